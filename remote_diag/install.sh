# Unpacks one bundle of rdiag into a cache directory: sh <this file> CACHE NONCE keep|replace [THIS-FILE]
# (replace: what is there is damaged; THIS-FILE: remove the file that this text was read from.)
# A bundle is unpacked under a temporary name and renamed, so it is there as a whole or not at all. The caller
# appends one function that writes the files (write_files), the bundle's hash, and the call of install: a text that
# arrives cut short defines something or nothing, and does nothing.
say() {
    printf '\nRDIAG1 %s 0 %s 0 00000000\n\n' "$nonce" "$1"
    exit "$2"
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
    place=$cache/$hash
    if [ -d "$place" ] && [ "$3" != replace ]; then
        say installed 0
    fi
    new=$cache/$hash.$nonce
    mkdir "$new" || say cannot-create 1
    write_files "$new" || {
        rm -rf "$new"
        say cannot-write 1
    }
    if [ -d "$place" ]; then
        mv "$place" "$new.old" 2>/dev/null && rm -rf "$new.old"
    fi
    # Another client may have been faster; then mv would move ours into its folder.
    if [ -d "$place" ] || ! mv "$new" "$place"; then
        rm -rf "$new" "$place/$hash.$nonce"
        [ -f "$place/enter" ] || say cannot-write 1
    fi
    say installed 0
}
