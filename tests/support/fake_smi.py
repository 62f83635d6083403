"""A stand-in ``nvidia-smi`` (and ``lspci``, ``dmesg``...) that plays drivers back: healthy ones, and each fault.

::

    smi = FakeSmi(tmp_path / "bin", rtx_pro_6000(8))
    smi.gpus[3]["remapped_rows.pending"] = "Yes"
    smi.write()
    ... run something with smi.path in front of its PATH ...
    assert smi.running_at_once() == 1

Cells are what csv prints, with units; the XML of ``-q -x`` is made of the same cells. Values are made up in the shape
of real drivers'; no real output is copied.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from .smi_program import PROGRAM
from .smi_topology import topology

Gpu = dict[str, str]
NOT_AVAILABLE = "[N/A]"
DEPRECATED = "[Requested functionality has been deprecated]"
SENTINELS = (
    "[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", "[GPU is lost]", "[GPU requires reset]",
    "[Insufficient Permissions]", "[Requested functionality has been deprecated]", "ERR!", "",
)  # fmt: skip
"""What a cell says in the place of a value."""

ALIASES = {
    "gpu_bus_id": "pci.bus_id",
    "gpu_name": "name",
    "gpu_uuid": "uuid",
    "used_memory": "used_gpu_memory",
    "clocks.sm": "clocks.current.sm",
    "clocks_throttle_reasons.active": "clocks_event_reasons.active",
}
_REASONS = {
    "gpu_idle": 0x1, "applications_clocks_setting": 0x2, "sw_power_cap": 0x4, "hw_slowdown": 0x8, "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20, "hw_thermal_slowdown": 0x40, "hw_power_brake_slowdown": 0x80,
}  # fmt: skip
_RTX_BUSES = ("01", "21", "41", "61", "81", "a1", "c1", "e1")
_H200_BUSES = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")


def _common(index: int, bus: str) -> Gpu:
    counts = {
        f"ecc.errors.{kind}.{span}.{part}": "0"
        for kind in ("corrected", "uncorrected")
        for span in ("volatile", "aggregate")
        for part in ("total", "dram", "sram")
    }
    for span in ("volatile", "aggregate"):
        counts.update({f"ecc.errors.uncorrected.{span}.sram.{part}": "0" for part in ("parity", "secded")})
    return {
        "index": str(index), "uuid": f"GPU-{index:08x}-5eed-4000-8000-{index:012x}", "pci.bus_id": f"00000000:{bus.upper()}:00.0",
        "serial": f"17900000{index:02d}", "driver_version": "590.48.01", "persistence_mode": "Enabled",
        "compute_mode": "Default", "addressing_mode": "None", "accounting.mode": "Disabled", "gsp.mode.current": "Enabled",
        "inforom.checksum_validation": "valid", "gpu_recovery_action": "None", "mig.mode.current": "Disabled",
        "mig.mode.pending": "Disabled", "utilization.gpu": "0 %", "utilization.memory": "0 %",
        "ecc.mode.current": "Enabled", "ecc.mode.pending": "Enabled", **counts,
        "ecc.errors.uncorrected.aggregate.sram.thresholdExceeded": "No",
        "remapped_rows.correctable": "0", "remapped_rows.uncorrectable": "0", "remapped_rows.pending": "No",
        "remapped_rows.failure": "No", "remapped_rows.histogram.high": "0",
        "remapped_rows.histogram.partial": "0", "remapped_rows.histogram.low": "0", "remapped_rows.histogram.none": "0",
        "retired_pages.single_bit_ecc.count": NOT_AVAILABLE, "retired_pages.double_bit.count": NOT_AVAILABLE,
        "retired_pages.pending": NOT_AVAILABLE,
        **{f"clocks_event_reasons.{name}": "Active" if name == "gpu_idle" else "Not Active" for name in _REASONS},
        "clocks_event_reasons.supported": "0x00000000000001FF", "clocks_event_reasons.active": "0x0000000000000001",
        **{f"clocks_event_reasons_counters.{name}": "0 us" for name in
           ("sw_power_cap", "sync_boost", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")},
        "clocks.applications.graphics": DEPRECATED, "clocks.default_applications.graphics": DEPRECATED,
        "fabric.health.summary": "N/A", "compute_cap": "9.0", "display_active": "Disabled",
        "pcie.link.gen.max": "5", "pcie.link.gen.gpumax": "5", "pcie.link.gen.hostmax": "5",
        "pcie.link.width.current": "16", "pcie.link.width.max": "16",
    }  # fmt: skip


def rtx_pro_6000(count: int = 8) -> list[Gpu]:
    """Return idle, healthy cards on PCIe: links asleep at gen 1, no NVLink."""
    return [
        {
            **_common(index, _RTX_BUSES[index]),
            "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition", "vbios_version": "98.02.81.00.07", "pstate": "P8",
            "memory.total": "97887 MiB", "memory.reserved": "637 MiB", "memory.used": "0 MiB", "memory.free": "97250 MiB",
            "power.draw": "31.20 W", "power.draw.average": "31.20 W", "power.draw.instant": "31.35 W",
            "power.limit": "600.00 W", "enforced.power.limit": "600.00 W", "power.default_limit": "600.00 W",
            "power.min_limit": "150.00 W", "power.max_limit": "600.00 W",
            "temperature.gpu": str(30 + index), "temperature.gpu.tlimit": str(60 - index), "temperature.memory": "N/A",
            "fan.speed": NOT_AVAILABLE, "clocks.current.sm": "180 MHz", "clocks.current.memory": "405 MHz",
            "clocks.current.graphics": "180 MHz", "clocks.max.sm": "2430 MHz", "clocks.max.memory": "12481 MHz",
            "clocks.max.graphics": "2430 MHz", "pcie.link.gen.current": "1", "pcie.link.gen.gpucurrent": "1",
            "remapped_rows.histogram.max": "768", "fabric.state": "N/A", "fabric.status": "N/A",
            "fabric.cliqueId": "N/A", "fabric.clusterUuid": "N/A",
        }
        for index in range(count)
    ]  # fmt: skip


def h200(count: int = 8) -> list[Gpu]:
    """Return idle, healthy cards on NVSwitches: links stay at gen 5."""
    return [
        {
            **_common(index, _H200_BUSES[index]),
            "name": "NVIDIA H200", "vbios_version": "96.00.C4.00.02", "pstate": "P0",
            "memory.total": "143771 MiB", "memory.reserved": "616 MiB", "memory.used": "0 MiB", "memory.free": "143155 MiB",
            "power.draw": "76.40 W", "power.draw.average": "76.40 W", "power.draw.instant": "76.90 W",
            "power.limit": "700.00 W", "enforced.power.limit": "700.00 W", "power.default_limit": "700.00 W",
            "power.min_limit": "200.00 W", "power.max_limit": "700.00 W",
            "temperature.gpu": str(27 + index), "temperature.gpu.tlimit": str(58 - index), "temperature.memory": str(33 + index),
            "fan.speed": NOT_AVAILABLE, "clocks.current.sm": "345 MHz", "clocks.current.memory": "3201 MHz",
            "clocks.current.graphics": "345 MHz", "clocks.max.sm": "1980 MHz", "clocks.max.memory": "3201 MHz",
            "clocks.max.graphics": "1980 MHz", "pcie.link.gen.current": "5", "pcie.link.gen.gpucurrent": "5",
            "remapped_rows.histogram.max": "3072", "fabric.state": "Completed", "fabric.status": "Success",
            "fabric.cliqueId": "0", "fabric.clusterUuid": "00000000-0000-0000-0000-000000000000",
        }
        for index in range(count)
    ]  # fmt: skip


class FakeSmi:
    """The stand-in in a folder of its own.

    Args:
        folder: gets the programs; put it in front of the PATH.
        gpus: what the driver has; changed freely, :meth:`write` makes it so.
    """

    def __init__(self, folder: Path, gpus: list[Gpu]) -> None:
        self.folder = folder
        self.gpus = gpus
        self.fields = list(gpus[0]) if gpus else list(rtx_pro_6000(1)[0])
        """What the driver's help lists; a field that is taken out here is refused as unknown."""
        self.aliases = dict(ALIASES)
        self.apps: list[dict[str, str]] = []
        self.answers: list[tuple[tuple[str, ...], str, int]] = []
        """(first arguments, text, status): looked at first, in order; ``()`` answers everything."""
        self.lost: dict[str, str] = {}
        self.nvlinks = {gpu["index"]: [True] * 18 for gpu in gpus if gpu["fabric.state"] == "Completed"}
        """Whether each NVLink of a GPU works, by its index; GPUs that are not here have none."""
        self.nics: list[str] = []
        """Network devices that ``topo -m`` lists beside the GPUs, half of them near each half of those."""
        self.status = 0
        self.xml: str | None = None
        """Instead of the one that is made of the cells."""
        self._hang: dict[str, object] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "calls").touch()
        (folder / "smi.py").write_text(PROGRAM)
        # Its own interpreter, without site: it answers in a few hundredths of a second.
        self.program("nvidia-smi", f'exec {sys.executable} -I -S "${{0%/*}}/smi.py" "$@"')
        self.write()

    @property
    def path(self) -> str:
        """A PATH on which the stand-in comes first."""
        return f"{self.folder}:{os.environ['PATH']}"

    def program(self, name: str, script: str) -> None:
        """Put a shell script beside it: lspci, dmesg, journalctl."""
        new = self.folder / f".{name}"
        new.write_text(f"#!/bin/sh\n{script}\n")
        new.chmod(0o755)
        new.rename(self.folder / name)

    def lspci(self, *more: str, without: tuple[int, ...] = ()) -> None:
        """Put an lspci there that lists the GPUs, but for ``without``, and further lines."""
        lines = [
            f"{gpu['pci.bus_id'][4:].lower()} 3D controller [0302]: NVIDIA Corporation Device [10de:2bb5] (rev a1)"
            for gpu in self.gpus
            if int(gpu["index"]) not in without
        ]
        text = "\n".join([*lines, *more])
        self.program("lspci", f"cat <<'END'\n{text}\nEND")

    def kernel_log(self, *lines: str) -> None:
        """Put a dmesg there that prints ``lines`` since the boot, and no journal."""
        text = "\n".join(["[    0.000000] Linux version 6.8.0-60-generic (build@host) #63-Ubuntu SMP", *lines])
        self.program("dmesg", f"cat <<'END'\n{text}\nEND")
        self.program("journalctl", "echo No journal files were found. >&2; exit 1")

    def answer(self, beginning: tuple[str, ...], text: str, status: int = 0) -> None:
        """Answer calls whose first arguments are ``beginning`` with ``text``."""
        self.answers.append((beginning, text, status))
        self.write()

    def answer_to(self, *arguments: str) -> str:
        """Return what it answers, for tests that change it."""
        done = subprocess.run([str(self.folder / "nvidia-smi"), *arguments], capture_output=True, text=True, check=False)
        return done.stdout

    def fail(self, text: str, status: int) -> None:
        """Answer everything with ``text``, as a driver that cannot be reached does."""
        self.answers = [((), text, status)]
        self.write()

    def lose(self, index: int, text: str | None = None) -> None:
        """Let one GPU be lost: an error between the rows, and a row of errors."""
        bus = self.gpus[index]["pci.bus_id"][4:]
        self.lost[str(index)] = text or f"Unable to determine the device handle for GPU{bus}: Unknown Error"
        self.write()

    def use(self, index: int, pid: int, name: str = "python3", memory: str = "71234 MiB") -> None:
        """Let a process compute on one GPU."""
        gpu = self.gpus[index]
        self.apps.append({
            "gpu_uuid": gpu["uuid"], "uuid": gpu["uuid"], "pci.bus_id": gpu["pci.bus_id"], "name": gpu["name"],
            "pid": str(pid), "process_name": name, "used_gpu_memory": memory,
        })  # fmt: skip
        load(gpu)
        gpu["memory.used"] = memory
        self.write()

    def write(self) -> None:
        """Make the next call answer by what is here now."""
        state = {
            "gpus": self.gpus, "fields": self.fields, "aliases": self.aliases, "apps": self.apps,
            "answers": [[list(beginning), text, status] for beginning, text, status in self.answers],
            "lost": self.lost, "status": self.status, "hang": self._hang, "topo": topology(self.gpus, self.nics),
            "nvlinks": self.nvlinks,
            "xml": self.xml if self.xml is not None else to_xml(self.gpus, self.apps),
        }  # fmt: skip
        new = self.folder / ".state"
        new.write_text(json.dumps(state))
        new.rename(self.folder / "state.json")

    # -- hanging

    @contextlib.contextmanager
    def hanging(self, *when: str, killable: bool = True) -> Iterator[None]:
        """Let calls hang whose arguments contain one of ``when`` (any call by default), until the block ends.

        One that cannot be killed is frozen by the kernel where that can be had (a freezer cgroup of version 1), which
        is what a driver that hangs looks like; elsewhere it is stopped.
        """
        freezer = None if killable else _make_freezer()
        self._hang = {"when": list(when) or [""], "freezer": freezer, "stop": not killable}
        self.write()
        try:
            yield
        finally:
            self._hang = None
            self.write()
            self._end(freezer)

    def _end(self, freezer: str | None) -> None:
        if freezer is not None:
            Path(freezer, "freezer.state").write_text("THAWED")
        for pid in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + 10
        while freezer is not None and time.monotonic() < until:
            try:
                Path(freezer).rmdir()
                return
            except OSError:
                time.sleep(0.02)

    # -- what was asked

    def calls(self) -> list[list[str]]:
        """Return the arguments of every call so far."""
        return [json.loads(line)[2] for line in (self.folder / "calls").read_text().splitlines()]

    def running(self) -> list[int]:
        """Return the calls that have not ended."""
        pids = [json.loads(line)[0] for line in (self.folder / "calls").read_text().splitlines()]
        found = []
        for pid in pids:
            with contextlib.suppress(OSError):
                if str(self.folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found


def _make_freezer() -> str | None:
    folder = Path("/sys/fs/cgroup/freezer") / f"rdiag-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        folder.mkdir()
        (folder / "freezer.state").write_text("FROZEN")
    except OSError:
        return None
    return str(folder)


_XML = {
    "product_name": "name", "uuid": "uuid", "serial": "serial", "vbios_version": "vbios_version",
    "persistence_mode": "persistence_mode", "addressing_mode": "addressing_mode", "accounting_mode": "accounting.mode",
    "mig_mode/current_mig": "mig.mode.current", "mig_mode/pending_mig": "mig.mode.pending", "minor_number": "index",
    "gpu_recovery_action": "gpu_recovery_action", "pci/pci_bus_id": "pci.bus_id",
    "pci/pci_gpu_link_info/pcie_gen/max_link_gen": "pcie.link.gen.max",
    "pci/pci_gpu_link_info/pcie_gen/current_link_gen": "pcie.link.gen.current",
    "pci/pci_gpu_link_info/pcie_gen/device_current_link_gen": "pcie.link.gen.gpucurrent",
    "pci/pci_gpu_link_info/pcie_gen/max_device_link_gen": "pcie.link.gen.gpumax",
    "pci/pci_gpu_link_info/pcie_gen/max_host_link_gen": "pcie.link.gen.hostmax",
    "pci/pci_gpu_link_info/link_widths/max_link_width": "pcie.link.width.max",
    "pci/pci_gpu_link_info/link_widths/current_link_width": "pcie.link.width.current",
    "fan_speed": "fan.speed", "performance_state": "pstate",
    **{f"clocks_event_reasons/clocks_event_reason_{name}": f"clocks_event_reasons.{name}" for name in _REASONS},
    **{f"clocks_event_reasons_counters/clocks_event_reasons_counters_{tail}": f"clocks_event_reasons_counters.{name}"
       for name, tail in (("sw_power_cap", "sw_power_cap"), ("sync_boost", "sync_boost"),
                          ("sw_thermal_slowdown", "sw_therm_slowdown"), ("hw_thermal_slowdown", "hw_therm_slowdown"),
                          ("hw_power_brake_slowdown", "hw_power_brake"))},
    "fb_memory_usage/total": "memory.total", "fb_memory_usage/reserved": "memory.reserved",
    "fb_memory_usage/used": "memory.used", "fb_memory_usage/free": "memory.free", "compute_mode": "compute_mode",
    "utilization/gpu_util": "utilization.gpu", "utilization/memory_util": "utilization.memory",
    "ecc_mode/current_ecc": "ecc.mode.current", "ecc_mode/pending_ecc": "ecc.mode.pending",
    "ecc_errors/volatile/sram_correctable": "ecc.errors.corrected.volatile.sram",
    "ecc_errors/volatile/sram_uncorrectable_parity": "ecc.errors.uncorrected.volatile.sram.parity",
    "ecc_errors/volatile/sram_uncorrectable_secded": "ecc.errors.uncorrected.volatile.sram.secded",
    "ecc_errors/volatile/dram_correctable": "ecc.errors.corrected.volatile.dram",
    "ecc_errors/volatile/dram_uncorrectable": "ecc.errors.uncorrected.volatile.dram",
    "ecc_errors/aggregate/sram_correctable": "ecc.errors.corrected.aggregate.sram",
    "ecc_errors/aggregate/sram_uncorrectable_parity": "ecc.errors.uncorrected.aggregate.sram.parity",
    "ecc_errors/aggregate/sram_uncorrectable_secded": "ecc.errors.uncorrected.aggregate.sram.secded",
    "ecc_errors/aggregate/dram_correctable": "ecc.errors.corrected.aggregate.dram",
    "ecc_errors/aggregate/dram_uncorrectable": "ecc.errors.uncorrected.aggregate.dram",
    "ecc_errors/aggregate/sram_threshold_exceeded": "ecc.errors.uncorrected.aggregate.sram.thresholdExceeded",
    "retired_pages/multiple_single_bit_retirement/retired_count": "retired_pages.single_bit_ecc.count",
    "retired_pages/double_bit_retirement/retired_count": "retired_pages.double_bit.count",
    "retired_pages/pending_retirement": "retired_pages.pending",
    "remapped_rows/remapped_row_corr": "remapped_rows.correctable", "remapped_rows/remapped_row_unc": "remapped_rows.uncorrectable",
    "remapped_rows/remapped_row_pending": "remapped_rows.pending", "remapped_rows/remapped_row_failure": "remapped_rows.failure",
    **{f"remapped_rows/row_remapper_histogram/row_remapper_histogram_{name}": f"remapped_rows.histogram.{name}"
       for name in ("max", "high", "partial", "low", "none")},
    "temperature/gpu_temp": "temperature.gpu", "temperature/gpu_temp_tlimit": "temperature.gpu.tlimit",
    "temperature/memory_temp": "temperature.memory",
    "gpu_power_readings/average_power_draw": "power.draw.average", "gpu_power_readings/instant_power_draw": "power.draw.instant",
    "gpu_power_readings/current_power_limit": "power.limit", "gpu_power_readings/requested_power_limit": "power.limit",
    "gpu_power_readings/default_power_limit": "power.default_limit", "gpu_power_readings/min_power_limit": "power.min_limit",
    "gpu_power_readings/max_power_limit": "power.max_limit",
    "clocks/graphics_clock": "clocks.current.graphics", "clocks/sm_clock": "clocks.current.sm", "clocks/mem_clock": "clocks.current.memory",
    "max_clocks/graphics_clock": "clocks.max.graphics", "max_clocks/sm_clock": "clocks.max.sm", "max_clocks/mem_clock": "clocks.max.memory",
    "fabric/state": "fabric.state", "fabric/status": "fabric.status", "fabric/cliqueId": "fabric.cliqueId", "fabric/clusterUuid": "fabric.clusterUuid",
}  # fmt: skip
_SUFFIX = {"temperature.gpu": " C", "temperature.gpu.tlimit": " C", "temperature.memory": " C", "pcie.link.width.max": "x",
           "pcie.link.width.current": "x"}  # fmt: skip


def to_xml(gpus: list[Gpu], apps: list[dict[str, str]]) -> str:
    """Return what ``-q -x`` prints for the same cells, in the layout of drivers from 570 on."""
    parts = ['<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">\n<nvidia_smi_log>']
    driver = gpus[0]["driver_version"] if gpus else "590.48.01"
    parts.append(f"\t<timestamp>Sun Nov 29 12:00:00 2026</timestamp>\n\t<driver_version>{driver}</driver_version>")
    parts.append(f"\t<cuda_version>13.1</cuda_version>\n\t<attached_gpus>{len(gpus)}</attached_gpus>")
    for gpu in gpus:
        tree: dict[str, object] = {}
        for path, field in _XML.items():
            text = gpu.get(field, NOT_AVAILABLE)
            text = text.strip("[]") if text.startswith("[") else text
            if field in _SUFFIX and text.lstrip("-").isdigit():
                text += _SUFFIX[field]
            if "histogram_" in path and text.isdigit():
                text += " bank(s)"
            below = tree
            *folders, leaf = path.split("/")
            for folder in folders:
                below = below.setdefault(folder, {})  # type: ignore[assignment]
            below[leaf] = text
        tree["processes"] = [
            {"pid": app["pid"], "type": "C", "process_name": app["process_name"], "used_memory": app["used_gpu_memory"]}
            for app in apps
            if app["uuid"] == gpu["uuid"]
        ]
        parts.append(f'\t<gpu id="{gpu["pci.bus_id"]}">')
        _elements(tree, parts, 2)
        parts.append("\t</gpu>")
    return "\n".join([*parts, "</nvidia_smi_log>", ""])


def _elements(tree: dict[str, object], parts: list[str], depth: int) -> None:
    indent = "\t" * depth
    for name, value in tree.items():
        if isinstance(value, str):
            parts.append(f"{indent}<{name}>{escape(value)}</{name}>")
            continue
        parts.append(f"{indent}<{name}>")
        if isinstance(value, dict):
            _elements(value, parts, depth + 1)
        elif isinstance(value, list):
            for item in value:
                parts.append(f"{indent}\t<process_info>")
                _elements(item, parts, depth + 2)
                parts.append(f"{indent}\t</process_info>")
        parts.append(f"{indent}</{name}>")


def reasons(gpu: Gpu, *active: str) -> None:
    """Let exactly these clock reasons be active: ``hw_thermal_slowdown``, ..."""
    for name in _REASONS:
        gpu[f"clocks_event_reasons.{name}"] = "Active" if name in active else "Not Active"
    gpu["clocks_event_reasons.active"] = f"0x{sum(_REASONS[name] for name in active):016X}"


def load(gpu: Gpu) -> None:
    """Let a healthy GPU be at work: clocks up, link at full speed."""
    gpu.update({
        "utilization.gpu": "99 %", "utilization.memory": "40 %", "pstate": "P0", "pcie.link.gen.current": gpu["pcie.link.gen.max"],
        "pcie.link.gen.gpucurrent": gpu["pcie.link.gen.max"], "clocks.current.sm": gpu["clocks.max.sm"],
        "clocks.current.memory": gpu["clocks.max.memory"],
    })  # fmt: skip
    reasons(gpu)
