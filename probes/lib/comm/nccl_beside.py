"""Holds the table that nccl-tests printed and the JSON that it wrote in the same run against each other.

Where both say the same the JSON is taken: it has more digits, and no label of a launcher and no message of NCCL damages
its rows. The list of devices is the text's, since a build without MPI writes the first device only.
"""

from __future__ import annotations

from dataclasses import replace

from . import nccl_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator, Tuple

    from .nccl_log import Line, Log, Printed, Side, Table

    Key = Tuple[Any, ...]

_EVIDENCE = 5
_NAMES = {"half": "float16", "float": "float32", "double": "float64", "char": "int8", "int": "int32"}
"""Spellings of element types in the table -> in JSON, where they differ between versions."""


def join(log: Log, written: str) -> tuple[Log, list[dict[str, Any]]]:
    """Return the log to read, and findings as arguments of `context.finding`.

    Args:
        log: Of what the program printed.
        written: What it wrote, whole or not.
    """
    try:
        other = nccl_json.read(written)
    except ValueError as error:
        # One that ended early has written nothing, or half of a name.
        if any(table.ended for table in log.tables):
            log.notes.append(f"its JSON cannot be read ({error}): numbers are those of its table")
        return log, []
    found = other.tables[0]
    if len(log.tables) > 1:
        log.notes.append("it printed several tables and wrote one JSON: numbers are those of the tables")
        return log, []
    if log.tables:
        table = log.tables[0]
        differences = _differences(table, found)
        if differences:
            _count_wrong(table, found)
            return log, [_differs(differences)]
        # Of two that end too early the one that got further tells more.
        if (found.ended, len(found.lines)) < (table.ended, len(table.lines)):
            log.notes.append(f"its JSON ends after {len(found.lines)} rows: numbers are those of its table")
            return log, []
        _complete(found, table)
    if not found.lines:
        return log, []
    both = f"its table agrees in {_sides(found)} numbers of rows" if log.tables else "it printed no table"
    notes = [*log.notes, *other.notes, f"numbers are those of the JSON that it wrote; {both}"]
    return replace(
        other, settings={**other.settings, **log.settings}, failures=list(dict.fromkeys([*log.failures, *other.failures])),
        command=log.command, notes=notes,
    ), []  # fmt: skip


def _complete(found: Table, table: Table) -> None:
    """Put what only the text tells into the table of the JSON."""
    if len(table.devices) > len(found.devices):
        found.devices = table.devices
    found.program = found.program or table.program
    found.nccl_version = found.nccl_version or table.nccl_version
    found.tests_version = table.tests_version


def _count_wrong(table: Table, other: Table) -> None:
    """Count what is wrong by either of the two: data are right only where both say so."""
    worst = {key: max(side.wrong or 0, other_side.wrong or 0) for key, side, other_side in _common(table, other)}
    for place, line in enumerate(table.lines):
        sides = tuple(replace(side, wrong=worst.get(_key(line, side)) or side.wrong) for side in line.sides)
        table.lines[place] = replace(line, sides=sides)


def _common(table: Table, other: Table) -> Iterator[tuple[Key, Side, Side]]:
    written = _rows(other)
    for key, side in _rows(table).items():
        if key in written:
            yield key, side, written[key]


def _sides(table: Table) -> int:
    return sum(len(line.sides) for line in table.lines)


def _rows(table: Table) -> dict[Key, Side]:
    """Return the placements by what they are of; a size that comes again, as of several cycles, is told apart by that."""
    found: dict[Key, Side] = {}
    for line in table.lines:
        for side in line.sides:
            key = _key(line, side)
            while key in found:
                key = (*key[:-1], key[-1] + 1)
            found[key] = side
    return found


def _key(line: Line, side: Side) -> Key:
    return (line.size_bytes, _NAMES.get(line.dtype or "", line.dtype), line.redop, line.root, side.in_place, 0)


def _differences(table: Table, other: Table) -> list[str]:
    printed, written = _rows(table), _rows(other)
    told = []
    for key in printed.keys() | written.keys():
        where = f"{key[0]} bytes, {'in' if key[4] else 'out of'} place"
        one, two = printed.get(key), written.get(key)
        if one is None or two is None:
            # A row that is damaged, or that an early end left out, contradicts nothing.
            whole = table.ended and other.ended and not table.damaged and not other.damaged and not table.left_out
            told += [f"{where}: only {'printed' if two is None else 'written'}"] if whole else []
            continue
        for name, first, second in (
            ("us", one.time_us, two.time_us), ("GB/s algbw", one.algbw_gbs, two.algbw_gbs), ("GB/s busbw", one.busbw_gbs, two.busbw_gbs),
        ):  # fmt: skip
            if not _same(first, second):
                told.append(f"{where}: {first.value:g} {name} printed, {second.value:g} written")
        if (one.wrong or 0) != (two.wrong or 0):
            told.append(f"{where}: {one.wrong} wrong elements printed, {two.wrong} written")
    return sorted(told)


def _same(one: Printed, other: Printed) -> bool:
    return abs(one.value - other.value) <= (one.slack + other.slack) * 1.001 + 1e-9 * one.value


def _differs(differences: list[str]) -> dict[str, Any]:
    return {
        "level": "unknown", "code": "json-differs", "value": len(differences), "unit": "differences", "threshold": 0,
        "message": f"its table and the JSON that it wrote differ in {len(differences)} numbers: what is shown is its table",
        "threshold_source": "both are of one run", "evidence": tuple(differences[:_EVIDENCE]),
        "action": "run it again; if they differ again, read both (--keep) and do not trust this build of nccl-tests",
    }  # fmt: skip
