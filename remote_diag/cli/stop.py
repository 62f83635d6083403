"""``rdiag stop``: end a job, and say truly whether that worked."""

from __future__ import annotations

import getpass
import socket
import sys
from typing import TYPE_CHECKING

import click

from ..exitcodes import ExitCode
from ..text import safe
from .options import common, job_host_option, pass_settings
from .settings import Settings

if TYPE_CHECKING:
    from ..jobs import Stopped


@click.command()
@click.argument("name")
@click.option(
    "--grace",
    type=click.FloatRange(min=0, max=86400),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Between asking (SIGTERM) and killing (SIGKILL).",
)
@job_host_option
@common
@pass_settings
def command(settings: Settings, name: str, grace: float) -> int:
    """Stop job NAME: SIGTERM to all its processes, SIGKILL to those that are left after the grace.

    NAME is a job (finetune.v2), or a name for its latest attempt that runs (finetune). Exit status 12: something
    survives, and is listed; state D means that the kernel does not let go of it.

    \b
    rdiag stop finetune
    rdiag stop finetune.v2 --grace 120 --host gpu8
    """
    from ..session import Session
    from .jobs import host_with
    from .output import Reporter, print_json

    host = host_with(settings, name)
    with Reporter(settings) as reporter, Session(host, on_event=reporter.tell) as session:
        done = session.stop(name, grace=grace, by=f"{getpass.getuser()} from {socket.gethostname()}")
    if settings.json:
        print_json(done.as_dict())
    else:
        sys.stdout.write("\n".join(_lines(done)) + "\n")
    return int(exit_code(done))


def exit_code(done: Stopped) -> ExitCode:
    """Return 0 when nothing of the job is left, 12 when something is, 10 when that cannot be told."""
    if done.survivors:
        return ExitCode.NOT_STOPPED
    if done.stopped or done.was in {"exited", "failed", "stopped"}:
        return ExitCode.OK
    return ExitCode.UNKNOWN_STATE if done.was in {"lost", "unknown"} else ExitCode.NOT_STOPPED


def _lines(done: Stopped) -> list[str]:
    record = done.record
    message = f": {safe(record.message)}" if record.message else ""
    if done.was not in {"starting", "running"}:
        return [f"{record.job} was not running on {record.host}; it is {record.state}{message}"]
    if done.stopped:
        signalled = "1 process was" if done.signalled == 1 else f"{done.signalled} processes were"
        return [f"{record.job} is {record.state} on {record.host} ({signalled} signalled){message}"]
    lines = [f"{record.job} is NOT stopped on {record.host}; it is {record.state}{message}"]
    lines += [f"  pid {one.pid}  {safe(one.name, limit=60)}  state {safe(one.state)}" for one in done.survivors]
    if any(one.state == "D" for one in done.survivors):
        lines.append("  state D: stuck in the kernel (a driver or a file system); it ends when the kernel lets go, or at a reboot")
    return lines
