"""An empty home for one test: no hosts.yaml, no cache, no variables of the person who runs the tests."""

from __future__ import annotations

from pathlib import Path

import pytest


def make_private_home(monkeypatch: pytest.MonkeyPatch, base: Path) -> Path:
    """Point HOME, the XDG folders and the working directory below ``base``; return the working directory."""
    for variable in ("RDIAG_HOSTS", "RDIAG_HOST"):
        monkeypatch.delenv(variable, raising=False)
    for variable, name in (
        ("HOME", "home"),
        ("XDG_CONFIG_HOME", "home/config"),
        ("XDG_CACHE_HOME", "home/cache"),
        ("XDG_STATE_HOME", "home/state"),
    ):
        (base / name).mkdir(mode=0o700, exist_ok=True)
        monkeypatch.setenv(variable, str(base / name))
    work = base / "work"
    work.mkdir(mode=0o700)
    monkeypatch.chdir(work)
    return work
