"""What an agent can do besides running a probe: jobs and their logs. Imported only when a request names an operation.

Every operation answers like a probe: frames of its own, one ``result`` (JSON), then ``end``.
"""

from __future__ import annotations

import os
import select
from time import monotonic

from . import wirejson
from .frames import FrameError
from .log_reader import drain, put_end
from .protocol import CANCELLED, ENVIRONMENT, LEASE, OK, PROTOCOL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .frames import Decoder, Frame
    from .outbox import Outbox

NO_JOB = "no-job"
"""Outcome: there is no job of that name."""
DEFAULT_LEASE = 30.0
_CHUNK = 1 << 16
_PULSE = 1.0


class Gone(Exception):
    """The client went away, or said nothing for too long, or talks nonsense; the text says which.

    Args:
        outcome: one of ``protocol.OUTCOMES``.
        message: the cause.
    """

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class Failure(Exception):
    """The operation cannot be done.

    Args:
        outcome: one of ``protocol.OUTCOMES``, or :data:`NO_JOB`.
        message: the cause.
        hint: what to do about it.
    """

    def __init__(self, outcome: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.message = message
        self.hint = hint


class Peer:
    """The client of one operation.

    Args:
        outbox: frames for it, on a descriptor that does not block.
        decoder: of what it says on stdin; what it holds already is taken first.
        lease_s: seconds without a word after which the client counts as gone.
    """

    def __init__(self, outbox: Outbox, decoder: Decoder, lease_s: float) -> None:
        self.outbox = outbox
        self._decoder = decoder
        self._lease = lease_s
        self._heard = monotonic()
        self._frames: list[Frame] = []
        self._gone: Gone | None = None
        self._pulsed = 0.0
        self._feed(b"")

    def put(self, kind: str, fields: dict[str, Any]) -> None:
        """Queue a frame, and write as much as the client takes now."""
        self.outbox.put(kind, wirejson.encode(fields))
        self.outbox.flush()

    def next(self, wait: float, *others: int) -> Frame | None:
        """Return the next frame that is no beat; None when ``wait`` seconds passed, or one of ``others`` is readable.

        Raises:
            Gone: the client is not there any more.
        """
        until = monotonic() + wait
        while True:
            if self._frames:
                return self._frames.pop(0)
            now = monotonic()
            if now >= self._heard + self._lease:
                self._gone = self._gone or Gone(LEASE, "nothing was heard from the client for %g s" % self._lease)
            if self._gone is not None:
                raise self._gone
            ready = self._poll(min(until, self._heard + self._lease) - now, others)
            if any(descriptor in others for descriptor in ready) or (monotonic() >= until and not self._frames):
                return None

    def pulse(self) -> None:
        """Answer the client, every second at most; for whoever works long without waiting. Raises Gone."""
        now = monotonic()
        if now >= self._pulsed + _PULSE:
            self._pulsed = now
            frame = self.next(0.0)
            if frame is not None:
                self._frames.insert(0, frame)

    def _poll(self, wait: float, others: tuple[int, ...]) -> list[int]:
        poller = select.poll()
        poller.register(0, select.POLLIN)
        poller.register(1, 0 if self.outbox.empty else select.POLLOUT)
        for descriptor in others:
            poller.register(descriptor, select.POLLIN)
        ready = poller.poll(max(0.0, wait) * 1000 + 0.5)
        for descriptor, events in ready:
            if descriptor == 1 and events & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
                self.outbox.abandon()
            elif descriptor == 0:
                self._read()
        self.outbox.flush()
        if self.outbox.gone:
            self._gone = self._gone or Gone(CANCELLED, "the client went away")
        return [descriptor for descriptor, _ in ready]

    def _read(self) -> None:
        try:
            data = os.read(0, _CHUNK)
        except OSError:
            data = b""
        if not data:
            self._gone = Gone(CANCELLED, "the client went away")
            return
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        self._heard = monotonic()
        try:
            for frame in self._decoder.feed(data):
                if frame.kind == "beat":
                    if not self.outbox.full:
                        self.outbox.put("beat")
                elif frame.kind == "cancel":
                    self._gone = Gone(CANCELLED, "the client cancelled")
                else:
                    self._frames.append(frame)
        except FrameError as error:
            self._gone = Gone(CANCELLED, "what the client sends is damaged: %s" % error)


def serve(  # noqa: PLR0917 - the agent's whole world, passed once
    payload: bytes, bundle: str, cache: str, outbox: Outbox, decoder: Decoder, umask: int
) -> bool:
    """Do what the request ``payload`` asks for, to its ``end`` frame; return False when it is about a probe.

    Args:
        payload: JSON of the client's ``request``.
        bundle: folder of this release on the host.
        cache: folder that holds it, and the jobs.
        outbox: the frames for the client, on a non-blocking descriptor 1.
        decoder: of the frames on stdin.
        umask: the file mode mask that the user's programs get.
    """
    try:
        fields = wirejson.decode(payload)
    except ValueError:
        return False
    if not isinstance(fields, dict) or fields.get("operation", "probe") == "probe":
        return False
    if fields.get("operation") == "read-log" and fields.get("protocol") == PROTOCOL:
        from .log_reader import read_log

        read_log(fields, cache, outbox, decoder)
        return True
    peer = Peer(outbox, decoder, _lease(fields))
    try:
        result = wirejson.encode(_do(fields, peer, bundle, cache, umask))
    except Failure as failure:
        put_end(outbox, failure.outcome, failure.message, hint=failure.hint)
    except Gone as gone:
        put_end(outbox, gone.outcome, str(gone))
    except OSError as error:
        if fields["operation"] == "launch":
            # Whether a job runs is not known here; the client asks again.
            raise
        where = "" if error.filename is None else ": %s" % os.fsdecode(error.filename)
        put_end(outbox, ENVIRONMENT, "cannot %s%s: %s" % (fields["operation"], where, error.strerror))
    else:
        outbox.put("result", result)
        put_end(outbox, OK, "", result=result)
    drain(outbox)
    return True


def _lease(fields: dict[str, Any]) -> float:
    lease = fields.get("lease_s")
    fits = isinstance(lease, (int, float)) and not isinstance(lease, bool) and 0 < lease < 1e6
    return float(lease) if fits else DEFAULT_LEASE  # type: ignore[arg-type]


def _do(fields: dict[str, Any], peer: Peer, bundle: str, cache: str, umask: int) -> dict[str, Any]:
    name = fields["operation"]
    if fields.get("protocol") != PROTOCOL:
        raise Failure(
            ENVIRONMENT, "the client speaks protocol %s and this agent protocol %d" % (str(fields.get("protocol"))[:20], PROTOCOL)
        )
    if not os.path.isdir("/proc/self"):
        raise Failure(ENVIRONMENT, "jobs need /proc, as Linux has it")
    if name == "launch":
        from .jobs.launch import launch

        return launch(fields, peer, bundle, cache, umask)
    if name == "jobs":
        from .jobs.listing import list_jobs

        return list_jobs(fields, cache)
    if name == "stop":
        from .jobs.stop import stop

        return stop(fields, peer, cache)
    if name == "clean":
        from .jobs.clean import clean

        return clean(fields, peer, bundle, cache)
    raise Failure(ENVIRONMENT, "this agent cannot %s; the client is of another release" % ascii(name)[:60])
