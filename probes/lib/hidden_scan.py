"""Numbers out of samples of hidden states: sizes, faults, and the states of some tokens to be held against the target."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from .files import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import numpy as np
    from numpy.typing import NDArray

    from .matrix import Matrix
    from .samples import Sample

SHIFTS = (-1, 0, 1, 2)
_FIRST = 64
"""Tokens whose hash tells conversations apart."""
_AT_ONCE = 512
"""Vectors that are multiplied with a chunk of the head at the same time."""


@dataclass
class PartFacts:
    """One layer's states in one sample, or in all."""

    name: str
    dtype: str
    width: int
    sizes: NDArray[np.float32]
    """Root mean square of each token's state, [S]; NaN and infinity included."""
    largest: float
    """Largest magnitude of the finite numbers."""
    broken: int
    """Numbers that are NaN or infinite."""
    zero_columns: int
    """Columns that are zero for every token."""


@dataclass
class SampleFacts:
    """What one file holds."""

    path: str
    kind: str
    reason: str
    tokens: int
    problems: tuple[str, ...]
    parts: list[PartFacts]
    first_tokens: str | None
    """Hash of the first 64 tokens; None where there are none."""
    mask_share: float | None
    """Share of tokens that count in the loss; None where that is not known."""
    first_counted: int | None
    """The first token (its id) that counts."""


@dataclass
class Picked:
    """States of some tokens of all samples, and the tokens around them."""

    states: dict[str, list[NDArray[np.float32]]] = field(default_factory=dict)
    """Part -> [tokens, width] of each sample."""
    around: list[NDArray[np.int64]] = field(default_factory=list)
    """Tokens at t - 1, t, t + 1, t + 2 of each sample, [tokens, 4]."""

    def tokens(self) -> int:
        """Return how many tokens were picked."""
        return sum(len(part) for part in self.around)


def scan(sample: Sample, mask: NDArray[np.bool_] | None) -> SampleFacts:
    """Return the facts of a sample, reading all of it once in pieces; ``mask`` is the sample's own or the dataset's."""
    import numpy as np

    parts: list[PartFacts] = []
    for source in sample.sources:
        members = [part for part in sample.parts if part.source is source]
        sizes = np.empty((len(members), source.rows), np.float32)
        largest, broken = np.zeros(len(members)), np.zeros(len(members), np.int64)
        filled = [np.zeros(part.width, bool) for part in members]
        for start, rows in source.chunks():
            for index, part in enumerate(members):
                block = rows[:, part.first : part.first + part.width]
                with np.errstate(all="ignore"):
                    sizes[index, start : start + len(rows)] = np.sqrt(np.einsum("ij,ij->i", block, block) / part.width)
                    high = np.abs(block).max(axis=0)
                filled[index] |= high != 0
                if np.isfinite(high).all():
                    largest[index] = max(largest[index], float(high.max()))
                else:
                    finite = np.isfinite(block)
                    broken[index] += int(block.size - finite.sum())
                    largest[index] = max(largest[index], float(np.abs(block[finite]).max(initial=0.0)))
        for index, part in enumerate(members):
            parts.append(
                PartFacts(
                    part.name, source.dtype, part.width, sizes[index], float(largest[index]), int(broken[index]),
                    int((~filled[index]).sum()),
                )
            )  # fmt: skip
    parts.sort(key=lambda part: [one.name for one in sample.parts].index(part.name))
    fits = mask is not None and sample.ids is not None and len(mask) == len(sample.ids)
    counted = np.flatnonzero(mask) if mask is not None else np.empty(0, np.int64)
    return SampleFacts(
        path=shown(sample.path),
        kind=sample.kind,
        reason=sample.reason,
        tokens=sample.tokens,
        problems=tuple(sample.problems),
        parts=parts,
        first_tokens=None if sample.ids is None else fingerprint(sample.ids),
        mask_share=None if mask is None else float(mask.mean()),
        first_counted=int(sample.ids[counted[0]]) if fits and len(counted) and sample.ids is not None else None,
    )


def fingerprint(ids: NDArray[np.int64]) -> str:
    """Return a hash of the first tokens."""
    return hashlib.sha256(ids[:_FIRST].astype("<i8").tobytes()).hexdigest()[:16]


def pick(sample: Sample, mask: NDArray[np.bool_] | None, count: int, random: np.random.Generator, into: Picked) -> None:
    """Add the states of at most ``count`` tokens after which a token follows that counts."""
    import numpy as np

    ids = sample.ids
    if ids is None or len(ids) != sample.tokens or sample.tokens < 5:
        return
    # Room for the tokens around; the first token's state is unlike all others.
    usable = np.arange(2, sample.tokens - 2)
    if mask is not None and len(mask) == len(ids) and mask[usable + 1].any():
        usable = usable[mask[usable + 1]]
    chosen = np.sort(random.choice(usable, min(count, len(usable)), replace=False))
    into.around.append(np.stack([ids[chosen + shift] for shift in SHIFTS], 1))
    for part in sample.parts:
        into.states.setdefault(part.name, []).append(part.take(chosen))


def best_tokens(head: Matrix, vectors: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the row of the head that each vector [N, hidden] scores highest; the head is read once and in pieces."""
    import numpy as np

    highest = np.full(len(vectors), -np.inf, np.float32)
    choice = np.zeros(len(vectors), np.int64)
    step = max(1, head.chunk_rows // 2)
    for start in range(0, head.rows, step):
        rows = head.numbers(start, min(head.rows, start + step)).astype(np.float32, copy=False)
        for begin in range(0, len(vectors), _AT_ONCE):
            with np.errstate(all="ignore"):
                scores = vectors[begin : begin + _AT_ONCE] @ rows.T
            index = scores.argmax(axis=1)
            value = scores[np.arange(len(scores)), index]
            better = value > highest[begin : begin + _AT_ONCE]
            highest[begin : begin + _AT_ONCE][better] = value[better]
            choice[begin : begin + _AT_ONCE][better] = index[better] + start
    return choice


def normed(states: NDArray[np.float32], weight: NDArray[Any], eps: float) -> NDArray[np.float32]:
    """Return ``states`` after the norm with that weight."""
    import numpy as np

    size = np.sqrt(np.mean(np.square(states, dtype=np.float64), axis=1, keepdims=True) + eps)
    result: NDArray[np.float32] = (states / size * weight).astype(np.float32)
    return result


def cosines(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    """Return the cosine of each row of ``a`` with that of ``b``; 0 where one is zero."""
    import numpy as np

    a, b = a.astype(np.float64), b.astype(np.float64)
    sizes = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    with np.errstate(all="ignore"):
        result: NDArray[np.float64] = np.nan_to_num(np.where(sizes > 0, (a * b).sum(axis=1) / sizes, 0.0))
    return result
