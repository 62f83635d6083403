"""``rdiag gpu`` as a person starts it: on this machine, behind a real sshd with zsh, and on saved output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import Ran, rdiag
from tests.support.fake_smi import FakeSmi, Gpu, h200, rtx_pro_6000, to_xml
from tests.support.gpu_faults import FAULTS, FAULTY, csv_text, plant
from tests.support.sshd import TestSshd

SHOWN = {"remap pending", "uncorrected ecc", "power brake", "link narrow", "fabric not started", "recovery reboot"}


class Host:
    """A host with a driver, and ``rdiag`` in front of it."""

    def __init__(self, smi: FakeSmi, home: Path, name: str, inventory: Path, path: str) -> None:
        self.smi, self._home, self._name, self._inventory, self._path = smi, home, name, inventory, path

    def rdiag(self, *arguments: str) -> Ran:
        return rdiag("gpu", *arguments, "-H", self._name, "-i", str(self._inventory), home=self._home, PATH=self._path)


@contextmanager
def a_host(kind: str, gpus: list[Gpu], tmp_path: Path, start_sshd: Callable[..., TestSshd]) -> Iterator[Host]:
    smi = FakeSmi(tmp_path / "driver", gpus)
    smi.lspci()
    smi.kernel_log()
    inventory = tmp_path / "hosts.yaml"
    defaults = f"defaults: {{environment: {{python: {sys.executable}}}}}\n"
    if kind == "local":
        inventory.write_text(defaults + "hosts:\n  box: {transport: local, gpus: 8}\n")
        yield Host(smi, tmp_path, "box", inventory, smi.path)
        return
    with start_sshd(shell=kind, env={"PATH": smi.path}) as server:
        inventory.write_text(
            defaults + f"hosts:\n  box: {{address: 127.0.0.1, port: {server.port}, user: {server.user}, gpus: 8,\n"
            f"    identity_file: {server.identity_file}, known_hosts: {server.known_hosts}}}\n"
        )
        yield Host(smi, tmp_path, "box", inventory, "/usr/bin:/bin")


@pytest.mark.parametrize("kind", ["local", "zsh"])
def test_healthy_and_broken_on_a_host(kind: str, tmp_path: Path, start_sshd: Callable[..., TestSshd]) -> None:
    with a_host(kind, h200(), tmp_path, start_sshd) as host:
        ran = host.rdiag("--json")
        assert ran.code == 0, ran.out + ran.err
        assert ran.json["status"] == "ok"
        assert ran.json["result"]["expected_gpus"] == 8
        assert [gpu["status"] for gpu in ran.json["result"]["gpus"]] == ["ok"] * 8
        for fault in FAULTS:
            if fault.name not in SHOWN:
                continue
            host.smi.gpus = h200()
            plant(host.smi, fault)
            ran = host.rdiag("--json")
            assert ran.code == 1
            (finding,) = [one for one in ran.json["findings"] if one["code"] == fault.code]
            assert finding["level"] == ran.json["status"] == fault.level
            assert finding["subject"] == f"gpu 3 0000:61:00.0 {host.smi.gpus[FAULTY]['uuid']}"
            assert fault.action in finding["action"]


@pytest.mark.parametrize(("kind", "killable"), [("local", True), ("zsh", False)])
def test_a_driver_that_hangs_ends_in_a_finding(
    kind: str, tmp_path: Path, start_sshd: Callable[..., TestSshd], *, killable: bool
) -> None:
    with a_host(kind, rtx_pro_6000(), tmp_path, start_sshd) as host, host.smi.hanging(killable=killable):
        ran = host.rdiag("--json")
        assert ran.code in {1, 10}, ran.out + ran.err
        (finding,) = [one for one in ran.json["findings"] if one["code"] == "driver-hangs"]
        assert "did not answer within 5 s" in finding["evidence"][0]
        assert len(host.smi.calls()) == 1
        assert ran.json["result"]["gpus"] == []
        assert len(ran.json["result"]["lspci_gpus"]) == 8
        if killable:
            assert host.rdiag().out.startswith("box: gpu: unknown - nobody can tell how many of 8 GPUs are usable")


def test_for_people_the_verdict_comes_first(tmp_path: Path, start_sshd: Callable[..., TestSshd]) -> None:
    with a_host("local", h200(), tmp_path, start_sshd) as host:
        healthy = host.rdiag()
        lines = healthy.out.splitlines()
        assert lines[0].startswith("box: gpu: ok - 8 of 8 GPUs usable")
        assert lines[1].split()[:3] == ["gpu", "bus", "id"]
        assert [line.split()[:2] for line in lines[2:10]] == [[str(index), gpu["pci.bus_id"][4:].lower()] for index, gpu in enumerate(h200())]
        host.smi.lose(FAULTY)
        broken = host.rdiag().out.splitlines()
    assert broken[0].startswith("box: gpu: fail - 7 of 8 GPUs usable")
    assert broken[1].startswith("fail     gpu 3 0000:61:00.0")
    assert sum(line.split()[:1] == [str(index)] for index in range(8) for line in broken) == 8


def test_the_first_line_does_not_contradict_the_findings(tmp_path: Path, start_sshd: Callable[..., TestSshd]) -> None:
    with a_host("local", h200(), tmp_path, start_sshd) as host:
        host.smi.gpus[5]["gpu_recovery_action"] = "Reset"
        host.smi.gpus[6]["remapped_rows.pending"] = "Yes"
        host.smi.write()
        host.smi.kernel_log("[  300.1] NVRM: Xid (PCI:0000:61:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
        told, answer = host.rdiag(), host.rdiag("--json").json
    first = "box: gpu: fail - 6 of 8 GPUs usable; 2 failed (1 recovery-action, 1 xid-79); 1 degraded (remap-pending)"
    assert " ".join(told.out.split()).startswith(first)
    assert answer["result"]["usable_gpus"] == 6
    (count,) = [one for one in answer["findings"] if one["code"] == "gpu-count"]
    assert (count["level"], count["value"], "usable" in str(count)) == ("ok", 8, False)


def test_who_says_how_many_gpus_there_should_be(tmp_path: Path, start_sshd: Callable[..., TestSshd]) -> None:
    with a_host("local", h200(7), tmp_path, start_sshd) as host:
        for arguments, source, action in (
            ((), "gpus in hosts.yaml", "correct gpus in hosts.yaml"), (("--gpus", "9"), "gpus given for this run", "--gpus"),
            (("--gpus", "7"), "gpus given for this run", None), (("--gpus", "6"), "gpus given for this run", "--gpus"),
        ):  # fmt: skip
            (count,) = [one for one in host.rdiag("--json", *arguments).json["findings"] if one["code"] == "gpu-count"]
            assert count["threshold_source"] == source
            assert action is None or action in count["action"]
            assert source == "gpus in hosts.yaml" or "hosts.yaml" not in str(count)


def test_a_host_without_nvidia_smi_prints_no_screen_of_field_names(tmp_path: Path) -> None:
    smi = FakeSmi(tmp_path / "driver", h200())
    smi.lspci()
    smi.kernel_log()
    (smi.folder / "nvidia-smi").unlink()
    for command in ("gpu", "topo"):
        told = rdiag(command, home=tmp_path, PATH=f"{smi.folder}:/usr/bin:/bin")
        answer = rdiag(command, "--json", home=tmp_path, PATH=f"{smi.folder}:/usr/bin:/bin")
        (line,) = [line for one in answer.json["findings"] for line in one["evidence"] if line.startswith("nvidia-smi --query-gpu")]
        assert line.endswith(": not on the PATH")
        assert len(line) > 100
        shown = " ".join(told.out.split())
        assert "nvidia-smi --query-gpu=index,uuid,pci.bus_id,...: not on" in shown or "pci.bus_id,... --format" in shown, told.out
        assert "GPUNone" not in shown


def test_a_baseline_tells_what_changed(tmp_path: Path, start_sshd: Callable[..., TestSshd]) -> None:
    with a_host("local", h200(), tmp_path, start_sshd) as host:
        saved = host.rdiag("--save-baseline", "--json").json
        assert Path(saved["baseline"]["saved"]).is_file()
        host.smi.lose(FAULTY)
        failed = host.rdiag("--save-baseline", "--json").json
        assert "baseline" not in failed
        assert [one["message"] for one in failed["findings"] if one["code"] == "baseline-not-saved"] == [
            "no baseline is saved: 1 of 8 GPUs have failed; an older one stays"
        ]
        host.smi.lost.clear()
        host.smi.write()
        same = host.rdiag("--json")
        assert (same.code, same.json["baseline"]["differences"]) == (0, [])
        for gpu in host.smi.gpus:
            gpu["power.limit"] = gpu["enforced.power.limit"] = gpu["power.default_limit"] = "600.00 W"
            gpu["driver_version"] = "595.10"
        host.smi.write()
        ran = host.rdiag("--json")
        told = " ".join(host.rdiag().out.split())
    assert told.startswith("box: gpu: degraded - 8 of 8 GPUs usable; 8 changes for the worse since the baseline (")
    assert told.count("power_limit_w was 700.0 and is 600.0") == 1
    assert ran.code == 1
    changed = {one["key"]: (one["old"], one["new"]) for one in ran.json["baseline"]["differences"]}
    assert changed["driver_version"] == ("590.48.01", "595.10")
    assert changed[f"gpus[{h200()[0]['uuid']}].power_limit_w"] == (700.0, 600.0)
    changes = [one for one in ran.json["findings"] if one["code"] == "changed-since-baseline"]
    assert sorted({one["level"] for one in changes}) == ["degraded", "ok"]
    assert all("baseline of box, saved" in one["threshold_source"] for one in changes)


def test_thresholds_are_checked_before_anything_is_contacted(tmp_path: Path) -> None:
    smi = FakeSmi(tmp_path / "driver", h200())
    mine = tmp_path / "mine.yaml"
    for text, words in (
        ("gpu.temprature_c: 80\n", "mine.yaml:1:19: there is no threshold 'gpu.temprature_c'"),
        ("gpu:\n  temperature_c: hot\n", "mine.yaml:2:18: the threshold gpu.temperature_c must be a number"),
        ("- 1\n", "a mapping of thresholds is expected"),
    ):
        mine.write_text(text)
        ran = rdiag("gpu", "--thresholds", str(mine), home=tmp_path, PATH=smi.path)
        assert ran.code == 3
        assert words in ran.err
    assert smi.calls() == []


def test_thresholds_of_ones_own_decide(tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps({"gpu": {"memory_temperature_c": 30}}))
    (tmp_path / "smi.csv").write_text(csv_text(h200()))
    ran = rdiag("gpu", "--parse", str(tmp_path / "smi.csv"), "--thresholds", str(mine), "--json", home=tmp_path)
    assert ran.code == 1
    assert {one["threshold_source"] for one in ran.json["findings"] if one["code"] == "memory-hot"} == {"your thresholds file"}


# -- saved output


@pytest.mark.parametrize("layout", ["csv", "xml"])
def test_saved_output_is_judged_without_a_host(layout: str, tmp_path: Path) -> None:
    gpus = h200()
    gpus[FAULTY]["remapped_rows.failure"] = "Yes"
    file = tmp_path / "saved"
    file.write_text(csv_text(gpus) if layout == "csv" else to_xml(gpus, []))
    ran = rdiag("gpu", "--parse", str(file), "--gpus", "8", "--json", home=tmp_path)
    assert ran.code == 1, ran.err
    answer: dict[str, Any] = ran.json
    assert (answer["host"], answer["probe"], answer["run_id"], answer["status"]) == ("-", "gpu", "", "fail")
    assert set(answer) == {"schema_version", "host", "probe", "run_id", "status", "result", "findings", "timing"}
    assert [gpu["index"] for gpu in answer["result"]["gpus"]] == list(range(8))
    (finding,) = [one for one in answer["findings"] if one["level"] == "fail"]
    assert finding["subject"] == f"gpu 3 0000:61:00.0 {gpus[FAULTY]['uuid']}"


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "empty"), ("hello\n", "saved: "), ("GPU0\tGPU1\n", "saved: "), ("<nvidia_smi_log><gpu>", "")],
)
def test_what_is_no_answer_about_gpus_is_refused_or_unknown(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "saved"
    file.write_text(text)
    ran = rdiag("gpu", "--parse", str(file), "--json", home=tmp_path)
    assert ran.code in {1, 3, 10}
    assert words in ran.out + ran.err


def test_parse_takes_no_host(tmp_path: Path) -> None:
    (tmp_path / "saved").write_text(csv_text(h200()))
    ran = rdiag("gpu", "--parse", str(tmp_path / "saved"), "-H", "local", home=tmp_path)
    assert ran.code == 2
    assert "--parse judges a file" in ran.err


def test_a_check_that_does_not_exist_is_named(tmp_path: Path) -> None:
    ran = rdiag("gpu", "--without", "kernel-logs", home=tmp_path)
    assert ran.code == 2
    assert "kernel-log" in ran.err


# -- NVML

_PYNVML = '''
class NVMLError(Exception):
    def __init__(self, value):
        self.value = value
        super().__init__("error %d" % value)
nvmlMemory_v2 = 2
class Thing:
    def __init__(self, **fields): self.__dict__.update(fields)
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 3
def nvmlSystemGetDriverVersion(): return "590.48.01"
def nvmlDeviceGetHandleByIndex(index):
    if index == 1: raise NVMLError(15)
    return index
def nvmlDeviceGetUUID(h): return "GPU-0000000%d-0000-0000-0000-000000000000" % h
def nvmlDeviceGetPciInfo(h): return Thing(busId=b"00000000:1%d:00.0" % h)
def nvmlDeviceGetName(h): return "NVIDIA H200"
def nvmlDeviceGetMemoryInfo(h, version): return Thing(total=143771 << 20, used=5 << 20, reserved=616 << 20, free=143150 << 20)
def nvmlDeviceGetUtilizationRates(h): return Thing(gpu=3, memory=0)
def nvmlDeviceGetTemperature(h, kind):
    if h == 2: raise NVMLError(4)
    return 41
def nvmlDeviceGetRemappedRows(h): return [0, 0, h == 0, False]
def nvmlDeviceGetEccMode(h): raise NVMLError(3)
def nvmlDeviceGetComputeRunningProcesses(h): return []
'''


def test_nvml_is_asked_where_the_environment_has_it(tmp_path: Path) -> None:
    """A stand-in for nvidia-ml-py; one card is lost, one call is not permitted, and neither costs the others anything."""
    from probes.lib.gpu import collect

    (tmp_path / "pynvml.py").write_text(_PYNVML)
    sys.path.insert(0, str(tmp_path))
    try:
        seen = collect.Seen()
        collect._nvml(seen, 30.0)
    finally:
        sys.path.remove(str(tmp_path))
    assert seen.source == "nvml"
    first, lost, third = seen.readings
    assert (first.index, first.bus_id, first.memory_used_mib, first.temperature_c) == (0, "0000:10:00.0", 5.0, 41.0)
    assert (first.remap_pending, third.remap_pending) == (True, False)
    assert third.temperature_c.reason == "not-permitted"  # type: ignore[union-attr]
    assert first.ecc_enabled.reason == "not-supported"  # type: ignore[union-attr]
    assert (lost.index, lost.temperature_c.reason) == (1, "gpu-lost")  # type: ignore[union-attr]
    assert seen.load[str(first.uuid)] == [3.0, 3.0]


def test_a_folder_of_ones_own_is_not_taken_for_the_shipped_code(tmp_path: Path) -> None:
    (tmp_path / "probes").mkdir()
    (tmp_path / "probes" / "__init__.py").write_text("raise RuntimeError('not this one')\n")
    (tmp_path / "saved").write_text(csv_text(h200()))
    ran = rdiag("gpu", "--parse", "saved", "--json", home=tmp_path)
    assert ran.code == 0, ran.err


def test_xids_are_set_by_options_and_checked_before_anything_is_contacted(tmp_path: Path, start_sshd: Callable[..., TestSshd]) -> None:
    with a_host("local", h200(), tmp_path, start_sshd) as host:
        host.smi.kernel_log("[  300.1] NVRM: Xid (PCI:0000:61:00): 92, High single-bit ECC error rate")
        assert host.rdiag("--json", "--xid-fail", "92").json["status"] == "fail"
        ran = host.rdiag("--json", "--xid-ok", "92", "--xid-ok", "63")
        assert (ran.code, ran.json["status"]) == (0, "ok"), ran.out
        calls = len(host.smi.calls())
        both = host.rdiag("--xid-ok", "63", "--xid-fail", "63")
        assert both.code == 2
        assert "Xid 63 is both" in both.err
        assert len(host.smi.calls()) == calls


def test_the_table_is_refused_by_name_and_what_to_save_is_said(tmp_path: Path) -> None:
    table = "| NVIDIA-SMI 590.48.01              Driver Version: 590.48.01      CUDA Version: 13.1     |\n"
    (tmp_path / "table.txt").write_text("Sun Nov 29 12:00:00 2026\n+----+\n" + table + "|----+----+----|\n")
    (tmp_path / "topo.txt").write_text("\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \tSYS\t0-3\t0\t\tN/A\n")
    ran = rdiag("gpu", "--parse", "table.txt", home=tmp_path)
    assert ran.code == 3
    assert "table.txt: this is the table of nvidia-smi" in ran.err
    assert "hint: save it on the host: nvidia-smi -q -x > FILE" in ran.err
    assert "hint: rdiag topo --parse FILE" in rdiag("gpu", "--parse", "topo.txt", home=tmp_path).err
    (tmp_path / "dmesg.txt").write_text("[  1.0] NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.\nx\ny\nz\n")
    assert "rdiag gpu --host HOST" in rdiag("gpu", "--parse", "dmesg.txt", home=tmp_path).err
    ran = rdiag("topo", "--parse", "table.txt", home=tmp_path)
    assert (ran.code, "hint: save it on the host: nvidia-smi topo -m > FILE" in ran.err) == (3, True)


_JUNK = ("foo, bar, baz, qux, 1", "foo, bar", "hello world, this, is, junk, and, more, text, here", "---, ---, ---, ---, ---")


def test_rows_that_are_none_are_counted_and_are_no_gpus(tmp_path: Path) -> None:
    fields = ("index", "name", "uuid", "pci.bus_id", "temperature.gpu")
    rows = [", ".join(gpu[field] for field in fields) for gpu in h200(2)]
    (tmp_path / "saved").write_text("\n".join([", ".join(fields), rows[0], *_JUNK, rows[1], ""]))
    ran = rdiag("gpu", "--parse", "saved", "--json", home=tmp_path)
    assert (ran.code, ran.json["status"]) == (10, "unknown")
    assert [gpu["index"] for gpu in ran.json["result"]["gpus"]] == [0, 1]
    (told,) = [one for one in ran.json["findings"] if one["code"] == "answer-damaged"]
    assert (told["level"], told["value"], told["evidence"]) == ("unknown", 4, [f"not a row: {row}" for row in _JUNK])
    assert "gpu ?" not in ran.out
    whole = csv_text(h200()).splitlines()
    (tmp_path / "saved").write_text("\n".join([*whole, "foo, bar", ""]))
    ran = rdiag("gpu", "--parse", "saved", "--gpus", "8", "--json", home=tmp_path)
    assert (ran.code, len(ran.json["result"]["gpus"])) == (10, 8)


def test_a_row_of_errors_is_a_gpu(tmp_path: Path) -> None:
    fields = ("index", "uuid", "pci.bus_id", "name", "temperature.gpu")
    row = ", ".join(h200(1)[0][field] for field in fields)
    (tmp_path / "saved").write_text("\n".join([", ".join(fields), row, ", ".join(["[Unknown Error]"] * 5), ""]))
    assert len(rdiag("gpu", "--parse", "saved", "--json", home=tmp_path).json["result"]["gpus"]) == 2


def test_what_a_sparse_table_lacks_takes_one_line_a_check(tmp_path: Path) -> None:
    rows = "".join(f"{index}, NVIDIA H200, {30 + index}\n" for index in range(8))
    (tmp_path / "saved").write_text("index, name, temperature.gpu\n" + rows)
    ran = rdiag("gpu", "--parse", "saved", home=tmp_path)
    lines = ran.out.splitlines()
    assert (ran.code, len(lines) < 40) == (10, True), ran.out
    assert lines[0].startswith("saved: gpu: unknown - 8 of 8 GPUs usable; 8 unknown")
    assert sum("remap: remap_failure" in line for line in lines) == 1
    assert sum("next: it is not in what was printed; nvidia-smi -q -x" in line for line in lines) == 1
    answer = rdiag("gpu", "--parse", "saved", "--json", home=tmp_path).json
    assert [(one["subject"], one["value"], one["unit"]) for one in answer["findings"] if one["code"] == "remap-unknown"] == [(None, 8, "GPUs")]
    assert {gpu["checks"]["remap"] for gpu in answer["result"]["gpus"]} == {"unknown"}


def test_files_as_they_are_saved_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "saved"
    for text in (csv_text(h200()), to_xml(h200(), [])):
        for codec in ("utf-16-le", "utf-16-be"):
            file.write_bytes(("\ufeff" + text).encode(codec))
            ran = rdiag("gpu", "--parse", str(file), "--gpus", "8", "--json", home=tmp_path)
            assert (ran.code, ran.json["status"]) == (0, "ok"), ran.out + ran.err
    once = csv_text(h200())
    again = [{**gpu, "remapped_rows.pending": "Yes"} if gpu["index"] == "3" else gpu for gpu in h200()]
    file.write_text(once + csv_text(again).partition("\n")[2])
    ran = rdiag("gpu", "--parse", str(file), "--gpus", "8", "--json", home=tmp_path)
    assert (ran.code, len(ran.json["result"]["gpus"])) == (1, 8)
    assert [gpu["status"] for gpu in ran.json["result"]["gpus"]].index("degraded") == 3
    file.write_text(to_xml(h200(), []) * 2)
    ran = rdiag("gpu", "--parse", str(file), home=tmp_path)
    assert ran.code == 3
    assert "2 answers, one after the other" in ran.err
