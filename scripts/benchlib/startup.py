"""``rdiag --help`` beside a bare ``import click``; and where the client's start-up time goes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .aims import Aim
from .clock import Contender, Step, Times, race, usual_environment
from .contenders import rdiag, rdiag_env, rdiag_program
from .rig import Place
from .workload import Workload

HELP = "rdiag --help"
CLICK = "import click"


def measure(rounds: int, directory: Path, tell: Callable[[str], None]) -> dict[str, Times]:
    """Return the times of both."""
    env = rdiag_env(directory / "rdiag")
    both = [
        Contender(HELP, [Step([rdiag_program(), "--help"])], "vocab-compare", env=env),
        Contender(CLICK, [Step([sys.executable, "-c", "import click"])]),
    ]
    return race(both, rounds, tell=tell, warm_up=2)


def aims(times: dict[str, Times]) -> list[Aim]:
    """Return the aim of start-up."""
    return [Aim("rdiag --help / import click", times[HELP].median / times[CLICK].median, 2.0)]


def profile(here: Place, work: Workload, directory: Path, top: int) -> str:
    """Return what ``python -X importtime`` says of one rdiag run, the most expensive modules first."""
    contender = rdiag(here, work, directory)
    argv = [sys.executable, "-X", "importtime", *(str(word) for word in contender.steps[0].argv)]
    for _ in range(2):  # the first run installs the agent
        done = subprocess.run(argv, capture_output=True, text=True, check=False, env={**usual_environment(), **contender.env})
    rows = re.findall(r"^import time:\s+(\d+) \|\s+(\d+) \| ( *)(\S+)$", done.stderr, re.MULTILINE)
    modules = [(int(own), int(total), len(indent) // 2, name) for own, total, indent, name in rows]
    packages: dict[str, int] = {}
    for own, _, _, name in modules:
        package = name.partition(".")[0]
        packages[package] = packages.get(package, 0) + own
    lines = [f"{len(modules)} modules, {sum(own for own, *_ in modules) / 1000:.0f} ms in all (traced, both threads)"]
    lines.append("by package, without what it imports:")
    ranked = sorted(packages.items(), key=lambda item: -item[1])[:top]
    lines += [f"{own / 1000:8.1f} ms  {name}" for name, own in ranked]
    lines.append("by module, with what it is the first to import:")
    slowest = sorted(modules, key=lambda row: -row[1])[:top]
    lines += [f"{total / 1000:8.1f} ms  {name}" for _, total, _, name in slowest]
    return "\n".join(lines)
