"""Greet, and say which Python and which platform answer.

The smallest probe there is: it touches nothing, needs nothing but Python, and shows that the whole road works.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remote_diag.probe import Context

EFFECTS = ()

# How rdiag checks Params and Result before and after a run; on the host nobody looks at it.
STRICT = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}


@dataclass(frozen=True)
class Params:
    """Whom to greet."""

    __pydantic_config__ = STRICT

    name: str = "world"
    """Whom to greet."""


@dataclass(frozen=True)
class Result:
    """Who answered."""

    __pydantic_config__ = STRICT

    greeting: str
    """The greeting, one sentence."""
    python: str
    """Version of the interpreter that ran the probe, ``3.11.7``."""
    executable: str
    """Path of that interpreter on the host; empty where it does not know."""
    system: str
    """Operating system, its release and the machine type, as ``uname`` has them."""


def run(params: Params, context: Context) -> Result:
    """Greet."""
    system = os.uname()
    context.progress(1, 1, unit="greeting")
    return Result(
        greeting=f"Hello, {params.name}!",
        python=sys.version.split()[0],
        executable=sys.executable or "",
        system=f"{system.sysname} {system.release} {system.machine}",
    )
