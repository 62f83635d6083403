from __future__ import annotations

import json
from pathlib import Path

from remote_diag.cli.env import watched
from tests.support.cli import rdiag


def test_the_environment_of_this_machine(tmp_path: Path) -> None:
    ran = rdiag("env", "--no-torch", "--json", home=tmp_path, NCCL_P2P_LEVEL="4", NCCL_API_KEY="hunter2")
    assert ran.code in {1, 10}, ran.err
    answer = json.loads(ran.out)
    settings = {setting["name"]: setting for setting in answer["result"]["settings"]}
    assert (settings["NCCL_P2P_LEVEL"]["value"], settings["NCCL_P2P_LEVEL"]["source"]) == ("4", "login shell")
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
    assert changed.keys() == {"settings[NCCL_DEBUG/login shell].value", "settings[NCCL_ALGO/login shell]"}
    assert changed["settings[NCCL_DEBUG/login shell].value"]["threshold"] == "WARN"


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
    assert rdiag("env", "--redact", "--save-baseline", home=tmp_path).code == 2
    assert rdiag("env", "--pid", "0", home=tmp_path).code == 2


def test_watched_paths_are_those_of_the_result() -> None:
    from probes import env
    from remote_diag.baselines import differences

    names = {field.split(".")[0].split("[")[0] for field in (watch.path for watch in watched())}
    assert names <= set(env.Result.__dataclass_fields__)
    assert differences({}, {}, watched()) == ()
