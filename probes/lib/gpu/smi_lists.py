"""Reads what else nvidia-smi prints: processes, retired pages, ``-L``, ``--version``, NVLink, dmon and pmon.

Of the default table only its two versions are read: its columns moved three times, and it cuts names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Union

from .busid import bus_id
from .missing import NOT_REPORTED, Missing, garbage, integer, known, missing, number, word
from .smi_errors import recognise
from .smi_fields import uuid, version
from .smi_reading import MigDevice, SmiProcess, Trouble

if TYPE_CHECKING:
    from typing import Sequence

    from .smi_reading import Whole, Word

MAX_LINES = 20000
MAX_LINK = 64
NO_PROCESS = "no running processes found"
_UNIT = re.compile(r" \[[A-Za-z%]{1,10}\]$")


# Processes


@dataclass
class Processes:
    """What ``--query-compute-apps`` lists."""

    processes: list[SmiProcess] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    """Lines that are no process: one of them may stand for one."""
    complete: bool = True


APPS_FIELDS = ("gpu_uuid", "gpu_bus_id", "pid", "process_name", "used_gpu_memory")
_APPS_NAMES = frozenset({*APPS_FIELDS, "timestamp", "gpu_name", "gpu_serial", "used_memory", "name"})


def parse_apps(text: str, asked: Sequence[str] = ()) -> Processes:
    """Return the processes of a ``--query-compute-apps`` answer.

    A process's name may hold commas: it takes whatever the columns on both sides of it leave.

    Args:
        text: stdout, with a header or without.
        asked: the fields, where there is no header.
    """
    found = Processes(complete=not text or text.endswith("\n"))
    columns = tuple(asked)
    lines = [line.strip() for line in text.split("\n")[:MAX_LINES] if line.strip()]
    for number_, line in enumerate(lines):
        cells = [_UNIT.sub("", cell.strip()) for cell in line.split(",")]
        if len(cells) > 1 and sum(cell in _APPS_NAMES for cell in cells) * 2 > len(cells):
            columns = tuple(cells)
            continue
        if line.lower().strip(". ") == NO_PROCESS:
            continue
        cut = not found.complete and number_ == len(lines) - 1
        process = None if cut else _app(line, columns)
        if process is not None:
            found.processes.append(process)
            continue
        trouble = recognise(line)
        if trouble is not None:
            found.troubles.append(trouble)
        else:
            found.damaged.append(line[:200])
    return found


def _app(line: str, columns: Sequence[str]) -> SmiProcess | None:
    cells = line.split(",")
    at = next((place for place, name in enumerate(columns) if name in {"process_name", "name"}), None)
    extra = len(cells) - len(columns)
    if not columns or extra < 0 or (extra and at is None):
        return None
    if extra and at is not None:
        cells = [*cells[:at], ",".join(cells[at : at + extra + 1]), *cells[at + extra + 1 :]]
    cell = dict(zip(columns, cells))
    pid = integer(cell["pid"], high=1 << 32) if "pid" in cell else NOT_REPORTED
    identity = uuid(cell.get("gpu_uuid", "-"))
    if isinstance(pid, Missing) and pid.reason in {"error", "not-reported"}:
        return None
    if isinstance(identity, Missing) and identity.reason == "error":
        return None
    memory = cell.get("used_gpu_memory", cell.get("used_memory", "-"))
    return SmiProcess(
        pid,
        word(cell.get("process_name", cell.get("name", "-"))),
        number(memory, "MiB"),
        uuid=identity,
        bus_id=bus_id(cell.get("gpu_bus_id", "-")),
    )


# Retired pages


@dataclass
class RetiredPages:
    """What ``--query-retired-pages`` lists: pages a GPU and cause; a row without an address is no page."""

    pages: dict[str, dict[str, int]] = field(default_factory=dict)
    """By UUID, then cause (Single Bit ECC, Double Bit ECC)."""
    not_supported: set[str] = field(default_factory=set)
    """UUIDs of the cards that do not retire pages."""
    damaged: list[str] = field(default_factory=list)


RETIRED_FIELDS = ("gpu_uuid", "retired_pages.address", "retired_pages.cause")


def parse_retired(text: str, asked: Sequence[str] = ()) -> RetiredPages:
    """Return the pages of a ``--query-retired-pages`` answer; ``asked`` where there is no header."""
    found = RetiredPages()
    columns = tuple(asked)
    for line in text.split("\n")[:MAX_LINES]:
        cells = [cell.strip() for cell in line.split(",")]
        if any(cell.startswith("retired_pages.") for cell in cells):
            columns = tuple(cells)
            continue
        if not line.strip():
            continue
        cell = dict(zip(columns, cells))
        card = uuid(cell.get("gpu_uuid", ""))
        cause = cell.get("retired_pages.cause", "")
        if len(cells) != len(columns) or isinstance(card, Missing) or cause not in {"Single Bit ECC", "Double Bit ECC"}:
            found.damaged.append(line.strip()[:200])
            continue
        address = cell.get("retired_pages.address", "")
        reason = missing(address)
        if reason is None and re.fullmatch(r"0x[0-9a-fA-F]{1,16}", address):
            causes = found.pages.setdefault(card, {})
            causes[cause] = causes.get(cause, 0) + 1
        elif reason is not None and reason.reason == "not-supported":
            found.not_supported.add(card)
        else:
            found.damaged.append(line.strip()[:200])
    return found


# -L


@dataclass
class Listed:
    """One GPU of ``nvidia-smi -L``, which also names those that are lost."""

    index: int
    name: Word
    uuid: Word
    mig_devices: list[MigDevice] = field(default_factory=list)


_LISTED = re.compile(r"GPU (?P<index>[0-9]{1,4}): (?P<name>.{0,150}?) ?\(UUID: (?P<uuid>[^()]{1,60})\)")
_LISTED_MIG = re.compile(
    r"MIG (?P<profile>[0-9a-z.+]{1,30}) +Device +(?P<index>[0-9]{1,3}): \(UUID: (?P<uuid>[^()]{1,60})\)"
)


@dataclass
class ListedGpus:
    """What ``-L`` says."""

    gpus: list[Listed] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def parse_list(text: str) -> ListedGpus:
    """Return the GPUs of ``nvidia-smi -L``."""
    found = ListedGpus()
    for line in text.split("\n")[:MAX_LINES]:
        stripped = line.strip()
        gpu, mig = _LISTED.fullmatch(stripped), _LISTED_MIG.fullmatch(stripped)
        if gpu:
            found.gpus.append(Listed(int(gpu.group("index")), word(gpu.group("name")), uuid(gpu.group("uuid"))))
        elif mig and found.gpus:
            device = MigDevice(int(mig.group("index")), uuid=uuid(mig.group("uuid")), profile=mig.group("profile"))
            found.gpus[-1].mig_devices.append(device)
        elif stripped:
            trouble = recognise(stripped)
            if trouble is not None:
                found.troubles.append(trouble)
            else:
                found.damaged.append(stripped[:200])
    return found


# Versions


@dataclass
class Versions:
    """Versions of the driver and its tools."""

    driver: Word = NOT_REPORTED
    """Of the kernel's side; two or three numbers, compare with :func:`version_tuple`."""
    cuda: Word = NOT_REPORTED
    """Newest CUDA API that the driver supports."""
    smi: Word = NOT_REPORTED
    nvml: Word = NOT_REPORTED


_VERSION_LABELS = {
    "nvidia-smi version": "smi",
    "nvml version": "nvml",
    "driver version": "driver",
    "kmd version": "driver",
    "cuda version": "cuda",
    "cuda umd version": "cuda",
}


def parse_version(text: str) -> Versions:
    """Return what ``nvidia-smi --version`` says; 610 says for some that they are deprecated."""
    found = Versions()
    for line in text.split("\n")[:100]:
        label, colon, value = line.partition(":")
        attribute = _VERSION_LABELS.get(" ".join(label.lower().split()))
        if not colon or attribute is None:
            continue
        read = version(value)
        if known(getattr(found, attribute)) is None:
            setattr(found, attribute, read)
        elif not isinstance(read, Missing) and read != getattr(found, attribute):
            setattr(found, attribute, garbage("%s and %s" % (getattr(found, attribute), read)))
    return found


_TABLE_DRIVER = re.compile(r"(?:Driver|KMD) Version: ?(\S{1,40})")
_TABLE_CUDA = re.compile(r"CUDA(?: UMD)? Version: ?(\S{1,40})")
_TABLE_SMI = re.compile(r"NVIDIA-SMI (\d\S{1,39})")


def parse_table(text: str) -> Versions:
    """Return the versions in the head of the default table; nothing else of it is data."""
    found = Versions()
    for attribute, pattern in (("driver", _TABLE_DRIVER), ("cuda", _TABLE_CUDA), ("smi", _TABLE_SMI)):
        match = pattern.search(text[:4096])
        if match:
            setattr(found, attribute, version(match.group(1)))
    return found


def version_tuple(text: str) -> tuple[int, ...]:
    """Return ``(590, 48, 1)``; () for no version. 570.124 and 570.124.06 differ only in how much they say."""
    return tuple(int(part) for part in text.split(".")) if re.fullmatch(r"[0-9]+(?:\.[0-9]+){1,3}", text) else ()


def same_version(first: str, second: str) -> bool | None:
    """Whether two versions agree as far as both go; None when one is none."""
    one, two = version_tuple(first), version_tuple(second)
    return None if not one or not two else all(a == b for a, b in zip(one, two))


# NVLink


@dataclass
class NvLinks:
    """The NVLinks of one GPU."""

    index: int
    name: Word
    uuid: Word
    links: dict[int, Union[float, Missing]] = field(default_factory=dict)
    """GB/s of signalling by link; compare counts with siblings, not speeds with a data sheet."""
    inactive: list[int] = field(default_factory=list)
    """Links that the driver says are inactive."""
    all_inactive: bool = False
    why: Missing | None = None
    """Why there is nothing to say: no NVLink, MIG mode."""

    @property
    def active(self) -> int | None:
        """How many links work; None when nobody says."""
        if self.all_inactive:
            return 0
        if self.why is not None or any(isinstance(speed, Missing) for speed in self.links.values()):
            return None
        return len(self.links) if self.links or self.inactive else None


@dataclass
class NvLinkStatus:
    """What ``nvlink -s`` says."""

    gpus: list[NvLinks] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


_LINK = re.compile(r"Link (?P<link>[0-9]{1,3}): *(?P<speed>.{1,80})")
_INACTIVE = re.compile(r"<?inactive>?", re.IGNORECASE)
_ALL_INACTIVE = re.compile(r"all links are inactive", re.IGNORECASE)
_NO_LINKS = re.compile(
    r"does not have or support NvLink|queries are not supported for Devices in MIG mode|NVLink (?:is )?not supported",
    re.IGNORECASE,
)


def parse_nvlink(text: str) -> NvLinkStatus:
    """Return the links of ``nvidia-smi nvlink -s``."""
    found = NvLinkStatus()
    complete = text.endswith("\n")
    lines = text.split("\n")[:MAX_LINES]
    for place, line in enumerate(lines):
        stripped = line.strip()
        head, link = _LISTED.fullmatch(stripped), _LINK.fullmatch(stripped)
        if not stripped:
            continue
        if head:
            found.gpus.append(NvLinks(int(head.group("index")), word(head.group("name")), uuid(head.group("uuid"))))
        elif link and found.gpus and int(link.group("link")) < MAX_LINK:
            _add_link(found.gpus[-1], int(link.group("link")), link.group("speed"), complete or place < len(lines) - 1)
        elif _ALL_INACTIVE.search(stripped) and found.gpus:
            found.gpus[-1].all_inactive = True
        elif _NO_LINKS.search(stripped) and found.gpus:
            found.gpus[-1].why = Missing("not-supported", stripped)
        else:
            trouble = recognise(stripped)
            if trouble is not None:
                found.troubles.append(trouble)
            else:
                found.damaged.append(stripped[:200])
                if found.gpus:
                    found.gpus[-1].links[MAX_LINK + len(found.damaged)] = garbage(stripped)
    return found


def _add_link(gpu: NvLinks, link: int, text: str, whole: bool) -> None:
    if link in gpu.links or link in gpu.inactive:
        gpu.links[link] = garbage("link %d twice" % link)
    elif _INACTIVE.fullmatch(text.strip()):
        gpu.inactive.append(link)
    else:
        gpu.links[link] = number(text, "GB/s", bare=False, high=1000) if whole else garbage(text)


# dmon and pmon


@dataclass
class Samples:
    """Rows of ``dmon`` or ``pmon``, each by the names of its columns."""

    kind: str
    """dmon or pmon."""
    units: dict[str, str] = field(default_factory=dict)
    """By column, in their order."""
    rows: list[dict[str, Union[float, str, Missing]]] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    def column(self, name: str, gpu: int) -> list[float]:
        """Return the numbers in one column of one GPU; what is missing is left out."""
        values = [row.get(name) for row in self.rows if row.get("gpu") == gpu]
        return [value for value in values if isinstance(value, float)]


_WORDS = frozenset({"command", "type", "name", "Date", "Time"})


def parse_samples(text: str) -> Samples:
    """Return what dmon or pmon printed; columns come and go with the driver, so their header names them."""
    found = Samples("dmon")
    names: list[str] = []
    lines = text.split("\n")[:MAX_LINES]
    for place, line in enumerate(lines):
        tokens = line.split()
        if not tokens:
            continue
        if tokens[0].startswith("#"):
            heads = [token for token in [tokens[0][1:], *tokens[1:]] if token]
            if heads[:1] == ["gpu"]:
                names = heads
                found.kind = "pmon" if "pid" in names else "dmon"
            elif heads[:1] == ["Idx"] and len(heads) == len(names):
                found.units = dict(zip(names, heads))
            continue
        if found.kind == "pmon" and len(tokens) > len(names) > 0 and names[-1] in _WORDS:
            tokens = [*tokens[: len(names) - 1], " ".join(tokens[len(names) - 1 :])]
        cut = place == len(lines) - 1
        if not names or len(tokens) != len(names) or cut:
            found.damaged.append(line.strip()[:200])
            continue
        found.rows.append({name: _sample(name, token) for name, token in zip(names, tokens)})
    return found


def _sample(name: str, token: str) -> float | str | Missing:
    if name in _WORDS:
        return word(token)
    if name in {"gpu", "pid"}:
        whole: Whole = integer(token)
        return whole
    return number(token, low=-100)
