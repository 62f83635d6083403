from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from remote_diag import paths
from remote_diag.cli.hosts import target
from remote_diag.host import Host
from tests.support.home import make_private_home

SEVERAL = """\
defaults: {timeout: 90}
hosts:
  gpu8: {address: 203.0.113.7, user: root, port: 22, environment: {venv: /root/ml-env}, gpus: 8}
  gpu9:
    ssh: lab-gpu9
    env: {HF_TOKEN: hf_canary, NCCL_DEBUG: INFO, ESCAPE: "\\e[2J[red]x", NO_KEYBOARD: fine}
groups: {lab: [gpu8, gpu9], one: [gpu8]}
"""


@pytest.fixture(autouse=True)
def work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    return make_private_home(monkeypatch, tmp_path)


def rdiag(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "COLUMNS": "160"}
    return subprocess.run(
        [sys.executable, "-m", "remote_diag.cli.entry", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )


def as_json(*arguments: str) -> dict[str, Any]:
    done = rdiag("hosts", "--json", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_without_a_file_local_is_shown_and_how_to_begin() -> None:
    done = rdiag("hosts")
    assert done.returncode == 0
    assert "no hosts.yaml was found" in done.stdout
    assert "rdiag hosts --example" in done.stdout
    assert done.stdout.splitlines()[-1].split()[:4] == ["local", "local", "this", "machine"]
    assert as_json()["inventory"]["path"] is None


def test_without_a_command_the_help_is_shown() -> None:
    done = rdiag()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage: rdiag [OPTIONS] COMMAND [ARGS]...\n\n")
    assert "vocab-compare" in done.stderr


def test_the_table_and_the_file_it_came_from(work: Path) -> None:
    (work / "hosts.yaml").write_text(SEVERAL)
    paths.user_inventory().parent.mkdir(parents=True)
    paths.user_inventory().write_text("hosts: {}\n")
    lines = rdiag("hosts").stdout.splitlines()
    assert lines[0] == f"inventory  {work}/hosts.yaml  (from ./hosts.yaml)"
    assert lines[1] == f"not read   {paths.user_inventory()}  (from the user's configuration folder)"
    rows = [line.split() for line in lines[2:]]
    assert rows[0] == ["host", "transport", "target", "environment", "GPUs", "groups"]
    assert ["gpu8", "ssh", "root@203.0.113.7:22", "venv", "/root/ml-env", "8", "lab,", "one"] in rows
    assert ["gpu9", "ssh", "lab-gpu9", "default", "lab"] in rows


def test_one_host_in_full_and_nothing_that_steers_a_terminal(work: Path) -> None:
    (work / "hosts.yaml").write_text(SEVERAL)
    done = rdiag("hosts", "gpu9")
    assert done.returncode == 0
    shown = dict(line.split(None, 1) for line in done.stdout.splitlines()[1:] if not line.startswith(" "))
    assert shown["timeout"].strip() == "90 s"
    assert shown["source"].strip() == "hosts.yaml:4"
    assert shown["env"].strip() == "HF_TOKEN: (hidden)"
    assert "ESCAPE: \\x1b[2J[red]x" in done.stdout
    assert "gpu8" not in done.stdout


def test_secrets_are_not_shown(work: Path) -> None:
    (work / "hosts.yaml").write_text(SEVERAL)
    for arguments in ((), ("gpu9",), ("--json",)):
        assert "hf_canary" not in rdiag("hosts", *arguments).stdout
    (host,) = as_json("gpu9")["hosts"]
    assert host["env"] == {"HF_TOKEN": "(hidden)", "NCCL_DEBUG": "INFO", "ESCAPE": "\x1b[2J[red]x", "NO_KEYBOARD": "fine"}


def test_the_json_object(work: Path) -> None:
    (work / "hosts.yaml").write_text(SEVERAL)
    named = work / "other.yaml"
    named.write_text("hosts: {a: {ssh: a}}\n")
    answer = as_json("-i", str(named))
    assert answer["schema_version"] == 1
    assert answer["inventory"] == {
        "path": str(named),
        "why": "-i/--inventory",
        "not_read": [{"path": str(work / "hosts.yaml"), "why": "./hosts.yaml"}],
    }
    assert [host["name"] for host in answer["hosts"]] == ["local", "a"]
    assert as_json()["groups"] == {"lab": ["gpu8", "gpu9"], "one": ["gpu8"]}
    (host,) = as_json("gpu8")["hosts"]
    assert host["environment"] == {"venv": "/root/ml-env"}
    assert host["groups"] == ["lab", "one"]
    # Everything a host has is there; adding a field is noticed here.
    assert host.keys() == {*Host.__dataclass_fields__, "groups"}


def test_errors_end_with_code_3_and_a_hint(work: Path) -> None:
    (work / "hosts.yaml").write_text("hosts:\n  gpu8: {adress: x}\n")
    done = rdiag("hosts")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.splitlines() == [
        "rdiag: error: config: hosts.yaml:2:10: hosts.gpu8: unknown field 'adress'",
        "hint: did you mean address?",
    ]
    done = rdiag("hosts", "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["error"]["code"] == "CONFIG"
    (work / "hosts.yaml").write_text(SEVERAL)
    done = rdiag("hosts", "gpu7")
    assert done.returncode == 3
    assert "did you mean gpu" in done.stderr


def test_the_example_can_be_written_over_the_inventory_and_works(work: Path) -> None:
    # A shell creates the file before rdiag starts.
    (work / "hosts.yaml").write_text("")
    done = rdiag("hosts", "--example")
    assert done.returncode == 0
    (work / "hosts.yaml").write_text(done.stdout)
    assert [host["name"] for host in as_json()["hosts"]] == ["local"]


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        (Host("a", transport="local"), "this machine"),
        (Host("a", ssh="alias"), "alias"),
        (Host("a", ssh="alias", user="ada"), "ada@alias"),
        (Host("a", address="2001:db8::7"), "2001:db8::7"),
        (Host("a", address="2001:db8::7", port=22), "[2001:db8::7]:22"),
        (Host("a", address="h", user="u", port=2222), "u@h:2222"),
    ],
)
def test_targets(host: Host, shown: str) -> None:
    assert target(host) == shown
