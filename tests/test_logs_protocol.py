"""What a host says about logs, taken apart: nothing of it is trusted, least of all where bytes belong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remote_diag.agent.frames import Frame
from remote_diag.errors import (
    AuthError,
    ConfigError,
    ConnectionLost,
    EnvironmentUnfit,
    HostKeyError,
    LocalIOError,
    RdiagError,
    StateUnknown,
    UnreachableError,
)
from remote_diag.follower import Follower, LogBytes, Wanted, Warned
from remote_diag.host import Host
from remote_diag.logs import Found, JobState, rank_of, stream_suffix
from remote_diag.session import Session

HOST = Host("gpu8")
JOB = {"job": "train.v1", "log": "/x/stdout.log", "state": "running", "exit_code": None, "signal": None}
RESULT = {"job": "train.v1", "state": "exited", "exit_code": 0, "signal": None}
END = {"outcome": "ok", "message": ""}
OFFER = {"stream": "stdout", "size": 0}
SEGMENT = {"number": 1, "stream": "stdout", "event": "begun", "offset": 0, "size": 0, "path": "/x/stdout.log", "older": None}


class Script:
    """A link that says what it was told to say, and a session that offers nothing else."""

    def __init__(self, *frames: tuple[str, Any]) -> None:
        self.frames_to_come = frames
        self.sent: list[tuple[str, Any]] = []

    def begin(self) -> None:
        return

    def close(self) -> None:
        return

    def send(self, kind: str, payload: bytes = b"") -> None:
        self.sent.append((kind, json.loads(payload)))

    def frames(self, _deadline: float) -> Iterator[Frame]:
        for number, (kind, payload) in enumerate(self.frames_to_come):
            yield Frame(number, kind, payload if isinstance(payload, bytes) else json.dumps(payload).encode())

    def session(self) -> Session:
        session = Session(HOST, transport=_Nowhere())  # type: ignore[arg-type]
        session.agent = lambda **_: self  # type: ignore[assignment, method-assign]
        return session


class _Nowhere:
    def connect(self) -> None:
        return

    def close(self) -> None:
        return


def data(number: int, offset: int, content: bytes) -> tuple[str, bytes]:
    return "data", bytes([number]) + offset.to_bytes(8, "big") + content


def follow(tmp_path: Path, *frames: tuple[str, Any], job: str = "train", **wanted: Any) -> tuple[Any, list[Any], Script]:
    events: list[Any] = []
    script = Script(*frames)
    with Follower(
        HOST, job, Wanted(directory=tmp_path, **wanted), on_event=events.append,
        connect=lambda _host, _tell: script.session(),
    ) as follower:  # fmt: skip
        return follower.run(), events, script


def test_a_whole_conversation(tmp_path: Path) -> None:
    ended, events, script = follow(
        tmp_path,
        ("job", JOB), ("offer", OFFER), ("beat", b""), ("segment", SEGMENT), data(1, 0, b"ab"), data(1, 2, b"c"),
        ("result", RESULT), ("end", END),
    )  # fmt: skip
    assert (tmp_path / "train.v1.log").read_bytes() == b"abc"
    assert ended.state == JobState("exited", 0)
    assert [event for event in events if isinstance(event, LogBytes)] == [LogBytes("stdout", b"ab"), LogBytes("stdout", b"c")]
    assert isinstance(events[0], Found)
    (_, request), (_, take) = script.sent
    assert (request["operation"], request["job"], request["follow"], request["lease_s"]) == ("read-log", "train", True, 30.0)
    assert take == {"stream": "stdout", "from": "offset", "count": 0}


START = (("job", JOB), ("offer", OFFER), ("segment", SEGMENT))


@pytest.mark.parametrize(
    "frames",
    [
        [("job", {**JOB, "job": "../../etc/passwd.v1"})],
        [("job", {**JOB, "job": "other.v1"})],
        [("job", {**JOB, "job": "train.v1/../x.v1"})],
        [("job", {**JOB, "job": "train..v1"})],
        [("job", {**JOB, "state": "\x1b[2J"})],
        [("job", {**JOB, "extra": 1})],
        [("job", b"\xff")],
        [("job", JOB), ("offer", {"stream": "../x", "size": 0})],
        [("job", JOB), ("offer", {"stream": "rank0.x", "size": 0})],
        [("job", JOB), ("segment", SEGMENT)],
        [("job", JOB), ("offer", OFFER), ("segment", {**SEGMENT, "offset": 5, "size": 5})],
        [("job", JOB), ("offer", OFFER), ("segment", {**SEGMENT, "event": "rotated", "offset": 5, "size": 5})],
        [("job", JOB), ("offer", OFFER), ("segment", {**SEGMENT, "number": 0})],
        [("job", JOB), ("offer", OFFER), ("segment", {**SEGMENT, "event": "whatever"})],
        [*START, data(2, 0, b"x")],
        [*START, data(1, 1, b"x")],
        [*START, data(1, 0, b"x"), data(1, 0, b"x")],
        [*START, ("data", b"\x01")],
        [*START, ("need", {"sha256": "0" * 64})],
        [*START, ("end", END)],
        [*START, ("result", {**RESULT, "job": "other.v1"}), ("end", END)],
    ],
)
def test_an_answer_that_makes_no_sense_ends_it(tmp_path: Path, frames: list[tuple[str, Any]]) -> None:
    with pytest.raises(ConnectionLost, match=r"understood|no sense"):
        follow(tmp_path / "logs", *frames)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "train.v1.log"]


@pytest.mark.parametrize(
    ("outcome", "error"), [("no-job", StateUnknown), ("environment", EnvironmentUnfit), ("\x1b[2J", EnvironmentUnfit)]
)
def test_a_host_that_says_no(tmp_path: Path, outcome: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="because"):
        follow(tmp_path, ("end", {"outcome": outcome, "message": "because"}))


def test_without_follow_it_gives_up_when_it_gets_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remote_diag.follower.FIRST_WAIT", 0.001)
    attempts: list[Script] = []
    scripts = iter([Script(*START, data(1, 0, b"x")), *(Script() for _ in range(20))])

    def connect(_host: Host, _tell: Any) -> Session:
        attempts.append(next(scripts))
        return attempts[-1].session()

    with (
        Follower(HOST, "train", Wanted(directory=tmp_path, follow=False), connect=connect) as follower,
        pytest.raises(ConnectionLost),
    ):
        follower.run()
    assert len(attempts) == 8
    assert (tmp_path / "train.v1.log").read_bytes() == b"x"


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (UnreachableError("reset the connection during the login", phase="auth"), True),
        (ConnectionLost("gone", retryable=True), True),
        (EnvironmentUnfit("the interpreter does not start"), True),
        (AuthError("no key was accepted"), False),
        (HostKeyError("another key"), False),
        (ConfigError("hosts.yaml"), False),
        (LocalIOError("no space"), False),
    ],
)
def test_what_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: RdiagError, again: bool
) -> None:
    monkeypatch.setattr("remote_diag.follower.FIRST_WAIT", 0.001)
    sessions = iter([Script(*START, data(1, 0, b"x")), None, Script(("job", JOB), ("result", RESULT), ("end", END))])

    def connect(_host: Host, _tell: Any) -> Session:
        script = next(sessions)
        if script is None:
            raise error
        return script.session()

    with Follower(HOST, "train", Wanted(directory=tmp_path), connect=connect) as follower:
        if again:
            assert follower.run().state.state == "exited"
        else:
            with pytest.raises(type(error)):
                follower.run()
    assert (tmp_path / "train.v1.log").read_bytes() == b"x"


def test_a_copy_goes_on_with_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "train.v1.log").write_bytes(b"abc")
    _, events, script = follow(
        tmp_path,
        ("job", JOB), ("offer", OFFER), ("segment", {**SEGMENT, "event": "resumed", "offset": 3, "size": 4}),
        data(1, 3, b"d"), ("segment", {**SEGMENT, "number": 2, "event": "truncated"}), data(2, 0, b"new"),
        ("result", RESULT), ("end", END),
    )  # fmt: skip
    take = script.sent[1][1]
    assert (take["from"], take["offset"], take["bytes"]) == ("copy", 3, 3)
    assert (tmp_path / "train.v1.log").read_bytes() == b"new"
    assert (tmp_path / "train.v1.log.old-1").read_bytes() == b"abcd"
    assert b"".join(event.data for event in events if isinstance(event, LogBytes)) == b"abcdnew"
    assert any(isinstance(event, Warned) and "old-1" in event.text for event in events)


def test_an_older_copy_goes_on_where_it_ends(tmp_path: Path) -> None:
    (tmp_path / "train.v1.log").write_bytes(b"abc")
    (tmp_path / "train.v1.log.old-1").write_bytes(b"very old")
    (tmp_path / "train.v1.log.old-2").write_bytes(b"old")
    resumed = {**SEGMENT, "event": "resumed"}
    _, _, script = follow(
        tmp_path,
        ("job", JOB), ("offer", OFFER), ("segment", {**resumed, "offset": 3, "size": 3}),
        ("segment", {**resumed, "number": 2, "offset": 3, "size": 4, "older": 1}), data(2, 3, b"er"), data(1, 3, b"d"),
        ("result", RESULT), ("end", END),
    )  # fmt: skip
    assert [(one["offset"], one["bytes"]) for one in script.sent[1][1]["older"]] == [(8, 8), (3, 3)]
    assert (tmp_path / "train.v1.log").read_bytes() == b"abcd"
    assert (tmp_path / "train.v1.log.old-1").read_bytes() == b"very old"
    assert (tmp_path / "train.v1.log.old-2").read_bytes() == b"older"


@pytest.mark.parametrize(("older", "offset"), [(2, 3), (0, 2), (0, 4)])
def test_an_older_copy_that_nobody_asked_for_changes_nothing(tmp_path: Path, older: int, offset: int) -> None:
    (tmp_path / "train.v1.log").write_bytes(b"abc")
    (tmp_path / "train.v1.log.old-1").write_bytes(b"old")
    strange = {**SEGMENT, "event": "resumed", "number": 2, "offset": offset, "size": 9, "older": older}
    with pytest.raises(ConnectionLost, match="makes no sense"):
        follow(tmp_path, ("job", JOB), ("offer", OFFER), ("segment", strange), data(2, offset, b"er"))
    assert (tmp_path / "train.v1.log.old-1").read_bytes() == b"old"


def test_names_of_copies() -> None:
    assert [stream_suffix(stream) for stream in ("stdout", "stderr", "rank0", "rank12.run1.attempt2.err")] == [
        ".log", ".err.log", ".rank0.log", ".rank12.run1.attempt2.err.log",
    ]  # fmt: skip
    assert (rank_of("stdout"), rank_of("rank12.err")) == (None, 12)
    wanted = Wanted(output=Path("out/train.txt"), ranks=(3,))
    assert wanted.path("train.v1", "rank3") == Path("out/train.txt")
    assert wanted.path("train.v1", "rank3.err") == Path("out/train.rank3.err.log")
