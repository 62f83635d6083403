"""Command line of the benchmark."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "scripts"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from benchlib import aims, checkpoint, contenders, report, rig, startup, workload  # noqa: E402
from tests.support.sshd import Missing  # noqa: E402

PARTS = ("race", "startup", "checkpoint")


def tell(text: str) -> None:
    """Say how far it is."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="interleaved rounds [10]")
    parser.add_argument(
        "--rtt", type=float, nargs="*", default=[0.0, 50.0], metavar="MS", help="round trips to measure at [0 50]"
    )
    parser.add_argument("--only", choices=PARTS, action="append", help="one part; may be repeated [all]")
    parser.add_argument(
        "--heads", action="store_true", help="vocab-remap and verifier-head at full size, and nothing else; 7 GB of files"
    )
    parser.add_argument("--dir", type=Path, metavar="DIR", help="with --heads: where to put the files for a while [.bench]")
    parser.add_argument("--with-peers", action="store_true", help="install ansible-core and pyinfra below .bench first")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--profile", action="store_true", help="print where rdiag's start-up time goes, and nothing else")
    parser.add_argument("--top", type=int, default=25, metavar="N", help="with --profile: how many modules [25]")
    chosen = parser.parse_args()
    if chosen.rounds < 1:
        parser.error("--rounds must be at least 1")
    if any(not 0 <= rtt <= 2000 for rtt in chosen.rtt):
        parser.error("--rtt is in milliseconds, 0 to 2000")
    return chosen


def main() -> int:
    """Measure and print; 0 when every aim is met, 1 when one is missed."""
    chosen = _arguments()
    directory = ROOT / ".bench"
    work = workload.write(directory / "work")
    parts = () if chosen.heads else chosen.only or PARTS
    tables: list[Any] = []
    found: list[aims.Aim] = []
    answer: dict[str, Any] = {
        "schema_version": 1,
        "machine": {"python": platform.python_version(), "system": platform.platform()},
        "rounds": chosen.rounds,
    }
    if chosen.with_peers:
        contenders.install_peers(directory, tell)
    if chosen.profile or "race" in parts:
        with rig.server() as sshd:
            if chosen.profile:
                with rig.place(sshd, directory / "rtt-0", 0.0) as here:
                    print(startup.profile(here, work, directory, chosen.top))
                return 0
            answer["races"] = []
            for rtt in chosen.rtt:
                tell(f"one probe on one host, {rtt:g} ms away")
                with rig.place(sshd, directory / f"rtt-{rtt:g}", rtt) as here:
                    times = clock_race(here, work, directory, chosen.rounds)
                tables.append(report.race_table(f"one probe, cold, round trip {rtt:g} ms", times))
                found += aims.of_race(rtt, times)
                answer["races"].append(
                    {"rtt_ms": rtt, "contenders": {name: one.as_dict() for name, one in times.items()}}
                )
    if "startup" in parts:
        tell("start-up")
        times = startup.measure(max(chosen.rounds, 10), directory, tell)
        tables.append(report.race_table("start-up", times, startup.HELP))
        found += startup.aims(times)
        answer["startup"] = {name: one.as_dict() for name, one in times.items()}
    if "checkpoint" in parts:
        tell("vocab-compare on checkpoints of 2 GB")
        measured = checkpoint.measure(ROOT / "examples" / "mappings", directory, max(chosen.rounds, 5), tell)
        tables.append(report.checkpoint_table(measured))
        found += checkpoint.aims(measured)
        answer["checkpoint"] = measured.as_dict()
    if chosen.heads:
        from benchlib import heads

        big = heads.measure(chosen.dir or directory, chosen.rounds, tell)
        tables.append(report.race_table("heads of 32,000 and 163,840 rows", big.times, ours=""))
        found += heads.aims(big)
        answer["heads"] = big.as_dict()
    answer["aims"] = [aim.as_dict() for aim in found]
    if chosen.json:
        print(json.dumps(answer, indent=2))
    else:
        report.show(*tables, report.aims_table(found))
    return 0 if all(aim.met for aim in found) else 1


def clock_race(here: rig.Place, work: workload.Workload, directory: Path, rounds: int) -> Any:
    """Return the times of every contender at one place."""
    from benchlib.clock import race

    return race(contenders.everyone(here, work, directory, tell), rounds, tell=tell)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Missing as error:
        sys.exit(f"bench: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
