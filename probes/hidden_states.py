"""Hold stored hidden states against the target, the dataset and the serving engine: thirteen ways in which they can be wrong.

Trainers keep the target's hidden states in six formats in which the same key means different things. This probe tells
them apart, reads a few files whole and in pieces, and asks the target's own head and layers what each state is: normed or
not, of which layer, in which order, of which token. What needs the target is unknown without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from probes.lib.hidden_run import Outcome
    from remote_diag.probe import Context

EFFECTS = ("reads-files",)

Verdict = Literal["ok", "degraded", "fail", "unknown", "skipped"]


@dataclass(frozen=True)
class Params:
    """Which samples to hold against what."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    samples: tuple[str, ...]
    """Files with hidden states, or folders of them, on the host."""
    target: str | None = None
    """The target model on the host: folder or file."""
    serving: str | None = None
    """Hidden states of the same tokens out of the serving engine, in any of the formats: file or folder on the host."""
    dataset: str | None = None
    """The tokenized dataset on the host, as JSON lines with input_ids and loss_mask; line n belongs to file n."""
    drafter: str | None = None
    """A drafter on the host: its layer ids, fc and flags are held against the samples."""
    layers: tuple[int, ...] = ()
    """Layers whose inputs the aux states should be; by default the drafter's, or what trainers take."""
    trainer_norm: Literal["auto", "on", "off"] = "auto"
    """Whether the trainer applies the target's final norm; auto: as trainers of the samples' format do."""
    limit: int = 16
    """Samples to read at most, spread evenly over all, 1 to 1024."""
    positions: int = 256
    """Tokens whose states are put through the target's head, 16 to 8192."""
    seed: int = 0
    """For the choice of these tokens."""

    def __post_init__(self) -> None:
        """Check what no path and no number can be."""
        for path in (self.target, self.serving, self.dataset, self.drafter, *self.samples):
            if path is not None and (not path or "\0" in path):
                raise ValueError("a path must not be empty and must not hold NUL")
        if not self.samples:
            raise ValueError("at least one sample is needed")
        if not (1 <= self.limit <= 1024 and 16 <= self.positions <= 8192 and 0 <= self.seed < 1 << 32):
            raise ValueError("limit must be 1 to 1024, positions 16 to 8192, seed 0 to 4294967295")
        if len(self.layers) > 64 or any(not 0 <= layer < 10_000 for layer in self.layers):
            raise ValueError("layers must be at most 64 numbers from 0 to 9999")


@dataclass(frozen=True)
class Check:
    """The verdict on one of the thirteen mismatches."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    number: int
    """1 to 13."""
    name: str
    """Also the code of its finding."""
    verdict: Verdict
    """ok: looked for and not there."""


@dataclass(frozen=True)
class Agreement:
    """How often the target's head, given a state, chooses the token at t + shift."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    part: str
    """final, or aux and a number."""
    normed: bool
    """Whether the final norm was applied before the head."""
    shares: dict[str, float]
    """Shift (-1, 0, 1, 2) to share of tokens, 0 to 1; the largest should stand at 1."""


@dataclass(frozen=True)
class Part:
    """One layer's states, over all samples that were read."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    name: str
    """aux and a number in the stored order, or final."""
    dtype: str
    """Its type as stored."""
    width: int
    """Numbers a token."""
    size_median: float | None
    """Median root mean square of a token's state; null where nothing is finite."""
    size_highest: float | None
    """The largest of them; null where nothing is finite."""
    largest: float
    """Largest magnitude of a number."""
    broken: int
    """Numbers that are NaN or infinite."""
    layer: int | None
    """Layer of the target whose input it is; the number of layers: the last one's output. Null where not computed."""
    layer_cosine: float | None
    """Mean cosine with that layer's state; null where not computed."""
    serving_cosine: float | None
    """Mean cosine with the same part of the serving dump; null without one."""


@dataclass(frozen=True)
class Sample:
    """One file."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    path: str
    """On the host."""
    kind: str
    """Its format: specforge, speculators-v0, speculators-v1, speculators, modelopt or angelslim."""
    reason: str
    """How that was recognised."""
    tokens: int
    """Tokens that it has states of."""
    mask_share: float | None
    """Share of tokens that count in the loss, 0 to 1; null without a mask."""
    problems: tuple[str, ...]
    """Contradictions within it."""


@dataclass(frozen=True)
class Result:
    """What the samples hold, and what is wrong with it."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    checks: tuple[Check, ...]
    """All thirteen, in order."""
    normed: bool | None
    """Whether the stored final states are normed; null where that cannot be told."""
    shift: int | None
    """Token relative to its own that a state predicts best; null without a target."""
    layers: tuple[int | None, ...]
    """Layers whose inputs the aux states are; empty where that was not computed."""
    hidden_size: int
    """Width of a layer's states."""
    target_hidden_size: int | None
    """Width of the target; null without it."""
    kinds: tuple[str, ...]
    """Formats that were found."""
    parts: tuple[Part, ...]
    """Layers of the samples."""
    agreements: tuple[Agreement, ...]
    """Empty without a target."""
    positions: int
    """Tokens that the agreements are of."""
    samples: tuple[Sample, ...]
    """The files that were read."""
    samples_total: int
    """Files that there are."""
    damaged: tuple[str, ...]
    """Files that could not be read, with the reasons."""
    bytes_read: int
    """Bytes read from all files."""


def run(params: Params, context: Context) -> Result:
    """Gather, check, and put the numbers into the result."""
    context.require("numpy")
    from probes.lib.files import Damaged, Unreadable
    from probes.lib.hidden_run import Gatherer, Request

    request = Request(
        samples=params.samples,
        target=params.target,
        serving=params.serving,
        dataset=params.dataset,
        drafter=params.drafter,
        layers=params.layers,
        trainer_norm={"auto": None, "on": True, "off": False}[params.trainer_norm],
        limit=params.limit,
        positions=params.positions,
        seed=params.seed,
    )
    try:
        return _result(Gatherer(context, request).gather())
    except (Unreadable, Damaged) as error:
        context.unfit(str(error), getattr(error, "hint", None))


def _result(outcome: Outcome) -> Result:
    from probes.lib.hidden_checks import NAMES

    evidence = outcome.evidence
    final = [one for one in evidence.agreements if one.part == "final"]
    aux = [match.layer for name, match in evidence.matches.items() if name != "final"]
    return Result(
        checks=tuple(Check(check.number, NAMES[check.number], check.verdict) for check in outcome.checks),  # type: ignore[arg-type]
        normed=outcome.normed,
        shift=max(final, key=lambda one: one.best).peak if final else None,
        layers=tuple(aux),
        hidden_size=evidence.samples[0].parts[-1].width,
        target_hidden_size=evidence.hidden,
        kinds=tuple(sorted({sample.kind for sample in evidence.samples})),
        parts=_parts(outcome),
        agreements=tuple(
            Agreement(one.part, one.normed, {str(shift): share for shift, share in one.shares.items()}) for one in evidence.agreements
        ),
        positions=evidence.picked,
        samples=tuple(Sample(s.path, s.kind, s.reason, s.tokens, s.mask_share, s.problems) for s in evidence.samples),
        samples_total=evidence.total,
        damaged=tuple(evidence.damaged),
        bytes_read=outcome.bytes_read,
    )


def _parts(outcome: Outcome) -> tuple[Part, ...]:
    import numpy as np

    evidence = outcome.evidence
    parts = []
    for first in evidence.samples[0].parts:
        same = [part for sample in evidence.samples for part in sample.parts if part.name == first.name]
        sizes = np.concatenate([part.sizes for part in same])
        sizes = sizes[np.isfinite(sizes)]
        match = evidence.matches.get(first.name)
        serving = (evidence.serving.cosines if evidence.serving else {}).get(first.name, {})
        parts.append(
            Part(
                name=first.name,
                dtype=first.dtype,
                width=first.width,
                size_median=float(np.median(sizes)) if len(sizes) else None,
                size_highest=float(sizes.max()) if len(sizes) else None,
                largest=max(part.largest for part in same),
                broken=sum(part.broken for part in same),
                layer=match.layer if match else None,
                layer_cosine=match.cosine if match else None,
                serving_cosine=serving.get(first.name),
            )
        )
    return tuple(parts)
