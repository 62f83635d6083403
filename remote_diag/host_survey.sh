# Looks at a host with nothing but a POSIX shell: sh -s NONCE CACHE, with this text on stdin.
# Every line of the answer is `NONCE key=value`; whatever else arrives was printed by somebody else. Before each
# step that can hang (a dead network file system, a directory service) stands a `stage` line, so an answer that
# stops says where. Writes only one small directory below CACHE and one below the temporary directory, and removes
# both at once. All of it stands in functions that the last line calls: a text that arrives cut short does nothing.
newline='
'

say() {
    printf '%s %s=%s\n' "$nonce" "$1" "${2%%"$newline"*}"
}

# Sets $mount to the entry of /proc/mounts that holds the directory $1: the longest mount point in front of it, and
# of equally long ones the last, which covers the others. Blanks in mount points are written \040 there and stay so.
find_mount() {
    mount=
    longest=0
    while read -r device point type options rest; do
        # Not "${point%/}"/* as the pattern: bash 5.2 lets that match nothing.
        inside=${point%/}/
        case $1/ in
            "$inside"*)
                if [ "${#point}" -ge "$longest" ]; then
                    longest=${#point}
                    mount="$device $point $type $options"
                fi
                ;;
        esac
    done </proc/mounts
}

# A directory: what it is mounted from, its free space and inodes; whether files can be made and started in it.
look_at_place() {
    name=$1
    wanted=$2
    say stage "$wanted"
    say "$name.wanted" "$wanted"
    error=$(umask 077 && mkdir -p "$wanted" 2>&1) || say "$name.error" "${error:-mkdir failed}"
    real=$wanted
    while [ ! -d "$real" ]; do
        shorter=${real%/*}
        [ "$shorter" != "$real" ] || break
        real=$shorter
    done
    real=$(CDPATH='' cd -P "${real:-/}" && pwd -P) || return
    say "$name.path" "$real"
    if [ -r /proc/mounts ]; then
        find_mount "$real"
        say "$name.mount" "$mount"
    fi
    say "$name.space" "$(df -Pk "$real" | tail -n 1)"
    say "$name.inodes" "$(df -Pi "$real" | tail -n 1)"
    [ -d "$wanted" ] || return
    # mkdir fails on whatever is there already, a link included: nobody can put anything in our way.
    new=$wanted/rdiag-check.$nonce
    if error=$(mkdir -m 700 "$new" 2>&1) && error=$(write_program "$new/program" 2>&1); then
        say "$name.writable" yes
        error=$("$new/program" 2>&1)
        say "$name.program" "$? $error"
    else
        say "$name.writable" no
        say "$name.error" "${error:-cannot write}"
    fi
    rm -rf "$new"
}

write_program() {
    printf '#!/bin/sh\nexit 0\n' >"$1" && chmod 700 "$1"
}

look_at_limits() {
    if [ -r /proc/self/limits ]; then
        while read -r line; do
            say limit "$line"
        done </proc/self/limits
    else
        say nofile "$(ulimit -n)"
    fi
}

look_at_gpus() {
    [ -d /proc ] || return
    count=0
    for entry in /proc/driver/nvidia/gpus/*; do
        [ -e "$entry" ] && count=$((count + 1))
    done
    [ -d /proc/driver/nvidia ] && say gpus.driver "$count"
    count=0
    for entry in /dev/nvidia[0-9]*; do
        [ -e "$entry" ] && count=$((count + 1))
    done
    say gpus.devices "$count"
}

look_at_programs() {
    for name in python3 python conda docker nvidia-smi srun tar rsync; do
        found=$(command -v "$name") && say "program.$name" "$found"
    done
    for found in /usr/bin/python3.[0-9]* /usr/local/bin/python3.[0-9]* /opt/conda/bin/python "$HOME"/*conda3/bin/python \
        "$HOME"/miniforge3/bin/python "$HOME"/.pyenv/versions/*/bin/python "$HOME"/*env*/bin/python; do
        case ${found##*/} in
            *[!a-z0-9.]*) continue ;;
        esac
        [ -x "$found" ] && say python "$found"
    done
}

# Whether a job of this user outlives the login: answered by the session manager, which may hang.
look_at_logind() {
    command -v loginctl >/dev/null || return
    say stage loginctl
    say linger "$(loginctl show-user "$user" --property=Linger --value)"
    say killed "$(loginctl show-user --property=KillUserProcesses --value)"
}

survey() {
    # The last word of the last line: without it the text was cut short.
    [ "$3" = go ] || return
    nonce=$1
    printf '\n%s begin\n' "$nonce"
    say now "$(date +%s.%N)"
    say umask "$(umask)"
    LC_ALL=C
    export LC_ALL
    say system "$(uname -srm)"
    say hostname "$(uname -n)"
    user=$(id -un)
    say user "$user"
    say uid "$(id -u)"
    say shell "$SHELL"
    parent=
    [ -r "/proc/$PPID/comm" ] && read -r parent <"/proc/$PPID/comm"
    say parent "${parent:-$(ps -o comm= -p "$PPID")}"
    say directory "$PWD"
    say home "$HOME"
    [ -d "$HOME" ] && say home.exists yes
    say path "$PATH"
    look_at_limits
    look_at_gpus
    look_at_programs
    case $2 in
        /*) look_at_place cache "$2" ;;
        *) look_at_place cache "$PWD/$2" ;;
    esac
    look_at_place tmp "${TMPDIR:-/tmp}"
    say stage getent
    account=$(getent passwd "$(id -u)") && say account "$account"
    look_at_logind
    printf '%s end\n' "$nonce"
} </dev/null 2>/dev/null

survey "$1" "$2" go
