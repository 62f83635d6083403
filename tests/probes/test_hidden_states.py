from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes import hidden_states
from probes.hidden_states import Params, Result
from remote_diag.findings import Finding, status
from remote_diag.paths import shipped_probes
from remote_diag.probe import load
from remote_diag.testing import Leave, RecordingContext

from ..support import checkpoints, tiny_files, tiny_stack
from ..support.cli import rdiag
from ..support.tiny_stack import AUX, LAYERS, H, Sample, Stack, V, reordered, shifted

Change = Callable[[Sample, int], Sample]


class World:
    """A target on disk, and samples of it."""

    def __init__(self, stack: Stack, folder: Path) -> None:
        self.stack = stack
        self.folder = folder
        self.target = str(tiny_files.write_target(folder / "target", stack.target))
        self.samples = stack.samples(8)

    def write(self, name: str, kind: str = "speculators-v1", change: Change | None = None) -> str:
        changed = [change(sample, number) if change else sample for number, sample in enumerate(self.samples)]
        tiny_files.write_samples(self.folder / name, changed, kind, self.stack.target)
        return str(self.folder / name)

    def run(self, samples: str | Sequence[str], **more: Any) -> tuple[Result, dict[str, Finding]]:
        more.setdefault("target", self.target)
        context = RecordingContext(self.folder)
        paths = (samples,) if isinstance(samples, str) else tuple(samples)
        result = hidden_states.run(Params(paths, **more), context)
        found = {finding.code: finding for finding in context.findings}
        assert [check.number for check in result.checks] == list(range(1, 14))
        assert {check.name: check.verdict for check in result.checks} == {code: finding.level for code, finding in found.items()}
        return result, found


@pytest.fixture(scope="module")
def world(tiny_stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tiny_stack, tmp_path_factory.mktemp("hidden"))


def bad(found: dict[str, Finding]) -> dict[str, str]:
    """Return what is not acquitted."""
    return {code: finding.level for code, finding in found.items() if finding.level not in ("ok", "skipped")}


def test_the_contract_holds() -> None:
    probe = load(shipped_probes() / "hidden_states.py")
    assert (probe.name, probe.effects) == ("hidden-states", ("reads-files",))


KINDS = {
    "specforge": ("specforge", True), "specforge-gz": ("specforge", True), "speculators-v0": ("speculators-v0", True),
    "speculators-v1": ("speculators-v1", False), "speculators": ("speculators", False), "modelopt": ("modelopt", True),
    "angelslim": ("angelslim", True),
}  # fmt: skip


@pytest.mark.parametrize("kind", tiny_files.FORMATS)
def test_every_format_is_read_and_acquitted(world: World, kind: str) -> None:
    path = world.write(f"healthy-{kind}", kind)
    dataset = tiny_files.write_dataset(world.folder / "dataset.jsonl", world.samples)
    result, found = world.run(path, dataset=str(dataset) if kind != "modelopt" else None)
    assert (result.kinds, result.normed) == ((KINDS[kind][0],), KINDS[kind][1])
    assert (result.shift, result.layers, result.hidden_size, result.samples_total) == (1, AUX, H, 8)
    assert [part.layer for part in result.parts] == [*AUX, LAYERS]
    assert not bad(found), found
    assert status(list(found.values())) == "ok"
    assert not [name for name in os.listdir(world.folder) if name.startswith("sample-")]


def test_everything_compared_is_acquitted(world: World) -> None:
    drafter = tiny_files.write_drafter(world.folder / "drafter", world.stack.drafter)
    serving = world.write("dump", "speculators")
    dataset = tiny_files.write_dataset(world.folder / "dataset.jsonl", world.samples)
    more = {"drafter": str(drafter), "serving": serving, "dataset": str(dataset)}
    _, found = world.run(world.write("healthy"), **more)
    assert {finding.level for finding in found.values()} == {"ok"}, found


def test_without_the_target_nothing_is_acquitted_that_needs_it(world: World) -> None:
    result, found = world.run(world.write("healthy"), target=None)
    needing = {"final-norm", "final-layer", "aux-layers", "aux-order", "shift", "width"}
    assert {code for code, finding in found.items() if finding.level == "unknown"} == needing
    assert (result.normed, result.shift, result.layers, result.agreements) == (None, None, (), ())


def test_1_normed_states_for_a_trainer_that_norms(world: World) -> None:
    def change(sample: Sample, _: int) -> Sample:
        return replace(sample, final=tiny_files.normed(world.stack.target, sample.final))

    result, found = world.run(world.write("normed", change=change))
    assert (result.normed, bad(found)) == (True, {"final-norm": "fail"})
    assert "normed already" in found["final-norm"].message
    assert found["final-norm"].value == 1.0
    _, found = world.run(str(world.folder / "normed"), trainer_norm="off")
    assert not bad(found)


def test_1_states_that_nobody_norms(world: World) -> None:
    _, found = world.run(world.write("raw"), trainer_norm="off")
    assert bad(found) == {"final-norm": "fail"}
    assert "not normed" in found["final-norm"].message


def test_2_the_last_state_is_not_of_the_last_layer(world: World) -> None:
    early = tiny_stack.capture(world.stack.target, np.stack([sample.ids for sample in world.samples]), layers=(LAYERS - 1,))
    _, found = world.run(world.write("early", change=lambda sample, n: replace(sample, final=early[n].aux[0])))
    assert found["final-layer"].level == "fail"
    assert (found["final-layer"].value, found["final-layer"].threshold) == (LAYERS - 1, LAYERS)
    assert set(bad(found)) <= {"final-layer", "final-norm"}


def test_2_an_aux_layer_and_the_last_one_changed_places(world: World) -> None:
    def change(sample: Sample, _: int) -> Sample:
        return replace(sample, aux=(*sample.aux[:2], sample.final), final=sample.aux[2])

    _, found = world.run(world.write("swapped-final", change=change))
    assert found["final-layer"].level == "fail"
    config = world.folder / "target" / "config.json"
    kept = config.read_text()
    try:
        # A target whose layers cannot be run leaves the head's opinion.
        config.write_text(kept.replace('"llama"', '"mixtral"'))
        _, found = world.run(str(world.folder / "swapped-final"))
    finally:
        config.write_text(kept)
    assert (found["final-layer"].level, found["aux-layers"].level) == ("fail", "unknown")
    assert "aux 2 predicts better" in found["final-layer"].message


def test_3_layers_off_by_one(world: World) -> None:
    ids = np.stack([sample.ids for sample in world.samples])
    for by, word in ((1, "1 layer too late"), (-1, "1 layer too early")):
        other = tiny_stack.capture(world.stack.target, ids, layers=[layer + by for layer in AUX])
        _, found = world.run(world.write(f"off{by}", change=lambda _, n, other=other: other[n]))  # type: ignore[misc]
        assert bad(found) == {"aux-layers": "fail"}
        assert word in found["aux-layers"].message
        asked = tuple(layer + by for layer in AUX)
        _, found = world.run(str(world.folder / f"off{by}"), layers=asked)
        assert not bad(found)


def test_3_states_of_another_model(world: World) -> None:
    random = np.random.default_rng(0)
    _, found = world.run(
        world.write("random", change=lambda s, _: replace(s, aux=tuple(random.normal(size=a.shape).astype(np.float32) for a in s.aux)))
    )
    assert found["aux-layers"].level == "fail"
    assert "no layer" in found["aux-layers"].message


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 0, 2), (0, 2, 1)])
def test_4_layers_in_another_order(world: World, order: tuple[int, ...]) -> None:
    result, found = world.run(world.write("shuffled", change=lambda sample, _: reordered(sample, order)))
    assert bad(found) == {"aux-order": "fail"}
    assert result.layers == tuple(AUX[index] for index in order)


@pytest.mark.parametrize("by", [-1, 1, 2])
def test_5_states_are_shifted(world: World, by: int) -> None:
    result, found = world.run(world.write("shifted", change=lambda sample, _: shifted(sample, by)))
    assert bad(found) == {"shift": "fail"}
    assert found["shift"].value == 1 - by
    assert result.shift == 1 - by


def test_6_other_tokens_than_in_the_dataset(world: World) -> None:
    path = world.write("tokens")
    changed = [replace(sample, ids=np.where(np.arange(len(sample.ids)) == 7, 3, sample.ids)) for sample in world.samples]
    dataset = tiny_files.write_dataset(world.folder / "other.jsonl", changed)
    _, found = world.run(path, dataset=str(dataset))
    assert bad(found) == {"tokens": "fail"}
    assert "number 7" in found["tokens"].evidence[0]
    shorter = [replace(sample, ids=sample.ids[:40], mask=sample.mask[:40]) for sample in world.samples]
    _, found = world.run(path, dataset=str(tiny_files.write_dataset(world.folder / "short.jsonl", shorter)))
    assert "48 tokens, 40 in the dataset" in found["tokens"].evidence[0]


def test_6_tokens_that_do_not_fit_their_states(world: World) -> None:
    _, found = world.run(world.write("cut", change=lambda s, n: replace(s, ids=s.ids[:-1]) if n == 3 else s))
    assert found["tokens"].level == "fail"
    assert "47 tokens, but hidden states of 48" in found["tokens"].evidence[0]


@pytest.mark.parametrize("change", [lambda ids: -1 - ids, lambda ids: ids + V])
def test_6_tokens_that_the_target_does_not_have(world: World, change: Any) -> None:
    _, found = world.run(world.write("strange", change=lambda s, _: replace(s, ids=change(s.ids))))
    assert (found["tokens"].level, "none of the target's" in found["tokens"].evidence[0]) == ("fail", True)
    # Nothing that depends on the tokens is said of the states.
    assert {code for code, level in bad(found).items() if level in ("fail", "degraded")} == {"tokens"}
    assert bad(found)["final-layer"] == bad(found)["shift"] == "unknown"


def test_7_masks(world: World) -> None:
    _, found = world.run(world.write("empty", change=lambda s, _: replace(s, mask=np.zeros_like(s.mask))))
    assert bad(found) == {"mask": "fail"}
    _, found = world.run(world.write("some", change=lambda s, n: replace(s, mask=np.zeros_like(s.mask)) if n == 1 else s))
    assert bad(found) == {"mask": "degraded"}
    _, found = world.run(world.write("full", change=lambda s, _: replace(s, mask=np.ones_like(s.mask))))
    assert bad(found) == {"mask": "degraded"}
    assert found["mask"].value == 1.0


def test_8_numbers_that_are_none(world: World) -> None:
    def change(sample: Sample, number: int) -> Sample:
        aux = sample.aux[1].copy()
        aux[5, 3] = np.inf if number == 2 else aux[5, 3]
        return replace(sample, aux=(sample.aux[0], aux, sample.aux[2]))

    result, found = world.run(world.write("infinite", change=change))
    assert found["overflow"].level == "fail"
    assert (found["overflow"].value, result.parts[1].broken) == (1, 1)


def test_8_nearly_too_large_for_float16(world: World) -> None:
    def change(sample: Sample, _: int) -> Sample:
        aux = sample.aux[1].astype(np.float16)
        aux[5, 3] = 60000
        return replace(sample, aux=(sample.aux[0], aux, sample.aux[2]))  # type: ignore[arg-type]

    _, found = world.run(world.write("large", change=change))
    assert found["overflow"].level == "degraded"


def test_9_another_width(world: World, tmp_path: Path) -> None:
    wide = replace(world.samples[0], aux=tuple(np.tile(a, 2) for a in world.samples[0].aux), final=np.tile(world.samples[0].final, 2))
    content = {"hidden_states": np.stack([*wide.aux, wide.final], 1), "token_ids": wide.ids}
    (tmp_path / "hs_0.safetensors").write_bytes(checkpoints.safetensors(content))
    result, found = world.run(str(tmp_path))
    assert (found["width"].level, found["width"].value, result.target_hidden_size) == ("fail", str(2 * H), H)


def test_9_a_drafter_of_more_layers(world: World) -> None:
    drafter = tiny_files.write_drafter(world.folder / "drafter", world.stack.drafter)
    _, found = world.run(world.write("two", change=lambda s, _: replace(s, aux=s.aux[:2])), drafter=str(drafter))
    assert found["width"].level == "fail"


def noisy(world: World, amount: float) -> Change:
    random = np.random.default_rng(5)

    def change(sample: Sample, _: int) -> Sample:
        def one(a: Any) -> Any:
            return (a + amount * a.std() * random.normal(size=a.shape)).astype(np.float32)

        return replace(sample, aux=tuple(one(a) for a in sample.aux), final=one(sample.final))

    return change


@pytest.mark.parametrize(("amount", "level"), [(0.02, "ok"), (0.35, "degraded"), (1.0, "fail")])
def test_10_serving_computes_with_less_precision(world: World, amount: float, level: str) -> None:
    serving = world.write(f"dump{amount}", "speculators", change=noisy(world, amount))
    _, found = world.run(world.write("healthy"), serving=serving)
    assert found["serving"].level == level
    assert not set(bad(found)) - {"serving"}


def test_10_serving_takes_other_layers(world: World) -> None:
    serving = world.write("dump-order", "speculators", change=lambda s, _: reordered(s, (2, 1, 0)))
    _, found = world.run(world.write("healthy"), serving=serving)
    assert bad(found) == {"serving": "fail"}
    assert "best 1.0000 with aux 2" in found["serving"].evidence[0]


def test_10_a_dump_of_other_text(world: World) -> None:
    serving = world.folder / "elsewhere"
    tiny_files.write_samples(serving, world.stack.samples(2, seed=77), "speculators", world.stack.target)
    _, found = world.run(world.write("healthy"), serving=str(serving))
    assert bad(found) == {"serving": "unknown"}


def test_11_a_wrong_flag(world: World) -> None:
    drafter = tiny_files.write_drafter(world.folder / "flag", world.stack.drafter, norm_before_residual=False)
    _, found = world.run(world.write("healthy"), drafter=str(drafter))
    assert bad(found) == {"residual-flag": "fail"}
    assert "True" in found["residual-flag"].message


def test_12_the_same_conversation_twice(world: World) -> None:
    _, found = world.run(world.write("twice", change=lambda _, n: world.samples[n // 4]))
    assert bad(found) == {"duplicates": "fail"}
    assert found["duplicates"].value == 6


def test_13_one_part_of_the_width(world: World) -> None:
    half = world.write("half", change=lambda s, _: replace(s, aux=tuple(a[:, : H // 2].copy() for a in s.aux), final=s.final[:, : H // 2].copy()))
    _, found = world.run(half)
    assert (found["sharded"].level, found["width"].level) == ("fail", "fail")
    assert "one part in 2" in found["sharded"].message


def test_13_columns_that_nobody_filled(world: World) -> None:
    def change(sample: Sample, _: int) -> Sample:
        aux = sample.aux[0].copy()
        aux[:, H // 2 :] = 0
        return replace(sample, aux=(aux, *sample.aux[1:]))

    _, found = world.run(world.write("holes", change=change))
    assert (found["sharded"].level, found["sharded"].value) == ("fail", H // 2)


def test_states_of_zeros_acquit_nothing(world: World) -> None:
    def change(sample: Sample, _: int) -> Sample:
        return replace(sample, aux=tuple(np.zeros_like(one) for one in sample.aux), final=np.zeros_like(sample.final))

    _, found = world.run(world.write("zeros", change=change))
    levels = {code: found[code].level for code in ("final-norm", "aux-layers", "shift", "sharded")}
    assert levels == {"final-norm": "unknown", "aux-layers": "fail", "shift": "unknown", "sharded": "fail"}
    assert found["final-layer"].level != "ok"


def test_a_damaged_file_among_good_ones(world: World) -> None:
    folder = Path(world.write("damaged"))
    whole = (folder / "data_2.pt").read_bytes()
    (folder / "data_2.pt").write_bytes(whole[: len(whole) // 2])
    result, found = world.run(str(folder))
    assert bad(found) == {"tokens": "fail"}
    assert (len(result.damaged), len(result.samples), result.samples_total) == (1, 7, 8)


def test_other_files_among_samples_are_left_alone(world: World) -> None:
    folder = Path(world.write("mixed"))
    checkpoints.write_torch(folder / "token_freq.pt", {"counts": np.arange(5)})
    checkpoints.write_torch(folder / "vocab_mapping.pt", {"d2t": np.arange(5)})
    (folder / "loop").symlink_to(folder)
    os.mkfifo(folder / "data_9.txt")
    result, found = world.run(str(folder))
    assert (result.samples_total, bad(found)) == (8, {})


def test_what_holds_no_states(world: World, tmp_path: Path) -> None:
    checkpoints.write_torch(tmp_path / "data_0.pt", {"input_ids": np.arange(4)})
    with pytest.raises(Leave, match="no hidden states of a known format"):
        world.run(str(tmp_path))
    with pytest.raises(Leave, match="No such file"):
        world.run(str(tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(Leave, match="holds no samples"):
        world.run(str(tmp_path / "empty"))


def test_a_lone_tensor_is_not_guessed(world: World, tmp_path: Path) -> None:
    sample = world.samples[0]
    checkpoints.write_torch(tmp_path / "data_0.pt", {"input_ids": sample.ids, "hidden_state": np.concatenate(sample.aux, 1)})
    with pytest.raises(Leave, match="may be aux layers or the final state"):
        world.run(str(tmp_path), target=None)
    result, _ = world.run(str(tmp_path))
    assert [part.name for part in result.parts] == ["aux 0", "aux 1", "aux 2"]


def test_batches_are_refused(world: World, tmp_path: Path) -> None:
    sample = world.samples[0]
    pair = np.stack([np.concatenate(sample.aux, 1)] * 2)
    checkpoints.write_torch(tmp_path / "data_0.ckpt", {"hidden_states": pair, "target_hiddens": np.stack([sample.final] * 2)})
    with pytest.raises(Leave, match="a batch of 2 conversations"):
        world.run(str(tmp_path))


@pytest.mark.parametrize("cut", [10, 200])
def test_gzip_that_is_cut(world: World, tmp_path: Path, cut: int) -> None:
    path = Path(world.write("packed", "specforge-gz")) / "data_0.ckpt.gz"
    (tmp_path / "data_0.ckpt.gz").write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(Leave, match="cut short"):
        world.run(str(tmp_path))
    assert not [name for name in os.listdir(world.folder) if name.startswith("sample-")]


def test_gzip_that_never_ends(tmp_path: Path) -> None:
    from probes.lib.files import Damaged, File, Meter
    from probes.lib.sample_files import unpack

    (tmp_path / "bomb.gz").write_bytes(gzip.compress(bytes(50 << 20)))
    with File(str(tmp_path / "bomb.gz"), Meter()) as file, pytest.raises(Damaged, match="more than 1048576 bytes"):
        unpack(file, str(tmp_path / "out"), 1 << 20)
    assert (tmp_path / "out").stat().st_size <= 1 << 20


@pytest.mark.parametrize(
    "wrong", [{"samples": ()}, {"samples": ("",)}, {"target": "a\0"}, {"limit": 0}, {"positions": 1}, {"layers": (-1,)}, {"seed": -1}]
)
def test_parameters_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|needed"):
        Params(**{"samples": ("s",), **wrong})


def test_the_command(world: World, tmp_path: Path) -> None:
    good, wrong = world.write("good"), world.write("wrong", change=lambda s, _: reordered(s, (2, 1, 0)))
    ran = rdiag("hidden-states", good, "--target", world.target, home=tmp_path)
    assert ran.code == 0, ran.err
    assert ran.out.startswith("local: hidden-states: ok - 8 of 8 samples (speculators-v1): nothing wrong was found\n")
    ran = rdiag("hidden-states", wrong, "--target", world.target, "--layers", "2,4,6", "--json", home=tmp_path)
    assert ran.code == 1
    assert [check["name"] for check in ran.json["result"]["checks"] if check["verdict"] == "fail"] == ["aux-order"]
    assert rdiag("hidden-states", good, home=tmp_path).code == 10
    assert rdiag("hidden-states", home=tmp_path).code == 2
    assert rdiag("hidden-states", good, "--layers", "two", home=tmp_path).code == 2
