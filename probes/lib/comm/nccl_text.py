"""Reads what nccl-tests prints: five generations of its table, told apart by the header of each table.

Columns differ between versions and programs, so rows are split by the names above them and never by position from an
end. Before lines there may be the label of a launcher (mpirun, srun, pdsh) and colours; between them, messages of NCCL
and of the launcher. A row that does not fit its header exactly is counted as damaged, and nothing is guessed from it.
"""

from __future__ import annotations

import re

from . import nccl_log
from .nccl_log import Config, Damage, Device, Line, Log, Printed, Side, Spread, Table, printed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_LINE = 1200
"""Characters of a line that are looked at; the longest row has fewer than 400."""
MAX_CELLS = 64
MAX_DAMAGED_KEPT = 50
MAX_FAILURES = 20
_SAMPLE = 200

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_TAG = re.compile(r"\[\d+,\d+\]<std(?:out|err)>:")
_LABELS = (
    re.compile(r"\[\d+,\d+\]<std(?:out|err)>:"),
    re.compile(r"\[[\w.-]+:\d+\] "),
    re.compile(r"\[?rank ?\d+\]?: ?", re.IGNORECASE),
    re.compile(r"\d{1,6}: "),
    re.compile(r"[A-Za-z][\w.-]*: (?=[\s#\d])"),
)
_MESSAGE = re.compile(r"\bNCCL (?:INFO|WARN|TRACE|CALL|ERROR|ABORT)\b")
_PROGRAM = re.compile(r"\b([a-z_]+)_perf(?:_mpi)?\b")
_COLLECTIVE_LINE = re.compile(r"Collective test (?:starting|concluded): (\S+)")
_TESTS_VERSION = re.compile(r"nccl-tests version (\S+)(?:.*nccl-library=(\d+))?")
_NCCL_VERSION = re.compile(r"\bNCCL version (\d+(?:\.\d+)+\S*)")
_DEVICE = re.compile(
    r"Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[(?:0x)?([0-9a-fA-F:.]+)\]\s+(.+?)\s*$"
)
_OUT_OF_BOUNDS = re.compile(r"Out of bounds values\s*:\s*(\S+)\s+(\S+)")
_AVERAGE = re.compile(r"Avg bus bandwidth\s*:\s*(\S+)?(?:\s+(OK|FAILED))?\s*$")
_JSON_PATH = re.compile(r"Writing JSON output to (\S+)")
_REDUCED = re.compile(r"Reducing maxBytes to (\d+)")
_SETTING = re.compile(r"\b(NCCL_[A-Z0-9_]+) set by environment to (\S+?)\.?$")
_TIMESTAMP = re.compile(r"\s\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\s*$")
_FAILURES = re.compile(
    r"Test (?:CUDA|NCCL) failure|Test failure \S+:\d+|Test timeout|Invalid number of GPUs|not enough slots available"
    r"|exited on signal|Segmentation fault|CANCELLED AT|DUE TO TIME LIMIT|srun: error|Killed\b|cannot open shared object"
    r"|[Cc]ommand not found|No such file or directory|unhandled (?:cuda|system) error"
)
_TELLS = re.compile(
    r"algbw|Rank |nccl-tests|Collective test|Bytes |iters:|Out of bounds|Avg bus|NCCL version|JSON output|set by env|_perf"
    "|" + _FAILURES.pattern
)
"""What every line holds that is no row and tells anything: most lines of a long log do not."""
_CONFIG_KEYS = {
    "threads": re.compile(r"\bnThreads? (\S+)"),
    "gpus": re.compile(r"\bnGpus (\S+)"),
    "min_bytes": re.compile(r"\bminBytes (\S+)"),
    "max_bytes": re.compile(r"\bmaxBytes (\S+)"),
    "warmup": re.compile(r"\bwarmup iters: (\S+)"),
    "iterations": re.compile(r"(?<!warmup )(?<!agg )\biters: (\S+)"),
    "validation": re.compile(r"\bvalidation: (\S+)"),
    "graph": re.compile(r"\bgraph: (\S+)"),
}
_STEP = re.compile(r"\bstep: (\d+)\((factor|bytes)\)")
_SIDE = ("time", "algbw", "busbw")
_TIMES = {"time", "cputime"}
_CHECKS = {"#wrong", "error"}
_PER_ITERATION = ("i_min", "i_max", "i_p99", "i_cv%")
_NOT_APPLICABLE = "N/A"


def read(text: str) -> Log:
    """Gather all tables of a text, in the order in which they begin."""
    return _Reader().read(text.splitlines())


def unlabelled(line: str) -> tuple[str, str]:
    """Split what a launcher put before a line from the line itself."""
    labels = ""
    for _ in range(3):
        for pattern in _LABELS:
            found = pattern.match(line)
            if found is not None:
                labels, line = labels + found.group().strip(), line[found.end() :]
                break
        else:
            break
    return labels, line


class _Stream:
    """The lines of one label: what was said before the next table, and the table that is open."""

    def __init__(self) -> None:
        self.next: Table | None = None
        self.table: Table | None = None
        self.open = False


class _Reader:
    def __init__(self) -> None:
        self.log = Log("text")
        self._streams: dict[str, _Stream] = {}
        self._programs: set[str] = set()

    def read(self, lines: Iterable[str]) -> Log:
        for number, raw in enumerate(lines, 1):
            line = _COLOUR.sub("", raw[:MAX_LINE]).rstrip()
            if line.strip():
                label, rest = unlabelled(line)
                # A launcher labels empty lines, too.
                if rest.strip():
                    self._take(number, label, rest)
        for table in self.log.tables:
            _no_mixed_reductions(table)
        if len(self._programs) == 1:
            self.log.command = self._programs.pop()
        return self.log

    def _take(self, number: int, label: str, line: str) -> None:
        stream = self._streams.setdefault(label, _Stream())
        bare = line.lstrip("# \t")
        tells = _TELLS.search(line) is not None
        columns = _header(bare) if tells else None
        if columns is not None:
            self._begin(number, label, stream, columns)
        elif not (tells and (self._said_before(number, label, stream, bare) or self._said_after(stream, bare))):
            if set(bare.strip()) == {"."}:
                self._left_out()
            elif not line.lstrip().startswith("#"):
                self._row_or_noise(number, stream, line)

    # Tables ----------------------------------------------------------------------------------------------------------

    def _begin(self, number: int, label: str, stream: _Stream, columns: tuple[str, ...]) -> None:
        table = stream.next or Table(number, label)
        table.first_line, table.columns, table.label = number, columns, label
        table.old_errors = "1:error" in columns
        stream.next, stream.table, stream.open = None, table, True
        self.log.tables.append(table)

    def _left_out(self) -> None:
        # Whoever shortens a log does so without the label of a launcher.
        for stream in self._streams.values():
            if stream.open and stream.table is not None:
                stream.table.left_out = True

    def _coming(self, number: int, label: str, stream: _Stream) -> Table:
        if stream.next is None:
            stream.next, stream.open = Table(number, label), False
        return stream.next

    def _said_before(self, number: int, label: str, stream: _Stream, bare: str) -> bool:
        version = _TESTS_VERSION.match(bare)
        starting = _COLLECTIVE_LINE.match(bare)
        device = _DEVICE.match(bare)
        if version is not None:
            table = self._coming(number, label, stream)
            table.tests_version, table.nccl_version = version.group(1), version_text(version.group(2)) or table.nccl_version
        elif starting is not None:
            begins = "starting" in starting.group()
            named = self._coming(number, label, stream) if begins else stream.table
            if named is not None:
                named.announced = True
                named.program = starting.group(1) if begins else named.program or starting.group(1)
        elif device is not None:
            rank, group, host, bus, name = device.groups()
            self._coming(number, label, stream).devices.append(Device(int(rank), int(group or 0), host, bus_id(bus), name))
        elif sum(key in bare for key in ("minBytes", "maxBytes", "iters:", "validation:")) >= 2:
            _configure(self._coming(number, label, stream).config, bare)
        else:
            return self._said_anywhere(stream, bare)
        return True

    def _said_anywhere(self, stream: _Stream, bare: str) -> bool:
        log, table = self.log, stream.next or stream.table
        if _FAILURES.search(bare) and len(log.failures) < MAX_FAILURES:
            log.failures.append(bare[:_SAMPLE].strip())
        if bare.startswith("+ ") or "--" in bare or bare.lstrip().startswith("/"):
            self._programs.update(found.group(1) for found in _PROGRAM.finditer(bare))
        version, path, setting, reduced = (
            pattern.search(bare) for pattern in (_NCCL_VERSION, _JSON_PATH, _SETTING, _REDUCED)
        )
        if version is not None and table is not None and table.nccl_version is None:
            table.nccl_version = version.group(1)
        if path is not None:
            log.json_path = path.group(1)
        if setting is not None:
            log.settings[setting.group(1)] = setting.group(2)
        if reduced is not None and table is not None:
            table.config.max_bytes = int(reduced.group(1))
        return any(found is not None for found in (version, path, setting, reduced))

    def _said_after(self, stream: _Stream, bare: str) -> bool:
        table = stream.table
        bounds, average = _OUT_OF_BOUNDS.search(bare), _AVERAGE.search(bare)
        if bounds is None and average is None:
            return False
        if table is not None and stream.next is None:
            if bounds is not None:
                table.out_of_bounds = int(bounds.group(1)) if bounds.group(1).isdigit() else None
                table.out_of_bounds_ok = {"OK": True, "FAILED": False}.get(bounds.group(2))
                table.ended = True
            if average is not None:
                table.average_ok = {"OK": True, "FAILED": False}.get(average.group(2) or "")
                table.ended = True
            stream.open = False
        return True

    # Rows ------------------------------------------------------------------------------------------------------------

    def _row_or_noise(self, number: int, stream: _Stream, line: str) -> None:
        if not stream.open and not re.match(r"\s*\d", line):
            return
        glued = _TAG.search(line) is not None or _MESSAGE.search(line) is not None
        tokens = _TIMESTAMP.sub("", line).split(None, MAX_CELLS)
        if glued and not re.match(r"\s*\d+\s", line) and sum(printed(token) is not None for token in tokens) < 6:
            return
        if not stream.open or stream.table is None:
            if len(tokens) >= 8 and tokens[0].isdigit() and _numeric(tokens) >= 0.6:
                _keep(self.log.stray, Damage(number, line.strip()[:_SAMPLE], "no header is above it"))
            return
        read = "a label or a message is inside it" if glued else _row(number, tokens, stream.table.columns)
        if isinstance(read, Line):
            stream.table.lines.append(read)
        elif glued or _like_a_row(tokens):
            _keep(stream.table.damaged, Damage(number, line.strip()[:_SAMPLE], read))


def _keep(kept: list[Damage], damage: Damage) -> None:
    # All are counted; a text of nothing but damaged rows must not fill the memory with samples.
    kept.append(damage if len(kept) < MAX_DAMAGED_KEPT else Damage(damage.number, "", damage.why))


def _numeric(tokens: list[str]) -> float:
    return sum(printed(token) is not None or token in {_NOT_APPLICABLE, "-1"} for token in tokens) / len(tokens)


def _like_a_row(tokens: list[str]) -> bool:
    first = tokens[0][:1].isdigit()
    return (first and (len(tokens) == 1 or tokens[1][:1].isdigit())) or (len(tokens) > 3 and _numeric(tokens) >= 0.5)


def _header(bare: str) -> tuple[str, ...] | None:
    """Return the columns, or None for a line that is no header: `2:time` is the time of the second placement."""
    tokens = bare.split()
    if not tokens or tokens[0] != "size" or "algbw" not in tokens or not _TIMES & set(tokens):
        return None
    columns: list[str] = []
    sides = 0
    for name in tokens:
        if name in _TIMES:
            sides += 1
            columns.append(f"{sides}:time")
        elif name in {*_SIDE, *_CHECKS, *_PER_ITERATION} and sides:
            columns.append(f"{sides}:{name}")
        elif name != "timestamp":
            columns.append(name)
    return tuple(columns)


def _whole(columns: tuple[str, ...]) -> bool:
    """Whether each placement of a header has all of its columns, and both have the same."""
    sides = [[name[2:] for name in columns if name.startswith(place)] for place in ("1:", "2:")]
    loose = {*_SIDE, *_CHECKS, *_PER_ITERATION} & set(columns)
    both = not sides[1] or sides[0] == sides[1]
    return not loose and both and set(_SIDE) <= set(sides[0]) and len(set(columns)) == len(columns)


def _row(number: int, tokens: list[str], columns: tuple[str, ...]) -> Line | str:
    """Return the row, or why it cannot be read."""
    if not _whole(columns):
        return "its header is not whole"
    if len(tokens) == len(columns) - 1 and "redop" in columns and "root" not in columns:
        # The all-to-all of 2021 announces a reduction, and prints none.
        place = columns.index("redop")
        if printed(tokens[place]) is not None:
            tokens = [*tokens[:place], "none", *tokens[place:]]
    if len(tokens) != len(columns):
        return f"{len(tokens)} values under {len(columns)} columns"
    cells = dict(zip(columns, tokens))
    size = cells.get("size", "")
    count = cells.get("count", "0")
    if not (size.isdigit() and count.isdigit() and len(size) < 20 and len(count) < 20):
        return "size or count is no number"
    dtype, redop, root = cells.get("type"), cells.get("redop"), cells.get("root", "-1")
    if (dtype is not None and dtype not in nccl_log.TYPE_BYTES) or (redop is not None and redop not in nccl_log.REDUCTIONS):
        return "its type or reduction is not known"
    if re.fullmatch(r"-1|\d{1,6}", root) is None:
        return "its root is no rank"
    sides = tuple(_sides(cells))
    if not sides or any(isinstance(side, str) for side in sides):
        return next((side for side in sides if isinstance(side, str)), "its header has no times")
    iterations = cells.get("#iters")
    if iterations is not None and not iterations.isdigit():
        return "its iterations are no number"
    return Line(
        number, int(size), int(count) if "count" in cells else None, dtype, None if redop == "none" else redop,
        None if root == "-1" else int(root), tuple(side for side in sides if isinstance(side, Side)),
        None if iterations is None else int(iterations),
    )  # fmt: skip


def _sides(cells: dict[str, str]) -> Iterator[Side | str]:
    for place in ("1", "2"):
        if f"{place}:time" not in cells:
            continue
        numbers = [printed(cells.get(f"{place}:{name}", "")) for name in _SIDE]
        plain = [number for number in numbers if number is not None]
        if len(plain) != 3 or plain[0].value <= 0:
            yield "its time or bandwidth is no number above 0"
            continue
        wrong = _wrong(cells.get(f"{place}:#wrong"))
        error = _wrong(cells.get(f"{place}:error"))
        spread = _spread(cells, place)
        if isinstance(wrong, str) or isinstance(error, str) or isinstance(spread, str):
            yield next(word for word in (wrong, error, spread) if isinstance(word, str))
            continue
        counted = None if wrong is None else int(wrong.value)
        if error is not None and error.value == 0:
            counted = 0
        yield Side(place == "2", plain[0], plain[1], plain[2], counted, None if error is None else error.value, spread)


def _wrong(text: str | None) -> Printed | str | None:
    if text is None or text == _NOT_APPLICABLE:
        return None
    return printed(text) or "its check is neither a number nor N/A"


def _spread(cells: dict[str, str], place: str) -> Spread | str | None:
    texts = [cells.get(f"{place}:{name}") for name in _PER_ITERATION]
    if all(text is None for text in texts):
        return None
    numbers = [printed(text or "") for text in texts]
    values = [number.value for number in numbers if number is not None]
    if len(values) != len(texts):
        return "the times of its single calls are no numbers"
    low, high, p99, cv = values
    if not low <= p99 <= high:
        return "the times of its single calls contradict each other"
    return Spread(low, None, p99, high, cv, None)


def _no_mixed_reductions(table: Table) -> None:
    """Rows without a reduction among rows with one have lost a cell."""
    if "redop" not in table.columns or "root" in table.columns:
        return
    if any(line.redop for line in table.lines):
        for line in [line for line in table.lines if line.redop is None]:
            table.lines.remove(line)
            table.damaged.append(Damage(line.number, "", "its reduction is missing"))


# What is said around tables -----------------------------------------------------------------------------------------


def _configure(config: Config, bare: str) -> None:
    for name, pattern in _CONFIG_KEYS.items():
        found = pattern.search(bare)
        if found is not None and found.group(1).isdigit():
            setattr(config, name, int(found.group(1)))
    if "validation" in bare and config.validation is None:
        config.validation_unreadable = True
    step = _STEP.search(bare)
    if step is not None:
        setattr(config, "step_" + step.group(2), int(step.group(1)))


def bus_id(text: str) -> str | None:
    """Return 0000:0f:00.0; versions before 2.14 print only the bus, and old ones always 00."""
    found = re.fullmatch(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.([0-7]))?", text)
    if found is None:
        return None
    domain, bus, device, function = found.groups()
    return f"{domain[-4:]}:{bus}:{device}.{function or 0}".lower()


def version_text(number: str | None) -> str | None:
    """Return 2.26.2 for 22602, and 2.8.4 for 2804."""
    if number is None or not number.isdigit():
        return None
    value = int(number)
    if value < 10_000:
        return f"{value // 1000}.{value // 100 % 10}.{value % 100}"
    return f"{value // 10_000}.{value // 100 % 100}.{value % 100}"
