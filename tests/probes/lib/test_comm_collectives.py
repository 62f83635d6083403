"""Ranks that misbehave: what is said of them, what is kept, and that nobody stays."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from probes import nccl
from probes.lib.comm import collectives, plan, workers
from probes.lib.comm.judge import Judge
from remote_diag.testing import RecordingContext
from tests.support import processes
from tests.support.fake_smi import FakeSmi, rtx_pro_6000

STAND_IN = str(Path(__file__).resolve().parents[2] / "support" / "stand_in_rank.py")
SIZES = [8, 1 << 20, 64 << 20]


class Bench:
    """Runs jobs whose ranks are stand-ins."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._patch = monkeypatch
        self.context = RecordingContext(folder)

    def run(self, play: dict[str, Any] | None = None, *, control: bool = True, **job: Any) -> nccl.Result:
        self._patch.setenv("PLAY", json.dumps(play or {}))
        fields: dict[str, Any] = {
            "backend": "nccl", "collective": "all_reduce", "sizes": SIZES, "dtype": "bf16", "ranks": 3, "graph": False,
            "check": True, "iterations": None, "judge": Judge({}), "step_timeout_s": 3.0, "start_timeout_s": 20.0, "port": None, "program": STAND_IN,
        }  # fmt: skip
        done = collectives.Job(**{**fields, **job})
        result = nccl.build_result(collectives.measure_job(self.context, done, control=control))
        assert processes.gone(STAND_IN, str(self.folder)) == []
        return result

    @property
    def codes(self) -> dict[str, str]:
        """Code -> level of what was found."""
        return {finding.code: finding.level for finding in self.context.findings}

    def message(self, code: str) -> str:
        (found,) = [finding for finding in self.context.findings if finding.code == code]
        return found.message


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.setattr(workers, "_AFTERMATH", 0.3)
    monkeypatch.setattr(workers, "_STOPPED_FOR", 0.3)
    return Bench(tmp_path, monkeypatch)


def test_healthy_ranks(bench: Bench) -> None:
    result = bench.run()
    assert (result.complete, result.correctness, result.ranks, result.failure) == (True, "ok", 3, None)
    assert [row.size_bytes for row in result.rows] == SIZES
    row = result.rows[-1]
    assert row.time_us is not None and row.algbw_gbs is not None  # noqa: PT018
    assert row.time_us == pytest.approx(10 + SIZES[-1] / 1e4)
    assert row.algbw_gbs == pytest.approx(SIZES[-1] / row.time_us / 1e3)
    assert row.busbw_gbs == pytest.approx(row.algbw_gbs * 4 / 3)
    assert (result.peak_busbw_gbs, result.peak_size_bytes) == (row.busbw_gbs, SIZES[-1])
    assert row.latency is not None
    # The third rank is always the last, and what counts.
    assert (row.latency.slowest_rank, row.latency.slowest_share) == (2, 1.0)
    assert row.latency.p50_us == pytest.approx(row.time_us + 2)
    assert result.rows[0].latency is not None
    assert result.rows[0].latency.iterations == 200
    assert bench.codes["data-correct"] == "ok"
    assert "fail" not in bench.codes.values()


@pytest.mark.parametrize(
    ("collective", "parts"),
    [("all_reduce", 1), ("broadcast", 1), ("sendrecv", 1), ("all_gather", 3), ("reduce_scatter", 3), ("alltoall", 3)],
)
def test_elements_are_counted_as_nccl_tests_counts_them(bench: Bench, collective: str, parts: int) -> None:
    (row,) = bench.run(collective=collective, sizes=[6 << 10]).rows
    assert (row.count, row.dtype) == ((6 << 10) // 2 // parts, "bf16")


@pytest.mark.parametrize(
    ("play", "kind", "code"),
    [
        ({"do": "kill"}, "killed", "rank-killed"),
        ({"do": "exit"}, "exited", "rank-exited"),
        ({"do": "stop"}, "frozen", "rank-frozen"),
        ({"do": "hang"}, "hang", "collective-hang"),
        ({"do": "error"}, "error", "collective-failed"),
    ],
)
def test_one_rank_fails_in_the_middle(bench: Bench, play: dict[str, Any], kind: str, code: str) -> None:
    begun = time.monotonic()
    result = bench.run({**play, "rank": 1, "phase": "burst", "size": 1 << 20}, control=False)
    assert time.monotonic() - begun < 30
    assert result.failure is not None
    assert (result.failure.kind, result.failure.rank) == (kind, 1)
    assert (result.failure.phase, result.failure.size_bytes) == ("burst", 1 << 20)
    assert not result.complete
    assert bench.codes == {code: "fail"}
    (found,) = [finding for finding in bench.context.findings if finding.code == code]
    assert found.subject == "rank 1"
    assert "burst" in found.message
    # What was measured before is kept; the size that failed was checked, and has no time.
    assert [(row.size_bytes, row.time_us is None, row.wrong) for row in result.rows] == [(8, False, 0), (1 << 20, True, 0)]
    # Nobody knows what the sizes that are missing would have given.
    assert result.correctness == "not_checked"


def test_a_silent_rank_is_frozen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "SILENT", 1.0)
    result = bench.run({"do": "silent", "rank": 2, "phase": "check", "size": 8}, control=False, step_timeout_s=20.0)
    assert result.failure is not None
    assert (result.failure.kind, result.failure.rank) == ("frozen", 2)


@pytest.mark.parametrize("phase", ["import", "devices"])
def test_a_rank_that_begins_slowly_is_not_frozen(bench: Bench, monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    monkeypatch.setattr(workers, "SILENT", 0.5)
    result = bench.run({"do": "silent", "rank": 2, "phase": phase}, start_timeout_s=2.5)
    assert result.failure is not None
    assert (result.failure.kind, result.failure.rank, result.failure.phase) == ("hang", 2, phase)
    assert result.control is None
    assert "persistence mode" in str(bench.context.findings[0].action)


def test_all_ranks_hang_in_the_same_call(bench: Bench) -> None:
    result = bench.run({"do": "hang", "phase": "check", "size": 8}, control=False, step_timeout_s=1.0)
    assert result.failure is not None
    assert (result.failure.kind, result.failure.rank, result.failure.phase) == ("hang", None, "check")
    assert result.failure.text.startswith("all 3 ranks did not come back")
    assert result.rows == ()
    assert result.correctness == "not_checked"


@pytest.mark.parametrize("phase", ["import", "devices", "meet"])
def test_ranks_that_never_meet(bench: Bench, phase: str) -> None:
    result = bench.run({"do": "hang", "rank": 1, "phase": phase}, control=False, start_timeout_s=1.5)
    assert result.failure is not None
    assert (result.failure.kind, result.failure.rank, result.failure.phase) == ("hang", 1, phase)


def test_a_rank_stopped_while_it_starts(bench: Bench) -> None:
    result = bench.run({"do": "stop", "rank": 1, "phase": "import"}, control=False, start_timeout_s=30.0)
    assert result.failure is not None
    assert (result.failure.kind, result.failure.rank) == ("frozen", 1)


def test_nonsense_from_a_rank_is_no_answer(bench: Bench) -> None:
    assert bench.run({"do": "garbage", "rank": 1, "phase": "check", "size": 8}).complete


def test_wrong_data_is_found_and_the_control_names_p2p(bench: Bench) -> None:
    result = bench.run({"do": "wrong", "rank": 1, "phase": "check", "size": 1 << 20, "with_p2p": True})
    assert result.correctness == "wrong"
    assert [row.wrong for row in result.rows] == [0, 3, 0]
    assert result.complete
    assert result.control is not None
    assert (result.control.outcome, result.control.settings) == ("healthy", {"NCCL_P2P_DISABLE": "1"})
    assert bench.codes["wrong-data"] == "fail"
    assert bench.codes["p2p-at-fault"] == "fail"
    assert "data-correct" not in bench.codes


@pytest.mark.parametrize(
    ("play", "outcome"),
    [
        ({"do": "hang", "phase": "check", "with_p2p": True}, "healthy"),
        ({"do": "hang", "phase": "check"}, "hang"),
        ({"do": "error", "phase": "check"}, "failed"),
        ({"do": "kill", "rank": 0, "phase": "check", "signal": int(signal.SIGSEGV), "with_p2p": True}, "healthy"),
        ({"do": "wrong", "phase": "check"}, "wrong"),
    ],
)
def test_the_control_run(bench: Bench, play: dict[str, Any], outcome: str) -> None:
    result = bench.run(play, step_timeout_s=1.0)
    assert result.control is not None
    assert result.control.outcome == outcome
    code = "p2p-at-fault" if outcome == "healthy" else "control-fails-too"
    assert bench.codes[code] == ("fail" if outcome == "healthy" else "unknown")


@pytest.mark.parametrize(
    "play",
    [
        {"do": "stop", "rank": 1, "phase": "check"},
        {"do": "kill", "rank": 1, "phase": "check"},
        {"do": "error", "phase": "prepare", "text": "CUDA error: out of memory"},
        {"do": "error", "phase": "meet", "text": "CUDA error: no kernel image is available for execution on the device"},
    ],
)
def test_what_p2p_cannot_cause_has_no_control_run(bench: Bench, play: dict[str, Any]) -> None:
    assert bench.run(play).control is None


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("CUDA error: no kernel image is available for execution on the device", "not-built-for-gpu", "rdiag env"),
        ("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized", "fabric-not-ready", "fabricmanager"),
        ("The NVIDIA driver on your system is too old (found version 12020).", "driver-too-old", "a newer driver"),
        ("CUDA error: uncorrectable ECC error encountered", "gpu-memory-error", "rdiag gpu"),
        ("CUDA error: invalid device ordinal", "gpu-unavailable", "MIG"),
    ],
)
def test_what_cuda_says_of_the_environment_is_named(bench: Bench, text: str, code: str, words: str) -> None:
    bench.run({"do": "error", "phase": "meet", "text": text})
    assert bench.codes == {code: "fail"}
    (found,) = bench.context.findings
    assert words in str(found.action)


def test_many_calls_are_no_hang(bench: Bench) -> None:
    # Ten thousand calls of a size whose call takes 6.7 ms would take longer than the size may.
    result = bench.run(sizes=[64 << 20], iterations=10_000, step_timeout_s=3.0)
    (row,) = result.rows
    assert row.latency is not None
    assert row.latency.iterations == pytest.approx(3e6 / 4 / 6721, abs=2)


def test_a_hang_on_the_cpu_is_not_blamed_on_links(bench: Bench) -> None:
    bench.run({"do": "hang", "phase": "check", "size": 8}, backend="gloo", step_timeout_s=1.0)
    (found,) = bench.context.findings
    assert found.code == "collective-hang"
    assert "P2P" not in str(found.action)
    assert "--step-timeout" in str(found.action)


def test_what_gloo_has_not_got_is_unknown_and_not_a_fault(bench: Bench) -> None:
    bench.run({"do": "error", "phase": "check", "text": "Invalid scalar type"}, backend="gloo")
    assert bench.codes == {"not-supported": "unknown"}


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "out of memory"), (signal.SIGSEGV, "it crashed"), (signal.SIGTERM, "somebody ended it")]
)
def test_what_to_do_depends_on_the_signal(bench: Bench, number: int, words: str) -> None:
    bench.run({"do": "kill", "signal": number, "rank": 1, "phase": "burst"}, control=False)
    (found,) = bench.context.findings
    assert words in str(found.action)


def test_on_the_cpu_sizes_are_bounded_by_what_a_container_may_use(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probes.lib.comm.memory.available", lambda: 3 * 64 << 20)
    result = bench.run({"free": None}, backend="gloo", sizes=[8, 8 << 20, 9 << 20])
    assert [row.size_bytes for row in result.rows] == [8, 8 << 20]
    assert (bench.codes["sizes-left-out"], result.complete) == ("unknown", False)
    monkeypatch.setattr("probes.lib.comm.memory.available", lambda: 100)
    bench.run({"free": None}, backend="gloo")
    assert bench.codes["out-of-memory"] == "unknown"
    assert "--sizes" in str(bench.context.findings[-1].action)


def test_no_memory_is_unknown_and_not_a_fault(bench: Bench) -> None:
    bench.run({"do": "error", "phase": "prepare", "text": "CUDA out of memory. Tried to allocate 4 GiB"})
    assert bench.codes["out-of-memory"] == "unknown"
    assert "fail" not in bench.codes.values()


def test_the_first_warning_of_nccl_is_evidence(bench: Bench) -> None:
    bench.run({"do": "error", "rank": 1, "phase": "check"}, control=False)
    (found,) = [finding for finding in bench.context.findings if finding.code == "collective-failed"]
    assert any("NCCL WARN the first word" in line for line in found.evidence)


def test_the_deadline_of_the_run_keeps_what_was_measured(bench: Bench) -> None:
    bench.context = RecordingContext(bench.folder, seconds=collectives._RESERVE + 2)
    result = bench.run({"do": "hang", "phase": "burst", "size": 1 << 20}, step_timeout_s=60.0)
    assert result.failure is not None
    assert result.failure.kind == "deadline"
    assert bench.codes["deadline"] == "unknown"
    assert result.rows[0].time_us is not None


def test_a_port_that_is_taken(bench: Bench) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        result = bench.run(port=holder.getsockname()[1])
    assert result.failure is not None
    assert result.failure.kind == "port-taken"
    assert bench.codes == {"port-taken": "unknown"}


def test_a_port_that_is_taken_meanwhile_is_replaced(bench: Bench) -> None:
    result = bench.run({"do": "error", "rank": 0, "phase": "meet", "text": "EADDRINUSE: address already in use"})
    assert result.failure is not None
    assert result.failure.kind == "port-taken"


def test_sizes_that_do_not_fit_are_left_out_and_told(bench: Bench) -> None:
    result = bench.run(sizes=[8, 1 << 30])
    assert [row.size_bytes for row in result.rows] == [8]
    assert (result.complete, result.correctness) == (False, "not_checked")
    assert bench.codes["sizes-left-out"] == "unknown"


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_one_rank_has_no_bandwidth(bench: Bench, backend: str) -> None:
    result = bench.run(ranks=1, backend=backend)
    assert {row.busbw_gbs for row in result.rows} == {0.0}
    assert result.peak_busbw_gbs is None
    assert bench.codes["one-rank"] == "skipped"
    assert bench.message("data-correct") == "all_reduce over 1 rank gave exact results in all of 3 sizes"


def test_the_peak_is_judged(bench: Bench) -> None:
    result = bench.run({"name": "NVIDIA H200"}, ranks=8)
    assert result.expectation is not None
    assert result.expectation.ratio == pytest.approx((result.peak_busbw_gbs or 0) / result.expectation.busbw_gbs)
    assert bench.codes["busbw"] == "fail"


def test_a_setting_of_the_ranks_that_slows_is_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    bench.run({"name": "NVIDIA H200"}, ranks=8)
    (found,) = [one for one in bench.context.findings if one.code == "busbw"]
    assert "NCCL_P2P_DISABLE=1 is set" in (found.action or "")


@pytest.mark.parametrize(("p50", "burst", "level"), [(52.0, 24.0, "ok"), (24.0, 52.0, "ok"), (52.0, 36.0, "unknown"), (52.0, 48.0, "degraded")])
def test_the_cost_of_launching_is_no_wrong_path(tmp_path: Path, *, p50: float, burst: float, level: str) -> None:
    context = RecordingContext(tmp_path)
    row = {"size_bytes": 32 << 10, "busbw_gbs": 1.0, "time_us": burst, "spread_pct": None, "latency": {"p50_us": p50}}
    names = [{"name": "NVIDIA RTX PRO 6000 Blackwell Server Edition"}] * 8
    report = {"ranks": 8, "load": [], "devices": names, "collective": "all_reduce", "settings": {}, "rows": [row], "failure": None}
    Judge({}).judge(context, report)
    (found,) = [finding for finding in context.findings if finding.code == "small-latency"]
    assert (found.level, found.value) == (level, min(p50, burst))


def test_a_peak_without_a_figure_is_unknown(bench: Bench) -> None:
    assert bench.run().expectation is None
    assert bench.codes["no-expectation"] == "unknown"


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_without_a_check_nothing_is_said_to_be_correct(bench: Bench, backend: str) -> None:
    result = bench.run(check=False, backend=backend)
    assert result.correctness == "not_checked"
    assert "data-correct" not in bench.codes
    assert bench.codes["not-checked"] == "unknown"


def test_the_two_probes_are_the_same() -> None:
    texts = [(Path(nccl.__file__).with_name(name)).read_text() for name in ("nccl.py", "collectives_cpu.py")]
    bodies = [text[text.index("from __future__") :] for text in texts]
    for old, new in (
        ('("runs-commands", "cuda", "collectives")', '("runs-commands",)'), ('= "nccl"', '= "gloo"'),
        ('"8:4G"', '"8:16M"'), ('= "bf16"', '= "fp32"'),
    ):  # fmt: skip
        assert old in bodies[0]
        bodies[0] = bodies[0].replace(old, new, 1)
    assert bodies[0] == bodies[1]


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8:128", [8, 32, 128]),
        ("8:100", [8, 32, 100]),
        ("1K:4K:2", [1024, 2048, 4096]),
        ("32K,1M", [32 << 10, 1 << 20]),
        ("7", [7]),
    ],
)
def test_sizes(text: str, sizes: list[int]) -> None:
    assert plan.parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "0", "8:", "4G:8", "1:8:1", "1:8:2:2", "x", "1,,2", "1:4G:1024x", "-8:8", "1T", "9" * 30, "9" * 5000, "8:99999999G"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        plan.parse_sizes(text)


def test_sizes_are_whole_elements_of_every_rank() -> None:
    assert plan.possible([8, 32, 100], "all_reduce", 8, 2) == [8, 32, 100]
    assert plan.possible([8, 32, 100], "all_gather", 8, 4) == [32, 96]
    assert plan.possible([1], "all_reduce", 2, 8) == [8]


def test_latency_is_that_of_the_slowest_rank_of_each_call() -> None:
    told = plan.latency({0: [1.0, 9.0, 2.0], 1: [3.0, 4.0, 5.0]})
    assert (told["min_us"], told["p50_us"], told["max_us"]) == (3.0, 5.0, 9.0)
    assert (told["slowest_rank"], told["slowest_share"]) == (1, pytest.approx(2 / 3))
    assert plan.nearest_rank([float(n) for n in range(1, 201)], 0.99) == 198.0
    assert plan.nearest_rank([1.0], 0.99) == 1.0


def test_gpus_are_looked_at_under_load(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = FakeSmi(tmp_path / "bin", rtx_pro_6000(4))
    for index, gpu in enumerate(smi.gpus):
        gpu.update({"pci.bus_id": f"00000000:{index:02X}:00.0", "clocks_event_reasons.active": "0x0000000000000004"})
        gpu["pcie.link.gen.current"] = "4" if index == 1 else "5"
    smi.write()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    result = bench.run()
    # The fourth GPU has no rank.
    assert [each.bus_id for each in result.load] == ["0000:00:00.0", "0000:01:00.0", "0000:02:00.0"]
    assert result.load[0].throttle == ("power cap",)
    assert result.load[0].samples >= 1
    assert [(held.reason, held.samples, held.share) for held in result.load[0].held] == [("power cap", result.load[0].samples, 1.0)]
    (found,) = [finding for finding in bench.context.findings if finding.code == "link-slow"]
    assert (found.subject, found.value, found.threshold) == ("gpu 0000:01:00.0", 4, 5)
    assert "load-unknown" not in bench.codes


def test_gpus_that_cannot_be_looked_at_are_unknown(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probes.lib.gpu.run_smi.find", lambda *_: None)
    bench.run()
    assert bench.codes["load-unknown"] == "unknown"
