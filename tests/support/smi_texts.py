"""Writes what nvidia-smi prints about made-up GPUs, in each of its layouts. Nothing in it was copied from a driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from probes.lib.gpu.smi_csv import QUERY
from probes.lib.gpu.smi_fields import BY_FIELD

_SPECIAL = {
    "index": "0", "uuid": "", "pci.bus_id": "", "name": "Test GPU 96GB", "serial": "1320000000001",
    "vbios_version": "98.02.81.00.07", "driver_version": "595.58.03", "compute_cap": "12.0",
    "memory.total": "97887 MiB", "memory.used": "1234 MiB", "memory.reserved": "636 MiB", "memory.free": "96017 MiB",
    "utilization.gpu": "37 %", "utilization.memory": "12 %", "temperature.gpu": "41", "temperature.memory": "47",
    "temperature.gpu.tlimit": "43", "fan.speed": "30 %", "power.draw": "312.55 W", "power.draw.average": "312.55 W",
    "power.draw.instant": "320.10 W", "power.limit": "600.00 W", "enforced.power.limit": "590.00 W",
    "power.default_limit": "610.00 W", "power.min_limit": "150.00 W", "power.max_limit": "625.00 W",
    "clocks.current.sm": "2430 MHz", "clocks.max.sm": "2617 MHz", "clocks.current.memory": "12481 MHz",
    "clocks.max.memory": "14001 MHz", "clocks.applications.graphics": "2300 MHz",
    "clocks.default_applications.graphics": "2280 MHz", "pstate": "P1",
    "clocks_event_reasons.active": "0x0000000000000004", "pcie.link.gen.current": "4", "pcie.link.gen.max": "5",
    "pcie.link.gen.gpucurrent": "3", "pcie.link.gen.gpumax": "6", "pcie.link.gen.hostmax": "2",
    "pcie.link.width.current": "8", "pcie.link.width.max": "16", "ecc.mode.current": "Enabled",
    "ecc.mode.pending": "Disabled", "ecc.errors.corrected.volatile.total": "11",
    "ecc.errors.uncorrected.volatile.total": "12", "ecc.errors.corrected.aggregate.total": "13",
    "ecc.errors.uncorrected.aggregate.total": "14", "ecc.errors.uncorrected.volatile.dram": "5",
    "ecc.errors.uncorrected.volatile.sram": "7", "ecc.errors.uncorrected.aggregate.dram": "6",
    "ecc.errors.uncorrected.aggregate.sram": "8", "ecc.errors.uncorrected.aggregate.sram.thresholdExceeded": "Yes",
    "remapped_rows.correctable": "3", "remapped_rows.uncorrectable": "2", "remapped_rows.pending": "Yes",
    "remapped_rows.failure": "No", "remapped_rows.histogram.max": "640", "remapped_rows.histogram.high": "21",
    "remapped_rows.histogram.partial": "22", "remapped_rows.histogram.low": "23", "remapped_rows.histogram.none": "24",
    "retired_pages.single_bit_ecc.count": "31", "retired_pages.double_bit.count": "32", "retired_pages.pending": "No",
    "gpu_recovery_action": "Drain and Reset", "fabric.state": "In Progress", "fabric.status": "Success",
    "fabric.cliqueId": "9", "fabric.clusterUuid": "01234567-89ab-cdef-0123-456789abcdef", "fabric.health.summary": "Healthy",
    "mig.mode.current": "Disabled", "mig.mode.pending": "Enabled", "compute_mode": "Exclusive_Process",
    "persistence_mode": "Enabled", "addressing_mode": "HMM", "gsp.mode.current": "Enabled",
    "inforom.checksum_validation": "valid", "display_active": "Disabled",
    "clocks_event_reasons_counters.sw_power_cap": "1001 us", "clocks_event_reasons_counters.sync_boost": "1002 us",
    "clocks_event_reasons_counters.sw_thermal_slowdown": "1003 us",
    "clocks_event_reasons_counters.hw_thermal_slowdown": "1004 us",
    "clocks_event_reasons_counters.hw_power_brake_slowdown": "1005 us",
}  # fmt: skip


def uuid(number: int) -> str:
    """Return the UUID of a made-up GPU."""
    return f"GPU-{0xA0000000 + number:08x}-1111-2222-3333-{number:012x}"


def bus_id(number: int) -> str:
    """Return its bus id, as nvidia-smi writes it."""
    return "00000000:%02X:00.0" % (0x1B + 0x10 * number)


@dataclass
class Card:
    """One GPU: cells as csv prints them, with units, by the name of their field."""

    number: int
    cells: dict[str, str] = field(default_factory=dict)

    def cell(self, name: str) -> str:
        """Return the cell of a field."""
        own = {"index": str(self.number), "uuid": uuid(self.number), "pci.bus_id": bus_id(self.number)}
        return {**_SPECIAL, **own, **self.cells}[name]


def cards(count: int = 8) -> list[Card]:
    """Return GPUs that differ in temperature, memory and serial number."""
    return [
        Card(
            number,
            {
                "temperature.gpu": str(30 + number),
                "memory.used": f"{1000 + number} MiB",
                "serial": f"13200000000{number:02d}",
            },
        )
        for number in range(count)
    ]


def bare(cell: str) -> str:
    """Return a cell as ``nounits`` prints it."""
    number, _, unit = cell.rpartition(" ")
    return number if unit in {"MiB", "W", "MHz", "%", "us"} and number else cell


def csv(
    gpus: Sequence[Card], fields: Sequence[str] = QUERY, *, header: bool = True, units: bool = True
) -> str:
    """Return what ``--query-gpu`` prints."""
    lines = [csv_header(fields)] if header else []
    lines += [", ".join(gpu.cell(name) if units else bare(gpu.cell(name)) for name in fields) for gpu in gpus]
    return "".join(line + "\n" for line in lines)


def csv_header(fields: Sequence[str] = QUERY) -> str:
    """Return its first line."""
    named = [(name, BY_FIELD[name].unit if name in BY_FIELD else "") for name in fields]
    return ", ".join(f"{name} [{unit}]" if unit else name for name, unit in named)


LAYOUTS = ("before-535", "535", "570", "610")
"""Of XML: power and clock blocks were renamed while the number in the DOCTYPE stayed."""


def xml(gpus: Sequence[Card], layout: str = "570", *, attached: int | None = None) -> str:
    """Return what ``-q -x`` prints, in one of :data:`LAYOUTS`."""
    version = {"before-535": 11, "610": 13}.get(layout, 12)
    blocks = "".join(_xml_gpu(gpu, layout) for gpu in gpus)
    return (
        f'<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v{version}.dtd">\n<nvidia_smi_log>\n'
        "\t<timestamp>Sun Nov 29 10:00:00 2026</timestamp>\n\t<driver_version>595.58.03</driver_version>\n"
        "\t<cuda_version>13.2</cuda_version>\n"
        f"\t<attached_gpus>{len(gpus) if attached is None else attached}</attached_gpus>\n{blocks}</nvidia_smi_log>\n"
    )


def _xml_gpu(gpu: Card, layout: str) -> str:
    body = _render(_blocks(gpu, layout), 2)
    return '\t<gpu id="{}">\n{}\t</gpu>\n'.format(gpu.cell("pci.bus_id"), body)


def _render(blocks: list[tuple[str, object]], depth: int) -> str:
    out = ""
    for name, value in blocks:
        indent = "\t" * depth
        if isinstance(value, list):
            out += f"{indent}<{name}>\n{_render(value, depth + 1)}{indent}</{name}>\n"
        else:
            out += f"{indent}<{name}>{value}</{name}>\n"
    return out


def _with(cell: str, unit: str) -> str:
    return cell + unit if cell[:1].isdigit() else cell


def _blocks(gpu: Card, layout: str) -> list[tuple[str, object]]:
    cell = gpu.cell
    reasons = "clocks_throttle_reasons" if layout == "before-535" else "clocks_event_reasons"
    bits = int(cell("clocks_event_reasons.active"), 16) if cell("clocks_event_reasons.active").startswith("0x") else None
    names = (
        "gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal_slowdown",
        "hw_thermal_slowdown", "hw_power_brake_slowdown", "display_clocks_setting",
    )  # fmt: skip
    flags: list[tuple[str, object]] = [
        (
            f"{reasons[:-1]}_{name}",
            cell("clocks_event_reasons.active") if bits is None else "Active" if bits >> place & 1 else "Not Active",
        )
        for place, name in enumerate(names)
    ]
    return [
        ("product_name", cell("name")),
        ("display_active", cell("display_active")),
        ("persistence_mode", cell("persistence_mode")),
        ("addressing_mode", cell("addressing_mode")),
        ("mig_mode", [("current_mig", cell("mig.mode.current")), ("pending_mig", cell("mig.mode.pending"))]),
        ("mig_devices", "\n\t\t\tNone\n"),
        ("serial", cell("serial")),
        ("uuid", cell("uuid")),
        ("minor_number", str(gpu.number)),
        ("vbios_version", cell("vbios_version")),
        ("gpu_recovery_action", cell("gpu_recovery_action")),
        (
            "pci",
            [
                ("pci_bus_id", cell("pci.bus_id")),
                (
                    "pci_gpu_link_info",
                    [
                        (
                            "pcie_gen",
                            [
                                ("max_link_gen", cell("pcie.link.gen.max")),
                                ("current_link_gen", cell("pcie.link.gen.current")),
                                ("device_current_link_gen", cell("pcie.link.gen.gpucurrent")),
                                ("max_device_link_gen", cell("pcie.link.gen.gpumax")),
                                ("max_host_link_gen", cell("pcie.link.gen.hostmax")),
                            ],
                        ),
                        (
                            "link_widths",
                            [
                                ("max_link_width", _with(cell("pcie.link.width.max"), "x")),
                                ("current_link_width", _with(cell("pcie.link.width.current"), "x")),
                            ],
                        ),
                    ],
                ),
                ("replay_counter", "0"),
            ],
        ),
        ("fan_speed", cell("fan.speed")),
        ("performance_state", cell("pstate")),
        (reasons, flags),
        (
            "clocks_event_reasons_counters",
            [
                ("clocks_event_reasons_counters_" + short, cell("clocks_event_reasons_counters." + name))
                for short, name in (
                    ("sw_power_cap", "sw_power_cap"),
                    ("sync_boost", "sync_boost"),
                    ("sw_therm_slowdown", "sw_thermal_slowdown"),
                    ("hw_therm_slowdown", "hw_thermal_slowdown"),
                    ("hw_power_brake", "hw_power_brake_slowdown"),
                )
            ],
        ),
        (
            "fb_memory_usage",
            [
                ("total", cell("memory.total")),
                ("reserved", cell("memory.reserved")),
                ("used", cell("memory.used")),
                ("free", cell("memory.free")),
            ],
        ),
        ("compute_mode", cell("compute_mode")),
        ("utilization", [("gpu_util", cell("utilization.gpu")), ("memory_util", cell("utilization.memory"))]),
        ("ecc_mode", [("current_ecc", cell("ecc.mode.current")), ("pending_ecc", cell("ecc.mode.pending"))]),
        ("ecc_errors", [(when, _ecc(gpu, when, layout)) for when in ("volatile", "aggregate")]),
        (
            "retired_pages",
            [
                ("multiple_single_bit_retirement", [("retired_count", cell("retired_pages.single_bit_ecc.count"))]),
                ("double_bit_retirement", [("retired_count", cell("retired_pages.double_bit.count"))]),
                ("pending_retirement", cell("retired_pages.pending")),
            ],
        ),
        (
            "remapped_rows",
            [
                ("remapped_row_corr", cell("remapped_rows.correctable")),
                ("remapped_row_unc", cell("remapped_rows.uncorrectable")),
                ("remapped_row_pending", cell("remapped_rows.pending")),
                ("remapped_row_failure", cell("remapped_rows.failure")),
                (
                    "row_remapper_histogram",
                    [
                        ("row_remapper_histogram_" + part, _with(cell("remapped_rows.histogram." + part), " bank(s)"))
                        for part in ("max", "high", "partial", "low", "none")
                    ],
                ),
            ],
        ),
        (
            "temperature",
            [
                ("gpu_temp", _with(cell("temperature.gpu"), " C")),
                ("gpu_temp_tlimit", _with(cell("temperature.gpu.tlimit"), " C")),
                ("memory_temp", _with(cell("temperature.memory"), " C")),
            ],
        ),
        *_power(gpu, layout),
        ("clocks", [("sm_clock", cell("clocks.current.sm")), ("mem_clock", cell("clocks.current.memory"))]),
        ("applications_clocks", [("graphics_clock", cell("clocks.applications.graphics"))]),
        ("default_applications_clocks", [("graphics_clock", cell("clocks.default_applications.graphics"))]),
        ("max_clocks", [("sm_clock", cell("clocks.max.sm")), ("mem_clock", cell("clocks.max.memory"))]),
        (
            "fabric",
            [
                ("state", cell("fabric.state")),
                ("status", cell("fabric.status")),
                ("cliqueId", cell("fabric.cliqueId")),
                ("clusterUuid", cell("fabric.clusterUuid")),
                ("health", [("summary", cell("fabric.health.summary"))]),
            ],
        ),
        ("processes", "\n\t\t"),
    ]


def _ecc(gpu: Card, when: str, layout: str) -> list[tuple[str, object]]:
    base = "ecc.errors.%s." + when
    corrected, dram, sram = (
        gpu.cell(base % "corrected" + ".total"),
        gpu.cell(base % "uncorrected" + ".dram"),
        gpu.cell(base % "uncorrected" + ".sram"),
    )
    parts: list[tuple[str, object]] = [("sram_correctable", "0"), ("dram_correctable", corrected)]
    if layout in {"before-535", "535"}:
        parts.append(("sram_uncorrectable", sram))
    else:
        parts += [("sram_uncorrectable_parity", "0"), ("sram_uncorrectable_secded", sram)]
    parts.append(("dram_uncorrectable", dram))
    if when == "aggregate":
        parts.append(
            ("sram_threshold_exceeded", gpu.cell("ecc.errors.uncorrected.aggregate.sram.thresholdExceeded"))
        )
    return parts


def _power(gpu: Card, layout: str) -> list[tuple[str, object]]:
    cell = gpu.cell
    ends: list[tuple[str, object]] = [
        ("min_power_limit", cell("power.min_limit")), ("max_power_limit", cell("power.max_limit"))
    ]  # fmt: skip
    if layout == "before-535":
        return [
            (
                "power_readings",
                [
                    ("power_state", cell("pstate")),
                    ("power_draw", cell("power.draw")),
                    ("power_limit", cell("power.limit")),
                    ("default_power_limit", cell("power.default_limit")),
                    ("enforced_power_limit", cell("enforced.power.limit")),
                    *ends,
                ],
            )
        ]
    limits: list[tuple[str, object]] = [
        ("current_power_limit", cell("enforced.power.limit")),
        ("requested_power_limit", cell("power.limit")),
        ("default_power_limit", cell("power.default_limit")),
    ]
    draws: list[tuple[str, object]] = [("power_draw", cell("power.draw"))]
    if layout != "535":
        draws = [
            ("average_power_draw", cell("power.draw.average")),
            ("instant_power_draw", cell("power.draw.instant")),
        ]
    if layout == "610":
        limits = [("gpu_ceiling_power_limit", limits)]
    module: list[tuple[str, object]] = [("power_draw", "9999.00 W"), ("current_power_limit", "8888.00 W")]
    return [("gpu_power_readings", [*draws, *limits, *ends]), ("module_power_readings", module)]


def q(gpus: Sequence[Card]) -> str:
    """Return what ``-q`` prints: the same in indented text."""
    head = "\n==============NVSMI LOG==============\n\n"
    top = [
        ("Timestamp", "Sun Nov 29 10:00:00 2026"), ("Driver Version", "595.58.03"), ("CUDA Version", "13.2"),
    ]  # fmt: skip
    lines = [_q_line(0, label, value) for label, value in top] + ["", _q_line(0, "Attached GPUs", str(len(gpus)))]
    for gpu in gpus:
        lines += [f"GPU {gpu.cell('pci.bus_id')}", *_q_render(_q_blocks(gpu), 1), ""]
    return head + "".join(line + "\n" for line in lines)


def _q_line(depth: int, label: str, value: str) -> str:
    return f"{'    ' * depth + label:<55}: {value}"


def _q_render(blocks: list[tuple[str, object]], depth: int) -> list[str]:
    lines = []
    for label, value in blocks:
        if isinstance(value, list):
            lines += ["    " * depth + label, *_q_render(value, depth + 1)]
        else:
            lines.append(_q_line(depth, label, str(value)))
    return lines


def _q_blocks(gpu: Card) -> list[tuple[str, object]]:
    cell = gpu.cell
    return [
        ("Product Name", cell("name")),
        ("Persistence Mode", cell("persistence_mode")),
        ("MIG Mode", [("Current", cell("mig.mode.current")), ("Pending", cell("mig.mode.pending"))]),
        ("Serial Number", cell("serial")),
        ("GPU UUID", cell("uuid")),
        ("Minor Number", str(gpu.number)),
        ("GPU Recovery Action", cell("gpu_recovery_action")),
        ("PCI", [
            ("Bus Id", cell("pci.bus_id")),
            ("GPU Link Info", [
                ("PCIe Generation", [
                    ("Max", cell("pcie.link.gen.max")), ("Current", cell("pcie.link.gen.current")),
                    ("Device Current", cell("pcie.link.gen.gpucurrent")), ("Device Max", cell("pcie.link.gen.gpumax")),
                    ("Host Max", cell("pcie.link.gen.hostmax")),
                ]),
                ("Link Width", [
                    ("Max", _with(cell("pcie.link.width.max"), "x")),
                    ("Current", _with(cell("pcie.link.width.current"), "x")),
                ]),
            ]),
        ]),
        ("Fan Speed", cell("fan.speed")),
        ("Performance State", cell("pstate")),
        ("FB Memory Usage", [
            ("Total", cell("memory.total")), ("Reserved", cell("memory.reserved")), ("Used", cell("memory.used")),
            ("Free", cell("memory.free")),
        ]),
        ("Compute Mode", cell("compute_mode")),
        ("Utilization", [("GPU", cell("utilization.gpu")), ("Memory", cell("utilization.memory"))]),
        ("ECC Mode", [("Current", cell("ecc.mode.current")), ("Pending", cell("ecc.mode.pending"))]),
        ("ECC Errors", [
            ("Volatile", [
                ("SRAM Correctable", "0"), ("SRAM Uncorrectable Parity", "0"),
                ("SRAM Uncorrectable SEC-DED", cell("ecc.errors.uncorrected.volatile.sram")),
                ("DRAM Correctable", cell("ecc.errors.corrected.volatile.total")),
                ("DRAM Uncorrectable", cell("ecc.errors.uncorrected.volatile.dram")),
            ]),
        ]),
        ("Remapped Rows", [
            ("Correctable Error", cell("remapped_rows.correctable")),
            ("Uncorrectable Error", cell("remapped_rows.uncorrectable")),
            ("Pending", cell("remapped_rows.pending")),
            ("Remapping Failure Occurred", cell("remapped_rows.failure")),
        ]),
        ("Temperature", [
            ("GPU Current Temp", _with(cell("temperature.gpu"), " C")),
            ("GPU T.Limit Temp", _with(cell("temperature.gpu.tlimit"), " C")),
            ("Memory Current Temp", _with(cell("temperature.memory"), " C")),
        ]),
        ("GPU Power Readings", [
            ("Average Power Draw", cell("power.draw.average")), ("Instantaneous Power Draw", cell("power.draw.instant")),
            ("Current Power Limit", cell("enforced.power.limit")), ("Requested Power Limit", cell("power.limit")),
            ("Default Power Limit", cell("power.default_limit")),
        ]),
        ("Clocks", [("SM", cell("clocks.current.sm")), ("Memory", cell("clocks.current.memory"))]),
        ("Max Clocks", [("SM", cell("clocks.max.sm")), ("Memory", cell("clocks.max.memory"))]),
        ("Fabric", [("State", cell("fabric.state")), ("Status", cell("fabric.status"))]),
        ("Processes", "None"),
    ]  # fmt: skip
