"""What the GPUs do while they are busy: only then do the link's generation, clocks and throttling mean anything."""

from __future__ import annotations

import re

from ..gpu.busid import normalise
from ..gpu.missing import missing as absent
from ..gpu.run_smi import SMI, Programs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Sequence

    from remote_diag.probe import Context

# The older name of the last field is one that every driver knows.
_FIELDS = (
    ("pcie_gen", "pcie.link.gen.current"),
    ("pcie_gen_max", "pcie.link.gen.max"),
    ("pcie_width", "pcie.link.width.current"),
    ("pcie_width_max", "pcie.link.width.max"),
    ("clock_sm_mhz", "clocks.sm"),
    ("power_w", "power.draw"),
    ("temperature_c", "temperature.gpu"),
    ("throttle", "clocks_throttle_reasons.active"),
)
_WHOLE = frozenset({"pcie_gen", "pcie_gen_max", "pcie_width", "pcie_width_max"})
IDLE = "idle"
_REASONS = {
    0x1: IDLE,
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal slowdown by software",
    0x40: "thermal slowdown by hardware",
    0x80: "power brake",
}
_IGNORED = 0x2 | 0x100
"""Application clocks, display clocks."""
_FAULTS = {"hardware slowdown", "thermal slowdown by hardware", "power brake"}
_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_SECONDS = 15.0


def sample(seconds: float = _SECONDS, bus_ids: Sequence[str] = ()) -> tuple[list[dict[str, Any]], str | None]:
    """Ask nvidia-smi once; return the fields of a Load for each GPU, and what went wrong.

    Args:
        seconds: after which nvidia-smi counts as stuck.
        bus_ids: of the GPUs that matter; all when empty.
    """
    names = ",".join(["pci.bus_id", *(name for _, name in _FIELDS)])
    said = Programs(seconds).ask(SMI, "--query-gpu=" + names, "--format=csv,noheader,nounits", seconds=seconds)
    found, damaged = parse(said.out)
    if bus_ids:
        found = [each for each in found if each["bus_id"] in bus_ids]
    if not said.ok:
        return found, said.why
    if damaged:
        return found, "%d lines of nvidia-smi make no sense, the first: %s" % (len(damaged), damaged[0][:200])
    return found, None


def parse(text: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the GPUs of an answer and the lines that are none; a cell without a value is None and kept in ``missing``."""
    found, damaged = [], []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        bus_id = normalise(cells[0]) if len(cells) == len(_FIELDS) + 1 else None
        if bus_id is None:
            damaged += [line.strip()] if line.strip() else []
            continue
        missing: dict[str, str] = {}
        fields: dict[str, Any] = {"bus_id": bus_id, "missing": missing}
        for (name, _), cell in zip(_FIELDS, cells[1:]):
            value = reasons(cell) if name == "throttle" else _number(cell, whole=name in _WHOLE)
            if value is None:
                missing[name] = cell or "empty"
            fields[name] = () if value is None and name == "throttle" else value
        found.append(fields)
    return found, damaged


def reasons(cell: str) -> tuple[str, ...] | None:
    """Return what holds clocks down, from ``0x0000000000000004``; None for anything else."""
    if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", cell) is None:
        return None
    bits = int(cell, 16) & ~_IGNORED
    known = [words for bit, words in _REASONS.items() if bits & bit]
    rest = bits & ~sum(_REASONS)
    return tuple(known + (["unknown reason 0x%x" % rest] if rest else []))


def _number(cell: str, *, whole: bool) -> float | int | None:
    if _NUMBER.fullmatch(cell) is None or (whole and "." in cell):
        return None
    return int(cell) if whole else float(cell)


def judge(context: Context, loads: Sequence[dict[str, Any]]) -> None:
    """Report links that stay narrow or slow under load, and clocks that a fault holds down."""
    for load in loads:
        subject = "gpu %s" % load["bus_id"]
        if IDLE in load["throttle"]:
            # An idle link sleeps at generation 1; that is no fault.
            context.finding("unknown", "load-unknown", "it was idle when it was looked at: nothing is known of it under load", subject=subject)
            continue
        _tell_missing(context, load, subject)
        for name, what, code in (("pcie_gen", "generation", "link-slow"), ("pcie_width", "width", "link-narrow")):
            now, most = load[name], load[name + "_max"]
            if now is not None and most is not None and now < most:
                context.finding(
                    "degraded",
                    code,
                    "the PCIe link's %s is %d under load, %d is possible" % (what, now, most),
                    subject=subject,
                    value=now,
                    threshold=most,
                    threshold_source="what GPU and slot can do, as nvidia-smi says",
                    action="reseat the card or riser, look at the slot's BIOS settings, then at rdiag topo",
                )
        held = [reason for reason in load["throttle"] if reason in _FAULTS]
        if held:
            context.finding(
                "fail",
                "throttled",
                "clocks are held down under load: %s" % ", ".join(held),
                subject=subject,
                action="look at cooling and power supply of this GPU; rdiag gpu shows its temperatures and limits",
            )
        elif "thermal slowdown by software" in load["throttle"]:
            context.finding(
                "degraded", "throttled", "clocks are lowered under load because the GPU is hot", subject=subject,
                value=load["temperature_c"], unit="C", action="look at the cooling of this GPU",
            )  # fmt: skip


def _tell_missing(context: Context, load: dict[str, Any], subject: str) -> None:
    """Report what could not be looked at; what the card or the driver does not have is no gap."""
    gaps = []
    for name, text in sorted(load["missing"].items()):
        reason = absent("" if text == "empty" else text)
        if reason is None or reason.reason not in ("not-supported", "deprecated"):
            gaps.append("%s: %s" % (name, text))
    if gaps:
        context.finding("unknown", "load-unknown", "what it does under load is not known: %s" % "; ".join(gaps), subject=subject)
