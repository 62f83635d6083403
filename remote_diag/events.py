"""What a session tells while it works; the CLI turns these into progress bars and lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .messages import Progress, Started


@dataclass(frozen=True)
class Note:
    """Something a person should know now: what is being uploaded, what was skipped."""

    text: str
    urgent: bool = False
    """Whether it is shown where nobody watches as well, in the log of a scheduled job."""


@dataclass(frozen=True)
class Log:
    """Bytes that the probe wrote, as they came (untrusted)."""

    stream: Literal["stdout", "stderr"]
    data: bytes


Event = Note | Started | Progress | Log

__all__ = ["Event", "Log", "Note", "Progress", "Started"]
