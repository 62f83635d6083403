"""Speaks the protocol to a real agent over plain pipes, as the client's session does over ssh."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from remote_diag.agent.digest import bundle_digest, library_digest
from remote_diag.agent.frames import Decoder, Encoder, Frame
from remote_diag.agent.layout import LIBRARY
from remote_diag.agent.protocol import CHECK_WHOLE

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE = 30.0
"""Seconds after which a test gives up waiting; never reached when things work."""

PRELUDE = '''
"""A probe for a test."""
from __future__ import annotations
import os, sys, time, signal, subprocess
from dataclasses import dataclass
from typing import Any
EFFECTS = ()

@dataclass(frozen=True)
class Params:
    value: Any = None

@dataclass(frozen=True)
class Result:
    value: Any = None

'''


def probe_source(body: str) -> bytes:
    """Return a probe file whose ``run(params, context)`` has ``body``."""
    return (PRELUDE + "def run(params, context):\n" + textwrap.indent(textwrap.dedent(body), "    ")).encode()


def lay_out_bundle(cache: Path, blobs: tuple[bytes, ...] = ()) -> Path:
    """Install the agent below ``cache`` as the client does, and return the bundle's folder."""
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    staging = cache / "staging"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "remote_diag" / "agent", staging / "agent", ignore=ignore)
    shutil.copytree(REPOSITORY / "probes" / "lib", staging / "probes" / "lib", ignore=ignore)
    shutil.copy(REPOSITORY / "probes" / "__init__.py", staging / "probes" / "__init__.py")
    (staging / LIBRARY).write_text(library_digest(str(staging)) + "\n")
    for blob in blobs:
        (staging / "blobs").mkdir(exist_ok=True)
        (staging / "blobs" / hashlib.sha256(blob).hexdigest()).write_bytes(blob)
    return staging.rename(cache / bundle_digest(str(staging)))


@dataclass
class Answer:
    """Everything an agent said about one run."""

    frames: list[Frame]
    end: dict[str, Any]
    stderr: bytes = b""

    def of(self, kind: str) -> list[bytes]:
        """Return the payloads of all frames of one kind."""
        return [frame.payload for frame in self.frames if frame.kind == kind]

    def json(self, kind: str) -> list[Any]:
        """Return the payloads of all frames of one kind, parsed."""
        return [json.loads(payload) for payload in self.of(kind)]

    @property
    def outcome(self) -> str:
        """How the run ended."""
        return str(self.end["outcome"])

    @property
    def result(self) -> Any:
        """The result, parsed; fails unless there is exactly one."""
        (payload,) = self.of("result")
        return json.loads(payload)

    def log(self, stream: bytes = b"o") -> bytes:
        """Return what the probe printed to stdout (``b"o"``) or stderr (``b"e"``)."""
        return b"".join(payload[1:] for payload in self.of("log") if payload[:1] == stream)


@dataclass
class AgentDriver:
    """One agent process; use it as a context manager, so that nothing is left behind."""

    bundle: Path
    python: str = sys.executable
    env: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    run_id: str = field(default_factory=lambda: "test-" + secrets.token_hex(6))
    check: str = CHECK_WHOLE
    """What must be undamaged before the agent says hello."""

    def __enter__(self) -> AgentDriver:
        self.entry_nonce, self.nonce = secrets.token_hex(16), secrets.token_hex(16)
        self.decoder = Decoder(self.entry_nonce, self.nonce)
        self.encoder = Encoder(self.nonce)
        self.frames: list[Frame] = []
        self._unread: list[Frame] = []
        self.process = subprocess.Popen(
            [self.python, "-E", "-s", "-S", str(self.bundle / "agent" / "__main__.py"), self.entry_nonce],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.env,
            bufsize=0,
        )
        self.write(self.check.encode() + b"\n")
        return self

    def __exit__(self, *_exc: object) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None and not stream.closed:
                stream.close()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            if self.process.stderr is not None:
                self.process.stderr.close()

    @property
    def cache(self) -> Path:
        """The cache folder that the bundle is in."""
        return self.bundle.parent

    @property
    def run_dir(self) -> Path:
        """The run's private directory."""
        return self.cache / "runs" / self.run_id

    def request(self, probe: bytes, **changes: Any) -> dict[str, Any]:
        """Return a request for ``probe`` with ``changes``."""
        return {
            "protocol": 1,
            "run_id": self.run_id,
            "probe": {"name": "test-probe", "sha256": hashlib.sha256(probe).hexdigest()},
            "params": {},
            "effects": [],
            "env": {},
            "workdir": None,
            "deadline_s": PATIENCE,
            "lease_s": PATIENCE,
            "keep": False,
            "force": False,
            "output_bytes": 1 << 20,
            "result_bytes": 1 << 20,
            "environment": {"kind": "default", "value": ""},
            **changes,
        }

    def write(self, data: bytes) -> None:
        """Write to the agent's stdin."""
        assert self.process.stdin is not None
        self.process.stdin.write(data)

    def send(self, kind: str, payload: bytes = b"") -> None:
        """Send one frame."""
        self.write(self.encoder.encode(kind, payload))

    def begin(self, probe: bytes, **changes: Any) -> None:
        """Send the nonce and a request for ``probe``."""
        self.write(self.nonce.encode() + b"\n")
        self.send("request", json.dumps(self.request(probe, **changes)).encode())

    def send_file(self, probe: bytes) -> None:
        """Answer a ``need`` frame."""
        self.send("file", hashlib.sha256(probe).hexdigest().encode() + b"\n" + probe)

    def incoming(self) -> Iterator[Frame]:
        """Yield the frames as they come, until the agent closes its stdout; a later call goes on after the last one."""
        assert self.process.stdout is not None
        until = time.monotonic() + PATIENCE
        while True:
            while self._unread:
                self.frames.append(self._unread.pop(0))
                yield self.frames[-1]
            assert time.monotonic() < until, "the agent talks for too long"
            data = self.process.stdout.read(1 << 16)
            if not data:
                return
            self._unread += self.decoder.feed(data)

    def wait_for(self, kind: str) -> Frame:
        """Return the next frame of one kind; fails when the agent ends without it."""
        for frame in self.incoming():
            if frame.kind == kind:
                return frame
        raise AssertionError(f"no {kind} frame; stderr: {self.stderr()!r}")

    def stderr(self) -> bytes:
        """Return what the agent itself said on stderr, once it has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read() or b""

    def finish(self) -> Answer:
        """Read until the ``end`` frame and the end of the agent."""
        end = json.loads(self.wait_for("end").payload)
        for _ in self.incoming():
            pass
        assert self.process.wait(PATIENCE) == 0
        return Answer(self.frames, end, self.stderr())

    def run(self, probe: bytes, **changes: Any) -> Answer:
        """Run ``probe`` to its end, sending its file when asked."""
        self.begin(probe, **changes)
        for frame in self.incoming():
            if frame.kind == "need":
                self.send_file(probe)
            if frame.kind in ("started", "end"):
                break
        if self.frames[-1].kind == "end":
            end = json.loads(self.frames[-1].payload)
            for _ in self.incoming():
                pass
            return Answer(self.frames, end, self.stderr())
        return self.finish()
