"""Reads ``nvidia-smi -q``: its XML and its indented text, both as one tree.

The XML is not trusted: its DOCTYPE is cut off unread, entities are refused, and its size, depth and number of elements
are bounded. The version that the DOCTYPE names says nothing, three layouts carry the same number.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from .busid import normalise
from .missing import NOT_REPORTED, Missing, flag, garbage, integer, known, missing, number, word
from .smi_csv import reasons_of, refuse_impossible
from .smi_errors import recognise
from .smi_fields import METRICS, WITH_UNIT, Metric, uuid, version
from .smi_reading import REASON_BITS, Answer, GpuReading, MigDevice, SmiProcess

if TYPE_CHECKING:
    from typing import Iterator

    from .smi_fields import Path

MAX_BYTES = 16 << 20
"""Sixteen GPUs with all their clocks are 1 MiB."""
MAX_NODES = 400_000
MAX_DEPTH = 24
MAX_GPUS = 1024
_DOCTYPE = re.compile(r"<!DOCTYPE[^<>\[\]]*>", re.IGNORECASE)
_Q_GPU = re.compile(r"GPU (?P<bus>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])")
_FALLS_THROUGH = frozenset({"not-supported", "deprecated", "not-reported"})
_Q_REASONS = {
    "Idle": "gpu_idle", "Applications Clocks Setting": "applications_clocks_setting", "SW Power Cap": "sw_power_cap",
    "HW Slowdown": "hw_slowdown", "HW Thermal Slowdown": "hw_thermal_slowdown", "Sync Boost": "sync_boost",
    "HW Power Brake Slowdown": "hw_power_brake_slowdown", "SW Thermal Slowdown": "sw_thermal_slowdown",
    "Display Clock Setting": "display_clocks_setting",
}  # fmt: skip


class Refused(ValueError):
    """The text is not what it is taken for, or is not safe to read.

    Args:
        message: what it is.
        hint: what to do instead; None where that is plain.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class NotWellFormed(Refused):
    """It may be such XML that was cut or damaged."""


class Node:
    """A named text, or a named block of nodes."""

    __slots__ = ("children", "name", "text")

    def __init__(self, name: str, text: str = "") -> None:
        self.name = name
        self.text = text
        self.children: list[Node] = []

    def all(self, name: str) -> list[Node]:
        """Return the children of that name."""
        return [child for child in self.children if child.name == name]

    def walk(self) -> Iterator[Node]:
        """Yield everything below, depth first."""
        waiting = list(reversed(self.children))
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))

    def find(self, path: str) -> str | Missing | None:
        """Return the text at ``a/b/c``; None when there is none.

        A block that consists of one sentinel (``remapped_rows`` is ``N/A``) says that of everything in it. Two texts
        for one path are an error.
        """
        found: list[Node] = [self]
        deep = False
        for part in path.split("/"):
            if part == "**":
                deep = True
                continue
            below: list[Node] = []
            for node in found:
                if not node.children and node is not self:
                    reason = missing(node.text)
                    if reason is not None and reason.reason != "empty":
                        return reason
                below += [one for one in (node.walk() if deep else node.children) if one.name == part]
            found, deep = below, False
        texts = {node.text for node in found if not node.children}
        if len(texts) > 1:
            return garbage(" and ".join(sorted(texts)))
        return texts.pop() if texts else None


# XML


def xml_tree(text: str) -> Node:
    """Return the tree of ``-q -x``; raise :class:`Refused` for what is no such thing."""
    if len(text) > MAX_BYTES:
        raise Refused("%d characters of XML, more than %d" % (len(text), MAX_BYTES))
    stripped = _DOCTYPE.sub("", text, count=1)
    if stripped.count("<") > 2 * MAX_NODES + 2:
        raise Refused("more than %d elements" % MAX_NODES)
    if text.count("</nvidia_smi_log>") > 1:
        raise Refused("it holds %d answers, one after the other: keep one of them" % text.count("</nvidia_smi_log>"))
    if "<!DOCTYPE" in stripped.upper() or "<!ENTITY" in stripped.upper():
        raise Refused("its document type declares something: not read")
    try:
        top = ElementTree.fromstring(stripped[max(stripped.find("<"), 0) :].strip())  # noqa: S314 - see above
    except ElementTree.ParseError as error:
        raise NotWellFormed("not well-formed XML: %s" % error) from None
    root = Node("")
    waiting = [(top, root, 1)]
    count = 0
    while waiting:
        element, parent, depth = waiting.pop()
        count += 1
        if count > MAX_NODES or depth > MAX_DEPTH:
            raise Refused("more than %d elements, or deeper than %d" % (MAX_NODES, MAX_DEPTH))
        node = Node(str(element.tag), (element.text or "").strip())
        if "id" in element.attrib:
            node.children.append(Node("@id", element.attrib["id"]))
        parent.children.append(node)
        waiting += [(child, node, depth + 1) for child in reversed(element)]
    root = root.children[0]
    if root.name != "nvidia_smi_log":
        raise Refused("its root is %s, not nvidia_smi_log" % root.name[:100])
    return root


def parse_xml(text: str) -> Answer:
    """Return what ``nvidia-smi -q -x`` says.

    A text that was cut is read up to its last whole GPU; where a GPU is not whole it is damaged, and named if it got
    as far as its address.

    Raises:
        Refused: it is not such XML at all.
    """
    whole = True
    try:
        root = xml_tree(text)
    except NotWellFormed:
        mended = _mend(text)
        if mended is None:
            raise
        root, whole = xml_tree(mended), False
    answer = Answer("smi_xml", complete=whole)
    answer.driver_version = _top(root, "driver_version")
    answer.cuda_version = _top(root, "cuda_version")
    answer.attached_gpus = _attached(root, "attached_gpus")
    for node in root.all("gpu"):
        reading = _reading(node, "xml", node.find("@id"))
        reading.mig_devices = [_xml_mig(one) for block in node.all("mig_devices") for one in block.all("mig_device")]
        reading.processes = [_process(one, _XML_PROCESS, reading) for one in _below(node, "processes", "process_info")]
        _add(answer, reading)
    if not whole:
        answer.notes.append("not well-formed: it is cut or damaged, and was read as far as it is whole")
        _damaged_blocks(text, answer)
    _finish(answer)
    return answer


def _mend(text: str) -> str | None:
    """Return the whole ``<gpu>`` blocks of a damaged text, each well-formed by itself, as a document."""
    if "<nvidia_smi_log" not in text or "<gpu " not in text:
        return None
    head = text[: text.find("<gpu ")]
    kept = [
        "<%s>%s</%s>" % (name, value, name)
        for name, value in re.findall(r"<(driver_version|cuda_version|attached_gpus)>([^<>&]{0,100})</\1>", head)
    ]
    kept += [block for block in _blocks(text) if _well_formed(block)]
    return "<nvidia_smi_log>%s</nvidia_smi_log>" % "".join(kept)


def _blocks(text: str) -> list[str]:
    """Return the text of each GPU, up to its end or to the beginning of the next one."""
    blocks = []
    for piece in re.split(r"(?=<gpu\b)", text, maxsplit=MAX_GPUS)[1:]:
        end = piece.find("</gpu>")
        blocks.append(piece if end < 0 else piece[: end + len("</gpu>")])
    return blocks


def _well_formed(block: str) -> bool:
    try:
        ElementTree.fromstring(block)  # noqa: S314 - no DOCTYPE and no entity in it: _mend and xml_tree look
    except ElementTree.ParseError:
        return False
    return True


def _damaged_blocks(text: str, answer: Answer) -> None:
    for block in _blocks(text):
        if _well_formed(block):
            continue
        reading = _broken("its block is not well-formed", block)
        name = re.match(r'<gpu\s+id="([^"<>]{1,40})"', block)
        address = normalise(name.group(1)) if name else None
        if address is not None:
            reading.bus_id = address
        identity = re.search(r"<uuid>([^<>]{1,60})</uuid>", block)
        if identity:
            reading.uuid = uuid(identity.group(1))
        _add(answer, reading)


def _broken(why: str, text: str) -> GpuReading:
    reading = GpuReading(source="xml", damaged=why)
    for name, value in list(reading.metrics()):
        if isinstance(value, Missing):
            setattr(reading, name, garbage(text.strip()[:80]))
    return reading


# The text of -q


def q_tree(text: str) -> Node:
    """Return the tree of ``-q``: a line is as deep as it is indented. Raise :class:`Refused` for something else."""
    if len(text) > MAX_BYTES:
        raise Refused("%d characters, more than %d" % (len(text), MAX_BYTES))
    if "NVSMI LOG" not in text[:4096]:
        raise Refused("it does not begin as nvidia-smi -q does")
    root = Node("log")
    levels: list[tuple[int, Node]] = [(-1, root)]
    for count, line in enumerate(text.splitlines()):
        if count > MAX_NODES:
            raise Refused("more than %d lines" % MAX_NODES)
        if not line.strip() or line.startswith("="):
            continue
        indent = len(line) - len(line.lstrip(" "))
        gpu = _Q_GPU.fullmatch(line.strip()) if indent == 0 else None
        if gpu:
            node = Node("GPU")
            node.children.append(Node("@id", gpu.group("bus")))
        else:
            label, _, value = line.partition(":")
            node = Node(label.strip(), value.strip())
        while levels[-1][0] >= indent:
            levels.pop()
        if len(levels) > MAX_DEPTH:
            raise Refused("deeper than %d" % MAX_DEPTH)
        levels[-1][1].children.append(node)
        levels.append((indent, node))
    return root


def parse_q(text: str) -> Answer:
    """Return what the text of ``nvidia-smi -q`` says; raise :class:`Refused` when it is not such a text."""
    root = q_tree(text)
    answer = Answer("smi_q", complete=text.endswith("\n"))
    answer.driver_version = _top(root, "KMD Version")
    if isinstance(answer.driver_version, Missing):
        answer.driver_version = _top(root, "Driver Version")
    answer.cuda_version = _top(root, "CUDA UMD Version")
    if isinstance(answer.cuda_version, Missing):
        answer.cuda_version = _top(root, "CUDA Version")
    answer.attached_gpus = _attached(root, "Attached GPUs")
    if not answer.complete:
        _drop_last(root)
        answer.notes.append("the last line has no end: it may be cut")
    for node in root.all("GPU"):
        reading = _reading(node, "q", node.find("@id"))
        reading.mig_devices = [_q_mig(one) for one in node.all("MIG Device")]
        reading.processes = [_process(one, _Q_PROCESS, reading) for one in _q_processes(node)]
        _add(answer, reading)
    answer.troubles = [trouble for trouble in map(recognise, _outside(text)) if trouble is not None]
    _finish(answer)
    return answer


def _outside(text: str) -> Iterator[str]:
    """Yield the lines that belong to no GPU."""
    return (line for line in text.splitlines() if line[:1] not in {"", " "} and not _Q_GPU.fullmatch(line.strip()))


def _drop_last(root: Node) -> None:
    node = root
    while node.children:
        if not node.children[-1].children:
            node.children[-1].text = "ERR!"
            return
        node = node.children[-1]


# Both


def _top(root: Node, name: str) -> str | Missing:
    text = root.find(name)
    return NOT_REPORTED if text is None else text if isinstance(text, Missing) else version(text)


def _attached(root: Node, name: str) -> int | Missing:
    text = root.find(name)
    return NOT_REPORTED if text is None else text if isinstance(text, Missing) else integer(text)


def _reading(node: Node, source: str, address: str | Missing | None) -> GpuReading:
    reading = GpuReading(source=source)
    for metric in METRICS:
        if metric.tree:
            setattr(reading, metric.name, _value(node, metric))
    reading.clock_reasons = _reasons(node)
    named = normalise(address) if isinstance(address, str) else None
    inside = known(reading.bus_id)
    if inside is not None and named is not None and inside != named:
        reading.bus_id = garbage("%s and %s" % (named, inside))
    elif named is not None and (inside is None):
        reading.bus_id = named
    refuse_impossible(reading)
    return reading


def _value(node: Node, metric: Metric) -> object:
    """Return the first value that is there; a reason that means trouble ends the search."""
    first: Missing | None = None
    for path in metric.tree:
        value = _at(node, metric, path)
        if value is None:
            continue
        if not isinstance(value, Missing) or value.reason not in _FALLS_THROUGH:
            return value
        first = first or value
    return first or NOT_REPORTED


def _at(node: Node, metric: Metric, path: Path) -> object:
    """Return the value at a path, the sum of several; None where one is not there."""
    if isinstance(path, str):
        text = node.find(path)
        return metric.read(text, WITH_UNIT) if isinstance(text, str) else text
    parts = [_at(node, metric, part) for part in path]
    if any(part is None for part in parts):
        return None
    worst = next((part for part in parts if isinstance(part, Missing)), None)
    return worst if worst is not None else sum(part for part in parts if isinstance(part, int))


def _reasons(node: Node) -> int | Missing:
    for name in ("clocks_event_reasons", "clocks_throttle_reasons", "Clocks Event Reasons", "Clocks Throttle Reasons"):
        for block in node.all(name):
            reason = missing(block.text) if not block.children else None
            if reason is not None:
                return reason
            flags = {}
            for one in block.walk():
                short = _Q_REASONS.get(one.name) or re.sub(r"^clocks_(?:event|throttle)_reasons?_", "", one.name)
                if short in flags:
                    return garbage("%s twice" % one.name)
                if short not in REASON_BITS and flag(one.text) is True:
                    return garbage("%s: %s" % (one.name, one.text))
                flags[short] = one.text
            return reasons_of(flags)
    return NOT_REPORTED


_XML_PROCESS = {
    "pid": "pid", "name": "process_name", "memory": "used_memory", "kind": "type", "instance": "gpu_instance_id"
}  # fmt: skip
_Q_PROCESS = {
    "pid": "Process ID", "name": "Name", "memory": "Used GPU Memory", "kind": "Type", "instance": "GPU instance ID"
}  # fmt: skip


def _below(node: Node, block: str, name: str) -> list[Node]:
    return [one for each in node.all(block) for one in each.all(name)]


def _process(node: Node, names: dict[str, str], reading: GpuReading) -> SmiProcess:
    texts = {key: node.find(name) for key, name in names.items()}
    text = {key: value if isinstance(value, str) else "" for key, value in texts.items()}
    return SmiProcess(
        integer(text["pid"]),
        word(text["name"]),
        number(text["memory"], "MiB", bare=False),
        kind=word(text["kind"]),
        uuid=reading.uuid,
        bus_id=reading.bus_id,
        gpu_instance=integer(text["instance"]),
    )


def _q_processes(node: Node) -> list[Node]:
    """Return one node a process: the ids stand beside it, the rest below its number."""
    found = []
    for block in node.all("Processes"):
        instance = Node("GPU instance ID", "N/A")
        for one in block.children:
            if one.name == "GPU instance ID":
                instance = one
            elif one.name == "Process ID":
                process = Node("process")
                process.children = [instance, Node("Process ID", one.text), *one.children]
                found.append(process)
    return found


def _mig(node: Node, paths: dict[str, str]) -> MigDevice:
    found = {key: node.find(path) for key, path in paths.items()}
    text = {key: value for key, value in found.items() if isinstance(value, str)}
    device = MigDevice()
    for key in ("index", "gpu_instance", "compute_instance"):
        if key in text:
            setattr(device, key, integer(text[key]))
    for key in ("memory_total_mib", "memory_used_mib"):
        if key in text:
            setattr(device, key, number(text[key], "MiB", bare=False))
    return device


def _xml_mig(node: Node) -> MigDevice:
    return _mig(
        node,
        {
            "index": "index",
            "gpu_instance": "gpu_instance_id",
            "compute_instance": "compute_instance_id",
            "memory_total_mib": "fb_memory_usage/total",
            "memory_used_mib": "fb_memory_usage/used",
        },
    )


def _q_mig(node: Node) -> MigDevice:
    shared = "Shared FB Memory Usage" if node.all("Shared FB Memory Usage") else "FB Memory Usage"
    return _mig(
        node,
        {
            "index": "Index",
            "gpu_instance": "GPU Instance ID",
            "compute_instance": "Compute Instance ID",
            "memory_total_mib": shared + "/Total",
            "memory_used_mib": shared + "/Used",
        },
    )


def _add(answer: Answer, reading: GpuReading) -> None:
    reading.position = len(answer.readings)
    answer.readings.append(reading)


def _finish(answer: Answer) -> None:
    for reading in answer.readings:
        answer.processes += reading.processes
        if isinstance(reading.driver_version, Missing):
            reading.driver_version = answer.driver_version
    attached = known(answer.attached_gpus)
    if attached is not None and attached != len(answer.readings):
        answer.notes.append("it says %d GPUs and shows %d" % (attached, len(answer.readings)))
