"""What is known about one GPU, filled alike from csv, XML, ``-q`` text and NVML.

Every value is there or is a :class:`Missing` with its reason; nothing is ever 0 or False because nobody said it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Union

from .missing import NOT_REPORTED, Missing

if TYPE_CHECKING:
    from typing import Iterator

Number = Union[float, Missing]
Whole = Union[int, Missing]
Flag = Union[bool, Missing]
Word = Union[str, Missing]

REASON_BITS = {
    "gpu_idle": 0x1, "applications_clocks_setting": 0x2, "sw_power_cap": 0x4, "hw_slowdown": 0x8, "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20, "hw_thermal_slowdown": 0x40, "hw_power_brake_slowdown": 0x80,
    "display_clocks_setting": 0x100,
}  # fmt: skip
"""Bits of :attr:`GpuReading.clock_reasons`; hw_slowdown is the umbrella of hardware reasons."""


@dataclass
class MigDevice:
    """A part of a GPU that MIG cut off."""

    index: Whole = NOT_REPORTED
    gpu_instance: Whole = NOT_REPORTED
    compute_instance: Whole = NOT_REPORTED
    uuid: Word = NOT_REPORTED
    profile: Word = NOT_REPORTED
    """As ``-L`` names it: 3g.40gb."""
    memory_total_mib: Number = NOT_REPORTED
    memory_used_mib: Number = NOT_REPORTED


@dataclass
class SmiProcess:
    """A process that nvidia-smi lists on a GPU."""

    pid: Whole
    name: Word
    memory_mib: Number
    kind: Word = NOT_REPORTED
    """C computes, G draws, C+G, M+C under MPS."""
    uuid: Word = NOT_REPORTED
    """Of its GPU; of the parent under MIG."""
    bus_id: Word = NOT_REPORTED
    gpu_instance: Whole = NOT_REPORTED


@dataclass
class GpuReading:
    """One GPU at one moment."""

    # Who it is.
    index: Whole = NOT_REPORTED
    """As nvidia-smi counts; XML and ``-q`` do not say it."""
    uuid: Word = NOT_REPORTED
    bus_id: Word = NOT_REPORTED
    """Canonical: 0000:1b:00.0."""
    name: Word = NOT_REPORTED
    serial: Word = NOT_REPORTED
    vbios_version: Word = NOT_REPORTED
    minor_number: Whole = NOT_REPORTED
    """Of /dev/nvidiaN; need not be the index."""
    driver_version: Word = NOT_REPORTED
    architecture: Word = NOT_REPORTED
    compute_capability: Word = NOT_REPORTED
    """9.0"""

    # Memory.
    memory_total_mib: Number = NOT_REPORTED
    memory_used_mib: Number = NOT_REPORTED
    """Without what the driver reserves, since 510."""
    memory_reserved_mib: Number = NOT_REPORTED
    memory_free_mib: Number = NOT_REPORTED

    # Load, heat, power.
    utilization_pct: Number = NOT_REPORTED
    utilization_memory_pct: Number = NOT_REPORTED
    temperature_c: Number = NOT_REPORTED
    temperature_memory_c: Number = NOT_REPORTED
    tlimit_c: Number = NOT_REPORTED
    """Degrees left until the limit; 0 is at the limit."""
    fan_pct: Number = NOT_REPORTED
    power_w: Number = NOT_REPORTED
    """power.draw: a one-second average from Ampere on, an instant before; the average where only that is printed."""
    power_average_w: Number = NOT_REPORTED
    power_instant_w: Number = NOT_REPORTED
    power_limit_w: Number = NOT_REPORTED
    power_enforced_limit_w: Number = NOT_REPORTED
    power_default_limit_w: Number = NOT_REPORTED
    power_min_limit_w: Number = NOT_REPORTED
    power_max_limit_w: Number = NOT_REPORTED

    # Clocks.
    clock_sm_mhz: Number = NOT_REPORTED
    clock_sm_max_mhz: Number = NOT_REPORTED
    clock_memory_mhz: Number = NOT_REPORTED
    clock_memory_max_mhz: Number = NOT_REPORTED
    clock_application_mhz: Number = NOT_REPORTED
    clock_application_default_mhz: Number = NOT_REPORTED
    pstate: Word = NOT_REPORTED
    """P0 to P15."""
    clock_reasons: Whole = NOT_REPORTED
    """Why clocks are not higher, bits of :data:`REASON_BITS` and others that are not known."""
    throttle_sw_power_us: Whole = NOT_REPORTED
    """This and the next four since the driver was loaded: only a difference says anything."""
    throttle_sw_thermal_us: Whole = NOT_REPORTED
    throttle_hw_thermal_us: Whole = NOT_REPORTED
    throttle_power_brake_us: Whole = NOT_REPORTED
    throttle_sync_boost_us: Whole = NOT_REPORTED

    # PCIe.
    pcie_gen: Whole = NOT_REPORTED
    """Now; sinks to 1 on many idle cards."""
    pcie_gen_max: Whole = NOT_REPORTED
    """What the card and the slot can do together."""
    pcie_gen_gpu: Whole = NOT_REPORTED
    pcie_gen_gpu_max: Whole = NOT_REPORTED
    pcie_gen_host_max: Whole = NOT_REPORTED
    pcie_width: Whole = NOT_REPORTED
    pcie_width_max: Whole = NOT_REPORTED
    pcie_replays: Whole = NOT_REPORTED

    # Memory errors.
    ecc_enabled: Flag = NOT_REPORTED
    ecc_pending_enabled: Flag = NOT_REPORTED
    ecc_corrected_volatile: Whole = NOT_REPORTED
    """Since the driver was loaded, of all memories."""
    ecc_uncorrected_volatile: Whole = NOT_REPORTED
    ecc_corrected_aggregate: Whole = NOT_REPORTED
    """Of the card's life."""
    ecc_uncorrected_aggregate: Whole = NOT_REPORTED
    ecc_uncorrected_volatile_dram: Whole = NOT_REPORTED
    ecc_uncorrected_volatile_sram: Whole = NOT_REPORTED
    ecc_uncorrected_aggregate_dram: Whole = NOT_REPORTED
    ecc_uncorrected_aggregate_sram: Whole = NOT_REPORTED
    ecc_sram_threshold_exceeded: Flag = NOT_REPORTED
    ecc_channel_repair_pending: Flag = NOT_REPORTED
    """This and the next two: only XML and ``-q``."""
    ecc_tpc_repair_pending: Flag = NOT_REPORTED
    ecc_unrepairable_memory: Flag = NOT_REPORTED
    remap_correctable: Whole = NOT_REPORTED
    remap_uncorrectable: Whole = NOT_REPORTED
    remap_pending: Flag = NOT_REPORTED
    remap_failure: Flag = NOT_REPORTED
    remap_banks_max: Whole = NOT_REPORTED
    """Banks with all spare rows left; then fewer and fewer, to none."""
    remap_banks_high: Whole = NOT_REPORTED
    remap_banks_partial: Whole = NOT_REPORTED
    remap_banks_low: Whole = NOT_REPORTED
    remap_banks_none: Whole = NOT_REPORTED
    retired_single_bit: Whole = NOT_REPORTED
    """Pages; only cards up to Turing retire pages."""
    retired_double_bit: Whole = NOT_REPORTED
    retired_pending: Flag = NOT_REPORTED

    # State.
    recovery_action: Word = NOT_REPORTED
    """``None`` (nothing to do), ``Reset``, ``Reboot``, ``Drain P2P``, ``Drain and Reset``."""
    fabric_state: Word = NOT_REPORTED
    """Completed, In Progress, Not Started."""
    fabric_status: Word = NOT_REPORTED
    """Success or an error's name."""
    fabric_clique: Word = NOT_REPORTED
    fabric_cluster_uuid: Word = NOT_REPORTED
    fabric_health: Word = NOT_REPORTED
    mig_enabled: Flag = NOT_REPORTED
    mig_pending_enabled: Flag = NOT_REPORTED
    compute_mode: Word = NOT_REPORTED
    persistence_enabled: Flag = NOT_REPORTED
    addressing_mode: Word = NOT_REPORTED
    gsp_enabled: Flag = NOT_REPORTED
    gsp_version: Word = NOT_REPORTED
    inforom_valid: Flag = NOT_REPORTED
    virtualization_mode: Word = NOT_REPORTED
    """None, Pass-Through, VGPU, Host VGPU, Host VSGA."""
    display_active: Flag = NOT_REPORTED

    # What is not a metric.
    source: str = ""
    """csv, xml, q, nvml."""
    position: int = 0
    """Where it stands in the output; not its index."""
    damaged: str | None = None
    """Why its line or block could not be trusted; its metrics are missing then."""
    mig_devices: list[MigDevice] = field(default_factory=list)
    processes: list[SmiProcess] = field(default_factory=list)

    def metrics(self) -> Iterator[tuple[str, object]]:
        """Yield (name, value or Missing) of everything that was read."""
        for name in _metric_names():
            yield name, getattr(self, name)

    def fill(self, other: GpuReading) -> None:
        """Take from another reading of this GPU what this one does not report; a stated reason is kept."""
        for name, value in other.metrics():
            mine = getattr(self, name)
            if isinstance(mine, Missing) and mine.reason == "not-reported":
                setattr(self, name, value)
        self.mig_devices = self.mig_devices or list(other.mig_devices)
        self.processes = self.processes or list(other.processes)

    def describe(self) -> str:
        """Name it in a finding: ``gpu 3 0000:5d:00.0 GPU-...``."""
        known = [str(part) for part in (self.bus_id, self.uuid) if not isinstance(part, Missing)]
        number = "?" if isinstance(self.index, Missing) else str(self.index)
        return " ".join(["gpu " + number, *known])


_NOT_METRICS = frozenset({"source", "position", "damaged", "mig_devices", "processes"})


@lru_cache(maxsize=1)
def _metric_names() -> tuple[str, ...]:
    return tuple(one.name for one in fields(GpuReading) if one.name not in _NOT_METRICS)


@dataclass
class Trouble:
    """Words in which a tool said what is wrong."""

    code: str
    """As in :data:`.smi_errors.ERRORS`."""
    text: str
    """The line."""
    meaning: str
    action: str
    level: str
    """fail, degraded or unknown."""
    scope: str
    """gpu, host or query: whom it is about."""
    bus_id: str | None = None
    """Of the GPU that it names."""


@dataclass
class Answer:
    """What one output of nvidia-smi says."""

    kind: str
    """As :func:`.smi_identify.identify` names it."""
    readings: list[GpuReading] = field(default_factory=list)
    """In the order of the output; one for every GPU that it speaks of, damaged ones too."""
    troubles: list[Trouble] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Lines that make no sense, and other reasons for doubt."""
    processes: list[SmiProcess] = field(default_factory=list)
    driver_version: Word = NOT_REPORTED
    cuda_version: Word = NOT_REPORTED
    """Newest CUDA API that the driver supports: not what is installed."""
    attached_gpus: Whole = NOT_REPORTED
    """How many the tool says that there are."""
    complete: bool = True
    """Whether it ends where it should."""
