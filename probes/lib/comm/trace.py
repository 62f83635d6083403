"""Traces of torch.profiler, read as a stream: gigabytes of them in little memory.

A trace is one JSON object whose ``traceEvents`` holds millions of events (an older kind is the bare array). Only work of
GPUs and annotations matter here. Two ways lead through the file, and the first is many times faster:

* As libkineto writes it (older releases with several keys a line, newer ones with one), an event starts on a line of its
  own, two spaces in, with its phase and category first. A raw
  line end never stands inside a JSON string, so the events that matter are found by a search, and only those are parsed.
  Counts of both kinds are compared in each piece; where they differ the second way takes over.
* In any other layout each event is parsed, one at a time, and dropped at once if it does not matter.
"""

from __future__ import annotations

import gc
import json
import re
import zlib
from codecs import getincrementaldecoder
from math import isfinite

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator, Tuple

    from probes.lib.files import File

    Take = Callable[[dict[str, Any]], None]
    Plain = Tuple[str, str, int, float, float, bytes]
    TakePlain = Callable[[str, str, int, float, float, bytes], None]

CHUNK = 1 << 20
"""Bytes read, or unpacked, at once."""
MAX_VALUE = 8 << 20
"""Characters of one event, or of one value beside the events; real events have a few thousand."""
PROPERTIES = frozenset({"distributedInfo"})
"""What is kept of what stands beside the events; anything may stand there."""
MAX_KEYS = 1000
"""Keys beside traceEvents."""

GPU_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
ANNOTATIONS = frozenset({"user_annotation", "gpu_user_annotation"})
KEPT = GPU_CATEGORIES | ANNOTATIONS
_KEPT = b"[Kk]ernel|gpu_memcpy|gpu_memset|Memcpy|Memset|user_annotation|gpu_user_annotation"
_OLD_NAMES = {"Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}

_START = b"\n  {\n"
_BOUNDARY = b"\n  },\n  {\n"
_EVENT = re.compile(rb'\n  \{\n    "ph": "X",\s+"cat": "(?:%s)",' % _KEPT)
_PLAIN = re.compile(
    rb'\n  \{\n    "ph": "X",\s+"cat": "(kernel|gpu_memcpy|gpu_memset)",\s+"name": "([^"\\]*)",\s+"pid": (\d{1,9}),\s+"tid": [^\s,]+,'
    rb'\s+"ts": (\d{1,17}(?:\.\d{1,9})?),\s+"dur": (\d{1,17}(?:\.\d{1,9})?)\s*,\s+"args": \{\n[^{}\\"]*(?:"(?!device|Coll)[^{}\\"]*)*"device": (\d{1,3})(?!\d)[^{}\\]*\}\n  \}(?=,\n  \{\n|\Z)'
)
"""A whole event of the most frequent form: category, name, process, start, length, device."""
_CATEGORY = re.compile(rb'"cat"\s*:\s*"(?:%s)"' % _KEPT)
_KINETO = re.compile(rb'\s*\{\n    "(?:ph|name)": "')
_SPACE = " \t\n\r"
_AFTER_SPACE = re.compile(r"[^ \t\n\r]|\Z")
_LONGEST_NUMBER = 4300


class BadTrace(Exception):
    """The file is no trace; the text says why."""


class _Cut(Exception):
    """The text ends before the value does."""


class Reader:
    """Reads one trace.

    Args:
        file: the file; gzip is recognised by its first bytes.
        take: gets every kept event, its category in today's spelling.
        take_plain: gets the category, name, GPU, start and length (us) of work of a GPU in the most frequent form, and
            the text of what is recorded of a collective, ``"Collective name": ...`` up to the last argument, if any; so
            most events need not be parsed in full.
        keep_on: is asked for each chunk with the bytes read; False ends the reading early.

    Raises:
        BadTrace: of :meth:`read`.
    """

    def __init__(self, file: File, take: Take, take_plain: TakePlain, keep_on: Callable[[int], bool]) -> None:
        self._file = file
        self._take = take
        self._take_plain = take_plain
        self._keep_on = keep_on
        self.compressed = file.read(0, min(2, file.size)) == b"\x1f\x8b"
        self.properties: dict[str, Any] = {}
        """What stands beside traceEvents: the values of :data:`PROPERTIES`, None for those of all others."""
        self.events = 0
        """Events of all kinds."""
        self.malformed = 0
        """Elements of traceEvents that are no objects."""
        self.layout = "general"
        """kineto: found by search, at least in parts; general: parsed one by one."""
        self.stopped = False
        """Whether keep_on ended the reading."""
        self.cut: str | None = None
        """Where the file ends too early: how; None for a whole one."""
        self.unpacked = 0
        """Bytes of JSON."""

    def read(self) -> None:
        """Read all of it; see the attributes afterwards."""
        enabled = gc.isenabled()
        # What is parsed holds no cycles, and the collector would look through it again and again.
        gc.disable()
        try:
            self._document(_Text(self._chunks()))
        except _Cut as error:
            if not self.stopped and self.cut is None:
                self.cut = str(error)
            if self.events == 0 and not self.stopped:
                raise BadTrace("it ends before its first event: %s" % self.cut) from None
        except RecursionError:
            raise BadTrace("it is nested too deeply") from None
        finally:
            if enabled:
                gc.enable()

    def _chunks(self) -> Iterator[bytes]:
        source = self._unpack() if self.compressed else self._raw()
        for chunk in source:
            self.unpacked += len(chunk)
            yield chunk

    def _raw(self) -> Iterator[bytes]:
        for offset in range(0, self._file.size, CHUNK):
            if not self._go_on(offset):
                return
            yield self._file.read(offset, min(CHUNK, self._file.size - offset))

    def _unpack(self) -> Iterator[bytes]:
        engine, begun = zlib.decompressobj(31), False
        for offset in range(0, self._file.size, CHUNK):
            data = self._file.read(offset, min(CHUNK, self._file.size - offset))
            while data:
                if not self._go_on(offset):
                    return
                begun = True
                try:
                    chunk = engine.decompress(data, CHUNK)
                except zlib.error as error:
                    raise BadTrace("the gzip data are damaged: %s" % error) from None
                if chunk:
                    yield chunk
                data = engine.unconsumed_tail
                if engine.eof:
                    # A further member follows directly; zero bytes are padding.
                    data = engine.unused_data.lstrip(b"\0")
                    engine, begun = zlib.decompressobj(31), False
                elif not chunk and not data:
                    break
        if begun:
            self.cut = "the gzip data end too early"

    def _go_on(self, offset: int) -> bool:
        if not self._keep_on(offset):
            self.stopped = True
            return False
        return True

    def _document(self, text: _Text) -> None:
        first = text.peek()
        if first == "[":
            text.expect("[")
            self._all_events(text)
        elif first == "{":
            self._object(text)
        else:
            raise BadTrace("it is no JSON object and no array: it begins with %r" % first)
        if not self.stopped and text.peek(end_allowed=True) and not text.only_padding():
            raise BadTrace("something follows after its end")

    def _object(self, text: _Text) -> None:
        text.expect("{")
        found = False
        keys = 0
        if text.peek() == "}":
            raise BadTrace("it has no traceEvents")
        while True:
            key = text.value()
            keys += 1
            if not isinstance(key, str) or keys > MAX_KEYS:
                raise BadTrace("it is no trace: a key is no text" if keys <= MAX_KEYS else "it has too many keys")
            text.expect(":")
            if key == "traceEvents":
                if found:
                    raise BadTrace("it has traceEvents twice")
                found = True
                text.expect("[")
                self._all_events(text)
            else:
                value = text.value()
                self.properties[key[:100]] = value if key in PROPERTIES else None
            if text.expect(",}") == "}":
                break
        if not found:
            raise BadTrace("it has no traceEvents: the keys are %s" % ", ".join(sorted(self.properties)[:10]))

    def _all_events(self, text: _Text) -> None:
        if text.peek() == "]":
            text.expect("]")
            return
        if self._fast(text):
            return
        while True:
            event = text.value()
            self._event(event)
            if text.expect(",]") == "]":
                return

    def _event(self, event: Any) -> None:
        self.events += 1
        if type(event) is not dict:
            self.malformed += 1
            return
        category = event.get("cat")
        if not isinstance(category, str) or event.get("ph") != "X":
            return
        category = _OLD_NAMES.get(category, category)
        if category in KEPT:
            event["cat"] = category
            self._take(event)

    def _fast(self, text: _Text) -> bool:
        """Read events of kineto's layout, and return whether that was all of them; ``text`` then stands behind them."""
        data = text.to_bytes()
        while len(data) < 1000:
            more = text.more_bytes()
            if not more:
                break
            data += more
        if not _KINETO.match(data):
            text.from_bytes(data)
            return False
        # So that the first event begins as all others do.
        data = b"\n  " + data.lstrip()
        while True:
            end = data.rfind(_BOUNDARY)
            if end < 0:
                more = text.more_bytes()
                if not more or len(data) > MAX_VALUE:
                    break
                data += more
                continue
            piece = data[: end + 4]
            if not self._piece(piece):
                break
            # The comma goes, the line end that starts the next event stays.
            data = data[end + 5 :] + text.more_bytes()
        # What is left is the last events and what follows them, or a layout that is another one after all.
        text.from_bytes(data)
        return False

    def _piece(self, piece: bytes) -> bool:
        """Take the events of ``piece``, whole ones in kineto's layout; return False, nothing taken, if it is another."""
        starts = piece.count(_START)
        if starts != piece.count(b'"ph": "') or not piece.startswith(_START):
            return False
        matches = [match.start() for match in _EVENT.finditer(piece)]
        if len(matches) != sum(1 for _ in _CATEGORY.finditer(piece)):
            return False
        found: list[dict[str, Any] | Plain] = []
        for begin in matches:
            plain = _PLAIN.match(piece, begin)
            # The profiler gives work of a GPU that GPU's number as process; who merges traces gives it another one.
            if plain is not None and plain[3] == plain[6]:
                category, name, _, start, length, device = plain.groups()
                place = piece.find(b'"Collective name"', plain.end(6), plain.end())
                recorded = piece[place : plain.end() - 5] if place >= 0 else b""
                found.append((category.decode(), name.decode("utf-8", "replace"), int(device), float(start), float(length), recorded))
                continue
            end = piece.find(_BOUNDARY, begin)
            raw = piece[begin : end + 4 if end >= 0 else len(piece)]
            try:
                found.append(_DECODER.decode(raw.decode("utf-8", "replace")))
            except ValueError:
                return False
        self.layout = "kineto"
        self.events += starts
        for event in found:
            if type(event) is tuple:
                self._take_plain(*event)
            else:
                self.events -= 1
                self._event(event)
        return True


class _Text:
    """Characters of a stream, with a place in them.

    Args:
        chunks: the stream.
    """

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._buffer = ""
        self._place = 0
        self._ended = False
        self._scan: Callable[[str, int], tuple[Any, int]] = _DECODER.scan_once  # type: ignore[attr-defined]

    def peek(self, *, end_allowed: bool = False) -> str:
        """Return the next character that is no space; an empty text at the end."""
        while True:
            found = _AFTER_SPACE.search(self._buffer, self._place)
            place = len(self._buffer) if found is None else found.start()
            if place < len(self._buffer):
                self._place = place
                if self._buffer[place] == "\ufeff" and place == 0:
                    raise BadTrace("it begins with a byte order mark")
                return self._buffer[place]
            self._place = place
            if not self._more():
                if end_allowed:
                    return ""
                raise _Cut("it ends in the middle")

    def expect(self, characters: str) -> str:
        """Step over one of ``characters``, and return it."""
        found = self._buffer[self._place : self._place + 1]
        if not found or found in _SPACE:
            found = self.peek()
        if found not in characters:
            raise BadTrace("not JSON: %r where %s should stand" % (found, " or ".join(map(repr, characters))))
        self._place += 1
        return found

    def value(self) -> Any:
        """Step over one value, and return it."""
        self.peek()
        while True:
            try:
                value, place = self._scan(self._buffer, self._place)
            except StopIteration:
                problem = "not JSON"
            except json.JSONDecodeError as error:
                problem = "not JSON: %s" % error.msg
            except ValueError:
                raise BadTrace("it has a number with more than %d digits" % _LONGEST_NUMBER) from None
            else:
                # A number at the very end of what was read may go on.
                if place < len(self._buffer) or type(value) not in {int, float} or not self._more():
                    self._place = place
                    return value
                continue
            left = len(self._buffer) - self._place
            if left > MAX_VALUE:
                raise BadTrace("%s, or one value of more than %d MiB" % (problem, MAX_VALUE >> 20))
            # Doubling keeps the work linear where a value is long.
            wanted = max(left, 1)
            while wanted > 0:
                before = len(self._buffer) - self._place
                if not self._more():
                    break
                wanted -= len(self._buffer) - self._place - before
            else:
                continue
            if len(self._buffer) - self._place > left:
                continue
            if left > CHUNK or self._unfinished():
                raise _Cut("it ends in the middle of a value")
            raise BadTrace(problem)

    def only_padding(self) -> bool:
        """Return whether nothing but zero bytes and spaces is left."""
        while True:
            if self._buffer[self._place :].strip("\0" + _SPACE):
                return False
            self._place = len(self._buffer)
            if not self._more():
                return True

    def to_bytes(self) -> bytes:
        """Return what was read and not yet stepped over; the text is empty then."""
        if not self._buffer and not self._more():
            return b""
        rest = self._buffer[self._place :].encode("utf-8")
        state = self._decoder.getstate()[0]
        self._decoder.reset()
        self._buffer, self._place = "", 0
        return rest + state

    def from_bytes(self, data: bytes) -> None:
        """Put back what :meth:`to_bytes` and :meth:`more_bytes` gave."""
        self._buffer, self._place = self._decoder.decode(data), 0

    def more_bytes(self) -> bytes:
        """Return the next chunk; empty at the end."""
        chunk = next(self._chunks, b"")
        self._ended = not chunk
        return chunk

    def _more(self) -> bool:
        if self._ended:
            return False
        chunk = next(self._chunks, b"")
        self._ended = not chunk
        text = self._decoder.decode(chunk, self._ended)
        self._buffer = self._buffer[self._place :] + text
        self._place = 0
        return bool(text) or not self._ended

    def _unfinished(self) -> bool:
        """Return whether the rest is the beginning of a value rather than no JSON: brackets or a string are open."""
        rest = self._buffer[self._place :]
        bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", rest)
        return bare.count("{") + bare.count("[") > bare.count("}") + bare.count("]") or '"' in bare


_DECODER = json.JSONDecoder(strict=False)


def number(value: Any) -> float | None:
    """Return a finite number of an event, of any sign; None for anything else."""
    if type(value) is int:
        return float(value) if abs(value) < 1 << 63 else None
    if type(value) is float and isfinite(value):
        return value
    if type(value) is str and len(value) < 40:
        try:
            parsed = float(value)
        except ValueError:
            return None
        return parsed if isfinite(parsed) else None
    return None
