"""One job as a reader of its logs sees it: where its files are, and whether it has ended."""

from __future__ import annotations

import os

from . import wirejson

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ENDED = ("exited", "failed", "stopped", "lost", "unknown")
"""States after which nothing more is expected in a log."""
_LIVENESS_EVERY = 1.0
_MAX_RECORD = 1 << 20


class JobView:
    """Looks at the record of one job, again and again, and cheaply.

    Args:
        directory: the job's folder.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.job = os.path.basename(directory)
        self._seen: tuple[int, int, int] | None = None
        self._record: dict[str, Any] = {}
        self._checked = -_LIVENESS_EVERY
        self._state: dict[str, Any] = {}

    def path(self, name: str) -> str:
        """Return the absolute path of one of the job's files."""
        return os.path.join(self.directory, name)

    def state(self, now: float = 0.0) -> dict[str, Any]:
        """Return ``state``, ``exit_code``, ``signal``, ``message``: the record, checked against what is alive."""
        changed = self._read()
        if changed or now >= self._checked + _LIVENESS_EVERY:
            self._checked = now
            self._state = self._judged()
        return self._state

    def _read(self) -> bool:
        try:
            status = os.stat(self.path("state.json"))
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
            if seen == self._seen:
                return False
            with open(self.path("state.json"), "rb", 0) as stream:
                record = wirejson.decode(stream.read(_MAX_RECORD))
            if isinstance(record, dict):
                self._record = record
            self._seen = seen
            return True
        except (OSError, ValueError):
            return False

    def _judged(self) -> dict[str, Any]:
        record = self._record
        state = record.get("state")
        if not isinstance(state, str):
            state = "starting" if os.path.isdir(self.directory) else "unknown"
        answer: dict[str, Any] = {"state": state}
        for name in ("exit_code", "signal"):
            value = record.get(name)
            answer[name] = value if isinstance(value, int) else None
        return answer


def find_job(cache: str, name: str) -> JobView:
    """Return the job called ``name`` (``finetune.v2``), or its latest attempt (``finetune``); raise LookupError."""
    folder = os.path.join(cache, "jobs")
    try:
        names = os.listdir(folder)
    except OSError:
        names = []
    if name in names and _attempt(name) is not None:
        return JobView(os.path.join(folder, name))
    attempts = [(number, one) for one in names for number in [_attempt(one, name)] if number is not None]
    if not attempts:
        raise LookupError("there is no job called %s on this host" % ascii(name)[:100])
    return JobView(os.path.join(folder, max(attempts)[1]))


def _attempt(job: str, name: str | None = None) -> int | None:
    """Return the attempt of a job id ``<name>.v<number>``; None when it is none, or of another name."""
    stem, _, number = job.rpartition(".v")
    if not stem or not number.isascii() or not number.isdigit() or len(number) > 9:
        return None
    return int(number) if name is None or stem == name else None
