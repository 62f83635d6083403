"""The thirteen ways in which hidden states and those who use them can disagree, each with the number that shows it.

What cannot be measured is ``unknown``; what needs something that was not given is ``skipped`` where it is a comparison on
request, and ``unknown`` where the answer is owed (everything that needs the target).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .hidden_scan import SHIFTS
from .samples import CONVENTIONS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from remote_diag.probe import Context

    from .hidden_layers import Match
    from .hidden_scan import SampleFacts

NAMES = {
    1: "final-norm", 2: "final-layer", 3: "aux-layers", 4: "aux-order", 5: "shift", 6: "tokens", 7: "mask", 8: "overflow",
    9: "width", 10: "serving", 11: "residual-flag", 12: "duplicates", 13: "sharded",
}  # fmt: skip
_RIGHT_COSINE, _BAD_COSINE = 0.97, 0.9
_LOW, _FAIR = 0.15, 0.3
_CLEAR = 0.1
_HALF_MAX = 65504.0


@dataclass
class Agreement:
    """How often the head's choice for a state is the token that follows."""

    part: str
    normed: bool
    """Whether the final norm was applied before the head."""
    shares: dict[int, float]
    """Shift k -> share of tokens t with the choice for t equal to the token at t + k."""

    @property
    def peak(self) -> int:
        """The shift with the largest share."""
        return max(SHIFTS, key=lambda shift: (self.shares[shift], shift == 1))

    @property
    def best(self) -> float:
        """The largest share."""
        return max(self.shares.values())


@dataclass
class Serving:
    """A training dump held against a serving dump of the same tokens."""

    cosines: dict[str, dict[str, float]]
    """Part -> part of the serving dump -> mean cosine."""
    samples: int


@dataclass
class Evidence:
    """All that was measured."""

    samples: list[SampleFacts]
    total: int
    """Samples that there are."""
    damaged: list[str]
    hidden: int | None = None
    """Width of the target; None without it."""
    layers: int | None = None
    """Layers of the target."""
    has_norm: bool = False
    unit_share: float | None = None
    """Share of final states whose size is that of a normed one."""
    agreements: list[Agreement] = field(default_factory=list)
    picked: int = 0
    """Tokens that the agreements are of."""
    matches: dict[str, Match] = field(default_factory=dict)
    match_problem: str | None = None
    """Why the layers were not identified."""
    expected: tuple[int, ...] | None = None
    """Layers whose inputs the aux parts should be."""
    expected_source: str = ""
    compared: int = 0
    """Samples held against the dataset."""
    differing: list[str] = field(default_factory=list)
    """What differed from the dataset."""
    has_dataset: bool = False
    serving: Serving | None = None
    serving_problem: str | None = None
    fc_inputs: int | None = None
    residual: tuple[bool, float, float] | None = None
    """(what the drafter declares, nats as declared, nats the other way)."""
    residual_problem: str | None = None
    trainer_norm: bool | None = None
    """Whether the trainer applies the final norm; None: as the format's trainers do."""

    @property
    def kind(self) -> str:
        """Format of the first sample."""
        return self.samples[0].kind

    def agreement(self, part: str, *, normed: bool) -> Agreement | None:
        """Return the agreement of a part; None where it was not measured."""
        return next((one for one in self.agreements if one.part == part and one.normed is normed), None)


@dataclass
class Check:
    """The verdict on one mismatch."""

    number: int
    verdict: str


class Checker:
    """Runs all checks, and reports what each found.

    Args:
        context: gets the findings.
        evidence: what was measured.
        subject: what findings are about.
    """

    def __init__(self, context: Context, evidence: Evidence, subject: str) -> None:
        self._context, self._evidence, self._subject = context, evidence, subject
        self.checks: list[Check] = []

    def run(self) -> list[Check]:
        """Return the verdicts on all mismatches, in their order."""
        for check in (
            self._final_norm, self._final_layer, self._aux_layers, self._aux_order, self._shift, self._tokens, self._mask,
            self._overflow, self._width, self._serving, self._residual, self._duplicates, self._sharded,
        ):  # fmt: skip
            check()
        return sorted(self.checks, key=lambda check: check.number)

    def _say(self, number: int, level: Any, message: str, **more: Any) -> None:
        self.checks.append(Check(number, level))
        self._context.finding(level, NAMES[number], message, subject=self._subject, **more)

    def _no_target(self, number: int, what: str) -> bool:
        if self._evidence.hidden is not None:
            return False
        self._say(number, "unknown", "%s cannot be told without the target" % what, action="give --target")
        return True

    def state(self) -> bool | None:
        """Return whether the final states are normed; None where that cannot be told."""
        share = self._evidence.unit_share
        if share is not None and (share > 0.9 or share < 0.1):
            return share > 0.9
        raw, normed = (self._evidence.agreement("final", normed=normed) for normed in (False, True))
        if raw is None or normed is None or abs(raw.best - normed.best) < _CLEAR:
            return None
        return raw.best > normed.best

    def _final(self) -> Agreement | None:
        """Return the agreement of the final state as the head should get it."""
        state = self.state()
        if state is not None:
            return self._evidence.agreement("final", normed=not state)
        both = [one for one in self._evidence.agreements if one.part == "final"]
        return max(both, key=lambda one: one.best) if both else None

    def _final_norm(self) -> None:
        evidence = self._evidence
        if self._no_target(1, "Whether the final states are normed"):
            return
        if not evidence.has_norm or evidence.unit_share is None:
            self._say(1, "unknown", "The samples have no final state, or the target no final norm to hold it against")
            return
        told = tuple(
            "agreement with the next token: %.3f %s" % (one.shares[1], "after the norm" if one.normed else "as stored")
            for one in evidence.agreements
            if one.part == "final"
        )
        state = self.state()
        numbers = {"value": round(evidence.unit_share, 4), "evidence": told}
        if state is None:
            self._say(1, "unknown", "Whether the final states are normed cannot be told from their sizes", **numbers)
            return
        kept, trainer = CONVENTIONS[evidence.kind]
        due = evidence.trainer_norm if evidence.trainer_norm is not None else (None if kept is None else not kept)
        source = "share of states of the size that the norm gives; %s: %s" % (evidence.kind, trainer)
        if due is None:
            self._say(
                1, "ok", "The final states are %s" % ("normed" if state else "not normed: the trainer must apply the final norm"),
                threshold_source=source, **numbers,
            )  # fmt: skip
        elif due is state:
            self._say(
                1, "fail",
                "The final states are normed already, and the trainer norms them again" if state
                else "The final states are not normed, and the trainer does not norm them",
                threshold_source=source,
                action="make the samples anew in the trainer's convention, or switch its norm %s" % ("off" if state else "on"), **numbers,
            )  # fmt: skip
        else:
            self._say(1, "ok", "The final norm is applied exactly once", threshold_source=source, **numbers)

    def _final_layer(self) -> None:
        evidence = self._evidence
        if self._no_target(2, "Whether the final state is that of the last layer"):
            return
        match, own = evidence.matches.get("final"), self._final()
        told = tuple("%s: %.3f" % (one.part, one.best) for one in evidence.agreements if one.normed or one.part == "final")
        if match is not None and match.layer is not None:
            right = match.layer == evidence.layers
            self._say(
                2, "ok" if right else "fail",
                "The final state is the last layer's output" if right
                else "The final state is the input of layer %d, not the output of the last one" % match.layer,
                value=match.layer, threshold=evidence.layers, threshold_source="computed from the target's own layers", evidence=told,
                action=None if right else "make the samples anew with the last layer",
            )  # fmt: skip
            return
        if own is None:
            self._say(2, "unknown", "The samples have no final state, or too few tokens to look at")
            return
        others = [one for one in evidence.agreements if one.part != "final" and one.best > own.best + _CLEAR]
        numbers = {"value": round(own.best, 4), "threshold": _FAIR, "evidence": told,
                   "threshold_source": "share of tokens that the right state predicts, 0.3 and more as a rule"}  # fmt: skip
        if others:
            self._say(
                2, "fail", "%s predicts better than the final state: the layers are in another order" % others[0].part,
                action="the last layer must come last", **numbers,
            )  # fmt: skip
        elif own.best < _LOW:
            self._say(
                2, "fail", "The final state does not predict the text: it is another layer's, or another model's",
                action="check the layer ids that the samples were made with, and the target", **numbers,
            )  # fmt: skip
        elif own.best < _FAIR:
            self._say(2, "degraded", "The final state predicts little of the text", action="hold it against --serving", **numbers)
        else:
            self._say(2, "ok", "The final state predicts the text", **numbers)

    def _found_layers(self) -> list[int | None] | None:
        found = [match.layer for name, match in self._evidence.matches.items() if name.startswith("aux")]
        return found or None

    def _aux_layers(self) -> None:
        evidence = self._evidence
        if self._no_target(3, "Which layers feed the drafter"):
            return
        found = self._found_layers()
        if found is None:
            self._say(
                3, "unknown", "Which layers feed the drafter could not be computed: %s" % (evidence.match_problem or "no aux layers"),
                action="hold the samples against a dump of the serving engine: --serving",
            )  # fmt: skip
            return
        told = tuple(
            "%s: %s, cosine %.4f" % (name, "no layer's" if match.layer is None else "input of layer %d" % match.layer, match.cosine)
            for name, match in evidence.matches.items()
        )
        expected = evidence.expected
        shown = ", ".join("none" if layer is None else str(layer) for layer in found)
        numbers = {"value": shown, "threshold": None if expected is None else ", ".join(map(str, expected)),
                   "threshold_source": evidence.expected_source, "evidence": told}  # fmt: skip
        if None in found:
            self._say(
                3, "fail", "Some aux states are those of no layer of this target", action="check which model made the samples", **numbers
            )
            return
        layers, due = sorted(layer for layer in found if layer is not None), sorted(expected or ())
        steps = {layer - other for layer, other in zip(layers, due)}
        if expected is None or layers == due:
            self._say(3, "ok", "The aux states are the inputs of the layers %s" % shown, **numbers)
        elif len(steps) == 1 and len(layers) == len(due):
            by = steps.pop()
            self._say(
                3, "fail", "The aux states come from %d layer%s too %s" % (abs(by), "" if abs(by) == 1 else "s", "late" if by > 0 else "early"),
                action="layer ids mean the output of a layer to some programs, the input to others: move them by one", **numbers,
            )  # fmt: skip
        else:
            self._say(3, "fail", "The aux states are the inputs of other layers than expected", action="make the samples anew", **numbers)

    def _aux_order(self) -> None:
        evidence = self._evidence
        if self._no_target(4, "The order of the aux layers"):
            return
        found = self._found_layers()
        if found and None not in found:
            layers = [layer for layer in found if layer is not None]
            right = layers == sorted(layers)
            self._say(
                4, "ok" if right else "fail",
                "The aux layers are in ascending order" if right else "The aux layers are not in ascending order",
                value=", ".join(map(str, layers)), threshold=", ".join(map(str, sorted(layers))),
                threshold_source="fc takes the lowest layer first",
                action=None if right else "reorder the columns of the samples, or make them anew",
            )  # fmt: skip
            return
        sizes = [_median(part.sizes) for part in evidence.samples[0].parts if part.name != "final"]
        rising = all(low < high for low, high in zip(sizes, sizes[1:]))
        told = ("sizes (root mean square): %s" % ", ".join("%.4g" % size for size in sizes),)
        if len(sizes) > 1 and not rising:
            self._say(
                4, "degraded", "The sizes of the aux states do not grow from layer to layer, as they do as a rule", evidence=told,
                action="hold the samples against a dump of the serving engine: --serving",
            )  # fmt: skip
        else:
            self._say(4, "unknown", "The sizes of the aux states grow as they should, which does not prove their order", evidence=told)

    def _shift(self) -> None:
        evidence = self._evidence
        if self._no_target(5, "Whether states and tokens are shifted"):
            return
        own = self._final()
        offsets = {match.offset for match in evidence.matches.values() if match.layer is not None}
        told = () if own is None else tuple("shift %d: %.3f" % (shift, own.shares[shift]) for shift in SHIFTS)
        peak = 1 + offsets.pop() if len(offsets) == 1 else None
        if peak is None and own is not None and own.best >= _LOW:
            rest = max(share for shift, share in own.shares.items() if shift != own.peak)
            peak = own.peak if own.best > rest + _CLEAR / 2 else None
        if peak is None:
            self._say(5, "unknown", "No shift stands out", evidence=told)
            return
        self._say(
            5, "ok" if peak == 1 else "fail",
            "Each state says what the next token is" if peak == 1
            else "The states are shifted: those of token t say what token t%+d is" % peak,
            value=peak, unit="tokens", threshold=1, threshold_source="the final state of token t predicts token t + 1", evidence=told,
            action=None if peak == 1 else "store the states of each token beside that token; the trainer makes the shift itself",
        )  # fmt: skip

    def _tokens(self) -> None:
        evidence = self._evidence
        wrong = [problem for sample in evidence.samples for problem in sample.problems]
        named = ["%s: %s" % (sample.path, "; ".join(sample.problems)) for sample in evidence.samples if sample.problems]
        if wrong or evidence.damaged:
            self._say(
                6, "fail", "Some samples contradict themselves", value=len(named) + len(evidence.damaged), unit="samples", threshold=0,
                evidence=tuple((evidence.damaged + named)[:6]), action="delete and make them anew: trainers skip or replace them silently",
            )  # fmt: skip
        elif evidence.differing:
            self._say(
                6, "fail", "The samples' tokens are not those of the dataset", value=len(evidence.differing), unit="samples", threshold=0,
                evidence=tuple(evidence.differing[:6]),
                action="template, tokenizer or truncation changed between the two: make the samples anew from this dataset",
            )  # fmt: skip
        elif evidence.compared:
            self._say(6, "ok", "The samples' tokens are those of the dataset", value=evidence.compared, unit="samples")
        elif evidence.has_dataset:
            self._say(6, "unknown", "No sample could be found in the dataset", action="file names must end in the number of the line, from 0")
        else:
            self._say(6, "skipped", "The samples' tokens were not held against a dataset", action="give --dataset")

    def _mask(self) -> None:
        evidence = self._evidence
        known = [sample for sample in evidence.samples if sample.mask_share is not None]
        shares = [sample.mask_share or 0.0 for sample in known]
        empty = [sample.path for sample in known if sample.mask_share == 0]
        if not known:
            self._say(7, "skipped", "The samples hold no mask", action="it is in the dataset: give --dataset")
            return
        first = sorted({sample.first_counted for sample in known if sample.first_counted is not None})
        told = ("first tokens that count, as ids: %s" % ", ".join(map(str, first[:8])),) if first else ()
        numbers = {"value": round(sum(shares) / len(shares), 4), "evidence": (*told, *("empty: %s" % path for path in empty[:4]))}
        if len(empty) * 2 > len(known):
            self._say(7, "fail", "In %d of %d samples no token counts in the loss" % (len(empty), len(known)),
                      action="the chat template did not find the assistant's turns", **numbers)  # fmt: skip
        elif empty:
            self._say(7, "degraded", "In %d of %d samples no token counts in the loss" % (len(empty), len(known)), **numbers)
        elif min(shares) == 1.0:
            self._say(7, "degraded", "Every token counts in the loss, prompts included",
                      action="check that prompts are masked on purpose or by the trainer", **numbers)  # fmt: skip
        else:
            self._say(7, "ok", "On average %.0f %% of the tokens count in the loss" % (100 * sum(shares) / len(shares)), **numbers)

    def _overflow(self) -> None:
        parts = [(sample, part) for sample in self._evidence.samples for part in sample.parts]
        broken = [(sample, part) for sample, part in parts if part.broken]
        largest = max(part.largest for _, part in parts)
        half = any(part.dtype == "float16" for _, part in parts)
        if broken:
            self._say(
                8, "fail", "Some states are NaN or infinite", value=sum(part.broken for _, part in broken), unit="numbers", threshold=0,
                evidence=tuple("%s: %s, %d numbers of %s" % (s.path, part.name, part.broken, part.dtype) for s, part in broken[:6]),
                action="make the samples anew in bfloat16: float16 ends at 65504",
            )  # fmt: skip
        elif half and largest > 0.5 * _HALF_MAX:
            self._say(8, "degraded", "Some states nearly overflow float16", value=largest, threshold=_HALF_MAX,
                      threshold_source="the largest float16", action="make the samples anew in bfloat16")  # fmt: skip
        else:
            self._say(8, "ok", "All states are finite", value=round(largest, 4), threshold_source="largest magnitude")

    def _width(self) -> None:
        evidence = self._evidence
        widths = sorted({part.width for sample in evidence.samples for part in sample.parts})
        counts = sorted({sum(part.name != "final" for part in sample.parts) for sample in evidence.samples})
        told = ["%s aux layers of %s numbers" % (" and ".join(map(str, counts)), " and ".join(map(str, widths)))]
        wrong = len(widths) > 1 or len(counts) > 1 or (evidence.hidden is not None and widths != [evidence.hidden])
        if evidence.fc_inputs is not None:
            told.append("fc of the drafter takes %d numbers" % evidence.fc_inputs)
            wrong = wrong or [count * width for count in counts for width in widths] != [evidence.fc_inputs]
        if wrong:
            self._say(9, "fail", "The samples do not fit the models", value=", ".join(map(str, widths)), threshold=evidence.hidden,
                      threshold_source="width of the target", evidence=tuple(told),
                      action="they are of another target, or of other layers than the drafter takes")  # fmt: skip
        elif not self._no_target(9, "Whether the widths are right"):
            self._say(9, "ok", "The widths fit", value=widths[0], threshold=evidence.hidden, evidence=tuple(told))

    def _serving(self) -> None:
        serving = self._evidence.serving
        if serving is None:
            problem = self._evidence.serving_problem
            self._say(10, "unknown" if problem else "skipped", problem or "The samples were not held against a serving dump",
                      action=None if problem else "give --serving")  # fmt: skip
            return
        told: list[str] = []
        misplaced = False
        lowest = 1.0
        for part, others in serving.cosines.items():
            best = max(others, key=lambda name: others[name])
            own = others.get(part, others[best])
            misplaced = misplaced or others[best] > own + 0.005
            lowest = min(lowest, own)
            told.append("%s: cosine %.4f with itself, best %.4f with %s" % (part, own, others[best], best))
        numbers = {"value": round(lowest, 4), "threshold": _RIGHT_COSINE, "evidence": tuple(told),
                   "threshold_source": "mean cosine over the same tokens; a quantised target stays above 0.97"}  # fmt: skip
        if misplaced:
            self._say(10, "fail", "Training and serving take their states from other layers, or in another order",
                      action="compare the layer ids on both sides: output or input of a layer", **numbers)  # fmt: skip
        elif lowest < _BAD_COSINE:
            self._say(10, "fail", "Training and serving have different states for the same tokens",
                      action="the same target, in the same precision, must make both", **numbers)  # fmt: skip
        elif lowest < _RIGHT_COSINE:
            self._say(10, "degraded", "Training and serving have somewhat different states for the same tokens", **numbers)
        else:
            self._say(10, "ok", "Training and serving have the same states for the same tokens", **numbers)

    def _residual(self) -> None:
        evidence = self._evidence
        if evidence.residual is None:
            told = evidence.residual_problem
            self._say(11, "unknown" if told else "skipped", told or "The flags of a drafter were not tried",
                      action=None if told else "give --drafter")  # fmt: skip
            return
        declared, own, other = evidence.residual
        numbers = {"value": round(own - other, 4), "unit": "nats", "threshold": _CLEAR,
                   "threshold_source": "what a wrong flag costs",
                   "evidence": ("divergence %.3f as declared, %.3f the other way" % (own, other),)}  # fmt: skip
        if own - other > _CLEAR:
            self._say(11, "fail", "The drafter was trained with norm_before_residual %s" % (not declared),
                      action="set norm_before_residual in its config.json", **numbers)  # fmt: skip
        elif other - own > _CLEAR:
            self._say(11, "ok", "norm_before_residual is as the drafter was trained", **numbers)
        else:
            self._say(11, "unknown", "The drafter does as well with either norm_before_residual", **numbers)

    def _duplicates(self) -> None:
        seen: dict[str, list[str]] = {}
        for sample in self._evidence.samples:
            if sample.first_tokens is not None:
                seen.setdefault(sample.first_tokens, []).append(sample.path)
        repeated = [paths for paths in seen.values() if len(paths) > 1]
        count = sum(len(paths) - 1 for paths in repeated)
        if not seen:
            self._say(12, "unknown", "Without tokens samples cannot be told apart")
            return
        level = "ok" if not count else "fail" if count * 4 >= len(self._evidence.samples) else "degraded"
        self._say(
            12, level, "All samples begin differently" if not count else "Several samples begin with the same 64 tokens",
            value=count, unit="samples", threshold=0, evidence=tuple(", ".join(paths[:4]) for paths in repeated[:4]),
            action=None if not count else "look for files of earlier runs in the folder",
        )  # fmt: skip

    def _sharded(self) -> None:
        evidence = self._evidence
        zero = [(sample, part) for sample in evidence.samples for part in sample.parts if part.zero_columns]
        width = evidence.samples[0].parts[-1].width
        if evidence.hidden is not None and width < evidence.hidden and evidence.hidden % width == 0:
            self._say(13, "fail", "The states are one part in %d of the target's width" % (evidence.hidden // width), value=width,
                      threshold=evidence.hidden, threshold_source="width of the target",
                      action="they were taken from one rank of several: gather before saving")  # fmt: skip
        elif zero:
            self._say(13, "fail", "Some columns are zero for every token", value=max(p.zero_columns for _, p in zero), unit="columns",
                      threshold=0, evidence=tuple("%s: %s" % (s.path, p.name) for s, p in zero[:6]),
                      action="the state was taken before it was gathered, or from a buffer that was padded")  # fmt: skip
        else:
            self._say(13, "ok", "No column is empty", value=0, unit="columns", threshold=0)


def _median(sizes: Any) -> float:
    import numpy as np

    finite = sizes[np.isfinite(sizes)]
    return float(np.median(finite)) if len(finite) else 0.0
