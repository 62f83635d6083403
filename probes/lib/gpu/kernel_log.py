"""What the kernel log says about GPUs, switches and their links, line by line.

Reads lines of ``dmesg``, ``journalctl -k`` and ``/dev/kmsg`` in every way they are stamped, and turns those that matter
into events: Xid, SXid, a card that fell off the bus (with an Xid or without), PCIe errors, links that trained narrow or
slow at boot, driver failures, and programs that died inside NCCL. A line that looks like an Xid and cannot be read is
kept as unread: it is no proof of health.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime
from time import mktime, strptime

from probes.lib.gpu import xid
from probes.lib.gpu.busid import normalise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterable

MAX_LINE = 4096
"""Characters of a line that are looked at."""
MAX_UNREAD = 20
FALL_LINES = 8
"""Within so many lines the driver ends its report of a lost card, which it prints in several."""

_FACILITY = re.compile(r"^\w+\s*:\w+\s*:\s*(?=\[|\d{4}-)")
_OFFSET = re.compile(r"^\[\s*(\d+\.\d+)\]\s?")
_CTIME = re.compile(r"^\[(\w{3} \w{3}\s+\d+ \d\d:\d\d:\d\d \d{4})\]\s?")
_ISO = re.compile(r"^(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)?\s+")
_SYSLOG_HEAD = re.compile(r"^\S+ kernel: ")
_SHORT = re.compile(r"^(\w{3}\s+\d+ \d\d:\d\d:\d\d) \S+ kernel: ")

_BDF = r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?"
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\)[^:]*: (\d+)(?:,|:| )\s*(.*)")
_SXID = re.compile(r"nvidia-nvswitch(\d+): SXid \(PCI:([0-9a-fA-F:.]+)\): (\d+), (.*)")
_SXID_MORE = re.compile(r"\s*(Severity\b|Data\s*\{)")
_PROCESS = re.compile(r"\s*pid='?(<unknown>|\d+)'?(?:, name=(.*?))?(?:, (.*))?$")
_LINK = re.compile(r"\bLink\s+(-?\d+)\b")
_LOST_HEAD = re.compile(r"NVRM: The NVIDIA GPU (\S+)")
_LOST_GPU = re.compile(r"NVRM: GPU (?:at )?(?:PCI:)?(" + _BDF + r"):? ")
_PCIE_ERROR = re.compile(r"(" + _BDF + r"): (?:AER: )?PCIe Bus Error: severity=(Correct\w*|Uncorrect\w*)(?: \((Non-?Fatal|Fatal)\))?")
_AER_RECEIVED = re.compile(
    r"(" + _BDF + r"): AER: (?:Multiple )?(Correct\w*|Uncorrect\w*)(?: \((Non-?Fatal|Fatal)\))? "
    r"error (?:message )?received(?:(?: from|:) (" + _BDF + r"))?",
    re.IGNORECASE,
)
_LIMITED = re.compile(
    r"(" + _BDF + r"): ([\d.]+) Gb/s available PCIe bandwidth, limited by ([\d.]+) GT/s PCIe x(\d+) link at (" + _BDF + r")"
    r"(?: \(capable of ([\d.]+) Gb/s with ([\d.]+) GT/s PCIe x(\d+) link\))?"
)
_NCCL_CRASH = re.compile(r"(?:traps: )?(\S.*?)\[(\d+)\]:? (?:segfault|general protection|trap|traps)\b.* in (libnccl[^\[\s]*)")
_IOMMU = re.compile(r"iommu: Default domain type: (\w+)", re.IGNORECASE)
_DRIVER = (
    ("init-failed", "fail", re.compile(r"NVRM:.*\bRmInitAdapter failed"), "the driver could not initialise the card",
     "reset the card or reboot; check that driver and card fit"),
    ("api-mismatch", "fail", re.compile(r"NVRM: API mismatch"), "library and kernel module of the driver differ in version",
     "reboot, or reload the kernel module"),
    ("needs-reset", "fail", re.compile(r"NVRM:.*The GPU likely needs to be reset"), "the driver says that the GPU needs a reset",
     "drain the GPU and reset it: nvidia-smi -r -i BUS_ID; reboot where that is not supported"),
)  # fmt: skip


@dataclass(frozen=True)
class Event:
    """One thing that happened to a GPU, a switch, a link or a program on it."""

    kind: str
    """xid, sxid, fallen-off-bus, pcie-error, pcie-error-received, pcie-limited, nccl-crash, init-failed, api-mismatch,
    needs-reset."""
    level: str
    """ok, degraded, fail or unknown: what the event by itself says about the hardware."""
    meaning: str
    action: str
    text: str
    """The message without its stamp."""
    line: int
    """Number of the line, from 1."""
    code: int | None = None
    """Of an Xid or SXid."""
    classes: str | None = None
    """Of an Xid: whose fault it is first, app, hw, sw, info."""
    bus_id: str | None = None
    """``0000:1b:00.0``; None where the line does not name a card that can be read."""
    time_s: float | None = None
    """Seconds since 1970 (UTC); None where the stamp does not tell."""
    stamp: str = ""
    """The stamp as printed."""
    pid: int | None = None
    process: str | None = None
    severity: str | None = None
    """fatal, nonfatal, corrected; None where the line does not say."""
    unit: int | None = None
    """NVSwitch number."""
    link: int | None = None
    """NVLink number."""
    speed_gts: float | None = None
    """Of a limited link, GT/s."""
    width: int | None = None
    """Of a limited link, lanes."""
    at: str | None = None
    """Bus id of the device that limits the link."""


@dataclass
class Contents:
    """What a log holds."""

    events: list[Event] = field(default_factory=list)
    """In order; the same Xid twice in one second is two events."""
    unread: list[str] = field(default_factory=list)
    """Lines that look like an Xid or SXid and cannot be read, the first twenty."""
    unread_count: int = 0
    lines: int = 0
    from_boot: bool = False
    """Whether the first lines of the boot are there, so that nothing was overwritten."""
    first_s: float | None = None
    """Time of the first line that has one, seconds since 1970."""
    last_s: float | None = None
    iommu_domain: str | None = None
    """``Translated`` or ``Passthrough``, as the kernel said at boot."""
    sandbox: str | None = None
    """Name of a sandbox that makes its log up."""


def parse(lines: Iterable[str], *, boot_time_s: float | None = None, overrides: xid.Policy | None = None) -> Contents:
    """Read a kernel log.

    Args:
        lines: of the log, with any stamp or none.
        boot_time_s: when the host booted, seconds since 1970, where the log is read on that host; without it stamps that
            count from the boot, or name no time zone, are no times.
        overrides: levels of Xids that replace the table's.
    """
    reader = _Reader(boot_time_s, overrides)
    for line in lines:
        reader.feed(line)
    return reader.contents


class _Reader:
    def __init__(self, boot_time_s: float | None, overrides: xid.Policy | None) -> None:
        self.contents = Contents()
        self._boot_time_s = boot_time_s
        self._overrides = overrides
        self._lost: tuple[str | None, int] | None = None
        self._stamp = ""
        self._time: float | None = None

    def feed(self, raw: str) -> None:
        contents = self.contents
        contents.lines += 1
        text = self._unstamp(raw.rstrip("\r\n")[:MAX_LINE])
        if self._time is not None:
            contents.first_s = self._time if contents.first_s is None else contents.first_s
            contents.last_s = self._time
        if contents.lines <= 200:
            contents.from_boot = contents.from_boot or text.startswith(("Linux version ", "Booting Linux on physical CPU"))
            if "Starting gVisor" in text:
                contents.sandbox = "gVisor"
        event = self._event(text)
        if event is not None:
            contents.events.append(event)

    def _unstamp(self, text: str) -> str:
        """Return the message, and keep stamp and time."""
        before = text
        text = _FACILITY.sub("", text, count=1)
        self._stamp, self._time = "", None
        found = _OFFSET.match(text)
        if found:
            self._stamp = found.group(1)
            self._time = None if self._boot_time_s is None else self._boot_time_s + float(found.group(1))
            return text[found.end() :]
        found = _CTIME.match(text)
        if found:
            self._stamp = found.group(1)
            self._time = None if self._boot_time_s is None else _ctime(found.group(1))
            return text[found.end() :]
        found = _ISO.match(text)
        if found:
            self._stamp = found.group(0).strip()
            self._time = _iso(*found.groups())
            return _SYSLOG_HEAD.sub("", text[found.end() :], count=1)
        found = _SHORT.match(text)
        if found:
            self._stamp = found.group(1)
            return text[found.end() :]
        return before

    def _event(self, text: str) -> Event | None:
        if "NVRM:" in text or self._lost is not None:
            event = self._driver(text)
            if event is not None:
                return event
        if "SXid" in text:
            return self._sxid(text)
        if "PCIe Bus Error" in text or "AER:" in text:
            return self._pcie_error(text)
        if "available PCIe bandwidth" in text:
            return self._limited(text)
        if "libnccl" in text:
            return self._crash(text)
        if "iommu" in text:
            found = _IOMMU.search(text)
            if found:
                self.contents.iommu_domain = found.group(1)
        return None

    def _make(self, kind: str, level: str, meaning: str, action: str, text: str, **more: object) -> Event:
        return Event(
            kind, level, meaning, action, text, self.contents.lines, stamp=self._stamp, time_s=self._time, **more,  # type: ignore[arg-type]
        )  # fmt: skip

    def _unreadable(self, text: str) -> None:
        self.contents.unread_count += 1
        if len(self.contents.unread) < MAX_UNREAD:
            self.contents.unread.append("line %d: %s" % (self.contents.lines, text[:300]))

    def _driver(self, text: str) -> Event | None:
        if "NVRM: Xid" in text:
            return self._xid(text)
        if "fallen off the bus" in text:
            named = _LOST_GPU.search(text) or _LOST_HEAD.search(text)
            where = normalise(named.group(1)) if named else self._lost[0] if self._lost else None
            self._lost = None
            known = xid.meaning(79)
            return self._make("fallen-off-bus", "fail", known.meaning, known.action, text, bus_id=where)
        head = _LOST_HEAD.search(text)
        if head:
            # "fallen off the bus" follows in one of the next lines, or something else that the driver says of a card.
            self._lost = (normalise(head.group(1)), self.contents.lines)
        elif self._lost is not None and self.contents.lines - self._lost[1] >= FALL_LINES:
            self._lost = None
        for kind, level, pattern, meaning, action in _DRIVER:
            if pattern.search(text):
                named = re.search(r"GPU (?:at )?(?:PCI:)?(" + _BDF + ")", text)
                where = normalise(named.group(1)) if named else None
                return self._make(kind, level, meaning, action, text, bus_id=where)
        return None

    def _xid(self, text: str) -> Event | None:
        found = _XID.search(text)
        where = None if found is None else normalise(found.group(1))
        if found is None or where is None:
            self._unreadable(text)
            return None
        code, tail = int(found.group(2)), found.group(3)
        level, meaning, action = xid.judge(code, tail, self._overrides)
        pid, name = _process(tail)
        link = _LINK.search(tail) if 144 <= code <= 150 else None
        return self._make(
            "xid", level, meaning, action, text, code=code, classes=xid.meaning(code).kind, bus_id=where, pid=pid, process=name,
            severity=xid.severity(tail) if 144 <= code <= 150 else None, link=int(link.group(1)) if link else None,
        )  # fmt: skip

    def _sxid(self, text: str) -> Event | None:
        found = _SXID.search(text)
        where = None if found is None else normalise(found.group(2))
        if found is None or where is None:
            self._unreadable(text)
            return None
        tail = found.group(4)
        if _SXID_MORE.match(tail):
            return None
        said = xid.severity(tail)
        level = {"fatal": "fail", "nonfatal": "degraded"}.get(said or "", "unknown")
        link = _LINK.search(tail)
        return self._make(
            "sxid", level, "NVSwitch error, %s" % (said or "its severity is not in the line"),
            "reboot the host, have the switch looked at if it comes again" if said == "fatal"
            else "watch the link that it names; restart the fabric manager if jobs fail",
            text, code=int(found.group(3)), bus_id=where, unit=int(found.group(1)), severity=said,
            link=int(link.group(1)) if link else None,
        )  # fmt: skip

    def _pcie_error(self, text: str) -> Event | None:
        found = _PCIE_ERROR.search(text)
        kind = "pcie-error"
        if found is None:
            found, kind = _AER_RECEIVED.search(text), "pcie-error-received"
        if found is None:
            return None
        corrected = found.group(2).lower().startswith("correct")
        fatal = (found.group(3) or "").lower() == "fatal"
        said = "corrected" if corrected else "fatal" if fatal else "nonfatal"
        where = (found.group(4) if kind == "pcie-error-received" else None) or found.group(1)
        return self._make(
            kind, "fail" if fatal else "degraded", "PCIe error, %s" % said,
            "check the seat of the card, risers and cables; pcie_aspm=off where it comes with changes of load",
            text, bus_id=normalise(where), severity=said,
        )  # fmt: skip

    def _limited(self, text: str) -> Event | None:
        found = _LIMITED.search(text)
        if found is None:
            return None
        where, _, speed, width, at = found.groups()[:5]
        return self._make(
            "pcie-limited", "degraded", "its PCIe link was narrower or slower than the card at boot",
            "look at the link under load; reseat the card, check riser and slot if it stays so",
            text, bus_id=normalise(where), speed_gts=float(speed), width=int(width), at=normalise(at),
        )  # fmt: skip

    def _crash(self, text: str) -> Event | None:
        found = _NCCL_CRASH.search(text)
        if found is None:
            return None
        return self._make(
            "nccl-crash", "degraded", "a program died inside NCCL",
            "look at what the program says; NCCL and driver may not fit together", text,
            pid=int(found.group(2)), process=found.group(1),
        )  # fmt: skip


def _process(tail: str) -> tuple[int | None, str | None]:
    """Return (pid, name) of the program that an Xid line names; names may hold colons, brackets, commas."""
    found = _PROCESS.match(tail)
    if found is None:
        return None, None
    pid, name = found.group(1), found.group(2)
    return (int(pid) if pid.isdigit() else None), (None if name in {None, "<unknown>"} else name.strip())


def _ctime(text: str) -> float | None:
    try:
        return mktime(strptime(text, "%a %b %d %H:%M:%S %Y"))
    except (ValueError, OverflowError):
        return None


def _iso(day: str, clock: str, fraction: str | None, zone: str | None) -> float | None:
    if zone is None:
        return None
    zone = "+0000" if zone == "Z" else zone.replace(":", "")
    try:
        moment = datetime.strptime("%sT%s%s" % (day, clock, zone), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (ValueError, OverflowError):
        return None
    return moment + float("0.%s" % (fraction or "0"))
