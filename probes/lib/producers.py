"""Which trainer wrote a drafter: told from its files, its configuration and its tensors' names, with the reasons."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from .locate import META

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .drafter import Drafter

_MODELOPT = ("use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm")
ASCENDING = ("SafeAI", "SpecForge", "speculators", "AngelSlim", "TorchSpec")
"""Trainers that always write rows in the order of their token ids."""


@dataclass(frozen=True)
class Producer:
    """Who wrote a checkpoint."""

    name: str
    """SafeAI, SpecForge, speculators, ModelOpt, NeMo, AngelSlim, TorchSpec; or ``unknown``."""
    reason: str


def recognise(drafter: Drafter) -> Producer:
    """Return who wrote ``drafter``; the most telling sign decides."""
    config = drafter.config
    values = config.values if config else {}
    beside = _beside(drafter.checkpoint.folder)
    eagle = values.get("eagle_config")
    keys = drafter.layer_keys
    parts = os.path.abspath(drafter.path).split(os.sep)[-3:]
    meta = next((name for name in META if name in beside), None)
    if config is not None and config.dialect == "speculators":
        return Producer("speculators", "config.json has speculators_model_type or transformer_layer_config")
    if meta is not None:
        return Producer("NeMo", "%s lies beside the weights" % meta)
    if isinstance(eagle, dict) and any(name in eagle for name in _MODELOPT):
        return Producer("ModelOpt", "eagle_config has settings that only ModelOpt writes")
    if any(re.match(r"iter_\d{7}\Z", part) for part in parts):
        return Producer("TorchSpec", "its folder is named as TorchSpec names them")
    if "midlayer" in " ".join(keys):
        if drafter.checkpoint.kind.startswith("torch"):
            mapped = "vocab_mapping.pt" in beside
            name, sign = ("AngelSlim", "vocab_mapping.pt beside them") if mapped else ("SafeAI", "no mapping file beside them")
            return Producer(name, "a layer named midlayer in files of torch, and %s" % sign)
        sign = "training_state.pt beside it" if "training_state.pt" in beside else "no sign of another trainer"
        return Producer("SpecForge", "a layer named midlayer in safetensors, and %s" % sign)
    if any(key.endswith("model.layers.0") for key in keys) and "d2t" not in drafter.roles:
        return Producer("NeMo", "a layer named model.layers.0, and no d2t")
    if keys == ["layers.0"] and "d2t" in drafter.roles and "t2d" not in drafter.roles:
        return Producer("ModelOpt", "a layer named layers.0, and d2t without t2d")
    return Producer("unknown", "none of the signs that are known")


def _beside(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))[:10_000]
    except OSError:
        return []
