"""The whole of a replay, for the probes that run it on a CPU and on a GPU."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, replace

from .drafter import open_drafter
from .eagle import Eagle, Flags
from .files import Damaged, Meter, Unreadable, shown
from .replay import SHIFTS, Hypothesis, Run, Stage, Window, cut, search
from .sample_files import find_samples, opened_sample
from .samples import CONVENTIONS
from .sides import read_side, understand
from .target import open_target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from remote_diag.probe import Context

    from .drafter import Drafter
    from .mappings import Ids
    from .samples import Sample
    from .target import Target

MARGIN = 0.1
"""Nats by which a hypothesis must beat another to be called the right one."""
_NORMED, _SPREAD = 0.05, 0.9
_ORDERS = "hypothesis: what differs from the declared one, as in mapping=B,norm=off,shift=0,aux=2-1-0,residual=on"


@dataclass(frozen=True)
class Request:
    """What a probe is asked for; see its parameters."""

    checkpoint: str
    samples: tuple[str, ...]
    target: str | None
    mapping: str | None
    hypotheses: tuple[str, ...]
    steps: int
    limit: int
    tokens: int


@dataclass(frozen=True)
class Report:
    """What came of it."""

    runs: tuple[Run, ...]
    """In the order in which they were made; the first one is what is declared."""
    best: int
    """Index of the run with the smallest divergence."""
    margin: float | None
    """Nats between it and the next best; None for a single run."""
    files: tuple[str, ...]
    kinds: tuple[str, ...]
    """Formats of the samples."""
    positions: int
    draft_vocab: int
    truth: str
    """``target`` or ``tokens``."""
    bytes_read: int


def parse(text: str, declared: Hypothesis) -> Hypothesis:
    """Return the hypothesis that ``text`` makes of what is declared; raise ValueError."""
    result = declared
    for item in text.split(","):
        key, _, value = item.strip().partition("=")
        if key == "mapping" and value.upper() in ("A", "B"):
            result = replace(result, mapping=value.upper())
        elif key in ("norm", "residual") and value in ("on", "off"):
            result = replace(result, **{"norm" if key == "norm" else "norm_before_residual": value == "on"})  # type: ignore[arg-type]
        elif key == "shift" and value in [str(shift) for shift in SHIFTS]:
            result = replace(result, shift=int(value))
        elif key == "aux" and all(part.isdigit() for part in value.split("-")) and len(value) < 600:
            result = replace(result, aux_order=tuple(int(part) for part in value.split("-")))
        else:
            raise ValueError("%s is no part of a %s" % (ascii(item), _ORDERS))
    return result


PLAIN = Hypothesis("A", None, 1, (), norm_before_residual=False)
"""For checking what :func:`parse` takes before anything is known."""


@dataclass
class Scene:
    """A drafter on a stage, ready for hypotheses."""

    stage: Stage
    flags: Flags
    declared: Hypothesis
    """What the files say."""
    mappings: dict[str, Ids]
    kinds: set[str]
    files: list[str]
    total: int
    """Samples that there are."""


def _set(context: Context, request: Request, device: str, meter: Meter, stack: ExitStack) -> Scene:
    """Open everything and put it on the stage; ``stack`` closes it."""
    drafter = stack.enter_context(open_drafter(request.checkpoint, meter))
    target = None if request.target is None else stack.enter_context(open_target(request.target, meter))
    eagle = Eagle(drafter, device)
    width = None if target is None else target.head().columns
    files, total = find_samples(request.samples, request.limit)
    windows, kinds, norm = _load(context, files, request, width=width, target=target, meter=meter)
    mappings = _mappings(request, drafter, eagle, meter)
    embed = _embedding(drafter, target)
    stage = Stage(eagle, windows, mappings, target=target, embed=embed, count=request.steps, device=device)
    order = tuple(range(stage.layers))
    applied = norm if stage.truth is not None and norm in stage.truth.norms else None if stage.truth is None else False
    declared = Hypothesis("A", applied, 1, order, eagle.flags.norm_before_residual)
    return Scene(stage, eagle.flags, declared, mappings, kinds, files, total)


def both_residuals(
    context: Context, checkpoint: str, samples: tuple[str, ...], target: str | None, meter: Meter
) -> tuple[bool, float, float]:
    """Return (the declared norm_before_residual, divergence as declared, divergence the other way).

    Raises:
        Damaged, Unreadable: the drafter or the samples cannot be run.
        ImportError: there is no torch.
    """
    request = Request(checkpoint, samples, target, None, (), 3, 8, 128)
    with ExitStack() as stack:
        scene = _set(context, request, "cpu", meter, stack)
        declared = scene.declared
        other = replace(declared, norm_before_residual=not declared.norm_before_residual)
        scores = [scene.stage.run(hypothesis, scene.flags).score for hypothesis in (declared, other)]
    return declared.norm_before_residual, scores[0], scores[1]


def replay(context: Context, request: Request, device: str) -> Report:
    """Run the drafter under all hypotheses, and report what they say.

    Raises:
        Damaged, Unreadable: something cannot be used.
    """
    meter = Meter()
    with ExitStack() as stack:
        scene = _set(context, request, device, meter, stack)
        others = tuple(name for name in scene.mappings if name != "A")
        runs = _runs(context, request, scene.stage, scene.declared, flags=scene.flags, others=others)
    if not all(math.isfinite(step.loss) and math.isfinite(step.divergence) for run in runs for step in run.steps):
        raise Damaged(request.checkpoint, "makes NaN or infinities of these samples: look at its weights with rdiag drafter-check")
    order = sorted(range(len(runs)), key=lambda index: runs[index].score)
    report = Report(
        runs=tuple(runs),
        best=order[0],
        margin=None if len(runs) < 2 else runs[order[1]].score - runs[order[0]].score,
        files=tuple(shown(path) for path in scene.files),
        kinds=tuple(sorted(scene.kinds)),
        positions=scene.stage.positions,
        draft_vocab=len(scene.mappings["A"]),
        truth="tokens" if scene.stage.truth is None else "target",
        bytes_read=meter.bytes,
    )
    judge(context, report, shown(request.checkpoint), scene.total)
    return report


def _load(
    context: Context, files: list[str], request: Request, *, width: int | None, target: Target | None, meter: Meter
) -> tuple[list[Window], set[str], bool]:
    """Return (stretches of the samples, their kinds, whether their convention leaves the norm to the trainer)."""
    windows: list[Window] = []
    kinds: set[str] = set()
    norm: bool | None = None
    for index, path in enumerate(files):
        context.progress(index, len(files), unit="samples", label="reading")
        with opened_sample(path, meter, context.run_dir, width) as sample:
            kinds.add(sample.kind)
            window = cut(sample, request.tokens, request.steps)
            if window is not None:
                windows.append(window)
                norm = _needs_norm(sample, window, target) if norm is None else norm
    if not windows:
        raise Unreadable(request.samples[0], "no sample has enough tokens that count in the loss", "look at them: rdiag hidden-states")
    return windows, kinds, bool(norm)


def _needs_norm(sample: Sample, window: Window, target: Target | None) -> bool:
    """Return whether the norm is still to be applied: by the format, or by the numbers where both are usual."""
    import numpy as np

    kept_normed = CONVENTIONS[sample.kind][0]
    if kept_normed is not None:
        return not kept_normed
    weight = None if target is None else target.norm_weight()
    if weight is None or window.final is None or window.final.shape[1] != len(weight):
        return True
    sizes = np.sqrt(np.mean((window.final / np.where(weight == 0, 1, weight)) ** 2, axis=1))
    return bool(np.mean(np.abs(sizes - 1) < _NORMED) < _SPREAD)


def _mappings(request: Request, drafter: Drafter, eagle: Eagle, meter: Meter) -> dict[str, Ids]:
    import numpy as np

    if eagle.head is None:
        raise Unreadable(drafter.path, "holds no lm_head", "its rows are what is judged; a head that is the target's is not run here")
    rows = eagle.head.shape[0]
    mappings = {"A": _ids("the drafter", request.checkpoint, None, meter) if drafter.has("d2t") or drafter.has("ids") else np.arange(rows)}
    if request.mapping is not None:
        mappings["B"] = _ids("the other mapping", request.mapping, None, meter)
    for name, ids in mappings.items():
        if len(ids) != rows:
            raise Unreadable(
                request.checkpoint if name == "A" else request.mapping or "",
                "the mapping has %d rows, lm_head %d" % (len(ids), rows),
            )
    return mappings


def _ids(name: str, path: str, vocab: int | None, meter: Meter) -> Ids:
    side = read_side(name, path)
    meter.bytes += side.meter.bytes
    understand(side, vocab, None)
    if side.ids is None:
        raise Damaged(path, "no usable mapping: %s" % side.reason)
    return side.ids


def _embedding(drafter: Drafter, target: Target | None) -> Any:
    if drafter.has("embed"):
        return drafter.matrix("embed")
    if target is None:
        raise Unreadable(drafter.path, "holds no embedding", "give --target: it is the target's")
    return target.embedding()


def _runs(
    context: Context, request: Request, stage: Stage, declared: Hypothesis, *, flags: Flags, others: tuple[str, ...]
) -> list[Run]:
    def tell(done: int) -> None:
        context.progress(done, unit="hypotheses", label="running the drafter")

    if not request.hypotheses:
        return list(search(stage, declared, flags, others, tell))
    wanted = [declared]
    for text in request.hypotheses:
        hypothesis = parse(text, declared)
        if hypothesis.mapping != "A" and hypothesis.mapping not in others:
            raise Unreadable(request.checkpoint, "hypothesis %s needs another mapping" % ascii(text), "give it with --mapping")
        if sorted(set(hypothesis.aux_order)) != sorted(hypothesis.aux_order) or len(hypothesis.aux_order) != stage.layers or max(
            hypothesis.aux_order
        ) >= stage.layers:
            raise Unreadable(request.checkpoint, "hypothesis %s: the samples have %d aux layers" % (ascii(text), stage.layers))
        if hypothesis.norm is not None and (stage.truth is None or hypothesis.norm not in stage.truth.norms):
            raise Unreadable(request.checkpoint, "hypothesis %s needs the target's final norm" % ascii(text), "give --target")
        if hypothesis not in wanted:
            wanted.append(hypothesis)
    runs = []
    for number, hypothesis in enumerate(wanted, 1):
        runs.append(stage.run(hypothesis, flags))
        tell(number)
    return runs


WORDS = {
    "mapping": ("mapping-differs", "its rows stand for the tokens of the other mapping",
                "move the rows by token id (rdiag vocab-remap), or put the mapping back that it was trained with"),
    "norm": ("norm-differs", "the stored final states are {not}normed already",
             "tell the trainer so, or make the samples anew: the final norm must be applied exactly once"),
    "shift": ("shift-differs", "the stored states stand {shift} against the tokens",
              "find where the shift is made twice or not at all: in the samples, or in the trainer"),
    "aux_order": ("aux-order-differs", "the aux layers are stored in the order {aux}",
                  "make the samples anew with the layers in ascending order, or reorder their columns"),
    "norm_before_residual": ("residual-differs", "the first layer's residual is the {not}normed state",
                             "set norm_before_residual in config.json to how the drafter was trained"),
}  # fmt: skip
"""What differs -> (code of the finding, what that means, what to do)."""


def describe(hypothesis: Hypothesis, field: str) -> str:
    """Return in words what ``hypothesis`` says of one of its fields."""
    words = WORDS[field][1]
    off = not hypothesis.norm if field == "norm_before_residual" else bool(hypothesis.norm)
    if field == "norm_before_residual":
        off = not hypothesis.norm_before_residual
    by = hypothesis.shift - 1
    shift = "%d token%s too %s" % (abs(by), "" if abs(by) == 1 else "s", "late" if by < 0 else "early")
    return words.replace("{not}", "not " if off else "").replace("{shift}", shift).replace(
        "{aux}", "-".join(str(index) for index in hypothesis.aux_order)
    )


def judge(context: Context, report: Report, subject: str, total: int) -> None:
    """Report what the runs say."""
    declared, best = report.runs[0], report.runs[report.best]
    evidence = [_told(run) for run in sorted(report.runs, key=lambda run: run.score)[:6]]
    if len(report.files) < total:
        evidence.append("%d of %d samples were used" % (len(report.files), total))
    uniform = math.log(report.draft_vocab)
    chance = 1.0 / report.draft_vocab
    first = best.steps[0]
    if first.top1 < max(10 * chance, 0.02) or first.loss > uniform:
        context.finding(
            "fail", "nothing-fits", "Under no hypothesis does the drafter predict anything", subject=subject,
            value=round(first.top1, 4), threshold=round(max(10 * chance, 0.02), 4), threshold_source="ten times chance, or 2 %",
            evidence=tuple(evidence),
            action="its weights are not trained, were never loaded (rdiag drafter-check), or the samples are of another target",
        )  # fmt: skip
        return
    if declared.score - best.score < MARGIN:
        _judge_rivals(context, report, subject, tuple(evidence))
        return
    for name, cost in _decisive(report):
        code, _, action = WORDS[name]
        context.finding(
            "fail", code, "The drafter fits when %s" % describe(best.hypothesis, name), subject=subject, value=round(cost, 4),
            unit="nats", threshold=MARGIN, threshold_source="what a wrong convention costs", evidence=tuple(evidence), action=action,
        )  # fmt: skip


def _judge_rivals(context: Context, report: Report, subject: str, evidence: tuple[str, ...]) -> None:
    """Report that what is declared fits, and what fits as well."""
    declared = report.runs[0]
    rivals = [run for run in report.runs[1:] if run.score - declared.score < MARGIN]
    context.finding(
        "ok", "declared-fits", "The drafter does best as its files declare it", subject=subject, value=round(declared.steps[0].top1, 4),
        evidence=evidence,
    )  # fmt: skip
    if rivals:
        names = sorted({name for run in rivals for name in run.hypothesis.differences(declared.hypothesis)})
        context.finding(
            "unknown", "undecided", "Some hypotheses fit as well as what is declared: %s" % ", ".join(names), subject=subject,
            value=round(min(run.score - declared.score for run in rivals), 4), unit="nats", threshold=MARGIN,
            threshold_source="what a wrong convention costs", evidence=evidence, action="give more samples",
        )  # fmt: skip


def _decisive(report: Report) -> list[tuple[str, float]]:
    """Return (what differs between the best hypothesis and the declared one, nats that it gains); what gains nothing is left out."""
    declared, best = report.runs[0], report.runs[report.best]
    scores = {run.hypothesis: run.score for run in report.runs}
    found = []
    names = best.hypothesis.differences(declared.hypothesis)
    for name in names:
        back = replace(best.hypothesis, **{name: getattr(declared.hypothesis, name)})
        found.append((name, scores.get(back, declared.score) - best.score))
    return [one for one in found if one[1] >= MARGIN] or found


def _told(run: Run) -> str:
    hypothesis, first = run.hypothesis, run.steps[0]
    norm = "" if hypothesis.norm is None else ", norm %s" % ("on" if hypothesis.norm else "off")
    return "mapping %s%s, shift %d, aux %s, residual %s: loss %.3f, divergence %.3f, top-1 %.3f, accepts %.2f" % (
        hypothesis.mapping, norm, hypothesis.shift, "-".join(map(str, hypothesis.aux_order)),
        "normed" if hypothesis.norm_before_residual else "plain", first.loss, first.divergence, first.top1, run.accept_length,
    )  # fmt: skip
