"""Active probes keep off GPUs that somebody uses; a stand-in named nvidia-smi says who does."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from probes.lib.gpu import where
from probes.lib.gpu.occupancy import APPS_QUESTION, GPUS_QUESTION, GpuProcess
from probes.lib.gpu.one_at_a_time import GATE, Turn
from remote_diag.agent import guard as guard_module
from remote_diag.agent.guard import Guard, Question
from remote_diag.agent.layout import smi_lock
from remote_diag.agent.processes import Children
from remote_diag.agent.request import Request
from remote_diag.agent.verdict import Verdict
from tests.agent.conftest import wait_until
from tests.support.agent_driver import AgentDriver, Answer, lay_out_bundle, probe_source

PROBE = probe_source("return Result(value=os.environ.get('CUDA_VISIBLE_DEVICES', 'unset'))")
ME = pwd.getpwuid(os.geteuid()).pw_name


IDLE = ("0, GPU-a, 00000000:1B:00.0, 97887, 2, 0", "1, GPU-b, 00000000:1C:00.0, 97887, 0, [N/A]")
"""Two free GPUs; the second has no counter of utilization."""


class Driver:
    """The stand-in and what it answers: a shell script's text, replaced while it is in use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        self.calls.touch()
        self.answer()

    def script(self, text: str) -> None:
        """Make the stand-in do ``text``."""
        new = self.folder / "new"
        new.write_text(f'#!/bin/sh\necho "$@" >> {self.calls}\n{textwrap.dedent(text)}\n')
        new.chmod(0o755)
        new.rename(self.folder / "nvidia-smi")

    def answer(self, *processes: str, gpus: tuple[str, ...] = IDLE) -> None:
        """Make the stand-in list GPUs, and ``pid, name, memory`` of who computes on the first of them."""
        apps = "".join(f"GPU-a, {line}\n" for line in processes)
        rows = "".join(line + "\n" for line in gpus)
        self.script(f"case $1 in\n--query-gpu=*) cat <<'END'\n{rows}END\n;;\n*) cat <<'END'\n{apps}END\n;;\nesac")

    def times_asked(self) -> int:
        """Return how often it was started."""
        return len(self.calls.read_text().splitlines())


@pytest.fixture
def gpus(tmp_path: Path) -> Driver:
    folder = tmp_path / "driver"
    folder.mkdir()
    return Driver(folder)


@pytest.fixture
def stranger() -> Iterator[int]:
    """A process that is none of ours."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A bundle in a cache of its own: the lock is per cache."""
    return lay_out_bundle(tmp_path / "cache")


def run_active(host: Path, gpus: Driver, probe: bytes = PROBE, **changes: object) -> Answer:
    with AgentDriver(host) as driver:
        path = f"{gpus.folder}:{os.environ['PATH']}"
        return driver.run(probe, **{"effects": ["cuda"], "env": {"PATH": path}, **changes})


def test_free_gpus_are_used_and_seen(host: Path, gpus: Driver) -> None:
    answer = run_active(host, gpus, env={"PATH": str(gpus.folder) + ":/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "3"})
    assert answer.outcome == "ok"
    assert answer.result == {"value": "3"}
    asked = [" ".join(question) for question in (GPUS_QUESTION, APPS_QUESTION, GPUS_QUESTION)]
    assert gpus.calls.read_text().splitlines() == asked


def test_passive_probes_ask_nobody(host: Path, gpus: Driver, stranger: int) -> None:
    gpus.answer(f"{stranger}, python, 100 MiB")
    answer = run_active(host, gpus, effects=["reads-files", "runs-commands"])
    assert answer.result == {"value": ""}
    assert gpus.times_asked() == 0


@pytest.mark.parametrize("effect", ["cuda", "collectives"])
def test_a_busy_gpu_is_refused_with_its_owner(host: Path, gpus: Driver, stranger: int, effect: str) -> None:
    gpus.answer(f"{stranger}, /opt/train, with commas, 71234 MiB", "4000001, [Not Found], [N/A]")
    answer = run_active(host, gpus, effects=[effect])
    assert answer.outcome == "refused"
    assert f"pid {stranger} (/opt/train, with commas, user {ME}, 71234 MiB)" in answer.end["message"]
    assert "pid 4000001 ([Not Found], user unknown, [N/A])" in answer.end["message"]
    assert "--force" in answer.end["hint"]
    assert answer.of("started") == []


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("0, GPU-a, 00000000:1B:00.0, 97887, 5000, 0", "GPU 0: 5000 MiB are held by a process that is not shown here"),
        ("0, GPU-a, 00000000:1B:00.0, 97887, 10, 100", "GPU 0: it is at work (utilization 100 %, 100 %"),
        ("0, GPU-a, 00000000:1B:00.0, [N/A], [N/A], 0", "GPU 0: nobody can tell how much of its memory is used"),
    ],
)
def test_a_gpu_without_a_process_in_sight_may_be_busy_all_the_same(host: Path, gpus: Driver, row: str, words: str) -> None:
    gpus.answer(gpus=(row,))
    answer = run_active(host, gpus)
    assert answer.outcome == "refused"
    assert words in answer.end["message"]


def test_a_card_that_only_wakes_up_is_free(host: Path, gpus: Driver) -> None:
    gpus.script(f"""
        case $1 in --query-gpu=*)
            if [ $(grep -c query-gpu {gpus.calls}) -le 2 ]; then load=99; else load=0; fi
            echo "0, GPU-a, 00000000:1B:00.0, 97887, 0, $load"
        esac
    """)
    assert run_active(host, gpus).outcome == "ok"
    assert gpus.times_asked() == 5


def test_force_runs_all_the_same(host: Path, gpus: Driver, stranger: int) -> None:
    gpus.answer(f"{stranger}, python, 100 MiB")
    assert run_active(host, gpus, force=True).outcome == "ok"
    assert gpus.times_asked() == 0


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "version mismatch"),
        ("echo 'No devices were found'", "No devices were found"),
        ("echo 'index, uuid, pci.bus_id, memory.total, memory.used, utilization.gpu'", "makes no sense"),
        ("echo '0, GPU-a, 00000000:1B:00.0, 97887, [Unknown Error], 0'", "[Unknown Error]"),
        ("echo '0, GPU-a, 00000000:1B:00.0, 97887, 0, [GPU requires reset]'", "[GPU requires reset]"),
        ("true", "it lists no GPU"),
        ("case $1 in --query-gpu=*) echo '0, GPU-a, x, 97887, 0, 0';; *) echo 'pid, process_name';; esac", "not a process"),
        ("head -c 3000000 /dev/zero", "makes no sense"),
        ("kill -9 $$", "without a word"),
    ],
)
def test_an_answer_that_cannot_be_read_is_refused(host: Path, gpus: Driver, script: str, words: str) -> None:
    gpus.script(script)
    answer = run_active(host, gpus)
    assert answer.outcome == "refused"
    assert "cannot tell whether the GPUs are free" in answer.end["message"]
    assert words in answer.end["message"]
    assert "--force" in answer.end["hint"]


def test_without_nvidia_smi_nobody_can_tell(tmp_path: Path, gpus: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, "_MORE_PATH", ())
    guard = make_guard(tmp_path, gpus, path=str(tmp_path))
    verdict = guard.begin()
    assert verdict is not None
    assert verdict.outcome == "refused"
    assert "nvidia-smi is not on the PATH" in verdict.message
    guard.close()


def test_nvidia_smi_is_found_where_probes_find_it(tmp_path: Path, gpus: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """WSL keeps it in a folder that is not on the PATH of a login by ssh."""
    monkeypatch.setattr(where, "_MORE_PATH", (str(gpus.folder),))
    (tmp_path / "cat").symlink_to("/bin/cat")
    guard = make_guard(tmp_path, gpus, path=str(tmp_path))
    assert guard.begin() is None
    assert follow(guard) is None
    assert guard.free
    guard.close()


def follow(guard: Guard) -> Verdict | None:
    """Let the guard work until it knows."""
    while not guard.free:
        verdict = guard.step(time.monotonic())
        if verdict is not None:
            return verdict
        if guard.descriptor is not None:
            guard.read()
        time.sleep(0.005)
    return None


def test_while_another_one_asks_the_guard_waits_for_its_turn(tmp_path: Path, gpus: Driver) -> None:
    lock = smi_lock(str(tmp_path))
    turn = Turn(lock, "nvidia-smi -q", 20.0)
    assert turn.ready()
    with subprocess.Popen(["sleep", "1000"], pass_fds=turn.inherited) as other:
        turn.started(other.pid)
        guard = make_guard(tmp_path, gpus)
        assert guard.begin() is None
        for _ in range(10):
            soon = guard.next_time()
            assert soon is not None
            assert soon < time.monotonic() + 1.0
            assert guard.step(soon) is None
        assert gpus.times_asked() == 0
        other.kill()
        other.wait()
        turn.end(over=True)
        assert follow(guard) is None
        assert gpus.times_asked() == 3
        guard.close()
    # It has let go of everything.
    again = Turn(lock, "nvidia-smi -q", 20.0)
    assert again.ready()
    again.end(over=True)


def test_what_is_asked_inherits_the_lock_and_the_probe_does_not(host: Path, gpus: Driver, tmp_path: Path) -> None:
    """It lives as long as what may be stuck, not as long as its agent, nor as long as the probe."""
    plain = (gpus.folder / "nvidia-smi").read_text().partition("\n")[2]
    gpus.script(f"ls -l /proc/$$/fd > {tmp_path}/open\n{plain}")
    answer = run_active(host, gpus, probe_source("return Result(os.popen('ls -l /proc/%d/fd' % os.getpid()).read())"))
    assert answer.outcome == "ok"
    lock = smi_lock(str(host.parent))
    inherited = (tmp_path / "open").read_text()
    assert f"-> {lock}\n" in inherited
    assert f"{lock}{GATE}" not in inherited
    assert answer.result is not None
    assert str(lock) not in answer.result["value"]


def test_a_probe_that_asks_while_it_is_guarded_is_answered_and_so_is_the_guard(host: Path, gpus: Driver) -> None:
    """As nccl does, which looks at the GPUs under load; the guard asks every two seconds."""
    probe = probe_source("""
        from probes.lib.gpu.run_smi import Programs
        programs, until = Programs(60), time.monotonic() + 5
        while time.monotonic() < until:
            programs.ask("nvidia-smi", "-L")
        return Result([len(programs.asked), sorted({said.how for said in programs.asked}), os.environ["RDIAG_SMI_LOCK"]])
    """)
    gpus.script((gpus.folder / "nvidia-smi").read_text().partition("\n")[2].replace("case", "[ $1 = -L ] && exec sleep 0.05\ncase"))
    answer = run_active(host, gpus, probe)
    assert answer.outcome == "ok", answer.end
    assert answer.result is not None
    asked, how, lock = answer.result["value"]
    assert how == ["ended"]
    assert lock == smi_lock(str(host.parent))
    calls = gpus.calls.read_text().splitlines()
    assert calls.count("-L") >= asked
    during = calls[calls.index("-L") :]
    assert during.count(" ".join(APPS_QUESTION)) >= 2


def test_a_kept_run_that_is_repeated_by_hand_takes_turns_too(host: Path) -> None:
    with AgentDriver(host) as driver:
        answer = driver.run(probe_source("return Result(os.environ['RDIAG_SMI_LOCK'])"), keep=True)
    run = Path(answer.end["run_dir"])
    (run / "result.json").unlink()
    env = {name: text for name, text in os.environ.items() if name != "RDIAG_SMI_LOCK"}
    subprocess.run([sys.executable, str(host / "agent" / "probe_main.py"), str(run)], env=env, capture_output=True, check=True)
    assert json.loads((run / "result.json").read_text()) == answer.result == {"value": smi_lock(str(host.parent))}


def test_the_guard_gives_up_its_turn_when_it_rests(tmp_path: Path, gpus: Driver) -> None:
    lock = smi_lock(str(tmp_path))
    turn = Turn(lock, "nvidia-smi -q", 20.0)
    assert turn.ready()
    turn.started(os.getpid())
    guard = make_guard(tmp_path, gpus)
    assert guard.begin() is None
    guard.rest()
    assert guard.next_time() is None
    assert guard.step(time.monotonic() + 100) is None
    turn.end(over=True)
    os.truncate(str(lock), 0)
    later = Turn(lock, "nvidia-smi -q", 20.0)
    assert later.ready()
    later.end(over=True)
    guard.close()


def test_a_newcomer_ends_the_probe(host: Path, gpus: Driver, stranger: int, tmp_path: Path) -> None:
    probe = probe_source(f"""
        import json
        child = subprocess.Popen(["sleep", "1000"])
        json.dump([os.getpid(), child.pid], open({str(tmp_path / "ours.new")!r}, "w"))
        os.rename({str(tmp_path / "ours.new")!r}, {str(tmp_path / "ours")!r})
        time.sleep(1000)
    """)
    with AgentDriver(host) as driver:
        path = f"{gpus.folder}:{os.environ['PATH']}"
        driver.begin(probe, effects=["collectives"], env={"PATH": path})
        for frame in driver.incoming():
            if frame.kind == "need":
                driver.send_file(probe)
            if frame.kind == "started":
                break
        assert wait_until((tmp_path / "ours").exists)
        ours = [f"{pid}, python, 500 MiB" for pid in json.loads((tmp_path / "ours").read_text())]
        gpus.answer(*ours)
        asked = gpus.times_asked()
        assert wait_until(lambda: gpus.times_asked() >= asked + 2)
        gpus.answer(*ours, f"{stranger}, newcomer, 2 MiB")
        answer = driver.finish()
    assert answer.outcome == "refused"
    assert f"pid {stranger} (newcomer, user {ME}, 2 MiB)" in answer.end["message"]
    assert "began to use a GPU while the probe ran" in answer.end["message"]
    assert str(json.loads((tmp_path / "ours").read_text())[0]) not in answer.end["message"]
    assert answer.end["survivors"] == []


def test_one_active_probe_a_host_and_the_lock_dies_with_its_holder(host: Path, gpus: Driver) -> None:
    sleeper = probe_source("time.sleep(1000)")
    path = {"PATH": f"{gpus.folder}:{os.environ['PATH']}"}
    with AgentDriver(host) as holder:
        holder.begin(sleeper, effects=["cuda"], env=path)
        holder.wait_for("need")
        holder.send_file(sleeper)
        holder.wait_for("started")
        for force in (False, True):
            refused = run_active(host, gpus, force=force)
            assert refused.outcome == "refused"
            for words in ("another active probe", "test-probe", holder.run_id, f"pid {holder.process.pid}", f"user {ME}"):
                assert words in refused.end["message"]
        assert run_active(host, gpus, effects=[]).outcome == "ok"
        holder.process.kill()
        holder.process.wait()
    assert run_active(host, gpus).outcome == "ok"
    for name in Path("/proc").iterdir():
        if name.name.isdigit() and _belongs_to(name, holder.run_id):
            os.kill(int(name.name), 9)


def _belongs_to(process: Path, run_id: str) -> bool:
    try:
        return f"RDIAG_RUN_ID={run_id}".encode() in (process / "environ").read_bytes()
    except OSError:
        return False


def test_a_link_in_the_place_of_the_lock_is_refused(host: Path, gpus: Driver, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("x")
    (host.parent / "active.lock").symlink_to(tmp_path / "victim")
    assert run_active(host, gpus).outcome == "refused"
    assert (tmp_path / "victim").read_text() == "x"


def test_cancelling_while_the_driver_is_asked(host: Path, gpus: Driver) -> None:
    gpus.script("exec sleep 1000")
    with AgentDriver(host) as driver:
        driver.begin(PROBE, effects=["cuda"], env={"PATH": f"{gpus.folder}:{os.environ['PATH']}"})
        driver.wait_for("need")
        driver.send_file(PROBE)
        assert wait_until(lambda: gpus.times_asked() == 1)
        driver.send("cancel")
        begun = time.monotonic()
        assert driver.finish().outcome == "cancelled"
        assert time.monotonic() - begun < 5


def make_guard(tmp_path: Path, gpus: Driver, path: str | None = None) -> Guard:
    request = Request(json.dumps(AgentDriver(tmp_path).request(PROBE, effects=["cuda"])).encode())
    return Guard(str(tmp_path), request, {"PATH": path or f"{gpus.folder}:/usr/bin:/bin"}, Children())


@pytest.mark.parametrize("script", ["exec sleep 1000", "sleep 1000 & echo $! > ${0%/*}/left; exit 0", "while :; do echo; sleep 0.01; done"])
def test_a_driver_that_hangs_is_abandoned_and_never_asked_again(
    tmp_path: Path, gpus: Driver, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_module, "ANSWER_WITHIN", 0.4)
    gpus.script(script)
    guard = make_guard(tmp_path, gpus)
    assert guard.begin() is None
    begun = time.monotonic()
    while (verdict := guard.step(time.monotonic())) is None:
        if guard.descriptor is not None:
            guard.read()
        assert not guard.free
        time.sleep(0.01)
    assert time.monotonic() - begun < 2
    assert "did not answer within 0.4 s" in verdict.message
    assert guard.step(time.monotonic() + 100) is None
    assert gpus.times_asked() == 1
    guard.close()
    if (gpus.folder / "left").exists():
        os.kill(int((gpus.folder / "left").read_text()), 9)


class Known:
    """A tree that knows some processes."""

    def __init__(self, *pids: int) -> None:
        self.pids = pids

    def members(self) -> None:
        pass

    def knows(self, pid: int) -> bool:
        return pid in self.pids


def gpu_process(pid: int) -> GpuProcess:
    return GpuProcess(f"{pid}, name, 1 MiB")


@pytest.mark.parametrize("everyone_visible", [True, False])
def test_who_cannot_be_seen_counts_the_second_time(
    tmp_path: Path, gpus: Driver, stranger: int, everyone_visible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be one of ours that has just ended, or, in a container, one of ours by its number outside."""
    monkeypatch.setattr(guard_module, "_sees_every_process", lambda: everyone_visible)
    guard, tree = make_guard(tmp_path, gpus), Known(10)
    assert guard._judge_during([gpu_process(10), gpu_process(4_000_001)], tree) is None  # type: ignore[arg-type]
    assert guard._judge_during([gpu_process(4_000_002)], tree) is None  # type: ignore[arg-type]
    verdict = guard._judge_during([gpu_process(4_000_002)], tree)  # type: ignore[arg-type]
    assert (verdict is not None) == everyone_visible
    assert guard._judge_during([gpu_process(stranger)], tree) is not None  # type: ignore[arg-type]


@pytest.mark.parametrize("line", ["", "x", "1", "1, name", "x, name, 1 MiB", "No running processes found"])
def test_lines_that_name_no_process_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        GpuProcess(line)


@pytest.mark.parametrize("end", ["exit 0", "exec sleep 1000"])
def test_what_nvidia_smi_started_ends_with_the_question(tmp_path: Path, gpus: Driver, end: str) -> None:
    gpus.script(f"sleep 1000 & echo $! > {tmp_path}/child\n{end}")
    children = Children()
    question = Question(str(gpus.folder / "nvidia-smi"), dict(os.environ), children, ("-L",), Turn(None, "", 10.0))
    wait_until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text().endswith("\n"))
    child = Path("/proc", (tmp_path / "child").read_text().strip())
    assert question.lines() is None
    question.abandon()
    wait_until(lambda: not child.exists() or ") Z " in (child / "stat").read_text())
