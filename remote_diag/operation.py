"""Everything besides running a probe that an agent is asked to do: one request, files on demand, one answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from . import __version__
from .agent.frames import Frame
from .conversation import PROTOCOL, request_bytes
from .errors import ConnectionLost, EnvironmentUnfit, RdiagError, Refused, StateUnknown
from .events import Event, Note, Progress
from .host import Host
from .job_files import JobFile, parts
from .link import AgentLink
from .messages import Fields, MessageError, parse_progress
from .strict_json import StrictJsonError, loads

PART = 1024 * 1024
"""Bytes of a large file that travel in one frame; larger ones than four of these travel in parts."""
_WINDOW = 16 * 1024 * 1024
_ALWAYS = 1e9
_LAST_WORDS = 2.0
_MAX_TEXT = 64 * 1024
Tell = Callable[[Event], None]


class Operation:
    """One thing that an agent is asked to do besides running a probe.

    Args:
        link: an agent that waits for a request; closed at the end.
        host: whose it is.
        tell: gets progress.
    """

    def __init__(self, link: AgentLink, host: Host, tell: Tell) -> None:
        self._link = link
        self._host = host
        self._tell = tell
        self._frames: Iterator[Frame] = iter(())

    def run(self, name: str, request: Mapping[str, Any], files: Sequence[JobFile] = ()) -> dict[str, Any]:
        """Ask, and return the result; raise the error that another end stands for."""
        try:
            self._link.begin()
            self._link.send(
                "request",
                request_bytes(
                    {
                        "protocol": PROTOCOL,
                        "client": __version__,
                        "operation": name,
                        "lease_s": self._host.lease,
                        **request,
                    }
                ),
            )
            self._frames = self._link.frames(time.monotonic() + _ALWAYS)
            return self._result(files)
        except MessageError as error:
            raise self._lost(f"the agent's answer cannot be understood: {error}") from error
        except StrictJsonError as error:
            raise self._lost(f"the agent's answer is no JSON: {error}") from error
        except ConnectionLost as error:
            raise self._lost(error.message) from error
        finally:
            self._link.close()

    def _result(self, files: Sequence[JobFile]) -> dict[str, Any]:
        result: dict[str, Any] | None = None
        for frame in self._frames:
            if frame.kind == "result":
                value = loads(frame.payload)
                if not isinstance(value, dict):
                    raise MessageError("result: not an object")
                result = value
            elif frame.kind == "end":
                self._check_end(frame.payload)
                if result is None:
                    raise MessageError("end: it came without a result")
                return result
            elif frame.kind == "need":
                self._send_files(frame.payload, files)
            else:
                self._take(frame)
        raise self._lost("the connection ended before the answer did")

    def _take(self, frame: Frame) -> int:
        """Take a frame that may come at any time; return how many bytes it acknowledges."""
        if frame.kind == "progress":
            progress = parse_progress(frame.payload)
            if progress.unit == "B":
                mebi = 1024 * 1024
                total = None if progress.total is None else progress.total / mebi
                self._tell(Progress(round(progress.done / mebi, 1), None if total is None else round(total, 1), "MiB", "sending files"))
                return int(progress.done)
            self._tell(Progress(progress.done, progress.total, progress.unit, progress.label))
        elif frame.kind == "end":
            self._check_end(frame.payload)
            raise MessageError("end: in the middle of the files")
        elif frame.kind != "beat":
            raise MessageError(f"a frame of kind {frame.kind!r}")
        return 0

    def _send_files(self, payload: bytes, files: Sequence[JobFile]) -> None:
        wanted = loads(payload)
        names, have = (wanted.get("files"), wanted.get("have", {})) if isinstance(wanted, dict) else (None, {})
        by_hash = {file.sha256: file for file in files}
        if not isinstance(names, list) or not all(isinstance(name, str) and name in by_hash for name in names):
            raise MessageError("need: files that this launch does not have")
        chosen = [by_hash[name] for name in names]
        begun = {file.sha256: _begun(have, file) for file in chosen}
        total = sum(file.size for file in chosen)
        sent = acknowledged = sum(begun.values())
        there = f", {_size(sent)} of which are there already" if sent else ""
        self._tell(Note(f"sending {len(chosen)} of {len(by_hash)} files ({_size(total)}{there}) to {self._host.name}"))
        for file in chosen:
            head = file.sha256.encode("ascii") + b"\n"
            in_parts = file.size > 4 * PART
            for offset, data in parts(file, PART if in_parts else max(1, file.size), begun[file.sha256]):
                if in_parts:
                    self._send("file-part", head + b"%d\n" % offset + data)
                else:
                    self._send("file", head + data)
                sent += len(data)
                while in_parts and sent - acknowledged > _WINDOW:
                    acknowledged = max(acknowledged, self._take(self._next()))

    def _send(self, kind: str, payload: bytes) -> None:
        """Send a frame; when nobody takes it any more, raise the reason that the agent gave before it left."""
        try:
            self._link.send(kind, payload)
        except ConnectionLost as lost:
            with contextlib.suppress(ConnectionLost):
                for frame in self._link.frames(time.monotonic() + _LAST_WORDS):
                    if frame.kind == "end":
                        self._check_end(frame.payload)
            raise lost from None

    def _next(self) -> Frame:
        frame = next(self._frames, None)
        if frame is None:
            raise self._lost("the connection ended while files were sent")
        return frame

    def _check_end(self, payload: bytes) -> None:
        fields = Fields(payload, "end")
        outcome = fields.text("outcome", 64)
        message = fields.text("message", _MAX_TEXT) or outcome
        hint = fields.optional_text("hint", _MAX_TEXT)
        kinds: dict[str, type[RdiagError]] = {
            "no-job": StateUnknown,
            "refused": Refused,
            "cancelled": ConnectionLost,
            "lease": ConnectionLost,
        }
        if outcome != "ok":
            raise kinds.get(outcome, EnvironmentUnfit)(message, host=self._host.name, hint=hint)

    def _lost(self, cause: str) -> ConnectionLost:
        return ConnectionLost(
            cause, host=self._host.name, hint=f"see what is there: rdiag jobs --host {self._host.name}", retryable=True
        )


def _begun(have: object, file: JobFile) -> int:
    """Return how many bytes of a file the host has from a connection that was lost; only large ones are gone on with."""
    count = have.get(file.sha256, 0) if isinstance(have, dict) else 0
    if type(count) is not int or not 0 <= count < max(1, file.size):
        raise MessageError("need: more of a file than there is")
    return count if file.size > 4 * PART else 0


def _size(count: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"
