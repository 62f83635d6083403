"""``nvidia-smi topo -m`` and ``topo -p2p``: raw with tabs and escape sequences, or pasted with blanks.

What is not understood stays out of the matrix and is named: a cell that is no known word, a row that is too short, a row
that is missing. A matrix has to be symmetric; where it is not, neither half is believed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterable, Sequence

CLOSENESS = ("X", "NV", "PIX", "PXB", "PHB", "NODE", "SYS")
"""From near to far; nvidia-smi's words, with all numbers of NVLinks as one."""
P2P_WORDS = {
    "OK": "possible",
    "CNS": "the chipset does not support it",
    "GNS": "the GPU does not support it",
    "TNS": "the topology does not support it",
    "NS": "not supported",
    "DR": "disabled by the driver's registry",
    "U": "unknown",
}
"""What ``topo -p2p`` answers, by its word."""
CAPABILITIES = {"r": "read", "w": "write", "n": "nvlink", "a": "atomics", "p": "pcie"}
"""What ``topo -p2p`` is asked, by its letter."""
ERRORS = (
    ("failed to run topology matrix", "nvidia-smi could not make the matrix; a software RDMA device does that"),
    ("failed to initialize nvml", "nvidia-smi cannot talk to the driver"),
    ("nvidia-smi has failed", "nvidia-smi cannot talk to the driver"),
    ("no devices were found", "the driver has no GPU"),
    ("unable to determine the device handle", "a GPU is lost"),
    ("gpu is lost", "a GPU is lost"),
    ("option \"-i\" is not recognized", "topo -m takes no -i"),
)  # fmt: skip
MAX_DEVICES = 256

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_GPU = re.compile(r"GPU\d{1,3}\Z")
_DEVICE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,40}\Z")
_LINK = re.compile(r"(X|SYS|NODE|PHB|PXB|PIX|SOC|NV([1-9]\d?))\Z")
_LEGEND = re.compile(r"\s*(NIC\d+): (\S+)\s*\Z")
_CPUS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*\Z")
_AFFINITY = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")


class NotATopology(ValueError):
    """The text holds no matrix; the message says what it holds instead."""

    hint = "save it on the host: nvidia-smi topo -m > FILE"


@dataclass(frozen=True)
class Link:
    """How two devices are joined."""

    kind: str
    """``NV``, ``PIX``, ``PXB``, ``PHB``, ``NODE``, ``SYS``."""
    nvlinks: int | None = None
    """How many NVLinks are bonded; None unless ``NV``."""

    @property
    def word(self) -> str:
        """As nvidia-smi prints it."""
        return self.kind if self.nvlinks is None else "NV%d" % self.nvlinks


@dataclass
class Matrix:
    """A link matrix."""

    devices: tuple[str, ...]
    """Columns in order: GPU0, ..., NIC0, ..."""
    links: dict[tuple[str, str], Link] = field(default_factory=dict)
    """Both directions of every pair that could be read and is symmetric."""
    rows: list[str] = field(default_factory=list)
    """Devices whose row was there."""
    cpu_affinity: dict[str, str] = field(default_factory=dict)
    """CPUs near each GPU, such as ``0-55,112-167``; without those that print N/A."""
    numa_node: dict[str, int] = field(default_factory=dict)
    nic_names: dict[str, str] = field(default_factory=dict)
    """``NIC0`` -> ``mlx5_0``; nvidia-smi leaves the last line out when it was cut."""
    damaged: list[str] = field(default_factory=list)
    """What could not be read, in words."""
    asymmetric: list[tuple[str, str, str, str]] = field(default_factory=list)
    """(device, device, word one way, word the other way)."""

    @property
    def gpus(self) -> tuple[str, ...]:
        """GPUs among the devices, in order."""
        return tuple(name for name in self.devices if _GPU.match(name))

    @property
    def nics(self) -> tuple[str, ...]:
        """The other devices."""
        return tuple(name for name in self.devices if not _GPU.match(name))

    @property
    def complete(self) -> bool:
        """Whether every device has its row, every cell was read, and both halves agree."""
        return not self.damaged and not self.asymmetric and set(self.rows) == set(self.devices)

    def missing_rows(self) -> tuple[str, ...]:
        """Return devices that have a column and no row."""
        return tuple(name for name in self.devices if name not in self.rows)


def parse_matrix(text: str) -> Matrix:
    """Read ``topo -m``.

    Raises:
        NotATopology: there is no header of a matrix, there are two matrices, or there is not one row.
    """
    lines = _lines(text)
    place, devices = _header(lines)
    matrix = Matrix(devices)
    cells: dict[tuple[str, str], str] = {}
    for line in lines[place + 1 :]:
        legend = _LEGEND.match(line)
        if legend and legend.group(1) in devices:
            matrix.nic_names[legend.group(1)] = legend.group(2)
            continue
        _row(line, matrix, cells)
    if not matrix.rows:
        raise NotATopology("the matrix has a header and no rows: it was cut")
    _settle(matrix, cells)
    for name in matrix.missing_rows():
        matrix.damaged.append("the row of %s is missing" % name)
    return matrix


def _lines(text: str) -> list[str]:
    return [_ESCAPE.sub("", line.rstrip("\r")).rstrip() for line in text.replace("\x1b(B", "").split("\n")]


def _header(lines: Sequence[str]) -> tuple[int, tuple[str, ...]]:
    found = [(place, devices) for place, line in enumerate(lines) for devices in (_columns(line),) if devices]
    if not found:
        low = "\n".join(lines).lower()
        for words, meaning in ERRORS:
            if words in low:
                raise NotATopology("no matrix: %s" % meaning)
        first = next((line.strip() for line in lines if line.strip()), "")
        raise NotATopology("no header with GPU0 in it; begins with %r" % first[:80] if first else "the text is empty")
    if len(found) > 1:
        raise NotATopology("there are %d matrices: keep one" % len(found))
    place, devices = found[0]
    if len(devices) != len(set(devices)):
        raise NotATopology("a device has two columns: %s" % ", ".join(sorted({name for name in devices if devices.count(name) > 1})))
    if len(devices) > MAX_DEVICES:
        raise NotATopology("%d devices are more than a host has" % len(devices))
    return place, devices


def _columns(line: str) -> tuple[str, ...]:
    """Return the devices that a header names; empty for any other line."""
    cut = re.split(r"\bCPU Affinity\b|\bNUMA Affinity\b|\bGPU NUMA ID\b", line, maxsplit=1)
    words = cut[0].split()
    if not words or not all(_DEVICE.match(word) for word in words) or not any(_GPU.match(word) for word in words):
        return ()
    if not _GPU.match(words[0]) and len(cut) == 1:
        return ()
    # A row begins with a device too, and goes on with links.
    if any(_LINK.match(word) or word in P2P_WORDS for word in words[1:]):
        return ()
    # "GPU0 topology" is no header; one column without affinity is, as a single GPU's.
    return tuple(words) if len(cut) > 1 or all(_is_device(word) for word in words) else ()


def _is_device(word: str) -> bool:
    return bool(_GPU.match(word) or re.match(r"(NIC\d+|mlx\d_.*|roce.*|rocep.*|ib.*|bnxt.*|efa.*|irdma.*|cxgb.*)\Z", word))


def _row(line: str, matrix: Matrix, cells: dict[tuple[str, str], str]) -> None:
    name, rest = _named(line)
    if name is None:
        return
    if name not in matrix.devices:
        if rest and _LINK.match(rest[0]):
            matrix.damaged.append("%s has a row and no column" % name)
        return
    if name in matrix.rows:
        matrix.damaged.append("%s has two rows" % name)
        return
    matrix.rows.append(name)
    count = len(matrix.devices)
    for other, word in zip(matrix.devices, rest[:count]):
        cells[name, other] = word
    for other in matrix.devices[len(rest) :]:
        cells[name, other] = ""
    if _GPU.match(name):
        _affinity(name, [word for word in rest[count:] if word], matrix)


def _named(line: str) -> tuple[str | None, list[str]]:
    """Return (device, cells) of a row: split at tabs where there are some, since cells may be empty."""
    parts = [part.strip() for part in line.split("\t")] if "\t" in line else line.split()
    if "\t" in line and not parts[0]:
        parts = parts[1:]
    if len(parts) < 2 or not _DEVICE.match(parts[0]):
        return None, []
    return parts[0], parts[1:]


def _affinity(name: str, words: list[str], matrix: Matrix) -> None:
    if words and words[0].upper() != "N/A":
        if _CPUS.match(words[0]):
            matrix.cpu_affinity[name] = words[0]
        else:
            matrix.damaged.append("the CPU affinity of %s reads %r" % (name, words[0][:40]))
    if len(words) > 1 and words[1].upper() != "N/A":
        if words[1].isdigit() and int(words[1]) < 1024:
            matrix.numa_node[name] = int(words[1])
        elif not _CPUS.match(words[1]):
            matrix.damaged.append("the NUMA affinity of %s reads %r" % (name, words[1][:40]))


def _settle(matrix: Matrix, cells: dict[tuple[str, str], str]) -> None:
    """Read every cell, and keep the pairs whose two cells agree."""
    read: dict[tuple[str, str], Link] = {}
    for (name, other), word in cells.items():
        found = _LINK.match(word)
        if found is None:
            matrix.damaged.append("the cell of %s and %s reads %r" % (name, other, word[:40]))
        elif (found.group(1) == "X") != (name == other):
            matrix.damaged.append("the cell of %s and %s reads %r, which is for a device and itself" % (name, other, word))
        elif name != other:
            kind = "SYS" if word == "SOC" else "NV" if found.group(2) else word
            read[name, other] = Link(kind, int(found.group(2)) if found.group(2) else None)
    for (name, other), link in read.items():
        back = read.get((other, name))
        if back == link:
            matrix.links[name, other] = link
        elif back is not None and matrix.devices.index(name) < matrix.devices.index(other):
            matrix.asymmetric.append((name, other, link.word, back.word))


@dataclass
class Peers:
    """One matrix of ``topo -p2p``."""

    devices: tuple[str, ...]
    states: dict[tuple[str, str], str] = field(default_factory=dict)
    """Word for each ordered pair: OK, CNS, GNS, TNS, NS, DR, U. The two directions may differ."""
    damaged: list[str] = field(default_factory=list)


def parse_p2p(text: str) -> Peers:
    """Read ``topo -p2p r`` and its sisters.

    Raises:
        NotATopology: there is no matrix.
    """
    lines = _lines(text)
    place, devices = _header(lines)
    peers = Peers(devices)
    rows = []
    for line in lines[place + 1 :]:
        name, rest = _named(line)
        if name is None or name not in devices or "=" in line:
            continue
        if name in rows:
            peers.damaged.append("%s has two rows" % name)
            continue
        rows.append(name)
        for number, other in enumerate(devices):
            word = rest[number].upper() if number < len(rest) else ""
            if (word == "X") != (name == other) or (name != other and word not in P2P_WORDS):
                peers.damaged.append("the cell of %s and %s reads %r" % (name, other, word[:40]))
            elif name != other:
                peers.states[name, other] = word
    if not rows:
        raise NotATopology("the matrix has a header and no rows: it was cut")
    peers.damaged.extend("the row of %s is missing" % name for name in devices if name not in rows)
    return peers


def groups(matrix: Matrix, names: Iterable[str], near: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the sets of devices that are joined, directly or through others, by links of the kinds ``near``."""
    left, found = list(names), []
    while left:
        group, queue = [left[0]], [left.pop(0)]
        while queue:
            here = queue.pop()
            for other in list(left):
                link = matrix.links.get((here, other))
                if link is not None and link.kind in near:
                    left.remove(other)
                    group.append(other)
                    queue.append(other)
        found.append(tuple(name for name in matrix.devices if name in group))
    return found
