"""What NCCL will make of a topology: for each pair of GPUs the way that data takes, and why.

The rules are those of NCCL's ``ncclTopoCheckP2p`` (2.30): peers talk directly when they are no farther apart than
``NCCL_P2P_LEVEL`` (PXB unless set; SYS with at most two GPUs below AMD CPUs) and the driver allows reads and writes;
everything else goes through shared memory of the host. What the driver allows is no proof that bytes arrive: that is
measured, not predicted.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from probes.lib.gpu import procfs
from probes.lib.gpu.topology import Link, Matrix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, Mapping

    Transport = Literal["nvlink", "p2p", "shm", "net", "refused", "unknown"]

ORDER = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
"""NCCL's distances, near to far."""
KIND = {"NV": "NVL", "PIX": "PIX", "PXB": "PXB", "PHB": "PHB", "NODE": "PHB", "SYS": "SYS"}
"""nvidia-smi's words in NCCL's: NCCL knows no difference between host bridges of one NUMA node."""
OLD_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS", "SYS")
"""What the integers meant before the names came; there is none for NVL."""
SETTINGS = ("NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IGNORE_DISABLED_P2P", "NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS")
DEFAULT_SOURCE = "NCCL's default"

_LINE = re.compile(r"\s*([A-Z][A-Z0-9_]*)\s*=\s*(.*?)\s*\Z")


@dataclass(frozen=True)
class Setting:
    """A variable of NCCL, and who sets it."""

    name: str
    value: str
    source: str


@dataclass(frozen=True)
class Level:
    """How far apart peers may be to talk directly."""

    name: str
    """One of :data:`ORDER`."""
    source: str
    """What sets it."""
    default: bool


@dataclass(frozen=True)
class Way:
    """How data gets from one GPU to another."""

    transport: Transport
    """``nvlink``; ``p2p`` over PCIe; ``shm`` through the host's memory; ``net`` through the network stack; ``refused``:
    NCCL does not start; ``unknown``."""
    reason: str
    certain: bool
    """False where the answer of the driver (``topo -p2p``) is not known and is taken for yes."""
    allowed: bool | None
    """Whether the driver allows reads and writes between the two; None where that is not known."""


def settings(environ: Mapping[str, str], root: str = "/") -> dict[str, Setting]:
    """Return NCCL's variables that decide about paths, with who sets them.

    The environment wins over ``NCCL_CONF_FILE`` (or ``~/.nccl.conf``), which wins over ``/etc/nccl.conf``.
    """
    found: dict[str, Setting] = {}
    home = environ.get("NCCL_CONF_FILE") or os.path.join(environ.get("HOME", ""), ".nccl.conf")
    for path in (os.path.join(root, "etc/nccl.conf"), home):
        for line in (procfs.read_text(path) or "").splitlines():
            match = _LINE.match(line)
            if match and match.group(1) in SETTINGS:
                found[match.group(1)] = Setting(match.group(1), match.group(2)[:100], path)
    for name in SETTINGS:
        if environ.get(name):
            found[name] = Setting(name, environ[name][:100], "the environment")
    return found


def level(found: Mapping[str, Setting], *, gpus: int, cpu_vendor: str | None) -> Level:
    """Return the distance up to which NCCL uses P2P.

    Args:
        found: from :func:`settings`.
        gpus: how many GPUs take part.
        cpu_vendor: ``amd``, ``intel``, ...
    """
    disable = found.get("NCCL_P2P_DISABLE")
    if disable is not None and _integer(disable.value) == 1:
        return Level("LOC", "NCCL_P2P_DISABLE=1 from %s" % disable.source, default=False)
    wanted = found.get("NCCL_P2P_LEVEL")
    if wanted is not None:
        source = "NCCL_P2P_LEVEL=%s from %s" % (wanted.value, wanted.source)
        if wanted.value in ORDER:
            return Level(wanted.value, source, default=False)
        if wanted.value[:1].isdigit():
            number = _integer(wanted.value) or 0
            name = OLD_LEVELS[min(number, len(OLD_LEVELS) - 1)]
            return Level(name, "%s, an old number that means %s" % (source, name), default=False)
    if cpu_vendor == "amd" and gpus <= 2:
        return Level("SYS", "%s with at most two GPUs below AMD CPUs" % DEFAULT_SOURCE, default=True)
    ignored = "" if wanted is None else "; NCCL_P2P_LEVEL=%s from %s is no level and is ignored" % (wanted.value, wanted.source)
    return Level("PXB", DEFAULT_SOURCE + ignored, default=True)


def _integer(text: str) -> int | None:
    found = re.match(r"\s*(\d{1,9})", text)
    return None if found is None else int(found.group(1))


def through(matrix: Matrix, first: str, second: str) -> str | None:
    """Return a GPU that has NVLinks to both of two that have none to each other."""
    for other in matrix.gpus:
        if other in {first, second}:
            continue
        links = (matrix.links.get((first, other)), matrix.links.get((other, second)))
        if all(link is not None and link.kind == "NV" for link in links):
            return other
    return None


def way(
    link: Link | None,
    limit: Level,
    read: str | None,
    write: str | None,
    found: Mapping[str, Setting],
    *,
    between: str | None = None,
) -> Way:
    """Return how NCCL moves data between two GPUs of one host.

    Args:
        link: how they are joined; None where that is not known.
        limit: from :func:`level`.
        read: word of ``topo -p2p r``, the worse of both directions; None where it was not asked.
        write: the same of ``topo -p2p w``.
        found: from :func:`settings`.
        between: GPU with NVLinks to both, where they have none to each other.
    """
    allowed = _allowed(read, write)
    if link is None:
        return Way("unknown", "how they are joined is not known", certain=False, allowed=allowed)
    distance = "NVB" if between is not None and link.kind != "NV" else KIND[link.kind]
    if ORDER.index(distance) > ORDER.index(limit.name):
        reason = "%s is farther than %s (%s)" % (link.word, limit.name, limit.source)
        return _shared(reason, found, allowed)
    if allowed is False:
        words = "the driver allows no P2P (read %s, write %s)" % (read or "?", write or "?")
        ignored = found.get("NCCL_IGNORE_DISABLED_P2P")
        if distance in {"NVL", "NVB"} and not (ignored is not None and _integer(ignored.value)):
            return Way("refused", "%s between GPUs that NVLinks join: NCCL ends with an error" % words, certain=True, allowed=False)
        return _shared(words, found, allowed=False)
    via = "" if between is None or link.kind == "NV" else " through %s" % between
    reason = "%s%s is within %s (%s)" % (link.word, via, limit.name, limit.source)
    if allowed is None:
        reason += "; whether the driver allows it is not known"
    return Way("nvlink" if distance in {"NVL", "NVB"} else "p2p", reason, certain=allowed is True, allowed=allowed)


def _allowed(read: str | None, write: str | None) -> bool | None:
    if any(word not in {None, "OK", "U"} for word in (read, write)):
        return False
    return True if read == write == "OK" else None


def _shared(reason: str, found: Mapping[str, Setting], allowed: bool | None) -> Way:
    disable = found.get("NCCL_SHM_DISABLE")
    if disable is not None and _integer(disable.value) == 1:
        return Way("net", "%s, and NCCL_SHM_DISABLE=1 from %s" % (reason, disable.source), certain=True, allowed=allowed)
    return Way("shm", reason, certain=True, allowed=allowed)
