"""Which target tokens the rows of a drafter's head stand for, asked of the weights themselves instead of d2t.

Three kinds of evidence, from strong to weak: a row equals the target's row bit for bit (heads copied from the target); it
points the same way (heads trained from such a copy); or it lies to other rows of the head as the target's rows lie to one
another. The last one holds in any basis, so it also works for heads that were trained from random numbers, and for a
drafter that is narrower than its target.

Hypotheses are told apart only by rows to which they give different tokens: two mappings that agree on most rows would
otherwise both look right.
"""

from __future__ import annotations

from dataclasses import dataclass

from .floats import cast, same_rows

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import numpy as np
    from numpy.typing import NDArray

    from .mappings import Ids
    from .matrix import Matrix

PER_PAIR = 128
"""Rows that are sampled to tell two hypotheses apart."""
RANDOM_ROWS = 512
"""Rows that are sampled besides, from all of the head."""
ANCHORS = 768
"""Rows that the sampled ones are compared with for the third kind of evidence."""
_LEAST = {"exact": 0.02, "cosine": 0.1, "similarity": 0.05}
"""Mean score that the best hypothesis must reach for a kind of evidence to be used; wrong ones are at 0."""
_MARGIN = {"exact": 0.1, "cosine": 0.1, "similarity": 0.02}
MAJORITY = 0.5
"""Share of the rows that must fit before a head is said to follow a mapping."""
_DEVIATIONS = 5.0
"""Standard errors that the mean difference of two hypotheses must exceed."""


@dataclass(frozen=True)
class Hypothesis:
    """One guess at what the rows of a head stand for."""

    name: str
    meaning: str
    ids: Ids
    """Target token of each row; -1 where the guess says nothing."""


@dataclass(frozen=True)
class Score:
    """How well a guess fits the sampled rows; None where it could not be measured."""

    name: str
    rows: int
    """Sampled rows to which it gives a token."""
    exact: float | None
    """Share of rows that equal the target's bit for bit, after casting the target's to the head's type; 0 to 1."""
    cosine: float | None
    """Mean cosine of rows with the target's, both without the mean row; -1 to 1."""
    similarity: float | None
    """Mean correlation of a row's cosines to other rows with those of the target's rows; -1 to 1."""
    agreeing: float | None
    """Share of randomly chosen rows that fit on their own better than any unfitting row would; 0 to 1."""


@dataclass(frozen=True)
class Judgement:
    """What came of comparing the guesses."""

    scores: tuple[Score, ...]
    follows: str | None
    """Name of the guess that the head follows; None when none stands out."""
    method: str | None
    """``exact``, ``cosine`` or ``similarity``: the evidence that decided or failed to; None when all were at chance."""
    margin: float | None
    """By how much the best guess beats the next best on the rows where the two differ; None with a single guess."""
    runner_up: str | None
    rows_compared: int
    """Rows on which the best and the next best differ, as far as they were sampled."""


class _Sample:
    """Rows of the head that are looked at, and those that they are compared with."""

    def __init__(self, head: Matrix, guesses: list[Hypothesis], seed: int) -> None:
        import numpy as np

        random = np.random.default_rng(seed)
        every = np.arange(head.rows)

        def some(rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
            return random.choice(rows, count, replace=False) if len(rows) > count else rows

        self.random_rows = some(every, RANDOM_ROWS)
        chosen = [self.random_rows]
        for index, one in enumerate(guesses):
            for other in guesses[index + 1 :]:
                chosen.append(some(np.flatnonzero(one.ids != other.ids), PER_PAIR))
        rows = np.unique(np.concatenate(chosen))
        self.bits = head.take_bits(rows)
        numbers = _numbers(self.bits, head.dtype)
        sound = np.isfinite(numbers).all(axis=1) & numbers.any(axis=1)
        self.rows, self.bits = rows[sound], self.bits[sound]
        unseen = np.setdiff1d(every, rows)
        # Of a small head all rows are looked at; then they are compared with one another.
        anchors = np.sort(some(unseen if len(unseen) >= 64 else every, ANCHORS))
        others = _numbers(head.take_bits(anchors), head.dtype)
        sound_anchors = np.isfinite(others).all(axis=1) & others.any(axis=1)
        self.anchors = anchors[sound_anchors]
        self.mean = others[sound_anchors].mean(axis=0) if sound_anchors.any() else 0
        self.units = _units(numbers[sound] - self.mean)
        self.gram = self.units @ _units(others[sound_anchors] - self.mean).T
        self.distinct = self.rows[:, None] != self.anchors[None, :]


def judge(head: Matrix, target: Matrix, guesses: list[Hypothesis], seed: int = 0) -> Judgement:
    """Return which of ``guesses`` the rows of ``head`` follow; equal ones must have been merged.

    Reads some thousand rows of both matrices.

    Raises:
        Damaged, Unreadable: a file cannot be read.
    """
    import numpy as np

    sample = _Sample(head, guesses, seed)
    measured = {guess.name: _measure(sample, head, target, guess.ids) for guess in guesses}
    noise = _noise(sample, head, target, guesses, seed)
    scores = tuple(_score(sample, guess, measured[guess.name], noise) for guess in guesses)
    best: tuple[str, str] | None = None
    for method in ("exact", "cosine", "similarity"):
        means = {score.name: getattr(score, method) for score in scores if getattr(score, method) is not None}
        if means and max(means.values()) >= _LEAST[method]:
            best = (max(means, key=lambda name: means[name]), method)
            break
    if best is None:
        return Judgement(scores, None, None, None, None, 0)
    name, method = best
    ids = {guess.name: guess.ids[sample.rows] for guess in guesses}
    values = {guess.name: np.nan_to_num(measured[guess.name][method]) for guess in guesses}
    fits = next(score.exact if method == "exact" else score.agreeing for score in scores if score.name == name)
    # Of a mapping that changed, a part of the rows often kept their tokens.
    follows: str | None = name if method == "similarity" or (fits or 0.0) >= MAJORITY else None
    runner_up, margin, compared = None, None, 0
    for other in sorted(values, key=lambda other: -float(values[other].mean())):
        differing = ids[name] != ids[other]
        if other == name or not differing.any():
            continue
        difference = values[name][differing] - values[other][differing]
        lead, error = float(difference.mean()), float(difference.std()) / len(difference) ** 0.5
        if runner_up is None:
            runner_up, margin, compared = other, lead, int(differing.sum())
        if lead < _MARGIN[method] or lead < _DEVIATIONS * error:
            follows = None
    return Judgement(scores, follows, method, margin, runner_up, compared)


def exact_rows(head: Matrix, target: Matrix, ids: Ids) -> NDArray[np.bool_]:
    """Return for every row of ``head`` whether it is the target's row ``ids[row]``, bit for bit after casting that one.

    Rows without a token (-1) or beyond the target count as different. Reads all of the head, in pieces.
    """
    import numpy as np

    equal = np.zeros(head.rows, bool)
    if head.columns != target.columns:
        return equal
    for start, bits in head.chunks():
        wanted = ids[start : start + len(bits)]
        known = np.flatnonzero((wanted >= 0) & (wanted < target.rows))
        theirs = cast(target.take_bits(wanted[known]), target.dtype, head.dtype)
        equal[start + known] = same_rows(bits[known], theirs)
    return equal


def find_copies(head: Matrix, target: Matrix) -> Ids:
    """Return for every row of ``head`` which row of the target it is a copy of, -1 where it is none.

    Rows are recognised by their first numbers: reads both matrices once, in pieces. A match is as good as certain, and
    :func:`exact_rows` makes it so.
    """
    import numpy as np

    found = np.full(head.rows, -1, np.int64)
    if head.columns != target.columns:
        return found
    keys = np.concatenate([row_keys(bits) for _, bits in head.chunks()] or [np.zeros(0, np.uint64)])
    for start, bits in target.chunks():
        theirs = row_keys(cast(bits[:, :_KEY_COLUMNS], target.dtype, head.dtype))
        order = np.argsort(theirs, kind="stable")
        place = np.minimum(np.searchsorted(theirs, keys, sorter=order), len(theirs) - 1)
        same = theirs[order[place]] == keys
        # The first of several equal rows, as padding often is.
        same &= found < 0
        found[same] = start + order[place[same]]
    return found


_KEY_COLUMNS = 16


def row_keys(bits: NDArray[Any]) -> NDArray[np.uint64]:
    """Return a 64-bit number for each row that depends on all of its first numbers."""
    import numpy as np

    part = np.ascontiguousarray(bits[:, :_KEY_COLUMNS])
    words = part.view("<u%d" % part.itemsize).astype(np.uint64)
    key = np.zeros(len(words), np.uint64)
    for column in range(words.shape[1]):
        key = (key ^ words[:, column]) * np.uint64(0x9E3779B97F4A7C15)
        key ^= key >> np.uint64(29)
    return key


def _measure(sample: _Sample, head: Matrix, target: Matrix, ids: Ids) -> dict[str, NDArray[Any]]:
    """Return each kind of evidence for each sampled row; NaN where there is none."""
    import numpy as np

    missing = np.full(len(sample.rows), np.nan)
    wanted, anchors = ids[sample.rows], ids[sample.anchors]
    known = np.flatnonzero((wanted >= 0) & (wanted < target.rows))
    known_anchors = np.flatnonzero((anchors >= 0) & (anchors < target.rows))
    measured = {"exact": missing, "cosine": missing.copy(), "similarity": missing.copy()}
    if not len(known) or len(known_anchors) < 3:
        return measured
    bits = target.take_bits(wanted[known])
    others = _numbers(target.take_bits(anchors[known_anchors]), target.dtype)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = others.mean(axis=0)
        units = _units(_numbers(bits, target.dtype) - mean)
        if head.columns == target.columns:
            exact = missing.copy()
            exact[known] = same_rows(sample.bits[known], cast(bits, target.dtype, head.dtype))
            measured["exact"] = exact
            measured["cosine"][known] = (units * sample.units[known]).sum(axis=1)
        gram = units @ _units(others - mean).T
        mine = sample.gram[np.ix_(known, known_anchors)]
        used = sample.distinct[np.ix_(known, known_anchors)] & np.isfinite(gram)
        measured["similarity"][known] = _correlation(mine, gram, used)
    return measured


def _noise(sample: _Sample, head: Matrix, target: Matrix, guesses: list[Hypothesis], seed: int) -> dict[str, float]:
    """Return for each kind of evidence a value that hardly any row reaches under a mapping that is certainly wrong."""
    import numpy as np

    known = guesses[0].ids
    shuffled = np.random.default_rng(seed + 1).permutation(known)
    limits = {}
    for method, values in _measure(sample, head, target, shuffled).items():
        finite = values[np.isfinite(values)]
        limits[method] = float(finite.mean() + 4 * finite.std()) if len(finite) else np.inf
    return limits


def _score(sample: _Sample, guess: Hypothesis, measured: dict[str, NDArray[Any]], noise: dict[str, float]) -> Score:
    import numpy as np

    chance = np.isin(sample.rows, sample.random_rows)

    def mean(values: NDArray[Any]) -> float | None:
        values = values[np.isfinite(values)]
        return float(values.mean()) if len(values) else None

    method = "cosine" if (mean(measured["cosine"]) or 0.0) >= _LEAST["cosine"] else "similarity"
    values = measured[method][chance]
    values = values[np.isfinite(values)]
    return Score(
        guess.name,
        int((guess.ids[sample.rows] >= 0).sum()),
        mean(measured["exact"][chance]),
        mean(measured["cosine"][chance]),
        mean(measured["similarity"][chance]),
        float((values > noise[method]).mean()) if len(values) else None,
    )


def _correlation(a: NDArray[Any], b: NDArray[Any], used: NDArray[np.bool_]) -> NDArray[Any]:
    """Return the correlation of each row of ``a`` with that of ``b`` over the columns that are used in it."""
    import numpy as np

    count = np.maximum(used.sum(axis=1), 1)[:, None]
    a, b = np.where(used, a, 0), np.where(used, b, 0)
    a = np.where(used, a - a.sum(axis=1, keepdims=True) / count, 0)
    b = np.where(used, b - b.sum(axis=1, keepdims=True) / count, 0)
    spread = np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
    result: NDArray[Any] = (a * b).sum(axis=1) / spread
    return result


def _numbers(bits: NDArray[Any], dtype: str) -> NDArray[Any]:
    import numpy as np

    from .floats import widen

    return widen(bits, dtype).astype(np.float32, copy=False)


def _units(rows: NDArray[Any]) -> NDArray[Any]:
    import numpy as np

    with np.errstate(invalid="ignore", divide="ignore"):
        result: NDArray[Any] = rows / np.sqrt((rows * rows).sum(axis=1, keepdims=True))
    return result
