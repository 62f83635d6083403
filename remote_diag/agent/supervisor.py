"""One run, from the request to the ``end`` frame: the agent's event loop.

Nothing here blocks. Each turn waits, for a bounded time, on what the client says, on the probe's output and
messages, and on signals; then it looks at the clocks. A run goes through these phases::

    request -> (file) -> (guard) -> running -> flushing

Any of them is cut short by :meth:`Supervisor.stop`; the first reason wins.
"""

from __future__ import annotations

import os
import select
import sys
from time import monotonic

from . import wirejson
from .digest import sha256
from .frames import MAX_PAYLOAD, Decoder, FrameError
from .outbox import Outbox
from .protocol import CANCELLED, DEADLINE, ENVIRONMENT, LEASE
from .request import Request, RequestError
from .storage import Blobs, RunDirectory, StorageError, create
from .verdict import Verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    from .guard import Guard
    from .processes import Children
    from .run import Run
    from .signals import SignalPipe

_FIRST_WORD = 60.0
"""Seconds that a client has to send its request once it began."""
_LAST_WORD = 10.0
"""Seconds that a client has to take what is left once the run is over; one second when it seems gone."""
_BRIEF_GRACE = 0.4
"""Seconds that the processes of a run get to end by themselves when the client is gone."""
_LONGEST_WAIT = 3600.0
"""Seconds; a month in milliseconds is more than poll() takes."""
_TIDYING = 3.0
"""Seconds to remove the run's folder in, before the client is told of the end; the rest goes afterwards."""
_CHUNK = 1 << 16
_REINSTALL = "remove %s on the host and run again: rdiag installs itself anew"


class Supervisor:
    """Talks to one client about one run.

    Args:
        bundle: folder of this release on the host.
        cache: folder that holds it, and the runs.
        nonce: nonce of the run's frames.
        early: bytes that came after the nonce.
        umask: the file mode mask that the probe gets.
    """

    def __init__(self, bundle: str, cache: str, nonce: str, early: bytes, umask: int) -> None:
        self._bundle = bundle
        self._cache = cache
        self._umask = umask
        self._early = early
        self._decoder = Decoder(nonce, max_payload=MAX_PAYLOAD)
        self._outbox = Outbox(1, nonce)
        self._client_talks = True
        self._begun = self._heard = monotonic()
        self._request: Request | None = None
        self._awaits_file = False
        self._directory: RunDirectory | None = None
        self._signals: SignalPipe | None = None
        self._children: Children | None = None
        self._guard: Guard | None = None
        self._run: Run | None = None
        self._verdict: Verdict | None = None
        self._asked_to_stop = self._known_gone = False
        self._drain_until: float | None = None
        self._flush_until: float | None = None

    def serve(self) -> int:
        """Do it all; return the exit status of the agent."""
        os.set_blocking(1, False)
        try:
            if self._early:
                self._hear(self._early)
                self._advance(monotonic())
            while not self._finished():
                self._wait()
                self._advance(monotonic())
        finally:
            self._leave()
        return 0

    # -- what the client says

    def _read_client(self) -> None:
        try:
            data = os.read(0, _CHUNK)
        except OSError:
            data = b""
        if data:
            self._hear(data)
        else:
            self._lose_client()

    def _hear(self, data: bytes) -> None:
        self._heard = monotonic()
        try:
            for frame in self._decoder.feed(data):
                self._take(frame.kind, frame.payload)
        except FrameError as error:
            self._client_talks = False
            self.stop(Verdict(CANCELLED, "what the client sends is damaged: %s" % error))

    def _take(self, kind: str, payload: bytes) -> None:
        if kind == "beat":
            if not self._outbox.full:
                self._outbox.put("beat")
        elif kind == "cancel":
            self._stop_or_hurry(Verdict(CANCELLED, "the client cancelled the run"))
        elif kind == "request" and self._request is None and self._verdict is None:
            self._begin(payload)
        elif kind == "file" and self._awaits_file:
            self._awaits_file = False
            self._take_file(payload)
        else:
            self.stop(Verdict(CANCELLED, "the client sent %r out of turn" % kind))

    # -- getting ready

    def _begin(self, payload: bytes) -> None:
        self._begun = monotonic()
        if b'"operation":' in payload:
            from .operations import serve

            if serve(payload, self._bundle, self._cache, self._outbox, self._decoder, self._umask):
                self._flush_until = monotonic()
                return
        try:
            self._request = Request(payload)
        except RequestError as error:
            self.stop(Verdict(ENVIRONMENT, str(error), _REINSTALL % self._bundle))
            return
        probe = Blobs(self._bundle, self._cache).read(self._request.probe_sha256)
        if probe is not None:
            self._prepare(probe)
        else:
            self._awaits_file = True
            self._outbox.put("need", wirejson.encode({"sha256": self._request.probe_sha256}))

    def _take_file(self, payload: bytes) -> None:
        assert self._request is not None  # noqa: S101 - a file is awaited only for a request
        expected = self._request.probe_sha256
        name, probe = payload[:64].decode("ascii", "replace"), payload[65:]
        if name != expected or payload[64:65] != b"\n" or sha256(probe) != expected:
            self.stop(Verdict(ENVIRONMENT, "the probe's file arrived damaged: its SHA-256 is not %s" % expected))
            return
        try:
            Blobs(self._bundle, self._cache).store(expected, probe)
        except StorageError as error:
            self.stop(Verdict(ENVIRONMENT, str(error), error.hint))
            return
        self._prepare(probe)

    def _prepare(self, probe: bytes) -> None:
        assert self._request is not None  # noqa: S101 - see above
        self._directory = RunDirectory(self._cache, self._request.run_id)
        try:
            self._directory.make(self._request, probe)
        except StorageError as error:
            self.stop(Verdict(ENVIRONMENT, str(error), error.hint))
            return
        if self._request.active:
            self._watch_gpus()
        else:
            self._start()

    def _watch_gpus(self) -> None:
        from .guard import Guard

        assert self._request is not None  # noqa: S101 - see above
        children = self._prepare_for_children()
        self._guard = Guard(self._cache, self._request, self._environment(), children)
        refusal = self._guard.begin()
        if refusal is not None:
            self.stop(refusal)

    def _start(self) -> None:
        from .spawn import as_utf8, spawn

        assert self._request is not None and self._directory is not None  # noqa: S101, PT018 - see above
        nonce = os.urandom(16).hex()
        until = self._begun + self._request.deadline_s
        program = os.path.join(self._bundle, "agent", "probe_main.py")
        argv = [*(as_utf8(path) for path in (sys.executable, program, self._directory.path)), nonce, repr(until)]
        try:
            spawned = spawn(argv, self._environment(), self._request.workdir, self._umask)
        except OSError as error:
            self.stop(Verdict(ENVIRONMENT, "cannot start another process: %s" % error.strerror))
            return
        # From here on the probe's interpreter starts up beside us; what is imported now costs no time of its own.
        children = self._prepare_for_children()
        from .run import Run

        self._run = Run(
            spawned,
            nonce,
            self._request,
            paths=self._directory.paths,
            outbox=self._outbox,
            children=children,
        )
        if self._guard is not None:
            self._guard.protects(self._run.tree)

    def _environment(self) -> dict[str, str]:
        from .layout import smi_lock
        from .spawn import child_environment, inherited_environment

        assert self._request is not None  # noqa: S101 - see above
        return child_environment(self._request, inherited_environment(), sys.executable, smi_lock(self._cache))

    def _prepare_for_children(self) -> Children:
        if self._children is None:
            from .processes import Children
            from .signals import SignalPipe

            self._signals = SignalPipe()
            self._children = Children()
        return self._children

    # -- one turn

    def _wait(self) -> None:
        """Wait until something happens or is due, and take it."""
        handlers: dict[int, Callable[[], Any]] = {}
        poller = select.poll()

        def watch(descriptor: int, events: int, handler: Callable[[], Any]) -> None:
            poller.register(descriptor, events)
            handlers[descriptor] = handler

        if self._client_talks:
            watch(0, select.POLLIN, self._read_client)
        if not self._outbox.gone:
            watch(1, 0 if self._outbox.empty else select.POLLOUT, lambda: None)
        if self._signals is not None:
            watch(self._signals.descriptor, select.POLLIN, self._take_signals)
        if self._guard is not None and self._guard.descriptor is not None:
            watch(self._guard.descriptor, select.POLLIN, self._guard.read)
        if self._run is not None and not self._outbox.full:
            for source in self._run.sources:
                if source.open:
                    watch(source.descriptor, select.POLLIN, source.read)
        wait = min(max(0.0, self._next_time() - monotonic()), _LONGEST_WAIT)
        for descriptor, events in poller.poll(wait * 1000 + 0.5):
            if descriptor == 1 and events & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
                self._outbox.abandon()
            handlers[descriptor]()
        self._outbox.flush()
        if self._outbox.gone and not self._known_gone:
            self._known_gone = True
            self._lose_client()

    def _next_time(self) -> float:
        """Return when, on the monotonic clock, the next thing is due."""
        if self._flush_until is not None:
            return self._flush_until
        if self._drain_until is not None:
            return self._drain_until
        if self._run is not None and self._run.ending:
            return monotonic() + self._run.pause()
        times = [self._heard + self._lease()]
        if self._request is not None:
            times.append(self._begun + self._request.deadline_s)
        for part in (self._run, self._guard):
            time = None if part is None else part.next_time()
            if time is not None:
                times.append(time)
        return min(times)

    def _lease(self) -> float:
        return _FIRST_WORD if self._request is None else self._request.lease_s

    def _advance(self, now: float) -> None:
        """Do what is due."""
        if self._flush_until is not None:
            return
        request = self._request
        if now >= self._heard + self._lease():
            self.stop(Verdict(LEASE, "nothing was heard from the client for %g s" % self._lease()))
        if request is not None and now >= self._begun + request.deadline_s:
            message = "the probe did not end within its deadline of %g s" % request.deadline_s
            self.stop(Verdict(DEADLINE, message, "raise it with --timeout"))
        if self._guard is not None:
            self._heed(self._guard, now)
        if self._run is not None:
            self._run.step(now)
            if self._run.over:
                if self._drain_until is None:
                    self._drain_until = now + self._patience()
                if self._run.drained() or now >= self._drain_until:
                    self._finish(self._run.conclude())
        elif self._verdict is not None:
            self._finish(self._verdict)

    def _heed(self, guard: Guard, now: float) -> None:
        """Do what the guard of the GPUs says."""
        if self._verdict is not None or (self._run is not None and self._run.ending):
            guard.rest()
            return
        refusal = guard.step(now)
        if refusal is not None:
            self.stop(refusal)
        elif self._run is None and guard.free:
            self._start()

    def _patience(self) -> float:
        """Return for how many seconds the client may take to read what is left."""
        return _LAST_WORD if self._client_talks else 1.0

    def _take_signals(self) -> None:
        from .signals import STOPPING, name_of

        assert self._signals is not None  # noqa: S101 - its descriptor was readable
        for number in self._signals.read():
            if number in STOPPING:
                self._stop_or_hurry(Verdict(CANCELLED, "the agent on the host was sent %s" % name_of(number)))

    def _lose_client(self) -> None:
        """End the run, and soon: whoever closed our pipes may kill us next, and then nobody would end it."""
        self._client_talks = False
        self.stop(Verdict(CANCELLED, "the client went away"), _BRIEF_GRACE)

    # -- the end

    def stop(self, verdict: Verdict, grace: float | None = None) -> None:
        """End the run, whatever phase it is in; of several reasons the first stays.

        Args:
            verdict: the reason.
            grace: seconds between asking its processes to end and killing them; None for the usual time.
        """
        if self._run is not None:
            self._run.stop(verdict, monotonic(), grace)
        elif self._verdict is None:
            self._verdict = verdict

    def _stop_or_hurry(self, verdict: Verdict) -> None:
        """End the run; whoever asks for a second time gets it without the grace."""
        if self._run is not None and self._asked_to_stop:
            self._run.hurry(monotonic())
        self._asked_to_stop = True
        self.stop(verdict)

    def _finish(self, verdict: Verdict) -> None:
        """Say how it ended and clean up; all that is left then is to have it read."""
        run, directory, request = self._run, self._directory, self._request
        result = None if run is None else run.result
        kept = None
        if directory is not None and directory.exists:
            if request is not None and request.keep:
                kept = directory.path
                if result is not None:
                    verdict = _kept(directory, result, verdict)
            else:
                directory.remove(monotonic() + _TIDYING)
        if result is not None:
            self._outbox.put("result", result)
        end = {
            "outcome": verdict.outcome,
            "message": verdict.message,
            "hint": verdict.hint,
            "details": verdict.details,
            "exit_status": None if run is None else run.exit_status,
            "signal": None if run is None else run.signal,
            "result_sha256": None if result is None else sha256(result),
            "result_bytes": 0 if result is None else len(result),
            "survivors": [
                {"pid": process.pid, "name": process.name, "state": process.state}
                for process in ([] if run is None else run.survivors)
            ],
            "run_dir": kept,
            "elapsed_s": round(monotonic() - self._begun, 6),
        }
        self._outbox.put("end", wirejson.encode(end))
        self._outbox.flush()
        self._flush_until = monotonic() + self._patience()

    def _finished(self) -> bool:
        if self._flush_until is None:
            return False
        return self._outbox.empty or monotonic() >= self._flush_until

    def _leave(self) -> None:
        os.set_blocking(1, True)
        if self._guard is not None:
            self._guard.close()
        if self._flush_until is None and self._run is not None:
            # Only a bug of ours leads here; the run must not outlive us all the same.
            self._run.kill()
        if self._directory is not None and self._request is not None and not self._request.keep:
            self._directory.remove()
            self._directory.sweep()


def _kept(directory: RunDirectory, result: bytes, verdict: Verdict) -> Verdict:
    """Write the result beside the other files of a run that is kept."""
    try:
        create(directory.paths.result, result)
    except OSError as error:
        verdict.details += ("%s was not written: %s" % (directory.paths.result, error.strerror),)
    return verdict
