"""Saved output of a program as text, whichever shell saved it."""

from __future__ import annotations

_WIDE = (b"\xff\xfe", b"\xfe\xff")


def decode(data: bytes) -> str:
    """Return ``data`` as text with plain line ends and no byte order mark.

    Windows PowerShell saves what a program prints as UTF-16, and with CR LF; an editor may put a mark before UTF-8.
    Bytes that make no sense become U+FFFD.
    """
    text = data.decode("utf-16" if data[:2] in _WIDE else "utf-8", "replace")
    return text.lstrip("\ufeff").replace("\r\n", "\n")
