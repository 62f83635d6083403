from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes.lib.files import Meter, Unreadable
from probes.lib.target import open_target

from ...support.checkpoints import bfloat16, write_safetensors, write_sharded, write_sharded_torch

V, H = 40, 8
HEAD = np.random.default_rng(0).normal(size=(V, H)).astype(np.float32)
EMBED = HEAD + 1
NORM = np.arange(H, dtype=np.float32)


def tensors(head: str | None, embed: str, norm: str) -> dict[str, Any]:
    found: dict[str, Any] = {embed: EMBED, norm: NORM, "vision_tower.embed_tokens.weight": np.zeros((3, 3), np.float32)}
    return found if head is None else {head: HEAD, **found}


@pytest.mark.parametrize(
    "names",
    [
        ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "language_model.model.embed_tokens.weight", "language_model.model.norm.weight"),
        ("lm_head.weight", "model.language_model.embed_tokens.weight", "model.language_model.norm.weight"),
        ("output.weight", "tok_embeddings.weight", "norm.weight"),
        ("lm_head.weight", "transformer.wte.weight", "transformer.ln_f.weight"),
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_where_models_keep_their_head(tmp_path: Path, names: tuple[str, str, str], sharded: bool) -> None:
    found = tensors(*names)
    if sharded:
        write_sharded(tmp_path, [{name: tensor} for name, tensor in found.items()])
    else:
        write_safetensors(tmp_path, found)
    with open_target(str(tmp_path), Meter()) as target:
        assert (target.head_name, target.embed_name, target.norm_name) == names
        assert not target.tied
        assert np.array_equal(target.head().take(np.array([7, 3])), HEAD[[7, 3]])
        assert np.array_equal(target.embedding().numbers(0, V), EMBED)
        norm = target.norm()
        assert norm is not None
        assert np.array_equal(norm, NORM)


def test_only_the_shard_of_the_head_is_opened(tmp_path: Path) -> None:
    found = tensors("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight")
    write_sharded(tmp_path, [{name: tensor} for name, tensor in found.items()])
    for path in tmp_path.glob("*.safetensors"):
        if "00001" not in path.name:
            path.unlink()
    meter = Meter()
    with open_target(str(tmp_path), meter) as target:
        target.head().numbers(0, 2)
    assert len([file for file in meter.files if file.endswith(".safetensors")]) == 1


def test_a_target_in_files_of_torch(tmp_path: Path) -> None:
    found = tensors("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight")
    write_sharded_torch(tmp_path, [{name: tensor} for name, tensor in found.items()])
    with open_target(str(tmp_path), Meter()) as target:
        assert np.array_equal(target.head().numbers(0, V), HEAD)


@pytest.mark.parametrize("said", [None, True])
def test_a_tied_head(tmp_path: Path, said: bool | None) -> None:
    config: dict[str, Any] = {"vocab_size": V} if said is None else {"vocab_size": V, "tie_word_embeddings": said}
    write_safetensors(tmp_path, tensors(None, "model.embed_tokens.weight", "model.norm.weight"), **config)
    with open_target(str(tmp_path), Meter()) as target:
        assert target.tied
        assert np.array_equal(target.head().numbers(0, V), EMBED)


def test_a_head_that_is_missing_is_not_taken_for_tied(tmp_path: Path) -> None:
    found = tensors(None, "model.embed_tokens.weight", "model.norm.weight")
    write_safetensors(tmp_path, found, text_config={"tie_word_embeddings": False})
    with open_target(str(tmp_path), Meter()) as target, pytest.raises(Unreadable, match="says that it is not the embedding"):
        target.head()


def test_a_padded_head(tmp_path: Path) -> None:
    padded = np.concatenate([HEAD, np.zeros((24, H), np.float32)])
    write_safetensors(tmp_path, {"lm_head.weight": bfloat16(padded)}, vocab_size=V)
    with open_target(str(tmp_path), Meter()) as target:
        assert (target.head().rows, target.vocab_size) == (V + 24, V)


@pytest.mark.parametrize("name", ["lm_head.weight_packed", "language_model.lm_head.qweight", "model.lm_head.weight_scale"])
def test_a_quantised_head_is_refused_by_name(tmp_path: Path, name: str) -> None:
    write_safetensors(tmp_path, {name: np.zeros((2, 2), np.int32), "model.embed_tokens.weight": EMBED})
    with open_target(str(tmp_path), Meter()) as target, pytest.raises(Unreadable, match="quantised") as caught:
        target.head()
    assert name in str(caught.value)
    assert "bfloat16" in (caught.value.hint or "")


def test_quantised_layers_do_not_matter(tmp_path: Path) -> None:
    layers = {"model.layers.0.mlp.up_proj.weight_packed": np.zeros((2, 2), np.int32)}
    write_safetensors(tmp_path, {"lm_head.weight": HEAD, **layers})
    with open_target(str(tmp_path), Meter()) as target:
        assert target.head().rows == V


def test_the_configuration_of_a_multimodal_target(tmp_path: Path) -> None:
    nested = {"vocab_size": V, "hidden_size": H, "num_hidden_layers": 61}
    write_safetensors(tmp_path, {"lm_head.weight": HEAD}, model_type="kimi_k25", text_config=nested)
    with open_target(str(tmp_path), Meter()) as target:
        assert (target.vocab_size, target.layers) == (V, 61)
        assert target.config is not None
        assert target.config.hidden_size == H
