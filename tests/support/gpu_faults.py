"""Faults of GPUs as drivers report them, planted in the stand-in: each with the verdict that must come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .fake_smi import FakeSmi, Gpu, h200, load, reasons, rtx_pro_6000

FAULTY = 3
"""Index of the GPU that a fault is planted in."""


@dataclass(frozen=True)
class Fault:
    """One fault of one GPU, in cells."""

    name: str
    plant: Callable[[Gpu], None]
    code: str
    """Of the finding."""
    level: str
    check: str
    action: str
    """A part of what must be advised."""
    gpus: Callable[[], list[Gpu]] = h200


def cells(**changes: str) -> Callable[[Gpu], None]:
    """Return what changes cells; ``__`` stands for a dot."""
    return lambda gpu: gpu.update({name.replace("__", "."): text for name, text in changes.items()})


def slowed(*names: str) -> Callable[[Gpu], None]:
    """Return what lets clock reasons be active."""
    return lambda gpu: reasons(gpu, *names)


def _slow_link(gpu: Gpu) -> None:
    load(gpu)
    gpu.update({"pcie.link.gen.current": "1", "pcie.link.gen.gpucurrent": "1"})


def _locked(gpu: Gpu) -> None:
    load(gpu)
    reasons(gpu, "applications_clocks_setting")
    gpu["clocks.current.sm"] = "1200 MHz"


_SLOT = {"pcie__link__gen__max": "3", "pcie__link__gen__hostmax": "3", "pcie__link__gen__current": "3", "pcie__link__gen__gpucurrent": "3"}
_PAGES = {"retired_pages.pending": "No", "retired_pages.double_bit.count": "0", "retired_pages.single_bit_ecc.count": "0"}

FAULTS = (
    Fault("recovery reset", cells(gpu_recovery_action="Reset"), "recovery-action", "fail", "recovery", "nvidia-smi -r -i 0000:61"),
    Fault("recovery reboot", cells(gpu_recovery_action="Reboot"), "recovery-action", "fail", "recovery", "reboot"),
    Fault("recovery drain p2p", cells(gpu_recovery_action="Drain P2P"), "recovery-action", "fail", "recovery", "peers"),
    Fault("recovery drain and reset", cells(gpu_recovery_action="Drain and Reset"), "recovery-action", "fail", "recovery", "reset"),
    Fault("requires reset", lambda gpu: gpu.update(dict.fromkeys(("temperature.gpu", "memory.used", "pstate"), "[GPU requires reset]")),
          "reset-required", "fail", "reachable", "nvidia-smi -r -i 0000:61"),
    Fault("lost by its cells", lambda gpu: gpu.update(dict.fromkeys(("temperature.gpu", "memory.used", "power.draw"), "[GPU is lost]")),
          "gpu-lost", "fail", "reachable", "power-cycle"),
    Fault("remap pending", cells(remapped_rows__pending="Yes", remapped_rows__uncorrectable="1"), "remap-pending", "degraded", "remap", "reset"),
    Fault("remap pending, old spelling", cells(remapped_rows__pending="1"), "remap-pending", "degraded", "remap", "reset"),
    Fault("remap failed", cells(remapped_rows__failure="Yes"), "remap-failure", "fail", "remap", "replaced"),
    Fault("no spare rows", cells(remapped_rows__histogram__none="2"), "remap-exhausted", "degraded", "remap", "replaced"),
    Fault("pages pending", cells(retired_pages__pending="Yes", retired_pages__double_bit__count="3", retired_pages__single_bit_ecc__count="0"),
          "page-retirement-pending", "degraded", "pages", "reset", lambda: [{**gpu, **_PAGES} for gpu in rtx_pro_6000()]),
    Fault("uncorrected ecc", cells(ecc__errors__uncorrected__volatile__total="2", ecc__errors__uncorrected__volatile__dram="2"),
          "ecc-uncorrected", "fail", "ecc", "reset"),
    Fault("sram threshold", cells(ecc__errors__uncorrected__aggregate__sram__thresholdExceeded="Yes"), "ecc-sram-threshold", "fail", "ecc", "replaced"),
    Fault("ecc off", cells(ecc__mode__current="Disabled", ecc__mode__pending="Disabled"), "ecc-off", "degraded", "ecc-mode", "nvidia-smi -e 1"),
    Fault("ecc change pending", cells(ecc__mode__pending="Disabled"), "ecc-mode-pending", "degraded", "ecc-mode", "reset"),
    Fault("thermal limit", cells(temperature__gpu="86", temperature__gpu__tlimit="0"), "at-thermal-limit", "degraded", "thermal", "fans"),
    Fault("hot", cells(temperature__gpu="93", temperature__gpu__tlimit="-2"), "at-thermal-limit", "degraded", "thermal", "fans"),
    Fault("memory hot", cells(temperature__memory="97"), "memory-hot", "degraded", "thermal", "fans"),
    Fault("fan error", cells(fan__speed="ERR!"), "fan-error", "degraded", "fan", "replaced",
          lambda: [{**gpu, "fan.speed": "30 %"} for gpu in rtx_pro_6000()]),
    Fault("hw slowdown", slowed("hw_slowdown"), "hw-slowdown", "fail", "clocks", "power"),
    Fault("hw thermal", slowed("hw_slowdown", "hw_thermal_slowdown"), "hw-thermal-slowdown", "fail", "clocks", "fans"),
    Fault("power brake", slowed("hw_slowdown", "hw_power_brake_slowdown"), "power-brake", "fail", "clocks", "power supplies"),
    Fault("sw thermal", slowed("sw_thermal_slowdown"), "sw-thermal-slowdown", "degraded", "clocks", "fans"),
    Fault("unknown reason", cells(clocks_event_reasons__active="0x0000000000000400"), "clock-reason-unknown", "unknown", "clocks", "NVML"),
    Fault("power limit", cells(power__limit="450.00 W", enforced__power__limit="450.00 W"), "power-limit-low", "degraded", "power-limit", "-pl 700"),
    Fault("power capped from outside", cells(enforced__power__limit="450.00 W"), "power-limit-enforced", "degraded", "power-limit", "BMC"),
    Fault("clocks locked", _locked, "clocks-locked", "degraded", "clock-limits", "-rgc"),
    Fault("link narrow", cells(pcie__link__width__current="8"), "pcie-width", "degraded", "pcie-width", "reseat"),
    Fault("link slow under load", _slow_link, "pcie-gen", "degraded", "pcie-gen", "reseat", rtx_pro_6000),
    Fault("slow slot", cells(**_SLOT), "pcie-slot-slow", "degraded", "pcie-gen", "BIOS"),
    Fault("fabric not started", cells(fabric__state="Not Started", fabric__status="N/A"), "fabric-not-ready", "fail", "fabric", "fabricmanager"),
    Fault("fabric in progress", cells(fabric__state="In Progress"), "fabric-not-ready", "degraded", "fabric", "wait"),
    Fault("fabric failed", cells(fabric__status="Failure"), "fabric-status", "fail", "fabric", "fabricmanager"),
    Fault("persistence off", cells(persistence_mode="Disabled"), "persistence-off", "degraded", "modes", "nvidia-persistenced"),
    Fault("exclusive", cells(compute_mode="Exclusive_Process"), "compute-mode", "degraded", "modes", "-c 0"),
    Fault("prohibited", cells(compute_mode="Prohibited"), "compute-mode", "fail", "modes", "-c 0"),
    Fault("mig", cells(mig__mode__current="Enabled", mig__mode__pending="Enabled", utilization__gpu="[N/A]"), "mig-on", "degraded", "modes", "-mig 0"),
    Fault("inforom", cells(inforom__checksum_validation="invalid"), "inforom-corrupt", "degraded", "inforom", "replaced"),
    Fault("other vbios", cells(vbios_version="96.00.88.00.01"), "sibling-vbios", "degraded", "siblings", "compare"),
    Fault("lower clock than siblings", cells(clocks__max__sm="1500 MHz"), "sibling-clock-sm-max", "degraded", "siblings", "compare"),
    Fault("hotter than siblings", cells(temperature__gpu="70", temperature__gpu__tlimit="15"), "sibling-temperature", "degraded", "siblings", "fan"),
)  # fmt: skip


def csv_text(gpus: list[Gpu]) -> str:
    """Return what ``--query-gpu`` with every field prints for these GPUs."""
    units = {"MiB", "W", "MHz", "%", "us"}
    fields = list(gpus[0])

    def header(field: str) -> str:
        samples = {gpu.get(field, "").rsplit(" ", 1)[-1] for gpu in gpus} & units
        return f"{field} [{samples.pop()}]" if samples and field != "index" else field

    rows = [", ".join(header(field) for field in fields)]
    rows += [", ".join(gpu[field] for field in fields) for gpu in gpus]
    return "\n".join(rows) + "\n"


def plant(smi: FakeSmi, fault: Fault) -> None:
    """Put a fault into the stand-in's faulty GPU."""
    fault.plant(smi.gpus[FAULTY])
    smi.write()
