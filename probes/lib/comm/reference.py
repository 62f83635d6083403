"""Published bus bandwidths of collectives, each with its conditions and its source.

The table stands beside this file. `kind` says what a figure is worth:

* measured: one size of a published run of a box that was in order;
* mean, peak: the same for a run of which only the mean over sizes, or the best size, was published;
* untuned: a published run of a box with a known fault or unsuitable settings;
* floor: what an operator takes for the least that a good box does.

Figures that contradict a published run of the same machine (thresholds that no box reaches) were left out.
"""

from __future__ import annotations

import csv
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from . import bandwidth

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterable

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "reference_busbw.csv")
COLUMNS = (
    "gpu", "gpus", "nodes", "link", "layout", "settings", "collective", "algorithm", "size_bytes", "busbw_gbs", "time_us",
    "nccl", "program", "kind", "source",
)  # fmt: skip
KINDS = ("measured", "peak", "mean", "floor", "untuned")
LINKS = ("nvlink", "nvlink-bridge", "pcie")
ALGORITHMS = ("ring", "nvls", "")
MAX_ROWS = 2000
YOURS = "yours"
"""Stands before the source of rows that a user gave."""


@dataclass(frozen=True)
class Reference:
    """One figure."""

    gpu: str
    """Family, as `family` names it."""
    gpus: int
    nodes: int
    link: str
    """Between GPUs of one node: nvlink (with switches), nvlink-bridge (pairs) or pcie."""
    layout: str
    settings: str
    collective: str
    algorithm: str
    """ring, nvls (the switch reduces, and busbw may exceed what the wire carries) or empty where not told."""
    size_bytes: int | None
    busbw_gbs: float
    time_us: float | None
    nccl: str
    program: str
    kind: str
    source: str
    own: bool = False
    """Whether a user gave it."""

    @property
    def conditions(self) -> str:
        """What it holds for, in words."""
        nodes = "" if self.nodes == 1 else f" over {self.nodes} nodes"
        algorithm = {"ring": "ring", "nvls": "NVLS: effective, more than the wire carries", "": ""}[self.algorithm]
        size = "" if self.size_bytes is None else f"{self.size_bytes} bytes"
        said = (f"{self.gpus} x {self.gpu}{nodes}", self.layout, algorithm, size, self.settings, self.program)
        return ", ".join(part for part in said if part)


@lru_cache(maxsize=1)
def shipped() -> tuple[Reference, ...]:
    """Return the table beside this file."""
    with open(PATH, encoding="utf-8", newline="") as stream:
        return tuple(parse(stream))


def parse(lines: Iterable[str], *, own: bool = False) -> list[Reference]:
    """Read a table with these columns; those from `time_us` on may be missing.

    Args:
        lines: Lines of a CSV, the first of them the names of the columns.
        own: Whether a user gave it.

    Raises:
        ValueError: A column or value is not as it should be; names the line.
    """
    reader = csv.DictReader(lines, strict=True)
    missing = [name for name in COLUMNS[:10] if name not in (reader.fieldnames or ())]
    if missing:
        raise ValueError("it has no column %s; there must be %s" % (missing[0], ", ".join(COLUMNS[:10])))
    found: list[Reference] = []
    try:
        for row in islice(reader, MAX_ROWS + 1):
            found.append(_row(row, own=own))
    except (ValueError, csv.Error) as error:
        raise ValueError("line %d: %s" % (reader.line_num, error)) from None
    if len(found) > MAX_ROWS:
        raise ValueError("it has more than %d rows" % MAX_ROWS)
    return found


def _row(row: dict[str, str | None], *, own: bool) -> Reference:
    cells = {name: (row.get(name) or "").strip() for name in COLUMNS}
    collective = bandwidth.canonical(cells["collective"])
    if collective is None:
        raise ValueError("%r is no collective" % cells["collective"])
    kind = cells["kind"] or "measured"
    for name, value, allowed in (("kind", kind, KINDS), ("link", cells["link"], LINKS), ("algorithm", cells["algorithm"], ALGORITHMS)):
        if value not in allowed:
            raise ValueError("%s must be one of %s, not %r" % (name, ", ".join(allowed), value))
    gpus, nodes = _whole("gpus", cells["gpus"]), _whole("nodes", cells["nodes"] or "1")
    size = _whole("size_bytes", cells["size_bytes"]) if cells["size_bytes"] else None
    busbw = _positive("busbw_gbs", cells["busbw_gbs"])
    source = cells["source"] or ("a file without a source" if own else "")
    if not source:
        raise ValueError("source is empty")
    return Reference(
        family(cells["gpu"]) or cells["gpu"], gpus, nodes, cells["link"], cells["layout"], cells["settings"], collective,
        cells["algorithm"], size, busbw, _positive("time_us", cells["time_us"]) if cells["time_us"] else None,
        cells["nccl"], cells["program"], kind, f"{YOURS}: {source}" if own else source, own,
    )  # fmt: skip


def _whole(name: str, text: str) -> int:
    if re.fullmatch(r"[1-9]\d{0,15}", text, re.ASCII) is None:
        raise ValueError("%s must be a whole number above 0, not %r" % (name, text))
    return int(text)


def _positive(name: str, text: str) -> float:
    if re.fullmatch(r"\d{1,12}(\.\d{0,12})?", text, re.ASCII) is None or not float(text):
        raise ValueError("%s must be a number above 0, not %r" % (name, text))
    return float(text)


# Which GPU -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """GPUs that communicate alike."""

    name: str
    pattern: str
    """Regular expression that a name as the driver tells it must hold, without regard to case."""
    link: str
    """How GPUs of one box are joined."""
    link_gbs: float | None
    """What the link carries in one direction, GB/s; None where it depends on the slot."""
    pcie_gen: int | None = None
    """Generation of its PCIe link, which is what joins it where link is pcie."""


FAMILIES = (
    Family("GB200", r"\bGB200\b", "nvlink", 900),
    Family("B200-SXM", r"\bB200\b", "nvlink", 900),
    Family("H200-NVL", r"\bH200 NVL\b", "nvlink-bridge", None, 5),
    Family("H200-SXM", r"\bH200(?:[- ]SXM)?\b", "nvlink", 450),
    Family("H100-NVL", r"\bH100[- ]NVL\b", "nvlink-bridge", None, 5),
    Family("H100-PCIe", r"\bH100 PCIe\b", "pcie", None, 5),
    Family("H100-SXM", r"\bH100(?:[- ]SXM|[ -]80GB HBM3)", "nvlink", 450),
    Family("H800-SXM", r"\bH800\b", "nvlink", 200),
    Family("H20-SXM", r"\bH20\b", "nvlink", 450),
    Family("A100-PCIe", r"\bA100(?:-PCIE|.* PCIe)", "pcie", None, 4),
    Family("A100-SXM", r"\bA100-SXM", "nvlink", 300),
    Family("A800-SXM", r"\bA800-SXM", "nvlink", 200),
    Family("RTX PRO 6000 Blackwell", r"\bRTX PRO 6000\b", "pcie", None, 5),
    Family("RTX 5090", r"\bRTX 5090\b", "pcie", None, 5),
    Family("RTX 4090", r"\bRTX 4090\b", "pcie", None, 4),
    Family("RTX 3090", r"\bRTX 3090\b", "pcie", None, 4),
    Family("L40S", r"\bL40S\b", "pcie", None, 4),
    Family("A40", r"\bA40\b", "pcie", None, 4),
)
PCIE_LANE_GBS = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""What a lane carries in one direction, GB/s, after its encoding."""


@lru_cache(maxsize=256)
def family_of(name: str) -> Family | None:
    """Return the family of a GPU, by its name as the driver tells it or as the table does."""
    for each in FAMILIES:
        if name.strip().lower() == each.name.lower() or re.search(each.pattern, name, re.IGNORECASE):
            return each
    return None


def family(name: str) -> str | None:
    """Return the name of its family."""
    found = family_of(name)
    return None if found is None else found.name
