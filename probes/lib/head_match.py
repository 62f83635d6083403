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

from .floats import cast, same_rows, widen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import numpy as np
    from numpy.typing import NDArray

    from .mappings import Ids
    from .matrix import Matrix

    Measured = dict[str, NDArray[Any]]
    """Kind of evidence -> value for each sampled row; NaN where there is none."""

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
    """Mean correlation of a row's cosines to other rows with those of the target's rows; -1 to 1. Only measured where
    the other two do not decide."""
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

        self._head = head
        self._random = np.random.default_rng(seed)
        self._every = np.arange(head.rows)
        self.random_rows = self._some(self._every, RANDOM_ROWS)
        chosen = [self.random_rows]
        for index, one in enumerate(guesses):
            for other in guesses[index + 1 :]:
                chosen.append(self._some(np.flatnonzero(one.ids != other.ids), PER_PAIR))
        self._chosen = np.unique(np.concatenate(chosen))
        bits = head.take_bits(self._chosen)
        numbers = _numbers(bits, head.dtype)
        sound = np.isfinite(numbers).all(axis=1) & numbers.any(axis=1)
        # Only rows that are finite and not zero say anything.
        self.rows, self.bits, self.numbers = self._chosen[sound], bits[sound], numbers[sound]

    def compare_with_others(self) -> None:
        """Read rows to compare the sampled ones with, and do so; what the third kind of evidence needs."""
        import numpy as np

        unseen = np.setdiff1d(self._every, self._chosen)
        # Of a small head all rows are looked at; then they are compared with one another.
        anchors = np.sort(self._some(unseen if len(unseen) >= 64 else self._every, ANCHORS))
        others = _numbers(self._head.take_bits(anchors), self._head.dtype)
        sound = np.isfinite(others).all(axis=1) & others.any(axis=1)
        self.anchors, others = anchors[sound], others[sound]
        mean = others.mean(axis=0) if len(others) else np.zeros(self._head.columns, np.float32)
        self.gram = _units(self.numbers, mean) @ _units(others, mean).T
        self.distinct = self.rows[:, None] != self.anchors[None, :]

    def _some(self, rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        return self._random.choice(rows, count, replace=False) if len(rows) > count else rows


def judge(head: Matrix, target: Matrix, guesses: list[Hypothesis], seed: int = 0) -> Judgement:
    """Return which of ``guesses`` the rows of ``head`` follow; equal ones must have been merged.

    Reads some thousand rows of both matrices.

    Raises:
        Damaged, Unreadable: a file cannot be read.
    """
    import numpy as np

    sample = _Sample(head, guesses, seed)
    # A mapping that is certainly wrong shows how well rows fit by chance.
    chance = Hypothesis("", "", np.random.default_rng(seed + 1).permutation(guesses[0].ids))
    tried = [*guesses, chance]
    measured = {guess.name: _measure_rows(sample, head, target, guess.ids) for guess in tried}
    best = _best(sample, measured)
    if best is None:
        sample.compare_with_others()
        for guess in tried:
            measured[guess.name]["similarity"] = _measure_neighbours(sample, target, guess.ids)
        best = _best(sample, measured)
    noise = measured.pop(chance.name)
    kind = "similarity" if best is None else "cosine" if best[1] == "exact" else best[1]
    scores = tuple(_score(sample, guess, measured[guess.name], noise, kind) for guess in guesses)
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
    distinct, which = np.unique(keys, return_inverse=True)
    source = np.full(len(distinct), -1, np.int64)
    for start, bits in target.chunks() if len(distinct) else ():
        theirs = row_keys(cast(bits[:, :_KEY_COLUMNS], target.dtype, head.dtype))
        place = np.minimum(np.searchsorted(distinct, theirs), len(distinct) - 1)
        same = np.flatnonzero((distinct[place] == theirs) & (source[place] < 0))[::-1]
        # Backwards: the first of several equal rows stays, as padding often is.
        source[place[same]] = start + same
    return source[which]


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


def _best(sample: _Sample, measured: dict[str, Measured]) -> tuple[str, str] | None:
    """Return (name of the guess that fits best, the strongest kind of evidence that is not at chance)."""
    import numpy as np

    for method in ("exact", "cosine", "similarity"):
        means = {name: _mean(sample, values[method]) for name, values in measured.items() if method in values and name}
        known = {name: mean for name, mean in means.items() if mean is not None}
        if known and max(known.values()) >= _LEAST[method]:
            # Of equally good ones, the one that speaks of more rows.
            rows = {name: int(np.isfinite(measured[name][method]).sum()) for name in known}
            return max(known, key=lambda name: (known[name], rows[name])), method
    return None


def _mean(sample: _Sample, values: NDArray[Any]) -> float | None:
    """Return the mean over the rows that were chosen from all of the head."""
    import numpy as np

    values = values[np.isin(sample.rows, sample.random_rows) & np.isfinite(values)]
    return float(values.mean()) if len(values) else None


def _measure_rows(sample: _Sample, head: Matrix, target: Matrix, ids: Ids) -> Measured:
    """Return the first two kinds of evidence for each sampled row."""
    import numpy as np

    exact, cosine = np.full(len(sample.rows), np.nan), np.full(len(sample.rows), np.nan)
    wanted = ids[sample.rows]
    known = np.flatnonzero((wanted >= 0) & (wanted < target.rows))
    if len(known) and head.columns == target.columns:
        bits = target.take_bits(wanted[known])
        exact[known] = same_rows(sample.bits[known], cast(bits, target.dtype, head.dtype))
        numbers = _numbers(bits, target.dtype)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            mean = np.nan_to_num(numbers.mean(axis=0), posinf=0, neginf=0)
            own = sample.numbers.mean(axis=0)
            cosine[known] = (_units(numbers, mean) * _units(sample.numbers[known], own)).sum(axis=1)
    return {"exact": exact, "cosine": cosine}


def _measure_neighbours(sample: _Sample, target: Matrix, ids: Ids) -> NDArray[Any]:
    """Return the third kind of evidence for each sampled row."""
    import numpy as np

    result = np.full(len(sample.rows), np.nan)
    wanted, anchors = ids[sample.rows], ids[sample.anchors]
    known = np.flatnonzero((wanted >= 0) & (wanted < target.rows))
    known_anchors = np.flatnonzero((anchors >= 0) & (anchors < target.rows))
    if len(known) and len(known_anchors) >= 3:
        others = _numbers(target.take_bits(anchors[known_anchors]), target.dtype)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            mean = np.nan_to_num(others.mean(axis=0), posinf=0, neginf=0)
            gram = _units(target.take(wanted[known]).astype(np.float32, copy=False), mean) @ _units(others, mean).T
            mine = sample.gram[np.ix_(known, known_anchors)]
            used = sample.distinct[np.ix_(known, known_anchors)] & np.isfinite(gram)
            result[known] = _correlation(mine, gram, used)
    return result


def _score(sample: _Sample, guess: Hypothesis, measured: Measured, noise: Measured, kind: str) -> Score:
    import numpy as np

    means = {method: _mean(sample, values) for method, values in measured.items()}
    by_chance = noise[kind][np.isfinite(noise[kind])]
    limit = float(by_chance.mean() + 4 * by_chance.std()) if len(by_chance) else np.inf
    values = measured[kind][np.isin(sample.rows, sample.random_rows) & np.isfinite(measured[kind])]
    return Score(
        guess.name,
        int((guess.ids[sample.rows] >= 0).sum()),
        means["exact"],
        means["cosine"],
        means.get("similarity"),
        float((values > limit).mean()) if len(values) else None,
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

    return widen(bits, dtype).astype(np.float32, copy=False)


def _units(rows: NDArray[Any], mean: NDArray[Any] | None = None) -> NDArray[Any]:
    """Return the directions of ``rows``, seen from ``mean``."""
    import numpy as np

    with np.errstate(invalid="ignore", divide="ignore"):
        if mean is not None:
            rows = rows - mean
        result: NDArray[Any] = rows / np.sqrt(np.einsum("ij,ij->i", rows, rows))[:, None]
    return result
