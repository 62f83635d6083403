"""Probes as tables: the list of all, and everything about one."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..probe_fields import is_union
from ..text import safe

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

    from ..discovery import Found, Listed
    from ..probe import Probe
    from ..probe_fields import Field


class Row(NamedTuple):
    """One field of a result, nested ones with their path: ``ranks[].gbps``."""

    name: str
    type: str
    doc: str


def result_rows(probe: Probe[Any, Any]) -> list[Row]:
    """Return every field that a result of ``probe`` can have, depth first."""
    return list(_rows(probe, probe.Result, "", ()))


def _rows(probe: Probe[Any, Any], kind: type[Any], prefix: str, above: tuple[type[Any], ...]) -> Iterator[Row]:
    for field in probe.fields(kind):
        name = f"{prefix}.{field.name}" if prefix else field.name
        yield Row(name, field.type_text, one_line(field.doc))
        for suffix, inner in _dataclasses_in(field.annotation):
            if inner not in (*above, kind):
                yield from _rows(probe, inner, name + suffix, (*above, kind))


def _dataclasses_in(annotation: Any) -> Iterator[tuple[str, type[Any]]]:
    """Yield (how a path goes on, dataclass) for every dataclass that a type holds."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        yield "", annotation
        return
    origin = typing.get_origin(annotation)
    step = "[]" if origin is tuple else ".*" if origin is dict else ""
    if step or is_union(annotation):
        for argument in typing.get_args(annotation):
            for suffix, inner in _dataclasses_in(argument):
                yield step + suffix, inner


def one_line(doc: str) -> str:
    """Return an attribute docstring as one line."""
    return " ".join(doc.split())


def _reflowed(text: str) -> str:
    """Return ``text`` with one line a paragraph, for the terminal to wrap; indented blocks and lists stay."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        paragraph if any(line[:1] in " -*" for line in paragraph.split("\n")) else " ".join(paragraph.split("\n"))
        for paragraph in paragraphs
    )


def origin_text(found: Found) -> str:
    """Return where a probe comes from, and what it hides."""
    return found.origin if found.shadows is None else f"{found.origin} (instead of {found.shadows})"


_GAP = 2
"""Blanks between two columns."""


@dataclasses.dataclass(frozen=True)
class _List:
    """The usable probes: one line each where that fits, else what a probe touches below its summary."""

    rows: Sequence[tuple[str, str, str, str]]
    """Name, summary, effects, origin."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        titles = ("probe", "summary", "effects", "from")
        widths = [max(map(len, column)) for column in zip(titles, *self.rows, strict=True)]
        lines = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
        lines.add_column("probe", style="cyan", no_wrap=True)
        if sum(widths) + _GAP * len(widths) <= options.max_width:
            for title in titles[1:]:
                lines.add_column(title, no_wrap=True)
            for name, *others in self.rows:
                lines.add_row(Text(name), *map(Text, others))
        else:
            lines.add_column("summary; effects; from", overflow="fold")
            for name, summary, effects, origin in self.rows:
                lines.add_row(Text(name), Text.assemble(summary, "\n", (f"{effects}; {origin}", "dim")))
        yield lines


def table(listed: Sequence[Listed]) -> RenderableType:
    """Return the list of probes; files that break the contract follow, with what is wrong."""
    rows = []
    broken: list[RenderableType] = []
    for item in listed:
        name = safe(item.found.name)
        if item.error is not None:
            broken.append(Text(f"\n{name} cannot be used: {item.error.message}", "red"))
            broken.append(Text(f"hint: {item.error.hint}", "dim"))
        elif item.probe is not None:
            effects = ", ".join(item.probe.effects) or "none"
            rows.append((name, safe(item.probe.summary), effects, safe(origin_text(item.found))))
    return Group(_List(rows), *broken)


def details(probe: Probe[Any, Any], found: Found) -> RenderableType:
    """Return everything about one probe."""
    parts: list[RenderableType] = [Text.assemble((probe.name, "cyan"), f": {safe(probe.summary)}")]
    if probe.description:
        parts.append(Text("\n" + safe(_reflowed(probe.description), keep_newlines=True)))
    facts = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    facts.add_row("effects", ", ".join(probe.effects) or "none")
    facts.add_row("file", Text(safe(str(probe.path)), overflow="fold"))
    facts.add_row("from", Text(safe(origin_text(found)), overflow="fold"))
    facts.add_row("sha256", probe.sha256)
    parts += [Text(""), facts, Text("\nparameters"), _parameters(probe.params_fields), Text("\nresult")]
    parts.append(_table(result_rows(probe)))
    return Group(*parts)


def _parameters(fields: Sequence[Field]) -> RenderableType:
    if not fields:
        return Text("  none")
    return _table([Row(field.name, _with_default(field), one_line(field.doc)) for field in fields])


def _with_default(field: Field) -> str:
    return field.type_text if field.required else f"{field.type_text} = {field.default!r}"


def _table(rows: Sequence[Row]) -> Table:
    lines = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 2))
    lines.add_column("name", style="cyan", overflow="fold")
    lines.add_column("type", overflow="fold")
    lines.add_column("meaning", overflow="fold", ratio=1)
    for row in rows:
        lines.add_row(*(Text(safe(cell)) for cell in row))
    return lines
