"""Where a launch comes from: who, which machine, which commit, and how the folder differs from it."""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from . import __version__

MAX_DIFF = 1024 * 1024
"""Bytes of a diff that are kept."""
_MAX_UNTRACKED = 200
_PATIENCE = 10.0
# A repository is data from elsewhere: nothing that its configuration names is run.
_GIT = (
    "git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "core.pager=cat",
    "-c", "core.quotePath=false",
)  # fmt: skip


def launched_from(folder: Path) -> dict[str, Any]:
    """Return who launches, from where and with which rdiag; with ``git`` when ``folder`` is in a repository."""
    found: dict[str, Any] = {
        "by": _user(),
        "from_host": socket.gethostname(),
        "from_folder": str(folder.absolute()),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "client_version": __version__,
        "git": None,
    }
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return found
    status = _git(folder, "status", "--porcelain=v1", "--untracked-files=normal", "--ignore-submodules=all") or b""
    lines = status.decode("utf-8", "backslashreplace").splitlines()
    untracked = [line[3:] for line in lines if line.startswith("?? ")]
    git: dict[str, Any] = {
        "commit": commit.decode("ascii", "replace").strip(),
        "branch": (_git(folder, "symbolic-ref", "--short", "-q", "HEAD") or b"").decode("utf-8", "replace").strip() or None,
        "dirty": bool(lines),
        "untracked": untracked[:_MAX_UNTRACKED],
        "diff_sha256": None,
        "diff_truncated": False,
    }
    if len(lines) > len(untracked):
        diff = _git(folder, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=all", "HEAD")
        if diff:
            git["diff_sha256"] = hashlib.sha256(diff).hexdigest()
            git["diff_truncated"] = len(diff) > MAX_DIFF
            found["dirty_diff"] = diff[:MAX_DIFF].decode("utf-8", "surrogateescape")
    found["git"] = git
    return found


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Return what git prints; None when it is not there, fails or takes too long."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [*_GIT, *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE,
            check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
        )
        if done.returncode == 0:
            return done.stdout
    return None
