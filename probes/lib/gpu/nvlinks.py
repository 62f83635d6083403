"""Judges the NVLinks of each GPU as ``nvidia-smi nvlink -s`` tells them: which do not work, and who has fewer than its siblings.

Counts are compared, not speeds: what is printed is the rate of signalling, above what a data sheet names. A card whose
links are all inactive is no fault by itself: so is one that nobody put a bridge on. Several on an SXM board are one.
"""

from __future__ import annotations

from .judgement import Judgement
from .missing import known

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Sequence

    from .collect import Seen
    from .smi_lists import NvLinks
    from .smi_reading import GpuReading

SIBLINGS = "the other cards of this model in this host"
_ACTION = (
    "nvidia-smi nvlink -s -i %s and nvlink -e -i %s; look for Xid 74, 144-150 and SXid in dmesg, at the fabric manager, at the bridge; "
    "reset the card when it is idle"
)


def judge(seen: Seen) -> list[Judgement]:
    """Return what there is to tell; nothing of cards that have no NVLink."""
    listed = {known(links.uuid): links for links in (seen.nvlinks.gpus if seen.nvlinks is not None else ())}
    found = [(reading, listed.get(known(reading.uuid))) for reading in seen.readings if known(reading.uuid) is not None]
    told: list[Judgement] = []
    good = 0
    for reading, links in found:
        most = _most(reading, found)
        judgement = _of(reading, links, most, seen)
        if judgement is not None:
            told.append(judgement)
        elif links is not None and links.active:
            good += 1
    if good and not told:
        counts = sorted({links.active for _, links in found if links is not None and links.active})
        message = "%d GPUs have all their NVLinks (%s)" % (good, ", ".join(map(str, counts)))
        told.append(Judgement("ok", "nvlink", message, None, good, "GPUs", evidence=("nvidia-smi nvlink -s",)))
    return told


def _most(reading: GpuReading, found: Sequence[tuple[GpuReading, NvLinks | None]]) -> int:
    """Return the most active links that a card of this model has."""
    return max((links.active or 0 for other, links in found if links is not None and known(other.name) == known(reading.name)), default=0)


def _on_a_board(reading: GpuReading, seen: Seen) -> bool:
    """Whether several cards of this model sit on a board that links them. One alone may be a guest's, whose links are off."""
    name = known(reading.name)
    return name is not None and "SXM" in name and sum(known(other.name) == name for other in seen.readings) > 1


def _of(reading: GpuReading, links: NvLinks | None, most: int, seen: Seen) -> Judgement | None:
    bus = known(reading.bus_id) or "BUS_ID"
    action = _ACTION % (bus, bus)
    # The driver tells the state of a fabric only of cards that sit on NVSwitches.
    expected = most > 0 or known(reading.fabric_state) is not None or _on_a_board(reading, seen)
    if links is None or (links.active is None and links.why is None):
        if not expected or (links is None and reading.mig_enabled is True):
            return None
        message = "which of its NVLinks work cannot be told"
        if seen.nvlinks is None:
            why, action = seen.nvlinks_why or "nvidia-smi nvlink -s: not asked, because nvidia-smi hung before", "see to the driver first, then run it again"
        else:
            why = seen.nvlinks_why or ("its lines cannot be read" if links is not None else "it is not listed")
            action = "nvidia-smi nvlink -s -i %s" % bus
        return Judgement("unknown", "nvlink-unknown", message, reading.describe(), evidence=(why[:300],), action=action)
    if links.active is None or not expected:
        return None
    if links.inactive or links.all_inactive:
        message = "none of its NVLinks works" if not links.active else "%d of its %d NVLinks do not work" % (
            len(links.inactive), len(links.inactive) + links.active,
        )  # fmt: skip
        shown = ("inactive: %s" % ", ".join(map(str, links.inactive)),) if links.inactive else ("all links are inactive",)
        level = "degraded" if links.active else "fail"
        return Judgement(
            level, "nvlink-inactive", message, reading.describe(), links.active, "NVLinks", len(links.inactive) + links.active or most or None,
            "the links that it has" if links.inactive else SIBLINGS, shown, action,
        )  # fmt: skip
    if links.active < most:
        return Judgement(
            "degraded", "nvlink-fewer", "it has fewer NVLinks than its siblings", reading.describe(), links.active, "NVLinks", most, SIBLINGS,
            action=action,
        )  # fmt: skip
    return None
