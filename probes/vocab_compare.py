"""Compare the draft vocabularies of two EAGLE-3 checkpoints: which target token each draft row stands for.

A drafter's output head has one row for each of its draft tokens; d2t says which target token that is. A head trained
under one mapping and used under another scores the wrong tokens, row by row, without any error. This probe reads the
two mappings (and nothing else of the checkpoints: no torch, no weights), finds out how each is encoded, checks d2t
against t2d and config.json, and counts what agrees.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from probes.lib.files import Meter
    from probes.lib.mappings import Comparison
    from probes.lib.shifts import Shifts
    from probes.lib.sides import Side
    from probes.lib.token_texts import TokenTexts
    from remote_diag.probe import Context

EFFECTS = ("reads-files",)

Encoding = Literal["offset", "absolute", "ambiguous", "uninitialised", "corrupt"]
Verdict = Literal["identical", "permutation", "subset", "superset", "different", "corrupt", "unknown"]

MAX_FIRST = 1000
"""Rows; more belong into a file, not into a result."""
MAX_POINTS = 4000
"""Of a picture; screens have no more."""


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
    accuracy: float | None = None
    """Accuracy of the drafter under its own mapping, 0 to 1: scales the ceiling."""
    tokenizer: str | None = None
    """Tokenizer on the host: folder or file. Without it, one that lies beside A or B is taken."""
    top: int = 20
    """How many of the tokens to return that only one of the two has, 0 to 1000."""
    points: int = 0
    """How many points of a picture to return, 0 to 4000; 0 for none."""
    encoding_a: Literal["auto", "offset", "absolute"] = "auto"
    """What d2t of A holds, where that cannot be told from the files."""
    encoding_b: Literal["auto", "offset", "absolute"] = "auto"
    """What d2t of B holds, where that cannot be told from the files."""

    def __post_init__(self) -> None:
        """Check what no path and no count can be."""
        for name in ("a", "b", "counts", "tokenizer"):
            path = getattr(self, name)
            if path is not None and (not path or "\0" in path):
                raise ValueError("%s must be a path: not empty, without NUL" % name)
        if not 0 <= self.first <= MAX_FIRST:
            raise ValueError("first must be 0 to %d" % MAX_FIRST)
        if not 0 <= self.top <= MAX_FIRST:
            raise ValueError("top must be 0 to %d" % MAX_FIRST)
        if self.accuracy is not None and not 0 <= self.accuracy <= 1:
            raise ValueError("accuracy must be 0 to 1")
        if self.points != 0 and not 2 <= self.points <= MAX_POINTS:
            raise ValueError("points must be 0, or 2 to %d" % MAX_POINTS)


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
class Shift:
    """Shared tokens that moved by about as many rows."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    low: int
    """Smallest shift of the bin, in rows: place in B less place in A."""
    high: int
    """Largest shift of the bin."""
    tokens: int
    """How many moved so far."""
    token_share: float | None
    """Share of the counted tokens, 0 to 1. Null without counts."""


@dataclass(frozen=True)
class Token:
    """A token that has a row in only one of the two."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    token: int
    """Target token id."""
    row: int
    """Its row in the mapping that has it."""
    token_share: float | None
    """Share of the counted tokens, 0 to 1. Null without counts."""
    text: str | None
    """What it stands for, at most 80 characters; null without a tokenizer that has it."""


@dataclass(frozen=True)
class Picture:
    """Points of a picture of both mappings."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    rows: tuple[int, ...]
    """Draft rows, evenly spread."""
    a: tuple[int | None, ...]
    """Their target ids in A; null where A has no such row."""
    b: tuple[int | None, ...]
    """Their target ids in B; null where B has no such row."""
    tokens: tuple[int, ...]
    """Target ids in the middle of equally wide ranges."""
    low: tuple[int | None, ...]
    """Smallest shift of a shared token in that range, in rows; null where there is none."""
    high: tuple[int | None, ...]
    """Largest shift there."""


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
    common_suffix: int | None
    """Rows after the last that differs, counted from the end of both."""
    blocks_inserted: int | None
    """Stretches of rows in B whose tokens A lacks."""
    blocks_deleted: int | None
    """Stretches of rows in A whose tokens B lacks."""
    shift_p50: int | None
    """Half of the shared tokens moved by at most as many rows, in either direction."""
    shift_p95: int | None
    """95 of 100 shared tokens did."""
    shifts: tuple[Shift, ...]
    """How many shared tokens moved how far; bins are twice as wide at twice the distance, empty ones are left out."""
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
    token_share_lost: float | None
    """Share of the counted tokens, 0 to 1, that have a row only in A. Null without counts."""
    token_share_gained: float | None
    """Share of the counted tokens, 0 to 1, that have a row only in B. Null without counts."""
    positional_share: float | None
    """Share of B's rows, 0 to 1, whose token is the same: what counts for a text in which all tokens are equally frequent."""
    accuracy_ceiling: float | None
    """Highest accuracy, 0 to 1, that A's head can show under B: positional_token_share times the accuracy that was given,
    or 1. Null without counts."""
    only_a: tuple[Token, ...]
    """Tokens that only A has: the most frequent, or the first where nothing was counted."""
    only_b: tuple[Token, ...]
    """Tokens that only B has."""
    texts: dict[str, str]
    """Token id -> what it stands for, for the tokens of first_rows and first_differences that the tokenizer has."""
    tokenizer: str | None
    """File on the host that the texts come from; null where there is none."""
    picture: Picture | None
    """Null unless points were asked for."""
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
    np = context.require("numpy")
    from probes.lib.compare_findings import report_comparison, report_vocabularies, weigh
    from probes.lib.files import Meter, shown
    from probes.lib.side_findings import report_side
    from probes.lib.vocabulary import counts_for

    a, b = _read_sides(context, params)
    for side in (a, b):
        report_side(context, side)
    report_vocabularies(context, a, b)
    comparison = _compare(a, b)
    meter = Meter()
    with _named(context, "counts"):
        counts, counts_name = counts_for(params.counts, None, meter)
    with _named(context, "tokenizer"):
        texts = _texts(params, meter)
    shares = weigh(context, a, b, counts)
    verdict = _verdict(a, b, comparison)
    report_comparison(context, a, b, comparison, shares)
    first_rows, first_differences = _rows(a, b, params.first)
    moved = _shifts(a, b, counts)
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
        common_suffix=moved.suffix if moved else None,
        blocks_inserted=moved.inserted if moved else None,
        blocks_deleted=moved.deleted if moved else None,
        shift_p50=moved.median if moved else None,
        shift_p95=moved.p95 if moved else None,
        shifts=tuple(Shift(found.low, found.high, found.tokens, found.share) for found in moved.bins) if moved else (),
        encoding_a=a.encoding,  # type: ignore[arg-type]
        encoding_b=b.encoding,  # type: ignore[arg-type]
        encoding_a_reason=a.reason,
        encoding_b_reason=b.reason,
        stored_equal=bool(np.array_equal(a.stored.d2t, b.stored.d2t)) if a.stored and b.stored else None,
        first_rows=first_rows,
        first_differences=first_differences,
        positional_token_share=shares.positional if shares else None,
        shared_token_share=shares.shared if shares else None,
        coverage_a=shares.coverage_a if shares else None,
        coverage_b=shares.coverage_b if shares else None,
        token_share_lost=max(0.0, shares.coverage_a - shares.shared) if shares else None,
        token_share_gained=max(0.0, shares.coverage_b - shares.shared) if shares else None,
        positional_share=comparison.positional_matches / (b.rows or 1) if comparison else None,
        accuracy_ceiling=shares.positional * (1.0 if params.accuracy is None else params.accuracy) if shares else None,
        only_a=_alone(a, b, counts, texts, params.top),
        only_b=_alone(b, a, counts, texts, params.top),
        texts=_texts_of((*first_rows, *first_differences), texts),
        tokenizer=shown(texts.path) if texts else None,
        picture=_picture(a, b, params.points),
        counts_name=counts_name,
        tokens_counted=None if counts is None else float(counts.sum(dtype="f8")),
        a=_files(a),
        b=_files(b),
        bytes_read=a.meter.bytes + b.meter.bytes + meter.bytes,
    )


@contextmanager
def _named(context: Context, what: str) -> Iterator[None]:
    """End the run, saying which of its inputs it was, where one cannot be used."""
    from probes.lib.files import Damaged, Unreadable

    try:
        yield
    except (Unreadable, Damaged) as error:
        context.unfit("%s: %s" % (what, error), getattr(error, "hint", None))


def _read_sides(context: Context, params: Params) -> tuple[Side, Side]:
    from probes.lib.sides import read_side, understand

    sides = []
    for name, path in (("A", params.a), ("B", params.b)):
        with _named(context, name):
            sides.append(read_side(name, path))
    a, b = sides
    understand(a, b.vocab, None if params.encoding_a == "auto" else params.encoding_a)
    understand(b, a.vocab, None if params.encoding_b == "auto" else params.encoding_b)
    return a, b


def _texts(params: Params, meter: Meter) -> TokenTexts | None:
    """Return the tokenizer that was given, or one that lies beside A or B."""
    from probes.lib.token_texts import find_texts, read_texts

    if params.tokenizer is not None:
        return read_texts(params.tokenizer, meter)
    paths = (params.a, params.b)
    return find_texts([path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path)) for path in paths], meter)


# Comparing -----------------------------------------------------------------------------------------------------------


def _compare(a: Side, b: Side) -> Comparison | None:
    from probes.lib.mappings import compare

    return None if a.ids is None or b.ids is None else compare(a.ids, b.ids)


def _verdict(a: Side, b: Side, comparison: Comparison | None) -> Verdict:
    if comparison is not None:
        return comparison.relation  # type: ignore[return-value]
    return "unknown" if {a.encoding, b.encoding}.isdisjoint({"corrupt", "uninitialised"}) else "corrupt"


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


def _shifts(a: Side, b: Side, counts: NDArray[Any] | None) -> Shifts | None:
    from probes.lib.shifts import shifts

    return None if a.ids is None or b.ids is None else shifts(a.ids, b.ids, counts)


def _alone(side: Side, other: Side, counts: NDArray[Any] | None, texts: TokenTexts | None, top: int) -> tuple[Token, ...]:
    """Return tokens that only ``side`` has."""
    from probes.lib.shifts import heaviest, weights

    if side.ids is None or other.ids is None:
        return ()
    rows = heaviest(side.ids, other.ids, counts, top)
    total = 0.0 if counts is None else float(counts.sum(dtype="f8"))
    shares: list[float | None] = [None] * len(rows)
    if counts is not None and total > 0:
        shares = (weights(side.ids[rows], counts) / total).tolist()
    tokens = side.ids[rows].tolist()
    return tuple(
        Token(token, row, share, texts.text(token) if texts else None)
        for token, row, share in zip(tokens, rows.tolist(), shares)
    )


def _texts_of(rows: tuple[Row, ...], texts: TokenTexts | None) -> dict[str, str]:
    tokens = sorted({token for row in rows for token in (row.target_a, row.target_b) if token is not None})
    found = ((token, texts.text(token)) for token in tokens) if texts else ()
    return {str(token): text for token, text in found if text is not None}


def _picture(a: Side, b: Side, points: int) -> Picture | None:
    from probes.lib.shifts import curves

    if not points or a.ids is None or b.ids is None:
        return None
    found = curves(a.ids, b.ids, max(side.vocab or 0 for side in (a, b)), points)
    return Picture(found.rows, found.a, found.b, found.tokens, found.low, found.high)


def _target(side: Side, row: int) -> int | None:
    return int(side.ids[row]) if side.ids is not None and row < len(side.ids) else None


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
