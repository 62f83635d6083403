"""What lies beside a drafter's weights: which of it belongs to a remapped drafter as well, and its new config.json."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from itertools import islice

from . import config as configs
from .files import Damaged, File, Meter, Unreadable, read_small, shown
from .locate import MAPPINGS, META, NOT_WEIGHTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_COMPANION = 256 << 20
"""Bytes; the largest tokenizers stay below 40 MB."""
_MAX_ENTRIES = 10_000
_READ = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py", ".md")
"""How the names end of what servers and trainers read: tokenizers, templates, configurations, code of tokenizers."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".index.json")
_MAPPED = ("d2t", "t2d", "token_freq")


@dataclass(frozen=True)
class Companions:
    """The other files of a folder."""

    copied: tuple[str, ...]
    """Names of those that go along."""
    left: tuple[str, ...]
    """Name and reason of those that do not."""
    size: int
    """Bytes of those that go along."""


def look_beside(folder: str, own: set[str]) -> Companions:
    """Return what of ``folder`` belongs to a remapped drafter.

    Args:
        folder: where the weights lie.
        own: names of the files that are written anew.
    """
    try:
        names = sorted(islice(os.listdir(folder), _MAX_ENTRIES))
    except OSError:
        return Companions((), (), 0)
    copied, left, size = [], [], 0
    for name in names:
        if name in own or name == configs.NAME:
            continue
        reason = _reason_to_leave(name) or _unfit(os.path.join(folder, name))
        if reason is None:
            copied.append(name)
            size += os.path.getsize(os.path.join(folder, name))
        else:
            left.append("%s: %s" % (shown(name), reason))
    return Companions(tuple(copied), tuple(left), size)


def new_config(config: configs.Config, rows_before: int, rows: int, vocab: int) -> bytes:
    """Return config.json for ``rows`` draft tokens: byte for byte as it was where it says so already.

    Raises:
        Unreadable: it vanished.
        Damaged: it is too large.
    """
    values = config.values
    changed = _resized(values, rows_before, rows, vocab)
    if changed == values:
        return read_small(config.path, Meter(), configs.MAX_BYTES)
    return json.dumps(changed, indent=2, ensure_ascii=True).encode("ascii") + b"\n"


def _resized(values: dict[str, Any], before: int, rows: int, vocab: int) -> dict[str, Any]:
    changed = dict(values)
    if values.get("draft_vocab_size") != rows and ("draft_vocab_size" in values or rows != vocab):
        changed["draft_vocab_size"] = rows
    for name in ("eagle_config", "transformer_layer_config"):
        nested = values.get(name)
        if not isinstance(nested, dict):
            continue
        nested = dict(nested)
        if "draft_vocab_size" in nested:
            nested["draft_vocab_size"] = rows
        # Old speculators wrote the draft size there, and reads it back as that.
        if name == "transformer_layer_config" and nested.get("vocab_size") == before != vocab:
            nested["vocab_size"] = rows
        changed[name] = nested
    return changed


def _reason_to_leave(name: str) -> str | None:
    lower = name.lower()
    if lower.startswith(NOT_WEIGHTS):
        return "state of a training, which belongs to the old rows"
    if lower.startswith(_MAPPED) or lower in MAPPINGS or lower in META:
        return "a mapping or counts of their own"
    if lower.endswith(_WEIGHTS):
        return "other weights"
    if not lower.endswith(_READ) and not lower.startswith(("license", "notice")):
        return "neither a tokenizer nor a configuration"
    return None


def _unfit(path: str) -> str | None:
    """Return why what is at ``path`` cannot be copied, None when it can."""
    try:
        with File(path, Meter()) as file:
            return None if file.size <= MAX_COMPANION else "%d bytes" % file.size
    except (Unreadable, Damaged) as error:
        return error.reason
