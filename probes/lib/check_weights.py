"""Checks of a drafter's weights on their own: is everything there, loaded, finite, and of shapes that fit together?"""

from __future__ import annotations

from dataclasses import dataclass

from .files import Damaged, Unreadable, listed, shown
from .floats import STORED, are_finite, widen
from .head_match import row_keys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from .drafter import Drafter
    from .matrix import Matrix
    from .report import Report
    from .sides import Side

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLA = ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_LAYER_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
_TINY = 1e-3
"""Of the median norm: no trained row is that short."""
_DEAD = 1e-3
_LOUD = 20.0
"""Ratio of the norms of two blocks of fc; healthy ones differ by a few times."""
_MANY = 0.01
"""Share of equal rows that no vocabulary has; a few unused tokens share a row in many targets."""


@dataclass(frozen=True)
class Rows:
    """What a walk over all rows of a head found."""

    rows: int
    not_finite: int
    """Rows with a NaN or an infinity."""
    zero: int
    """Rows that are all zero."""
    tiny: int
    """Rows shorter than a thousandth of the median."""
    repeated: int
    """Rows that are equal to an earlier one."""
    median_norm: float | None
    """Of the finite rows that are not zero; None where there are none."""


def scan_rows(matrix: Matrix) -> tuple[Rows, NDArray[Any]]:
    """Return what all rows of ``matrix`` look like, and a number for each that only equal rows share."""
    import numpy as np

    norms, keys = [np.zeros(0)], [np.zeros(0, np.uint64)]
    for _, bits in matrix.chunks():
        keys.append(row_keys(bits))
        for start in range(0, len(bits), 512):
            numbers = widen(bits[start : start + 512], matrix.dtype)
            with np.errstate(over="ignore", invalid="ignore"):
                norms.append(np.sqrt(np.einsum("ij,ij->i", numbers, numbers, dtype=np.float64)))
    norm, key = np.concatenate(norms), np.concatenate(keys)
    finite = np.isfinite(norm)
    used = norm[finite & (norm > 0)]
    median = float(np.median(used)) if len(used) else None
    sound = key[finite & (norm > 0)]
    return (
        Rows(
            len(norm),
            int((~finite).sum()),
            int((norm == 0).sum()),
            0 if median is None else int(((norm > 0) & (norm < _TINY * median)).sum()),
            len(sound) - len(np.unique(sound)),
            median,
        ),
        key,
    )


def check_head(report: Report, drafter: Drafter, side: Side | None) -> Rows | None:
    """Check all rows of the drafter's head; None where it has none."""
    import numpy as np

    if not drafter.has("lm_head"):
        if not (drafter.config is not None and drafter.config.tied):
            report.degraded(
                "head-missing",
                "The checkpoint has no lm_head: servers take the target's",
                action="write the head that was trained into the checkpoint, if there was one",
            )
        return None
    head = drafter.matrix("lm_head")
    rows, keys = scan_rows(head)
    part = report.part()
    norm = drafter.entry("norm")
    if norm is not None and len(norm.shape) == 1 and norm.shape[0] != head.columns:
        part.fail(
            "head-width",
            "lm_head takes %d numbers, the norm before it gives %d" % (head.columns, norm.shape[0]),
            value=head.columns, unit="columns", threshold=norm.shape[0], threshold_source="the drafter's final norm",
            action="the head is another drafter's: find the one that was trained with these layers",
        )  # fmt: skip
    if not rows.rows:
        part.fail("head-empty", "lm_head has no rows", value=0, unit="rows", action="export the checkpoint again")
    if rows.not_finite:
        every = rows.not_finite == rows.rows
        part.fail(
            "head-not-finite",
            "lm_head was never loaded: all of it is NaN" if every else "lm_head has rows with NaN or infinities",
            value=rows.not_finite, unit="rows", threshold=0, threshold_source="one such row makes every loss NaN",
            action="load the head from the target or from the checkpoint that it was trained in",
        )  # fmt: skip
    if rows.zero or rows.tiny:
        every = rows.zero == rows.rows
        level = part.fail if every else part.degraded
        level(
            "head-empty-rows",
            "lm_head was never loaded: all of it is zero" if every else "lm_head has rows that are zero or next to it",
            value=rows.zero + rows.tiny, unit="rows", threshold=0,
            threshold_source="rows shorter than a thousandth of the median row",
            action="find out whether these rows were ever trained; their tokens get the logit 0 at every position",
        )  # fmt: skip
    if rows.repeated:
        by_offset = _repeats_like(keys, side)
        level = part.fail if by_offset or rows.repeated > _MANY * rows.rows else part.ok
        evidence = ("rows with the same offset in d2t are the same row: the head was indexed with offsets",) if by_offset else ()
        level(
            "head-repeated-rows",
            "{:,} rows of lm_head are equal to earlier ones".format(rows.repeated),
            value=rows.repeated, unit="rows", threshold=int(_MANY * rows.rows),
            threshold_source="1 % of the rows; targets have a few tokens that were never trained",
            evidence=evidence,
            action="export the checkpoint again from the trainer's own files: a converter took offsets for token ids"
            if by_offset else "find out which tokens these are",
        )  # fmt: skip
    if part.sound:
        report.ok("head-rows", "All rows of lm_head are finite, filled and different", value=int(np.int64(rows.rows)), unit="rows")
    return rows


def _repeats_like(keys: NDArray[Any], side: Side | None) -> bool:
    """Whether rows are equal exactly where their numbers in d2t are."""
    import numpy as np

    if side is None or side.stored is None or len(side.stored.d2t) != len(keys):
        return False
    offsets = side.stored.d2t
    order = np.argsort(offsets, kind="stable")
    same_offset = offsets[order][1:] == offsets[order][:-1]
    same_row = keys[order][1:] == keys[order][:-1]
    return bool(same_offset.any()) and float((same_offset == same_row).mean()) > 0.99


def check_layers(report: Report, drafter: Drafter, hidden: int | None) -> None:
    """Check that every tensor of the decoder layers is there, and that the first one takes twice the width."""
    keys = [shown(key) for key in drafter.layer_keys]
    numbers = sorted({int(role.split(".")[1]) for role in drafter.roles if role.startswith("layers.")})
    part = report.part()
    if not numbers:
        part.fail(
            "layers-missing",
            "The checkpoint has no decoder layer: servers would run one of random numbers",
            evidence=("tensors of unknown names: %s" % listed(drafter.unknown),) if drafter.unknown else (),
            action="give the drafter's whole checkpoint; layers are named midlayer, layers.0 or model.layers.0",
        )
        return
    styles = {"midlayer" if "midlayer" in key else "layers" for key in keys}
    if len(styles) > 1:
        part.degraded(
            "layer-names-mixed",
            "Layers are named both midlayer and layers.N: each server reads one of them",
            evidence=tuple(keys[:8]),
            action="keep the names that the server expects",
        )
    missing = [role for number in numbers for role in _missing_in_layer(drafter, number)]
    missing += [role for role in ("fc", "norm") if role not in drafter.roles]
    if missing:
        part.fail(
            "tensors-missing",
            "Tensors of the drafter are missing: %s" % listed(missing),
            value=len(missing), unit="tensors", threshold=0, threshold_source="servers leave what is missing at random numbers",
            action="export the checkpoint again, and compare the names with those that the server expects",
        )  # fmt: skip
    _check_input_width(part, drafter, numbers[0], hidden)
    if drafter.unknown:
        part.degraded(
            "tensors-unknown",
            "Tensors that no server knows, which are skipped without a word: %s" % listed(drafter.unknown),
            value=len(drafter.unknown), unit="tensors", threshold=0,
            action="rename them as the server expects, or leave them out",
        )  # fmt: skip
    if drafter.repeated:
        part.degraded(
            "tensors-twice",
            "The same tensor under several names: %s" % listed([name for names in drafter.repeated.values() for name in names]),
            value=len(drafter.repeated), unit="tensors", threshold=0,
            action="keep one of each: which one a server takes depends on their order",
        )  # fmt: skip
    if part.sound:
        report.ok(
            "layers-complete",
            "All tensors of the decoder layer are there, named %s" % ", ".join(keys[:4]),
            evidence=("releases of SGLang before it renamed its layer read midlayer only, vLLM reads layers.N",),
        )


def check_body(report: Report, drafter: Drafter) -> None:
    """Check that the matrices of the decoder layers are finite and not zero; reads them once."""
    broken, empty = [], []
    for role in sorted(drafter.roles):
        entry = drafter.entry(role)
        if not role.startswith("layers.") or entry is None or len(entry.shape) != 2 or entry.dtype not in STORED:
            continue
        finite, filled = True, False
        for _, bits in drafter.matrix(role).chunks():
            finite = finite and are_finite(bits, entry.dtype)
            filled = filled or bool(bits.any())
        if not finite:
            broken.append(role)
        elif not filled:
            empty.append(role)
    if broken:
        report.fail(
            "layer-not-finite",
            "Weights of the decoder layer hold NaN or infinities: %s" % listed(broken),
            value=len(broken), unit="tensors", threshold=0, threshold_source="one such number makes every state NaN",
            action="take an earlier checkpoint",
        )  # fmt: skip
    if empty:
        report.fail(
            "layer-zero",
            "Weights of the decoder layer were never loaded or trained, they are all zero: %s" % listed(empty),
            value=len(empty), unit="tensors", threshold=0, threshold_source="no trainer leaves a whole matrix at zero",
            action="export the checkpoint again, and compare these tensors with the trainer's own",
        )  # fmt: skip


def _missing_in_layer(drafter: Drafter, number: int) -> list[str]:
    def has(name: str) -> bool:
        return "layers.%d.%s" % (number, name) in drafter.roles

    attention = _MLA if has("self_attn.kv_a_proj_with_mqa") else _ATTENTION
    # Some trainers fuse them.
    fused = {"q_proj", "k_proj", "v_proj"} if has("self_attn.qkv_proj") else set()
    fused |= {"gate_proj", "up_proj"} if has("mlp.gate_up_proj") else set()
    wanted = ["self_attn." + name for name in attention if name not in fused]
    wanted += ["mlp." + name for name in _MLP if name not in fused]
    wanted += [name for name in _LAYER_NORMS if number == 0 or name != "hidden_norm"]
    return ["layers.%d.%s" % (number, name) for name in wanted if not has(name)]


def _check_input_width(report: Report, drafter: Drafter, number: int, hidden: int | None) -> None:
    names = ("q_proj", "q_a_proj", "qkv_proj", "kv_a_proj_with_mqa")
    role = next(
        (role for role in ("layers.%d.self_attn.%s" % (number, name) for name in names) if role in drafter.roles), None
    )
    entry = drafter.entry(role) if role else None
    if entry is None or len(entry.shape) != 2 or hidden is None or entry.shape[1] == 2 * hidden:
        return
    report.fail(
        "layer-input-width",
        "The first layer takes %d numbers, not the embedding and the hidden state side by side" % entry.shape[1],
        value=entry.shape[1], unit="columns", threshold=2 * hidden, threshold_source="twice the drafter's hidden size",
        action="this is no EAGLE-3 layer, or hidden_size in config.json is another model's",
    )  # fmt: skip


def check_fc(report: Report, drafter: Drafter, target_hidden: int | None) -> int | None:
    """Check fc, which joins the target's layers; return how many layers it takes, None where that cannot be told."""
    import numpy as np

    if not drafter.has("fc"):
        return None
    matrix = drafter.matrix("fc")
    # Without a width as many layers are taken for granted as config.json names, and only that they divide it is checked.
    named = len((drafter.config.aux_ids[0] if drafter.config else None) or ()) or 3
    parts = named if matrix.columns % named == 0 else 3
    width = target_hidden or (matrix.columns // parts if matrix.columns % parts == 0 else None)
    if not width or matrix.columns % width:
        report.fail(
            "fc-width",
            "fc takes %d numbers, which is no multiple of the target's hidden size" % matrix.columns,
            value=matrix.columns, unit="columns", threshold=target_hidden or 3,
            threshold_source="the target's hidden size" if target_hidden else "three layers side by side",
            action="the drafter belongs to another target, or target_hidden_size in config.json is wrong",
        )  # fmt: skip
        return None
    blocks = matrix.columns // width
    squares = np.zeros(blocks)
    for _, bits in matrix.chunks():
        for start in range(0, len(bits), 512):
            numbers = widen(bits[start : start + 512], matrix.dtype)
            with np.errstate(over="ignore", invalid="ignore"):
                squares += np.square(numbers, dtype=np.float64).sum(axis=0).reshape(blocks, width).sum(axis=1)
    norms = np.sqrt(squares)
    told = tuple("norm of the block of layer %d of %d: %.4g" % (index + 1, blocks, norm) for index, norm in enumerate(norms))
    if not np.isfinite(norms).all():
        report.fail("fc-not-finite", "fc holds NaN or infinities", evidence=told, action="take an earlier checkpoint")
    elif norms.min() <= _DEAD * norms.max():
        report.fail(
            "fc-dead-block",
            "fc ignores one of the target's layers",
            value=float(norms.min()), threshold=float(_DEAD * norms.max()), threshold_source="a thousandth of the largest block",
            evidence=told,
            action="the layer was missing or zero in the training data: look at the hidden states",
        )  # fmt: skip
    elif norms.max() > _LOUD * norms.min():
        report.degraded(
            "fc-uneven",
            "fc weighs the target's layers very differently",
            value=float(norms.max() / norms.min()), threshold=_LOUD, threshold_source="healthy blocks differ by a few times",
            evidence=told,
            action="check that the layers of the training data are the ones that are meant, and in their order",
        )  # fmt: skip
    else:
        report.ok("fc-blocks", "fc weighs %d layers of the target alike" % blocks, evidence=told)
    return blocks


def check_norms(report: Report, drafter: Drafter) -> None:
    """Check that the weights of all norms are finite, and were trained."""
    import numpy as np

    untrained, broken = [], []
    for role in sorted(drafter.roles):
        entry = drafter.entry(role)
        if "norm" not in role or entry is None or len(entry.shape) != 1 or entry.elements > 1 << 20:
            continue
        weights = drafter.read(role)
        if not np.isfinite(weights).all() or not weights.any():
            broken.append(role)
        elif (weights == 1).all():
            untrained.append(role)
    if broken:
        report.fail(
            "norms-broken", "Norms that are zero or not finite: %s" % listed(broken), action="take an earlier checkpoint"
        )
    if untrained:
        report.degraded(
            "norms-untrained",
            "Norms whose weights are all exactly 1, as before training: %s" % listed(untrained),
            value=len(untrained), unit="norms", threshold=0,
            action="a trainer that did not find a norm leaves it at 1: look for a warning in its log",
        )  # fmt: skip


def check_embedding(report: Report, drafter: Drafter, vocab: int | None) -> None:
    """Check the embedding, where the checkpoint has one: its rows, and that it was loaded."""
    import numpy as np

    if not drafter.has("embed"):
        return
    try:
        matrix = drafter.matrix("embed")
        sample = matrix.take(np.unique(np.linspace(0, max(0, matrix.rows - 1), 1024).astype(np.int64)))
    except (Damaged, Unreadable) as error:
        report.unknown("embedding-unreadable", "The embedding cannot be read: %s" % error.reason)
        return
    if vocab is not None and matrix.rows < vocab:
        report.fail(
            "embedding-rows",
            "The embedding has fewer rows than the target has tokens",
            value=matrix.rows, unit="rows", threshold=vocab, threshold_source="the target's vocabulary",
            action="the drafter embeds target tokens: never cut its embedding down to the draft vocabulary",
        )  # fmt: skip
    if not np.isfinite(sample).all():
        report.fail(
            "embedding-not-finite",
            "The embedding was never loaded: it holds NaN" if np.isnan(sample).all() else "The embedding holds NaN or infinities",
            action="load it from the target",
        )
    elif not sample.any():
        report.fail("embedding-zero", "The embedding was never loaded: it is zero", action="load it from the target")
