"""The logs of a job, as the agent sends them: what is asked, what is answered, every word checked.

:mod:`follow` builds on this what people use: a local copy that survives every interruption.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from . import __version__
from .agent.frames import Frame
from .agent.log_files import RETIRED
from .agent.log_reader import EVENTS
from .conversation import PROTOCOL, request_bytes
from .errors import ConnectionLost, EnvironmentUnfit, RdiagError, StateUnknown
from .host import Host
from .link import AgentLink
from .messages import Fields, MessageError
from .text import safe

if TYPE_CHECKING:
    from .session import Session

SegmentEvent = Literal["begun", "resumed", "rotated", "truncated", "rewritten", "different"]
ENDED = frozenset({"exited", "failed", "stopped", "lost", "unknown"})
"""States of a job after which its log does not grow any more."""
STATES = ("starting", "running", *sorted(ENDED))
_JOB = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}\.v[1-9][0-9]{0,8}\Z")
_STREAM = re.compile(r"(?:stdout|stderr|rank[0-9]{1,5}(?:\.run[0-9]{1,5})?(?:\.attempt[0-9]{1,5})?(?:\.err)?)\Z")
_MAX_SIZE = 2**62
_ALWAYS = 1e9


@dataclass(frozen=True)
class JobState:
    """What the host says of a job."""

    state: str
    """One of :data:`STATES`."""
    exit_code: int | None = None
    signal: int | None = None

    @property
    def ended(self) -> bool:
        """Whether the job's log is complete."""
        return self.state in ENDED


@dataclass(frozen=True)
class Found:
    """The job that was asked for."""

    job: str
    """Its id, ``finetune.v2``."""
    log: str
    """Absolute path of its standard output on the host (untrusted)."""
    state: JobState


@dataclass(frozen=True)
class Offer:
    """A log that can be had; to be answered with :meth:`LogConversation.take`."""

    stream: str
    """``stdout``, ``stderr``, ``rank0``, ``rank0.err``, ...; safe as a part of a file name."""
    size: int | None
    """Bytes; None when there is no such file (yet)."""


@dataclass(frozen=True)
class Segment:
    """From here on ``number`` stands for this file of ``stream``."""

    number: int
    stream: str
    event: SegmentEvent
    offset: int
    size: int
    path: str
    older: int | None = None
    """The place of the copy that these bytes belong to, in the list of older ones that was sent."""


@dataclass(frozen=True)
class Data:
    """Bytes of a segment."""

    number: int
    offset: int
    data: memoryview


@dataclass(frozen=True)
class Gone:
    """A log's name is gone (``deleted``), or never appeared (``missing``)."""

    stream: str
    event: str


@dataclass(frozen=True)
class Done:
    """Everything that was asked for has been sent."""

    job: str
    state: JobState


Message = Found | Offer | Segment | Data | Gone | JobState | Done


def stream_suffix(stream: str) -> str:
    """Return how the copy of ``stream`` is called, after the job: ``.log``, ``.err.log``, ``.rank0.log``."""
    if stream == "stdout":
        return ".log"
    return ".err.log" if stream == "stderr" else f".{stream}.log"


def rank_of(stream: str) -> int | None:
    """Return the rank whose log ``stream`` is; None for the job's own."""
    return int(stream[4:].split(".", maxsplit=1)[0]) if stream.startswith("rank") else None


class LogConversation:
    """One request for logs over one agent.

    Args:
        link: an agent that has said hello and waits for a request.
        host: whose it is.
    """

    def __init__(self, link: AgentLink, host: Host) -> None:
        self._link = link
        self._host = host

    def begin(self, job: str, *, follow: bool) -> None:
        """Ask for the logs of ``job``: an id, or a name for its latest attempt."""
        self._link.begin()
        request = {
            "protocol": PROTOCOL,
            "client": __version__,
            "operation": "read-log",
            "job": job,
            "follow": follow,
            "lease_s": self._host.lease,
        }
        self._link.send("request", request_bytes(request))

    def take(self, stream: str, how: Mapping[str, Any]) -> None:
        """Answer an offer.

        Args:
            stream: the log.
            how: ``{"from": "copy", "offset", "bytes", "sha256", "older"}`` with the same three of each older copy, ``{"from": "offset" | "last-bytes" | "last-lines",
                "count"}``, or ``{"from": "nothing"}``.
        """
        self._link.send("take", request_bytes({"stream": stream, **how}))

    def messages(self) -> Iterator[Message | None]:
        """Yield what the host says, until :class:`Done`; None now and then, when there is nothing else.

        Raises:
            ConnectionLost: the connection ended before that; nothing that was received is wrong.
            StateUnknown: there is no such job.
            EnvironmentUnfit: the host's agent does not understand the request.
        """
        done: Done | None = None
        try:
            for frame in self._link.frames(time.monotonic() + _ALWAYS):
                if frame.kind == "end":
                    yield self._checked_end(frame.payload, done)
                    return
                message = _parse(frame)
                if isinstance(message, Done):
                    done = message
                else:
                    yield message
        except MessageError as error:
            raise self._lost(f"the agent's answer cannot be understood: {error}", retryable=False) from error
        except ConnectionLost as error:
            raise self._lost(error.message) from error
        raise self._lost("the connection ended")

    def _checked_end(self, payload: bytes, done: Done | None) -> Done:
        fields = Fields(payload, "end")
        outcome = fields.text("outcome", 64)
        message = fields.text("message", 16 * 1024)
        name = self._host.name
        if outcome == "ok":
            if done is None:
                raise MessageError("end: it came without a result")
            return done
        if outcome == "no-job":
            raise StateUnknown(message, host=name, hint=f"see: rdiag jobs --host {name}")
        if outcome in {"lease", "cancelled", "again"}:
            raise ConnectionLost(message, host=name)
        raise EnvironmentUnfit(message, host=name)

    def _lost(self, cause: str, *, retryable: bool = True) -> RdiagError:
        hint = "the job goes on; run the same command again: it continues where this one stopped"
        return ConnectionLost(cause, host=self._host.name, hint=hint, retryable=retryable)


def read(
    session: Session, job: str, *, stream: str = "stdout", offset: int = 0, follow: bool = False
) -> Iterator[bytes]:
    """Yield the bytes of one log, as they are, over one connection; nothing is kept on this machine.

    :class:`remote_diag.follower.Follower` is what survives a lost connection.

    Args:
        session: the host.
        job: a job id, or a name for its latest attempt.
        stream: ``stdout``, ``stderr``, ``rank0``, ...
        offset: where to begin, bytes.
        follow: go on until the job has ended, instead of until the end that the log has now.

    Raises:
        ConnectionLost: the connection ended first.
        StateUnknown: there is no such job.
    """
    link = session.agent(library=False)
    try:
        conversation = LogConversation(link, session.host)
        conversation.begin(job, follow=follow)
        for message in conversation.messages():
            if isinstance(message, Offer):
                wanted = message.stream == stream
                conversation.take(message.stream, {"from": "offset", "count": offset} if wanted else {"from": "nothing"})
            elif isinstance(message, Data):
                yield bytes(message.data)
    finally:
        link.close()


def _parse(frame: Frame) -> Message | None:
    if frame.kind == "data":
        return _parse_data(frame.payload)
    if frame.kind == "beat":
        return None
    parser = _PARSERS.get(frame.kind)
    if parser is None:
        raise MessageError(f"a frame of kind {frame.kind!r}")
    message: Message = parser(frame.payload)
    return message


def _state(fields: Fields) -> JobState:
    return JobState(
        fields.choice("state", STATES),
        fields.optional_integer("exit_code", 0, 255),
        fields.optional_integer("signal", 1, 255),
    )


def _job(fields: Fields) -> str:
    job = fields.text("job", 100)
    if not _JOB.match(job) or ".." in job:
        raise MessageError(f"{safe(job)!r} is no job id")
    return job


def _stream(fields: Fields) -> str:
    stream = fields.text("stream", 100)
    if not _STREAM.match(stream):
        raise MessageError(f"{safe(stream)!r} is no name of a log")
    return stream


def _parse_found(payload: bytes) -> Found:
    fields = Fields(payload, "job")
    found = Found(_job(fields), fields.text("log", 4096), _state(fields))
    fields.nothing_left()
    return found


def _parse_done(payload: bytes) -> Done:
    fields = Fields(payload, "result")
    done = Done(_job(fields), _state(fields))
    fields.nothing_left()
    return done


def _parse_offer(payload: bytes) -> Offer:
    fields = Fields(payload, "offer")
    offer = Offer(_stream(fields), fields.optional_integer("size", 0, _MAX_SIZE))
    fields.nothing_left()
    return offer


def _parse_segment(payload: bytes) -> Segment:
    fields = Fields(payload, "segment")
    segment = Segment(
        number=fields.integer("number", 1, 255),
        stream=_stream(fields),
        event=cast(SegmentEvent, fields.choice("event", EVENTS)),
        offset=fields.integer("offset", 0, _MAX_SIZE),
        size=fields.integer("size", 0, _MAX_SIZE),
        path=fields.text("path", 4096),
        older=fields.optional_integer("older", 0, RETIRED - 1),
    )
    fields.nothing_left()
    return segment


def _parse_gone(payload: bytes) -> Gone:
    fields = Fields(payload, "missing")
    gone = Gone(_stream(fields), fields.choice("event", ("deleted", "missing")))
    fields.nothing_left()
    return gone


def _parse_data(payload: bytes) -> Data:
    if len(payload) < 10:
        raise MessageError("data: empty")
    return Data(payload[0], int.from_bytes(payload[1:9], "big"), memoryview(payload)[9:])


def _parse_changed(payload: bytes) -> JobState:
    fields = Fields(payload, "state")
    state = _state(fields)
    fields.nothing_left()
    return state


_PARSERS: Mapping[str, Callable[[bytes], Message]] = {
    "job": _parse_found,
    "result": _parse_done,
    "offer": _parse_offer,
    "segment": _parse_segment,
    "missing": _parse_gone,
    "state": _parse_changed,
}
