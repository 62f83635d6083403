from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from probes import env
from remote_diag.findings import Finding, status
from remote_diag.outcome import Outcome, Timing
from remote_diag.testing import RecordingContext
from remote_diag.views.env import render


def shown(result: env.Result | None, found: tuple[Finding, ...]) -> str:
    outcome: Outcome[Any] = Outcome("gpu8", "env", "run", status(found), result, found, Timing(0, 0, 0, 0), message="why")
    page = io.StringIO()
    Console(file=page, width=80, color_system=None).print(render(outcome))
    return page.getvalue()


def test_versions_first_then_traps_then_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_LEVEL", "4\x1b[2J")
    context = RecordingContext(tmp_path)
    result = env.run(env.Params(torch=False), context)
    driver = dataclasses.replace(
        result.driver, version="580.65.06", open_module=True, models=("NVIDIA H200",) * 8, parameters={"nvidia_uvm.uvm_disable_hmm": "N"}
    )
    torch = env.Torch("2.9.0+cu128", "12.8", ("sm_90",), 91002, "2.27.5")
    libraries = (env.NcclLibrary("/venv/nvidia/nccl/lib/libnccl.so.2", "wheel", "2.27.5", None),)
    setting = env.Setting("NCCL_ALGO", "Ring", "conf file /etc/nccl.conf", ("/etc/nccl.conf:1",), in_force=False)
    result = dataclasses.replace(
        result, driver=driver, torch=torch, nccl_version="2.27.5", nccl_libraries=libraries, process_settings=(setting,)
    )
    text = shown(result, tuple(context.findings))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "driver 580.65.06 (open), torch 2.9.0+cu128, NCCL 2.27.5" in " ".join(" ".join(lines[:2]).split())
    assert "8 x NVIDIA H200" in text
    assert "Ring (not in force)" in text
    assert "\x1b" not in text
    assert "NCCL_P2P_LEVEL" in text


def test_nothing_to_show() -> None:
    assert shown(None, ()).endswith(" - why\n")
