"""Operation ``stop``: end every process of a job, and say truly whether that worked.

First the wish is written down, so that whoever looks later knows why the job ended. Then SIGTERM goes to each of its
processes, after the grace SIGKILL. Only what provably belongs to the job is signalled, and never its supervisor,
which has to live to write how it ended. The client may go away meanwhile: this goes on to its end.
"""

from __future__ import annotations

from time import monotonic, time

from .. import wirejson
from ..operations import NO_JOB, Failure, Gone
from ..processes import Ending
from ..protocol import ENVIRONMENT
from ..storage import create
from . import names, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..operations import Peer
    from ..processes import Process
    from .record import Job
    from .tree import JobTree

KILLING = 5.0
"""Seconds of killing after which what is left counts as a survivor."""
_SUPERVISOR_WITHIN = 10.0
_MAX_GRACE = 86400.0
_TELL_EVERY = 1.0


def stop(fields: dict[str, Any], peer: Peer, cache: str) -> dict[str, Any]:
    """Stop the job that ``fields`` name; return what became of it.

    Args:
        fields: ``job`` (an id, or a name for its latest attempt that runs), ``grace_s``, ``by``.
        peer: the client; gets ``progress``.
        cache: the cache folder.
    """
    wanted, grace = fields.get("job"), fields.get("grace_s")
    if not isinstance(wanted, str) or not (names.is_name(wanted) or names.split(wanted)):
        raise Failure(ENVIRONMENT, "the request's 'job' is no name of a job")
    if not isinstance(grace, (int, float)) or isinstance(grace, bool) or not 0 <= grace <= _MAX_GRACE:
        raise Failure(ENVIRONMENT, "the request's 'grace_s' must be a number of seconds")
    job = _find(cache, wanted)
    if job is None:
        raise Failure(NO_JOB, "there is no job called %s on this host" % wanted, "rdiag jobs shows those that are there")
    return _Stopping(job, float(grace), peer, str(fields.get("by") or "")[:200]).run()


def _find(cache: str, wanted: str) -> Job | None:
    """Return the job; of several attempts of a name the latest one that is not over, else the latest."""
    if names.split(wanted) is not None:
        return record.find(cache, wanted)
    attempts = [job for job in record.all_jobs(cache) if job.happened and (names.split(job.id) or ("",))[0] == wanted]
    active = [job for job in attempts if not job.is_final and job.judge()["state"] in (record.STARTING, record.RUNNING)]
    return (active or attempts or [None])[-1]  # type: ignore[list-item]


class _Stopping:
    def __init__(self, job: Job, grace: float, peer: Peer, by: str) -> None:
        self._job = job
        self._grace = grace
        self._peer: Peer | None = peer
        self._by = by
        self._told = 0.0

    def run(self) -> dict[str, Any]:
        before = self._job.judge()
        if before["state"] not in (record.STARTING, record.RUNNING):
            return {"job": self._job.id, **before, "stopped": False, "signalled": 0, "survivors": [], "was": before["state"]}
        self._write_wish()
        ending, supervised = self._end_all()
        after = self._job.judge()
        return {
            "job": self._job.id,
            **after,
            "stopped": not ending.survivors and not supervised,
            "signalled": len(ending.ended),
            "survivors": [_describe(process) for process in ending.survivors],
            "was": before["state"],
        }

    def _write_wish(self) -> None:
        wish = {"schema_version": record.SCHEMA_VERSION, "by": self._by, "at": time(), "grace_s": self._grace}
        try:
            create(self._job.paths.stop, wirejson.encode(wish))
        except FileExistsError:
            return
        except OSError as error:
            raise Failure(ENVIRONMENT, "cannot write to %s: %s" % (self._job.paths.directory, error.strerror)) from None

    def _end_all(self) -> tuple[Ending, bool]:
        """Signal until nothing is left; return that, and whether the supervisor is still there."""
        began = monotonic()
        tree: JobTree | None = None
        ending: Ending | None = None
        quiet_since: float | None = None
        while True:
            now = monotonic()
            self._job.look_again()
            supervised = self._job.supervised()
            # While it starts, the record does not say yet who belongs to it.
            if tree is None or (self._job.identity("leader") is None and supervised):
                tree = self._job.tree()
                ending = Ending(tree, began, self._grace, KILLING)  # type: ignore[arg-type]
            assert ending is not None  # noqa: S101 - made with the tree
            over = ending.step(now)
            if over and (ending.survivors or not supervised):
                return ending, supervised and bool(ending.survivors)
            if not over:
                quiet_since = None
            elif quiet_since is None:
                quiet_since = now
            elif now > quiet_since + _SUPERVISOR_WITHIN:
                return ending, True
            self._tell(now - began)
            self._pause(max(0.01, min(0.2, 4 * (monotonic() - now))))

    def _tell(self, elapsed: float) -> None:
        if self._peer is not None and elapsed >= self._told + _TELL_EVERY:
            self._told = elapsed
            self._peer.put(
                "progress",
                {"done": min(elapsed, self._grace), "total": self._grace, "unit": "s", "label": "ending " + self._job.id},
            )

    def _pause(self, seconds: float) -> None:
        if self._peer is not None:
            try:
                self._peer.next(seconds)
                return
            except Gone:
                self._peer = None
        _sleep(seconds)


def _sleep(seconds: float) -> None:
    from time import sleep

    sleep(seconds)


def _describe(process: Process) -> dict[str, Any]:
    return {"pid": process.pid, "name": process.name, "state": process.state, "waits_in": _wchan(process.pid)}


def _wchan(pid: int) -> str | None:
    """Return the kernel function in which a process sleeps, where the kernel tells."""
    try:
        with open("/proc/%d/wchan" % pid) as stream:
            return stream.read(100).strip("\0\n 0") or None
    except OSError:
        return None


