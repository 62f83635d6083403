"""One GPU that differs from its siblings: cards of one model in one host should not."""

from __future__ import annotations

from statistics import median

from .missing import Missing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .looking import Look

_LOWER = (
    ("memory_total_mib", "MiB", "gpu.sibling_memory_pct", "memory", "look for a card of another size, or memory that was switched off"),
    ("power_limit_w", "W", "gpu.sibling_power_limit_pct", "power limit", "set the same limit on all: nvidia-smi -pl"),
    ("power_max_limit_w", "W", "gpu.sibling_power_limit_pct", "highest power limit", "compare VBIOS and board"),
    ("clock_sm_max_mhz", "MHz", "gpu.sibling_clock_pct", "highest SM clock", "compare VBIOS; reset locked clocks: nvidia-smi -rgc"),
    ("clock_memory_max_mhz", "MHz", "gpu.sibling_clock_pct", "highest memory clock", "compare VBIOS; nvidia-smi -rmc"),
    ("pcie_width_max", "lanes", None, "widest link", "compare the slots; check riser and cable"),
    ("pcie_gen_max", "PCIe gen", None, "fastest link", "compare the slots; check riser and BIOS"),
)
_ALIKE = (
    ("vbios_version", "VBIOS", "compare part numbers; have the odd one updated"),
    ("compute_mode", "compute mode", "nvidia-smi -c 0"),
    ("addressing_mode", "addressing mode", "look at the parameters of nvidia_uvm"),
)
_FLAGS = (
    ("ecc_enabled", "ECC", "nvidia-smi -e"),
    ("mig_enabled", "MIG", "nvidia-smi -mig"),
    ("persistence_enabled", "persistence mode", "nvidia-smi -pm 1"),
)


def siblings(look: Look) -> None:
    """Hold one GPU against the others of its model."""
    if not look.case.siblings:
        return
    for name, unit, threshold, words, action in _LOWER:
        value = look.number(name)
        others = [other for other in (getattr(sibling, name) for sibling in look.case.siblings) if not isinstance(other, Missing)]
        if value is None or not others:
            continue
        usual = median(others)
        tolerated = 0.0 if threshold is None else look.case.thresholds[threshold].value / 100.0
        if value < usual * (1.0 - tolerated):
            source = "median of %d siblings" % len(others)
            if threshold is not None:
                source += "; %g %% tolerated: %s" % (tolerated * 100, look.case.thresholds[threshold].provenance)
            look.say(
                "degraded", "sibling-" + name.rsplit("_", 1)[0].replace("_", "-") if unit not in {"lanes", "PCIe gen"}
                else "sibling-" + name.replace("_", "-"),
                "its %s is %g %s, that of its siblings %g" % (words, value, unit, usual), value=value, unit=unit, against=usual,
                source=source, action=action,
            )  # fmt: skip
    _words(look)
    _heat(look)


def _words(look: Look) -> None:
    for name, words, action in (*_ALIKE, *_FLAGS):
        value = look.flag(name) if name.endswith("_enabled") else look.word(name)
        others = [other for other in (getattr(sibling, name) for sibling in look.case.siblings) if not isinstance(other, Missing)]
        if value is None or not others:
            continue
        if len(others) > 1 and len(set(others)) == 1 and value != others[0]:
            look.say(
                "degraded", "sibling-" + name.replace("_version", "").replace("_enabled", "").replace("_", "-"),
                "its %s is %s, that of all its siblings %s" % (words, _shown(value), _shown(others[0])),
                value=value, against=others[0], source="%d siblings" % len(others), action=action,
            )  # fmt: skip


def _shown(value: object) -> object:
    return ("on" if value else "off") if isinstance(value, bool) else value


def _heat(look: Look) -> None:
    """Hotter than the others although it does no more than they do."""
    load, temperature = look.number("utilization_pct"), look.number("temperature_c")
    peers = [
        sibling.temperature_c
        for sibling in look.case.siblings
        if not isinstance(sibling.temperature_c, Missing)
        and not isinstance(sibling.utilization_pct, Missing)
        and load is not None
        and abs(sibling.utilization_pct - load) <= 20
    ]
    if temperature is None or len(peers) < 2:
        return
    limit = look.case.thresholds["gpu.idle_temperature_above_siblings_c"].value
    above = temperature - median(peers)
    if above > limit:
        look.say(
            "degraded", "sibling-temperature", "it is %.0f C hotter than its siblings under the same load" % above, value=above,
            threshold="gpu.idle_temperature_above_siblings_c", evidence=("%.0f C, median of %d siblings %.0f C"
            % (temperature, len(peers), median(peers)),), action="look at its fan, its filter and the air around it",
        )  # fmt: skip
