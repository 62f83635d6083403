"""What happens in a training log besides numbers: mappings loaded, checkpoints saved, ranks that fail."""

from __future__ import annotations

import re
from typing import NamedTuple

from .training_values import NUMBER


class Happening(NamedTuple):
    """One line that tells of something."""

    kind: str
    dialect: str | None
    """The dialect that prints it; None where anybody may."""
    value: float | None = None
    """The number in it: a share, a rank."""
    top: int | None = None
    """The size in it: N of ``top N``."""
    subject: str = ""
    """The file or folder in it."""


_FRACTION = re.compile(r"top (\d{1,12}) token frequency ratio:\s{0,4}(" + NUMBER + r")\s?%")

_WORDS: tuple[tuple[str, str, str | None], ...] = (
    ("Finetuning from base model: ", "warm-start", "specforge-warm-start"),
    ("Last checkpoint detected: ", "checkpoint-found", "specforge-warm-start"),
    ("Loaded vocab mapping", "mapping-loaded", "specforge-warm-start"),
    ("Loading vocab mapping from the cached file at: ", "mapping-cached", "specforge-mapping"),
    ("Saved vocab mapping to: ", "mapping-saved", "specforge-mapping"),
    ("Loading vocab mappings from ", "mapping-files", "speculators-mapping"),
    ("No vocab mappings provided. Regenerating", "mapping-regenerated", "speculators-mapping"),
    ("Caching vocab mapping files to ", "mapping-saved", "speculators-mapping"),
    ("No vocab mappings found", "mapping-missing", "speculators-mapping"),
    ("Started saving checkpoint to ", "checkpoint-saving", "speculators-phases"),
    ("Finished saving", "checkpoint-saved", "speculators-phases"),
    ("Saving checkpoint to ", "checkpoint-saving", "speculators-phases"),
    ("Updated checkpoint_best -> ", "best-checkpoint", "speculators-phases"),
    ("Found checkpoint at ", "checkpoint-found", "speculators-phases"),
    ("No previous checkpoint found", "from-scratch", "speculators-phases"),
    ("Now training epoch ", "epoch-started", "safeai"),
    ("New best checkpoint: ", "best-checkpoint", "torchspec"),
)
_TELLING = ("apping", "checkpoint", "base model", " saving", "epoch ", "local_rank")
"""One of these is in every line that tells of something."""
_EPOCH = re.compile(r"(Training|Validation) epoch (\d{1,9})/\d{1,9} (started|completed)")
_FAULTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("root-cause", re.compile(r"Root Cause \(first observed failure\)")),
    ("nccl-error", re.compile(r"Watchdog caught collective operation timeout|NCCL (?:error|WARN .{0,80}(?:failed|error))|ncclSystemError"
                              r"|ncclUnhandledCudaError|ncclInternalError|ncclRemoteError")),
    ("cuda-out-of-memory", re.compile(r"CUDA out of memory|CUDA error: out of memory")),
    ("cuda-error", re.compile(r"CUDA error: |CUDA_ERROR_|device-side assert|cudaError[A-Z]")),
    ("xid", re.compile(r"NVRM: Xid ")),
    ("not-a-number", re.compile(r"(?i)\b(?:loss|gradients?|grad[ _]norm)\b.{0,40}\b(?:nan|inf)\b|\bnan\b.{0,40}\b(?:loss|gradients?)\b")),
    ("exception", re.compile(r"Traceback \(most recent call last\)")),
)  # fmt: skip
_FAILED_RANK = re.compile(r"^\s{0,8}rank\s{1,12}:\s{0,4}(\d{1,6}) \(local_rank: \d{1,6}\)")
FAULTS = frozenset(kind for kind, _ in _FAULTS) | {"failed-rank"}
"""Kinds that tell of a fault."""


def happening(text: str) -> Happening | None:
    """Return what a line tells of, None when that is nothing known."""
    if "token frequency ratio" in text:
        match = _FRACTION.search(text)
        if match is not None:
            return Happening("token-coverage", "specforge-mapping", float(match.group(2)) / 100, int(match.group(1)))
    if not any(word in text for word in _TELLING):
        return None
    for words, kind, dialect in _WORDS:
        place = text.find(words)
        if place >= 0:
            return Happening(kind, dialect, subject=text[place + len(words) :].strip()[:300])
    match = _EPOCH.search(text)
    if match is not None:
        kind = "epoch-started" if match.group(3) == "started" else "epoch-finished"
        return Happening(kind, "speculators-phases", float(match.group(2)), subject=match.group(1).lower())
    match = _FAILED_RANK.match(text)
    if match is not None:
        return Happening("failed-rank", None, float(match.group(1)))
    return None


def fault(text: str) -> Happening | None:
    """Return the fault that a line tells of, None when it tells of none."""
    for kind, pattern in _FAULTS:
        if pattern.search(text):
            return Happening(kind, None)
    return None
