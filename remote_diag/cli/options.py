"""Options that several commands share. Each writes its value into :class:`Settings`; commands read it from there."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from .settings import Settings

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
pass_settings = click.make_pass_decorator(Settings, ensure=True)


LONGEST_RUN = 7 * 24 * 3600
"""Seconds; the same as in an inventory."""


def _store(name: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    def callback(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:  # noqa: ARG001
        setattr(ctx.ensure_object(Settings), name, value)
        return value

    return callback


def complete_hosts(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001
    """Return the hosts and groups that begin with what was typed."""
    from ..inventory import load

    try:
        inventory = load(ctx.params.get("inventory"))
    except Exception:  # noqa: BLE001 - a completion must never print
        return []
    return sorted(name for name in (*inventory.hosts, *inventory.groups) if name.startswith(incomplete))


json_option = click.option(
    "--json", "as_json", is_flag=True, expose_value=False, callback=_store("json"), help="Print one JSON object."
)
inventory_option = click.option(
    "-i",
    "--inventory",
    type=click.Path(path_type=Path, dir_okay=False),
    expose_value=False,
    callback=_store("inventory"),
    help="The hosts.yaml to use.",
)


def _hosts(default: str) -> Callable[[CommandT], CommandT]:
    return click.option(
        "-H",
        "--host",
        "hosts",
        multiple=True,
        metavar="NAME",
        expose_value=False,
        callback=_store("hosts"),
        envvar="RDIAG_HOST",
        shell_complete=complete_hosts,
        help=f"Host or group of the inventory; may be repeated.  [default: {default}]",
    )


host_option = _hosts("local")
job_host_option = _hosts("where jobs were launched from here")


def _store_timeout(ctx: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    # Nothing is less or more than nan, so the range lets it pass.
    if value is not None and math.isnan(value):
        raise click.BadParameter("nan is no number of seconds", ctx=ctx, param=parameter)
    stored: float | None = _store("timeout")(ctx, parameter, value)
    return stored


timeout_option = click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True, max=LONGEST_RUN),
    metavar="SECONDS",
    expose_value=False,
    callback=_store_timeout,
    help="Deadline of the run.  [default: the host's]",
)
probe_path_option = click.option(
    "--probe-path",
    "probe_paths",
    multiple=True,
    type=click.Path(path_type=Path),
    expose_value=False,
    callback=_store("probe_paths"),
    help="Another folder with probes; may be repeated.",
)
keep_option = click.option(
    "--keep", is_flag=True, expose_value=False, callback=_store("keep"), help="Keep the run's directory on the host."
)


def _force(what: str) -> Callable[[CommandT], CommandT]:
    return click.option("--force", is_flag=True, expose_value=False, callback=_store("force"), help=what)


force_option = _force("Run an active probe although a GPU is busy, or nobody can tell.")
force_launch_option = _force("Launch although GPUs or room are short, or nobody can tell; the job's record says so.")
dry_run_option = click.option(
    "--dry-run",
    is_flag=True,
    expose_value=False,
    callback=_store("dry_run"),
    help="Contact nothing; print the exact command, files and hashes.",
)
save_baseline_option = click.option(
    "--save-baseline",
    is_flag=True,
    expose_value=False,
    callback=_store("save_baseline"),
    help="Keep the result as what is normal on this host; later runs say what changed.",
)
parse_option = click.option(
    "--parse",
    "parsed",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="Judge saved output instead of asking a host; - reads it from stdin.",
)
verbose_option = click.option(
    "-v", "--verbose", count=True, expose_value=False, callback=_store("verbose"), help="Show what a probe prints, and all of an error."
)
debug_option = click.option(
    "--debug",
    is_flag=True,
    hidden=True,
    expose_value=False,
    callback=_store("debug"),
    help="Show tracebacks of internal errors.",
)


def common(command: CommandT) -> CommandT:
    """Add ``--json``, ``-i``, ``-v``: what every command takes."""
    for option in (debug_option, verbose_option, json_option, inventory_option):
        command = option(command)
    return command


def running(command: CommandT) -> CommandT:
    """Add what every command takes that runs a probe on hosts."""
    for option in (dry_run_option, force_option, keep_option, timeout_option, probe_path_option):
        command = option(command)
    return host_option(common(command))
