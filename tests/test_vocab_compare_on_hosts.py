"""The main job on real input: over ssh with zsh, and on this machine, through the same agent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remote_diag.host import Environment
from remote_diag.session import Session

from .support import checkpoints, mission
from .support.cli import CHECKOUT, rdiag
from .support.sshd import TestSshd

A = CHECKOUT / "examples/mappings/a.npz"
B = CHECKOUT / "examples/mappings/b.npz"


@pytest.fixture(params=["zsh", "local"])
def on_host(request: pytest.FixtureRequest, zsh_server: TestSshd, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that runs ``rdiag vocab-compare --json`` on the host and gives (exit code, object)."""
    inventory = tmp_path / "hosts.yaml"
    inventory.write_text(
        f"""
defaults: {{environment: {{python: {sys.executable}}}}}
hosts:
  zsh: {{address: 127.0.0.1, port: {zsh_server.port}, user: {zsh_server.user},
        identity_file: {zsh_server.identity_file}, known_hosts: {zsh_server.known_hosts}}}
  local: {{transport: local}}
"""
    )

    def compare(*arguments: str) -> tuple[int, dict[str, Any]]:
        ran = rdiag(
            "vocab-compare", *arguments, "-H", request.param, "-i", str(inventory), "--json", home=tmp_path
        )
        return ran.code, ran.json

    return compare


def test_the_mission(on_host: Callable[..., Any], tmp_path: Path) -> None:
    for name, ids in zip("ab", mission.mappings(), strict=True):
        checkpoints.write_safetensors(
            tmp_path / name,
            {
                "d2t": checkpoints.offsets(ids),
                "t2d": checkpoints.mask(ids, mission.VOCAB),
                "lm_head.weight": np.zeros((mission.ROWS, 4), np.float16),
            },
        )
    code, answer = on_host(str(tmp_path / "a"), str(tmp_path / "b"))
    assert code == 1
    result = answer["result"]
    assert result["draft_vocab_size"] == 32_000
    assert result["target_vocab_size"] == 163_840
    assert result["positional_matches"] == 252
    assert result["shared_targets"] == 25_750
    assert result["rows_without_source"] == 6_250
    assert 45 <= result["common_prefix"] <= 60
    assert result["verdict"] == "different"
    assert result["encoding_a"] == result["encoding_b"] == "offset"
    assert answer["status"] == "fail"


def test_two_real_vocabularies(on_host: Callable[..., Any]) -> None:
    code, answer = on_host(str(A), str(B), "--counts", str(B), "--first", "7")
    assert code == 1
    result = answer["result"]
    exact = {
        "draft_vocab_size": 32_000,
        "target_vocab_size": 163_840,
        "positional_matches": 132,
        "shared_targets": 21_703,
        "common_prefix": 126,
        "rows_without_source": 10_297,
        "order_preserved": True,
        "max_shift": 1393,
        "verdict": "different",
        "encoding_a": "offset",
        "encoding_b": "offset",
    }
    assert {name: result[name] for name in exact} == exact
    shares = {
        "coverage_a": 0.92229,
        "coverage_b": 0.99716,
        "positional_token_share": 0.15068,
        "shared_token_share": 0.92129,
    }
    assert {name: round(result[name], 5) for name in shares} == shares
    assert [row["row"] for row in result["first_rows"]] == list(range(7))


def test_identical_is_ok(on_host: Callable[..., Any]) -> None:
    code, answer = on_host(str(A), str(A))
    assert (code, answer["status"], answer["result"]["verdict"]) == (0, "ok", "identical")


def test_ambiguous_is_neither_ok_nor_failed(on_host: Callable[..., Any], tmp_path: Path) -> None:
    # Few low ids, ascending: they could be offsets as well, and no mask is there to tell.
    for name in ("a", "b"):
        checkpoints.write_npz(tmp_path / f"{name}.npz", d2t=np.arange(1, 2001, 2, dtype=np.int64))
    code, answer = on_host(str(tmp_path / "a.npz"), str(tmp_path / "b.npz"))
    assert answer["result"]["encoding_a"] == "ambiguous"
    assert answer["status"] == "unknown"
    assert code == 10


@pytest.mark.parametrize("name", ["-a b&c)", "$(touch pwned)", "q'\"`.npz", "\U0001f680"])
def test_paths_of_any_kind(on_host: Callable[..., Any], tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(A.read_bytes())
    path = tmp_path / (name if name.endswith(".npz") else f"{name}.npz")
    path.write_bytes(A.read_bytes())
    code, answer = on_host(str(path), str(A))
    assert (code, answer["result"]["verdict"]) == (0, "identical")
    assert not list(tmp_path.rglob("pwned"))


def test_a_path_with_a_leading_dash_below_the_working_directory(zsh_server: TestSshd) -> None:
    (zsh_server.home / "-x.npz").write_bytes(A.read_bytes())
    with Session(zsh_server.host(environment=Environment("python", sys.executable))) as session:
        outcome = session.run("vocab-compare", {"a": "-x.npz", "b": "./-x.npz"})
    assert outcome.result.verdict == "identical"


def test_missing_numpy_is_exit_7_and_says_what_to_install(zsh_server: TestSshd, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    inventory = tmp_path / "hosts.yaml"
    inventory.write_text(
        f"""
hosts:
  zsh: {{address: 127.0.0.1, port: {zsh_server.port}, user: {zsh_server.user},
        identity_file: {zsh_server.identity_file}, known_hosts: {zsh_server.known_hosts},
        environment: {{venv: {bare}}}}}
"""
    )
    ran = rdiag("vocab-compare", str(A), str(B), "-H", "zsh", "-i", str(inventory), home=tmp_path)
    assert ran.code == 7
    assert "numpy" in ran.err
    assert f"{bare}/bin/python -m pip install numpy" in ran.err


@pytest.fixture
def huge(tmp_path: Path) -> Iterator[Path]:
    ids = mission.mappings()[0]
    path = tmp_path / "huge" / "model.safetensors"
    path.parent.mkdir()
    checkpoints.write_sparse_checkpoint(path, ids, mission.VOCAB, head_bytes=2 << 30)
    yield path.parent
    path.unlink()


COUNTING = '''

def run(params: Params, context: Context) -> Result:
    """Run, and write down how many bytes this process read meanwhile, by the kernel's count."""
    import os

    def read() -> int:
        with open("/proc/self/io") as io:
            return int(io.readline().split()[1])

    context.require("numpy")
    before = read()
    result = counted(params, context)
    with open(os.environ["COUNTED"], "w") as told:
        told.write(str(read() - before))
    return result
'''


def test_of_a_two_gigabyte_checkpoint_only_the_mapping_is_read(zsh_server: TestSshd, huge: Path, tmp_path: Path) -> None:
    for module in ("torch", "safetensors"):
        (tmp_path / "path" / module).mkdir(parents=True)
        (tmp_path / "path" / module / "__init__.py").write_text(f"raise SystemExit('{module} was imported')\n")
    source = (CHECKOUT / "probes/vocab_compare.py").read_text()
    probe = tmp_path / "counting.py"
    probe.write_text(source.replace("def run(", "def counted(") + COUNTING)
    host = zsh_server.host(
        environment=Environment("python", sys.executable),
        env=(("PYTHONPATH", str(tmp_path / "path")), ("COUNTED", str(tmp_path / "counted"))),
    )
    with Session(host) as session:
        result = session.run(probe, {"a": str(huge), "b": str(huge)}).result
    assert result.verdict == "identical"
    assert result.bytes_read < 4 << 20
    # The shared code that is imported meanwhile is in the kernel's count, and not in the probe's own.
    assert result.bytes_read <= int((tmp_path / "counted").read_text()) < 4 << 20
