"""What the kept events of a trace add up to: windows, and for each GPU the share of communication in them."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from heapq import merge

from probes.lib.comm.kernel_names import communication, element_bytes
from probes.lib.comm.lengths import PENDING, Calls
from probes.lib.comm.overlap import Ahead, Events, Scratch, Share, Union, clipped
from probes.lib.comm.steps import SharePerStep, Span, Windows, of_spans
from probes.lib.comm.trace import number
from probes.lib.legible import legible

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterable, Iterator, NamedTuple, Sequence

    class Kind(NamedTuple):
        """What one key of an event stands for."""

        name: str
        family: str | None
        collective: str | None
        size_bytes: int | None
        dtype: str | None
        ranks: int | None

    Label = tuple[str, int]
else:
    from collections import namedtuple

    Kind = namedtuple("Kind", "name family collective size_bytes dtype ranks")

PROFILER_STEP = re.compile(r"ProfilerStep\s*#\s*(\d+)\Z")
MAX_KINDS = 30_000
"""Kernels by name and message that are told apart."""
MAX_CHARACTERS = 16 << 20
"""Of names that are remembered whole: those of templates have thousands each."""
MAX_DEVICES = 256
"""A number from here on is no GPU's."""
MAX_WINDOWS = 250_000
MAX_NAMES = 500
"""Names of annotations that are remembered to be offered."""
_NAME = 200
_FEW = 100
_NOW_AND_THEN = 64
"""Parts after which it is worth looking for what can be forgotten."""
_OTHER = "(more names than can be told apart)"


class Work:
    """What one GPU did."""

    def __init__(self, scratch: Scratch | None = None) -> None:
        self.scratch = scratch
        self.communication, self.compute, self.copies = Events(scratch), Events(scratch), Events(scratch)
        self.own = 0
        """Events whose process is the GPU's number, as the profiler writes it."""
        self.others: set[str] = set()
        """Other processes, a few of them: traces of several ranks in one file."""

    @property
    def mixed(self) -> bool:
        """Whether this is the work of several ranks, each with a GPU of this number."""
        return len(self.others) + (self.own > 0) > 1


class Gathered:
    """Takes the kept events of a trace.

    Args:
        step: name of the annotation whose spans are the steps; ``*`` and ``?`` as in a shell, and a number after ``#`` is
            ignored. None for torch's own ProfilerStep.
        scratch: where events go that are too many for memory.
    """

    def __init__(self, step: str | None = None, scratch: Scratch | None = None) -> None:
        self._step = step
        self._scratch = scratch
        self.devices: dict[int, Work] = {}
        self.kinds: list[Kind] = []
        self._ids: dict[tuple[Any, ...], int] = {}
        self._plain: dict[tuple[str, str, bytes], int] = {}
        self._characters = 0
        self.unusable = 0
        """Events without times, of a negative length, or on a device number that no machine has."""
        self.gpu_spans: dict[int, list[Span]] = {}
        """Spans of the step's annotation on each GPU."""
        self.cpu_spans: list[Span] = []
        self._labels: set[tuple[int | None, Label, str]] = set()
        self.repeated: set[tuple[int | None, Label]] = set()
        """Labels that occur more than once on one stream of a GPU."""
        self._texts: dict[str, str] = {}
        self._spans = 0
        self.spans_left_out = 0
        self.names: set[str] = set()
        """Names of annotations, without numbers."""

    def take(self, event: dict[str, Any]) -> None:
        """Take one event."""
        start, length = number(event.get("ts")), number(event.get("dur", 0))
        name = event.get("name")
        if start is None or length is None or length < 0 or not isinstance(name, str):
            self.unusable += 1
            return
        category = event["cat"]
        arguments = event.get("args")
        if not isinstance(arguments, dict):
            arguments = {}
        if category == "user_annotation":
            self._annotation(name, start, start + length, None, event.get("tid"))
            return
        device = arguments.get("device", event.get("pid"))
        if type(device) is not int or not 0 <= device < MAX_DEVICES:
            self.unusable += 1
            return
        if category == "gpu_user_annotation":
            self._annotation(name, start, start + length, device, event.get("tid"))
            return
        if event.get("pid") != device:
            work = self._work(device)
            work.own -= 1
            if len(work.others) < _FEW:
                work.others.add(repr(event.get("pid"))[:_NAME])
        if category == "kernel" and "Collective name" in arguments:
            place = self._collective(name, arguments)
            work = self._work(device)
            work.own += 1
            target = work.compute if self.kinds[place].family is None else work.communication
            target.add(start, start + length, place)
        else:
            self.take_plain(category, name, device, start, length)

    def take_plain(  # noqa: PLR0917
        self, category: str, name: str, device: int, start: float, length: float, recorded: bytes = b""
    ) -> None:
        """Take a kernel, copy or fill; ``recorded`` is JSON, without brackets, of what is known of its collective."""
        work = self.devices.get(device) or self._work(device)
        work.own += 1
        place = self._plain.get((category, name, recorded))
        if place is None:
            arguments = _arguments(recorded) if recorded and category == "kernel" else {}
            if arguments:
                place = self._collective(name, arguments)
            elif category == "kernel":
                place = self._new_kernel((name,), name, None)
            else:
                place = self._id(Kind(legible(name[:_NAME]), None, None, None, None, None))
            if len(self._plain) < MAX_KINDS and self._remembers(len(name) + len(recorded)):
                self._plain[category, name, recorded] = place
        if category != "kernel":
            work.copies.add(start, start + length, place)
        elif self.kinds[place].family is None:
            work.compute.add(start, start + length, place)
        else:
            work.communication.add(start, start + length, place)

    def _work(self, device: int) -> Work:
        if device not in self.devices:
            self.devices[device] = Work(self._scratch)
        return self.devices[device]

    def _collective(self, name: str, arguments: dict[str, Any]) -> int:
        recorded = arguments.get("Collective name")
        key = (
            name, str(recorded)[:_NAME], _count(arguments.get("In msg nelems")), _count(arguments.get("Out msg nelems")),
            str(arguments.get("dtype"))[:_NAME], _count(arguments.get("Group size")),
        )  # fmt: skip
        place = self._ids.get(key)
        if place is None:
            place = self._new_kernel(key, name, recorded)
        return place

    def _new_kernel(self, key: tuple[Any, ...], name: str, recorded: object) -> int:
        named = communication(name, recorded)
        family, collective = (None, None) if named is None else named
        size = ranks = None
        dtype = None
        if len(key) > 1 and named is not None:
            width = element_bytes(key[4])
            elements = max(key[2] or 0, key[3] or 0)
            size = elements * width if width and elements else None
            dtype, ranks = (key[4] if width else None), key[5]
        if len(self.kinds) < MAX_KINDS and self._remembers(len(name)):
            place = self._add(Kind(legible(name[:_NAME]), family, collective, size, dtype, ranks))
            self._ids[key] = place
            return place
        return self._id(Kind(_OTHER, family, collective, None, None, None))

    def _remembers(self, characters: int) -> bool:
        if self._characters + characters > MAX_CHARACTERS:
            return False
        self._characters += characters
        return True

    def _id(self, kind: Kind) -> int:
        place = self._ids.get(kind)
        if place is None:
            if len(self.kinds) >= MAX_KINDS and kind.name != _OTHER:
                return self._id(kind._replace(name=_OTHER))
            place = self._ids[kind] = self._add(kind)
        return place

    def _add(self, kind: Kind) -> int:
        self.kinds.append(kind)
        return len(self.kinds) - 1

    def _annotation(self, name: str, start: float, end: float, device: int | None, stream: object) -> None:
        base, mark, digits = name.partition("#")
        counter = int(digits) if mark and digits.strip().isdecimal() and len(digits) < 18 else None
        plain = base.rstrip() if counter is not None else name
        if len(self.names) < MAX_NAMES:
            self.names.add(legible(plain[:_NAME]))
        if self._step is None:
            wanted = PROFILER_STEP.match(name) is not None
        else:
            wanted = fnmatchcase(name, self._step) or fnmatchcase(plain, self._step)
        if not wanted:
            return
        if self._spans >= MAX_WINDOWS:
            self.spans_left_out += 1
            return
        self._spans += 1
        spans = self.cpu_spans if device is None else self.gpu_spans.setdefault(device, [])
        # What is called alike on one stream more than once are several calls: their number tells nothing.
        label = None if counter is None or device is None else (plain[:_NAME], counter)
        # One text for all spans that have it: there are many.
        where, plain = (self._texts.setdefault(text, text) for text in (str(stream)[:_NAME], plain[:_NAME]))
        if label is not None:
            once = device, label, where
            if once in self._labels:
                self.repeated.add((device, label))
            self._labels.add(once)
        spans.append(Span(start, end, label, plain, where))


def windows(gathered: Gathered, device: int, step: str | None) -> Windows | None:
    """Return the windows of a GPU; None where a step was named that does not occur."""
    kind = "profiler-step" if step is None else "annotation"
    on_gpu = gathered.gpu_spans.get(device)
    if on_gpu:
        spans = [span._replace(label=None) if (device, span.label) in gathered.repeated else span for span in on_gpu]
        return of_spans(kind, "gpu", spans, joined=step is None)
    if gathered.cpu_spans:
        return of_spans(kind, "cpu", gathered.cpu_spans, joined=False)
    if step is not None:
        return None
    work = gathered.devices[device]
    every = (work.communication, work.compute, work.copies)
    first, last = min(events.first for events in every), max(events.last for events in every)
    return Windows("span", "gpu", [(first, last)] if last > first else [])


class DeviceShares:
    """The measures of one GPU, us.

    Args:
        work: its events; they are used up.
        kinds: what the keys mean.
        within: its windows.
    """

    def __init__(self, work: Work, kinds: Sequence[Kind], within: Windows) -> None:
        spans = within.spans
        self._scratch = work.scratch
        self.kernels: dict[str, dict[int, list[float]]] = {}
        """compute, copy, communication: key -> calls, us of parts within the windows."""
        self.calls: dict[int, Calls] = {}
        """Key of a communication kernel -> its calls."""
        self.all = SharePerStep(within.steps)
        self.families: dict[str, Share] = {}
        self.names: dict[str, Share] = {}
        """Collective -> its share, whatever library does it."""
        self.collectives: dict[tuple[str, str], Share] = {}
        """(family, collective) -> its share."""
        # All three by their starts at once, so that none has to be held in memory.
        computing = Ahead(self._counted("compute", clipped(work.compute.drain(), spans)))
        has_copies = work.copies.count > 0
        # What is copied is told apart by a key that no kernel has.
        copying = ((start, end, -1) for start, end, _ in self._counted("copy", clipped(work.copies.drain(), spans)))
        communicating = self._counted("communication", clipped(self._measured(work.communication.drain(), spans), spans))
        copies, other, nothing = Share(), Share(), Union()
        shares, followers = self._shares(kinds)
        add, covered = self.all.add, computing.covered
        for place, (start, end, key) in enumerate(merge(copying, communicating) if has_copies else communicating):
            if not place % _NOW_AND_THEN:
                computing.forget(start)
            if key < 0:
                other.add(start, end, computing)
                copies.add(start, end, nothing)
                continue
            # Asked once for all of them: in most traces nothing of a part is counted yet.
            exposed = end - start - covered(start, end)
            exposed = exposed if exposed > 0 else 0.0
            add(start, end, computing, exposed)
            if has_copies:
                other.add(start, end, computing, exposed)
            for share in shares[key]:
                share.add(start, end, computing, exposed)
        for key, (_, length) in self.kernels["communication"].items():
            self.calls[key].kernel_us = length
        if not has_copies:
            other = self.all
        for share in followers:
            share.follow(self.all)
        self._forget_unused(kinds)
        self.compute_us = computing.total()
        self.copies_us = copies.total
        self.busy_us = self.compute_us + other.exposed

    def _shares(self, kinds: Sequence[Kind]) -> tuple[list[tuple[Share, ...]], list[Share]]:
        """Return the shares that each kind of kernel adds to, and those that get what all communication does."""
        found = {(kind.family, kind.collective) for kind in kinds if kind.family is not None}
        families, names = {family for family, _ in found}, [name for _, name in found]
        self.families = {family or "": Share() for family in families}
        self.collectives = {(family or "", name or ""): Share() for family, name in found}
        self.names = {
            name or "": Share() if names.count(name) > 1 else self.collectives[family or "", name or ""] for family, name in found
        }
        alone = [*(self.families.values() if len(families) == 1 else ()), *(self.collectives.values() if len(found) == 1 else ())]
        adding = []
        for kind in kinds:
            family, name = kind.family or "", kind.collective or ""
            each = [] if kind.family is None else [self.families[family], self.collectives[family, name]]
            if names.count(kind.collective) > 1 and each:
                each.append(self.names[name])
            adding.append(tuple(share for share in each if all(share is not other for other in alone)))
        return adding, alone

    def _forget_unused(self, kinds: Sequence[Kind]) -> None:
        """Leave no share of what other GPUs do only."""
        used = {(kinds[key].family or "", kinds[key].collective or "") for key in self.kernels.get("communication", ())}
        self.collectives = {key: share for key, share in self.collectives.items() if key in used}
        self.families = {family: share for family, share in self.families.items() if any(family == each for each, _ in used)}
        self.names = {name: share for name, share in self.names.items() if any(name == each for _, each in used)}

    def by_name(self, kinds: Sequence[Kind]) -> dict[tuple[str, str], tuple[int, float]]:
        """Return (name, kind) -> (calls, us): compute, copy, or the family of communication; messages of all sizes together."""
        rows: dict[tuple[str, str], tuple[int, float]] = {}
        for kind_name, kernels in self.kernels.items():
            for key, (calls, length) in kernels.items():
                row = kinds[key].name, kinds[key].family or kind_name
                known = rows.get(row, (0, 0.0))
                rows[row] = known[0] + int(calls), known[1] + length
        return rows

    def _counted(
        self, kind: str, parts: Iterable[tuple[float, float, int, bool]]
    ) -> Iterator[tuple[float, float, int]]:
        kernels = self.kernels.setdefault(kind, {})
        for start, end, key, begins in parts:
            row = kernels.get(key)
            if row is None:
                row = kernels[key] = [0, 0.0]
            row[0] += begins
            row[1] += end - start
            yield start, end, key

    def _measured(
        self, events: Iterable[tuple[float, float, int]], spans: Sequence[tuple[float, float]]
    ) -> Iterator[tuple[float, float, int]]:
        """Pass events on, and note the whole length of each that begins within a window."""
        place = pending = 0
        for event in events:
            start, end, key = event
            while place < len(spans) and spans[place][1] <= start:
                place += 1
            calls = self.calls.get(key)
            if calls is None:
                calls = self.calls[key] = Calls()
            if place < len(spans) and spans[place][0] <= start:
                calls.recent.append(end - start)
                pending += 1
                if pending >= PENDING and self._scratch is not None:
                    pending = 0
                    for each in self.calls.values():
                        each.store(self._scratch)
            yield event


def _arguments(recorded: bytes) -> dict[str, Any]:
    """Return what is recorded of a collective; nothing where that is no JSON."""
    try:
        value = json.loads(b"{" + recorded.rstrip() + b"}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int | None:
    """Return a count of elements or ranks; None for what cannot be one."""
    if type(value) is str and value.isdecimal() and len(value) < 18:
        value = int(value)
    return value if type(value) is int and 0 < value < 1 << 50 else None
