"""Mappings that lie about near a drafter: trainers pick such files up by themselves, whatever checkpoint they start from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import islice

from .files import Damaged, Unreadable, shown
from .locate import META
from .sides import read_side, understand

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .files import Meter
    from .mappings import Ids

_NAMES = ("d2t.npy", "vocab_mapping.pt", "cache.pt", "d2t.pt", *META)
_FOLDERS = ("", "cache", "cache/vocab_mapping", "vocab_mapping", "draft_vocab_cache", "data")
_MAX_FILES = 40
_MAX_ENTRIES = 2000


@dataclass(frozen=True)
class Artefact:
    """One file that a trainer would take its mapping from."""

    path: str
    modified: float
    """Seconds since 1970."""
    rows: int | None
    """Draft rows; None when it is not understood."""
    same: bool | None
    """Whether it gives every row the drafter's token; None when one of the two is not understood."""
    matches: int | None
    """Rows to which both give the same token."""
    note: str
    """Why it is not understood; empty when it is."""


def find_artefacts(folders: list[str], own: set[str]) -> list[str]:
    """Return the paths of mappings in ``folders`` and where trainers keep theirs below them; ``own`` are left out."""
    found: dict[str, None] = {}
    for folder in folders:
        for below in _FOLDERS:
            place = os.path.join(folder, below) if below else folder
            for name in _entries(place):
                mapping = name in _NAMES or (name.startswith("d2t-") and name.endswith(".npy"))
                # SpecForge names its own after a hash.
                hashed = below.endswith("vocab_mapping") and name.endswith(".pt")
                path = os.path.join(place, name)
                if (mapping or hashed) and os.path.realpath(path) not in own:
                    found[os.path.realpath(path)] = None
    return list(islice(found, _MAX_FILES))


def read_artefact(path: str, ids: Ids | None, vocab: int | None, meter: Meter) -> Artefact:
    """Return what the mapping at ``path`` says, held against the drafter's ``ids``."""
    try:
        modified = os.stat(path).st_mtime
        side = read_side("a mapping", path)
    except OSError as error:
        return Artefact(shown(path), 0.0, None, None, None, str(error))
    except (Unreadable, Damaged) as error:
        return Artefact(shown(path), modified, None, None, None, error.reason)
    meter.bytes += side.meter.bytes
    understand(side, vocab, None)
    if side.ids is None:
        return Artefact(shown(path), modified, side.rows, None, None, side.reason)
    if ids is None:
        return Artefact(shown(path), modified, side.rows, None, None, "")
    count = min(len(ids), len(side.ids))
    matches = int((ids[:count] == side.ids[:count]).sum())
    return Artefact(shown(path), modified, side.rows, matches == len(ids) == len(side.ids), matches, "")


def _entries(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in islice(entries, _MAX_ENTRIES))
    except OSError:
        return []
