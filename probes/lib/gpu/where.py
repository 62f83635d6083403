"""Where the programs are that know about GPUs: one rule for probes, for the guard of active probes, and for launches."""

from __future__ import annotations

import os

_MORE_PATH = ("/usr/bin", "/usr/local/bin", "/usr/sbin", "/sbin", "/bin", "/usr/lib/wsl/lib", "/opt/bin")
"""Looked at after the PATH: lspci is in /usr/sbin, which is not on everybody's PATH; WSL keeps nvidia-smi apart."""


def find(program: str, path: str | None = None) -> str | None:
    """Return the first executable ``program`` on ``path`` (the PATH), then in the usual folders."""
    folders = (os.environ.get("PATH", os.defpath) if path is None else path).split(os.pathsep)
    for folder in (*folders, *_MORE_PATH):
        candidate = os.path.join(folder, program)
        if folder and os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return candidate
    return None
