"""Hosts of every kind the contract names: the local one, and a real sshd behind each login shell and each obstacle."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from remote_diag.host import Host

from . import sshd

SHELL_PLACES = ("local", *sshd.SHELLS)
OBSTACLES = ("noisy", "no-sftp", "noisy-sftp", "one-session", "noexec", "read-only-home")


@dataclass(frozen=True)
class Place:
    """A host to run things on, and its home directory as the tests see it."""

    name: str
    host: Host
    home: Path
    server: sshd.TestSshd | None = None

    def commands(self) -> list[str]:
        """Return what the login shell was asked to run; empty for the local host."""
        return self.server.commands() if self.server else []


@contextmanager
def open_place(name: str, start_sshd: Callable[..., sshd.TestSshd], base: Path, **host: object) -> Iterator[Place]:
    """Yield the place called ``name``; keyword arguments replace fields of its Host."""
    if name == "local":
        before = os.environ.get("HOME")
        os.environ["HOME"] = str(base)
        try:
            yield Place(name, Host(name="here", transport="local", **host), base)  # type: ignore[arg-type]
        finally:
            if before is None:
                del os.environ["HOME"]
            else:
                os.environ["HOME"] = before
        return
    with (
        _home(name, base) as home,
        start_sshd(
            shell=name if name in sshd.SHELLS else "zsh",
            noise=sshd.NOISE if name.startswith("noisy") else b"",
            sftp={"no-sftp": False, "noisy-sftp": "noisy"}.get(name, True),
            max_sessions=1 if name == "one-session" else None,
            home=home,
        ) as server,
    ):
        yield Place(name, server.host(**host), server.home, server)


@contextmanager
def _home(name: str, base: Path) -> Iterator[Path | None]:
    options = {"noexec": "size=8m,mode=700,noexec", "read-only-home": "size=1m,mode=700,ro"}.get(name)
    if options is None:
        yield None
        return
    with mounted(base / "home", options) as home:
        yield home


@contextmanager
def mounted(path: Path, options: str) -> Iterator[Path]:
    """Yield ``path`` as a tmpfs mounted with ``options``; skip where mounting is not allowed."""
    path.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=False)
