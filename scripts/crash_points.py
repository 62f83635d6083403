"""Launches jobs over connections that are cut after every byte, in both directions, over a real sshd on loopback.

After each cut there must be one job or none, the host must say which, and asking again with the same launch id must
give exactly one. The test-suite takes a few of these points; this takes all of them, a few of them a second.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from remote_diag.host import Environment  # noqa: E402
from tests.support.crash_points import CrashPoints, Direction  # noqa: E402
from tests.support.sshd import Missing, TestSshd  # noqa: E402


def main() -> int:
    """Cut, and report; 0 when every point was as it must be."""
    parser = argparse.ArgumentParser(prog="scripts/crash_points", description=__doc__)
    parser.add_argument("--stride", type=int, default=1, metavar="N", help="every Nth byte only [1]")
    parser.add_argument("--login", action="store_true", help="the bytes of the login too, before anything is asked")
    parser.add_argument("--how", choices=("rst", "fin"), default="rst", help="reset, or orderly end [rst]")
    chosen = parser.parse_args()
    directions: tuple[Direction, ...] = ("server", "client")
    try:
        with TestSshd(shell="zsh") as server:  # noqa: S604 - a login shell, not subprocess's option
            crash = CrashPoints(server, server.host(environment=Environment("python", sys.executable)))
            exchange = crash.measure()
            for direction in directions:
                first = 1 if chosen.login else exchange.login[direction]
                points = range(first, exchange.total[direction] + 1, max(1, chosen.stride))
                print(f"cutting what the {direction} sends after {len(points)} different bytes", flush=True)
                seen: Counter[int] = Counter()
                for number, after in enumerate(points):
                    seen[crash.cut(direction, after, f"{direction}-{after}", chosen.how)] += 1
                    crash.end()
                    if number % 100 == 99:
                        print(f"  {number + 1}: no job {seen[0]} times, one job {seen[1]} times", flush=True)
                print(f"  {len(points)}: no job {seen[0]} times, one job {seen[1]} times, never anything else", flush=True)
    except Missing as error:
        print(f"crash_points: {error}", file=sys.stderr)
        return 7
    return 0


if __name__ == "__main__":
    sys.exit(main())
