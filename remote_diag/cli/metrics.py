"""``rdiag metrics``: loss, accuracy and learning rate of a job, and what is alarming about them."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

import click

from ..exitcodes import ExitCode
from ..text import safe
from .options import common, job_host_option, pass_settings
from .picture import plot_option
from .settings import Settings

if TYPE_CHECKING:
    from rich.console import ConsoleDimensions, RenderableType
    from rich.live import Live

    from probes.lib.training_log import Point

    from ..findings import Finding
    from ..follower import Followed, FollowEvent
    from ..metrics import Metrics

CSV_COLUMNS = ("stream", "line", "metric", "position", "split", "rank", "step", "epoch", "value")
_QUIET = 1.0
"""Seconds without a byte after which a line that might go on is taken as it is."""
_TICK = 0.25


@click.command()
@click.argument("name")
@click.option("-f", "--follow/--no-follow", default=False, help="Go on until the job ends.  [default: no-follow]")
@click.option(
    "--vocab", type=click.IntRange(2, 1 << 31), metavar="N",
    help="Rows of the head that the loss is over: alert when it is above ln N, as no warm-up is.",
)  # fmt: skip
@click.option(
    "--stall", type=click.FloatRange(min=0, min_open=True), default=10.0, show_default=True, metavar="MINUTES",
    help="With -f, alert after so long without a line.",
)  # fmt: skip
@click.option("--csv", "as_csv", is_flag=True, help="Print every point as CSV, as it comes.")
@plot_option("Draw the series at the end")
@job_host_option
@common
@pass_settings
def command(
    settings: Settings,
    name: str,
    *,
    follow: bool,
    vocab: int | None,
    stall: float,
    as_csv: bool,
    plot: Path | None,
) -> int:
    """Read loss, accuracy and learning rate from the logs of job NAME, and say what is alarming.

    The logs are mirrored to ./rdiag-logs as rdiag logs does; stdout, stderr and the logs of single ranks are read.
    Alerts: NaN, a loss above ln N, divergence (20 points in a row above twice the lowest level), silence, NCCL and
    CUDA errors with the first rank that failed, Xid. Exit status 1 when there is one.

    \b
    rdiag metrics finetune -f --vocab 32000
    rdiag metrics finetune.v2 --plot loss.html
    rdiag metrics finetune --csv > points.csv
    """
    from ..findings import exit_code, status
    from .jobs import host_with

    if as_csv and settings.json:
        raise click.UsageError("--csv and --json exclude each other.")
    if plot is not None:
        from ..views.metrics_plot import check

        check(plot)
    watcher = Watcher(settings, name, follow=follow, vocab=vocab, stall=stall * 60, as_csv=as_csv, plot=plot)
    ended = watcher.watch(host_with(settings, name))
    found = watcher.metrics.findings()
    if settings.json:
        from .output import print_json

        print_json(as_dict(ended, watcher.metrics))
    elif not as_csv:
        watcher.show_all(f"{ended.host}: {ended.job}: {ended.state.state}")
    code = exit_code(status(found))
    return int(ExitCode.UNKNOWN_STATE if code == ExitCode.OK and ended.state.state == "unknown" else code)


def as_dict(ended: Followed, metrics: Metrics) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    from ..findings import status
    from ..outcome import SCHEMA_VERSION

    found = metrics.findings()
    return {
        "schema_version": SCHEMA_VERSION,
        "host": ended.host,
        "job": ended.job,
        "state": ended.state.state,
        "exit_code": ended.state.exit_code,
        "signal": ended.state.signal,
        "status": status(found),
        "series": [row.as_dict() for row in metrics.rows()],
        "points_left_out": metrics.points_left_out(),
        "findings": [dataclasses.asdict(finding) for finding in found],
    }


class Watcher:
    """Reads what a follower tells, watches the clock, and shows both.

    Args:
        settings: the common options.
        job: id or name.
        follow: go on until the job has ended.
        vocab: rows of the head.
        stall: seconds.
        as_csv: print points as CSV.
        plot: where to draw to at the end.
    """

    def __init__(
        self, settings: Settings, job: str, *, follow: bool, vocab: int | None, stall: float, as_csv: bool, plot: Path | None
    ) -> None:
        from ..metrics import Metrics
        from .output import Reporter

        people = not (as_csv or settings.json)
        self._settings = settings
        self._job = job
        self._follow = follow
        self._plot = plot
        self._people = people
        self._live: Live | None = None
        self._draws = follow and people and sys.stdout.isatty()
        self._reporter = Reporter(settings)
        self._headline = job
        self._running = True
        self._read_at = time.monotonic()
        self._settled = True
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._clock = threading.Thread(target=self._watch_clock, name="clock", daemon=True)
        self._csv = csv.writer(sys.stdout, lineterminator="\n") if as_csv else None
        if self._csv is not None:
            self._csv.writerow(CSV_COLUMNS)
        tell: Callable[[str, list[Point]], None] | None = None
        if self._csv is not None:
            tell = self._write_csv
        elif follow and people and not self._draws:
            tell = self._write_line
        self.metrics = Metrics(
            job=job, vocabulary=vocab, stall=stall if follow else None, on_points=tell, on_alert=self._alert
        )

    def watch(self, host: Any) -> Followed:
        """Follow to the end; when this is interrupted, show what there is and how to come back."""
        from ..follower import Follower, Wanted

        wanted = Wanted(follow=self._follow, ranks="all")
        with Follower(host, self._job, wanted, on_event=self.tell) as follower, self:
            try:
                ended = follower.run()
            except BaseException as error:
                self.close()
                if isinstance(error, KeyboardInterrupt):
                    self._finish()
                    if self._people:
                        self.show_all(self._headline)
                if self._follow and not isinstance(error, Exception) and not follower.state.ended:
                    self._note(f"{follower.job} goes on at {host.name}")
                    self._note(f"  follow it again:  rdiag metrics {follower.job} -f --host {host.name}")
                    self._note(f"  stop it:          rdiag stop {follower.job} --host {host.name}")
                raise
        self._finish()
        return ended

    def _finish(self) -> None:
        with self._lock:
            self.metrics.finish()
            if self._plot is not None:
                from ..views.metrics_plot import write

                write(self._plot, self._headline, self.metrics.rows())

    def __enter__(self) -> Watcher:
        """Start the clock and the picture."""
        if self._draws:
            from rich.live import Live

            from .output import console

            self._live = Live(console=console(), auto_refresh=False, transient=True)
            self._live.start()
        self._clock.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take the picture away."""
        self.close()

    def close(self) -> None:
        """Stop the clock and the picture; idempotent."""
        self._ended.set()
        self._clock.join()
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
        self._reporter.__exit__(None, None, None)

    def show_all(self, headline: str) -> None:
        """Print the table and the alerts."""
        from ..findings import status
        from ..views.metrics import render
        from .output import show

        found = self.metrics.findings()
        show(render(headline, self.metrics.rows(), found, status=status(found)))

    def tell(self, event: FollowEvent) -> None:
        """Take one event of the follower."""
        handler = self._handlers.get(type(event).__name__)
        if handler is not None:
            with self._lock:
                handler(self, event)

    def _bytes(self, event: Any) -> None:
        self._read_at = time.monotonic()
        self._settled = False
        if self._running:
            self.metrics.alerts.heard(self._read_at)
        self.metrics.feed(event.stream, event.data)

    def _found(self, event: Any) -> None:
        self._headline = f"{event.job}: {event.state.state}"
        self._job = event.job
        self._state(event.state)

    def _state(self, state: Any) -> None:
        self._headline = f"{self._job}: {state.state}"
        self._running = not state.ended
        if self._running:
            self.metrics.alerts.listen(time.monotonic())
        else:
            self.metrics.alerts.deaf()

    def _said(self, event: Any) -> None:
        # A follower speaks up when its connection is gone: whether the job is silent then, nobody knows.
        self.metrics.alerts.deaf()
        self._progress(event)

    def _progress(self, event: Any) -> None:
        if not self._draws:
            self._reporter.tell(event)

    def _warned(self, event: Any) -> None:
        self._note(event.text)

    def _watch_clock(self) -> None:
        while not self._ended.wait(_TICK):
            # Whoever reads our output may be gone; the thread that receives finds out, too.
            with contextlib.suppress(OSError, ValueError):
                self._look()

    def _look(self) -> None:
        with self._lock:
            now = time.monotonic()
            if not self._settled and now - self._read_at >= _QUIET:
                self._settled = True
                self.metrics.settle()
            self.metrics.alerts.tick(now)
            live = self._live
            picture = None if live is None else self._picture(live.console.size)
        # The picture has a lock of its own, which notes take while they hold ours: never the other way round.
        if live is not None and picture is not None:
            live.update(picture, refresh=True)

    def _picture(self, size: ConsoleDimensions) -> RenderableType:
        from ..views.metrics import live

        alerts = self.metrics.alerts.findings()
        return live(self._headline, self.metrics.rows(), alerts, width=size.width, height=size.height)

    def _alert(self, alert: Finding) -> None:
        # Without following, the alerts are all in the answer, a moment later.
        if self._follow or not self._people:
            from ..views.metrics import alert_text

            self._note(f"{alert.level}: {alert_text(alert)}")

    def _note(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(f"rdiag: {safe(text)}")
            return
        sys.stderr.write(f"rdiag: {safe(text)}\n")
        sys.stderr.flush()

    def _write_line(self, stream: str, points: list[Point]) -> None:
        from ..views.metrics import line

        sys.stdout.write(line(stream, points) + "\n")
        sys.stdout.flush()

    def _write_csv(self, stream: str, points: list[Point]) -> None:
        assert self._csv is not None  # noqa: S101 - only called with one
        for one in points:
            where = one.where
            row = (stream, where.line, one.metric, one.position, one.split, where.rank, one.step, one.epoch, one.value)
            self._csv.writerow(row)
        if self._follow:
            sys.stdout.flush()

    _handlers: ClassVar[dict[str, Callable[[Any, Any], None]]] = {
        "LogBytes": _bytes,
        "Found": _found,
        "JobState": _state,
        "Note": _said,
        "Progress": _progress,
        "Warned": _warned,
    }
