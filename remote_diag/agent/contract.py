"""What a probe may say besides its result; the client reads it with the same code."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Optional, Tuple, Union

from .protocol import LEVELS, MAX_FINDING_BYTES

Scalar = Union[None, bool, int, float, str]

_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789")
_MAX_TEXT = 4000
_MAX_EVIDENCE = 100


@dataclass(frozen=True)
class Finding:
    """One thing that was found out, with what it rests on.

    Raises ValueError, naming the field, when a part does not fit. Text loses what has no encoding (lone
    surrogates, as in the names of files that are not UTF-8, become escapes).
    """

    level: str
    """``ok``, ``degraded``, ``fail``, ``unknown`` (could not be measured) or ``skipped``."""
    code: str
    """Stable name for programs, lower-case words joined by dashes: ``vocab-order-differs``."""
    message: str
    """One sentence for people."""
    subject: Optional[str] = None
    """What it is about: a file, a GPU, a link."""
    value: Scalar = None
    """What was measured, in ``unit``."""
    unit: Optional[str] = None
    """Unit of ``value`` and ``threshold``: ``GB/s``, ``ratio``, ``tokens``."""
    threshold: Scalar = None
    """What ``value`` was held against."""
    threshold_source: Optional[str] = None
    """Where ``threshold`` comes from."""
    evidence: Tuple[str, ...] = ()
    """Lines that support it, as they were seen."""
    action: Optional[str] = None
    """What to do next."""

    def __post_init__(self) -> None:
        """Check every field and make text encodable."""
        if self.level not in LEVELS:
            raise ValueError("finding: level must be one of %s, not %r" % (", ".join(LEVELS), self.level))
        words = self.code.split("-") if isinstance(self.code, str) else [""]
        if not all(word and set(word) <= _LETTERS for word in words) or len(self.code) > 64:
            raise ValueError("finding: code must be words of a-z and 0-9 joined by '-', not %r" % (self.code,))
        for name in ("message", "subject", "unit", "threshold_source", "action"):
            text = getattr(self, name)
            if text is not None or name == "message":
                object.__setattr__(self, name, _checked_text(name, text))
        for name in ("value", "threshold"):
            object.__setattr__(self, name, _checked_scalar(name, getattr(self, name)))
        if not isinstance(self.evidence, (tuple, list)) or len(self.evidence) > _MAX_EVIDENCE:
            raise ValueError("finding: evidence must be a tuple of at most %d lines" % _MAX_EVIDENCE)
        object.__setattr__(self, "evidence", tuple(_checked_text("evidence", line) for line in self.evidence))

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as plain data."""
        return {**asdict(self), "evidence": list(self.evidence)}

    def to_json(self) -> bytes:
        """Return the payload of a ``finding`` frame; raise ValueError when it is too large for one."""
        payload = json.dumps(self.as_dict(), allow_nan=False).encode("ascii")
        if len(payload) > MAX_FINDING_BYTES:
            raise ValueError("finding: %d bytes; %d are allowed" % (len(payload), MAX_FINDING_BYTES))
        return payload

    @classmethod
    def from_json(cls, payload: bytes) -> Finding:
        """Read the payload of a ``finding`` frame; raise ValueError when it is not exactly one finding."""
        try:
            data = json.loads(payload, object_pairs_hook=_without_duplicates)
        except RecursionError:
            raise ValueError("finding: nested too deeply") from None
        names = {field.name for field in fields(cls)}
        if not isinstance(data, dict) or set(data) != names or not isinstance(data["evidence"], list):
            raise ValueError("finding: not an object with exactly the fields %s" % ", ".join(sorted(names)))
        return cls(**{**data, "evidence": tuple(data["evidence"])})


def _checked_text(name: str, text: object) -> str:
    if not isinstance(text, str):
        raise ValueError("finding: %s must be text, not %s" % (name, type(text).__name__))  # noqa: TRY004
    if len(text) > _MAX_TEXT:
        raise ValueError("finding: %s has %d characters; %d are allowed" % (name, len(text), _MAX_TEXT))
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _checked_scalar(name: str, value: object) -> Scalar:
    if value is None or type(value) in (bool, int):
        return value  # type: ignore[return-value]
    if type(value) is float:
        if value - value != 0:
            raise ValueError("finding: %s is %r; say so in words, or leave it out" % (name, value))
        return value
    if isinstance(value, str):
        return _checked_text(name, value)
    raise ValueError("finding: %s must be a number, text or None, not %s" % (name, _type_name(value)))


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else "%s.%s" % (kind.__module__, kind.__name__)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("finding: a field occurs twice")
    return data
