"""A case's drafter run over its samples: does it predict them as they are stored, or only under another convention?"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .replay_run import MARGIN, Request, replay

TYPE_CHECKING = False
if TYPE_CHECKING:
    from remote_diag.probe import Context

    from .replay import Run

SAMPLES = 8
TOKENS = 128


@dataclass(frozen=True)
class Replayed:
    """What the drafter does as declared, and the best that it does under one of the alternatives."""

    declared: Run
    best: Run
    """Of the alternatives; ``declared`` where there are none."""
    chance: float

    @property
    def fits(self) -> bool:
        """Whether it predicts the samples as they are: far above chance, with a loss well below that of a uniform guess."""
        return _predicts(self.declared, self.chance)

    @property
    def alternative(self) -> bool:
        """Whether it only predicts them under the best alternative."""
        gain = self.declared.score - self.best.score
        return gain >= MARGIN and _predicts(self.best, self.chance) and self.best.steps[0].top1 >= 1.3 * self.declared.steps[0].top1

    def told(self) -> str:
        """Return the numbers of the declared run in words."""
        first = self.declared.steps[0]
        return "the drafter before, run over these samples: top-1 %.3f, loss %.3g (a uniform guess: %.3g)" % (
            first.top1, first.loss, -math.log(self.chance),
        )  # fmt: skip


def _predicts(run: Run, chance: float) -> bool:
    first = run.steps[0]
    return first.top1 >= max(10 * chance, 0.1) and first.loss < 0.8 * -math.log(chance)


def has_torch() -> bool:
    """Whether torch can be imported."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True


def run_over(
    context: Context, drafter: str, samples: tuple[str, ...], target: str | None, alternatives: tuple[str, ...] = ()
) -> Replayed:
    """Run ``drafter`` over ``samples`` as its files declare it, and under each alternative (see :func:`replay_run.parse`).

    Raises:
        Unreadable, Damaged: it cannot be run over these samples.
    """
    request = Request(drafter, samples, target, None, alternatives or ("shift=1",), 3, SAMPLES, TOKENS)
    report = replay(context, request, "cpu")
    declared, others = report.runs[0], report.runs[1:]
    best = min(others, key=lambda run: run.score, default=declared)
    return Replayed(declared, best if alternatives else declared, 1.0 / report.draft_vocab)
