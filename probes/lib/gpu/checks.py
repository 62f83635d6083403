"""What is judged of each GPU: one small function a question, all of one shape (see :mod:`.looking`)."""

from __future__ import annotations

from . import xid
from .missing import Missing
from .smi_reading import REASON_BITS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Mapping

    from .looking import Look

RESET = "end what runs on it, then reset it: nvidia-smi -r -i %s; where that is not supported, reboot the host"
LOST = (
    "end what still runs on it, then power-cycle the host (a reboot may not be enough); look for Xid 79 in dmesg; "
    "check power, seat and heat; have it replaced if it comes again"
)
REPLACE = "have the card replaced; keep the output of nvidia-smi -q -i %s and nvidia-bug-report.sh"
_HARDWARE_REASONS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")


def _bus(look: Look) -> str:
    bus = look.case.reading.bus_id
    return bus if isinstance(bus, str) else "BUS_ID"


def reachable(look: Look) -> None:
    """Whether the driver still reaches it: any value that says ``GPU is lost`` or ``requires reset`` is about the whole card."""
    reading = look.case.reading
    gaps = [(name, value) for name, value in reading.metrics() if isinstance(value, Missing)]
    for reason, code, message, action in (
        ("gpu-lost", "gpu-lost", "the driver has lost it", LOST),
        ("reset-required", "reset-required", "it must be reset before it can be used", RESET % _bus(look)),
    ):
        said = [(name, gap) for name, gap in gaps if gap.reason == reason]
        if said:
            texts = dict.fromkeys(gap.text for _, gap in said)
            look.say("fail", code, message, evidence=tuple(texts)[:5], action=action)
    if reading.damaged is not None and not look.judgements:
        look.say(
            "unknown", "reading-damaged", "what the driver says of it cannot be read: %s" % reading.damaged,
            evidence=(reading.damaged,), action="ask it alone: nvidia-smi -q -i %s" % _bus(look),
        )  # fmt: skip
    for name in ("uuid", "bus_id", "name"):
        look.word(name)
    look.number("index")


def recovery(look: Look) -> None:
    """What the driver itself asks for: the best single sign."""
    asked = look.word("recovery_action")
    if asked is None:
        return
    level, action = xid.RECOVERY_ACTIONS.get(asked.lower(), ("unknown", "look up what this driver means by it"))
    if level != "ok":
        look.say(
            level, "recovery-action", "the driver asks for: %s" % asked, value=asked,
            action=action.replace("BUS_ID", _bus(look)),
        )  # fmt: skip


def remap(look: Look) -> None:
    """Rows of its memory that were, or could not be, replaced by spare ones."""
    if look.flag("remap_failure"):
        look.say("fail", "remap-failure", "a row of its memory could not be replaced", value=True, action=REPLACE % _bus(look))
    if look.flag("remap_pending"):
        look.say(
            "degraded", "remap-pending", "a row of its memory is to be replaced at the next reset", value=True,
            evidence=("uncorrectable remaps so far: %s" % _shown(look, "remap_uncorrectable"),), action=RESET % _bus(look),
        )  # fmt: skip
    none = look.number("remap_banks_none")
    if none is not None and none > look.case.thresholds["gpu.remap_exhausted_banks"].value:
        look.say(
            "degraded", "remap-exhausted", "banks of its memory have no spare row left", value=none,
            threshold="gpu.remap_exhausted_banks", action=REPLACE % _bus(look),
        )  # fmt: skip


def pages(look: Look) -> None:
    """The same on cards up to Turing, which retire pages."""
    if look.flag("retired_pending"):
        look.say(
            "degraded", "page-retirement-pending", "pages of its memory are to be retired at the next reset", value=True,
            evidence=("retired so far: %s after single-bit, %s after double-bit errors"
                      % (_shown(look, "retired_single_bit"), _shown(look, "retired_double_bit")),),
            action=RESET % _bus(look),
        )  # fmt: skip


def ecc(look: Look) -> None:
    """Errors of its memories that nothing corrected. The count of the card's life is history, no fault."""
    uncorrected = look.number("ecc_uncorrected_volatile")
    if uncorrected is not None and uncorrected > look.case.thresholds["gpu.ecc_uncorrected_volatile"].value:
        look.say(
            "fail", "ecc-uncorrected", "uncorrected memory errors since the driver was loaded", value=uncorrected, unit="errors",
            threshold="gpu.ecc_uncorrected_volatile", action=RESET % _bus(look) + "; run it alone before it is trusted again",
        )  # fmt: skip
    for name, level, code, message, action in (
        ("ecc_sram_threshold_exceeded", "fail", "ecc-sram-threshold", "its SRAM had more errors than its maker accepts", REPLACE % _bus(look)),
        ("ecc_unrepairable_memory", "fail", "ecc-unrepairable", "it has memory that cannot be repaired", REPLACE % _bus(look)),
        ("ecc_channel_repair_pending", "degraded", "ecc-repair-pending", "a memory channel is to be repaired at the next reset", RESET % _bus(look)),
        ("ecc_tpc_repair_pending", "degraded", "ecc-repair-pending", "a processor cluster is to be repaired at the next reset", RESET % _bus(look)),
    ):
        if look.flag(name):
            look.say(level, code, message, value=True, action=action)


def ecc_mode(look: Look) -> None:
    """Whether errors would be noticed at all."""
    enabled, pending = look.flag("ecc_enabled"), look.flag("ecc_pending_enabled")
    if enabled is False:
        look.say(
            "degraded", "ecc-off", "ECC is off: memory errors go unnoticed", value=False, against=True, source="the card supports it",
            action="nvidia-smi -e 1 -i %s, then reset or reboot" % _bus(look),
        )  # fmt: skip
    if enabled is not None and pending is not None and enabled != pending:
        look.say(
            "degraded", "ecc-mode-pending", "ECC will be %s after the next reset" % ("on" if pending else "off"), value=enabled,
            against=pending, source="pending mode", action="reset it when it is idle, or set the mode back: nvidia-smi -e",
        )  # fmt: skip


def thermal(look: Look) -> None:
    """Heat: the margin that the card itself tells where it does, else the temperature."""
    limits = look.case.thresholds
    temperature, margin = look.number("temperature_c"), look.number("tlimit_c")
    if margin is not None and margin <= limits["gpu.tlimit_margin_c"].value:
        look.say(
            "degraded", "at-thermal-limit", "it is as hot as it may get and slows down", value=margin, threshold="gpu.tlimit_margin_c",
            evidence=("temperature: %s C" % _shown(look, "temperature_c"),), action="look at fans, filters and the air around it; compare with its neighbours",
        )  # fmt: skip
    elif margin is None and temperature is not None and temperature >= limits["gpu.temperature_c"].value:
        look.say(
            "degraded", "hot", "it is hot", value=temperature, threshold="gpu.temperature_c",
            action="look at fans, filters and the air around it; compare with its neighbours",
        )  # fmt: skip
    memory = look.number("temperature_memory_c")
    if memory is not None and memory >= limits["gpu.memory_temperature_c"].value:
        look.say(
            "degraded", "memory-hot", "its memory is hot", value=memory, threshold="gpu.memory_temperature_c",
            action="look at fans, filters and the air around it",
        )  # fmt: skip


def fan(look: Look) -> None:
    """Fans. None at all is a passive card, 0 % one that stops them when it is cool, ``ERR!`` a fault."""
    speed = look.case.reading.fan_pct
    if isinstance(speed, Missing) and speed.reason == "error":
        look.say(
            "degraded", "fan-error", "its fan does not answer (%s)" % speed.text, value=speed.text,
            action="look whether it turns; have it replaced",
        )  # fmt: skip
    elif not isinstance(speed, Missing):
        look.measured()
    elif look.case.expected("fan_pct", speed.reason):
        look.number("fan_pct")


def clocks(look: Look) -> None:
    """Why its clocks are not higher. What hardware asks for is a fault at any time; a power cap under load is not."""
    mask = look.number("clock_reasons")
    if mask is None:
        return
    bits = int(mask)
    evidence = ("clock reasons 0x%x" % bits, "SM clock %s of %s MHz" % (_shown(look, "clock_sm_mhz"), _shown(look, "clock_sm_max_mhz")))
    hardware = [name for name in _HARDWARE_REASONS if bits & REASON_BITS[name]]
    if hardware:
        brake = "hw_power_brake_slowdown" in hardware
        heat = "hw_thermal_slowdown" in hardware
        look.say(
            "fail", "power-brake" if brake else "hw-thermal-slowdown" if heat else "hw-slowdown",
            "hardware slows it down: %s" % ", ".join(hardware), value="0x%x" % bits, evidence=evidence,
            action="check power supplies and cables: the chassis pulls the brake" if brake
            else "look at fans, filters and the air around it; check power cables",
        )  # fmt: skip
    if bits & REASON_BITS["sw_thermal_slowdown"]:
        look.say(
            "degraded", "sw-thermal-slowdown", "the driver slows it down because it is hot", value="0x%x" % bits, evidence=evidence,
            action="look at fans, filters and the air around it; compare with its neighbours",
        )  # fmt: skip
    if bits & REASON_BITS["sync_boost"]:
        look.say(
            "degraded", "sync-boost", "it runs at the clock of its slowest neighbour (sync boost)", value="0x%x" % bits,
            evidence=evidence, action="find the neighbour that is slowed down, or take the group apart",
        )  # fmt: skip
    strange = bits & ~sum(REASON_BITS.values())
    if strange:
        look.say(
            "unknown", "clock-reason-unknown", "its clocks are held back for a reason that is not known here: 0x%x" % strange,
            value="0x%x" % strange, evidence=evidence, action="look it up in the NVML header of this driver",
        )  # fmt: skip


def _shown(look: Look, name: str) -> str:
    value = getattr(look.case.reading, name)
    return "?" if isinstance(value, Missing) else "%g" % value


def power_limit(look: Look) -> None:
    """Whether somebody lowered what it may draw."""
    limit, default = look.number("power_limit_w"), look.number("power_default_limit_w")
    if limit is not None and default is not None and limit < default - 0.5:
        look.say(
            "degraded", "power-limit-low", "it may draw %.0f W of the usual %.0f W" % (limit, default), value=limit, unit="W",
            against=default, source="the card's default limit", action="if it is not meant: nvidia-smi -i %s -pl %.0f" % (_bus(look), default),
        )  # fmt: skip
    enforced = look.number("power_enforced_limit_w")
    if enforced is not None and limit is not None and enforced < limit - 0.5:
        look.say(
            "degraded", "power-limit-enforced", "something besides its own limit caps it at %.0f W" % enforced, value=enforced,
            unit="W", against=limit, source="its own limit", action="look at the chassis: power supplies, power policy of the BMC",
        )  # fmt: skip


def clock_limits(look: Look) -> None:
    """Whether somebody locked its clocks low."""
    chosen, default = look.number("clock_application_mhz"), look.number("clock_application_default_mhz")
    if chosen is not None and default is not None and chosen < default:
        look.say(
            "degraded", "application-clocks-low", "its application clocks are set below their default", value=chosen, unit="MHz",
            against=default, source="the card's default", action="if it is not meant: nvidia-smi -i %s -rac" % _bus(look),
        )  # fmt: skip
    now, highest = look.number("clock_sm_mhz"), look.number("clock_sm_max_mhz")
    if look.judgements or now is None or highest is None or now >= highest:
        return
    bits = look.number("clock_reasons")
    held = bits is not None and int(bits) & REASON_BITS["applications_clocks_setting"]
    if held and look.number("utilization_pct") is not None and look.case.loaded:
        look.say(
            "degraded", "clocks-locked", "it works at %.0f of %.0f MHz because its clocks are set so" % (now, highest), value=now,
            unit="MHz", against=highest, source="its highest clock", action="if it is not meant: nvidia-smi -i %s -rgc" % _bus(look),
        )  # fmt: skip


def pcie_width(look: Look) -> None:
    """Lanes: they never shrink when a card is idle."""
    width, widest = look.number("pcie_width"), look.number("pcie_width_max")
    if width is not None and widest is not None and width < widest:
        look.say(
            "degraded", "pcie-width", "its link has %.0f of %.0f lanes" % (width, widest), value=width, unit="lanes", against=widest,
            source="what card and slot can do", action="reseat the card; check riser, cable and slot; look at lspci -vv -s %s (LnkSta)" % _bus(look),
        )  # fmt: skip


def pcie_gen(look: Look) -> None:
    """Speed of the link: what card and slot agreed on, and under load what it runs at. Idle cards let it sink."""
    now, possible = look.number("pcie_gen"), look.number("pcie_gen_max")
    card = look.number("pcie_gen_gpu_max")
    if possible is not None and card is not None and possible < card:
        host = look.case.reading.pcie_gen_host_max
        look.say(
            "degraded", "pcie-slot-slow", "it sits in a slot of PCIe gen %.0f and could do gen %.0f" % (possible, card), value=possible,
            unit="PCIe gen", against=card, source="what the card can do",
            evidence=("the slot can do gen %s" % host,) if not isinstance(host, Missing) else (),
            action="check the slot's setting in the BIOS, riser and cable, or move the card",
        )  # fmt: skip
    if now is None or possible is None or now >= possible:
        return
    # Where nobody knows whether it is at work, nobody knows whether a slow link is a fault.
    if look.number("utilization_pct") is not None and look.case.loaded:
        look.say(
            "degraded", "pcie-gen", "under load its link runs at PCIe gen %.0f of %.0f" % (now, possible), value=now, unit="PCIe gen",
            against=possible, source="what card and slot can do",
            evidence=("utilization %s %%" % _shown(look, "utilization_pct"),),
            action="reseat the card; check riser and slot; look into dmesg for AER lines",
        )  # fmt: skip


def fabric(look: Look) -> None:
    """Whether it has joined the NVSwitches, on boards that have them."""
    state, status = look.word("fabric_state"), look.word("fabric_status")
    manager = "start or restart the fabric manager of the driver's version: systemctl status nvidia-fabricmanager"
    if state is not None and state.lower() not in {"completed", "not supported"}:
        started = state.lower() == "in progress"
        look.say(
            "degraded" if started else "fail", "fabric-not-ready", "it has not joined the NVSwitch fabric: %s" % state, value=state,
            against="Completed", source="what CUDA needs on a board with NVSwitches",
            action=("wait a minute and look again; then " if started else "") + manager,
        )  # fmt: skip
    if status is not None and status.lower() not in {"success", "not supported"}:
        look.say("fail", "fabric-status", "joining the NVSwitch fabric failed: %s" % status, value=status, against="Success",
                 source="what CUDA needs on a board with NVSwitches", action=manager)  # fmt: skip
    health = look.word("fabric_health")
    if health is not None and health.lower() not in {"healthy", "success", "not supported"}:
        look.say("degraded", "fabric-health", "its NVSwitch links are not well: %s" % health, value=health,
                 action="look at nvidia-smi -q -d FABRIC and at SXid lines in dmesg")  # fmt: skip


def modes(look: Look) -> None:
    """Modes in which it works, and not as most programs expect."""
    if look.flag("persistence_enabled") is False:
        look.say(
            "degraded", "persistence-off", "persistence mode is off: its state is lost whenever nobody uses it, and each start takes seconds",
            value=False, action="start nvidia-persistenced, or nvidia-smi -pm 1",
        )  # fmt: skip
    compute = look.word("compute_mode")
    if compute is not None and compute.lower() != "default":
        prohibited = compute.lower() == "prohibited"
        look.say(
            "fail" if prohibited else "degraded", "compute-mode",
            "its compute mode is %s: %s" % (compute, "no program may use it" if prohibited else "one process at a time may use it"),
            value=compute, against="Default", source="what most programs expect", action="if it is not meant: nvidia-smi -c 0 -i %s" % _bus(look),
        )  # fmt: skip
    mig, pending = look.flag("mig_enabled"), look.flag("mig_pending_enabled")
    if mig:
        parts = look.case.reading.mig_devices
        look.say(
            "degraded", "mig-on", "MIG is on: it is cut into %s parts; no program gets all of it, and NCCL cannot use its links"
            % (len(parts) or "an unknown number of"),
            value=True, evidence=tuple("%s %s" % (part.profile, part.uuid) for part in parts if isinstance(part.profile, str))[:8],
            action="if it is not meant: nvidia-smi -mig 0 -i %s" % _bus(look),
        )  # fmt: skip
    if mig is not None and pending is not None and mig != pending:
        look.say("degraded", "mig-pending", "MIG will be %s after the next reset" % ("on" if pending else "off"), value=mig,
                 against=pending, source="pending mode", action="reset it when it is idle")  # fmt: skip


def inforom(look: Look) -> None:
    """The store in which the card keeps its own history."""
    if look.flag("inforom_valid") is False:
        look.say("degraded", "inforom-corrupt", "the card's own records (InfoROM) are damaged", value=False, action=REPLACE % _bus(look))


def memory(look: Look) -> None:
    """Whether its memory is held by processes that are shown."""
    total, used = look.number("memory_total_mib"), look.number("memory_used_mib")
    use = look.case.use
    if total is None or used is None or use is None:
        return
    if look.case.reading.display_active is True:
        return
    limit = use.memory_limit_mib
    drawing = [one.memory_mib for one in look.case.reading.processes if one.kind == "G"]
    used -= sum(held for held in drawing if not isinstance(held, Missing))
    if not use.processes and limit is not None and used > limit:
        look.say(
            "degraded", "hidden-memory", "%.0f MiB of its memory are held and no process is shown" % used, value=used, unit="MiB",
            against=limit, source="what a free GPU may hold",
            action="look in other containers, and for ended processes: fuser -v /dev/nvidia*; reset it if nobody holds it",
        )  # fmt: skip


GPU_CHECKS: Mapping[str, Callable[[Look], None]] = {
    "reachable": reachable,
    "recovery": recovery,
    "remap": remap,
    "pages": pages,
    "ecc": ecc,
    "ecc-mode": ecc_mode,
    "thermal": thermal,
    "fan": fan,
    "clocks": clocks,
    "power-limit": power_limit,
    "clock-limits": clock_limits,
    "pcie-width": pcie_width,
    "pcie-gen": pcie_gen,
    "fabric": fabric,
    "modes": modes,
    "inforom": inforom,
    "memory": memory,
}
"""By name, in the order in which they are told."""
