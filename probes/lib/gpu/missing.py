"""Values that a GPU's tools did not give, with the reason: never zero, never a guess.

nvidia-smi prints some twenty different words where a number should be. Each means something else for a verdict: a card
that has no such counter is healthy, one that is lost is not, and where permission is missing nobody knows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeVar, Union

Reason = Literal[
    "not-supported",
    "not-permitted",
    "gpu-lost",
    "reset-required",
    "deprecated",
    "error",
    "empty",
    "not-reported",
    "timeout",
]
T = TypeVar("T")

REASONS = (
    "not-supported", "not-permitted", "gpu-lost", "reset-required", "deprecated", "error", "empty", "not-reported",
    "timeout",
)  # fmt: skip
MAX_TEXT = 200
"""Characters of the printed text that are kept."""


@dataclass(frozen=True)
class Missing:
    """A value that is not there."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}
    reason: Reason
    """``not-supported``: the card or driver has no such value; ``not-permitted``; ``gpu-lost``: the card does not
    answer any more; ``reset-required``; ``deprecated``: the driver no longer says it; ``error``: something else was
    printed in its place; ``empty``: nothing was printed; ``not-reported``: it does not occur in the output at all;
    ``timeout``."""
    text: str = ""
    """What was printed instead, at most 200 characters."""

    def __post_init__(self) -> None:
        """Check the reason; shorten the text."""
        if self.reason not in REASONS:
            raise ValueError("%r is not one of %s" % (self.reason, ", ".join(REASONS)))
        if len(self.text) > MAX_TEXT:
            object.__setattr__(self, "text", self.text[: MAX_TEXT - 3] + "...")


NOT_REPORTED = Missing("not-reported")

_WORDS: dict[str, Reason] = {
    "": "empty",
    "-": "not-reported",
    "n/a": "not-supported",
    "na": "not-supported",
    "not available": "not-supported",
    "not applicable": "not-supported",
    "not supported": "not-supported",
    "feature not supported": "not-supported",
    "function not found": "not-supported",
    "insufficient permissions": "not-permitted",
    "insufficient permission": "not-permitted",
    "no permission": "not-permitted",
    "permission denied": "not-permitted",
    "gpu is lost": "gpu-lost",
    "gpu not found": "gpu-lost",
    "gpu requires reset": "reset-required",
    "reset required": "reset-required",
    "requested functionality has been deprecated": "deprecated",
    "deprecated": "deprecated",
    "unknown error": "error",
    "unknown": "error",
    "err!": "error",
    "err": "error",
    "error": "error",
    "not found": "error",
    "timeout": "timeout",
    "timed out": "timeout",
    "query timed out": "timeout",
}
_STARTS: tuple[tuple[str, Reason], ...] = (
    ("gpu is lost", "gpu-lost"),
    ("gpu has fallen off the bus", "gpu-lost"),
    ("gpu requires reset", "reset-required"),
    ("insufficient permission", "not-permitted"),
    ("requested functionality has been deprecated", "deprecated"),
    ("deprecated,", "deprecated"),
    ("unknown error", "error"),
    ("error -", "error"),
)
_FIRST = tuple(start for start, _ in _STARTS)
_NUMBER = re.compile(r"-?[0-9]{1,20}(?:\.[0-9]{1,9})?")
_FLAGS = {
    "yes": True, "no": False, "1": True, "0": False, "enabled": True, "disabled": False, "active": True,
    "not active": False, "true": True, "false": False, "on": True, "off": False,
}  # fmt: skip
_HEX = re.compile(r"0[xX][0-9a-fA-F]{1,16}")
_GARBAGE = re.compile(r"[\x00-\x1f\x7f\ufffd]")


def missing(text: str) -> Missing | None:
    """Return why a cell has no value; None when it holds something else.

    Case, surrounding blanks and one pair of brackets do not matter.
    """
    bare = text.strip()
    if bare.startswith("[") and bare.endswith("]"):
        bare = bare[1:-1].strip()
    word = bare.lower()
    reason = _WORDS.get(word) or _WORDS.get(word.rstrip("."))
    if reason is None and word.startswith(_FIRST):
        reason = next((reason for start, reason in _STARTS if word.startswith(start)), None)
    return None if reason is None else Missing(reason, text.strip())


def garbage(text: str) -> Missing:
    """Return the Missing of a cell that cannot be what it should be."""
    return Missing("error", text.strip())


def number(
    text: str, unit: str = "", *, bare: bool = True, low: float | None = 0.0, high: float | None = None
) -> float | Missing:
    """Return a number.

    Args:
        text: the number, then its unit.
        unit: that unit as printed (``MiB``, ``W``, ``%``); letter case counts, another unit is an error.
        bare: whether the number may stand without its unit, as ``nounits`` prints it.
        low: the smallest value that makes sense; None for none.
        high: the largest.
    """
    reason = missing(text)
    if reason is not None:
        return reason
    stripped = text.strip()
    match = _NUMBER.match(stripped)
    if match is None:
        return garbage(text)
    rest = stripped[match.end() :]
    right = bool(unit) and rest.strip() == unit if rest else bare or not unit
    value = float(match.group())
    if not right or (low is not None and value < low) or (high is not None and value > high):
        return garbage(text)
    return value


def integer(text: str, *, high: int = 1 << 64) -> int | Missing:
    """Return a whole number from 0 to ``high``."""
    reason = missing(text)
    if reason is not None:
        return reason
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 20):
        return garbage(text)
    value = int(digits)
    return value if value <= high else garbage(text)


def flag(text: str) -> bool | Missing:
    """Return whether a cell says yes: Yes/No, 1/0, Enabled/Disabled, Active/Not Active."""
    reason = missing(text)
    if reason is not None:
        return reason
    value = _FLAGS.get(text.strip().lower())
    return garbage(text) if value is None else value


def hexmask(text: str) -> int | Missing:
    """Return the bits of ``0x...``; a number without that prefix is no mask."""
    reason = missing(text)
    if reason is not None:
        return reason
    match = _HEX.fullmatch(text.strip())
    return garbage(text) if match is None else int(match.group(), 16)


def word(text: str) -> str | Missing:
    """Return a text as it stands, without surrounding blanks; control characters make it an error."""
    reason = missing(text)
    if reason is not None:
        return reason
    stripped = text.strip()
    return garbage(_GARBAGE.sub("?", text)) if _GARBAGE.search(stripped) or len(stripped) > MAX_TEXT else stripped


def known(value: Union[T, Missing]) -> T | None:
    """Return the value; None when it is missing."""
    return None if isinstance(value, Missing) else value
