"""Every capture of a real tool: read to typed values by the one parser that claims it, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import takewhile

import pytest

from probes.lib.gpu.dcgm_diag import parse_dcgm_diag
from probes.lib.gpu.missing import Missing
from probes.lib.gpu.smi_csv import QUERY, askable, help_fields, parse_gpu_csv
from probes.lib.gpu.smi_fields import METRICS
from probes.lib.gpu.smi_identify import GPU, KINDS, identify, parse
from probes.lib.gpu.smi_lists import (
    parse_apps,
    parse_list,
    parse_nvlink,
    parse_retired,
    parse_samples,
    parse_table,
    parse_version,
    version_tuple,
)
from probes.lib.gpu.smi_reading import Answer
from probes.lib.gpu.smi_tree import Refused, parse_q, parse_xml
from tests.support import captures

pytestmark = captures.needs_captures

CLAIMS = {
    "query_gpu_csv": "query_gpu_csv", "query_apps_csv": "query_apps_csv", "query_retired_csv": "query_retired_csv",
    "help_query_gpu": "help_query_gpu", "smi_xml": "smi_xml", "smi_q": "smi_q", "smi_q_page_retirement": "smi_q",
    "smi_list": "smi_list", "smi_version": "smi_version", "smi_table": "smi_table", "nvlink_s": "nvlink_s",
    "dmon": "dmon", "pmon": "pmon", "dcgmi_diag_json": "dcgmi_diag_json",
    # Read elsewhere, and refused here by name.
    "dmesg": "kernel_log", "lspci_nn": "lspci", "fabricmanager_log": "fabricmanager_log", "topo_m": "topo_m",
    "topo_p2p_p": "topo_p2p", "nccl_debug": "nccl_debug", "nccl_tests": "nccl_tests",
    "nccl_tests_json": "nccl_tests_json", "ncclras_json": "ncclras_json", "reference_busbw.csv": "busbw_table",
}  # fmt: skip
"""Which kind a family of captures is."""
EXCEPTIONS = {
    "nvlink_s__gpud-a10.txt": ("empty", "a card without NVLink prints an empty line"),
    "nccl_tests__gcm-failure.txt": ("mpirun_error", "mpirun refused to start: nccl-tests printed nothing"),
}
"""Captures that are not what their name says, and why."""
READ = {"query_gpu_csv", "smi_xml", "smi_q"}


def kind_of(name: str) -> str:
    exception = EXCEPTIONS.get(name)
    return exception[0] if exception else CLAIMS[name.rsplit("/", 1)[-1].split("__", maxsplit=1)[0]]


def of(*families: str) -> list[str]:
    return [name for name in captures.names() if name not in EXCEPTIONS and name.rsplit("/", 1)[-1].split("__")[0] in families]


@pytest.mark.parametrize("name", captures.names())
def test_every_capture_is_what_its_name_says_and_is_claimed_once(name: str) -> None:
    text = captures.read(name)
    kind = identify(text)
    assert kind.name == kind_of(name)
    if kind.name in READ:
        assert kind.reader == GPU
        assert parse(text).readings
    else:
        with pytest.raises(Refused, match=re.escape(kind.name)) as refused:
            parse(text)
        assert kind.meaning in str(refused.value)
        assert kind.reader in str(refused.value)


def test_every_kind_says_who_reads_it_or_why_nobody_does() -> None:
    assert {kind_of(name) for name in captures.names()} <= set(KINDS)
    assert {kind.name for kind in KINDS.values() if kind.reader == GPU} == {*READ, "smi_error"}


def plausible(answer: Answer) -> None:
    """No damage, no garbage, and every metric of its type."""
    assert answer.readings
    assert not answer.troubles
    assert [note for note in answer.notes if not note.startswith("it says ")] == []
    for reading in answer.readings:
        assert reading.damaged is None
        assert not isinstance(reading.bus_id, Missing)
        for name, value in reading.metrics():
            if isinstance(value, Missing):
                assert value.reason in {"not-supported", "not-reported", "deprecated"}, (name, value)


@pytest.mark.parametrize("name", of("query_gpu_csv"))
def test_query_gpu(name: str) -> None:
    text = captures.read(name)
    answer = parse_gpu_csv(text)
    plausible(answer)
    (reading,) = answer.readings
    cells = dict(zip(*(line.split(", ") for line in text.rstrip("\n").split("\n")), strict=True))
    assert reading.memory_total_mib == float(cells["memory.total [MiB]"].split()[0])
    assert reading.index == 0
    assert reading.driver_version == name.split("__")[2]
    if "mig" in name:
        assert reading.mig_enabled is True
        assert reading.utilization_pct == Missing("not-supported", "[N/A]")
        assert reading.remap_pending == Missing("not-supported", "[N/A]")
    else:
        assert isinstance(reading.utilization_pct, float)
    missing = {metric for metric, value in reading.metrics() if isinstance(value, Missing) and value.reason == "not-reported"}
    assert missing == {metric.name for metric in METRICS if not metric.csv}


@pytest.mark.parametrize("name", of("smi_xml"))
def test_xml(name: str) -> None:
    answer = parse_xml(captures.read(name))
    plausible(answer)
    assert answer.complete
    said = {metric for one in answer.readings for metric, value in one.metrics() if not isinstance(value, Missing)}
    assert {"name", "uuid", "bus_id"} <= said
    if "outdated" not in name:
        assert {"memory_total_mib", "temperature_c", "clock_sm_mhz", "pcie_width"} <= said
    if "1070" not in name and "p400" not in name and "outdated" not in name:
        assert {"power_w", "power_limit_w", "power_enforced_limit_w", "power_max_limit_w"} <= said


def test_xml_layouts_that_others_misread() -> None:
    readings = {
        name: parse_xml(captures.read(name)).readings[0]
        for name in of("smi_xml")
    }  # fmt: skip
    power = {name.split("-", 1)[1]: reading.power_w for name, reading in readings.items()}
    assert power["a100-sxm4-v12.xml"] == 67.03, "535: gpu_power_readings/power_draw"
    assert power["rtx-3060-v12.xml"] == 11.60, "570: average_power_draw"
    assert power["rtx-3080-v13.xml"] == 139.62, "a schema that did not exist then"
    assert power["tesla-t4.xml"] == 26.78, "power_readings"
    assert power["gtx-1070-ti.xml"] == Missing("not-supported", "N/A")
    limited = next(reading for name, reading in readings.items() if "3090" in name)
    assert (limited.power_limit_w, limited.power_default_limit_w) == (200.0, 350.0)
    a100 = next(reading for name, reading in readings.items() if "a100" in name)
    assert len(a100.mig_devices) >= 2
    assert (a100.mig_devices[0].gpu_instance, a100.mig_devices[0].memory_total_mib) == (3, 19968.0)
    four = parse_xml(captures.read("smi_xml__pai-nvidia_smi_out_of_order.xml")).readings
    assert [one.minor_number for one in four] == [1, 2, 3, 0]
    assert len({one.bus_id for one in four}) == 4
    assert four[0].ecc_uncorrected_aggregate == 7


@pytest.mark.parametrize("name", of("smi_q"))
def test_q_and_csv_of_one_moment_agree(name: str) -> None:
    answer = parse_q(captures.read(name))
    plausible(answer)
    assert answer.driver_version == name.split("__")[2]
    assert answer.attached_gpus == len(answer.readings) == 1
    twin = name.replace("smi_q__", "query_gpu_csv__")
    if twin not in captures.names():
        return
    (csv,) = parse_gpu_csv(captures.read(twin)).readings
    moving = ("temperature", "tlimit", "power_w", "power_average", "power_instant", "utilization", "clock", "fan", "throttle",
              "pcie_gen", "memory_used", "memory_free", "pstate")  # fmt: skip
    agreed = 0
    for metric, value in csv.metrics():
        other = getattr(answer.readings[0], metric)
        if isinstance(value, Missing) or isinstance(other, Missing) or metric.startswith(moving):
            continue
        agreed += 1
        assert other == value, metric
    assert agreed > 15


def test_q_of_mig_and_retired_pages() -> None:
    (mig,) = parse_q(captures.read("smi_q__h100-mig__590.48.01__load.txt")).readings
    assert [device.gpu_instance for device in mig.mig_devices] == [2, 3, 9, 10]
    assert [device.memory_used_mib for device in mig.mig_devices] == [11091.0, 17.0, 9.0, 9.0]
    bad = parse_q(captures.read("smi_q_page_retirement__bad__azhc.txt"))
    assert [one.retired_pending for one in bad.readings] == [False, True, False, True, False, True, False, True]
    assert [one.retired_double_bit for one in bad.readings] == [5, 61, 0, 0, 0, 45, 0, 56]
    assert bad.readings[1].bus_id == "0002:00:00.0"


@pytest.mark.parametrize("name", of("help_query_gpu"))
def test_help(name: str) -> None:
    fields = help_fields(captures.read(name))
    driver = name.rsplit("__", 1)[1][:3]
    # What --query-gpu of all fields prints as columns; four quoted lines are values of compute_mode.
    assert len(fields) == {"590": 212, "595": 202, "610": 241}[driver]
    known, unknown = askable(QUERY, captures.read(name))
    assert unknown == ()
    assert len(known) == len(QUERY)


@pytest.mark.parametrize("name", of("query_apps_csv"))
def test_apps(name: str) -> None:
    text = captures.read(name)
    found = parse_apps(text)
    assert (found.troubles, found.damaged) == ([], [])
    assert len(found.processes) == text.rstrip("\n").count("\n")
    for process in found.processes:
        assert isinstance(process.pid, int)
        assert isinstance(process.name, str)
        assert process.uuid == "GPU-00000000-0000-0000-0000-000000000000"
        assert isinstance(process.memory_mib, float) is ("win" not in name)


@pytest.mark.parametrize("name", of("query_retired_csv"))
def test_a_row_for_a_cause_is_no_retired_page(name: str) -> None:
    found = parse_retired(captures.read(name))
    assert found.pages == {}
    assert found.damaged == []
    assert found.not_supported == {"GPU-00000000-0000-0000-0000-000000000000"}


@pytest.mark.parametrize("name", of("smi_list"))
def test_list(name: str) -> None:
    found = parse_list(captures.read(name))
    assert found.damaged == []
    assert [gpu.index for gpu in found.gpus] == [0]
    assert len(found.gpus[0].mig_devices) == {"smi_list__h100-mig": 4, "smi_list__h200-mig": 5}.get(name.rsplit("__", 1)[0], 0)


@pytest.mark.parametrize("name", of("smi_version", "smi_table"))
def test_versions(name: str) -> None:
    read: Callable[[str], object] = parse_version if name.startswith("smi_version") else parse_table
    found = read(captures.read(name))
    driver = name.removesuffix(".txt").split("__")[2]
    assert getattr(found, "driver") == driver  # noqa: B009 - either of two readers
    cuda = getattr(found, "cuda")  # noqa: B009
    assert version_tuple(cuda) >= (13,)


@pytest.mark.parametrize("name", of("nvlink_s"))
def test_nvlink(name: str) -> None:
    found = parse_nvlink(captures.read(name))
    assert (found.damaged, found.troubles) == ([], [])
    (gpu,) = found.gpus
    if "mig" in name:
        assert gpu.active is None
        assert gpu.why is not None
        assert gpu.why.reason == "not-supported"
    elif "inactive" in name:
        assert gpu.active == 0
    else:
        assert gpu.active == 18
        assert set(gpu.links.values()) == {26.562}


@pytest.mark.parametrize("name", of("dmon", "pmon"))
def test_samples(name: str) -> None:
    text = captures.read(name)
    found = parse_samples(text)
    assert found.kind == name[:4]
    assert found.damaged == []
    rows = [line for line in text.split("\n") if line and not line.startswith("#")]
    assert len(found.rows) == len(rows)
    head = list(takewhile(lambda word: word, text.split("\n", 1)[0].lstrip("#").split()))
    assert list(found.units) == head
    for row, line in zip(found.rows, rows, strict=True):
        shown = ["-" if isinstance(value, Missing) else str(int(value)) if isinstance(value, float) else str(value)
                 for value in row.values()]  # fmt: skip
        assert shown == line.split()


@pytest.mark.parametrize("name", of("dcgmi_diag_json"))
def test_dcgm(name: str) -> None:
    found = parse_dcgm_diag(captures.read(name))
    assert found.damaged == []
    failed = {(one.entity_id, one.error_ids) for one in found.outcomes if one.status == "fail"}
    if "v4" in name:
        assert failed == {(1, (85,))}
        assert [one.entity_id for one in found.outcomes if one.status == "skipped"] == [1]
        assert found.version == "4.6.0"
    else:
        assert failed == {(None, ()), (1, ()), (2, ()), (3, ())}
