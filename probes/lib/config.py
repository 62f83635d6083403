"""What ``config.json`` beside a model says, in the dialects of all trainers.

Two ways of writing a drafter's: *flat* (SpecForge, SGLang, ModelOpt: everything at top level, layer ids below
``eagle_config``) and *speculators* (the layer's settings below ``transformer_layer_config``, layer ids at top level).
Multimodal targets nest those of their language model below ``text_config``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from .files import Damaged, Unreadable, read_small
from .strict_json import count, parse_object

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .files import Meter

MAX_BYTES = 4 << 20
NAME = "config.json"
AUX_IDS = "eagle_aux_hidden_state_layer_ids"
_MAX_IDS = 64


@dataclass(frozen=True)
class Config:
    """One model's configuration; None where it does not say."""

    path: str
    dialect: str
    """``speculators`` (sizes of the target below transformer_layer_config) or ``flat`` (all at top level)."""
    target_vocab_size: int | None
    draft_vocab_size: int | None
    values: dict[str, Any] = field(default_factory=dict, repr=False)
    """The whole file. It comes from elsewhere: check the type of whatever is taken from it."""

    @property
    def layer(self) -> dict[str, Any]:
        """Settings of the decoder layers: the nested object where there is one, else the whole file."""
        return _nested(self.values) or self.values

    @property
    def hidden_size(self) -> int | None:
        """Width of the model's own layers."""
        return count(self.layer.get("hidden_size")) or None

    @property
    def target_hidden_size(self) -> int | None:
        """Width of the target's layers: ``hidden_size`` where a drafter does not say otherwise."""
        return count(self.values.get("target_hidden_size")) or self.hidden_size

    @property
    def layers(self) -> int | None:
        """Decoder layers."""
        return count(self.layer.get("num_hidden_layers")) or None

    @property
    def tied(self) -> bool | None:
        """``tie_word_embeddings``: whether the head is the embedding."""
        own = _flag(self.values, "tie_word_embeddings")
        return _flag(self.layer, "tie_word_embeddings") if own is None else own

    @property
    def aux_places(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Where layer ids may stand: eagle_config, the top level."""
        eagle = self.values.get("eagle_config")
        return eagle if isinstance(eagle, dict) else {}, self.values

    @property
    def aux_ids(self) -> tuple[tuple[int, ...] | None, str | None]:
        """(Layers of the target that feed the drafter, where that is written); both None where it is not."""
        for values, where in zip(self.aux_places, ("eagle_config", "the top level")):
            ids = values.get(AUX_IDS)
            if isinstance(ids, list) and 0 < len(ids) <= _MAX_IDS and all(type(item) is int for item in ids):
                return tuple(ids), where
        return None, None

    def flag(self, name: str) -> bool | None:
        """Return a truth value from ``eagle_config`` or the top level; None where it is not said."""
        eagle = self.values.get("eagle_config")
        own = _flag(self.values, name)
        return _flag(eagle, name) if own is None and isinstance(eagle, dict) else own

    def text(self, name: str) -> str | None:
        """Return a text at top level; None where there is none."""
        value = self.values.get(name)
        return value if isinstance(value, str) and value else None

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names of the classes that the model says it is of."""
        value = self.values.get("architectures")
        return tuple(item for item in value[:8] if isinstance(item, str)) if isinstance(value, list) else ()


def read(folder: str, meter: Meter) -> tuple[Config | None, str | None]:
    """Return (the configuration in ``folder``, what is wrong with the file); both None where there is no file."""
    path = os.path.join(folder, NAME)
    if not os.path.lexists(path):
        return None, None
    try:
        values = parse_object(read_small(path, meter, MAX_BYTES))
    except ValueError as error:
        return None, "%s: %s" % (NAME, error)
    except (Unreadable, Damaged) as error:
        return None, "%s: %s" % (NAME, error.reason)
    nested = _nested(values) or {}
    speculators = "transformer_layer_config" in values or "speculators_model_type" in values
    target = count(values.get("vocab_size"))
    return (
        Config(
            path,
            "speculators" if speculators else "flat",
            # 0 says as little as nothing.
            target or count(nested.get("vocab_size")) or None,
            count(values.get("draft_vocab_size")) or None,
            values,
        ),
        None,
    )


def _nested(values: dict[str, Any]) -> dict[str, Any] | None:
    # speculators nests the layer's settings; multimodal models nest those of the language model.
    candidates = (values.get(name) for name in ("transformer_layer_config", "text_config"))
    return next((value for value in candidates if isinstance(value, dict)), None)


def _flag(values: dict[str, Any], name: str) -> bool | None:
    value = values.get(name)
    return value if type(value) is bool else None
