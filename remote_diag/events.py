"""What a session tells while it works; the CLI turns these into progress bars and lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Note:
    """Something a person should know now: what is being uploaded, what was skipped."""

    text: str


@dataclass(frozen=True)
class Started:
    """The probe runs."""

    pid: int
    run_dir: str


@dataclass(frozen=True)
class Progress:
    """How far the probe says it is."""

    done: float
    total: float | None
    unit: str
    label: str


@dataclass(frozen=True)
class Log:
    """Bytes that the probe wrote, as they came (untrusted)."""

    stream: Literal["stdout", "stderr"]
    data: bytes


Event = Note | Started | Progress | Log
