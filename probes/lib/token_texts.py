"""The text that a token id stands for, from whatever tokenizer files lie on the host; none of their code is run.

``tokenizer.json`` names every piece in an alphabet of its own: bytes written as printable characters (GPT-2's), or spaces
written as a low line (SentencePiece's). ``tiktoken`` files list the bytes themselves. A token that is half a character
is shown by its bytes.
"""

from __future__ import annotations

import base64
import binascii
import os
import re

from .files import Damaged, Unreadable, quoted, read_small, shown
from .special_tokens import MAX_TOKENIZER, added_tokens, vocabulary
from .strict_json import count, parse_object

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .files import Meter

MAX_TEXT = 80
"""Characters of a token that are shown."""
_MAX_TOKENS = 1 << 22
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class TokenTexts:
    """Texts of tokens.

    Args:
        path: the file that they come from.
        pieces: bytes of each token.
        added: texts of tokens that were added to the vocabulary; they come first.
    """

    def __init__(self, path: str, pieces: dict[int, bytes], added: dict[int, str]) -> None:
        self.path = path
        self._pieces = pieces
        self._added = added

    def text(self, token: int) -> str | None:
        """Return what the token stands for, None where the tokenizer does not have it."""
        if token in self._added:
            return shown(self._added[token])[:MAX_TEXT]
        piece = self._pieces.get(token)
        return None if piece is None else piece.decode("utf-8", "backslashreplace")[:MAX_TEXT]


def find_texts(folders: list[str], meter: Meter) -> TokenTexts | None:
    """Return the texts of the first tokenizer in ``folders`` that can be read, None where there is none."""
    for folder in folders:
        for path in _files(folder):
            try:
                return read_texts(path, meter)
            except (Damaged, Unreadable):
                continue
    return None


def read_texts(path: str, meter: Meter) -> TokenTexts:
    """Return the texts of the tokenizer at ``path``, a file or a folder.

    Raises:
        Unreadable: there is none of a kind that is read.
        Damaged: it is broken.
    """
    if os.path.isdir(path):
        files = _files(path)
        if not files:
            raise Unreadable(path, "holds no tokenizer that is read", "tokenizer.json, tiktoken.model, *.tiktoken, vocab.json are")
        path = files[0]
    data = read_small(path, meter, MAX_TOKENIZER)
    folder = os.path.dirname(path)
    added = {token: text for token, text in added_tokens(folder, meter) if text}
    if os.path.basename(path).endswith(".json"):
        try:
            values = parse_object(data)
        except ValueError as error:
            raise Damaged(path, str(error)) from None
        return TokenTexts(path, _from_json(path, values), added)
    return TokenTexts(path, _from_tiktoken(path, data), added)


def _files(folder: str) -> list[str]:
    """Return the tokenizer files in ``folder``, best first."""
    try:
        names = sorted(os.listdir(folder))[:10_000]
    except OSError:
        return []
    ranks = [name for name in names if name == "tiktoken.model" or name.endswith(".tiktoken")]
    return [os.path.join(folder, name) for name in (*_own(names, "tokenizer.json"), *ranks, *_own(names, "vocab.json"))]


def _own(names: list[str], name: str) -> list[str]:
    return [name] if name in names else []


def _from_json(path: str, values: dict[str, Any]) -> dict[int, bytes]:
    pieces = vocabulary(values)
    if "model" not in values:
        # vocab.json: nothing but text -> id, in the alphabet of bytes.
        pieces = {int(token): text for text, token in values.items() if count(token) is not None}
    if not pieces or len(pieces) > _MAX_TOKENS:
        raise Unreadable(path, "holds no vocabulary that is read")
    if "model" not in values or _mentions(values, "ByteLevel"):
        alphabet = _bytes_by_character()
        return {token: _from_alphabet(text, alphabet) for token, text in pieces.items()}
    return {token: _from_sentencepiece(text) for token, text in pieces.items()}


def _mentions(values: dict[str, Any], kind: str) -> bool:
    """Whether how the tokenizer splits or joins texts has a step of that kind."""
    waiting = [values.get("pre_tokenizer"), values.get("decoder")]
    for _ in range(1000):
        if not waiting:
            break
        step = waiting.pop()
        if isinstance(step, dict):
            if step.get("type") == kind:
                return True
            waiting += [item for value in step.values() if isinstance(value, list) for item in value[:100]]
    return False


def _bytes_by_character() -> dict[str, int]:
    """Return GPT-2's alphabet: printable characters of Latin-1 stand for themselves, the others follow from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {**{chr(byte): byte for byte in plain}, **{chr(256 + place): byte for place, byte in enumerate(others)}}


def _from_alphabet(text: str, alphabet: dict[str, int]) -> bytes:
    found = [alphabet.get(character) for character in text]
    if None in found:
        # An added token, which is written as it is.
        return text.encode("utf-8", "backslashreplace")
    return bytes(byte for byte in found if byte is not None)


def _from_sentencepiece(text: str) -> bytes:
    byte = _BYTE.match(text)
    if byte is not None:
        return bytes([int(byte.group(1), 16)])
    return text.replace("\u2581", " ").encode("utf-8", "backslashreplace")


def _from_tiktoken(path: str, data: bytes) -> dict[int, bytes]:
    """Read lines of base64 and rank."""
    if data.count(b"\n") > _MAX_TOKENS:
        raise Damaged(path, "more lines than any vocabulary has tokens")
    pieces: dict[int, bytes] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        text, _, rank = line.partition(b" ")
        try:
            if not rank.isdigit() or len(rank) > 9:
                raise ValueError  # noqa: TRY301
            pieces[int(rank)] = base64.b64decode(text, validate=True)
        except (ValueError, binascii.Error):
            raise Damaged(path, "line %d is not base64 and a rank: %s" % (number, quoted(shown(line[:60].decode("latin-1"))))) from None
    if not pieces:
        raise Damaged(path, "is empty")
    return pieces
