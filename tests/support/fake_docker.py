"""A stand-in for docker whose one container ``box`` is a folder."""

from __future__ import annotations

from pathlib import Path

_PROGRAM = """#!/bin/sh
printf '%s\\n' "$*" >>"$HOME/docker.log"
case $1 in
version) exit 0 ;;
inspect)
    case "$4" in
    box) echo true ;;
    stopped) echo false ;;
    *) exit 1 ;;
    esac ;;
exec)
    shift
    if [ "$1" = -i ]; then shift; else exec </dev/null; fi
    [ "$1" = box ] || exit 1
    shift
    HOME="$HOME/inside the box"
    export HOME
    case "$*" in *"tar -xf"*) [ ! -d "$HOME/faster" ] || mv "$HOME/faster" "$HOME/.cache" ;; esac
    exec "$@" ;;
esac
"""


def make_docker(home: Path) -> None:
    """Put it in ``bin`` below the home folder, and the home folder of the container in ``inside the box``.

    What it was asked is in ``docker.log``; a folder ``faster`` in the container appears as its cache when a bundle arrives.
    """
    (home / "bin").mkdir()
    (home / "bin/docker").write_text(_PROGRAM)
    (home / "bin/docker").chmod(0o755)
    (home / "inside the box").mkdir()
