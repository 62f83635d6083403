"""What an Xid means: the driver's error numbers as data (``xid_table.json``), each with its class and first action.

The level of a code is what it says about the card: ``ok`` for a program's own fault, ``degraded``, ``fail``, and
``unknown`` for a number that the table does not have. Peers disagree about 63, 92, 94 and 109, so every set can be
overridden (:class:`Policy`).
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from functools import lru_cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Literal, Mapping

    Level = Literal["ok", "degraded", "fail", "unknown"]

TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "xid_table.json")
LEVELS = ("ok", "degraded", "fail", "unknown")
RECOVERY_ACTIONS = {
    "none": ("ok", "nothing"),
    "gpu reset": ("fail", "drain the GPU and reset it: nvidia-smi -r -i BUS_ID"),
    "gpu reset required": ("fail", "drain the GPU and reset it: nvidia-smi -r -i BUS_ID"),
    "reset": ("fail", "drain the GPU and reset it: nvidia-smi -r -i BUS_ID"),
    "node reboot": ("fail", "reboot the host"),
    "node reboot required": ("fail", "reboot the host"),
    "reboot": ("fail", "reboot the host"),
    "drain p2p": ("fail", "end the work that reaches this GPU through its peers, then look again"),
    "drain and reset": ("fail", "end all work on this GPU and its peers, then reset it: nvidia-smi -r -i BUS_ID"),
}  # fmt: skip
"""Level and action of what Xid 154 (and ``gpu_recovery_action``) asks for, by its words in lower case."""

_SEVERITY = re.compile(r"(?<![A-Za-z-])(non-?fatal|fatal)(?![A-Za-z])", re.IGNORECASE)
_RECOVERY = re.compile(r"recovery action changed from \S+ \([^)]*\) to \S+ \(([^)]*)\)", re.IGNORECASE)


@dataclass(frozen=True)
class Meaning:
    """What is known about one code."""

    code: int
    kind: str
    """Whose fault it is first: app, hw, sw, info, several with a slash; ``varies``; ``unknown`` if not in the table."""
    level: str
    """ok, degraded, fail, unknown; ``by-severity`` and ``by-recovery-action`` are settled by the line."""
    meaning: str
    action: str


@dataclass(frozen=True)
class Policy:
    """Codes that a user judges differently, by code: ok, degraded, fail or unknown."""

    levels: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the levels."""
        for code, level in self.levels.items():
            if level not in LEVELS:
                raise ValueError("Xid %d: %r is not one of %s" % (code, level, ", ".join(LEVELS)))


def policy(sets: Mapping[str, Any]) -> Policy:
    """Return the policy of ``{"fail": [63, 92], "ok": [109]}``; a code in two sets is a ValueError."""
    levels: dict[int, str] = {}
    for level, codes in sets.items():
        for code in codes:
            if type(code) is not int or code < 0:
                raise ValueError("Xid %r in the set %r is no code" % (code, level))
            if code in levels:
                raise ValueError("Xid %d is in two sets: %s and %s" % (code, levels[code], level))
            levels[code] = level
    return Policy(levels)


@lru_cache(maxsize=1)
def table() -> dict[int, Meaning]:
    """Return every code that is known."""
    with open(TABLE, encoding="utf-8") as file:
        content = json.load(file)
    return {
        int(code): Meaning(int(code), entry["class"], entry["level"], entry["meaning"], entry["action"])
        for code, entry in content["codes"].items()
    }


def meaning(code: int) -> Meaning:
    """Return what ``code`` means; one that is not in the table is ``unknown``, never harmless."""
    known = table().get(code)
    if known is not None:
        return known
    return Meaning(
        code, "unknown", "unknown", "an Xid that the table does not have", "look it up in NVIDIA's Xid catalogue for this driver"
    )


def severity(text: str) -> str | None:
    """Return ``fatal`` or ``nonfatal`` as the line of an NVLink or NVSwitch error says; None where it does not."""
    found = _SEVERITY.search(text)
    return None if found is None else found.group(1).lower().replace("-", "")


def recovery_action(text: str) -> str | None:
    """Return what an Xid 154 asks for now, in lower case: ``none``, ``gpu reset required``, ..."""
    found = _RECOVERY.search(text)
    return None if found is None else found.group(1).strip().lower()


def judge(code: int, text: str, overrides: Policy | None = None) -> tuple[str, str, str]:
    """Return (level, meaning, action) of one Xid line.

    Args:
        code: the number.
        text: what follows it.
        overrides: levels that replace the table's.
    """
    known = meaning(code)
    level, words, action = known.level, known.meaning, known.action
    if level == "by-severity":
        said = severity(text)
        level = {"fatal": "fail", "nonfatal": "degraded"}.get(said or "", "unknown")
        words = "%s, %s" % (words, said or "its severity is not in the line")
    elif level == "by-recovery-action":
        said = recovery_action(text)
        level, action = RECOVERY_ACTIONS.get(said or "", ("unknown", "read the line, and nvidia-smi --query-gpu=gpu_recovery_action"))
        words = "%s: %s" % (words, said or "to something that could not be read")
    if "fallen off the bus" in text and code != 79:
        lost = meaning(79)
        level, words, action = lost.level, "%s (in the text of Xid %d)" % (lost.meaning, code), lost.action
    if overrides is not None and overrides.levels.get(code, level) != level:
        level, words = overrides.levels[code], "%s; %s by the user's setting, %s by the table" % (words, overrides.levels[code], level)
    return level, words, action
