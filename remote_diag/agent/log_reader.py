"""Sends the logs of one job to one client, from any offset, for as long as the client wants: operation ``read-log``.

The client names a job; the answer is a ``job`` frame and an ``offer`` for each log, those of ranks that appear later
included. The client answers each offer with ``take``: what it has of that log already (an offset, and the hash of the
bytes before it), where to begin, or that it does not want it. Then::

    segment   JSON: a number, whose bytes follow under this number, from which offset, and why it begins (EVENTS); with
              "older", they belong to the copy at that place in the list of older ones that the client has
    data      1 byte number, 8 bytes big-endian offset, the bytes
    missing   JSON: a name that is gone, or that never appeared before the job ended
    state     JSON: the job's state has changed
    result    JSON: job, state, and how far each log was sent; then ``end``

Bytes are read only when the client takes them, so memory is bounded however fast a job writes. A job that has ended
is read to the size it has *then*: first the state, then the size, then the bytes. Nothing here ever waits for the job,
writes into its folder, or locks anything.
"""

from __future__ import annotations

import os
import select
from time import monotonic, sleep

from . import wirejson
from .frames import FrameError
from .job_view import ENDED, JobView, find_job
from .log_files import CHECKED, CHUNK, RETIRED, Copy, Log, Segment
from .log_watch import Watch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    from .frames import Decoder
    from .outbox import Outbox

EVENTS = ("begun", "resumed", "rotated", "truncated", "rewritten", "different")
"""Why a segment begins. The last four mean that a copy has to begin anew; the client's bytes are older ones."""
MAX_SEGMENTS = 250
_LITTLE = 4096
_PACE = 0.001
_RANKS_EVERY = 1.0
_RANK_FILES = 512
_LAST_WORD = 10.0
_MAX_OFFSET = 1 << 62


class LogRequestError(ValueError):
    """The request cannot be followed; the text says why."""


class LogReader:
    """One client and the logs of one job.

    Args:
        view: the job.
        outbox: where frames go.
        decoder: of the frames on stdin.
        follow: go on until the job has ended; otherwise stop at the present sizes.
        lease_s: seconds without any word from the client after which it counts as gone.
    """

    def __init__(self, view: JobView, outbox: Outbox, decoder: Decoder, *, follow: bool, lease_s: float) -> None:
        self._view = view
        self._outbox = outbox
        self._decoder = decoder
        self._follow = follow
        self._lease = lease_s
        self._heard = monotonic()
        self._logs: dict[str, Log] = {}
        self._unanswered: set[str] = set()
        self._numbers = 0
        self._watch = Watch()
        self._ranks_at = 0.0
        self._state: dict[str, Any] = {}
        self._over: tuple[str, str] | None = None

    def serve(self) -> None:
        """Send everything, then ``result`` and ``end``."""
        self._watch.add(self._view.paths.directory)
        self._state = self._view.state(monotonic())
        self._put("job", {"job": self._view.job, "log": self._view.paths.stdout, **self._state})
        self._offer("stdout", self._view.paths.stdout)
        self._offer("stderr", self._view.paths.stderr)
        self._find_ranks(monotonic())
        sent, took = 1, 0.0
        while self._over is None:
            if 0 < sent < _LITTLE and took:
                # A job that writes line by line without a pause would otherwise wake us for each of them.
                sleep(max(_PACE, 4 * took))
            timed_out = self._wait(busy=sent > 0)
            caught_up = sent == 0 and not self._outbox.full
            began = monotonic()
            sent = self._turn(began)
            took = monotonic() - began
            if sent and timed_out and caught_up:
                self._watch.missed()
        self._finish()

    # -- one turn

    def _turn(self, now: float) -> int:
        """Send what there is, as far as the client takes it; return the number of bytes."""
        if self._outbox.gone:
            self._over = self._over or ("cancelled", "the client went away")
            return 0
        # The state first: what a job wrote before it ended is there once it is known to have ended.
        ended = self._look_at_state(now)
        self._find_ranks(now)
        final = ended or not self._follow
        for log in self._logs.values():
            if log.taken and final:
                log.freeze()
            elif log.taken:
                log.look()
        sent = self._pump()
        if final and not sent and not self._outbox.full and not self._unanswered and self._over is None:
            self._over = ("ok", "")
        return sent

    def _pump(self) -> int:
        """Send pieces of all logs in turn until none has more, or the client is behind; return the number of bytes."""
        sent = 0
        again = True
        while again and not self._outbox.full:
            again = False
            for log in self._logs.values():
                if not log.taken or self._outbox.full:
                    continue
                self._tell_news(log)
                piece = log.read(CHUNK)
                if piece is not None:
                    segment, offset, data = piece
                    self._outbox.put("data", bytes((segment.number,)) + offset.to_bytes(8, "big") + data)
                    sent += len(data)
                    again = True
                elif log.news:
                    again = True
            self._outbox.flush()
        return sent

    def _tell_news(self, log: Log) -> None:
        for event, segment in log.news:
            if segment is None:
                self._put("missing", {"stream": log.stream, "event": event})
            else:
                self._put(
                    "segment",
                    {
                        "number": segment.number,
                        "stream": log.stream,
                        "event": event,
                        "offset": segment.offset,
                        "size": segment.size(),
                        "older": segment.older,
                        "path": os.fsencode(segment.path).decode("utf-8", "backslashreplace"),
                    },
                )
        log.news.clear()

    def _look_at_state(self, now: float) -> bool:
        state = self._view.state(now)
        if state != self._state:
            self._state = state
            self._put("state", state)
        return state["state"] in ENDED

    # -- the logs

    def _offer(self, stream: str, path: str) -> None:
        log = Log(stream, path, self._next_number, lambda: self._view.held(stream))
        self._logs[stream] = log
        self._unanswered.add(stream)
        self._watch.add(os.path.dirname(path))
        self._put("offer", {"stream": stream, "size": log.size()})

    def _next_number(self) -> int:
        self._numbers += 1
        if self._numbers > MAX_SEGMENTS:
            self._over = ("again", "the logs were replaced too often for one connection")
            return MAX_SEGMENTS
        return self._numbers

    def _find_ranks(self, now: float) -> None:
        if now < self._ranks_at:
            return
        self._ranks_at = now + _RANKS_EVERY
        for stream, path in rank_logs(self._view.paths.ranks):
            if stream not in self._logs:
                self._offer(stream, path)

    # -- the client

    def _wait(self, *, busy: bool) -> bool:
        """Wait until something is to do, or until files are to be looked at; return whether nothing happened."""
        poller = select.poll()
        poller.register(0, select.POLLIN)
        full = self._outbox.full
        poller.register(1, 0 if self._outbox.empty else select.POLLOUT)
        if self._watch.descriptor >= 0 and not full:
            poller.register(self._watch.descriptor, select.POLLIN)
        until = self._heard + self._lease
        pause = until - monotonic()
        interval = self._watch.interval(busy=busy)
        if not full:
            pause = min(pause, 0.0 if busy else interval)
        ready = poller.poll(max(0.0, pause) * 1000)
        for descriptor, events in ready:
            if descriptor == 0:
                self._read_client()
            elif descriptor == 1:
                if events & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
                    self._outbox.abandon()
            else:
                self._watch.drain()
        self._outbox.flush()
        if monotonic() >= self._heard + self._lease:
            self._over = ("lease", "nothing was heard from the client for %g s" % self._lease)
        return not ready

    def _read_client(self) -> None:
        try:
            data = os.read(0, 1 << 16)
        except OSError:
            data = b""
        if not data:
            self._outbox.abandon()
            return
        self.hear(data)

    def hear(self, data: bytes) -> None:
        """Take what the client says."""
        self._heard = monotonic()
        try:
            for frame in self._decoder.feed(data):
                self._obey(frame.kind, frame.payload)
        except (FrameError, LogRequestError) as error:
            self._over = ("environment", str(error))

    def _obey(self, kind: str, payload: bytes) -> None:
        if kind == "beat":
            if not self._outbox.full:
                self._outbox.put("beat")
        elif kind == "take":
            self._take(payload)
        elif kind == "cancel":
            self._over = ("cancelled", "the client has seen enough")
        else:
            raise LogRequestError("the client sent %r out of turn" % kind)

    def _take(self, payload: bytes) -> None:
        fields = _object(payload)
        stream = fields.get("stream")
        if not isinstance(stream, str) or stream not in self._unanswered:
            raise LogRequestError("'take' names no log that was offered")
        self._unanswered.discard(stream)
        how = fields.get("from")
        log = self._logs[stream]
        if how == "nothing":
            return
        if how == "copy":
            older = fields.get("older", [])
            if not isinstance(older, list) or len(older) > RETIRED or not all(isinstance(one, dict) for one in older):
                raise LogRequestError("'take' names older copies by a list of at most %d objects" % RETIRED)
            log.take(_copy(fields), None, tuple(map(_copy, older)))
        elif how in _STARTS:
            count = _integer(fields, "count", _MAX_OFFSET)
            start = _STARTS[how]
            log.take(None, lambda segment: start(segment, count))
        else:
            raise LogRequestError("'take' does not say from where")

    # -- the end

    def _finish(self) -> None:
        assert self._over is not None  # noqa: S101 - the loop ends by it
        outcome, message = self._over
        result = wirejson.encode({"job": self._view.job, **self._state})
        if outcome == "ok":
            for log in self._logs.values():
                if log.taken and log.size() is None:
                    self._put("missing", {"stream": log.stream, "event": "missing"})
            self._outbox.put("result", result)
        put_end(self._outbox, outcome, message, result=result if outcome == "ok" else None)
        for log in self._logs.values():
            log.close()
        self._watch.close()
        drain(self._outbox)

    def _put(self, kind: str, fields: dict[str, Any]) -> None:
        self._outbox.put(kind, wirejson.encode(fields))


def read_log(fields: dict[str, Any], cache: str, outbox: Outbox, decoder: Decoder) -> None:
    """Serve one client until its ``end`` frame is written; stdin and stdout are used directly.

    Args:
        fields: the request: ``job`` (a job id, or a name for its latest attempt), ``follow``, ``lease_s``.
        cache: the cache folder on this host.
        outbox: the frames for the client, on a non-blocking descriptor 1.
        decoder: of the client's frames; what it holds already is taken first.
    """
    try:
        name, follow, lease = _arguments(fields)
        view = find_job(cache, name)
    except (LogRequestError, LookupError) as error:
        outcome = "no-job" if isinstance(error, LookupError) else "environment"
        put_end(outbox, outcome, str(error.args[0]))
        drain(outbox)
        return
    reader = LogReader(view, outbox, decoder, follow=follow, lease_s=lease)
    reader.hear(b"")
    reader.serve()


def _arguments(fields: dict[str, Any]) -> tuple[str, bool, float]:
    name, follow, lease = fields.get("job"), fields.get("follow"), fields.get("lease_s")
    if not isinstance(name, str) or not isinstance(follow, bool):
        raise LogRequestError("a request for logs needs a 'job' and 'follow'")
    if not isinstance(lease, (int, float)) or isinstance(lease, bool) or not 0 < lease < 1e6:
        raise LogRequestError("a request for logs needs 'lease_s', a positive number of seconds")
    return name, follow, float(lease)


def put_end(
    outbox: Outbox, outcome: str, message: str, *, hint: str | None = None, result: bytes | None = None
) -> None:
    """Queue the ``end`` frame, of the same form as that of a probe's run."""
    from .digest import sha256

    outbox.put(
        "end",
        wirejson.encode(
            {
                "outcome": outcome,
                "message": message,
                "hint": hint,
                "details": [],
                "exit_status": None,
                "signal": None,
                "result_sha256": None if result is None else sha256(result),
                "result_bytes": 0 if result is None else len(result),
                "survivors": [],
                "run_dir": None,
                "elapsed_s": 0.0,
            }
        ),
    )


def drain(outbox: Outbox) -> None:
    """Write what is left, as long as the client takes it."""
    until = monotonic() + _LAST_WORD
    outbox.flush()
    while not outbox.empty and not outbox.gone:
        poller = select.poll()
        poller.register(1, select.POLLOUT)
        if not poller.poll(max(0.0, until - monotonic()) * 1000):
            return
        before = outbox.empty
        outbox.flush()
        if not before:
            until = monotonic() + _LAST_WORD


def rank_logs(folder: str) -> list[tuple[str, str]]:
    """Return (stream, path) of the logs that torchrun's ``--log-dir`` made below ``folder``, at most 512.

    torchrun writes ``<run>/attempt_<n>/<rank>/stdout.log`` and ``stderr.log``; streams are called ``rank0``,
    ``rank0.err``, and with ``.run<k>`` and ``.attempt<n>`` where there are several.
    """
    found: list[tuple[str, str]] = []
    for position, run in enumerate(_runs(folder)):
        run_part = ".run%d" % position if position else ""
        for attempt in _numbered(run, "attempt_"):
            attempt_part = ".attempt%d" % attempt if attempt else ""
            attempt_path = os.path.join(run, "attempt_%d" % attempt)
            for rank in _numbered(attempt_path, ""):
                for file, ending in (("stdout.log", ""), ("stderr.log", ".err")):
                    path = os.path.join(attempt_path, str(rank), file)
                    if len(found) < _RANK_FILES and os.path.lexists(path):
                        found.append(("rank%d%s%s%s" % (rank, run_part, attempt_part, ending), path))
    return found


def _runs(folder: str) -> list[str]:
    """Return the folders of torchrun's runs, oldest first: attempt_0 is not touched once its ranks were started."""
    runs: list[tuple[float, str]] = []
    for name in _names(folder):
        path = os.path.join(folder, name)
        try:
            runs.append((os.lstat(os.path.join(path, "attempt_0")).st_mtime, path))
        except OSError:
            continue
    return [path for _, path in sorted(runs)]


def _numbered(folder: str, prefix: str) -> list[int]:
    numbers = [name[len(prefix) :] for name in _names(folder) if name.startswith(prefix)]
    return sorted(
        int(number)
        for number in numbers
        if number.isascii() and number.isdigit() and len(number) <= 5 and str(int(number)) == number
    )


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _object(payload: bytes) -> dict[str, Any]:
    try:
        fields = wirejson.decode(payload)
    except ValueError as error:
        raise LogRequestError("not JSON: %s" % error) from None
    if not isinstance(fields, dict):
        raise LogRequestError("not a JSON object")
    return fields


def _copy(fields: dict[str, Any]) -> Copy:
    digest = fields.get("sha256")
    if not isinstance(digest, str) or len(digest) != 64:
        raise LogRequestError("'take' needs a sha256")
    offset = _integer(fields, "offset", _MAX_OFFSET)
    return Copy(offset, _integer(fields, "bytes", min(CHECKED, offset)), digest)


def _integer(fields: dict[str, Any], name: str, largest: int) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= largest:
        raise LogRequestError("%r must be an integer from 0 to %d" % (name, largest))
    return value


_STARTS: dict[str, Callable[[Segment, int], int]] = {
    "offset": lambda _segment, count: count,
    "last-bytes": lambda segment, count: max(0, segment.size() - count),
    "last-lines": lambda segment, count: segment.start_of_last_lines(count),
}
