"""Findings about one checkpoint's draft vocabulary on its own: encoding, t2d against d2t, sizes."""

from __future__ import annotations

from .mappings import is_ascending

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator

    from remote_diag.probe import Context

    from .sides import Side
    from .vocabulary import Stored


def report_side(context: Context, side: Side) -> None:
    """Report what is wrong with one side on its own."""
    if side.stored is None:
        context.finding(
            "fail",
            "file-damaged",
            "%s cannot be trusted: %s" % (side.name, side.damage),
            subject=side.path,
            action="compare its size and hash with the original's, and copy it again",
        )
        return
    _report_encoding(context, side, side.stored)
    _report_t2d(context, side)
    _report_sizes(context, side, side.stored)


def _report_encoding(context: Context, side: Side, stored: Stored) -> None:
    evidence = (side.reason,)
    if side.encoding == "ambiguous":
        context.finding(
            "unknown",
            "d2t-ambiguous",
            "What the numbers in d2t of %s mean cannot be told" % side.name,
            subject=side.path,
            evidence=evidence,
            action="say it with %s offset (or absolute), or give a checkpoint that has t2d and config.json" % side.option,
        )
    elif side.encoding == "uninitialised" and stored.d2t_name is None:
        context.finding(
            "fail",
            "d2t-missing",
            "%s has no d2t, and fewer rows than the target has tokens: servers take row i for token i" % side.name,
            subject=side.path,
            evidence=evidence,
            action="write the d2t that the drafter was trained with into the checkpoint",
        )
    elif side.encoding == "uninitialised":
        context.finding(
            "fail",
            "d2t-uninitialised",
            "The mapping of %s was never loaded" % side.name,
            subject=side.path,
            evidence=evidence,
            action="take d2t and t2d from where the drafter was trained, and write them into this checkpoint",
        )
    elif side.encoding == "corrupt":
        context.finding(
            "fail",
            "d2t-corrupt",
            "d2t of %s is no mapping" % side.name,
            subject=side.path,
            evidence=evidence,
            action="take d2t from the original checkpoint; it must stay int64 through every conversion",
        )
    elif not (stored.d2t_dtype or "int").startswith("int"):
        context.finding(
            "degraded",
            "d2t-type",
            "d2t of %s is stored as %s" % (side.name, stored.d2t_dtype),
            subject=side.path,
            value=stored.d2t_dtype,
            threshold="int64",
            threshold_source="what trainers write and servers add to row numbers",
            action="write d2t as int64: the values are still exact here, a further cast may round them",
        )


def _report_t2d(context: Context, side: Side) -> None:
    if side.t2d_problem is not None:
        context.finding(
            "fail",
            "t2d-unusable",
            "t2d of %s is no mask: %s" % (side.name, side.t2d_problem),
            subject=side.path,
            action="write t2d anew from d2t: true for every token that has a draft row",
        )
    if side.t2d is None or side.ids is None:
        return
    hits, rows, selected = int(side.t2d.holds(side.ids).sum()), len(side.ids), side.t2d.selected
    if not side.t2d.agrees(side.ids):
        marked = () if selected is None else ("t2d marks %d tokens, d2t has %d rows" % (selected, rows),)
        context.finding(
            "fail",
            "t2d-disagrees",
            "t2d and d2t of %s stand for different tokens" % side.name,
            subject=side.path,
            value=hits,
            unit="rows",
            threshold=rows,
            threshold_source="every row's token must be in t2d, and no other",
            evidence=marked,
            action="training cuts the target's head with t2d, serving translates with d2t: find out which one the head "
            "follows, and write the other anew from it",
        )
    elif side.t2d.kind == "mask" and not is_ascending(side.ids):
        context.finding(
            "ok",
            "rows-not-ascending",
            "The rows of %s are not in the order of token ids; t2d alone would put them in that order" % side.name,
            subject=side.path,
            action="use it only with trainers that gather by d2t",
        )


def _report_sizes(context: Context, side: Side, stored: Stored) -> None:
    rows, head = len(stored.d2t), stored.lm_head_rows
    if stored.config_problem is not None:
        context.finding("degraded", "config-unreadable", stored.config_problem, subject=side.path, action="repair or remove it")
    for name, said, found, where in _config_against_tensors(side, stored):
        context.finding(
            "degraded",
            "config-disagrees",
            "config.json of %s says %s %d, %s has %d" % (side.name, name, said, where, found),
            subject=side.path,
            value=said,
            unit="tokens",
            threshold=found,
            threshold_source="%s in the same checkpoint" % where,
            action="one of them is left over from another mapping; servers size the head by config.json",
        )
    # A head of all target tokens is what some exporters write.
    if head is not None and head not in (rows, side.vocab):
        context.finding(
            "fail",
            "head-size",
            "lm_head of %s has %d rows, d2t has %d" % (side.name, head, rows),
            subject=side.path,
            value=head,
            unit="rows",
            threshold=rows,
            threshold_source="d2t in the same checkpoint",
            action="head and mapping come from different runs; find the mapping that the head was trained with",
        )


def _config_against_tensors(side: Side, stored: Stored) -> Iterator[tuple[str, int, int, str]]:
    """Yield (name, what config.json says, what the tensor has, which tensor) where they differ."""
    config, rows = stored.config, len(stored.d2t)
    if config is None:
        return
    if config.draft_vocab_size not in (None, rows):
        yield "draft_vocab_size", config.draft_vocab_size or 0, rows, "d2t"
    target = config.target_vocab_size
    # Old speculators wrote the draft size there; that harms nobody who reads t2d.
    harmless = config.dialect == "speculators" and target == rows
    if target is not None and side.t2d is not None and target != len(side.t2d.values) and not harmless:
        yield "vocab_size", target, len(side.t2d.values), "t2d"
