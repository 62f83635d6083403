from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from probes import env
from probes.lib.env import machine, software, variables
from probes.lib.env.judgement import Judge, capability, runs_on, version_tuple
from probes.lib.env.redact import Redactor
from remote_diag.findings import Finding
from remote_diag.paths import shipped_probes
from remote_diag.probe import load
from remote_diag.testing import Leave, RecordingContext

UUID = "GPU-1a2b3c4d-1111-2222-3333-444455556666"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, and no settings of whoever runs the tests."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    for name in list(os.environ):
        if variables.allowed(name):
            monkeypatch.delenv(name)
    return folder


def look(tmp_path: Path, **params: Any) -> tuple[env.Result, dict[str, Finding]]:
    context = RecordingContext(tmp_path / "scratch")
    result = env.run(env.Params(**{"torch": False, **params}), context)
    load(shipped_probes() / "env.py").result_adapter.validate_json(json.dumps(dataclasses.asdict(result)), strict=True)
    return result, {finding.code: finding for finding in context.findings}


def judged(**found: Any) -> list[Finding]:
    """Apply the rules to a healthy host with some facts replaced."""
    facts: dict[str, Any] = {
        "variables": {}, "models": ["NVIDIA H200"] * 8, "gpu_devices": 8, "driver_version": "580.65.06", "open_module": True,
        "library_versions": ("580.65.06",), "driver_cuda": "13.0", "torch": {"version": "2.9.0", "cuda": "12.8", "arch_list": ("sm_80", "sm_90")},
        "torch_error": None, "torch_asked": True, "nccl_runs": "2.27.5", "nccl_from": "torch loads it", "nccl_built": "2.27.5", "nccl_libraries": [], "conf_lines": [],
        "conf_errors": [], "mentions": [], "packages": {"accelerate": "1.10.0"}, "shm_total": 1 << 36,
        "limits": {"locked_memory_bytes": (None, None), "open_files": (1 << 20, 1 << 20)}, "infiniband": ("mlx5_0",),
        "governors": {"performance": 64}, "scaling_driver": "acpi-cpufreq", "pid": None, "process_differs": [],
    }  # fmt: skip
    assert found.keys() <= facts.keys()
    told: list[Finding] = []
    Judge(lambda level, code, message, **more: told.append(Finding(level, code, message, **more)), {**facts, **found}).all()
    return told


def test_a_healthy_host_has_nothing_to_report() -> None:
    assert {(found.level, found.code) for found in judged()} == {
        ("ok", "driver"), ("ok", "torch"), ("ok", "nccl"), ("ok", "device-order"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "level", "code"),
    [
        ({"driver_version": "580.65.06", "library_versions": ("580.95.05",)}, "fail", "driver-library-mismatch"),
        ({"open_module": False, "models": ["NVIDIA RTX PRO 6000 Blackwell Server Edition"], "torch": None}, "fail", "driver-not-open"),
        ({"driver_version": None}, "unknown", "driver"),
        ({"models": ["NVIDIA RTX PRO 6000 Blackwell Server Edition"]}, "fail", "torch-lacks-architecture"),
        ({"driver_cuda": "12.8", "torch": {"version": "2.12", "cuda": "13.0", "arch_list": ("sm_90",)}}, "fail", "driver-too-old"),
        ({"torch": {"version": "2.9+cpu", "cuda": None, "arch_list": ()}}, "degraded", "torch-without-cuda"),
        ({"torch": None, "torch_error": "it did not answer within 60 s"}, "unknown", "torch"),
        ({"torch": None}, "skipped", "torch"),
        ({"torch": None, "torch_error": "x", "torch_asked": False}, "skipped", "torch"),
        ({"nccl_runs": "2.21.5"}, "degraded", "nccl-mismatch"),
        ({"nccl_runs": None}, "unknown", "nccl"),
        ({"variables": {"NCCL_P2P_DISABLE": ("1", "inventory")}}, "degraded", "setting-slows"),
        ({"variables": {"NCCL_NVLS_ENABLE": ("0", "conf file /etc/nccl.conf")}}, "degraded", "setting-slows"),
        ({"variables": {"NCCL_P2P_LEVEL": ("4", "inherited")}}, "degraded", "p2p-level-number"),
        ({"variables": {"NCCL_P2P_LEVEL": ("NODE", "inherited")}}, "degraded", "p2p-level-unknown"),
        ({"variables": {"NCCL_PROTO": ("LL128", "x")}}, "degraded", "protocol-forced"),
        ({"variables": {"NCCL_ALGO": ("Ring", "x")}}, "degraded", "algorithm-forced"),
        ({"variables": {"LD_PRELOAD": ("/opt/libnccl.so.2", "x")}}, "degraded", "nccl-preloaded"),
        ({"models": ["NVIDIA H200", "NVIDIA A100"]}, "degraded", "device-order"),
        ({"conf_lines": [variables.ConfLine("/etc/nccl.conf", 3, "NCCL_ALGO", "Ring", read=False)]}, "degraded", "conf-line-ignored"),
        ({"conf_errors": [("/etc/nccl.conf", "Permission denied")]}, "unknown", "conf-file-unreadable"),
        ({"mentions": [variables.Mention("NCCL_P2P_DISABLE", "~/.bashrc", 7)]}, "degraded", "setting-not-here"),
        ({"models": ["NVIDIA GeForce RTX 4090"] * 8, "driver_version": "550.40.06", "library_versions": ()}, "degraded", "accelerate-disables-p2p"),
        ({"shm_total": 64 << 20}, "degraded", "shared-memory"),
        ({"limits": {"locked_memory_bytes": (8 << 20, None), "open_files": (1 << 20, None)}}, "degraded", "locked-memory"),
        ({"limits": {"locked_memory_bytes": (None, None), "open_files": (1024, None)}}, "degraded", "open-files"),
        ({"governors": {"powersave": 64}}, "degraded", "cpu-governor"),
    ],
)  # fmt: skip
def test_each_trap_is_found(facts: dict[str, Any], level: str, code: str) -> None:
    found = [finding for finding in judged(**facts) if finding.code == code]
    assert [finding.level for finding in found] == [level]


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        ({"models": ["NVIDIA GeForce RTX 4090"] * 8, "driver_version": "550.40.07"}, "accelerate-disables-p2p"),
        ({"models": ["NVIDIA GeForce RTX 4090"] * 8, "driver_version": "560.28", "library_versions": ()}, "accelerate-disables-p2p"),
        ({"driver_version": "570.124.06", "library_versions": ("570.124",)}, "driver-library-mismatch"),
        ({"variables": {"NCCL_P2P_LEVEL": ("sys", "x")}}, "p2p-level-unknown"),
        ({"governors": {"powersave": 64}, "scaling_driver": "intel_pstate"}, "cpu-governor"),
        ({"limits": {"locked_memory_bytes": (8 << 20, None), "open_files": (1 << 20, None)}, "infiniband": ()}, "locked-memory"),
        ({"models": ["H200", "A100"], "variables": {"CUDA_DEVICE_ORDER": ("PCI_BUS_ID", "x")}}, "device-order"),
        ({"mentions": [variables.Mention("NCCL_DEBUG", "f", 1)], "variables": {"NCCL_DEBUG": ("WARN", "x")}}, "setting-not-here"),
    ],
)  # fmt: skip
def test_what_is_no_trap_is_not_reported(facts: dict[str, Any], code: str) -> None:
    assert code not in {finding.code for finding in judged(**facts)}


def test_numbers_of_levels_are_explained() -> None:
    (found,) = [finding for finding in judged(variables={"NCCL_P2P_LEVEL": ("3", "inherited (~/.profile:2)")}) if finding.value == "3"]
    assert "takes it as PHB" in found.message
    assert found.evidence[0] == "set by: inherited (~/.profile:2)"


def test_settings_and_who_makes_them(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_FANCY_API_KEY", "hunter2")
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "request.json").write_text(json.dumps({"env": {"CUDA_MODULE_LOADING": "EAGER", "SECRET": "hunter2"}}))
    (home / ".nccl.conf").write_text("# a comment\nNCCL_DEBUG=WARN\nNCCL_P2P_LEVEL=2\n NCCL_ALGO=Ring\nNCCL_PROTO = LL\nSECRET=hunter2\n")
    (home / ".bashrc").write_text("alias x=y\nexport NCCL_DEBUG=INFO\nexport TOKEN=hunter2\nexport NCCL_SHM_DISABLE=1\n")
    result, found = look(tmp_path)
    assert "hunter2" not in repr((result, found))
    assert "hf_secret" not in repr((result, found))
    by_name = {(setting.name, setting.in_force): setting for setting in result.settings}
    assert by_name["NCCL_DEBUG", True].value == "INFO"
    assert by_name["NCCL_DEBUG", True].places == (f"{home}/.bashrc:2",)
    assert by_name["NCCL_DEBUG", False].value == "WARN"
    assert by_name["NCCL_FANCY_API_KEY", True].value == "(hidden)"
    assert (by_name["CUDA_MODULE_LOADING", True].source, by_name["CUDA_MODULE_LOADING", True].value) == ("inventory", "EAGER")
    assert by_name["NCCL_P2P_LEVEL", True].source == f"conf file {home}/.nccl.conf"
    assert ("NCCL_ALGO", False) in by_name
    assert ("NCCL_PROTO", False) in by_name
    assert "CUDA_VISIBLE_DEVICES" not in {setting.name for setting in result.settings}
    assert {"p2p-level-number", "conf-line-ignored", "setting-not-here"} <= found.keys()
    assert found["setting-not-here"].subject == "NCCL_SHM_DISABLE"


def test_the_conf_file_that_a_variable_names(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / ".nccl.conf").write_text("NCCL_ALGO=Tree\n")
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "mine.conf"))
    assert look(tmp_path)[1]["conf-file-unreadable"].subject == str(tmp_path / "mine.conf")
    (tmp_path / "mine.conf").write_text("NCCL_ALGO=Ring\n")
    values = {setting.name: setting.value for setting in look(tmp_path)[0].settings if setting.in_force}
    assert values["NCCL_ALGO"] == "Ring"
    (tmp_path / "mine.conf").unlink()
    os.mkfifo(tmp_path / "mine.conf")
    look(tmp_path)


def test_the_settings_of_a_running_process(tmp_path: Path, home: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={"NCCL_P2P_DISABLE": "1", "HF_TOKEN": "hunter2", "MASTER_ADDR": "http://me:hunter2@h"},
    )  # fmt: skip
    try:
        assert child.stdout is not None
        child.stdout.readline()
        result, found = look(tmp_path, pid=child.pid)
    finally:
        child.communicate(b"\n")
    assert "hunter2" not in repr((result, found))
    assert {setting.name: setting.value for setting in result.process_settings} == {
        "NCCL_P2P_DISABLE": "1",
        "MASTER_ADDR": "http://(hidden)@h",
    }
    assert "NCCL_P2P_DISABLE: 1 there, not set here" in found["process-differs"].evidence
    with pytest.raises(Leave, match="no process"):
        look(tmp_path, pid=child.pid)


def test_torch_is_asked_in_a_child(tmp_path: Path, home: Path) -> None:
    import torch

    result, found = look(tmp_path, torch=True)
    assert result.torch is not None
    assert result.torch.version == str(torch.__version__)
    assert found["torch"].level == "ok"
    assert "torch" in {package.name for package in result.packages}


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os; os.kill(os.getpid(), 11)", "ended by signal 11"),
        ("import time; time.sleep(60)", "did not answer within 1 s"),
        ("import os, time\nif os.fork() == 0: time.sleep(60)", "did not answer within 1 s"),
        ("raise ImportError('libcudart.so.12: cannot open')", "ImportError: libcudart.so.12: cannot open"),
        ("import os, sys; os.write(int(sys.argv[1]), b'[]')", "it answered nonsense"),
        ("import os, sys; os.write(int(sys.argv[1]), b'{' * 300000)", "ended without an answer"),
        ("print('x' * 1000000)", "ended without an answer"),
    ],
)
def test_a_child_that_misbehaves_costs_its_answer_only(code: str, error: str) -> None:
    answer = software._child(code, [], 1.0, dict(os.environ))
    assert answer.values is None
    assert error in (answer.error or "")


def test_a_real_library_is_asked_for_its_version(tmp_path: Path) -> None:
    source = tmp_path / "nccl.c"
    source.write_text("int ncclGetVersion(int *version) { *version = 22809; return 0; }")
    library = tmp_path / "libnccl.so.2"
    compiler = next((name for name in ("cc", "gcc") if any((Path(folder) / name).exists() for folder in os.environ["PATH"].split(":"))), None)
    if compiler is None:
        library.write_bytes(b"no library")
        (found, *_) = software.nccl_libraries({"LD_LIBRARY_PATH": str(tmp_path)}, [], 20)
        assert found.error
        return
    subprocess.run([compiler, "-shared", "-o", library, source], check=True)
    (found, *_) = software.nccl_libraries({"LD_LIBRARY_PATH": f"/absent:{tmp_path}"}, [], 20)
    assert (found.path, found.origin, found.version) == (str(library), "LD_LIBRARY_PATH", "2.28.9")


@pytest.mark.parametrize(("code", "version"), [(22809, "2.28.9"), (2804, "2.8.4"), (21005, "2.10.5"), (0, None), ("x", None)])
def test_versions_of_nccl(code: object, version: str | None) -> None:
    assert software.nccl_version(code) == version
    assert software.torch_nccl_version(2 << 32 | 27 << 16 | 5) == "2.27.5"
    assert software.cuda_version(12080) == "12.8"


@pytest.mark.parametrize(
    ("text", "version", "is_open"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@host)\nGCC version: 12", "580.65.06", True),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12\n", "535.183.01", False),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.124  Release Build", "570.124", True),
        ("something else", None, False),
    ],
)
def test_the_loaded_module(tmp_path: Path, text: str, version: str | None, is_open: bool) -> None:
    folder = tmp_path / "proc/driver/nvidia"
    folder.mkdir(parents=True)
    (folder / "version").write_text(text)
    assert machine.driver(f"{tmp_path}/") == (version, is_open)
    assert machine.driver(f"{tmp_path}/absent/") == (None, None)


def test_kernel_options_are_an_allow_list(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cmdline").write_text("BOOT_IMAGE=/vmlinuz root=UUID=abc iommu=pt luks.key=hunter2 pcie_aspm=off nvidia-drm.modeset=1\n")
    assert machine.kernel_options(f"{tmp_path}/") == ("iommu=pt", "pcie_aspm=off", "nvidia-drm.modeset=1")


@pytest.mark.parametrize(
    ("arch_list", "wanted", "runs"),
    [
        (["sm_80", "sm_90"], (9, 0), True), (["sm_80"], (8, 9), True), (["sm_86"], (8, 0), False), (["sm_90"], (12, 0), False),
        (["sm_90", "compute_90"], (12, 0), True), (["sm_90a"], (9, 0), True), (["sm_100"], (12, 0), False), (["sm_120"], (12, 0), True),
        (["sm_100f"], (10, 3), True), (["nonsense"], (9, 0), False),
    ],
)  # fmt: skip
def test_architectures(arch_list: list[str], wanted: tuple[int, int], runs: bool) -> None:
    assert runs_on(arch_list, wanted) is runs


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ("NVIDIA H200", (9, 0)), ("NVIDIA B200", (10, 0)), ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0)), ("NVIDIA L40S", (8, 9)),
        ("NVIDIA A100-SXM4-80GB", (8, 0)), ("NVIDIA GeForce RTX 4090", (8, 9)), ("NVIDIA GeForce RTX 3090", (8, 6)), ("NVIDIA A10", (8, 6)),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9)), ("Tesla T4", (7, 5)), ("NVIDIA X9000", None), ("NVIDIA GeForce RTX 5090", (12, 0)),
    ],
)  # fmt: skip
def test_capabilities(model: str, wanted: tuple[int, int] | None) -> None:
    assert capability(model) == wanted


def test_version_tuples() -> None:
    assert version_tuple("550.40.07") == (550, 40, 7)
    assert version_tuple("580.65.06-custom") == (580, 65, 6)
    assert version_tuple("x") is version_tuple(None) is None


def test_redaction(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_TOPO_FILE", str(home / "topo.xml"))
    monkeypatch.setenv("MASTER_ADDR", "10.1.2.3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", UUID)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "/home/ada/if")
    result, found = look(tmp_path, redact=True)
    text = repr((result, found))
    assert result.redacted
    for secret in (str(home), "10.1.2.3", UUID, "ada", str(result.machine.boot_id or "(no)").replace("(uuid)", "(no)")):
        assert secret not in text
    assert {setting.name: setting.value for setting in result.settings} == {
        "NCCL_TOPO_FILE": "~/topo.xml",
        "MASTER_ADDR": "(address)",
        "CUDA_VISIBLE_DEVICES": "GPU-(hidden)",
        "NCCL_SOCKET_IFNAME": "/home/(user)/if",
    }


def test_redaction_hides_other_hosts_and_longer_names_and_keeps_versions_of_packages(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = subprocess.Popen(["sleep", "60"], env={"MASTER_ADDR": "peer8.corp.example", "PATH": os.environ["PATH"]})
    try:
        monkeypatch.setenv("MASTER_ADDR", "peer7.corp.example")
        monkeypatch.setenv("NCCL_COMM_ID", "chief.corp.example:29500")
        monkeypatch.setattr("socket.gethostname", lambda: "gpu8")
        monkeypatch.setenv("LD_LIBRARY_PATH", "/data/gpu8_scratch/lib:/gpu8-ib0:/gpu80")
        monkeypatch.setattr(software, "packages", lambda: {"nvidia-cudnn-cu12": "9.10.2.21"})
        result, found = look(tmp_path, redact=True, pid=child.pid)
    finally:
        child.kill()
        child.wait()
    assert {setting.name: setting.value for setting in result.settings} == {
        "MASTER_ADDR": "(host)",
        "NCCL_COMM_ID": "(host):29500",
        "LD_LIBRARY_PATH": "/data/(host)_scratch/lib:/(host)-ib0:/gpu80",
    }
    assert "process-differs" in found
    assert "corp" not in repr((result, found))
    assert result.packages == (env.Package("nvidia-cudnn-cu12", "9.10.2.21"),)


@pytest.mark.parametrize(
    "value",
    [
        "http://bob:p@ss/SEKRET@proxy:1", "http://bob:a/SEKRET@proxy", "https://h/x?token=SEKRET&a=1", "--password SEKRET", "hf_SEKRET34567890123456",
        '{"api_key": "SEKRET"}', "Authorization: Bearer SEKRET", "x;access-token:SEKRET", "ghp_SEKRET0123456789abcdef", "a sk-SEKRET-0123456789abcdef",
        "eyJSEKRET01234567.eyJSEKRET.sig", "x" * 490 + " hf_" + "SEKRET" * 10, "http://" + "y" * 600 + ":SEKRET@h",
    ],
)  # fmt: skip
def test_secrets_in_values_are_hidden(value: str) -> None:
    assert "SEKRET" not in variables.shown("NCCL_X", value)


@pytest.mark.parametrize("redact", [False, True])
def test_paths_that_are_no_text_cost_no_answer(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, redact: bool) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    (folder / "libnccl.so.2").write_bytes(b"NCCL_A =1\n")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    monkeypatch.setenv("NCCL_CONF_FILE", str(folder / "libnccl.so.2"))
    result, found = look(tmp_path, redact=redact)
    assert result.nccl_libraries[0].path.endswith("\\udcff/libnccl.so.2")
    str((result, [dataclasses.astuple(each) for each in found.values()])).encode("utf-8")
    assert "\\udcff" in found["conf-line-ignored"].evidence[0]
    for text in (*found["nccl"].evidence, *found["conf-line-ignored"].evidence):
        text.encode("utf-8")


@pytest.mark.parametrize("name", ["NCCL_PASS", "NCCL_PASSPHRASE", "CUDA_API_KEYS", "NCCL_BEARER", "NCCL_X_JWT", "CUDA_COOKIE"])
def test_variables_called_like_secrets_are_hidden(name: str) -> None:
    assert variables.shown(name, "plain") == variables.HIDDEN


@pytest.mark.parametrize("value", ["/opt/keys/lib:/a/token/lib", "^LL128", "mlx5_0:1,mlx5_1:1", "expandable_segments:True", "bypass=1", "tcp://10.0.0.1:29500"])
def test_ordinary_values_are_shown(value: str) -> None:
    assert variables.shown("NCCL_X", value) == value


def test_a_long_value_does_not_take_long() -> None:
    # 100 KiB of one word took minutes, as each letter began another search.
    begun = time.process_time()
    variables.shown("NCCL_X", "a" * 100_000)
    variables.shown("NCCL_X", "a://" * 100_000)
    assert time.process_time() - begun < 5


def test_redaction_leaves_versions_and_loopback() -> None:
    redactor = Redactor(("gpu8",))
    kept = "driver 580.65.06, NCCL 2.27.5, 127.0.0.1, sm_90, 4.18.0-553.el8 1:2"
    assert redactor.text(kept) == kept
    assert redactor.text("GPU8: fe80::1:2:3:4, de:ad:be:ef:00:01") == "(host): (address), (mac)"


def test_params() -> None:
    with pytest.raises(ValueError, match="pid"):
        env.Params(pid=0)


def test_what_the_environment_changes_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/conda/lib:/usr/lib/x")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    context = RecordingContext(tmp_path / "run")
    monkeypatch.setattr(variables, "of_process", lambda _: {"LD_LIBRARY_PATH": "/usr/lib/x", "NCCL_ALGO": "Ring"})
    _, sources = env._effective(context)
    assert (sources["LD_LIBRARY_PATH"], sources["NCCL_ALGO"]) == ("environment", "inherited")

    def hidden(_: int) -> dict[str, str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(variables, "of_process", hidden)
    assert env._effective(context)[1]["NCCL_ALGO"] == "unknown"
