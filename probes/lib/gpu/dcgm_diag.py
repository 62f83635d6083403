"""Reads the JSON of ``dcgmi diag -j`` of DCGM 3 and 4: one result a test and entity, every one of them, not the first.

A test that was skipped, or whose status is a word that is not known, has not passed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, Iterator

MAX_BYTES = 16 << 20
ROOTS = ("DCGM Diagnostic", "DCGM GPU Diagnostic", "DCGM GPU Diagnostic Results")
_STATUSES = {"pass": "ok", "fail": "fail", "warn": "degraded", "skip": "skipped", "not run": "skipped"}


class Refused(ValueError):
    """The text is no such JSON."""


@dataclass(frozen=True)
class Outcome:
    """One test on one entity."""

    category: str
    test: str
    status: str
    """ok, fail, degraded, skipped; unknown for any other word."""
    printed: str
    """That word."""
    entity: str | None = None
    """GPU, CPU...; None for the whole host."""
    entity_id: int | None = None
    warnings: tuple[str, ...] = ()
    error_ids: tuple[int, ...] = ()


@dataclass
class Diagnosis:
    """All outcomes, and those that make no sense."""

    version: str | None = None
    driver_version: str | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def parse_dcgm_diag(text: str) -> Diagnosis:
    """Return every result of a diagnosis; raise :class:`Refused` for another text."""
    if len(text) > MAX_BYTES:
        raise Refused("%d characters, more than %d" % (len(text), MAX_BYTES))
    start = text.find("{")
    try:
        top: Any = json.JSONDecoder().raw_decode(text[start:])[0] if start >= 0 else {}
    except (ValueError, RecursionError) as error:
        raise Refused("not whole JSON: %s" % str(error)[:200]) from None
    top = top if isinstance(top, dict) else {}
    root = next((top[name] for name in ROOTS if isinstance(top.get(name), dict)), None)
    if root is None or not isinstance(root.get("test_categories"), list):
        raise Refused("no diagnosis of DCGM in it")
    metadata = top.get("metadata")
    about = {**root, **(metadata if isinstance(metadata, dict) else {})}
    found = Diagnosis(_text(about.get("version")), _text(about.get("Driver Version Detected")))
    for category, test, result in _results(root):
        if isinstance(result, dict) and isinstance(result.get("status"), str):
            found.outcomes += _outcomes(category, test, result)
        else:
            found.damaged.append("%s / %s: %s" % (category, test, json.dumps(result)[:100]))
    return found


def _results(root: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for category in _dicts(root.get("test_categories")):
        for test in _dicts(category.get("tests")):
            names = str(category.get("category")), str(test.get("name"))
            results = test.get("results")
            for result in results if isinstance(results, list) and results else [None]:
                yield (*names, result)


def _outcomes(category: str, test: str, result: dict[str, Any]) -> list[Outcome]:
    printed = result["status"]
    status = _STATUSES.get(printed.strip().lower(), "unknown")
    raw = result.get("warnings", ())
    entries = raw if isinstance(raw, list) else [raw] if raw else []
    warnings = tuple(str(one.get("warning") if isinstance(one, dict) else one)[:500] for one in entries)
    ids = tuple(one["error_id"] for one in entries if isinstance(one, dict) and type(one.get("error_id")) is int)
    entities: list[tuple[str | None, int | None]] = [(None, None)]
    if type(result.get("entity_id")) is int:
        entities = [(_text(result.get("entity_group")), result["entity_id"])]
    elif isinstance(result.get("gpu_ids"), str) and re.fullmatch(r"[0-9]{1,4}(?:, ?[0-9]{1,4})*", result["gpu_ids"]):
        entities = [("GPU", int(one)) for one in result["gpu_ids"].split(",")]
    return [Outcome(category, test, status, printed, name, number, warnings, ids) for name, number in entities]


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _text(value: Any) -> str | None:
    return value[:200] if isinstance(value, str) else None
