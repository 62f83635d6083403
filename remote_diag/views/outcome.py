"""Any probe's outcome as a table: the verdict first, then findings, then the fields of the result."""

from __future__ import annotations

import dataclasses
import re
from itertools import islice
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ..text import safe

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence, Sized

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from ..findings import Finding
    from ..outcome import Outcome

STYLES = {"ok": "green", "degraded": "yellow", "fail": "bold red", "unknown": "magenta", "skipped": "dim"}
"""Colour of each status and level; every one is also written out as a word."""
_SHOWN = 300
_NAME = 80
_MANY = 100
"""Entries of one mapping or list that get lines of their own."""


def headline(outcome: Outcome[Any], sentence: str | None = None) -> Text:
    """Return the first line: host, probe, status, and one sentence if there is one."""
    text = Text()
    text.append(f"{outcome.host}: {outcome.probe}: ")
    text.append(outcome.status, STYLES.get(outcome.status, ""))
    told = sentence or outcome.message
    if told:
        text.append(f" - {safe(told)}")
    return text


def findings(items: Sequence[Finding]) -> RenderableType | None:
    """Return the findings as lines: level, subject, message; below each its numbers, evidence and next step.

    What is the same on several subjects comes once, with all of them below it.
    """
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column("level", no_wrap=True, min_width=8)
    table.add_column("text", overflow="fold")
    for item, subjects in alike(items):
        subject = f"{safe(subjects[0])}: " if len(subjects) == 1 and not item.message.startswith(subjects[0]) else ""
        table.add_row(Text(item.level, STYLES.get(item.level, "")), Text(f"{subject}{safe(item.message)}"))
        if len(subjects) > 1:
            table.add_row("", Text(f"applies to {len(subjects)}: {', '.join(safe(_short(one)) for one in subjects)}"))
        for line in support(item):
            table.add_row("", Text(line, "dim"))
        if item.action:
            table.add_row("", Advice(f"next: {safe(item.action)}"))
    return table if items else None


class Advice:
    """Text whose commands of nvidia-smi are not broken over lines where a line has room for them.

    Half of one is another command: without its ``-i``, ``nvidia-smi -r`` resets every GPU of the host.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines."""

        def whole(found: re.Match[str]) -> str:
            command = found.group()
            return command.replace(" ", _GLUE) if len(command) < options.max_width else command

        for line in Text(_COMMAND.sub(whole, self._text), overflow="fold").wrap(console, options.max_width):
            yield Text(line.plain.replace(_GLUE, " ").rstrip())

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the width of the words, and that of all on one line."""
        return Measurement.get(console, options, Text(self._text))


_COMMAND = re.compile(r"nvidia-smi(?: -[\w-]+(?: [\w.:%,]*[\w%])?)+")
_GLUE = "\ue000"
"""A character of one column that is no space; private, and in no text that is shown."""
_UUID = re.compile(r" (?:GPU|MIG)-[0-9a-f][0-9a-f-]+\Z")
"""Of no use in a long list, where the bus id tells cards apart; ``--json`` has it."""
_ITEM = re.compile(r"(\w+)\[([^\]]+)\]((?:\.\w+)?)\Z")
"""One thing of a list, or a value of it, as comparisons with a baseline name them: ``gpus[GPU-12ab].power_limit_w``."""


def _short(subject: str) -> str:
    """Return a subject as it is named beside others."""
    item = _ITEM.match(subject)
    return _UUID.sub("", subject) if item is None else item[2]


def alike(items: Sequence[Finding]) -> Iterator[tuple[Finding, list[str]]]:
    """Yield (what findings that differ in nothing but their subject have in common, all their subjects), in order.

    The address of a subject's own card is no difference: where there are several it reads BUS_ID; nor is the name of a
    thing that the subject and the message have in common.
    """
    together: dict[Finding, tuple[Finding, list[str]]] = {}
    for item in items:
        _, subjects = together.setdefault(_of_any(item), (item, []))
        if item.subject and item.subject not in subjects:
            subjects.append(item.subject)
    for common, (first, subjects) in together.items():
        yield (common if len(subjects) > 1 else first), subjects


_BUS_ID = re.compile(r"\b[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b")


def _of_any(item: Finding) -> Finding:
    """Return a finding without what is in it of its subject alone."""
    thing = _ITEM.match(item.subject or "")
    if thing is not None:
        return dataclasses.replace(item, subject=None, message=item.message.replace(thing[0], f"{thing[1]}[...]{thing[3]}"))
    address = _BUS_ID.search(item.subject or "")
    if address is None:
        return dataclasses.replace(item, subject=None)
    own = re.compile("(GPU(?=[0-9]))?" + re.escape(address.group()), re.IGNORECASE)

    def general(line: str) -> str:
        return own.sub(lambda match: "GPU BUS_ID" if match[1] else "BUS_ID", line)

    action = None if item.action is None else general(item.action)
    return dataclasses.replace(item, subject=None, action=action, evidence=tuple(map(general, item.evidence)))


def opening(outcome: Outcome[Any], sentence: str | None) -> list[RenderableType]:
    """Return what a view begins with: the headline, then the findings if there are any."""
    found = findings(outcome.findings)
    return [headline(outcome, sentence), *([] if found is None else [found])]


def support(item: Finding) -> Iterator[str]:
    """Yield what a finding stands on: the measured value and its threshold, then the evidence, escaped."""
    unit = f" {safe(item.unit)}" if item.unit else ""
    if item.value is not None and not isinstance(item.value, bool):
        against = ""
        if item.threshold is not None:
            source = f" ({safe(item.threshold_source)})" if item.threshold_source else ""
            against = f"; threshold {safe(str(item.threshold))}{unit}{source}"
        yield f"measured {safe(str(item.value))}{unit}{against}"
    for line in item.evidence:
        yield safe(brief(line), limit=_SHOWN)


def brief(line: str) -> str:
    """Return a line with the lists of fields in its commands cut short; ``--json`` has them in full."""
    return _FIELDS.sub(r"\1...", line)


_FIELDS = re.compile(r"(--[a-z-]+=(?:[\w.]+,){3})[\w.,]{20,}")
"""An option with a long list, such as --query-gpu=index,uuid,...: its beginning tells which question it is."""


def _rows(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _rows(getattr(value, field.name), f"{prefix}.{field.name}" if prefix else field.name)
    elif isinstance(value, dict):
        if not value:
            yield prefix, "none"
        for key, item in islice(value.items(), _MANY):
            yield from _rows(item, f"{prefix}.{safe(str(key), limit=_NAME)}")
        yield from _rest(value, prefix)
    elif isinstance(value, (tuple, list)):
        if any(dataclasses.is_dataclass(item) for item in value):
            for index, item in enumerate(value[:_MANY]):
                yield from _rows(item, f"{prefix}[{index}]")
            yield from _rest(value, prefix)
        else:
            yield prefix, safe(", ".join(str(item) for item in value), limit=_SHOWN) or "none"
    elif value is None:
        yield prefix, "unknown"
    else:
        yield prefix, safe(str(value), limit=_SHOWN)


def _rest(value: Sized, prefix: str) -> Iterator[tuple[str, str]]:
    if len(value) > _MANY:
        yield prefix, f"... and {len(value) - _MANY} more; --json prints them all"


def fields(result: Any) -> Table:
    """Return the fields of a result as a two-column table; nested ones with dotted names."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("field", style="cyan", no_wrap=True)
    table.add_column("value", overflow="fold")
    for name, value in _rows(result):
        table.add_row(Text(name), Text(value))
    return table


def render(outcome: Outcome[Any]) -> RenderableType:
    """Return any outcome as verdict, findings and fields."""
    parts = opening(outcome, None)
    if outcome.answer is not None:
        parts.append(fields(outcome.answer))
    return Group(*parts)


def footer(outcome: Outcome[Any]) -> list[str]:
    """Return what a person should know besides the result: notes, where a baseline was saved, and where the run was kept.

    Plain lines, never wrapped: the last one is a command to copy.
    """
    lines = [f"note: {safe(note)}" for note in outcome.notes]
    if outcome.baseline is not None and "saved" in outcome.baseline:
        holds = outcome.baseline.get("holds")
        lines.append(f"baseline of {outcome.host} saved to {safe(outcome.baseline['saved'])}{f' ({safe(holds)})' if holds else ''}")
    if outcome.kept:
        lines.append(f"kept on {outcome.host}: {safe(outcome.kept)}")
        lines.append(f"run it again there: {safe(outcome.rerun or '')}")
    return lines
