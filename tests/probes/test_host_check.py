from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from probes import host_check
from remote_diag.findings import Finding
from remote_diag.paths import shipped_probes


class FakeContext:
    """Keeps what a probe says."""

    run_id = "test"
    run_dir = "/nowhere"

    def __init__(self) -> None:
        self.findings: dict[str, Finding] = {}

    def progress(self, done: float, total: float | None = None, *, unit: str = "", label: str = "") -> None: ...

    def finding(self, level: Any, code: str, message: str, **more: Any) -> None:
        assert code not in self.findings
        self.findings[code] = Finding(level, code, message, **more)

    def require(self, name: str, hint: str | None = None) -> Any:  # noqa: ARG002
        raise AssertionError(name)

    def unfit(self, message: str, hint: str | None = None) -> Any:  # noqa: ARG002
        raise AssertionError(message)

    def skip(self, reason: str) -> Any:
        raise AssertionError(reason)

    def remaining(self) -> float:
        return 60.0


def run(gpus: int | None = None) -> tuple[host_check.Result, dict[str, Finding]]:
    context = FakeContext()
    return host_check.run(host_check.Params(gpus), context), context.findings


def module(folder: Path, name: str, body: str, version: str | None = "1.2.3") -> None:
    (folder / f"{name}.py").write_text(body)
    if version is not None:
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A path on which nothing is installed but what a test puts into the returned folder."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if "site-packages" not in p)])
    for name in ("numpy", "safetensors", "torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_the_contract_holds() -> None:
    from remote_diag.probe import load

    probe = load(shipped_probes() / "host_check.py")
    assert probe.name == "host-check"
    assert set(probe.effects) == {"reads-files", "runs-commands"}


def test_a_healthy_environment() -> None:
    result, findings = run()
    assert result.python_version == ".".join(map(str, sys.version_info[:3]))
    assert result.executable == sys.executable
    assert abs(result.unix_time_s - time.time()) < 60
    assert result.cpus >= 1
    assert result.memory_total_bytes is not None
    assert result.memory_total_bytes > (result.memory_available_bytes or 0) > 0
    assert set(result.limits) >= {"open_files", "core_file_bytes"}
    assert findings["python"].level == "ok"
    assert findings["numpy"].level == findings["safetensors"].level == "ok"
    assert result.packages["numpy"].imported is True
    assert result.packages["torch"].imported is None


def test_only_names_of_variables_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SECRET_OF_THE_TEST", "hunter2")
    monkeypatch.setenv("UNRELATED", "hunter2")
    result, findings = run()
    assert "NCCL_SECRET_OF_THE_TEST" in result.environment_names
    assert "UNRELATED" not in result.environment_names
    assert "hunter2" not in repr(result) + repr(findings)


def test_torch_is_never_imported(bare: Path) -> None:
    module(bare, "torch", f"open({str(bare / 'imported')!r}, 'w')", "2.11.0+cu130")
    result, findings = run()
    assert result.packages["torch"] == host_check.Package("2.11.0+cu130", found=True, imported=None, error=None)
    assert findings["torch"].level == "ok"
    assert findings["torch"].evidence == ()
    assert not (bare / "imported").exists()


@pytest.mark.parametrize(("version", "recent"), [("2.10.0", True), ("2.9.1+cu128", False), ("1.13.1", False), ("3.0", True)])
def test_a_torch_that_reads_no_pickles(bare: Path, version: str, recent: bool) -> None:
    module(bare, "torch", "", version)
    assert (run()[1]["torch"].evidence == ()) is recent


def test_missing_packages_say_how_to_get_them(bare: Path) -> None:
    result, findings = run()
    assert not result.packages["numpy"].found
    assert findings["numpy"].level == "degraded"
    assert "install numpy" in (findings["numpy"].action or "")
    # Nobody expects GPUs here, so nothing needs torch.
    assert findings["torch"].level == ("degraded" if result.gpus_driver or result.gpu_devices else "ok")


def test_torch_is_needed_where_gpus_are_expected(bare: Path) -> None:
    assert run(gpus=8)[1]["torch"].level == "degraded"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise OSError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
        ("import sys; sys.exit(3)", "status 3"),
    ],
)
def test_a_broken_numpy_does_not_end_the_probe(bare: Path, body: str, said: str) -> None:
    module(bare, "numpy", body)
    result, findings = run()
    assert result.packages["numpy"].imported is False
    assert findings["numpy"].level == "degraded"
    assert said in findings["numpy"].evidence[0]
    assert result.packages["numpy"].version == "1.2.3"


def test_an_import_that_hangs_is_left_behind(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_check, "IMPORT_SECONDS", 0.5)
    module(bare, "numpy", "import time; time.sleep(60)")
    assert "did not end" in run()[1]["numpy"].evidence[0]


def test_metadata_without_a_module(bare: Path) -> None:
    module(bare, "numpy", "")
    (bare / "numpy.py").unlink()
    finding = run()[1]["numpy"]
    assert finding.level == "degraded"
    assert "module is missing" in finding.message


def test_a_package_without_metadata_still_has_its_version(bare: Path) -> None:
    module(bare, "numpy", "__version__ = '9.8.7'", version=None)
    assert run()[0].packages["numpy"].version == "9.8.7"


@pytest.mark.parametrize(("managed", "writable"), [(True, True), (False, False)])
def test_where_pip_may_not_install_a_venv_is_advised(
    bare: Path, monkeypatch: pytest.MonkeyPatch, managed: bool, writable: bool
) -> None:
    monkeypatch.setattr(host_check, "_externally_managed", lambda: managed)
    monkeypatch.setattr("os.access", lambda *_: writable)
    advice = run()[1]["numpy"].action or ""
    assert "make a venv" in advice
    assert "~" not in advice, "hosts.yaml does not take it"


@pytest.mark.parametrize(
    ("driver", "devices", "expected", "level", "value"),
    [
        (8, 8, 8, "ok", 8),
        (8, 0, 8, "ok", 8),  # no device files before the first use
        (8, 4, 8, "degraded", 4),  # a container that was given four
        (7, 8, 8, "degraded", 7),  # one fell off the bus, its device file stays
        (None, 0, 8, "degraded", 0),
        (None, 0, None, "ok", 0),
        (None, None, 8, "unknown", None),
    ],
)
def test_gpus_are_counted_without_cuda(  # noqa: PLR0917
    monkeypatch: pytest.MonkeyPatch,
    driver: int | None,
    devices: int | None,
    expected: int | None,
    level: str,
    value: int | None,
) -> None:
    monkeypatch.setattr(host_check, "_count_gpus", lambda: (driver, devices))
    finding = run(expected)[1]["gpus"]
    assert (finding.level, finding.value, finding.threshold) == (level, value, expected)


@pytest.mark.parametrize(
    ("shm", "level"), [((64 << 20, 60 << 20), "degraded"), ((8 << 30, 1 << 30), "ok"), (None, "skipped")]
)
def test_shared_memory(monkeypatch: pytest.MonkeyPatch, shm: tuple[int, int] | None, level: str) -> None:
    monkeypatch.setattr(host_check, "_shm", lambda: shm)
    assert run()[1]["shared-memory"].level == level


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        host_check.Params(gpus=-1)
