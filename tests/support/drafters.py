"""Small drafters as each trainer writes them: the same weights and the same ids in eight houses' styles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoints import Raw, bfloat16, from_bfloat16, mask, offsets, write_safetensors, write_torch

V, D, H, LAYERS, WIDE = 600, 120, 16, 12, 24
"""Target tokens, draft tokens, width, layers of the target, width within the MLP."""

_random = np.random.default_rng(11)
TARGET_ROWS = from_bfloat16(bfloat16(0.02 * (_random.normal(size=(V, H)) + _random.normal(size=H)))).reshape(V, H)
EMBEDDING = from_bfloat16(bfloat16(0.03 * _random.normal(size=(V, H)))).reshape(V, H)
ASCENDING = np.sort(_random.choice(V, D, replace=False)).astype(np.int64)
BY_FREQUENCY = _random.permutation(ASCENDING)
EOS = int(ASCENDING[-1])

OUTPUT_IDS = [1, LAYERS // 2 - 1, LAYERS - 4]
INPUT_IDS = [2, LAYERS // 2, LAYERS - 3]


def numbers(*shape: int) -> Any:
    """Return random float32 numbers of a shape, the same for the same shape."""
    return np.random.default_rng(sum(shape) * 31 + len(shape)).normal(size=shape).astype(np.float32)


def layer(key: str, *, first: bool = True) -> dict[str, Any]:
    """Return the tensors of a decoder layer named ``key``."""
    columns = 2 * H if first else H
    tensors = {f"{key}.self_attn.{name}_proj.weight": numbers(H, columns) for name in "qkv"}
    tensors[f"{key}.self_attn.o_proj.weight"] = numbers(H, H)
    tensors |= {f"{key}.mlp.{name}_proj.weight": numbers(WIDE, H) for name in ("gate", "up")}
    tensors[f"{key}.mlp.down_proj.weight"] = numbers(H, WIDE)
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    return tensors | {f"{key}.{name}.weight": numbers(H) for name in norms}


def weights(key: str, ids: Any, *, prefix: str = "", mapping: bool = True, t2d: bool = True) -> dict[str, Any]:
    """Return a drafter's tensors, its head copied from the target."""
    tensors = {
        "fc.weight": numbers(H, 3 * H),
        "norm.weight": numbers(H + 1)[:H],
        "lm_head.weight": bfloat16(TARGET_ROWS[ids]),
        **layer(key),
    }
    if mapping:
        tensors["d2t"] = offsets(ids)
        if t2d:
            tensors["t2d"] = mask(ids, V)
    return {prefix + name: tensor for name, tensor in tensors.items()}


def flat_config(**more: Any) -> dict[str, Any]:
    """Return config.json as SpecForge, SGLang, ModelOpt, TorchSpec and NeMo write it."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": V, "draft_vocab_size": D,
        "hidden_size": H, "intermediate_size": WIDE, "num_hidden_layers": 1, "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": OUTPUT_IDS, "use_aux_hidden_state": True}, **more,
    }  # fmt: skip


def speculators_config(**more: Any) -> dict[str, Any]:
    """Return config.json as speculators writes it."""
    return {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.5.0",
        "draft_vocab_size": D, "norm_before_residual": True, "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": INPUT_IDS,
        "transformer_layer_config": {
            "model_type": "llama", "vocab_size": V, "hidden_size": H, "intermediate_size": WIDE,
            "max_position_embeddings": 131072,
        }, **more,
    }  # fmt: skip


def half(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return ``tensors`` with their weights as float16."""
    wide = {name: from_bfloat16(one).reshape(tuple(one.shape)) if isinstance(one, Raw) else one for name, one in tensors.items()}
    return {name: one.astype(np.float16) if one.dtype.kind == "f" else one for name, one in wide.items()}


def safe_ai(folder: Path) -> Path:
    """pytorch_model.bin in float16, no embedding."""
    write_torch(folder / "pytorch_model.bin", half(weights("midlayer", ASCENDING)))
    (folder / "config.json").write_text(json.dumps(flat_config()))
    return folder


def spec_forge(folder: Path) -> Path:
    """model.safetensors, and the optimizer's state beside it."""
    folder = folder / "epoch_3_step_900"
    write_safetensors(folder, weights("midlayer", ASCENDING), **flat_config())
    # Not even opened: it can have gigabytes.
    (folder / "training_state.pt").write_bytes(b"\x80\x02this is no pickle")
    return folder


def speculators(folder: Path) -> Path:
    """An epoch's folder with its own embedding, reached through a link."""
    tensors = weights("layers.0", ASCENDING) | {"embed_tokens.weight": bfloat16(EMBEDDING)}
    write_safetensors(folder / "3", tensors, **speculators_config())
    (folder / "checkpoint_best").symlink_to("3")
    return folder / "checkpoint_best"


def angel_slim(folder: Path) -> Path:
    """Files of torch, with vocab_mapping.pt beside them."""
    safe_ai(folder)
    write_torch(folder / "vocab_mapping.pt", {"d2t": offsets(ASCENDING), "t2d": mask(ASCENDING, V)})
    return folder


def torch_spec(folder: Path) -> Path:
    """A folder named after the iteration."""
    return write_safetensors(folder / "iter_0001000", weights("midlayer", ASCENDING), **flat_config())


def model_opt(folder: Path) -> Path:
    """Rows by frequency, no t2d, settings of its own."""
    config = flat_config()
    config["eagle_config"]["use_input_layernorm_in_first_layer"] = True
    return write_safetensors(folder, weights("layers.0", BY_FREQUENCY, t2d=False), **config)


def ne_mo(folder: Path) -> Path:
    """Everything below ``model.``, d2t and t2d since they are exported."""
    return write_safetensors(folder, weights("layers.0", BY_FREQUENCY, prefix="model."), **flat_config())


def old_ne_mo(folder: Path, name: str = "eagle_meta.pt") -> Path:
    """No mapping in the weights; the ids are in a file beside them."""
    write_safetensors(folder, weights("layers.0", BY_FREQUENCY, prefix="model.", mapping=False), **flat_config())
    write_torch(folder / name, {"selected_token_ids": BY_FREQUENCY, "draft_vocab_size": D})
    return folder


DRAFTERS = {
    "SafeAI": safe_ai, "SpecForge": spec_forge, "speculators": speculators, "AngelSlim": angel_slim, "TorchSpec": torch_spec,
    "ModelOpt": model_opt,
}  # fmt: skip
"""Trainers that are recognised, and what writes their checkpoints."""


def write_target(folder: Path, *, specials: Any = None, **config: Any) -> Path:
    """Write the target that all of them belong to."""
    tensors: dict[str, Any] = {
        "model.embed_tokens.weight": bfloat16(EMBEDDING), "model.norm.weight": np.ones(H, np.float32),
        "lm_head.weight": bfloat16(TARGET_ROWS),
    }  # fmt: skip
    values = {"vocab_size": V, "hidden_size": H, "num_hidden_layers": LAYERS, "model_type": "llama", **config}
    write_safetensors(folder, tensors, **values)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS], "bos_token_id": 0}))
    added = {str(token): {"content": text, "special": True} for token, text in (specials or {EOS: "<|end|>"}).items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    return folder
