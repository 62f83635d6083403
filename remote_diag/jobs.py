"""Jobs on a host, as the client sees them: what is asked of the agent, and every word of its answers checked.

The host is the source of truth. A launch carries an id chosen here, so that asking again after a lost connection
never starts anything twice (:func:`launch_surely`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import (
    AuthError,
    ConnectionLost,
    StateUnknown,
    UnreachableError,
)
from .events import Note
from .host import Host
from .job_files import JobFile
from .job_records import JOB_ID
from .messages import Survivor
from .operation import Operation, Tell
from .text import safe

if TYPE_CHECKING:
    from .session import Session

STATES = ("starting", "running", "exited", "failed", "stopped", "lost", "unknown")
ACTIVE = ("starting", "running")
SCHEMA_VERSION = 1
_MAX_TEXT = 64 * 1024
_RETRIES = (0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class JobSpec:
    """What to launch."""

    name: str
    """``[a-z0-9][a-z0-9._-]{0,62}``, without ``.v<number>`` at its end."""
    argv: tuple[str, ...]
    """The command, word by word; no shell reads it. ``{files}``, ``{logs}``, ``{job}``, ``{attempt}`` and ``{gpus}``
    are filled in on the host."""
    files: tuple[JobFile, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    """Absolute path on the host; None for the folder of the job's files, and where it has none, the host's."""
    gpus: int | tuple[int, ...] | None = None
    """How many GPUs, or which; None to leave them alone."""
    disk_bytes: int | None = None
    """Needed disk space, bytes; None for 1 GiB."""
    shm_bytes: int | None = None
    """Needed space in /dev/shm, bytes; None for 1 GiB when there are GPUs."""
    launched: Mapping[str, Any] = field(default_factory=dict)
    """Who launches it and from what; see :mod:`provenance`."""

    def request(self, host: Host, *, launch_id: str, force: bool) -> dict[str, Any]:
        """Return what the agent is asked, as ``--dry-run`` shows it."""
        return {
            "launch_id": launch_id,
            "name": self.name,
            "argv": list(self.argv),
            "env": {**dict(host.env), **self.env},
            "workdir": self.workdir or (None if self.files else host.workdir),
            "gpus": list(self.gpus) if isinstance(self.gpus, tuple) else self.gpus,
            "files": [file.as_dict() for file in self.files],
            "force": force,
            "needs": {"disk_bytes": self.disk_bytes, "shm_bytes": self.shm_bytes},
            "environment": {"kind": host.environment.kind, "value": host.environment.value},
            "launched": dict(self.launched),
        }


@dataclass(frozen=True)
class JobRecord:
    """One attempt of a job, as its host describes it. Texts come from the host and are untrusted."""

    host: str
    job: str
    """Its id, ``finetune.v2``."""
    state: str
    """One of :data:`STATES`."""
    message: str = ""
    """Why it is in this state, where there is something to say."""
    exit_code: int | None = None
    signal: int | None = None
    """Number of the signal that ended it."""
    oom_killed: bool = False
    """Whether the kernel counted a kill for lack of memory."""
    started_at: float | None = None
    """Seconds since 1970, on the host's clock."""
    ended_at: float | None = None
    gpus: tuple[int, ...] | None = None
    """Indexes as nvidia-smi counts; None when it did not ask for any."""
    argv: tuple[str, ...] = ()
    pid: int | None = None
    log: str | None = None
    """Absolute path of its standard output on the host."""
    log_bytes: int | None = None
    last_line: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last value of each metric that the end of its log tells, by canonical name."""
    launch_id: str | None = None
    workdir: str | None = None
    directory: str | None = None
    by: str | None = None
    """Who launched it."""
    git_commit: str | None = None
    forced: tuple[str, ...] = ()
    """What --force overrode."""
    warning: str | None = None

    @property
    def active(self) -> bool:
        """Whether it has not ended."""
        return self.state in ACTIVE

    def as_dict(self) -> dict[str, Any]:
        """Return it as ``--json`` prints it; times as ISO 8601 in UTC."""
        return {
            "job": self.job,
            "host": self.host,
            "state": self.state,
            "message": self.message,
            "exit_code": self.exit_code,
            "signal": self.signal,
            "oom_killed": self.oom_killed,
            "started_at": iso(self.started_at),
            "ended_at": iso(self.ended_at),
            "gpus": None if self.gpus is None else list(self.gpus),
            "argv": list(self.argv),
            "pid": self.pid,
            "log": self.log,
            "log_bytes": self.log_bytes,
            "last_line": self.last_line,
            "metrics": dict(self.metrics),
            "launch_id": self.launch_id,
            "workdir": self.workdir,
            "directory": self.directory,
            "launched_by": self.by,
            "git_commit": self.git_commit,
            "forced": list(self.forced),
        }


@dataclass(frozen=True)
class Stopped:
    """What became of a job that was to be stopped."""

    record: JobRecord
    stopped: bool
    """Whether nothing of it is left."""
    was: str
    """Its state before."""
    signalled: int
    """How many processes were signalled."""
    survivors: tuple[Survivor, ...]
    """Processes that cannot be ended; state D means that the kernel does not let go of them."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as ``--json`` prints it."""
        return {
            "job": self.record.job,
            "host": self.record.host,
            "stopped": self.stopped,
            "was": self.was,
            "state": self.record.state,
            "exit_code": self.record.exit_code,
            "signal": self.record.signal,
            "message": self.record.message,
            "signalled": self.signalled,
            "survivors": [{"pid": one.pid, "name": one.name, "state": one.state} for one in self.survivors],
        }


@dataclass(frozen=True)
class Cleaned:
    """What was removed from a host, or would be."""

    host: str
    removed: tuple[tuple[str, str], ...]
    """(kind, name) each."""
    kept: tuple[tuple[str, str], ...]
    """(job, why it stays) each."""
    bytes: int
    problems: tuple[str, ...]
    dry_run: bool

    def as_dict(self) -> dict[str, Any]:
        """Return it as ``--json`` prints it."""
        return {
            "host": self.host,
            "dry_run": self.dry_run,
            "bytes": self.bytes,
            "removed": [{"what": what, "name": name} for what, name in self.removed],
            "kept": [{"job": job, "why": why} for job, why in self.kept],
            "problems": list(self.problems),
        }


def iso(seconds: float | None) -> str | None:
    """Return a time as ``2026-05-04T13:12:11Z``."""
    if seconds is None or not 0 <= seconds < 1e11:
        return None
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def new_launch_id() -> str:
    """Return a fresh id of a launch: 32 hex digits."""
    return os.urandom(16).hex()


def launch(session: Session, spec: JobSpec, *, launch_id: str, force: bool = False, tell: Tell) -> JobRecord:
    """Launch ``spec``; asked again with the same id, return the job that it became.

    Raises:
        Refused: a GPU is in use, or the name runs already.
        EnvironmentUnfit: it cannot be started there; then there is no job.
        ConnectionLost: whether it was launched is not known; ask again with the same id.
    """
    request = spec.request(session.host, launch_id=launch_id, force=force)
    result = Operation(session.agent(), session.host, tell).run("launch", request, spec.files)
    return parse_record(session.host.name, result)


def launch_surely(
    connect: Callable[[], Session], spec: JobSpec, *, force: bool = False, tell: Tell, launch_id: str | None = None
) -> JobRecord:
    """Launch ``spec`` and find out whether it happened, over several connections where need be.

    Args:
        connect: returns a new session each time.
        spec: what to launch.
        force: overrule what is checked before.
        tell: gets notes and progress.
        launch_id: the id of a launch that was tried before.

    Raises:
        StateUnknown: the connection was lost, and again; the job may run or not.
    """
    chosen = launch_id or new_launch_id()
    asked = launch_id is not None
    for wait in (*_RETRIES, None):
        try:
            with connect() as session:
                # Until an agent waits for the request, nothing can have been launched.
                session.hello()
                asked = True
                return launch(session, spec, launch_id=chosen, force=force, tell=tell)
        except (UnreachableError, AuthError) as error:
            if not asked:
                raise
            if wait is None:
                raise StateUnknown(
                    f"the connection was lost during the launch, again and again; whether the job runs is not known ({error})",
                    host=error.host,
                    hint=f"see: rdiag jobs --host {error.host or 'HOST'}\nthis launch has the id {chosen}",
                ) from error
            tell(Note(f"the connection was lost ({error}); asking again whether the job was launched"))
            time.sleep(wait)
    raise StateUnknown("the launch was not tried")


def jobs(session: Session, name: str | None = None, *, launch_id: str | None = None, tell: Tell) -> list[JobRecord]:
    """Return the jobs of a host; only those called ``name``, or of one launch, when given."""
    request = {"job": name, "launch_id": launch_id}
    result = Operation(session.agent(), session.host, tell).run("jobs", request)
    found = result.get("jobs")
    if not isinstance(found, list):
        raise ConnectionLost("the agent's answer holds no jobs", host=session.host.name)
    return [parse_record(session.host.name, one) for one in found]


def stop(session: Session, name: str, *, grace: float, by: str = "", tell: Tell) -> Stopped:
    """Stop a job; return what became of it.

    Args:
        session: its host.
        name: its id, or a name for the latest attempt that runs.
        grace: seconds between SIGTERM and SIGKILL.
        by: who wants it, for the record.
        tell: gets progress.

    Raises:
        StateUnknown: there is no such job.
    """
    result = Operation(session.agent(library=False), session.host, tell).run("stop", {"job": name, "grace_s": grace, "by": by})
    survivors = result.get("survivors")
    return Stopped(
        record=parse_record(session.host.name, result),
        stopped=result.get("stopped") is True,
        was=_text(result, "was") or "unknown",
        signalled=_integer(result, "signalled") or 0,
        survivors=tuple(
            Survivor(_integer(one, "pid") or 0, _text(one, "name") or "?", _text(one, "state") or "?")
            for one in (survivors if isinstance(survivors, list) else [])
            if isinstance(one, dict)
        ),
    )


def clean(session: Session, *, older_than_s: float, dry_run: bool, tell: Tell) -> Cleaned:
    """Remove old finished jobs and caches from a host; return what was, or would be, removed."""
    request = {"older_than_s": older_than_s, "dry_run": dry_run}
    result = Operation(session.agent(library=False), session.host, tell).run("clean", request)
    return Cleaned(
        host=session.host.name,
        removed=tuple((_text(one, "what") or "?", _text(one, "name") or "?") for one in _objects(result, "removed")),
        kept=tuple((_text(one, "name") or "?", _text(one, "why") or "?") for one in _objects(result, "kept")),
        bytes=_integer(result, "bytes") or 0,
        problems=_texts(result, "problems"),
        dry_run=dry_run,
    )


def parse_record(host: str, value: object) -> JobRecord:
    """Return a job as the agent describes it; what a newer release adds is passed over.

    Raises:
        ConnectionLost: that is no description of a job.
    """
    if not isinstance(value, dict):
        raise ConnectionLost("the agent describes a job by something that is no object", host=host)
    job, state = _text(value, "job"), _text(value, "state")
    if job is None or not JOB_ID.match(job):
        raise ConnectionLost(f"the agent names a job {safe(str(job), limit=60)!r}", host=host)
    launched = value.get("launched")
    launched = launched if isinstance(launched, dict) else {}
    git = launched.get("git")
    gpus = value.get("gpus")
    return JobRecord(
        host=host,
        job=job,
        state=state if state in STATES else "unknown",
        message=_text(value, "message") or "",
        exit_code=_integer(value, "exit_code"),
        signal=_integer(value, "signal"),
        oom_killed=value.get("oom_killed") is True,
        started_at=_number(value, "started_at"),
        ended_at=_number(value, "ended_at"),
        gpus=tuple(one for one in gpus if type(one) is int) if isinstance(gpus, list) else None,
        argv=_texts(value, "argv"),
        pid=_integer(value, "pid"),
        log=_text(value, "log"),
        log_bytes=_integer(value, "log_bytes"),
        last_line=_text(value, "last_line"),
        metrics=_numbers(value, "metrics"),
        launch_id=_text(value, "launch_id"),
        workdir=_text(value, "workdir"),
        directory=_text(value, "directory"),
        by=_text(launched, "by"),
        git_commit=_text(git, "commit") if isinstance(git, dict) else None,
        forced=_texts(value, "forced"),
        warning=_text(value, "warning"),
    )


def _text(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if not isinstance(value, str):
        return None
    # A lone surrogate stands for a byte that is no character; shown, it can be encoded.
    return value[:_MAX_TEXT].encode("utf-8", "backslashreplace").decode("utf-8")


def _integer(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    return value if type(value) is int and abs(value) < 1 << 63 else None


def _number(fields: Mapping[str, Any], name: str) -> float | None:
    value = fields.get(name)
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e12
    return float(value) if fits else None  # type: ignore[arg-type]


def _numbers(fields: Mapping[str, Any], name: str) -> dict[str, float]:
    value = fields.get(name)
    members = list(value.items())[:50] if isinstance(value, dict) else []
    return {str(key)[:100]: float(one) for key, one in members if type(one) in {int, float} and abs(one) < 1e300}


def _texts(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = fields.get(name)
    return tuple(str(one) for one in value if isinstance(one, str)) if isinstance(value, list) else ()


def _objects(fields: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    value = fields.get(name)
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
