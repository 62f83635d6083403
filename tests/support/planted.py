"""Cases for triage: the tiny stack with one cause planted in it, on disk, with what its training then prints.

Every case has all inputs, and everything in it but the planted cause is sound. On disk the vocabulary is wider than the one
that was trained with: between any two tokens lie some that no text has. So offsets are as large as those of real
vocabularies, which a cast to a short float needs to do harm.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from . import checkpoints
from .tiny_files import normed, write_drafter, write_samples, write_target
from .tiny_stack import (
    AUX,
    STEPS,
    Curve,
    D,
    Drafter,
    H,
    Ids,
    Sample,
    Stack,
    V,
    capture,
    copy_drafter,
    reordered,
    shifted,
    train_drafter,
)

SAMPLES = 8
SPREAD = 16
"""Token t of the stack is token 16 t on disk."""
WIDE = V * SPREAD
"""Tokens of the target on disk."""
FIRST = 5
"""Numbers of the training that the case holds."""
TRAINING = 256
"""Conversations that the fine-tuning trains on."""


@dataclass(frozen=True)
class Planted:
    """A case on disk."""

    cause: str | None
    """Id of the hypothesis that must be supported; None for a sound one."""
    folder: Path
    values: dict[str, Any]
    """Entries of the case."""
    curve: Curve
    """What the training prints."""

    @property
    def case(self) -> Path:
        """The case as a file."""
        return self.folder / "case.yaml"


def _spread(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return rows of the wide vocabulary; those of tokens that no text has are small and random."""
    wide = np.random.default_rng(11).normal(scale=0.02, size=(len(rows) * SPREAD, rows.shape[1])).astype(np.float32)
    wide[::SPREAD] = rows
    return wide


def _patch(path: Path, vocab: int) -> None:
    config = json.loads(path.read_text())
    for values in (config, config.get("transformer_layer_config", {})):
        if "vocab_size" in values:
            values["vocab_size"] = vocab
    path.write_text(json.dumps(config))


class Planter:
    """Writes cases below a folder.

    Args:
        stack: trained.
        folder: where to.
    """

    def __init__(self, stack: Stack, folder: Path) -> None:
        self.stack = stack
        self.folder = folder
        self.rows = {name: _spread(stack.target.state_dict()[name].numpy()) for name in ("embed_tokens.weight", "lm_head.weight")}
        """Embedding and head of the target on disk."""
        self.target = self._write_target(folder / "target")
        self.counts = folder / "counts.npy"
        counts = np.zeros(WIDE, np.int64)
        counts[::SPREAD] = stack.text.frequencies * 1e7
        np.save(self.counts, counts)
        self.ids = stack.text.sample(TRAINING, seed=7000)
        self.sound = capture(stack.target, self.ids)
        self.serving = folder / "serving"
        self._write_samples(self.serving, self.sound, "speculators")
        self.before = {
            dialect: self.write_drafter(folder / f"before-{dialect}", stack.drafter, dialect) for dialect in ("speculators", "specforge")
        }

    def plant(self, cause: str) -> Planted:
        """Write the case of a cause, ``healthy`` for none."""
        return PLANTS[cause](self, cause)

    def case(
        self,
        cause: str,
        curve: Curve,
        *,
        after: dict[str, Any] | None = None,
        drafter: Drafter | None = None,
        samples: Sequence[Sample] | None = None,
        kind: str = "speculators",
        trainer: str = "speculators",
        dialect: str = "speculators",
        **more: Any,
    ) -> Planted:
        """Write everything of a case; what is not given is sound."""
        folder = self.folder / cause
        drafted = self.write_drafter(folder / "after", drafter or self.stack.drafter, dialect, loss_head=True, **(after or {}))
        self._write_samples(folder / "samples", samples or self.sound, kind)
        values = {
            "drafter_before": str(self.before[dialect]), "drafter_after": str(drafted), "target": str(self.target),
            "samples": [str(folder / "samples")], "serving_dump": [str(self.serving)], "counts": str(self.counts),
            "trainer": trainer, "serving_accept_length": round(self.accept_length, 3),
            "loss": [round(value, 6) for value in curve.loss[:FIRST]],
            "accuracy": [round(value, 6) for value in curve.accuracy[:FIRST]], **more,
        }  # fmt: skip
        # JSON is YAML.
        (folder / "case.yaml").write_text(json.dumps(values, indent=1) + "\n")
        return Planted(None if cause == "healthy" else cause, folder, values, curve)

    def write_drafter(
        self,
        folder: Path,
        drafter: Drafter,
        dialect: str,
        *,
        ids: Ids | None = None,
        t2d: Ids | None = None,
        loss_head: bool = False,
        **tensors: NDArray[Any],
    ) -> Path:
        """Write a drafter for the wide vocabulary.

        Args:
            folder: where to.
            drafter: the drafter.
            dialect: speculators or specforge.
            ids: the tokens that its rows stand for; its own by default.
            t2d: the tokens that t2d marks; ``ids`` by default.
            loss_head: whether the head that the loss compares with is in it, as speculators keeps it.
            tensors: by name, dots written as two underscores; instead of what they would be.
        """
        ids = drafter.ids if ids is None else ids
        marked = ids if t2d is None else t2d
        content: dict[str, NDArray[Any]] = {
            "d2t": checkpoints.offsets(ids * SPREAD), "t2d": checkpoints.mask(marked * SPREAD, WIDE),
        }  # fmt: skip
        if dialect == "speculators":
            embed = drafter.embed_tokens.weight.detach().numpy()
            content["embed_tokens.weight"] = self.rows["embed_tokens.weight"].copy()
            content["embed_tokens.weight"][::SPREAD] = embed
            if loss_head:
                content["verifier_lm_head.weight"] = self.head(marked)
        content.update({name.replace("__", "."): tensor for name, tensor in tensors.items()})
        write_drafter(folder, drafter, dialect=dialect, tensors=content)
        _patch(folder / "config.json", WIDE)
        return folder

    def _write_target(self, folder: Path) -> Path:
        state = {**self.stack.target.state_dict(), **{name: torch.from_numpy(rows) for name, rows in self.rows.items()}}
        write_target(folder, SimpleNamespace(state_dict=lambda: state))  # type: ignore[arg-type]
        _patch(folder / "config.json", WIDE)
        return folder

    def _write_samples(self, folder: Path, samples: Sequence[Sample], kind: str) -> None:
        wide = [replace(sample, ids=sample.ids * SPREAD) for sample in samples[:SAMPLES]]
        write_samples(folder, wide, kind, self.stack.target)

    def head(self, ids: Ids) -> NDArray[np.float32]:
        """Return the target's rows of some tokens of the stack."""
        return self.rows["lm_head.weight"][ids * SPREAD]

    def train(self, drafter: Drafter | None = None, samples: Sequence[Sample] | None = None, *, steps: int = FIRST, **how: Any) -> Curve:
        """Return what the first steps of a fine-tuning print; the drafter is changed by it."""
        drafter = drafter or copy_drafter(self.stack)
        rate = how.pop("learning_rate", 1e-4)
        return train_drafter(
            drafter, self.stack.target, samples or self.sound, steps=steps, batch=64, learning_rate=rate, **how
        )

    @cached_property
    def other(self) -> Ids:
        """Mapping B: of those that drifted corpora give, the one that keeps the fewest tokens of the text in their rows."""
        candidates = [self.stack.text.mapping(seed) for seed in range(2, 13)]
        return min(candidates, key=lambda ids: self.stack.text.frequencies[ids[ids == self.stack.mapping_a]].sum())

    @cached_property
    def accept_length(self) -> float:
        """Return the mean number of tokens that a pass of the target yields with the drafter, counted on fresh text."""
        ids, mask, aux, final = self._tensors(self.stack.samples(64))
        with torch.no_grad():
            rows = torch.from_numpy(self.stack.mapping_a)
            best = self.stack.target.lm_head(self.stack.target.norm(final)).argmax(-1)
            length = ids.shape[1] - STEPS
            right = torch.ones(len(ids), length, dtype=torch.bool)
            total = torch.ones(len(ids), length)
            for step, logits in enumerate(self.stack.drafter(aux[:, :length], ids[:, 1:], STEPS)):
                right &= rows[logits.argmax(-1)] == best[:, 1 + step : 1 + step + length]
                total += right
        counted = mask[:, 1 : 1 + length].bool()
        return float(total[counted].mean())

    def accuracy_through(self, drafter: Drafter, trained: Ids, offsets: NDArray[np.int64]) -> float:
        """Return the accuracy of trainers that translate what is drafted with d2t, and compare among all tokens.

        Args:
            drafter: the drafter.
            trained: tokens of its rows.
            offsets: d2t, of the wide vocabulary.
        """
        ids, mask, aux, final = self._tensors(self.sound)
        length = ids.shape[1] - STEPS
        translate = torch.from_numpy(offsets + np.arange(D))
        with torch.no_grad():
            best = self.stack.target.lm_head(self.stack.target.norm(final)).argmax(-1)[:, 1 : 1 + length]
            logits = drafter(aux[:, :length], ids[:, 1:], 1)[0]
        # Places whose token has no draft row count as wrong.
        hits = (translate[logits.argmax(-1)] == best * SPREAD) & torch.isin(best, torch.from_numpy(trained))
        counted = mask[:, 1 : 1 + length].float()
        return float((hits * counted).sum() / counted.sum())

    @staticmethod
    def _tensors(samples: Sequence[Sample]) -> tuple[Any, Any, Any, Any]:
        return (
            torch.from_numpy(np.stack([sample.ids for sample in samples])),
            torch.from_numpy(np.stack([sample.mask for sample in samples])),
            torch.from_numpy(np.stack([np.concatenate(sample.aux, 1) for sample in samples])),
            torch.from_numpy(np.stack([sample.final for sample in samples])),
        )


Plant = Callable[[Planter, str], Planted]


def _healthy(planter: Planter, cause: str) -> Planted:
    return planter.case(cause, planter.train())


def _mapping_replaced(planter: Planter, cause: str) -> Planted:
    drafter, new = copy_drafter(planter.stack), planter.other
    curve = planter.train(drafter, ids=new, steps=20)
    return planter.case(cause, curve, drafter=drafter, after={"ids": new})


def _verifier_order(planter: Planter, cause: str) -> Planted:
    rows = np.random.default_rng(3).permutation(planter.stack.mapping_a)
    curve = planter.train(verifier_rows=rows)
    return planter.case(cause, curve, after={"verifier_lm_head__weight": planter.head(rows)})


def _final_norm(planter: Planter, cause: str) -> Planted:
    samples = [replace(sample, final=normed(planter.stack.target, sample.final)) for sample in planter.sound]
    return planter.case(cause, planter.train(samples=samples), samples=samples)


def _aux_order(planter: Planter, cause: str) -> Planted:
    samples = [reordered(sample, (2, 0, 1)) for sample in planter.sound]
    return planter.case(cause, planter.train(samples=samples), samples=samples)


def _shift_by_one(planter: Planter, cause: str) -> Planted:
    samples = [shifted(sample, 1) for sample in planter.sound]
    return planter.case(cause, planter.train(samples=samples), samples=samples)


def _aux_layer_ids(planter: Planter, cause: str) -> Planted:
    samples = capture(planter.stack.target, planter.ids, layers=tuple(layer - 1 for layer in AUX))
    return planter.case(cause, planter.train(samples=samples), samples=samples)


def _head_overwritten(planter: Planter, cause: str) -> Planted:
    drafter = copy_drafter(planter.stack)
    with torch.no_grad():
        drafter.lm_head.weight.copy_(torch.from_numpy(planter.rows["lm_head.weight"][:D]))
    return planter.case(cause, planter.train(drafter), drafter=drafter)


def _d2t_cast(planter: Planter, cause: str) -> Planted:
    ids = planter.stack.mapping_a * SPREAD
    raw = checkpoints.bfloat16(checkpoints.offsets(ids).astype(np.float32))
    rounded = checkpoints.from_bfloat16(raw).astype(np.int64).reshape(-1)
    return _through_d2t(planter, cause, rounded)


def _d2t_of_another(planter: Planter, cause: str) -> Planted:
    return replace(_through_d2t(planter, cause, checkpoints.offsets(planter.other * SPREAD)), cause="t2d-disagrees")


def _through_d2t(planter: Planter, cause: str, offsets: NDArray[np.int64]) -> Planted:
    """A fault of d2t alone: the loss is normal, the accuracy of a trainer that translates with d2t is not."""
    drafter, ids = copy_drafter(planter.stack), planter.stack.mapping_a
    curve = planter.train(drafter)
    curve = Curve(curve.loss, [planter.accuracy_through(drafter, ids, offsets)] * FIRST)
    return planter.case(
        cause, curve, drafter=drafter, after={"d2t": offsets}, kind="specforge", trainer="specforge", dialect="specforge"
    )


def _t2d_disagrees(planter: Planter, cause: str) -> Planted:
    drafter, new = copy_drafter(planter.stack), planter.other
    # speculators cuts the target's head with t2d; d2t is not used in training.
    curve = planter.train(drafter, ids=new)
    return planter.case(cause, curve, drafter=drafter, after={"t2d": new})


def _embedding_replaced(planter: Planter, cause: str) -> Planted:
    drafter = copy_drafter(planter.stack)
    rows = np.random.default_rng(5).normal(scale=0.5, size=(WIDE, H)).astype(np.float32)
    with torch.no_grad():
        drafter.embed_tokens.weight.copy_(torch.from_numpy(rows[::SPREAD].copy()))
    return planter.case(cause, planter.train(drafter), drafter=drafter, after={"embed_tokens__weight": rows})


def _body_replaced(planter: Planter, cause: str) -> Planted:
    drafter = Drafter(planter.stack.target, planter.stack.mapping_a)
    drafter.load_state_dict({**drafter.state_dict(), **{
        name: value for name, value in planter.stack.drafter.state_dict().items() if name.startswith(("lm_head.", "embed_tokens."))
    }})  # fmt: skip
    return planter.case(cause, planter.train(drafter), drafter=drafter)


def _norm_flags(planter: Planter, cause: str) -> Planted:
    drafter = Drafter(planter.stack.target, planter.stack.mapping_a, norm_before_residual=False)
    drafter.load_state_dict(planter.stack.drafter.state_dict())
    return planter.case(cause, planter.train(drafter), drafter=drafter)


def _mask_empty(planter: Planter, cause: str) -> Planted:
    samples = [replace(sample, mask=np.zeros_like(sample.mask)) for sample in planter.sound]
    return planter.case(cause, planter.train(samples=samples), samples=samples, kind="speculators-v1")


PLANTS: dict[str, Plant] = {
    "healthy": _healthy,
    "mapping-replaced": _mapping_replaced,
    "verifier-order": _verifier_order,
    "final-norm": _final_norm,
    "aux-order": _aux_order,
    "shift-by-one": _shift_by_one,
    "aux-layer-ids": _aux_layer_ids,
    "head-overwritten": _head_overwritten,
    "d2t-cast": _d2t_cast,
    "t2d-disagrees": _t2d_disagrees,
    "d2t-of-another": _d2t_of_another,
    "embedding-replaced": _embedding_replaced,
    "body-replaced": _body_replaced,
    "norm-flags": _norm_flags,
    "mask-empty": _mask_empty,
}
"""Cause -> what plants it. ``d2t-of-another`` is a second way in which t2d and d2t disagree."""


def read_head(folder: Path) -> NDArray[np.float32]:
    """Return ``lm_head.weight`` of a drafter in one safetensors file, float32, read without the project's own code."""
    from safetensors.numpy import load_file

    head: NDArray[np.float32] = load_file(folder / "model.safetensors")["lm_head.weight"]
    return head
