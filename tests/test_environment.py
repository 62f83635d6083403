"""The entry script with every kind of environment, played against stand-in interpreters."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from remote_diag import environment
from remote_diag.host import Environment, EnvironmentKind

from .support.fake_docker import make_docker

NONCE = "0123456789abcdef" * 2
HASH = "ab" * 32
SHELLS = [name for name in ("sh", "dash", "bash", "zsh") if shutil.which(name)]
NASTY = "we ird $(touch pwned) `touch pwned` ; touch pwned & 'q' \"d\" \\ *"


def lay_out(root: Path, target: Environment) -> Path:
    place = root / "cache" / HASH
    (place / "agent").mkdir(parents=True)
    for name, data in environment.entry_files(target).items():
        (place / name).write_bytes(data)
    return place


def fake_python(path: Path) -> Path:
    """A stand-in interpreter that tells its name, its arguments and what is left on stdin."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('#!/bin/sh\nprintf "[%s]" "$0" "$@"\nprintf "\\n"\ncat\n')
    path.chmod(0o755)
    return path


def enter(
    root: Path,
    *arguments: str,
    shell: str = "sh",
    path: str = "/usr/bin:/bin",
    stdin: str = f"{NONCE}\nrest\n",
    **extra: str,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [shell, f"cache/{HASH}/enter", *arguments],
        cwd=root,
        input=stdin,
        env={"PATH": path, "HOME": str(root), **extra},
        capture_output=True,
        text=True,
        timeout=20,
    )


def frame(kind: str) -> str:
    return f"\nRDIAG1 {NONCE} 0 {kind} 0 00000000\n\n"


@pytest.mark.parametrize("shell", SHELLS)
def test_venv_starts_its_python_with_stdin_untouched(tmp_path: Path, shell: str) -> None:
    python = fake_python(tmp_path / NASTY / "bin/python")
    lay_out(tmp_path, Environment("venv", str(tmp_path / NASTY)))
    done = enter(tmp_path, shell=shell)
    assert done.stdout == f"[{python}][-E][-s][-S][cache/{HASH}/agent/__main__.py][{NONCE}]\nrest\n"
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("venv", "/nowhere/at all", "no-venv"),
        ("python", "/nowhere/python3", "no-python"),
        ("conda", "nowhere", "no-conda"),
        ("conda", "/nowhere/prefix", "no-conda"),
        ("docker", "box", "no-docker"),
        ("default", "", "no-python"),
    ],
)
def test_what_is_missing_is_said_in_a_frame(
    tmp_path: Path, shell: str, kind: EnvironmentKind, value: str, said: str
) -> None:
    target = Environment(kind, value)
    place = lay_out(tmp_path, target)
    if kind == "default":
        # Names only: the absolute ones may exist on this machine.
        (place / "python").write_text("python3\npython\n")
    done = enter(tmp_path, shell=shutil.which(shell) or shell, path=str(tmp_path))
    assert done.stdout == frame(said)
    message, hint = environment.explain(said, target)
    assert value in message
    assert hint


def test_the_first_interpreter_on_the_path_is_taken(tmp_path: Path) -> None:
    lay_out(tmp_path, Environment())
    fake_python(tmp_path / "second/python3")
    done = enter(tmp_path, path=f"{tmp_path}/first:{tmp_path}/second:/usr/bin:/bin")
    assert done.stdout.startswith(f"[{tmp_path}/second/python3][-E]")


def test_a_conda_name_is_looked_up_in_condas_own_list(tmp_path: Path) -> None:
    python = fake_python(tmp_path / "far away/envs/ml/bin/python")
    (tmp_path / ".conda").mkdir()
    (tmp_path / ".conda/environments.txt").write_text(f"{tmp_path}/gone/envs/ml\n{tmp_path}/far away/envs/ml\n")
    lay_out(tmp_path, Environment("conda", "ml"))
    assert enter(tmp_path).stdout.startswith(f"[{python}]")


def test_a_conda_name_is_looked_up_below_the_usual_roots(tmp_path: Path) -> None:
    python = fake_python(tmp_path / "miniforge3/envs/ml/bin/python")
    lay_out(tmp_path, Environment("conda", "ml"))
    assert enter(tmp_path).stdout.startswith(f"[{python}]")


def test_the_conda_base_environment(tmp_path: Path) -> None:
    python = fake_python(tmp_path / "miniconda3/bin/python")
    (tmp_path / "miniconda3/conda-meta").mkdir()
    lay_out(tmp_path, Environment("conda", "base"))
    assert enter(tmp_path).stdout.startswith(f"[{python}]")


def test_a_conda_prefix(tmp_path: Path) -> None:
    python = fake_python(tmp_path / NASTY / "bin/python")
    lay_out(tmp_path, Environment("conda", str(tmp_path / NASTY)))
    assert enter(tmp_path).stdout.startswith(f"[{python}]")


@pytest.mark.parametrize("line", ["", "\n", "no hex\n", f"{NONCE};id\n", "$(id)\n"])
def test_an_entry_line_that_is_none_ends_it(tmp_path: Path, line: str) -> None:
    lay_out(tmp_path, Environment())
    done = enter(tmp_path, stdin=line)
    assert done.returncode == 65
    assert done.stdout == ""


@pytest.mark.parametrize("damaged", [None, b"", bytes(9), bytes(8) + b"\n"])
@pytest.mark.parametrize("kind", ["python", "venv", "conda", "docker"])
def test_a_bundle_that_has_lost_what_it_enters_says_nothing_of_an_environment(
    tmp_path: Path, kind: EnvironmentKind, damaged: bytes | None
) -> None:
    lay_out(tmp_path, Environment(kind, "/a"))
    path = tmp_path / "cache" / HASH / ("container" if kind == "docker" else kind)
    path.unlink() if damaged is None else path.write_bytes(damaged)
    if kind == "docker" and damaged is None:
        (tmp_path / "cache" / HASH / "python").unlink()
    done = enter(tmp_path)
    assert (done.returncode, done.stdout) == (66, "")


@pytest.fixture
def docker(tmp_path: Path) -> str:
    make_docker(tmp_path)
    fake_python(tmp_path / "bin/python3")
    return f"{tmp_path}/bin:/usr/bin:/bin"


def test_a_container_gets_the_bundle_once_and_runs_it_inside(tmp_path: Path, docker: str) -> None:
    lay_out(tmp_path, Environment("docker", "box"))
    for _ in range(2):
        done = enter(tmp_path, path=docker)
        assert done.stdout == f"[{tmp_path}/bin/python3][-E][-s][-S][.cache/rdiag/{HASH}/agent/__main__.py][{NONCE}]\nrest\n"
    inside = tmp_path / "inside the box/.cache/rdiag"
    assert sorted(os.listdir(inside)) == [HASH]
    assert (inside / HASH / "enter").read_bytes() == (tmp_path / "cache" / HASH / "enter").read_bytes()
    assert sum("tar -xf" in line for line in (tmp_path / "docker.log").read_text().splitlines()) == 1


@pytest.mark.parametrize("damaged", ["enter", "agent/main.py", "agent/more.py"])
def test_a_damaged_copy_in_a_container_is_replaced_when_the_client_asks_for_it(
    tmp_path: Path, docker: str, damaged: str
) -> None:
    lay_out(tmp_path, Environment("docker", "box"))
    (tmp_path / "cache" / HASH / "agent/main.py").write_text("whole")
    enter(tmp_path, path=docker)
    inside = tmp_path / "inside the box/.cache/rdiag"
    (inside / HASH / damaged).write_text("exit 1")
    assert f"[{NONCE}]" in enter(tmp_path, "anew", path=docker).stdout
    assert os.listdir(inside) == [HASH]
    for name in ("enter", "agent/main.py"):
        assert (inside / HASH / name).read_bytes() == (tmp_path / "cache" / HASH / name).read_bytes()
    assert not (inside / HASH / "agent/more.py").exists()
    (inside / HASH / "enter").unlink()
    assert f"[{NONCE}]" in enter(tmp_path, path=docker).stdout


@pytest.mark.parametrize("mv", ["with -T", "without -T"])
def test_who_comes_second_into_a_container_leaves_the_first_ones_files_alone(tmp_path: Path, docker: str, mv: str) -> None:
    lay_out(tmp_path, Environment("docker", "box"))
    inside = tmp_path / "inside the box"
    shutil.copytree(tmp_path / "cache" / HASH, inside / "faster/rdiag" / HASH)
    if mv == "without -T":
        (tmp_path / "bin/mv").write_text('#!/bin/sh\n[ "$1" = -T ] && exit 1\nexec /bin/mv "$@"\n')
        (tmp_path / "bin/mv").chmod(0o755)
    assert f"[{NONCE}]" in enter(tmp_path, path=docker).stdout
    assert os.listdir(inside / ".cache/rdiag") == [HASH]
    installed = inside / ".cache/rdiag" / HASH
    assert sorted(os.listdir(installed)) == sorted(os.listdir(tmp_path / "cache" / HASH))


@pytest.mark.parametrize("container", ["stopped", "gone"])
def test_a_container_that_does_not_run(tmp_path: Path, docker: str, container: str) -> None:
    lay_out(tmp_path, Environment("docker", container))
    assert enter(tmp_path, path=docker).stdout == frame("no-container")


def test_a_container_that_takes_no_files(tmp_path: Path, docker: str) -> None:
    lay_out(tmp_path, Environment("docker", "box"))
    shutil.rmtree(tmp_path / "inside the box")
    assert enter(tmp_path, path=docker).stdout == frame("no-container-copy")


def test_no_value_is_part_of_the_script() -> None:
    scripts = {environment.entry_files(Environment(kind, "/a"))["enter"] for kind in ("python", "venv", "conda", "docker")}
    assert len(scripts) == 1
