r"""Log bytes as a person reads them: whole lines of several logs, progress bars as one line, colours and nothing else.

Everything comes from a job and may be hostile. Of all control sequences only those that set usual colours and styles
reach a terminal; every other control character is shown as an escape (``\x1b``).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from ..text import safe

MAX_PENDING = 64 * 1024
"""Bytes of an unfinished line that are kept; a longer one is shown in pieces."""
REDRAW_EVERY = 0.1
"""Seconds between two drawings of an unfinished line."""
_SGR = re.compile(rb"\x1b\[([0-9;]{0,40})m")
_STYLES = frozenset({0, 1, 2, 3, 4, 7, 9, 22, 23, 24, 27, 29, 39, 49, *range(30, 38), *range(40, 48), *range(90, 98), *range(100, 108)})
_RESET = "\x1b[0m"
_ERASE = "\r\x1b[2K"


def label(stream: str) -> str:
    """Return what is put before a line: nothing for the job's own output."""
    if stream == "stdout":
        return ""
    if stream == "stderr":
        return "stderr: "
    rank, *rest = stream.removeprefix("rank").split(".")
    return " ".join((f"rank {rank}", *("stderr" if part == "err" else part for part in rest))) + ": "


def styled(line: bytes, *, color: bool) -> str:
    r"""Return a line for a terminal: colours kept (or, without ``color``, left out), all else that steers made visible.

    Kept are the SGR sequences for colours, bold, faint, italic, underlined, inverse and struck through. A line that sets
    any of them ends with a reset. Blinking and concealed text is shown as it is written, ``\x1b[8m``.
    """
    if b"\x1b" not in line:
        return safe(line)
    parts: list[str] = []
    position = 0
    used = False
    for match in _SGR.finditer(line):
        if not _harmless(match.group(1)):
            continue
        parts.append(safe(line[position : match.start()]))
        position = match.end()
        if color:
            parts.append(match.group().decode("ascii"))
            used = True
    parts.append(safe(line[position:]))
    return "".join(parts) + (_RESET if used else "")


def _harmless(parameters: bytes) -> bool:
    numbers = [int(number or b"0") for number in parameters.split(b";")]
    while numbers:
        first = numbers.pop(0)
        if first in {38, 48}:
            # 38;5;<0-255> or 38;2;<red>;<green>;<blue>
            count = {5: 1, 2: 3}.get(numbers.pop(0) if numbers else -1, -1)
            values, numbers = numbers[: max(0, count)], numbers[max(0, count) :]
            if len(values) != count or any(value > 255 for value in values):
                return False
        elif first not in _STYLES:
            return False
    return True


def collapsed(line: bytes) -> bytes:
    r"""Return what is left of a line once its carriage returns have been obeyed: the last part that is not empty."""
    if b"\r" not in line:
        return line
    return next((part for part in reversed(line.split(b"\r")) if part), b"")


class _Pending:
    """The unfinished line of one log."""

    def __init__(self) -> None:
        self.data = b""
        self.skip = False
        """Whether what comes first is the end of a line whose beginning is not shown."""
        self.open = False
        """Whether the beginning of this line has been written."""


class LogView:
    """Merges logs line by line.

    Args:
        write: where text goes; called with whole pieces.
        terminal: whether unfinished lines are drawn (and redrawn) as they grow.
        color: whether colours are kept.
        width: columns of the terminal.
        later: called when a line was not redrawn because it was a moment ago; :meth:`redraw` is then to be called.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        *,
        terminal: bool,
        color: bool = False,
        width: int = 80,
        later: Callable[[], None] | None = None,
    ) -> None:
        self._write = write
        self._terminal = terminal
        self._color = color
        self._width = width
        self._later = later or (lambda: None)
        self._waiting: str | None = None
        self._front: str | None = None
        self._pending: dict[str, _Pending] = {}
        self._drawn = False
        self._drawn_at = 0.0
        self._unfinished: str | None = None

    def skipped(self, stream: str) -> None:
        """What comes next of ``stream`` may begin in the middle of a line: leave that line out."""
        self._of(stream).skip = True

    def add(self, stream: str, data: bytes) -> None:
        """Show bytes of a log."""
        pending = self._of(stream)
        text: list[str] = []
        *lines, rest = (pending.data + data).split(b"\n")
        pending.data = b""
        for line in lines:
            if pending.skip:
                pending.skip = False
            else:
                text.append(self._line(stream, pending, line.removesuffix(b"\r")))
        self._keep(stream, pending, rest, text)
        if text:
            self._erase()
            self._write("".join(text))
        if pending.data or self._front is None:
            self._front = stream
        self._draw(self._front, self._of(self._front))

    def finish(self) -> None:
        """Show what is left: lines that have no end."""
        self._erase()
        for stream, pending in self._pending.items():
            if pending.data and not pending.skip:
                self._write(self._line(stream, pending, pending.data.removesuffix(b"\r")))
            elif pending.open:
                self._write("\n")
            pending.data = b""
            pending.open = False

    def redraw(self) -> None:
        """Draw what was held back."""
        if self._waiting is not None:
            stream, self._waiting, self._drawn_at = self._waiting, None, 0.0
            self._draw(stream, self._of(stream))

    def clear(self) -> None:
        """Take the unfinished line off the terminal: something else is about to be written there."""
        self._erase()

    def _of(self, stream: str) -> _Pending:
        return self._pending.setdefault(stream, _Pending())

    def _line(self, stream: str, pending: _Pending, line: bytes) -> str:
        start = self._start(stream, pending)
        pending.open = False
        self._unfinished = None
        return f"{start}{styled(collapsed(line), color=self._color)}\n"

    def _start(self, stream: str, pending: _Pending) -> str:
        """Return what has to be written before the next piece of a line."""
        if pending.open and self._unfinished == stream:
            return ""
        broken = "\n" if self._unfinished is not None else ""
        self._unfinished = None
        return broken + label(stream)

    def _keep(self, stream: str, pending: _Pending, rest: bytes, text: list[str]) -> None:
        """Keep an unfinished line, within bounds: of a progress bar its last state, of anything else a piece."""
        if len(rest) > MAX_PENDING:
            head, _, last = rest.rpartition(b"\r")
            if head and last:
                rest = last
            elif head:
                rest = collapsed(head)[-MAX_PENDING:] + b"\r"
        if pending.skip:
            rest = rest[-1:]
        while len(rest) > MAX_PENDING:
            piece, rest = _cut(rest)
            text.append(self._start(stream, pending) + styled(piece, color=self._color))
            pending.open = True
            self._unfinished = stream
        pending.data = rest

    def _draw(self, stream: str, pending: _Pending) -> None:
        """Draw an unfinished line over the last one."""
        if not self._terminal or pending.open or pending.skip or self._unfinished is not None:
            return
        line = collapsed(pending.data)
        now = time.monotonic()
        if not line:
            return
        if self._drawn and now < self._drawn_at + REDRAW_EVERY:
            self._waiting = stream
            self._later()
            return
        text = label(stream) + safe(_SGR.sub(b"", line), limit=4 * self._width)
        self._write(f"{_ERASE}{text[: self._width - 1]}")
        self._drawn, self._drawn_at = True, now

    def _erase(self) -> None:
        if self._drawn:
            self._write(_ERASE)
            self._drawn = False


def _cut(data: bytes) -> tuple[bytes, bytes]:
    """Split at MAX_PENDING, but not inside a character."""
    end = MAX_PENDING
    for _ in range(3):
        if data[end] & 0xC0 != 0x80:
            break
        end -= 1
    return data[:end], data[end:]
