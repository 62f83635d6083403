"""How a run ended, in one value."""

from __future__ import annotations


class Verdict:
    """One outcome with what there is to say about it.

    Args:
        outcome: one of ``protocol.OUTCOMES``.
        message: the cause, one sentence; empty when there is nothing to explain.
        hint: what to do about it.
        details: further lines, for example those of a traceback.
    """

    __slots__ = ("details", "hint", "message", "outcome")

    def __init__(self, outcome: str, message: str = "", hint: str | None = None, details: tuple[str, ...] = ()) -> None:
        self.outcome = outcome
        self.message = message
        self.hint = hint
        self.details = details
