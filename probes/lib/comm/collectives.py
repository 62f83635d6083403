"""Measures one collective over several sizes: contents first, then single calls, then bursts.

The starter leads: ranks do one thing at a time and answer, each through a pipe of its own. So every step has a bound,
and when the group hangs it is known who got how far, and everything that was measured before is kept.
"""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from dataclasses import dataclass, field
from time import monotonic

from ..gpu.busid import normalise
from . import bandwidth, devices, faults, load, memory, plan, tables, workers
from .judge import Judge

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping

    from remote_diag.probe import Context

_REPEATS = 3
"""Bursts at the peak, of which the median counts."""
_LOAD_SECONDS = 4.0
_LATENCY_SECONDS = 5.0
_RESERVE = 15.0
"""Seconds before the deadline of the run that are kept for ending all ranks and telling what was found."""
_CONTROL_SECONDS = 60.0
_CONTROL_SIZES = (64, 16 << 20)
_ATTEMPTS = 3
_COPIES = 4
"""Memory of a rank over its size: what goes in and comes out, and what is compared."""
_COPIES_GLOO = 8
"""The same for gloo, which buffers what it sends and receives: up to five were seen."""
P2P_OFF = {"NCCL_P2P_DISABLE": "1"}


@dataclass
class Job:
    """What to measure, as the probe's parameters say."""

    backend: str
    collective: str
    sizes: list[int]
    dtype: str
    ranks: int
    graph: bool
    check: bool
    iterations: int | None
    step_timeout_s: float
    start_timeout_s: float
    port: int | None
    judge: Judge
    program: str = workers.PROGRAM

    @property
    def cuda(self) -> bool:
        """Whether ranks compute on GPUs."""
        return self.backend == "nccl"


@dataclass
class Arm:
    """What came of one group of ranks."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    ready: list[dict[str, Any]] = field(default_factory=list)
    """What each rank said of itself, by rank."""
    trouble: workers.Trouble | None = None
    size: int | None = None
    """What was measured when trouble came."""
    load: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)
    survivors: tuple[int, ...] = ()


def measure(context: Context, backend: str, **given: Any) -> dict[str, Any]:
    """Measure; return the fields of a result, and report what was found.

    Args:
        context: of the run.
        backend: nccl or gloo.
        given: the parameters of the probe.
    """
    control = given.pop("control")
    job = _job(context, backend, given)
    return measure_job(context, job, control=control)


def measure_job(context: Context, job: Job, *, control: bool) -> dict[str, Any]:
    """The same for a job that is complete."""
    until = monotonic() + max(1.0, context.remaining() - _RESERVE)
    spare = _CONTROL_SECONDS if control and job.cuda and until - monotonic() > 3 * _CONTROL_SECONDS else 0.0
    folder = tempfile.mkdtemp(prefix="ranks-", dir=context.run_dir)
    arm = _run_arm(context, job, folder, until - spare, {})
    report = _report(job, arm)
    faults.tell(context, report, arm)
    if control and job.cuda and faults.asks_for_control(report, arm):
        report["control"] = _control(context, job, folder, until)
    if job.cuda:
        load.judge(context, arm.load)
        job.judge.judge(context, report)
    return report


def _job(context: Context, backend: str, given: dict[str, Any]) -> Job:
    try:
        sizes = plan.parse_sizes(given.pop("sizes"))
        judge = Judge(given.pop("thresholds"), given.pop("reference"), given.pop("thresholds_from", ""))
    except ValueError as error:
        context.unfit(str(error))
    wanted = given.pop("ranks")
    ranks = _ranks(context, backend, wanted)
    if given["collective"] == "sendrecv" and ranks < 2:
        context.unfit("sendrecv needs two ranks, and there is one", "choose another collective")
    made = plan.possible(sizes, given["collective"], ranks, plan.ELEMENT[given["dtype"]])
    return Job(backend=backend, sizes=made, ranks=ranks, judge=judge, **given)


def _ranks(context: Context, backend: str, wanted: int | None) -> int:
    if backend == "gloo":
        from importlib.util import find_spec

        if find_spec("torch") is None:
            # Says who misses it, and how to install it. Otherwise only ranks import it: that takes seconds.
            context.require("torch")
        return wanted or 2
    torch = context.require("torch")
    count, why = devices.count(torch)
    if not count:
        context.unfit("torch sees no GPU" + (why and ": " + why), "the same on the CPU: rdiag nccl --backend gloo")
    if not torch.distributed.is_nccl_available():
        context.unfit("this torch was built without NCCL")
    if wanted is not None and wanted > count:
        context.unfit("%d ranks were asked for, and torch sees %d GPUs: NCCL wants one a rank" % (wanted, count))
    return wanted or count


# -- one group of ranks


def _run_arm(context: Context, job: Job, folder: str, until: float, env: Mapping[str, str]) -> Arm:
    """Start the ranks, measure, end them; a port that somebody took meanwhile is replaced by another."""
    for attempt in range(_ATTEMPTS):
        arm = Arm()
        port = job.port or free_port()
        if job.port is not None and taken(job.port):
            arm.trouble = workers.Trouble("port-taken", None, "start", "port %d of the loopback is in use, or may not be used" % job.port)
            return arm
        spec = {
            "backend": job.backend,
            "collective": job.collective,
            "dtype": job.dtype,
            "graph": job.graph,
            "port": port,
            "timeout_s": job.step_timeout_s + job.start_timeout_s,
        }
        group = None
        try:
            with workers.Group(spec, job.ranks, folder, env={**_environment(job), **env}, program=job.program) as group:
                _Steps(context, job, arm, group, until).all()
        except workers.Trouble as trouble:
            arm.trouble = trouble
        except OSError as error:
            arm.trouble = workers.Trouble("not-started", None, "start", "cannot start a rank: %s" % error.strerror)
        arm.survivors = group.survivors if group is not None else ()
        if arm.trouble is None or not faults.is_port_taken(arm.trouble):
            return arm
        arm.trouble.kind = "port-taken"
        if job.port is not None or attempt == _ATTEMPTS - 1:
            return arm
    raise AssertionError


def _environment(job: Job) -> dict[str, str]:
    """Return what ranks get where the host does not say otherwise."""
    wanted = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "NCCL_DEBUG": "WARN"}
    if not job.cuda:
        # All ranks are on this host, whatever its name resolves to.
        wanted = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    chosen = {name: os.environ.get(name) or value for name, value in wanted.items()}
    if job.graph:
        # A watchdog that asks the driver while a graph is captured ends the capture. Our own bounds stay.
        chosen["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    return chosen


class _Steps:
    """The course of one arm."""

    def __init__(self, context: Context, job: Job, arm: Arm, group: workers.Group, until: float) -> None:
        self._context, self._job, self._arm, self._group, self._until = context, job, arm, group, until

    def all(self) -> None:
        """Measure all sizes, then the peak again, then look at the GPUs under load."""
        job, arm = self._job, self._arm
        arm.ready = self._answers(job.start_timeout_s)
        sizes = self._that_fit()
        for done, size in enumerate(sizes):
            self._context.progress(done, len(sizes), unit="sizes", label="%s of %d bytes" % (job.collective, size))
            arm.size = size
            self._measure(size)
        self._context.progress(len(sizes), len(sizes), unit="sizes", label=job.collective)
        peak = max(arm.rows, key=lambda row: (row["busbw_gbs"], row["size_bytes"]))
        arm.size = peak["size_bytes"]
        self._repeat(peak)
        if job.cuda:
            self._look_under_load(peak)
        arm.size = None

    def _answers(self, seconds: float) -> list[dict[str, Any]]:
        bound = monotonic() + seconds
        try:
            return self._group.answers(min(bound, self._until))
        except workers.Trouble as trouble:
            if trouble.kind == "hang" and self._until < bound:
                raise workers.Trouble(
                    "deadline", None, trouble.phase, "the time of the run was over: %s" % trouble.text, trouble.evidence
                ) from trouble
            raise

    def _that_fit(self) -> list[int]:
        free = [ready["free"] for ready in self._arm.ready if ready.get("free")]
        copies = _COPIES if free else _COPIES_GLOO
        most = (min(free) if free else memory.available() // self._job.ranks) // copies
        fitting = [size for size in self._job.sizes if size <= most]
        if not fitting:
            text = "out of memory: every size is above %d bytes, 1/%d of what is free for a rank" % (most, copies)
            raise workers.Trouble("error", None, "prepare", text)
        self._arm.left_out = [size for size in self._job.sizes if size > most]
        if self._arm.left_out:
            self._arm.notes.append("sizes above %d bytes, 1/%d of the memory that is free for a rank, were left out" % (most, copies))
        return fitting

    def _measure(self, size: int) -> None:
        job = self._job
        told = self._prepare(size, check=job.check)
        row = tables.row(
            job.collective,
            size,
            in_place=job.collective in plan.IN_PLACE,
            wrong=sum(each["wrong"] for each in told) if job.check else None,
            # nccl-tests counts what goes from one rank to one other.
            count=told[0]["count"] // (job.ranks if job.collective in plan.SPLIT else 1),
            dtype=job.dtype,
            redop=plan.REDOPS.get(job.collective),
            root=plan.ROOTS.get(job.collective),
        )
        self._arm.rows.append(row)
        estimate = max(each["estimate_us"] for each in told)
        calls = plan.burst_calls(estimate, cuda=job.cuda)
        # Ranks that merely have a lot to do must not count as hanging.
        seconds = min(_LATENCY_SECONDS, job.step_timeout_s / 4)
        latency = plan.latency_calls(size, estimate, job.iterations, cuda=job.cuda, seconds=seconds)
        self._group.order(do="time", latency=latency, burst=calls, bursts=1)
        timed = self._answers(job.step_timeout_s)
        row["iterations"] = calls
        row["latency"] = plan.latency({rank: each["latency_us"] for rank, each in enumerate(timed)})
        self._set_time(row, [max(each["burst_us"][0] for each in timed)])

    def _prepare(self, size: int, *, check: bool) -> list[dict[str, Any]]:
        self._group.order(do="prepare", size=size, check=check)
        return self._answers(self._job.step_timeout_s)

    def _set_time(self, row: dict[str, Any], times: list[float]) -> None:
        time_us = plan.median(times)
        row["time_us"] = time_us
        row["spread_pct"] = plan.spread(times)
        row["algbw_gbs"] = bandwidth.algbw_gbs(row["size_bytes"], time_us)
        row["busbw_gbs"] = bandwidth.busbw_gbs(self._job.collective, self._job.ranks, row["size_bytes"], time_us)

    def _repeat(self, row: dict[str, Any]) -> None:
        self._prepare(row["size_bytes"], check=False)
        self._group.order(do="time", latency=0, burst=row["iterations"], bursts=_REPEATS - 1)
        timed = self._answers(self._job.step_timeout_s)
        repeated = [max(burst) for burst in zip(*(each["burst_us"] for each in timed))]
        self._set_time(row, [row["time_us"], *repeated])

    def _look_under_load(self, row: dict[str, Any]) -> None:
        calls = plan.burst_calls(row["time_us"], cuda=True, seconds=_LOAD_SECONDS)
        self._group.order(do="time", latency=0, burst=calls, bursts=1)
        buses = [bus for bus in (normalise(ready["bus_id"] or "") for ready in self._arm.ready) if bus]
        # Many calls of a small size may be over sooner.
        lasts = min(_LOAD_SECONDS, calls * row["time_us"] / 1e6)
        samples, problem = load.watch(lasts, buses, limit=min(10.0, self._job.step_timeout_s))
        self._arm.load = load.summary(samples)
        self._answers(self._job.step_timeout_s + _LOAD_SECONDS)
        if problem is not None:
            self._context.finding("unknown", "load-unknown", "the GPUs could not be looked at under load: %s" % problem)


# -- what it amounts to


def _report(job: Job, arm: Arm) -> dict[str, Any]:
    timed = [row for row in arm.rows if row["time_us"] is not None]
    large = [row for row in timed if row["size_bytes"] >= plan.LATENCY_UP_TO] if job.ranks > 1 and not job.cuda else []
    # On GPUs the judge says from which size on a peak counts.
    peak = max(large, key=lambda row: row["busbw_gbs"], default=None)
    first = arm.ready[0] if arm.ready else {}
    devices = [
        {"rank": rank, "name": ready["name"], "bus_id": ready["bus_id"], "uuid": ready["uuid"]}
        for rank, ready in enumerate(arm.ready)
    ]
    complete = arm.trouble is None and not arm.left_out
    correctness = tables.correctness(arm.rows)
    return tables.report(
        "measured",
        job.backend,
        job.collective,
        rows=arm.rows,
        complete=complete,
        # What a size that was not measured would have given is not known.
        correctness="not_checked" if correctness == "ok" and not complete else correctness,
        ranks=job.ranks,
        peak_busbw_gbs=None if peak is None else peak["busbw_gbs"],
        peak_size_bytes=None if peak is None else peak["size_bytes"],
        devices=tuple(devices),
        load=tuple(arm.load),
        failure=faults.failure(arm),
        library_version=first.get("library"),
        torch_version=first.get("torch"),
        settings=settings(),
        notes=tuple(arm.notes),
    )


def settings() -> dict[str, str]:
    """Return the variables that change what NCCL does."""
    more = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    return {name: value for name, value in os.environ.items() if name.startswith("NCCL_") or name in more}


def _control(context: Context, job: Job, folder: str, until: float) -> dict[str, Any] | None:
    """Run the failed collective once more without P2P, contents only."""
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return None
    if until - monotonic() < _RESERVE:
        faults.tell_no_time(context)
        return None
    sizes = plan.possible(list(_CONTROL_SIZES), job.collective, job.ranks, plan.ELEMENT[job.dtype])
    again = Job(**{**vars(job), "sizes": sizes, "check": True, "graph": False, "port": None, "iterations": 5})
    arm = _run_arm(context, again, folder, min(until, monotonic() + _CONTROL_SECONDS), P2P_OFF)
    return faults.tell_control(context, arm, P2P_OFF)


def free_port() -> int:
    """Return a port of the loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def taken(port: int) -> bool:
    """Whether somebody listens at a port of the loopback, or it is kept for root."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return error.errno in (errno.EADDRINUSE, errno.EACCES)
    return False
