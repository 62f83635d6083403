"""Local copies of a job's logs, kept up to date over any number of connections.

Each file here is the byte-for-byte copy of one file there; its size says where to go on. A lost connection costs
nothing but time: the next one continues at that offset, once the host has confirmed the last bytes before it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from .agent.log_files import RETIRED
from .errors import (
    AuthError,
    ConfigError,
    ConnectionLost,
    HostKeyError,
    RdiagError,
    Refused,
    UnreachableError,
)
from .events import Event, Note, Progress
from .host import Host
from .logs import Data, Done, Found, Gone, JobState, LogConversation, Offer, Segment, rank_of, stream_suffix
from .mirror import Busy, Copy, Mirror, Position, described, older_copies, with_copies
from .session import Session

DIRECTORY = Path("rdiag-logs")
FIRST_WAIT = 0.5
"""Seconds before the first attempt to connect again; doubled each time, up to :data:`LONGEST_WAIT`."""
LONGEST_WAIT = 15.0
_ATTEMPTS = 7
"""How often in a row a copy that does not follow tries to get any further."""
_STARTS = 3
"""How often in a row an agent may fail to start on a host where it has started before."""
_BACKLOG = 4 * 1024 * 1024
_PROGRESS_EVERY = 0.1
_PIECE = 256 * 1024


@dataclass(frozen=True)
class LogBytes:
    """Bytes to show, in the order of each stream."""

    stream: str
    data: bytes


@dataclass(frozen=True)
class Skipped:
    """So many bytes of a stream are not shown; what comes next may begin in the middle of a line."""

    stream: str
    count: int
    path: Path | None
    """Where they are."""


@dataclass(frozen=True)
class Warned:
    """Something about a log that its reader has to know."""

    text: str


FollowEvent = Event | LogBytes | Skipped | Warned | Found | JobState


@dataclass(frozen=True)
class Start:
    """Begin elsewhere than at the beginning; nothing is mirrored then."""

    kind: Literal["offset", "last-bytes", "last-lines"]
    count: int


@dataclass(frozen=True)
class Wanted:
    """Which logs, where to, and how much of them to show.

    Args:
        follow: go on until the job has ended.
        directory: where copies go, as ``<job>.log``, ``<job>.err.log``, ``<job>.rank0.log``.
        output: the copy of the main log instead; others beside it.
        start: show from there and mirror nothing (``output`` gets what is shown).
        ranks: show and fetch these ranks only; ``"all"`` shows the job's own log and every rank; None shows the job's
            own log, and mirrors those of ranks too.
        show: whether to give bytes to the caller at all.
        show_last: of what is there already, give only so many bytes of each log; None for all.
    """

    follow: bool = True
    directory: Path = DIRECTORY
    output: Path | None = None
    start: Start | None = None
    ranks: tuple[int, ...] | Literal["all"] | None = None
    show: bool = True
    show_last: int | None = None

    def fetches(self, stream: str) -> bool:
        """Whether this log is wanted at all."""
        if isinstance(self.ranks, tuple):
            return rank_of(stream) in self.ranks
        return self.start is None or self.shows(stream)

    def shows(self, stream: str) -> bool:
        """Whether this log is shown."""
        if not self.show:
            return False
        rank = rank_of(stream)
        if isinstance(self.ranks, tuple):
            return rank in self.ranks
        return rank is None or self.ranks == "all"

    def is_main(self, stream: str) -> bool:
        """Whether this is the log that ``output`` names."""
        if isinstance(self.ranks, tuple):
            return stream == f"rank{self.ranks[0]}"
        return stream == "stdout"

    def path(self, job: str, stream: str) -> Path:
        """Return where the copy of ``stream`` goes."""
        if self.output is None:
            return self.directory / (job + stream_suffix(stream))
        if self.is_main(stream):
            return self.output
        return self.output.with_name(self.output.stem + stream_suffix(stream))


@dataclass
class CopiedFile:
    """One log, as far as it was received."""

    stream: str
    path: Path | None
    """The local copy; None when it was only shown."""
    offset: int = 0
    """Bytes of the log that are here (or were shown)."""
    remote: str | None = None
    older: list[Path] = field(default_factory=list)
    """Copies of files that had this log's name before."""
    missing: bool = False
    """Whether the host has no such file any more."""


@dataclass(frozen=True)
class Followed:
    """How it ended: the job's state as the host says, and what is here."""

    host: str
    job: str
    state: JobState
    files: tuple[CopiedFile, ...]


class _Stream:
    """One log over all connections."""

    def __init__(self, file: CopiedFile, copy: Copy, *, shown: bool) -> None:
        self.file = file
        self.copy = copy
        self.shown = shown
        self.older: list[Copy] = []
        """Of files that had this name before; the last one was replaced last."""
        self.asked_for: list[Copy] = []
        """Those of them that the agent was told of."""
        self.begun = False
        self.show_from = 0
        self.goal = 0
        self.backlog = False

    def count(self) -> None:
        self.file.offset = self.copy.offset


class Backoff:
    """How long to wait before the next attempt."""

    def __init__(self) -> None:
        self.attempts = 0

    def next(self) -> float:
        """Return the next wait, seconds: doubled each time, and never quite the same for two clients."""
        longest = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(self.attempts, 20))
        self.attempts += 1
        return longest * random.uniform(0.6, 1.0)  # noqa: S311 - to spread clients out, not to hide anything


class Follower:
    """Fetches the logs of one job; a context manager.

    Args:
        host: where the job is.
        job: its id, or its name for the latest attempt.
        wanted: what of it.
        on_event: gets everything to show, in the calling thread.
        connect: makes a session; for tests.
        insist: keep trying from the first connection on: the host is known to answer, and the job to be there.
    """

    def __init__(
        self,
        host: Host,
        job: str,
        wanted: Wanted,
        *,
        on_event: Callable[[FollowEvent], None] | None = None,
        connect: Callable[[Host, Callable[[Event], None]], Session] | None = None,
        insist: bool = False,
    ) -> None:
        self.host = host
        self.job = job
        self.state = JobState("starting")
        self._wanted = wanted
        self._tell = on_event or (lambda _: None)
        self._connect = connect or (lambda host, tell: Session(host, on_event=tell))
        self._streams: dict[str, _Stream] = {}
        self._numbers: dict[int, tuple[_Stream, Copy]] = {}
        self._known = self._ranks_mentioned = False
        self._insist = insist
        self._backoff = Backoff()
        self._failed_starts = 0
        self._progress_at = 0.0

    def __enter__(self) -> Follower:
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close every copy, with everything on the disk."""
        self.close()

    def close(self) -> None:
        """Close every copy; idempotent."""
        for copy in self._copies():
            copy.close()

    def run(self) -> Followed:
        """Fetch, over as many connections as it takes, and return how it ended.

        Raises:
            RdiagError: the first connection failed; a later one was refused (login, host key); a copy could not be
                written; or, without ``follow``, several attempts in a row came no further.
        """
        while True:
            try:
                return self._once()
            except RdiagError as error:
                if not self._worth_another(error):
                    raise with_copies(error, self._wanted.directory, self.job) from error.__cause__
                wait = self._backoff.next()
                self._tell(Note(f"{self.host.name}: {error.message}; trying again in {wait:.1f} s, the job goes on"))
                time.sleep(wait)

    def _worth_another(self, error: RdiagError) -> bool:
        """Whether what ended the connection may be over soon; a refused login or a wrong key is not tried twice."""
        refused = isinstance(error, AuthError) and error.phase == "auth"
        if refused or isinstance(error, (HostKeyError, ConfigError)):
            return False
        lost = isinstance(error, ConnectionLost)
        if lost and not error.retryable and error.phase == "run":
            return False
        if not (self._known or self._insist):
            # Nobody waits for a host that was never reached; one that was, and is lost, gets a few more chances.
            return lost and self._backoff.attempts < _ATTEMPTS
        if isinstance(error, UnreachableError):
            return self._wanted.follow or self._backoff.attempts < _ATTEMPTS
        # An agent that started before and does not now: whatever ended the session may have ended the agent first.
        self._failed_starts += 1
        return error.phase in {"start", "upload"} and self._failed_starts <= _STARTS

    def _once(self) -> Followed:
        """Use one connection, to its end."""
        self._sync()
        self._numbers.clear()
        with self._connect(self.host, self._tell) as session:
            link = session.agent(library=False)
            try:
                conversation = LogConversation(link, self.host)
                conversation.begin(self.job, follow=self._wanted.follow)
                for message in conversation.messages():
                    if isinstance(message, Done):
                        return self._done(message)
                    self._take(conversation, message)
            finally:
                link.close()
                self._sync()
        raise AssertionError("a conversation ends with Done, or raises")

    # -- what the host says

    def _take(self, conversation: LogConversation, message: object) -> None:
        if isinstance(message, Data):
            self._take_data(message)
        elif isinstance(message, Segment):
            self._take_segment(message)
        elif isinstance(message, Offer):
            conversation.take(message.stream, self._answer(message))
        elif isinstance(message, Found):
            self._take_found(message)
        elif isinstance(message, JobState):
            self.state = message
            self._tell(message)
        elif isinstance(message, Gone):
            self._take_gone(message)
        self._sync(if_due=True)

    def _take_found(self, found: Found) -> None:
        if found.job != self.job and not (not self._known and found.job.rpartition(".v")[0] == self.job):
            raise self._confused(f"it speaks of the job {found.job}")
        if self._known and self._backoff.attempts:
            self._tell(Note(f"{self.host.name}: connected again"))
        self.job = found.job
        self.state = found.state
        self._known = True
        self._backoff.attempts = self._failed_starts = 0
        self._tell(found)

    def _answer(self, offer: Offer) -> Mapping[str, Any]:
        """Return what to say to an offer: where the copy that is here ends, or where to begin."""
        if not self._wanted.fetches(offer.stream):
            return {"from": "nothing"}
        stream = self._streams.get(offer.stream)
        if stream is None:
            stream = self._streams[offer.stream] = self._open(offer)
        if stream.begun or stream.copy.offset:
            stream.asked_for = stream.older[-RETIRED:]
            return {"from": "copy", **described(stream.copy), "older": [described(one) for one in stream.asked_for]}
        if self._wanted.start is not None:
            return {"from": self._wanted.start.kind, "count": self._wanted.start.count}
        if isinstance(stream.copy, Position) and self._wanted.show_last is not None:
            return {"from": "last-bytes", "count": self._wanted.show_last}
        return {"from": "offset", "count": 0}

    def _open(self, offer: Offer) -> _Stream:
        """Open the local copy of a log; only show it when another process keeps that file."""
        name, wanted = offer.stream, self._wanted
        shown = wanted.shows(name)
        rank = rank_of(name)
        if wanted.show and not shown and rank is not None and not self._ranks_mentioned:
            self._ranks_mentioned = True
            self._tell(Note(f"single ranks have logs of their own, which are mirrored too; to see one: --rank {rank}"))
        if wanted.start is not None:
            return _Stream(CopiedFile(name, None), Position(), shown=shown)
        path = wanted.path(self.job, name)
        try:
            mirror = Mirror(path, lazy=not wanted.is_main(name))
        except Busy:
            if wanted.output is not None:
                raise Refused(
                    f"another rdiag is writing {path}", host=self.host.name, hint="give another file with --output"
                ) from None
            if wanted.is_main(name):
                self._tell(Warned(f"another rdiag keeps {path} up to date; this one only shows the log"))
            return _Stream(CopiedFile(name, None), Position(), shown=shown)
        stream = _Stream(CopiedFile(name, path), mirror, shown=shown)
        stream.older += older_copies(path, RETIRED)
        return stream

    def _take_segment(self, segment: Segment) -> None:
        stream = self._streams.get(segment.stream)
        if stream is None:
            raise self._confused(f"{segment.stream} begins, and was not asked for")
        if segment.older is not None:
            self._go_on_with_older(stream, segment)
            return
        if segment.event in {"begun", "resumed"}:
            self._begin(stream, segment)
        else:
            self._begin_anew(stream, segment)
        stream.file.remote = segment.path
        stream.file.missing = False
        stream.goal = segment.size
        stream.backlog = segment.size - segment.offset > _BACKLOG
        self._numbers[segment.number] = (stream, stream.copy)
        stream.count()

    def _go_on_with_older(self, stream: _Stream, segment: Segment) -> None:
        """A file that lost its name to another one has grown, or may do so."""
        copy = dict(enumerate(stream.asked_for)).get(-1 if segment.older is None else segment.older)
        if copy is None or copy.offset != segment.offset:
            raise self._confused(f"an older {segment.stream} goes on at {segment.offset}")
        self._numbers[segment.number] = (stream, copy)

    def _begin(self, stream: _Stream, segment: Segment) -> None:
        if isinstance(stream.copy, Position) and not stream.begun:
            stream.copy = Position(segment.offset)
        if stream.copy.offset != segment.offset:
            raise self._confused(f"{segment.stream} goes on at {segment.offset} instead of {stream.copy.offset}")
        if not stream.begun:
            stream.begun = True
            self._show_earlier(stream, segment)

    def _show_earlier(self, stream: _Stream, segment: Segment) -> None:
        """Show what is in the copy already, or its end, and say what is left out."""
        last = self._wanted.show_last
        first = segment.offset if isinstance(stream.copy, Position) else 0
        stream.show_from = first if last is None else max(first, segment.size - last)
        if not stream.shown:
            return
        if stream.show_from and self._wanted.start is None:
            self._tell(Skipped(segment.stream, stream.show_from, stream.file.path))
        if isinstance(stream.copy, Mirror):
            position = stream.show_from
            while data := stream.copy.read(position, _PIECE):
                self._tell(LogBytes(segment.stream, data))
                position += len(data)

    def _begin_anew(self, stream: _Stream, segment: Segment) -> None:
        """Begin a new copy; the one that is here keeps its bytes, under another name."""
        if segment.offset != 0:
            raise self._confused(f"{segment.stream} begins anew at {segment.offset}")
        what = {
            "rotated": "was rotated on the host",
            "truncated": "was truncated on the host",
            "rewritten": "was written anew on the host",
            "different": "is not the one that the local copy was made of",
        }[segment.event]
        kept = ""
        earlier = stream.copy
        stream.older.append(earlier)
        if isinstance(earlier, Mirror):
            # Even when there is no byte in it yet: they may come.
            older, stream.copy = earlier.set_aside()
            stream.file.older.append(older)
            kept = f"; the bytes so far are kept in {older}" if earlier.offset else ""
        else:
            stream.copy = Position()
        stream.begun = True
        stream.show_from = 0
        self._tell(Warned(f"{segment.stream} {what}{kept}"))

    def _take_data(self, data: Data) -> None:
        target = self._numbers.get(data.number)
        if target is None:
            raise self._confused(f"bytes of a file {data.number} that was not announced")
        stream, copy = target
        if data.offset != copy.offset:
            raise self._confused(f"bytes at {data.offset} where {copy.offset} was due")
        copy.append(data.data)
        stream.count()
        if not stream.shown:
            self._report_backlog(stream)
            return
        if stream.backlog:
            self._report_backlog(stream)
        hidden = stream.show_from - data.offset if copy is stream.copy else 0
        shown = data.data if hidden <= 0 else data.data[hidden:]
        if shown:
            self._tell(LogBytes(stream.file.stream, bytes(shown)))

    def _take_gone(self, gone: Gone) -> None:
        stream = self._streams.get(gone.stream)
        if stream is None:
            return
        # That nothing was ever written to stderr is nothing to tell.
        stream.file.missing = stream.begun or self._wanted.is_main(gone.stream)
        if gone.event == "deleted":
            self._tell(Warned(f"{gone.stream} was deleted on the host; whatever is still written into it arrives"))

    def _report_backlog(self, stream: _Stream) -> None:
        if not stream.backlog:
            return
        done = stream.copy.offset >= stream.goal
        now = time.monotonic()
        if done or now >= self._progress_at + _PROGRESS_EVERY:
            self._progress_at = now
            stream.backlog = not done
            offset = min(stream.copy.offset, stream.goal)
            self._tell(Progress(offset / 2**20, stream.goal / 2**20, "MiB", stream.file.stream))

    def _done(self, done: Done) -> Followed:
        if done.job != self.job:
            raise self._confused(f"it speaks of the job {done.job}")
        if done.state != self.state:
            self.state = done.state
            self._tell(done.state)
        self._sync(now=True)
        return Followed(self.host.name, self.job, done.state, tuple(one.file for one in self._streams.values()))

    # -- copies

    def _copies(self) -> list[Copy]:
        return [copy for one in self._streams.values() for copy in (one.copy, *one.older)]

    def _sync(self, *, now: bool = False, if_due: bool = False) -> None:
        for copy in self._copies():
            copy.sync(now=now or not if_due)

    def _confused(self, what: str) -> ConnectionLost:
        return ConnectionLost(f"the agent's answer makes no sense: {what}", host=self.host.name, phase="run")
