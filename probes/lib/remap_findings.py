"""What a remapping did, in words: rows and share of text by source, what to do next, and what is doubtful about it."""

from __future__ import annotations

from dataclasses import dataclass

from .files import shown
from .mappings import is_ascending, shares

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from remote_diag.probe import Context

    from .remap import Moves
    from .remap_folder import Folder, Written
    from .row_fill import Sample
    from .sides import Side

CHEAP = 0.01
"""Share of the counted tokens; a mapping that covers so little more is not worth new rows."""
IN_VERIFIERS_SPACE = 0.3
"""Mean cosine; rows of a head that was made from the verifier's stay far above it, those of any other are near 0."""
_LISTED = 20


@dataclass(frozen=True)
class Weights:
    """Shares of the counted tokens, 0 to 1."""

    moved: float
    """Whose row was moved."""
    initialised: float
    """Whose row was made anew."""
    before: float
    """That had a row under the old mapping."""

    @property
    def without_row(self) -> float:
        """That have no row under the new mapping."""
        return max(0.0, 1.0 - self.moved - self.initialised)

    @property
    def gained(self) -> float:
        """By how much the new mapping covers more than the old one."""
        return self.moved + self.initialised - self.before


def weigh(moves: Moves, counts: NDArray[Any]) -> Weights | None:
    """Return the shares of text by source; None when nothing was counted."""
    weighed = shares(moves.a, moves.b, counts)
    if weighed is None:
        return None
    return Weights(weighed.shared, max(0.0, weighed.coverage_b - weighed.shared), weighed.coverage_a)


def report_remapped(context: Context, folder: Folder, written: Written, missing: str, weights: Weights | None) -> None:
    """Report what was done, and whether keeping the old mapping would have been cheaper."""
    plan, fill = folder.plan, folder.fill
    moves = plan.moves
    evidence = ["{:,} other tensors are the source's, byte for byte".format(len(plan.copied))]
    if weights is not None:
        told = "of the counted tokens, %.2f %% keep their row, %.2f %% get a new one, %.2f %% have none"
        evidence.append(told % (100 * weights.moved, 100 * weights.initialised, 100 * weights.without_row))
    if fill is not None and fill.scale is not None:
        evidence.append("the verifier's rows were multiplied by %.4g" % fill.scale)
    if plan.dropped:
        names = ", ".join(shown(name) for name in plan.dropped[:_LISTED])
        evidence.append("left out, because trainers cut it from the target anew: %s" % names)
    evidence += ["not copied: %s" % line for line in written.left[:_LISTED]]
    made = ", {:,} made anew ({})".format(moves.initialised, missing) if moves.initialised else ""
    context.finding(
        "ok",
        "remapped",
        "{:,} rows were moved by token id{}; what was written was read again and is right".format(moves.moved, made),
        subject=shown(folder.place),
        value=moves.moved,
        unit="rows",
        threshold=len(moves.b),
        threshold_source="rows of the new head",
        evidence=tuple(evidence),
        action="train from it with exactly this mapping, and without the old optimizer state: its moments belong to the "
        "old rows",
    )
    if weights is not None and moves.initialised and weights.gained < CHEAP:
        context.finding(
            "ok",
            "keeping-is-cheaper",
            "The new mapping covers hardly more text than the drafter's own: keeping that costs next to nothing, and no row",
            value=round(weights.gained, 6),
            unit="share of counted tokens",
            threshold=CHEAP,
            threshold_source="what a mapping should cover more to be worth new rows",
            action="write the drafter's own mapping for the trainer with rdiag vocab-keep",
        )


def report_doubts(context: Context, folder: Folder, sample: Sample, b: Side) -> None:
    """Report what may be wrong although everything went as asked for."""
    plan, fill, subject = folder.plan, folder.fill, shown(folder.place)
    if fill is not None and fill.cosine is not None and fill.cosine < IN_VERIFIERS_SPACE:
        context.finding(
            "ok",
            "verifier-rows-foreign",
            "The drafter's head was not made from the verifier's: new rows start out about as good as random ones",
            subject=subject,
            value=round(fill.cosine, 4),
            unit="mean cosine",
            threshold=IN_VERIFIERS_SPACE,
            threshold_source="heads that trainers copy from the target stay above it",
            action="train them; until then --missing mean disturbs less, and keeping the old mapping not at all",
        )
    if sample.broken:
        context.finding(
            "degraded",
            "head-not-finite",
            "Rows of the source's head hold infinities or NaN, and were moved as they are",
            subject=subject,
            value=sample.broken,
            unit="rows",
            threshold=0,
            threshold_source="of %d that were looked at" % (sample.broken + len(sample.rows)),
            action="find an earlier checkpoint: a training does not recover from them",
        )
    if plan.suspects:
        context.finding(
            "degraded",
            "unknown-tensors",
            "Tensors of unknown meaning have one entry for each old draft row, and were copied as they are",
            subject=subject,
            evidence=tuple(shown(name) for name in plan.suspects[:_LISTED]),
            action="look at what they are for: if they belong to the head, they are in the wrong order now",
        )
    if b.ids is not None and not is_ascending(b.ids):
        context.finding(
            "ok",
            "rows-not-ascending",
            "The rows are not in the order of token ids; t2d alone would put them in that order",
            subject=subject,
            action="use it only with trainers that gather by d2t",
        )
