from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

import pytest

from probes.lib.gpu import kernel_log, kernel_log_findings
from probes.lib.gpu.kernel_log_source import Attempt, Log
from tests.support import captures

PREFIXES = (
    "", "[  123.456789] ", "[Thu Oct 10 12:03:11 2024] ", "2026-03-01T10:00:00,123456+01:00 ", "2026-03-01T10:00:00+0000 host kernel: ",
    "kern  :warn  : 2026-03-01T10:00:00,123456+00:00 ", "kern  :err   : [  123.456789] ", "Mar 01 10:00:00 host kernel: ",
)  # fmt: skip
FALL = "NVRM: Xid (PCI:0000:5d:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
BOOT = "[    0.000000] Linux version 6.8.0 (build@host)"


def log(*lines: str, complete: bool = True, boot_time_s: float | None = None) -> Log:
    contents = kernel_log.parse(lines, boot_time_s=boot_time_s)
    return Log("read", "dmesg", "", contents, complete, "boot", boot_time_s, ())


def levels(found: Log, gpus: dict[str, str] | None = None, links: dict[str, str] | None = None) -> list[tuple[str, str]]:
    return [(item.level, item.code) for item in kernel_log_findings.judge(found, gpus, links=links)]


# The captures --------------------------------------------------------------------------------------------------------


@captures.needs_captures
def test_all_xids_of_the_captures_are_read_but_for_three_that_are_none() -> None:
    read, unread = 0, []
    for name in captures.names("dmesg__*"):
        lines = captures.read(name).splitlines()
        contents = kernel_log.parse(lines)
        xids = [event for event in contents.events if event.kind == "xid"]
        read += len(xids)
        missed = [line for line in contents.unread if "SXid" not in line]
        unread += [line.partition(": ")[2] for line in missed]
        assert len(xids) + len(missed) == sum("NVRM: Xid" in line for line in lines)
        assert all(event.bus_id for event in xids)
    assert read == 124
    assert sorted(unread) == ["NVRM: Xid (PCI:0000:04:00): 69", "NVRM: Xid (invalid): some error", "NVRM: Xid error: xyz, invalid data"]


@captures.needs_captures
@pytest.mark.parametrize("name", captures.names("dmesg__*"))
def test_each_capture_is_judged_and_none_is_found_clean(name: str) -> None:
    found = kernel_log_findings.judge(log(*captures.read(name).splitlines()))
    assert any(item.level in {"fail", "degraded"} for item in found)
    assert not any(item.level == "ok" and item.code == "kernel-log" for item in found)


@captures.needs_captures
def test_lines_of_the_driver_that_are_no_xid() -> None:
    events = kernel_log.parse(captures.read("dmesg__nvrm-non-xid__gpud.txt").splitlines()).events
    lost = [event.bus_id for event in events if event.kind == "fallen-off-bus"]
    assert lost == ["0000:29:00.0", "0000:91:00.0", "0000:18:00.0", None, None]
    assert [event.bus_id for event in events if event.kind == "needs-reset"] == ["0000:9b:00.0"]


@captures.needs_captures
def test_switch_errors() -> None:
    contents = kernel_log.parse(captures.read("dmesg__sxid__gpud.txt").splitlines())
    assert [event.severity for event in contents.events].count("fatal") == 5
    assert {event.code for event in contents.events if event.level == "unknown"} == {12028, 20123, 99999}
    assert contents.unread_count == 2
    # Lines that go on with an event are none of their own.
    assert not any("Severity" in event.text or "Data {" in event.text for event in contents.events)


# Lines ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_stamp(prefix: str) -> None:
    contents = kernel_log.parse([prefix + FALL], boot_time_s=1_000_000.0)
    (event,) = contents.events
    assert (event.code, event.bus_id, event.text) == (79, "0000:5d:00.0", FALL)
    assert (event.pid, event.process) == (None, None)


def test_times() -> None:
    def time_of(line: str, boot: float | None = None) -> float | None:
        return kernel_log.parse([line], boot_time_s=boot).events[0].time_s

    at_ten = datetime(2026, 3, 1, 10, tzinfo=timezone.utc).timestamp()
    assert time_of(f"2026-03-01T10:00:00,500000+00:00 {FALL}") == at_ten + 0.5
    assert time_of(f"2026-03-01T11:00:00.25+0100 host kernel: {FALL}") == at_ten + 0.25
    assert time_of(f"[  100.5] {FALL}", 50.0) == 150.5
    # Nobody knows when a host of a saved log booted, or in which zone it is.
    assert time_of(f"[  100.5] {FALL}") is None
    assert time_of(f"[Thu Oct 10 12:03:11 2024] {FALL}") is None
    assert time_of(f"2026-03-01T10:00:00 {FALL}") is None
    assert time_of(f"2026-13-41T10:00:00+00:00 {FALL}") is None


@pytest.mark.parametrize(
    ("bus", "expected"),
    [("PCI:0000:9b:00", "0000:9b:00.0"), ("0000:03:00", "0000:03:00.0"), ("PCI:00000000:1B:00.0", "0000:1b:00.0"),
     ("PCI:0018:01:00", "0018:01:00.0"), ("PCI:18:00.0", "0000:18:00.0")],
)  # fmt: skip
def test_bus_ids(bus: str, expected: str) -> None:
    assert kernel_log.parse([f"NVRM: Xid ({bus}): 48, text"]).events[0].bus_id == expected


@pytest.mark.parametrize(
    ("tail", "pid", "name"),
    [
        ("pid=12, name=ray::Worker[a,b], Ch 00000008", 12, "ray::Worker[a,b]"),
        ("pid=12, name=python3", 12, "python3"),
        ("pid='<unknown>', name=<unknown>, text", None, None),
        ("pid=123", 123, None),
        ("pid=XXX", None, None),
        ("Row remapping failure", None, None),
    ],
)
def test_programs(tail: str, pid: int | None, name: str | None) -> None:
    event = kernel_log.parse([f"NVRM: Xid (PCI:0000:01:00): 31, {tail}"]).events[0]
    assert (event.code, event.pid, event.process) == (31, pid, name)


def test_a_line_without_parentheses_is_no_event_and_is_not_forgotten() -> None:
    contents = kernel_log.parse(["NVRM: Xid PCI:0000:01:00: 79, GPU has fallen off the bus"])
    assert contents.events == []
    assert contents.unread_count == 1


@pytest.mark.parametrize("continued", ["NVRM: ", ""])
def test_a_card_that_falls_without_an_xid(continued: str) -> None:
    lines = [
        "[ 10.0] NVRM: The NVIDIA GPU 0000:5d:00.0",
        f"[ 10.0] {continued}(PCI ID: 10de:2901) installed in this system has",
        f"[ 10.0] {continued}fallen off the bus and is not responding to commands.",
    ]
    (event,) = kernel_log.parse(lines).events
    assert (event.kind, event.bus_id, event.level) == ("fallen-off-bus", "0000:5d:00.0", "fail")


def test_words_of_another_driver_are_no_lost_gpu() -> None:
    assert kernel_log.parse(["nvme 0000:01:00.0: device has fallen off the bus"]).events == []
    # Too far below to belong together.
    lines = ["NVRM: The NVIDIA GPU 0000:5d:00.0", *["something else"] * 12, "it has fallen off the bus"]
    assert kernel_log.parse(lines).events == []


@pytest.mark.parametrize(
    ("line", "severity", "level", "bus"),
    [
        ("nvidia 0000:3b:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)", "corrected", "degraded", "3b"),
        ("pcieport 0000:16:01.0: AER: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer", "nonfatal", "degraded", "16"),
        ("nvidia 0000:3b:00.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Inaccessible", "fatal", "fail", "3b"),
        ("pcieport 0000:16:01.0: AER: Uncorrected (Fatal) error received: 0000:3b:00.0", "fatal", "fail", "3b"),
        ("pcieport 0000:16:01.0: AER: Multiple Corrected error received: 0000:3b:00.0", "corrected", "degraded", "3b"),
        ("pcieport 0000:16:01.0: AER: Correctable error message received from 0000:3b:00.0", "corrected", "degraded", "3b"),
    ],
)  # fmt: skip
def test_pcie_errors(line: str, severity: str, level: str, bus: str) -> None:
    (event,) = kernel_log.parse([line]).events
    assert (event.severity, event.level) == (severity, level)
    assert event.bus_id is not None
    assert event.bus_id[5:7] == bus


def test_aer_that_is_only_switched_on_is_no_error() -> None:
    assert kernel_log.parse(["pcieport 0000:16:01.0: AER: enabled with IRQ 25"]).events == []


def test_a_link_that_was_limited_at_boot() -> None:
    line = (
        "[ 2.5] pci 0000:17:00.0: 15.752 Gb/s available PCIe bandwidth, limited by 8.0 GT/s PCIe x2 link at 0000:16:00.0 "
        "(capable of 252.048 Gb/s with 16.0 GT/s PCIe x16 link)"
    )
    (event,) = kernel_log.parse([line]).events
    assert (event.kind, event.bus_id, event.speed_gts, event.width, event.at) == ("pcie-limited", "0000:17:00.0", 8.0, 2, "0000:16:00.0")


def test_crashes_inside_nccl() -> None:
    lines = [
        "pt main[1][2536443]: segfault at 7f79 ip 00007f7c sp 00007f7c error 4 in libnccl.so.2[7f7c+d3d3000]",
        "traps: python3[77] general protection fault ip:7f sp:7f error:0 in libnccl.so.2.21.5[7f+9]",
        "python3[78]: segfault at 0 ip 0 sp 0 error 4 in libc.so.6[7f+9]",
    ]
    events = kernel_log.parse(lines).events
    assert [(event.process, event.pid) for event in events] == [("pt main[1]", 2536443), ("python3", 77)]


def test_facts_of_the_boot() -> None:
    contents = kernel_log.parse([BOOT, "[ 0.5] iommu: Default domain type: Translated (set via kernel command line)"])
    assert contents.from_boot
    assert contents.iommu_domain == "Translated"
    assert kernel_log.parse(["[    0.000000] Starting gVisor..."]).sandbox == "gVisor"


def test_long_lines_and_bytes_that_are_no_text() -> None:
    contents = kernel_log.parse(["NVRM: Xid (PCI:0000:01:00): 79, " + "x" * 10_000_000, "\x00\ufffd", ""])
    assert len(contents.events) == 1
    assert len(contents.events[0].text) <= kernel_log.MAX_LINE


# Judging -------------------------------------------------------------------------------------------------------------


def test_the_same_xid_twice_in_one_second_is_two_events_and_one_finding() -> None:
    found = kernel_log_findings.judge(log(BOOT, f"[ 10.0] {FALL}", f"[ 10.0] {FALL}"), {"0000:5d:00.0": "gpu 3 0000:5d:00.0 GPU-x"})
    assert [(item.level, item.code, item.value, item.subject) for item in found] == [("fail", "xid-79", 2, "gpu 3 0000:5d:00.0 GPU-x")]
    assert "power-cycle" in (found[0].action or "")


def test_an_earlier_xid_is_not_hidden_by_a_later_one() -> None:
    lines = [f"[ 1.0] NVRM: Xid (PCI:0000:5d:00): {code}, text" for code in (62, 45, 45)]
    assert levels(log(BOOT, *lines)) == [("fail", "xid-62"), ("ok", "xid-45")]


def test_a_clean_log_is_ok_only_when_it_reaches_far_enough() -> None:
    assert levels(log(BOOT)) == [("ok", "kernel-log")]
    assert levels(log("2020-03-01T10:00:00+00:00 something", complete=False)) == [("ok", "kernel-log")]
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S+00:00 something")
    assert levels(log(now, complete=False)) == [("unknown", "kernel-log-incomplete")]
    assert levels(log("something", complete=False)) == [("unknown", "kernel-log-incomplete")]


@pytest.mark.parametrize("state", ["not-permitted", "absent", "timeout", "empty", "error"])
def test_a_log_that_cannot_be_read_is_unknown(state: str) -> None:
    attempt = Attempt("dmesg", state, "Operation not permitted")  # type: ignore[arg-type]
    (found,) = kernel_log_findings.judge(replace(log(), state=state, attempts=(attempt,)))  # type: ignore[arg-type]
    assert (found.level, found.code) == ("unknown", "kernel-log")
    assert "Operation not permitted" in found.evidence[0]
    assert found.action


def test_what_recovered_is_history() -> None:
    def line(code: int, text: str) -> str:
        return f"[ 1.0] NVRM: Xid (PCI:0000:5d:00): {code}, {text}"

    lost, back = (f"GPU recovery action changed from 0x0 ({a}) to 0x1 ({b})" for a, b in (("None", "GPU Reset Required"), ("GPU Reset Required", "None")))
    assert levels(log(BOOT, line(48, "text"), line(154, lost))) == [("fail", "xid-48"), ("fail", "xid-154")]
    assert levels(log(BOOT, line(48, "text"), line(154, lost), line(154, back))) == [("degraded", "xid-48"), ("ok", "xid-154")]
    # What comes after it is new.
    assert levels(log(BOOT, line(154, lost), line(154, back), line(48, "text"))) == [("fail", "xid-48"), ("ok", "xid-154")]


def test_an_earlier_boot_is_history() -> None:
    then = log("2026-03-01T10:00:00+00:00 " + FALL, boot_time_s=datetime(2026, 3, 2, tzinfo=timezone.utc).timestamp())
    assert ("ok", "xid-79") in levels(then)
    now = log("2026-03-03T10:00:00+00:00 " + FALL, boot_time_s=datetime(2026, 3, 2, tzinfo=timezone.utc).timestamp())
    assert ("fail", "xid-79") in levels(now)


def test_program_errors_accuse_a_card_only_when_several_programs_meet_them_there() -> None:
    def line(bus: str, name: str) -> str:
        return f"[ 1.0] NVRM: Xid (PCI:0000:{bus}:00): 13, pid=1, name={name}, Graphics Exception"

    gpus = {"0000:5d:00.0": "gpu 0", "0000:5e:00.0": "gpu 1"}
    assert levels(log(BOOT, line("5d", "a"), line("5d", "a")), gpus)[0] == ("ok", "xid-13")
    assert levels(log(BOOT, line("5d", "a"), line("5d", "b")), gpus) == [("degraded", "xid-13")]
    assert {level for level, _ in levels(log(BOOT, line("5d", "a"), line("5d", "b"), line("5e", "a")), gpus)} == {"ok"}


def test_errors_of_other_devices_are_not_ours() -> None:
    line = "[ 1.0] nvme 0000:99:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer"
    assert levels(log(BOOT, line), {"0000:5d:00.0": "gpu 0"}) == [("ok", "kernel-log")]
    assert levels(log(BOOT, line), {"0000:5d:00.0": "gpu 0"}, {"0000:99:00.0": "bridge"}) == [("fail", "pcie-error")]
    assert levels(log(BOOT, line)) == [("fail", "pcie-error")]


def test_corrected_errors_count_when_there_are_many() -> None:
    line = "[ 1.0] nvidia 0000:5d:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer"
    notice = "[ 1.0] pcieport 0000:16:01.0: AER: Corrected error received: 0000:5d:00.0"
    assert ("ok", "pcie-error") in levels(log(BOOT, *[notice, line] * kernel_log_findings.CORRECTED_MANY))
    found = kernel_log_findings.judge(log(BOOT, *[notice, line] * 50))
    # Each error is printed as a notice and with details: it is one.
    assert [(item.level, item.code, item.value) for item in found] == [("degraded", "pcie-error", 50)]


def test_unread_lines_keep_a_log_from_being_ok() -> None:
    assert ("unknown", "kernel-log-unread") in levels(log(BOOT, "[ 1.0] NVRM: Xid (invalid): some error"))


@pytest.mark.parametrize("cut", range(8, len(FALL), 5))
def test_no_cut_of_an_xid_line_makes_the_log_clean(cut: int) -> None:
    text = f"[ 1.0] {FALL[:cut]}"
    found = levels(log(BOOT, text))
    if "NVRM: Xid" in text:
        assert {level for level, _ in found} & {"fail", "unknown"}
