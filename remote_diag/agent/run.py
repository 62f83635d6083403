"""The probe while it runs: its output, its messages, its end, and what all of that amounts to.

Imported only after the probe's process was started, so that what this pulls in costs no time of its own.
"""

from __future__ import annotations

import os
from time import monotonic, sleep

from . import wirejson
from .frames import Decoder, FrameError
from .processes import GRACE, Children, Ending, Process, Tree, become_subreaper
from .protocol import (
    BAD_RESULT,
    CHILD_OUTCOMES,
    CRASHED,
    ENVIRONMENT,
    MAX_FINDING_BYTES,
    MAX_FINDINGS,
    MAX_LOG,
    NO_RESULT,
    OK,
    OUTPUT_LIMIT,
    PROBE_ERROR,
)
from .signals import name_of
from .storage import write_all
from .verdict import Verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

    from .layout import RunPaths
    from .outbox import Outbox
    from .request import Request
    from .spawn import Spawned

_NOT_STARTED = "look at workdir, env and environment of this host in hosts.yaml"
LINGER = 2.0
"""Seconds that the probe's process may go on after its answer: atexit handlers, threads that never end."""
_MESSAGE_ROOM = 256 * 1024
_MAX_PROGRESS = 4096
_MAX_PIECES = 64
_MAX_TEXT = 4000
_MAX_LINE = 1000
_MAX_DETAILS = 60


class Source:
    """A pipe from the probe's process."""

    __slots__ = ("descriptor", "left", "open", "receive")

    def __init__(self, descriptor: int, receive: Callable[[bytes], None]) -> None:
        self.descriptor = descriptor
        self.receive = receive
        self.open = True
        self.left = _MAX_PIECES
        """How many more pieces may be read once nobody of the run is left to write them."""

    def read(self) -> bool:
        """Take what is there, at most one piece; return whether there was any."""
        try:
            data = os.read(self.descriptor, MAX_LOG)
        except BlockingIOError:
            return False
        if not data:
            self.open = False
            os.close(self.descriptor)
        self.receive(data)
        return bool(data)


class OutputFile:
    """One of the two output files of a run that is kept; a full disk makes it incomplete, not the run."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = -1
        self.problem: str | None = None

    def write(self, data: bytes) -> None:
        """Append ``data``."""
        if self.problem is not None:
            return
        try:
            if self._descriptor < 0:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            write_all(self._descriptor, data)
        except OSError as error:
            self.problem = "%s is incomplete: %s" % (self._path, error.strerror)


class Run:
    """The probe's process and its descendants, seen through the pipes and ``/proc``.

    Args:
        spawned: the process, just started.
        nonce: nonce of the messages it sends.
        request: what the client asked for.
        paths: the run's files.
        outbox: where frames for the client go.
        children: who waits for our children.
    """

    def __init__(
        self,
        spawned: Spawned,
        nonce: str,
        request: Request,
        *,
        paths: RunPaths,
        outbox: Outbox,
        children: Children,
    ) -> None:
        self.pid = spawned.pid
        self._request = request
        self._paths = paths
        self._outbox = outbox
        self._children = children
        self._decoder = Decoder(nonce, max_payload=max(request.result_bytes, _MESSAGE_ROOM))
        self._budget = request.output_bytes
        self._findings = 0
        self._failure = b""
        self._ending: Ending | None = None
        self._answered_at: float | None = None
        self._stopped: Verdict | None = None
        self._announced: Verdict | None = None
        self._files: dict[bytes, OutputFile] = {}
        self.over = False
        """Whether the process and its descendants are gone, or given up."""
        self.result: bytes | None = None
        self.sources = [
            Source(spawned.failure, self._take_failure),
            Source(spawned.messages, self._take_messages),
            Source(spawned.stdout, lambda data: self._take_output(b"o", data)),
            Source(spawned.stderr, lambda data: self._take_output(b"e", data)),
        ]
        children.await_(self.pid)
        self.tree = Tree(request.run_id, self.pid, children)
        self._oom_kills = _oom_kills()
        if request.keep:
            self._files = {b"o": OutputFile(paths.stdout), b"e": OutputFile(paths.stderr)}
            for file in self._files.values():
                file.write(b"")
        # Only now may the probe's code run: an orphan that it leaves would otherwise be nobody's, and live on.
        self.tree.adopts_all = become_subreaper()
        try:  # noqa: SIM105 - contextlib would be one more import
            os.write(spawned.gate, b".")
        except BrokenPipeError:
            # It could not be started, and has ended; why comes through another pipe.
            pass
        os.close(spawned.gate)

    def stop(self, verdict: Verdict, now: float, grace: float | None = None) -> None:
        """End the run for a reason that is not its own; an answer that is already here stays the answer."""
        grace = GRACE if grace is None else grace
        if self._stopped is None and self._answered_at is None and self.pid not in self._children.ended:
            self._stopped = verdict
        if self._ending is None:
            self._ending = Ending(self.tree, now, grace)
        else:
            self._ending.hurry(now + grace)

    def kill(self) -> None:
        """Kill everything without ceremony: the agent itself is about to end for a bug of its own."""
        ending = Ending(self.tree, monotonic(), 0.0, 1.0)
        while not ending.step(monotonic()):
            sleep(0.02)

    def hurry(self, now: float) -> None:
        """Kill whoever is still being asked to go."""
        if self._ending is not None:
            self._ending.hurry(now)

    def pause(self) -> float:
        """Return the seconds to wait between two looks at processes that are being ended."""
        return 0.0 if self._ending is None else self._ending.pause()

    @property
    def ending(self) -> bool:
        """Whether the processes are being ended."""
        return self._ending is not None

    def step(self, now: float) -> None:
        """Go on with what time brings: notice the end of the process, end its descendants."""
        if self.over:
            return
        self._children.reap()
        if self._ending is None:
            lingers = self._answered_at is not None and now >= self._answered_at + LINGER
            if lingers or self.pid in self._children.ended:
                self._ending = Ending(self.tree, now)
        if self._ending is not None:
            self.over = self._ending.step(now)

    def next_time(self) -> float | None:
        """Return the monotonic time at which :meth:`step` has something to do; None when only events matter."""
        return None if self._answered_at is None else self._answered_at + LINGER

    def drained(self) -> bool:
        """Read what the pipes still hold; return whether that was all. Only once the run is over."""
        for source in self.sources:
            while source.open and source.left > 0:
                if self._outbox.full:
                    return False
                source.left -= 1
                if not source.read():
                    break
        return True

    def _take_failure(self, data: bytes) -> None:
        self._failure += data
        if not data and not self._failure:
            started = {"pid": self.pid, "run_dir": self._paths.directory}
            self._outbox.put("started", wirejson.encode(started))

    def _take_output(self, stream: bytes, data: bytes) -> None:
        allowed = data[: self._budget]
        self._budget -= len(allowed)
        if allowed:
            self._outbox.put("log", stream + allowed)
            if stream in self._files:
                self._files[stream].write(allowed)
        if len(allowed) < len(data):
            self.stop(
                Verdict(
                    OUTPUT_LIMIT,
                    "the probe printed more than %d bytes and was ended" % self._request.output_bytes,
                    "return data as fields of the result; print little",
                ),
                monotonic(),
            )

    def _take_messages(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                self._take_message(frame.kind, frame.payload)
        except FrameError as error:
            self._spoil("the messages of the probe's process are damaged: %s" % error)

    def _take_message(self, kind: str, payload: bytes) -> None:
        if kind == "progress":
            if len(payload) <= _MAX_PROGRESS and not self._outbox.full:
                self._outbox.put("progress", payload)
        elif kind == "finding":
            self._findings += 1
            if self._findings > MAX_FINDINGS or len(payload) > MAX_FINDING_BYTES:
                self._spoil("the probe reported more or larger findings than allowed")
            else:
                self._outbox.put("finding", payload)
        elif kind == "result":
            if self.result is not None or self._announced is not None:
                self._spoil("the probe answered more than once")
            elif len(payload) > self._request.result_bytes:
                self._spoil(
                    "the result has %d bytes; %d are allowed" % (len(payload), self._request.result_bytes)
                )
            else:
                self.result = payload
                self._answered_at = monotonic()
        elif kind == "error" and self._announced is None:
            self._announced = _announced(payload)
            self._answered_at = monotonic()

    def _spoil(self, message: str) -> None:
        self.result = None
        self._answered_at = None
        self.stop(Verdict(BAD_RESULT, message), monotonic())

    def conclude(self) -> Verdict:
        """Return what all of it amounts to, once the run is over and drained."""
        verdict = self._verdict()
        verdict.details += self._remarks()
        return verdict

    def _verdict(self) -> Verdict:
        if self._failure:
            return Verdict(ENVIRONMENT, "cannot " + self._failure.decode("utf-8", "backslashreplace"), _NOT_STARTED)
        if self._stopped is not None:
            return self._stopped
        if self._announced is not None:
            return self._announced
        after = " after it had returned its result" if self.result is not None else ""
        if self.signal is not None and not (self.result is not None and self._was_ended()):
            hint = None
            if self.signal == 9 and _oom_kills() > self._oom_kills:
                hint = "the kernel ended a process for lack of memory meanwhile (oom_kill in /proc/vmstat grew)"
            elif self.signal == 9:
                hint = "somebody sent SIGKILL; if it was the kernel, for lack of memory, dmesg says so"
            return Verdict(CRASHED, "the probe was killed by %s%s" % (name_of(self.signal), after), hint)
        if self.exit_status and self.result is not None:
            return Verdict(PROBE_ERROR, "the probe exited with status %d%s" % (self.exit_status, after))
        if self.result is None:
            status = "" if self.exit_status is None else " with status %d" % self.exit_status
            return Verdict(NO_RESULT, "the probe exited%s without a result" % status)
        return Verdict(OK)

    def _was_ended(self) -> bool:
        return self._ending is not None and self.pid in self._ending.ended

    @property
    def signal(self) -> int | None:
        """Number of the signal that killed the probe's process."""
        status = self._children.ended.get(self.pid)
        return os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None

    @property
    def exit_status(self) -> int | None:
        """Exit status of the probe's process."""
        status = self._children.ended.get(self.pid)
        return os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None

    @property
    def survivors(self) -> list[Process]:
        """Processes that could not be ended."""
        return [] if self._ending is None else self._ending.survivors

    def _remarks(self) -> tuple[str, ...]:
        remarks = [file.problem for file in self._files.values() if file.problem is not None]
        if self._ending is not None and self._stopped is None:
            for pid, name in sorted(self._ending.ended.items()):
                who = "the probe's own process" if pid == self.pid else "process %d (%s)" % (pid, name)
                remarks.append("%s had not ended when the probe had answered; it was ended" % who)
        return tuple(remarks[:_MAX_DETAILS])


def _announced(payload: bytes) -> Verdict:
    """Return what the probe's process says of itself, taking nothing on trust."""
    try:
        fields = wirejson.decode(payload)
        outcome, message, hint, details = (fields[name] for name in ("outcome", "message", "hint", "details"))
        lines = tuple(str(line)[:_MAX_LINE] for line in list(details)[:_MAX_DETAILS])
        if outcome in CHILD_OUTCOMES:
            advice = None if hint is None else str(hint)[:_MAX_TEXT]
            return Verdict(outcome, str(message)[:_MAX_TEXT], advice, lines)
    except (ValueError, TypeError, KeyError):
        pass
    return Verdict(BAD_RESULT, "the probe's process announced its end in words unknown here")


def _oom_kills() -> int:
    """Return how many processes the kernel has ended for lack of memory since boot; 0 when it does not say."""
    try:
        with open("/proc/vmstat", "rb", 0) as stream:
            for line in stream.read().splitlines():
                if line.startswith(b"oom_kill "):
                    return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0
