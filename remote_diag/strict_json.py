"""JSON from a host: one value, nothing silently repaired, and every refusal says where.

Python's reader takes NaN and Infinity, turns ``1e999`` into infinity, lets the last of two equal keys win, guesses
UTF-16 and recurses as deep as it is told to. None of that is accepted here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from .text import safe

MAX_DEPTH = 100
"""How deep arrays and objects may be nested."""
MAX_INTEGER = 2**1024
"""Integers are smaller than this, in magnitude, as the agent has it too; a float ends there as well."""
_MAX_DIGITS = len(str(MAX_INTEGER))
_TOKENS = re.compile(r'\\.|["\[\]{}]', re.DOTALL)
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SHOWN = 60


class StrictJsonError(ValueError):
    """The text is not the JSON that was promised; the message names the place, as ``a.b[3]``, and the reason."""


class _Flaw:
    """Stands in the tree for a value that is not accepted, until its path is known."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class _Hooks:
    """What the parser calls; remembers whether there was any flaw, so that clean data is not searched."""

    def __init__(self) -> None:
        self.flawed = False

    def flaw(self, reason: str) -> _Flaw:
        self.flawed = True
        return _Flaw(reason)

    def pairs(self, pairs: list[tuple[str, Any]]) -> Any:
        members = dict(pairs)
        if len(members) == len(pairs):
            return members
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                return self.flaw(f"the key {_shown(key)} appears twice")
            seen.add(key)
        return members

    def constant(self, name: str) -> _Flaw:
        return self.flaw(f"{name} is not a number in JSON")

    def real(self, text: str) -> Any:
        number = float(text)
        return number if number - number == 0 else self.flaw(f"the number {_cut(text)} is too large")

    def integer(self, text: str) -> Any:
        # The length first: turning a long text into a number takes time that grows with its square.
        number = int(text) if len(text) <= _MAX_DIGITS + 1 else MAX_INTEGER
        return number if -MAX_INTEGER < number < MAX_INTEGER else self.flaw(f"the number {_cut(text)} is too large")


def loads(data: bytes) -> Any:
    """Return the one JSON value in ``data``.

    Raises:
        StrictJsonError: not UTF-8, not exactly one JSON text, nested deeper than :data:`MAX_DEPTH`, a key twice in
            one object, NaN or an infinity, or an integer of :data:`MAX_INTEGER` or more.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise StrictJsonError(f"byte {error.start} is not UTF-8") from None
    _check_depth(text)
    hooks = _Hooks()
    try:
        value = json.loads(
            text,
            object_pairs_hook=hooks.pairs,
            parse_constant=hooks.constant,
            parse_float=hooks.real,
            parse_int=hooks.integer,
        )
    except json.JSONDecodeError as error:
        raise StrictJsonError(f"not JSON: {safe(error.msg)} at character {error.pos} of {len(text)}") from None
    except (ValueError, RecursionError) as error:
        raise StrictJsonError(f"not JSON: {safe(str(error), limit=200)}") from None
    if hooks.flawed:
        for path, flaw in _flaws(value, ()):
            raise StrictJsonError(f"{path_text(path)}: {flaw.reason}")
    return value


def path_text(path: tuple[str | int, ...]) -> str:
    """Return a path as people read it: ``ranks[3].gbps``; keys that are no names stand in brackets, escaped."""
    parts: list[str] = []
    for part in path:
        if isinstance(part, int):
            parts.append(f"[{part}]")
        elif _IDENTIFIER.match(part) and len(part) <= _SHOWN:
            parts.append(f".{part}" if parts else part)
        else:
            parts.append(f"[{_shown(part)}]")
        if len(parts) > 40:
            return "".join(parts) + "…"
    return "".join(parts) or "the value itself"


def _check_depth(text: str) -> None:
    """Refuse deep nesting before any parser recurses into it."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = 0
    inside_string = False
    for token in _TOKENS.finditer(text):
        mark = token.group()
        if mark == '"':
            inside_string = not inside_string
        elif inside_string or mark[0] == "\\":
            continue
        elif mark in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise StrictJsonError(f"nested deeper than {MAX_DEPTH} at character {token.start()} of {len(text)}")
        else:
            depth -= 1


def _flaws(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], _Flaw]]:
    if isinstance(value, _Flaw):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _flaws(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _flaws(item, (*path, index))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:20]}… ({len(text)} characters)"


def _shown(key: str) -> str:
    return json.dumps(safe(key, limit=_SHOWN), ensure_ascii=False)
