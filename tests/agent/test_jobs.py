"""Jobs on the host, with real processes: how they start, how they end, and what is known of them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remote_diag.agent.jobs import record
from remote_diag.agent.jobs.files import JobFiles
from remote_diag.agent.jobs.request import SentFile
from tests.agent.conftest import alive, wait_until
from tests.agent.test_interpreters import NEW
from tests.support.agent_driver import AgentDriver, lay_out_bundle
from tests.support.job_host import Ended, JobHost, finish, launch_request, marked
from tests.support.places import mounted


@pytest.fixture
def host(tmp_path: Path) -> Iterator[JobHost]:
    with JobHost(lay_out_bundle(tmp_path / "cache")) as jobs:
        yield jobs


# -- starting


def test_started_means_that_the_program_runs(host: JobHost) -> None:
    report = host.launch(["/bin/sleep", "100"])
    assert report["state"] == "running"
    assert Path(f"/proc/{report['pid']}/cmdline").read_bytes() == b"/bin/sleep\x00100\x00"
    assert report["job"] == "job.v1"
    assert report["log"] == str(host.directory("job.v1") / "stdout.log")


def test_the_job_is_in_a_session_of_its_own_and_the_supervisor_in_another(host: JobHost) -> None:
    pid = host.launch(["/bin/sleep", "100"])["pid"]
    supervisor = host.record("job.v1").state["supervisor_pid"]
    assert os.getsid(pid) == pid
    assert os.getsid(supervisor) not in {pid, os.getsid(0)}
    # Not its leader either: it could never get a terminal.
    assert os.getsid(supervisor) != supervisor


def test_words_reach_the_program_as_they_are(host: JobHost) -> None:
    words = ["a b", "$HOME", "`id`", '"', "'", "", "*", "ü", "\\", "{other}"]
    source = "import json,sys,os; print(json.dumps([sys.argv[1:], os.environ['V']]))"
    host.python(source, *words, env={"V": "$(x) ; y"})
    host.wait_for("job.v1", "exited")
    assert json.loads((host.directory("job.v1") / "stdout.log").read_text()) == [words, "$(x) ; y"]


def test_places_of_the_job_are_filled_in(host: JobHost) -> None:
    host.launch(["/bin/echo", "{job}|{attempt}|{logs}|{files}/x"], gpus=None)
    host.wait_for("job.v1", "exited")
    folder = host.directory("job.v1")
    assert (folder / "stdout.log").read_text() == f"job.v1|1|{folder}/ranks|{folder}/files/x\n"


@pytest.mark.parametrize(
    ("argv", "message", "hint"),
    [
        (["no-such-program-here"], "cannot start no-such-program-here: no such program", "PATH"),
        (["./missing.sh"], "cannot start ./missing.sh: no such file", None),
        (["./plain.txt"], "cannot start ./plain.txt: Permission denied", None),
        (["./noline.sh"], "Exec format error", "#!"),
        (["./badline.sh"], "the interpreter that its first line names does not exist", None),
    ],
)
def test_a_program_that_does_not_start_leaves_no_job(
    host: JobHost, argv: list[str], message: str, hint: str | None
) -> None:
    files = {"plain.txt": b"x", "noline.sh": b"echo\n", "badline.sh": b"#!/no/such/interpreter\n"}
    request = launch_request(argv, "job", files)
    for one in request["files"]:
        one["mode"] = 0o755 if one["path"].endswith(".sh") else 0o644
    with pytest.raises(Ended) as caught:
        host.operate("launch", files.values(), **request)
    assert caught.value.outcome == "environment"
    assert message in caught.value.message
    assert hint is None or hint in (caught.value.hint or "")
    assert host.jobs() == []
    assert [one for one in os.listdir(host.cache / "jobs") if not one.startswith(".numbers")] == []
    assert os.listdir(host.cache / "launches") == []
    assert host.launch(["/bin/true"])["job"] == "job.v1"


def test_a_missing_working_directory_is_named(host: JobHost) -> None:
    with pytest.raises(Ended, match="cannot enter the working directory /no/such/folder: No such file"):
        host.launch(["/bin/true"], workdir="/no/such/folder")


def test_attempts_are_numbered_and_keep_their_own_files(host: JobHost) -> None:
    for text in (b"one", b"two"):
        host.launch(["/bin/sh", "-c", "cat data.txt; echo changed >data.txt"], files={"data.txt": text})
        host.wait_for(host.jobs()[-1]["job"], "exited")
    host.launch(["/bin/cat", "data.txt"], files={"data.txt": b"one"})
    host.wait_for("job.v3", "exited")
    logs = [(host.directory(f"job.v{number}") / "stdout.log").read_bytes() for number in (1, 2, 3)]
    # The third attempt gets what was sent, not what the first one made of it.
    assert logs == [b"one", b"two", b"one"]


def test_launches_at_once_get_different_numbers(host: JobHost) -> None:
    reports: list[Any] = []
    threads = [
        threading.Thread(target=lambda: reports.append(host.launch(["/bin/sleep", "50"], force=True))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(one["job"] for one in reports) == [f"job.v{number}" for number in range(1, 7)]


def test_only_missing_files_are_asked_for(host: JobHost) -> None:
    host.launch(["/bin/true"], files={"a": b"a" * 1000, "b": b"b" * 1000})
    host.wait_for("job.v1", "exited")
    with AgentDriver(host.bundle) as driver:
        host.begin(driver, "launch", **launch_request(["/bin/true"], "job", {"a": b"a" * 1000, "b": b"c" * 1000}))
        finish(driver, [b"c" * 1000])
        (need,) = [json.loads(frame.payload) for frame in driver.frames if frame.kind == "need"]
        assert len(need["files"]) == 1


def test_a_damaged_stored_file_is_asked_for_again(host: JobHost) -> None:
    host.launch(["/bin/true"], files={"a": b"a" * 1000})
    host.wait_for("job.v1", "exited")
    (blob,) = (host.cache / "blobs").iterdir()
    blob.write_bytes(b"x" * 1000)
    host.launch(["/bin/cat", "a"], files={"a": b"a" * 1000})
    host.wait_for("job.v2", "exited")
    assert (host.directory("job.v2") / "stdout.log").read_bytes() == b"a" * 1000


def test_a_file_that_arrives_damaged_starts_nothing(host: JobHost) -> None:
    with AgentDriver(host.bundle) as driver:
        host.begin(driver, "launch", **launch_request(["/bin/true"], "job", {"a": b"right"}))
        need = json.loads(driver.wait_for("need").payload)
        driver.send("file", need["files"][0].encode() + b"\n" + b"wrong")
        with pytest.raises(Ended, match="arrived damaged"):
            finish(driver)
    assert host.jobs() == []
    assert os.listdir(host.cache / "blobs") == []


class CountingPeer:
    """Stands for a client; counts how often it could have been answered."""

    def __init__(self) -> None:
        self.pulses = 0

    def pulse(self) -> None:
        self.pulses += 1


def test_the_client_is_answered_while_large_files_are_looked_at_and_copied(tmp_path: Path) -> None:
    content = os.urandom(5 << 20)
    name = hashlib.sha256(content).hexdigest()
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / name).write_bytes(content)
    peer = CountingPeer()
    files = JobFiles(str(tmp_path), [SentFile("a", name, len(content), 0o600)], peer)  # type: ignore[arg-type]
    assert files.receive_missing() == 0
    looked_at = peer.pulses
    assert looked_at >= 5
    files.place(str(tmp_path / "files"))
    assert peer.pulses >= looked_at + 5
    assert (tmp_path / "files" / "a").read_bytes() == content


def test_what_came_of_a_file_is_kept_for_the_next_launch_whatever_it_is(host: JobHost) -> None:
    content = os.urandom(9 << 20)
    name = hashlib.sha256(content).hexdigest()
    partial = host.cache / "blobs" / f".{name}.part"
    request = launch_request(["/usr/bin/wc", "-c", "a"], "job", {"a": content})

    def sent(driver: AgentDriver, begin: int, end: int) -> None:
        for offset in range(begin, end, 1 << 20):
            driver.send("file-part", b"%s\n%d\n" % (name.encode(), offset) + content[offset : offset + (1 << 20)])

    with AgentDriver(host.bundle) as driver:
        host.begin(driver, "launch", **request)
        assert json.loads(driver.wait_for("need").payload) == {"files": [name], "have": {}}
        sent(driver, 0, 5 << 20)
        assert wait_until(lambda: partial.exists() and partial.stat().st_size == 5 << 20, 20)
        # Another launch with the same file does not wait for this one.
        with AgentDriver(host.bundle) as other:
            host.begin(other, "launch", **launch_request(["/bin/true"], "other", {"a": content}))
            assert json.loads(other.wait_for("need").payload)["have"] == {}
    assert wait_until(lambda: [one.name for one in partial.parent.iterdir()] == [partial.name], 20)
    with AgentDriver(host.bundle) as driver:
        host.begin(driver, "launch", **request)
        assert json.loads(driver.wait_for("need").payload)["have"] == {name: 5 << 20}
        sent(driver, 5 << 20, 9 << 20)
        finish(driver)
    host.wait_for("job.v1", "exited")
    assert (host.directory("job.v1") / "stdout.log").read_text() == f"{9 << 20} a\n"
    assert [one.name for one in partial.parent.iterdir()] == [name]
    # What is damaged is found out at the end, and is not kept.
    (partial.parent / name).unlink()
    partial.write_bytes(bytes(5 << 20))
    with AgentDriver(host.bundle) as driver:
        host.begin(driver, "launch", **launch_request(["/bin/true"], "again", {"a": content}))
        driver.wait_for("need")
        sent(driver, 5 << 20, 9 << 20)
        with pytest.raises(Ended, match="arrived damaged"):
            finish(driver)
    assert list(partial.parent.iterdir()) == []


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "a//b", ".", "", "a\0b", "a/."])
def test_no_file_leaves_its_folder(host: JobHost, path: str) -> None:
    with pytest.raises(Ended, match="'files' must be"):
        host.launch(["/bin/true"], files={path: b"x"})


@pytest.mark.parametrize(
    "change",
    [{"name": "../x"}, {"name": "a.v2"}, {"name": "A"}, {"argv": []}, {"argv": [""]}, {"argv": ["a\0"]}, {"env": {"A=B": ""}},
     {"launch_id": "x"}, {"gpus": -1}, {"gpus": [1, 1]}, {"workdir": "rel"}, {"force": 1}, {"launched": []}],
)  # fmt: skip
def test_a_request_that_does_not_fit_is_refused(host: JobHost, change: dict[str, Any]) -> None:
    with pytest.raises(Ended, match=f"'{next(iter(change))}' must be"):
        host.operate("launch", **{**launch_request(["/bin/true"]), **change})


def test_everything_about_the_launch_is_kept(host: JobHost) -> None:
    launched = {"by": "ada", "git": {"commit": "c0ffee"}, "dirty_diff": "+line\n"}
    host.launch(["/bin/true"], files={"a": b"x"}, env={"A": "1"}, launched=launched)
    folder = host.directory("job.v1")
    kept = json.loads((folder / "job.json").read_text())
    assert kept["argv"] == ["/bin/true"]
    assert kept["files"][0]["path"] == "a"
    assert kept["launched"] == {"by": "ada", "git": {"commit": "c0ffee"}}
    assert kept["schema_version"] == 1
    assert (folder / "dirty.diff").read_text() == "+line\n"
    snapshot = json.loads((folder / "environment.json").read_text())
    assert snapshot["variables"]["A"] == "1"
    assert snapshot["variables"]["PYTHONUNBUFFERED"] == "1"
    assert any(one.startswith("pytest-") for one in snapshot["packages"])
    # Variables may hold secrets.
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(one.stat().st_mode) & 0o077 == 0 for one in folder.iterdir())


# -- once, and only once


def test_asking_again_with_the_same_id_gives_the_same_job(host: JobHost) -> None:
    request = launch_request(["/bin/sleep", "100"])
    first = host.operate("launch", **request)
    again = host.operate("launch", **request)
    assert again["job"] == first["job"]
    assert again["pid"] == first["pid"]
    assert len(host.jobs()) == 1


def test_asking_with_one_id_from_many_sides_starts_one_job(host: JobHost) -> None:
    request = launch_request(["/bin/sleep", "100"])
    reports: list[Any] = []
    threads = [threading.Thread(target=lambda: reports.append(host.operate("launch", **request))) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {(one["job"], one["pid"]) for one in reports} == {("job.v1", reports[0]["pid"])}


def test_a_launch_that_was_cut_off_between_claim_and_start_is_finished_by_asking_again(host: JobHost) -> None:
    request = launch_request(["/bin/sleep", "100"])
    host.operate("launch", **request)
    host.stop("job.v1")
    # As the launcher's death leaves it: everything written, nothing started.
    for name in ("started", "state.json", "stop", ".state.spare"):
        (host.directory("job.v1") / name).unlink(missing_ok=True)
    assert host.jobs() == []
    report = host.operate("launch", **request)
    assert (report["job"], report["state"]) == ("job.v1", "running")


def test_a_client_that_leaves_before_the_start_leaves_nothing(host: JobHost) -> None:
    with AgentDriver(host.bundle) as driver:
        host.begin(driver, "launch", **launch_request(["/bin/sleep", "100"], "job", {"a": b"x"}))
        driver.wait_for("need")
    assert host.jobs() == []
    assert os.listdir(host.cache / "jobs") == []


def test_cut_off_after_any_byte_of_the_request_there_is_one_job_or_none(host: JobHost) -> None:
    content = b"x" * 500
    for number, share in enumerate(range(0, 101, 5)):
        request = launch_request(["/bin/sleep", "1000"], f"cut-{number}", {"a": content})
        with AgentDriver(host.bundle) as driver:
            payload = json.dumps({"protocol": 1, "operation": "launch", "lease_s": 30.0, **request}, separators=(",", ":"))
            name = request["files"][0]["sha256"].encode()
            whole = driver.nonce.encode() + b"\n" + driver.encoder.encode("request", payload.encode())
            if number == 0:
                # Later launches find the file here.
                whole += driver.encoder.encode("file", name + b"\n" + content)
            assert driver.process.stdin is not None
            driver.write(whole[: len(whole) * share // 100])
            driver.process.stdin.close()
        found = host.jobs(f"cut-{number}")
        assert [one["state"] for one in found] in (["running"], [])
        assert len(marked(f"cut-{number}.v1", host.cache)) == len(found)
        # Asked again with the same id, there is one.
        again = host.operate("launch", [content], **request)
        assert again["job"] == f"cut-{number}.v1"
        assert len(marked(again["job"], host.cache)) == 1


def test_the_same_name_does_not_run_twice_unless_forced(host: JobHost) -> None:
    host.launch(["/bin/sleep", "100"])
    with pytest.raises(Ended, match=r"job\.v1 is running on this host \(pid [0-9]+\)") as caught:
        host.launch(["/bin/sleep", "100"])
    assert caught.value.outcome == "refused"
    forced = host.launch(["/bin/sleep", "100"], force=True)
    assert forced["job"] == "job.v2"
    assert "job.v1 is running" in forced["forced"][0]


# -- how jobs end


@pytest.mark.parametrize("code", [0, 1, 3, 137, 255])
def test_exit_status(host: JobHost, code: int) -> None:
    host.python(f"import sys; print('last words'); sys.exit({code})")
    judged = host.wait_for("job.v1", "exited", "failed")
    assert (judged["state"], judged["exit_code"], judged["signal"]) == ("failed" if code else "exited", code, None)
    assert host.job("job.v1")["last_line"] == "last words"


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_death_by_a_signal_that_rdiag_did_not_send(host: JobHost, number: signal.Signals) -> None:
    report = host.launch(["/bin/sleep", "100"])
    os.kill(report["pid"], number)
    judged = host.wait_for("job.v1", "failed")
    assert (judged["exit_code"], judged["signal"]) == (None, number)
    assert number.name in judged["message"]
    if number == signal.SIGKILL:
        assert "rdiag did not send" in judged["message"]
        assert host.job("job.v1")["oom_killed"] is False


def test_signals_are_as_a_program_expects_them(host: JobHost) -> None:
    host.python("print(open('/proc/self/status').read())")
    host.wait_for("job.v1", "exited")
    status = dict(
        line.split(":\t", 1) for line in (host.directory("job.v1") / "stdout.log").read_text().splitlines() if ":\t" in line
    )
    assert int(status["SigBlk"], 16) == 0
    # Python itself ignores SIGPIPE and SIGXFSZ, and nothing else; glibc's posix_spawn its own two, which no program can set.
    theirs = {signal.SIGPIPE, signal.SIGXFSZ, 32, 33}
    assert int(status["SigIgn"], 16) & ~sum(1 << (number - 1) for number in theirs) == 0


def test_no_descriptor_leaks_into_the_job(host: JobHost) -> None:
    host.launch(["/bin/ls", "-l", "/proc/self/fd"])
    host.wait_for("job.v1", "exited")
    listed = (host.directory("job.v1") / "stdout.log").read_text()
    names = [line.split()[-3] for line in listed.splitlines() if " -> " in line]
    assert names == ["0", "1", "2", "3"]
    assert "/dev/null" in listed
    assert "stderr.log" in listed


def test_the_job_goes_on_while_what_it_left_behind_goes_on(host: JobHost) -> None:
    source = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.execve("/bin/sleep", ["sleep", "1000"], {})
time.sleep(0.3)
"""
    host.python(source)
    assert wait_until(lambda: "left behind" in host.record("job.v1").judge()["message"])
    judged = host.record("job.v1").judge()
    assert (judged["state"], judged["exit_code"]) == ("running", 0)
    members = host.record("job.v1").tree().members()
    assert [process.name for process in members.values()] == ["sleep"]
    # Without its marker and far from its session it is found all the same.
    assert marked("job.v1", host.cache) == []
    done = host.stop("job.v1")
    assert (done["stopped"], done["state"], done["exit_code"]) == (True, "stopped", 0)
    assert not any(alive(pid) for pid in members)


def test_killing_the_agent_or_its_group_does_not_touch_the_job(host: JobHost) -> None:
    with AgentDriver(host.bundle) as driver:
        host.begin(driver, "launch", **launch_request(["/bin/sleep", "100"]))
        pid = finish(driver)["pid"]
        driver.process.kill()
    time.sleep(0.2)
    assert alive(pid)
    assert host.job("job.v1")["state"] == "running"


def test_a_hangup_of_the_supervisor_is_ignored(host: JobHost) -> None:
    pid = host.launch(["/bin/sleep", "100"])["pid"]
    supervisor = host.record("job.v1").state["supervisor_pid"]
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1):
        os.kill(supervisor, number)
    time.sleep(0.1)
    assert alive(supervisor)
    assert alive(pid)


def test_a_shutdown_ends_the_job_in_order(host: JobHost) -> None:
    host.launch(["/bin/sh", "-c", "trap 'echo saved; exit 0' TERM; while :; do sleep 0.05; done"])
    time.sleep(0.2)
    os.kill(host.record("job.v1").state["supervisor_pid"], signal.SIGTERM)
    host.wait_for("job.v1", "stopped")
    assert host.job("job.v1")["last_line"] == "saved"


def test_last_words_are_there_when_the_end_is(host: JobHost) -> None:
    for number in range(1, 11):
        host.launch(["/bin/sh", "-c", f"echo line {number}"], name="last")
        host.wait_for(f"last.v{number}", "exited")
        assert (host.directory(f"last.v{number}") / "stdout.log").read_text() == f"line {number}\n"


# -- what is known of a job whose supervisor is gone


def test_without_its_supervisor_a_job_is_still_known_and_stopped(host: JobHost) -> None:
    host.launch(["/bin/sleep", "100"])
    os.kill(host.record("job.v1").state["supervisor_pid"], signal.SIGKILL)
    assert wait_until(lambda: "supervisor is gone" in host.record("job.v1").judge()["message"])
    assert host.job("job.v1")["state"] == "running"
    with pytest.raises(Ended, match="is running on this host"):
        host.launch(["/bin/sleep", "100"])
    done = host.stop("job.v1")
    assert (done["stopped"], done["state"], done["survivors"]) == (True, "stopped", [])
    assert marked("job.v1", host.cache) == []


def test_without_supervisor_and_processes_it_is_lost(host: JobHost) -> None:
    pid = host.launch(["/bin/sleep", "100"])["pid"]
    os.kill(host.record("job.v1").state["supervisor_pid"], signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    assert host.wait_for("job.v1", "lost")["exit_code"] is None


def forge(host: JobHost, **changes: Any) -> record.Job:
    """Return a job whose record says what ``changes`` say, without supervisor and lock."""
    host.launch(["/bin/true"])
    host.wait_for("job.v1", "exited")
    # Its last word comes a moment before its end.
    assert wait_until(lambda: not host.record("job.v1").supervised(), 20)
    path = host.directory("job.v1") / "state.json"
    state = {**json.loads(path.read_text()), "state": "running", "exit_code": None, **changes}
    path.write_text(json.dumps(state))
    return host.record("job.v1")


def test_a_reboot_is_seen_by_the_boot_id(host: JobHost) -> None:
    judged = forge(host, boot_id="00000000-0000-0000-0000-000000000000").judge()
    assert (judged["state"], judged["message"]) == ("lost", "the host was rebooted while it ran")


def test_a_job_of_another_machine_is_not_judged(host: JobHost) -> None:
    judged = forge(host, boot_id="00000000-0000-0000-0000-000000000000", node="elsewhere").judge()
    assert judged["state"] == "unknown"
    assert "elsewhere" in judged["message"]


@pytest.mark.parametrize("boot", [None, "00000000-0000-0000-0000-000000000000"])
def test_a_pid_that_was_used_again_is_never_signalled(host: JobHost, boot: str | None) -> None:
    with AgentDriver(host.bundle) as stranger:
        pid = stranger.process.pid
        changes: dict[str, Any] = {"pid": pid, "supervisor_pid": pid, "start_ticks": 1, "supervisor_start_ticks": 1}
        if boot is not None:
            changes["boot_id"] = boot
        job = forge(host, **changes)
        assert job.judge()["state"] == "lost"
        assert job.tree().members() == {}
        done = host.stop("job.v1", 0)
        assert (done["signalled"], done["was"]) == (0, "lost")
        assert alive(pid)


def test_records_of_a_newer_release_are_understood_as_far_as_possible(host: JobHost) -> None:
    job = forge(host, schema_version=99, state="failed", exit_code=4, novelty={"a": [1]}, signal="SIGNOVEL")
    assert job.judge() == {"state": "failed", "message": "", "exit_code": 4, "signal": None}
    described = host.job("job.v1")
    assert described["state"] == "failed"
    job = forge_again(host, state="hibernating")
    assert job.judge()["state"] == "unknown"
    assert "hibernating" in job.judge()["message"]
    assert host.job("job.v1")["job"] == "job.v1"


def forge_again(host: JobHost, **changes: Any) -> record.Job:
    path = host.directory("job.v1") / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return host.record("job.v1")


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"state": 7}', '{"state": "running", "pid": "x"}'])
def test_a_damaged_state_hides_no_job(host: JobHost, content: str) -> None:
    forge(host)
    (host.directory("job.v1") / "state.json").write_text(content)
    assert host.job("job.v1")["state"] in {"lost", "unknown"}


def test_an_old_record_without_most_fields_is_listed_and_stopped(host: JobHost) -> None:
    host.launch(["/bin/sleep", "100"])
    folder = host.directory("job.v1")
    record_now = json.loads((folder / "job.json").read_text())
    (folder / "job.json").write_text(json.dumps({"job": "job.v1", "marker": record_now["marker"]}))
    os.kill(host.record("job.v1").state["supervisor_pid"], signal.SIGKILL)
    (folder / "state.json").write_text('{"state": "running"}')
    (folder / "lock").unlink()
    assert host.job("job.v1")["state"] == "running"
    assert host.stop("job.v1", 1)["stopped"] is True
    assert marked("job.v1", host.cache) == []


def test_a_job_whose_folder_was_swept_away_is_named(host: JobHost) -> None:
    pid = host.launch(["/bin/sleep", "100"], name="swept")["pid"]
    folder = host.directory("swept.v1")
    folder.rename(host.cache / "away")
    try:
        found = {one["job"]: one for one in host.jobs()}
        assert found["swept.v1"]["state"] == "unknown"
        assert str(pid) in found["swept.v1"]["message"]
    finally:
        (host.cache / "away").rename(folder)


# -- places that are less than ideal


def test_the_end_is_written_though_the_disk_is_full(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "small", "size=8m,mode=700") as small,
        JobHost(lay_out_bundle(small / "cache")) as host,
    ):
        source = """
import sys
try:
    with open("fill", "wb", 0) as stream:
        while True:
            stream.write(b"x" * 4096)
except OSError as error:
    sys.exit(error.errno)
"""
        host.python(source)
        assert wait_until(lambda: host.record("job.v1").judge()["state"] == "failed")
        assert host.record("job.v1").judge()["exit_code"] == errno.ENOSPC
        # The room that was taken for it beforehand is what it stands in.
        assert not Path(host.record("job.v1").paths.state_spare).exists()


def test_a_full_disk_breaks_nothing_that_is_needed_to_make_room(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=12m") as small, JobHost(lay_out_bundle(small / "cache")) as host:
        host.python("import sys\ntry:\n  while True: sys.stdout.write('x' * 65536)\nexcept OSError:\n  sys.exit(3)")
        host.wait_for("job.v1", "failed")
        (listed,) = host.jobs()
        assert listed["exit_code"] == 3
        with pytest.raises(Ended, match=r"cannot store a file in .*: No space left"):
            host.launch(["/bin/true"], "big", {"a": bytes(1 << 20)})
        cleaned = host.operate("clean", older_than_s=0, dry_run=False)
        assert [one["name"] for one in cleaned["removed"] if one["what"] == "job"] == ["job.v1"]
        assert cleaned["problems"] == []
        assert host.jobs() == []
        assert host.launch(["/bin/true"])["job"] == "job.v2"


def test_a_compiled_file_that_was_cut_off_does_not_stay(host: JobHost) -> None:
    assert host.jobs() == []
    (compiled,) = (host.bundle / "agent" / "jobs" / "__pycache__").glob("listing.*.pyc")
    compiled.write_bytes(compiled.read_bytes()[:200])
    with pytest.raises(AssertionError, match="marshal"):
        host.jobs()
    assert host.jobs() == []


def test_the_last_metrics_are_told(host: JobHost) -> None:
    host.python("for step in range(400):\n    print({'loss': 2.0 - step / 400, 'step': step, 'acc': 0.25})\nprint('loss: nan')")
    host.wait_for("job.v1", "exited")
    metrics = host.job("job.v1")["metrics"]
    assert metrics["acc"] == 0.25
    # JSON has no NaN; the last line says it.
    assert "loss" not in metrics
    assert host.job("job.v1")["last_line"] == "loss: nan"


@pytest.mark.parametrize("python", NEW)
def test_every_interpreter_supervises(tmp_path: Path, python: str) -> None:
    with JobHost(lay_out_bundle(tmp_path / "cache"), python=python) as host:
        host.launch(["/bin/sh", "-c", "echo here; exit 4"])
        assert host.wait_for("job.v1", "failed")["exit_code"] == 4
        host.launch(["/bin/sh", "-c", "setsid sleep 1000 & sleep 1000"])
        assert host.stop("job.v2", 1)["stopped"] is True
        assert [one["state"] for one in host.jobs()] == ["failed", "stopped"]
        assert host.operate("clean", older_than_s=0, dry_run=False)["problems"] == []
