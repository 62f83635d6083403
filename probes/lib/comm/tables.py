"""What measured and parsed collectives have in common: the fields of the result of the probe nccl, as plain dicts.

A probe declares its result itself; what fills it, whether ranks or the text of nccl-tests, is made here.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Sequence

    Fields = Dict[str, Any]


def row(
    collective: str,
    size_bytes: int,
    *,
    in_place: bool,
    time_us: float | None = None,
    algbw_gbs: float | None = None,
    busbw_gbs: float | None = None,
    wrong: int | None = None,
    **more: Any,
) -> Fields:
    """Return the fields of one row; ``more`` are those that only some sources know, null otherwise."""
    fields: Fields = {
        "collective": collective,
        "size_bytes": size_bytes,
        "in_place": in_place,
        "time_us": time_us,
        "algbw_gbs": algbw_gbs,
        "busbw_gbs": busbw_gbs,
        "wrong": wrong,
        "count": None,
        "dtype": None,
        "redop": None,
        "root": None,
        "reported_algbw_gbs": None,
        "reported_busbw_gbs": None,
        "iterations": None,
        "spread_pct": None,
        "latency": None,
    }
    unknown = set(more) - set(fields)
    if unknown:
        raise TypeError("no such fields of a row: %s" % ", ".join(sorted(unknown)))
    fields.update(more)
    return fields


def report(
    source: str, backend: str, collective: str, *, rows: Sequence[Fields], complete: bool, **more: Any
) -> Fields:
    """Return the fields of a result; ``more`` are those that are not empty, null or zero."""
    fields: Fields = {
        "source": source,
        "backend": backend,
        "collective": collective,
        "ranks": None,
        "complete": complete,
        "correctness": correctness(rows),
        "damaged_rows": 0,
        "rows": tuple(rows),
        "peak_busbw_gbs": None,
        "peak_size_bytes": None,
        "expectation": None,
        "devices": (),
        "load": (),
        "failure": None,
        "control": None,
        "library_version": None,
        "torch_version": None,
        "settings": {},
        "notes": (),
    }
    unknown = set(more) - set(fields)
    if unknown:
        raise TypeError("no such fields of a result: %s" % ", ".join(sorted(unknown)))
    fields.update(more)
    return fields


def correctness(rows: Sequence[Fields]) -> str:
    """Say what all rows together prove: one wrong element is enough, one row that was not checked leaves it open."""
    if any(each["wrong"] for each in rows):
        return "wrong"
    if not rows or any(each["wrong"] is None for each in rows):
        return "not_checked"
    return "ok"
