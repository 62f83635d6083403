"""Say how much space is free where a path is.

Replace this by what your probe does. The first line above is what `rdiag probes` shows. This file travels to the
host as it is: at module level it imports the standard library only; everything else is imported inside run(), with
context.require("numpy").
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remote_diag.probe import Context

# What it touches: reads-files, runs-commands, network, cuda, collectives, writes-files. () is nothing.
EFFECTS = ("reads-files",)

# How rdiag checks Params and Result before and after a run; on the host nobody looks at it.
STRICT = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}


@dataclass(frozen=True)
class Params:
    """What run() needs to know; `rdiag run sample-probe --set path=/data` fills it."""

    __pydantic_config__ = STRICT

    path: str = "/"
    """A file or folder on the host."""
    least_free: float = 0.05
    """Below this fraction of free space, between 0 and 1, the probe says fail."""

    def __post_init__(self) -> None:
        """Refuse what makes no sense, on this machine and before anything is contacted."""
        if not 0.0 <= self.least_free <= 1.0:
            raise ValueError("least_free is a fraction, between 0 and 1")


@dataclass(frozen=True)
class Result:
    """What was measured; every field says its unit."""

    __pydantic_config__ = STRICT

    total_bytes: int
    """Size of the file system, bytes."""
    free_bytes: int
    """Free for ordinary users, bytes."""


def run(params: Params, context: Context) -> Result:
    """Run on the host, in the host's own environment."""
    try:
        usage = shutil.disk_usage(params.path)
    except OSError as error:
        context.unfit(f"{params.path} cannot be looked at: {error.strerror}", "give another --set path=...")
    context.progress(1, 1, unit="file systems")
    free = usage.free / usage.total if usage.total else 0.0
    if free < params.least_free:
        context.finding(
            "fail",
            "little-space",
            f"only {free:.1%} of the file system is free",
            subject=params.path,
            value=round(free, 4),
            unit="fraction",
            threshold=params.least_free,
            threshold_source="least_free",
            action=f"look at what fills it: du -xh {params.path} | sort -h | tail",
        )
    return Result(total_bytes=usage.total, free_bytes=usage.free)
