"""The agent on every interpreter of this machine, the too old ones included, and how little it loads."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agent.conftest import RunBody
from tests.support.agent_driver import REPOSITORY, AgentDriver, probe_source

NONCE = "0123456789abcdef" * 2


def find_interpreters() -> dict[str, tuple[tuple[int, int], str]]:
    """Return version and path of every Python found here, by a short name; one per minor version."""
    names = ["python2.7", *(f"python3.{minor}" for minor in range(5, 20))]
    candidates = [path for name in names if (path := shutil.which(name))]
    candidates += sorted(str(path) for path in Path("~/.pyenv/versions").expanduser().glob("*/bin/python"))
    candidates.append(sys.executable)
    found: dict[str, tuple[tuple[int, int], str]] = {}
    for path in candidates:
        asked = subprocess.run(
            [path, "-c", "import sys; print('%d %d' % sys.version_info[:2])"], capture_output=True, timeout=30
        )
        if asked.returncode == 0:
            major, minor = map(int, asked.stdout.split())
            found.setdefault(f"{major}.{minor}", ((major, minor), path))
    return found


INTERPRETERS = find_interpreters()
NEW = [pytest.param(path, id=name) for name, (version, path) in INTERPRETERS.items() if version >= (3, 8)]
OLD = [pytest.param(path, id=name) for name, (version, path) in INTERPRETERS.items() if version < (3, 8)]


@pytest.mark.parametrize("python", NEW)
def test_a_run_on_every_supported_interpreter(bundle: Path, python: str, tmp_path: Path) -> None:
    probe = probe_source("""
        import probes.lib
        print("héllo")
        context.progress(1, 1)
        context.finding("ok", "all-well", "fine", value=1.5)
        if params.value == "fail":
            raise ValueError("as asked")
        if not os.path.exists(context.run_dir + "/again"):
            open(context.run_dir + "/again", "w").close()
            subprocess.Popen(["sleep", "1000"], start_new_session=True, env={})
        return Result(value=[list(sys.version_info[:2]), params.value])
    """)
    with AgentDriver(bundle, python=python) as driver:
        answer = driver.run(probe, params={"value": "é 🦙"}, keep=True)
    assert answer.outcome == "ok", answer.end
    assert answer.stderr == b""
    version, value = answer.result["value"]
    assert answer.json("hello")[0]["python"].startswith(f"{version[0]}.{version[1]}.")
    assert value == "é 🦙"
    assert answer.log() == "héllo\n".encode()
    assert len(answer.of("finding")) == len(answer.of("progress")) == 1
    assert len(answer.end["details"]) == 1
    assert answer.end["survivors"] == []
    by_hand = subprocess.run(
        [python, str(bundle / "agent" / "probe_main.py"), answer.end["run_dir"]],
        capture_output=True, timeout=30, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert by_hand.returncode == 0, by_hand.stderr
    shutil.rmtree(answer.end["run_dir"])
    with AgentDriver(bundle, python=python) as driver:
        answer = driver.run(probe, params={"value": "fail"})
    assert answer.outcome == "probe-error"
    assert "ValueError: as asked" in answer.end["details"]


@pytest.mark.parametrize("python", OLD)
def test_an_old_interpreter_says_so_in_a_frame(bundle: Path, python: str) -> None:
    with AgentDriver(bundle, python=python) as driver:
        said = json.loads(driver.wait_for("python-too-old").payload)
        assert driver.process.wait(30) == 0
    assert tuple(map(int, said["python"].split(".")))[:2] < (3, 8)
    assert Path(said["executable"]).name.startswith("python")


def test_the_machine_offers_something_to_test_with() -> None:
    """Not a property of the code: whoever reads the report should see what was not covered."""
    missing = {f"3.{minor}" for minor in range(8, 14)} - set(INTERPRETERS)
    if missing or not OLD:
        pytest.skip("no interpreter here for: " + ", ".join(sorted(missing) + ([] if OLD else ["older than 3.8"])))


@pytest.mark.parametrize("arguments", [[], ["x"], [NONCE.upper()], [NONCE, NONCE]])
def test_a_start_without_a_nonce_explains_itself(arguments: list[str]) -> None:
    started = subprocess.run(
        [sys.executable, "-E", "-s", "-S", str(REPOSITORY / "remote_diag" / "agent" / "__main__.py"), *arguments],
        capture_output=True,
        timeout=30,
    )
    assert started.returncode == 2
    assert started.stdout == b""
    assert b"usage" in started.stderr


def test_the_version_floor_holds() -> None:
    """Features are looked up in tables, so this covers paths that no test takes."""
    vermin = Path(sys.executable).with_name("vermin")
    if not vermin.exists():
        pytest.skip("vermin is not installed beside this interpreter (it comes with the dev extra)")
    checked = subprocess.run(
        [str(vermin), "-t=3.8-", "--violations", "--no-tips", str(REPOSITORY / "remote_diag" / "agent")],
        capture_output=True,
        timeout=60,
    )
    assert checked.returncode == 0, checked.stdout.decode()


def test_the_agent_loads_next_to_nothing_before_the_probe_starts(bundle: Path) -> None:
    """Every module here is paid for by every run; the ones below were measured at 2 to 20 ms each."""
    code = f"""
import sys
sys.path.insert(0, {str(bundle)!r})
import agent.main, agent.supervisor, agent.spawn, agent.digest, agent.wirejson
agent.digest.sha256(b"")
agent.wirejson.decode(b'{{"a": [1.5, "b"]}}')
agent.wirejson.encode({{"a": "b"}})
print(" ".join(sorted(sys.modules)))
"""
    loaded = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, timeout=30, check=True)
    heavy = {
        "argparse", "asyncio", "collections", "contextlib", "ctypes", "dataclasses", "enum", "functools", "hashlib",
        "inspect", "json", "logging", "pathlib", "random", "re", "selectors", "shutil", "signal", "socket", "subprocess",
        "tempfile", "threading", "traceback", "typing",
    }  # fmt: skip
    assert not heavy & set(loaded.stdout.decode().split())


def test_constant_tables_agree_with_the_client(run_body: RunBody) -> None:
    from remote_diag.agent import protocol

    assert set(protocol.CHILD_OUTCOMES) < set(protocol.OUTCOMES)
    assert len(set(protocol.OUTCOMES)) == len(protocol.OUTCOMES) == 12
    assert set(protocol.EFFECTS) == {
        "reads-files", "runs-commands", "network", "writes-files", "cuda", "collectives",
    }  # fmt: skip
