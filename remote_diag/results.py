"""A probe's answer, from hostile bytes to the probe's own ``Result``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

from .agent.frames import MAX_PAYLOAD
from .errors import ProbeError
from .strict_json import StrictJsonError, loads, path_text
from .text import safe

if TYPE_CHECKING:
    from pydantic import ValidationError

    from .probe import Probe

ParamsT = TypeVar("ParamsT")
ResultT = TypeVar("ResultT")

_SHOWN = 200
_MAX_PROBLEMS = 10
_IN_OUR_WORDS = {"missing": "is missing", "unexpected_keyword_argument": "is no field of it"}


def parse(probe: Probe[ParamsT, ResultT], data: bytes) -> ResultT:
    """Return the result of ``probe`` that ``data`` holds as JSON.

    Nothing is converted: ``"12"`` is no number, a missing or an additional key is an error, as is whatever
    :func:`remote_diag.strict_json.loads` refuses.

    Raises:
        ProbeError: naming the place in the result, and the reason.
    """
    if len(data) > MAX_PAYLOAD:
        raise _invalid(probe, f"{len(data)} bytes; at most {MAX_PAYLOAD} are allowed")
    try:
        loads(data)
    except StrictJsonError as error:
        raise _invalid(probe, str(error)) from None
    from pydantic import ValidationError

    try:
        return probe.result_adapter.validate_json(data, strict=True)
    except ValidationError as error:
        problems = _problems(error)
        raise _invalid(probe, problems[0], details=tuple(problems[1:])) from None
    except Exception as error:  # __post_init__ of the probe's dataclasses is the probe's own code
        raise _invalid(probe, f"{type(error).__name__}: {error}") from error


def _invalid(probe: Probe[Any, Any], reason: str, details: tuple[str, ...] = ()) -> ProbeError:
    return ProbeError(
        f"the result of {probe.name} is invalid: {safe(reason, limit=2 * _SHOWN)}",
        phase="collect",
        hint=f"compare what {probe.path} returns with its Result; see: rdiag probes {probe.name}",
        details=details,
    )


def _problems(error: ValidationError) -> list[str]:
    found = error.errors(include_url=False, include_context=False)
    lines = [
        f"{path_text(problem['loc'])}: {_reason(problem)}"
        for problem in found[:_MAX_PROBLEMS]
    ]
    if len(found) > _MAX_PROBLEMS:
        lines.append(f"and {len(found) - _MAX_PROBLEMS} more")
    return lines


def _reason(problem: Any) -> str:
    """Return what is wrong and, where that is short, what was given."""
    if problem["type"] in _IN_OUR_WORDS:
        return _IN_OUR_WORDS[problem["type"]]
    reason = safe(problem["msg"], limit=_SHOWN)
    value = problem["input"]
    if value is None or isinstance(value, (bool, int, float, str)):
        reason += f" (got {safe(json.dumps(value, ensure_ascii=False), limit=60)})"
    return reason
