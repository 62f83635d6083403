"""The norms inside the drafter are set differently in training than they were: flags in config.json differ.

norm_before_residual, norm_output, fc_norm and norm_before_fc change what the same weights compute. Programs have different
defaults for them, and some do not know them at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from probes.lib.files import Meter
    from probes.lib.hypothesis import Answer
    from remote_diag.probe import Context

EFFECTS = ("reads-files",)
HYPOTHESIS = {"cost_s": 4.0, "likelihood": 0.1}

MATTERS = 0.3
"""Nats that the wrong setting costs at least."""


@dataclass(frozen=True)
class Params:
    """Entries of the case."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    drafter_before: str
    """The drafter that serves above chance (A)."""
    drafter_after: str
    """The drafter as training has it (B)."""
    samples: tuple[str, ...] = ()
    """Files with the hidden states that it is trained on."""
    target: str | None = None
    """The target model."""


@dataclass(frozen=True)
class Result:
    """What every hypothesis answers."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    verdict: Literal["supported", "refuted", "undecided"]
    """Whether it holds."""
    evidence: tuple[str, ...]
    """The numbers that say so."""
    explains: str | None
    """What it would account for, in words."""
    accuracy: float | None
    """Accuracy that training would start with for this cause alone, at most, 0 to 1."""
    loss: float | None
    """Loss that training would start with for this cause alone, nat."""
    next_command: str | None
    """What to type next."""
    missing: tuple[str, ...]
    """Entries of the case that would decide it."""


def run(params: Params, context: Context) -> Result:
    """Compare the flags, and run the drafter both ways where that is possible."""
    context.require("numpy")
    from probes.lib.hypothesis import answered

    return Result(**answered(lambda meter: _decide(params, context, meter)))


def _decide(params: Params, context: Context, meter: Meter) -> Answer:
    from probes.lib.hypothesis import refuted, supported, undecided

    before, after = _flags(params.drafter_before, meter), _flags(params.drafter_after, meter)
    facts = ["%s: %s before, %s in training" % (name, _said(before[name]), _said(after[name])) for name in FLAGS]
    differing = [name for name in FLAGS if bool(before[name]) != bool(after[name])]
    more = {
        "explains": "a first step or later steps that collapse: the same weights compute something else",
        "next_command": "set %s in config.json to what the drafter was trained with" % (" and ".join(differing) or "them"),
    }
    if not differing:
        return refuted(*facts)
    silent = [name for name in differing if before[name] is None or after[name] is None]
    if differing != ["norm_before_residual"] or not params.samples:
        if silent and len(silent) == len(differing):
            return undecided(*facts, "%s is said in one of them only, and defaults differ" % silent[0], missing=("samples",), **more)
        return supported(*facts, **more)
    return _by_replay(params, context, facts, bool(before["norm_before_residual"]), more)


FLAGS = ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc")


def _flags(path: str, meter: Meter) -> dict[str, bool | None]:
    from probes.lib.drafter import open_drafter

    with open_drafter(path, meter) as drafter:
        config = drafter.config
        return {name: None if config is None else config.flag(name) for name in FLAGS}


def _said(value: bool | None) -> str:
    return "not said" if value is None else str(value).lower()


def _by_replay(params: Params, context: Context, facts: list[str], flag: bool, more: dict[str, Any]) -> Answer:
    """Judge by what the drafter does either way: trained states may be of nearly the size that the norm gives them."""
    from probes.lib.case_replay import has_torch, run_over
    from probes.lib.hypothesis import refuted, supported, undecided

    if not has_torch():
        return supported(*facts, **more)
    found = run_over(context, params.drafter_before, params.samples, params.target, ("residual=%s" % ("off" if flag else "on"),))
    gain = found.best.score - found.declared.score
    facts.append("run over the samples, top-1 %.3f as before and %.3f as in training; %.2f nats between them" % (
        found.declared.steps[0].top1, found.best.steps[0].top1, gain))  # fmt: skip
    if not found.fits and gain < MATTERS:
        return undecided(*facts, "the drafter predicts these samples neither way", **more)
    return supported(*facts, accuracy=found.best.steps[0].top1, **more) if gain >= MATTERS else refuted(*facts)
