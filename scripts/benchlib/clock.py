"""Timing whole processes: interleaved rounds, medians."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TIMEOUT = 120.0
"""Seconds; a contender that takes longer is broken."""


class Broken(Exception):
    """A contender did not do its work."""


@dataclass(frozen=True)
class Step:
    """One process of a contender."""

    argv: Sequence[str | Path]
    stdin: Path | None = None
    statuses: tuple[int, ...] = (0,)
    """Exit statuses that mean success."""


@dataclass(frozen=True)
class Contender:
    """One way to get the work done."""

    name: str
    steps: Sequence[Step]
    """Run one after the other; what the last one prints must hold ``expect``."""
    expect: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None


@dataclass
class Times:
    """What was measured of one contender, seconds."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """Processor time of the local processes, what runs on the "host" not included."""

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.wall)

    def as_dict(self) -> dict[str, float | int]:
        """Return milliseconds, for --json."""
        return {
            "rounds": len(self.wall),
            "median_ms": round(self.median * 1000, 1),
            "min_ms": round(min(self.wall) * 1000, 1),
            "max_ms": round(max(self.wall) * 1000, 1),
            "median_cpu_ms": round(statistics.median(self.cpu) * 1000, 1),
        }


def usual_environment() -> dict[str, str]:
    """Return the variables of this process, but for those that slow every Python down and that few people set."""
    unusual = ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "PYTHONDEVMODE", "PYTHONPATH", "COVERAGE_PROCESS_START")
    return {name: value for name, value in os.environ.items() if name not in unusual}


def run_once(contender: Contender) -> tuple[float, float]:
    """Run all steps of ``contender`` and return (wall, processor) time, seconds; raises Broken."""
    env = {**usual_environment(), **contender.env}
    output = b""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    for step in contender.steps:
        output = _run_step(contender, step, env)
    elapsed = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if contender.expect.encode() not in output:
        raise Broken(f"{contender.name} did not print the answer:\n{_tail(output)}")
    return elapsed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _run_step(contender: Contender, step: Step, env: Mapping[str, str]) -> bytes:
    argv = [str(word) for word in step.argv]
    stdin = open(step.stdin, "rb") if step.stdin else subprocess.DEVNULL  # noqa: SIM115, PTH123 - closed below
    try:
        done = subprocess.run(
            argv, stdin=stdin, capture_output=True, env=env, cwd=contender.cwd, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise Broken(f"{contender.name} took more than {TIMEOUT:.0f} s") from None
    finally:
        if not isinstance(stdin, int):
            stdin.close()
    if done.returncode not in step.statuses:
        raise Broken(f"{contender.name} ended with {done.returncode}:\n{_tail(done.stdout + done.stderr)}")
    return done.stdout + done.stderr


def _tail(output: bytes) -> str:
    return output.decode(errors="replace")[-2000:]


def race(
    contenders: Sequence[Contender],
    rounds: int,
    *,
    tell: Callable[[str], None],
    warm_up: int = 1,
) -> dict[str, Times]:
    """Run ``rounds`` interleaved rounds after ``warm_up`` uncounted ones; another contender begins each round.

    A contender that fails in the first uncounted round is left out, with a line that says so.
    """
    running = list(contenders)
    for contender in contenders:
        try:
            for _ in range(max(1, warm_up)):
                run_once(contender)
        except Broken as error:
            tell(f"left out: {error}")
            running.remove(contender)
    times = {contender.name: Times() for contender in running}
    for number in range(rounds):
        tell(f"round {number + 1} of {rounds}")
        shift = number % max(1, len(running))
        for contender in running[shift:] + running[:shift]:
            wall, cpu = run_once(contender)
            times[contender.name].wall.append(wall)
            times[contender.name].cpu.append(cpu)
    return times
