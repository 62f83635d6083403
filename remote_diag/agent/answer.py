"""A probe's result as strict JSON: what the client cannot read back exactly is refused here, by name of the field."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MAX_DEPTH = 100
_MAX_INTEGER_BITS = 1024


class BadResult(Exception):
    """The result is not what a probe may return; the text names the field.

    Args:
        message: the cause.
        hint: how to return it instead.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def encode(result: Any, limit: int) -> bytes:
    """Return the dataclass instance ``result`` as UTF-8 JSON of at most ``limit`` bytes; raise BadResult."""
    plain = _plain(result, type(result).__name__, 0)
    payload = json.dumps(plain, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    if len(payload) > limit:
        raise BadResult(
            "the result has %d bytes as JSON; %d are allowed" % (len(payload), limit),
            "return figures that summarise the data, not the data",
        )
    return payload


def _plain(value: Any, path: str, depth: int) -> Any:
    """Return ``value`` as dicts, lists and scalars; ``path`` is how a person would write its place."""
    if value is None or value is True or value is False:
        return value
    kind = type(value)
    if kind is str:
        return _text(value, path)
    if kind is int:
        if value.bit_length() > _MAX_INTEGER_BITS:
            raise BadResult("%s is an integer of %d bits; %d are allowed" % (path, value.bit_length(), _MAX_INTEGER_BITS))
        return value
    if kind is float:
        if value - value != 0:
            raise BadResult(
                "%s is %r, which JSON does not have" % (path, value),
                "use None for what could not be measured, and say why in a finding",
            )
        return value
    if depth >= _MAX_DEPTH:
        raise BadResult("%s is nested more than %d deep" % (path[:200], _MAX_DEPTH))
    if is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name), "%s.%s" % (path, field.name), depth + 1)
            for field in fields(value)
        }
    if kind in (tuple, list):
        return [_plain(item, "%s[%d]" % (path, index), depth + 1) for index, item in enumerate(value)]
    if kind is dict:
        return {_key(key, path): _plain(item, "%s[%r]" % (path, key), depth + 1) for key, item in value.items()}
    raise BadResult("%s is a %s" % (path, _type_name(kind)), _how_to_convert(value, kind))


def _key(key: Any, path: str) -> str:
    if type(key) is not str:
        raise BadResult("%s has the key %r of type %s; keys must be str" % (path, key, _type_name(type(key))))
    return _text(key, "a key of " + path)


def _text(text: str, path: str) -> str:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise BadResult(
                "%s holds bytes that are no text: %s" % (path, ascii(text)[:200]),
                "os.fsencode(name).decode('utf-8', 'backslashreplace') makes text of any file name",
            ) from None
    return text


def _type_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else "%s.%s" % (kind.__module__, kind.__qualname__)


def _how_to_convert(value: Any, kind: type) -> str:
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        if getattr(value, "shape", None) == ():
            return "value.item() makes a Python number of it"
        return "tuple(values.tolist()) makes Python numbers of it"
    for base in (bool, int, float, str, tuple, dict):
        if issubclass(kind, base):
            return "%s(value) makes a plain value of it" % base.__name__
    if kind in (set, frozenset):
        return "tuple(sorted(values)) has an order"
    if kind is bytes:
        return "value.decode() or value.hex() makes text of it"
    return "a result is made of frozen dataclasses, tuples, dicts with str keys, str, int, float, bool and None"
