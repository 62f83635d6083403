"""Reads the csv that nvidia-smi prints for ``--query-gpu``, with error text between its rows.

Cells are taken by their position. A row with another number of cells than there are columns tells nothing but who it
may be about: every number in it could stand in the wrong column.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .busid import normalise
from .missing import NOT_REPORTED, Missing, flag, garbage, known, missing
from .smi_errors import recognise
from .smi_fields import BY_FIELD, METRICS, Metric
from .smi_reading import REASON_BITS, Answer, GpuReading

if TYPE_CHECKING:
    from typing import Sequence

    from .missing import Reason

MAX_ROWS = 1024
MAX_LINE = 65536
MIN_FIELDS = ("index", "uuid", "pci.bus_id", "name")
"""Every driver knows these."""
_HEADER = re.compile(r"(?P<name>[A-Za-z0-9_.]{1,100})(?: \[(?P<unit>[A-Za-z%/]{1,10})\])?")
_UUID = re.compile(r"GPU-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}(?![0-9a-fA-F-])")
_ADDRESS = re.compile(r"(?<![0-9a-fA-F:.])[0-9a-fA-F]{8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7](?![0-9a-fA-F:.])")
_WITH_UNIT = re.compile(r"-?[0-9]+(?:\.[0-9]+)? ?(?:MiB|W|MHz|%|us)")
_QUOTED = re.compile(r'"([A-Za-z0-9_.]{1,100})"')
_REFUSED = re.compile(r'Field "([^"\n]{1,100})" is not a valid field to query', re.IGNORECASE)

QUERY: tuple[str, ...] = (
    *MIN_FIELDS,
    *(metric.csv[0] for metric in METRICS if metric.csv and metric.csv[0] not in {*MIN_FIELDS, "compute_mode"}),
    "compute_mode",
)
"""Everything worth asking, by its present name; ends with a word, where a cut shows."""


def help_fields(text: str) -> tuple[frozenset[str], ...]:
    """Return the fields of ``--help-query-gpu``: each as the set of its names. Empty if there are none."""
    found = []
    for line in text.splitlines()[:10000]:
        stripped = line.strip()
        if stripped.startswith('"') and _only_names(stripped):
            found.append(frozenset(_QUOTED.findall(stripped)))
    return tuple(found)


def _only_names(line: str) -> bool:
    rest = _QUOTED.sub("", line)
    return all(part in {"or", "and", ""} for part in rest.replace(",", " ").split())


def askable(wanted: Sequence[str], help_text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (what of ``wanted`` this driver knows, under the name that it knows; what it does not know).

    With no usable help text (it fails while the driver still loads) only :data:`MIN_FIELDS` are certain; then ask
    everything and drop what :func:`refused_field` names.
    """
    names = frozenset().union(*help_fields(help_text)) if help_text else frozenset()
    known_names, unknown = [], []
    for field in wanted:
        metric = BY_FIELD.get(field)
        aliases = (field, *(metric.csv if metric else ()))
        name = next((alias for alias in aliases if alias in names), None)
        if name is None:
            unknown.append(field)
        else:
            known_names.append(name)
    return tuple(known_names), tuple(unknown)


def refused_field(text: str) -> str | None:
    """Return the field that the driver says it does not know."""
    match = _REFUSED.search(text)
    return match.group(1) if match else None


def without(asked: Sequence[str], refused: str) -> tuple[str, ...]:
    """Return what to ask next: the refused field under its next name, or left out when it has no other."""
    metric = BY_FIELD.get(refused)
    names = metric.csv if metric else ()
    following = names[names.index(refused) + 1 :] if refused in names else ()
    after = next((name for name in following if name not in asked), None)
    replaced = [after if field == refused else field for field in asked]
    return tuple(field for field in replaced if field is not None)


class _Column:
    """One column: which metric it holds, if any, and whether the header gives it another unit than that metric has."""

    def __init__(self, name: str, header_unit: str | None = None) -> None:
        self.name = name
        self.metric: Metric | None = BY_FIELD.get(name)
        self.right = self.metric is None or not header_unit or header_unit == self.metric.unit


def parse_gpu_csv(text: str, asked: Sequence[str] = ()) -> Answer:
    """Return what a ``--query-gpu`` answer says.

    Args:
        text: stdout; with or without header, with or without units.
        asked: the fields that were asked for, in order. Without them there must be a header.
    """
    answer = Answer("query_gpu_csv")
    lines = [line for line in text.split("\n")[: MAX_ROWS * 4] if line.strip()]
    answer.complete = not text or text.endswith("\n")
    columns, header_at = _columns(lines, asked)
    if not columns:
        answer.troubles = [trouble for trouble in map(recognise, lines) if trouble is not None]
        answer.notes.append("no header names the columns")
        return answer
    cells_of = {number: _cells(line) for number, line in enumerate(lines)}
    strict = any(_WITH_UNIT.fullmatch(cell) for cells in cells_of.values() for cell in cells)
    trouble_before: str | None = None
    for number, line in enumerate(lines):
        cells = cells_of[number]
        if number == header_at or _is_header(cells):
            continue
        if len(cells) == len(columns) and (len(cells) > 1 or recognise(line) is None):
            if _is_junk(columns, cells, strict):
                answer.notes.append("not a row: %s" % line.strip()[:200])
                continue
            reading = _reading(columns, cells, strict)
            if number == len(lines) - 1 and not answer.complete and columns[-1].metric:
                # The line has no end: its last cell may have lost its own.
                setattr(reading, columns[-1].metric.name, garbage(cells[-1]))
        else:
            trouble = recognise(line)
            if trouble is not None and len(cells) < 4:
                answer.troubles.append(trouble)
                trouble_before = trouble.bus_id
                continue
            answer.notes.append("not a row: %s" % line.strip()[:200])
            *glued, reading = _identities(line)
            if known(reading.uuid) is None and known(reading.bus_id) is None:
                # Nobody knows whom it is about, or whether it is about a GPU at all.
                continue
            for other in glued:
                other.position = len(answer.readings)
                answer.readings.append(other)
        reading.position = len(answer.readings)
        if isinstance(reading.bus_id, Missing) and isinstance(reading.uuid, Missing) and trouble_before:
            # The driver names a card that it cannot reach, then prints that card's row full of errors.
            reading.bus_id = trouble_before
        trouble_before = None
        answer.readings.append(reading)
    _finish(answer)
    return answer


def _columns(lines: Sequence[str], asked: Sequence[str]) -> tuple[list[_Column], int]:
    """Return the columns, and which line is their header (-1: none)."""
    for number, line in enumerate(lines[:20]):
        cells = _cells(line)
        if not _is_header(cells):
            continue
        matches = [_HEADER.fullmatch(cell) for cell in cells]
        columns = []
        for position, match in enumerate(matches):
            name = match.group("name") if match else ""
            if name not in BY_FIELD and len(cells) == len(asked):
                name = asked[position]
            columns.append(_Column(name, match.group("unit") if match else None))
        return columns, number
    return [_Column(name) for name in asked], -1


_IDENTITY = frozenset({"index", "uuid", "bus_id"})


def _is_junk(columns: Sequence[_Column], cells: Sequence[str], strict: bool) -> bool:
    """Whether a row cannot be a GPU's: nothing that should say whose it is reads like it, nor like a reason why it is missing."""
    told = [(column.metric, cell) for column, cell in zip(columns, cells) if column.metric is not None]
    telling = [item for item in told if item[0].name in _IDENTITY] or told
    return bool(telling) and all(
        missing(cell) is None and isinstance(metric.read(cell, not (strict and metric.unit)), Missing) for metric, cell in telling
    )


def _is_header(cells: Sequence[str]) -> bool:
    """Whether most cells are names of fields: one glued label does not hide a header."""
    names = 0
    for cell in cells:
        match = _HEADER.fullmatch(cell)
        if match and (match.group("name") in BY_FIELD or "." in match.group("name")):
            names += not _looks_like_value(cell)
    return names > 0 and names * 2 >= len(cells)


def _looks_like_value(cell: str) -> bool:
    return cell.replace(".", "").isdigit() or normalise(cell) is not None


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line[:MAX_LINE].split(",")]


def _reading(columns: Sequence[_Column], cells: Sequence[str], strict: bool) -> GpuReading:
    reading = GpuReading(source="csv")
    flags: dict[str, str] = {}
    for column, cell in zip(columns, cells):
        metric = column.metric
        if metric is None:
            prefix, _, reason = column.name.rpartition(".")
            if prefix in {"clocks_event_reasons", "clocks_throttle_reasons"}:
                flags[reason] = cell
            continue
        bare = not (strict and metric.unit)
        value = metric.read(cell, bare) if column.right else garbage(cell)
        _set(reading, metric.name, value)
    if flags and _is_unsaid(reading.clock_reasons):
        reading.clock_reasons = reasons_of(flags)
    return reading


def _set(reading: GpuReading, name: str, value: object) -> None:
    """Two columns may hold one metric: what contradicts is an error, what adds a value to a reason is taken."""
    before = getattr(reading, name)
    if _is_unsaid(before) or (isinstance(before, Missing) and before.reason in _WEAK):
        setattr(reading, name, value)
    elif isinstance(value, Missing):
        if value.reason not in _WEAK:
            setattr(reading, name, value)
    elif not isinstance(before, Missing) and before != value:
        setattr(reading, name, garbage("%s and %s" % (before, value)))


_WEAK: frozenset[Reason] = frozenset({"not-supported", "deprecated", "not-reported"})


def _is_unsaid(value: object) -> bool:
    return isinstance(value, Missing) and value.reason == "not-reported"


def reasons_of(flags: dict[str, str]) -> int | Missing:
    """Return the clock reasons of single flags (Active, Not Active); missing unless all that matter are there."""
    mask = 0
    for name, bit in REASON_BITS.items():
        if name not in flags:
            if name == "display_clocks_setting":
                continue
            return NOT_REPORTED
        value = flag(flags[name])
        if isinstance(value, Missing):
            return value
        mask |= bit if value else 0
    return mask


def _identities(line: str) -> list[GpuReading]:
    """Return readings that say only whom a damaged line is about, if that is plain: one for each row that was glued into it."""
    uuids = list(dict.fromkeys(_UUID.findall(line)))
    addresses = list(dict.fromkeys(filter(None, (normalise(found) for found in _ADDRESS.findall(line)))))
    if len(uuids) > 1 and len(addresses) in {0, len(uuids)}:
        # Both come once in each row, in the same order.
        return [_identity(line, uuid, addresses[place] if addresses else None) for place, uuid in enumerate(uuids)]
    return [_identity(line, uuids[0] if len(uuids) == 1 else None, addresses[0] if len(addresses) == 1 else None)]


def _identity(line: str, uuid: str | None, address: str | None) -> GpuReading:
    reading = GpuReading(source="csv", damaged="its row has another number of cells than there are columns")
    broken = garbage(line.strip())
    for name, value in list(reading.metrics()):
        if isinstance(value, Missing):
            setattr(reading, name, broken)
    reading.uuid = broken if uuid is None else uuid
    reading.bus_id = broken if address is None else address
    return reading


def _finish(answer: Answer) -> None:
    seen: dict[str, int] = {}
    for reading in answer.readings:
        refuse_impossible(reading)
        address = known(reading.bus_id)
        if address is not None:
            seen[address] = seen.get(address, 0) + 1
    answer.notes += ["%d rows for %s" % (count, address) for address, count in seen.items() if count > 1]
    if not answer.complete:
        answer.notes.append("the last line has no end: it may be cut")
    versions = {value for value in (known(reading.driver_version) for reading in answer.readings) if value is not None}
    if len(versions) == 1:
        answer.driver_version = versions.pop()


def refuse_impossible(reading: GpuReading) -> None:
    """Turn numbers that contradict each other into errors: each is readable, none can be believed."""
    total, used = known(reading.memory_total_mib), known(reading.memory_used_mib)
    if total is not None and used is not None and used > total + 1:
        reading.memory_used_mib = garbage("%.0f MiB used of %.0f MiB" % (used, total))
