from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes import drafter_check
from probes.drafter_check import Params, Result
from remote_diag.findings import Finding, status
from remote_diag.paths import shipped_probes
from remote_diag.probe import load
from remote_diag.testing import Leave, RecordingContext

from ..support import drafters
from ..support.checkpoints import (
    Raw,
    bfloat16,
    from_bfloat16,
    mask,
    offsets,
    write_npy,
    write_safetensors,
    write_sharded,
    write_torch,
)
from ..support.cli import rdiag
from ..support.drafters import ASCENDING, BY_FREQUENCY, EMBEDDING, EOS, LAYERS, TARGET_ROWS, D, H, V


def run(path: Path, target: Path | None = None, **more: Any) -> tuple[Result, list[Finding]]:
    context = RecordingContext(os.curdir)
    result = drafter_check.run(Params(str(path), None if target is None else str(target), **more), context)
    return result, context.findings


def wrong(findings: list[Finding]) -> dict[str, str]:
    """Return code -> level of what is not ok."""
    found: dict[str, str] = {finding.code: finding.level for finding in findings if finding.level != "ok"}
    assert len(found) == sum(finding.level != "ok" for finding in findings)
    return found


def test_the_contract_holds() -> None:
    probe = load(shipped_probes() / "drafter_check.py")
    assert (probe.name, probe.effects) == ("drafter-check", ("reads-files",))


# The healthy ones are acquitted --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*drafters.DRAFTERS, "NeMo"])
def test_a_healthy_drafter_of_each_trainer(tmp_path: Path, name: str) -> None:
    write = drafters.DRAFTERS.get(name, drafters.ne_mo)
    path = write(tmp_path / "drafter")
    alone, findings = run(path)
    assert wrong(findings) == {}
    assert alone.draft_vocab_size == D
    assert alone.head is not None
    assert (alone.head.rows, alone.head.repeated, alone.fc_layers) == (D, 0, 3)
    result, findings = run(path, drafters.write_target(tmp_path / "target"))
    assert wrong(findings) == {}
    assert status(findings) == "ok"
    assert (result.head_follows, result.target_layers) == ("d2t", LAYERS)
    assert result.embedding_equal is (True if name == "speculators" else None)
    assert result.aux_convention == ("inputs" if name == "speculators" else "outputs")
    assert result.producer == (name if name != "NeMo" else "unknown")


def test_a_full_vocabulary_needs_no_mapping(tmp_path: Path) -> None:
    tensors = drafters.weights("layers.0", np.arange(V), mapping=False)
    config = drafters.flat_config()
    del config["draft_vocab_size"]
    result, findings = run(write_safetensors(tmp_path / "d", tensors, **config), drafters.write_target(tmp_path / "t"))
    assert wrong(findings) == {}
    assert "full-vocabulary" in {finding.code for finding in findings}
    assert (result.encoding, result.head_follows) == (None, "first-rows")


def test_shards(tmp_path: Path) -> None:
    tensors = drafters.weights("midlayer", ASCENDING)
    names = sorted(tensors)
    path = write_sharded(tmp_path, [{name: tensors[name]} for name in names])
    (path / "config.json").write_text(json.dumps(drafters.flat_config()))
    assert wrong(run(path)[1]) == {}
    tensors["lm_head.weight"] = bfloat16(TARGET_ROWS[: D + 2])
    write_sharded(tmp_path, [{name: tensors[name]} for name in names])
    assert wrong(run(path)[1]) == {"head-size": "fail"}


# Each fault is found, and no other -----------------------------------------------------------------------------------

Change = Callable[[dict[str, Any], dict[str, Any]], None]


def through_bfloat16(array: Any) -> Any:
    return from_bfloat16(bfloat16(array)).reshape(array.shape)


def never_loaded(*, marked: bool) -> Change:
    def change(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        tensors["d2t"] = np.zeros(D, np.int64)
        tensors["t2d"] = np.full(V, marked)

    return change


def rows(edit: Callable[[Any], None]) -> Change:
    """Return a change of the head's rows, given as numbers."""

    def change(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        head = TARGET_ROWS[ASCENDING].copy()
        edit(head)
        tensors["lm_head.weight"] = bfloat16(head)

    return change


def tensor(name: str, value: Any) -> Change:
    def change(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value(tensors.get(name)) if callable(value) else value

    return change


def setting(name: str, value: Any = True, below: str | None = None) -> Change:
    def change(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        place = config[below] if below else config
        if value is None:
            del place[name]
        else:
            place[name] = value

    return change


def rename(old: str, new: str) -> Change:
    def change(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def silence_block(fc: Any) -> Any:
    fc = fc.copy()
    fc[:, H : 2 * H] = 0
    return fc


def shout_block(fc: Any) -> Any:
    fc = fc.copy()
    fc[:, :H] *= 100
    return fc


def torch_spec_bug(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    """The head indexed with offsets: rows repeat where offsets do."""
    tensors["lm_head.weight"] = bfloat16(TARGET_ROWS[offsets(ASCENDING)])


def set_rows(value: float, count: int | None = None) -> Callable[[Any], None]:
    def edit(head: Any) -> None:
        head[slice(count)] = value

    return edit


AUX = "eagle_aux_hidden_state_layer_ids"
EAGLE = "eagle_config"

FAULTS: dict[str, tuple[Change, dict[str, str]]] = {
    "never loaded, all marked": (never_loaded(marked=True), {"d2t-uninitialised": "fail"}),
    "never loaded, none marked": (never_loaded(marked=False), {"d2t-uninitialised": "fail"}),
    "no t2d but zeros": (lambda t, c: (never_loaded(marked=True)(t, c), t.pop("t2d"))[0], {"d2t-uninitialised": "fail"}),
    "t2d of others": (tensor("t2d", lambda t2d: np.roll(t2d, 1)), {"t2d-disagrees": "fail"}),
    "t2d one more": (tensor("t2d", lambda t2d: t2d | (np.arange(V) == np.argmin(t2d))), {"t2d-disagrees": "fail"}),
    "t2d too short": (tensor("t2d", lambda t2d: t2d[: D - 5]), {"t2d-unusable": "fail"}),
    "d2t out of range": (tensor("d2t", lambda d2t: d2t + V), {"d2t-corrupt": "fail"}),
    "d2t repeats": (tensor("d2t", lambda d2t: np.where(np.arange(D) == 5, d2t[4] - 1, d2t)), {"d2t-corrupt": "fail"}),
    "d2t as floats": (tensor("d2t", lambda d2t: d2t.astype(np.float32)), {"d2t-type": "degraded"}),
    "d2t in other order": (tensor("d2t", offsets(BY_FREQUENCY)), {"rows-not-ascending-here": "fail"}),
    "d2t shorter than the head": (
        lambda t, c: (tensor("d2t", lambda d2t: d2t[:-1])(t, c), tensor("t2d", lambda _: mask(ASCENDING[:-1], V))(t, c))[0],
        {"head-size": "fail", "config-disagrees": "degraded"},
    ),
    "no d2t": (tensor("d2t", None), {"d2t-missing": "fail"}),
    "d2t holds ids": (tensor("d2t", ASCENDING), {"d2t-absolute": "fail"}),
    "t2d holds rows": (
        tensor("t2d", lambda t2d: np.where(t2d, np.cumsum(t2d) - 1, -1)), {"t2d-rows": "degraded"}
    ),
    "d2t shorter than head and t2d": (
        tensor("d2t", lambda d2t: d2t[:-1]), {"head-size": "fail", "config-disagrees": "degraded", "t2d-disagrees": "fail"}
    ),
    "config of another D": (setting("draft_vocab_size", D + 1), {"config-disagrees": "degraded"}),
    "config of another V": (setting("vocab_size", V + 1), {"config-disagrees": "degraded"}),
    "head all NaN": (rows(set_rows(np.nan)), {"head-not-finite": "fail"}),
    "head with NaN": (rows(set_rows(np.nan, 2)), {"head-not-finite": "fail"}),
    "head all zero": (rows(set_rows(0)), {"head-empty-rows": "fail"}),
    "head with zeros": (rows(set_rows(0, 3)), {"head-empty-rows": "degraded"}),
    "head with tiny rows": (rows(lambda head: head.__setitem__(slice(3), head[:3] * 1e-5)), {"head-empty-rows": "degraded"}),
    "head indexed with offsets": (torch_spec_bug, {"head-repeated-rows": "fail"}),
    "head with many equal rows": (rows(lambda head: head.__setitem__(slice(30), head[50])), {"head-repeated-rows": "fail"}),
    "head of another width": (tensor("lm_head.weight", lambda _: drafters.numbers(D, H - 1)), {"head-width": "fail"}),
    "head without rows": (
        tensor("lm_head.weight", np.zeros((0, H), np.float32)), {"head-empty": "fail", "head-size": "fail"}
    ),
    "no head": (tensor("lm_head.weight", None), {"head-missing": "degraded"}),
    "no layer": (rename("midlayer", "other"), {"layers-missing": "fail"}),
    "a tensor missing": (tensor("midlayer.hidden_norm.weight", None), {"tensors-missing": "fail"}),
    "a matrix with NaN": (
        tensor("midlayer.mlp.up_proj.weight", lambda up: np.where(np.arange(H) == 3, np.nan, up).astype(np.float32)),
        {"layer-not-finite": "fail"},
    ),
    "a short matrix with infinities": (
        tensor("midlayer.mlp.up_proj.weight", lambda up: bfloat16(np.where(np.arange(H) == 3, np.inf, up))),
        {"layer-not-finite": "fail"},
    ),
    "a matrix of zeros": (tensor("midlayer.self_attn.q_proj.weight", lambda q: q * 0), {"layer-zero": "fail"}),
    "fc missing": (tensor("fc.weight", None), {"tensors-missing": "fail"}),
    "unknown tensors": (tensor("draft_d2t", np.zeros(3)), {"tensors-unknown": "degraded"}),
    "twice": (tensor("model.norm.weight", lambda _: drafters.numbers(H)), {"tensors-twice": "degraded"}),
    "no EAGLE-3 layer": (
        lambda t, _: t.update({f"midlayer.self_attn.{n}_proj.weight": drafters.numbers(H, H) for n in "qkv"}),
        {"layer-input-width": "fail"},
    ),
    "fc of another target": (tensor("fc.weight", lambda _: drafters.numbers(H, 3 * H + 1)), {"fc-width": "fail"}),
    "fc ignores a layer": (tensor("fc.weight", silence_block), {"fc-dead-block": "fail"}),
    "fc uneven": (tensor("fc.weight", shout_block), {"fc-uneven": "degraded"}),
    "fc NaN": (tensor("fc.weight", lambda fc: fc * np.nan), {"fc-not-finite": "fail"}),
    "norm never trained": (tensor("norm.weight", np.ones(H, np.float32)), {"norms-untrained": "degraded"}),
    "norm NaN": (tensor("norm.weight", np.full(H, np.nan, np.float32)), {"norms-broken": "fail"}),
    "norm before fc forgotten": (tensor("fc_norm.0.weight", drafters.numbers(H)), {"norm-flag": "fail"}),
    "input norm forgotten": (tensor("input_norm.weight", drafters.numbers(3 * H)), {"norm-flag": "fail"}),
    "norm before fc missing": (setting("norm_before_fc"), {"norm-flag": "fail"}),
    "fc_norm missing": (setting("fc_norm"), {"norm-flag": "fail"}),
    "norm_before_residual": (setting("norm_before_residual"), {"norm-before-residual": "degraded"}),
    "tied": (setting("tie_word_embeddings"), {"config-tied": "fail"}),
    "another hidden size": (setting("intermediate_size", 7), {"config-size": "fail"}),
    "short context": (setting("max_position_embeddings", 2048), {"context-short": "degraded"}),
    "ids of the other convention": (setting(AUX, drafters.INPUT_IDS, EAGLE), {"aux-ids-convention": "degraded"}),
    "ids reversed": (setting(AUX, drafters.OUTPUT_IDS[::-1], EAGLE), {"aux-ids-order": "fail"}),
    "two ids": (setting(AUX, drafters.OUTPUT_IDS[:2], EAGLE), {"aux-ids-count": "fail"}),
    "ids that are texts": (setting(AUX, ["1", "5", "8"], EAGLE), {"config-value": "degraded"}),
    "a size that is a text": (setting("vocab_size", str(V)), {"config-value": "degraded"}),
    "a size of zero": (setting("hidden_size", 0), {"config-value": "degraded"}),
    "a negative id": (setting(AUX, [-1, 4, 8], EAGLE), {"aux-ids-range": "fail"}),
    "ids at the top level": (
        lambda _, c: c.update({AUX: c.pop(EAGLE)[AUX]}), {"aux-ids-place": "degraded"}
    ),
    "embedding cut to the draft": (tensor("embed_tokens.weight", lambda _: EMBEDDING[ASCENDING]), {"embedding-rows": "fail"}),
    "embedding NaN": (tensor("embed_tokens.weight", lambda _: EMBEDDING * np.nan), {"embedding-not-finite": "fail"}),
    "embedding zero": (tensor("embed_tokens.weight", lambda _: EMBEDDING * 0), {"embedding-zero": "fail"}),
}  # fmt: skip


def write(folder: Path, *changes: Change) -> Path:
    tensors, config = drafters.weights("midlayer", ASCENDING), drafters.flat_config()
    for change in changes:
        change(tensors, config)
    return write_safetensors(folder, tensors, **config)


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_and_no_other(tmp_path: Path, name: str) -> None:
    change, expected = FAULTS[name]
    _, findings = run(write(tmp_path, change))
    assert wrong(findings) == expected
    assert status(findings) in {"fail", "degraded"}
    for finding in findings:
        if finding.level != "ok":
            assert finding.subject == str(tmp_path)
            assert finding.action, finding.code


def test_offsets_through_a_short_float(tmp_path: Path) -> None:
    ids = np.sort(np.random.default_rng(4).choice(163_840, 4000, replace=False))
    head = Raw("BF16", (4000, H), bytes(4000 * H * 2))
    tensors = {**drafters.weights("midlayer", ASCENDING), "lm_head.weight": head, "t2d": mask(ids, 163_840)}
    tensors["d2t"] = through_bfloat16(offsets(ids)).astype(np.int64)
    path = write_safetensors(tmp_path, tensors, **drafters.flat_config(vocab_size=163_840, draft_vocab_size=4000))
    assert wrong(run(path)[1])["d2t-corrupt"] == "fail"


def test_repeated_rows_of_a_converter_are_named_as_such(tmp_path: Path) -> None:
    _, findings = run(write(tmp_path, torch_spec_bug))
    found = next(finding for finding in findings if finding.code == "head-repeated-rows")
    assert "indexed with offsets" in found.evidence[0]
    _, findings = run(write(tmp_path, rows(lambda head: head.__setitem__(slice(30), head[50]))))
    found = next(finding for finding in findings if finding.code == "head-repeated-rows")
    assert (found.value, found.evidence) == (30, ())


def test_a_few_equal_rows_are_no_fault(tmp_path: Path) -> None:
    result, findings = run(write(tmp_path, rows(lambda head: head.__setitem__(3, head[50]))))
    assert wrong(findings) == {}
    assert result.head is not None
    assert result.head.repeated == 1


def test_a_mapping_that_only_lies_beside_the_weights(tmp_path: Path) -> None:
    result, findings = run(drafters.old_ne_mo(tmp_path))
    assert wrong(findings) == {"d2t-not-in-weights": "fail"}
    assert (result.producer, result.encoding) == ("NeMo", "absolute")


def test_a_pruned_head_without_any_mapping(tmp_path: Path) -> None:
    tensors = drafters.weights("midlayer", ASCENDING, mapping=False)
    config = drafters.flat_config()
    del config["draft_vocab_size"]
    _, findings = run(write_safetensors(tmp_path / "d", tensors, **config), drafters.write_target(tmp_path / "t"))
    assert wrong(findings)["d2t-missing"] == "fail"


def test_no_configuration(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path, drafters.weights("midlayer", ASCENDING))
    assert wrong(run(path)[1]) == {"config-missing": "unknown"}
    (path / "config.json").write_text("{")
    assert wrong(run(path)[1]) == {"config-unreadable": "degraded", "config-missing": "unknown"}


def test_an_mla_layer_is_complete_without_k_and_v(tmp_path: Path) -> None:
    def change(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        for name in "qkv":
            del tensors[f"midlayer.self_attn.{name}_proj.weight"]
        for name, shape in {"q_a_proj": (8, 2 * H), "kv_a_proj_with_mqa": (8, 2 * H), "kv_b_proj": (H, 6)}.items():
            tensors[f"midlayer.self_attn.{name}.weight"] = drafters.numbers(*shape)

    assert wrong(run(write(tmp_path, change))[1]) == {}


def test_two_layers(tmp_path: Path) -> None:
    tensors = drafters.weights("layers.0", ASCENDING, t2d=True) | drafters.layer("layers.1", first=False)
    del tensors["layers.1.hidden_norm.weight"]
    path = write_safetensors(tmp_path, tensors, **drafters.flat_config(num_hidden_layers=2))
    assert wrong(run(path)[1]) == {}
    tensors["midlayer.hidden_norm.weight"] = tensors["layers.0.hidden_norm.weight"]
    del tensors["layers.1.mlp.up_proj.weight"]
    found = wrong(run(write_safetensors(tmp_path, tensors, **drafters.flat_config(num_hidden_layers=1)))[1])
    assert found == {
        "layer-names-mixed": "degraded", "tensors-missing": "fail", "tensors-twice": "degraded", "config-size": "fail",
    }  # fmt: skip


def test_more_layers_than_three_are_no_fault_where_the_width_is_not_known(tmp_path: Path) -> None:
    tensors = drafters.weights("midlayer", ASCENDING) | {"fc.weight": drafters.numbers(H, 6 * H)}
    config = drafters.flat_config(**{EAGLE: {AUX: [1, 2, 4, 5, 6, 8]}})
    del config["hidden_size"]
    result, findings = run(write_safetensors(tmp_path, tensors, **config))
    assert (wrong(findings), result.fc_layers) == ({}, 6)


def test_a_mapping_in_a_file_that_is_not_there_is_no_missing_mapping(tmp_path: Path) -> None:
    tensors = drafters.weights("midlayer", ASCENDING)
    mapping = {name: tensors.pop(name) for name in ("d2t", "t2d")}
    path = write_sharded(tmp_path, [tensors, mapping])
    (path / "config.json").write_text(json.dumps(drafters.flat_config()))
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(Leave, match=r"model-00002-of-00002.safetensors: No such file"):
        run(path)


# Against the target --------------------------------------------------------------------------------------------------


def against(tmp_path: Path, *changes: Change, **target: Any) -> tuple[Result, dict[str, str], list[Finding]]:
    path = write(tmp_path / "drafter", *changes)
    result, findings = run(path, drafters.write_target(tmp_path / "target", **target))
    return result, wrong(findings), findings


def test_an_overwritten_head(tmp_path: Path) -> None:
    other = np.sort(np.random.default_rng(8).choice(V, D, replace=False))
    result, found, _ = against(tmp_path, tensor("lm_head.weight", bfloat16(TARGET_ROWS[other])))
    assert found == {"head-order": "fail"}
    assert result.head_follows is None


def test_a_head_in_the_order_of_t2d(tmp_path: Path) -> None:
    result, found, _ = against(tmp_path, tensor("d2t", offsets(BY_FREQUENCY)))
    assert found == {"rows-not-ascending-here": "fail", "head-order": "fail"}
    assert result.head_follows == "t2d"


def test_an_embedding_of_its_own(tmp_path: Path) -> None:
    noise = np.random.default_rng(3).normal(size=EMBEDDING.shape)
    for name, embedding, expected in (
        ("equal", EMBEDDING, {}),
        ("cast", EMBEDDING.astype(np.float16), {}),
        ("trained", EMBEDDING + 0.01 * noise, {"embedding-differs": "degraded"}),
        ("random", 0.02 * noise, {"embedding-random": "fail"}),
        ("shuffled", EMBEDDING[::-1], {"embedding-random": "fail"}),
        ("shuffled in part", np.concatenate([EMBEDDING[99::-1], EMBEDDING[100:]]), {"embedding-rows-differ": "fail"}),
        ("narrow", EMBEDDING[:, :8], {"embedding-width": "degraded"}),
    ):
        result, found, _ = against(tmp_path, tensor("embed_tokens.weight", lambda _, e=embedding: np.ascontiguousarray(e)))
        assert found == expected, name
        assert result.embedding_equal is (not expected), name


def test_a_target_of_other_sizes(tmp_path: Path) -> None:
    _, found, _ = against(tmp_path, setting("target_hidden_size", 2 * H))
    assert found == {"target-size": "fail"}
    _, found, findings = against(tmp_path, vocab_size=V + 8)
    assert found == {"target-size": "fail"}
    assert next(finding for finding in findings if finding.code == "target-size").threshold == V + 8


def test_a_row_with_nan_says_nothing_of_the_others(tmp_path: Path) -> None:
    embedding = EMBEDDING.copy()
    embedding[0] = np.nan
    _, found, findings = against(tmp_path, tensor("embed_tokens.weight", embedding))
    assert found == {"embedding-not-finite": "fail"}
    assert "embedding-equal" in {finding.code for finding in findings}


@pytest.mark.parametrize("kind", ["deepseek_v3", "kimi_k2"])
def test_targets_whose_layers_sglang_counts_by_inputs(tmp_path: Path, kind: str) -> None:
    _, found, _ = against(tmp_path, setting(AUX, drafters.INPUT_IDS, EAGLE), model_type=kind)
    assert found == {}
    _, found, _ = against(tmp_path, setting(AUX, drafters.INPUT_IDS, EAGLE), model_type="llama")
    assert found == {"aux-ids-convention": "degraded"}


def test_layers_beyond_the_target(tmp_path: Path) -> None:
    _, found, _ = against(tmp_path, setting(AUX, [1, 5, LAYERS], EAGLE))
    assert found == {"aux-ids-range": "fail"}


def test_ids_of_a_speculators_drafter(tmp_path: Path) -> None:
    target = drafters.write_target(tmp_path / "target")
    for ids, expected in (
        (drafters.INPUT_IDS, {}),
        ([*drafters.INPUT_IDS, LAYERS], {}),
        (None, {}),
        (drafters.OUTPUT_IDS, {"aux-ids-convention": "degraded"}),
        ([*drafters.INPUT_IDS, LAYERS + 1], {"aux-ids-range": "fail"}),
    ):
        config = drafters.speculators_config(**{AUX: ids})
        path = write_safetensors(tmp_path / "drafter", drafters.weights("layers.0", ASCENDING), **config)
        assert wrong(run(path, target)[1]) == expected, ids


def test_special_tokens_that_cannot_be_proposed(tmp_path: Path) -> None:
    lost = int(np.setdiff1d(np.arange(V), ASCENDING)[-1])
    result, found, _ = against(tmp_path, specials={EOS: "<|end|>", lost: "<|tool|>"})
    assert found == {}
    assert {(token.id, token.text, token.role) for token in result.special_tokens_missing} >= {(lost, "<|tool|>", "added")}
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": lost}))
    _, findings = run(tmp_path / "drafter", tmp_path / "target")
    assert wrong(findings) == {"special-tokens-missing": "degraded"}
    for name in ("generation_config.json", "tokenizer_config.json"):
        (tmp_path / "target" / name).write_text("not JSON")
    _, findings = run(tmp_path / "drafter", tmp_path / "target")
    assert wrong(findings) == {"special-tokens-unknown": "unknown"}


def tokenizer(**pieces: int) -> str:
    return json.dumps({"model": {"vocab": pieces}, "added_tokens": [{"id": 9, "content": "<end>"}]})


def test_tokenizers(tmp_path: Path) -> None:
    for own, theirs, same in (
        (tokenizer(a=0, b=1), tokenizer(a=0, b=1), True),
        (tokenizer(a=0, b=1), tokenizer(b=1, a=0), True),
        (tokenizer(a=0, b=1), tokenizer(a=1, b=0), False),
        (tokenizer(a=0), tokenizer(a=0, c=2), False),
    ):
        path = write(tmp_path / "drafter")
        (path / "tokenizer.json").write_text(own)
        target = drafters.write_target(tmp_path / "target")
        (target / "tokenizer.json").write_text(theirs)
        result, findings = run(path, target)
        assert result.same_tokenizer is same
        assert wrong(findings) == ({} if same else {"tokenizers-differ": "degraded"})


def test_a_quantised_target_head(tmp_path: Path) -> None:
    path = write(tmp_path / "drafter")
    tensors: Any = {"model.embed_tokens.weight": bfloat16(EMBEDDING), "lm_head.weight_packed": np.zeros((4, 4), np.int32)}
    drafters.write_target(tmp_path / "target")
    write_safetensors(tmp_path / "target", tensors)
    _, findings = run(path, tmp_path / "target")
    assert wrong(findings) == {"head-not-compared": "unknown"}


# Mappings nearby -----------------------------------------------------------------------------------------------------


def test_stale_mappings_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "run" / "drafter")
    other = np.sort(np.random.default_rng(8).choice(V, D, replace=False))
    pair = {"d2t": offsets(other), "t2d": mask(other, V)}
    assert run(path)[0].mappings_near == ()
    write_torch(tmp_path / "run" / "cache.pt", {"d2t": offsets(ASCENDING), "t2d": mask(ASCENDING, V)})
    write_torch(tmp_path / "run" / "cache" / "vocab_mapping" / "3f.pt", pair)
    write_npy(tmp_path / "data", pair["d2t"], pair["t2d"])
    result, findings = run(path, near=(str(tmp_path / "data"),))
    found = {Path(item.path).name: item for item in result.mappings_near}
    assert {name: item.same for name, item in found.items()} == {"cache.pt": True, "3f.pt": False, "d2t.npy": False}
    assert found["3f.pt"].matches == int((other == ASCENDING).sum())
    assert [finding.code for finding in findings if finding.level != "ok"] == ["mapping-near-differs"] * 2


def test_a_mapping_nearby_that_is_broken(tmp_path: Path) -> None:
    path = write(tmp_path / "run" / "drafter")
    (tmp_path / "run" / "cache.pt").write_bytes(b"no pickle")
    os.mkfifo(tmp_path / "run" / "d2t.npy")
    result, findings = run(path)
    assert wrong(findings) == {}
    assert {item.same for item in result.mappings_near} == {None}
    assert all(item.note for item in result.mappings_near)


# What cannot be checked ----------------------------------------------------------------------------------------------


def test_what_is_no_drafter(tmp_path: Path) -> None:
    for path in (tmp_path / "none", write_npy(tmp_path / "pair", offsets(ASCENDING))):
        with pytest.raises(Leave):
            run(path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(Leave, match="named pipe"):
        run(tmp_path / "pipe.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((write(tmp_path / "d") / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(Leave, match="cut"):
        run(tmp_path / "cut.safetensors")


@pytest.mark.parametrize("bad", [{"drafter": ""}, {"target": "a\0b"}, {"near": ("",)}, {"seed": -1}])
def test_parameters_that_cannot_be(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        Params(**{"drafter": "d", **bad})


def test_the_command(tmp_path: Path) -> None:
    good, bad = write(tmp_path / "good"), write(tmp_path / "bad", never_loaded(marked=True))
    ran = rdiag("drafter-check", str(good), home=tmp_path)
    assert ran.code == 0
    assert ran.out.startswith("local: drafter-check: ok - nothing wrong in ")
    ran = rdiag("drafter-check", str(bad), "--json", home=tmp_path)
    assert ran.code == 1
    assert "d2t-uninitialised" in {finding["code"] for finding in ran.json["findings"]}
    target = drafters.write_target(tmp_path / "target")
    ran = rdiag("drafter-check", str(good), "--target", str(target), "--near", str(tmp_path), home=tmp_path)
    assert ran.code == 0
    assert "its head follows  d2t" in ran.out
