# The entry script of rdiag: the only thing that a login shell is asked to run, as `sh <this file>`, or, where that has
# just failed, as `sh <this file> anew`: the copy in a container may be damaged.
# It finds the Python of the configured environment and hands stdin and stdout to the agent. Nothing that a user
# wrote is part of this text: names and paths are read, as data, from the files beside it.
umask 077
dir=${0%/*}
hash=${dir##*/}
inside=
anew=
[ "$1" != anew ] || anew=yes
if [ "$1" = inside ]; then
    inside=yes
    nonce=$2
else
    IFS= read -r nonce || exit 65
fi
case $nonce in
    '' | *[!0-9a-f]*) exit 65 ;;
esac
case $hash in
    '' | *[!0-9a-f]*) exit 65 ;;
esac

# One frame without payload, as remote_diag/agent/frames.py describes it.
fail() {
    printf '\nRDIAG1 %s 0 %s 0 00000000\n\n' "$nonce" "$1"
    exit 0
}

# -E -s -S and not -I, which Python 2.7 lacks: it would fail before it could say how old it is. The file and not its
# folder: that would load runpy, 4 ms of every run.
start() {
    exec "$1" -E -s -S "$dir/agent/__main__.py" "$nonce" 3<&-
}

find_conda() {
    case $1 in
        /*) prefix=$1; return ;;
    esac
    prefix=
    # conda itself keeps the list of all environments of this user.
    if [ -r "$HOME/.conda/environments.txt" ]; then
        while IFS= read -r line <&4; do
            if [ "${line##*/}" = "$1" ] && [ -x "$line/bin/python" ]; then
                prefix=$line
                return
            fi
        done 4<"$HOME/.conda/environments.txt"
    fi
    for root in "${CONDA_EXE%/bin/conda}" "$HOME/miniconda3" "$HOME/anaconda3" "$HOME/miniforge3" \
        "$HOME/mambaforge" "$HOME/.conda" "$HOME/micromamba" /opt/conda /opt/miniconda3 /opt/miniforge3; do
        [ -n "$root" ] || continue
        if [ "$1" = base ] && [ -x "$root/bin/python" ] && [ -d "$root/conda-meta" ]; then
            prefix=$root
            return
        fi
        if [ -x "$root/envs/$1/bin/python" ]; then
            prefix=$root/envs/$1
            return
        fi
    done
}

# docker's client would swallow our stdin in every command that does not need it, hence </dev/null.
enter_container() {
    command -v docker >/dev/null 2>&1 || fail no-docker
    docker version </dev/null >/dev/null 2>&1 || fail no-docker
    running=$(docker inspect --format '{{.State.Running}}' "$1" </dev/null 2>/dev/null)
    [ "$running" = true ] || fail no-container
    place=.cache/rdiag/$hash
    if [ -n "$anew" ] || ! docker exec "$1" sh -c "cd && test -f $place/enter" </dev/null >/dev/null 2>&1; then
        # Where mv has no -T it moves the folder into that of a client that was faster, where nothing else may be.
        tar -cf - -C "$dir" . 2>/dev/null | docker exec -i "$1" sh -c "cd && umask 077 && mkdir -p $place.$nonce &&
            tar -xf - -C $place.$nonce && {
                [ -z '$anew' ] && [ -f $place/enter ] || mv $place $place.$nonce.old
                mv -T $place.$nonce $place || test -d $place || mv $place.$nonce $place
                rm -rf $place.$nonce.old $place.$nonce $place/$hash.$nonce
                test -f $place/enter
            }" \
            >/dev/null 2>&1 || fail no-container-copy
    fi
    exec docker exec -i "$1" sh -c "cd && exec sh $place/enter inside $nonce"
}

# Reads a file of one line. Every bundle has such files: one that has lost them, or their contents, ends with 66, and
# the client looks for what it lacks.
read_value() {
    IFS= read -r value <"$dir/$1" && [ -n "$value" ] || exit 66
}

if [ -z "$inside" ] && [ -f "$dir/container" ]; then
    read_value container
    enter_container "$value"
fi
if [ -f "$dir/conda" ]; then
    read_value conda
    find_conda "$value"
    [ -n "$prefix" ] && [ -x "$prefix/bin/python" ] || fail no-conda
    start "$prefix/bin/python"
fi
if [ -f "$dir/venv" ]; then
    read_value venv
    [ -x "$value/bin/python" ] || fail no-venv
    start "$value/bin/python"
fi
[ -f "$dir/python" ] && read_value python || exit 66
while IFS= read -r candidate <&3; do
    case $candidate in
        /*) [ -x "$candidate" ] || continue ;;
        *) command -v "$candidate" >/dev/null 2>&1 || continue ;;
    esac
    start "$candidate"
done 3<"$dir/python"
fail no-python
