"""Operation ``jobs``: every job of this host and its state, read from the records and checked against what is alive."""

from __future__ import annotations

import os

from ..layout import JOB_MARKER, JOBS
from ..operations import Failure
from ..processes import all_processes
from ..protocol import ENVIRONMENT
from ..spawn import as_utf8
from . import names, record
from .tree import read_environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .record import Job

MAX_JOBS = 1000
_TAIL = 16 * 1024
_LINE = 400
_METRICS = 12


def list_jobs(fields: dict[str, Any], cache: str) -> dict[str, Any]:
    """Return ``jobs``: one object for each job, oldest attempt of each name first.

    Args:
        fields: ``job`` (an id or a name) and ``launch_id`` narrow the list down; both may be null.
        cache: the cache folder.
    """
    wanted, launch_id = fields.get("job"), fields.get("launch_id")
    if wanted is not None and not (isinstance(wanted, str) and (names.is_name(wanted) or names.split(wanted))):
        raise Failure(ENVIRONMENT, "the request's 'job' is no name of a job")
    found = [job for job in record.all_jobs(cache) if job.happened]
    described = [
        describe(job)
        for job in found[-MAX_JOBS:]
        if (wanted is None or wanted in (job.id, (names.split(job.id) or ("",))[0]))
        and (launch_id is None or job.record.get("launch_id") == launch_id)
    ]
    if launch_id is None:
        known = {job.id for job in found}
        described += [one for one in _without_record(known, cache) if wanted is None or one["job"].startswith(wanted)]
    return {"jobs": described, "left_out": max(0, len(found) - MAX_JOBS)}


def describe(job: Job) -> dict[str, Any]:
    """Return what is known of a job, for the client."""
    judged = job.judge()
    split = names.split(job.id) or (job.id, 0)
    log, size = job.paths.stdout, _size(job.paths.stdout)
    line = last_line(job.paths.stdout) or last_line(job.paths.stderr)
    return {
        "job": job.id,
        "name": split[0],
        "attempt": split[1],
        "schema_version": job.record.get("schema_version"),
        "launch_id": record.text(job.record, "launch_id"),
        **judged,
        "oom_killed": job.state.get("oom_killed") is True,
        "oom": job.state.get("oom"),
        "created_at": record.number(job.record, "created_at"),
        "started_at": record.number(job.state, "started_at"),
        "ended_at": record.number(job.state, "ended_at"),
        "pid": record.integer(job.state, "pid"),
        "gpus": _gpus(job.record.get("gpus")),
        "argv": [str(word) for word in job.record.get("argv") or []],
        "workdir": record.text(job.record, "workdir"),
        "launched": job.record.get("launched") if isinstance(job.record.get("launched"), dict) else {},
        "forced": [str(one) for one in job.record.get("forced") or []],
        "directory": as_utf8(job.paths.directory),
        "log": as_utf8(log),
        "log_bytes": size,
        "last_line": line,
        "metrics": last_metrics(job.paths.stdout) or last_metrics(job.paths.stderr),
    }


def last_metrics(path: str) -> dict[str, float]:
    """Return the last value of each metric that the end of a training log tells; by name, steps over all only."""
    data = tail(path, _TAIL)
    if not data:
        return {}
    try:
        from probes.lib.training_log import Point, Reader
    except ImportError:
        return {}
    reader = Reader()
    found: dict[str, float] = {}
    # The first line is cut in two, as a rule.
    for event in reader.feed(data[data.find(b"\n") + 1 :] if len(data) == _TAIL else data) + reader.finish():
        if isinstance(event, Point) and event.position is None:
            found.pop(event.metric, None)
            found[event.metric] = event.value
            if event.step is not None:
                found["step"] = float(event.step)
    finite = {name: value for name, value in found.items() if value - value == 0}
    return dict(list(finite.items())[-_METRICS:])


def _gpus(value: object) -> list[int] | None:
    if not isinstance(value, list):
        return None
    return [one for one in value if isinstance(one, int)]


def _size(path: str) -> int | None:
    try:
        return os.lstat(path).st_size
    except OSError:
        return None


def tail(path: str, count: int) -> bytes:
    """Return the last ``count`` bytes of a regular file; nothing when there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    with open(descriptor, "rb", 0) as stream:
        try:
            size = os.fstat(descriptor).st_size
            return os.pread(stream.fileno(), count, max(0, size - count))
        except OSError:
            return b""


def last_line(path: str) -> str | None:
    """Return the last line that is not blank; of one that overwrites itself (a progress bar) its last form."""
    for line in reversed(tail(path, _TAIL).replace(b"\r\n", b"\n").split(b"\n")):
        shown = [part for part in line.split(b"\r") if part.strip()]
        if shown:
            return shown[-1][-_LINE:].decode("utf-8", "backslashreplace")
    return None


def _without_record(known: set[str], cache: str) -> list[dict[str, Any]]:
    """Return jobs whose folder in ``cache`` is gone while processes of theirs are alive."""
    alive: dict[str, list[int]] = {}
    own = os.geteuid()
    for process in all_processes().values():
        try:
            if process.dead or process.pid == os.getpid() or os.stat("/proc/%d" % process.pid).st_uid != own:
                continue
        except OSError:
            continue
        job = _job_of(read_environment(process.pid) or b"", os.path.join(cache, JOBS))
        if job is not None and job not in known:
            alive.setdefault(job, []).append(process.pid)
    return [_lost_record(job, pids) for job, pids in sorted(alive.items())]


def _job_of(environment: bytes, folder: str) -> str | None:
    """Return the job that a process with these variables belongs to, if its folder is, or was, in ``folder``."""
    variables = dict(entry.partition(b"=")[::2] for entry in environment.split(b"\0"))
    job = variables.get(JOB_MARKER.encode("ascii"), b"").partition(b":")[0].decode("utf-8", "replace")
    if names.split(job) is None or variables.get(b"RDIAG_JOB_FILES") != os.fsencode(os.path.join(folder, job, "files")):
        return None
    return job


def _lost_record(job: str, pids: list[int]) -> dict[str, Any]:
    name, attempt = names.split(job) or (job, 0)
    return {
        "job": job,
        "name": name,
        "attempt": attempt,
        "state": record.UNKNOWN,
        "message": "its record is gone; processes are alive: pid %s"
        % ", ".join(map(str, sorted(pids)[:10])),
        "exit_code": None,
        "signal": None,
    }
