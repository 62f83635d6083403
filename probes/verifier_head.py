"""Hold a drafter's head against its target's: whose rows are they, in which order, and which mapping do they follow?

Trainers make the head that the loss compares with by cutting the target's head with t2d; many start the drafter's own
head from the same rows. This probe finds out from the weights themselves which target token each row stands for: bit for
bit where rows were copied, by direction where they were trained on, by their neighbourhood where they were trained from
random numbers. Rows are read in pieces; memory stays far below the size of either head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from probes.lib.drafter import Drafter
    from probes.lib.files import Meter
    from probes.lib.head_findings import HeadReport
    from probes.lib.mappings import Ids
    from probes.lib.matrix import Matrix
    from probes.lib.sides import Side
    from remote_diag.probe import Context

EFFECTS = ("reads-files",)

Method = Literal["exact", "cosine", "similarity"]


@dataclass(frozen=True)
class Params:
    """Which drafter to hold against which target."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    drafter: str
    """The drafter's checkpoint on the host: folder or file."""
    target: str
    """The target model on the host: folder (or file) with lm_head."""
    mapping: str | None = None
    """Another mapping that the head may follow: file or folder on the host."""
    previous: str | None = None
    """The drafter that this one was started from: tells whether its head kept its rows when the mapping changed."""
    counts: str | None = None
    """Token counts on the host; adds the order of frequency to what is tried."""
    seed: int = 0
    """For the choice of the rows that are sampled."""

    def __post_init__(self) -> None:
        """Check what no path can be."""
        for name in ("drafter", "target", "mapping", "previous", "counts"):
            path = getattr(self, name)
            if path is not None and (not path or "\0" in path):
                raise ValueError("%s must be a path: not empty, without NUL" % name)
        if not 0 <= self.seed < 1 << 32:
            raise ValueError("seed must be 0 to 4294967295")


@dataclass(frozen=True)
class Guess:
    """One guess at what the rows stand for, and how well it fits."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    name: str
    """d2t, t2d, d2t-as-ids, d2t-as-offsets, other, frequency or first-rows."""
    meaning: str
    """In words; names the guesses that are equal to it."""
    rows: int
    """Sampled rows to which it gives a token."""
    exact: float | None
    """Share of sampled rows that equal the target's bit for bit after the cast, 0 to 1."""
    cosine: float | None
    """Mean cosine with the target's rows, -1 to 1; null where the widths differ."""
    similarity: float | None
    """Mean correlation of a row's cosines to other rows with those of the target's rows, -1 to 1; null where the
    other two decide."""
    agreeing: float | None
    """Share of randomly chosen rows that fit on their own, 0 to 1."""


@dataclass(frozen=True)
class Head:
    """One head of the drafter's checkpoint."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    name: str
    """Full name of the tensor."""
    dtype: str
    """Its type as stored."""
    rows: int
    """Draft tokens; all target tokens in some exports."""
    columns: int
    """Width of the drafter."""
    follows: str | None
    """Name of the guess that it follows; null when none stands out."""
    method: Method | None
    """The evidence that decided: exact, cosine or similarity."""
    margin: float | None
    """By how much the best guess beats the next best on the rows where they differ."""
    runner_up: str | None
    """Name of the next best guess."""
    rows_compared: int
    """Rows on which these two differ, as far as they were sampled."""
    rows_exact: int | None
    """Rows that are the target's bit for bit under the guess that it follows; null when it follows none."""
    rows_copied: int | None
    """Rows that are copies of any row of the target; null when that was not looked for."""
    guesses: tuple[Guess, ...]
    """All that was tried."""


@dataclass(frozen=True)
class Result:
    """What the heads stand for."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    follows: str | None
    """What the drafter's own head follows; null when that cannot be told."""
    method: Method | None
    """The evidence for it."""
    exact: bool | None
    """Whether its rows are the target's bit for bit up to the cast; null when it follows nothing."""
    loss_order_matches: bool | None
    """Whether its rows are in the ascending order that cutting the target's head with t2d gives; null when unknown."""
    previous_follows: Literal["rows", "tokens"] | None
    """What it kept of the previous head: rows in their places, or rows with their tokens; null when not told."""
    draft_vocab_size: int | None
    """Rows of d2t."""
    lm_head: Head
    """The drafter's own head."""
    verifier_lm_head: Head | None
    """The target's rows that the loss compares with, where the checkpoint holds them."""
    target_head: str
    """Full name of the target's head."""
    target_dtype: str
    """Its type as stored."""
    target_rows: int
    """Its rows; padded heads have more than there are tokens."""
    target_tied: bool
    """Whether it is the embedding."""
    bytes_read: int
    """Bytes read from all files."""


def run(params: Params, context: Context) -> Result:
    """Open both, build the guesses, compare."""
    context.require("numpy")
    from probes.lib.files import Damaged, Meter, Unreadable

    meter = Meter()
    try:
        return _run(params, context, meter)
    except (Unreadable, Damaged) as error:
        context.unfit(str(error), getattr(error, "hint", None))


def _run(params: Params, context: Context, meter: Meter) -> Result:
    from probes.lib.drafter import open_drafter
    from probes.lib.head_findings import build_guesses, examine, report_head
    from probes.lib.target import open_target

    with open_drafter(params.drafter, meter) as drafter, open_target(params.target, meter) as target:
        head, theirs = drafter.matrix("lm_head"), target.head()
        side = own_side(params.drafter, theirs.rows, meter)
        other = None if params.mapping is None else _ids(params.mapping, theirs.rows, meter)
        guesses = build_guesses(side, head.rows, theirs.rows, other, _counts(params.counts, meter))
        context.progress(0, None, unit="rows", label="comparing heads")
        report = examine(head, theirs, guesses, params.seed)
        report_head(context, head, report, side, subject=drafter.path)
        if side is not None and side.t2d_problem is not None:
            context.finding(
                "unknown", "t2d-unusable", "In which order t2d puts the target's rows cannot be told: %s" % side.t2d_problem,
                subject=drafter.path, action="write t2d anew from d2t: true for every token that has a draft row",
            )  # fmt: skip
        loss_head = _loss_head(context, drafter, theirs, side, params.seed)
        previous = None
        if params.previous is not None:
            previous = _previous(context, params, head, side, meter)
        return Result(
            follows=report.judgement.follows,
            method=report.judgement.method,  # type: ignore[arg-type]
            exact=None if report.rows_exact is None else report.rows_exact == head.rows,
            loss_order_matches=_loss_order(report, side),
            previous_follows=previous,  # type: ignore[arg-type]
            draft_vocab_size=side.rows if side else None,
            lm_head=_head(head, report),
            verifier_lm_head=loss_head,
            target_head=theirs.name,
            target_dtype=theirs.dtype,
            target_rows=theirs.rows,
            target_tied=target.tied,
            bytes_read=meter.bytes,
        )


def own_side(path: str, target_rows: int, meter: Meter) -> Side | None:
    """Return the drafter's own mapping, None where it has none."""
    from probes.lib.files import Absent
    from probes.lib.sides import read_side, understand

    try:
        side = read_side("the drafter", path)
    except Absent:
        return None
    meter.bytes += side.meter.bytes
    understand(side, target_rows, None)
    return side


def _ids(path: str, target_rows: int | None, meter: Meter) -> Ids:
    from probes.lib.files import Damaged
    from probes.lib.sides import read_side, understand

    side = read_side("the other mapping", path)
    meter.bytes += side.meter.bytes
    understand(side, target_rows, None)
    if side.ids is None:
        raise Damaged(path, "no usable mapping: %s" % side.reason)
    return side.ids


def _counts(path: str | None, meter: Meter) -> NDArray[Any] | None:
    from probes.lib.vocabulary import read_counts

    return None if path is None else read_counts(path, meter)[0]


def _loss_head(context: Context, drafter: Drafter, theirs: Matrix, side: Side | None, seed: int) -> Head | None:
    """Judge the target's rows that the checkpoint holds for the loss, where it does."""
    from probes.lib.head_findings import build_guesses, examine, report_loss_head

    if not drafter.has("verifier_lm_head"):
        return None
    head = drafter.matrix("verifier_lm_head")
    report = examine(head, theirs, build_guesses(side, head.rows, theirs.rows, None, None), seed)
    report_loss_head(context, head, report, side, subject=drafter.path)
    return _head(head, report)


def _previous(context: Context, params: Params, head: Matrix, side: Side | None, meter: Meter) -> str | None:
    from probes.lib.drafter import open_drafter
    from probes.lib.head_findings import report_previous

    path = params.previous or ""
    if side is None or side.ids is None:
        context.finding("unknown", "previous-not-compared", "Without a mapping of its own the head cannot be followed back")
        return None
    ids = _ids(path, side.vocab, meter), side.ids
    with open_drafter(path, meter) as previous:
        return report_previous(context, head, previous.matrix("lm_head"), ids, subject=side.path, seed=params.seed)


def _loss_order(report: HeadReport, side: Side | None) -> bool | None:
    if report.judgement.follows is None or side is None or side.t2d is None or side.t2d.kind != "mask":
        return None
    ids = next(guess.ids for guess in report.guesses if guess.name == report.judgement.follows)
    return side.t2d.in_order(ids)


def _head(head: Matrix, report: HeadReport) -> Head:
    from probes.lib.files import shown

    judgement = report.judgement
    meanings = {guess.name: guess.meaning for guess in report.guesses}
    return Head(
        name=shown(head.name),
        dtype=head.dtype,
        rows=head.rows,
        columns=head.columns,
        follows=judgement.follows,
        method=judgement.method,  # type: ignore[arg-type]
        margin=judgement.margin,
        runner_up=judgement.runner_up,
        rows_compared=judgement.rows_compared,
        rows_exact=report.rows_exact,
        rows_copied=None if report.copied_ids is None else report.copies,
        guesses=tuple(
            Guess(score.name, meanings[score.name], score.rows, score.exact, score.cosine, score.similarity, score.agreeing)
            for score in judgement.scores
        ),
    )
