"""Write a drafter's own mapping for its trainer as d2t.npy and t2d.npy, so that fine-tuning keeps the rows of its head.

Trainers make a mapping from the data they are given and put it over the one that a drafter came with. Keeping the old
one loses nothing but the difference in coverage, and that is usually small: this probe writes it, says what it costs
where the data was counted, and lists the files that trainers would take another mapping from all the same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from probes.lib.artefacts import Artefact
    from probes.lib.files import Meter
    from probes.lib.mappings import Ids, Shares
    from probes.lib.sides import Side
    from remote_diag.probe import Context

EFFECTS = ("reads-files", "writes-files")


@dataclass(frozen=True)
class Params:
    """Whose mapping to write, and where."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    source: str
    """The drafter, or its mapping, on the host. It is only read."""
    out: str
    """The folder to make on the host; it must not exist."""
    mapping: str | None = None
    """The mapping that would be used instead: file or folder on the host. Tells what keeping the old one costs."""
    counts: str | None = None
    """Token counts on the host; without it, those in the other mapping's own file are taken."""
    look_in: tuple[str, ...] = ()
    """Folders on the host to search for mappings that trainers would pick up, besides those around the drafter."""

    def __post_init__(self) -> None:
        """Check what no path can be."""
        for name in ("source", "out", "mapping", "counts"):
            path = getattr(self, name)
            if path is not None and (not path or "\0" in path):
                raise ValueError("%s must be a path: not empty, without NUL" % name)
        if any(not path or "\0" in path for path in self.look_in):
            raise ValueError("look_in must be paths: not empty, without NUL")


@dataclass(frozen=True)
class Cache:
    """A file that a trainer would take a mapping from."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    path: str
    """Where on the host."""
    modified: float
    """Seconds since 1970."""
    rows: int | None
    """Draft rows; null when it is not understood."""
    same: bool | None
    """Whether it is the drafter's own mapping; null when it is not understood."""
    note: str
    """Why it is not understood; empty when it is."""


@dataclass(frozen=True)
class Result:
    """What was written, and what it costs."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    out: str
    """Absolute path on the host of the folder that was made."""
    files_written: tuple[str, ...]
    """Names in it."""
    draft_vocab_size: int
    """Rows of the mapping."""
    target_vocab_size: int
    """Tokens of the target."""
    ascending: bool
    """Whether the rows are in the order of their token ids, as trainers that cut with t2d assume."""
    rows_kept: int | None
    """Rows that the other mapping would give another token; null without one."""
    coverage_kept: float | None
    """Share of the counted tokens, 0 to 1, that have a row in the drafter's own mapping. Null without counts."""
    coverage_other: float | None
    """The same for the other mapping."""
    coverage_lost: float | None
    """How much less the drafter's own covers; null without counts and another mapping."""
    cheaper: bool | None
    """Whether that is little enough to keep it; null when unknown."""
    counts_name: str | None
    """Name of the array that the counts were taken from."""
    caches: tuple[Cache, ...]
    """Files that trainers would take a mapping from."""
    bytes_read: int
    """Bytes read from all files."""


def run(params: Params, context: Context) -> Result:
    """Read, write beside, rename, look around."""
    context.require("numpy")
    from probes.lib.files import Damaged, Meter, Unreadable

    try:
        return _run(params, context, Meter())
    except (Unreadable, Damaged) as error:
        context.unfit(str(error), getattr(error, "hint", None))


def _run(params: Params, context: Context, meter: Meter) -> Result:
    from probes.lib.files import shown
    from probes.lib.mappings import compare, is_ascending
    from probes.lib.new_folder import place_for
    from probes.lib.remap_findings import CHEAP
    from probes.lib.sides import read_side
    from probes.lib.vocabulary import counts_for

    place = place_for(params.out)
    own = read_side("the drafter", params.source)
    other = None if params.mapping is None else read_side("the other mapping", params.mapping)
    ids, vocab = _tokens(own, other)
    counts, counts_name = counts_for(params.counts, params.mapping, meter)
    _write(place, context.run_id, ids, vocab, params.source)
    weighed = _weigh(ids, other, counts)
    lost = None if weighed is None or other is None else weighed.coverage_b - weighed.coverage_a
    caches = _look_around(params, ids, vocab, place, meter)
    result = Result(
        out=shown(place),
        files_written=("d2t.npy", "t2d.npy"),
        draft_vocab_size=len(ids),
        target_vocab_size=vocab,
        ascending=is_ascending(ids),
        rows_kept=None if other is None or other.ids is None else len(ids) - compare(ids, other.ids).positional_matches,
        coverage_kept=weighed.coverage_a if weighed else None,
        coverage_other=weighed.coverage_b if weighed and other else None,
        coverage_lost=lost,
        cheaper=None if lost is None else lost <= CHEAP,
        counts_name=counts_name,
        caches=tuple(Cache(found.path, found.modified, found.rows, found.same, found.note) for found in caches),
        bytes_read=meter.bytes + own.meter.bytes + (other.meter.bytes if other else 0),
    )
    _report(context, result)
    _report_caches(context, caches)
    return result


def _tokens(own: Side, other: Side | None) -> tuple[Ids, int]:
    """Understand both; return the drafter's tokens and the size of the target's vocabulary."""
    from probes.lib.files import Unreadable
    from probes.lib.sides import sound_ids, understand

    understand(own, other.vocab if other else None, None)
    ids = sound_ids(own, "find out with verifier-head which mapping the head follows, and give that")
    vocab = own.vocab if own.vocab is not None else (other.vocab if other else None)
    if vocab is None:
        raise Unreadable(own.path, "nothing tells how many tokens the target has", "give it with its config.json, or with t2d")
    if other is not None:
        understand(other, vocab, None)
        sound_ids(other, "take it from where it was made")
        if other.vocab not in (None, vocab):
            raise Unreadable(other.path, "belongs to a target of %s tokens, the drafter to one of %d" % (other.vocab, vocab))
    return ids, vocab


def _write(place: str, tag: str, ids: Ids, vocab: int, source: str) -> None:
    """Make the folder with d2t.npy and t2d.npy, whole or not at all."""
    import numpy as np

    from probes.lib.new_folder import NewFolder, check_space
    from probes.lib.npy import make_header
    from probes.lib.safetensors_writer import Writer

    mask = np.zeros(vocab, bool)
    mask[ids] = True
    arrays = {"d2t.npy": (ids - np.arange(len(ids))).astype("<i8"), "t2d.npy": mask}
    check_space(place, sum(array.nbytes for array in arrays.values()))
    with NewFolder(place, tag) as new:
        for name, array in arrays.items():
            with Writer(os.path.join(new.path, name)) as writer:
                writer.write(make_header(array.dtype.str, array.shape))
                writer.write(array.tobytes())
        for name, array in arrays.items():
            _check(os.path.join(new.path, name), array)
        new.keep(readable_as=source if os.path.isdir(source) else os.path.dirname(os.path.abspath(source)))


def _check(path: str, array: Any) -> None:
    """Read a file again; raise Damaged when it is not what was written."""
    import numpy as np

    from probes.lib.checkpoint import open_array
    from probes.lib.files import Damaged, Meter

    with open_array(path, "array", Meter()) as written:
        if not np.array_equal(written.read("array"), array):
            raise Damaged(path, "is not what was written: the disk changed it")


def _weigh(ids: Ids, other: Side | None, counts: Any) -> Shares | None:
    from probes.lib.mappings import shares

    return None if counts is None else shares(ids, other.ids if other is not None and other.ids is not None else ids, counts)


def _look_around(params: Params, ids: Ids, vocab: int, place: str, meter: Meter) -> list[Artefact]:
    from probes.lib.artefacts import find_artefacts, read_artefact

    source = os.path.abspath(params.source)
    folder = source if os.path.isdir(source) else os.path.dirname(source)
    around = [folder, os.path.dirname(folder), os.getcwd(), *params.look_in]
    own = {os.path.realpath(source), *(os.path.realpath(os.path.join(place, name)) for name in ("d2t.npy", "t2d.npy"))}
    return [read_artefact(path, ids, vocab, meter) for path in find_artefacts(around, own)]


# Findings ------------------------------------------------------------------------------------------------------------


def _report(context: Context, result: Result) -> None:
    evidence = []
    if result.rows_kept is not None:
        evidence.append("the other mapping would give {:,} of {:,} rows another token".format(result.rows_kept, result.draft_vocab_size))
    d2t, t2d = (os.path.join(result.out, name) for name in result.files_written)
    context.finding(
        "ok",
        "mapping-written",
        "The drafter's own mapping is ready for its trainer",
        subject=result.out,
        value=result.draft_vocab_size,
        unit="rows",
        evidence=tuple(evidence),
        action="speculators: --d2t-path %s --t2d-path %s (they come before anything in the data folder), or start from the "
        "drafter without any mapping. SpecForge: model.vocab_mapping_path, or a release that keeps a checkpoint's mapping" % (d2t, t2d),
    )
    if result.coverage_lost is not None:
        told = "costs next to nothing" if result.cheaper else "costs coverage: moving the rows may be worth more"
        context.finding(
            "ok",
            "coverage-kept",
            "Keeping the drafter's mapping %s" % told,
            value=round(result.coverage_lost, 6),
            unit="share of counted tokens",
            threshold=_cheap(),
            threshold_source="what another mapping should cover more to be worth new rows",
            action=None if result.cheaper else "compare with rdiag vocab-remap, which moves the rows by token id",
        )
    if not result.ascending:
        context.finding(
            "degraded",
            "rows-not-ascending",
            "The rows are not in the order of token ids: trainers that cut the target's head with t2d put them in that order",
            subject=result.out,
            action="use it only with trainers that gather by d2t, or move the rows with rdiag vocab-remap to an ascending mapping",
        )


def _cheap() -> float:
    from probes.lib.remap_findings import CHEAP

    return CHEAP


def _report_caches(context: Context, caches: list[Artefact]) -> None:
    for found in caches:
        if found.same:
            continue
        context.finding(
            "degraded" if found.same is False else "unknown",
            "mapping-would-override",
            "A trainer that finds this file takes its mapping instead"
            if found.same is False
            else "A trainer may take its mapping from this file, which is not understood: %s" % found.note,
            subject=found.path,
            value=found.matches,
            unit=None if found.matches is None else "rows",
            threshold=None if found.matches is None else found.rows,
            threshold_source=None if found.matches is None else "every row must have the drafter's token",
            action="remove or rename it before the training starts",
        )
