"""One run as the client hears it: streams of an agent are replayed, whole, cut, damaged and forged."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from remote_diag.agent.frames import Encoder
from remote_diag.cli.output import Reporter
from remote_diag.cli.settings import Settings
from remote_diag.conversation import Conversation, build_request
from remote_diag.errors import ConnectionLost, ProbeError, RdiagError
from remote_diag.events import Event, Note
from remote_diag.host import Environment, Host
from remote_diag.link import AgentLink
from remote_diag.messages import Hello
from remote_diag.outcome import Outcome, Timing
from remote_diag.parameters import build
from remote_diag.paths import shipped_probes
from remote_diag.probe import Probe, load

from .support.probe_files import write_probe

HELLO = Hello(python="3.11.2", executable="/usr/bin/python3", bundle="0" * 64, cache="/c", cwd="/", user="ada", pid=7)
RESULT = b'{"text":"as it was sent"}'


def end(result: bytes | None = RESULT, **more: Any) -> bytes:
    """Return the payload of an end frame that stands for ``result``."""
    fields: dict[str, Any] = {
        "outcome": "ok",
        "message": "",
        "hint": None,
        "details": [],
        "exit_status": 0,
        "signal": None,
        "result_sha256": None if result is None else hashlib.sha256(result).hexdigest(),
        "result_bytes": len(result or b""),
        "survivors": [],
        "run_dir": None,
        "elapsed_s": 0.1,
    }
    return json.dumps({**fields, **more}).encode()


GOOD = [("log", b"osome output\n"), ("result", RESULT), ("end", end())]


class Replay:
    """A channel that gives a prepared answer, and then ends."""

    def __init__(self) -> None:
        self.sent = b""
        self.answer = b""
        self.interrupted = False

    def send(self, data: bytes) -> None:
        self.sent += data

    def send_eof(self) -> None:
        """Nothing reads it."""

    def receive(self, timeout: float) -> tuple[bytes, bytes] | None:  # noqa: ARG002 - the interface of channels
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt
        if not self.answer:
            return None
        answer, self.answer = self.answer, b""
        return answer, b""

    def exit_status(self, timeout: float) -> int | None:  # noqa: ARG002 - the interface of channels
        return 0

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Probe[Any, Any]:
    folder = tmp_path_factory.mktemp("probes")
    return load(write_probe(folder, "one", 'return Result(text="")', params={}, result={"text": "str"}))


class Run:
    """A run whose request was sent; its answer is to be heard."""

    def __init__(self, probe: Probe[Any, Any]) -> None:
        host = Host("replayed", transport="local")
        self.channel = Replay()
        self.told: list[Event] = []
        self.link = AgentLink(self.channel, host.name)
        self.conversation = Conversation(
            host=host, probe=probe, params=probe.Params(), run_id="20260101T000000Z-00000000", timeout=5.0,
            keep=False, force=False, tell=self.told.append,
        )  # fmt: skip
        self.conversation.warm()
        self.link.greet()
        self.conversation.ask(self.link)
        self.nonce = self.channel.sent.split(b"\n", 2)[1].decode()

    def stream(self, frames: list[tuple[str, bytes]]) -> bytes:
        encoder = Encoder(self.nonce)
        return b"".join(encoder.encode(kind, payload) for kind, payload in frames)

    def hear(self, stream: bytes) -> Outcome[Any]:
        self.channel.answer = stream
        self.conversation.hold(self.link)
        return self.conversation.outcome(timing=Timing(0.0, 0.0, 0.0, 0.0), hello=HELLO, bundle_dir="/c", notes=())


def test_the_whole_stream_is_accepted(probe: Probe[Any, Any]) -> None:
    run = Run(probe)
    outcome = run.hear(b"Welcome!\n" + run.stream(GOOD))
    assert (outcome.status, outcome.result.text) == ("ok", "as it was sent")


@pytest.mark.parametrize(
    ("body", "effects", "needed"),
    [
        ("return Result(text='')", (), False),
        ("return Result(text='')", ("reads-files", "runs-commands"), False),
        ("from probes.lib import mappings", (), True),
        ("import probes.lib.gpu as gpu", (), True),
        ("__import__('probes.lib')", (), True),
        ("return Result(text='')", ("cuda",), True),
        ("return Result(text='')", ("reads-files", "collectives"), True),
    ],
)
def test_the_shared_code_is_checked_for_whoever_may_use_it(
    tmp_path: Path, body: str, effects: tuple[str, ...], *, needed: bool
) -> None:
    probe = load(write_probe(tmp_path, "one", body, result={"text": "str"}, effects=effects))
    assert Run(probe).conversation.needs_library is needed


def test_cut_after_any_byte_nothing_is_accepted(probe: Probe[Any, Any]) -> None:
    # The last byte of all is the line feed behind the last payload.
    for length in range(len(Run(probe).stream(GOOD)) - 1):
        run = Run(probe)
        with pytest.raises(ConnectionLost):
            run.hear(run.stream(GOOD)[:length])


def test_with_any_byte_changed_nothing_else_is_accepted(probe: Probe[Any, Any]) -> None:
    for place in range(len(Run(probe).stream(GOOD)) - 1):
        run = Run(probe)
        stream = bytearray(run.stream(GOOD))
        stream[place] ^= 1
        try:
            outcome = run.hear(bytes(stream))
        except RdiagError:
            continue
        assert outcome.result.text == "as it was sent"


@pytest.mark.parametrize(
    ("frames", "kind", "words"),
    [
        ([("end", end())], ProbeError, "no result came"),
        ([("result", RESULT), ("result", RESULT), ("end", end())], ProbeError, "two results"),
        ([("result", RESULT[:-2] + b'!"}'), ("end", end())], ConnectionLost, "size or hash"),
        ([("result", RESULT), ("end", end(result_bytes=len(RESULT) + 1))], ConnectionLost, "size or hash"),
        ([("result", RESULT), ("end", end(None))], ConnectionLost, "size or hash"),
        ([("result", RESULT), ("surprise", b""), ("end", end())], ConnectionLost, "'surprise'"),
        ([("result", RESULT), ("end", b"{}")], ConnectionLost, "cannot be understood"),
        ([("need", b'{"sha256":"' + b"0" * 64 + b'"}'), ("result", RESULT), ("end", end())], ConnectionLost, "does not have"),
    ],
)
def test_what_is_not_as_agreed_is_no_result(
    probe: Probe[Any, Any], frames: list[tuple[str, bytes]], kind: type[RdiagError], words: str
) -> None:
    run = Run(probe)
    with pytest.raises(kind, match=words):
        run.hear(run.stream(frames))


@pytest.mark.parametrize(
    "result",
    [
        b'{"text":NaN}',
        b'{"text":1}',
        b"{}",
        b'{"text":"a","more":1}',
        b'{"text":"a","text":"b"}',
        b'{"text":' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"text":"\xff"}',
        b"null",
        b"",
    ],
)
def test_a_result_that_was_not_declared_is_an_error(probe: Probe[Any, Any], result: bytes) -> None:
    run = Run(probe)
    with pytest.raises(ProbeError):
        run.hear(run.stream([("result", result), ("end", end(result))]))


def test_frames_of_others_are_noise(probe: Probe[Any, Any]) -> None:
    run = Run(probe)
    forged = Encoder("f" * 32)
    other = b'{"text":"forged"}'
    noise = forged.encode("result", other) + forged.encode("end", end(other))
    assert run.hear(noise + run.stream(GOOD)).result.text == "as it was sent"
    run = Run(probe)
    with pytest.raises(ConnectionLost, match="ended before the end"):
        run.hear(noise)


def test_who_survives_an_interrupted_run_is_told_where_nobody_watches_too(
    probe: Probe[Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(probe)
    run.channel.interrupted = True
    left = [{"pid": 4711, "name": "python3", "state": "D"}]
    with pytest.raises(KeyboardInterrupt):
        run.hear(run.stream([("end", end(None, outcome="cancelled", survivors=left))]))
    assert run.told == [Note("still running on replayed: 4711 python3 (D)", urgent=True)]
    with Reporter(Settings()) as reporter:
        reporter.tell(run.told[0])
        reporter.tell(Note("of no importance"))
    assert capsys.readouterr().err == "rdiag: still running on replayed: 4711 python3 (D)\n"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (Host("box", transport="local"), "here"),
        (Host("box", transport="local", workdir="/data"), "/data"),
        (Host("box", transport="ssh"), None),
        # Its folders are not those of the machine that it runs on.
        (Host("box", transport="local", environment=Environment("docker", "trainer")), None),
        (Host("box", transport="local", environment=Environment("docker", "trainer"), workdir="/w"), "/w"),
    ],
)
def test_a_probe_runs_where_its_user_is_unless_that_is_elsewhere(
    host: Host, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    probe = load(shipped_probes() / "hello.py")
    params = build(probe)
    request = build_request(host=host, probe=probe, params=params, run_id="r", timeout=1.0, keep=False, force=False)
    assert request["workdir"] == (str(tmp_path) if expected == "here" else expected)
