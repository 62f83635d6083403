"""Probes that tests write: correct ones, and ones that misbehave in every way a probe can."""

from __future__ import annotations

import textwrap
from pathlib import Path

_HEAD = '''\
"""{summary}"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remote_diag.probe import Context

EFFECTS = {effects!r}
_CONFIG = {{"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}}


@dataclass(frozen=True)
class Params:
    """What it takes."""

    __pydantic_config__ = {{"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}}
{params}

@dataclass(frozen=True)
class Result:
    """What it gives."""

    __pydantic_config__ = {{"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}}
{result}

def run(params: Params, context: Context) -> Result:
    """Run."""
{body}
'''


def _fields(fields: dict[str, str]) -> str:
    return "".join(f"\n    {name}: {kind}\n    \"\"\"The {name.replace('_', ' ')}.\"\"\"\n" for name, kind in fields.items())


def write_probe(
    folder: Path,
    name: str,
    body: str,
    *,
    params: dict[str, str] | None = None,
    result: dict[str, str] | None = None,
    effects: tuple[str, ...] = (),
) -> Path:
    """Write a probe file whose ``run`` has ``body``; field declarations are ``name: "type = default"``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(
        _HEAD.format(
            summary=f"The probe {name} of a test.",
            effects=effects,
            params=_fields(params or {}),
            result=_fields(result if result is not None else {"value": "str"}),
            body=textwrap.indent(textwrap.dedent(body).strip("\n"), "    "),
        )
    )
    return path


_VERDICTS = """\

def supported(*evidence: str, **more: object) -> Result:
    return _answer("supported", evidence, more)


def refuted(*evidence: str, **more: object) -> Result:
    return _answer("refuted", evidence, more)


def _answer(verdict: str, evidence: tuple[str, ...], more: dict[str, object]) -> Result:
    return Result(verdict, evidence, **{**dict.fromkeys(("explains", "accuracy", "loss", "next_command")), "missing": (), **more})
"""


def write_hypothesis(
    folder: Path,
    name: str,
    body: str,
    *,
    params: dict[str, str] | None = None,
    cost: float = 1.0,
    likelihood: float = 0.1,
) -> Path:
    """Write a hypothesis, whose ``body`` can call ``supported(evidence..., accuracy=...)`` and ``refuted(evidence...)``."""
    result = {
        "verdict": "str", "evidence": "tuple[str, ...]", "explains": "str | None", "accuracy": "float | None",
        "loss": "float | None", "next_command": "str | None", "missing": "tuple[str, ...]",
    }  # fmt: skip
    path = write_probe(folder, name, body, params=params, result=result)
    declaration = f"HYPOTHESIS = {{'cost_s': {cost}, 'likelihood': {likelihood}}}\n"
    path.write_text(f"{path.read_text()}\n{_VERDICTS}\n{declaration}")
    return path
