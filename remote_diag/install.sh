# Unpacks one bundle of rdiag into a cache directory: sh <this file> CACHE NONCE keep|replace [THIS-FILE]
# (keep: what is there stays unless it is damaged, which may have kept the agent from saying so itself;
# replace: what is there is damaged; THIS-FILE: remove the file that this text was read from.)
# A bundle is unpacked under a temporary name and renamed, so it is there as a whole or not at all. One that is damaged
# is mended file by file, since agents of other clients may be running from it. The caller appends the bundle's hash,
# two functions (make_folders PLACE; each_file COMMAND PLACE, which calls COMMAND for every file, its path as the
# argument and its contents as stdin, until one fails) and the call of install: a text that arrives cut short defines
# something or nothing, and does nothing.
say() {
    printf '\nRDIAG1 %s 0 %s 0 00000000\n\n' "$nonce" "$1"
    exit "$2"
}

put() {
    cat >"$1"
}

# After a loss of power a file may have its size and none of its contents. Where there is no cmp, the size must do.
is_same() {
    [ -f "$1" ] && [ ! -L "$1" ] || return 1
    if command -v cmp >/dev/null 2>&1; then
        cmp -s - "$1"
    else
        [ "$(wc -c)" -eq "$(wc -c <"$1")" ]
    fi
}

# Lets the new file take the place of one that is damaged, or may be.
mend_file() {
    command -v cmp >/dev/null 2>&1 && is_same "$1" && return 0
    [ ! -d "$1" ] || rm -rf "$1"
    mv -f "$new${1#"$place"}" "$1"
}

count_files() {
    find "$1" -type d -name __pycache__ -prune -o ! -type d -print | wc -l
}

# Makes what is there whole, with the new files; fails where something else is there, or in the way.
mend() {
    count=$(count_files "$new")
    make_folders "$place" && each_file mend_file "$place" && [ "$(count_files "$place")" -eq "$count" ]
}

# Whatever kept an agent from answering, it may be what Python made of these files.
forget_compiled() {
    find "$place" -type d -name __pycache__ -exec rm -rf {} + 2>/dev/null
}

# Gives a folder a name that must be free. Where mv has no -T it moves the folder into one that came meanwhile.
settle() {
    mv -T "$1" "$2" 2>/dev/null && return 0
    [ -d "$1" ] && [ ! -d "$2" ] && mv "$1" "$2" && [ ! -d "$2/${1##*/}" ]
}

fail_to_write() {
    rm -rf "$new"
    say cannot-write 1
}

install() {
    umask 077
    cache=$1
    nonce=$2
    case $nonce in
        '' | *[!0-9a-f]*) exit 65 ;;
    esac
    [ -z "$4" ] || rm -f "$4"
    mkdir -p "$cache" || say cannot-create 1
    if [ -L "$cache" ] || [ ! -O "$cache" ]; then
        echo "$cache is a link, or belongs to somebody else" >&2
        say cannot-create 1
    fi
    # What installations left that were cut short, a day ago or earlier: <hash>.<nonce>, and names made of that.
    some='????????????????'
    find "$cache" -maxdepth 1 -name "$some$some$some$some.$some$some*" ! -name '*[!0-9a-z.]*' -mtime +0 \
        -exec rm -rf {} + 2>/dev/null
    place=$cache/$hash
    new=$cache/$hash.$nonce
    damaged=
    if [ -d "$place" ]; then
        if [ "$3" != replace ] && each_file is_same "$place"; then
            forget_compiled
            say installed 0
        fi
        damaged=yes
    fi
    mkdir "$new" || say cannot-create 1
    make_folders "$new" && each_file put "$new" || fail_to_write
    # Who comes second leaves alone what the first one has installed meanwhile.
    if [ -n "$damaged" ] && [ -d "$place" ]; then
        if mend 2>/dev/null; then
            forget_compiled
            rm -rf "$new"
            say installed 0
        fi
        each_file put "$new" || fail_to_write
        mv "$place" "$new.old" 2>/dev/null && rm -rf "$new.old"
    fi
    if ! settle "$new" "$place"; then
        # Another client was faster, and its files are the same.
        rm -rf "$place/$hash.$nonce"
        [ -f "$place/enter" ] || fail_to_write
        rm -rf "$new"
    fi
    say installed 0
}
