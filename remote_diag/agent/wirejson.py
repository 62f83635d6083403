"""JSON for the supervisor, without what ``import json`` pulls in.

The standard package imports ``re`` and ``enum``: 5 ms of a start that takes 13. The scanner and the string
encoder underneath are one small C module; where it is missing or different, the package itself is used.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def _refuse(name: str) -> Any:
    raise ValueError("%s is not JSON" % name)


class _Rules:
    """What the C scanner asks of a decoder."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = staticmethod(_refuse)


def decode(data: bytes) -> Any:
    """Return the value of one UTF-8 JSON text without surrounding blanks; raise ValueError for anything else."""
    text = data.decode("utf-8")
    try:
        from _json import make_scanner

        scan: Any = make_scanner(_Rules)  # type: ignore[arg-type]
    except (ImportError, AttributeError, TypeError):
        return _decode_with_package(text)
    try:
        value, end = scan(text, 0)
    except StopIteration:
        raise ValueError("not JSON") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except SystemError:
        # Python 3.11 looks for the class of the error in json.decoder, which is not loaded here, and says only this.
        raise ValueError("not JSON") from None
    if text[end:].strip(" \t\r\n"):
        raise ValueError("something follows the JSON text")
    return value


def _decode_with_package(text: str) -> Any:
    import json

    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def encode(value: Any) -> bytes:
    """Return ``value`` (None, bool, int, finite float, str, list, tuple, dict with str keys) as ASCII JSON."""
    parts: list[str] = []
    _write(value, parts)
    return "".join(parts).encode("ascii")


def _write(value: Any, parts: list[str]) -> None:
    if value is None or value is True or value is False:
        parts.append({None: "null", True: "true", False: "false"}[value])
    elif isinstance(value, str):
        parts.append(_quoted(value))
    elif isinstance(value, int):
        parts.append(int.__repr__(value))
    elif isinstance(value, float):
        if value - value != 0:
            raise ValueError("%r is not JSON" % value)
        parts.append(float.__repr__(value))
    elif isinstance(value, (list, tuple)):
        parts.append("[")
        for index, item in enumerate(value):
            parts.append("," if index else "")
            _write(item, parts)
        parts.append("]")
    elif isinstance(value, dict):
        parts.append("{")
        for index, key in enumerate(value):
            parts.append(("," if index else "") + _quoted(key) + ":")
            _write(value[key], parts)
        parts.append("}")
    else:
        raise TypeError("%s is not JSON" % type(value).__name__)


def _quoted(text: str) -> str:
    try:
        from _json import encode_basestring_ascii
    except ImportError:
        import json

        return json.dumps(text)
    return str(encode_basestring_ascii(text))
