"""Which field of csv, XML and ``-q`` holds which metric, and how it is read.

One table for all of them: elements were renamed within one version of the schema, so several places are named for a
value and the first that occurs is taken, whatever version the output claims.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

from .busid import bus_id
from .missing import Missing, flag, garbage, hexmask, integer, missing, number, word

if TYPE_CHECKING:
    from typing import Callable

    Reader = Callable[[str, bool], object]
    """Takes the text, and whether a number may stand without its unit."""

BARE, WITH_UNIT = True, False
"""Whether a number may stand without its unit."""
Path = Union[str, "tuple[str, ...]"]
"""``a/b/c`` below the GPU; several in a tuple are added up. ``**`` stands for any blocks between."""

_UUID = re.compile(r"(?:GPU|MIG)-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_VERSION = re.compile(r"[0-9]{1,4}(?:\.[0-9]{1,4}){1,3}")
_PSTATE = re.compile(r"P(?:[0-9]|1[0-5])")
_BOARD = re.compile(r"[0-9A-Fa-f]{1,4}(?:\.[0-9A-Fa-f]{1,4}){2,7}")
_WIDTH = re.compile(r"([0-9]{1,2})x?")
_WIDTHS = frozenset({1, 2, 4, 8, 12, 16, 32})
_NO_COUNT = frozenset({0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF})
"""All bits set: what a card that is gone, or a field that is not there, reads as."""
_RECOVERY = ("None", "Reset", "Reboot", "Drain P2P", "Drain and Reset", "Recover IMEX Domain")
_COMPUTE = ("Default", "Exclusive_Process", "Exclusive_Thread", "Prohibited", "Exclusive Process")
_FABRIC_STATES = ("Completed", "In Progress", "Not Started")
_VIRTUALIZATION = ("None", "Pass-Through", "VGPU", "Host VGPU", "Host VSGA", "vGPU SR-IOV")
_CLUSTER = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_CLIQUE = re.compile(r"[0-9]{1,10}")
_ADDRESSING = ("None", "HMM", "ATS")


def uuid(text: str, _bare: bool = True) -> str | Missing:
    """Read a whole UUID; a part of one is an error."""
    return _shaped(text, _UUID)


def version(text: str, _bare: bool = True) -> str | Missing:
    """Read ``590.48.01``; a note in brackets behind it is left out."""
    return _shaped(re.sub(r"\s+\[[^\]]*\]$", "", text.strip()) if text.strip()[:1].isdigit() else text, _VERSION)


def _shaped(text: str, shape: re.Pattern[str]) -> str | Missing:
    reason = missing(text)
    if reason is not None:
        return reason
    return text.strip() if shape.fullmatch(text.strip()) else garbage(text)


def _quantity(unit: str, low: float | None, high: float) -> Reader:
    return lambda text, bare: number(text, unit, bare=bare, low=low, high=high)


def _count(text: str, _bare: bool = True) -> int | Missing:
    value = integer(text)
    return garbage(text) if value in _NO_COUNT else value


def _whole(unit: str, high: int) -> Reader:
    def read(text: str, bare: bool) -> int | Missing:
        stripped = text.strip()
        if stripped.endswith(unit) and stripped[: -len(unit)].rstrip().isdigit():
            stripped = stripped[: -len(unit)].rstrip()
        elif not bare and missing(text) is None:
            return garbage(text)
        value = integer(stripped, high=high)
        return garbage(text) if value in _NO_COUNT or (isinstance(value, Missing) and value.reason == "error") else value

    return read


def _small(text: str, _bare: bool = True) -> int | Missing:
    value = integer(text, high=9)
    return garbage(text) if value == 0 else value


def _width(text: str, _bare: bool = True) -> int | Missing:
    reason = missing(text)
    if reason is not None:
        return reason
    match = _WIDTH.fullmatch(text.strip())
    return int(match.group(1)) if match and int(match.group(1)) in _WIDTHS else garbage(text)


def _one_of(words: tuple[str, ...]) -> Reader:
    spelt = {each.lower(): each for each in words}

    def read(text: str, _bare: bool) -> str | Missing:
        known = spelt.get(text.strip().lower())
        return known if known is not None else missing(text) or garbage(text)

    return read


def _valid(text: str, _bare: bool = True) -> bool | Missing:
    states = {"valid": True, "invalid": False, "corrupt": False, "corrupted": False}
    state = states.get(text.strip().lower())
    return state if state is not None else missing(text) or garbage(text)


def _any(reader: Callable[[str], object]) -> Reader:
    return lambda text, _bare: reader(text)


_FLAG, _WORD = _any(flag), _any(word)
_MIB, _PCT, _FAN = _quantity("MiB", 0, 1e8), _quantity("%", 0, 100), _quantity("%", 0, 250)
_WATT, _MHZ, _US = _quantity("W", 0, 20000), _quantity("MHz", 0, 20000), _whole("us", 1 << 63)
_CELSIUS, _MARGIN = _quantity("C", -60, 250), _quantity("C", -250, 250)
_BANKS = _whole("bank(s)", 1 << 31)


@dataclass(frozen=True)
class Metric:
    """One attribute of :class:`.smi_reading.GpuReading`, and where it is found."""

    name: str
    read: Reader
    csv: tuple[str, ...] = ()
    """Fields of ``--query-gpu``, aliases included; the first is asked for."""
    unit: str = ""
    """As csv prints it."""
    tree: tuple[Path, ...] = ()
    """In XML and in ``-q``, the newest first."""


_LINK, _Q_LINK = "pci/pci_gpu_link_info", "PCI/GPU Link Info"
_POWER, _Q_POWER = "gpu_power_readings", "GPU Power Readings"
_OLD_POWER, _Q_OLD_POWER = "power_readings", "Power Readings"
_COUNTERS, _Q_COUNTERS = "clocks_event_reasons_counters", "Clocks Event Reasons Counters"
_ROWS, _Q_ROWS = "remapped_rows", "Remapped Rows"
_HISTOGRAM, _Q_HISTOGRAM = _ROWS + "/row_remapper_histogram", _Q_ROWS + "/Bank Remap Availability Histogram"


def _power(new: str, old: str, q_new: str, q_old: str) -> tuple[Path, ...]:
    return (
        "%s/%s" % (_POWER, new), "%s/**/%s" % (_POWER, new), "%s/%s" % (_OLD_POWER, old),
        "%s/%s" % (_Q_POWER, q_new), "%s/**/%s" % (_Q_POWER, q_new), "%s/%s" % (_Q_OLD_POWER, q_old),
    )  # fmt: skip


def _counter(field: str, element: str, label: str) -> Metric:
    names = ("clocks_event_reasons_counters." + field, "clocks_throttle_reasons_counters." + field)
    attribute = {
        "sw_power_cap": "throttle_sw_power_us",
        "sw_thermal_slowdown": "throttle_sw_thermal_us",
        "hw_thermal_slowdown": "throttle_hw_thermal_us",
        "hw_power_brake_slowdown": "throttle_power_brake_us",
        "sync_boost": "throttle_sync_boost_us",
    }[field]
    return Metric(attribute, _US, names, "us", ("%s/%s_%s" % (_COUNTERS, _COUNTERS, element), _Q_COUNTERS + "/" + label))


def _ecc(kind: str, when: str) -> Metric:
    """All memories together: the driver's own total where it prints one, else the sum of all its parts."""
    one, label = ("single_bit", "Single Bit") if kind == "corrected" else ("double_bit", "Double Bit")
    block, q_block = "ecc_errors/" + when, "ECC Errors/" + when.capitalize()
    tree: tuple[Path, ...] = (
        "%s/%s/total" % (block, one),
        "%s/%s/Total" % (q_block, label),
        *(tuple("%s/%s" % (base, part) for part in parts) for base, parts in (
            (block, _SUMS[kind][0]), (block, _SUMS[kind][1]), (q_block, _SUMS[kind][2]), (q_block, _SUMS[kind][3]),
        )),
    )  # fmt: skip
    return Metric("ecc_%s_%s" % (kind, when), _any(_count), ("ecc.errors.%s.%s.total" % (kind, when),), "", tree)


_SUMS = {
    "corrected": (
        ("sram_correctable", "dram_correctable"),
        ("sram_correctable", "dram_correctable"),
        ("SRAM Correctable", "DRAM Correctable"),
        ("SRAM Correctable", "DRAM Correctable"),
    ),
    "uncorrected": (
        ("sram_uncorrectable_parity", "sram_uncorrectable_secded", "dram_uncorrectable"),
        ("sram_uncorrectable", "dram_uncorrectable"),
        ("SRAM Uncorrectable Parity", "SRAM Uncorrectable SEC-DED", "DRAM Uncorrectable"),
        ("SRAM Uncorrectable", "DRAM Uncorrectable"),
    ),
}


def _ecc_part(when: str, memory: str) -> Metric:
    block, q_block = "ecc_errors/" + when, "ECC Errors/" + when.capitalize()
    upper = memory.upper()
    tree: tuple[Path, ...] = (
        "%s/%s_uncorrectable" % (block, memory),
        "%s/%s Uncorrectable" % (q_block, upper),
    )
    names: tuple[str, ...] = ("ecc.errors.uncorrected.%s.%s" % (when, memory),)
    if memory == "sram":
        tree += (
            ("%s/sram_uncorrectable_parity" % block, "%s/sram_uncorrectable_secded" % block),
            ("%s/SRAM Uncorrectable Parity" % q_block, "%s/SRAM Uncorrectable SEC-DED" % q_block),
        )
    else:
        names += ("ecc.errors.uncorrected.%s.device_memory" % when,)
        tree += ("%s/double_bit/device_memory" % block, "%s/Double Bit/Device Memory" % q_block)
    return Metric("ecc_uncorrected_%s_%s" % (when, memory), _any(_count), names, "", tree)


METRICS: tuple[Metric, ...] = (
    Metric("index", _any(_count), ("index",)),
    Metric("uuid", uuid, ("uuid", "gpu_uuid"), "", ("uuid", "GPU UUID")),
    Metric("bus_id", _any(bus_id), ("pci.bus_id", "gpu_bus_id"), "", ("pci/pci_bus_id", "PCI/Bus Id")),
    Metric("name", _WORD, ("name", "gpu_name"), "", ("product_name", "Product Name")),
    Metric("serial", _WORD, ("serial", "gpu_serial"), "", ("serial", "Serial Number")),
    Metric(
        "vbios_version", lambda text, _bare: _shaped(text, _BOARD), ("vbios_version",), "",
        ("vbios_version", "VBIOS Version"),
    ),
    Metric("minor_number", _any(_count), (), "", ("minor_number", "Minor Number")),
    Metric("driver_version", version, ("driver_version", "kmd_version"), "", ()),
    Metric("architecture", _WORD, (), "", ("product_architecture", "Product Architecture")),
    Metric("compute_capability", version, ("compute_cap",), "", ()),
    Metric("memory_total_mib", _MIB, ("memory.total",), "MiB", ("fb_memory_usage/total", "FB Memory Usage/Total")),
    Metric("memory_used_mib", _MIB, ("memory.used",), "MiB", ("fb_memory_usage/used", "FB Memory Usage/Used")),
    Metric(
        "memory_reserved_mib", _MIB, ("memory.reserved",), "MiB", ("fb_memory_usage/reserved", "FB Memory Usage/Reserved")
    ),
    Metric("memory_free_mib", _MIB, ("memory.free",), "MiB", ("fb_memory_usage/free", "FB Memory Usage/Free")),
    Metric(
        "utilization_pct", _PCT, ("utilization.gpu",), "%", ("utilization/gpu_util", "Utilization/GPU", "Utilization/Gpu")
    ),
    Metric(
        "utilization_memory_pct", _PCT, ("utilization.memory",), "%", ("utilization/memory_util", "Utilization/Memory")
    ),
    Metric("temperature_c", _CELSIUS, ("temperature.gpu",), "", ("temperature/gpu_temp", "Temperature/GPU Current Temp")),
    Metric(
        "temperature_memory_c", _CELSIUS, ("temperature.memory",), "",
        ("temperature/memory_temp", "Temperature/Memory Current Temp"),
    ),
    Metric(
        "tlimit_c", _MARGIN, ("temperature.gpu.tlimit",), "",
        ("temperature/gpu_temp_tlimit", "Temperature/GPU T.Limit Temp", "Temperature/GPU Current T.Limit Temp"),
    ),
    Metric("fan_pct", _FAN, ("fan.speed",), "%", ("fan_speed", "Fan Speed")),
    Metric(
        "power_w", _WATT, ("power.draw",), "W",
        (
            _POWER + "/power_draw", _POWER + "/average_power_draw", _OLD_POWER + "/power_draw", _Q_POWER + "/Power Draw",
            _Q_POWER + "/Average Power Draw", _Q_OLD_POWER + "/Power Draw",
            # Before Ampere there is no average, and power.draw is this.
            _POWER + "/instant_power_draw", _Q_POWER + "/Instantaneous Power Draw",
        ),
    ),
    Metric(
        "power_average_w", _WATT, ("power.draw.average",), "W",
        (_POWER + "/average_power_draw", _Q_POWER + "/Average Power Draw"),
    ),
    Metric(
        "power_instant_w", _WATT, ("power.draw.instant",), "W",
        (_POWER + "/instant_power_draw", _Q_POWER + "/Instantaneous Power Draw"),
    ),
    Metric(
        "power_limit_w", _WATT, ("power.limit",), "W",
        _power("requested_power_limit", "power_limit", "Requested Power Limit", "Power Limit"),
    ),
    Metric(
        "power_enforced_limit_w", _WATT, ("enforced.power.limit",), "W",
        _power("current_power_limit", "enforced_power_limit", "Current Power Limit", "Enforced Power Limit"),
    ),
    Metric(
        "power_default_limit_w", _WATT, ("power.default_limit",), "W",
        _power("default_power_limit", "default_power_limit", "Default Power Limit", "Default Power Limit"),
    ),
    Metric(
        "power_min_limit_w", _WATT, ("power.min_limit",), "W",
        _power("min_power_limit", "min_power_limit", "Min Power Limit", "Min Power Limit"),
    ),
    Metric(
        "power_max_limit_w", _WATT, ("power.max_limit",), "W",
        _power("max_power_limit", "max_power_limit", "Max Power Limit", "Max Power Limit"),
    ),
    Metric("clock_sm_mhz", _MHZ, ("clocks.current.sm", "clocks.sm"), "MHz", ("clocks/sm_clock", "Clocks/SM")),
    Metric("clock_sm_max_mhz", _MHZ, ("clocks.max.sm",), "MHz", ("max_clocks/sm_clock", "Max Clocks/SM")),
    Metric(
        "clock_memory_mhz", _MHZ, ("clocks.current.memory", "clocks.mem", "clocks.memory"), "MHz",
        ("clocks/mem_clock", "Clocks/Memory"),
    ),
    Metric(
        "clock_memory_max_mhz", _MHZ, ("clocks.max.memory", "clocks.max.mem"), "MHz",
        ("max_clocks/mem_clock", "Max Clocks/Memory"),
    ),
    Metric(
        "clock_application_mhz", _MHZ, ("clocks.applications.graphics", "clocks.applications.gr"), "MHz",
        ("applications_clocks/graphics_clock", "Applications Clocks/Graphics"),
    ),
    Metric(
        "clock_application_default_mhz", _MHZ,
        ("clocks.default_applications.graphics", "clocks.default_applications.gr"), "MHz",
        ("default_applications_clocks/graphics_clock", "Default Applications Clocks/Graphics"),
    ),
    Metric(
        "pstate", lambda text, _bare: _shaped(text, _PSTATE), ("pstate",), "", ("performance_state", "Performance State")
    ),
    Metric("clock_reasons", _any(hexmask), ("clocks_event_reasons.active", "clocks_throttle_reasons.active")),
    _counter("sw_power_cap", "sw_power_cap", "SW Power Capping"),
    _counter("sw_thermal_slowdown", "sw_therm_slowdown", "SW Thermal Slowdown"),
    _counter("hw_thermal_slowdown", "hw_therm_slowdown", "HW Thermal Slowdown"),
    _counter("hw_power_brake_slowdown", "hw_power_brake", "HW Power Braking"),
    _counter("sync_boost", "sync_boost", "Sync Boost"),
    Metric(
        "pcie_gen", _any(_small), ("pcie.link.gen.current",), "",
        (_LINK + "/pcie_gen/current_link_gen", _Q_LINK + "/PCIe Generation/Current"),
    ),
    Metric(
        "pcie_gen_max", _any(_small), ("pcie.link.gen.max",), "",
        (_LINK + "/pcie_gen/max_link_gen", _Q_LINK + "/PCIe Generation/Max"),
    ),
    Metric(
        "pcie_gen_gpu", _any(_small), ("pcie.link.gen.gpucurrent",), "",
        (_LINK + "/pcie_gen/device_current_link_gen", _Q_LINK + "/PCIe Generation/Device Current"),
    ),
    Metric(
        "pcie_gen_gpu_max", _any(_small), ("pcie.link.gen.gpumax",), "",
        (_LINK + "/pcie_gen/max_device_link_gen", _Q_LINK + "/PCIe Generation/Device Max"),
    ),
    Metric(
        "pcie_gen_host_max", _any(_small), ("pcie.link.gen.hostmax",), "",
        (_LINK + "/pcie_gen/max_host_link_gen", _Q_LINK + "/PCIe Generation/Host Max"),
    ),
    Metric(
        "pcie_width", _any(_width), ("pcie.link.width.current",), "",
        (_LINK + "/link_widths/current_link_width", _Q_LINK + "/Link Width/Current"),
    ),
    Metric(
        "pcie_width_max", _any(_width), ("pcie.link.width.max",), "",
        (_LINK + "/link_widths/max_link_width", _Q_LINK + "/Link Width/Max"),
    ),
    Metric("pcie_replays", _any(_count), (), "", ("pci/replay_counter", "PCI/Replays Since Reset", "PCI/Replays since reset")),
    Metric("ecc_enabled", _FLAG, ("ecc.mode.current",), "", ("ecc_mode/current_ecc", "ECC Mode/Current", "Ecc Mode/Current")),
    Metric(
        "ecc_pending_enabled", _FLAG, ("ecc.mode.pending",), "",
        ("ecc_mode/pending_ecc", "ECC Mode/Pending", "Ecc Mode/Pending"),
    ),
    _ecc("corrected", "volatile"),
    _ecc("uncorrected", "volatile"),
    _ecc("corrected", "aggregate"),
    _ecc("uncorrected", "aggregate"),
    _ecc_part("volatile", "dram"),
    _ecc_part("volatile", "sram"),
    _ecc_part("aggregate", "dram"),
    _ecc_part("aggregate", "sram"),
    Metric(
        "ecc_sram_threshold_exceeded", _FLAG, ("ecc.errors.uncorrected.aggregate.sram.thresholdExceeded",), "",
        ("ecc_errors/aggregate/sram_threshold_exceeded", "ECC Errors/Aggregate/SRAM Threshold Exceeded"),
    ),
    Metric(
        "ecc_channel_repair_pending", _FLAG, (), "",
        ("ecc_errors/channel_repair_pending", "ECC Errors/Channel Repair Pending"),
    ),
    Metric("ecc_tpc_repair_pending", _FLAG, (), "", ("ecc_errors/tpc_repair_pending", "ECC Errors/TPC Repair Pending")),
    Metric(
        "ecc_unrepairable_memory", _FLAG, (), "", ("ecc_errors/unrepairable_memory", "ECC Errors/Unrepairable Memory")
    ),
    Metric(
        "remap_correctable", _any(_count), ("remapped_rows.correctable", "remapped_rows.sbe"), "",
        (_ROWS + "/remapped_row_corr", _Q_ROWS + "/Correctable Error"),
    ),
    Metric(
        "remap_uncorrectable", _any(_count), ("remapped_rows.uncorrectable", "remapped_rows.dbe"), "",
        (_ROWS + "/remapped_row_unc", _Q_ROWS + "/Uncorrectable Error"),
    ),
    Metric(
        "remap_pending", _FLAG, ("remapped_rows.pending",), "", (_ROWS + "/remapped_row_pending", _Q_ROWS + "/Pending")
    ),
    Metric(
        "remap_failure", _FLAG, ("remapped_rows.failure",), "",
        (_ROWS + "/remapped_row_failure", _Q_ROWS + "/Remapping Failure Occurred"),
    ),
    *(
        Metric(
            "remap_banks_" + part, _BANKS, ("remapped_rows.histogram." + part,), "",
            ("%s/row_remapper_histogram_%s" % (_HISTOGRAM, part), "%s/%s" % (_Q_HISTOGRAM, part.capitalize())),
        )
        for part in ("max", "high", "partial", "low", "none")
    ),
    Metric(
        "retired_single_bit", _any(_count),
        ("retired_pages.single_bit_ecc.count", "retired_pages.sbe"), "",
        ("retired_pages/multiple_single_bit_retirement/retired_count", "Retired Pages/Single Bit ECC"),
    ),
    Metric(
        "retired_double_bit", _any(_count), ("retired_pages.double_bit.count", "retired_pages.dbe"), "",
        ("retired_pages/double_bit_retirement/retired_count", "Retired Pages/Double Bit ECC"),
    ),
    Metric(
        "retired_pending", _FLAG, ("retired_pages.pending",), "",
        (
            "retired_pages/pending_retirement", "retired_pages/pending_blacklist", "Retired Pages/Pending Page Blacklist",
            "Retired Pages/Pending",
        ),
    ),
    Metric(
        "recovery_action", _one_of(_RECOVERY), ("gpu_recovery_action",), "", ("gpu_recovery_action", "GPU Recovery Action")
    ),
    Metric("fabric_state", _one_of(_FABRIC_STATES), ("fabric.state",), "", ("fabric/state", "Fabric/State")),
    Metric("fabric_status", _WORD, ("fabric.status",), "", ("fabric/status", "Fabric/Status")),
    Metric("fabric_clique", _any(lambda text: _shaped(text, _CLIQUE)), ("fabric.cliqueId",), "", ("fabric/cliqueId", "Fabric/CliqueId")),
    Metric(
        "fabric_cluster_uuid", _any(lambda text: _shaped(text, _CLUSTER)), ("fabric.clusterUuid",), "",
        ("fabric/clusterUuid", "Fabric/ClusterUUID"),
    ),
    Metric("fabric_health", _WORD, ("fabric.health.summary",), "", ("fabric/health/summary", "Fabric/Health/Summary")),
    Metric("mig_enabled", _FLAG, ("mig.mode.current",), "", ("mig_mode/current_mig", "MIG Mode/Current")),
    Metric("mig_pending_enabled", _FLAG, ("mig.mode.pending",), "", ("mig_mode/pending_mig", "MIG Mode/Pending")),
    Metric("compute_mode", _one_of(_COMPUTE), ("compute_mode",), "", ("compute_mode", "Compute Mode")),
    Metric("persistence_enabled", _FLAG, ("persistence_mode",), "", ("persistence_mode", "Persistence Mode")),
    Metric("addressing_mode", _one_of(_ADDRESSING), ("addressing_mode",), "", ("addressing_mode", "Addressing Mode")),
    Metric("gsp_enabled", _FLAG, ("gsp.mode.current",), "", ()),
    Metric("gsp_version", version, (), "", ("gsp_firmware_version", "GSP Firmware Version")),
    Metric("inforom_valid", _any(_valid), ("inforom.checksum_validation",), "", ()),
    Metric(
        "virtualization_mode", _one_of(_VIRTUALIZATION), (), "",
        ("gpu_virtualization_mode/virtualization_mode", "GPU Virtualization Mode/Virtualization Mode"),
    ),
    Metric("display_active", _FLAG, ("display_active",), "", ("display_active", "Display Active")),
)  # fmt: skip

BY_FIELD: dict[str, Metric] = {name: metric for metric in METRICS for name in metric.csv}
"""By every name that ``--query-gpu`` has for it."""
