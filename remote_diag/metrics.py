"""Loss, accuracy and learning rate of a job, read from its logs as they arrive.

The reading itself is the one that ``loss-check`` does on hosts: the library that travels there is loaded here too.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import paths
from .errors import InternalError
from .findings import Finding
from .logs import rank_of
from .metric_alerts import Alerts

if TYPE_CHECKING:
    from probes.lib.training_log import Milestone, Point, Reader, Where
    from probes.lib.training_series import Gathered, Series

POINTS = 1000
"""Points of each series that are kept and given out; its extremes are among them. CSV gets every point."""
_END = 256 * 1024
"""Bytes at the end of a log in which the failure of a rank is looked for."""
_LIBRARY = "_rdiag_probe_library"
_FIRST = ("loss", "kl_div", "full_acc", "cond_acc", "acc", "acceptance_rate", "accept_length", "lr", "grad_norm")

Tell = Callable[[str, "list[Point]"], None]


@cache
def library(module: str) -> Any:
    """Return a module of the probes' library, such as ``training_log``.

    The library lies beside this package in a checkout and inside it in a wheel; it is loaded from there under a name of
    its own, so that no other package called ``probes`` is taken for it.
    """
    if _LIBRARY not in sys.modules:
        folder = paths.shipped_probes() / "lib"
        spec = importlib.util.spec_from_file_location(
            _LIBRARY, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        if spec is None or spec.loader is None:
            raise InternalError(f"rdiag's own files cannot be loaded from {folder}")
        package = importlib.util.module_from_spec(spec)
        sys.modules[_LIBRARY] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{_LIBRARY}.{module}")


@dataclass(frozen=True)
class Row:
    """One series of one log."""

    stream: str
    """``stdout``, ``stderr``, ``rank0``, ..."""
    series: Series

    @property
    def label(self) -> str:
        """The series as people read it: ``train/loss``, ``loss rank 3``."""
        key = self.series.key
        return key.label if key.rank is None else f"{key.label} rank {key.rank}"

    def points(self) -> list[Point]:
        """Return at most :data:`POINTS` finite points in order, the lowest and the highest among them."""
        return self.series.thinned(POINTS)

    def as_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints of it."""
        series, key = self.series, self.series.key
        ends = (("first", series.first), ("lowest", series.lowest), ("highest", series.highest), ("last", series.last))
        return {
            "label": key.label,
            "metric": key.metric,
            "position": key.position,
            "split": key.split,
            "rank": key.rank,
            "stream": self.stream,
            "family": key.family,
            "count": series.count,
            "not_finite": series.not_finite,
            **{name: None if point is None else point.value for name, point in ends},
            "points": [
                {"step": point.step, "epoch": point.epoch, "ordinal": point.ordinal, "value": point.value}
                for point in self.points()
            ],
        }


class _Log:
    """One log of the job."""

    def __init__(self, stream: str) -> None:
        self.rank = rank_of(stream)
        self.reader: Reader = library("training_log").Reader()
        self.gathered: Gathered = library("training_series").Gathered()
        self._counted = 0
        self._steps: int | None = None

    def steps(self) -> int | None:
        """Return over how many steps k there are losses; None when they are not numbered."""
        if self._counted != len(self.gathered.series):
            self._counted = len(self.gathered.series)
            keys = [key for key in self.gathered.series if key.metric == "loss" and key.position is not None]
            self._steps = len({key.position for key in keys}) or None
        return self._steps


class Metrics:
    """Everything that the logs of one job say in numbers, and what is alarming about them.

    Not thread-safe: whoever feeds and asks from several threads takes turns.

    Args:
        job: its name, for the command that shows its log.
        vocabulary: rows of the head that the loss is over; without it no loss is held against a uniform guess.
        stall: seconds without a byte after which a running job counts as stalled.
        on_points: gets the points of each line, and the log that it is from.
        on_alert: gets each alert when it is raised.
    """

    def __init__(
        self,
        *,
        job: str | None = None,
        vocabulary: int | None = None,
        stall: float | None = None,
        on_points: Tell | None = None,
        on_alert: Callable[[Finding], None] | None = None,
    ) -> None:
        self._job = job
        self._logs: dict[str, _Log] = {}
        self._on_points = on_points
        self._point_type = library("training_log").Point
        self.alerts = Alerts(
            library("loss_reading"), library("training_milestones").FAULTS, vocabulary=vocabulary, stall=stall, tell=on_alert
        )

    def feed(self, stream: str, data: bytes) -> None:
        """Take the next bytes of a log."""
        log = self._logs.get(stream)
        if log is None:
            log = self._logs[stream] = _Log(stream)
        self._take(stream, log, log.reader.feed(data))

    def settle(self) -> None:
        """Read what waits for a continuation: the logs went quiet."""
        for stream, log in self._logs.items():
            self._take(stream, log, log.reader.settle())

    def finish(self) -> None:
        """Read what is left: nothing more will come."""
        for stream, log in self._logs.items():
            self._take(stream, log, log.reader.finish())

    def _take(self, stream: str, log: _Log, events: list[Any]) -> None:
        for where, group in groupby(events, key=_where):
            points: list[Point] = []
            for event in group:
                placed = event
                if log.rank is not None and where.rank is None:
                    placed = event._replace(where=where._replace(rank=log.rank))
                if isinstance(event, self._point_type):
                    points.append(placed)
                    self._add(log, placed)
                else:
                    self._happened(stream, placed)
            if points and self._on_points is not None:
                self._on_points(stream, points)

    def _add(self, log: _Log, point: Point) -> None:
        series = log.gathered.add(point)
        if series is not None:
            self.alerts.point(series, point, log.steps())

    def _happened(self, stream: str, milestone: Milestone) -> None:
        self.alerts.milestone(stream, milestone)

    def rows(self) -> list[Row]:
        """Return every series: what is judged by first, training before validation, in the order of steps and ranks."""
        order = {name: place for place, name in enumerate(_FIRST)}
        rows = [Row(stream, series) for stream, log in self._logs.items() for series in log.gathered.series.values()]

        def place(row: Row) -> tuple[object, ...]:
            key = row.series.key
            judged = order.get(key.metric, len(order))
            return judged, key.metric, key.split == "val", key.position or 0, -1 if key.rank is None else key.rank, row.stream != "stdout", row.stream

        return sorted(rows, key=place)

    def points_left_out(self) -> int:
        """Return how many points belong to more series than are kept."""
        return sum(log.gathered.left_out for log in self._logs.values())

    def findings(self) -> tuple[Finding, ...]:
        """Return the alerts, and what could not be read."""
        found = list(self.alerts.findings())
        found += self._unread()
        if not any(row.series.count or row.series.not_finite for row in self.rows()):
            lines = sum(log.reader.statistics.lines for log in self._logs.values())
            found.append(
                Finding(
                    "unknown", "no-metrics", f"no loss, accuracy or learning rate in {lines:,} lines",
                    action=f"look at the log itself{f': rdiag logs {self._job}' if self._job else ''}",
                )
            )  # fmt: skip
        return tuple(found)

    def _unread(self) -> Iterator[Finding]:
        for stream, log in self._logs.items():
            statistics = log.reader.statistics
            if statistics.unread:
                yield Finding(
                    "unknown" if not statistics.metric_lines else "ok",
                    "lines-not-read",
                    f"{statistics.unread:,} lines look like metrics and are in no known form",
                    subject=stream,
                    value=statistics.unread,
                    unit="lines",
                    evidence=tuple(f"line {sample.line}: {sample.text}" for sample in statistics.unread_samples[:3]),
                )


def first_failing_rank(logs: Mapping[str, Path]) -> str | None:
    """Return which rank failed first, and by what that is known; None when the ends of the logs do not tell.

    Args:
        logs: local copies of a job's logs, by stream; what cannot be read is passed over.
    """
    metrics = Metrics()
    for stream, path in logs.items():
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _END))
            metrics.feed(stream, file.read(_END))
    metrics.finish()
    return next((one.message for one in metrics.alerts.findings() if one.code == "first-failing-rank"), None)


def _where(event: Any) -> Where:
    where: Where = event.where
    return where
