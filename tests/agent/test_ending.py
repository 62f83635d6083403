"""A run is ended for many reasons; whatever its processes tried, none of them is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from remote_diag.agent import processes
from remote_diag.agent.digest import bundle_digest
from remote_diag.agent.processes import Children, Ending, Process, Tree, read_process, send
from remote_diag.agent.spawn import spawn
from tests.agent.conftest import RunBody, alive, pids_in, wait_until
from tests.support.agent_driver import AgentDriver, lay_out_bundle, probe_source

WITHIN = 10.0
"""Seconds in which everything must be gone, whatever the reason."""

# Puts down its number, then becomes a sleeper that can be told apart by nothing: own session, no environment,
# orphaned twice over, deaf to polite requests, holding the probe's output open.
ESCAPE = """
def note():
    with open(params.value, "a") as pids:
        pids.write("%d\\n" % os.getpid())

def escape():
    middle = os.fork()
    if middle:
        os.waitpid(middle, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    note()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.execve("/bin/sleep", ["sleep", "1000"], {})

"""
STUBBORN = ESCAPE + """
note()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
escape()
escape()
subprocess.Popen(["sleep", "1000"])
while not os.path.exists(params.value + ".go"):
    time.sleep(0.01)
"""


def start(driver: AgentDriver, pid_file: Path, body: str, processes: int, **changes: object) -> list[int]:
    """Start a probe and return the numbers of its processes once ``processes`` of them are known."""
    probe = probe_source(body)
    driver.begin(probe, params={"value": str(pid_file)}, **changes)
    for frame in driver.incoming():
        if frame.kind == "need":
            driver.send_file(probe)
        if frame.kind == "started":
            break
    assert wait_until(lambda: len(pids_in(pid_file)) >= processes)
    pids = pids_in(pid_file)
    assert all(alive(pid) for pid in pids)
    return pids


@pytest.mark.parametrize("reason", ["cancel", "sigterm", "sighup", "sigint", "deadline", "lease", "output"])
def test_every_reason_ends_every_process(bundle: Path, pid_file: Path, reason: str) -> None:
    body = STUBBORN + {"output": "while True: os.write(1, bytes(65536))"}.get(reason, "time.sleep(1000)")
    limits = {"deadline": {"deadline_s": 1.5}, "lease": {"lease_s": 1.5}}.get(reason, {})
    with AgentDriver(bundle) as driver:
        pids = start(driver, pid_file, body, 3, **limits)
        Path(f"{pid_file}.go").touch()
        begun = time.monotonic()
        if reason == "cancel":
            driver.send("cancel")
        elif reason.startswith("sig"):
            driver.process.send_signal(getattr(signal, reason.upper()))
        answer = driver.finish()
    assert time.monotonic() - begun < WITHIN
    assert not [pid for pid in pids if alive(pid)]
    outcomes = {"deadline": "deadline", "lease": "lease", "output": "output-limit"}
    assert answer.outcome == outcomes.get(reason, "cancelled")
    words = {"deadline": "deadline of 1.5 s", "lease": "nothing was heard", "output": "more than", "cancel": "cancelled"}
    assert words.get(reason, reason.upper()) in answer.end["message"]
    assert answer.end["survivors"] == []
    assert answer.of("result") == []
    assert not driver.run_dir.exists()


def test_an_orphan_of_a_quick_probe_finds_a_slow_agent_ready(tmp_path: Path, pid_file: Path) -> None:
    bundle = lay_out_bundle(tmp_path / "cache")
    module = bundle / "agent" / "processes.py"
    code = module.read_text()
    slow = code.replace("        import ctypes\n", "        import ctypes, time\n        time.sleep(1.0)\n")
    assert slow != code
    module.write_text(slow)
    bundle = bundle.rename(bundle.parent / bundle_digest(str(bundle)))
    probe = probe_source(ESCAPE + "escape()\nwhile not os.path.getsize(params.value): pass\nreturn Result(value=1)")
    pid_file.touch()
    with AgentDriver(bundle) as driver:
        answer = driver.run(probe, params={"value": str(pid_file)})
    assert answer.outcome == "ok", answer.end
    (pid,) = pids_in(pid_file)
    assert not alive(pid)
    assert re.search(rf"process {pid} \(.*\) had not ended", answer.end["details"][0])


@pytest.mark.parametrize(
    ("closed", "keep"), [("stdin", False), ("stdin", True), ("stdout", False), ("both", False)]
)
def test_a_client_that_goes_away_takes_the_run_with_it(
    bundle: Path, pid_file: Path, closed: str, keep: bool
) -> None:
    with AgentDriver(bundle) as driver:
        pids = start(driver, pid_file, STUBBORN + "time.sleep(1000)", 3, keep=keep)
        Path(f"{pid_file}.go").touch()
        assert driver.process.stdin is not None
        assert driver.process.stdout is not None
        begun = time.monotonic()
        if closed in ("stdin", "both"):
            driver.process.stdin.close()
        if closed in ("stdout", "both"):
            driver.process.stdout.close()
        assert wait_until(lambda: not any(map(alive, pids)), WITHIN)
        assert time.monotonic() - begun < processes.GRACE
        assert driver.process.wait(WITHIN) == 0
        assert driver.stderr() == b""
    assert driver.run_dir.exists() == keep


def test_an_agent_that_is_killed_takes_the_probe_and_its_children_with_it(bundle: Path, pid_file: Path) -> None:
    body = f"""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGIO):
            signal.signal(number, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        open({str(pid_file)!r}, "a").write("%d\\n%d\\n" % (os.getpid(), child.pid))
        time.sleep(1000)
    """
    with AgentDriver(bundle) as driver:
        pids = start(driver, pid_file, body, 2)
        driver.process.kill()
        assert wait_until(lambda: not any(map(alive, pids)), WITHIN)
    assert driver.process.returncode == -signal.SIGKILL


def test_a_client_that_goes_away_before_the_request_leaves_nothing(bundle: Path) -> None:
    for words in (b"", b"0" * 10, b"0" * 32 + b"\n"):
        with AgentDriver(bundle) as driver:
            driver.write(words)
            driver.wait_for("hello")
            assert driver.process.stdin is not None
            driver.process.stdin.close()
            assert driver.process.wait(WITHIN) == 0


def test_a_first_line_that_is_no_nonce_is_refused(agent: AgentDriver) -> None:
    agent.write(b"x" * 40 + b"\n")
    agent.wait_for("hello")
    assert agent.process.wait(WITHIN) == 2
    assert b"nonce" in agent.stderr()


def test_a_damaged_stream_from_the_client_ends_the_run(bundle: Path, pid_file: Path) -> None:
    with AgentDriver(bundle) as driver:
        pids = start(driver, pid_file, ESCAPE + "note(); time.sleep(1000)", 1)
        driver.write(driver.encoder.encode("beat", b"x").replace(b"x\n", b"y\n"))
        answer = driver.finish()
    assert answer.outcome == "cancelled"
    assert "damaged" in answer.end["message"]
    assert not any(map(alive, pids))


def test_a_polite_probe_gets_its_grace_and_its_last_words_arrive(bundle: Path, pid_file: Path) -> None:
    body = ESCAPE + """
    def bye(number, frame):
        os.write(1, b"cleaning up")
        time.sleep(0.3)
        os.write(1, b", done")
        os._exit(0)
    signal.signal(signal.SIGTERM, bye)
    note()
    while True:
        time.sleep(0.01)
    """.replace("\n    ", "\n")
    with AgentDriver(bundle) as driver:
        start(driver, pid_file, body, 1)
        begun = time.monotonic()
        driver.send("cancel")
        answer = driver.finish()
    assert answer.outcome == "cancelled"
    assert answer.log() == b"cleaning up, done"
    assert time.monotonic() - begun < processes.GRACE


def test_asking_twice_skips_the_grace(bundle: Path, pid_file: Path) -> None:
    with AgentDriver(bundle) as driver:
        pids = start(driver, pid_file, STUBBORN, 3)
        begun = time.monotonic()
        driver.send("cancel")
        driver.send("cancel")
        driver.finish()
    assert time.monotonic() - begun < processes.GRACE
    assert not any(map(alive, pids))


def test_what_outlives_the_probe_is_ended_and_told(bundle: Path, pid_file: Path) -> None:
    """The orphans hold the output pipes open; nobody waits for them to close."""
    body = ESCAPE + "escape()\nescape()\nprint('last words')\nreturn Result(value=1)"
    with AgentDriver(bundle) as driver:
        answer = driver.run(probe_source(body), params={"value": str(pid_file)})
    assert answer.outcome == "ok"
    assert answer.result == {"value": 1}
    assert answer.log() == b"last words\n"
    assert wait_until(lambda: len(pids_in(pid_file)) == 0 or not any(map(alive, pids_in(pid_file))))
    told = [line for line in answer.end["details"] if "had not ended" in line]
    assert len(told) == 2
    assert all(re.search(r"process \d+ \(\S+\)", line) for line in told)


def test_a_family_that_keeps_forking_is_caught(bundle: Path, pid_file: Path) -> None:
    """Each member lives for a moment only, so that no list of processes is ever complete."""
    body = ESCAPE + """
if os.fork() == 0:
    os.setsid()
    while True:
        if os.fork():
            time.sleep(0.005)
            os._exit(0)
note()
time.sleep(1000)
"""
    with AgentDriver(bundle) as driver:
        start(driver, pid_file, body, 1)
        driver.send("cancel")
        answer = driver.finish()
    assert answer.outcome == "cancelled"
    assert answer.end["survivors"] == []
    assert not processes_of(driver.run_id)


def processes_of(run_id: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"RDIAG_RUN_ID={run_id}".encode() in environment.split(b"\0"):
                found.append(int(entry.name))
    return found


def test_adopted_children_are_reaped_while_the_run_goes_on(bundle: Path, pid_file: Path) -> None:
    body = ESCAPE + """
for _ in range(20):
    middle = os.fork()
    if middle == 0:
        if os.fork() == 0:
            os._exit(0)
        os._exit(0)
    os.waitpid(middle, 0)
note()
time.sleep(1000)
"""
    with AgentDriver(bundle) as driver:
        start(driver, pid_file, body, 1)

        def children() -> int:
            return sum(
                1 for found in processes.all_processes().values() if found.parent == driver.process.pid
            )

        assert wait_until(lambda: children() == 1)
        driver.send("cancel")
        driver.finish()


def test_other_peoples_processes_are_left_alone(bundle: Path, pid_file: Path) -> None:
    run_id = "spare-1"
    strangers = [
        subprocess.Popen(["sleep", "1000"], env={"RDIAG_RUN_ID": value, "X": f"RDIAG_RUN_ID={run_id}"})
        for value in (run_id + "0", "x" + run_id, "")
    ]
    try:
        with AgentDriver(bundle, run_id=run_id) as driver:
            start(driver, pid_file, STUBBORN, 3)
            driver.send("cancel")
            assert driver.finish().end["survivors"] == []
        assert [stranger.poll() for stranger in strangers] == [None] * 3
    finally:
        for stranger in strangers:
            stranger.kill()
            stranger.wait()


def test_beats_are_answered_before_during_and_while_ending(bundle: Path, pid_file: Path) -> None:
    with AgentDriver(bundle) as driver:
        driver.write(driver.nonce.encode() + b"\n")
        driver.send("beat")
        driver.wait_for("beat")
        probe = probe_source(STUBBORN + "# beats")
        driver.send("request", json.dumps(driver.request(probe, params={"value": str(pid_file)})).encode())
        driver.wait_for("need")
        driver.send_file(probe)
        driver.wait_for("started")
        driver.send("beat")
        driver.wait_for("beat")
        assert wait_until(lambda: len(pids_in(pid_file)) == 3)
        driver.send("cancel")
        driver.send("beat")
        driver.wait_for("beat")
        driver.finish()


def test_beats_keep_the_lease(bundle: Path) -> None:
    probe = probe_source("time.sleep(2); return Result(value=1)")
    with AgentDriver(bundle) as driver:
        driver.begin(probe, lease_s=1.0)
        beats = 0
        for frame in driver.incoming():
            if frame.kind == "need":
                driver.send_file(probe)
            beats += frame.kind == "beat"
            if frame.kind in ("started", "beat") and beats < 5:
                time.sleep(0.3)
                driver.send("beat")
            if frame.kind == "end":
                break
    assert b'"outcome":"ok"' in driver.frames[-1].payload


def test_a_client_that_does_not_read_makes_nobody_grow_or_wait(bundle: Path) -> None:
    body = "block = bytes(65536)\nwhile True: os.write(1, block)"
    with AgentDriver(bundle) as driver:
        probe = probe_source(body)
        driver.begin(probe, deadline_s=2.0, output_bytes=1 << 30)
        for frame in driver.incoming():
            if frame.kind == "need":
                driver.send_file(probe)
            if frame.kind == "started":
                break
        status = Path(f"/proc/{driver.process.pid}/status")
        peak = 0
        until = time.monotonic() + 3.5
        while time.monotonic() < until:
            match = re.search(r"VmRSS:\s+(\d+) kB", status.read_text())
            assert match is not None
            peak = max(peak, int(match.group(1)))
            time.sleep(0.05)
        answer = driver.finish()
    assert answer.outcome == "deadline"
    assert len(answer.log()) < 4 << 20
    assert peak < 60_000


def test_a_run_cancelled_while_its_file_is_awaited(bundle: Path) -> None:
    with AgentDriver(bundle) as driver:
        driver.begin(probe_source("return Result() # never sent"))
        driver.wait_for("need")
        driver.send("cancel")
        answer = driver.finish()
    assert answer.outcome == "cancelled"
    assert not driver.run_dir.exists()


# -- the parts, for what cannot be provoked from outside


class FakeTree:
    """A tree whose members survive everything."""

    def __init__(self, *members: Process) -> None:
        self._members = {member.pid: member for member in members}
        self.adopts_all = False

    def empty(self) -> bool:
        return False

    def members(self) -> dict[int, Process]:
        return self._members


def line(pid: int, name: bytes, state: bytes = b"D", started: int = 5) -> bytes:
    fields = [state, b"1", b"2", b"3", *[b"0"] * 13, b"1", b"0", b"%d" % started]
    return b"%d (%s) " % (pid, name) + b" ".join(fields)


def test_survivors_are_given_up_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(processes, "send", lambda process, number: sent.append((process.pid, number)))
    stuck = Process(4_000_001, line(4_000_001, b"nvidia-smi"))
    ending = Ending(FakeTree(stuck), now=100.0)  # type: ignore[arg-type]
    assert not ending.step(100.0)
    assert not ending.step(101.9)
    assert not ending.step(102.0)
    assert not ending.step(106.9)
    assert ending.step(107.0)
    assert sent == [(4_000_001, signal.SIGTERM), (4_000_001, signal.SIGKILL), (4_000_001, signal.SIGKILL)]
    assert [(one.pid, one.name, one.state) for one in ending.survivors] == [(4_000_001, "nvidia-smi", "D")]


def test_names_with_brackets_and_blanks_are_read() -> None:
    found = Process(7, line(7, b"a) S 1 (b", b"S"))
    assert (found.name, found.state, found.parent, found.group, found.session) == ("a) S 1 (b", "S", 1, 2, 3)
    assert not found.dead
    assert Process(7, line(7, b"x", b"Z")).dead


@pytest.mark.parametrize("with_handles", [True, False])
def test_only_the_process_that_was_seen_is_signalled(with_handles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_handles:
        monkeypatch.setattr(os, "pidfd_open", None, raising=False)
    with subprocess.Popen(["sleep", "1000"]) as sleeper:
        seen = read_process(sleeper.pid)
        assert seen is not None
        predecessor = Process(sleeper.pid, line(sleeper.pid, b"sleep", started=seen.started - 1))
        send(predecessor, signal.SIGKILL)
        time.sleep(0.05)
        assert sleeper.poll() is None
        send(seen, signal.SIGKILL)
        assert sleeper.wait(WITHIN) == -signal.SIGKILL
    send(seen, signal.SIGKILL)


FAMILY = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
with open(sys.argv[1], "a") as pids:
    pids.write("%d\\n" % os.getpid())
time.sleep(1000)
"""


def test_without_adoption_the_marker_and_the_session_find_the_family(pid_file: Path) -> None:
    """A kernel (or a sandbox) that refuses to make the agent a reaper of orphans."""
    children = Children()
    env = {**os.environ, "RDIAG_RUN_ID": "marked-1"}
    spawned = spawn([sys.executable, "-c", FAMILY, str(pid_file)], env, None, 0o022)
    children.await_(spawned.pid)
    tree = Tree("marked-1", spawned.pid, children)
    assert wait_until(lambda: len(pids_in(pid_file)) == 2)
    pids = pids_in(pid_file)
    assert not tree.empty()
    assert set(tree.members()) == set(pids)
    os.kill(spawned.pid, signal.SIGKILL)
    assert wait_until(lambda: not alive(spawned.pid))
    assert set(tree.members()) == set(pids) - {spawned.pid}
    ending = Ending(tree, time.monotonic(), grace=0.0)
    assert wait_until(lambda: ending.step(time.monotonic()))
    assert not any(map(alive, pids))
    assert ending.survivors == []
    assert os.WTERMSIG(children.ended[spawned.pid]) == signal.SIGKILL


def test_without_proc_the_process_group_is_ended(pid_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.setattr(processes, "_HAS_PROC", False)
    children = Children()
    code = "import os, sys, time; os.fork(); open(sys.argv[1], 'a').write('%d\\n' % os.getpid()); time.sleep(1000)"
    spawned = spawn([sys.executable, "-c", code, str(pid_file)], dict(os.environ), None, 0o022)
    children.await_(spawned.pid)
    tree = Tree("group-1", spawned.pid, children)
    assert wait_until(lambda: len(pids_in(pid_file)) == 2)
    ending = Ending(tree, time.monotonic())
    assert wait_until(lambda: ending.step(time.monotonic()))
    assert wait_until(lambda: not any(map(alive, pids_in(pid_file))))


def test_a_result_that_is_here_outranks_a_later_stop(run_body: RunBody) -> None:
    answer = run_body(
        """
        import atexit
        atexit.register(time.sleep, 1000)
        return Result(value=1)
        """,
        deadline_s=1.0,
    )
    assert answer.outcome == "ok"
    assert answer.result == {"value": 1}


def test_waiting_costs_no_processor_time_and_no_limit_is_too_long(bundle: Path, pid_file: Path) -> None:
    month = 31 * 24 * 3600.0
    with AgentDriver(bundle) as driver:
        start(driver, pid_file, ESCAPE + "note(); time.sleep(1000)", 1, deadline_s=month, lease_s=month)

        def ticks() -> int:
            fields = Path(f"/proc/{driver.process.pid}/stat").read_bytes().rsplit(b")", 1)[1].split()
            return int(fields[11]) + int(fields[12])

        before = ticks()
        time.sleep(1.0)
        assert ticks() - before < 0.2 * os.sysconf("SC_CLK_TCK")
        driver.send("cancel")
        assert driver.finish().outcome == "cancelled"
