from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from probes.lib.files import Damaged, Meter, Unreadable
from probes.lib.token_texts import _bytes_by_character, find_texts, read_texts


def texts(path: Path, *tokens: int) -> list[str | None]:
    found = read_texts(str(path), Meter())
    return [found.text(token) for token in tokens]


def write_json(folder: Path, name: str = "tokenizer.json", **values: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(values), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "steps",
    [
        {"pre_tokenizer": {"type": "ByteLevel"}},
        {"decoder": {"type": "ByteLevel"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split"}, {"type": "ByteLevel"}]}},
    ],
)
def test_the_alphabet_of_bytes(tmp_path: Path, steps: dict[str, Any]) -> None:
    # As GPT-2 writes them: a space, a newline, é in two bytes, the first byte of a longer character.
    vocab = {"Ġthe": 0, "Ċ": 1, "Ã©": 2, "ä": 3, "!": 4, "ł": 5}
    write_json(tmp_path / "t", model={"type": "BPE", "vocab": vocab, "merges": []}, **steps)
    assert texts(tmp_path / "t", 0, 1, 2, 3, 4, 5, 6) == [" the", "\n", "é", "\\xe4", "!", "\\xa0", None]


def test_every_byte_has_a_character() -> None:
    alphabet = _bytes_by_character()
    assert sorted(alphabet.values()) == list(range(256))
    assert len(alphabet) == 256
    assert (alphabet["Ġ"], alphabet["Ċ"], alphabet["A"], alphabet["ÿ"], alphabet["Ń"]) == (32, 10, 65, 255, 173)


def test_sentencepieces(tmp_path: Path) -> None:
    write_json(tmp_path / "t", model={"type": "BPE", "vocab": {"▁the": 0, "<0xE4>": 1, "▁": 2, "é": 3}})
    assert texts(tmp_path / "t", 0, 1, 2, 3) == [" the", "\\xe4", " ", "é"]
    write_json(tmp_path / "u", model={"type": "Unigram", "vocab": [["<unk>", 0.0], ["▁of", -3.5]]})
    assert texts(tmp_path / "u", 0, 1, 2) == ["<unk>", " of", None]


def test_added_tokens_come_first(tmp_path: Path) -> None:
    added = [{"id": 7, "content": "<|im_end|>"}, {"id": 0, "content": "[BOS]"}, {"id": "x"}, 3]
    write_json(tmp_path / "t", model={"vocab": {"Ġa": 0, "b": 1}}, decoder={"type": "ByteLevel"}, added_tokens=added)
    assert texts(tmp_path / "t", 0, 1, 7) == ["[BOS]", "b", "<|im_end|>"]


def test_tiktoken_with_the_names_of_its_special_tokens(tmp_path: Path) -> None:
    lines = [b"%s %d" % (base64.b64encode(piece), rank) for rank, piece in enumerate([b" the", b"\xe4\xbd", "é".encode()])]
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    write_json(tmp_path, "tokenizer_config.json", added_tokens_decoder={"9": {"content": "[EOS]"}})
    assert texts(tmp_path, 0, 1, 2, 3, 9) == [" the", "\\xe4\\xbd", "é", None, "[EOS]"]
    assert texts(tmp_path / "tiktoken.model", 2, 9) == ["é", "[EOS]"]
    (tmp_path / "tiktoken.model").rename(tmp_path / "qwen.tiktoken")
    assert texts(tmp_path, 0) == [" the"]


def test_vocab_json_alone(tmp_path: Path) -> None:
    vocab = {"Ġthe": 0, "Ċ": 1}
    write_json(tmp_path / "t", "vocab.json", **vocab)
    assert texts(tmp_path / "t", 0, 1) == [" the", "\n"]


def test_long_and_odd_texts_are_cut_and_escaped(tmp_path: Path) -> None:
    vocab = {"x" * 500: 0, "a\ud800b": 1}
    write_json(tmp_path / "t", model={"vocab": vocab}, added_tokens=[{"id": 2, "content": "\udc80"}])
    long, odd, added = texts(tmp_path / "t", 0, 1, 2)
    assert long == "x" * 80
    assert (odd, added) == ("a\\ud800b", "\\udc80")


@pytest.mark.parametrize(
    ("name", "content", "error", "reason"),
    [
        ("tokenizer.json", b"{", Damaged, "not JSON"),
        ("tokenizer.json", b'{"model": {"vocab": 3}}', Unreadable, "no vocabulary"),
        ("tokenizer.json", b"[" * 100_000, Damaged, "nested|not JSON"),
        ("tiktoken.model", b"\x0a\x09sentencepiece", Damaged, "line 2 is not base64"),
        ("tiktoken.model", b"", Damaged, "empty"),
        ("a.tiktoken", b"aGk= -1\n", Damaged, "line 1"),
        ("a.tiktoken", b"aGk= 9999999999\n", Damaged, "line 1"),
    ],
)
def test_broken_tokenizers(tmp_path: Path, name: str, content: bytes, error: type[Exception], reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=reason):
        read_texts(str(tmp_path), Meter())
    assert find_texts([str(tmp_path)], Meter()) is None


def test_the_first_tokenizer_that_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "tokenizer.json").write_text("{")
    write_json(tmp_path / "b", model={"vocab": {"x": 0}})
    found = find_texts([str(tmp_path / name) for name in ("none", "a", "b")], Meter())
    assert found is not None
    assert found.path == str(tmp_path / "b" / "tokenizer.json")
    with pytest.raises(Unreadable, match="holds no tokenizer"):
        read_texts(str(tmp_path), Meter())


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    assert find_texts([str(tmp_path)], Meter()) is None
