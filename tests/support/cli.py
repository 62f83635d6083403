"""``rdiag`` as a process of its own, the way a person or a program starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ran:
    """What came of one call."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def environment(home: Path, **extra: str) -> dict[str, str]:
    """Return an environment in which nothing of the person who runs the tests is found."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "TMPDIR") if name in os.environ}
    for name in ("config", "cache", "state"):
        (home / name).mkdir(parents=True, exist_ok=True, mode=0o700)
    return {
        **kept,
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / "config"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_STATE_HOME": str(home / "state"),
        "PYTHONPATH": str(CHECKOUT),
        "COLUMNS": "100",
        **extra,
    }


def command(*arguments: str) -> list[str]:
    """Return the argument vector of ``rdiag ARGUMENTS``."""
    return [sys.executable, "-m", "remote_diag.cli.entry", *arguments]


def rdiag(*arguments: str, home: Path, cwd: Path | None = None, timeout: float = 60, **extra: str) -> Ran:
    """Run ``rdiag`` to its end; without a terminal, and with nothing on stdin."""
    done = subprocess.run(
        command(*arguments),
        cwd=cwd or home,
        env=environment(home, **extra),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout,
    )
    return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())
