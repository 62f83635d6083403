"""The one place where bytes and strings from elsewhere become something a terminal may show."""

from __future__ import annotations

import unicodedata

_JOINERS = frozenset("\u200c\u200d")
"""Invisible, and part of ordinary text: emoji sequences, Persian, Indic scripts."""


def _escaped(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _hidden(character: str) -> bool:
    # Cc: C0, DEL, C1. Cs: lone surrogates. Cf: bidirectional controls, zero-width and tag characters.
    # Zl, Zp: separators that some terminals and editors break lines at.
    return character not in _JOINERS and unicodedata.category(character) in {"Cc", "Cf", "Cs", "Zl", "Zp"}


def safe(value: str | bytes, *, limit: int | None = None, keep_newlines: bool = False) -> str:
    r"""Return ``value`` with everything that could steer a terminal made visible.

    Control characters (C0, DEL, C1), bidirectional overrides, invisible separators and lone surrogates become
    escapes such as ``\x1b``; bytes that are not UTF-8 become ``\xNN``. Tabs become a space. With
    ``keep_newlines`` the newline passes. ``limit`` bounds the returned characters and says how many were cut.
    """
    text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
    cut = 0
    if limit is not None and len(text) > limit:
        cut = len(text) - limit
        text = text[:limit]
    if not (text.isascii() and text.isprintable()):
        text = "".join(
            " " if character == "\t" else
            character if character == "\n" and keep_newlines else
            _escaped(character) if _hidden(character) else character
            for character in text
        )
    return f"{text}… ({cut} more)" if cut else text


def last_lines(output: bytes, *, count: int = 5, limit: int = 300) -> list[str]:
    """Return the last ``count`` non-empty lines of ``output``, each escaped and at most ``limit`` characters.

    A carriage return counts as the end of a line, so a progress bar shows its last state only.
    """
    tail = output[-64 * 1024 :]
    lines = [line.rsplit(b"\r", 1)[-1] for line in tail.replace(b"\r\n", b"\n").split(b"\n")]
    return [safe(line, limit=limit) for line in lines if line.strip()][-count:]
