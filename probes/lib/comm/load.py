"""What the GPUs do while they are busy: only then do the link's generation, clocks and throttling mean anything."""

from __future__ import annotations

import re
from time import monotonic, sleep

from ..gpu.busid import normalise
from ..gpu.missing import missing as absent
from ..gpu.run_smi import SMI, Programs
from .plan import median

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, List, Sequence, Tuple

    from remote_diag.probe import Context

    Sample = Tuple[float, List[Dict[str, Any]]]

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
_HOT = "thermal slowdown by software"
_REASONS = {
    0x1: IDLE,
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: _HOT,
    0x40: "thermal slowdown by hardware",
    0x80: "power brake",
}
_IGNORED = 0x2 | 0x100
"""Application clocks, display clocks."""
_FAULTS = {"hardware slowdown", "thermal slowdown by hardware", "power brake"}
_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_SECONDS = 15.0
_INTERVAL = 0.5
"""Seconds from one question to the next."""
_MOST = 8
"""Samples that tell enough."""
_MARGIN = 1.5
"""How much longer than the last answer the next one may take."""
_LASTING = 0.5
"""Share of samples from which on something is no passing state."""


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


def watch(seconds: float, bus_ids: Sequence[str], *, limit: float = _SECONDS) -> tuple[list[Sample], str | None]:
    """Ask nvidia-smi again and again; return (seconds after the beginning, fields of each GPU), and what went wrong.

    Args:
        seconds: how long the GPUs will be busy; what nvidia-smi says after that is not counted.
        bus_ids: of the GPUs that matter; all when empty.
        limit: seconds after which nvidia-smi counts as stuck.
    """
    begun = monotonic()
    taken: list[Sample] = []
    while True:
        asked = monotonic()
        found, problem = sample(limit, bus_ids)
        ended = monotonic()
        if ended - begun > seconds and problem is None:
            if not taken:
                problem = "nvidia-smi took %.1f s: GPUs may have been idle again when it looked" % (ended - begun)
            return taken, problem
        if found:
            taken.append((ended - begun, found))
        pause = max(0.0, _INTERVAL - (ended - asked))
        # One that would end too late is not asked for: it would only be thrown away.
        if problem is not None or len(taken) >= _MOST or ended - begun + pause + _MARGIN * (ended - asked) > seconds:
            return taken, problem
        sleep(pause)


def summary(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return the fields of a Load for each GPU, in the order of bus ids, from all that was seen of it."""
    seen: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for moment, gpus in samples:
        for gpu in gpus:
            seen.setdefault(gpu["bus_id"], []).append((moment, gpu))
    return [_summed(bus_id, seen[bus_id]) for bus_id in sorted(seen)]


def _summed(bus_id: str, every: list[tuple[float, dict[str, Any]]]) -> dict[str, Any]:
    # An idle link sleeps at generation 1; that is no fault, and tells nothing of what it does under load.
    busy = [(moment, gpu) for moment, gpu in every if IDLE not in gpu["throttle"]]
    used = busy or every
    gpus = [gpu for _, gpu in used]
    values = {name: [gpu[name] for gpu in gpus if gpu[name] is not None] for name, _ in _FIELDS if name != "throttle"}
    fields: dict[str, Any] = {name: median(found) if found else None for name, found in values.items()}
    fields["temperature_c"] = max(values["temperature_c"], default=None)
    low: set[int] = set()
    for name in ("pcie_gen", "pcie_width"):
        most = fields[name + "_max"] = max(values[name + "_max"], default=None)
        settled, places = _settled(gpus, name, most)
        fields[name] = min(settled, default=None)
        low.update(places)
    known = [(moment, gpu["throttle"]) for moment, gpu in used if "throttle" not in gpu["missing"]]
    return {
        "bus_id": bus_id,
        **fields,
        "throttle": tuple(dict.fromkeys(reason for _, reasons_ in known for reason in reasons_)),
        "missing": {name: text for name, text in gpus[-1]["missing"].items() if all(name in gpu["missing"] for gpu in gpus)},
        "samples": len(busy),
        "idle_samples": len(every) - len(busy),
        "link_low_samples": len(low),
        "held": tuple(_held(known)) if busy else (),
    }


def _settled(gpus: list[dict[str, Any]], name: str, most: int | None) -> tuple[list[int], list[int]]:
    """Return what a link had once it was awake, and the samples in which that was less than it can do."""
    known = [(place, gpu[name]) for place, gpu in enumerate(gpus) if gpu[name] is not None]
    if most is not None and any(value >= most for _, value in known):
        # A link that slept takes a moment to wake up.
        while known[0][1] < most:
            del known[0]
    return [value for _, value in known], [place for place, value in known if most is not None and value < most]


def _held(known: list[tuple[float, tuple[str, ...]]]) -> Iterator[dict[str, Any]]:
    for reason in dict.fromkeys(reason for _, reasons_ in known for reason in reasons_):
        moments = [moment for moment, reasons_ in known if reason in reasons_]
        yield {
            "reason": reason, "samples": len(moments), "share": len(moments) / len(known),
            "first_s": round(moments[0], 3), "last_s": round(moments[-1], 3),
        }  # fmt: skip


def judge(context: Context, loads: Sequence[dict[str, Any]]) -> None:
    """Report links that stay narrow or slow under load, and clocks that a fault holds down."""
    for load in loads:
        subject = "gpu %s" % load["bus_id"]
        if not load["samples"]:
            text = "it was idle when it was looked at (%s): nothing is known of it under load" % _count(load["idle_samples"])
            context.finding("unknown", "load-unknown", text, subject=subject)
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
                    evidence=("the link was below that %s" % _often(load["link_low_samples"], load["samples"]),),
                    action="reseat the card or riser, look at the slot's BIOS settings, then at rdiag topo",
                )
        _judge_clocks(context, load, subject)


def _judge_clocks(context: Context, load: dict[str, Any], subject: str) -> None:
    faults = [held for held in load["held"] if held["reason"] in _FAULTS]
    hot = [held for held in load["held"] if held["reason"] == _HOT]
    evidence = tuple(
        "%s: %s, first after %.1f s and last after %.1f s"
        % (held["reason"], _often(held["samples"], load["samples"]), held["first_s"], held["last_s"])
        for held in faults + hot
    )
    if faults:
        share = max(held["share"] for held in faults)
        context.finding(
            "fail" if share >= _LASTING else "degraded",
            "throttled",
            "clocks are held down under load %s: %s"
            % (_often(max(held["samples"] for held in faults), load["samples"]), ", ".join(held["reason"] for held in faults)),
            subject=subject,
            value=round(share, 3),
            unit="of the samples",
            threshold=_LASTING,
            threshold_source="rdiag's rule: from there on it lasts, below it comes and goes",
            evidence=evidence,
            action="look at cooling and power supply of this GPU; rdiag gpu shows its temperatures and limits",
        )
    elif hot:
        context.finding(
            "degraded", "throttled",
            "clocks are lowered under load because the GPU is hot, %s" % _often(hot[0]["samples"], load["samples"]),
            subject=subject, value=load["temperature_c"], unit="C", evidence=evidence, action="look at the cooling of this GPU",
        )  # fmt: skip


def _count(samples: int) -> str:
    return "%d sample%s" % (samples, "" if samples == 1 else "s")


def _often(count: int, samples: int) -> str:
    """Say in how many samples something was seen."""
    if samples == 1:
        return "in 1 sample, the only one"
    return "in all %d samples" % samples if count >= samples else "in %d of %d samples" % (count, samples)


def _tell_missing(context: Context, load: dict[str, Any], subject: str) -> None:
    """Report what could not be looked at; what the card or the driver does not have is no gap."""
    gaps = []
    for name, text in sorted(load["missing"].items()):
        reason = absent("" if text == "empty" else text)
        if reason is None or reason.reason not in ("not-supported", "deprecated"):
            gaps.append("%s: %s" % (name, text))
    if gaps:
        context.finding("unknown", "load-unknown", "what it does under load is not known: %s" % "; ".join(gaps), subject=subject)
