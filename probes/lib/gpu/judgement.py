"""One finding, before it is told: what checks return, so that they can be tested without a probe."""

from __future__ import annotations

from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Union

    Scalar = Union[None, bool, int, float, str]


class Judgement(NamedTuple):
    """The arguments of ``context.finding``; ``context.finding(**judgement._asdict())`` tells it."""

    level: str
    """ok, degraded, fail, unknown or skipped."""
    code: str
    """kebab-case."""
    message: str
    subject: str | None = None
    value: Scalar = None
    unit: str | None = None
    threshold: Scalar = None
    threshold_source: str | None = None
    evidence: tuple[str, ...] = ()
    action: str | None = None
