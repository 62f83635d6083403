from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from probes import replay
from probes.replay import Params, Result, Run
from remote_diag.findings import Finding
from remote_diag.paths import shipped_probes
from remote_diag.probe import load
from remote_diag.testing import Leave, RecordingContext

from ..support import checkpoints, tiny_files, tiny_stack
from ..support.cli import rdiag
from ..support.tiny_stack import D, Sample, Stack, V, reordered, shifted

Change = Callable[[Sample], Sample]


class World:
    """The trained stack on disk."""

    def __init__(self, stack: Stack, folder: Path) -> None:
        self.stack = stack
        self.folder = folder
        self.target = str(tiny_files.write_target(folder / "target", stack.target))
        self.drafter = str(tiny_files.write_drafter(folder / "drafter", stack.drafter))
        self.b = str(checkpoints.write_npy(folder / "b", checkpoints.offsets(stack.mapping_b), checkpoints.mask(stack.mapping_b, V)))
        self.samples = stack.samples(8)
        self.healthy = self.write("healthy")

    def write(self, name: str, kind: str = "speculators-v1", change: Change | None = None) -> str:
        tiny_files.write_samples(self.folder / name, [change(s) if change else s for s in self.samples], kind, self.stack.target)
        return str(self.folder / name)

    def run(self, samples: str, drafter: str | None = None, **more: Any) -> tuple[Result, dict[str, Finding]]:
        given = {"target": self.target, "mapping": self.b, **more}
        context = RecordingContext(self.folder)
        result = replay.run(Params(drafter or self.drafter, (samples,), **given), context)
        return result, {finding.code: finding for finding in context.findings}


@pytest.fixture(scope="module")
def world(tiny_stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tiny_stack, tmp_path_factory.mktemp("replay"))


def best(result: Result) -> tuple[Any, ...]:
    run = result.runs[result.best]
    return run.mapping, run.norm, run.shift, run.aux_order, run.norm_before_residual


RIGHT = ("A", True, 1, (0, 1, 2), True)


def test_the_contract_holds() -> None:
    cpu, cuda = (load(shipped_probes() / f"{name}.py") for name in ("replay", "replay_cuda"))
    assert (cpu.name, cpu.effects) == ("replay", ("reads-files",))
    assert (cuda.name, cuda.effects) == ("replay-cuda", ("reads-files", "cuda"))
    assert cpu.schema() == cuda.schema()


def test_the_two_probes_differ_in_their_device_alone() -> None:
    def body(name: str) -> str:
        text = (shipped_probes() / name).read_text()
        text = text[text.index("from __future__") :]
        return text.replace('("reads-files", "cuda")', '("reads-files",)').replace('] = "cuda"', '] = "cpu"')

    assert body("replay.py") == body("replay_cuda.py")


def test_the_right_hypothesis_wins_clearly(world: World) -> None:
    result, found = world.run(world.healthy)
    assert (best(result), result.best) == (RIGHT, 0)
    assert set(found) == {"declared-fits"}
    # Each other value of each field is there, alone.
    assert len(result.runs) == 1 + 1 + 1 + 3 + 5 + 1
    right = result.runs[0]
    assert result.margin is not None
    assert result.margin > 0.1
    assert right.top1 > 0.7
    assert right.accept_length > 2.5
    for run in result.runs[1:]:
        assert run.accept_length < right.accept_length
        # Another norm leaves the best token where it is, as a rule.
        assert run.top1 < right.top1 or not run.norm
    by_name = {(run.mapping, run.shift): run for run in result.runs}
    assert by_name["B", 1].loss > np.log(D)
    assert by_name["B", 1].top1 < 0.6 * right.top1
    assert by_name["A", 0].accept_length < 1.5


def test_numbers_are_those_of_the_training(world: World) -> None:
    """The trainer's own loss over the same tokens, by code that shares nothing with the probe's."""
    result, _ = world.run(world.healthy, hypotheses=("norm=off",), tokens=4096)
    window = [
        # The probe leaves out the first token and the last two, which other shifts would need.
        Sample(s.ids[1:-2], s.mask[1:-2], tuple(a[1:-2] for a in s.aux), s.final[1:-2])
        for s in world.samples
    ]
    tensors = [torch.from_numpy(np.stack(part)) for part in tiny_stack._columns(window)]
    rows = torch.from_numpy(world.stack.mapping_a)
    for norm, run in zip((True, False), result.runs, strict=True):
        losses, _ = tiny_stack.batch_losses(world.stack.drafter, world.stack.target, rows, tensors, norm=norm)
        assert run.norm is norm
        assert len(run.steps) == tiny_stack.STEPS
        # Later steps count where their own token does: the same tokens, less those whose draft began in the prompt.
        assert run.loss == pytest.approx(float(losses[0].detach()), abs=2e-4)


FAULTS: dict[str, tuple[Change, str, tuple[Any, ...]]] = {
    "late": (lambda s: shifted(s, 1), "shift-differs", ("A", True, 0, (0, 1, 2), True)),
    "early": (lambda s: shifted(s, -1), "shift-differs", ("A", True, 2, (0, 1, 2), True)),
    "reversed": (lambda s: reordered(s, (2, 1, 0)), "aux-order-differs", ("A", True, 1, (2, 1, 0), True)),
    "rotated": (lambda s: reordered(s, (1, 2, 0)), "aux-order-differs", ("A", True, 1, (2, 0, 1), True)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_the_samples(world: World, fault: str) -> None:
    change, code, right = FAULTS[fault]
    result, found = world.run(world.write(fault, change=change))
    assert best(result) == right
    assert {finding.code: finding.level for finding in found.values()} == {code: "fail"}


def test_states_that_are_normed_already(world: World) -> None:
    normed = world.write("normed", change=lambda s: replace(s, final=tiny_files.normed(world.stack.target, s.final)))
    result, found = world.run(normed)
    assert best(result) == ("A", False, 1, (0, 1, 2), True)
    assert set(found) == {"norm-differs"}
    assert "are normed already" in found["norm-differs"].message


@pytest.mark.parametrize("kind", ["specforge", "modelopt", "angelslim", "speculators-v0"])
def test_formats_that_keep_normed_states(world: World, kind: str) -> None:
    result, found = world.run(world.write(kind, kind), hypotheses=("norm=on",))
    assert (best(result), result.kinds) == (("A", False, 1, (0, 1, 2), True), (kind,))
    assert set(found) == {"declared-fits"}


def test_a_mapping_that_was_overwritten(world: World) -> None:
    drafter = str(tiny_files.write_drafter(world.folder / "overwritten", world.stack.drafter, ids=world.stack.mapping_b))
    a = checkpoints.write_npy(world.folder / "a", checkpoints.offsets(world.stack.mapping_a), checkpoints.mask(world.stack.mapping_a, V))
    result, found = world.run(world.healthy, drafter, mapping=str(a))
    assert best(result)[0] == "B"
    assert {code: finding.level for code, finding in found.items()} == {"mapping-differs": "fail"}
    assert "vocab-remap" in (found["mapping-differs"].action or "")
    declared = result.runs[0]
    assert declared.loss > np.log(D)


def test_a_flag_that_is_wrong(world: World) -> None:
    drafter = tiny_files.write_drafter(world.folder / "flag", world.stack.drafter, norm_before_residual=False)
    result, found = world.run(world.healthy, str(drafter))
    assert best(result) == RIGHT
    assert set(found) == {"residual-differs"}
    assert "residual is the normed state" in found["residual-differs"].message


def test_two_faults_at_once(world: World) -> None:
    both = world.write("both", change=lambda s: reordered(shifted(s, 1), (2, 1, 0)))
    result, found = world.run(both)
    assert best(result) == ("A", True, 0, (2, 1, 0), True)
    assert {code: finding.level for code, finding in found.items()} == {"shift-differs": "fail", "aux-order-differs": "fail"}


def test_a_drafter_that_was_never_trained(world: World) -> None:
    torch.manual_seed(5)
    fresh = tiny_stack.Drafter(world.stack.target, world.stack.mapping_a)
    with torch.no_grad():
        fresh.lm_head.weight.normal_()
    drafter = tiny_files.write_drafter(world.folder / "fresh", fresh)
    _, found = world.run(world.healthy, str(drafter))
    assert {code: finding.level for code, finding in found.items()} == {"nothing-fits": "fail"}


def test_without_the_target(world: World) -> None:
    result, found = world.run(world.healthy, target=None)
    assert (result.truth, best(result)) == ("tokens", ("A", None, 1, (0, 1, 2), True))
    assert {run.norm for run in result.runs} == {None}
    assert {finding.level for finding in found.values()} <= {"ok", "unknown"}
    assert result.runs[0].top1 > 0.6


def test_the_dialect_of_specforge(world: World) -> None:
    """midlayer for layers.0, no embedding, sizes at top level: the same drafter, the same numbers."""
    other = tiny_files.write_drafter(world.folder / "specforge", world.stack.drafter, dialect="specforge")
    one, _ = world.run(world.healthy, hypotheses=("shift=0",))
    two, _ = world.run(world.healthy, str(other), hypotheses=("shift=0",))
    assert one.runs == two.runs
    with pytest.raises(Leave, match="holds no embedding"):
        world.run(world.healthy, str(other), target=None)


def test_bfloat16_weights(world: World) -> None:
    state = {n: checkpoints.bfloat16(v.numpy()) for n, v in world.stack.drafter.state_dict().items()}
    folder = world.folder / "bfloat16"
    config = (Path(world.drafter) / "config.json").read_bytes()
    ids = world.stack.mapping_a
    checkpoints.write_safetensors(folder, {**state, "d2t": checkpoints.offsets(ids), "t2d": checkpoints.mask(ids, V)})
    (folder / "config.json").write_bytes(config)
    one, _ = world.run(world.healthy, hypotheses=("shift=0",))
    two, _ = world.run(world.healthy, str(folder), hypotheses=("shift=0",))
    assert two.runs[0].loss == pytest.approx(one.runs[0].loss, abs=0.02)


def test_hypotheses_of_ones_own(world: World) -> None:
    result, _ = world.run(world.healthy, hypotheses=("mapping=B,shift=0", "norm=off", "aux=2-1-0,residual=off"), steps=1)
    assert [(r.mapping, r.norm, r.shift, r.aux_order, r.norm_before_residual) for r in result.runs] == [
        RIGHT, ("B", True, 0, (0, 1, 2), True), ("A", False, 1, (0, 1, 2), True), ("A", True, 1, (2, 1, 0), False),
    ]  # fmt: skip
    assert all(len(run.steps) == 1 and 1 <= run.accept_length <= 2 for run in result.runs)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("mapping=C", "no part of a hypothesis"),
        ("shift=3", "no part of a hypothesis"),
        ("", "no part of a hypothesis"),
        ("aux=0-1", "3 aux layers"),
        ("aux=0-1-3", "3 aux layers"),
        ("aux=0-0-1", "3 aux layers"),
    ],
)
def test_hypotheses_that_cannot_be(world: World, text: str, reason: str) -> None:
    with pytest.raises(Leave, match=reason):
        world.run(world.healthy, hypotheses=(text,))


def test_what_hypotheses_need(world: World) -> None:
    with pytest.raises(Leave, match="another mapping"):
        world.run(world.healthy, mapping=None, hypotheses=("mapping=B",))
    with pytest.raises(Leave, match="final norm"):
        world.run(world.healthy, target=None, hypotheses=("norm=on",))


def altered(world: World, name: str, change: Callable[[dict[str, Any]], None], **config: Any) -> str:
    weights: dict[str, Any] = {n: v.numpy().copy() for n, v in world.stack.drafter.state_dict().items()}
    ids = world.stack.mapping_a
    weights.update(d2t=checkpoints.offsets(ids), t2d=checkpoints.mask(ids, V))
    change(weights)
    tiny_files.write_drafter(world.folder / name, world.stack.drafter, **config)
    (world.folder / name / "model.safetensors").write_bytes(checkpoints.safetensors(weights))
    return str(world.folder / name)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: w.pop("fc.weight"), "holds no fc"),
        (lambda w: w.pop("norm.weight"), "holds no final norm"),
        (lambda w: w.pop("lm_head.weight"), "holds no lm_head"),
        (lambda w: w.pop("layers.0.mlp.up_proj.weight"), "no mlp.up_proj"),
        (lambda w: w.pop("layers.0.hidden_norm.weight"), "no hidden_norm"),
        (lambda w: w.update({"layers.0.self_attn.q_a_proj.weight": w.pop("layers.0.self_attn.q_proj.weight")}), "MLA"),
        (lambda w: w.update({"layers.0.self_attn.q_proj.weight": w["layers.0.self_attn.q_proj.weight"][:, :64]}), "64 wide"),
        (lambda w: w.update({"layers.0.self_attn.q_proj.weight": w["layers.0.self_attn.q_proj.weight"][:48]}), "config.json needs 64"),
        (lambda w: w.update({"fc.weight": w["fc.weight"][:, :128]}), "fc takes 128"),
        (lambda w: w.update({"lm_head.weight": w["lm_head.weight"][:100]}), "lm_head 100"),
    ],
)
def test_drafters_that_are_not_run(world: World, change: Callable[[dict[str, Any]], None], reason: str) -> None:
    with pytest.raises(Leave, match=reason):
        world.run(world.healthy, altered(world, "altered", change))


def test_norms_before_fc_are_applied(world: World) -> None:
    """Weights that undo the norm's division on average: the drafter goes on predicting; left out, nothing changes at all."""
    plain, _ = world.run(world.healthy, hypotheses=("shift=0",), steps=1)
    sizes = [float(np.sqrt(np.mean(np.stack([s.aux[i] for s in world.samples]) ** 2))) for i in range(3)]
    three = altered(
        world, "fc-norm",
        lambda w: w.update({f"fc_norm.{i}.weight": np.full(tiny_stack.H, size, np.float32) for i, size in enumerate(sizes)}),
    )  # fmt: skip
    one = altered(world, "input-norm", lambda w: w.update({"input_norm.weight": np.repeat(np.array(sizes, np.float32), tiny_stack.H)}))
    for drafter in (three, one):
        result, _ = world.run(world.healthy, drafter, hypotheses=("shift=0",), steps=1)
        assert result.runs[0].loss != plain.runs[0].loss
        assert result.runs[0].top1 > 0.3


def test_samples_in_which_nothing_counts(world: World) -> None:
    with pytest.raises(Leave, match="no sample has enough tokens"):
        world.run(world.write("empty", change=lambda s: replace(s, mask=np.zeros_like(s.mask))))


@pytest.mark.parametrize(
    "wrong", [{"samples": ()}, {"checkpoint": ""}, {"target": "a\0"}, {"steps": 0}, {"limit": 0}, {"tokens": 1}]
)
def test_parameters_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|needed"):
        Params(**{"checkpoint": "c", "samples": ("s",), **wrong})


def test_states_and_weights_that_are_not_finite(world: World) -> None:
    def broken(sample: Sample) -> Sample:
        aux = tuple(layer.copy() for layer in sample.aux)
        aux[1][10] = np.nan
        return replace(sample, aux=aux)

    with pytest.raises(Leave, match="its hidden states hold NaN or infinities"):
        world.run(world.write("not-finite", change=broken))
    weight = {"layers.0.mlp.up_proj.weight": np.full((tiny_stack.INNER, tiny_stack.H), np.nan, np.float32)}
    drafter = tiny_files.write_drafter(world.folder / "not-finite-drafter", world.stack.drafter, tensors=weight)
    with pytest.raises(Leave, match="makes NaN or infinities of these samples"):
        world.run(world.healthy, str(drafter))


def test_the_command(world: World, tmp_path: Path) -> None:
    ran = rdiag("replay", world.drafter, world.healthy, "--target", world.target, "--mapping", world.b, home=tmp_path)
    assert ran.code == 0, ran.out + ran.err
    assert ran.out.startswith("local: replay: ok - best as declared: top-1 0.")
    assert ran.out.count("<- declared") == 1
    late = world.write("late", change=lambda s: shifted(s, 1))
    ran = rdiag("replay", world.drafter, late, "--target", world.target, "--hypothesis", "shift=0", "--json", home=tmp_path)
    assert ran.code == 1
    assert {"mapping", "norm", "shift", "loss", "top1", "accept_length"} <= set(ran.json["result"]["runs"][0])
    assert rdiag("replay", world.drafter, home=tmp_path).code == 2


def test_a_gpu_only_when_asked_for(world: World, tmp_path: Path) -> None:
    ran = rdiag("replay", world.drafter, world.healthy, "--device", "cuda", "--dry-run", "--json", home=tmp_path)
    assert ran.code == 0
    assert (ran.json["probe"]["name"], ran.json["request"]["effects"]) == ("replay-cuda", ["reads-files", "cuda"])


def test_the_order_of_runs_is_kept(world: World) -> None:
    result, _ = world.run(world.healthy, hypotheses=("shift=2",))
    first: Run = result.runs[0]
    assert (first.shift, result.device, result.draft_vocab_size) == (1, "cpu", D)
    assert Path(result.files[0]).parent == Path(world.healthy)
