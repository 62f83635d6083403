"""``rdiag run`` as a process: exit codes, JSON, signals, and what is left on the host afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .support.cli import command, environment, rdiag
from .support.probe_files import write_probe
from .support.sshd import TestSshd, wait_until

LINGER = """
import os, signal, subprocess, sys, time
# One child that ignores TERM, one double-forked daemon in a session of its own, one without our environment.
subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(300)", params.tag])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(300)", params.tag])
    os._exit(0)
subprocess.Popen(["setsid", sys.executable, "-c", "import time; time.sleep(300)", params.tag], env={})
open(params.ready, "w").close()
time.sleep(300)
"""


@pytest.fixture
def inventory(zsh_server: TestSshd, tmp_path: Path) -> Path:
    path = tmp_path / "hosts.yaml"
    path.write_text(
        f"""
hosts:
  zsh: {{address: 127.0.0.1, port: {zsh_server.port}, user: {zsh_server.user},
        identity_file: {zsh_server.identity_file}, known_hosts: {zsh_server.known_hosts}}}
  gone: {{address: 127.0.0.1, port: 1, user: nobody}}
  broken: {{address: 127.0.0.1, port: {zsh_server.port}, user: {zsh_server.user},
           identity_file: {zsh_server.identity_file}, known_hosts: {zsh_server.known_hosts},
           environment: {{venv: /nowhere}}}}
groups: {{both: [zsh, gone]}}
"""
    )
    return path


def tagged(tag: str) -> list[int]:
    """Return the processes that carry ``tag`` as an argument, zombies not counted."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if tag.encode() in arguments:
                found.append(int(entry.name))
    return found


class Running:
    """A lingering probe on the test server, started by a real ``rdiag`` process."""

    def __init__(self, inventory: Path, tmp_path: Path) -> None:
        self.tag = f"linger-{os.urandom(8).hex()}"
        self.ready = tmp_path / "ready"
        probe = write_probe(
            tmp_path / "mine", "linger", LINGER, params={"tag": "str", "ready": "str"}, effects=("runs-commands",)
        )
        self.process = subprocess.Popen(
            command("run", str(probe), "-H", "zsh", "-i", str(inventory), "--set", f"tag={self.tag}",
                    "--set", f"ready={self.ready}"),
            env=environment(tmp_path / "home"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        assert wait_until(self.ready.exists, 20.0), self.process.communicate(timeout=5)
        assert wait_until(lambda: len(tagged(self.tag)) == 3, 5.0), tagged(self.tag)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pid in tagged(self.tag):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def running(inventory: Path, tmp_path: Path) -> Iterator[Running]:
    (tmp_path / "home").mkdir()
    started = Running(inventory, tmp_path)
    yield started
    started.close()


def test_a_killed_client_leaves_nothing_on_the_host(running: Running, zsh_server: TestSshd) -> None:
    running.process.send_signal(signal.SIGKILL)
    assert running.process.wait(5) == -signal.SIGKILL
    assert wait_until(lambda: not tagged(running.tag), 10.0), "something of the run is left on the host"
    assert wait_until(lambda: not list(zsh_server.home.glob(".cache/rdiag/runs/*")), 5.0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_everything_at_once(running: Running, number: signal.Signals, code: int) -> None:
    started = time.monotonic()
    running.process.send_signal(number)
    out, err = running.process.communicate(timeout=15)
    assert running.process.returncode == code
    assert tagged(running.tag) == [], "all was ended when the client ended"
    assert time.monotonic() - started < 10
    assert out == b""
    assert b"Traceback" not in err


def test_a_frozen_client_loses_its_lease(inventory: Path, tmp_path: Path) -> None:
    text = inventory.read_text().replace("hosts:", "defaults: {lease: 10}\nhosts:", 1)
    inventory.write_text(text)
    (tmp_path / "home").mkdir()
    running = Running(inventory, tmp_path)
    try:
        running.process.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: not tagged(running.tag), 25.0)
        running.process.send_signal(signal.SIGCONT)
        _, err = running.process.communicate(timeout=20)
        assert running.process.returncode == 4, err
    finally:
        running.process.send_signal(signal.SIGCONT)
        running.close()


MISBEHAVIOUR: dict[str, tuple[str, int]] = {
    "a gigabyte": ('import sys\nfor _ in range(1024):\n    sys.stdout.write("x" * (1 << 20))\nreturn Result(value="never")', 8),
    "a gigabyte of stderr": (
        'import os\nblock = b"e" * (1 << 20)\nfor _ in range(1024):\n    os.write(2, block)\nreturn Result(value="never")',
        8,
    ),
    "no result": ("import os\nos._exit(0)", 8),
    "forged frames and no result": (
        'import os\nfor fd in (1, 2):\n    os.write(fd, b"RDIAG1 " + b"0" * 32 + b" 0 result 2 a3830d3e\\n{}\\n")\nos._exit(0)',
        8,
    ),
    "binary noise and no result": ("import os\nos.write(1, os.urandom(1 << 20))\nos._exit(0)", 8),
    "killed by itself": ("import os\nos.kill(os.getpid(), 11)", 8),
    "an exception": ('raise RuntimeError("no")', 8),
    "exit": ("raise SystemExit(3)", 8),
    "not a number": ('return Result(value=float("nan"))', 8),
    "another type": ("return Result(value=7)", 8),
    "no Result": ('return {"value": "x"}', 8),
    "noise and a result": (
        'import os, sys\nos.write(1, os.urandom(1 << 16))\nprint("RDIAG1 x", flush=True)\nreturn Result(value="fine")',
        0,
    ),
}


# The peak of a child counts from its parent's size at the fork, so the parent must be small: not the test runner.
WEIGH = """
import os, resource, sys
pid = os.spawnv(os.P_NOWAIT, sys.argv[2], sys.argv[2:])
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
open(sys.argv[1], "w").write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(status)
"""


@pytest.mark.parametrize("case", MISBEHAVIOUR)
def test_a_probe_that_misbehaves(inventory: Path, tmp_path: Path, case: str) -> None:
    body, code = MISBEHAVIOUR[case]
    probe = write_probe(tmp_path / "mine", "odd", body)
    done = subprocess.run(
        [sys.executable, "-S", "-c", WEIGH, str(tmp_path / "peak"),
         *command("run", str(probe), "-H", "zsh", "-i", str(inventory), "--json")],
        env=environment(tmp_path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
    )  # fmt: skip
    err = done.stderr
    assert done.returncode == code, err
    assert int((tmp_path / "peak").read_text()) < 200 * 1024, "kilobytes"
    answer = json.loads(done.stdout)
    if code:
        assert answer["error"]["exit"] == code
        assert answer["error"]["message"]
        assert err.decode().startswith("rdiag: error: zsh: ")
        assert b"Traceback (most recent call last)" not in err
    else:
        assert answer["result"] == {"value": "fine"}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("run",), 2, "Missing argument"),
        (("rum", "hello"), 2, "Did you mean 'run'"),
        (("run", "hello", "--set", "nmae=x"), 2, "name"),
        (("run", "helo"), 3, "hello"),
        (("run", "hello", "-H", "zhs"), 3, "zsh"),
        (("run", "hello", "-H", "gone"), 4, "gone: connect"),
        (("run", "hello", "-H", "broken"), 7, "/nowhere/bin/python"),
        (("run", "hello", "-H", "zsh", "--timeout", "0"), 2, "timeout"),
        (("run", "hello", "-H", "zsh", "--timeout", "nan"), 2, "timeout"),
        (("run", "hello", "-H", "zsh", "--timeout", "inf"), 2, "timeout"),
        (("run", "hello", "-H", "zsh", "--timeout", "1e9"), 2, "timeout"),
    ],
)
def test_errors_have_their_code_and_say_what_to_do(
    inventory: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    extra = () if arguments[0] == "rum" or len(arguments) == 1 else ("-i", str(inventory))
    plain = rdiag(*arguments, *extra, home=tmp_path)
    assert plain.code == code, plain.err
    assert said in plain.err
    assert "Traceback" not in plain.err
    assert plain.out == ""
    if code != 2 or extra:
        machine = rdiag(*arguments, *extra, "--json", home=tmp_path)
        assert machine.code == code
        assert machine.json["error"]["exit"] == code
        assert machine.json["schema_version"] == 1


def test_a_deadline(inventory: Path, tmp_path: Path) -> None:
    probe = write_probe(tmp_path / "mine", "slow", "import time\ntime.sleep(300)")
    ran = rdiag("run", str(probe), "-H", "zsh", "-i", str(inventory), "--timeout", "1", "--json", home=tmp_path)
    assert ran.code == 124
    assert ran.json["error"]["code"] == "DEADLINE"
    assert "--timeout" in ran.json["error"]["hint"]


def test_several_hosts_keep_what_each_gave(inventory: Path, tmp_path: Path) -> None:
    ran = rdiag("run", "hello", "-H", "both", "-H", "local", "-i", str(inventory), "--json", home=tmp_path)
    assert ran.code == 4
    answers = {answer["host"]: answer for answer in ran.json["hosts"]}
    assert list(answers) == ["zsh", "gone", "local"]
    assert answers["zsh"]["status"] == answers["local"]["status"] == "ok"
    assert answers["gone"]["error"]["code"] == "UNREACHABLE"
    plain = rdiag("run", "hello", "-H", "both", "-i", str(inventory), home=tmp_path)
    assert plain.code == 4
    assert "zsh: hello: ok" in plain.out
    assert "gone: connect" in plain.err


def test_json_is_one_object_with_the_promised_names(inventory: Path, tmp_path: Path) -> None:
    ran = rdiag("run", "hello", "-H", "zsh", "-i", str(inventory), "--set", "name=\x1b[2J\u202e", "--json", home=tmp_path)
    assert ran.code == 0
    assert list(ran.json) == ["schema_version", "host", "probe", "run_id", "status", "result", "findings", "timing"]
    assert ran.out.isascii()
    assert "\x1b" not in ran.out
    assert ran.err == "", "silent in a pipe"


def test_what_a_host_says_cannot_steer_a_terminal(inventory: Path, tmp_path: Path) -> None:
    body = 'print("\\x1b]0;printed\\x07", flush=True)\nreturn Result(value="\\x1b[2J\\u202eevil")'
    probe = write_probe(tmp_path / "mine", "evil", body)
    ran = rdiag("run", str(probe), "-H", "zsh", "-i", str(inventory), "-v", home=tmp_path)
    assert ran.code == 0
    for shown in (ran.out, ran.err):
        assert "\x1b" not in shown
        assert "\u202e" not in shown
    assert "\\x1b[2J\\u202eevil" in ran.out
    assert "\\x1b]0;printed\\x07" in ran.err


def test_dry_run_contacts_nothing_and_names_everything(inventory: Path, tmp_path: Path, zsh_server: TestSshd) -> None:
    before = zsh_server.log()
    ran = rdiag("run", "hello", "-H", "zsh", "-i", str(inventory), "--set", "name=a & b", "--dry-run", "--json", home=tmp_path)
    assert ran.code == 0
    assert zsh_server.log() == before
    plan: dict[str, Any] = ran.json
    assert plan["command"] == f"sh .cache/rdiag/{plan['bundle']['sha256']}/enter"
    assert "agent/__main__.py" in plan["bundle"]["files"]
    assert plan["request"]["params"]["name"] == "a & b"
    assert len(plan["probe"]["sha256"]) == 64
    assert plan["command"] in rdiag("run", "hello", "-H", "zsh", "-i", str(inventory), "--dry-run", home=tmp_path).out


def test_a_dry_run_hides_what_sounds_like_a_secret(tmp_path: Path) -> None:
    (tmp_path / "hosts.yaml").write_text('hosts: {box: {address: box, env: {HF_TOKEN: hunter2, NCCL_DEBUG: INFO}}}\n')
    for extra in ((), ("--json",)):
        ran = rdiag("run", "hello", "-H", "box", "-i", "hosts.yaml", "--dry-run", *extra, home=tmp_path)
        assert ran.code == 0
        assert "hunter2" not in ran.out + ran.err
        assert "HF_TOKEN" in ran.out
        assert "INFO" in ran.out


def test_a_kept_run_can_be_run_again_by_hand(inventory: Path, tmp_path: Path) -> None:
    ran = rdiag("run", "hello", "-H", "zsh", "-i", str(inventory), "--set", "name=Ada", "--keep", home=tmp_path)
    line = next(line for line in ran.out.splitlines() if line.startswith("run it again there: "))
    folder = Path(line.split()[-1])
    (folder / "result.json").unlink()
    again = subprocess.run(line.removeprefix("run it again there: ").split(), capture_output=True, text=True, cwd="/")
    assert again.returncode == 0, again.stderr
    assert json.loads((folder / "result.json").read_text())["greeting"] == "Hello, Ada!"


@pytest.mark.parametrize("arguments", [("run", "hello"), ("run", "hello", "--json"), ("probes",), ("hosts", "--json")])
def test_a_full_disk_and_a_reader_that_went_away(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command(*arguments), stdout=full, stderr=subprocess.PIPE, env=environment(tmp_path), cwd=tmp_path, timeout=60
        )
    assert done.returncode == 74, done.stderr
    assert b"Traceback" not in done.stderr
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            command(*arguments), stdout=writer, stderr=subprocess.PIPE, env=environment(tmp_path), cwd=tmp_path, timeout=60
        )
    finally:
        os.close(writer)
    assert done.returncode == 141, done.stderr
    assert done.stderr == b""


def test_parameters_come_from_a_file_and_set_wins(inventory: Path, tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("name: file\n")
    arguments = ("run", "hello", "-H", "zsh", "-i", str(inventory), "--json", "--params", str(tmp_path / "params.yaml"))
    assert rdiag(*arguments, home=tmp_path).json["result"]["greeting"] == "Hello, file!"
    assert rdiag(*arguments, "--set", "name=set", home=tmp_path).json["result"]["greeting"] == "Hello, set!"


def test_on_this_machine_relative_paths_start_here(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    probe = write_probe(tmp_path / "mine", "where", "import os\nreturn Result(value=os.getcwd())")
    ran = rdiag("run", str(probe), "--json", home=tmp_path, cwd=tmp_path / "here")
    assert ran.json["result"]["value"] == str(tmp_path / "here")


def test_a_users_own_probe_is_found_in_the_working_directory(inventory: Path, tmp_path: Path) -> None:
    write_probe(tmp_path / "probes", "mine", 'return Result(value="own")')
    ran = rdiag("run", "mine", "-H", "zsh", "-i", str(inventory), "--json", home=tmp_path)
    assert ran.json["result"] == {"value": "own"}


def test_a_progress_bar_on_a_terminal_only(inventory: Path, tmp_path: Path) -> None:
    body = (
        "import time\nfor step in range(6):\n    context.progress(step, 6, unit='files', label='reading')\n"
        "    time.sleep(0.1)\nreturn Result(value='done')"
    )
    probe = write_probe(tmp_path / "mine", "steps", body)
    arguments = command("run", str(probe), "-H", "zsh", "-i", str(inventory), "--json")
    leader, follower = os.openpty()
    process = subprocess.Popen(
        arguments, stdin=follower, stdout=subprocess.PIPE, stderr=follower, env=environment(tmp_path, TERM="xterm")
    )
    os.close(follower)
    shown = bytearray()
    try:
        while piece := os.read(leader, 65536):
            shown += piece
    except OSError:
        pass  # how Linux says that the other side of a terminal is closed
    out, _ = process.communicate(timeout=30)
    os.close(leader)
    assert process.returncode == 0
    assert json.loads(out)["result"] == {"value": "done"}
    assert b"reading" in shown
    assert b"files" in shown


@pytest.mark.parametrize(
    ("redirections", "code", "said"),
    [
        (">&-", 74, "cannot write"),
        ("--json >&-", 74, "cannot write"),
        ("2>&-", 0, ""),
        ("<&- 2>&-", 0, ""),
        ("<&- >&- 2>&-", 74, ""),
    ],
)
def test_closed_standard_streams(tmp_path: Path, redirections: str, code: int, said: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$@" {redirections}', "sh", *command("run", "hello", "-H", "local")],
        env=environment(tmp_path / "home"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert done.stderr.count("rdiag: error") == (1 if said else 0)
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "home" / "state" / "rdiag" / "crashes").exists()


def test_a_locale_that_lacks_the_characters(tmp_path: Path) -> None:
    probe = write_probe(tmp_path / "mine", "snow", 'return Result(value="\\u2603")')
    done = rdiag("run", str(probe), "-H", "local", home=tmp_path / "home", PYTHONIOENCODING="ascii")
    assert (done.code, "\\u2603" in done.out) == (0, True), done.err


def test_a_probe_in_the_place_of_another_is_named(tmp_path: Path) -> None:
    write_probe(tmp_path / "probes", "hello", 'return Result(value="mine")')
    done = rdiag("run", "hello", "-H", "local", "--json", home=tmp_path)
    assert done.json["result"] == {"value": "mine"}
    assert done.err.startswith("rdiag: note: hello is probes/hello.py, in place of /")
    assert rdiag("run", "probes/hello.py", "-H", "local", home=tmp_path).err == ""


def test_the_way_to_the_host_is_begun_before_the_heavy_imports(tmp_path: Path) -> None:
    program = """
import sys
import remote_diag.transport

class Begun:
    def prestart(self):
        heavy = ("remote_diag.session", "remote_diag.bundle", "remote_diag.probe", "fabric", "pydantic", "yaml", "rich")
        sys.exit(f"begun with {[name for name in heavy if name in sys.modules]}")

remote_diag.transport.for_host = lambda host: Begun()
sys.argv = ["rdiag", "run", "hello", "--host", "local"]
from remote_diag.cli.entry import cli, Settings
cli(obj=Settings())
"""
    call = [sys.executable, "-c", program]
    # The second time the inventory is known, and neither read as YAML nor validated.
    for _ in range(2):
        done = subprocess.run(call, env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stderr == "begun with []\n"
