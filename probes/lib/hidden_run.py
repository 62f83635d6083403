"""Gathers everything that the checks of hidden states need, in one walk over the samples."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from .drafter import open_drafter
from .files import Damaged, Meter, Unreadable, shown
from .hidden_checks import Agreement, Checker, Evidence, Serving
from .hidden_layers import match_layers
from .hidden_scan import SHIFTS, Picked, best_tokens, cosines, fingerprint, normed, pick, scan
from .sample_files import Dataset, find_samples, number_of, opened_sample
from .target import open_target

TYPE_CHECKING = False
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from remote_diag.probe import Context

    from .hidden_checks import Check
    from .samples import Sample
    from .target import Target

_UNIT = 0.05
"""How far from 1 the size of a normed state may be."""
_DUMPS = 512
"""Files of a serving dump that are looked at."""
_COMPARED = 64


@dataclass(frozen=True)
class Request:
    """What the probe is asked for; see its parameters."""

    samples: tuple[str, ...]
    target: str | None
    serving: str | None
    dataset: str | None
    drafter: str | None
    layers: tuple[int, ...]
    trainer_norm: bool | None
    limit: int
    positions: int
    seed: int


@dataclass
class Outcome:
    """What came of it."""

    evidence: Evidence
    checks: list[Check]
    normed: bool | None
    """Whether the final states are normed."""
    bytes_read: int


class Gatherer:
    """Walks over the samples once.

    Args:
        context: for progress, and a folder for unpacked files.
        request: what was asked for.
    """

    def __init__(self, context: Context, request: Request) -> None:
        self._context, self._request = context, request
        self.meter = Meter()
        self._picked = Picked()
        self._cosines: dict[str, dict[str, list[float]]] = {}
        self._held = 0

    def gather(self) -> Outcome:
        """Return everything, with all findings reported.

        Raises:
            Damaged, Unreadable: no sample, or no target, can be used.
        """
        request = self._request
        files, total = find_samples(request.samples, request.limit)
        with ExitStack() as stack:
            target = None if request.target is None else stack.enter_context(open_target(request.target, self.meter))
            evidence = Evidence([], total, [], trainer_norm=request.trainer_norm, has_dataset=request.dataset is not None)
            if target is not None:
                evidence.hidden, evidence.layers = target.head().columns, target.layers
                evidence.has_norm = target.norm_name is not None
            self._walk(files, evidence, target)
            if target is not None:
                self._agree(evidence, target)
        self._expect(evidence)
        if request.drafter is not None:
            self._residual(evidence)
        if self._cosines:
            means = {part: {name: sum(v) / len(v) for name, v in others.items()} for part, others in self._cosines.items()}
            evidence.serving = Serving(means, self._held)
        elif request.serving is not None:
            evidence.serving_problem = "No sample has the tokens of one in the serving dump"
        checker = Checker(self._context, evidence, shown(request.samples[0]))
        return Outcome(evidence, checker.run(), checker.state(), self.meter.bytes)

    def _walk(self, files: list[str], evidence: Evidence, target: Target | None) -> None:
        import numpy as np

        request, random = self._request, np.random.default_rng(self._request.seed)
        numbers = {number for number in map(number_of, files) if number is not None}
        dataset = None if request.dataset is None else Dataset(request.dataset, numbers, self.meter)
        dumps = {} if request.serving is None else self._dumps(request.serving, evidence.hidden)
        each = max(1, request.positions // len(files))
        unused: Unreadable | Damaged | None = None
        for index, path in enumerate(files):
            self._context.progress(index, len(files), unit="samples", label="reading")
            try:
                with opened_sample(path, self.meter, self._context.run_dir, evidence.hidden) as sample:
                    mask = self._hold(sample, dataset, evidence)
                    strange = _strange_tokens(sample, target)
                    if strange is not None:
                        sample.problems.append(strange)
                    evidence.samples.append(scan(sample, mask))
                    self._hold_against_dump(sample, dumps, evidence.hidden)
                    if strange is not None:
                        # What such tokens predict says nothing of the states.
                        continue
                    pick(sample, mask, each, random, self._picked)
                    if target is not None and not evidence.matches and evidence.match_problem is None:
                        self._match(sample, target, evidence)
            except (Unreadable, Damaged) as error:
                unused = error
                evidence.damaged.append(str(error))
        if not evidence.samples and unused is not None:
            raise unused

    def _match(self, sample: Sample, target: Target, evidence: Evidence) -> None:
        try:
            evidence.matches = match_layers(
                target, sample, lambda done, total: self._context.progress(done, total, unit="layers", label="running the target")
            )
            evidence.layers = evidence.layers or max((m.layer or 0 for m in evidence.matches.values()), default=None)
        except (Unreadable, Damaged) as error:
            evidence.match_problem = error.reason

    def _hold(self, sample: Sample, dataset: Dataset | None, evidence: Evidence) -> NDArray[np.bool_] | None:
        """Hold a sample against its line of the dataset; return the mask to go by."""
        number = number_of(sample.path)
        line = None if dataset is None or number is None else dataset.get(number)
        if line is None:
            return sample.mask
        ids, mask = line
        if sample.ids is not None:
            evidence.compared += 1
            same = min(len(ids), len(sample.ids))
            differ = (ids[:same] != sample.ids[:same]).nonzero()[0]
            if len(differ):
                evidence.differing.append("%s: the first of %d different tokens is number %d" % (shown(sample.path), len(differ), differ[0]))
            elif len(ids) != len(sample.ids):
                evidence.differing.append("%s: %d tokens, %d in the dataset" % (shown(sample.path), len(sample.ids), len(ids)))
        return sample.mask if sample.mask is not None or mask is None else mask

    def _dumps(self, path: str, hidden: int | None) -> dict[str, str]:
        """Return the files of a serving dump by the hash of their first tokens."""
        found: dict[str, str] = {}
        for file in find_samples((path,), _DUMPS)[0]:
            with opened_sample(file, self.meter, self._context.run_dir, hidden) as sample:
                if sample.ids is not None:
                    found.setdefault(fingerprint(sample.ids), file)
        return found

    def _hold_against_dump(self, sample: Sample, dumps: dict[str, str], hidden: int | None) -> None:
        import numpy as np

        path = None if sample.ids is None else dumps.get(fingerprint(sample.ids))
        if path is None:
            return
        length_of_ours = sample.tokens
        with opened_sample(path, self.meter, self._context.run_dir, hidden) as dump:
            length = min(length_of_ours, dump.tokens)
            at = np.unique(np.linspace(min(1, length - 1), length - 1, _COMPARED).astype(np.int64))
            theirs = {part.name: part.take(at) for part in dump.parts if part.width == sample.width}
            for part in sample.parts:
                ours = part.take(at)
                for name, states in theirs.items():
                    mean = float(cosines(ours, states).mean())
                    self._cosines.setdefault(part.name, {}).setdefault(name, []).append(mean)
        self._held += 1

    def _agree(self, evidence: Evidence, target: Target) -> None:
        """Hold the picked states against the target's head: whose choice is the next token?"""
        import numpy as np

        head = target.head()
        states = {name: np.concatenate(parts) for name, parts in self._picked.states.items()}
        states = {name: part for name, part in states.items() if part.shape[1] == head.columns}
        if not states:
            return
        weight = target.norm_weight()
        variants: list[tuple[str, bool, NDArray[np.float32]]] = []
        if "final" in states:
            variants.append(("final", False, states["final"]))
        if weight is not None and len(weight) == head.columns:
            variants += [(name, True, normed(part, weight, target.norm_eps)) for name, part in states.items()]
            if "final" in states:
                safe = np.where(weight == 0, 1, weight)
                sizes = np.sqrt(np.mean(np.square(states["final"] / safe, dtype=np.float64), axis=1))
                # States that are zero say nothing.
                if (sizes > 0).mean() > 0.5:
                    evidence.unit_share = float(np.mean(np.abs(sizes[sizes > 0] - 1) < _UNIT))
        self._context.progress(0, None, unit="rows", label="asking the target's head")
        around = np.concatenate(self._picked.around)
        evidence.picked = len(around)
        chosen = best_tokens(head, np.concatenate([part for _, _, part in variants]))
        for (name, is_normed, _), choice in zip(variants, np.split(chosen, len(variants))):
            shares = {shift: float((choice == around[:, place]).mean()) for place, shift in enumerate(SHIFTS)}
            evidence.agreements.append(Agreement(name, is_normed, shares))

    def _expect(self, evidence: Evidence) -> None:
        """Find out which layers' inputs the aux parts should be."""
        request = self._request
        if request.drafter is not None:
            with open_drafter(request.drafter, self.meter) as drafter:
                fc, config = drafter.entry("fc"), drafter.config
                evidence.fc_inputs = fc.shape[1] if fc is not None and len(fc.shape) == 2 else None
                ids = None if config is None else config.aux_ids[0]
                if config is not None and ids is not None and not request.layers:
                    inputs = config.dialect == "speculators"
                    evidence.expected = tuple(layer if inputs else layer + 1 for layer in ids)
                    evidence.expected_source = "config.json of the drafter: %s of the layers %s" % (
                        "inputs" if inputs else "outputs", ", ".join(map(str, ids)),
                    )  # fmt: skip
        aux = sum(part.name != "final" for part in evidence.samples[0].parts)
        if request.layers:
            evidence.expected, evidence.expected_source = request.layers, "as asked for"
        elif evidence.expected is None and evidence.layers and aux == 3 and evidence.layers > 5:
            layers = evidence.layers
            evidence.expected = (2, layers // 2, layers - 3)
            evidence.expected_source = "what trainers take of %d layers by default" % layers

    def _residual(self, evidence: Evidence) -> None:
        """Try both settings of the drafter's flag."""
        from . import replay_run

        request = self._request
        try:
            flags = replay_run.both_residuals(self._context, str(request.drafter), request.samples, request.target, self.meter)
        except (Unreadable, Damaged) as error:
            evidence.residual_problem = "The flags of the drafter cannot be tried: %s" % error.reason
        except ImportError:
            evidence.residual_problem = "The flags of the drafter cannot be tried: there is no torch on this host"
        else:
            evidence.residual = flags


def _strange_tokens(sample: Sample, target: Target | None) -> str | None:
    """Return what is wrong with tokens that the target does not have; None where there are none."""
    if sample.ids is None or target is None:
        return None
    rows = target.head().rows
    beyond = int(((sample.ids < 0) | (sample.ids >= rows)).sum())
    return "%d of its tokens are none of the target's %d" % (beyond, rows) if beyond else None
