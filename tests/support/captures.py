"""Real outputs of other people's tools, kept beside the checkout: tests read them where they are, nothing copies them."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "shared" / "captures"
PRESENT = FOLDER.is_dir()
needs_captures = pytest.mark.skipif(not PRESENT, reason="the captures of real tools are not beside this checkout")


def names(pattern: str = "*") -> list[str]:
    """Return the captures that fit a pattern, relative to their folder; the list of their sources is none."""
    if not PRESENT:
        return []
    found = (path for path in FOLDER.rglob(pattern) if path.is_file() and path.name != "sources.tsv")
    return sorted(path.relative_to(FOLDER).as_posix() for path in found)


def read(name: str) -> str:
    """Return one as it is, line ends included."""
    return (FOLDER / name).read_bytes().decode("utf-8", "replace")
