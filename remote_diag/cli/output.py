"""The only place that prints: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..events import Event, Log, Note, Progress
from ..text import safe

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress as ProgressBar

    from ..errors import RdiagError
    from ..outcome import Outcome
    from .settings import Settings

View = Callable[["Outcome[Any]"], "RenderableType"]


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object; all ASCII, so nothing in it can steer a terminal."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=True, allow_nan=False) + "\n")


def print_list(values: list[dict[str, Any]]) -> None:
    """Print a JSON list of objects, as :func:`print_json` prints one."""
    sys.stdout.write(json.dumps(values, indent=2, ensure_ascii=True, allow_nan=False) + "\n")


def console(*, stderr: bool = False) -> Console:
    """Return a rich console that takes text as it is: no markup, no emoji codes, no automatic highlighting."""
    from rich.console import Console

    class PlainConsole(Console):
        def on_broken_pipe(self) -> None:
            # rich would exit with status 1 here, which means findings.
            raise BrokenPipeError

    return PlainConsole(stderr=stderr, markup=False, emoji=False, highlight=False, soft_wrap=False)


def show(renderable: RenderableType, *, rows: bool = False) -> None:
    """Print something rich can render to stdout; as wide as the terminal, 100 columns in a pipe.

    Args:
        renderable: what is printed; no line of it ends with blanks, which rich fills tables up with.
        rows: whether each line is a row for another program: in a pipe none of them is wrapped.
    """
    target = console()
    if not target.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        target.width = _ROW if rows else 100
    target.print(_without_trailing_blanks(target, renderable))


_ROW = 10_000
"""Columns of a line that is not wrapped."""


def _without_trailing_blanks(target: Console, renderable: RenderableType) -> RenderableType:
    from rich.segment import Segment, Segments

    found: list[Segment] = []
    for line in target.render_lines(renderable, pad=False):
        while line and not line[-1].text.rstrip(" "):
            line.pop()
        if line:
            line[-1] = Segment(line[-1].text.rstrip(" "), line[-1].style, line[-1].control)
        found += [*line, Segment.line()]
    return Segments(found)


def print_outcome(outcome: Outcome[Any], view: View | None = None) -> None:
    """Print a result for people."""
    from ..views.outcome import footer, render

    show(render(outcome) if view is None or outcome.answer is None else view(outcome))
    for line in footer(outcome):
        sys.stdout.write(line + "\n")


def print_error(error: RdiagError, settings: Settings) -> None:
    """Print an error to stderr, the way the command line ends with one."""
    from .entry import error_lines

    for line in error_lines(error, verbose=settings.verbose):
        sys.stderr.write(line + "\n")


def print_plan(plan: dict[str, Any], request: str) -> None:
    """Print what ``--dry-run`` found out: the exact command, the files and their hashes, the request."""
    bundle = plan["bundle"]
    lines = [
        f"host     {plan['host']} ({safe(plan['target'])})",
        f"command  {plan['command']}",
        f"bundle   sha256 {bundle['sha256']}, {bundle['bytes']} bytes, sent once",
        *(f"           {digest}  {name}" for name, digest in bundle["files"].items()),
        f"probe    sha256 {plan['probe']['sha256']}  {safe(plan['probe']['path'])}",
        "request  (on stdin, never on a command line)",
        *(f"  {line}" for line in request.splitlines()),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def warn(text: str) -> None:
    """Print one line to stderr that nobody asked for and everybody has to see, in a pipe as well."""
    sys.stderr.write(f"rdiag: note: {safe(text)}\n")


class Reporter:
    """Shows what a session tells: a progress bar on a terminal, only what is urgent in a pipe, output of probes with ``-v``.

    Args:
        settings: the common options.
        hosts: how many hosts answer; with several, lines carry the host's name and the bar counts hosts.
    """

    def __init__(self, settings: Settings, hosts: int = 1) -> None:
        self._verbose = settings.verbose
        self._terminal = sys.stderr.isatty()
        self._hosts = hosts
        self._arrived = 0
        self._bar: ProgressBar | None = None
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Reporter:
        """Start."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def tell(self, event: Event) -> None:
        """Show one event."""
        self._show(event, "")

    def teller(self, host: str) -> Callable[[Event], None]:
        """Return a function that shows the events of ``host``."""
        return lambda event: self._show(event, host)

    def arrived(self, host: str) -> None:
        """Count one host as done."""
        self._arrived += 1
        if self._terminal and self._hosts > 1:
            self._advance("", Progress(self._arrived, self._hosts, "hosts", f"last: {host}"))

    def _show(self, event: Event, host: str) -> None:
        prefix = f"{host}: " if host else ""
        if isinstance(event, Note):
            if event.urgent or self._terminal or self._verbose:
                self._line(f"rdiag: {prefix}{safe(event.text)}")
        elif isinstance(event, Log):
            if self._verbose:
                for line in event.data.split(b"\n"):
                    if line:
                        self._line(f"{prefix}{event.stream}: {safe(line)}")
        elif isinstance(event, Progress) and self._terminal:
            self._advance(host, event)

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text)
        else:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    def _advance(self, host: str, event: Progress) -> None:
        bar = self._bar or self._start_bar()
        label = safe(" ".join(part for part in (host, event.label) if part), limit=60) or "working"
        if host not in self._tasks:
            self._tasks[host] = bar.add_task(label, total=event.total, unit="")
        bar.update(
            self._tasks[host],
            completed=event.done,
            total=event.total,
            description=label,
            unit=safe(event.unit, limit=20),
        )

    def _start_bar(self) -> ProgressBar:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as ProgressBar

        self._bar = ProgressBar(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}", markup=False),
            TimeElapsedColumn(),
            console=console(stderr=True),
            transient=True,
        )
        self._bar.start()
        return self._bar
