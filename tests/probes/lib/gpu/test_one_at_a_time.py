"""One question to the driver at a time: turns, what a held lock is worth, and what cannot be locked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from probes.lib.gpu import collect, one_at_a_time, run_smi
from probes.lib.gpu.one_at_a_time import GATE, PAUSE, VARIABLE, Busy, Turn
from remote_diag.agent.layout import SMI_LOCK_VARIABLE, smi_lock
from tests.support.fake_smi import FakeSmi, h200

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "smi.lock")


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts programs that end with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def program(*argv: str, turn: Turn | None = None) -> subprocess.Popen[bytes]:
        inherited = () if turn is None else turn.inherited
        started.append(subprocess.Popen(argv or ("sleep", "1000"), pass_fds=inherited, start_new_session=True))
        if turn is not None:
            turn.started(started[-1].pid)
        return started[-1]

    yield program
    for process in started:
        process.kill()
        process.wait()


def take(turn: Turn) -> Turn:
    """Wait for a turn."""
    while not turn.ready():
        time.sleep(PAUSE)
    return turn


def refused(path: str, patience: float = 0.2) -> Busy:
    """Return why a turn is not given."""
    with pytest.raises(Busy) as caught:
        take(Turn(path, "nvidia-smi -q", 20.0, patience))
    return caught.value


def die_holding(turn: Turn) -> None:
    """Let go of the lock as an agent does that is killed: its descriptors are closed, and nothing else happens."""
    turn.end(over=False)


def test_the_agent_and_the_probes_mean_the_same_variable() -> None:
    assert VARIABLE == SMI_LOCK_VARIABLE
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert smi_lock("/cache") == f"/cache/nvidia-smi.{boot}.lock"


def test_a_turn_is_given_again_once_it_is_over(path: str, start: Start) -> None:
    for _ in range(3):
        turn = take(Turn(path, "nvidia-smi -L", 20.0))
        process = start("true", turn=turn)
        process.wait()
        turn.end(over=True)
    assert Path(path).stat().st_mode & 0o777 == 0o600


def test_what_is_left_behind_keeps_the_lock_though_its_asker_is_gone(path: str, start: Start) -> None:
    turn = take(Turn(path, "nvidia-smi -L", 20.0))
    process = start(turn=turn)
    die_holding(turn)
    busy = refused(path)
    assert busy.holder is not None
    assert (busy.holder.pid, busy.holder.asked, busy.unkillable) == (process.pid, "nvidia-smi -L", None)
    assert f"now pid {process.pid} (state S" in str(busy)
    process.kill()
    process.wait()
    take(Turn(path, "nvidia-smi -L", 20.0)).end(over=True)


def test_the_recorded_process_counts_even_without_the_lock(path: str, start: Start) -> None:
    """One that is stuck in its own end may have lost its descriptors."""
    turn = take(Turn(path, "nvidia-smi -L", 20.0))
    process = start()
    turn.started(process.pid)
    die_holding(turn)
    assert refused(path).holder is not None
    process.kill()
    process.wait()
    take(Turn(path, "nvidia-smi -L", 20.0)).end(over=True)


def test_a_number_that_was_given_again_is_somebody_else(path: str, start: Start) -> None:
    turn = take(Turn(path, "nvidia-smi -L", 20.0))
    turn.started(start().pid)
    die_holding(turn)
    record = json.loads(Path(path).read_text())
    Path(path).write_text(json.dumps({**record, "started": record["started"] - 1}))
    take(Turn(path, "nvidia-smi -L", 20.0)).end(over=True)


def test_a_lock_that_leaked_to_something_long_lived_does_not_count_for_ever(
    path: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorded process is gone; what holds the lock is something that it started."""
    monkeypatch.setattr(one_at_a_time, "_LEAKED", 0.3)
    turn = take(Turn(path, "nvidia-smi -L", 20.0))
    process = start("sh", "-c", "sleep 1000 & exit", turn=turn)
    process.wait()
    die_holding(turn)
    assert refused(path).holder is not None
    for _ in range(2):
        again = take(Turn(path, "nvidia-smi -L", 20.0))
        assert again.inherited == ()
        # The record alone tells now who asks.
        asker = start(turn=again)
        holder = refused(path).holder
        assert holder is not None
        assert holder.pid == asker.pid
        asker.kill()
        asker.wait()
        again.end(over=True)
    os.killpg(process.pid, 9)


def test_an_asker_that_lives_frees_the_lock_whatever_has_inherited_it(path: str, start: Start) -> None:
    turn = take(Turn(path, "nvidia-smi -L", 20.0))
    process = start("sh", "-c", "sleep 1000 & exit", turn=turn)
    process.wait()
    turn.end(over=True)
    later = Turn(path, "nvidia-smi -L", 20.0)
    assert later.ready()
    assert later.inherited
    later.end(over=True)
    os.killpg(process.pid, 9)


def test_an_asker_that_died_before_it_could_say_whom_it_started(path: str, start: Start) -> None:
    turn = take(Turn(path, "nvidia-smi -L", 20.0))
    process = subprocess.Popen(["sleep", "1000"], pass_fds=turn.inherited)
    die_holding(turn)
    busy = refused(path)
    assert busy.unkillable is None
    # A busy machine may take seconds from one line to the next.
    assert re.search(r"pid unknown, asked \d+ s ago: nvidia-smi -L", str(busy))
    process.kill()
    process.wait()
    take(Turn(path, "nvidia-smi -L", 20.0)).end(over=True)


@pytest.mark.parametrize("content", [b"", b"\0" * 2048, b"[]", b'{"pid": "x", "started": 1}', b'{"pid": 1, "started": tru'])
def test_a_record_that_makes_no_sense_is_none(path: str, content: bytes, start: Start) -> None:
    turn = take(Turn(path, "nvidia-smi -L", 20.0))
    start(turn=turn)
    Path(path).write_bytes(content)
    assert "pid unknown" in str(refused(path))
    turn.end(over=True)
    take(Turn(path, "nvidia-smi -L", 20.0)).end(over=True)


def test_in_another_container_the_lock_decides(path: str, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = take(Turn(path, "nvidia-smi -L", 20.0))
    process = start(turn=turn)
    monkeypatch.setattr(one_at_a_time, "_namespace", lambda: "pid:[1]")
    assert refused(path).holder is not None
    turn.end(over=True)
    take(Turn(path, "nvidia-smi -L", 20.0)).end(over=True)
    assert process.poll() is None


def test_what_nobody_is_left_to_end_is_ended_when_its_time_is_over(
    path: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_at_a_time, "_LATE", 0.0)
    turn = take(Turn(path, "nvidia-smi -L", 0.2))
    process = start(turn=turn)
    die_holding(turn)
    threading.Thread(target=process.wait).start()
    take(Turn(path, "nvidia-smi -L", 20.0)).end(over=True)
    assert process.wait() == -9


@pytest.mark.parametrize("kind", ["no folder", "a folder in its place", "a link", "a link at the gate"])
def test_without_a_place_for_the_lock_nobody_waits(path: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("x")
    if kind == "no folder":
        path = str(tmp_path / "missing" / "lock")
    elif kind == "a folder in its place":
        Path(path).mkdir()
    else:
        Path(path + (GATE if "gate" in kind else "")).symlink_to(tmp_path / "victim")
    turns = [Turn(path, "nvidia-smi -L", 20.0) for _ in range(2)]
    assert [turn.ready() for turn in turns] == [True, True]
    for turn in turns:
        assert turn.inherited == ()
        turn.started(os.getpid())
        turn.end(over=True)
    assert (tmp_path / "victim").read_text() == "x"


def test_a_read_only_folder(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("probes.lib.gpu.one_at_a_time.os.open", refuse)
    assert Turn(path, "nvidia-smi -L", 20.0).ready()


def test_without_locks_the_record_tells(path: str, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("probes.lib.gpu.one_at_a_time.fcntl.flock", unsupported)
    turn = take(Turn(path, "nvidia-smi -L", 20.0))
    process = start(turn=turn)
    die_holding(turn)
    holder = refused(path).holder
    assert holder is not None
    assert holder.pid == process.pid


def test_a_lock_file_that_was_removed_is_made_anew(path: str) -> None:
    take(Turn(path, "nvidia-smi -L", 20.0)).end(over=True)
    Path(path).unlink()
    turn = take(Turn(path, "nvidia-smi -L", 20.0))
    assert Path(path).exists()
    assert not Turn(path, "nvidia-smi -L", 20.0).ready()
    turn.end(over=True)


def test_who_waits_is_next(path: str) -> None:
    """One that asks question after question does not keep another one out."""
    first = take(Turn(path, "one", 20.0))
    first.started(os.getpid())
    waiting = Turn(path, "two", 20.0)
    assert not waiting.ready()
    first.end(over=True)
    os.truncate(path, 0)
    assert not Turn(path, "one, again", 20.0).ready()
    assert waiting.ready()
    waiting.end(over=True)


# -- with the programs themselves


@pytest.fixture
def smi(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> FakeSmi:
    stand_in = FakeSmi(tmp_path / "bin", h200(2))
    monkeypatch.setenv("PATH", stand_in.path)
    monkeypatch.setenv(VARIABLE, path)
    monkeypatch.setattr(run_smi, "SMI_SECONDS", 5.0)
    return stand_in


def test_many_at_once_get_their_answers_one_after_the_other(smi: FakeSmi) -> None:
    smi.program("nvidia-smi", f"mkdir {smi.folder}/inside || exit 9; sleep 0.02; rmdir {smi.folder}/inside; echo fine")
    answers: list[run_smi.Said] = []

    def ask() -> None:
        programs = run_smi.Programs(60)
        answers.extend(programs.ask("nvidia-smi", "-L") for _ in range(5))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(said.how, said.out) for said in answers] == [("ended", "fine\n")] * 20


def test_a_second_run_does_not_start_what_hangs_once_more(smi: FakeSmi) -> None:
    with smi.hanging(killable=False):
        first = run_smi.Programs(60).ask("nvidia-smi", "-L", seconds=0.5)
        assert first.how == "timeout"
        programs = run_smi.Programs(60)
        second = programs.ask("nvidia-smi", "-q")
        assert (second.how, second.hung, second.pid) == ("not-asked", True, first.pid)
        assert programs.stuck("nvidia-smi") is second
        if first.pid is not None:
            words = f"an earlier question has no answer yet, the driver may hang: pid {first.pid} (killed and still there, state D"
            assert words in second.why
            assert "s ago: nvidia-smi -L" in second.why
            assert len(smi.calls()) == 1
    assert run_smi.Programs(60).ask("nvidia-smi", "-L").ok


def test_nvml_that_hangs_is_not_followed_by_nvidia_smi(
    smi: FakeSmi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hang in the same driver; the module hangs as soon as it is imported, as nvmlInit would."""
    package = tmp_path / "site" / "pynvml"
    package.mkdir(parents=True)
    freezer = "/sys/fs/cgroup/freezer"
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(collect, "SMI_SECONDS", 1.5)
    with smi.hanging("-", killable=False):
        hang = json.loads((smi.folder / "state.json").read_text())["hang"]["freezer"]
        if hang is None:
            pytest.skip(f"no freezer cgroup (version 1) can be made here: {freezer}")
        (package / "__init__.py").write_text(
            f"import os, time\nopen({hang!r} + '/cgroup.procs', 'w').write(str(os.getpid()))\ntime.sleep(1000)\n"
        )
        for _ in range(2):
            seen = collect.collect(60, lambda *_: None)
            assert smi.calls() == []
            (trouble,) = [one for one in seen.troubles if one.code == "driver-hangs"]
            assert trouble.level == "fail"
            assert "cannot be killed" in trouble.meaning
            assert seen.hung is not None
            assert seen.hung.command == "NVML (nvidia-ml-py)"
    (package / "__init__.py").write_text("")
    assert collect.collect(60, lambda *_: None).source == "nvidia-smi"
