"""Count and explain the skipped tests of a pytest report; a skip that nobody allowed fails in CI.

Usage: skips.py REPORT.xml ALLOWED.txt

ALLOWED.txt has one line a reason: a regular expression that matches the whole reason, `` # ``, and why it is all right.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree


@dataclass(frozen=True)
class Allowed:
    """One reason for which a test may be skipped."""

    pattern: re.Pattern[str]
    why: str


def read_allowed(path: Path) -> list[Allowed]:
    """Return what ``path`` allows; raises ValueError for a line without an explanation."""
    allowed = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        pattern, mark, why = line.partition(" # ")
        if not mark or not why.strip():
            raise ValueError(f"{path}:{number}: write REGULAR-EXPRESSION # why it is all right")
        allowed.append(Allowed(re.compile(pattern.strip(), re.DOTALL), why.strip()))
    return allowed


def read_skips(report: Path) -> Counter[str]:
    """Return how many tests were skipped for each reason."""
    # The report was written by pytest a moment ago.
    tree = ElementTree.parse(report)  # noqa: S314
    return Counter(skipped.get("message") or "no reason given" for skipped in tree.iter("skipped"))


def _shortened(reason: str) -> str:
    """Return the first line up to its first path, which differs from test to test."""
    first = reason.partition("\n")[0]
    return first if len(first) <= 100 else re.sub(r"[:,]? ?\S*/.*", " ...", first)


def main(report: Path, allowed_file: Path) -> int:
    """Print the skips and return the exit status."""
    if not report.exists():
        print("pytest wrote no report")
        return 1
    allowed = read_allowed(allowed_file)
    skips = read_skips(report)
    print(f"{sum(skips.values())} skipped")
    by_rule: dict[Allowed | None, Counter[str]] = {}
    for reason, count in skips.items():
        rule = next((one for one in allowed if one.pattern.fullmatch(reason)), None)
        by_rule.setdefault(rule, Counter())[_shortened(reason)] += count
    for rule, reasons in by_rule.items():
        print(f"  {'NOT ALLOWED by tests/skips.txt' if rule is None else f'allowed: {rule.why}'}")
        for reason, count in reasons.most_common():
            print(f"{count:6}  {reason}")
    refused = sum(by_rule.get(None, Counter()).values())
    if refused and os.environ.get("CI", "").lower() in {"1", "true", "yes"}:
        print(f"{refused} of them for reasons that are not allowed")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
