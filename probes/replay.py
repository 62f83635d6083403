"""Run a drafter over stored samples under several hypotheses, on the CPU: which conventions does it follow?

A drafter predicts well only under the mapping, norm, shift and order of layers that it was trained with. Each hypothesis
is one run in plain torch, in float32: drafting steps as in serving, held against what the target says from its stored
final states. Without hypotheses of your own, those that differ from what the files declare in one thing are tried, and
the best of them is followed on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from remote_diag.probe import Context

EFFECTS = ("reads-files",)

DEVICE: Literal["cpu", "cuda"] = "cpu"


@dataclass(frozen=True)
class Params:
    """What to run over what."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    checkpoint: str
    """The drafter on the host: folder or file."""
    samples: tuple[str, ...]
    """Files with hidden states, or folders of them, on the host."""
    target: str | None = None
    """The target model on the host; without it drafts are held against the samples' own tokens, and the norm is not tried."""
    mapping: str | None = None
    """Another mapping (B) that the drafter's rows may stand for: file or folder on the host."""
    hypotheses: tuple[str, ...] = ()
    """What to try, each as in ``mapping=B,norm=off,shift=0,aux=2-1-0,residual=on``; nothing: search."""
    steps: int = 3
    """Drafting steps, 1 to 8."""
    limit: int = 8
    """Samples to use at most, spread evenly over all, 1 to 256."""
    tokens: int = 128
    """Tokens of each sample to use at most, 8 to 4096."""

    def __post_init__(self) -> None:
        """Check what no path and no hypothesis can be."""
        for path in (self.checkpoint, self.target, self.mapping, *self.samples):
            if path is not None and (not path or "\0" in path):
                raise ValueError("a path must not be empty and must not hold NUL")
        if not self.samples:
            raise ValueError("at least one sample is needed")
        if not (1 <= self.steps <= 8 and 1 <= self.limit <= 256 and 8 <= self.tokens <= 4096):
            raise ValueError("steps must be 1 to 8, limit 1 to 256, tokens 8 to 4096")


@dataclass(frozen=True)
class Step:
    """One drafting step of a run."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    tokens: int
    """Positions that counted."""
    loss: float
    """Cross entropy against the truth over the draft tokens, nats."""
    divergence: float
    """The same without the truth's own entropy, nats."""
    top1: float
    """Share of drafts that are the target's choice among all its tokens, 0 to 1."""
    token_top1: float
    """Share of drafts that are the token that follows in the sample, 0 to 1."""


@dataclass(frozen=True)
class Run:
    """What came of one hypothesis."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    mapping: Literal["A", "B"]
    """Whose tokens the rows stand for: A the checkpoint's own, B the other mapping's."""
    norm: bool | None
    """Whether the target's final norm was applied to the stored final states; null without a target."""
    shift: int
    """A stored state of token t says what token t + shift is; 1 is right."""
    aux_order: tuple[int, ...]
    """Which of the stored aux layers was fed first, second..."""
    norm_before_residual: bool
    """Whether the first layer's residual was the normed state."""
    loss: float
    """Of the first drafting step, nats a token."""
    divergence: float
    """Loss without the truth's own entropy, mean of all drafting steps, nats a token: what runs are ranked by."""
    top1: float
    """Of the first drafting step, 0 to 1."""
    accept_length: float
    """Tokens that one pass of the target would yield in a simulation: 1 and the drafts before the first wrong one."""
    steps: tuple[Step, ...]
    """All drafting steps."""


@dataclass(frozen=True)
class Result:
    """All runs, and the best one."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    runs: tuple[Run, ...]
    """In the order in which they were made; the first one is what the files declare."""
    best: int
    """Index of the run with the smallest divergence."""
    margin: float | None
    """Nats between it and the next best run; null for a single one."""
    truth: Literal["target", "tokens"]
    """What drafts were held against: the target's distribution, or the samples' own tokens."""
    positions: int
    """Positions that drafts began at."""
    draft_vocab_size: int
    """Rows of the drafter's head."""
    kinds: tuple[str, ...]
    """Formats of the samples."""
    files: tuple[str, ...]
    """The samples that were used."""
    device: str
    """cpu or cuda."""
    bytes_read: int
    """Bytes read from all files."""


def run(params: Params, context: Context) -> Result:
    """Check the hypotheses, run, and put the numbers into the result."""
    torch = context.require("torch")
    if DEVICE == "cuda" and not torch.cuda.is_available():
        context.unfit("torch sees no GPU", "run it on the CPU: rdiag replay --device cpu")
    context.require("numpy")
    from probes.lib import replay_run
    from probes.lib.files import Damaged, Unreadable

    try:
        for text in params.hypotheses:
            replay_run.parse(text, replay_run.PLAIN)
        request = replay_run.Request(
            params.checkpoint, params.samples, params.target, params.mapping, params.hypotheses, params.steps, params.limit, params.tokens
        )
        report = replay_run.replay(context, request, DEVICE)
    except ValueError as error:
        context.unfit(str(error))
    except (Unreadable, Damaged) as error:
        context.unfit(str(error), getattr(error, "hint", None))
    return Result(
        runs=tuple(_run(one) for one in report.runs),
        best=report.best,
        margin=report.margin,
        truth=report.truth,  # type: ignore[arg-type]
        positions=report.positions,
        draft_vocab_size=report.draft_vocab,
        kinds=report.kinds,
        files=report.files,
        device=DEVICE,
        bytes_read=report.bytes_read,
    )


def _run(one: object) -> Run:
    from dataclasses import asdict

    from probes.lib.replay import Run as Done

    assert isinstance(one, Done)  # noqa: S101 - for the type checker
    first = one.steps[0]
    return Run(
        **asdict(one.hypothesis),
        loss=first.loss,
        divergence=one.score,
        top1=first.top1,
        accept_length=one.accept_length,
        steps=tuple(Step(**vars(step)) for step in one.steps),
    )
