from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from remote_diag.cli.env import watched
from tests.support.cli import rdiag
from tests.support.sshd import TestSshd


def test_the_environment_of_this_machine(tmp_path: Path) -> None:
    ran = rdiag("env", "--no-torch", "--json", home=tmp_path, NCCL_P2P_LEVEL="4", NCCL_API_KEY="hunter2")
    assert ran.code in {1, 10}, ran.err
    answer = json.loads(ran.out)
    settings = {setting["name"]: setting for setting in answer["result"]["settings"]}
    assert (settings["NCCL_P2P_LEVEL"]["value"], settings["NCCL_P2P_LEVEL"]["source"]) == ("4", "inherited")
    assert "p2p-level-number" in {finding["code"] for finding in answer["findings"]}
    assert "hunter2" not in ran.out
    # What the agent sets to hide GPUs from this probe is not told as anybody's setting.
    assert "CUDA_VISIBLE_DEVICES" not in settings


def test_settings_of_the_inventory_are_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "hosts.yaml").write_text("hosts:\n  here:\n    transport: local\n    env: {NCCL_DEBUG: WARN}\n")
    ran = rdiag("env", "--no-torch", "--json", "--host", "here", "-i", "hosts.yaml", home=tmp_path)
    (setting,) = [each for each in json.loads(ran.out)["result"]["settings"] if each["name"] == "NCCL_DEBUG"]
    assert (setting["value"], setting["source"]) == ("WARN", "inventory")


def test_what_changed_since_a_baseline(tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    saved = rdiag("env", "--no-torch", "--save-baseline", home=tmp_path, XDG_DATA_HOME=data, NCCL_DEBUG="WARN")
    assert saved.code in {0, 1, 10}
    ran = rdiag("env", "--no-torch", "--json", home=tmp_path, XDG_DATA_HOME=data, NCCL_DEBUG="INFO", NCCL_ALGO="Ring")
    changed = {finding["subject"]: finding for finding in json.loads(ran.out)["findings"] if finding["code"] == "changed-since-baseline"}
    assert changed.keys() == {"settings[NCCL_DEBUG/inherited].value", "settings[NCCL_ALGO/inherited]"}
    assert changed["settings[NCCL_DEBUG/inherited].value"]["threshold"] == "WARN"


def test_two_hosts_beside_each_other(tmp_path: Path) -> None:
    (tmp_path / "hosts.yaml").write_text(
        "hosts:\n  a: {transport: local, env: {NCCL_ALGO: Ring}}\n  b: {transport: local, env: {NCCL_ALGO: Tree}}\n"
    )
    data = str(tmp_path / "data")
    absent = rdiag("env", "--no-torch", "--host", "b", "--like", "a", "-i", "hosts.yaml", home=tmp_path, XDG_DATA_HOME=data)
    assert absent.code == 3
    assert "rdiag env --host a --save-baseline" in absent.err
    rdiag("env", "--no-torch", "--host", "a", "--save-baseline", "-i", "hosts.yaml", home=tmp_path, XDG_DATA_HOME=data)
    ran = rdiag("env", "--no-torch", "--json", "--host", "b", "--like", "a", "-i", "hosts.yaml", home=tmp_path, XDG_DATA_HOME=data)
    (changed,) = [finding for finding in ran.json["findings"] if finding["code"] == "changed-since-baseline"]
    assert (changed["value"], changed["threshold"]) == ("Tree", "Ring")
    assert changed["threshold_source"].startswith("baseline of a, saved ")


def test_misuse(tmp_path: Path) -> None:
    for other in ("--save-baseline", "--keep", "--dry-run"):
        assert rdiag("env", "--redact", other, home=tmp_path).code == 2
    assert rdiag("env", "--pid", "0", home=tmp_path).code == 2


def test_watched_paths_are_those_of_the_result() -> None:
    from probes import env
    from remote_diag.comparison import differences

    names = {field.split(".")[0].split("[")[0] for field in (watch.path for watch in watched().watches)}
    assert names <= set(env.Result.__dataclass_fields__)
    assert differences({}, {}, watched()) == ()


NAMES = "hosts:\n  secretbox: {transport: local}\n  othersecret: {address: 127.0.0.1, port: 9, user: ada, connect_timeout: 2}\n"


def test_redaction_gives_the_host_of_the_inventory_another_name(tmp_path: Path) -> None:
    (tmp_path / "hosts.yaml").write_text(NAMES)
    common = ("env", "--no-torch", "--redact", "-i", "hosts.yaml")
    plain = rdiag(*common, "-H", "secretbox", home=tmp_path, MASTER_ADDR="secretbox")
    assert plain.out.startswith("host-1: env: ")
    alone = rdiag(*common, "-H", "secretbox", "--json", home=tmp_path)
    assert alone.json["host"] == "host-1"
    both = rdiag(*common, "-H", "othersecret", "-H", "secretbox", "--json", home=tmp_path)
    first, second = both.json["hosts"]
    assert (first["host"], first["status"], first["error"]["host"], second["host"]) == ("host-1", "error", "host-1", "host-2")
    lost = rdiag(*common, "-H", "othersecret", "--json", home=tmp_path)
    assert lost.code == 4
    assert "host-1" in lost.out
    for ran in (plain, alone, both, lost):
        assert not [word for word in ("secretbox", "othersecret", "ada", "127.0.0.1") if f'"{word}' in ran.out or f" {word}" in ran.out], ran.out
    # Who has to reach the host is told which one it is.
    assert "othersecret" in rdiag(*common, "-H", "othersecret", "-H", "secretbox", home=tmp_path).err


def test_a_variable_that_somebody_handed_on_is_not_laid_to_the_login_shell(tmp_path: Path, start_sshd: Callable[..., TestSshd]) -> None:
    with start_sshd(shell="zsh", env={"NCCL_DEBUG": "WARN"}) as server:
        (server.home / ".zshenv").write_text("export NCCL_ALGO=Ring\n")
        (tmp_path / "hosts.yaml").write_text(
            f"hosts:\n  box: {{address: 127.0.0.1, port: {server.port}, user: {server.user}, environment: {{python: {sys.executable}}},\n"
            f"    identity_file: {server.identity_file}, known_hosts: {server.known_hosts}}}\n"
        )
        ran = rdiag("env", "--no-torch", "--json", "-H", "box", "-i", "hosts.yaml", home=tmp_path)
    found = {each["name"]: each for each in ran.json["result"]["settings"]}
    assert (found["NCCL_DEBUG"]["source"], found["NCCL_DEBUG"]["places"]) == ("inherited", [])
    assert found["NCCL_ALGO"]["source"] == "inherited"
    assert [place.endswith("/.zshenv:1") for place in found["NCCL_ALGO"]["places"]] == [True]
    assert "login shell" not in ran.out
