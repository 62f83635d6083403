"""Special tokens of a target, and whether two folders hold the same tokenizer: from its files, without its code."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

from .files import Damaged, File, Unreadable, read_small, shown
from .strict_json import count, parse_object

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

    from .files import Meter

MAX_TOKENIZER = 128 << 20
"""Bytes of a tokenizer.json; the largest real ones have about 35 MB."""
TOKENIZER_FILES = ("tokenizer.json", "tiktoken.model", "tokenizer.model", "vocab.json")
_ROLES = ("bos_token_id", "eos_token_id", "pad_token_id")
_MAX_TEXT = 80


@dataclass(frozen=True)
class Special:
    """One special token."""

    id: int
    text: str | None
    role: str
    """``bos_token_id``, ``eos_token_id``, ``pad_token_id``, or ``added`` for all others."""


def read_special_tokens(folder: str, meter: Meter) -> list[Special]:
    """Return the special tokens that the files of the model in ``folder`` name, by id.

    The roles come from generation_config.json and config.json; texts and all others from tokenizer_config.json and
    tokenizer.json. Files that are missing or broken are passed over.
    """
    roles: dict[int, str] = {}
    for name in ("generation_config.json", "config.json"):
        values = _object(os.path.join(folder, name), 4 << 20, meter)
        nested = values.get("text_config")
        for source in (values, nested if isinstance(nested, dict) else {}):
            for role in _ROLES:
                ids = source.get(role)
                for item in map(count, ids if isinstance(ids, list) else [ids]):
                    if item is not None:
                        roles.setdefault(item, role)
    texts: dict[int, str] = {}
    for token, text in added_tokens(folder, meter):
        texts.setdefault(token, text)
    return [
        Special(token, texts.get(token), roles.get(token, "added")) for token in sorted({*roles, *texts}) if token < 1 << 31
    ]


def added_tokens(folder: str, meter: Meter) -> Iterator[tuple[int, str]]:
    """Yield (id, text) for the tokens that were added to the vocabulary of the tokenizer in ``folder``."""
    decoder = _object(os.path.join(folder, "tokenizer_config.json"), 32 << 20, meter).get("added_tokens_decoder")
    if isinstance(decoder, dict):
        for token, entry in decoder.items():
            if token.isdigit() and len(token) < 10 and isinstance(entry, dict):
                yield int(token), _text(entry.get("content"))
        return
    tokens = _object(os.path.join(folder, "tokenizer.json"), MAX_TOKENIZER, meter).get("added_tokens")
    for entry in tokens if isinstance(tokens, list) else []:
        if isinstance(entry, dict) and count(entry.get("id")) is not None:
            yield int(entry["id"]), _text(entry.get("content"))


def _text(value: object) -> str:
    return shown(value)[:_MAX_TEXT] if isinstance(value, str) else ""


def compare_tokenizers(a: str, b: str, meter: Meter) -> tuple[bool | None, str]:
    """Return whether the tokenizers in two folders are the same, and what that rests on; None where one has none."""
    for name in TOKENIZER_FILES:
        paths = [os.path.join(folder, name) for folder in (a, b)]
        if not all(os.path.lexists(path) for path in paths):
            continue
        try:
            if os.path.samefile(*paths):
                return True, "%s is one and the same file" % name
            digests = [_digest(path, meter) for path in paths]
        except (OSError, Damaged, Unreadable) as error:
            return None, "%s: %s" % (name, error)
        if digests[0] == digests[1]:
            return True, "%s has the same bytes" % name
        if name != "tokenizer.json":
            return False, "%s differs" % name
        return _compare_vocabularies(paths, meter)
    return None, "no tokenizer file that both have"


def _compare_vocabularies(paths: list[str], meter: Meter) -> tuple[bool | None, str]:
    pieces = [vocabulary(_object(path, MAX_TOKENIZER, meter)) for path in paths]
    if not pieces[0] or not pieces[1]:
        return None, "tokenizer.json differs, and its vocabulary cannot be read"
    shared = pieces[0].keys() & pieces[1].keys()
    differing = sorted(token for token in shared if pieces[0][token] != pieces[1][token])
    alone = len(pieces[0]) + len(pieces[1]) - 2 * len(shared)
    if not differing and not alone:
        return True, "tokenizer.json differs, and gives every id the same text"
    first = ": first id %d, %s and %s" % (
        differing[0], ascii(pieces[0][differing[0]][:40]), ascii(pieces[1][differing[0]][:40])
    ) if differing else ""  # fmt: skip
    return False, "tokenizer.json: %d ids with other texts, %d ids that only one has%s" % (len(differing), alone, first)


def vocabulary(values: dict[str, Any]) -> dict[int, str]:
    """Return what a tokenizer.json calls each token id, added tokens included."""
    model = values.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    pieces: dict[int, str] = {}
    if isinstance(vocab, dict):
        pieces = {token: text for text, token in vocab.items() if type(token) is int}
    elif isinstance(vocab, list):
        # Unigram: [[text, score], ...].
        pairs = (pair[0] if isinstance(pair, list) and pair else None for pair in vocab)
        pieces = {token: text for token, text in enumerate(pairs) if isinstance(text, str)}
    added = values.get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict) and type(entry.get("id")) is int and isinstance(entry.get("content"), str):
            pieces[entry["id"]] = entry["content"]
    return pieces


def _digest(path: str, meter: Meter) -> str:
    with File(path, meter) as file:
        if file.size > MAX_TOKENIZER:
            raise Damaged(path, "%d bytes; no tokenizer is that large" % file.size)
        return hashlib.sha256(file.read(0, file.size)).hexdigest()


def _object(path: str, limit: int, meter: Meter) -> dict[str, Any]:
    try:
        return parse_object(read_small(path, meter, limit))
    except (Unreadable, Damaged, ValueError):
        return {}
