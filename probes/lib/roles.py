"""What each tensor of a drafter is for, whatever its trainer calls it.

Trainers name the one decoder layer ``midlayer``, ``layers.0`` or ``model.layers.0`` and wrap everything in prefixes; here
a tensor has one name, its role: ``d2t``, ``lm_head``, ``fc``, ``layers.0.self_attn.q_proj``. The role ``ids`` is that of
target ids themselves, as NeMo and SGLang keep them, where ``d2t`` has offsets.
"""

from __future__ import annotations

import re

PREFIXES = ("model.", "draft_model.", "eagle_module.", "module.", "_orig_mod.")
"""What trainers and wrappers put before a tensor's own name; several may be stacked."""

_ROLES = {
    "d2t": "d2t",
    "draft_id_to_target_id": "d2t",
    "t2d": "t2d",
    "selected_token_ids": "ids",
    "hot_token_id": "ids",
    "lm_head.weight": "lm_head",
    "verifier_lm_head.weight": "verifier_lm_head",
    "embed_tokens.weight": "embed",
    "fc.weight": "fc",
    "fc.bias": "fc.bias",
    "norm.weight": "norm",
    "verifier_norm.weight": "verifier_norm",
    "input_norm.weight": "input_norm",
    "aux_norm_low.weight": "fc_norm.0",
    "aux_norm_mid.weight": "fc_norm.1",
    "aux_norm_high.weight": "fc_norm.2",
}
_NUMBERED = re.compile(r"(fc_norm\.\d{1,3}\.weight|layers\.\d{1,4}\..+)\Z")


def bare_name(name: str) -> str:
    """Return a tensor's name without the prefixes of wrappers; ``draft_d2t`` and ``x.d2t`` stay what they are."""
    shorter = True
    while shorter:
        shorter = False
        for prefix in PREFIXES:
            if name.startswith(prefix):
                name, shorter = name[len(prefix) :], True
    return name


def role_of(name: str) -> str | None:
    """Return what the tensor ``name`` is for; None where that is not known.

    A layer's tensor keeps its own name below ``layers.N.``, without ``.weight``.
    """
    bare = bare_name(name)
    if bare in _ROLES:
        return _ROLES[bare]
    if bare.startswith("midlayer."):
        bare = "layers.0." + bare[len("midlayer.") :]
    if not _NUMBERED.match(bare):
        return None
    return bare[: -len(".weight")] if bare.endswith(".weight") else bare


def layer_key(name: str) -> str | None:
    """Return how the file calls the layer that the tensor ``name`` belongs to, such as ``model.layers.0``; None for none."""
    match = re.match(r"(.*?\b(?:midlayer|layers\.\d{1,4}))\.", name)
    return match.group(1) if match and (role_of(name) or "").startswith("layers.") else None
