"""What a drafter's head says of its mapping when it is held against the target's head: guesses, verdict, findings."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .head_match import MAJORITY, Hypothesis, exact_rows, find_copies, judge
from .mappings import find_rows, is_ascending

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Literal

    from numpy.typing import NDArray

    from remote_diag.probe import Context

    from .head_match import Judgement, Score
    from .mappings import Ids
    from .matrix import Matrix
    from .sides import Side


_STRAY = 0.01
"""Share of rows that may be copies of other tokens' rows before the whole order is in question."""


@dataclass(frozen=True)
class HeadReport:
    """What was found out about one head."""

    judgement: Judgement
    guesses: tuple[Hypothesis, ...]
    rows_exact: int | None
    """Rows that are the target's bit for bit under the guess that the head follows; None when none was followed."""
    copied_ids: Ids | None
    """Target row of which each row is a copy, -1 for none; None when that was not looked for."""
    copies: int
    """Rows that are copies of some row of the target's head."""


def build_guesses(
    side: Side | None, rows: int, target_rows: int, other: Ids | None, counts: NDArray[Any] | None
) -> list[Hypothesis]:
    """Return all that the rows of a head may stand for; equal guesses are merged into the first of them.

    Args:
        side: the drafter's own mapping; None where it has none.
        rows: of the head.
        target_rows: of the target's head.
        other: ids of another mapping to try.
        counts: occurrences by token id, for the order of frequency.
    """
    import numpy as np

    guesses = [] if side is None else _own_guesses(side)
    if other is not None:
        guesses.append(Hypothesis("other", "the other mapping that was given", other))
    if counts is not None:
        # The largest counts first; of equal ones the smallest id, as the trainers that break ties do.
        order = np.argsort(-counts.astype(np.float64), kind="stable")[:rows]
        guesses.append(Hypothesis("frequency", "the most frequent tokens, most frequent first", order.astype(np.int64)))
    guesses.append(Hypothesis("first-rows", "tokens 0, 1, 2... in order", np.arange(rows, dtype=np.int64)))
    distinct: list[Hypothesis] = []
    for guess in guesses:
        ids = np.full(rows, -1, np.int64)
        count = min(rows, len(guess.ids))
        ids[:count] = guess.ids[:count]
        ids[(ids < 0) | (ids >= target_rows)] = -1
        twin = next((index for index, known in enumerate(distinct) if np.array_equal(known.ids, ids)), None)
        if twin is not None:
            meaning = "%s; the same as %s" % (distinct[twin].meaning, guess.meaning)
            distinct[twin] = replace(distinct[twin], meaning=meaning)
        elif (ids >= 0).sum() >= min(8, rows):
            distinct.append(replace(guess, ids=ids))
    return distinct


def _own_guesses(side: Side) -> list[Hypothesis]:
    import numpy as np

    guesses = []
    stored = side.stored.d2t if side.stored is not None and side.stored.d2t_name is not None else None
    ids = side.ids
    whole = None
    if stored is not None and stored.dtype.kind in "iuf" and (stored.dtype.kind != "f" or bool(np.isfinite(stored).all())):
        whole = np.clip(stored, -(1 << 40), 1 << 40).astype(np.int64)
    if ids is None and whole is not None:
        # Damaged as it may be, this is what servers take it for.
        ids = whole + np.arange(len(whole))
    if ids is not None:
        guesses.append(Hypothesis("d2t", "d2t, as servers read it", ids))
    if side.t2d is not None and side.t2d.kind == "mask":
        guesses.append(Hypothesis("t2d", "the tokens that t2d marks, in ascending order", np.flatnonzero(side.t2d.values)))
    if whole is not None and whole.any() and side.encoding != "absolute":
        guesses.append(Hypothesis("d2t-as-ids", "the numbers in d2t taken for token ids", whole))
    if whole is not None and whole.any() and side.encoding != "offset":
        guesses.append(Hypothesis("d2t-as-offsets", "the numbers in d2t taken for offsets", whole + np.arange(len(whole))))
    return guesses


def examine(head: Matrix, target: Matrix, guesses: list[Hypothesis], seed: int = 0) -> HeadReport:
    """Return which guess ``head`` follows, and whether its rows are the target's bit for bit.

    Reads samples of both heads; all rows of both only where rows turn out to be copies, or nothing fits.
    """
    judgement = judge(head, target, guesses, seed)
    ids = next((guess.ids for guess in guesses if guess.name == judgement.follows), None)
    if judgement.method not in (None, "exact"):
        return HeadReport(judgement, tuple(guesses), None if ids is None else 0, None, 0)
    equal = None if ids is None else exact_rows(head, target, ids)
    if equal is not None and equal.all():
        return HeadReport(judgement, tuple(guesses), head.rows, ids, head.rows)
    copied = find_copies(head, target)
    copies = int((copied >= 0).sum())
    if equal is not None and int(((copied >= 0) & ~equal).sum()) > _STRAY * head.rows:
        # The rows that do not fit are no accident either: they belong to other tokens.
        judgement, equal = replace(judgement, follows=None), None
    return HeadReport(judgement, tuple(guesses), None if equal is None else int(equal.sum()), copied, copies)


def report_head(context: Context, head: Matrix, report: HeadReport, side: Side | None, *, subject: str) -> None:
    """Report what the rows of a drafter's head stand for, and whether the mapping beside them says the same."""
    judgement = report.judgement
    evidence = tuple(_told(score) for score in judgement.scores)
    if judgement.follows is None:
        _report_undecided(context, head, report, side, evidence, subject=subject)
        return
    guess = next(guess for guess in report.guesses if guess.name == judgement.follows)
    margin = None if judgement.margin is None else round(judgement.margin, 4)
    if _as_expected(guess, report.guesses, _expected(head, side)):
        context.finding(
            "ok",
            "head-follows-mapping",
            "The rows of lm_head stand for %s" % guess.meaning,
            subject=subject,
            value=margin,
            threshold_source=_runner_up(judgement),
            evidence=evidence,
        )
    else:
        context.finding(
            "fail",
            "head-order",
            "The rows of lm_head do not stand for the tokens of its mapping, but for %s" % guess.meaning,
            subject=subject,
            value=margin,
            threshold_source=_runner_up(judgement),
            evidence=evidence,
            action="keep the mapping that the head follows, or move the head's rows by token id: rdiag vocab-remap",
        )
    _report_copies(context, head, report, subject=subject)
    score = next(score for score in judgement.scores if score.name == guess.name)
    if judgement.method == "similarity" and score.agreeing is not None and score.agreeing < MAJORITY:
        _report_partly(context, score, evidence, subject=subject, level="degraded")
    _report_loss_order(context, guess, side, subject=subject)


def _expected(head: Matrix, side: Side | None) -> tuple[str, ...]:
    """Return the names of the guesses that a healthy head follows."""
    if side is None or (side.rows is not None and side.rows < head.rows and head.rows >= (side.vocab or 0)):
        # Some exports have the target's whole head beside a d2t.
        return ("first-rows",)
    return ("d2t",) if side.ids is not None or side.t2d is None else ()


def _as_expected(guess: Hypothesis, guesses: tuple[Hypothesis, ...], expected: tuple[str, ...]) -> bool:
    """Whether ``guess`` is an expected one, or says the same as far as that reaches: a d2t can be shorter than the head."""
    for one in guesses:
        known = one.ids >= 0
        if one.name in expected and bool(known.any()) and bool((one.ids == guess.ids)[known].all()):
            return True
    return False


def _runner_up(judgement: Judgement) -> str | None:
    if judgement.runner_up is None:
        return None
    return "ahead of %r by this much on %d rows where the two differ, by %s" % (
        judgement.runner_up, judgement.rows_compared, _METHODS[judgement.method or "similarity"],
    )  # fmt: skip


_METHODS = {"exact": "equality of rows", "cosine": "cosine of rows", "similarity": "likeness of neighbourhoods"}


def _told(score: Any) -> str:
    parts = [
        "%s %s" % (label, "unknown" if value is None else "%.4f" % value)
        for label, value in (("equal rows", score.exact), ("cosine", score.cosine), ("similarity", score.similarity))
        if value is not None
    ]
    return "%s: %s (%d rows)" % (score.name, ", ".join(parts) or "nothing could be measured", score.rows)


def _report_undecided(
    context: Context, head: Matrix, report: HeadReport, side: Side | None, evidence: tuple[str, ...], *, subject: str
) -> None:
    if side is not None and side.stored is None:
        context.finding(
            "unknown",
            "head-undecided",
            "Which mapping lm_head follows cannot be told: its own cannot be read",
            subject=subject,
            evidence=(*evidence, side.damage or ""),
            action="compare the checkpoint's size and hash with the original's, and copy it again",
        )
        return
    if report.copied_ids is not None and report.copies > head.rows // 2:
        ids = report.copied_ids
        assumed = "d2t" if side is not None else "first-rows"
        guess = next((guess for guess in report.guesses if guess.name == assumed), None)
        told = "its mapping says" if side is not None else "servers assume without a d2t"
        agreeing = 0 if guess is None else int(((ids == guess.ids) & (ids >= 0)).sum())
        order = "in ascending order of ids" if is_ascending(ids[ids >= 0]) else "in no ascending order"
        context.finding(
            "fail",
            "head-order",
            "{:,} rows of lm_head are the target's, bit for bit, but of other tokens than {}".format(report.copies, told),
            subject=subject,
            value=agreeing,
            unit="rows",
            threshold=head.rows,
            threshold_source="rows that hold the token that %s" % ("d2t gives them" if side is not None else "has their number"),
            evidence=(*evidence, "the tokens that the rows hold are " + order),
            action="find the mapping that the head was made with, and keep it, or move the rows: rdiag vocab-remap",
        )
        return
    best = report.judgement.method
    scores = [score for score in report.judgement.scores if score.agreeing is not None]
    fitting = max(scores, key=lambda score: score.agreeing or 0.0, default=None)
    if best is not None and fitting is not None and 0 < (fitting.agreeing or 0.0) < MAJORITY:
        _report_partly(context, fitting, evidence, subject=subject, level="fail")
        return
    context.finding(
        "unknown",
        "head-undecided",
        "Which mapping lm_head follows cannot be told: %s"
        % ("none of those tried is better than chance" if best is None else "the best ones are too close to each other"),
        subject=subject,
        evidence=evidence,
        action="name the mapping that the head may have been trained with: --mapping FILE",
    )


def _report_copies(context: Context, head: Matrix, report: HeadReport, *, subject: str) -> None:
    if report.judgement.method != "exact":
        if report.judgement.method == "cosine":
            context.finding(
                "ok", "head-trained", "lm_head was trained away from a copy of the target's rows", subject=subject
            )
        return
    exact = report.rows_exact or 0
    if exact == head.rows:
        context.finding(
            "ok",
            "head-copied",
            "Every row of lm_head is the target's, bit for bit after the cast to %s" % head.dtype,
            subject=subject,
            value=exact,
            unit="rows",
            threshold=head.rows,
        )
        return
    context.finding(
        "fail",
        "head-rows-differ",
        "{:,} rows of lm_head are not the target's, while the others are bit for bit".format(head.rows - exact),
        subject=subject,
        value=exact,
        unit="rows",
        threshold=head.rows,
        threshold_source="a head that is copied and frozen equals the target's in every row",
        evidence=("{:,} rows are copies of some row of the target".format(report.copies),),
        action="the head was overwritten in part, or belongs to another target; copy the target's rows again by token id",
    )


def _report_partly(
    context: Context, score: Score, evidence: tuple[str, ...], *, subject: str, level: Literal["degraded", "fail"]
) -> None:
    context.finding(
        level,
        "head-fits-partly",
        "Only a part of the rows of lm_head fit the tokens that they should stand for: %s fits best" % score.name,
        subject=subject,
        value=round(score.agreeing or 0.0, 4),
        threshold=MAJORITY,
        threshold_source="share of random rows that fit better than wrong ones ever do",
        evidence=evidence,
        action="hold it against other mappings: --mapping FILE",
    )


def _report_loss_order(context: Context, guess: Hypothesis, side: Side | None, *, subject: str) -> None:
    if side is None or side.t2d is None or side.t2d.kind != "mask" or side.t2d.in_order(guess.ids):
        return
    # A head of all target tokens is cut by d2t, in whatever order that has.
    if guess.name == "first-rows" or (guess.name == "d2t" and side.t2d.agrees(guess.ids)):
        context.finding(
            "ok",
            "loss-order-differs",
            "lm_head is not in the ascending order of token ids, in which t2d cuts the target's head",
            subject=subject,
            action="use it only with trainers that gather by d2t",
        )
        return
    context.finding(
        "fail",
        "loss-order-differs",
        "A loss that cuts the target's head with t2d compares the rows of lm_head with those of other tokens",
        subject=subject,
        action="find out which mapping the head follows, and write d2t and t2d anew from it",
    )


def report_previous(
    context: Context, head: Matrix, previous: Matrix, ids: tuple[Ids, Ids], *, subject: str, seed: int
) -> str | None:
    """Report whether a head that was started from another one kept that one's rows although the tokens changed.

    Args:
        context: told of it.
        head: the head now.
        previous: the head that it was started from.
        ids: token of each of the previous head's rows, and of each row now.
        subject: path of the checkpoint.
        seed: for the sample.

    Returns:
        ``rows`` (each row stayed where it was), ``tokens`` (rows moved along with their tokens), None where neither shows.
    """
    import numpy as np

    old, new = ids
    stayed = np.arange(head.rows)
    stayed[stayed >= previous.rows] = -1
    moved = np.full(head.rows, -1, np.int64)
    count = min(head.rows, len(new))
    moved[:count] = find_rows(new[:count], old)
    if np.array_equal(stayed, moved):
        return "tokens"
    judgement = judge(head, previous, [Hypothesis("rows", "", stayed), Hypothesis("tokens", "", moved)], seed)
    margin = None if judgement.margin is None else round(judgement.margin, 4)
    evidence = tuple(_told(score) for score in judgement.scores)
    if judgement.follows == "rows":
        context.finding(
            "fail",
            "mapping-overwritten",
            "The head still has the rows of the one it was started from, in the same places, but the mapping changed",
            subject=subject,
            value=margin,
            threshold_source="margin on {:,} rows whose token changed".format(judgement.rows_compared),
            evidence=evidence,
            action="put the previous d2t and t2d back, or move the rows by token id before training: rdiag vocab-remap",
        )
    elif judgement.follows == "tokens":
        context.finding(
            "ok",
            "head-moved-with-mapping",
            "The head's rows moved along with their tokens when the mapping changed",
            subject=subject,
            value=margin,
            evidence=evidence,
        )
    return judgement.follows


def report_loss_head(
    context: Context, head: Matrix, report: HeadReport, side: Side | None, *, subject: str
) -> None:
    """Report whether the head that the loss compares with is the target's, cut with the checkpoint's own t2d."""
    judgement = report.judgement
    guess = next((guess for guess in report.guesses if guess.name == judgement.follows), None)
    evidence = tuple(_told(score) for score in judgement.scores)
    expected = side is None or side.t2d is None or side.t2d.kind != "mask"
    if guess is not None and not expected and side is not None and side.t2d is not None:
        expected = side.t2d.in_order(guess.ids)
    if guess is not None and expected and report.rows_exact == head.rows:
        context.finding(
            "ok",
            "loss-head-copied",
            "The head in the loss is the target's, bit for bit: the rows of %s" % guess.meaning,
            subject=subject,
            value=head.rows,
            unit="rows",
        )
        return
    context.finding(
        "fail",
        "loss-head-differs",
        "The head in the loss is not the target's head cut with t2d",
        subject=subject,
        value=report.rows_exact if report.rows_exact is not None else report.copies,
        unit="rows",
        threshold=head.rows,
        threshold_source="rows that are the target's, bit for bit, under the best guess",
        evidence=(*evidence, "it follows %s" % (guess.meaning if guess else "none of the guesses")),
        action="cut it anew from the target with the t2d that is used in training",
    )
