"""The tiny stack on disk: target and drafter as checkpoints, samples in every format that trainers keep them in."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from . import checkpoints
from .tiny_stack import (
    AUX,
    DRAFT_THETA,
    EPS,
    HEAD_DIM,
    HEADS,
    INNER,
    KV_HEADS,
    LAYERS,
    TARGET_THETA,
    D,
    Drafter,
    H,
    Ids,
    Sample,
    Target,
    V,
)


def target_config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": V, "hidden_size": H,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "intermediate_size": INNER, "rms_norm_eps": EPS, "rope_theta": TARGET_THETA, "tie_word_embeddings": False,
        "hidden_act": "silu", "max_position_embeddings": 2048,
    }  # fmt: skip


def write_target(folder: Path, target: Target) -> Path:
    """Write the target as transformers would; float32, so that nothing is lost."""
    weights = {name if name.startswith("lm_head") else f"model.{name}": value.numpy() for name, value in target.state_dict().items()}
    return checkpoints.write_safetensors(folder, weights, **target_config())


def write_drafter(
    folder: Path,
    drafter: Drafter,
    *,
    dialect: str = "speculators",
    ids: Ids | None = None,
    t2d: Ids | None = None,
    tensors: Mapping[str, NDArray[Any]] | None = None,
    **config: Any,
) -> Path:
    """Write the drafter in the ``dialect`` of speculators or specforge.

    Args:
        folder: where to.
        drafter: the drafter.
        dialect: layer names and config keys.
        ids: what d2t says of the rows; the drafter's own ids by default.
        t2d: the tokens that t2d marks; ``ids`` by default.
        tensors: further tensors, or others in the place of the usual ones.
        config: further keys at the top level of config.json.
    """
    ids = drafter.ids if ids is None else ids
    weights: dict[str, Any] = {name: value.numpy() for name, value in drafter.state_dict().items()}
    layer = {key: value for key, value in target_config().items() if key != "architectures"}
    layer.update(num_hidden_layers=1, rope_theta=DRAFT_THETA)
    flags = {"norm_before_residual": drafter.norm_before_residual, "norm_output": drafter.norm_output}
    if dialect == "speculators":
        values = {
            "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": D,
            "transformer_layer_config": layer, "eagle_aux_hidden_state_layer_ids": list(AUX), "target_hidden_size": None, **flags,
        }  # fmt: skip
    else:
        weights = {name.replace("layers.0.", "midlayer."): value for name, value in weights.items() if "embed" not in name}
        values = {
            **layer, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": D, **flags,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in AUX], "use_aux_hidden_state": True},
        }  # fmt: skip
    weights.update(d2t=checkpoints.offsets(ids), t2d=checkpoints.mask(ids if t2d is None else t2d, V))
    weights.update(tensors or {})
    return checkpoints.write_safetensors(folder, weights, **{**values, **config})


FORMATS = ("specforge", "specforge-gz", "speculators-v0", "speculators-v1", "speculators", "modelopt", "angelslim")


def write_samples(folder: Path, samples: Sequence[Sample], kind: str, target: Target) -> list[Path]:
    """Write samples as the trainer ``kind`` keeps them: file names, keys, shapes, and its idea of the final state."""
    folder.mkdir(parents=True, exist_ok=True)
    return [_write_sample(folder, number, sample, kind, target) for number, sample in enumerate(samples)]


def normed(target: Target, final: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the final state as the head gets it."""
    with torch.no_grad():
        result: NDArray[np.float32] = target.norm(torch.from_numpy(final)).numpy()
    return result


def _write_sample(folder: Path, number: int, sample: Sample, kind: str, target: Target) -> Path:
    aux = np.concatenate(sample.aux, 1)
    after = normed(target, sample.final) if sample.final.shape[1] == H else sample.final
    common: dict[str, Any] = {"input_ids": sample.ids, "loss_mask": sample.mask}
    if kind == "speculators":
        path = folder / f"hs_{number}.safetensors"
        stacked = np.stack([*sample.aux, sample.final], 1)
        path.write_bytes(checkpoints.safetensors({"hidden_states": stacked, "token_ids": sample.ids}))
        return path
    name, content = {
        "specforge": ("data_%d.ckpt", {**common, "hidden_state": after[None], "aux_hidden_state": aux[None]}),
        "speculators-v0": ("data_%d.pt", {**common, "hidden_state": aux, "target": after}),
        "speculators-v1": ("data_%d.pt", {**common, "hidden_states": [*sample.aux, sample.final]}),
        "modelopt": ("conv-%d.pt", {**common, "hidden_states": after, "aux_hidden_states": aux, "conversation_id": str(number)}),
        "angelslim": ("data_%d.ckpt", {
            "input_ids": sample.ids[None], "loss_mask": sample.mask[None], "hidden_states": aux[None], "target_hiddens": after[None],
        }),
    }[kind.replace("-gz", "")]  # fmt: skip
    path = checkpoints.write_torch(folder / (name % number), content)
    if kind.endswith("-gz"):
        packed = path.with_name(path.name + ".gz")
        packed.write_bytes(gzip.compress(path.read_bytes(), 1))
        path.unlink()
        path = packed
    return path


def write_dataset(path: Path, samples: Sequence[Sample]) -> Path:
    """Write the tokens that the samples should hold, one JSON object a line."""
    lines = [json.dumps({"input_ids": sample.ids.tolist(), "loss_mask": sample.mask.tolist()}) for sample in samples]
    path.write_text("\n".join(lines) + "\n")
    return path
