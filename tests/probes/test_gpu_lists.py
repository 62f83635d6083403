"""``rdiag gpu`` where the list of GPUs is cut short, or a card has no name: by drivers that hang and crash half-way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from probes.lib.gpu import collect, occupancy
from tests.probes.test_gpu import judge
from tests.support.fake_smi import FakeSmi, h200, rtx_pro_6000

_PYNVML = """
import os, time
class NVMLError(Exception):
    def __init__(self, value):
        self.value = value
        super().__init__("error %d" % value)
nvmlMemory_v2 = 2
class Thing:
    def __init__(self, **fields): self.__dict__.update(fields)
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 8
def nvmlSystemGetDriverVersion(): return "590.48.01"
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(h): return "GPU-%08x-5eed-4000-8000-%012x" % (h, h)
def nvmlDeviceGetPciInfo(h): return Thing(busId=("00000000:%s:00.0" % "01 21 41 61 81 A1 C1 E1".split()[h]).encode())
def nvmlDeviceGetName(h): return "NVIDIA RTX PRO 6000 Blackwell Server Edition"
def nvmlDeviceGetMemoryInfo(h, version): return Thing(total=97887 << 20, used=0, reserved=637 << 20, free=97250 << 20)
def nvmlDeviceGetUtilizationRates(h): return Thing(gpu=0, memory=0)
def nvmlDeviceGetTemperature(h, kind): return 41
def nvmlDeviceGetComputeRunningProcesses(h): return []
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSmi:
    monkeypatch.setattr(occupancy, "SAMPLE_GAP", 0.0)
    smi = FakeSmi(tmp_path / "bin", rtx_pro_6000())
    smi.lspci()
    smi.kernel_log()
    monkeypatch.setenv("PATH", smi.path)
    return smi


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that puts a module pynvml there, changed by some lines."""
    (tmp_path / "modules").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "modules"), *sys.path])

    def put(lines: str) -> None:
        (tmp_path / "modules" / "pynvml.py").write_text(_PYNVML + lines)

    return put


def break_off(smi: FakeSmi, last: str) -> None:
    """Let the driver print three of its rows and then do ``last``."""
    answer = f'{sys.executable} -I -S "${{0%/*}}/smi.py" "$@"'
    smi.program("nvidia-smi", f'case "$*" in *" -i "*) ;; --query-gpu=*) {answer} | head -n 4; {last};; esac; exec {answer}')


@pytest.mark.parametrize(("last", "code"), [("exec sleep 1000", "driver-hangs"), ("kill -SEGV $$", "nvidia-smi-failed")])
def test_a_list_that_is_cut_short_fails_no_card(
    last: str, code: str, smi: FakeSmi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("probes.lib.gpu.run_smi.SMI_SECONDS", 1.0)
    smi.xml = "<broken"
    smi.write()
    break_off(smi, last)
    judged = judge(tmp_path, gpus=8, without=("processes",))
    assert judged.status == "unknown"
    assert sorted(set(judged.bad())) == sorted([code, "gpu-count"])
    assert judged.finding("gpu-count").level == "unknown"
    assert [gpu.index for gpu in judged.result.gpus] == [0, 1, 2]
    assert "gpu-count" not in [one.code for one in judge(tmp_path).findings if one.level == "ok"]


def test_what_the_short_list_lacks_the_long_one_has(smi: FakeSmi, tmp_path: Path) -> None:
    break_off(smi, "kill -SEGV $$")
    smi.gpus.pop()
    smi.write()
    assert judge(tmp_path, gpus=8).finding("gpu-count").level == "fail"


def test_nvml_that_ends_in_the_middle(smi: FakeSmi, nvml: Callable[[str], None], tmp_path: Path) -> None:
    nvml("def nvmlDeviceGetPowerUsage(h):\n    if h == 6: os.abort()\n    return 31000\n")
    smi.xml = "<broken"
    smi.write()
    for expected in (8, None):
        judged = judge(tmp_path, gpus=expected)
        assert judged.result.source == "nvml"
        assert (len(judged.result.gpus), judged.status) == (6, "unknown")
        assert "NVML broke off" in judged.finding("answer-incomplete").message
        assert {one.level for one in judged.findings if one.code == "gpu-count"} == ({"unknown"} if expected else set())


def test_nvml_that_hangs_is_a_finding_and_nvidia_smi_is_asked(
    smi: FakeSmi, nvml: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "SMI_SECONDS", 1.0)
    nvml("def nvmlInit(): time.sleep(1000)\n")
    judged = judge(tmp_path, gpus=8)
    assert (judged.status, judged.bad(), judged.result.source) == ("unknown", ["driver-hangs"], "nvidia-smi")
    assert "NVML (nvidia-ml-py) did not answer" in judged.finding("driver-hangs").evidence[0]
    assert len(judged.result.gpus) == 8


def test_a_card_that_nvml_has_lost_is_named(smi: FakeSmi, nvml: Callable[[str], None], tmp_path: Path) -> None:
    nvml("def nvmlDeviceGetHandleByIndex(index):\n    if index == 3: raise NVMLError(15)\n    return index\n")
    smi.lose(3)
    judged = judge(tmp_path, gpus=8)
    assert judged.finding("gpu-lost").subject == f"gpu 3 0000:61:00.0 {smi.gpus[3]['uuid']}"
    # One finding about the card: that nothing else of it can be told says the same again.
    assert [one.code for one in judged.findings if one.subject and " 0000:61:00.0" in one.subject] == ["gpu-lost"]


def test_links_that_nobody_asked_for_because_the_driver_hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probes.lib.gpu.run_smi.SMI_SECONDS", 1.0)
    smi = FakeSmi(tmp_path / "bin", h200())
    smi.lspci()
    smi.kernel_log()
    monkeypatch.setenv("PATH", smi.path)
    with smi.hanging("--query-compute-apps"):
        told = [one for one in judge(tmp_path).findings if one.code == "nvlink-unknown"]
    assert len(told) == 8
    # Alike, so that they are shown once; and nobody is sent to ask a driver that hangs.
    assert {(one.evidence, one.action) for one in told} == {
        (("nvidia-smi nvlink -s: not asked, because nvidia-smi hung before",), "see to the driver first, then run it again")
    }


def test_a_share_of_a_card_has_no_temperature(smi: FakeSmi, tmp_path: Path) -> None:
    for name, status in (("GRID A100-10C", "ok"), ("NVIDIA A100-PCIE-40GB", "unknown")):
        for gpu in smi.gpus:
            gpu.update({"name": name, "temperature.gpu": "[N/A]", "temperature.gpu.tlimit": "[N/A]", "gpu_recovery_action": "None"})
        smi.write()
        assert judge(tmp_path).status == status
