"""Processes, pages, links, versions, samples, error texts and diagnoses: damaged ones too."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.lib.gpu.dcgm_diag import Refused as DcgmRefused
from probes.lib.gpu.dcgm_diag import parse_dcgm_diag
from probes.lib.gpu.missing import Missing
from probes.lib.gpu.smi_csv import MIN_FIELDS, QUERY, askable, parse_gpu_csv, refused_field, without
from probes.lib.gpu.smi_errors import ERRORS, recognise, troubles
from probes.lib.gpu.smi_identify import identify, parse
from probes.lib.gpu.smi_lists import (
    APPS_FIELDS,
    RETIRED_FIELDS,
    NvLinks,
    parse_apps,
    parse_list,
    parse_nvlink,
    parse_retired,
    parse_samples,
    parse_table,
    parse_version,
    same_version,
    version_tuple,
)
from probes.lib.gpu.smi_tree import Refused, parse_q, parse_xml, xml_tree
from tests.support import smi_texts

ONE, TWO = smi_texts.uuid(1), smi_texts.uuid(2)

# Processes


def test_a_process_name_may_hold_commas_and_memory_may_be_unknown() -> None:
    text = (
        f"{ONE}, {smi_texts.bus_id(1)}, 4711, python train.py --sizes 1, 2, 3, 512 MiB\n"
        f"{TWO}, {smi_texts.bus_id(2)}, 4712, [Not Found], [N/A]\n"
        f"{TWO}, {smi_texts.bus_id(2)}, 4713, x, [Insufficient Permissions]\n"
    )
    found = parse_apps(text, APPS_FIELDS)
    assert found.damaged == []
    assert [(one.pid, one.name) for one in found.processes[:1]] == [(4711, "python train.py --sizes 1, 2, 3")]
    assert found.processes[0].memory_mib == 512.0
    assert found.processes[0].bus_id == "0000:2b:00.0"
    assert [one.memory_mib for one in found.processes[1:]] == [
        Missing("not-supported", "[N/A]"), Missing("not-permitted", "[Insufficient Permissions]"),
    ]  # fmt: skip


def test_lines_that_are_no_process_are_not_dropped_in_silence() -> None:
    good = f"{ONE}, {smi_texts.bus_id(1)}, 4711, a, 512 MiB\n"
    for line in ("4711, a", f"{ONE[:-1]}, {smi_texts.bus_id(1)}, 4711, a, 1 MiB", f"{ONE}, x, pid, a, 1 MiB", "hello"):
        found = parse_apps(good + line + "\n", APPS_FIELDS)
        assert (len(found.processes), found.damaged) == (1, [line])
    error = parse_apps("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", APPS_FIELDS)
    assert [one.code for one in error.troubles] == ["driver-not-loaded"]
    cut = parse_apps(good + good[:-5], APPS_FIELDS)
    assert (len(cut.processes), len(cut.damaged), cut.complete) == (1, 1, False)
    assert parse_apps("No running processes found\n", APPS_FIELDS).damaged == []


# Retired pages


def test_pages_are_counted_by_their_addresses() -> None:
    text = (
        "gpu_uuid, retired_pages.address, retired_pages.cause\n"
        f"{ONE}, 0x00000000005a1000, Single Bit ECC\n{ONE}, 0x00000000005a2000, Double Bit ECC\n"
        f"{ONE}, 0x00000000005a3000, Double Bit ECC\n{TWO}, [N/A], Single Bit ECC\n{TWO}, [N/A], Double Bit ECC\n"
        f"{TWO}, [GPU is lost], Double Bit ECC\n{ONE}, 0x1\n"
    )
    found = parse_retired(text)
    assert found.pages == {ONE: {"Single Bit ECC": 1, "Double Bit ECC": 2}}
    assert found.not_supported == {TWO}
    assert len(found.damaged) == 2
    headless = "".join(line + "\n" for line in text.split("\n")[1:4])
    assert parse_retired(headless, RETIRED_FIELDS).pages == found.pages


# Lists, versions


def test_a_list_names_mig_devices_and_errors() -> None:
    found = parse_list(
        f"GPU 0: Test GPU (UUID: {ONE})\n  MIG 3g.40gb     Device  0: (UUID: {TWO.replace('GPU', 'MIG')})\n"
        "Unable to determine the device handle for gpu 0000:2B:00.0: GPU is lost.  Reboot the system\nwhat\n"
    )
    assert [(gpu.index, gpu.name, gpu.uuid) for gpu in found.gpus] == [(0, "Test GPU", ONE)]
    assert [(one.profile, one.index) for one in found.gpus[0].mig_devices] == [("3g.40gb", 0)]
    assert [(one.code, one.bus_id) for one in found.troubles] == [("gpu-lost", "0000:2b:00.0")]
    assert found.damaged == ["what"]


@pytest.mark.parametrize(
    ("text", "driver", "cuda"),
    [
        ("NVIDIA-SMI version : 590.48.01\nDRIVER version : 590.48.01\nCUDA Version : 13.1\n", "590.48.01", "13.1"),
        ("DRIVER version : Deprecated, see KMD version\nKMD version : 610.57.04\nCUDA UMD Version : 13.3\n",
         "610.57.04", "13.3"),
        ("KMD version : 610.57.04\nDRIVER version : 595.80\n", Missing("error", "610.57.04 and 595.80"),
         Missing("not-reported")),
        ("DRIVER version : 59x\nCUDA Version : N/A\n", Missing("error", "59x"), Missing("not-supported", "N/A")),
    ],
)  # fmt: skip
def test_versions(text: str, driver: object, cuda: object) -> None:
    found = parse_version(text)
    assert (found.driver, found.cuda) == (driver, cuda)


@pytest.mark.parametrize(
    ("line", "driver", "cuda"),
    [
        ("| NVIDIA-SMI 430.26       Driver Version: 430.26       CUDA Version: 10.2     |", "430.26", "10.2"),
        ("| NVIDIA-SMI 610.62       KMD Version: 610.62      CUDA UMD Version: 13.3     |", "610.62", "13.3"),
        ("| NVIDIA-SMI 580.10       Driver Version: 580.10     CUDA Version: N/A     |", "580.10", None),
        ("| NVIDIA-SMI 580.10       Driver Version: 580.10     CUDA Version: ERR!    |", "580.10", None),
    ],
)
def test_of_the_table_only_versions_are_read(line: str, driver: str, cuda: str | None) -> None:
    found = parse_table("+------+\n" + line + "\n")
    assert found.driver == driver
    assert found.cuda == cuda if cuda else isinstance(found.cuda, Missing)


def test_versions_agree_as_far_as_both_go() -> None:
    assert same_version("570.124", "570.124.06") is True
    assert same_version("580.178", "580.173.02") is False
    assert same_version("570.124", "unknown") is None
    assert version_tuple("570.124.06") == (570, 124, 6)


# NVLink


def links(text: str) -> NvLinks:
    (gpu,) = parse_nvlink(f"GPU 0: Test GPU (UUID: {ONE})\n" + text).gpus
    return gpu


def test_links_are_counted_only_when_all_of_them_are_known() -> None:
    assert links("\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n\t Link 2: 26.562 GB/s\n").active == 2
    assert links("\t Link 0: inActive\n").active == 0
    assert links("all links are inActive\n").active == 0
    assert links("Device does not have or support Nvlink\n").active is None
    assert links("").active is None
    for text in ("Link 0: [Unknown Error]\n", "Link 0: 26.562\n", "Link 0: 26.562 GB/s", "Link 0: 1 GB/s\nLink 0: 1 GB/s\n",
                 "Link 0: 1 GB/s\n[1,0]<stdout>: Link 1: 1 GB/s\n"):  # fmt: skip
        assert links(text).active is None, text


# dmon and pmon


DMON = "# gpu    pwr  gtemp     sm \n# Idx      W      C      % \n    0     97     38      - \n    1    101     39      8 \n"
PMON = "# gpu   pid   type    sm    command \n# Idx     #    C/G     %    name \n    0     7      C     9    a b \n    1     -      -     -    - \n"


def test_columns_are_found_by_name() -> None:
    dmon = parse_samples(DMON)
    assert dmon.units == {"gpu": "Idx", "pwr": "W", "gtemp": "C", "sm": "%"}
    assert dmon.column("sm", 1) == [8.0]
    assert dmon.column("sm", 0) == []
    assert dmon.rows[0]["sm"] == Missing("not-reported", "-")
    pmon = parse_samples(PMON)
    assert pmon.kind == "pmon"
    assert (pmon.rows[0]["pid"], pmon.rows[0]["command"]) == (7, "a b")
    assert isinstance(pmon.rows[1]["pid"], Missing)


def test_samples_that_lost_something_are_no_samples() -> None:
    assert parse_samples(DMON.replace("    8 ", "")).column("pwr", 1) == []
    assert parse_samples(DMON.rstrip("\n ")).column("pwr", 1) == [], "cut: the last number may have lost a digit"
    assert parse_samples(DMON.split("\n", 1)[1]).rows == []
    assert parse_samples(DMON.replace("101", "ERR!")).column("pwr", 1) == []


# Asking


def test_a_field_that_a_driver_refuses_is_asked_by_its_older_name_then_left_out() -> None:
    answer = 'Field "clocks_event_reasons.active" is not a valid field to query.\n'
    refused = refused_field(answer)
    assert refused == "clocks_event_reasons.active"
    asked = without(("index", refused, "uuid"), refused)
    assert asked == ("index", "clocks_throttle_reasons.active", "uuid")
    assert without(asked, "clocks_throttle_reasons.active") == ("index", "uuid")
    assert without(("index", "fabric.state"), "fabric.state") == ("index",)
    assert refused_field("all right") is None
    old = 'List\n\n"clocks_throttle_reasons.active"\nWhy.\n\n"name" or "gpu_name"\nA "name" or a word.\n\n"0: Default" means\n'
    assert askable(["clocks_event_reasons.active", "name", "fabric.state"], old) == (
        ("clocks_throttle_reasons.active", "name"), ("fabric.state",),
    )  # fmt: skip
    assert askable(QUERY, "") == ((), QUERY), "no help text: nothing is certain"
    assert set(MIN_FIELDS) < set(QUERY)
    assert len(set(QUERY)) == len(QUERY)


# Errors


TEXTS = {
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure": ("driver-not-loaded", "host"),
    "Failed to initialize NVML: Driver/library version mismatch": ("driver-library-mismatch", "host"),
    "Failed to initialize NVML: Unknown Error": ("nvml-unknown-error", "host"),
    "Failed to initialize NVML: Insufficient Permissions": ("nvml-not-permitted", "host"),
    "Failed to initialize NVML: Something New": ("nvml-failed", "host"),
    "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.": ("nvml-library-missing", "host"),
    "No devices were found": ("no-devices", "host"),
    "Unable to determine the device handle for GPU0000:02:00.0: Unknown Error": ("gpu-lost", "gpu"),
    "Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost.  Reboot": ("gpu-lost", "gpu"),
    "Unable to determine the device handle for GPU: Not Found": ("gpu-lost", "gpu"),
    "GPU is lost.  Reboot the system to recover this GPU": ("gpu-lost", "gpu"),
    "GPU requires reset": ("gpu-reset-required", "gpu"),
    'Field "x.y" is not a valid field to query.': ("field-not-known", "query"),
    "Failed to run topology matrix": ("topology-failed", "query"),
    "h: Test CUDA failure common.cu:1 'out of memory'": ("cuda-out-of-memory", "program"),
    "h:1:2 [0] NCCL WARN Cuda failure 'peer mapping resources exhausted'": ("nccl-peer-mapping", "program"),
    "ncclUnhandledCudaError: unhandled cuda error": ("nccl-error", "program"),
    "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-abc (size 1)": ("nccl-shared-memory", "host"),
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=X)": ("collective-timeout", "program"),
    "Exception (either an error or timeout) detected by watchdog at work: 808, last": ("collective-timeout", "program"),
    "CUDA error: uncorrectable ECC error encountered": ("cuda-ecc", "gpu"),
    "CUDA error: an illegal memory access was encountered": ("cuda-illegal-access", "program"),
    "RuntimeError: system not yet initialized": ("cuda-not-initialized", "host"),
    "CUDA driver version is insufficient for CUDA runtime version": ("cuda-driver-too-old", "host"),
    "no kernel image is available for execution on the device": ("cuda-no-kernel-image", "program"),
    "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30": ("switch-fault", "host"),
    "AER: Multiple Uncorrected (Fatal) error received": ("pcie-error", "host"),
    "31.5 Gb/s available PCIe bandwidth, limited by 2.5 GT/s PCIe x16 link at 0000:00:01.0": ("pcie-limited", "gpu"),
}


@pytest.mark.parametrize(("text", "expected"), TEXTS.items())
def test_error_texts_have_a_meaning_a_scope_and_an_action(text: str, expected: tuple[str, str]) -> None:
    trouble = recognise(text)
    assert trouble is not None
    assert (trouble.code, trouble.scope) == expected
    assert trouble.meaning
    assert trouble.action
    assert trouble.level in {"fail", "degraded", "unknown"}
    assert trouble.bus_id == ("0000:02:00.0" if "02:00.0" in text else None)


def test_what_is_no_error_is_none() -> None:
    assert recognise("0, GPU-1, Test GPU, 41") is None
    assert recognise("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 11012, Non-fatal, Link 30") is None
    assert troubles(["", "all is well", "GPU requires reset"])[0].code == "gpu-reset-required"
    assert {known.scope for known in ERRORS} == {"gpu", "host", "query", "program"}


def test_an_answer_that_is_only_an_error_is_read_as_one() -> None:
    text = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95\n"
    assert identify(text).name == "smi_error"
    answer = parse(text)
    assert answer.readings == []
    assert answer.troubles[0].code == "driver-library-mismatch"
    assert parse_gpu_csv(text, QUERY).troubles[0].code == "driver-library-mismatch"
    assert parse_gpu_csv(text, QUERY).readings == []


# XML that means harm, and things that are no XML


@pytest.mark.parametrize(
    "text",
    [
        '<!DOCTYPE x [<!ENTITY a "aaaa">]><nvidia_smi_log><gpu id="0000:01:00.0"><uuid>&a;</uuid></gpu></nvidia_smi_log>',
        '<!DOCTYPE x SYSTEM "file:///etc/passwd" [<!ENTITY % p SYSTEM "http://x/">%p;]><nvidia_smi_log/>',
        '<!DOCTYPE a><!DOCTYPE b><nvidia_smi_log/>',
        "<other/>", "", "<nvidia_smi_log>",
        "<nvidia_smi_log>" + "<a>" * 100 + "</a>" * 100 + "</nvidia_smi_log>",
        "<nvidia_smi_log>" + "<a/>" * 900_000 + "</nvidia_smi_log>",
        "<nvidia_smi_log>" + " " * (17 << 20) + "</nvidia_smi_log>",
    ],
    ids=["entity", "parameter entity", "two doctypes", "other root", "empty", "open", "deep", "many", "long"],
)  # fmt: skip
def test_xml_that_may_do_harm_is_refused(text: str) -> None:
    with pytest.raises(Refused):
        parse_xml(text)


def test_a_document_type_is_never_looked_up() -> None:
    text = smi_texts.xml(smi_texts.cards(1)).replace("nvsmi_device_v12.dtd", "file:///nowhere/x.dtd")
    assert len(parse_xml(text).readings) == 1
    assert xml_tree(text).name == "nvidia_smi_log"


def test_a_count_that_does_not_fit_is_said() -> None:
    answer = parse_xml(smi_texts.xml(smi_texts.cards(7), attached=8))
    assert answer.notes == ["it says 8 GPUs and shows 7"]
    assert answer.attached_gpus == 8


def test_processes_and_contradictions_in_xml() -> None:
    process = (
        "<processes><process_info><gpu_instance_id>N/A</gpu_instance_id><pid>42</pid><type>C</type>"
        "<process_name>a, b</process_name><used_memory>5 MiB</used_memory></process_info></processes>"
    )
    text = smi_texts.xml(smi_texts.cards(1))
    with_process = text.replace("<processes>\n\t\t</processes>", process)
    (found,) = parse_xml(with_process).processes
    assert (found.pid, found.name, found.memory_mib, found.bus_id) == (42, "a, b", 5.0, "0000:1b:00.0")
    twice = text.replace("<gpu_temp>30 C</gpu_temp>", "<gpu_temp>30 C</gpu_temp><gpu_temp>90 C</gpu_temp>")
    assert parse_xml(twice).readings[0].temperature_c == Missing("error", "30 C and 90 C")
    other = text.replace('<gpu id="00000000:1B:00.0">', '<gpu id="00000000:1C:00.0">')
    assert isinstance(parse_xml(other).readings[0].bus_id, Missing)
    more = smi_texts.cards(1)
    more[0].cells["memory.used"] = "99999999 MiB"
    assert isinstance(parse_xml(smi_texts.xml(more)).readings[0].memory_used_mib, Missing), "more than it has"


def test_q_with_an_error_among_its_gpus() -> None:
    text = smi_texts.q(smi_texts.cards(2)).replace(
        f"GPU {smi_texts.bus_id(1)}\n",
        f"Unable to determine the device handle for GPU {smi_texts.bus_id(3)}: Unknown Error\nGPU {smi_texts.bus_id(1)}\n",
    )
    answer = parse_q(text)
    assert [one.bus_id for one in answer.troubles] == ["0000:4b:00.0"]
    assert len(answer.readings) == 2
    with pytest.raises(Refused):
        parse_q("GPU 00000000:1B:00.0\n")


# dcgmi


def test_a_test_of_dcgm_that_did_not_run_has_not_passed() -> None:
    results = [
        {"status": "Pass", "entity_group": "GPU", "entity_id": 0},
        {"status": "Skip", "entity_group": "GPU", "entity_id": 1},
        {"status": "Splendid", "entity_group": "GPU", "entity_id": 2},
        {"nothing": 1},
    ]
    tests = [{"name": "memory", "results": results}, {"name": "empty", "results": []}]
    root = {"DCGM Diagnostic": {"test_categories": [{"category": "Hardware", "tests": tests}]}}
    found = parse_dcgm_diag("Successfully ran diagnostic\n" + json.dumps(root))
    assert [(one.entity_id, one.status) for one in found.outcomes] == [(0, "ok"), (1, "skipped"), (2, "unknown")]
    assert len(found.damaged) == 2
    for text in ("", "{}", "[1]", json.dumps(root)[:-3], "[" * 100000, '{"DCGM Diagnostic": 1}'):
        with pytest.raises(DcgmRefused):
            parse_dcgm_diag(text)


@given(st.text(max_size=200))
def test_no_text_breaks_these_parsers(text: str) -> None:
    for reader in (parse_apps, parse_retired, parse_list, parse_version, parse_table, parse_nvlink, parse_samples):
        reader(text)
    parse_apps(text, APPS_FIELDS)
    parse_retired(text, RETIRED_FIELDS)
    recognise(text)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", "empty"), ("  \n", "empty"), ("hello world\n", "unknown"),
        (smi_texts.csv(smi_texts.cards(2)), "query_gpu_csv"), (smi_texts.xml(smi_texts.cards(2)), "smi_xml"),
        (smi_texts.q(smi_texts.cards(2)), "smi_q"), (DMON, "dmon"), (PMON, "pmon"),
        (f"GPU 0: Test GPU (UUID: {ONE})\n", "smi_list"),
        (f"GPU 0: Test GPU (UUID: {ONE})\n\t Link 0: 26.562 GB/s\n", "nvlink_s"),
        ("index, name\n0, Test GPU\n", "query_gpu_csv"),
        ("\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPIX\t0-63\t0\n", "topo_m"),
        (" \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tCNS\tX\t\n", "topo_p2p"),
        ("[  1.0] NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.\nx\ny\nz\n", "kernel_log"),
        # Its words are those of nvidia-smi as well; alone it is no answer of it.
        ("[  1.0] NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.\n", "kernel_log"),
        ("kernel: nvidia-nvswitch0: SXid (PCI:0000:c4:00.0): 12028, GPU has fallen off the bus\n", "kernel_log"),
    ],
)  # fmt: skip
def test_what_a_text_is(text: str, kind: str) -> None:
    assert identify(text).name == kind


def test_what_is_read_live_is_refused_with_the_command_that_reads_it() -> None:
    with pytest.raises(Refused, match="this is a kernel log") as caught:
        parse("[  1.0] NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.\n")
    assert caught.value.hint == "rdiag gpu --host HOST"
