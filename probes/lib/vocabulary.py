"""A checkpoint's draft vocabulary as it is stored: d2t, t2d, and what config.json and lm_head say of their sizes."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from . import config as configs
from .checkpoint import Checkpoint, open_array, open_checkpoint
from .files import Absent, Damaged, Unreadable, quoted, shown
from .locate import META
from .roles import role_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from .files import Meter

MAX_TOKENS = 1 << 24
"""No vocabulary is larger: 64 times that of today's large ones."""
_COUNT_NAMES = ("freq", "counts", "token_freq")
_NUMBERS = ("int", "uint", "float", "bfloat", "bool")


@dataclass(frozen=True)
class Stored:
    """One side's mapping, not yet interpreted."""

    kind: str
    kind_reason: str
    d2t_name: str | None
    """Full name of the tensor; None where there is none, and d2t stands for what servers then assume: zeros."""
    d2t_dtype: str | None
    d2t: NDArray[Any]
    """As stored, one number a draft row."""
    t2d_dtype: str | None
    t2d: NDArray[Any] | None
    """As stored, one value a target token; None where there is none."""
    t2d_problem: str | None
    """Why t2d is there and cannot be used."""
    config: configs.Config | None
    config_problem: str | None
    lm_head_rows: int | None
    """Rows of the drafter's output head; None where that is not in a file that was open anyway."""
    claimed: str | None = None
    """The encoding of d2t where the format says it (``absolute``: a list of selected token ids); None where none does."""
    beside: str | None = None
    """File name of the mapping where it does not come from the weights but from a file of the same checkpoint."""


def read_stored(path: str, meter: Meter) -> Stored:
    """Return the mapping at ``path``.

    Raises:
        Absent: there is no mapping in it.
        Unreadable: no such path, or no kind that is read.
        Damaged: the file is broken, or what it calls d2t is no vector of numbers.
    """
    with open_checkpoint(path, meter) as checkpoint:
        config, config_problem = configs.read(checkpoint.folder, meter)
        names = {role: _named(checkpoint, role) for role in ("d2t", "ids", "t2d", "lm_head")}
        if not names["d2t"] and not names["ids"]:
            meta = _meta_beside(checkpoint)
            if meta is not None:
                with open_checkpoint(meta, meter) as other:
                    found = _stored(other, {role: _named(other, role) for role in names}, config, config_problem)
                    found = replace(found, lm_head_rows=_head_rows(checkpoint, names["lm_head"]))
                return replace(found, kind=checkpoint.kind, kind_reason="%s; its mapping is in %s beside it"
                               % (checkpoint.reason, os.path.basename(meta)), beside=os.path.basename(meta))  # fmt: skip
        return _stored(checkpoint, names, config, config_problem)


def _stored(
    checkpoint: Checkpoint, names: dict[str, list[str]], config: configs.Config | None, config_problem: str | None
) -> Stored:
    """Return the mapping in ``checkpoint``, whose tensors have these roles."""
    role = "ids" if names["ids"] and not names["d2t"] else "d2t"
    name = names[role][0] if names[role] else None
    if name is None:
        head = _head_rows(checkpoint, names["lm_head"])
        dtype, d2t = None, _implied(checkpoint, config, head)
    else:
        dtype, d2t = checkpoint.entry(name).dtype, _vector(checkpoint, names[role])
        # After d2t: the file that holds it is open now.
        head = _head_rows(checkpoint, names["lm_head"])
    t2d_dtype, t2d, t2d_problem = _optional_vector(checkpoint, names["t2d"])
    return Stored(
        checkpoint.kind, checkpoint.reason, name, dtype, d2t, t2d_dtype, t2d, t2d_problem, config, config_problem, head,
        "absolute" if role == "ids" else None,
    )  # fmt: skip


def _meta_beside(checkpoint: Checkpoint) -> str | None:
    """Return the path of NeMo's list of token ids beside weights without a mapping; None where there is none."""
    if not checkpoint.kind.startswith(("safetensors", "torch")):
        return None
    places = [os.path.join(checkpoint.folder, name) for name in META]
    return next((place for place in places if os.path.lexists(place)), None)


def read_counts(path: str, meter: Meter) -> tuple[NDArray[Any], str]:
    """Return (token counts, one per target token; the name of the array) from a file of any kind that is read.

    speculators writes them as a dict of counts by token id (``token_freq.pt``).

    Raises:
        Unreadable: not such a file, or no vector of counts in it.
        Damaged: broken, or not counts: negative, infinite.
    """
    import numpy as np

    if os.path.isdir(path):
        raise Unreadable(path, "is a folder", "give the file with the counts")
    plain = path.lower().endswith(".npy")
    with open_array(path, "counts", meter) if plain else open_checkpoint(path, meter) as checkpoint:
        name = _counts_name(checkpoint, path)
        counts = _vector(checkpoint, [name])
    if counts.dtype.kind == "f" and not np.isfinite(counts).all():
        raise Damaged(path, "%s holds infinities or NaN" % quoted(name))
    if counts.size and counts.min() < 0:
        raise Damaged(path, "%s holds negative counts" % quoted(name))
    return counts, name


def counts_for(path: str | None, mapping: str | None, meter: Meter) -> tuple[NDArray[Any] | None, str | None]:
    """Return (token counts, the name of their array); both None where there are none.

    Args:
        path: where the counts are, as the user says.
        mapping: without that, counts are taken from the mapping's own file, where it has some.
        meter: told of every byte.

    Raises:
        Unreadable, Damaged: as :func:`read_counts` does.
    """
    if path is None and mapping is not None and not os.path.isdir(mapping):
        with open_checkpoint(mapping, meter) as checkpoint:
            if any(name in _COUNT_NAMES for name in checkpoint.names()):
                path = mapping
    if path is None:
        return None, None
    counts, name = read_counts(path, meter)
    return counts, shown(name)


def _counts_name(checkpoint: Checkpoint, path: str) -> str:
    names = checkpoint.names()
    for wanted in _COUNT_NAMES:
        if wanted in names:
            return wanted
    for name in names[:1000]:
        entry = checkpoint.entry(name)
        whole = entry.dtype.startswith(("int", "uint"))
        if whole and len(entry.shape) == 1 and role_of(name) not in ("d2t", "t2d", "ids"):
            return name
    raise Unreadable(path, "holds no vector of counts", "one whole number per target token, named freq or counts")


def _named(checkpoint: Checkpoint, role: str) -> list[str]:
    return sorted((name for name in checkpoint.names() if role_of(name) == role), key=lambda name: (len(name), name))


def _vector(checkpoint: Checkpoint, names: list[str]) -> NDArray[Any]:
    """Return the tensor that all of ``names`` stand for; more than one must hold the same."""
    import numpy as np

    vectors = []
    for name in names[:4]:
        entry = checkpoint.entry(name)
        if len(entry.shape) != 1 or entry.elements > MAX_TOKENS:
            raise Damaged(checkpoint.path, "%s has the shape %s, not one of a mapping" % (quoted(name), list(entry.shape)))
        if not entry.dtype.startswith(_NUMBERS):
            raise Damaged(checkpoint.path, "%s is stored as %s, which cannot hold it" % (quoted(name), quoted(entry.dtype)))
        vectors.append(checkpoint.read(name))
    if any(not np.array_equal(vectors[0], other) for other in vectors[1:]):
        raise Damaged(checkpoint.path, "%s hold different values" % " and ".join(quoted(name) for name in names[:4]))
    return vectors[0]


def _optional_vector(checkpoint: Checkpoint, names: list[str]) -> tuple[str | None, NDArray[Any] | None, str | None]:
    """Return (dtype, values, why there are none although the tensor is there)."""
    if not names:
        return None, None, None
    try:
        return checkpoint.entry(names[0]).dtype, _vector(checkpoint, names), None
    except (Damaged, Unreadable) as error:
        return None, None, error.reason


def _head_rows(checkpoint: Checkpoint, names: list[str]) -> int | None:
    entry = checkpoint.peek(names[0]) if names else None
    return entry.shape[0] if entry is not None and len(entry.shape) == 2 else None


def _implied(checkpoint: Checkpoint, config: configs.Config | None, head: int | None) -> NDArray[Any]:
    """Return the zeros that servers assume where a checkpoint has no d2t; as many as it has draft rows."""
    import numpy as np

    rows = (config.draft_vocab_size or config.target_vocab_size) if config else None
    if checkpoint.kind in ("npy", "npz") or rows is None or head not in (None, rows) or rows > MAX_TOKENS:
        similar = [name for name in checkpoint.names() if "d2t" in name or "t2d" in name]
        reason = "holds no d2t" + (", only %s" % ", ".join(quoted(name) for name in similar[:4]) if similar else "")
        beside = os.path.join(checkpoint.folder, "d2t.npy")
        hint = "d2t.npy lies beside it: give that" if os.path.lexists(beside) else None
        raise Absent(checkpoint.path, reason, hint or "give the drafter's checkpoint, or the mapping it was trained with")
    return np.zeros(rows, np.int64)
