"""Every two GPUs of a host: how they are joined, what the driver allows, and the way that NCCL will take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from probes.lib.gpu import nccl_paths
from probes.lib.gpu.topology import CLOSENESS, Link

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping, Sequence

    from probes.lib.gpu.nccl_paths import Level, Way
    from probes.lib.gpu.topo_reading import Facts, Gpu


@dataclass(frozen=True)
class Pair:
    """Two GPUs, and how NCCL moves data between them."""

    a: Gpu
    b: Gpu
    link: str | None
    """nvidia-smi's word; None where it is not known."""
    read: str | None
    """The worse of both directions, as ``topo -p2p r`` says; None where it does not."""
    write: str | None
    others: Mapping[str, str | None]
    """The same for nvlink, atomics and pcie, which NCCL does not ask for."""
    way: Way

    @property
    def name(self) -> str:
        """Such as ``GPU0-GPU4``."""
        return "%s-%s" % (self.a.label, self.b.label)


def pairs(facts: Facts, limit: Level) -> list[Pair]:
    """Return every pair of GPUs that has an index."""
    known = [gpu for gpu in facts.gpus if gpu.index is not None]
    found = []
    for place, a in enumerate(known):
        for b in known[place + 1 :]:
            link = _on_the_bus(facts, a, b) if facts.matrix is None else facts.matrix.links.get((a.label, b.label))
            read, write = (_worse(facts, capability, a.label, b.label) for capability in ("read", "write"))
            others = {capability: _worse(facts, capability, a.label, b.label) for capability in ("nvlink", "atomics", "pcie")}
            between = None if facts.matrix is None else nccl_paths.through(facts.matrix, a.label, b.label)
            way = nccl_paths.way(link, limit, read, write, facts.settings, between=between)
            if facts.matrix is None and link is not None:
                way = replace(way, certain=False, reason=way.reason + "; as the PCI bus says, NVLinks are not known")
            found.append(Pair(a, b, None if link is None else link.word, read, write, others, way))
    return found


def _on_the_bus(facts: Facts, a: Gpu, b: Gpu) -> Link | None:
    word = None if facts.tree is None else facts.tree.distance(a.bus_id, b.bus_id)
    return None if word is None else Link(word)


def _worse(facts: Facts, capability: str, a: str, b: str) -> str | None:
    """Return the word that decides: one direction that is not allowed is enough, one that is not known makes both so."""
    peers = facts.peers.get(capability)
    if peers is None:
        return None
    words = (peers.states.get((a, b)), peers.states.get((b, a)))
    refused = [word for word in words if word not in {None, "OK", "U"}]
    if refused:
        return refused[0]
    return "OK" if words == ("OK", "OK") else "U" if "U" in words else None


def names(found: Sequence[Pair]) -> str:
    """Return the first four by name, and how many more there are."""
    first = ", ".join(pair.name for pair in found[:4])
    return first if len(found) <= 4 else "%s and %d more" % (first, len(found) - 4)


def islands(facts: Facts, found: Sequence[Pair]) -> tuple[tuple[int, ...], ...]:
    """Return the sets of GPUs, by index, within which NCCL needs no memory of the host; none where a way is not known."""
    if any(pair.way.transport == "unknown" for pair in found):
        return ()
    left = sorted(gpu.index for gpu in facts.gpus if gpu.index is not None)
    near: dict[int, set[int]] = {index: set() for index in left}
    for pair in found:
        if pair.way.transport in {"nvlink", "p2p"} and pair.a.index is not None and pair.b.index is not None:
            near[pair.a.index].add(pair.b.index)
            near[pair.b.index].add(pair.a.index)
    groups = []
    while left:
        group, queue = set(), [left[0]]
        while queue:
            here = queue.pop()
            if here not in group:
                group.add(here)
                queue.extend(near[here] - group)
        left = [index for index in left if index not in group]
        groups.append(tuple(sorted(group)))
    return tuple(groups)


def nearest_nics(facts: Facts, label: str) -> tuple[tuple[str, ...], str | None]:
    """Return the NICs that are nearest to a device by the link matrix, and how they are joined to it."""
    if facts.matrix is None:
        return (), None
    found = {nic: facts.matrix.links[label, nic].kind for nic in facts.matrix.nics if (label, nic) in facts.matrix.links}
    if not found:
        return (), None
    best = min(found.values(), key=CLOSENESS.index)
    return tuple(nic for nic, kind in found.items() if kind == best), best
