from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes import verifier_head
from probes.verifier_head import Params, Result
from remote_diag.findings import Finding, status
from remote_diag.paths import shipped_probes
from remote_diag.probe import load
from remote_diag.testing import Leave, RecordingContext

from ..support.checkpoints import (
    bfloat16,
    from_bfloat16,
    mask,
    offsets,
    write_npy,
    write_safetensors,
    write_sharded,
)
from ..support.cli import rdiag

V, D, H = 4000, 800, 64


class World:
    """A target whose rows have a common direction and clusters, as real ones do, and mappings A and B."""

    def __init__(self) -> None:
        random = np.random.default_rng(7)
        clusters = random.normal(size=(50, H))[random.integers(0, 50, V)]
        rows = 0.02 * (random.normal(size=(V, H)) + random.normal(size=H) + clusters)
        self.stored = bfloat16(rows)
        self.rows = from_bfloat16(self.stored).reshape(V, H)
        self.a = np.sort(random.choice(V, D, replace=False))
        spare = np.setdiff1d(np.arange(V), self.a)
        self.b = np.sort(np.concatenate([np.delete(self.a, range(50, 60)), spare[:10]]))
        self.rotation = np.linalg.qr(random.normal(size=(H, H)))[0]
        self.random = random


WORLD = World()
A, B, ROWS = WORLD.a, WORLD.b, WORLD.rows


def write_target(folder: Path, **config: Any) -> Path:
    tensors: dict[str, Any] = {"model.norm.weight": np.ones(H, np.float32), "lm_head.weight": WORLD.stored}
    return write_safetensors(folder, tensors, vocab_size=V, hidden_size=H, **config)


def write_drafter(folder: Path, head: Any, ids: Any = A, marked: Any = None, **tensors: Any) -> Path:
    """Write a drafter; ``head`` holds numbers, stored as bfloat16 unless they are Raw or another type on purpose."""
    raw = bfloat16(head) if getattr(head, "dtype", None) == np.float64 or head is ROWS else head
    content: dict[str, Any] = {"lm_head.weight": raw, "fc.weight": np.zeros((H, 3), np.float32), **tensors}
    if ids is not None:
        content.update(d2t=offsets(ids), t2d=mask(ids if marked is None else marked, V))
    return write_safetensors(folder, content, vocab_size=V, draft_vocab_size=D, hidden_size=H)


def copy(ids: Any) -> Any:
    return bfloat16(ROWS[ids])


def run(tmp_path: Path, **more: Any) -> tuple[Result, dict[str, Finding]]:
    if not (tmp_path / "target").exists():
        write_target(tmp_path / "target")
    context = RecordingContext(os.curdir)
    result = verifier_head.run(Params(str(tmp_path / "drafter"), str(tmp_path / "target"), **more), context)
    found = {finding.code: finding for finding in context.findings}
    assert len(found) == len(context.findings)
    return result, found


def test_the_contract_holds() -> None:
    probe = load(shipped_probes() / "verifier_head.py")
    assert (probe.name, probe.effects) == ("verifier-head", ("reads-files",))


def test_a_healthy_copy_is_acquitted(tmp_path: Path) -> None:
    write_drafter(tmp_path / "drafter", copy(A))
    result, found = run(tmp_path)
    assert (result.follows, result.method, result.exact, result.loss_order_matches) == ("d2t", "exact", True, True)
    assert (result.lm_head.rows_exact, result.draft_vocab_size, result.target_rows) == (D, D, V)
    assert set(found) == {"head-follows-mapping", "head-copied"}
    assert status(list(found.values())) == "ok"


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_bit_for_bit_up_to_the_cast(tmp_path: Path, dtype: Any) -> None:
    write_drafter(tmp_path / "drafter", ROWS[A].astype(dtype))
    result, _ = run(tmp_path)
    assert (result.exact, result.lm_head.dtype) == (True, np.dtype(dtype).name)


def test_a_float32_target_is_rounded_to_the_heads_type(tmp_path: Path) -> None:
    exact = (ROWS + WORLD.random.normal(size=ROWS.shape) * 1e-5).astype(np.float32)
    write_safetensors(tmp_path / "target", {"model.embed_tokens.weight": exact}, vocab_size=V, tie_word_embeddings=True)
    write_drafter(tmp_path / "drafter", bfloat16(exact[A]))
    result, _ = run(tmp_path)
    assert (result.exact, result.target_tied, result.target_head) == (True, True, "model.embed_tokens.weight")


def test_one_row_that_is_not_the_targets(tmp_path: Path) -> None:
    head = ROWS[A].astype(np.float64)
    head[700] = 0.5
    write_drafter(tmp_path / "drafter", head)
    result, found = run(tmp_path)
    assert (result.follows, result.exact, result.lm_head.rows_exact) == ("d2t", False, D - 1)
    assert found["head-rows-differ"].level == "fail"
    assert (found["head-rows-differ"].value, found["head-rows-differ"].threshold) == (D - 1, D)


def trained(ids: Any) -> Any:
    return ROWS[ids] + 0.01 * WORLD.random.normal(size=(len(ids), H))


def own_space(ids: Any) -> Any:
    """Rows as a head has them that was trained from random numbers: the same geometry in another basis."""
    return ROWS[ids] @ WORLD.rotation + 0.02 * WORLD.random.normal(size=(len(ids), H))


@pytest.mark.parametrize(("make", "method"), [(trained, "cosine"), (own_space, "similarity")])
def test_a_trained_head_is_acquitted(tmp_path: Path, make: Any, method: str) -> None:
    write_drafter(tmp_path / "drafter", make(A))
    result, found = run(tmp_path)
    assert (result.follows, result.method, result.exact) == ("d2t", method, False)
    assert not {finding.level for finding in found.values()} - {"ok"}


@pytest.mark.parametrize("make", [copy, trained, own_space])
def test_an_overwritten_mapping_is_found(tmp_path: Path, make: Any) -> None:
    write_drafter(tmp_path / "drafter", make(A), B)
    write_npy(tmp_path / "a", offsets(A), mask(A, V))
    result, found = run(tmp_path, mapping=str(tmp_path / "a"))
    assert (result.follows, result.loss_order_matches) == ("other", False)
    assert found["head-order"].level == "fail"
    assert "vocab-remap" in (found["head-order"].action or "")
    assert found["loss-order-differs"].level == "fail"


def test_a_copy_tells_by_itself_that_its_mapping_was_overwritten(tmp_path: Path) -> None:
    write_drafter(tmp_path / "drafter", copy(A), B)
    result, found = run(tmp_path)
    assert (result.follows, result.lm_head.rows_copied) == (None, D)
    assert (found["head-order"].level, found["head-order"].value) == ("fail", int((A == B).sum()))
    assert found["head-order"].evidence[-1] == "the tokens that the rows hold are in ascending order of ids"


def test_a_trained_copy_of_which_a_part_kept_its_tokens(tmp_path: Path) -> None:
    partly = A.copy()
    partly[200:] = np.sort(np.random.default_rng(2).choice(np.setdiff1d(np.arange(V), A[:200]), D - 200, replace=False))
    write_drafter(tmp_path / "drafter", trained(A), partly)
    result, found = run(tmp_path)
    assert result.follows is None
    assert found["head-fits-partly"].level == "fail"
    assert 0.15 < found["head-fits-partly"].value < 0.35  # type: ignore[operator]


@pytest.mark.parametrize("make", [trained, own_space])
def test_what_cannot_be_told_is_not_guessed(tmp_path: Path, make: Any) -> None:
    write_drafter(tmp_path / "drafter", make(A), np.sort(WORLD.random.choice(V, D, replace=False)))
    result, found = run(tmp_path)
    assert result.follows is None
    assert [finding.level for finding in found.values()] == ["unknown"]
    assert "--mapping" in (found["head-undecided"].action or "")


@pytest.mark.parametrize("make", [copy, trained, own_space])
def test_rows_in_the_order_of_t2d_although_d2t_is_by_frequency(tmp_path: Path, make: Any) -> None:
    shuffled = np.random.default_rng(1).permutation(A)
    write_drafter(tmp_path / "drafter", make(A), shuffled)
    result, found = run(tmp_path)
    assert (result.follows, result.loss_order_matches) == ("t2d", True)
    assert found["head-order"].level == "fail"


def test_a_head_that_is_not_ascending_on_purpose(tmp_path: Path) -> None:
    shuffled = np.random.default_rng(1).permutation(A)
    write_drafter(tmp_path / "drafter", copy(shuffled), shuffled)
    result, found = run(tmp_path)
    assert (result.follows, result.exact, result.loss_order_matches) == ("d2t", True, False)
    assert found["loss-order-differs"].level == "ok"
    assert "gather by d2t" in (found["loss-order-differs"].action or "")


def test_two_mappings_that_differ_in_few_rows(tmp_path: Path) -> None:
    near = A.copy()
    near[[100, 300, 500, 700]] += 1
    near = np.where(np.isin(near, A) & (near != A), A, near)
    changed = int((near != A).sum())
    assert 2 <= changed <= 4
    write_drafter(tmp_path / "drafter", trained(A), near)
    write_npy(tmp_path / "a", offsets(A), mask(A, V))
    result, _ = run(tmp_path, mapping=str(tmp_path / "a"))
    assert (result.follows, result.lm_head.runner_up, result.lm_head.rows_compared) == ("other", "d2t", changed)


def test_offsets_taken_for_ids(tmp_path: Path) -> None:
    write_drafter(tmp_path / "drafter", copy(offsets(A)))
    result, found = run(tmp_path)
    assert result.follows == "d2t-as-ids"
    assert found["head-order"].level == "fail"


def test_d2t_through_a_short_float(tmp_path: Path) -> None:
    cast = from_bfloat16(bfloat16(offsets(A))).astype(np.int64)
    write_drafter(tmp_path / "drafter", copy(A), None, d2t=cast, t2d=mask(A, V))
    result, found = run(tmp_path)
    assert result.follows == "t2d"
    assert found["head-order"].level == "fail"


def test_the_order_of_frequency(tmp_path: Path) -> None:
    counts = np.zeros(V, np.int64)
    order = np.random.default_rng(3).permutation(A)
    counts[order] = np.arange(D, 0, -1)
    np.save(tmp_path / "freq.npy", counts)
    write_drafter(tmp_path / "drafter", copy(order))
    result, found = run(tmp_path, counts=str(tmp_path / "freq.npy"))
    assert result.follows == "frequency"
    assert found["head-order"].level == "fail"


def test_the_head_in_the_loss(tmp_path: Path) -> None:
    write_drafter(tmp_path / "drafter", own_space(A), **{"verifier_lm_head.weight": copy(A)})
    result, found = run(tmp_path)
    assert result.verifier_lm_head is not None
    assert result.verifier_lm_head.rows_exact == D
    assert found["loss-head-copied"].level == "ok"
    for wrong in (copy(B), copy(A[::-1]), bfloat16(ROWS[A] * 1.01), bfloat16(WORLD.random.normal(size=(D, H)))):
        write_drafter(tmp_path / "drafter", own_space(A), **{"verifier_lm_head.weight": wrong})
        _, found = run(tmp_path)
        assert found["loss-head-differs"].level == "fail"


@pytest.mark.parametrize("make", [copy, trained, own_space])
def test_a_head_that_kept_its_rows_when_the_mapping_changed(tmp_path: Path, make: Any) -> None:
    head = make(A)
    write_drafter(tmp_path / "previous", head)
    write_drafter(tmp_path / "drafter", head, B)
    result, found = run(tmp_path, previous=str(tmp_path / "previous"))
    assert result.previous_follows == "rows"
    assert found["mapping-overwritten"].level == "fail"


def test_a_head_whose_rows_were_moved(tmp_path: Path) -> None:
    head = own_space(A)
    place = {token: row for row, token in enumerate(A.tolist())}
    moved = np.stack([head[place[token]] if token in place else ROWS[token] for token in B.tolist()])
    write_drafter(tmp_path / "previous", head)
    write_drafter(tmp_path / "drafter", moved, B)
    result, found = run(tmp_path, previous=str(tmp_path / "previous"))
    assert result.previous_follows == "tokens"
    assert "mapping-overwritten" not in found


def test_the_targets_whole_head(tmp_path: Path) -> None:
    write_drafter(tmp_path / "drafter", ROWS)
    result, found = run(tmp_path)
    assert (result.follows, result.lm_head.rows, result.exact) == ("first-rows", V, True)
    assert not {finding.level for finding in found.values()} - {"ok"}


def test_a_drafter_of_the_full_vocabulary(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {"lm_head.weight": WORLD.stored, "fc.weight": np.zeros((H, 3), np.float32)}
    write_safetensors(tmp_path / "drafter", tensors)
    result, found = run(tmp_path)
    assert (result.follows, result.exact, result.draft_vocab_size) == ("first-rows", True, None)
    assert found["head-follows-mapping"].level == "ok"


def test_a_narrow_drafter_is_judged_by_neighbourhoods(tmp_path: Path) -> None:
    narrow = ROWS[A] @ np.random.default_rng(5).normal(size=(H, 48))
    write_drafter(tmp_path / "drafter", narrow)
    result, _ = run(tmp_path)
    assert (result.follows, result.method) == ("d2t", "similarity")
    assert result.lm_head.guesses[0].cosine is None


def test_rows_of_nan_and_zeros_do_not_disturb(tmp_path: Path) -> None:
    head = ROWS[A].astype(np.float64)
    head[3], head[5] = np.nan, 0
    write_drafter(tmp_path / "drafter", head)
    result, _ = run(tmp_path)
    assert (result.follows, result.lm_head.rows_exact) == ("d2t", D - 2)


def test_a_padded_target(tmp_path: Path) -> None:
    padded = bfloat16(np.concatenate([ROWS, np.zeros((64, H))]))
    write_safetensors(tmp_path / "target", {"lm_head.weight": padded}, vocab_size=V)
    write_drafter(tmp_path / "drafter", copy(A))
    result, _ = run(tmp_path)
    assert (result.exact, result.target_rows) == (True, V + 64)


@pytest.mark.parametrize(
    ("tensors", "config", "reason"),
    [
        ({"lm_head.weight_packed": np.zeros((4, 4), np.int32)}, {}, "quantised"),
        ({"lm_head.weight": np.zeros((V, H), np.int8)}, {}, "stored as 'int8'"),
        ({"model.norm.weight": np.ones(H)}, {}, "neither an output head nor"),
        ({"model.embed_tokens.weight": ROWS}, {"tie_word_embeddings": False}, "not the embedding"),
    ],
)
def test_targets_that_have_no_usable_head(tmp_path: Path, tensors: Any, config: Any, reason: str) -> None:
    write_safetensors(tmp_path / "target", tensors, vocab_size=V, **config)
    write_drafter(tmp_path / "drafter", copy(A))
    with pytest.raises(Leave, match=reason):
        run(tmp_path)


@pytest.mark.parametrize("field", ["drafter", "target", "mapping", "previous", "counts"])
def test_paths_that_lead_nowhere(tmp_path: Path, field: str) -> None:
    write_drafter(tmp_path / "drafter", copy(A))
    write_target(tmp_path / "target")
    paths: dict[str, Any] = {"drafter": str(tmp_path / "drafter"), "target": str(tmp_path / "target"), field: str(tmp_path / "none")}
    with pytest.raises(Leave, match="none: No such file"):
        verifier_head.run(Params(**paths), RecordingContext(os.curdir))


@pytest.mark.parametrize("bad", [{"drafter": ""}, {"target": "a\0b"}, {"mapping": ""}, {"seed": -1}])
def test_parameters_that_cannot_be(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Params(**{"drafter": "d", "target": "t", **bad})


def test_the_command(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    write_drafter(tmp_path / "good", copy(A))
    write_drafter(tmp_path / "bad", copy(A), B)
    target = ("--target", str(tmp_path / "target"))
    ran = rdiag("verifier-head", str(tmp_path / "good"), *target, home=tmp_path)
    assert ran.code == 0
    assert ran.out.startswith("local: verifier-head: ok - the head follows d2t, bit for bit in 800 of 800 rows\n")
    ran = rdiag("verifier-head", str(tmp_path / "bad"), *target, "--mapping", str(tmp_path / "good"), "--json", home=tmp_path)
    assert (ran.code, json.loads(ran.out)["result"]["follows"]) == (1, "other")
    assert rdiag("verifier-head", str(tmp_path / "good"), home=tmp_path).code == 2


def test_what_is_not_known_of_the_mapping_accuses_nobody(tmp_path: Path) -> None:
    """The mapping's file is missing, or damaged: the head is in no wrong order for that."""
    head = {"lm_head.weight": copy(A), "fc.weight": np.zeros((H, 3), np.float32)}
    mapping = {"d2t": offsets(A), "t2d": mask(A, V)}
    write_sharded(tmp_path / "drafter", [head, mapping])
    _, found = run(tmp_path)
    assert set(found) == {"head-follows-mapping", "head-copied"}
    shard = tmp_path / "drafter" / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    result, found = run(tmp_path)
    assert {code: finding.level for code, finding in found.items()} == {"head-undecided": "unknown"}
    assert (result.follows, result.draft_vocab_size) == (None, None)
    shard.unlink()
    with pytest.raises(Leave, match="No such file"):
        run(tmp_path)


def test_a_t2d_that_is_no_mask_leaves_the_order_of_the_loss_unknown(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {"lm_head.weight": copy(A), "fc.weight": np.zeros((H, 3), np.float32), "d2t": offsets(A), "t2d": mask(A, V)[None]}
    write_safetensors(tmp_path / "drafter", tensors, vocab_size=V, draft_vocab_size=D, hidden_size=H)
    result, found = run(tmp_path)
    assert (found["t2d-unusable"].level, status(list(found.values())), result.loss_order_matches) == ("unknown", "unknown", None)


def test_a_d2t_that_is_shorter_than_the_head_is_right_as_far_as_it_reaches(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {"lm_head.weight": copy(A), "fc.weight": np.zeros((H, 3), np.float32), "d2t": offsets(A)[:-5], "t2d": mask(A, V)}
    write_safetensors(tmp_path / "drafter", tensors, vocab_size=V, draft_vocab_size=D, hidden_size=H)
    result, found = run(tmp_path)
    assert (result.follows, result.exact, found["head-follows-mapping"].level) == ("t2d", True, "ok")
    assert "head-order" not in found
    write_safetensors(tmp_path / "drafter", {**tensors, "d2t": offsets(B)[:-5]}, vocab_size=V, draft_vocab_size=D, hidden_size=H)
    assert run(tmp_path)[1]["head-order"].level == "fail"


def test_a_cut_head_without_any_mapping(tmp_path: Path) -> None:
    write_drafter(tmp_path / "drafter", copy(A), None)
    (tmp_path / "drafter" / "config.json").unlink()
    _, found = run(tmp_path)
    assert "than servers assume without a d2t" in found["head-order"].message
