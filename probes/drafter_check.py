"""Check the checkpoint of an EAGLE-3 drafter on its own, and against its target.

Every way is looked for in which checkpoints in the wild are broken without any error being raised: mappings that were
never loaded, were rounded or contradict themselves; rows of the head that are empty, repeated or in another order;
missing layers; an fc that ignores a layer; layer ids of the other convention; norms that config.json forgets; random
embeddings; special tokens that can never be proposed; stale mappings that a trainer would pick up. Each comes as a
finding. Weights are read in pieces.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from probes.lib.check_weights import Rows
    from probes.lib.drafter import Drafter
    from probes.lib.files import Meter
    from probes.lib.report import Report
    from probes.lib.sides import Side
    from probes.lib.target import Target
    from remote_diag.probe import Context

EFFECTS = ("reads-files",)


@dataclass(frozen=True)
class Params:
    """What to check."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    drafter: str
    """The drafter's checkpoint on the host: folder or file."""
    target: str | None = None
    """The target model's folder on the host; adds all checks against it."""
    encoding: Literal["auto", "offset", "absolute"] = "auto"
    """What d2t holds, where that cannot be told from the files."""
    near: tuple[str, ...] = ()
    """Folders on the host to search for stale mappings, besides those around the checkpoint."""
    seed: int = 0
    """For the choice of the rows that are sampled."""

    def __post_init__(self) -> None:
        """Check what no path can be."""
        for path in (self.drafter, self.target, *self.near):
            if path is not None and (not path or "\0" in path):
                raise ValueError("paths must not be empty or hold NUL")
        if not 0 <= self.seed < 1 << 32:
            raise ValueError("seed must be 0 to 4294967295")


@dataclass(frozen=True)
class HeadRows:
    """What all rows of lm_head look like."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    rows: int
    """Rows of lm_head."""
    not_finite: int
    """Rows with a NaN or an infinity."""
    zero: int
    """Rows that are all zero."""
    tiny: int
    """Rows shorter than a thousandth of the median."""
    repeated: int
    """Rows that are equal to an earlier one."""
    median_norm: float | None
    """Median length of the rows that are finite and not zero."""


@dataclass(frozen=True)
class SpecialToken:
    """A special token of the target without a draft row."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    id: int
    """Target token id."""
    text: str | None
    """Its text, where a tokenizer file names it."""
    role: str
    """bos_token_id, eos_token_id, pad_token_id, or added for all others."""


@dataclass(frozen=True)
class Mapping:
    """A mapping that lies near the checkpoint."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    path: str
    """Where on the host."""
    modified: float
    """Seconds since 1970."""
    rows: int | None
    """Draft rows; null when it is not understood."""
    same: bool | None
    """Whether it gives every row the drafter's token; null when one of the two is not understood."""
    matches: int | None
    """Rows to which both give the same token."""
    note: str
    """Why it is not understood; empty when it is."""


@dataclass(frozen=True)
class Result:
    """What was found; the findings say what is wrong with it."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    path: str
    """Absolute path on the host of what was asked for."""
    kind: str
    """safetensors, safetensors-sharded, torch or torch-sharded."""
    kind_reason: str
    """How the kind was recognised."""
    producer: str
    """SafeAI, SpecForge, speculators, ModelOpt, NeMo, AngelSlim, TorchSpec, or unknown."""
    producer_reason: str
    """The sign that it was recognised by."""
    tensors: int
    """Tensors in the checkpoint."""
    layer_keys: tuple[str, ...]
    """How its decoder layers are named: midlayer, layers.0, model.layers.0."""
    encoding: Literal["offset", "absolute", "ambiguous", "uninitialised", "corrupt"] | None
    """What d2t holds; null where the checkpoint has no mapping."""
    encoding_reason: str | None
    """How that was decided."""
    draft_vocab_size: int | None
    """Rows of d2t; null where the checkpoint has no mapping."""
    target_vocab_size: int | None
    """Target tokens, by t2d, else by config.json, else by the target."""
    hidden_size: int | None
    """Width of the drafter."""
    target_hidden_size: int | None
    """Width of the target."""
    target_layers: int | None
    """Decoder layers of the target; null without a target."""
    fc_layers: int | None
    """Layers of the target that fc takes."""
    aux_layer_ids: tuple[int, ...] | None
    """Layers of the target that config.json names."""
    aux_convention: Literal["outputs", "inputs"] | None
    """Whether these are the usual ids of those who number layers by outputs or by inputs; null when neither's."""
    head: HeadRows | None
    """What all rows of lm_head look like; null where there is none."""
    head_follows: str | None
    """What the rows of lm_head stand for, by the target's head: d2t, t2d, ...; null without a target or when untold."""
    head_method: Literal["exact", "cosine", "similarity"] | None
    """The evidence for it."""
    embedding_equal: bool | None
    """Whether the embedding is the target's; null when that was not compared."""
    same_tokenizer: bool | None
    """Whether the tokenizer beside the drafter is the target's; null when there are not two."""
    special_tokens_missing: tuple[SpecialToken, ...]
    """Special tokens of the target without a draft row."""
    mappings_near: tuple[Mapping, ...]
    """Other mappings around the checkpoint."""
    bytes_read: int
    """Bytes read from all files."""


@dataclass
class _Against:
    """What holding the drafter against its target gave."""

    follows: str | None = None
    method: str | None = None
    embedding_equal: bool | None = None
    same_tokenizer: bool | None = None
    missing: tuple[Any, ...] = ()


def run(params: Params, context: Context) -> Result:
    """Open, check, compare."""
    context.require("numpy")
    from probes.lib.drafter import open_drafter
    from probes.lib.files import Damaged, Meter, Unreadable
    from probes.lib.target import open_target

    meter = Meter()
    try:
        with open_drafter(params.drafter, meter) as drafter:
            if params.target is None:
                return _check(params, context, drafter, None, meter)
            with open_target(params.target, meter) as target:
                return _check(params, context, drafter, target, meter)
    except (Unreadable, Damaged) as error:
        context.unfit(str(error), getattr(error, "hint", None))


def _check(params: Params, context: Context, drafter: Drafter, target: Target | None, meter: Meter) -> Result:
    from probes.lib import check_config, check_weights
    from probes.lib.files import shown
    from probes.lib.producers import recognise
    from probes.lib.report import Report

    report = Report(context, shown(os.path.abspath(params.drafter)))
    producer = recognise(drafter)
    config = drafter.config
    side = _side(params, drafter, target, meter)
    vocab = (side.vocab if side else None) or (config.target_vocab_size if config else None) or _vocab(target)
    hidden = _hidden(drafter)
    width = (target.config.hidden_size if target and target.config else None) or (
        config.target_hidden_size if config else None
    )
    layers = target.layers if target else None

    context.progress(0, 4, unit="steps", label="mapping")
    _check_mapping(report, drafter, side, producer.name, vocab)
    context.progress(1, 4, unit="steps", label="layers")
    check_config.check_config(report, drafter)
    check_weights.check_layers(report, drafter, hidden)
    check_weights.check_body(report, drafter)
    blocks = check_weights.check_fc(report, drafter, width)
    check_weights.check_norms(report, drafter)
    check_weights.check_embedding(report, drafter, vocab)
    convention = check_config.check_aux_layers(report, config, blocks, layers, _kind(target))
    context.progress(2, 4, unit="steps", label="head")
    rows = check_weights.check_head(report, drafter, side)
    context.progress(3, 4, unit="steps", label="target" if target else "files around it")
    against = _against(report, drafter, target, side, seed=params.seed, meter=meter) if target else _Against()
    near = _near(report, params, drafter, side, meter)
    return Result(
        path=report.subject,
        kind=drafter.checkpoint.kind,
        kind_reason=drafter.checkpoint.reason,
        producer=producer.name,
        producer_reason=producer.reason,
        tensors=len(drafter.checkpoint.names()),
        layer_keys=tuple(shown(key) for key in drafter.layer_keys[:64]),
        encoding=side.encoding if side else None,  # type: ignore[arg-type]
        encoding_reason=side.reason if side else None,
        draft_vocab_size=side.rows if side else None,
        target_vocab_size=vocab,
        hidden_size=hidden,
        target_hidden_size=width,
        target_layers=layers,
        fc_layers=blocks,
        aux_layer_ids=config.aux_ids[0] if config else None,
        aux_convention=convention,  # type: ignore[arg-type]
        head=_rows(rows),
        head_follows=against.follows,
        head_method=against.method,  # type: ignore[arg-type]
        embedding_equal=against.embedding_equal,
        same_tokenizer=against.same_tokenizer,
        special_tokens_missing=tuple(SpecialToken(item.id, item.text, item.role) for item in against.missing[:1000]),
        mappings_near=near,
        bytes_read=meter.bytes,
    )


def _side(params: Params, drafter: Drafter, target: Target | None, meter: Meter) -> Side | None:
    """Return the drafter's mapping; None where it has none because it needs none, or nothing tells how large it is."""
    from probes.lib.files import Absent
    from probes.lib.sides import read_side, understand

    try:
        side = read_side("the drafter", params.drafter)
    except Absent:
        return None
    meter.bytes += side.meter.bytes
    understand(side, _vocab(target), None if params.encoding == "auto" else params.encoding)
    head = drafter.entry("lm_head")
    if side.stored is not None and head is not None and len(head.shape) == 2:
        # Reading the mapping alone does not open the shard that holds the head.
        side.stored = replace(side.stored, lm_head_rows=head.shape[0])
    whole = side.stored is not None and side.stored.d2t_name is None
    if whole and side.vocab is not None and (head is None or head.shape[0] == side.vocab == side.rows):
        return None
    return side


def _check_mapping(report: Report, drafter: Drafter, side: Side | None, producer: str, vocab: int | None) -> None:
    from probes.lib.mappings import is_ascending
    from probes.lib.producers import ASCENDING
    from probes.lib.side_findings import report_side

    if side is None:
        head = drafter.entry("lm_head")
        if head is not None and vocab is not None and head.shape[0] < vocab:
            report.fail(
                "d2t-missing",
                "The checkpoint has no d2t, and a head of fewer rows than the target has tokens: servers take row i for token i",
                value=head.shape[0], unit="rows", threshold=vocab, threshold_source="the target's vocabulary",
                action="write the d2t that the drafter was trained with into the checkpoint",
            )  # fmt: skip
        elif head is None or vocab is None:
            report.unknown("mapping-unknown", "There is no mapping, and nothing tells whether one is needed")
        else:
            report.ok("full-vocabulary", "The head has a row for every target token: no mapping is needed", value=head.shape[0])
        return
    before = len(report.levels)
    report_side(_Counting(report), side)  # type: ignore[arg-type]
    if side.stored is not None and side.stored.beside is not None:
        report.fail(
            "d2t-not-in-weights",
            "The mapping is only in %s, which servers do not read: they take row i for token i" % side.stored.beside,
            action="export the checkpoint with a release that writes d2t and t2d into the weights",
        )
    _check_form(report, side)
    if side.ids is not None and producer in ASCENDING and not is_ascending(side.ids):
        report.fail(
            "rows-not-ascending-here",
            "%s writes rows in the order of token ids, and these are not" % producer,
            action="its trainer cuts the target's head with t2d, in ascending order: d2t was exchanged or written by another tool",
        )
    if set(report.levels[before:]) <= {"ok"} and side.ids is not None:
        report.ok(
            "mapping-valid",
            "d2t gives each of its rows a token of its own" + (", and t2d marks just these" if side.t2d else ""),
            value=len(side.ids), unit="rows", evidence=(side.reason,),
        )  # fmt: skip


def _check_form(report: Report, side: Side) -> None:
    """Check that d2t and t2d are stored as the programs take them that read them."""
    if side.encoding == "absolute" and side.stored is not None and side.stored.claimed is None:
        report.fail(
            "d2t-absolute",
            "d2t holds token ids; servers and trainers take it for offsets, and add the number of the row to each",
            value=side.encoding, threshold="offset", threshold_source="how servers and trainers read a tensor named d2t",
            evidence=(side.reason,),
            action="write offsets into d2t, as int64: the token id of each row less the number of the row",
        )  # fmt: skip
    if side.t2d is not None and side.t2d.kind == "index-map":
        report.degraded(
            "t2d-rows",
            "t2d holds the row of each token; trainers take it for a mask, in which every number but 0 is true",
            threshold="a mask", threshold_source="how trainers read a tensor named t2d",
            action="write t2d anew as truth values: true for every token that has a draft row",
        )  # fmt: skip


class _Counting:
    """A context for findings that are written for one, which a report counts."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def finding(self, level: str, code: str, message: str, **more: Any) -> None:
        getattr(self._report, level)(code, message, **more)


def _against(
    report: Report, drafter: Drafter, target: Target, side: Side | None, *, seed: int, meter: Meter
) -> _Against:
    from probes.lib import check_config, check_target
    from probes.lib.files import Damaged, Unreadable

    found = _Against()
    check_config.check_against_target(report, drafter, target.config)
    found.embedding_equal = check_target.check_embedding_against_target(report, drafter, target)
    folder = target.checkpoint.folder
    found.same_tokenizer = check_target.check_tokenizers(report, drafter.checkpoint.folder, folder, meter)
    if side is not None:
        found.missing = check_target.check_special_tokens(report, side.ids, folder, meter)
    if drafter.has("lm_head"):
        try:
            found.follows, found.method = _check_order(report, drafter, target, side, seed)
        except (Unreadable, Damaged) as error:
            report.unknown("head-not-compared", "The head cannot be held against the target's: %s" % error.reason)
    return found


def _check_order(
    report: Report, drafter: Drafter, target: Target, side: Side | None, seed: int
) -> tuple[str | None, str | None]:
    """Return (what the head follows, the evidence), after reporting it."""
    from probes.lib.head_findings import build_guesses, examine, report_head

    head, theirs = drafter.matrix("lm_head"), target.head()
    examined = examine(head, theirs, build_guesses(side, head.rows, theirs.rows, None, None), seed)
    report_head(report.context, head, examined, side, subject=report.subject)
    return examined.judgement.follows, examined.judgement.method


def _near(report: Report, params: Params, drafter: Drafter, side: Side | None, meter: Meter) -> tuple[Mapping, ...]:
    from probes.lib.artefacts import find_artefacts, read_artefact

    folder = os.path.abspath(drafter.checkpoint.folder)
    own = {os.path.realpath(path) for path in meter.files}
    if side is not None:
        own |= {os.path.realpath(path) for path in side.meter.files}
    folders = list(dict.fromkeys([folder, os.path.dirname(folder), *params.near]))
    found = [
        read_artefact(path, side.ids if side else None, side.vocab if side else None, meter)
        for path in find_artefacts(folders, own)
    ]
    for item in found:
        if item.same is False:
            report.degraded(
                "mapping-near-differs",
                "Another mapping lies where trainers look for one: %s" % item.path,
                value=item.matches, unit="rows", threshold=side.rows if side else None,
                threshold_source="rows that keep their token under it",
                action="remove or rename it before the drafter is trained on, or pin the checkpoint's own",
            )  # fmt: skip
        elif item.same is None and item.note:
            report.ok("mapping-near-unread", "A file that may be a mapping was not understood: %s" % item.path, evidence=(item.note,))
    return tuple(Mapping(item.path, item.modified, item.rows, item.same, item.matches, item.note) for item in found)


def _vocab(target: Target | None) -> int | None:
    return target.vocab_size if target else None


def _kind(target: Target | None) -> str:
    value = target.config.layer.get("model_type") if target and target.config else None
    return value if isinstance(value, str) else ""


def _hidden(drafter: Drafter) -> int | None:
    """Return the width of the drafter: by its final norm, its head, then config.json."""
    for role in ("norm", "lm_head"):
        entry = drafter.entry(role)
        if entry is not None and entry.shape:
            return entry.shape[-1]
    return drafter.config.hidden_size if drafter.config else None


def _rows(rows: Rows | None) -> HeadRows | None:
    if rows is None:
        return None
    return HeadRows(rows.rows, rows.not_finite, rows.zero, rows.tiny, rows.repeated, rows.median_norm)
