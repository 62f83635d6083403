"""A comparison of draft vocabularies for people: the verdict, the numbers, the first rows, what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..text import safe
from .outcome import findings, headline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from ..outcome import Outcome

_MARK = "<- differs"
_DIFFERENCES = 5
"""Shown when none of the first rows differs."""
_ENCODINGS = {
    "offset": "d2t holds offsets",
    "absolute": "d2t holds token ids",
    "ambiguous": "d2t is ambiguous",
    "uninitialised": "d2t was never filled",
    "corrupt": "d2t is corrupt",
}


def sentence(result: Any) -> str:
    """Return the verdict in one sentence."""
    rows, same = result.draft_vocab_size, result.positional_matches
    if result.verdict == "unknown":
        return f"cannot tell: {_sides(result, 'ambiguous')} ambiguous"
    if result.verdict == "corrupt":
        return f"not comparable: no valid mapping in {_sides(result, 'corrupt', 'uninitialised', verb=False)}"
    if result.verdict == "identical":
        return f"identical: all {rows:,} rows agree"
    start = {
        "permutation": "the same tokens in other rows",
        "subset": "A's tokens are some of B's",
        "superset": "B's tokens are some of A's",
        "different": "the mappings differ",
    }[result.verdict]
    return f"{start}: {same:,} of {rows:,} rows agree"


def render(outcome: Outcome[Any]) -> RenderableType:
    """Return the whole comparison; 80 columns are enough."""
    result = outcome.result
    parts: list[RenderableType] = [headline(outcome, sentence(result)), Text(), _files(result)]
    if result.positional_matches is not None:
        parts += [Text(), _numbers(result)]
    if result.first_rows:
        parts += [Text(), _rows(result)]
    for label, tokens in (("only in A", result.only_a), ("only in B", result.only_b)):
        if tokens and tokens[0].token_share is not None:
            parts += [Text(), _tokens(label, tokens)]
    found = findings(outcome.findings)
    if found is not None:
        parts += [Text(), found]
    return Group(*parts)


def _sides(result: Any, *encodings: str, verb: bool = True) -> str:
    named = [name for name, is_ in (("A", result.encoding_a), ("B", result.encoding_b)) if is_ in encodings]
    return " and ".join(named) + (f" {'is' if len(named) == 1 else 'are'}" if verb else "")


def _files(result: Any) -> Table:
    table = _plain_table()
    table.add_column("side", style="cyan", no_wrap=True)
    table.add_column("what", overflow="fold")
    for name, side, encoding, reason in (
        ("A", result.a, result.encoding_a, result.encoding_a_reason),
        ("B", result.b, result.encoding_b, result.encoding_b_reason),
    ):
        table.add_row(name, Text(safe(side.path, limit=400)))
        table.add_row("", Text("; ".join(_described(side, encoding))))
        table.add_row("", Text(safe(reason, limit=300), "dim"))
    return table


def _described(side: Any, encoding: str) -> Iterator[str]:
    if side.kind is not None:
        yield safe(side.kind)
    if side.rows is not None:
        size = f" of {side.target_vocab_size:,} tokens" if side.target_vocab_size is not None else ""
        yield f"{side.rows:,} rows{size}"
    yield _ENCODINGS[encoding]
    if side.t2d_kind in {"absent", "unusable"}:
        yield f"t2d {side.t2d_kind}"
    elif side.t2d_agrees is not None:
        yield "t2d agrees" if side.t2d_agrees else "t2d disagrees"
    if side.ascending is False:
        yield "not in the order of ids"


def _numbers(result: Any) -> Table:
    table = _plain_table()
    table.add_column("what", style="cyan")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    rows = result.draft_vocab_size
    for label, value in (
        ("rows with the same token", result.positional_matches),
        ("tokens with a row in both", result.shared_targets),
        ("rows of B without a source in A", result.rows_without_source),
        ("first rows that agree", result.common_prefix),
        ("last rows that agree", result.common_suffix),
    ):
        table.add_row(label, f"{value:,}", percent(value / rows))
    if result.max_shift is not None:
        table.add_row("shared tokens in the same order", "yes" if result.order_preserved else "no", "")
        table.add_row("largest shift of a shared token, rows", f"{result.max_shift:,}", "")
        table.add_row("  half of them at most, 95 of 100 at most", f"{result.shift_p50:,}, {result.shift_p95:,}", "")
        table.add_row("stretches of rows put in, left out", f"{result.blocks_inserted:,}, {result.blocks_deleted:,}", "")
    if result.coverage_a is not None:
        table.add_row(f"counted tokens ({safe(result.counts_name or '', limit=30)})", f"{result.tokens_counted:,.0f}", "")
        for label, share in (
            ("  whose row is the same: the ceiling", result.positional_token_share),
            ("  with a row in both", result.shared_token_share),
            ("  with a row in A", result.coverage_a),
            ("  with a row in B", result.coverage_b),
            ("  with a row only in A: lost", result.token_share_lost),
            ("  with a row only in B: new", result.token_share_gained),
        ):
            table.add_row(label, "", percent(share))
        if result.accuracy_ceiling != result.positional_token_share:
            table.add_row("highest accuracy that A's head can show under B", "", percent(result.accuracy_ceiling))
    return table


def percent(share: float) -> str:
    """Return a share as a percentage; neither 0 nor 100 unless it is."""
    if 0 < share < 0.00005:
        return "< 0.01 %"
    if 0.99995 <= share < 1:
        return "> 99.99 %"
    return f"{100 * share:.2f} %"


def _rows(result: Any) -> Table:
    table = _plain_table()
    table.add_column("row", justify="right", no_wrap=True, header_style="cyan")
    table.add_column("token id in A", justify="right", no_wrap=True, header_style="cyan")
    table.add_column("token id in B", justify="right", no_wrap=True, header_style="cyan")
    table.add_column("", no_wrap=True)
    if result.texts:
        table.add_column("in A", overflow="fold", header_style="cyan")
        table.add_column("in B", overflow="fold", header_style="cyan")
    table.show_header = True
    comparable = result.positional_matches is not None
    for row in result.first_rows:
        _add(table, row, result.texts, comparable=comparable)
    later = [row for row in result.first_differences if row.row > result.first_rows[-1].row]
    if later and len(later) == len(result.first_differences):
        if later[0].row > result.first_rows[-1].row + 1:
            table.add_row("...", "", "", "")
        for row in later[:_DIFFERENCES]:
            _add(table, row, result.texts, comparable=comparable)
    return table


def _add(table: Table, row: Any, texts: dict[str, str], *, comparable: bool) -> None:
    # "none": that side has fewer rows. "?": nobody knows what it has.
    missing = "none" if comparable else "?"
    cells = [missing if target is None else str(target) for target in (row.target_a, row.target_b)]
    mark = _MARK if comparable and row.target_a != row.target_b else ""
    words = [Text(_quoted(texts.get(str(target)))) for target in (row.target_a, row.target_b)] if texts else []
    table.add_row(str(row.row), *cells, mark, *words)


def _tokens(label: str, tokens: Any) -> Table:
    table = _plain_table()
    for heading in (f"token {label}", "row", "of the counted"):
        table.add_column(heading, justify="right", no_wrap=True, header_style="cyan")
    table.add_column("", overflow="fold")
    table.show_header = True
    for token in tokens:
        table.add_row(str(token.token), f"{token.row:,}", percent(token.token_share), Text(_quoted(token.text)))
    return table


def _quoted(text: str | None) -> str:
    """Return a token's text so that spaces at its ends are seen."""
    return "" if text is None else f"'{safe(text, limit=40)}'"


def _plain_table() -> Table:
    return Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
