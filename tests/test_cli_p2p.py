"""``rdiag p2p`` and ``rdiag nccl`` on hosts whose GPUs are busy, or that have none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.cli import Ran, rdiag
from tests.support.fake_smi import FakeSmi, rtx_pro_6000


@pytest.fixture
def smi(tmp_path: Path) -> FakeSmi:
    smi = FakeSmi(tmp_path / "bin", rtx_pro_6000(2))
    smi.write()
    return smi


def run(tmp_path: Path, *arguments: str) -> Ran:
    inventory = tmp_path / "hosts.yaml"
    inventory.write_text(f"hosts:\n  here: {{transport: local, environment: {{python: {sys.executable}}}}}\n")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    return rdiag(*arguments, "-H", "here", "-i", str(inventory), home=tmp_path, PATH=path)


@pytest.mark.parametrize("command", ["p2p", "nccl"])
def test_busy_gpus_are_left_alone(smi: FakeSmi, tmp_path: Path, command: str) -> None:
    smi.use(0, 4711)
    ran = run(tmp_path, command)
    assert ran.code == 9
    assert "4711" in ran.err
    assert processes.gone("p2p_main.py", str(tmp_path)) == []


@pytest.mark.parametrize("command", ["p2p", "nccl"])
def test_a_torch_without_gpus_is_no_environment(smi: FakeSmi, tmp_path: Path, command: str) -> None:
    ran = run(tmp_path, command)
    assert ran.code == 7, ran.err
    assert "torch sees" in ran.err
    assert processes.gone("p2p_main.py", str(tmp_path)) == []


@pytest.mark.parametrize(
    "arguments", [("--gpus", "0,x"), ("--gpus", ""), ("--gpus", "1,1"), ("--pair-timeout", "0")], ids=lambda words: words[1]
)
def test_options_that_make_no_sense(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    ran = run(tmp_path, "p2p", *arguments)
    assert ran.code in (2, 3)
    assert ran.out == ""
