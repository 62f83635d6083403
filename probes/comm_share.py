"""Say which share of a step the GPUs spend communicating, from a trace of torch.profiler.

Reads a trace (.json or .json.gz, of any size, as a stream) and tells for each GPU how much of the step goes into the
kernels of NCCL and of other libraries that move data between GPUs, how much of that computation hides, by collective and
by message. With a process instead of a file: the newest trace that the process has written. The process itself is left
alone: nothing is attached to it, and no profiler is started.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from probes.lib.comm.lengths import Calls
    from probes.lib.comm.steps import Windows
    from probes.lib.comm.trace import Reader
    from probes.lib.comm.trace_shares import DeviceShares, Gathered, Kind
    from remote_diag.probe import Context

EFFECTS = ("reads-files",)
RESERVE_S = 10.0
"""Seconds before the deadline at which reading stops, so that what was read still gets added up."""


@dataclass(frozen=True)
class Params:
    """A trace, and what a step is."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    path: str | None = None
    """The trace on the host."""
    pid: int | None = None
    """Instead of a trace: a process whose newest finished trace is read."""
    step: str | None = None
    """Annotation (record_function) whose spans are the steps, with * and ?; torch's own ProfilerStep if not given."""
    small_bytes: int = 1 << 20
    """Messages of at most this many bytes count as bound by latency."""
    exposed_limit: float = 0.5
    """Exposed communication / step above which the finding is degraded, 0 to 1."""
    top: int = 10
    """Kernels, and messages, that are listed for each GPU, 1 to 100."""

    def __post_init__(self) -> None:
        """Check that there is one source, and the ranges."""
        if (self.path is None) == (self.pid is None):
            raise ValueError("give a trace (path) or a process (pid)")
        if self.pid is not None and self.pid < 1:
            raise ValueError("pid must be 1 or more")
        if self.step is not None and not self.step.strip():
            raise ValueError("step must not be empty")
        if self.small_bytes < 0:
            raise ValueError("small_bytes must not be negative")
        if not 0 <= self.exposed_limit <= 1:
            raise ValueError("exposed_limit must be between 0 and 1")
        if not 1 <= self.top <= 100:
            raise ValueError("top must be 1 to 100")


@dataclass(frozen=True)
class Kernel:
    """A kernel by its name."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    name: str
    """Its name, cut to 200 characters."""
    kind: str
    """compute, copy, or the family of communication: nccl, custom."""
    calls: int
    """Calls that begin within the steps."""
    total_us: float
    """Sum of their parts within the steps, us; parallel ones count each."""
    share: float
    """total_us / length of the steps; more than 1 is possible where kernels run in parallel."""


@dataclass(frozen=True)
class Message:
    """Calls of one collective with messages of one size."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    collective: str
    """all_reduce, all_gather, ..."""
    size_bytes: int
    """The larger of what goes in and what comes out on this rank, bytes."""
    dtype: str
    """As the profiler names it."""
    ranks: int | None
    """Size of the group; None where it was not recorded."""
    calls: int
    """Calls that begin within the steps."""
    total_us: float
    """Sum of their parts within the steps, us."""
    min_us: float
    """The fastest call: nobody had to be waited for long."""
    p50_us: float
    """Median call."""
    algbw_gbs: float
    """size_bytes / p50_us, GB/s: what a call moves, waiting for other ranks included."""


@dataclass(frozen=True)
class Collective:
    """One collective on one GPU."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    name: str
    """all_reduce, all_gather, ..., unnamed where neither the profiler nor the kernel's name says."""
    family: str
    """nccl, or custom for kernels of other libraries."""
    calls: int
    """Calls that begin within the steps."""
    total_us: float
    """Time in which at least one runs, us."""
    share: float
    """total_us / length of the steps, 0 to 1."""
    exposed_us: float
    """Part of total_us in which no kernel computes, us."""
    exposed_share: float
    """exposed_us / length of the steps, 0 to 1."""
    min_us: float | None
    """The fastest call, us; None where none begins within the steps."""
    p50_us: float | None
    """Median call, us."""
    p99_us: float | None
    """99th percentile (nearest rank), us."""
    latency_bound_us: float
    """Kernel time of calls with at most small_bytes, us."""
    bandwidth_bound_us: float
    """Kernel time of calls with more, us."""
    unsized_us: float
    """Kernel time of calls whose size was not recorded, us."""


@dataclass(frozen=True)
class PerStep:
    """Single steps, each by itself: the least, the median and the most."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    steps: int
    """How many: all that have a length."""
    length_min_us: float
    """The shortest, us."""
    length_p50_us: float
    """Median (nearest rank), us."""
    length_max_us: float
    """The longest, us."""
    communication_min: float
    """Least share of a step in which at least one communication kernel runs, 0 to 1."""
    communication_p50: float
    """Median of these shares."""
    communication_max: float
    """Most of them."""
    exposed_min: float
    """Least share of a step in which one runs and no kernel computes, 0 to 1."""
    exposed_p50: float
    """Median of these shares."""
    exposed_max: float
    """Most of them."""


@dataclass(frozen=True)
class Device:
    """One GPU of the trace."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    device: int
    """Its number in the traced process, which CUDA_VISIBLE_DEVICES decides."""
    window: str
    """profiler-step, annotation, or span: from the first to the last event."""
    clock: str
    """gpu where the steps are spans of the GPU's own work, cpu where they are the program's."""
    steps: int
    """How many steps."""
    step_us: float
    """Length of all steps together, us."""
    communication_us: float
    """Time in which at least one communication kernel runs, us."""
    communication_share: float
    """communication_us / step_us, 0 to 1."""
    nccl_us: float
    """Time in which at least one kernel of NCCL runs, us."""
    nccl_share: float
    """nccl_us / step_us, 0 to 1."""
    overlapped_us: float
    """Part of communication_us in which a kernel computes too, us."""
    exposed_us: float
    """Part of communication_us in which none does, us."""
    exposed_share: float
    """exposed_us / step_us, 0 to 1."""
    compute_us: float
    """Time in which at least one kernel computes, us."""
    copies_us: float
    """Time in which at least one copy or fill runs, us."""
    idle_us: float
    """Time in which nothing runs, us."""
    collectives: tuple[Collective, ...]
    """The longest first."""
    messages: tuple[Message, ...]
    """Sizes where they were recorded, the longest first."""
    top_kernels: tuple[Kernel, ...]
    """The longest first."""
    per_step: PerStep | None
    """How single steps differ; None for the whole span."""


@dataclass(frozen=True)
class Result:
    """What the trace says."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    path: str
    """The trace."""
    bytes_read: int
    """Bytes of the file that were read."""
    json_bytes: int
    """Bytes of JSON in them; more where the file is compressed."""
    complete: bool
    """Whether all of it was read, to a proper end."""
    events: int
    """Events of all kinds."""
    gpu_events: int
    """Kernels, copies and fills."""
    unusable_events: int
    """Events that are damaged and left out."""
    rank: int | None
    """Rank in the process group, as the trace says; None where it does not."""
    world_size: int | None
    """Ranks, as the trace says."""
    backend: str | None
    """nccl, gloo..., as the trace says."""
    nccl_version: str | None
    """As the trace says."""
    step_name: str | None
    """The annotation that steps follow; None for the whole span."""
    annotations: tuple[str, ...]
    """Names that --step could take, in order, at most 40."""
    devices: tuple[Device, ...]
    """The GPUs, in order."""


def run(params: Params, context: Context) -> Result:
    """Read, add up, tell."""
    from probes.lib.comm.overlap import Scratch
    from probes.lib.comm.share_findings import tell_completeness
    from probes.lib.comm.trace import BadTrace, Reader
    from probes.lib.comm.trace_shares import Gathered
    from probes.lib.files import Damaged, File, Meter, Unreadable
    from probes.lib.legible import legible

    path = params.path if params.path is not None else _trace_of(params.pid or 0, context)
    meter = Meter()
    gathered = Gathered(params.step, Scratch(context.run_dir))
    shrank = None
    try:
        with File(path, meter) as file:

            def keep_on(done: int) -> bool:
                context.progress(done, file.size, unit="bytes", label="reading the trace")
                return context.remaining() > RESERVE_S

            reader = Reader(file, gathered.take, gathered.take_plain, keep_on)
            try:
                reader.read()
            except Damaged as error:
                shrank = str(error)
            context.progress(file.size, file.size, unit="bytes", label="reading the trace")
    except Unreadable as error:
        context.unfit("cannot read the trace: %s" % legible(str(error)), hint=error.hint or "give one trace file of torch.profiler")
    except BadTrace as error:
        context.unfit(
            legible("%s is no trace of torch.profiler: %s" % (path, error)),
            hint="export one with profiler.export_chrome_trace(FILE), or with tensorboard_trace_handler(FOLDER)",
        )
    tell_completeness(reader, meter.bytes, file.size, shrank, context)
    return _result(params, path, meter.bytes, reader, gathered, shrank is None, context)


def _trace_of(pid: int, context: Context) -> str:
    from probes.lib.comm.find_traces import NoProcess, newest_trace
    from probes.lib.legible import legible

    try:
        found = newest_trace(pid)
    except NoProcess as error:
        context.unfit(str(error), hint="look at the pid, and run rdiag as the user of that process or as root")
    if found.path is None:
        context.unfit(
            "process %d has written no trace that can be found in %s" % (pid, legible(", ".join(found.looked_in)) or "any folder"),
            hint="rdiag starts no profiler in a running process. Let the program write a trace (SGLang and vLLM have"
            " /start_profile and /stop_profile, which slow the server down meanwhile), then give the file",
        )
    context.finding(
        "ok", "trace-of-process", "the newest finished trace of process %d is %.0f s old" % (pid, found.age_s),
        subject="pid %d" % pid, value=round(found.age_s), unit="s",
        evidence=legible((found.path, *("still being written, left out: %s" % path for path in found.open_for_writing[:5]))),
    )  # fmt: skip
    return found.path


def _result(  # noqa: PLR0917
    params: Params, path: str, size: int, reader: Reader, gathered: Gathered, whole: bool, context: Context
) -> Result:
    from probes.lib.comm.share_findings import judge
    from probes.lib.comm.share_words import count_of, text_of
    from probes.lib.comm.trace_shares import DeviceShares, windows
    from probes.lib.legible import legible

    devices: list[Device] = []
    leaders: dict[int, tuple[float, str]] = {}
    idle: list[int] = []
    gpu_events = sum(each.communication.count + each.compute.count + each.copies.count for each in gathered.devices.values())
    for number in sorted(gathered.devices):
        found = windows(gathered, number, params.step)
        if found is None:
            continue
        shares = DeviceShares(gathered.devices[number], gathered.kinds, found)
        if any(shares.kernels.values()):
            devices.append(_device(params, number, found, shares, gathered.kinds))
            leaders[number] = max(((measure.total, name) for name, measure in shares.names.items()), default=(0.0, ""))
        else:
            idle.append(number)
    group = reader.properties.get("distributedInfo")
    group = group if isinstance(group, dict) else {}
    stepped = any(device.window != "span" for device in devices)
    result = Result(
        path=legible(path),
        bytes_read=size,
        json_bytes=reader.unpacked,
        complete=whole and reader.cut is None and not reader.stopped,
        events=reader.events,
        gpu_events=gpu_events,
        unusable_events=gathered.unusable + reader.malformed,
        rank=count_of(group.get("rank")),
        world_size=count_of(group.get("world_size")),
        backend=text_of(group.get("backend")),
        nccl_version=text_of(group.get("nccl_version")),
        step_name=(params.step or "ProfilerStep") if stepped else None,
        annotations=tuple(sorted(gathered.names))[:40],
        devices=tuple(devices),
    )
    judge(params, result, gathered, leaders, idle, context)
    return result


def _device(params: Params, number: int, found: Windows, shares: DeviceShares, kinds: list[Kind]) -> Device:
    total = found.total

    def share(part: float) -> float:
        return min(1.0, part / total) if total > 0 else 0.0

    nccl = shares.families.get("nccl")
    kernels = [
        Kernel(name, kind, calls, length, length / total if total > 0 else 0.0)
        for (name, kind), (calls, length) in shares.by_name(kinds).items()
    ]
    return Device(
        device=number,
        window=found.kind,
        clock=found.clock,
        steps=1 if found.kind == "span" else len(found.steps),
        step_us=total,
        communication_us=shares.all.total,
        communication_share=share(shares.all.total),
        nccl_us=0.0 if nccl is None else nccl.total,
        nccl_share=0.0 if nccl is None else share(nccl.total),
        overlapped_us=max(0.0, shares.all.total - shares.all.exposed),
        exposed_us=shares.all.exposed,
        exposed_share=share(shares.all.exposed),
        compute_us=shares.compute_us,
        copies_us=shares.copies_us,
        idle_us=max(0.0, total - shares.busy_us),
        collectives=_collectives(params, shares, kinds, share),
        messages=_messages(shares, kinds)[: params.top],
        top_kernels=tuple(sorted(kernels, key=lambda kernel: -kernel.total_us)[: params.top]),
        per_step=None if found.kind == "span" else _per_step(shares),
    )


def _per_step(shares: DeviceShares) -> PerStep | None:
    from probes.lib.comm.lengths import of, ranked

    lengths, (whole, exposed) = shares.all.lengths(), shares.all.shares()
    if not lengths:
        return None
    columns = [(min(values), ranked(of(values), (len(values) - 1) // 2), max(values)) for values in (lengths, whole, exposed)]
    return PerStep(len(lengths), *(value for column in columns for value in column))


def _collectives(params: Params, shares: DeviceShares, kinds: list[Kind], share: Callable[[float], float]) -> tuple[Collective, ...]:
    from probes.lib.comm.lengths import extremes, percentile

    rows = []
    for (family, name), measure in shares.collectives.items():
        together: list[Calls] = []
        small = large = unsized = 0.0
        for key, calls in shares.calls.items():
            if (kinds[key].family, kinds[key].collective) != (family, name):
                continue
            together.append(calls)
            size = kinds[key].size_bytes
            if size is None:
                unsized += calls.kernel_us
            elif size <= params.small_bytes:
                small += calls.kernel_us
            else:
                large += calls.kernel_us
        shortest = extremes(together)
        rows.append(
            Collective(
                name=name,
                family=family,
                calls=sum(map(len, together)),
                total_us=measure.total,
                share=share(measure.total),
                exposed_us=measure.exposed,
                exposed_share=share(measure.exposed),
                min_us=shortest[0] if shortest is not None else None,
                p50_us=percentile(together, 0.5),
                p99_us=percentile(together, 0.99),
                latency_bound_us=small,
                bandwidth_bound_us=large,
                unsized_us=unsized,
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.total_us))


def _messages(shares: DeviceShares, kinds: list[Kind]) -> tuple[Message, ...]:
    from probes.lib.comm.lengths import extremes, percentile

    groups: dict[tuple[str, int, str, int | None], list[Calls]] = {}
    for key, calls in shares.calls.items():
        kind = kinds[key]
        if kind.size_bytes is None or kind.collective is None or kind.dtype is None:
            continue
        groups.setdefault((kind.collective, kind.size_bytes, kind.dtype, kind.ranks), []).append(calls)
    rows = []
    for (collective, size, dtype, ranks), alike in groups.items():
        median, shortest = percentile(alike, 0.5), extremes(alike)
        if median is not None and shortest is not None:
            bandwidth = size / median / 1e3 if median > 0 else 0.0
            count, total = sum(map(len, alike)), sum(each.kernel_us for each in alike)
            rows.append(Message(collective, size, dtype, ranks, count, total, shortest[0], median, bandwidth))
    return tuple(sorted(rows, key=lambda row: -row.total_us))
