"""What ``config.json`` beside a drafter says of its vocabularies, in both dialects."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .files import Damaged, Unreadable, read_small
from .strict_json import count, parse_object

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .files import Meter

MAX_BYTES = 4 << 20
NAME = "config.json"


@dataclass(frozen=True)
class Config:
    """The vocabulary sizes of one drafter's configuration; None where it does not say."""

    path: str
    dialect: str
    """``speculators`` (sizes of the target below transformer_layer_config) or ``flat`` (all at top level)."""
    target_vocab_size: int | None
    draft_vocab_size: int | None


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
    # speculators nests the layer's settings; multimodal models nest those of the language model.
    candidates = (values.get(name) for name in ("transformer_layer_config", "text_config"))
    nested: dict[str, Any] = next((value for value in candidates if isinstance(value, dict)), {})
    speculators = "transformer_layer_config" in values or "speculators_model_type" in values
    target = count(values.get("vocab_size"))
    return (
        Config(
            path,
            "speculators" if speculators else "flat",
            # 0 says as little as nothing.
            target or count(nested.get("vocab_size")) or None,
            count(values.get("draft_vocab_size")) or None,
        ),
        None,
    )
