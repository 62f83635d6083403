"""A small but true EAGLE-3 stack on the CPU, from a trained drafter to the repaired checkpoint.

A tiny target learns a text; a drafter learns, with mapping A, to draft for it, until it is clearly above chance. The same
drafter is fine-tuned under mapping B: its loss starts above ln D and its accuracy near the predicted ceiling. ``rdiag
triage`` must name the mapping and nothing else; after ``rdiag vocab-remap`` the training must start where the original
was. Then every other cause is planted alone: triage must name that one, and acquit all others.

Exit status 0 when all of that holds, 1 otherwise.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import remote_diag  # noqa: E402
from remote_diag import triage  # noqa: E402
from remote_diag.session import Session  # noqa: E402
from remote_diag.triage_ranking import VERDICTS  # noqa: E402
from tests.support.planted import PLANTS, Planted, Planter, read_head  # noqa: E402
from tests.support.tiny_stack import D, Stack, copy_drafter, evaluate, load_or_build  # noqa: E402

OTHERS = [cause for cause in PLANTS if cause != "mapping-replaced"]
CHANCE = 1 / D
UNIFORM = math.log(D)
NEAR_CEILING = (0.5, 1.2)
"""Observed accuracy over the ceiling: the range in which a mapping alone explains it, as loss-check has it."""
NEAR_ORIGINAL = 0.15
"""By how much, as a share, the repaired drafter may be worse: rows that were made anew know nothing yet."""


@dataclass
class Report:
    """What was checked, printed as it comes."""

    failed: list[str] = field(default_factory=list)

    def check(self, good: bool, text: str) -> None:
        """Print one result."""
        print(f"  {'ok  ' if good else 'FAIL'}  {text}", flush=True)
        if not good:
            self.failed.append(text)


def diagnose(session: Session, planted: Planted) -> Any:
    """Return what triage makes of a case, over the agent."""
    return triage.run(session, triage.load_case(planted.case)).result


def diagnose_alone(planted: Planted) -> Any:
    """Return the same over a connection of its own."""
    with remote_diag.connect("local") as session:
        return diagnose(session, planted)


def check_verdicts(report: Report, planted: Planted, result: Any) -> None:
    """Check that triage names the planted cause, and that every other hypothesis is refuted."""
    by_verdict = {name: [one.id for one in result.hypotheses if one.verdict == name] for name in VERDICTS}
    named = result.cause or "nothing"
    loss, accuracy = planted.curve.loss[0], planted.curve.accuracy[0]
    rest = f"{len(by_verdict['refuted'])} of {len(result.hypotheses)} acquitted"
    others = [name for name in (*by_verdict["supported"], *by_verdict["undecided"]) if name != planted.cause]
    report.check(
        result.cause == planted.cause and not others,
        f"{planted.folder.name}: loss {loss:.2f}, accuracy {accuracy:.3f}: triage names {named}, {rest}"
        + (f"; not {', '.join(others)}" if others else ""),
    )


def check_stack(report: Report, stack: Stack) -> None:
    """Check that the drafter is clearly above chance on text that it never saw."""
    fresh = evaluate(stack.drafter, stack.target, stack.samples(64))
    report.check(
        fresh.accuracy[0] > 20 * CHANCE and fresh.loss[0] < 0.6 * UNIFORM,
        f"under mapping A: loss {fresh.loss[0]:.2f} (ln D = {UNIFORM:.2f}), accuracy {fresh.accuracy[0]:.3f} (chance {CHANCE})",
    )


def check_mapping(report: Report, session: Session, planter: Planter) -> None:
    """Check the main case: fine-tuned under mapping B, diagnosed, repaired, relaunched."""
    planted = planter.plant("mapping-replaced")
    result = diagnose(session, planted)
    loss, accuracy = planted.curve.loss[0], planted.curve.accuracy[0]
    report.check(loss > UNIFORM, f"fine-tuned under mapping B: the loss starts at {loss:.2f}, above ln D = {UNIFORM:.2f}")
    ceiling = result.accuracy_ceiling or 0.0
    low, high = NEAR_CEILING
    report.check(
        low * ceiling <= accuracy <= high * ceiling,
        f"its accuracy starts at {accuracy:.3f}, near the predicted ceiling of {ceiling:.3f}",
    )
    check_verdicts(report, planted, result)
    out = planted.folder / "remapped"
    remap = {
        "source": planted.values["drafter_before"], "mapping": planted.values["drafter_after"], "out": str(out),
        "verifier": planted.values["target"], "counts": planted.values["counts"],
    }  # fmt: skip
    moved = session.run("vocab-remap", remap).result
    again = relaunch(planter, out)
    original = evaluate(planter.stack.drafter, planter.stack.target, planter.sound)
    report.check(
        again.accuracy[0] >= (1 - NEAR_ORIGINAL) * original.accuracy[0]
        and again.loss[0] <= (1 + NEAR_ORIGINAL) * original.loss[0],
        f"{moved.rows_moved} rows moved, {moved.rows_initialised} made anew: the relaunched training starts at loss "
        f"{again.loss[0]:.2f}, accuracy {again.accuracy[0]:.3f}; the original was at {original.loss[0]:.2f}, "
        f"{original.accuracy[0]:.3f}",
    )


def relaunch(planter: Planter, folder: Path) -> Any:
    """Return what training under mapping B prints first when it starts from the drafter in ``folder``."""
    import torch

    drafter = copy_drafter(planter.stack)
    with torch.no_grad():
        drafter.lm_head.weight.copy_(torch.from_numpy(read_head(folder)))
    return planter.train(drafter, ids=planter.other)


def main(argv: list[str] | None = None) -> int:
    """Run all of it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep checkpoints, samples and cases there")
    parser.add_argument("--seed", type=int, default=0, help="of text, weights and mappings")
    given = parser.parse_args(argv)
    begun = time.monotonic()
    report = Report()
    with ExitStack() as stack:
        folder = given.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rdiag-stack-")))
        print("training a target and a drafter", flush=True)
        trained = load_or_build(folder, given.seed)
        check_stack(report, trained)
        planter = Planter(trained, folder.resolve())
        print("the mapping is replaced", flush=True)
        with remote_diag.connect("local") as session:
            check_mapping(report, session, planter)
        print("every other cause, planted alone; and none", flush=True)
        # One case is diagnosed while the next one is planted.
        pool = stack.enter_context(ThreadPoolExecutor(max_workers=1))
        cases = [(planted, pool.submit(diagnose_alone, planted)) for planted in map(planter.plant, OTHERS)]
        for planted, answer in cases:
            check_verdicts(report, planted, answer.result())
    told = f"{len(report.failed)} checks failed" if report.failed else "all of it holds"
    print(f"{told}; {time.monotonic() - begun:.0f} s")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
