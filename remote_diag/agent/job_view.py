"""One job as a reader of its logs sees it: where its files are, and whether it has ended. Cheap to ask again."""

from __future__ import annotations

import os

from .jobs import record
from .jobs.tree import identity_alive

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ENDED = (*record.FINAL, record.LOST, record.UNKNOWN)
"""States after which nothing more is expected in a log."""
_JUDGE_EVERY = 1.0
_SEARCH_EVERY = 5.0


class JobView:
    """Looks at one job, again and again.

    Args:
        job: the job.
    """

    def __init__(self, job: record.Job) -> None:
        self._job = job
        self.job = job.id
        self.paths = job.paths
        self._seen: tuple[int, int, int] | None = None
        self._due = 0.0
        self._state: dict[str, Any] = {}

    def state(self, now: float) -> dict[str, Any]:
        """Return ``state``, ``exit_code`` and ``signal``: anew when the record has changed, and every second.

        Args:
            now: monotonic time.
        """
        try:
            status = os.lstat(self.paths.state)
            seen: tuple[int, int, int] | None = (status.st_ino, status.st_mtime_ns, status.st_size)
        except OSError:
            seen = None
        if not self._state or seen != self._seen or now >= self._due:
            self._seen = seen
            judged = self._job.judge()
            # Without its supervisor a job is known by its processes only, and finding these takes longer.
            self._due = now + (_SEARCH_EVERY if judged["message"] else _JUDGE_EVERY)
            self._state = {name: judged[name] for name in ("state", "exit_code", "signal")}
        return self._state

    def held(self, stream: str) -> str | None:
        """Return where the file is open that the job was given as ``stdout`` or ``stderr``; None when nobody tells.

        It is that file under any name, and without one: its supervisor holds it for as long as the job runs.
        """
        descriptors = self._job.state.get("log_descriptors")
        number = descriptors.get(stream) if isinstance(descriptors, dict) else None
        supervisor = self._job.identity("supervisor")
        if type(number) is not int or supervisor is None or not self._job.is_here() or not identity_alive(supervisor):
            return None
        return "/proc/%d/fd/%d" % (supervisor[0], number)


def find_job(cache: str, name: str) -> JobView:
    """Return the job called ``name`` (``finetune.v2``), or its latest attempt (``finetune``); raise LookupError."""
    job = record.find(cache, name)
    if job is None:
        raise LookupError("there is no job called %s on this host" % ascii(name)[:100])
    return JobView(job)
