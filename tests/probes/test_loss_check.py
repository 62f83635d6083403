from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from probes import loss_check
from probes.lib.accuracy_reading import SENTENCES, VERDICTS
from probes.lib.loss_reading import Known, Track, reference
from probes.lib.training_dialects import DIALECTS
from remote_diag.findings import Finding, status
from remote_diag.paths import shipped_probes
from remote_diag.results import parse

LN_D = math.log(32000)


class Unfit(Exception):
    """What the fake context raises for an unfit environment."""


class FakeContext:
    """Keeps what a probe says."""

    run_id = "test"
    run_dir = "/nowhere"

    def __init__(self, remaining: float = 60.0) -> None:
        self.findings: list[Finding] = []
        self._remaining = remaining

    def progress(self, done: float, total: float | None = None, *, unit: str = "", label: str = "") -> None: ...

    def finding(self, level: Any, code: str, message: str, **more: Any) -> None:
        self.findings.append(Finding(level, code, message, **more))

    def require(self, name: str, hint: str | None = None) -> Any:  # noqa: ARG002
        raise AssertionError(name)

    def unfit(self, message: str, hint: str | None = None) -> Any:
        assert hint
        raise Unfit(message)

    def skip(self, reason: str) -> Any:
        raise AssertionError(reason)

    def remaining(self) -> float:
        return self._remaining


class Checked:
    """One run of the probe."""

    def __init__(self, params: loss_check.Params, context: FakeContext | None = None) -> None:
        context = context or FakeContext()
        self.result = loss_check.run(params, context)
        self.findings = {finding.code: finding for finding in context.findings}
        assert len(self.findings) == len(context.findings), "a finding occurs twice"
        self.status = status(context.findings)

    def __getitem__(self, code: str) -> Finding:
        return self.findings[code]


def numbers(loss: tuple[float, ...], accuracy: tuple[float, ...], **more: Any) -> Checked:
    return Checked(loss_check.Params(loss=loss, accuracy=accuracy, **{"draft_vocab_size": 32000, **more}))


@pytest.fixture
def log(tmp_path: Path) -> Any:
    def check(text: str | bytes, **more: Any) -> Checked:
        path = tmp_path / "train.log"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return Checked(loss_check.Params(path=str(path), **{"draft_vocab_size": 32000, **more}))

    return check


def specforge(losses: list[float], accuracies: list[float], position: int = 0) -> str:
    lines = []
    for n, (loss, acc) in enumerate(zip(losses, accuracies, strict=True)):
        lines.append(f"Eval - Step {n * 50} [{n * 50 + 1}/10], position {position},  Acc: {acc:.2f}")
        lines.append(f"Eval - Step {n * 50} [{n * 50 + 1}/10], position {position}, pLoss: {loss}")
    return "\n".join(lines) + "\n"


def speculators(losses: list[float], accuracies: list[list[float]]) -> str:
    lines = []
    for loss, accs in zip(losses, accuracies, strict=True):
        steps = ", ".join(f"train/loss_{k}={loss:.3f}, train/full_acc_{k}={acc:.3f}" for k, acc in enumerate(accs))
        lines.append(f"{steps}, train/loss={loss * len(accs):.3f}, epoch=0, lr=1.00e-04")
    return "\n".join(lines) + "\n"


def test_the_contract_holds() -> None:
    from remote_diag.probe import load

    probe = load(shipped_probes() / "loss_check.py")
    assert probe.name == "loss-check"
    assert probe.effects == ("reads-files",)


def test_the_result_travels(log: Any) -> None:
    import dataclasses
    import json

    from remote_diag.probe import load

    checked = log(specforge([3.5, float("nan"), 1.0], [0.1, 0.2, 0.3]) + "loss=oops\nLoaded vocab mapping\n")
    data = json.dumps(dataclasses.asdict(checked.result), allow_nan=False).encode()
    parsed = parse(load(shipped_probes() / "loss_check.py"), data)
    assert dataclasses.asdict(parsed) == dataclasses.asdict(checked.result)


def test_a_warm_start_that_begins_above_ln_d() -> None:
    """Loss 18 to 20 and 2 to 7 % right with 32,000 rows: what a drafter under another mapping shows."""
    checked = numbers((19.2, 18.7, 19.9, 18.1), (0.03, 0.05, 0.02, 0.07))
    assert checked.status == "fail"
    assert checked.result.verdict == "confidently-wrong"
    above = checked["loss-above-uniform"]
    assert above.threshold == pytest.approx(LN_D, abs=1e-5)
    assert above.value == pytest.approx(18.95)
    assert "ln 32000" in (above.threshold_source or "")
    assert "vocab-compare" in (above.action or "")
    assert any("sum over" in line for line in above.evidence)
    assert checked["accuracy-near-frequencies"].level == "degraded"
    told = checked.result.interpretation
    assert told.loss_ratio_start == pytest.approx(18.95 / LN_D)
    assert told.chance == 1 / 32000


def test_the_same_with_the_ceiling_known() -> None:
    checked = numbers((19.2, 18.7), (0.03, 0.05), ceiling=0.05)
    assert checked.result.verdict == "mapping"
    assert checked["accuracy-at-ceiling"].value == 0.04
    assert checked.result.interpretation.accuracy_over_ceiling == pytest.approx(0.8)


def test_far_below_the_ceiling_there_is_another_fault() -> None:
    checked = numbers((19.2, 18.7), (0.03, 0.05), ceiling=0.31)
    assert checked.result.verdict == "another-fault"
    assert checked["accuracy-below-ceiling"].level == "fail"


def test_above_the_ceiling_the_mapping_is_acquitted() -> None:
    assert numbers((3.0, 2.5), (0.5, 0.6), ceiling=0.05)["accuracy-above-ceiling"].level == "ok"


def test_a_sum_over_steps_is_held_against_the_sum() -> None:
    checked = numbers((19.2, 18.7), (0.03, 0.05), loss_is="total", ttt_steps=3, ttt_decay=1.0)
    assert "loss-above-uniform" not in checked.findings
    assert checked.result.interpretation.reference_high == pytest.approx(3 * LN_D)
    # Averaged over which positions, nobody knows: nothing is concluded.
    assert checked["loss-reference-open"].level == "unknown"
    assert numbers((40.0,), (0.03,), loss_is="total", ttt_steps=3)["loss-above-uniform"].level == "fail"
    assert numbers((40.0,), (0.03,), loss_is="total")["loss-reference-open"].threshold is None


def test_without_a_vocabulary_size_nothing_is_concluded_from_the_loss() -> None:
    checked = numbers((19.2,), (0.03,), draft_vocab_size=None)
    assert checked["draft-vocab-size-unknown"].level == "unknown"
    assert "--draft-vocab-size" in (checked["draft-vocab-size-unknown"].action or "")


def test_above_the_whole_target_vocabulary_is_above_any_draft_vocabulary() -> None:
    assert numbers((19.2,), (0.03,), draft_vocab_size=None, target_vocab_size=163840)["loss-above-uniform"].level == "fail"
    assert numbers((11.5,), (0.03,), draft_vocab_size=None, target_vocab_size=163840)["loss-reference-open"].level == "unknown"


@pytest.mark.parametrize(
    ("dialect", "position", "known", "seen", "bounds"),
    [
        ("speculators", 0, {}, 3, (LN_D, LN_D)),
        ("speculators", 2, {"ttt_decay": 0.5}, 3, (LN_D / 4, LN_D / 4)),
        ("speculators", None, {}, 3, (3 * LN_D, 3 * LN_D)),
        ("speculators", None, {"ttt_decay": 0.5}, 3, (1.75 * LN_D, 1.75 * LN_D)),
        ("speculators", None, {}, None, (LN_D, None)),
        ("specforge-ploss", 0, {}, 7, (None, LN_D)),
        ("specforge-ploss", 3, {"mask_density": 0.25}, 7, (LN_D / 4, LN_D / 4)),
        ("specforge-step", None, {"mask_density": 0.5}, 2, (0.9 * LN_D, 0.9 * LN_D)),
        ("specforge-step", None, {"mask_density": 0.5}, None, (0.5 * LN_D, 2.5 * LN_D)),
        ("specforge-progress", None, {"mask_density": 0.5}, None, (0.5 * LN_D, 0.5 * LN_D)),
        ("safeai", 1, {"mask_density": 0.5}, 7, (0.5 * LN_D, 0.5 * LN_D)),
        ("angelslim", None, {"mask_density": 1.0, "ttt_steps": 2}, 1, (1.8 * LN_D, 1.8 * LN_D)),
        ("key-value", None, {"mask_density": 0.5}, None, (0.5 * LN_D, LN_D)),
        ("modelopt", None, {}, None, (None, LN_D)),
    ],
)
def test_references(
    dialect: str, position: int | None, known: dict[str, Any], seen: int | None, bounds: tuple[float | None, float | None]
) -> None:
    track = Track("loss", DIALECTS[dialect].family, dialect, position, 1.0, 1.0, 1.0, 1.0, 1, 0.0, ())
    ref = reference(track, Known(draft_vocab_size=32000, **known), seen)
    low, high = bounds
    assert ref is not None
    assert ref.low == (None if low is None else pytest.approx(low))
    assert ref.high == (None if high is None else pytest.approx(high))
    assert bool(ref.missing) == (not ref.exact)
    assert ref.formula.startswith("ln 32000")


def test_mask_density_decides_what_a_specforge_loss_means(log: Any) -> None:
    text = specforge([5.2] * 6, [0.03] * 6)
    left_open = log(text)["loss-reference-open"]
    assert left_open.level == "unknown"
    assert "mask density" in left_open.message
    assert any("0.5" in line for line in left_open.evidence)
    assert log(text, mask_density=0.25)["loss-above-uniform"].threshold == pytest.approx(LN_D / 4, abs=1e-5)
    assert log(text, mask_density=0.5)["loss-at-uniform"].level == "degraded"
    assert log(text, mask_density=0.5, start="warm")["loss-at-uniform"].level == "fail"
    assert log(text, mask_density=0.7)["loss-near-frequencies"].level == "degraded"
    assert log(text, mask_density=1.0)["loss-below-uniform"].level == "ok"


def test_a_good_accuracy_settles_what_the_loss_leaves_open(log: Any) -> None:
    checked = log(specforge([2.0] * 6, [0.6] * 6))
    assert checked.status == "ok"
    assert checked.result.verdict == "healthy"
    assert checked["loss-reference-open"].level == "ok"


def test_a_fresh_drafter_that_learns_is_healthy(log: Any) -> None:
    losses = [10.4, 10.3, 10.4, 10.2, 10.3, 8.0, 5.0, 3.0, 2.5, 2.4, 2.4, 2.4, 2.4]
    accs = [[0.001 + 0.04 * n, 0.0005 + 0.03 * n] for n in range(13)]
    checked = log(speculators(losses, accs))
    assert checked.status == "ok", checked.findings
    assert checked.result.verdict == "healthy"
    assert checked.result.interpretation.expected_accept_length == pytest.approx(1 + accs[-3][0] + accs[-3][1], abs=1e-3)


def test_speculators_totals_are_not_mistaken_for_one_step(log: Any) -> None:
    # 3 x 6.4 = 19.2 in total: below a uniform guess over three steps, and step 0 says so.
    checked = log(speculators([6.4] * 6, [[0.05, 0.01, 0.0]] * 6))
    assert "loss-above-uniform" not in checked.findings
    assert checked.result.interpretation.loss == "train/loss_0"
    assert checked["loss-near-frequencies"].level == "degraded"
    total = "\n".join(["train/loss=19.200, epoch=0"] * 6)
    assert log(total)["loss-reference-open"].level == "unknown"
    assert log(total, ttt_steps=3).result.interpretation.loss_ratio_start == pytest.approx(19.2 / 3 / LN_D)


def test_nothing_supervised(log: Any) -> None:
    bar = "Training Epoch 0:   {n}%|#| {n}/100 [00:01<00:09,  1.0s/it, loss=0.00, acc=0.00, time=1.0s]"
    checked = log("\r".join(bar.format(n=n) for n in range(1, 9)))
    assert checked.result.verdict == "mask-empty"
    assert checked["mask-empty"].level == "fail"
    assert set(checked.findings) == {"mask-empty"}


def test_a_loss_that_learns_beside_an_accuracy_of_nothing(log: Any) -> None:
    checked = log(specforge([9.0, 9.0, 9.0, 5.0, 2.0, 2.0, 2.0, 2.0, 2.0], [0.0] * 9))
    assert checked.result.verdict == "d2t"
    assert "d2t" in checked["accuracy-zero-loss-normal"].message
    steady = log(specforge([2.0] * 9, [0.0] * 9))
    assert "accuracy-zero-loss-normal" not in steady.findings, "it may be a sparse mask"
    assert "accuracy-zero-loss-normal" in log(specforge([2.0] * 9, [0.0] * 9), mask_density=0.5).findings


def test_what_two_decimals_hide_is_said(log: Any) -> None:
    found = log(specforge([2.0] * 6, [0.0] * 6))["accuracy-below-frequencies"]
    assert any("0.00 hides" in line for line in found.evidence)


def test_chance(log: Any) -> None:
    checked = log("\n".join(f"step={n} loss=10.4 acc=0.00003" for n in range(6)), start="warm")
    assert checked["accuracy-at-chance"].level == "fail"
    assert checked["accuracy-at-chance"].threshold == 1 / 32000


def test_later_steps_that_collapse(log: Any) -> None:
    checked = log(speculators([2.0] * 6, [[0.6, 0.06, 0.001]] * 6))
    assert checked["steps-collapse"].level == "degraded"
    assert checked.result.verdict == "steps-collapse"
    assert "norm_output" in checked["steps-collapse"].message
    assert checked.result.interpretation.conditional_accuracies["1"] == pytest.approx(0.1)
    sound = log(speculators([2.0] * 6, [[0.6, 0.35, 0.2]] * 6))
    assert sound["steps-regular"].level == "ok"
    assert sound.result.interpretation.expected_accept_length == pytest.approx(2.15)


def test_unconditional_accuracies_chain_to_a_length(log: Any) -> None:
    text = "\n".join(f"Step {n} Training Acc: [0.5, 0.4]" for n in range(1, 6))
    assert log(text).result.interpretation.expected_accept_length == pytest.approx(1 + 0.5 + 0.5 * 0.4)


@pytest.mark.parametrize(
    ("length", "first", "code", "words"),
    [(2.87, 0.8, "accept-length", ""), (1.02, 0.01, "accept-length-one", "layer names"), (1.07, 0.07, "accept-length-one", "off by one")],
)
def test_servers(log: Any, length: float, first: float, code: str, words: str) -> None:
    line = f"SpecDecoding metrics: Mean acceptance length: {length}, Per-position acceptance rate: {first}, 0.1, 0.0\n"
    checked = log(line * 4)
    assert words in checked[code].message
    assert set(checked.findings) == {code}
    assert checked.status == ("ok" if code == "accept-length" else "fail")


def test_a_mapping_loaded_over_a_warm_start(log: Any) -> None:
    lines = "Finetuning from base model: /ckpt/AQ\nLoaded vocab mapping\n"
    checked = log(lines + specforge([2.0] * 6, [0.5] * 6))
    found = checked["mapping-installed-over-warm-start"]
    assert found.evidence == ("line 1: Finetuning from base model: /ckpt/AQ", "line 2: Loaded vocab mapping")
    assert "/ckpt/AQ" in (found.action or "")
    other_order = log("Loaded vocab mapping\nFinetuning from base model: /ckpt/AQ\n" + specforge([2.0] * 6, [0.5] * 6))
    assert "mapping-installed-over-warm-start" not in other_order.findings


def test_sizes_are_taken_from_the_log(log: Any) -> None:
    text = "top 32000 token frequency ratio: 95.00%\n" + speculators([2.0] * 6, [[0.6, 0.4]] * 6)
    told = log(text, draft_vocab_size=None).result.interpretation
    assert told.draft_vocab_size == 32000
    assert told.coverage == pytest.approx(0.95)
    assert told.serving_accuracy_at_least == pytest.approx(0.55)
    assert log(text, draft_vocab_size=16000)["draft-vocab-size-differs"].level == "degraded"


def test_a_full_vocabulary(log: Any) -> None:
    text = "No vocab mappings found, and can't. Using full verifier vocab\n" + speculators([2.0] * 6, [[0.6, 0.4]] * 6)
    checked = log(text, draft_vocab_size=None, target_vocab_size=163840)
    assert checked.result.interpretation.draft_vocab_size == 163840
    assert checked["mapping-missing"].level == "degraded"


def test_training_that_loses_what_it_had(log: Any) -> None:
    checked = log(speculators([2.0] * 5 + [4.0] * 10, [[0.6, 0.4]] * 5 + [[0.2, 0.1]] * 10))
    assert checked["accuracy-lost"].level == "degraded"
    assert log(speculators([2.0] * 5 + [14.0] * 10, [[0.6, 0.4]] * 5 + [[0.2, 0.1]] * 10))["loss-diverges"].level == "fail"


def test_not_a_number_is_a_failure_at_a_line(log: Any) -> None:
    found = log(specforge([2.0, 2.0, float("nan"), 2.0], [0.5] * 4))["loss-not-finite"]
    assert found.level == "fail"
    assert "line 6" in found.message


def test_faults_name_the_first_failing_rank(log: Any) -> None:
    text = (
        specforge([2.0] * 6, [0.5] * 6)
        + "[rank5]:[E ProcessGroupNCCL.cpp:616] Watchdog caught collective operation timeout\n"
        + "Root Cause (first observed failure):\n  rank      : 3 (local_rank: 3)\n"
    )
    found = log(text)["training-fault"]
    assert found.subject == "rank 3"
    assert len(found.evidence) == 3
    soft = log(specforge([2.0] * 6, [0.5] * 6) + "Traceback (most recent call last):\n")["training-complaint"]
    assert soft.level == "degraded"


@pytest.mark.parametrize("text", [b"", b"nothing of interest\n" * 10, bytes(range(256)) * 100])
def test_a_log_without_metrics_is_unknown_never_ok(log: Any, text: bytes) -> None:
    checked = log(text)
    assert checked.status == "unknown"
    assert checked["no-metrics"].level == "unknown"
    assert checked.result.verdict == "open"


def test_a_log_that_cannot_be_read_for_the_most_part(log: Any) -> None:
    checked = log("loss=<Tensor>\n" * 10 + specforge([2.0] * 6, [0.5] * 6))
    assert checked["metrics-unread"].level == "unknown"
    assert checked.result.unread_lines == 10
    assert checked.status == "unknown"


def test_half_of_the_numbers() -> None:
    checked = Checked(loss_check.Params(loss=(12.5,), draft_vocab_size=32000))
    assert checked["no-accuracy"].level == "unknown"
    checked = Checked(loss_check.Params(accuracy=(0.5,), draft_vocab_size=32000))
    assert checked["no-loss"].level == "unknown"
    assert checked.result.verdict == "open"


def test_several_ranks_and_validation_are_kept_apart(log: Any) -> None:
    lines = [f"[rank{rank}]: train/loss_0={3 + rank}.000, train/full_acc_0=0.500, epoch=0" for _ in range(6) for rank in (1, 0)]
    checked = log("\n".join([*lines, "val/loss_0_epoch=9.0, val/full_acc_0_epoch=0.1, epoch=0"]))
    assert checked.result.ranks == (0, 1)
    assert checked.result.interpretation.loss_start == 3.0
    assert {(item.label, item.rank) for item in checked.result.series} >= {("train/loss_0", 0), ("train/loss_0", 1), ("val/loss_0", None)}


def test_series_are_thinned_and_say_so(log: Any) -> None:
    losses = [3.0] * 300
    losses[123], losses[222] = 9.0, 1.0
    checked = log(specforge(losses, [0.5] * 300), max_points=20)
    series = next(item for item in checked.result.series if item.metric == "loss")
    assert len(series.values) == len(series.steps) <= 20
    assert series.left_out == 300 - len(series.values)
    assert {9.0, 1.0} <= set(series.values)
    assert (series.highest, series.lowest, series.count) == (9.0, 1.0, 300)
    assert series.steps[series.values.index(9.0)] == 123 * 50


def test_the_deadline_cuts_the_reading_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(specforge([2.0] * 6, [0.5] * 6))
    checked = Checked(loss_check.Params(path=str(path)), FakeContext(remaining=0.5))
    assert checked["log-cut"].level == "unknown"
    assert checked.result.bytes_read == 0


@pytest.mark.timeout(30)
def test_only_ordinary_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "packed").write_bytes(b"\x1f\x8b\x08\x00rest")
    for path, reason in (
        (tmp_path / "fifo", "pipe"),
        (tmp_path, "folder"),
        (Path("/dev/zero"), "device"),
        (tmp_path / "absent", "No such file"),
        (tmp_path / "packed", "compressed"),
    ):
        with pytest.raises(Unfit, match=reason):
            Checked(loss_check.Params(path=str(path)))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({}, "give a log"),
        ({"path": "x", "loss": (1.0,)}, "not both"),
        ({"accuracy": (3.0,)}, "fractions"),
        ({"loss": (1.0,), "mask_density": 0.0}, "mask_density"),
        ({"loss": (1.0,), "ceiling": 1.5}, "ceiling"),
        ({"loss": (1.0,), "draft_vocab_size": 1}, "draft_vocab_size"),
        ({"loss": (1.0,), "ttt_steps": 0}, "ttt_steps"),
        ({"loss": (1.0,), "max_points": 1}, "max_points"),
    ],
)
def test_parameters_that_make_no_sense(params: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        loss_check.Params(**params)


def test_every_verdict_has_its_sentence() -> None:
    assert {name for name, _ in VERDICTS} | {"healthy", "open"} == set(SENTENCES)


def test_findings_say_what_they_stand_on() -> None:
    context = FakeContext()
    loss_check.run(loss_check.Params(loss=(19.2,), accuracy=(0.03,), draft_vocab_size=32000), context)
    for finding in context.findings:
        assert finding.value is not None
        assert finding.threshold is not None
        assert finding.threshold_source
        assert finding.evidence
        assert finding.action
