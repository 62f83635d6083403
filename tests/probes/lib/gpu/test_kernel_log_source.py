from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from probes.lib.gpu import kernel_log_source
from probes.lib.gpu.run_smi import Programs
from tests.support.fake_smi import FakeSmi

LINUX = "Linux version 6.8.0-60-generic (build@host)"
XID = "NVRM: Xid (PCI:0000:5d:00): 79, GPU has fallen off the bus."


@pytest.fixture(autouse=True)
def no_kmsg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's own log is not to answer."""
    monkeypatch.setattr(kernel_log_source, "KMSG", str(tmp_path / "absent"))


@pytest.fixture
def smi(tmp_path: Path) -> FakeSmi:
    made = FakeSmi(tmp_path / "bin", [])
    made.program("dmesg", "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1")
    made.program("journalctl", "echo No journal files were found. >&2; exit 1")
    return made


def read(smi: FakeSmi, seconds: float = 20.0) -> kernel_log_source.Log:
    return kernel_log_source.read(Programs(seconds, smi.path))


def test_the_journal_is_asked_first(smi: FakeSmi) -> None:
    smi.program("journalctl", f"echo '2026-03-01T10:00:00.000001+0000 host kernel: {LINUX}'; echo '2026-03-01T10:00:01.000001+0000 host kernel: {XID}'")
    log = read(smi)
    assert (log.state, log.source, log.complete) == ("read", "journal", True)
    assert [event.code for event in log.contents.events] == [79]
    assert log.contents.events[0].time_s is not None
    assert log.boot_id


def test_not_permitted_is_not_clean(smi: FakeSmi) -> None:
    log = read(smi)
    assert log.state == "not-permitted"
    assert "dmesg" in log.reason
    assert [attempt.state for attempt in log.attempts] == ["absent", "not-permitted", "absent"]


def test_a_journal_that_shows_only_the_users_own_lines(smi: FakeSmi) -> None:
    smi.program("journalctl", "echo 'Hint: You are currently not seeing messages from other users and the system.' >&2; echo '-- No entries --'")
    log = read(smi)
    assert log.attempts[0].state == "not-permitted"


def test_a_log_that_lost_its_beginning_gives_way_to_one_that_has_it(smi: FakeSmi) -> None:
    smi.program("journalctl", f"echo '2026-03-01T10:00:01.000001+0000 host kernel: {XID}'")
    assert (read(smi).source, read(smi).complete) == ("journal", False)
    smi.program("dmesg", f"echo '[    0.000000] {LINUX}'; echo '[   10.000000] {XID}'")
    log = read(smi)
    assert (log.source, log.complete) == ("dmesg", True)


def test_an_empty_log_is_none(smi: FakeSmi) -> None:
    smi.program("dmesg", "exit 0")
    log = read(smi)
    assert log.state == "empty"


def test_a_sandbox_that_invents_its_log(smi: FakeSmi) -> None:
    smi.program("dmesg", "echo '[    0.000000] Starting gVisor...'; echo '[    0.4] Checking naughty and nice process list...'")
    log = read(smi)
    assert log.state == "absent"
    assert "gVisor" in log.reason


def test_a_reader_that_hangs_is_left(smi: FakeSmi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_log_source, "SECONDS", 0.5)
    smi.program("journalctl", "sleep 60")
    smi.program("dmesg", f"echo '[    0.000000] {LINUX}'")
    log = read(smi)
    assert log.attempts[0].state == "timeout"
    assert (log.state, log.source) == ("read", "dmesg")


def test_records_of_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [f"5,0,0,-;{LINUX}\n".encode(), f"4,1,2500000,-;{XID}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:5d:00.0\n".encode()]
    kmsg = tmp_path / "kmsg"
    kmsg.touch()
    monkeypatch.setattr(kernel_log_source, "KMSG", str(kmsg))
    waiting: list[bytes | OSError] = [records[0], OSError(errno.EPIPE, "overwritten"), records[1], BlockingIOError()]

    def one(descriptor: int, size: int) -> bytes:
        del descriptor, size
        item = waiting.pop(0)
        if isinstance(item, OSError):
            raise item
        return item

    monkeypatch.setattr(os, "read", one)
    attempt = kernel_log_source._kmsg(Programs(1.0), 1000.0, None)
    assert attempt.state == "read"
    assert attempt.complete
    assert attempt.contents is not None
    (event,) = attempt.contents.events
    assert (event.code, event.time_s) == (79, 1002.5)


def test_what_users_may_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_more: object) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "open", refuse)
    assert kernel_log_source._kmsg(Programs(1.0), None, None).state == "not-permitted"
    monkeypatch.undo()
    monkeypatch.setattr(kernel_log_source, "KMSG", str(tmp_path / "absent"))
    assert kernel_log_source._kmsg(Programs(1.0), None, None).state == "absent"
