# What demo, test and bench share: finding a Python and keeping .venv up to date. Sourced, not run; plain sh.
# shellcheck shell=sh
# Expects $root, the checkout. Sets nothing else that a caller should use but $venv.

# shellcheck disable=SC2154
venv=$root/.venv

say() {
    printf '==> %s\n' "$*"
}

die() {
    printf 'error: %s\n' "$1" >&2
    shift
    for line in "$@"; do
        printf '       %s\n' "$line" >&2
    done
    exit 1
}

# Prints the first interpreter that is new enough and can make a virtual environment.
find_python() {
    old='' bare=''
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
        version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
        if ! "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            old="$old $candidate ($version)"
        elif ! "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            bare=${bare:-$version}
        else
            command -v "$candidate"
            return
        fi
    done
    if [ -n "$bare" ]; then
        die "Python $bare is here, but it cannot make a virtual environment (no venv or no ensurepip)" \
            "on Debian or Ubuntu: apt-get install python$bare-venv"
    fi
    die "Python 3.10 or newer is needed${old:+; found only:$old}" \
        "install one, or name it: PYTHON=/path/to/python3.12 $0"
}

# ensure_venv EXTRA: makes .venv with rdiag (editable) and its extra in it, unless that is done already.
ensure_venv() {
    # What the installation depends on: when any of it changes, it is done again.
    wanted=$(printf '%s\n' "$root" && cat "$root/pyproject.toml")
    if [ -x "$venv/bin/python" ] && ! "$venv/bin/python" -c pass 2>/dev/null; then
        say "the Python of .venv is gone; making it anew"
        rm -rf "$venv"
    fi
    stamp=$venv/.rdiag-$1
    if [ -x "$venv/bin/rdiag" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    if [ ! -x "$venv/bin/pip" ]; then
        python=$(find_python) || exit 1
        say "making .venv with $python"
        rm -rf "$venv"
        "$python" -m venv "$venv"
    fi
    say "installing rdiag[$1] into .venv (only the first time; about a minute)"
    rm -f "$venv"/.rdiag-*
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --editable "${root}[$1]" ||
        die "pip could not install rdiag (see above)" "a package index must be reachable, or pip told of another one"
    printf '%s\n' "$wanted" >"$stamp"
    # What tests need includes what the demo needs.
    if [ "$1" = dev ]; then
        cp "$stamp" "$venv/.rdiag-probes"
    fi
}
