"""Move the rows of a drafter's head to another mapping, by token id, and write the drafter as a new folder.

A head that was trained under one mapping scores the wrong tokens under another. This probe gives every row the place that
its token has in the other mapping, makes rows for tokens that had none, and writes lm_head, d2t, t2d and config.json
together; every other tensor stays as it is, byte for byte. The source is only read. What is written is read again and
compared before it gets its name; a kill at any moment leaves nothing under that name, or all of it.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from probes.lib.files import Meter
    from probes.lib.mappings import Ids
    from probes.lib.remap import Plan
    from probes.lib.row_fill import Fill, Sample
    from probes.lib.sides import Side
    from remote_diag.probe import Context

EFFECTS = ("reads-files", "writes-files")

Missing = Literal["verifier", "verifier-scaled", "mean", "random"]
Encoding = Literal["auto", "offset", "absolute"]


@dataclass(frozen=True)
class Params:
    """Which drafter to write under which mapping, and where."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    source: str
    """The drafter on the host: folder, or file beside its config.json. It is only read."""
    mapping: str
    """The mapping that it shall have: file or folder on the host, of any kind that vocab-compare reads."""
    out: str
    """The folder to make on the host; it must not exist."""
    missing: Missing = "verifier-scaled"
    """How to make rows for tokens that the drafter has none for: the verifier's row as it is, or brought to the length that
    the drafter's rows have; the mean of the drafter's rows; random numbers that spread as these do."""
    verifier: str | None = None
    """The target model on the host, whose head gives those rows."""
    seed: int = 0
    """For random rows."""
    counts: str | None = None
    """Token counts on the host; adds shares of text. Without it, those in the mapping's own file are taken."""
    head_mapping: str | None = None
    """The mapping that the source's head really follows, where that is not the source's own d2t."""
    encoding_source: Encoding = "auto"
    """What the source's d2t holds, where that cannot be told from the files."""
    encoding_mapping: Encoding = "auto"
    """What the new mapping's d2t holds, where that cannot be told from the files."""

    def __post_init__(self) -> None:
        """Check what no path and no seed can be."""
        for name in ("source", "mapping", "out", "verifier", "counts", "head_mapping"):
            path = getattr(self, name)
            if path is not None and (not path or "\0" in path):
                raise ValueError("%s must be a path: not empty, without NUL" % name)
        if not 0 <= self.seed < 1 << 63:
            raise ValueError("seed must be 0 or more, and fit into 63 bits")


@dataclass(frozen=True)
class Result:
    """What was written."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    out: str
    """Absolute path on the host of the folder that was made."""
    rows_moved: int
    """Rows of lm_head that are copies of the source's, bit for bit."""
    rows_initialised: int
    """Rows that were made anew."""
    rows_dropped: int
    """Rows of the source whose token the new mapping lacks."""
    missing_policy: Missing
    """How new rows were made."""
    draft_vocab_size: int
    """Rows of the new head."""
    target_vocab_size: int
    """Tokens of the target."""
    token_share_moved: float | None
    """Share of the counted tokens, 0 to 1, whose row was moved. Null without counts."""
    token_share_initialised: float | None
    """Share of the counted tokens, 0 to 1, whose row was made anew. Null without counts."""
    token_share_without_row: float | None
    """Share of the counted tokens, 0 to 1, that have no row under the new mapping. Null without counts."""
    coverage_before: float | None
    """Share of the counted tokens, 0 to 1, that have a row under the old mapping. Null without counts."""
    counts_name: str | None
    """Name of the array that the counts were taken from."""
    verifier_scale: float | None
    """What the verifier's rows were multiplied by; null where they were not."""
    verifier_cosine: float | None
    """Mean cosine, -1 to 1, between rows of the drafter and of the verifier for the same token; null without a verifier."""
    tensors_copied: int
    """Tensors that are the source's, bit for bit."""
    tensors_dropped: tuple[str, ...]
    """Tensors that were left out: cut from the target anew by whoever needs them."""
    files_written: tuple[str, ...]
    """Names in the new folder."""
    files_left: tuple[str, ...]
    """Name and reason of what lies beside the source and was not copied."""
    bytes_written: int
    """Bytes of all files in the new folder."""
    bytes_verified: int
    """Bytes of the weights that were read again and compared."""
    bytes_read: int
    """Bytes read from all files before that."""


def run(params: Params, context: Context) -> Result:
    """Read, plan, write beside, verify, rename."""
    context.require("numpy")
    from probes.lib.files import Damaged, Meter, Unreadable

    try:
        with ExitStack() as stack:
            return _run(params, context, Meter(), stack)
    except (Unreadable, Damaged) as error:
        context.unfit(str(error), getattr(error, "hint", None))


def _run(params: Params, context: Context, meter: Meter, stack: ExitStack) -> Result:
    from probes.lib.drafter import open_drafter
    from probes.lib.files import shown
    from probes.lib.new_folder import place_for
    from probes.lib.remap import plan_moves, plan_tensors
    from probes.lib.remap_findings import report_doubts, report_remapped, weigh
    from probes.lib.remap_folder import Folder, write_folder
    from probes.lib.row_fill import take_sample
    from probes.lib.vocabulary import counts_for

    # All that can be refused is refused before the first byte is written.
    place = place_for(params.out)
    _refuse_inside(params.source, place)
    drafter = stack.enter_context(open_drafter(params.source, meter))
    a, b, b_side, vocab = _mappings(params, meter)
    plan = plan_tensors(drafter, plan_moves(a, b, vocab))
    sample = take_sample(drafter.matrix("lm_head"))
    fill = _fill(params, plan, sample, meter, stack)
    counts, counts_name = counts_for(params.counts, params.mapping, meter)
    shares = None if counts is None else weigh(plan.moves, counts)
    folder = Folder(place, plan, fill, _provenance(params, plan, fill), context.run_id)

    def told(done: int, total: int, label: str) -> None:
        context.progress(done, total, unit="bytes", label=label)

    written = write_folder(folder, meter, told)
    report_remapped(context, folder, written, params.missing, shares)
    report_doubts(context, folder, sample, b_side)
    return Result(
        out=shown(place),
        rows_moved=plan.moves.moved,
        rows_initialised=plan.moves.initialised,
        rows_dropped=len(a) - plan.moves.moved,
        missing_policy=params.missing,
        draft_vocab_size=len(b),
        target_vocab_size=vocab,
        token_share_moved=shares.moved if shares else None,
        token_share_initialised=shares.initialised if shares else None,
        token_share_without_row=shares.without_row if shares else None,
        coverage_before=shares.before if shares else None,
        counts_name=counts_name,
        verifier_scale=fill.scale if fill else None,
        verifier_cosine=fill.cosine if fill else None,
        tensors_copied=len(plan.copied),
        tensors_dropped=tuple(shown(name) for name in plan.dropped),
        files_written=written.names,
        files_left=written.left,
        bytes_written=written.size,
        bytes_verified=written.verified,
        bytes_read=written.read,
    )


def _refuse_inside(source: str, place: str) -> None:
    """Refuse to write into the folder that is only to be read."""
    from probes.lib.files import Unreadable

    folder, parent = os.path.realpath(source), os.path.realpath(os.path.dirname(place))
    if os.path.isdir(folder) and os.path.commonpath([folder, parent]) == folder:
        raise Unreadable(place, "lies inside of the source, which is not touched", "give a folder outside of it")


# The mappings --------------------------------------------------------------------------------------------------------


def _mappings(params: Params, meter: Meter) -> tuple[Ids, Ids, Side, int]:
    """Return (tokens of the source's head, tokens of the new one, the new mapping, tokens of the target)."""
    from probes.lib.files import Unreadable
    from probes.lib.sides import read_side, sound_ids, understand

    own = params.head_mapping is None
    a = read_side("the source" if own else "the head's mapping", params.source if params.head_mapping is None else params.head_mapping)
    b = read_side("the new mapping", params.mapping)
    understand(a, b.vocab, None if params.encoding_source == "auto" else params.encoding_source)
    understand(b, a.vocab, None if params.encoding_mapping == "auto" else params.encoding_mapping)
    meter.bytes += a.meter.bytes + b.meter.bytes
    say = "say what it holds with --encoding-%s" if "ambiguous" in (a.encoding, b.encoding) else None
    find = "find out with verifier-head which mapping the head follows, and give that with --head-mapping"
    ids_a = sound_ids(a, say % "source" if say else find)
    ids_b = sound_ids(b, say % "mapping" if say else "take the mapping from where it was made, or write t2d anew from d2t")
    vocab = a.vocab if b.vocab is None else b.vocab
    if vocab is None:
        vocab = _verifiers_vocab(params.verifier, meter)
    if vocab is None:
        raise Unreadable(b.path, "nothing tells how many tokens the target has", "give --verifier, or a mapping that has t2d")
    if a.vocab is not None and a.vocab != vocab:
        raise Unreadable(
            b.path,
            "belongs to a target of %d tokens, the source to one of %d: equal ids need not be equal tokens" % (vocab, a.vocab),
            "give a mapping for the same target and tokenizer",
        )
    beyond = int((ids_a >= vocab).sum() + (ids_b >= vocab).sum())
    if beyond:
        raise Unreadable(b.path, "%d rows stand for tokens beyond the target's %d" % (beyond, vocab))
    return ids_a, ids_b, b, vocab


def _verifiers_vocab(path: str | None, meter: Meter) -> int | None:
    from probes.lib.target import open_target

    if path is None:
        return None
    with open_target(path, meter) as target:
        return target.vocab_size or target.head().rows


# New rows ------------------------------------------------------------------------------------------------------------


def _fill(params: Params, plan: Plan, sample: Sample, meter: Meter, stack: ExitStack) -> Fill | None:
    """Return what makes the new rows; None where there are none to make."""
    from probes.lib import row_fill
    from probes.lib.files import Damaged, Unreadable
    from probes.lib.target import open_target

    head = plan.drafter.matrix("lm_head")
    if not len(sample.rows):
        raise Damaged(plan.drafter.path, "lm_head holds nothing but infinities and NaN: it was never filled")
    if not plan.moves.initialised:
        return None
    if params.missing == "mean":
        return row_fill.Mean(head)
    if params.missing == "random":
        return row_fill.Random(head, sample, params.seed)
    if params.verifier is None:
        raise Unreadable(
            params.mapping,
            "%d of its tokens have no row in the source" % plan.moves.initialised,
            "give the target model with --verifier, or another way to fill them: --missing mean or random",
        )
    theirs = stack.enter_context(open_target(params.verifier, meter)).head()
    scaled = params.missing == "verifier-scaled"
    return row_fill.Verifier(head, plan.moves.a, sample, theirs, scaled=scaled)


# Provenance ----------------------------------------------------------------------------------------------------------


def _provenance(params: Params, plan: Plan, fill: Fill | None) -> dict[str, Any]:
    """Return where the new head comes from. The same run gives the same bytes."""
    from probes.lib.files import shown

    def place(path: str | None) -> str | None:
        return None if path is None else shown(os.path.abspath(path))

    return {
        "source": place(params.source),
        "mapping": place(params.mapping),
        "head_mapping": place(params.head_mapping),
        "missing_policy": params.missing,
        "rows_moved": plan.moves.moved,
        "rows_initialised": plan.moves.initialised,
        "verifier": place(params.verifier) if fill is not None and fill.cosine is not None else None,
        "verifier_scale": fill.scale if fill is not None else None,
        "seed": params.seed if params.missing == "random" else None,
    }
