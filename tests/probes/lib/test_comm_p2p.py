"""Copies on GPUs that lie, lose bytes, hang and crash: each pair costs its own result only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from probes import p2p as probe
from probes.lib.comm import p2p
from remote_diag.testing import Leave, RecordingContext
from tests.support import processes
from tests.support.fake_smi import FakeSmi, rtx_pro_6000

LAYER = str(Path(__file__).resolve().parents[2] / "support" / "stand_in_layer.py")


class Bench:
    """Copies with the stand-in layer."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._patch = monkeypatch
        self.context = RecordingContext(folder)

    def run(self, play: dict[str, Any], **given: Any) -> probe.Result:
        self._patch.setenv("PLAY", json.dumps(play))
        params = probe.Params(**{"size_bytes": 1 << 16, "pair_timeout_s": 2.0, "host": False, **given})
        result = probe.build_result(p2p.measure(self.context, layer=LAYER, **vars(params)))
        assert processes.gone(p2p.PROGRAM, str(self.folder)) == []
        return result

    def found(self, code: str) -> Any:
        (one,) = [finding for finding in self.context.findings if finding.code == code]
        return one

    @property
    def codes(self) -> dict[str, str]:
        return {finding.code: finding.level for finding in self.context.findings}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_every_ordered_pair_is_copied(bench: Bench) -> None:
    result = bench.run({"gpus": 3})
    assert [(pair.source, pair.target) for pair in result.pairs] == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert {pair.outcome for pair in result.pairs} == {"ok"}
    assert {pair.can_access for pair in result.pairs} == {True}
    assert (result.complete, result.correctness) == (True, "ok")
    assert bench.codes == {"bytes-arrive": "ok"}
    assert [pair.both_ways_gbs is not None for pair in result.pairs] == [True, True, False, True, False, False]
    pair = result.pairs[0]
    assert pair.bandwidth_gbs == pytest.approx((1 << 16) / (1e-5 + (1 << 16) / 50e9) / 1e9)
    assert pair.latency_us == pytest.approx(10, rel=0.01)


def test_one_gpu_copies_to_itself(bench: Bench) -> None:
    result = bench.run({"gpus": 1})
    assert [(pair.source, pair.target, pair.can_access) for pair in result.pairs] == [(0, 0, None)]
    assert result.correctness == "ok"


def test_chosen_gpus_only(bench: Bench) -> None:
    result = bench.run({"gpus": 4}, gpus=(1, 3))
    assert [gpu.index for gpu in result.gpus] == [1, 3]
    assert [(pair.source, pair.target) for pair in result.pairs] == [(1, 3), (3, 1)]


@pytest.mark.parametrize(("do", "wrong"), [("corrupt", 4), ("swallow", 2 * (4 + (1 << 16)))])
def test_lost_bytes_are_found_although_access_is_granted(bench: Bench, do: str, wrong: int) -> None:
    result = bench.run({"gpus": 3, "do": do, "pair": [1, 2]})
    assert [pair.outcome for pair in result.pairs] == ["ok", "ok", "ok", "wrong", "ok", "ok"]
    assert result.correctness == "wrong"
    assert result.pairs[3].wrong_bytes == wrong
    found = bench.found("copy-wrong")
    assert found.level == "fail"
    assert found.subject == "gpu 1 0000:01:00.0 GPU-1 to gpu 2 0000:02:00.0 GPU-2"
    assert "although the driver grants peer access" in found.message
    assert "bytes-arrive" not in bench.codes


@pytest.mark.parametrize(("do", "outcome"), [("hang", "hang"), ("stop", "hang"), ("crash", "crashed"), ("error", "error")])
def test_a_pair_that_takes_its_process_along(bench: Bench, do: str, outcome: str) -> None:
    result = bench.run({"gpus": 3, "do": do, "pair": [0, 2]}, pair_timeout_s=1.5)
    assert [pair.outcome for pair in result.pairs] == ["ok", outcome, "ok", "ok", "ok", "ok"]
    assert (result.complete, result.correctness) == (True, "not_checked")
    assert bench.codes == {f"copy-{outcome}": "fail"}
    assert "in phase check" in result.pairs[1].text


def test_a_torch_that_was_not_built_for_these_gpus_copies_nothing(bench: Bench) -> None:
    text = "CUDA error: no kernel image is available for execution on the device"
    with pytest.raises(Leave, match="no kernel image") as left:
        bench.run({"gpus": 3, "do": "error", "text": text, "pair": [0, 1]})
    assert "rdiag env" in str(left.value.hint)
    assert processes.gone(p2p.PROGRAM, str(bench.folder)) == []


def test_the_deadline_leaves_the_rest_out(bench: Bench) -> None:
    bench.context = RecordingContext(bench.folder, seconds=p2p._RESERVE + 1.5)
    result = bench.run({"gpus": 3, "do": "hang", "pair": [0, 2]}, pair_timeout_s=60.0)
    assert [pair.outcome for pair in result.pairs] == ["ok", "hang", "not-run", "not-run", "not-run", "not-run"]
    assert not result.complete
    assert bench.codes["not-all-copied"] == "unknown"


def test_access_that_is_refused(bench: Bench) -> None:
    result = bench.run({"gpus": 2, "refused": [[0, 1]]})
    assert [pair.can_access for pair in result.pairs] == [False, True]
    assert bench.codes["no-peer-access"] == "degraded"
    assert bench.found("no-peer-access").evidence == ("gpu 0 to gpu 1",)


def test_access_that_is_refused_everywhere_is_no_fault(bench: Bench) -> None:
    bench.run({"gpus": 2, "refused": "all"})
    assert bench.codes == {"bytes-arrive": "ok", "no-peer-access": "ok"}


def test_a_pair_slower_than_its_siblings(bench: Bench) -> None:
    bench.run({"gpus": 3, "slow": {"2,0": 5.0}}, size_bytes=1 << 22)
    found = bench.found("slow-pairs")
    assert (found.level, len(found.evidence)) == ("degraded", 1)
    assert found.evidence[0].startswith("gpu 2 to gpu 0")


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [("p2p.sibling_pct", 99.0, "slow-pairs"), ("nccl.sibling_pct", 5.0, "slow-host-link"), ("p2p.host_share", 0.99, "slow-host-link")],
)
def test_thresholds_of_ones_own(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, name: str, value: float, code: str
) -> None:
    smi = FakeSmi(tmp_path / "bin", rtx_pro_6000(3))
    for index, gpu in enumerate(smi.gpus):
        gpu["pci.bus_id"] = f"00000000:{index:02X}:00.0"
    smi.write()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    play = {"gpus": 3, "slow": {"2,0": 5.0, "-1,1": 46.0}}
    bench.run(play, host=True, size_bytes=1 << 26, thresholds={name: value}, thresholds_from="own.yaml")
    named = [finding.threshold_source for finding in bench.context.findings if finding.code == code]
    assert (named == []) if code == "slow-pairs" else any("yours (own.yaml)" in str(source) for source in named)


def test_host_links(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = FakeSmi(tmp_path / "bin", rtx_pro_6000(2))
    for index, gpu in enumerate(smi.gpus):
        gpu["pci.bus_id"] = f"00000000:{index:02X}:00.0"
    smi.write()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    result = bench.run({"gpus": 2, "slow": {"-1,1": 20.0}}, host=True, size_bytes=1 << 22)
    assert [(link.gpu, link.outcome) for link in result.host_links] == [(0, "ok"), (1, "ok")]
    slow = bench.found("slow-host-link")
    assert slow.subject == "gpu 1 0000:01:00.0 GPU-1"
    assert "to the GPU" in slow.message
    assert "PCIe Gen5 x16" in slow.threshold_source


@pytest.mark.parametrize("field", ["pcie.link.gen.gpumax", "pcie.link.width.max"])
def test_a_link_that_nobody_tells_is_unknown(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    smi = FakeSmi(tmp_path / "bin", rtx_pro_6000(1))
    smi.gpus[0]["pci.bus_id"] = "00000000:00:00.0"
    known = [name for name in smi.gpus[0] if name.startswith(field.rpartition(".")[0])]
    for name in known:
        smi.gpus[0][name] = "[N/A]"
    smi.write()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    # However slow the copies are.
    bench.run({"gpus": 1, "slow": {"-1,0": 0.1, "0,-1": 0.1}}, host=True, size_bytes=1 << 22)
    assert bench.codes["link-unknown"] == "unknown"
    assert "slow-host-link" not in bench.codes


def test_without_nvidia_smi_links_are_unknown(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probes.lib.gpu.run_smi.find", lambda *_: None)
    bench.run({"gpus": 1}, host=True)
    assert bench.codes["link-unknown"] == "unknown"


@pytest.mark.parametrize("do", ["corrupt", "hang"])
def test_a_host_link_that_fails(bench: Bench, do: str) -> None:
    result = bench.run({"gpus": 1, "do": do, "pair": [0, -1]}, host=True)
    (link,) = result.host_links
    assert link.outcome == ("wrong" if do == "corrupt" else "hang")
    assert link.h2d_gbs is not None
    assert link.text.startswith("from the GPU")
    assert bench.codes[f"host-copy-{link.outcome}"] == "fail"


@pytest.mark.parametrize(("play", "gpus"), [({"gpus": 0}, ()), ({"gpus": 2}, (5,))])
def test_gpus_that_are_not_there(bench: Bench, play: dict[str, Any], gpus: tuple[int, ...]) -> None:
    with pytest.raises(Leave, match="torch sees"):
        bench.run(play, gpus=gpus)
    assert processes.gone(p2p.PROGRAM, str(bench.folder)) == []


def test_a_layer_that_cannot_be_loaded(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import a_module_that_nobody_has\n")
    with pytest.raises(Leave, match="a_module_that_nobody_has"):
        p2p.measure(bench.context, layer=str(tmp_path / "broken.py"), **vars(probe.Params()))


@pytest.mark.parametrize(
    "wrong", [{"gpus": (1, 1)}, {"gpus": (-1,)}, {"size_bytes": 5}, {"size_bytes": 1 << 40}, {"pair_timeout_s": 0.0}]
)
def test_params_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        probe.Params(**wrong)
