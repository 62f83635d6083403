"""Run collectives between processes on the CPU: is what torch.distributed, gloo and the loopback do correct?

The same as the probe nccl, which measures GPUs, but with gloo and without any GPU. Bandwidth is shown and not judged.
Apart from this text, its effects and its backend the two files are the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from remote_diag.probe import Context

EFFECTS = ("runs-commands",)

BACKEND: Literal["nccl", "gloo"] = "gloo"

_SIZES = re.compile(r"\d+[KMG]?(?::\d+[KMG]?(?::\d+)?|(?:,\d+[KMG]?)*)", re.ASCII)


@dataclass(frozen=True)
class Params:
    """What to measure."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    collective: Literal["all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast", "reduce", "sendrecv"] = "all_reduce"
    """Which one."""
    sizes: str = "8:16M"
    """Bytes, the larger of what a rank sends and receives: ``FROM:TO``, each 4 times the last, ``FROM:TO:FACTOR``, or a list ``32K,1M``."""
    dtype: Literal["bf16", "fp16", "fp32", "fp64", "int32", "int64", "uint8"] = "fp32"
    """Type of the elements."""
    ranks: int | None = None
    """Processes, 1 to 64; with nccl at most one a GPU. Without it: one a GPU, or two on the CPU."""
    graph: bool = False
    """Whether latency is that of calls replayed from a CUDA graph, without the cost of launching them."""
    check: bool = True
    """Whether contents are checked, before each size is timed."""
    iterations: int | None = None
    """Calls that latency is taken from, 5 to 10000. Without it: 200 up to 1 MiB, 50 on the CPU, fewer where a call takes long."""
    step_timeout_s: float = 60.0
    """Seconds that one size may take to be checked, or timed, before its ranks count as hanging."""
    start_timeout_s: float = 180.0
    """Seconds until all ranks have imported torch and found each other."""
    port: int | None = None
    """Port of the loopback at which ranks meet; without it a free one is chosen."""
    control: bool = True
    """Whether a run that fails is followed by one without P2P (NCCL_P2P_DISABLE=1)."""
    thresholds: dict[str, float] = field(default_factory=dict)
    """Thresholds in place of the shipped ones, by their name in thresholds.json."""
    thresholds_from: str = ""
    """The file that they are from, as findings name it."""
    reference: tuple[str, ...] = ()
    """Lines of a table of bandwidths of your own, columns as in reference_busbw.csv; they win over published ones."""
    binary: str | None = None
    """A program of nccl-tests on the host, such as /opt/nccl-tests/build/all_reduce_perf, to run in place of rdiag's own ranks."""
    arguments: tuple[str, ...] = ()
    """Its arguments; without them it is asked for the same sizes, type, ranks, checks and calls as rdiag's own ranks."""
    gpu: str | None = None
    """Name of the GPUs that a file is from, where it does not say."""
    file_collective: str | None = None
    """Which collective a file is of, where it does not say."""
    file_name: str = ""
    """Name of the file that is parsed; it may hold the name of the collective."""

    def __post_init__(self) -> None:
        """Check what can be checked without the host."""
        if not _SIZES.fullmatch(self.sizes):
            raise ValueError("sizes must be FROM:TO, FROM:TO:FACTOR or a list of sizes such as 32K,1M; suffixes are K, M and G")
        if self.ranks is not None and not 1 <= self.ranks <= 64:
            raise ValueError("ranks must be 1 to 64")
        if self.iterations is not None and not 5 <= self.iterations <= 10_000:
            raise ValueError("iterations must be 5 to 10000")
        if not (1 <= self.step_timeout_s <= 3600 and 1 <= self.start_timeout_s <= 3600):
            raise ValueError("timeouts must be 1 to 3600 seconds")
        if self.port is not None and not 1 <= self.port <= 65_535:
            raise ValueError("port must be 1 to 65535")
        if self.binary is not None and BACKEND == "gloo":
            raise ValueError("programs of nccl-tests need GPUs: binary needs the probe nccl")
        if self.arguments and self.binary is None:
            raise ValueError("arguments are those of a binary: give one")
        if len(self.arguments) > 100 or any("\0" in word or len(word) > 4096 for word in self.arguments):
            raise ValueError("arguments must be at most 100, without zero bytes")
        if self.graph and BACKEND == "gloo":
            raise ValueError("only CUDA has graphs: graph needs the probe nccl")


@dataclass(frozen=True)
class Latency:
    """How long single calls took, each as long as its slowest rank."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    iterations: int
    """Calls."""
    min_us: float
    """Shortest, microseconds."""
    p50_us: float | None
    """Median, microseconds, nearest rank; null where a file does not tell it."""
    p99_us: float
    """99 of 100 took no longer, microseconds, nearest rank."""
    max_us: float
    """Longest, microseconds."""
    slowest_rank: int | None
    """The rank that was last most often; null where that is not known."""
    slowest_share: float | None
    """Share of calls in which it was last, 0 to 1."""


@dataclass(frozen=True)
class Row:
    """One size, in one placement."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    collective: str
    """Which collective this row is of: that of the result, or one of several in a file."""
    size_bytes: int
    """Bytes, the larger of what a rank sends and receives."""
    count: int | None
    """Elements, as nccl-tests counts them; null where not told."""
    dtype: str | None
    """Type of the elements; null where not told."""
    redop: str | None
    """Reduction, such as sum; null for collectives that do not reduce."""
    root: int | None
    """Rank that sends or receives; null for collectives without one."""
    in_place: bool
    """Whether input and output were the same memory."""
    time_us: float | None
    """Microseconds a call in a burst of calls, of the slowest rank; null when it was not timed."""
    algbw_gbs: float | None
    """size_bytes / time_us, GB/s of 1e9 bytes, computed here."""
    busbw_gbs: float | None
    """algbw_gbs times the factor of the collective, GB/s: comparable with the link; 0 for a single rank."""
    wrong: int | None
    """Elements with a wrong value, over all ranks; null when they were not checked."""
    reported_algbw_gbs: float | None
    """What the file says, GB/s; null for rows that were measured here."""
    reported_busbw_gbs: float | None
    """What the file says, GB/s; null for rows that were measured here."""
    iterations: int | None
    """Calls in the burst; null where not told."""
    spread_pct: float | None
    """(longest - shortest) / median of repeated bursts, per cent; null when there was one."""
    latency: Latency | None
    """Single calls; null when only a burst was timed."""


@dataclass(frozen=True)
class Device:
    """What one rank ran on."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    rank: int
    """Number of the process in the group."""
    name: str
    """Name of the GPU, or cpu."""
    bus_id: str | None
    """Such as 0000:1b:00.0; null on the CPU or where not told."""
    uuid: str | None
    """GPU-...; null on the CPU or where not told."""


@dataclass(frozen=True)
class Held:
    """One reason that held the clocks of a GPU down."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    reason: str
    """Such as power cap."""
    samples: int
    """In how many samples it was there."""
    share: float
    """Their share of the samples that told, 0 to 1."""
    first_s: float
    """Seconds after the beginning of the load at which it was first seen."""
    last_s: float
    """Seconds after the beginning of the load at which it was last seen."""


@dataclass(frozen=True)
class Load:
    """State of one GPU while ranks were busy with the size of the peak, from several samples."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    bus_id: str
    """Such as 0000:1b:00.0."""
    pcie_gen: int | None
    """Generation of the link under load, the lowest once it was awake; null where the driver does not say."""
    pcie_gen_max: int | None
    """Highest generation of this GPU in this slot."""
    pcie_width: int | None
    """Lanes under load, the fewest once it was awake."""
    pcie_width_max: int | None
    """Most lanes of this GPU in this slot."""
    clock_sm_mhz: float | None
    """SM clock under load, MHz, median of the samples."""
    power_w: float | None
    """Power under load, W, median of the samples."""
    temperature_c: float | None
    """Highest temperature under load, degrees Celsius."""
    throttle: tuple[str, ...]
    """Reasons that held clocks down in any sample; application clocks are none, and idleness only where every sample was idle."""
    missing: dict[str, str]
    """Field -> what the driver said in place of a value, in every sample."""
    samples: int
    """How often it was looked at while it was busy; 0 where it was idle each time."""
    idle_samples: int
    """How often it was idle instead; these count for nothing."""
    link_low_samples: int
    """In how many samples the link, once awake, was slower or narrower than it can be."""
    held: tuple[Held, ...]
    """The reasons in throttle, and how often each was seen."""


@dataclass(frozen=True)
class Failure:
    """What ended the run before it was complete."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    kind: Literal["killed", "exited", "frozen", "hang", "error", "port-taken", "not-started", "deadline", "truncated"]
    """killed: by a signal; frozen: stopped, or without a sign of life; hang: alive, and in a call that never returns."""
    rank: int | None
    """Which rank; null when it is not one rank's."""
    phase: str
    """start, import, devices, meet, prepare, check, warm-up, latency, burst."""
    size_bytes: int | None
    """Size at which it happened; null before the first."""
    text: str
    """What is known, in words."""


@dataclass(frozen=True)
class Control:
    """The same once more without P2P, after a failure."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    settings: dict[str, str]
    """Environment variables that it differed in."""
    outcome: Literal["healthy", "wrong", "hang", "failed"]
    """healthy: correct data, in time."""
    text: str
    """What that says about the first run."""


@dataclass(frozen=True)
class Expectation:
    """What the peak was held against."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    busbw_gbs: float
    """Expected bus bandwidth, GB/s."""
    ratio: float
    """Peak / expected."""
    kind: str
    """published, measured, baseline, physics..."""
    source: str
    """Where the figure is from."""
    conditions: str
    """What it holds for: GPU, number of GPUs, size, algorithm."""


@dataclass(frozen=True)
class Result:
    """All rows, and what they say."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    source: Literal["measured", "binary", "file"]
    """Whether rows were measured by rdiag, by a program of nccl-tests that it ran, or read from a file."""
    backend: str
    """nccl or gloo."""
    collective: str
    """Which one; of a file with several the first, each row tells its own."""
    ranks: int | None
    """Processes over all hosts; null where a file does not say."""
    complete: bool
    """Whether every size was measured, or the file has its footer."""
    correctness: Literal["ok", "wrong", "not_checked"]
    """Whether contents arrived: wrong as soon as one element is; ok only if every size is there and was checked."""
    damaged_rows: int
    """Rows of a file that could not be read."""
    rows: tuple[Row, ...]
    """In the order in which they were measured."""
    peak_busbw_gbs: float | None
    """Best bus bandwidth among sizes that are large enough to tell, GB/s; null without such a size."""
    peak_size_bytes: int | None
    """Its size."""
    expectation: Expectation | None
    """What the peak was held against; null when nothing fits."""
    devices: tuple[Device, ...]
    """What each rank ran on, by rank."""
    load: tuple[Load, ...]
    """Each GPU under load; empty without GPUs, or when there was no time to look."""
    failure: Failure | None
    """Why the run is not complete; null when it is."""
    control: Control | None
    """The same without P2P, after a failure; null when it was not run."""
    library_version: str | None
    """Version of NCCL that ran; null on the CPU or where not told."""
    torch_version: str | None
    """Version of torch; null for files and programs."""
    settings: dict[str, str]
    """NCCL_ variables that were set, and CUDA_VISIBLE_DEVICES."""
    notes: tuple[str, ...]
    """What else is to be known about the numbers."""


def run(params: Params, context: Context) -> Result:
    """Measure, and put the numbers into the result."""
    if params.binary is not None:
        return _run_binary(params.binary, params, context)
    from probes.lib.comm import collectives

    own = {name: value for name, value in vars(params).items() if name not in _OF_PROGRAMS}
    return build_result(collectives.measure(context, BACKEND, **own))


def parse(data: bytes, params: Params, context: Context) -> Result:
    """Read text or JSON of nccl-tests, or a log of NCCL.

    Raises:
        ValueError: It is neither.
    """
    from probes.lib.comm import nccl_report

    fields, findings = nccl_report.parse(data, _given(params, "file"))
    for finding in findings:
        context.finding(**finding)
    return build_result(fields)


_OF_PROGRAMS = {"binary", "arguments", "gpu", "file_collective", "file_name"}
"""Parameters that rdiag's own ranks do not need."""


def _run_binary(binary: str, params: Params, context: Context) -> Result:
    from probes.lib.comm import nccl_binary

    words = params.arguments
    if not words:
        names = ("sizes", "dtype", "ranks", "graph", "check", "iterations")
        try:
            words = tuple(nccl_binary.arguments(**{name: getattr(params, name) for name in names}))
        except ValueError as error:
            context.unfit(str(error))
    fields, findings = nccl_binary.measure(context, binary, words, _given(params, "binary"))
    for finding in findings:
        context.finding(**finding)
    return build_result(fields)


def _given(params: Params, source: str) -> Any:
    from probes.lib.comm import nccl_report, reference
    from probes.lib.gpu.thresholds import Thresholds

    return nccl_report.Given(
        Thresholds(params.thresholds, params.thresholds_from), source=source, name=params.file_name, collective=params.file_collective, gpu=params.gpu,
        own=reference.parse(params.reference, own=True) if params.reference else (),
    )  # fmt: skip


def build_result(report: dict[str, Any]) -> Result:
    """Return the result whose fields are those of ``report``, nested objects as dicts."""
    expectation, failure, control = report["expectation"], report["failure"], report["control"]
    return Result(
        **{
            **report,
            "rows": tuple(_row(row) for row in report["rows"]),
            "expectation": None if expectation is None else Expectation(**expectation),
            "devices": tuple(Device(**device) for device in report["devices"]),
            "load": tuple(Load(**{**load, "held": tuple(Held(**held) for held in load["held"])}) for load in report["load"]),
            "failure": None if failure is None else Failure(**failure),
            "control": None if control is None else Control(**control),
        }
    )


def _row(row: dict[str, Any]) -> Row:
    latency = row["latency"]
    return Row(**{**row, "latency": None if latency is None else Latency(**latency)})
