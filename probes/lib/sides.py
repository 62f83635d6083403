"""One checkpoint's draft vocabulary, read and understood as far as it can be: a side of a comparison."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from .files import Damaged, Meter, Unreadable, shown
from .mappings import Mapping, understand_d2t, understand_t2d
from .vocabulary import read_stored

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .mappings import Ids, Membership
    from .vocabulary import Stored


@dataclass
class Side:
    """What is known of one side; fields are filled as more becomes known."""

    name: str
    """What findings call it: ``A``."""
    path: str
    """Absolute path on the host."""
    meter: Meter = field(default_factory=Meter)
    stored: Stored | None = None
    """None when the files are damaged."""
    damage: str | None = None
    """What is damaged."""
    t2d: Membership | None = None
    t2d_problem: str | None = None
    """Why t2d is there and means nothing."""
    vocab: int | None = None
    """Size of the target vocabulary by this side's own files; None where they do not tell."""
    mapping: Mapping | None = None
    """Set by :func:`understand`."""

    @property
    def ids(self) -> Ids | None:
        """Target token of each draft row; None where that is not known."""
        return self.mapping.ids if self.mapping else None

    @property
    def option(self) -> str:
        """The option that says what its d2t holds: a comparison has one for each side."""
        return "--encoding-%s" % self.name.lower() if len(self.name) == 1 else "--encoding"

    @property
    def encoding(self) -> str:
        """See :class:`mappings.Mapping`; ``corrupt`` also when the files are damaged."""
        return self.mapping.encoding if self.mapping else "corrupt"

    @property
    def reason(self) -> str:
        """How the encoding was decided."""
        return self.mapping.reason if self.mapping else self.damage or ""

    @property
    def rows(self) -> int | None:
        """Draft rows; None when the files are damaged."""
        return len(self.stored.d2t) if self.stored else None


def read_side(name: str, path: str) -> Side:
    """Read the mapping at ``path``, a file or folder; damage is noted in the side.

    Raises:
        Unreadable: there is nothing to read.
    """
    side = Side(name, shown(os.path.abspath(path)))
    try:
        stored = read_stored(path, side.meter)
    except Damaged as error:
        side.damage = str(error)
        return side
    side.stored = stored
    side.t2d_problem = stored.t2d_problem
    if stored.t2d is not None:
        try:
            side.t2d = understand_t2d(stored.t2d)
        except ValueError as error:
            side.t2d_problem = str(error)
    if side.t2d is not None and len(side.t2d.values) < len(stored.d2t):
        side.t2d_problem = "%d tokens for %d draft rows" % (len(side.t2d.values), len(stored.d2t))
        side.t2d = None
    side.vocab = len(side.t2d.values) if side.t2d is not None else _configured_vocab(stored)
    return side


def understand(side: Side, others_vocab: int | None, claimed: str | None) -> None:
    """Find out what d2t of ``side`` means.

    Args:
        side: as :func:`read_side` returned it.
        others_vocab: size of the target vocabulary to go by where the side's own files do not tell.
        claimed: ``offset`` or ``absolute`` when the user says so.
    """
    if side.stored is None:
        return
    vocab = others_vocab if side.vocab is None else side.vocab
    mapping = understand_d2t(side.stored.d2t, vocab, side.t2d, claimed or side.stored.claimed)
    notes = [mapping.reason]
    if claimed is None and side.stored.claimed is not None:
        notes = ["%s holds token ids by its format" % shown(side.stored.d2t_name or "")]
        notes += [] if mapping.ids is not None else [mapping.reason]
    if side.stored.d2t_name is None:
        notes.append("there is no d2t; servers then assume zeros")
    if side.vocab is None and vocab is not None:
        notes.append("the vocabulary size %d is the other side's" % vocab)
    side.mapping = Mapping(mapping.encoding, mapping.ids, "; ".join(notes))


def sound_ids(side: Side, hint: str) -> Ids:
    """Return the tokens of an understood side that nothing contradicts.

    Args:
        side: as :func:`understand` left it.
        hint: what to do where it is contradicted.

    Raises:
        Unreadable: for every other side, with the reason.
    """
    if side.stored is None:
        raise Unreadable(side.path, "%s cannot be trusted: %s" % (side.name, side.damage), "copy it again from the original")
    if side.ids is None:
        raise Unreadable(side.path, "d2t is %s: %s" % (side.encoding, side.reason), hint)
    if side.t2d is not None and not side.t2d.agrees(side.ids):
        told = "t2d and d2t of %s stand for different tokens; nobody knows which of them its head follows" % side.name
        raise Unreadable(side.path, told, hint)
    return side.ids


def _configured_vocab(stored: Stored) -> int | None:
    if stored.config is None:
        return None
    size = stored.config.target_vocab_size
    # speculators once wrote the size of the draft vocabulary where that of the target belongs.
    if stored.config.dialect == "speculators" and size == len(stored.d2t) and stored.d2t.any():
        return None
    return size
