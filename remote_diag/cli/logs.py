"""``rdiag logs``: the logs of a job, in a local file and on the terminal."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import click

from ..exitcodes import ExitCode
from ..text import safe
from .options import common, job_host_option, pass_settings
from .settings import Settings

if TYPE_CHECKING:
    from ..follower import Followed, FollowEvent, Start, Wanted
    from ..host import Host

LAST_SHOWN = 64 * 1024
"""Of what a log holds already, a terminal gets so many bytes; a pipe gets all of it."""
_SIZE = re.compile(r"([0-9]{1,18})([kKmMgG]?)(?:i?[bB])?\Z")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class ByteSize(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes: ``4096``, ``64k``, ``10M``, ``2G`` (powers of 1024)."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number."""
        if isinstance(value, int):
            return value
        match = _SIZE.match(str(value))
        if match is None:
            self.fail(f"{value!r} is no number of bytes, such as 4096, 64k or 10M", param, ctx)
        return int(match[1]) * _UNITS[match[2].lower()]


class Ranks(click.ParamType):  # type: ignore[type-arg]
    """``0``, or ``all``."""

    name = "rank"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text, checked."""
        if value != "all" and not (str(value).isascii() and str(value).isdigit() and len(str(value)) <= 5):
            self.fail(f"{value!r} is no rank; give a number, or all", param, ctx)
        return str(value)


@click.command()
@click.argument("name")
@click.option("-f", "--follow/--no-follow", default=False, help="Go on until the job ends.  [default: no-follow]")
@click.option("--tail", type=click.IntRange(0), metavar="LINES", help="Only the last LINES lines; nothing is mirrored.")
@click.option("--since", type=ByteSize(), metavar="BYTES", help="Only from this offset on (64k, 10M); nothing is mirrored.")
@click.option("--rank", "ranks", type=Ranks(), multiple=True, metavar="R", help="Logs of this rank; may be repeated, or all.")
@click.option("--raw", is_flag=True, help="Write the bytes as they are: stdout to stdout, stderr to stderr.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Mirror to FILE, and print nothing.  [default: ./rdiag-logs/JOB.log]",
)
@job_host_option
@common
@pass_settings
def command(
    settings: Settings,
    name: str,
    *,
    follow: bool,
    tail: int | None,
    since: int | None,
    ranks: tuple[str, ...],
    raw: bool,
    output: Path | None,
) -> int:
    """Mirror the logs of job NAME to ./rdiag-logs, byte for byte, and show them.

    NAME is a job (finetune.v2), or a name for its latest attempt (finetune). The copy goes on where it ends: after
    anything that interrupted it, and from another machine from the beginning.

    \b
    rdiag logs finetune -f
    rdiag logs finetune --tail 50
    rdiag logs finetune.v1 --no-follow --output finetune.log
    """
    from ..follower import Start
    from .jobs import host_with

    if tail is not None and since is not None:
        raise click.UsageError("--tail and --since exclude each other.")
    start: Start | None = None
    if tail is not None:
        start = Start("last-lines", tail)
    elif since is not None:
        start = Start("offset", since)
    if start is not None and output is not None:
        raise click.UsageError("--output keeps a whole copy; with --tail or --since, redirect what is printed.")
    show = output is None and not settings.json
    wanted = _wanted(follow=follow, start=start, ranks=ranks, output=output, show=show, raw=raw)
    ended = show_logs(settings, host_with(settings, name), name, wanted, raw=raw)
    if settings.json:
        from .output import print_json

        print_json(as_dict(ended))
    lost = any(file.missing for file in ended.files) or ended.state.state == "unknown"
    return int(ExitCode.UNKNOWN_STATE if lost and ended.state.ended else ExitCode.OK)


def _wanted(
    *, follow: bool, start: Start | None, ranks: tuple[str, ...], output: Path | None, show: bool, raw: bool
) -> Wanted:
    from ..follower import Wanted

    chosen: tuple[int, ...] | Literal["all"] | None = None
    if ranks:
        chosen = "all" if "all" in ranks else tuple(dict.fromkeys(int(rank) for rank in ranks))
    terminal = sys.stdout.isatty() and not raw
    return Wanted(
        follow=follow, start=start, ranks=chosen, output=output, show=show, show_last=LAST_SHOWN if terminal else None
    )


def show_logs(
    settings: Settings, host: Host, job: str, wanted: Wanted, *, raw: bool = False, insist: bool = False
) -> Followed:
    """Mirror and show the logs of ``job``; when this is interrupted, say how to come back and how to stop the job.

    Args:
        settings: the common options.
        host: where the job is.
        job: its id or name.
        wanted: what of its logs.
        raw: bytes as they are.
        insist: keep trying from the first connection on: the job is known to be there.
    """
    from ..follower import Follower

    screen = Screen(settings, raw=raw)
    with Follower(host, job, wanted, on_event=screen.tell, insist=insist) as follower:
        try:
            ended = follower.run()
        except BaseException as error:
            screen.close()
            if wanted.follow and not isinstance(error, Exception) and not follower.state.ended:
                screen.note(f"{follower.job} goes on at {host.name}")
                screen.note(f"  follow it again:  rdiag logs {follower.job} -f --host {host.name}")
                screen.note(f"  stop it:          rdiag stop {follower.job} --host {host.name}")
            raise
        screen.close()
        return ended


def keep_memory() -> None:
    """Have the C library keep freed blocks of this process instead of giving them back to the kernel each time.

    Bytes arrive in pieces of 256 KiB; by default each is a mapping of its own, whose pages the kernel has to clear again
    and again. That is a sixth of the time that a large log takes. Does nothing where there is no such setting.
    """
    try:
        import ctypes

        library = ctypes.CDLL(None)
        for setting in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            library.mallopt(setting, 32 * 1024 * 1024)
    except (ImportError, OSError, AttributeError):
        return


def as_dict(ended: Followed) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    from ..outcome import SCHEMA_VERSION

    return {
        "schema_version": SCHEMA_VERSION,
        "host": ended.host,
        "job": ended.job,
        "state": ended.state.state,
        "exit_code": ended.state.exit_code,
        "signal": ended.state.signal,
        "files": [
            {
                "stream": file.stream,
                "path": None if file.path is None or not file.path.exists() else str(file.path),
                "bytes": file.offset,
                "remote": file.remote,
                "older": [str(path) for path in file.older],
                "missing": file.missing,
            }
            for file in ended.files
        ],
    }


class Screen:
    """Shows what a follower tells: the log to stdout, everything else to stderr.

    Args:
        settings: the common options.
        raw: bytes as they are.
    """

    def __init__(self, settings: Settings, *, raw: bool) -> None:
        from ..views.logs import REDRAW_EVERY, LogView

        self._talks = sys.stderr.isatty() or settings.verbose > 0
        self._terminal = sys.stdout.isatty()
        self._raw = raw
        self._bar: Any = None
        self._expects_much = False
        self._task: Any = None
        color = self._terminal and not os.environ.get("NO_COLOR")
        self._one_at_a_time = threading.RLock()
        self._held_back = threading.Event()
        self._view = LogView(
            self._write,
            terminal=self._terminal,
            color=color,
            width=shutil.get_terminal_size().columns,
            later=self._held_back.set,
        )
        if self._terminal:
            threading.Thread(target=self._redraw, args=(REDRAW_EVERY,), name="redraw", daemon=True).start()

    def tell(self, event: FollowEvent) -> None:
        """Show one event."""
        handler = self._handlers.get(type(event).__name__)
        if handler is not None:
            with self._one_at_a_time:
                handler(self, event)

    def note(self, text: str) -> None:
        """Say something that has to be said, on stderr."""
        self._stop_bar()
        self._view.clear()
        sys.stderr.write(f"rdiag: {safe(text)}\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Finish what is unfinished."""
        self._stop_bar()
        try:
            with self._one_at_a_time:
                self._view.finish()
        except BrokenPipeError:
            # Whoever read it is gone; the copy is what counts.
            return

    def _redraw(self, every: float) -> None:
        """Draw the last state of a progress bar that has stopped to move."""
        while self._held_back.wait():
            time.sleep(every)
            self._held_back.clear()
            with self._one_at_a_time, contextlib.suppress(OSError, ValueError):
                self._view.redraw()

    def _show_bytes(self, event: Any) -> None:
        self._stop_bar()
        if self._raw:
            target = sys.stderr.buffer if event.stream.endswith(("err", "stderr")) else sys.stdout.buffer
            target.write(event.data)
            target.flush()
        else:
            self._view.add(event.stream, event.data)

    def _show_skipped(self, event: Any) -> None:
        if event.stream == "stdout" and self._talks:
            where = f"in {event.path}" if event.path is not None else "not shown"
            self.note(f"{event.count:,} bytes before this are {where}")
        self._view.skipped(event.stream)

    def _show_note(self, event: Any) -> None:
        if self._talks:
            self.note(event.text)

    def _show_warning(self, event: Any) -> None:
        self.note(event.text)

    def _show_progress(self, event: Any) -> None:
        if not self._expects_much:
            self._expects_much = True
            keep_memory()
        if not sys.stderr.isatty():
            return
        if event.total is not None and event.done >= event.total:
            self._stop_bar()
            return
        if self._bar is None:
            self._bar = self._new_bar()
            self._task = self._bar.add_task("", total=event.total)
        self._bar.update(self._task, completed=event.done, total=event.total, description=safe(event.label))

    def _new_bar(self) -> Any:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        from .output import console

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} MiB"),
        )
        bar = Progress(*columns, TimeRemainingColumn(), console=console(stderr=True), transient=True)
        bar.start()
        return bar

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    _handlers: ClassVar[dict[str, Callable[[Any, Any], None]]] = {
        "LogBytes": _show_bytes,
        "Skipped": _show_skipped,
        "Note": _show_note,
        "Warned": _show_warning,
        "Progress": _show_progress,
    }

