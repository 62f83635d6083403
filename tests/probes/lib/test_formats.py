"""Every format that mappings come in, read back to the ids that were written; and what breaks a naive reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes.lib.checkpoint import open_checkpoint
from probes.lib.drafter import open_drafter
from probes.lib.files import Meter, Unreadable
from probes.lib.producers import recognise
from probes.lib.sides import Side, read_side, understand
from probes.lib.vocabulary import read_counts

from ...support import drafters
from ...support.checkpoints import (
    bfloat16,
    from_bfloat16,
    mask,
    offsets,
    write_npy,
    write_safetensors,
    write_sharded,
    write_sharded_torch,
    write_torch,
)
from ...support.drafters import ASCENDING, BY_FREQUENCY, D, H, V


def side_of(path: Path, vocab: int | None = V, claimed: str | None = None) -> Side:
    side = read_side("A", str(path))
    understand(side, vocab, claimed)
    return side


def ids_of(path: Path, vocab: int | None = V) -> Any:
    side = side_of(path, vocab)
    assert side.ids is not None, side.reason
    return side.ids


# Checkpoints of every trainer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", drafters.DRAFTERS)
def test_a_drafter_of_each_trainer(tmp_path: Path, name: str) -> None:
    path = drafters.DRAFTERS[name](tmp_path)
    meter = Meter()
    with open_drafter(str(path), meter) as drafter:
        assert recognise(drafter).name == name
        assert {"d2t", "lm_head", "fc", "norm", "layers.0.self_attn.q_proj", "layers.0.hidden_norm"} <= set(drafter.roles)
        assert (drafter.matrix("lm_head").rows, drafter.matrix("lm_head").columns) == (D, H)
        assert not drafter.unknown
        assert len(drafter.layer_keys) == 1
    assert not any("training_state" in file for file in meter.files)
    expected = BY_FREQUENCY if name == "ModelOpt" else ASCENDING
    assert np.array_equal(ids_of(path, None), expected)


@pytest.mark.parametrize("write", [drafters.ne_mo, drafters.old_ne_mo])
def test_drafters_of_nemo(tmp_path: Path, write: Any) -> None:
    path = write(tmp_path)
    with open_drafter(str(path), Meter()) as drafter:
        assert drafter.layer_keys == ["model.layers.0"]
        assert drafter.has("layers.0.mlp.gate_proj")
    assert np.array_equal(ids_of(path), BY_FREQUENCY)


@pytest.mark.parametrize("name", ["eagle_meta.pt", "eagle3_meta.pt"])
def test_ids_of_nemo_are_absolute_by_their_format(tmp_path: Path, name: str) -> None:
    path = drafters.old_ne_mo(tmp_path, name)
    side = side_of(path)
    assert (side.encoding, side.stored.beside if side.stored else None) == ("absolute", name)
    assert "token ids by its format" in side.reason
    # Small ascending ids could as well be offsets; the format decides.
    write_torch(path / name, {"selected_token_ids": np.arange(D) * 2})
    assert side_of(path).encoding == "absolute"
    assert np.array_equal(ids_of(path / name), np.arange(D) * 2)
    with open_drafter(str(path), Meter()) as drafter:
        assert recognise(drafter).name == "NeMo"


# Mappings on their own -----------------------------------------------------------------------------------------------

PAIR = {"d2t": offsets(ASCENDING), "t2d": mask(ASCENDING, V)}


def make_cache(folder: Path) -> Path:
    return write_torch(folder / "cache.pt", PAIR)


def make_old_cache(folder: Path) -> Path:
    return write_torch(folder / "cache.pt", PAIR, old=True)


def make_vocab_mapping(folder: Path) -> Path:
    return write_torch(folder / "cache" / "vocab_mapping" / "0f3c.pt", PAIR).parent


def make_lone_tensor(folder: Path) -> Path:
    return write_torch(folder / "draft_vocab_cache" / "model" / "d2t.pt", offsets(ASCENDING)).parent


def make_arrays(folder: Path) -> Path:
    write_torch(folder / "token_freq.pt", {3: 4})
    return write_npy(folder, PAIR["d2t"], PAIR["t2d"])


def make_map_of_ids(folder: Path) -> Path:
    return write_torch(folder / "freq_map.pt", BY_FREQUENCY.tolist()).rename(folder / "map.pt")


def make_tensor_of_ids(folder: Path) -> Path:
    return write_torch(folder / "map.pt", BY_FREQUENCY)


def make_wrapped(folder: Path) -> Path:
    return write_torch(folder / "x.ckpt", {"epoch": 1, "state_dict": {"module.draft_model." + k: v for k, v in PAIR.items()}})


def make_sharded_bin(folder: Path) -> Path:
    return write_sharded_torch(folder, [{"fc.weight": np.zeros((2, 2))}, PAIR])


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (make_cache, ASCENDING), (make_old_cache, ASCENDING), (make_vocab_mapping, ASCENDING), (make_lone_tensor, ASCENDING),
        (make_arrays, ASCENDING), (make_map_of_ids, BY_FREQUENCY), (make_tensor_of_ids, BY_FREQUENCY),
        (make_wrapped, ASCENDING), (make_sharded_bin, ASCENDING),
    ],
)  # fmt: skip
def test_a_mapping_of_each_kind(tmp_path: Path, make: Any, expected: Any) -> None:
    assert np.array_equal(ids_of(make(tmp_path)), expected)


def test_offsets_by_frequency_may_be_negative(tmp_path: Path) -> None:
    stored = offsets(BY_FREQUENCY)
    assert stored.min() < 0
    path = write_torch(tmp_path / "d2t.pt", stored)
    assert np.array_equal(ids_of(path, None), BY_FREQUENCY)


def test_counts_as_speculators_writes_them(tmp_path: Path) -> None:
    counts, name = read_counts(str(write_torch(tmp_path / "token_freq.pt", {7: 3, 2: 1})), Meter())
    assert (counts.tolist(), name) == ([0, 0, 1, 0, 0, 0, 0, 3], "counts")
    counts, _ = read_counts(str(write_torch(tmp_path / "token_freq.pt", np.arange(5))), Meter())
    assert counts.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("prefix", ["", "model.", "draft_model.", "eagle_module.", "module.", "_orig_mod.", "module._orig_mod.model."])
@pytest.mark.parametrize("key", ["midlayer", "layers.0"])
def test_roles_behind_prefixes(tmp_path: Path, prefix: str, key: str) -> None:
    path = write_safetensors(tmp_path, drafters.weights(key, ASCENDING, prefix=prefix))
    with open_drafter(str(path), Meter()) as drafter:
        assert drafter.roles["layers.0.self_attn.q_proj"] == f"{prefix}{key}.self_attn.q_proj.weight"
        assert drafter.layer_keys == [prefix + key]
        assert not drafter.unknown


def test_old_names_of_the_norms_before_fc(tmp_path: Path) -> None:
    names = {"low": 0, "mid": 1, "high": 2}
    tensors = {f"aux_norm_{name}.weight": np.full(H, number, np.float32) for name, number in names.items()}
    with open_drafter(str(write_safetensors(tmp_path, {"fc.weight": np.zeros((2, 6)), **tensors})), Meter()) as drafter:
        for number in range(3):
            assert drafter.read(f"fc_norm.{number}")[0] == number


# What breaks a naive reader ------------------------------------------------------------------------------------------


def test_the_optimizers_state_is_never_taken_for_weights(tmp_path: Path) -> None:
    for name in ("training_state.pt", "optimizer_state_dict.pt", "optimizer.bin", "scheduler.pt", "rng_state_0.pth"):
        (tmp_path / name).write_bytes(b"no pickle")
    with pytest.raises(Unreadable, match="no checkpoint and no mapping"):
        open_checkpoint(str(tmp_path), Meter())
    write_torch(tmp_path / "vocab_mapping.pt", PAIR)
    assert np.array_equal(ids_of(tmp_path), ASCENDING)


def test_the_vocabulary_is_not_taken_from_the_embedding(tmp_path: Path) -> None:
    path = drafters.spec_forge(tmp_path)
    assert side_of(path, None).vocab == V
    tensors = drafters.weights("midlayer", ASCENDING, t2d=False)
    config = drafters.flat_config(vocab_size=V + 40)
    assert side_of(write_safetensors(tmp_path / "b", tensors, **config), None).vocab == V + 40


def test_where_speculators_keeps_the_vocabulary(tmp_path: Path) -> None:
    tensors = drafters.weights("layers.0", ASCENDING, t2d=False)
    path = write_safetensors(tmp_path / "new", tensors, **drafters.speculators_config())
    assert side_of(path, None).vocab == V
    old = drafters.speculators_config()
    old["transformer_layer_config"]["vocab_size"] = D
    # Then the draft's size stands there: nothing is said of the target's.
    assert side_of(write_safetensors(tmp_path / "old", tensors, **old), None).vocab is None


def test_names_that_only_contain_the_wanted_one(tmp_path: Path) -> None:
    decoys = {"draft_d2t": PAIR["d2t"] + 1, "d2t_old": PAIR["d2t"] + 2, "vision.embed_tokens.weight": np.zeros((2, 2))}
    path = write_safetensors(tmp_path, {**decoys, **drafters.weights("midlayer", ASCENDING)})
    assert np.array_equal(ids_of(path), ASCENDING)
    with open_drafter(str(path), Meter()) as drafter:
        assert not drafter.has("embed")
        assert sorted(drafter.unknown) == sorted(decoys)


def test_one_index_or_several(tmp_path: Path) -> None:
    path = write_sharded(tmp_path, [drafters.weights("midlayer", ASCENDING, mapping=False), PAIR])
    assert np.array_equal(ids_of(path), ASCENDING)
    (path / "other.safetensors.index.json").write_text("{}")
    with pytest.raises(Unreadable, match="2 indexes"):
        open_checkpoint(str(path), Meter())
    assert np.array_equal(ids_of(path / "model.safetensors.index.json"), ASCENDING)


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64"])
def test_types_that_still_hold_the_offsets(tmp_path: Path, dtype: str) -> None:
    for path in (write_npy(tmp_path, PAIR["d2t"].astype(dtype)), write_torch(tmp_path / "x.pt", {"d2t": PAIR["d2t"].astype(dtype)})):
        assert np.array_equal(ids_of(path), ASCENDING)


def big_offsets() -> Any:
    """A mapping whose offsets a short float cannot hold."""
    return np.sort(np.random.default_rng(4).choice(163_840, 32_000, replace=False))


@pytest.mark.parametrize("short", ["bfloat16", "float16"])
def test_offsets_through_a_short_float_are_found(tmp_path: Path, short: str) -> None:
    ids = big_offsets()
    stored = offsets(ids)
    cast = bfloat16(stored) if short == "bfloat16" else stored.clip(0, 65_504).astype(np.float16)
    damaged = from_bfloat16(cast) if short == "bfloat16" else cast.astype(np.float32)  # type: ignore[arg-type, union-attr]
    # Rounded, and still strictly ascending: uniqueness says nothing.
    assert len(np.unique(damaged.astype(np.int64) + np.arange(len(ids)))) == len(ids)
    for name, tensor in (("as-is", cast), ("int64", damaged.astype(np.int64))):
        path = write_torch(tmp_path / f"{name}.pt", {"d2t": tensor, "t2d": mask(ids, 163_840)})
        assert side_of(path, None).encoding == "corrupt", name


def test_a_mask_in_other_types(tmp_path: Path) -> None:
    for dtype in ("bool", "uint8", "int8", "int64", "float32"):
        side = side_of(write_torch(tmp_path / "x.pt", {"d2t": PAIR["d2t"], "t2d": PAIR["t2d"].astype(dtype)}))
        assert side.t2d is not None
        assert (side.t2d.kind, side.t2d.selected) == ("mask", D), dtype


def test_a_folder_of_hidden_states_is_no_mapping(tmp_path: Path) -> None:
    for number in range(3):
        write_torch(tmp_path / f"data_{number}.pt", {"input_ids": np.arange(4)})
    with pytest.raises(Unreadable, match="several mappings"):
        read_side("A", str(tmp_path))


def test_links_to_a_checkpoint_lead_to_it(tmp_path: Path) -> None:
    path = drafters.speculators(tmp_path)
    assert path.is_symlink()
    assert np.array_equal(ids_of(path), ASCENDING)


@pytest.mark.parametrize("name", ["epoch_3_step_900", "run-step400", "iter_0001000"])
def test_a_run_with_several_checkpoints_names_them(tmp_path: Path, name: str) -> None:
    write_safetensors(tmp_path / name, drafters.weights("midlayer", ASCENDING))
    with pytest.raises(Unreadable, match="no checkpoint") as caught:
        read_side("A", str(tmp_path))
    assert name in (caught.value.hint or "")


def test_a_head_of_all_target_tokens(tmp_path: Path) -> None:
    tensors = drafters.weights("layers.0", BY_FREQUENCY, t2d=False)
    tensors["lm_head.weight"] = bfloat16(drafters.TARGET_ROWS)
    side = side_of(write_safetensors(tmp_path, tensors, **drafters.flat_config()))
    assert side.stored is not None
    assert (side.stored.lm_head_rows, side.rows) == (V, D)


def test_zeros_where_draft_and_target_are_the_same(tmp_path: Path) -> None:
    path = write_torch(tmp_path / "pytorch_model.bin", {"d2t": np.zeros(V, np.int64), "t2d": np.ones(V, bool)})
    assert np.array_equal(ids_of(path, None), np.arange(V))


def test_every_trainers_config_is_read(tmp_path: Path) -> None:
    for name, config in (("flat", drafters.flat_config()), ("speculators", drafters.speculators_config())):
        write_safetensors(tmp_path / name, drafters.weights("layers.0", ASCENDING), **config)
        with open_drafter(str(tmp_path / name), Meter()) as drafter:
            assert drafter.config is not None
            assert (drafter.config.dialect, drafter.config.hidden_size, drafter.config.target_vocab_size) == (name, H, V)
            ids = drafters.OUTPUT_IDS if name == "flat" else drafters.INPUT_IDS
            assert drafter.config.aux_ids[0] == tuple(ids)
            assert json.loads((tmp_path / name / "config.json").read_text()) == drafter.config.values
