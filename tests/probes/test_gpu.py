"""``rdiag gpu``: recorded drivers, healthy and with every fault, played back to the probe in this process."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from probes.lib.gpu import collect, occupancy, run_smi, where
from probes.lib.gpu.looking import Surroundings
from remote_diag.discovery import find
from remote_diag.findings import Finding, status
from remote_diag.testing import RecordingContext
from tests.support.fake_smi import FakeSmi, Gpu, h200, rtx_pro_6000
from tests.support.gpu_faults import FAULTS, FAULTY, Fault, plant


@dataclasses.dataclass
class Judged:
    """What came of one run."""

    result: Any
    findings: list[Finding]

    @property
    def status(self) -> str:
        return status(self.findings)

    def finding(self, code: str) -> Finding:
        (found,) = [finding for finding in self.findings if finding.code == code]
        return found

    def bad(self) -> list[str]:
        return [finding.code for finding in self.findings if finding.level not in {"ok", "skipped"}]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Gpu]], FakeSmi]:
    """Return a function that puts a driver with these GPUs on the PATH, an lspci and a clean kernel log beside it."""
    monkeypatch.setattr(occupancy, "SAMPLE_GAP", 0.0)

    def put(gpus: list[Gpu]) -> FakeSmi:
        smi = FakeSmi(tmp_path / "bin", gpus)
        smi.lspci()
        smi.kernel_log()
        monkeypatch.setenv("PATH", smi.path)
        return smi

    return put


def judge(tmp_path: Path, **params: Any) -> Judged:
    probe = find("gpu")
    context = RecordingContext(tmp_path / "run", seconds=60.0)
    result = probe.module.run(probe.Params(**params), context)
    # What a host cannot send is not accepted here either.
    probe.result_adapter.validate_json(probe.result_adapter.dump_json(result), strict=True)
    return Judged(result, context.findings)


@pytest.mark.parametrize("gpus", [rtx_pro_6000, h200])
def test_healthy_drivers_are_ok(make: Callable[..., FakeSmi], tmp_path: Path, gpus: Callable[[], list[Gpu]]) -> None:
    smi = make(gpus())
    judged = judge(tmp_path, gpus=8)
    assert judged.bad() == []
    assert judged.status == "ok"
    assert judged.result.expected_gpus == judged.result.usable_gpus == 8
    assert judged.result.source == "nvidia-smi"
    assert judged.result.driver_version == "590.48.01"
    for index, gpu in enumerate(judged.result.gpus):
        assert (gpu.index, gpu.status, gpu.free, gpu.busy) == (index, "ok", True, None)
        assert gpu.uuid == smi.gpus[index]["uuid"]
        assert gpu.bus_id == smi.gpus[index]["pci.bus_id"][4:].lower()
        assert f"{gpu.memory_total_mib:.0f} MiB" == smi.gpus[index]["memory.total"]
        assert gpu.temperature_c == float(smi.gpus[index]["temperature.gpu"])
        assert gpu.utilization_samples_pct == (0.0, 0.0)
        assert gpu.fan_pct is None
        assert gpu.missing["fan_pct"].reason == "not-supported"
        assert set(gpu.checks.values()) <= {"ok", "skipped"}
    assert judged.finding("gpu-count").value == 8
    # Two at a time would both enter a driver that hangs; help, one question for all cards, who computes, load, NVLinks, evidence.
    assert len(smi.calls()) == 6


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_gets_its_verdict_its_subject_and_its_action(
    make: Callable[..., FakeSmi], tmp_path: Path, fault: Fault
) -> None:
    smi = make(fault.gpus())
    plant(smi, fault)
    judged = judge(tmp_path, gpus=8)
    faulty = smi.gpus[FAULTY]
    bus = faulty["pci.bus_id"][4:].lower()
    assert fault.code in judged.bad()
    finding = judged.finding(fault.code)
    assert finding.level == fault.level
    assert finding.subject == f"gpu {FAULTY} {bus} {faulty['uuid']}"
    assert fault.action in (finding.action or "").replace("0000:61:00.0", "0000:61")
    assert judged.status == fault.level
    gpu = judged.result.gpus[FAULTY]
    assert gpu.checks[fault.check] == fault.level
    assert gpu.status == fault.level
    assert [other.status for other in judged.result.gpus if other is not gpu] == ["ok"] * 7


def test_a_lost_card_is_named_and_costs_the_others_nothing(make: Callable[..., FakeSmi], tmp_path: Path) -> None:
    smi = make(h200())
    smi.lose(FAULTY)
    smi.kernel_log("[  300.1] NVRM: Xid (PCI:0000:61:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
    judged = judge(tmp_path, gpus=8)
    subject = f"gpu 3 0000:61:00.0 {smi.gpus[FAULTY]['uuid']}"
    assert judged.finding("gpu-lost").subject == subject
    assert "power-cycle" in (judged.finding("gpu-lost").action or "")
    assert judged.finding("xid-79").subject == subject
    assert judged.finding("gpu-count").value == 7
    assert judged.status == "fail"
    lost = judged.result.gpus[FAULTY]
    assert (lost.status, lost.temperature_c, lost.missing["temperature_c"].reason) == ("fail", None, "gpu-lost")
    assert [gpu.status for gpu in judged.result.gpus] == ["ok"] * 3 + ["fail"] + ["ok"] * 4


@pytest.mark.parametrize(
    "words",
    ["Unable to determine the device handle for GPU0000:61:00.0: GPU is lost.  Reboot the system to recover this GPU",
     "Unable to determine the device handle for GPU 0000:61:00.0: Not Found"],
)  # fmt: skip
def test_every_spelling_of_a_lost_card(make: Callable[..., FakeSmi], tmp_path: Path, words: str) -> None:
    make(h200()).lose(FAULTY, words)
    judged = judge(tmp_path)
    assert judged.result.gpus[FAULTY].status == "fail"
    assert judged.result.usable_gpus == 7


def test_one_damaged_row_is_asked_for_again(make: Callable[..., FakeSmi], tmp_path: Path) -> None:
    """What spoils the common answer, a card that is asked alone does not say."""
    smi = make(rtx_pro_6000())
    smi.gpus[FAULTY]["name"] = "NVIDIA RTX, with a comma"
    smi.write()
    judged = judge(tmp_path)
    assert judged.result.gpus[FAULTY].status == "unknown"
    assert sum(gpu.status == "ok" for gpu in judged.result.gpus) == 7
    assert any("-i" in call for call in smi.calls())


def test_fields_that_a_driver_does_not_know_are_not_asked(make: Callable[..., FakeSmi], tmp_path: Path) -> None:
    smi = make(h200())
    gone = {"temperature.gpu.tlimit", "fabric.cliqueId", "clocks_event_reasons.active"}
    smi.fields = [field for field in smi.fields if field not in gone]
    smi.aliases = {name: of for name, of in smi.aliases.items() if of not in gone}
    for gpu in smi.gpus:
        gpu["driver_version"] = "535.54.03"
    smi.write()
    judged = judge(tmp_path)
    assert judged.result.usable_gpus == 8
    # The long answer has them all the same.
    assert judged.result.gpus[0].tlimit_c == 58
    assert any("does not know" in note for note in judged.result.notes)


def test_without_help_what_is_refused_is_dropped(make: Callable[..., FakeSmi], tmp_path: Path) -> None:
    smi = make(h200())
    smi.answer(("--help-query-gpu",), "NVIDIA-SMI has failed because ...\n", 9)
    smi.fields = [field for field in smi.fields if field not in {"gsp.mode.current", "fabric.cliqueId"}]
    smi.write()
    judged = judge(tmp_path)
    assert judged.result.usable_gpus == 8
    assert judged.result.gpus[0].gsp_enabled is None
    assert judged.status == "ok"


_HOST_ERRORS = (
    ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running.\n",
     9, "driver-not-loaded", "fail", "modprobe"),
    ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 590.48\n", 18, "driver-library-mismatch", "fail", "reboot"),
    ("Failed to initialize NVML: Unknown Error\n", 255, "nvml-unknown-error", "fail", "container"),
    ("Failed to initialize NVML: Insufficient Permissions\n", 4, "nvml-not-permitted", "unknown", "group"),
    ("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that the NVIDIA Display Driver is properly installed\n",
     12, "nvml-library-missing", "fail", "install"),
    ("No devices were found\n", 6, "no-devices", "fail", "lspci"),
    ("something nobody has seen\n", 255, "nvidia-smi-failed", "unknown", "dmesg"),
)  # fmt: skip


@pytest.mark.parametrize(("text", "code", "name", "level", "action"), _HOST_ERRORS, ids=[row[2] for row in _HOST_ERRORS])
def test_a_driver_that_cannot_be_asked(  # noqa: PLR0917
    make: Callable[..., FakeSmi], tmp_path: Path, text: str, code: int, name: str, level: str, action: str
) -> None:
    make(h200()).fail(text, code)
    judged = judge(tmp_path, gpus=8)
    finding = judged.finding(name)
    assert finding.level == level
    assert action in (finding.action or "")
    assert any(text.splitlines()[0][:60] in line for line in finding.evidence)
    assert judged.status in {"fail", "unknown"}
    assert judged.result.gpus == ()
    assert judged.result.lspci_gpus is not None
    assert len(judged.result.lspci_gpus) == 8


def test_what_only_lspci_lists_has_no_driver(make: Callable[..., FakeSmi], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = make(h200())
    lost = smi.gpus.pop(FAULTY)
    smi.write()
    smi.lspci(f"{lost['pci.bus_id'][4:].lower()} 3D controller [0302]: NVIDIA Corporation Device [10de:2335] (rev a1)")
    monkeypatch.setattr(collect, "look_around", lambda _: Surroundings())
    judged = judge(tmp_path, gpus=8)
    assert judged.finding("gpu-without-driver").subject == "gpu ? 0000:61:00.0"
    assert judged.finding("gpu-count").level == "fail"
    smi.lspci(f"{lost['pci.bus_id'][4:].lower()} 3D controller [0302]: NVIDIA Corporation Device [10de:2335] (rev ff)")
    assert judge(tmp_path).finding("gpu-lost").level == "fail"
    monkeypatch.setattr(collect, "look_around", lambda _: Surroundings(container="docker"))
    smi.lspci(f"{lost['pci.bus_id'][4:].lower()} 3D controller [0302]: NVIDIA Corporation Device [10de:2335] (rev a1)")
    judged = judge(tmp_path)
    assert judged.finding("gpu-not-here").level == "ok"
    assert judged.status == "ok"


def test_a_driver_that_does_not_speak_says_nothing_of_cards_in_a_container(
    make: Callable[..., FakeSmi], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = make(h200())
    smi.lspci()
    smi.answers.append(((), "Failed to initialize NVML: Driver/library version mismatch\n", 18))
    smi.write()
    monkeypatch.setattr(collect, "look_around", lambda _: Surroundings(container="docker"))
    judged = judge(tmp_path)
    assert judged.status == "fail"
    assert "gpu-not-here" not in {finding.code for finding in judged.findings}


def test_no_gpu_is_skipped_and_nobody_to_ask_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(where, "_MORE_PATH", ())
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    judged = judge(tmp_path)
    assert (judged.status, judged.result.gpus) == ("unknown", ())
    lspci = tmp_path / "empty" / "lspci"
    lspci.write_text("#!/bin/sh\necho '0000:00:00.0 Host bridge [0600]: Intel Corporation 440FX [8086:1237] (rev 02)'\n")
    lspci.chmod(0o755)
    judged = judge(tmp_path)
    assert judged.finding("no-gpus").level == "skipped"
    assert judged.status == "skipped"


# -- hanging


@pytest.mark.parametrize("when", ["--help-query-gpu", "--query-gpu", "--query-compute-apps", "-x"])
@pytest.mark.parametrize("killable", [True, False])
def test_a_driver_that_hangs_is_a_finding_and_is_asked_once(
    make: Callable[..., FakeSmi], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, *, killable: bool
) -> None:
    smi = make(h200())
    monkeypatch.setattr(collect, "HELP_SECONDS", 0.7)
    monkeypatch.setattr(run_smi, "SMI_SECONDS", 0.7)
    with smi.hanging(when, killable=killable):
        begun = time.monotonic()
        judged = judge(tmp_path, gpus=8)
        assert time.monotonic() - begun < 10
        stuck = [call for call in smi.calls() if any(when in word for word in call)]
        assert len(stuck) == 1
        assert smi.calls()[-1] == stuck[0]
        assert len(smi.running()) <= 1
        finding = judged.finding("driver-hangs")
        unkillable = bool(smi.running())
    assert finding.level == ("fail" if unkillable else "unknown")
    assert "did not answer within" in finding.evidence[0]
    assert "dmesg" in (finding.action or "")
    assert judged.status == ("unknown" if not unkillable else "fail")
    if when in {"--query-compute-apps", "-x"}:
        assert [gpu.memory_total_mib for gpu in judged.result.gpus] == [143771.0] * 8


def test_a_program_that_cannot_be_killed_is_left_behind(tmp_path: Path) -> None:
    smi = FakeSmi(tmp_path / "bin", h200(1))
    with smi.hanging(killable=False):
        begun = time.monotonic()
        said = run_smi.ask((str(smi.folder / "nvidia-smi"), "-L"), 0.6)
        assert time.monotonic() - begun < 3
        assert said.how == "timeout"
        if Path("/sys/fs/cgroup/freezer").is_dir() and os.geteuid() == 0:
            assert said.pid is not None
            assert f"pid {said.pid} cannot be killed" in said.why
    assert smi.running() == []


# -- who is on it


def test_who_is_on_which_gpu(make: Callable[..., FakeSmi], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = make(rtx_pro_6000())
    with subprocess.Popen(["sleep", "1000"]) as stranger:
        smi.use(2, stranger.pid, "/opt/train, with commas", "71234 MiB")
        judged = judge(tmp_path)
        stranger.kill()
    gpu = judged.result.gpus[2]
    assert gpu.free is False
    assert f"pid {stranger.pid} (/opt/train, with commas, user " in gpu.busy
    (process,) = gpu.processes
    assert (process.pid, process.memory_mib, process.alive) == (stranger.pid, 71234.0, True)
    assert process.user == occupancy.owner(os.getpid())
    assert judged.status == "ok"
    assert [other.free for other in judged.result.gpus] == [True, True, False] + [True] * 5
    monkeypatch.setattr(collect, "look_around", lambda _: Surroundings())
    judged = judge(tmp_path)
    assert judged.finding("process-gone").value == stranger.pid
    assert judged.status == "degraded"


def test_memory_that_nobody_holds_is_found(make: Callable[..., FakeSmi], tmp_path: Path) -> None:
    smi = make(h200())
    smi.gpus[FAULTY]["memory.used"] = "40000 MiB"
    smi.write()
    judged = judge(tmp_path)
    assert judged.finding("hidden-memory").value == 40000
    gpu = judged.result.gpus[FAULTY]
    assert (gpu.free, gpu.status) == (False, "degraded")
    assert "held by a process that is not shown" in gpu.busy


def test_processes_that_cannot_be_listed_leave_it_open_who_is_there(make: Callable[..., FakeSmi], tmp_path: Path) -> None:
    make(h200()).answer(("--query-compute-apps=gpu_uuid,gpu_bus_id,pid,process_name,used_gpu_memory",), "Insufficient Permissions\n", 4)
    judged = judge(tmp_path)
    assert judged.finding("processes-unknown").level == "unknown"
    assert judged.status == "unknown"
    assert {gpu.free for gpu in judged.result.gpus} == {None}


def test_what_a_saved_table_lacks_is_said_once_and_how_to_get_it(tmp_path: Path) -> None:
    table = b"index, name, temperature.gpu\n0, NVIDIA H100 80GB HBM3, 33\n"
    probe = find("gpu")
    context = RecordingContext(tmp_path / "run", seconds=60.0)
    probe.module.parse(table, probe.Params(), context)
    found = next(one for one in context.findings if one.code == "fan-unknown")
    assert (found.message, found.evidence) == ("fan cannot be told: fan_pct: not-reported", ())
    assert "nvidia-smi -q -x" in (found.action or "")


_LATER = 'here=${0%/*}; case "$*" in *utilization.gpu*) echo x >>"$here/n"; [ "$(wc -l <"$here/n")" -lt 3 ] || sed -i "s/30 %/0 %/g" "$here/state.json";; esac\n'


def test_a_card_that_was_only_woken_by_the_question_is_free(make: Callable[..., FakeSmi], tmp_path: Path) -> None:
    """The rule that active probes and launches wait by: two idle samples in a row, up to four."""
    smi = make(h200())
    smi.gpus[FAULTY]["utilization.gpu"] = "30 %"
    smi.write()
    around(smi, _LATER + 'real "$@"')
    gpu = judge(tmp_path).result.gpus[FAULTY]
    assert (gpu.free, gpu.utilization_samples_pct) == (True, (30.0, 30.0, 0.0, 0.0))


def test_one_card_that_spoils_the_second_sample_leaves_the_others_theirs(make: Callable[..., FakeSmi], tmp_path: Path) -> None:
    smi = make(h200())
    around(smi, 'case "$*" in *nounits*) real "$@" | sed "4s/ 0$/ [Unknown Error]/";; *) real "$@";; esac')
    judged = judge(tmp_path)
    assert [gpu.free for gpu in judged.result.gpus] == [True] * 3 + [None] + [True] * 4


def test_who_is_named_is_not_asked_for_twice(make: Callable[..., FakeSmi], tmp_path: Path) -> None:
    smi = make(h200(1))
    smi.use(0, os.getpid())
    assert judge(tmp_path).result.gpus[0].free is False
    assert not [call for call in smi.calls() if "--format=csv,noheader,nounits" in call]


# -- NVLink


@pytest.mark.parametrize(
    ("links", "code", "level", "value", "threshold"),
    [([True] * 16 + [False] * 2, "nvlink-inactive", "degraded", 16, 18), ([False] * 18, "nvlink-inactive", "fail", 0, 18),
     ([True] * 17, "nvlink-fewer", "degraded", 17, 18)],
)  # fmt: skip
def test_links_that_do_not_work(  # noqa: PLR0917
    make: Callable[..., FakeSmi], tmp_path: Path, links: list[bool], code: str, level: str, value: int, threshold: int
) -> None:
    smi = make(h200())
    smi.nvlinks["3"] = links
    smi.write()
    judged = judge(tmp_path)
    assert judged.bad() == [code]
    finding = judged.finding(code)
    assert (finding.level, finding.value, finding.threshold, finding.unit) == (level, value, threshold, "NVLinks")
    assert finding.subject == f"gpu 3 0000:61:00.0 {smi.gpus[FAULTY]['uuid']}"
    assert "nvidia-smi nvlink -s -i 0000:61:00.0" in (finding.action or "")
    assert [gpu.status for gpu in judged.result.gpus] == ["ok"] * 3 + [level] + ["ok"] * 4
    assert judge(tmp_path, without=("nvlink",)).status == "ok"


def test_no_link_works_on_a_board_that_has_them_and_tells_of_no_fabric(make: Callable[..., FakeSmi], tmp_path: Path) -> None:
    gpus = [{**gpu, "name": "NVIDIA A100-SXM4-80GB", "fabric.state": "N/A", "fabric.status": "N/A"} for gpu in h200(2)]
    for count, level in ((2, "fail"), (1, "ok")):
        smi = make(gpus[:count])
        smi.nvlinks = {"0": [False] * 12, "1": [False] * 12}
        smi.write()
        judged = judge(tmp_path)
        assert [gpu.status for gpu in judged.result.gpus] == [level] * count


def test_links_of_which_nobody_tells(make: Callable[..., FakeSmi], tmp_path: Path) -> None:
    smi = make(h200(2))
    smi.answer(("nvlink", "-s"), "Insufficient Permissions\n", 4)
    judged = judge(tmp_path)
    assert {one.subject for one in judged.findings if one.code == "nvlink-unknown"} == {
        f"gpu {gpu['index']} {gpu['pci.bus_id'][4:].lower()} {gpu['uuid']}" for gpu in smi.gpus
    }
    assert judged.status == "unknown"


def test_cards_without_nvlinks_or_without_a_bridge_are_not_asked_for_them(make: Callable[..., FakeSmi], tmp_path: Path) -> None:
    smi = make(rtx_pro_6000(2))
    assert judge(tmp_path).result.checks["nvlink"] == "skipped"
    smi.nvlinks = {"0": [False] * 4, "1": [False] * 4}
    smi.write()
    judged = judge(tmp_path)
    assert (judged.status, judged.result.checks["nvlink"]) == ("ok", "skipped")


# -- thresholds, checks left out, kernel log


def test_thresholds_of_ones_own(make: Callable[..., FakeSmi], tmp_path: Path) -> None:
    smi = make(h200())
    smi.gpus[FAULTY]["temperature.memory"] = "80"
    smi.write()
    assert judge(tmp_path).status == "ok"
    judged = judge(tmp_path, thresholds={"gpu.memory_temperature_c": 75.0})
    finding = judged.finding("memory-hot")
    assert (finding.value, finding.threshold, finding.unit) == (80, 75, "C")
    assert finding.threshold_source == "your thresholds file"
    with pytest.raises(ValueError, match="there is no threshold"):
        judge(tmp_path, thresholds={"gpu.temprature_c": 75.0})


def test_checks_can_be_left_out(make: Callable[..., FakeSmi], tmp_path: Path) -> None:
    smi = make(h200())
    smi.program("dmesg", "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1")
    smi.program("journalctl", "exit 1")
    smi.gpus[FAULTY]["persistence_mode"] = "Disabled"
    smi.write()
    judged = judge(tmp_path, without=("modes", "siblings", "kernel-log"))
    assert judged.status == "ok"
    assert judged.result.checks["kernel-log"] == "skipped"
    assert judged.result.gpus[FAULTY].checks["modes"] == "skipped"
    with pytest.raises(ValueError, match="there is no check"):
        judge(tmp_path, without=("mode",))


def test_xids_are_pinned_to_their_card(make: Callable[..., FakeSmi], tmp_path: Path) -> None:
    smi = make(h200())
    smi.kernel_log("[  99.0] NVRM: Xid (PCI:0000:61:00): 48, pid=77, name=python, An uncorrectable double bit error (DBE) has been detected")
    judged = judge(tmp_path)
    assert judged.finding("xid-48").subject == f"gpu 3 0000:61:00.0 {smi.gpus[FAULTY]['uuid']}"
    assert judged.result.gpus[FAULTY].status == judged.finding("xid-48").level == "fail"
    assert sum(gpu.status == "ok" for gpu in judged.result.gpus) == 7


def test_an_xid_of_a_program_says_what_to_do_about_the_program(make: Callable[..., FakeSmi], tmp_path: Path) -> None:
    smi = make(h200())
    smi.kernel_log("[  99.0] NVRM: Xid (PCI:0000:61:00): 31, pid=77, name=python, Ch 00000008, intr 10000000. MMU Fault")
    judged = judge(tmp_path)
    finding = judged.finding("xid-31")
    assert (finding.level, judged.status) == ("ok", "ok")
    assert finding.subject == f"gpu 3 0000:61:00.0 {smi.gpus[FAULTY]['uuid']}"
    assert "restart the program" in (finding.action or "")


def test_what_is_said_of_a_card_that_nobody_names_is_not_lost(make: Callable[..., FakeSmi], tmp_path: Path) -> None:
    smi = make(h200())
    smi.gpus.pop(FAULTY)
    smi.write()
    smi.program("nvidia-smi", '"${0%/*}/real" "$@"; case $1 in --query-gpu=index*) echo "GPU is lost.  Reboot the system to recover this GPU";; esac')
    smi.program("real", f'exec {sys.executable} -I -S "${{0%/*}}/smi.py" "$@"')
    judged = judge(tmp_path)
    assert judged.finding("gpu-lost").level == "fail"
    assert judged.status == "fail"
    assert judged.result.usable_gpus == 7


# -- answers that are not what they seem


def around(smi: FakeSmi, script: str) -> None:
    """Put a script before the stand-in, which it reaches as ``real``; ``head`` keeps the first rows of the main answer."""
    (smi.folder / "nvidia-smi").rename(smi.folder / "real")
    smi.program("nvidia-smi", f'real() {{ "${{0%/*}}/real" "$@"; }}\n{script}')


@pytest.mark.parametrize(("ending", "word"), [("exit 255", "status 255"), ("kill -SEGV $$", "signal 11"), ("exit 15", "status 15")])
@pytest.mark.parametrize("rows", [5, 8])
def test_an_answer_that_breaks_off_is_not_ok(make: Callable[..., FakeSmi], tmp_path: Path, ending: str, word: str, rows: int) -> None:
    smi = make(h200())
    smi.program("lspci", "exit 1")
    around(smi, f'case "$*" in *--query-gpu=index*) real "$@" | head -n {rows + 1}; {ending};; *) real "$@";; esac')
    judged = judge(tmp_path)
    assert judged.status == "unknown"
    assert judged.finding("nvidia-smi-failed").evidence[0].startswith(f"{word} after {rows} rows: nvidia-smi --query-gpu=")
    assert [gpu.status for gpu in judged.result.gpus[:rows]] == ["ok"] * rows


def test_cards_that_only_the_long_answer_has_are_there(make: Callable[..., FakeSmi], tmp_path: Path) -> None:
    smi = make(h200())
    smi.program("lspci", "exit 1")
    around(smi, 'case "$*" in *--query-gpu=index*) real "$@" | head -n 6;; *) real "$@";; esac')
    judged = judge(tmp_path)
    assert judged.status == "unknown"
    assert [(gpu.index, gpu.uuid) for gpu in judged.result.gpus] == [(index, gpu["uuid"]) for index, gpu in enumerate(smi.gpus)]
    assert [gpu.temperature_c for gpu in judged.result.gpus] == [27.0 + index for index in range(8)]
    assert smi.gpus[7]["uuid"] in judged.finding("answer-incomplete").evidence[0]


def test_rows_that_are_glued_are_asked_for_alone(make: Callable[..., FakeSmi], tmp_path: Path) -> None:
    smi = make(h200())
    around(smi, 'case "$*" in *--query-gpu=index*-i*|*-i*--query-gpu=index*) real "$@";;\n'
                '*--query-gpu=index*) real "$@" | sed "4{N;s/\\n//}";; *) real "$@";; esac')  # fmt: skip
    judged = judge(tmp_path, gpus=8)
    assert judged.bad() == ["answer-damaged"]
    assert [(gpu.index, gpu.status) for gpu in judged.result.gpus] == [(index, "ok") for index in range(8)]


def test_an_answer_that_comes_twice_is_of_the_same_cards(make: Callable[..., FakeSmi], tmp_path: Path) -> None:
    smi = make(h200())
    around(smi, 'case "$*" in *--query-gpu=index*) real "$@";; esac; real "$@"')
    judged = judge(tmp_path, gpus=8)
    assert judged.status == "ok"
    assert len(judged.result.gpus) == judged.result.usable_gpus == 8
    assert judged.finding("readings-repeated").value == 2


@pytest.mark.parametrize("field", ["index", "uuid", "pci.bus_id"])
def test_two_cards_that_claim_to_be_one_are_not_ok(make: Callable[..., FakeSmi], tmp_path: Path, field: str) -> None:
    smi = make(h200())
    smi.gpus[FAULTY][field] = smi.gpus[2][field]
    smi.lspci()
    smi.write()
    judged = judge(tmp_path)
    assert judged.status == "unknown"
    assert judged.finding("cards-confused").level == "unknown"


@pytest.mark.parametrize("ending", ["exit 0", "exit 14"])
def test_a_warning_about_a_card_counts_although_its_row_is_good(make: Callable[..., FakeSmi], tmp_path: Path, ending: str) -> None:
    smi = make(h200())
    around(smi, f'real "$@"; case "$*" in *--query-gpu=index*) echo "WARNING: infoROM is corrupted at gpu 0000:61:00.0"; {ending};; esac')
    judged = judge(tmp_path, gpus=8)
    assert judged.bad() == ["inforom-corrupted"]
    assert judged.finding("inforom-corrupted").subject == f"gpu 3 0000:61:00.0 {smi.gpus[FAULTY]['uuid']}"
    assert [gpu.status for gpu in judged.result.gpus] == ["ok"] * 3 + ["degraded"] + ["ok"] * 4


def test_a_card_that_answers_only_when_asked_again_is_not_ok(make: Callable[..., FakeSmi], tmp_path: Path) -> None:
    smi = make(h200())
    around(smi, 'real "$@"; case "$*" in *-i*) ;; *--query-gpu=index*) '
                'echo "Unable to determine the device handle for GPU0000:61:00.0: Unknown Error";; esac')  # fmt: skip
    judged = judge(tmp_path, gpus=8)
    assert judged.finding("gpu-lost").level == "degraded"
    assert "asked again it answered" in judged.finding("gpu-lost").message
    assert judged.result.gpus[FAULTY].status == "degraded"


@pytest.mark.parametrize("script", ["exec yes A", "exec /no/such/program", None])
def test_a_program_that_answers_nonsense_says_nothing_about_the_driver(make: Callable[..., FakeSmi], tmp_path: Path, script: str | None) -> None:
    smi = make(h200())
    if script is None:
        (smi.folder / "nvidia-smi").write_bytes(b"\x7fELF of another machine")
    else:
        smi.program("nvidia-smi", script)
    judged = judge(tmp_path)
    assert judged.status == "unknown"
    assert judged.result.gpus == ()
