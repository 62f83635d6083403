"""Reads the kernel log of this boot from whatever lets itself be read: the journal, dmesg, /dev/kmsg.

Not being allowed to read it is not the same as a log without errors, and neither is an empty one: a kernel that runs has
said something. Everything is bounded in time and size.
"""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass
from time import monotonic

from probes.lib.gpu import kernel_log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    from probes.lib.gpu.run_smi import Programs, Said
    from probes.lib.gpu.xid import Policy

    State = Literal["read", "not-permitted", "absent", "timeout", "error", "empty"]

KMSG = "/dev/kmsg"
BOOT_ID = "/proc/sys/kernel/random/boot_id"
MAX_LINES = 40_000
"""Lines asked from the journal, the newest; about 6 MiB."""
MAX_BYTES = 8 << 20
MAX_RECORD = 16 << 10
"""Bytes of one record of /dev/kmsg; the kernel refuses smaller reads than a record."""
SECONDS = 10.0
_DENIED = ("permission", "not permitted", "not seeing messages from other users")
_NO_JOURNAL = ("no journal files were found", "not been booted with systemd", "failed to connect", "no persistent journal")


@dataclass(frozen=True)
class Attempt:
    """One source that was tried."""

    source: str
    """journal, dmesg or kmsg."""
    state: State
    reason: str
    """Why it could not be read, in one line; empty if it was."""
    contents: kernel_log.Contents | None = None
    complete: bool = False
    """Whether it reaches back to the boot."""


@dataclass(frozen=True)
class Log:
    """The kernel log of this boot, or why there is none."""

    state: State
    """``read``, or what the most telling source said."""
    source: str | None
    reason: str
    """Why it could not be read: each source in one sentence; empty if it was."""
    contents: kernel_log.Contents
    complete: bool
    """Whether it reaches back to the boot; if not, older lines are gone."""
    boot_id: str | None
    boot_time_s: float | None
    """Seconds since 1970."""
    attempts: tuple[Attempt, ...]

    @property
    def covers_s(self) -> float | None:
        """How far back it reaches, seconds before now; None where the lines do not tell."""
        return None if self.contents.first_s is None else max(0.0, time.time() - self.contents.first_s)


def read(programs: Programs, *, overrides: Policy | None = None) -> Log:
    """Read the log; stops at the first source that reaches back to the boot, else takes the one that reaches furthest."""
    boot = boot_time()
    attempts: list[Attempt] = []
    for way in (_journal, _dmesg, _kmsg):
        attempt = way(programs, boot, overrides)
        attempts.append(attempt)
        if attempt.complete:
            break
    readable = [attempt for attempt in attempts if attempt.state == "read"]
    if readable:
        best = max(readable, key=_reach)
        assert best.contents is not None  # noqa: S101 - what was read has contents
        return Log("read", best.source, "", best.contents, best.complete, boot_id(), boot, tuple(attempts))
    reason = "; ".join("%s: %s" % (attempt.source, attempt.reason) for attempt in attempts)
    return Log(_worst(attempts), None, reason, kernel_log.Contents(), complete=False, boot_id=boot_id(), boot_time_s=boot, attempts=tuple(attempts))


def boot_id() -> str | None:
    """Return the id of this boot; events of another one are history."""
    try:
        with open(BOOT_ID, encoding="ascii") as file:
            return file.read(64).strip() or None
    except OSError:
        return None


def boot_time() -> float | None:
    """Return when the kernel's clock of its log was zero, seconds since 1970."""
    try:
        # Not /proc/uptime: in a container that may tell the container's age.
        return time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    except (AttributeError, OSError):
        return None


def _reach(attempt: Attempt) -> tuple[bool, float, int]:
    contents = attempt.contents or kernel_log.Contents()
    return attempt.complete, -(contents.first_s or time.time()), contents.lines


def _worst(attempts: list[Attempt]) -> State:
    states = {attempt.state for attempt in attempts}
    order: tuple[State, ...] = ("timeout", "not-permitted", "error", "empty", "absent")
    return next((state for state in order if state in states), "absent")


def _taken(source: str, text: str, boot: float | None, overrides: Policy | None, *, cut: bool = False) -> Attempt:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("-- ")]
    if not lines:
        return Attempt(source, "empty", "has no line, which no running kernel's log is")
    contents = kernel_log.parse(lines, boot_time_s=boot, overrides=overrides)
    if contents.sandbox is not None:
        return Attempt(source, "absent", "the sandbox %s makes its log up" % contents.sandbox)
    return Attempt(source, "read", "", contents, contents.from_boot and not cut)


def _failed(source: str, said: Said) -> Attempt:
    if said.how == "timeout":
        return Attempt(source, "timeout", said.why)
    if said.how in {"not-found", "not-asked", "not-started"}:
        return Attempt(source, "absent" if said.how == "not-found" else "error", said.why)
    words = (said.err + said.out[-2000:]).lower()
    if any(word in words for word in _DENIED):
        return Attempt(source, "not-permitted", said.why)
    if any(word in words for word in _NO_JOURNAL):
        return Attempt(source, "absent", said.why)
    return Attempt(source, "error", said.why)


def _journal(programs: Programs, boot: float | None, overrides: Policy | None) -> Attempt:
    said = programs.ask(
        "journalctl", "-k", "-b", "--no-pager", "-n", str(MAX_LINES), "-o", "short-iso-precise", seconds=SECONDS
    )  # fmt: skip
    if not said.ok:
        return _failed("journal", said)
    lines = said.out.count("\n")
    attempt = _taken("journal", said.out, boot, overrides, cut=lines >= MAX_LINES)
    if attempt.state == "empty":
        words = said.err.lower()
        if any(word in words for word in _DENIED):
            return Attempt("journal", "not-permitted", "only the groups adm and systemd-journal may read it")
        return Attempt("journal", "absent", "no journal of this boot's kernel is kept")
    return attempt


def _dmesg(programs: Programs, boot: float | None, overrides: Policy | None) -> Attempt:
    said = programs.ask("dmesg", seconds=SECONDS)
    return _taken("dmesg", said.out, boot, overrides) if said.ok else _failed("dmesg", said)


def _kmsg(programs: Programs, boot: float | None, overrides: Policy | None) -> Attempt:
    del programs
    try:
        descriptor = os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        denied = error.errno in {errno.EPERM, errno.EACCES}
        return Attempt("kmsg", "not-permitted" if denied else "absent", "%s: %s" % (KMSG, error.strerror))
    until, records, size = monotonic() + SECONDS, [], 0
    cut = False
    try:
        while True:
            if monotonic() > until or size > MAX_BYTES:
                cut = True
                break
            try:
                record = os.read(descriptor, MAX_RECORD)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:  # Overwritten while we read: what comes next is there.
                    continue
                denied = error.errno in {errno.EPERM, errno.EACCES}
                return Attempt("kmsg", "not-permitted" if denied else "error", "%s: %s" % (KMSG, error.strerror))
            if not record:
                break
            size += len(record)
            records.append(_record(record))
    finally:
        os.close(descriptor)
    attempt = _taken("kmsg", "\n".join(records), boot, overrides)
    if cut and attempt.state == "read":
        return Attempt("kmsg", "error", "there was more than could be read in %.0f s and %d MiB" % (SECONDS, MAX_BYTES >> 20))
    return attempt


def _record(record: bytes) -> str:
    """Return one record as dmesg prints it: ``6,339,5140900,-;text`` and continuation lines that begin with a blank."""
    head, _, rest = record.decode("utf-8", "replace").partition(";")
    message = rest.splitlines()[0] if rest else ""
    parts = head.split(",")
    if len(parts) < 3 or not parts[2].isdigit():
        return message
    return "[%12.6f] %s" % (int(parts[2]) / 1e6, message)
