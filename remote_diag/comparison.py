"""What of a probe's result is held against a stored one, under which conditions, and what differs.

A command says it once, beside itself::

    Comparison(
        watches=(Watch("gpus[uuid]", level="fail"), Watch("gpus[uuid].power_limit_w", tolerance=0.01, worse="lower")),
        conditions=(Condition("ranks", lambda result, asked: result["ranks"], "{} ranks"),),
        places={"gpus": "bus_id"},
    )

Three things are kept apart: a value that is another one now, a thing that a whole listing lacks (gone), and what
nobody can tell any more. The last is never called gone and never ok.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from .findings import Finding, Level

Plain: TypeAlias = bool | int | float | str | None
Kind: TypeAlias = Literal["changed", "gone", "new", "unknown"]
_STEP = re.compile(r"(?P<name>[a-z0-9_]+)(?:\[(?P<by>[a-z0-9_,]+)\])?\Z")
_ABSENT: Any = object()
"""Stands for a field that is not there at all, where None is a value."""


@dataclass(frozen=True)
class Watch:
    """One value, or one kind of thing, that is compared."""

    path: str
    """Names joined by dots; ``gpus[uuid]`` goes through a list whose items are recognised by their ``uuid``, and
    ``rows[size_bytes,in_place]`` by two fields. A path that ends with a list watches which items are there."""
    level: Level = "degraded"
    """What a change is worth; ``ok`` for one that is worth knowing and no fault."""
    tolerance: float = 0.0
    """Relative change of a number that means nothing."""
    worse: Literal["any", "lower", "higher"] = "any"
    """Which direction is a change for the worse; the other one is only told, as ``ok``."""
    unit: str | None = None
    action: str | None = None
    source: str | None = None
    """Where the tolerance comes from, for people."""
    optional: bool = False
    """Whether items that are not there now were only not asked for: sizes that this run left out."""
    null_says: bool = False
    """Whether None is an answer (there is none of it) and not a value that is missing."""


@dataclass(frozen=True)
class Condition:
    """Something that has to be the same before numbers are compared: how many ranks, which device."""

    name: str
    read: Callable[[Mapping[str, Any], Mapping[str, Any]], Plain]
    """Gets a result and the parameters of its run (none for what was stored before they were kept); None is the usual case."""
    words: str = "{}"
    """How a value is told: ``{} ranks``."""
    usual: str = ""
    """How None is told: ``without --p2p-level``."""
    option: str | None = None
    """Parameter that asks for it; where that is None the host decides, and another value is the host's change."""

    def tell(self, value: Plain) -> str:
        """Return a value in words."""
        return (self.usual or f"without {self.name}") if value is None else self.words.format(value)


def _whole(_result: Mapping[str, Any], _codes: frozenset[str]) -> str | None:
    return None


def _as_they_are(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return old, new


@dataclass(frozen=True)
class Comparison:
    """What of one probe is compared, and when."""

    watches: Sequence[Watch]
    conditions: Sequence[Condition] = ()
    places: Mapping[str, str] = field(default_factory=dict)
    """List -> field that tells where an item is (a slot), for items that nobody can name any more, and for swapped ones."""
    unlisted: Callable[[Mapping[str, Any], frozenset[str]], str | None] = _whole
    """Gets a result and the codes of its findings, and says why its lists may lack things that are there; None if they are whole."""
    align: Callable[[Mapping[str, Any], Mapping[str, Any]], tuple[Mapping[str, Any], Mapping[str, Any]]] = _as_they_are
    """Gets both results, and names their things in the same way."""

    def conditions_of(self, result: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Plain]:
        """Return the conditions that a result holds for, by name, without the usual ones."""
        values = {condition.name: condition.read(result, asked) for condition in self.conditions}
        return {name: value for name, value in values.items() if value is not None}

    def differing(self, conditions: Mapping[str, Plain], other: Mapping[str, Plain]) -> set[str]:
        """Return the names of the conditions that are not the same."""
        return {each.name for each in self.conditions if conditions.get(each.name) != other.get(each.name)}

    def tell(self, conditions: Mapping[str, Plain], names: Collection[str]) -> str:
        """Return the conditions called ``names`` in words."""
        return ", ".join(each.tell(conditions.get(each.name)) for each in self.conditions if each.name in names)


@dataclass(frozen=True)
class Difference:
    """One value that is not what it was."""

    key: str
    """``gpus[GPU-12ab].power_limit_w``."""
    old: Plain
    """None where there was no value; for a thing that is new or gone, whether it was there."""
    new: Plain
    change: float | None
    """Relative to the old value, for numbers."""
    watch: Watch
    kind: Kind = "changed"
    item: str = ""
    """Which thing it is a value of: ``gpus[GPU-12ab]``; empty for values of the whole."""
    reason: str = ""
    """Why it cannot be told; for a thing that is gone, what is in its place."""

    def as_dict(self) -> dict[str, Plain]:
        """Return the object that ``--json`` prints."""
        return {
            "key": self.key, "old": self.old, "new": self.new, "change": self.change, "kind": self.kind, "reason": self.reason or None,
        }  # fmt: skip


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], comparison: Comparison, codes: frozenset[str] = frozenset()
) -> tuple[Difference, ...]:
    """Return what differs between two results, as far as it is watched.

    Items of lists are matched by what identifies them, never by their place; an item that is new or gone is one
    difference of its list, and its values are not compared. What cannot be told now is of the kind ``unknown``.

    Args:
        old: the stored result.
        new: the result of now.
        comparison: what is watched.
        codes: codes of the findings of now; some say that a listing is not whole.
    """
    old, new = comparison.align(old, new)
    why = comparison.unlisted(new, codes)
    watched_lists = {_Path.of(watch.path).list_name for watch in comparison.watches if watch.path.endswith("]")}
    found: list[Difference] = []
    for watch in comparison.watches:
        path = _Path.of(watch.path)
        if path.by is None:
            found += _value(path.list_name, _dig(old, path.head), _dig(new, path.head), watch)
        elif not path.tail:
            found += _which(path, old, new, watch, why=why, place=comparison.places.get(path.list_name))
        else:
            found += _values_of_items(path, old, new, watch, covered=path.list_name in watched_lists)
    return tuple(found)


@dataclass(frozen=True)
class _Path:
    head: tuple[str, ...]
    by: tuple[str, ...] | None
    tail: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> _Path:
        head: list[str] = []
        tail: list[str] = []
        by: tuple[str, ...] | None = None
        for step in text.split("."):
            match = _STEP.match(step)
            if match is None or (by is not None and match["by"] is not None):
                raise ValueError(f"not a path of a watch: {text!r}")
            (head if by is None else tail).append(match["name"])
            by = tuple(match["by"].split(",")) if match["by"] is not None else by
        return cls(tuple(head), by, tuple(tail))

    @property
    def list_name(self) -> str:
        """The list, or the value itself where there is none."""
        return ".".join(self.head)


@dataclass(frozen=True)
class _Items:
    named: dict[str, Mapping[str, Any]]
    nameless: list[Mapping[str, Any]]


def _dig(value: Any, names: Sequence[str]) -> Any:
    for name in names:
        if not isinstance(value, Mapping) or name not in value:
            return _ABSENT
        value = value[name]
    return value


def _items(result: Mapping[str, Any], path: _Path) -> _Items | None:
    """Return the items of a list by what identifies them; None where there is no list, or items cannot be told apart."""
    value = _dig(result, path.head)
    if not isinstance(value, Sequence) or isinstance(value, str):
        return None
    found = _Items({}, [])
    for item in value:
        if not isinstance(item, Mapping):
            return None
        identity = [item.get(part) for part in path.by or ()]
        key = "/".join(str(part) for part in identity)
        if None in identity:
            found.nameless.append(item)
        elif key in found.named:
            return None
        else:
            found.named[key] = item
    return found


def _which(
    path: _Path, old: Mapping[str, Any], new: Mapping[str, Any], watch: Watch, *, why: str | None, place: str | None
) -> Iterator[Difference]:
    """Which things are gone, new, or cannot be told to be there."""
    before, after = _items(old, path), _items(new, path)
    if before is None:
        return
    name = path.list_name
    if after is None:
        if before.named:
            yield Difference(name, len(before.named), None, None, watch, "unknown", reason=why or "the list cannot be read")
        return
    missing = [key for key in before.named if key not in after.named]
    if why is not None:
        if missing:
            yield Difference(name, len(missing), None, None, watch, "unknown", reason=why)
        missing = []
    elif after.nameless:
        where = {item.get(place) for item in after.nameless} - {None} if place else set()
        lost = [key for key in missing if place and before.named[key].get(place) in where]
        # One that has neither name nor known place may be any of the others.
        lost = missing if len(after.nameless) > len(lost) else lost
        missing = [key for key in missing if key not in lost]
        if lost:
            reason = f"{len(after.nameless)} listed without {' and '.join(path.by or ())}{_first_reason(after.nameless, path)}"
            yield Difference(name, len(lost), None, None, watch, "unknown", reason=reason)
    successors = {item.get(place): key for key, item in after.named.items() if key not in before.named} if place else {}
    for key in missing:
        successor = successors.get(before.named[key].get(place)) if place else None
        label = f"{name}[{key}]"
        yield Difference(label, old=True, new=False, change=None, watch=watch, kind="gone", item=label, reason=successor or "")
    for key in after.named:
        if key not in before.named and not before.nameless:
            label = f"{name}[{key}]"
            yield Difference(label, old=False, new=True, change=None, watch=watch, kind="new", item=label)


def _first_reason(items: Sequence[Mapping[str, Any]], path: _Path) -> str:
    reasons = (_reason(item, part) for item in items for part in path.by or ())
    found = next((reason for reason in reasons if reason), "")
    return f" ({found})" if found else ""


def _values_of_items(
    path: _Path, old: Mapping[str, Any], new: Mapping[str, Any], watch: Watch, *, covered: bool
) -> Iterator[Difference]:
    before, after = _items(old, path), _items(new, path)
    tail = ".".join(path.tail)
    told = {} if before is None else {key: item for key, item in before.named.items() if _dig(item, path.tail) not in (None, _ABSENT)}
    if (after is None or not (after.named or after.nameless)) and told and not covered:
        yield Difference(f"{path.list_name}.{tail}", len(told), None, None, watch, "unknown", reason="nothing of it was told now")
        return
    if before is None or after is None:
        return
    for key, item in before.named.items():
        label = f"{path.list_name}[{key}]"
        if key in after.named:
            now = after.named[key]
            was, became = _dig(item, path.tail), _dig(now, path.tail)
            yield from _value(f"{label}.{tail}", was, became, watch, item=label, reason=_reason(now, path.tail[0]))
        elif key in told and not covered and not watch.optional:
            yield Difference(f"{label}.{tail}", _plain(_dig(item, path.tail)), None, None, watch, "unknown", label, "it is not listed now")


def _reason(item: Mapping[str, Any], name: str) -> str:
    """Return why a field is None, where the item keeps reasons (``missing``)."""
    missing = item.get("missing")
    why = missing.get(name) if isinstance(missing, Mapping) else None
    return str(why.get("reason") or "") if isinstance(why, Mapping) else str(why or "")


def _plain(value: Any) -> Plain:
    return value if isinstance(value, (bool, int, float, str, type(None))) else json.dumps(value, sort_keys=True)


def _value(key: str, old: Any, new: Any, watch: Watch, *, item: str = "", reason: str = "") -> Iterator[Difference]:
    if old is _ABSENT:
        return
    old = _plain(old)
    if new is _ABSENT or (new is None and old is not None and not watch.null_says):
        if old is not None:
            yield Difference(key, old, None, None, watch, "unknown", item, reason)
        return
    new = _plain(new)
    if old == new:
        return
    change = None
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (old, new)):
        change = (new - old) / abs(old) if old else None
        if change is not None and abs(change) <= watch.tolerance:
            return
    yield Difference(key, old, new, change, watch, "changed", item)


# -- in words


_SHOWN = 8
_MAX_FINDINGS = 200
_CODE = "changed-since-baseline"
_CODE_UNKNOWN = "not-compared-with-baseline"


def findings(found: Sequence[Difference], source: str) -> list[Finding]:
    """Return differences as findings: each change for itself, what cannot be told only once for all things alike.

    Args:
        found: the differences.
        source: which baseline they are from, for people.
    """
    told = [_changed(one, source) for one in found if one.kind != "unknown"]
    more = len(told) - _MAX_FINDINGS
    if more > 0:
        worst = "unknown" if all(one.level in {"ok", "skipped"} for one in told[_MAX_FINDINGS:]) else "degraded"
        told = told[:_MAX_FINDINGS]
        told.append(Finding(worst, _CODE, f"{more} more changes; --json lists them all", value=more, threshold_source=source))  # type: ignore[arg-type]
    return told + list(_unknown([one for one in found if one.kind == "unknown"], source))


def _changed(difference: Difference, source: str) -> Finding:
    watch, key = difference.watch, difference.key
    level: Level = watch.level
    if difference.kind == "gone":
        message = f"{key} is gone since the baseline"
        if difference.reason:
            message += f": {difference.reason} is in its place"
            level = "degraded" if level == "fail" else level
    elif difference.kind == "new":
        message = f"{key} is new since the baseline"
        level = "ok" if watch.worse != "any" else "degraded" if level == "fail" else level
    elif difference.old is None and not watch.null_says:
        message, level = f"{key} can be told now: {difference.new}", "ok"
    else:
        percent = "" if difference.change is None else f" ({difference.change:+.1%})"
        message = f"{key} was {_shown(difference.old)} and is {_shown(difference.new)}{percent}"
        if watch.worse != "any" and difference.change is not None and (difference.change < 0) != (watch.worse == "lower"):
            level = "ok"
    return Finding(
        level, _CODE, message, subject=key, value=difference.new, unit=watch.unit, threshold=difference.old, threshold_source=source,
        evidence=(f"up to {watch.tolerance:.0%} is no change ({watch.source})",) if watch.source and difference.change is not None else (),
        action=watch.action or "find out what changed; if it is meant, save a new baseline with --save-baseline",
    )  # fmt: skip


def _shown(value: Plain) -> str:
    return "none" if value is None else str(value)


def _unknown(found: Sequence[Difference], source: str) -> Iterator[Finding]:
    """Fold what cannot be told: the fields that the same things lack for the same reason are one finding."""
    lists = [one for one in found if not one.item and one.watch.path.endswith("]")]
    for one in lists:
        these = f"one of the baseline's {one.key} is" if one.old == 1 else f"{one.old} of the baseline's {one.key} are"
        yield _finding_unknown(f"whether {these} still there cannot be told: {one.reason}", [one], source)
    of_field: dict[str, list[Difference]] = {}
    for one in found:
        if one not in lists:
            of_field.setdefault(one.watch.path, []).append(one)
    alike: dict[tuple[str, ...], list[list[Difference]]] = {}
    for group in of_field.values():
        alike.setdefault(tuple(sorted(one.item for one in group)), []).append(group)
    for items, groups in alike.items():
        ones = [one for group in groups for one in group]
        names = ", ".join(group[0].watch.path.rpartition("].")[2] if group[0].item else group[0].key for group in groups)
        reasons = ", ".join(dict.fromkeys(one.reason for one in ones if one.reason))
        whose = "" if items[0] == "" else f" of {items[0]}" if len(items) == 1 else f" of {len(items)} {items[0].partition('[')[0]}"
        yield _finding_unknown(f"{names}{whose} can no longer be told{f': {reasons}' if reasons else ''}", ones, source)


def _finding_unknown(message: str, ones: Sequence[Difference], source: str) -> Finding:
    evidence = [f"{one.key} was {_shown(one.old)}" for one in ones[:_SHOWN]]
    evidence += [f"and {len(ones) - _SHOWN} more"] if len(ones) > _SHOWN else []
    return Finding(
        "unknown" if any(one.watch.level != "ok" for one in ones) else "skipped",
        _CODE_UNKNOWN, message, subject=ones[0].key if len(ones) == 1 else None,
        threshold=ones[0].old if len(ones) == 1 else None, threshold_source=source, evidence=tuple(evidence) if ones[0].item or len(ones) > 1 else (),
        action="see why nobody tells it; what was is in the baseline",
    )  # fmt: skip
