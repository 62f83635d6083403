"""One parameter's value: held to its field's type, or read from the text of ``--set``."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Mapping
from typing import Any, Literal

from .probe_fields import type_text, without_none

Place = tuple[str | int, ...]

_INTEGER = re.compile(r"[-+]?[0-9]+\Z", re.ASCII)
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?\Z", re.ASCII)
_MAX_DIGITS = 300


class Unfit(ValueError):
    """A value does not fit its field: where inside the field, and what is allowed there."""

    def __init__(self, given: object, allowed: str, path: Place = ()) -> None:
        super().__init__(allowed)
        self.given = given
        self.allowed = allowed
        self.path = path

    def below(self, part: str | int) -> Unfit:
        """Return the same complaint, seen from one level further out."""
        return Unfit(self.given, self.allowed, (part, *self.path))


ALLOWED: dict[type, str] = {
    str: "a text is allowed",
    int: "an integer is allowed",
    float: "a finite number is allowed",
    bool: "true or false is allowed",
}
"""What to say of each scalar type."""


def checked(value: Any, annotation: Any) -> Any:
    """Return ``value`` as a field of type ``annotation`` holds it; raise Unfit."""
    inner, optional = without_none(annotation)
    if value is None and optional:
        return None
    origin = typing.get_origin(inner)
    if origin is Literal:
        return _checked_choice(value, inner)
    if origin is tuple:
        return _checked_items(value, inner)
    if origin is dict:
        return _checked_entries(value, inner)
    return _checked_scalar(value, inner, optional=optional)


def _checked_scalar(value: Any, kind: type, *, optional: bool) -> Any:
    if kind is str and isinstance(value, str):
        return without_nul(str(value))
    if kind is float:
        if type(value) is int and abs(value) < 2**1023:
            return float(value)
        if type(value) is float and value - value == 0:
            return value
    elif type(value) is kind and kind is not str:
        return _bounded(value)
    raise _unfit_scalar(value, kind, optional=optional)


def _unfit_scalar(value: Any, kind: type, *, optional: bool) -> Unfit:
    return Unfit(value, ALLOWED[kind] + (", or null" if optional else ""))


def _bounded(value: Any) -> Any:
    if type(value) is int and abs(value) >= 10**_MAX_DIGITS:
        raise Unfit(f"an integer of {value.bit_length()} bits", f"at most {_MAX_DIGITS} digits are allowed")
    return value


def without_nul(text: str) -> str:
    """Return ``text``; raise Unfit when there is a NUL in it."""
    if "\0" in text:
        raise Unfit(text, "a text without NUL is allowed: no path, argument or environment variable can hold one")
    return text


def _choices(annotation: Any) -> str:
    shown = [value if isinstance(value, str) else json.dumps(value) for value in typing.get_args(annotation)]
    return "one of " + ", ".join(shown) + " is allowed"


def _checked_choice(value: Any, annotation: Any) -> Any:
    for choice in typing.get_args(annotation):
        if type(choice) is type(value) and choice == value:
            return choice
    raise Unfit(value, _choices(annotation))


def _checked_items(value: Any, annotation: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise Unfit(value, f"a list is allowed: {type_text(annotation)}")
    item_type = typing.get_args(annotation)[0]
    items = []
    for index, item in enumerate(value):
        try:
            items.append(checked(item, item_type))
        except Unfit as unfit:
            raise unfit.below(index) from None
    return tuple(items)


def _checked_entries(value: Any, annotation: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise Unfit(value, f"a mapping of names to values is allowed: {type_text(annotation)}")
    item_type = typing.get_args(annotation)[1]
    entries = {}
    for key, item in value.items():
        try:
            entries[without_nul(key)] = checked(item, item_type)
        except Unfit as unfit:
            raise unfit.below(key) from None
    return entries


def plain(value: Any) -> Any:
    """Return a parameter's value as JSON has it: tuples are lists there."""
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def items_from_text(text: str, annotation: Any) -> tuple[Any, ...]:
    """Return a JSON array's items; any other text is one item."""
    item_type = typing.get_args(annotation)[0]
    plain_item, _ = without_none(item_type)
    if text.startswith("["):
        try:
            value = _json(text)
        except Unfit:
            if plain_item is not str:
                raise
        else:
            return _checked_items(value, annotation)
    return (from_text(text, item_type),)


def from_text(text: str, annotation: Any) -> Any:
    """Return the value of type ``annotation`` that ``text`` stands for; raise Unfit."""
    inner, optional = without_none(annotation)
    if inner is str:
        # Literally: "null" is a text of four letters. A parameter file can say null.
        return without_nul(text)
    if optional and text == "null":
        return None
    origin = typing.get_origin(inner)
    if origin is Literal:
        return _choice_from_text(text, inner)
    if origin in (tuple, dict):
        return checked(_json(text), inner)
    return _scalar_from_text(text, inner, optional=optional)


def _scalar_from_text(text: str, kind: type, *, optional: bool) -> Any:
    if kind is bool and text in {"true", "false"}:
        return text == "true"
    if kind is int and _INTEGER.match(text) and len(text) <= _MAX_DIGITS:
        return int(text)
    if kind is float and _NUMBER.match(text):
        number = float(text)
        if number - number == 0:
            return number
    raise _unfit_scalar(text, kind, optional=optional)


def _choice_from_text(text: str, annotation: Any) -> Any:
    choices = typing.get_args(annotation)
    if text in choices:
        return text
    for choice in choices:
        if not isinstance(choice, str) and json.dumps(choice) == text:
            return choice
    raise Unfit(text, _choices(annotation))


def _json(text: str) -> Any:
    from .strict_json import StrictJsonError, loads

    try:
        return loads(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise Unfit(text, "JSON in UTF-8 is allowed") from None
    except StrictJsonError as error:
        raise Unfit(text, f"JSON is allowed ({error})") from None
