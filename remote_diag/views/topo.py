"""A topology: the verdict, findings, a row for each GPU, the link matrix, and the tree of who is near whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..text import safe
from .outcome import STYLES, brief, findings, headline

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from ..outcome import Outcome

NEAR = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")
"""Kinds of links, near to far."""
WAYS = {
    "nvlink": "NVLink", "p2p": "PCIe P2P", "shm": "host memory", "net": "network", "refused": "refused", "unknown": "unknown",
}  # fmt: skip
"""What NCCL's ways are called here."""
_MATRIX = 20
"""Devices up to which the matrix fits a terminal."""
_NAME = 30
"""Columns for a GPU's model."""
_STYLE = {"NV": "green", "PIX": "green", "PXB": "cyan", "PHB": "yellow", "NODE": "yellow", "SYS": "red"}


@dataclass
class Node:
    """One thing in the tree, and what hangs below it."""

    label: str
    children: list[Node] = field(default_factory=list)


def render(outcome: Outcome[Any]) -> RenderableType:
    """Return a topology; 80 columns are enough for eight GPUs, 100 for eight NICs besides."""
    result = outcome.answer
    if result is None:
        return headline(outcome)
    parts: list[RenderableType] = [headline(outcome, sentence(result))]
    found = findings([item for item in outcome.findings if item.level != "ok" or item.action])
    if found is not None:
        parts.append(found)
    sound = sorted({item.code for item in outcome.findings if item.level == "ok" and not item.action})
    if sound:
        parts.append(Text(f"ok: {', '.join(sound)}", "dim"))
    if result.gpus:
        parts.append(_gpus(result))
    names = devices(result)
    if 1 < len(names) <= _MATRIX and result.links:
        parts.append(Matrix(result, names))
    elif len(names) > _MATRIX:
        parts.append(Text(f"the matrix of {len(names)} devices is in --json, and drawn by --plot", "dim"))
    parts += [Text(line) for root in tree(result) for line in drawn(root)]
    parts += [Text(line, "dim") for line in _conditions(result)]
    return Group(*parts)


def sentence(result: Any) -> str:
    """Return the whole in one sentence."""
    if not result.gpus:
        return "no GPU is seen"
    count = f"{len(result.gpus)} GPU{'s' * (len(result.gpus) != 1)}"
    if result.expected_gpus is not None and result.expected_gpus != len(result.gpus):
        count = f"{len(result.gpus)} of {result.expected_gpus} GPUs"
    if not result.pairs:
        return count
    ways = Counter(pair.transport for pair in result.pairs)
    words = ", ".join(f"{number} {WAYS.get(way, way)}" for way, number in ways.most_common())
    apart = "" if len(result.islands) < 2 else f"; {len(result.islands)} islands that only the host's memory joins"
    return f"{count}; pairs as NCCL will join them: {words}{apart}"


def devices(result: Any) -> list[str]:
    """Return the devices of the matrix: GPUs by number, then the others in their order."""
    names = {name: None for link in result.links for name in (link.a, link.b)}
    gpus = sorted((name for name in names if name.startswith("GPU")), key=lambda name: int(name[3:]) if name[3:].isdigit() else 0)
    return [*gpus, *(name for name in names if name not in gpus)]


def word(link: Any) -> str:
    """Return a link as nvidia-smi prints it."""
    return link.link if link.nvlinks is None else f"NV{link.nvlinks}"


def cells(result: Any) -> dict[tuple[str, str], Any]:
    """Return the links by both orders of their devices."""
    return {pair: link for link in result.links for pair in ((link.a, link.b), (link.b, link.a))}


def _gpus(result: Any) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in ("gpu", "status", "bus id", "pcie now", "at most", "NUMA", "near", "name"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=_NAME if name == "name" else None)
    for gpu in result.gpus:
        near = f"{', '.join(gpu.nearest_nics)} {gpu.nic_link}" if gpu.nearest_nics else "-"
        idle = " idle" if gpu.idle else ""
        table.add_row(
            "?" if gpu.index is None else str(gpu.index),
            Text(gpu.status, STYLES.get(gpu.status, "")),
            safe(gpu.bus_id or "-"),
            f"{lanes(gpu.pcie_gen, gpu.pcie_width)}{idle}",
            lanes(gpu.pcie_gen_max, gpu.pcie_width_max),
            "-" if gpu.numa_node is None else str(gpu.numa_node),
            safe(near, limit=24),
            safe((gpu.name or "-").removeprefix("NVIDIA ")),
        )
    return table


def lanes(generation: int | None, width: int | None) -> str:
    """Return ``gen5 x16``; a dash for what is not known."""
    if generation is None and width is None:
        return "-"
    return f"gen{'?' if generation is None else generation} x{'?' if width is None else width}"


class Matrix:
    """The links of all devices; where a line has no room for all columns, those of GPUs, so that each row keeps its name.

    Args:
        result: what the probe answered.
        names: the devices.
    """

    def __init__(self, result: Any, names: Sequence[str]) -> None:
        self._result, self._names = result, names

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, and what it leaves out."""
        names = self._names
        width = max(len(name) for name in names) + sum(1 + max(len(name), 4) for name in names)
        gpus = [name for name in names if name.startswith("GPU")]
        columns = names if width <= options.max_width or not gpus else gpus
        yield _matrix(self._result, names, columns)
        if len(columns) < len(names):
            yield Text("links between devices that are no GPUs are in --json, and drawn by --plot", "dim")


def _matrix(result: Any, names: Sequence[str], columns: Sequence[str]) -> Table:
    links = cells(result)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(safe(name), no_wrap=True)
    for name in names:
        row: list[RenderableType] = [Text(safe(name), "dim")]
        for other in columns:
            link = links.get((name, other))
            text = "X" if name == other else "?" if link is None else word(link)
            row.append(Text(text, "dim" if name == other else "magenta" if link is None else _STYLE.get(link.link, "")))
        table.add_row(*row)
    return table


# The tree ------------------------------------------------------------------------------------------------------------


def tree(result: Any) -> list[Node]:
    """Return who hangs below what: by NUMA node, then host bridge and bridges; by nearness where no bus is known."""
    placed = [gpu for gpu in result.gpus if gpu.path]
    return _bus_tree(result) if placed else _near_tree(result)


def _bus_tree(result: Any) -> list[Node]:
    bridges = {bridge.bus_id: bridge for bridge in result.bridges}
    roots: dict[str, Node] = {}
    known: dict[str, Node] = {}
    leaves = [(gpu, f"{_gpu_label(gpu)}  {lanes(gpu.pcie_gen, gpu.pcie_width)}") for gpu in result.gpus]
    leaves += [(nic, _nic_label(nic)) for nic in result.nics if nic.path]
    for leaf, label in leaves:
        node = "NUMA ?" if leaf.numa_node is None else f"NUMA {leaf.numa_node}"
        here = roots.setdefault(node, Node(node))
        for bus_id in leaf.path:
            bridge = bridges.get(bus_id)
            if bridge is not None and bridge.parent is None:
                here = _below(known, here, f"{node}/{bridge.root}", f"host bridge {bridge.root}")
            here = _below(known, here, bus_id, _bridge_label(bridge, bus_id))
        here.children.append(Node(safe(label)))
    return [roots[name] for name in sorted(roots)]


def _below(known: dict[str, Node], here: Node, key: str, label: str) -> Node:
    if key not in known:
        known[key] = Node(safe(label))
        here.children.append(known[key])
    return known[key]


def _gpu_label(gpu: Any) -> str:
    return f"GPU{'?' if gpu.index is None else gpu.index} {gpu.bus_id or ''}".rstrip()


def _nic_label(nic: Any) -> str:
    return f"{nic.label or 'NIC'} {', '.join(nic.names)} {nic.bus_id or ''}".strip()


def _bridge_label(bridge: Any, bus_id: str) -> str:
    if bridge is None:
        return bus_id
    acs = "  ACS redirects" if bridge.acs_redirect else ""
    speed = "" if bridge.width is None or bridge.speed_gts is None else f"  {bridge.speed_gts:g} GT/s x{bridge.width}"
    kind = "root port" if bridge.parent is None else "bridge"
    return f"{kind} {bus_id}{speed}{acs}"


def _near_tree(result: Any) -> list[Node]:
    """Return groups by nearness: devices that are joined by PIX, within PXB, within a NUMA node."""
    names = devices(result) or [f"GPU{gpu.index}" if gpu.index is not None else _gpu_label(gpu) for gpu in result.gpus]
    links = cells(result)
    kinds = {link.link for link in result.links}

    def split(group: Sequence[str], level: int) -> list[Node]:
        if level < 0 or len(group) == 1:
            return [Node(_named(result, name)) for name in group]
        parts = _joined(group, links, NEAR[1 : level + 1])
        if len(parts) == 1 or NEAR[level] not in kinds:
            # A level that does not divide is not drawn.
            return split(group, level - 1)
        made = []
        for part in parts:
            children = split(part, level - 1)
            made.append(children[0] if len(part) == 1 else Node(f"within {NEAR[level]}", children))
        return made

    by_node: dict[str, list[str]] = {}
    numa = {f"GPU{gpu.index}": gpu.numa_node for gpu in result.gpus}
    for part in _joined(names, links, NEAR[1:5]):
        nodes = sorted({str(numa[name]) for name in part if numa.get(name) is not None})
        by_node.setdefault(f"NUMA {', '.join(nodes)}" if nodes else "NUMA ?", []).extend(part)
    return [Node(safe(node), split(group, 3)) for node, group in by_node.items()]


def _joined(names: Sequence[str], links: dict[tuple[str, str], Any], kinds: Sequence[str]) -> list[list[str]]:
    left, found = list(names), []
    while left:
        group, queue = [left[0]], [left.pop(0)]
        while queue:
            here = queue.pop()
            for other in list(left):
                link = links.get((here, other))
                if link is not None and link.link in kinds:
                    left.remove(other)
                    group.append(other)
                    queue.append(other)
        found.append([name for name in names if name in group])
    return found


def _named(result: Any, name: str) -> str:
    for nic in result.nics:
        if nic.label == name and nic.names and nic.names[0] != name:
            return safe(f"{name} {nic.names[0]}")
    return safe(name)


def drawn(node: Node, indent: str = "", own: str = "") -> Iterator[str]:
    """Yield a tree as lines; chains without branches share one."""
    label, here = node.label, node
    while len(here.children) == 1 and here.children[0].children:
        here = here.children[0]
        label = f"{label} > {here.label}"
    yield f"{indent}{own}{label}"
    below = indent + ("   " if own in {"", "└─ "} else "│  ") if own else indent
    for place, child in enumerate(here.children):
        yield from drawn(child, below, "└─ " if place == len(here.children) - 1 else "├─ ")


def _conditions(result: Any) -> Iterator[str]:
    if result.pairs:
        yield f"NCCL joins directly up to {result.p2p_level}: {safe(result.p2p_level_source)}"
    facts = [
        None if result.driver_version is None else f"driver {result.driver_version}{' (open kernel module)' * bool(result.open_kernel_module)}",
        None if result.cpu_vendor is None else f"CPU {result.cpu_vendor}",
        None if result.iommu is None else f"IOMMU {result.iommu}",
        "virtual machine" if result.virtual_machine else None,
        None if result.uvm_hmm is None else f"HMM {'on' if result.uvm_hmm else 'off'}",
    ]
    known = [fact for fact in facts if fact is not None]
    if known:
        yield safe("; ".join(known))
    for name, value in result.nccl_settings.items():
        yield safe(f"{name}={value}")
    for line in result.unread:
        yield safe(f"not read: {brief(line)}", limit=200)
