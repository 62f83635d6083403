"""Findings about two draft vocabularies held against each other: what differs, how much text that is, what to do."""

from __future__ import annotations

from .mappings import shares

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from remote_diag.probe import Context

    from .mappings import Comparison, Shares
    from .sides import Side


def report_vocabularies(context: Context, a: Side, b: Side) -> None:
    """Report that A and B belong to different targets."""
    if a.vocab is not None and b.vocab is not None and a.vocab != b.vocab:
        context.finding(
            "fail",
            "target-vocab-differs",
            "A and B belong to target vocabularies of different sizes, so equal ids need not be equal tokens",
            value=b.vocab,
            unit="tokens",
            threshold=a.vocab,
            threshold_source="the target vocabulary of A",
            action="check that both drafters belong to the same target model and tokenizer",
        )


def weigh(context: Context, a: Side, b: Side, counts: NDArray[Any] | None) -> Shares | None:
    """Return the shares of text; None where they are not known, which is reported when counts were given."""
    if counts is None or a.ids is None or b.ids is None:
        return None
    weighed = shares(a.ids, b.ids, counts)
    if weighed is None:
        context.finding("unknown", "counts-empty", "No token was counted, so there are no shares of text", value=0, unit="tokens")
        return None
    vocab = max((side.vocab for side in (a, b) if side.vocab is not None), default=None)
    if vocab is not None and len(counts) > vocab and counts[vocab:].any():
        context.finding(
            "degraded",
            "counts-of-other-vocabulary",
            "The counts name tokens beyond the target vocabulary: they come from another tokenizer",
            value=len(counts),
            unit="tokens",
            threshold=vocab,
            threshold_source="the target vocabulary of A and B",
            action="count the corpus again with the target's tokenizer",
        )
    return weighed


def report_comparison(
    context: Context, a: Side, b: Side, comparison: Comparison | None, shares: Shares | None
) -> None:
    """Report how the rows of A and B relate."""
    if comparison is None or a.ids is None or b.ids is None:
        return
    rows = len(b.ids)
    if comparison.relation == "identical":
        context.finding(
            "ok", "mappings-identical", "A and B give every row the same token", value=rows, unit="rows", threshold=rows
        )
        return
    evidence = [
        "{:,} of B's {:,} tokens have a row in A; {:,} have none".format(
            comparison.shared_targets, rows, comparison.rows_without_source
        ),
        "the first {:,} rows agree".format(comparison.common_prefix),
    ]
    if comparison.max_shift is not None:
        order = "keep their order and move" if comparison.order_preserved else "change their order and move"
        evidence.append("shared tokens {} by up to {:,} rows".format(order, comparison.max_shift))
    if shares is not None:
        evidence.append("%.2f %% of the counted tokens keep their row" % (100 * shares.positional))
        lost, gained = (100 * (coverage - shares.shared) for coverage in (shares.coverage_a, shares.coverage_b))
        evidence.append("%.2f %% have a row only in A, %.2f %% only in B" % (lost, gained))
    context.finding(
        "fail",
        "mappings-differ",
        "A and B give the same row different tokens: {:,} of {:,} rows agree".format(comparison.positional_matches, rows),
        value=comparison.positional_matches,
        unit="rows",
        threshold=rows,
        threshold_source="a head can be used under another mapping only if every row keeps its token",
        evidence=tuple(evidence),
        action=_advice(comparison),
    )


def _advice(comparison: Comparison) -> str:
    keep = "keep A's d2t and t2d for training and serving (rdiag vocab-keep writes them and finds what would replace them)"
    if not comparison.shared_targets:
        return "%s; the two have no token in common, nothing of A's head can be used under B" % keep
    moved = "move the rows of A's lm_head by token id, together with d2t, t2d and draft_vocab_size (rdiag vocab-remap)"
    if comparison.rows_without_source:
        cost = "{:,} rows come from A, {:,} must be made anew".format(
            comparison.shared_targets, comparison.rows_without_source
        )
    elif comparison.relation == "permutation":
        cost = "nothing is lost"
    else:
        cost = "every row of B has its source in A"
    return "%s; or %s: %s" % (keep, moved, cost)
