"""Checks of a drafter against its target: the embedding, and the tokens that it can never propose."""

from __future__ import annotations

from .files import Damaged, Unreadable
from .floats import cast, same_rows, widen
from .special_tokens import compare_tokenizers, read_special_tokens

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .drafter import Drafter
    from .files import Meter
    from .mappings import Ids
    from .report import Report
    from .special_tokens import Special
    from .target import Target

SAMPLE = 4096
"""Rows of the embeddings that are compared."""
_RELATED = 0.5
"""Mean cosine above which an embedding is the target's, trained on; that of two unrelated ones is near 0."""
_SOME = 0.05
"""Share of rows without any likeness that is no accident."""


def check_embedding_against_target(report: Report, drafter: Drafter, target: Target) -> bool | None:
    """Hold the drafter's embedding against the target's; return whether they are equal, None when that was not compared."""
    import numpy as np

    if not drafter.has("embed"):
        report.ok("embedding-shared", "The checkpoint has no embedding of its own: servers give it the target's")
        return None
    try:
        own, theirs = drafter.matrix("embed"), target.embedding()
    except (Damaged, Unreadable) as error:
        report.unknown("embedding-not-compared", "The embeddings cannot be compared: %s" % error.reason)
        return None
    if own.columns != theirs.columns:
        report.degraded(
            "embedding-width",
            "The embedding is not as wide as the target's",
            value=own.columns, unit="columns", threshold=theirs.columns, threshold_source=theirs.name,
            action="serve it only where the drafter's own embedding is kept: SGLang replaces it with the target's",
        )  # fmt: skip
        return False
    rows = np.unique(np.linspace(0, max(0, min(own.rows, theirs.rows) - 1), SAMPLE).astype(np.int64))
    mine, other = own.take_bits(rows), theirs.take_bits(rows)
    # Rows with NaN are another finding's.
    finite = np.isfinite(widen(mine, own.dtype)).all(axis=1)
    if not finite.any():
        return None
    rows, mine, other = rows[finite], mine[finite], other[finite]
    # Bit for bit in the shorter of the two types: copies are cast when they are written.
    equal = same_rows(mine, cast(other, theirs.dtype, own.dtype)) | same_rows(cast(mine, own.dtype, theirs.dtype), other)
    if equal.all():
        report.ok("embedding-equal", "The embedding is the target's, bit for bit", value=len(rows), unit="sampled rows")
        return True
    a, b = widen(mine, own.dtype), widen(other, theirs.dtype)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = np.einsum("ij,ij->i", a, b) / np.sqrt(np.einsum("ij,ij->i", a, a) * np.einsum("ij,ij->i", b, b))
    cosines = cosines[np.isfinite(cosines)]
    cosine = float(cosines.mean()) if len(cosines) else 0.0
    far = float((cosines < _RELATED).mean()) if len(cosines) else 1.0
    evidence = (
        "%d of %d sampled rows are equal; mean cosine %.3f" % (int(equal.sum()), len(rows), cosine),
        "standard deviation %.4g, the target's %.4g" % (float(a.std()), float(b.std())),
    )
    if cosine < _RELATED:
        report.fail(
            "embedding-random",
            "The embedding has nothing to do with the target's: random, or another model's",
            value=cosine, threshold=_RELATED, threshold_source="mean cosine of rows; copies have 1, unrelated ones 0",
            evidence=evidence,
            action="leave embed_tokens out of the checkpoint, or copy the target's into it",
        )  # fmt: skip
    elif far > _SOME:
        report.fail(
            "embedding-rows-differ",
            "A part of the embedding's rows have nothing to do with the target's, the others do",
            value=far, threshold=_SOME, threshold_source="share of rows whose cosine with the target's is below %.1f" % _RELATED,
            evidence=evidence,
            action="rows were moved or overwritten: leave embed_tokens out of the checkpoint, or copy the target's into it",
        )  # fmt: skip
    else:
        report.degraded(
            "embedding-differs",
            "The embedding was trained away from the target's: SGLang replaces it with the target's, vLLM keeps it",
            value=cosine, threshold=1.0, threshold_source="mean cosine of rows with the target's",
            evidence=evidence,
            action="serve it where its own embedding is kept, or train with a frozen one",
        )  # fmt: skip
    return False


def check_special_tokens(report: Report, ids: Ids | None, folder: str, meter: Meter) -> tuple[Special, ...]:
    """Report the special tokens of the target in ``folder`` that have no draft row; return them."""
    import numpy as np

    specials = read_special_tokens(folder, meter)
    if not specials or ids is None:
        report.unknown(
            "special-tokens-unknown",
            "Which special tokens the drafter lacks cannot be told: %s"
            % ("its mapping is not understood" if ids is None else "the target's folder names none"),
            action="give the target's whole folder: generation_config.json and tokenizer_config.json name them",
        )
        return ()
    has = np.isin(np.array([special.id for special in specials]), ids)
    missing = tuple(special for special, found in zip(specials, has.tolist()) if not found)
    told = tuple("%d %s (%s)" % (special.id, special.text or "", special.role) for special in missing[:20])
    ends = [special for special in missing if special.role == "eos_token_id"]
    if ends:
        report.degraded(
            "special-tokens-missing",
            "The drafter can never propose the end of a turn: its token has no draft row",
            value=len(missing), unit="tokens", threshold=0, threshold_source="special tokens without a draft row",
            evidence=told,
            action="output stays right, each end costs one rejected draft; build mappings with the special tokens forced in",
        )  # fmt: skip
    else:
        report.ok(
            "special-tokens",
            "%d of the target's %d special tokens have no draft row, the end of a turn has one" % (len(missing), len(specials)),
            value=len(missing), unit="tokens", evidence=told,
        )  # fmt: skip
    return missing


def check_tokenizers(report: Report, drafter_folder: str, target_folder: str, meter: Meter) -> bool | None:
    """Report whether the tokenizer beside the drafter is the target's; None when there is nothing to compare."""
    same, why = compare_tokenizers(drafter_folder, target_folder, meter)
    if same is False:
        report.degraded(
            "tokenizers-differ",
            "The tokenizer beside the drafter is not the target's",
            evidence=(why,),
            action="if the training data was made with it, equal ids were different tokens; servers use the target's",
        )
    elif same:
        report.ok("tokenizers-same", "The tokenizer beside the drafter is the target's", evidence=(why,))
    return same
