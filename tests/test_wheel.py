"""rdiag as others get it: built into a wheel, installed far from the checkout, with nothing of the checkout in reach."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from remote_diag import __version__
from tests.support.cli import CHECKOUT

pytestmark = pytest.mark.xdist_group("wheel")  # so that it is built once

EXAMPLES = CHECKOUT / "examples" / "mappings"


def call(*argv: str | Path, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in argv], cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built with the hatchling that is installed here: no download."""
    folder = tmp_path_factory.mktemp("wheel")
    done = call(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, CHECKOUT, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(folder.glob("*.tar.gz"))) == 1
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel in it; what it depends on is lent by the environment of the tests."""
    venv = tmp_path_factory.mktemp("venv")
    done = call(sys.executable, "-m", "venv", venv, cwd=venv)
    assert done.returncode == 0, done.stderr
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)}))
    options = ("-qq", "--no-deps", "--no-index", "--disable-pip-version-check")
    done = call(venv / "bin" / "python", "-m", "pip", "install", *options, wheel, cwd=venv)
    assert done.returncode == 0, done.stderr
    # After the installation, so that pip does not take the checkout's rdiag for an older version of this one. The
    # folders are appended as they are: their .pth files, one of which leads to the checkout, are not followed.
    lent = [path for path in (*site.getsitepackages(), site.getusersitepackages()) if Path(path).is_dir()]
    (packages / "lent.pth").write_text("".join(f"{path}\n" for path in lent))
    return venv


@pytest.fixture
def env(installed: Path, tmp_path: Path) -> dict[str, str]:
    names = {f"XDG_{kind}_HOME": str(tmp_path / kind.lower()) for kind in ("CONFIG", "CACHE", "STATE")}
    path = f"{installed / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {"HOME": str(tmp_path), "PATH": path, "COLUMNS": "100", **names}


def test_what_travels_to_hosts_is_inside(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for folder, inside in (("remote_diag", "remote_diag"), ("probes", "remote_diag/_shipped/probes")):
        sources = {path.relative_to(CHECKOUT / folder) for path in (CHECKOUT / folder).rglob("*.py")}
        sources |= {path.relative_to(CHECKOUT / folder) for path in (CHECKOUT / folder).rglob("*.sh")}
        missing = {f"{inside}/{path.as_posix()}" for path in sources} - names
        assert sources and not missing  # noqa: PT018
    assert {"remote_diag/_shipped/hosts.yaml", "remote_diag/py.typed"} <= names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"remote_diag", f"remote_diag-{__version__}.dist-info"}
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    assert f"remote_diag-{__version__}.dist-info/licenses/LICENSE" in names


def test_it_is_the_wheel_that_runs(installed: Path, env: dict[str, str], tmp_path: Path) -> None:
    done = call(installed / "bin" / "python", "-c", "import remote_diag; print(remote_diag.__file__)", cwd=tmp_path, env=env)
    assert Path(done.stdout.strip()).is_relative_to(installed), done.stderr
    done = call("rdiag", "--version", cwd=tmp_path, env=env)
    assert done.stdout.strip().endswith(__version__), done.stderr
    module = call(installed / "bin" / "python", "-m", "remote_diag", "--version", cwd=tmp_path, env=env)
    assert (module.returncode, module.stdout) == (0, done.stdout), module.stderr


def test_probes_are_found_and_run(env: dict[str, str], installed: Path, tmp_path: Path) -> None:
    done = call("rdiag", "probes", "--json", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert {"hello", "vocab-compare"} <= {probe["name"] for probe in json.loads(done.stdout)["probes"]}
    done = call("rdiag", "run", "hello", "--json", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)["result"]
    assert answer["greeting"] == "Hello, world!"
    # This machine's probes run in the Python that runs rdiag: what was installed with it is there.
    assert Path(answer["executable"]).is_relative_to(installed)


def test_vocab_compare_works_from_an_unrelated_folder(env: dict[str, str], tmp_path: Path) -> None:
    a, b = EXAMPLES / "a.npz", EXAMPLES / "b.npz"
    done = call("rdiag", "vocab-compare", a, b, "--counts", b, "--host", "local", "--json", cwd=tmp_path, env=env)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["result"]["positional_matches"] == 132


def test_a_probe_can_be_written_from_the_template(env: dict[str, str], tmp_path: Path) -> None:
    assert call("rdiag", "new-probe", "mine", cwd=tmp_path, env=env).returncode == 0
    done = call("rdiag", "run", "mine", "--json", cwd=tmp_path, env=env)
    assert done.returncode in {0, 1}, done.stderr
    assert "free_bytes" in json.loads(done.stdout)["result"]


def test_the_sample_inventory_is_inside(env: dict[str, str], tmp_path: Path) -> None:
    done = call("rdiag", "hosts", "--example", cwd=tmp_path, env=env)
    assert done.stdout == (CHECKOUT / "hosts.yaml").read_text()
