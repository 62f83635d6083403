"""The GPUs of a host on one screen: the verdict, then only what is not well, then one row a GPU."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..text import safe
from .outcome import STYLES, findings, headline

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..findings import Finding
    from ..outcome import Outcome

_PLAINLY = frozenset({"gpu-passed-on", "gpu-not-here", "readings-repeated", "iommu-translated", "changed-since-baseline"})
"""Findings that are no fault and are shown all the same."""
_NOBODY_KNOWS = frozenset({"gpu-count", "driver-hangs", "no-answer", "nvidia-smi-failed"})
"""Findings that leave open whether there are GPUs where none is listed and nothing has failed."""
_MAX_PROCESSES = 20
_SHORT = (
    ("NVIDIA ", ""), (" Generation", ""), (" Blackwell", ""), (" Server Edition", " Server"),
    (" Workstation Edition", " WS"), ("GeForce ", ""),
)  # fmt: skip


def render(outcome: Outcome[Any]) -> RenderableType:
    """Return the GPUs of a host; 80 columns are enough where all are of one model."""
    result = outcome.answer
    if result is None:
        return headline(outcome)
    parts: list[RenderableType] = [headline(outcome, _sentence(outcome))]
    shown = [finding for finding in outcome.findings if finding.level not in {"ok", "skipped"} or finding.code in _PLAINLY]
    found = findings(_lacking_once(shown))
    if found is not None:
        parts.append(found)
    if result.gpus:
        parts.append(_table(result))
    parts += [Text(line) for line in _processes(result)]
    parts += [Text(line, "dim") for line in _about(outcome)]
    return Group(*parts)


_LACKING = re.compile(r"(\S+) cannot be told: ")
_NOT_PRINTED = "it is not in what was printed"


def _lacking_once(items: Sequence[Finding]) -> list[Finding]:
    """Put what a saved answer lacks into one finding with a line for each check."""
    kept: list[Finding] = []
    lines: list[str] = []
    for item in items:
        match = _LACKING.match(item.message)
        if match is None or not (item.action or "").startswith(_NOT_PRINTED):
            kept.append(item)
            continue
        names = item.evidence or item.message[match.end() :].split("; ")
        fields = ", ".join(name.removesuffix(": not-reported") for name in names[:_MAX_FIELDS])
        more = f" and {len(names) - _MAX_FIELDS} more" if len(names) > _MAX_FIELDS else ""
        lines.append(f"{item.subject + ': ' if item.subject else ''}{match.group(1)}: {fields}{more}")
        if len(lines) == 1:
            kept.append(item)
    if len(lines) < 2:
        return list(items)
    return [
        dataclasses.replace(item, subject=None, message="not printed, and so not judged:", value=None, evidence=tuple(lines))
        if _LACKING.match(item.message) and (item.action or "").startswith(_NOT_PRINTED) else item
        for item in kept
    ]  # fmt: skip


_MAX_FIELDS = 3
"""Fields of a check that are named where a saved answer lacks them."""


def _sentence(outcome: Outcome[Any]) -> str:
    result: Any = outcome.answer
    there = result.expected_gpus if result.expected_gpus is not None else len(result.gpus)
    usable = f"{result.usable_gpus} of {there} GPUs usable{_what_some_have(outcome)}" if there or result.gpus else "no GPU"
    if outcome.status == "unknown" and not result.gpus and any(finding.code in _NOBODY_KNOWS for finding in outcome.findings):
        usable = f"nobody can tell how many{f' of {there}' if there else ''} GPUs are usable"
    busy = sum(gpu.free is False for gpu in result.gpus)
    if busy:
        usable += f", {busy} in use"
    changes = sum(one.code == "changed-since-baseline" and one.level in {"fail", "degraded"} for one in outcome.findings)
    if changes:
        usable += f"; {changes} change{'s' if changes > 1 else ''} for the worse since the baseline"
    levels = Counter(level for group in (result.checks, *(gpu.checks for gpu in result.gpus)) for level in group.values())
    told = [f"{levels[level]} {level}" for level in ("ok", "fail", "degraded", "unknown") if levels[level] or level == "ok"]
    return f"{usable} (checks: {', '.join(told)})"


def _what_some_have(outcome: Outcome[Any]) -> str:
    """Say how many GPUs have failed or are degraded, and of what: the count alone would hide it."""
    parts = []
    for level, verb in (("fail", "failed"), ("degraded", "degraded")):
        of_cards = [one for one in outcome.findings if one.level == level and (one.subject or "").startswith("gpu ")]
        cards = {(one.subject or "").split()[-1 if len((one.subject or "").split()) < 3 else 2] for one in of_cards}
        if not cards:
            continue
        codes = Counter(code for code, _ in {(one.code, one.subject) for one in of_cards})
        words = [f"{count} {code}" if len(cards) > 1 else code for code, count in sorted(codes.items(), key=lambda item: (-item[1], item[0]))[:_MAX_CODES]]
        more = f", {len(codes) - _MAX_CODES} more" if len(codes) > _MAX_CODES else ""
        parts.append(f"; {len(cards)} {verb} ({', '.join(words)}{more})")
    undecided = sum(gpu.status == "unknown" for gpu in outcome.result.gpus)
    return "".join(parts) + (f"; {undecided} unknown" if undecided else "")


_MAX_CODES = 3
"""Kinds of findings that the headline names."""


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.0f}{unit}"


def _of(value: float | None, limit: float | None) -> str:
    return "-" if value is None else f"{_number(value)}/{_number(limit)}"


def _gib(gpu: Any) -> str:
    if gpu.memory_used_mib is None or gpu.memory_total_mib is None:
        return "-"
    return f"{gpu.memory_used_mib / 1024:.1f}/{gpu.memory_total_mib / 1024:.0f}"


def _name(text: str | None) -> str:
    name = text or "-"
    for long, short in _SHORT:
        name = name.replace(long, short)
    return safe(name, limit=26)


def _errors(gpu: Any) -> str:
    if gpu.ecc_enabled is False:
        return "off"
    return "-" if gpu.ecc_uncorrected_volatile is None else str(gpu.ecc_uncorrected_volatile)


def _remap(gpu: Any) -> str:
    if gpu.remap_pending is None and gpu.remap_failure is None:
        return "-"
    return "failed" if gpu.remap_failure else "pending" if gpu.remap_pending else "ok"


def _table(result: Any) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    mixed = len(_models(result)) > 1
    table.add_column("gpu", justify="right", no_wrap=True, min_width=3)
    # What tells the card in the machine is never cut.
    table.add_column("bus id", no_wrap=True, min_width=max(len(safe(gpu.bus_id or "?")) for gpu in result.gpus))
    table.add_column("status", no_wrap=True, min_width=8)
    for name in ("util", "mem GiB", "C", "power W", "PCIe now/max", "ecc", "remap"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    table.add_column("action")
    if mixed:
        table.add_column("model", no_wrap=True)
    for gpu in result.gpus:
        link = "-" if gpu.pcie_gen is None else f"{gpu.pcie_gen}x{_number(gpu.pcie_width)}/{_number(gpu.pcie_gen_max)}x{_number(gpu.pcie_width_max)}"
        table.add_row(
            _number(gpu.index) if gpu.index is not None else "?",
            safe(gpu.bus_id or "?"),
            Text(gpu.status, STYLES.get(gpu.status, "")),
            _number(gpu.utilization_pct, "%"),
            _gib(gpu),
            _number(gpu.temperature_c),
            _of(gpu.power_w, gpu.power_limit_w),
            link,
            _errors(gpu),
            _remap(gpu),
            safe(gpu.recovery_action or "-"),
            *((_name(gpu.name),) if mixed else ()),
        )
    return table


def _models(result: Any) -> Counter[str]:
    return Counter(_name(gpu.name) for gpu in result.gpus if gpu.name)


def _processes(result: Any) -> Iterator[str]:
    lines = []
    for gpu in result.gpus:
        for process in gpu.processes:
            where = f", {safe(process.container)}" if process.container else ""
            lines.append(
                f"gpu {_number(gpu.index)}: pid {process.pid} {safe(process.user or 'unknown user')} "
                f"{_number(process.memory_mib, ' MiB')} {safe(process.name, limit=60)}{where}"
            )
    yield from lines[:_MAX_PROCESSES]
    if len(lines) > _MAX_PROCESSES:
        yield f"and {len(lines) - _MAX_PROCESSES} more processes; --json lists them all"


def _about(outcome: Outcome[Any]) -> Iterator[str]:
    result: Any = outcome.answer
    driver = result.driver_version or "unknown"
    module = "" if result.module_version is None else f", kernel module {result.module_version}{' (open)' if result.module_open else ''}"
    models = _models(result)
    if models:
        yield "cards: " + ", ".join(f"{count} x {model}" for model, count in models.items())
    yield f"driver {safe(driver)}{safe(module)}; from {safe(result.source)}; {safe(result.surroundings)}"
    skipped = [finding.message for finding in outcome.findings if finding.level == "skipped"]
    if skipped:
        yield "not judged: " + "; ".join(safe(message, limit=120) for message in skipped)
