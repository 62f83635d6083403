"""JSON from files nobody vouches for: headers of checkpoints, indexes, config.json."""

from __future__ import annotations

import json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MAX_DIGITS = 20
"""More than any 64-bit number has; Python needs quadratic time for long ones."""


MAX_CONTAINERS = 700_000
"""Objects and arrays; an empty one takes 2 bytes of text and 200 of memory. 200,000 tensors need 600,000."""


def parse_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in ``data``.

    Raises:
        ValueError: in words, why it is none: not UTF-8, not JSON, a key that occurs twice, nested too deeply, a number
            that no format has, more objects and arrays than any format needs.
    """
    if data.count(b"{") + data.count(b"[") > MAX_CONTAINERS:
        raise ValueError("more than %d objects and arrays" % MAX_CONTAINERS)
    try:
        # Not bytes: then UTF-16 and UTF-32 would pass as well. Infinity and NaN pass: transformers writes them.
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_object, parse_int=_integer, parse_float=_number)
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8 at byte %d" % error.start) from None
    except json.JSONDecodeError as error:
        raise ValueError("not JSON at character %d: %s" % (error.pos, error.msg)) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004
    return value


def count(value: object) -> int | None:
    """Return ``value`` when it is a non-negative integer, None otherwise; true and false are none."""
    return value if type(value) is int and value >= 0 else None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError("the name %s occurs twice" % ascii(name[:80]))
            seen.add(name)
    return found


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError("a number of %d digits" % len(text))
    return int(text)


def _number(text: str) -> float:
    if len(text) > 400:
        raise ValueError("a number of %d characters" % len(text))
    return float(text)
