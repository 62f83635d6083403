"""A drafter run over stored samples under one hypothesis after another, and held against what the target said there.

A hypothesis fixes what files alone do not say: which tokens the drafter's rows stand for, whether the stored final state
still has to be normed, by how many tokens states and tokens are shifted, in which order the aux layers are, and what the
first layer's residual is. Under the right one the drafter does what it was trained to do; under the others it does not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .files import Damaged, Unreadable
from .llama import rms_norm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator

    from .eagle import Eagle, Flags
    from .mappings import Ids
    from .matrix import Matrix
    from .samples import Sample
    from .target import Target

SHIFTS = (-1, 0, 1, 2)
MAX_POSITIONS = 1024
"""Positions that drafts are begun at, at most, spread evenly over all that count."""
_AT_ONCE = 128
"""Positions whose logits are in memory at the same time."""
_BEFORE = 32
"""Tokens of the prompt that are kept before the first one that counts."""
_ROUNDS = 3
_GAIN = 0.02
"""Nats that a change must gain to be kept in the search."""


@dataclass(frozen=True)
class Hypothesis:
    """What is assumed in one run."""

    mapping: str
    """``A``: the checkpoint's own; ``B``: the other one."""
    norm: bool | None
    """Whether the target's final norm is applied to the stored final state; None where there is no target."""
    shift: int
    """The stored state of token t says what token t + shift is; 1 is right."""
    aux_order: tuple[int, ...]
    """Which of the stored aux layers is fed first, second..."""
    norm_before_residual: bool

    def differences(self, other: Hypothesis) -> tuple[str, ...]:
        """Return the names of what differs."""
        return tuple(name for name in self.__dataclass_fields__ if getattr(self, name) != getattr(other, name))


@dataclass(frozen=True)
class Step:
    """One drafting step of a run."""

    tokens: int
    """Positions that counted."""
    loss: float
    """Cross entropy of the drafter against the truth, in nats."""
    divergence: float
    """Of which the truth's own entropy is no part."""
    top1: float
    """Share of drafts that are the target's choice among all its tokens."""
    token_top1: float
    """Share of drafts that are the token that follows in the sample."""


@dataclass(frozen=True)
class Run:
    """What came of one hypothesis."""

    hypothesis: Hypothesis
    steps: tuple[Step, ...]
    accept_length: float
    """Tokens that one pass of the target would yield: one, and the drafts before the first wrong one."""

    @property
    def score(self) -> float:
        """What hypotheses are ranked by, in nats: mean divergence of all steps. Sharp truths get no advantage."""
        return sum(step.divergence for step in self.steps) / len(self.steps)


@dataclass
class Window:
    """A stretch of one sample: T tokens, and the states from one token before to two after."""

    ids: Any
    """int64 [T + 1]."""
    mask: Any
    """bool [T]."""
    aux: list[Any]
    """Of each aux layer, float32 [T + 3, width]."""
    final: Any
    """float32 [T + 3, width]; None where the sample has none."""


def cut(sample: Sample, tokens: int, steps: int) -> Window | None:
    """Return a stretch of ``sample`` that begins shortly before what counts; None where nothing counts or it is too short.

    Raises:
        Damaged: its tokens do not fit its states, or these are not finite.
    """
    import numpy as np

    if sample.ids is None or len(sample.ids) != sample.tokens:
        raise Damaged(sample.path, "its tokens and its hidden states are not of the same length")
    mask = np.ones(sample.tokens, bool) if sample.mask is None or len(sample.mask) != sample.tokens else sample.mask
    counted = np.flatnonzero(mask)
    if not len(counted):
        return None
    begin = max(1, int(counted[0]) - _BEFORE)
    end = min(sample.tokens - 2, begin + tokens)
    if end - begin < steps + 2:
        return None
    at = np.arange(begin - 1, end + 2)
    aux = [part.take(at) for part in sample.aux]
    final = None if sample.final is None else sample.final.take(at)
    if not all(np.isfinite(states).all() for states in (*aux, *(() if final is None else (final,)))):
        raise Damaged(sample.path, "its hidden states hold NaN or infinities")
    return Window(sample.ids[begin : end + 1], mask[begin:end], aux, final)


class Stage:
    """Everything that runs share, on one device.

    Args:
        eagle: the drafter.
        windows: at least one; all of the same layers.
        mappings: name -> target token of each draft row; ``A`` always.
        target: makes the truth; without it the truth is the tokens of the samples.
        embed: the embedding that tokens are looked up in.
        count: drafting steps.
        device: torch's name of it.

    Raises:
        Damaged, Unreadable: what cannot be fitted together.
    """

    def __init__(
        self,
        eagle: Eagle,
        windows: list[Window],
        mappings: dict[str, Ids],
        *,
        target: Target | None,
        embed: Matrix,
        count: int,
        device: str,
    ) -> None:
        import numpy as np
        import torch

        self._eagle, self._count, self._device = eagle, count, device
        self._length = max(len(window.mask) for window in windows)
        self._ids = _padded([window.ids for window in windows], self._length + 1, device)
        self._mask = _padded([window.mask for window in windows], self._length, device)
        layers = len(windows[0].aux)
        if not layers or any(len(window.aux) != layers for window in windows):
            raise Unreadable(eagle.path, "the samples have different numbers of aux layers, or none")
        self._aux = [_padded([window.aux[index] for window in windows], self._length + 3, device) for index in range(layers)]
        wide = sum(part.shape[-1] for part in self._aux)
        if wide != eagle.inputs:
            raise Unreadable(eagle.path, "fc takes %d numbers a token, the samples' %d aux layers have %d" % (eagle.inputs, layers, wide))
        unique, places = np.unique(self._ids.cpu().numpy(), return_inverse=True)
        table = torch.from_numpy(np.asarray(embed.take(unique), np.float32)).to(device)
        self._embedded = table[torch.from_numpy(places.reshape(self._ids.shape)).to(device)]
        self._bases = self._choose([len(window.mask) for window in windows])
        self._mappings = {name: torch.from_numpy(ids).to(device) for name, ids in mappings.items()}
        self.truth = None if target is None else Truth(target, windows, self._length, mappings, device)
        """None where there is no target."""

    @property
    def layers(self) -> int:
        """Aux layers in the samples."""
        return len(self._aux)

    @property
    def positions(self) -> int:
        """Positions that drafts are begun at."""
        return len(self._bases[0])

    def run(self, hypothesis: Hypothesis, flags: Flags) -> Run:
        """Return what the drafter does under ``hypothesis``."""
        import torch

        with torch.no_grad():
            return self._run(hypothesis, replace(flags, norm_before_residual=hypothesis.norm_before_residual))

    def _run(self, hypothesis: Hypothesis, flags: Flags) -> Run:
        import torch

        offset = 2 - hypothesis.shift
        bases = self._length - self._count
        aux = torch.cat([self._aux[index][:, offset : offset + bases] for index in hypothesis.aux_order], -1)
        words = self._embedded[:, 1 : self._length]
        accepted = torch.ones(self.positions, dtype=torch.bool, device=self._device)
        lengths = torch.ones(self.positions, device=self._device)
        steps = []
        for number, state in enumerate(self._eagle.steps(aux, words, self._count, flags)):
            step, right = self._judge(hypothesis, state[self._bases], number)
            steps.append(step)
            accepted = accepted & right
            lengths += accepted
        return Run(hypothesis, tuple(steps), float(lengths.mean()))

    def _judge(self, hypothesis: Hypothesis, state: Any, number: int) -> tuple[Step, Any]:
        """Return one step's numbers, and which drafts were right."""
        import torch

        batch, base = self._bases
        at = base + 1 + number
        counted = self._mask[batch, at].float()
        following = self._ids[batch, at + 1]
        ids = self._mappings[hypothesis.mapping]
        row_of = None
        if self.truth is None:
            row_of = torch.full((int(max(int(ids.max()), int(self._ids.max()))) + 1,), -1, device=self._device)
            row_of[ids] = torch.arange(len(ids), device=self._device)
            counted = counted * (row_of[following] >= 0)
        total = counted.sum().clamp(min=1)
        loss = divergence = 0.0
        drafts = []
        for begin in range(0, len(state), _AT_ONCE):
            end = min(len(state), begin + _AT_ONCE)
            logits = state[begin:end] @ self._eagle.head.float().t()
            drafts.append(ids[logits.argmax(-1)])
            told = logits.log_softmax(-1)
            weight = counted[begin:end] / total
            if self.truth is None:
                row = row_of[following[begin:end]].clamp(min=0) if row_of is not None else None
                own = -(told.gather(-1, row[:, None])[:, 0] * weight).sum() if row is not None else told.sum()
                loss, divergence = loss + float(own), divergence + float(own)
                continue
            wanted = self.truth.chances(hypothesis, batch[begin:end], at[begin:end])
            crossed = -(wanted.exp() * told).sum(-1)
            entropy = -(wanted.exp() * wanted).sum(-1)
            loss += float((crossed * weight).sum())
            divergence += float(((crossed - entropy) * weight).sum())
        draft = torch.cat(drafts)
        best = following if self.truth is None else self.truth.best(hypothesis, batch, at)
        right = draft == best
        top1, token_top1 = (float((hits * counted).sum() / total) for hits in (right, draft == following))
        return Step(int(counted.sum()), loss, divergence, top1, token_top1), right

    def _choose(self, lengths: list[int]) -> tuple[Any, Any]:
        """Return (sample, position) of the tokens that drafts begin at."""
        import torch

        last = torch.tensor(lengths, device=self._device) - self._count
        usable = self._mask[:, 1:].clone()
        usable &= torch.arange(self._length - 1, device=self._device)[None] < last[:, None]
        batch, base = usable.nonzero(as_tuple=True)
        if not len(batch):
            raise Unreadable(self._eagle.path, "no token of the samples counts in the loss")
        if len(batch) > MAX_POSITIONS:
            chosen = torch.arange(MAX_POSITIONS, device=self._device) * len(batch) // MAX_POSITIONS
            batch, base = batch[chosen], base[chosen]
        return batch, base


class Truth:
    """What the target says after each token, from the stored final states.

    Args:
        target: its head and its norm.
        windows: their final states.
        length: of the longest window.
        mappings: see :class:`Stage`.
        device: torch's name of it.
    """

    def __init__(self, target: Target, windows: list[Window], length: int, mappings: dict[str, Ids], device: str) -> None:
        import torch

        self._head = target.head()
        finals = [window.final for window in windows]
        if any(final is None or final.shape[1] != self._head.columns for final in finals):
            raise Unreadable(target.path, "the samples have no final state, or one of another width than the head's")
        stored = _padded(finals, length + 3, device)
        weight = target.norm_weight()
        self.norms: tuple[bool, ...] = (False,) if weight is None else (True, False)
        """Whether the norm can be applied."""
        self._states = {False: stored}
        if weight is not None:
            self._states[True] = rms_norm(stored, torch.from_numpy(weight.copy()).to(device), target.norm_eps)
        self._rows = {name: _rows(self._head, ids, device) for name, ids in mappings.items()}
        self._best = self._choices(device)

    def chances(self, hypothesis: Hypothesis, batch: Any, at: Any) -> Any:
        """Return the log chances of the draft tokens after positions ``at``, [positions, D]."""
        states = self._states[bool(hypothesis.norm)][batch, at + 2 - hypothesis.shift]
        return (states @ self._rows[hypothesis.mapping].float().t()).log_softmax(-1)

    def best(self, hypothesis: Hypothesis, batch: Any, at: Any) -> Any:
        """Return the target's choice among all its tokens after positions ``at``."""
        return self._best[bool(hypothesis.norm)][batch, at + 2 - hypothesis.shift]

    def _choices(self, device: str) -> dict[bool, Any]:
        """Return the best token of every state, reading the head once and in pieces."""
        import torch

        both = torch.cat([self._states[norm].flatten(0, 1) for norm in self.norms])
        highest = torch.full((len(both),), float("-inf"), device=device)
        choice = torch.zeros(len(both), dtype=torch.int64, device=device)
        for start in range(0, self._head.rows, self._head.chunk_rows):
            stop = min(self._head.rows, start + self._head.chunk_rows)
            rows = torch.from_numpy(self._head.numbers(start, stop).copy()).float().to(device)
            for begin in range(0, len(both), 4 * _AT_ONCE):
                part = slice(begin, begin + 4 * _AT_ONCE)
                value, index = (both[part] @ rows.t()).max(-1)
                better = value > highest[part]
                highest[part] = torch.where(better, value, highest[part])
                choice[part] = torch.where(better, index + start, choice[part])
        shape = self._states[False].shape[:2]
        return {norm: part.view(shape) for norm, part in zip(self.norms, choice.chunk(len(self.norms)))}


def _rows(head: Matrix, ids: Ids, device: str) -> Any:
    """Return the head's rows of some tokens in the type that they are stored in, as far as that saves room."""
    import numpy as np
    import torch

    kind = torch.bfloat16 if head.dtype == "bfloat16" else torch.float32
    rows = torch.empty(len(ids), head.columns, dtype=kind, device=device)
    for start in range(0, len(ids), head.chunk_rows):
        part = ids[start : start + head.chunk_rows]
        rows[start : start + len(part)] = torch.from_numpy(np.asarray(head.take(part), np.float32)).to(device)
    return rows


def _padded(arrays: list[Any], length: int, device: str) -> Any:
    """Return arrays of one kind, filled up with zeros to ``length``, as one tensor."""
    import torch

    first = torch.from_numpy(arrays[0])
    out = torch.zeros((len(arrays), length, *first.shape[1:]), dtype=first.dtype, device=device)
    for index, array in enumerate(arrays):
        out[index, : len(array)] = torch.from_numpy(array).to(device)
    return out


def search(
    stage: Stage, declared: Hypothesis, flags: Flags, other_mappings: tuple[str, ...], tell: Callable[[int], None]
) -> Iterator[Run]:
    """Yield the run of what is declared, then those that differ from the best so far in one thing, as long as that helps."""
    done: dict[Hypothesis, Run] = {}

    def run(hypothesis: Hypothesis) -> Run:
        done[hypothesis] = stage.run(hypothesis, flags)
        tell(len(done))
        return done[hypothesis]

    best = run(declared)
    yield best
    for _ in range(_ROUNDS):
        base = best
        for neighbour in neighbours(base.hypothesis, stage, other_mappings):
            if neighbour in done:
                continue
            tried = run(neighbour)
            yield tried
            if tried.score < best.score:
                best = tried
        if best.score > base.score - _GAIN:
            return


def neighbours(base: Hypothesis, stage: Stage, other_mappings: tuple[str, ...]) -> Iterator[Hypothesis]:
    """Yield the hypotheses that differ from ``base`` in one thing; of the orders of many layers only the likely ones."""
    from itertools import permutations

    for mapping in ("A", *other_mappings):
        yield replace(base, mapping=mapping)
    if stage.truth is not None:
        for norm in stage.truth.norms:
            yield replace(base, norm=norm)
    for shift in SHIFTS:
        yield replace(base, shift=shift)
    plain = tuple(range(stage.layers))
    orders = list(permutations(plain)) if stage.layers <= 3 else [plain, plain[::-1]]
    for order in orders:
        yield replace(base, aux_order=tuple(order))
    for flag in (False, True):
        yield replace(base, norm_before_residual=flag)
