"""Names of jobs: ``finetune`` is a name, ``finetune.v2`` its second attempt, and the id of that job."""

from __future__ import annotations

_FIRST = frozenset("abcdefghijklmnopqrstuvwxyz0123456789")
_OTHERS = _FIRST | frozenset("._-")
_HEX = frozenset("0123456789abcdef")
MAX_NAME = 63
MAX_ATTEMPT = 999_999_999


def is_name(text: object) -> bool:
    """Whether ``text`` can be the name of a job: ``[a-z0-9][a-z0-9._-]{0,62}``, and no attempt of another one."""
    return (
        isinstance(text, str)
        and 0 < len(text) <= MAX_NAME
        and text[0] in _FIRST
        and set(text) <= _OTHERS
        and split(text) is None
    )


def split(job: str) -> tuple[str, int] | None:
    """Return (name, attempt) of a job id; None when ``job`` is none."""
    name, dot, number = job.rpartition(".v")
    if not dot or not number.isascii() or not number.isdigit() or len(number) > 9 or number[0] == "0":
        return None
    return (name, int(number)) if is_name(name) else None


def compose(name: str, attempt: int) -> str:
    """Return the id of an attempt."""
    return "%s.v%d" % (name, attempt)


def is_launch_id(text: object) -> bool:
    """Whether ``text`` can name one launch: 32 hex digits, chosen by the client."""
    return isinstance(text, str) and len(text) == 32 and set(text) <= _HEX
