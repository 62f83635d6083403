"""Training logs as points and milestones: fed with bytes as they come, in memory that does not grow with them.

The text may be anything: progress bars that return to the line's start, colours, lines of several ranks, lines that a
handler wrapped at 80 columns, no text at all. What looks like metrics and cannot be read is counted and kept as a sample.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Iterator, NamedTuple, Union

from .training_dialects import DIALECTS, Reading, looks_like_metrics, read
from .training_milestones import fault, happening
from .training_values import NUMBER

MAX_LINE = 1024 * 1024
"""Bytes of one line that are looked at; the rest of a longer one is skipped and counted."""
MAX_TEXT = 400
"""Characters of a line that a point keeps."""
_MAX_RANK = 1 << 20
_MAX_SERIES = 1 << 16
_MAX_SAMPLES = 5
_MAX_BLOCKS = 64
_MAX_WRAPPED = 200


class Where(NamedTuple):
    """The line that something was read from."""

    line: int
    """From 1, counting newlines."""
    offset: int
    """Of its first byte in the log."""
    rank: int | None
    """The rank that printed it, where the line says so."""
    text: str
    """The line without colours, wrapped lines joined, at most 400 characters."""


class Point(NamedTuple):
    """One value of one metric."""

    metric: str
    """Canonical name: loss, acc, full_acc, cond_acc, acceptance_rate, kl_div, lr, grad_norm, accept_length, ..."""
    position: int | None
    """Step k of ``loss_k``; None for a value over all steps."""
    value: float
    """May be NaN or infinite."""
    resolution: float
    """Half a unit of the last printed digit."""
    raw: str
    """Name as printed."""
    dialect: str
    split: str | None
    """``train``, ``val``, ``summary`` (over a whole run); None where the line does not say."""
    step: int | None
    """As printed; the place within the epoch for progress bars."""
    ordinal: int
    """Running number within its series, from 0."""
    epoch: float | None
    where: Where


class Milestone(NamedTuple):
    """Something that happened."""

    kind: str
    """``warm-start``, ``mapping-loaded``, ``checkpoint-saved``, ``nccl-error``, ..."""
    value: float | None
    """A share (``token-coverage``), a rank (``failed-rank``), an epoch."""
    top: int | None
    """N of ``top N token frequency ratio``."""
    subject: str
    """The file or folder that it is about."""
    where: Where


Event = Union[Point, Milestone]


@dataclass
class Statistics:
    """What was read so far."""

    bytes: int = 0
    lines: int = 0
    """Newlines."""
    long_lines: int = 0
    """Lines that were cut at :data:`MAX_LINE`."""
    metric_lines: int = 0
    """Lines that gave points."""
    repeated: int = 0
    """States of a progress bar that said nothing new."""
    rejoined: int = 0
    """Lines that were put together from wrapped ones."""
    unread: int = 0
    """Lines that look like metrics and are in no known dialect."""
    unread_samples: list[Where] = field(default_factory=list)
    not_finite: int = 0
    """Values that were NaN or infinite."""
    undated: int = 0
    """Points beyond the number of series that are counted; their ordinal is 0."""


class DialectSeen(NamedTuple):
    """A dialect that occurs in a log."""

    name: str
    family: str
    lines: int
    confidence: str
    """``high``: only one program prints so, and it did three times or more; ``medium``: it did less often; ``low``: anybody
    may print so."""


class _Line(NamedTuple):
    data: bytes
    number: int
    offset: int


_ENDS = re.compile(rb"[\r\n]")
_NEWLINE = 10


class _Splitter:
    r"""Bytes to lines, empty ones left out. Both ``\n`` and ``\r`` end one."""

    def __init__(self, statistics: Statistics, max_line: int) -> None:
        self._statistics = statistics
        self._max = max_line
        self._kept = bytearray()
        self._length = 0
        self._offset = 0

    def split(self, data: bytes) -> Iterator[_Line]:
        """Yield the lines that ``data`` completes; must be exhausted."""
        start = 0
        for match in _ENDS.finditer(data):
            end = match.start()
            self._keep(data, start, end)
            start = end + 1
            if self._length:
                yield self._complete()
            self._offset += self._length + 1
            self._length = 0
            self._statistics.lines += data[end] == _NEWLINE
        self._keep(data, start, len(data))

    def rest(self) -> list[_Line]:
        """Return what stands behind the last line end, as a line."""
        if not self._length:
            return []
        line = self._complete()
        self._offset += self._length
        self._length = 0
        return [line]

    def _keep(self, data: bytes, start: int, end: int) -> None:
        room = self._max - len(self._kept)
        if room > 0:
            self._kept += data[start : min(end, start + room)]
        self._length += end - start

    def _complete(self) -> _Line:
        self._statistics.long_lines += self._length > len(self._kept)
        line = _Line(bytes(self._kept), self._statistics.lines + 1, self._offset)
        self._kept.clear()
        return line


_TELLING = (
    b"loss", b"acc", b".py:", b"kl", b"error", b"nccl", b"cuda", b"nan", b"epoch", b"vocab", b"checkpoint", b"saving",
    b"base model", b"frequency", b"perplexity", b"ppl", b"xid", b"traceback", b"root cause", b"local_rank", b"top1",
    b"tau", b"training ar", b"spec_decode", b"device-side", b"watchdog", b"grad",
)  # fmt: skip
"""A line without any of these tells nothing; most lines of most logs are passed over this way."""


def _may_tell(data: bytes) -> bool:
    lower = data.lower()
    return any(word in lower for word in _TELLING) or b"\x1b" in data


_ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_=>()][0-9A-B]?)")
_CONTROLS = bytes(code for code in range(32) if code != 9) + b"\x7f"


def _clean(data: bytes) -> str:
    """Return a line as text without colours and control characters."""
    if b"\x1b" in data:
        data = _ANSI.sub(b"", data)
    return data.translate(None, _CONTROLS).decode("utf-8", "replace")


_RANK = re.compile(
    r"\s{0,4}(?:\[[a-z_]{1,20}(\d{1,7})\]:?|\[\d{1,7},(\d{1,7})\]<std(?:out|err)>:|[Rr]ank[ =:]{1,2}(\d{1,7})\s{0,2}[:|\]])"
)
"""Prefixes of torchrun (``[default0]:``, ``[rank0]:``), mpirun and hand-written ones."""
_RANK_INSIDE = re.compile(r"\[[Rr]ank[ =:]{0,2}(\d{1,7})\]")


def _take_rank(text: str) -> tuple[int | None, str]:
    """Return the rank that a line says it comes from, and the line without that prefix."""
    match = _RANK.match(text)
    if match is not None:
        rank = int(next(group for group in match.groups() if group is not None))
        if rank < _MAX_RANK:
            return rank, text[match.end() :]
    if "ank" in text[:160]:
        match = _RANK_INSIDE.search(text[:160])
        if match is not None and int(match.group(1)) < _MAX_RANK:
            return int(match.group(1)), text
    return None, text


_LEVEL = re.compile(
    r"(\s{0,4}(?:\[[^\[\]]{1,40}\] ?)?\s{0,40})(?:DEBUG|INFO|WARNING|ERROR|CRITICAL|NOTSET)\s{1,6}(?=\S)", re.ASCII
)
_PLACE = re.compile(r"[\w.\-/<>]{1,80}:\d{1,7}\Z")

_WHOLE_PAIR = re.compile(r"[=:]" + NUMBER + r"\Z")
_NAME = re.compile(r"[A-Za-z_][\w/.\-]{0,80}[=:]")


class _Block:
    """A line of rich's log handler and the lines that its message was wrapped to, in one column of the page."""

    def __init__(self, line: _Line, rank: int | None, message: str, column: int, width: int) -> None:
        self.line = line
        self.rank = rank
        self.text = message
        self._column = column
        self._width = width
        self._last = message
        self.parts = 1

    @classmethod
    def begin(cls, line: _Line, rank: int | None, text: str) -> _Block | None:
        """Return the block that ``text`` begins; None when it is no such line."""
        if len(text) > 1000 or ":" not in text:
            return None
        level = _LEVEL.match(text)
        if level is None:
            return None
        message, _, place = text.rstrip()[level.end() :].rpartition(" ")
        if not message or _PLACE.match(place) is None:
            return None
        width = len(text.rstrip()) - len(place) - 1 - level.end()
        return cls(line, rank, message.rstrip(), level.end(), width)

    def take(self, text: str) -> bool:
        """Take ``text`` as the next part of the message; False when it is not one."""
        part = text[self._column :].rstrip()
        if text[: self._column].strip() or not part or len(part) > self._width or self.parts >= _MAX_WRAPPED:
            return False
        if part[0] == " ":
            # The space behind a word that filled the line before; more of them belong to something else.
            part = part[1:]
            if part[0] == " " or len(self._last) < self._width:
                return False
            self._last = ""
        self.text += part if self._is_cut(part) else f" {part}"
        self._last = part
        self.parts += 1
        return True

    def _is_cut(self, part: str) -> bool:
        """Whether ``part`` goes on in the middle of a word: only a word longer than the column is cut, at its edge."""
        if not self._last or len(self._last) < self._width or " " in self._last or self._last[-1] in ",:":
            return False
        # A word as long as the column is not cut: name=number is complete where another name follows.
        return not (_WHOLE_PAIR.search(self._last) and _NAME.match(part))


class Reader:
    """Reads one training log.

    Args:
        max_line: bytes of one line that are looked at.
    """

    def __init__(self, *, max_line: int = MAX_LINE) -> None:
        self.statistics = Statistics()
        self._splitter = _Splitter(self.statistics, max_line)
        self._blocks: dict[int | None, _Block] = {}
        self._seen: dict[str, int] = {}
        self._counts: dict[tuple[object, ...], int] = {}
        self._last_bar: dict[int | None, tuple[object, ...]] = {}

    def feed(self, data: bytes) -> list[Event]:
        """Return what the next bytes of the log tell; how they are cut makes no difference."""
        self.statistics.bytes += len(data)
        events: list[Event] = []
        for line in self._splitter.split(data):
            self._take(line, events)
        return events

    def settle(self) -> list[Event]:
        """Return what waits for a possible continuation, for a follower whose log went quiet.

        A continuation that comes nevertheless is read as a line of its own.
        """
        events: list[Event] = []
        for rank in list(self._blocks):
            self._close(rank, events)
        return events

    def finish(self) -> list[Event]:
        """Return what is left at the end of the log; a last line without newline included."""
        events: list[Event] = []
        for line in self._splitter.rest():
            self._take(line, events)
        return events + self.settle()

    def dialects(self) -> tuple[DialectSeen, ...]:
        """Return the dialects seen so far, the most frequent first."""
        found = []
        for name, lines in self._seen.items():
            dialect = DIALECTS[name]
            sure = "low" if not dialect.distinctive else "high" if lines >= 3 else "medium"
            found.append(DialectSeen(name, dialect.family, lines, sure))
        return tuple(sorted(found, key=lambda seen: (-seen.lines, seen.name)))

    def _take(self, line: _Line, events: list[Event]) -> None:
        if not self._blocks and not _may_tell(line.data):
            return
        rank, text = _take_rank(_clean(line.data))
        block = self._blocks.get(rank)
        if block is not None:
            if block.take(text):
                return
            self._close(rank, events)
        block = _Block.begin(line, rank, text)
        if block is None:
            self._interpret(line, rank, text, events)
            return
        if len(self._blocks) >= _MAX_BLOCKS:
            self._close(next(iter(self._blocks)), events)
        self._blocks[rank] = block

    def _close(self, rank: int | None, events: list[Event]) -> None:
        block = self._blocks.pop(rank)
        self.statistics.rejoined += block.parts > 1
        self._interpret(block.line, block.rank, block.text, events)

    def _interpret(self, line: _Line, rank: int | None, text: str, events: list[Event]) -> None:
        if not text or text.isspace():
            return
        where = Where(line.number, line.offset, rank, text.strip()[:MAX_TEXT])
        told = happening(text)
        reading = None if told is not None else read(text)
        if reading is not None:
            self._add_points(reading, where, events)
            return
        if told is None:
            told = fault(text[: 16 * 1024])
        if told is not None:
            if told.dialect is not None:
                self._count(told.dialect)
            events.append(Milestone(told.kind, told.value, told.top, told.subject, where))
        elif looks_like_metrics(text):
            self.statistics.unread += 1
            if len(self.statistics.unread_samples) < _MAX_SAMPLES:
                self.statistics.unread_samples.append(where)

    def _count(self, dialect: str) -> None:
        self._seen[dialect] = self._seen.get(dialect, 0) + 1

    def _add_points(self, reading: Reading, where: Where, events: list[Event]) -> None:
        rank = where.rank if where.rank is not None else reading.rank
        if rank is not None and rank >= _MAX_RANK:
            rank = None
        if rank != where.rank:
            where = where._replace(rank=rank)
        if reading.dialect in {"specforge-progress", "tqdm", "torchspec"} and self._is_repeated(reading, rank):
            self.statistics.repeated += 1
            return
        self._count(reading.dialect)
        self.statistics.metric_lines += 1
        for raw, metric, number in reading.values:
            split = metric.split or reading.split
            if reading.split == "summary":
                split = "summary"
            ordinal = self._next_ordinal((reading.dialect, split, metric.name, metric.position, rank))
            self.statistics.not_finite += number.value - number.value != 0
            events.append(
                Point(
                    metric.name, metric.position, number.value, number.resolution, raw, reading.dialect, split,
                    reading.step, ordinal, reading.epoch, where,
                )
            )  # fmt: skip

    def _is_repeated(self, reading: Reading, rank: int | None) -> bool:
        """Whether a progress bar was drawn again without a new step or number."""
        state = (reading.dialect, reading.step, reading.epoch, str(reading.values))
        if self._last_bar.get(rank) == state:
            return True
        if len(self._last_bar) >= _MAX_BLOCKS:
            self._last_bar.clear()
        self._last_bar[rank] = state
        return False

    def _next_ordinal(self, key: tuple[object, ...]) -> int:
        ordinal = self._counts.get(key, 0)
        if ordinal == 0 and len(self._counts) >= _MAX_SERIES:
            self.statistics.undated += 1
            return 0
        self._counts[key] = ordinal + 1
        return ordinal
