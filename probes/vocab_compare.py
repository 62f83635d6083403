"""Compare the draft vocabularies of two EAGLE-3 checkpoints: which target token each draft row stands for.

A drafter's output head has one row for each of its draft tokens; d2t says which target token that is. A head trained
under one mapping and used under another scores the wrong tokens, row by row, without any error. This probe reads the
two mappings (and nothing else of the checkpoints: no torch, no weights), finds out how each is encoded, checks d2t
against t2d and config.json, and counts what agrees.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from probes.lib.mappings import Comparison, Shares
    from probes.lib.sides import Side
    from remote_diag.probe import Context

EFFECTS = ("reads-files",)

Encoding = Literal["offset", "absolute", "ambiguous", "uninitialised", "corrupt"]
Verdict = Literal["identical", "permutation", "subset", "superset", "different", "corrupt", "unknown"]

MAX_FIRST = 1000
"""Rows; more belong into a file, not into a result."""


@dataclass(frozen=True)
class Params:
    """Which two mappings to compare."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    a: str
    """The mapping that the head was trained with: file or folder on the host. Safetensors and torch files (also sharded), .npy, .npz."""
    b: str
    """The mapping that it is, or would be, used with."""
    counts: str | None = None
    """File with the number of times each target token was seen (.npy, .npz, safetensors, token_freq.pt); adds shares of text."""
    first: int = 20
    """How many of the first rows to return, 0 to 1000."""
    encoding_a: Literal["auto", "offset", "absolute"] = "auto"
    """What d2t of A holds, where that cannot be told from the files."""
    encoding_b: Literal["auto", "offset", "absolute"] = "auto"
    """What d2t of B holds, where that cannot be told from the files."""

    def __post_init__(self) -> None:
        """Check what no path and no count can be."""
        for name in ("a", "b", "counts"):
            path = getattr(self, name)
            if path is not None and (not path or "\0" in path):
                raise ValueError("%s must be a path: not empty, without NUL" % name)
        if not 0 <= self.first <= MAX_FIRST:
            raise ValueError("first must be 0 to %d" % MAX_FIRST)


@dataclass(frozen=True)
class Row:
    """One draft row in both mappings."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    row: int
    """Index of the row, from 0."""
    target_a: int | None
    """Id of its target token in A; None where A has no such row or its d2t is not understood."""
    target_b: int | None
    """The same in B."""


@dataclass(frozen=True)
class Files:
    """What one side's files hold."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    path: str
    """Absolute path on the host of what was asked for."""
    kind: str | None
    """safetensors, safetensors-sharded, torch, torch-sharded, npy or npz; None when the files are too damaged to tell."""
    kind_reason: str | None
    """How the kind was recognised."""
    files: tuple[str, ...]
    """Paths of all files that were opened."""
    d2t_name: str | None
    """Full name of the tensor; None where there is none."""
    d2t_dtype: str | None
    """Its type as stored, int64 in healthy files."""
    rows: int | None
    """Draft rows that d2t has."""
    target_vocab_size: int | None
    """Target tokens, by t2d, else by config.json; None where neither tells."""
    min_id: int | None
    """Smallest target id in the draft vocabulary."""
    max_id: int | None
    """Largest target id in the draft vocabulary."""
    ascending: bool | None
    """Whether the rows are in the order of their target ids; None when d2t is not understood."""
    t2d_kind: str
    """mask, index-map, absent or unusable."""
    t2d_dtype: str | None
    """Its type as stored, bool in healthy files."""
    t2d_size: int | None
    """Target tokens that t2d has."""
    t2d_selected: int | None
    """Tokens that t2d marks; None where it is no mask."""
    t2d_hits: int | None
    """Rows of d2t whose token t2d marks (or maps back to that row); None when either is not understood."""
    t2d_agrees: bool | None
    """Whether t2d stands for exactly the tokens of d2t."""
    config_dialect: str | None
    """flat or speculators: how config.json beside it is laid out; None where there is none."""
    config_target_vocab_size: int | None
    """Target vocabulary by config.json."""
    config_draft_vocab_size: int | None
    """Draft vocabulary by config.json."""
    lm_head_rows: int | None
    """Rows of the drafter's output head, by its header; None where that was not at hand."""
    problem: str | None
    """What is damaged; None when nothing is."""


@dataclass(frozen=True)
class Result:
    """How the draft rows of A and B relate; null where a side is not understood."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    verdict: Verdict
    """identical; permutation (same tokens, other rows); subset (A's tokens are some of B's); superset; different;
    corrupt (a side is damaged or was never filled); unknown (an encoding cannot be told)."""
    draft_vocab_size: int | None
    """Draft rows of B; those of A stand in a.rows."""
    target_vocab_size: int | None
    """Target tokens, the larger of the two sides; null where neither a mask nor a config tells."""
    positional_matches: int | None
    """Rows that stand for the same target token in A and B."""
    shared_targets: int | None
    """Target tokens that have a row in both."""
    common_prefix: int | None
    """Rows before the first that differs."""
    rows_without_source: int | None
    """Rows of B whose token A lacks: nothing in A's head can fill them."""
    order_preserved: bool | None
    """Whether the shared tokens come in the same order in both."""
    max_shift: int | None
    """Largest distance, in rows, between the places of a shared token; null also when nothing is shared."""
    encoding_a: Encoding
    """What d2t of A holds: offsets (target = row + d2t[row]) or absolute target ids, or why neither."""
    encoding_b: Encoding
    """The same of B."""
    encoding_a_reason: str
    """How that was decided."""
    encoding_b_reason: str
    """How that was decided."""
    stored_equal: bool | None
    """Whether the two d2t hold the same numbers, whatever these mean; null when one could not be read."""
    first_rows: tuple[Row, ...]
    """The first rows; as many as were asked for, fewer where both sides have fewer."""
    first_differences: tuple[Row, ...]
    """The first rows that differ; as many as were asked for, fewer where fewer differ."""
    positional_token_share: float | None
    """Share of the counted tokens, 0 to 1, whose row is the same in both: the ceiling of a head used under the other
    mapping. Null without counts."""
    shared_token_share: float | None
    """Share of the counted tokens, 0 to 1, that have a row in both. Null without counts."""
    coverage_a: float | None
    """Share of the counted tokens, 0 to 1, that have a row in A. Null without counts."""
    coverage_b: float | None
    """Share of the counted tokens, 0 to 1, that have a row in B. Null without counts."""
    counts_name: str | None
    """Name of the array that the counts were taken from."""
    tokens_counted: float | None
    """Sum of all counts."""
    a: Files
    """What A's files hold."""
    b: Files
    """What B's files hold."""
    bytes_read: int
    """Bytes read from all files."""


def run(params: Params, context: Context) -> Result:
    """Read, understand, check, compare."""
    context.require("numpy")
    from probes.lib.side_findings import report_side

    a, b = _read_sides(context, params)
    for side in (a, b):
        report_side(context, side)
    _report_vocabularies(context, a, b)
    comparison = _compare(a, b)
    counts, counts_name, counts_bytes = _read_counts(context, params.counts)
    shares = _weigh(context, a, b, counts)
    verdict = _verdict(a, b, comparison)
    _report_comparison(context, a, b, comparison, shares)
    first_rows, first_differences = _rows(a, b, params.first)
    return Result(
        verdict=verdict,
        draft_vocab_size=b.rows,
        target_vocab_size=max((side.vocab for side in (a, b) if side.vocab is not None), default=None),
        positional_matches=comparison.positional_matches if comparison else None,
        shared_targets=comparison.shared_targets if comparison else None,
        common_prefix=comparison.common_prefix if comparison else None,
        rows_without_source=comparison.rows_without_source if comparison else None,
        order_preserved=comparison.order_preserved if comparison else None,
        max_shift=comparison.max_shift if comparison else None,
        encoding_a=a.encoding,  # type: ignore[arg-type]
        encoding_b=b.encoding,  # type: ignore[arg-type]
        encoding_a_reason=a.reason,
        encoding_b_reason=b.reason,
        stored_equal=_stored_equal(a, b),
        first_rows=first_rows,
        first_differences=first_differences,
        positional_token_share=shares.positional if shares else None,
        shared_token_share=shares.shared if shares else None,
        coverage_a=shares.coverage_a if shares else None,
        coverage_b=shares.coverage_b if shares else None,
        counts_name=counts_name,
        tokens_counted=None if counts is None else float(counts.sum(dtype="f8")),
        a=_files(a),
        b=_files(b),
        bytes_read=a.meter.bytes + b.meter.bytes + counts_bytes,
    )


def _read_sides(context: Context, params: Params) -> tuple[Side, Side]:
    from probes.lib.files import Unreadable
    from probes.lib.sides import read_side, understand

    sides = []
    for name, path in (("A", params.a), ("B", params.b)):
        try:
            sides.append(read_side(name, path))
        except Unreadable as error:
            context.unfit("%s: %s" % (name, error), error.hint)
    a, b = sides
    understand(a, b.vocab, None if params.encoding_a == "auto" else params.encoding_a)
    understand(b, a.vocab, None if params.encoding_b == "auto" else params.encoding_b)
    return a, b


def _read_counts(context: Context, path: str | None) -> tuple[NDArray[Any] | None, str | None, int]:
    from probes.lib.files import Damaged, Meter, Unreadable, shown
    from probes.lib.vocabulary import read_counts

    if path is None:
        return None, None, 0
    meter = Meter()
    try:
        counts, name = read_counts(path, meter)
    except (Unreadable, Damaged) as error:
        context.unfit("counts: %s" % error, getattr(error, "hint", None))
    return counts, shown(name), meter.bytes


# Comparing -----------------------------------------------------------------------------------------------------------


def _compare(a: Side, b: Side) -> Comparison | None:
    from probes.lib.mappings import compare

    return None if a.ids is None or b.ids is None else compare(a.ids, b.ids)


def _verdict(a: Side, b: Side, comparison: Comparison | None) -> Verdict:
    if comparison is not None:
        return comparison.relation  # type: ignore[return-value]
    return "unknown" if {a.encoding, b.encoding}.isdisjoint({"corrupt", "uninitialised"}) else "corrupt"


def _weigh(context: Context, a: Side, b: Side, counts: NDArray[Any] | None) -> Shares | None:
    from probes.lib.mappings import shares

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


def _rows(a: Side, b: Side, count: int) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Return the first rows, and the first rows that differ."""
    import numpy as np

    length = max((len(side.ids) for side in (a, b) if side.ids is not None), default=0)

    def rows(indexes: NDArray[Any]) -> tuple[Row, ...]:
        return tuple(Row(int(index), _target(a, index), _target(b, index)) for index in indexes)

    differing = np.zeros(0, np.int64)
    if a.ids is not None and b.ids is not None:
        both = min(len(a.ids), len(b.ids))
        differing = np.concatenate([np.flatnonzero(a.ids[:both] != b.ids[:both]), np.arange(both, length)])
    return rows(np.arange(min(count, length))), rows(differing[:count])


def _target(side: Side, row: int) -> int | None:
    return int(side.ids[row]) if side.ids is not None and row < len(side.ids) else None


def _stored_equal(a: Side, b: Side) -> bool | None:
    import numpy as np

    return bool(np.array_equal(a.stored.d2t, b.stored.d2t)) if a.stored and b.stored else None


def _files(side: Side) -> Files:
    from probes.lib.files import shown
    from probes.lib.mappings import is_ascending

    stored, ids, t2d = side.stored, side.ids, side.t2d
    config = stored.config if stored else None
    unusable = "unusable" if side.t2d_problem else "absent"
    return Files(
        path=side.path,
        kind=stored.kind if stored else None,
        kind_reason=stored.kind_reason if stored else None,
        files=tuple(shown(os.path.abspath(file)) for file in side.meter.files),
        d2t_name=shown(stored.d2t_name) if stored and stored.d2t_name is not None else None,
        d2t_dtype=stored.d2t_dtype if stored else None,
        rows=side.rows,
        target_vocab_size=side.vocab,
        min_id=None if ids is None else int(ids.min()),
        max_id=None if ids is None else int(ids.max()),
        ascending=None if ids is None else is_ascending(ids),
        t2d_kind=t2d.kind if t2d else unusable,
        t2d_dtype=stored.t2d_dtype if stored else None,
        t2d_size=len(t2d.values) if t2d else None,
        t2d_selected=t2d.selected if t2d else None,
        t2d_hits=None if ids is None or t2d is None else int(t2d.holds(ids).sum()),
        t2d_agrees=None if ids is None or t2d is None else t2d.agrees(ids),
        config_dialect=config.dialect if config else None,
        config_target_vocab_size=config.target_vocab_size if config else None,
        config_draft_vocab_size=config.draft_vocab_size if config else None,
        lm_head_rows=stored.lm_head_rows if stored else None,
        problem=side.damage or (stored.config_problem if stored else None) or side.t2d_problem,
    )


def _report_vocabularies(context: Context, a: Side, b: Side) -> None:
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


def _report_comparison(
    context: Context, a: Side, b: Side, comparison: Comparison | None, shares: Shares | None
) -> None:
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
    keep = "keep A's d2t and t2d for training and serving (remove cached mappings that would replace them)"
    if not comparison.shared_targets:
        return "%s; the two have no token in common, nothing of A's head can be used under B" % keep
    moved = "move the rows of A's lm_head by token id, together with d2t, t2d and draft_vocab_size"
    if comparison.rows_without_source:
        cost = "{:,} rows come from A, {:,} must be made anew".format(
            comparison.shared_targets, comparison.rows_without_source
        )
    elif comparison.relation == "permutation":
        cost = "nothing is lost"
    else:
        cost = "every row of B has its source in A"
    return "%s; or %s: %s" % (keep, moved, cost)
