"""A whole EAGLE-3 stack that is small enough to train in a test: text, target, hidden states, drafter.

The text comes from a process whose next token depends on the last two, so a drafter needs the token that it is given
*and* the target's hidden state of the token before. The target is a Llama of nine layers, the drafter is trained as
speculators trains one: head and embedding from the target, three steps with teacher forcing, the target's distribution
over the draft vocabulary as the truth. All of this is written without the project's own code, which it judges.

``python -m tests.support.tiny_stack`` trains one and prints how good it is.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F  # noqa: N812

V, D, H, LAYERS = 512, 200, 64, 9
HEADS, KV_HEADS, HEAD_DIM, INNER = 4, 2, 16, 128
AUX = (2, LAYERS // 2, LAYERS - 3)
"""Layers whose *input* feeds the drafter, as vLLM and speculators count."""
LENGTH = 48
STEPS = 3
EPS = 1e-5
TARGET_THETA, DRAFT_THETA = 10_000.0, 5_000.0

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """One conversation with what the target made of it. Edit copies of it to plant faults: ``replace(sample, ...)``."""

    ids: Ids
    """Tokens, [S]."""
    mask: Ids
    """1 where the loss counts, [S]."""
    aux: tuple[NDArray[np.float32], ...]
    """Hidden states of the layers :data:`AUX`, each [S, H]."""
    final: NDArray[np.float32]
    """Output of the last layer before the final norm, [S, H]."""


class Text:
    """The process that the tokens come from.

    A token is a pair (u, v). u follows from the last token's, v from that of the token before; both jump now and then,
    to frequent values most of the time.
    """

    _GROUPS_U, _GROUPS_V, _WEIGHTS = (8, 8, 16), (4, 4, 8), (0.7, 0.2, 0.1)

    def __init__(self, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self._u = self._follow(random, self._GROUPS_U)
        self._v = self._follow(random, self._GROUPS_V)
        self._chance_u, self._chance_v = self._chances(self._GROUPS_U), self._chances(self._GROUPS_V)
        mass = np.outer(self._chance_u, self._chance_v).ravel()
        # Frequent tokens tend to have small ids, as those of real tokenizers do.
        order = np.argsort(-np.log(mass) + random.normal(size=V))
        self._ids = np.empty(V, np.int64)
        self._ids[order] = np.arange(V)
        self.frequencies: NDArray[np.float64] = np.empty(V)
        self.frequencies[self._ids] = mass
        """Share of each token in endless text, [V]."""

    def sample(self, count: int, *, seed: int, length: int = LENGTH) -> Ids:
        """Return ``count`` texts, [count, length]."""
        random = np.random.default_rng((seed, 1))
        u, v = np.empty((count, length), np.int64), np.empty((count, length), np.int64)
        for at in range(length):
            u[:, at] = random.choice(len(self._u), count, p=self._chance_u)
            v[:, at] = random.choice(len(self._v), count, p=self._chance_v)
            if at >= 2:
                u[:, at] = np.where(random.random(count) < 0.9, self._u[u[:, at - 1]], u[:, at])
                v[:, at] = np.where(random.random(count) < 0.9, self._v[v[:, at - 2]], v[:, at])
        ids: Ids = self._ids[u * len(self._v) + v]
        return ids

    def mapping(self, seed: int, drift: float = 0.7) -> Ids:
        """Return the ``D`` most frequent tokens, ascending, by counts that drift apart with the seed."""
        noise = np.random.default_rng((seed, 2)).normal(size=V) * drift
        return np.sort(np.argsort(-(np.log(self.frequencies) + noise))[:D])

    @staticmethod
    def _follow(random: np.random.Generator, groups: Sequence[int]) -> Ids:
        """Return a permutation within each group, so that text keeps the groups' weights."""
        starts = np.cumsum([0, *groups])
        return np.concatenate([start + random.permutation(size) for start, size in zip(starts, groups, strict=False)])

    def _chances(self, groups: Sequence[int]) -> NDArray[np.float64]:
        return np.repeat(np.array(self._WEIGHTS) / np.array(groups), groups)


class Norm(nn.Module):
    def __init__(self, width: int, spread: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.exp(spread * torch.randn(width)))

    def forward(self, x: Any) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * self.weight


def _rotate(x: Any, positions: Any, theta: float) -> Any:
    """Rotate [..., S, head_dim] by its positions [S]."""
    half = HEAD_DIM // 2
    angles = positions[:, None].float() * theta ** (-torch.arange(half).float() / half)
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    """Grouped-query attention; ``keys`` of earlier drafting steps are seen along the diagonal only."""

    def __init__(self, width: int, theta: float) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(width, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(width, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, H, bias=False)
        self.theta = theta

    def forward(self, x: Any, step: int = 0, cache: list[tuple[Any, Any]] | None = None) -> Any:
        batch, length, _ = x.shape
        positions = torch.arange(length) + step
        q = _rotate(self._split(self.q_proj(x), HEADS), positions, self.theta)
        k = _rotate(self._split(self.k_proj(x), KV_HEADS), positions, self.theta)
        v = self._split(self.v_proj(x), KV_HEADS)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        cache = [] if cache is None else cache
        cache.append((k, v))
        scores = q @ cache[0][0].transpose(-1, -2)
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        own = [(q * keys).sum(-1, keepdim=True) for keys, _ in cache[1:]]
        weights = (torch.cat([scores, *own], -1) / math.sqrt(HEAD_DIM)).softmax(-1)
        out = weights[..., :length] @ cache[0][1]
        for index, (_, values) in enumerate(cache[1:]):
            out = out + weights[..., length + index, None] * values
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))

    def _split(self, x: Any, heads: int) -> Any:
        return x.view(*x.shape[:2], heads, HEAD_DIM).transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(H, INNER, bias=False)
        self.up_proj = nn.Linear(H, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, H, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TargetLayer(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.input_layernorm = Norm(H)
        self.self_attn = Attention(H, TARGET_THETA)
        self.post_attention_layernorm = Norm(H)
        self.mlp = Mlp()
        with torch.no_grad():
            self.self_attn.o_proj.weight *= gain
            self.mlp.down_proj.weight *= gain

    def forward(self, x: Any) -> Any:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Target(nn.Module):
    """A Llama; its weights have the names that they have in a checkpoint, below ``model.``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(V, H)
        # What a layer adds must outweigh what was there, as it does in large models: else all layers say the same.
        self.layers = nn.ModuleList(TargetLayer(min(2.0**layer, 32.0)) for layer in range(LAYERS))
        # Weights of real final norms are far from equal; equal ones would hide whether a norm was applied.
        self.norm = Norm(H, spread=1.0)
        self.lm_head = nn.Linear(H, V, bias=False)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        nn.init.normal_(self.lm_head.weight, std=0.1)

    def hidden(self, ids: Any) -> list[Any]:
        """Return the input of every layer, and last the output of the last one (not normed)."""
        states = [self.embed_tokens(ids)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return states

    def forward(self, ids: Any) -> Any:
        return self.lm_head(self.norm(self.hidden(ids)[-1]))


class DraftLayer(nn.Module):
    def __init__(self, *, norm_before_residual: bool) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = Norm(H), Norm(H), Norm(H)
        self.self_attn = Attention(2 * H, DRAFT_THETA)
        self.mlp = Mlp()
        self.norm_before_residual = norm_before_residual

    def forward(self, embedded: Any, hidden: Any, step: int, cache: list[tuple[Any, Any]]) -> Any:
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embedded), normed], -1)
        x = (normed if self.norm_before_residual else hidden) + self.self_attn(x, step, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """An EAGLE-3 drafter whose rows stand for the tokens ``ids``."""

    def __init__(self, target: Target, ids: Ids, *, norm_before_residual: bool = True, norm_output: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * H, H, bias=False)
        self.layers = nn.ModuleList([DraftLayer(norm_before_residual=norm_before_residual)])
        self.norm = Norm(H)
        self.lm_head = nn.Linear(H, D, bias=False)
        self.embed_tokens = nn.Embedding(V, H)
        self.norm_before_residual, self.norm_output = norm_before_residual, norm_output
        self.ids = ids
        with torch.no_grad():
            self.lm_head.weight.copy_(target.lm_head.weight[torch.from_numpy(ids)])
            self.embed_tokens.weight.copy_(target.embed_tokens.weight)
        self.lm_head.requires_grad_(requires_grad=False)
        self.embed_tokens.requires_grad_(requires_grad=False)

    def forward(self, aux: Any, tokens: Any, steps: int) -> list[Any]:
        """Return the logits of each step.

        Args:
            aux: hidden states of the target, [B, S, 3H].
            tokens: tokens [B, S + steps - 1]; the first one is the token *after* that of aux[:, 0].
            steps: how many tokens are drafted in a row.
        """
        state = self.fc(aux)
        cache: list[tuple[Any, Any]] = []
        logits = []
        for step in range(steps):
            embedded = self.embed_tokens(tokens[:, step : step + aux.shape[1]])
            state = self.layers[0](embedded, state, step, cache)
            normed = self.norm(state)
            logits.append(self.lm_head(normed))
            state = normed if self.norm_output else state
        return logits


@dataclass
class Curve:
    """What a training would log, one entry a step."""

    loss: list[float] = field(default_factory=list)
    """Mean over the drafting steps of the cross entropy per counted token, in nats."""
    accuracy: list[float] = field(default_factory=list)
    """Share of counted tokens whose best draft row is the target's best among the draft tokens, first drafting step."""


@dataclass(frozen=True)
class Stack:
    """A trained target, a trained drafter, and what they were trained with."""

    text: Text
    target: Target
    drafter: Drafter
    """Trained with :attr:`mapping_a`."""
    mapping_a: Ids
    mapping_b: Ids
    """Of another corpus: most tokens are shared, few rows agree."""
    curve: Curve
    """Of the drafter's training."""

    def samples(self, count: int, *, seed: int = 1000) -> list[Sample]:
        """Return conversations that neither model was trained on, with their hidden states."""
        return capture(self.target, self.text.sample(count, seed=seed))


def capture(target: Target, ids: Ids, layers: Sequence[int] = AUX) -> list[Sample]:
    """Return what the target makes of the texts ``ids`` [count, S]; a quarter of each is the prompt."""
    with torch.no_grad():
        states = target.hidden(torch.from_numpy(ids))
    mask = np.ones(ids.shape, np.int64)
    mask[:, : ids.shape[1] // 4] = 0
    return [
        Sample(ids[i], mask[i], tuple(states[layer][i].numpy().copy() for layer in layers), states[-1][i].numpy().copy())
        for i in range(len(ids))
    ]


def train_target(text: Text, *, steps: int = 300, seed: int = 0) -> Target:
    """Return a target that has learnt the text."""
    torch.manual_seed(seed)
    target = Target()
    optimizer = torch.optim.AdamW(target.parameters(), lr=4e-3, weight_decay=0.01)
    for step in range(steps):
        ids = torch.from_numpy(text.sample(32, seed=step))
        loss = F.cross_entropy(target(ids)[:, :-1].reshape(-1, V), ids[:, 1:].reshape(-1))
        _update(optimizer, loss, step, steps)
    target.requires_grad_(requires_grad=False)
    return target


def train_drafter(
    drafter: Drafter,
    target: Target,
    samples: Sequence[Sample],
    *,
    ids: Ids | None = None,
    verifier_rows: Ids | None = None,
    norm: bool = True,
    steps: int = 200,
    batch: int = 32,
    learning_rate: float = 4e-3,
    seed: int = 0,
) -> Curve:
    """Train ``drafter`` in place and return what was logged.

    Args:
        drafter: its head stays frozen, as speculators has it.
        target: its norm and head make the truth out of the samples' final states.
        samples: all of one length.
        ids: the tokens that training believes the rows to stand for; the drafter's own by default.
        verifier_rows: the rows of the target's head that the loss compares with; those of ``ids`` by default.
        norm: whether the trainer applies the target's final norm to the stored final state.
        steps, batch, learning_rate, seed: the usual. With ``learning_rate`` 0 nothing is learnt, only measured.
    """
    random = np.random.default_rng((seed, 3))
    rows = torch.from_numpy(np.asarray((drafter.ids if ids is None else ids) if verifier_rows is None else verifier_rows))
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=learning_rate, weight_decay=0.0)
    tensors = [torch.from_numpy(np.stack(part)) for part in _columns(samples)]
    curve = Curve()
    for step in range(steps):
        chosen = torch.from_numpy(random.integers(0, len(samples), batch))
        losses, hits = batch_losses(drafter, target, rows, [part[chosen] for part in tensors], norm=norm)
        loss = torch.stack(losses).mean()
        if learning_rate:
            _update(optimizer, loss, step, steps)
        curve.loss.append(float(loss.detach()))
        curve.accuracy.append(float(hits[0]))
    return curve


def batch_losses(
    drafter: Drafter, target: Target, rows: Any, batch: Sequence[Any], *, norm: bool = True
) -> tuple[list[Any], list[Any]]:
    """Return (cross entropy, accuracy) of each drafting step over the counted tokens of a batch (ids, mask, aux, final)."""
    ids, mask, aux, final = batch
    length = ids.shape[1] - STEPS
    with torch.no_grad():
        truth = target.lm_head(target.norm(final) if norm else final)[..., rows].softmax(-1)
    losses, hits = [], []
    for step, logits in enumerate(drafter(aux[:, :length], ids[:, 1:], STEPS)):
        # aux of token t and token t+1 draft the target's word at t+1, which is token t+2; later steps one further each.
        wanted = truth[:, 1 + step : 1 + step + length]
        counted = mask[:, 1 + step : 1 + step + length].float()
        entropy = -(wanted * logits.log_softmax(-1)).sum(-1)
        total = counted.sum().clamp(min=1)
        losses.append((entropy * counted).sum() / total)
        hits.append((((logits.argmax(-1) == wanted.argmax(-1)) * counted).sum() / total).detach())
    return losses, hits


def evaluate(drafter: Drafter, target: Target, samples: Sequence[Sample], **how: Any) -> Curve:
    """Return the loss and accuracy of a drafter that is not trained any further."""
    return train_drafter(drafter, target, samples, steps=1, batch=len(samples), learning_rate=0.0, **how)


def _columns(samples: Sequence[Sample]) -> Iterator[list[NDArray[Any]]]:
    yield [sample.ids for sample in samples]
    yield [sample.mask for sample in samples]
    yield [np.concatenate(sample.aux, 1) for sample in samples]
    yield [sample.final for sample in samples]


def _update(optimizer: Any, loss: Any, step: int, steps: int) -> None:
    for group in optimizer.param_groups:
        group.setdefault("peak", group["lr"])
        group["lr"] = group["peak"] * min(1.0, (step + 1) / 20) * (0.05 + 0.95 * math.cos(math.pi / 2 * step / steps))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
    optimizer.step()


def build(seed: int = 0) -> Stack:
    """Train a whole stack; about half a minute."""
    torch.set_num_threads(1)
    text = Text(seed)
    target = train_target(text, seed=seed)
    mapping_a, mapping_b = _mappings(text)
    drafter = Drafter(target, mapping_a)
    curve = train_drafter(drafter, target, capture(target, text.sample(1024, seed=5000)))
    return Stack(text, target, drafter, mapping_a, mapping_b, curve)


def load_or_build(folder: Path, seed: int = 0) -> Stack:
    """Return the stack kept in ``folder``, trained and kept there by whoever comes first."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"tiny-stack-{seed}.pt"
    with _locked(folder / "tiny-stack.lock"):
        if not path.exists():
            stack = build(seed)
            kept = {"target": stack.target.state_dict(), "drafter": stack.drafter.state_dict(), "curve": vars(stack.curve)}
            torch.save(kept, path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
            return stack
    torch.set_num_threads(1)
    kept = torch.load(path, weights_only=True)
    text, target = Text(seed), Target()
    target.load_state_dict(kept["target"])
    target.requires_grad_(requires_grad=False)
    mapping_a, mapping_b = _mappings(text)
    drafter = Drafter(target, mapping_a)
    drafter.load_state_dict(kept["drafter"])
    return Stack(text, target, drafter, mapping_a, mapping_b, Curve(**kept["curve"]))


def _mappings(text: Text) -> tuple[Ids, Ids]:
    """Return A and B: three in four tokens are shared, one row in eight agrees."""
    return text.mapping(1), text.mapping(4, drift=0.85)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl

    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def copy_drafter(stack: Stack) -> Drafter:
    """Return a copy of the trained drafter, to be trained further or spoilt."""
    drafter = Drafter(
        stack.target, stack.drafter.ids, norm_before_residual=stack.drafter.norm_before_residual,
        norm_output=stack.drafter.norm_output,
    )  # fmt: skip
    drafter.load_state_dict(stack.drafter.state_dict())
    return drafter


def shifted(sample: Sample, by: int) -> Sample:
    """Return the sample with its hidden states moved ``by`` tokens to the right against the tokens; zeros come in."""

    def move(states: NDArray[np.float32]) -> NDArray[np.float32]:
        moved = np.zeros_like(states)
        here, there = slice(max(0, by), len(states) + min(0, by)), slice(max(0, -by), len(states) - max(0, by))
        moved[here] = states[there]
        return moved

    return replace(sample, aux=tuple(move(one) for one in sample.aux), final=move(sample.final))


def reordered(sample: Sample, order: Sequence[int]) -> Sample:
    """Return the sample with its aux layers in another order."""
    return replace(sample, aux=tuple(sample.aux[index] for index in order))


if __name__ == "__main__":
    import time

    begin = time.monotonic()
    made = build()
    ids_ = made.text.sample(64, seed=999)
    agreement = float((made.target(torch.from_numpy(ids_)).argmax(-1)[:, :-1].numpy() == ids_[:, 1:]).mean())
    held = evaluate(made.drafter, made.target, made.samples(64))
    wrong = evaluate(made.drafter, made.target, made.samples(64), ids=made.mapping_b)
    rows = made.mapping_a == made.mapping_b
    print(  # noqa: T201
        f"{time.monotonic() - begin:.1f} s on {os.cpu_count()} cores; target right {agreement:.2f}; drafter A loss "
        f"{held.loss[0]:.2f} accuracy {held.accuracy[0]:.2f}; under B loss {wrong.loss[0]:.2f} accuracy {wrong.accuracy[0]:.2f}; "
        f"ln D {math.log(D):.2f}; rows that agree {rows.mean():.2f}, of text {made.text.frequencies[made.mapping_a[rows]].sum():.2f}; "
        f"shared {np.isin(made.mapping_a, made.mapping_b).mean():.2f}"
    )
