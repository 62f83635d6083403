"""One installed agent for all tests of this folder, and processes looked for by what they say of themselves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent_driver import PATIENCE, AgentDriver, Answer, lay_out_bundle, probe_source

RunBody = Callable[..., Answer]


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installed bundle, shared; every run has a directory of its own."""
    return lay_out_bundle(tmp_path_factory.mktemp("host") / "cache")


@pytest.fixture
def agent(bundle: Path) -> Iterator[AgentDriver]:
    """A started agent that has been told nothing yet."""
    with AgentDriver(bundle) as driver:
        yield driver


@pytest.fixture
def run_body(bundle: Path) -> RunBody:
    """Run a probe given as the body of its ``run(params, context)`` and return what the agent said."""

    def run(body: str, **changes: Any) -> Answer:
        with AgentDriver(bundle) as driver:
            return driver.run(probe_source(body), **changes)

    return run


def alive(pid: int) -> bool:
    """Whether ``pid`` is a process that can still do something."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[0] not in b"ZX"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Return whether ``condition`` became true in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


@pytest.fixture
def pid_file(tmp_path: Path) -> Iterator[Path]:
    """A file to which a probe's processes append their numbers; whoever is left is killed after the test."""
    path = tmp_path / "pids"
    path.touch()
    yield path
    for pid in pids_in(path):
        if alive(pid):
            os.kill(pid, 9)


def pids_in(path: Path) -> list[int]:
    """Return the process numbers that were written so far, complete lines only."""
    return [int(line) for line in path.read_text().split("\n")[:-1]]
