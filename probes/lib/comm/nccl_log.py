"""What the readers of nccl-tests output gather: tables of rows as they were printed, and what was said around them.

Nothing here is computed or corrected; `nccl_check` holds the numbers against each other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

NUMBER = re.compile(r"(\d+)(?:\.(\d*))?(?:[eE]([+-]?\d+))?", re.ASCII)
"""How a printed number looks; nan, inf and negative ones are none."""

TYPE_BYTES = {
    "int8": 1, "uint8": 1, "char": 1, "int32": 4, "int": 4, "uint32": 4, "int64": 8, "uint64": 8, "half": 2, "float16": 2,
    "float": 4, "float32": 4, "double": 8, "float64": 8, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "f8e4m3": 1, "f8e5m2": 1,
}  # fmt: skip
"""Names of element types in nccl-tests -> bytes an element."""
REDUCTIONS = frozenset({"sum", "prod", "max", "min", "avg", "mulsum", "none"})


@dataclass(frozen=True)
class Printed:
    """A number, and how far the true one may be from it because it was rounded."""

    value: float
    slack: float


def printed(text: str) -> Printed | None:
    """Read a number as programs print it.

    Returns:
        None for everything that is not a plain number of 0 or more.
    """
    found = NUMBER.fullmatch(text)
    if found is None:
        return None
    exponent = int(found.group(3) or 0)
    if abs(exponent) > 30 or len(text) > 40:
        return None
    return Printed(float(text), 0.5 * 10.0 ** (exponent - len(found.group(2) or "")))


@dataclass(frozen=True)
class Spread:
    """Single calls, each as long as the slowest process."""

    min_us: float
    p50_us: float | None
    p99_us: float
    max_us: float
    cv_pct: float
    """Standard deviation / mean, per cent."""
    calls: int | None


@dataclass(frozen=True)
class Side:
    """One placement of one row, as printed."""

    in_place: bool
    time_us: Printed
    algbw_gbs: Printed
    busbw_gbs: Printed
    wrong: int | None
    """Elements with a wrong value; None where they were not counted (N/A)."""
    max_error: float | None = None
    """Largest deviation, as versions before 2.13 print it in place of a count."""
    spread: Spread | None = None


@dataclass(frozen=True)
class Line:
    """One row: a size in both placements."""

    number: int
    """Line of the text, or number of the object in JSON, from 1."""
    size_bytes: int
    count: int | None
    dtype: str | None
    redop: str | None
    root: int | None
    sides: tuple[Side, ...]
    iterations: int | None = None


@dataclass(frozen=True)
class Damage:
    """A row that could not be read; nothing is guessed from it."""

    number: int
    text: str
    why: str


@dataclass(frozen=True)
class Device:
    """A line of the list of devices."""

    rank: int
    group: int
    host: str
    bus_id: str | None
    name: str


@dataclass
class Config:
    """How the program was asked to run; None where it does not say."""

    threads: int | None = None
    gpus: int | None = None
    min_bytes: int | None = None
    max_bytes: int | None = None
    step_factor: int | None = None
    step_bytes: int | None = None
    warmup: int | None = None
    iterations: int | None = None
    validation: int | None = None
    validation_unreadable: bool = False
    """Whether it says something about validation that is no number."""
    graph: int | None = None

    def sizes(self) -> int | None:
        """Return how many sizes were asked for."""
        low, high = self.min_bytes, self.max_bytes
        if low is None or high is None or high < low:
            return None
        if low == high:
            return 1
        if self.step_factor is not None and self.step_factor > 1 and low > 0:
            count, size = 0, low
            while size <= high:
                count, size = count + 1, size * self.step_factor
            return count
        if self.step_bytes:
            return (high - low) // self.step_bytes + 1
        return None


    def each_size(self) -> Iterator[int]:
        """Yield the sizes that were asked for; nothing where `sizes` does not know how many."""
        size = self.min_bytes or 0
        for _ in range(self.sizes() or 0):
            yield size
            factor = self.step_factor or 0
            size = size * factor if factor > 1 and size else size + (self.step_bytes or 0)


@dataclass
class Table:
    """One run of one collective."""

    first_line: int
    label: str = ""
    """What was before its lines: the rank or host that a launcher names."""
    program: str | None = None
    """Such as all_reduce_perf, as the text says it."""
    announced: bool = False
    """Whether the program says itself which one it is, as text of 2025 does."""
    json: bool = False
    """Whether it is of JSON, which says null where nothing was checked."""
    config: Config = field(default_factory=Config)
    devices: list[Device] = field(default_factory=list)
    nccl_version: str | None = None
    tests_version: str | None = None
    columns: tuple[str, ...] = ()
    lines: list[Line] = field(default_factory=list)
    damaged: list[Damage] = field(default_factory=list)
    left_out: bool = False
    """Whether somebody replaced rows by dots."""
    out_of_bounds: int | None = None
    out_of_bounds_ok: bool | None = None
    average_ok: bool | None = None
    """What the program says of its average against NCCL_TESTS_MIN_BW; None when there was no such limit."""
    ended: bool = False
    """Whether its footer (in JSON: its end) is there."""
    old_errors: bool = False
    """Whether it prints the largest deviation (`error`) in place of a count (`#wrong`)."""


@dataclass
class Log:
    """All that a file holds."""

    form: str
    """text or json."""
    tables: list[Table] = field(default_factory=list)
    stray: list[Damage] = field(default_factory=list)
    """Rows outside of every table."""
    failures: list[str] = field(default_factory=list)
    """Lines in which the program or its launcher says that it failed."""
    settings: dict[str, str] = field(default_factory=dict)
    """NCCL_ and CUDA_ variables; all others are dropped where they are read."""
    json_path: str | None = None
    """Where the program says that it wrote its JSON."""
    command: str | None = None
    """A program of nccl-tests that a command line in the text names."""
    json_version: int | None = None
    notes: list[str] = field(default_factory=list)
