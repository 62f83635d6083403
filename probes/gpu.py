"""Inventory and health of every GPU: what the driver, the bus and the kernel log say, judged without touching one.

Starts no CUDA context and needs no root. Asks NVML where the environment has nvidia-ml-py, else nvidia-smi, and beside
it lspci, /proc/driver/nvidia and the kernel log of this boot. A value that is missing keeps its reason and never counts
as good; what cannot be told about one card costs the others nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from probes.lib.gpu.collect import Seen
    from probes.lib.gpu.health import GpuReport, Report
    from probes.lib.gpu.owners import Holder
    from remote_diag.findings import Level
    from remote_diag.probe import Context

EFFECTS = ("reads-files", "runs-commands")

Reason = Literal[
    "not-supported", "not-permitted", "gpu-lost", "reset-required", "deprecated", "error", "empty", "not-reported", "timeout"
]
Status = Literal["ok", "degraded", "fail", "unknown"]
CheckLevel = Literal["ok", "degraded", "fail", "unknown", "skipped"]


@dataclass(frozen=True)
class Params:
    """What is expected, and what to hold values against."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    gpus: int | None = None
    """How many GPUs there should be; None where nobody said."""
    gpus_from_inventory: bool = False
    """Whether that number is the inventory's, and was not given for this run."""
    thresholds: dict[str, float] | None = None
    """Thresholds of your own by their name in thresholds.json; the unit is the one given there."""
    without: tuple[str, ...] = ()
    """Checks that are left out, such as kernel-log; they count as skipped."""
    xid_ok: tuple[int, ...] = ()
    """Xids that are no fault of a card here, beside those that the table has so."""
    xid_fail: tuple[int, ...] = ()
    """Xids that are a failure of the card here, whatever the table says."""

    def __post_init__(self) -> None:
        """Check the count."""
        if self.gpus is not None and self.gpus < 0:
            raise ValueError("gpus must not be negative")
        both = set(self.xid_ok) & set(self.xid_fail)
        if both:
            raise ValueError("Xid %d is both in xid_ok and in xid_fail" % min(both))
        if any(code < 0 for code in (*self.xid_ok, *self.xid_fail)):
            raise ValueError("no Xid is negative")


@dataclass(frozen=True)
class Missing:
    """Why a value is None."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    reason: Reason
    """not-supported by the card, not-permitted to this user, gpu-lost, reset-required, deprecated in this driver, error,
    empty, not-reported by the source, timeout."""
    text: str
    """What was printed in its place."""


@dataclass(frozen=True)
class Process:
    """One process on a GPU."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    pid: int
    """Process id as the driver knows it: in a container that may be the number outside."""
    name: str
    """Program, as the driver names it."""
    kind: str | None
    """C computes, G draws; None where that is not said."""
    user: str | None
    """Owner; None where the process cannot be seen from here."""
    container: str | None
    """Such as ``docker 0123456789ab``; None for one that is in none, or cannot be seen."""
    memory_mib: float | None
    """What it holds on this GPU, MiB; None where the driver does not say."""
    alive: bool | None
    """Whether it still exists; None where that cannot be told from here."""


@dataclass(frozen=True)
class MigPart:
    """A part of a GPU that MIG cut off."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    profile: str | None
    """Such as 3g.40gb."""
    uuid: str | None
    """MIG-... of the part."""
    memory_total_mib: float | None
    """Its memory, MiB."""


@dataclass(frozen=True)
class Gpu:
    """One GPU. A metric that is None has its reason in ``missing``."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    status: Status
    """The worst of its checks."""
    checks: dict[str, CheckLevel]
    """Level of each check by name; skipped where the card has nothing to check."""
    free: bool | None
    """Whether nobody uses it: no process, next to no memory held, two idle samples; None where that cannot be told."""
    busy: str | None
    """Who or what uses it."""
    processes: tuple[Process, ...]
    """Who is on it."""
    mig_parts: tuple[MigPart, ...]
    """What it is cut into."""
    utilization_samples_pct: tuple[float, ...]
    """Samples of utilization in order, %."""
    missing: dict[str, Missing]
    """Why a metric is None, by its name; also what is wrong with the reading as a whole."""
    index: int | None
    """As nvidia-smi counts; None where the source does not say it."""
    uuid: str | None
    """GPU-... of the card."""
    bus_id: str | None
    """PCI address, 0000:1b:00.0."""
    name: str | None
    """Model."""
    serial: str | None
    """Printed on the card."""
    vbios_version: str | None
    """Version of its firmware."""
    minor_number: int | None
    """Of /dev/nvidiaN; need not be the index."""
    driver_version: str | None
    """Version of the driver."""
    architecture: str | None
    """Such as Blackwell."""
    compute_capability: str | None
    """9.0"""
    memory_total_mib: float | None
    """Size of its memory, MiB."""
    memory_used_mib: float | None
    """Without what the driver reserves, since 510."""
    memory_reserved_mib: float | None
    """What the driver keeps for itself, MiB."""
    memory_free_mib: float | None
    """What is left, MiB."""
    utilization_pct: float | None
    """Share of time in which something ran, %."""
    utilization_memory_pct: float | None
    """Share of time in which its memory was read or written, %."""
    temperature_c: float | None
    """Of the chip, degrees C."""
    temperature_memory_c: float | None
    """Of its memory, degrees C."""
    tlimit_c: float | None
    """Degrees left until the limit; 0 is at the limit."""
    fan_pct: float | None
    """Intended fan speed, %; 0 is a fan that rests."""
    power_w: float | None
    """power.draw: a one-second average from Ampere on, an instant before; the average where only that is printed."""
    power_average_w: float | None
    """Average over a second, W."""
    power_instant_w: float | None
    """This instant, W."""
    power_limit_w: float | None
    """What it was set to draw at most, W."""
    power_enforced_limit_w: float | None
    """What holds in the end, W."""
    power_default_limit_w: float | None
    """As it came, W."""
    power_min_limit_w: float | None
    """Lowest limit that can be set, W."""
    power_max_limit_w: float | None
    """Highest limit that can be set, W."""
    clock_sm_mhz: float | None
    """SM clock now, MHz."""
    clock_sm_max_mhz: float | None
    """Highest SM clock, MHz."""
    clock_memory_mhz: float | None
    """Memory clock now, MHz."""
    clock_memory_max_mhz: float | None
    """Highest memory clock, MHz."""
    clock_application_mhz: float | None
    """Application clock that was set, MHz."""
    clock_application_default_mhz: float | None
    """Its default, MHz."""
    pstate: str | None
    """P0 to P15."""
    clock_reasons: int | None
    """Why clocks are not higher: bits as NVML numbers them."""
    throttle_sw_power_us: int | None
    """Held back by the power cap, microseconds since the driver was loaded."""
    throttle_sw_thermal_us: int | None
    """Held back by the driver for heat, microseconds since it was loaded."""
    throttle_hw_thermal_us: int | None
    """Held back by hardware for heat, microseconds since then."""
    throttle_power_brake_us: int | None
    """Held back by the power brake, microseconds since then."""
    throttle_sync_boost_us: int | None
    """Held back for its group, microseconds since then."""
    pcie_gen: int | None
    """Now; sinks to 1 on many idle cards."""
    pcie_gen_max: int | None
    """What the card and the slot can do together."""
    pcie_gen_gpu: int | None
    """Generation that the card's side runs at."""
    pcie_gen_gpu_max: int | None
    """What the card can do."""
    pcie_gen_host_max: int | None
    """What the slot can do."""
    pcie_width: int | None
    """Lanes now."""
    pcie_width_max: int | None
    """Lanes that card and slot can do."""
    pcie_replays: int | None
    """Replayed packets since the last reset."""
    ecc_enabled: bool | None
    """Whether ECC is on."""
    ecc_pending_enabled: bool | None
    """Whether it will be after the next reset."""
    ecc_corrected_volatile: int | None
    """Corrected errors since the driver was loaded, all memories."""
    ecc_uncorrected_volatile: int | None
    """Uncorrected errors since the driver was loaded."""
    ecc_corrected_aggregate: int | None
    """Corrected errors of the card's life."""
    ecc_uncorrected_aggregate: int | None
    """Uncorrected errors of the card's life."""
    ecc_uncorrected_volatile_dram: int | None
    """Of its DRAM, since the driver was loaded."""
    ecc_uncorrected_volatile_sram: int | None
    """Of its SRAM, since the driver was loaded."""
    ecc_uncorrected_aggregate_dram: int | None
    """Of its DRAM, of its life."""
    ecc_uncorrected_aggregate_sram: int | None
    """Of its SRAM, of its life."""
    ecc_sram_threshold_exceeded: bool | None
    """Whether SRAM errors passed what its maker accepts."""
    ecc_channel_repair_pending: bool | None
    """Whether a memory channel waits for a repair."""
    ecc_tpc_repair_pending: bool | None
    """Whether a processor cluster waits for a repair."""
    ecc_unrepairable_memory: bool | None
    """Whether some memory cannot be repaired."""
    remap_correctable: int | None
    """Rows remapped after corrected errors."""
    remap_uncorrectable: int | None
    """Rows remapped after uncorrected errors."""
    remap_pending: bool | None
    """Whether a row waits for a reset to be remapped."""
    remap_failure: bool | None
    """Whether remapping failed."""
    remap_banks_max: int | None
    """Banks with all spare rows left."""
    remap_banks_high: int | None
    """Banks with most of them left."""
    remap_banks_partial: int | None
    """Banks with some left."""
    remap_banks_low: int | None
    """Banks with few left."""
    remap_banks_none: int | None
    """Banks with none left."""
    retired_single_bit: int | None
    """Pages retired after single-bit errors; up to Turing."""
    retired_double_bit: int | None
    """Pages retired after double-bit errors."""
    retired_pending: bool | None
    """Whether pages wait for a reset to be retired."""
    recovery_action: str | None
    """What the driver asks for: None, Reset, Reboot, Drain P2P, Drain and Reset."""
    fabric_state: str | None
    """Completed, In Progress, Not Started."""
    fabric_status: str | None
    """Success or an error's name."""
    fabric_clique: str | None
    """Number of its NVLink partition."""
    fabric_cluster_uuid: str | None
    """Of the NVLink fabric."""
    fabric_health: str | None
    """Summary of the fabric."""
    mig_enabled: bool | None
    """Whether it is cut up (MIG)."""
    mig_pending_enabled: bool | None
    """Whether it will be after the next reset."""
    compute_mode: str | None
    """Default, Exclusive_Process, Prohibited."""
    persistence_enabled: bool | None
    """Whether the driver keeps its state while nobody uses it."""
    addressing_mode: str | None
    """HMM, ATS, None."""
    gsp_enabled: bool | None
    """Whether firmware on the card runs the driver."""
    gsp_version: str | None
    """Of that firmware."""
    inforom_valid: bool | None
    """Whether its own records are intact."""
    virtualization_mode: str | None
    """None, Pass-Through, VGPU, Host VGPU, Host VSGA."""
    display_active: bool | None
    """Whether a display is driven."""

    def __post_init__(self) -> None:
        """Check that no metric is missing without a reason."""
        unexplained = [one.name for one in fields(self) if one.name not in _NO_METRICS and getattr(self, one.name) is None]
        unexplained = [name for name in unexplained if name not in self.missing]
        if unexplained:
            raise ValueError("missing without a reason: %s" % ", ".join(unexplained))


_NO_METRICS = frozenset(
    {"status", "checks", "free", "busy", "processes", "mig_parts", "utilization_samples_pct", "missing"}
)


@dataclass(frozen=True)
class Asked:
    """One question to a program."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    command: str
    """What was run."""
    outcome: str
    """ended, timeout, not-found, not-started, not-asked, too-long."""
    exit_status: int | None
    """None unless it ended."""
    seconds: float
    """How long it took, seconds."""


@dataclass(frozen=True)
class Result:
    """The GPUs of a host."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    gpus: tuple[Gpu, ...]
    """Every GPU that the driver speaks of, lost ones too, in its order."""
    expected_gpus: int | None
    """How many there should be; None where nobody said."""
    usable_gpus: int
    """How many the driver reaches and no finding calls failed."""
    source: str
    """Where the metrics come from: nvml, nvidia-smi, or what was parsed; ``nothing`` where nobody answered."""
    driver_version: str | None
    """Version of the driver's libraries; None where nobody answered."""
    module_version: str | None
    """Version of the loaded kernel module; None where there is none to be seen."""
    module_open: bool | None
    """Whether it is the open one."""
    cuda_version: str | None
    """Newest CUDA API that the driver supports: not what is installed."""
    surroundings: str
    """Container, virtual machine, WSL, or a host of its own."""
    lspci_gpus: tuple[str, ...] | None
    """Bus ids of the NVIDIA GPUs that lspci lists; None where it could not be asked."""
    proc_gpus: tuple[str, ...] | None
    """Bus ids below /proc/driver/nvidia/gpus; None where that is not there."""
    kernel_log: str
    """Where the kernel log was read from, or why it was not."""
    checks: dict[str, CheckLevel]
    """Level of each check about the host as a whole."""
    notes: tuple[str, ...]
    """Lines that make no sense, fields that this driver does not know."""
    asked: tuple[Asked, ...]
    """Every question in order."""


def run(params: Params, context: Context) -> Result:
    """Ask everything that knows about the GPUs, and judge it."""
    from probes.lib.gpu.collect import collect
    from probes.lib.gpu.xid import policy

    def progress(done: float, total: float, label: str) -> None:
        context.progress(done, total, unit="steps", label=label)

    _check(params)
    overrides = policy({"ok": sorted(set(params.xid_ok)), "fail": sorted(set(params.xid_fail))})
    seen = collect(max(1.0, context.remaining() - 5.0), progress, overrides=overrides)
    return _judge(seen, params, context)


def parse(data: bytes, params: Params, context: Context) -> Result:
    """Judge a saved answer of nvidia-smi: XML (``-q -x``), csv with a header, or the text of ``-q``.

    Raises:
        ValueError: it is something else, which is named.
    """
    from probes.lib.gpu.saved import read

    _check(params)
    return _judge(read(data), params, context)


def _check(params: Params) -> None:
    from probes.lib.gpu.health import CHECKS
    from probes.lib.gpu.thresholds import Thresholds

    Thresholds(params.thresholds)
    strange = [name for name in params.without if name not in CHECKS]
    if strange:
        raise ValueError("there is no check %s; there are %s" % (strange[0], ", ".join(CHECKS)))


def _judge(seen: Seen, params: Params, context: Context) -> Result:
    from probes.lib.gpu.census import expectation
    from probes.lib.gpu.health import judge
    from probes.lib.gpu.thresholds import Thresholds

    expected = expectation(params.gpus, from_inventory=params.gpus_from_inventory)
    report = judge(seen, Thresholds(params.thresholds), expected, params.without)
    for place, judgement in enumerate(report.judgements):
        if place == _MAX_FINDINGS:
            left = report.judgements[_MAX_FINDINGS:]
            context.finding("unknown", "more-findings", "%d more findings; each GPU's checks are in the result" % len(left), value=len(left))
            break
        level: Level = judgement.level  # type: ignore[assignment]
        context.finding(level, *judgement[1:3], **dict(zip(judgement._fields[3:], judgement[3:])))  # type: ignore[arg-type]
    return _result(seen, report, params)


_MAX_FINDINGS = 900


def _result(seen: Seen, report: Report, params: Params) -> Result:
    from probes.lib.gpu.census import usable
    from probes.lib.gpu.collect import gpus_of
    from probes.lib.gpu.missing import known
    from probes.lib.gpu.surroundings import describe

    versions = [version for version in (known(reading.driver_version) for reading in seen.readings) if version is not None]
    log = seen.log
    return Result(
        gpus=tuple(_gpu(gpu, report.holders or ()) for gpu in report.gpus),
        expected_gpus=params.gpus,
        usable_gpus=sum(usable(gpu.reading) and gpu.status != "fail" for gpu in report.gpus),
        source=seen.source,
        driver_version=versions[0] if versions else None,
        module_version=seen.module.version if seen.module is not None else None,
        module_open=seen.module.open if seen.module is not None else None,
        cuda_version=seen.cuda_version,
        surroundings="saved output: what is around it is unknown" if seen.parsed else describe(seen.around),
        lspci_gpus=None if seen.devices is None else tuple(sorted(gpus_of(seen.devices))),
        proc_gpus=None if seen.proc_gpus is None else tuple(sorted(seen.proc_gpus)),
        kernel_log="not asked" if log is None else log.source or log.reason,
        checks=dict(report.checks),  # type: ignore[arg-type]
        notes=tuple(note[:300] for note in seen.notes[:50]),
        asked=tuple(Asked(said.command, said.how, said.status, round(said.seconds, 3)) for said in seen.asked),
    )


def _gpu(gpu: GpuReport, holders: tuple[Holder, ...] | list[Holder]) -> Gpu:
    from probes.lib.gpu import missing as gaps

    known = gaps.known
    reading = gpu.reading
    values: dict[str, object] = {}
    missing = {}
    for name, value in reading.metrics():
        values[name] = gaps.known(value)
        if isinstance(value, gaps.Missing):
            missing[name] = Missing(value.reason, value.text)
        elif isinstance(value, float) and not isinstance(value, bool):
            values[name] = float(value)
    if reading.damaged is not None:
        missing["reading"] = Missing("error", reading.damaged[:200])
    mine = [
        holder
        for holder in holders
        if (holder.uuid is not None and holder.uuid == known(reading.uuid))
        or (holder.bus_id is not None and holder.bus_id == known(reading.bus_id))
    ]
    use = gpu.use
    return Gpu(
        status=gpu.status,  # type: ignore[arg-type]
        checks=dict(gpu.checks),  # type: ignore[arg-type]
        free=gpu.free,
        busy=use.busy if use is not None and gpu.free is False else None,
        processes=tuple(
            Process(one.pid, one.name[:300], one.kind, one.user, one.container, known(one.memory), one.alive) for one in mine
        ),
        mig_parts=tuple(
            MigPart(known(part.profile), known(part.uuid), known(part.memory_total_mib)) for part in reading.mig_devices
        ),
        utilization_samples_pct=tuple(sample for sample in (use.utilization_pct if use is not None else ()) if sample is not None),
        missing=missing,
        **values,  # type: ignore[arg-type]
    )
