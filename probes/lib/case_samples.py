"""Hidden states of a case, as far as hypotheses need them: read in part, held against the target's head and a server's dump."""

from __future__ import annotations

from dataclasses import dataclass

from .files import Unreadable
from .hidden_scan import best_tokens, normed
from .sample_files import find_samples, opened_sample

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import numpy as np
    from numpy.typing import NDArray

    from remote_diag.probe import Context

    from .files import Meter
    from .hidden_layers import Match
    from .target import Target

    States = NDArray[np.float32]

MAX_SAMPLES = 8
MAX_TOKENS = 128
"""Tokens of each sample that are read, from where the first one counts."""
MAX_POSITIONS = 384
"""States that are multiplied with the target's whole head, at most."""
STEPS = (-1, 0, 1, 2)
"""How many tokens after a state's own the token is looked for that it predicts; 1 is right."""
LEAST = 0.1
"""A share of right predictions below is none."""
NEAR = 0.05
"""Deviation from the size that the norm gives; bfloat16 makes less than 1 % of it."""
RARELY, MOSTLY = 0.1, 0.9
STANDS_OUT = 0.1
"""By how much the likeness of two layers of the same tokens exceeds that of neighbouring tokens."""
AHEAD = 1.5
"""A reading is the right one when it is right so many times as often as the others."""


@dataclass(frozen=True)
class Text:
    """A stretch of one conversation, T tokens."""

    path: str
    kind: str
    """Format of the file; see :mod:`samples`."""
    start: int
    """Index of the first token in the conversation."""
    ids: NDArray[np.int64]
    """[T]"""
    mask: NDArray[np.bool_] | None
    """[T]; None where the file has none."""
    aux: tuple[States, ...]
    """Of each layer, [T, width]."""
    final: States | None
    """[T, width]"""


@dataclass(frozen=True)
class Masks:
    """What the masks of a case's samples say."""

    files: int
    without: int
    """Files that hold no mask."""
    empty: int
    """Files in which nothing counts."""
    tokens: int
    counted: int


@dataclass(frozen=True)
class Predictions:
    """How often the target's head, fed with the stored final states, says the token that follows."""

    positions: int
    shares: dict[bool, dict[int, float]]
    """Whether the final norm was applied first -> by how many tokens later -> share, 0 to 1."""
    same: float
    """Share of positions at which both readings say the same token."""
    normed: float | None
    """Share of states whose size is exactly that which the norm gives; None where the target's norm is not known."""

    def best(self, *, normed: bool) -> float:
        """Return the best share of a reading, whatever the shift."""
        return max(self.shares[normed].values())

    @property
    def stored_normed(self) -> bool | None:
        """Whether the stored states are normed already: by their size, else by what predicts; None when neither tells."""
        if self.normed is not None and not RARELY < self.normed < MOSTLY:
            return self.normed >= MOSTLY
        with_norm, without = self.best(normed=True), self.best(normed=False)
        if max(with_norm, without) < LEAST or max(with_norm, without) < AHEAD * min(with_norm, without):
            return None
        return without > with_norm

    @property
    def better(self) -> dict[int, float]:
        """The shares of the reading that predicts better."""
        return self.shares[self.best(normed=True) >= self.best(normed=False)]

    @property
    def shift(self) -> int | None:
        """By how many tokens later the states predict; None when no place stands out."""
        better = self.better
        ordered = sorted(better, key=lambda step: -better[step])
        if better[ordered[0]] < LEAST or better[ordered[0]] < AHEAD * better[ordered[1]]:
            return None
        return ordered[0]


def read_texts(context: Context, paths: tuple[str, ...], meter: Meter, hidden: int | None) -> list[Text]:
    """Return stretches of some samples, spread evenly over all.

    Raises:
        Unreadable, Damaged: a file is no sample, or none is of use.
    """
    import numpy as np

    files, _ = find_samples(paths, MAX_SAMPLES)
    texts = []
    for number, path in enumerate(files):
        context.progress(number, len(files), unit="samples", label="reading")
        with opened_sample(path, meter, context.run_dir, hidden) as sample:
            if sample.ids is None or len(sample.ids) != sample.tokens:
                raise Unreadable(path, "its tokens and its hidden states are not of the same length")
            mask = sample.mask if sample.mask is not None and len(sample.mask) == sample.tokens else None
            counted = np.flatnonzero(mask) if mask is not None else np.zeros(0, np.int64)
            start = max(0, int(counted[0]) - 2) if len(counted) else 0
            at = np.arange(start, min(sample.tokens, start + MAX_TOKENS))
            final = sample.final
            texts.append(
                Text(
                    path, sample.kind, start, sample.ids[at], None if mask is None else mask[at],
                    tuple(part.take(at) for part in sample.aux), None if final is None else final.take(at),
                )
            )  # fmt: skip
    return texts


def read_masks(context: Context, paths: tuple[str, ...], meter: Meter, hidden: int | None, limit: int = 64) -> Masks:
    """Return what the masks of at most ``limit`` samples say; raise Unreadable or Damaged."""
    files, _ = find_samples(paths, limit)
    without = empty = tokens = counted = 0
    for path in files:
        with opened_sample(path, meter, context.run_dir, hidden) as sample:
            if sample.mask is None:
                without += 1
                continue
            ones = int(sample.mask.sum())
            empty += not ones
            tokens, counted = tokens + len(sample.mask), counted + ones
    return Masks(len(files), without, empty, tokens, counted)


def predict(texts: list[Text], target: Target) -> Predictions:
    """Hold stored final states against the target's head, normed first and as they are.

    Raises:
        Unreadable: there are no final states, or of another width than the head's.
    """
    import numpy as np

    head = target.head()
    states, wanted = _positions(texts, head.columns, target.path)
    weight = target.norm_weight()
    readings = {False: states}
    exact = None
    if weight is not None:
        readings[True] = normed(states, weight, target.norm_eps)
        bare = states / np.where(weight == 0, 1, weight)
        exact = float((np.abs(np.sqrt((bare.astype(np.float64) ** 2).mean(axis=1)) - 1) < NEAR).mean())
    choice = best_tokens(head, np.concatenate(list(readings.values())))
    shares = {}
    for number, reading in enumerate(readings):
        said = choice[number * len(states) : (number + 1) * len(states)]
        shares[reading] = {step: float((said == wanted[step]).mean()) for step in STEPS}
    same = float((choice[: len(states)] == choice[-len(states) :]).mean())
    return Predictions(len(states), {True: shares.get(True, dict.fromkeys(STEPS, 0.0)), False: shares[False]}, same, exact)


def layers_beside_final(texts: list[Text]) -> tuple[dict[int, float], int | None]:
    """Hold the aux layers against the final states of the same samples: layers of one token share most of their directions.

    Returns:
        (how many tokens later -> mean cosine, every number in units of its own spread; of the layer that is most like;
        by how many tokens the aux states are late, None where no place stands out). Empty where there is nothing to hold.
    """
    import numpy as np

    sums: dict[int, list[Any]] = {lag: [] for lag in (-2, -1, 0, 1, 2)}
    for text in texts:
        if text.final is None or len(text.ids) < 8 or not text.aux or text.aux[0].shape[1] != text.final.shape[1]:
            continue
        final, aux = _spread_out(text.final), [_spread_out(layer) for layer in text.aux]
        for lag, found in sums.items():
            low, high = max(0, -lag), min(len(final), len(final) - lag)
            found.append([_mean_cosine(layer[low + lag : high + lag], final[low:high]) for layer in aux])
    if not sums[0] or len({len(found) for lags in sums.values() for found in lags}) > 1:
        return {}, None
    alike = {lag: float(np.mean(found, axis=0).max()) for lag, found in sums.items()}
    ordered = sorted(alike, key=lambda lag: -alike[lag])
    return alike, ordered[0] if alike[ordered[0]] >= alike[ordered[1]] + STANDS_OUT else None


def _spread_out(states: States) -> States:
    """Return states whose every number is in units of its spread over the tokens: a few large ones would decide alone."""
    import numpy as np

    spread = states.std(axis=0)
    result: States = ((states - states.mean(axis=0)) / np.where(spread > 0, spread, 1)).astype(np.float32)
    return result


def _mean_cosine(a: States, b: States) -> float:
    import numpy as np

    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = (a * b).sum(axis=1) / np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
    return float(np.nan_to_num(cosines).mean())


def _positions(texts: list[Text], columns: int, path: str) -> tuple[States, dict[int, Any]]:
    """Return (final states [N, width], the token that many later of each [N]) of positions that count."""
    import numpy as np

    states, ids = [], []
    for text in texts:
        if text.final is None or text.final.shape[1] != columns:
            continue
        counts = np.ones(len(text.ids), bool) if text.mask is None or not text.mask.any() else text.mask
        at = np.flatnonzero(counts[1:-2]) + 1 if len(text.ids) > 3 else np.zeros(0, np.int64)
        states.append(text.final[at])
        ids.append(np.stack([text.ids[at + step] for step in STEPS], 1))
    if not states or not sum(map(len, states)):
        raise Unreadable(path, "the samples have no final states as wide as its head (%d)" % columns)
    all_states, all_ids = np.concatenate(states), np.concatenate(ids)
    chosen = np.unique(np.linspace(0, len(all_states) - 1, MAX_POSITIONS).astype(np.int64))
    return all_states[chosen], {step: all_ids[chosen, number] for number, step in enumerate(STEPS)}


def find_layers(context: Context, paths: tuple[str, ...], target: Target, meter: Meter) -> tuple[list[int | None] | None, str]:
    """Return (the layer whose input each aux part of the first sample is; in words what was found, or why nothing was).

    Runs the target's own layers over the beginning of the sample, where it is small and of a kind that is known. A part that
    is no layer's is None; the whole is None where the target cannot be run.
    """
    try:
        matches = match_aux(context, paths, target, meter)
    except Unreadable as error:
        return None, "the target's layers could not be run: %s" % error.reason
    told = ", ".join(
        "no layer's" if match.layer is None else "layer %d's (cosine %.3f)" % (match.layer, match.cosine) for match in matches
    )
    return [match.layer for match in matches], "computed with the target's own layers, the stored states are the inputs of: %s" % told


def match_aux(context: Context, paths: tuple[str, ...], target: Target, meter: Meter) -> list[Match]:
    """Return which layer's input each aux part of the first sample is, by the target's own layers.

    Raises:
        Unreadable: the target cannot be run, or the sample cannot be read.
        Damaged: a file contradicts itself.
    """
    from .hidden_layers import match_layers

    files, _ = find_samples(paths, 1)
    with opened_sample(files[0], meter, context.run_dir, target.head().columns) as sample:
        matches = match_layers(
            target, sample, lambda done, total: context.progress(done, total, unit="layers", label="running the target")
        )
    return [matches[name] for name in sorted((name for name in matches if name.startswith("aux ")), key=lambda name: int(name[4:]))]


@dataclass(frozen=True)
class Likeness:
    """Hidden states of training held against those of a server for the same texts."""

    tokens: int
    cosines: dict[int, NDArray[Any]]
    """Shift -> mean cosine of each layer in training with each layer when served, [layers, layers]."""

    @property
    def shift(self) -> int:
        """By how many tokens training's states are too late; where the layers fit best."""
        return max(self.cosines, key=lambda shift: float(self.cosines[shift].max(axis=1).mean()))

    def order(self, shift: int) -> tuple[int, ...]:
        """Return for each layer in training which one when served it is most like."""
        return tuple(int(index) for index in self.cosines[shift].argmax(axis=1))

    def worst(self, shift: int) -> float:
        """Return the cosine of the layer in training that has the least like it when served."""
        return float(self.cosines[shift].max(axis=1).min())

    @property
    def straight(self) -> float:
        """The least cosine of a layer with the one in its place, without any shift."""
        return float(self.cosines[0].diagonal().min())


def compare_served(texts: list[Text], served: list[Text]) -> Likeness:
    """Hold the aux layers of training against those of a server, text by text.

    Raises:
        Unreadable: the two have no text in common, or other layers.
    """
    import numpy as np

    sums: dict[int, Any] = {}
    counts: dict[int, int] = {}
    for text in texts:
        other = next((one for one in served if _same_text(text, one)), None)
        if other is None:
            continue
        if len(text.aux) != len(other.aux) or not text.aux or text.aux[0].shape[1] != other.aux[0].shape[1]:
            raise Unreadable(other.path, "has %d aux layers, the samples of training have %d" % (len(other.aux), len(text.aux)))
        for shift in (-1, 0, 1):
            mine, theirs = _aligned(text, other, shift)
            cosines = np.array([[_cosine(a[mine], b[theirs]) for b in other.aux] for a in text.aux])
            sums[shift] = sums.get(shift, 0) + cosines * len(mine)
            counts[shift] = counts.get(shift, 0) + len(mine)
    if not counts.get(0):
        raise Unreadable(served[0].path, "is of no text that the samples of training are of", "dump the same texts when serving")
    return Likeness(counts[0], {shift: sums[shift] / max(1, counts[shift]) for shift in sums})


def _same_text(a: Text, b: Text) -> bool:
    begin = max(a.start, b.start)
    end = min(a.start + len(a.ids), b.start + len(b.ids))
    if end - begin < 8:
        return False
    return bool((a.ids[begin - a.start : end - a.start] == b.ids[begin - b.start : end - b.start]).all())


def _aligned(a: Text, b: Text, shift: int) -> tuple[Any, Any]:
    """Return (places in a, places in b) of the same token, training's states taken ``shift`` places later."""
    import numpy as np

    begin = max(a.start, b.start) + 1
    end = min(a.start + len(a.ids), b.start + len(b.ids)) - 1
    at = np.arange(begin, end)
    return at - a.start + shift, at - b.start


def _cosine(a: States, b: States) -> float:
    # A direction that all states share would make everything look alike.
    mean = b.mean(axis=0)
    return _mean_cosine(a - mean, b - mean)
