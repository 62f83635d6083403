"""The drafter's layers were not loaded: training begins from random ones, or from those of another drafter.

Loaders match tensors by name and leave what they do not find at its first random numbers, with a warning at most: layers
that are called ``midlayer`` in one program and ``layers.0`` in the next, an fc under another prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from probes.lib.drafter import Drafter
    from probes.lib.files import Meter
    from probes.lib.hypothesis import Answer
    from remote_diag.probe import Context

EFFECTS = ("reads-files",)
HYPOTHESIS = {"cost_s": 2.0, "likelihood": 0.05}


@dataclass(frozen=True)
class Params:
    """Entries of the case."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    drafter_after: str
    """The drafter as training has it (B)."""
    drafter_before: str | None = None
    """The drafter that serves above chance (A)."""


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
    """Hold the matrices of the layers and of fc after against those before."""
    context.require("numpy")
    from probes.lib.hypothesis import answered

    return Result(**answered(lambda meter: _decide(params, meter)))


ROWS = 256
"""Rows of each matrix that are looked at."""
KEPT = 0.5
"""Cosine of a matrix with the one before above which it is the same, trained on; a fine-tuning moves it by far less."""
UNRELATED = 0.1
"""Below this it is another one: two random matrices have 0 within 1 / sqrt(numbers looked at)."""


def _decide(params: Params, meter: Meter) -> Answer:
    from probes.lib.drafter import open_drafter
    from probes.lib.files import listed
    from probes.lib.hypothesis import needs

    with open_drafter(params.drafter_after, meter) as after:
        if params.drafter_before is not None:
            with open_drafter(params.drafter_before, meter) as before:
                return _compare(params, before, after)
        untrained = _untrained(after)
        if not untrained:
            return needs("drafter_before")
        return _held(params, "all norms of the layers are exactly 1, as before training: %s" % listed(untrained))


def _compare(params: Params, before: Drafter, after: Drafter) -> Answer:
    from probes.lib.files import listed
    from probes.lib.hypothesis import refuted, undecided

    roles = [role for role in sorted(before.roles) if role == "fc" or role.startswith("layers.")]
    matrices = [role for role in roles if len(getattr(before.entry(role), "shape", ())) == 2]
    common = [role for role in matrices if after.has(role)]
    if not common:
        return undecided("the two drafters have no matrix of a layer in common; theirs are called %s and %s" % (
            listed(before.layer_keys) or "nothing", listed(after.layer_keys) or "nothing"))  # fmt: skip
    likeness = {role: _likeness(before, after, role) for role in common}
    fact = "cosine of {} matrices of fc and the layers with those before: {:.3f} to {:.3f}".format(
        len(common), min(likeness.values()), max(likeness.values())
    )
    other = [role for role in common if likeness[role] < UNRELATED]
    if other:
        untrained = _untrained(after)
        return _held(
            params,
            fact,
            "%d of %d have nothing to do with those before: %s" % (len(other), len(common), listed(other)),
            *(["norms that are exactly 1, as before training: %s" % listed(untrained)] if untrained else []),
        )
    far = [role for role in common if likeness[role] < KEPT]
    if far:
        return undecided(fact, "neither the same nor unlike: %s" % listed(far))
    return refuted(fact)


def _held(params: Params, *evidence: str) -> Answer:
    from probes.lib.hypothesis import command, supported

    return supported(
        *evidence,
        explains="a loss near that of token frequencies or above it: what the layers make of the states says nothing to the head",
        next_command=command("rdiag", "drafter-check", params.drafter_before or params.drafter_after),
    )


def _likeness(before: Drafter, after: Drafter, role: str) -> float:
    """Return the cosine of sampled rows, taken as one vector; -1 where the shapes differ or a side is not finite."""
    import numpy as np

    a, b = before.matrix(role), after.matrix(role)
    if (a.rows, a.columns) != (b.rows, b.columns):
        return -1.0
    rows = np.unique(np.linspace(0, max(0, a.rows - 1), ROWS).astype(np.int64))
    x, y = a.take(rows).astype(np.float64).ravel(), b.take(rows).astype(np.float64).ravel()
    if np.array_equal(x, y):
        return 1.0
    with np.errstate(all="ignore"):
        cosine = float(x @ y / np.sqrt((x @ x) * (y @ y)))
    return cosine if np.isfinite(cosine) else -1.0


def _untrained(drafter: Drafter) -> list[str]:
    """Return the norms of the layers, where every one of them is exactly 1."""
    norms = [
        role for role in sorted(drafter.roles)
        if role.startswith("layers.") and "norm" in role and len(getattr(drafter.entry(role), "shape", ())) == 1
    ]  # fmt: skip
    return norms if norms and all(bool((drafter.read(role) == 1).all()) for role in norms) else []
