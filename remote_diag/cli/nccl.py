"""``rdiag nccl``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import parse_option, pass_settings, running, save_baseline_option
from .settings import Settings
from .thresholds import read_overrides, thresholds_option

if TYPE_CHECKING:
    from ..baselines import Watch
    from ..outcome import Outcome
    from ..probe import Probe

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast", "reduce", "sendrecv")
DTYPES = ("bf16", "fp16", "fp32", "fp64", "int32", "int64", "uint8")
PROBES = {"nccl": "nccl", "gloo": "collectives-cpu"}
"""Backend -> the probe that measures with it; only the first is guarded against busy GPUs."""


def checked_sizes(ctx: click.Context, parameter: click.Parameter, given: str | None) -> str | None:
    """Refuse sizes that no host could measure before one is asked."""
    from .parse import provide_probe_code

    if given is not None:
        provide_probe_code()
        from probes.lib.comm.plan import parse_sizes

        try:
            parse_sizes(given)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx=ctx, param=parameter) from error
    return given


@click.command()
@click.option(
    "--collective", type=click.Choice(COLLECTIVES), default="all_reduce", show_default=True, metavar="NAME",
    help=", ".join(COLLECTIVES) + ".",
)  # fmt: skip
@click.option(
    "--sizes", metavar="FROM:TO", callback=checked_sizes, help="Bytes: 8:4G, 8:4G:2 with a factor, or a list 32K,1M.  [default: 8:4G, gloo 8:16M]"
)
@click.option("--dtype", type=click.Choice(DTYPES), metavar="TYPE", help=", ".join(DTYPES) + ".  [default: bf16, gloo fp32]")
@click.option("--graph", is_flag=True, help="Take latency from replayed CUDA graphs: without the cost of launching.")
@click.option(
    "--backend", type=click.Choice(list(PROBES)), default="nccl", show_default=True, help="gloo runs the same on the CPU."
)
@click.option("--ranks", type=click.IntRange(1, 64), metavar="N", help="Processes.  [default: one a GPU, gloo 2]")
@click.option("--iterations", type=click.IntRange(5, 10_000), metavar="N", help="Calls that latency is taken from.")
@click.option("--check/--no-check", default=True, show_default=True, help="Whether contents are checked before timing.")
@click.option("--control/--no-control", default=True, show_default=True, help="Whether a failure is repeated without P2P.")
@click.option("--step-timeout", "step_timeout_s", type=click.FloatRange(1, 3600), metavar="SECONDS",
              help="What one size may take.  [default: 60]")  # fmt: skip
@click.option("--port", type=click.IntRange(1, 65_535), metavar="N", help="Where ranks meet.  [default: a free port]")
@click.option("--reference", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="CSV with bandwidths of your own; they win over published ones.")  # fmt: skip
@click.option("--binary", metavar="PATH", help="Run this program of nccl-tests on the host in place of rdiag's own ranks.")
@click.argument("arguments", nargs=-1, metavar="[-- ARGUMENTS...]")
@parse_option
@click.option("--gpu", metavar="NAME", help="With --parse: the GPUs that the file is from, where it does not say.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Also draw bandwidth and latency against size: a .html or .png file here.")  # fmt: skip
@thresholds_option
@save_baseline_option
@running
@pass_settings
def command(settings: Settings, /, backend: str, parsed: Path | None, plot: Path | None, **given: Any) -> int:
    """Measure a collective over all GPUs of a host: contents first, then latency, then bandwidth, then a verdict.

    \b
    rdiag nccl --host gpu8
    rdiag nccl --collective all_gather --sizes 32K,1M,1G --host gpu8
    rdiag nccl --backend gloo --ranks 8
    rdiag nccl --binary /opt/all_reduce_perf --host gpu8 -- -e 1G -g 8
    rdiag nccl --parse all_reduce.log --plot all_reduce.html
    """
    from ..parameters import build
    from ..views.nccl import render
    from .parse import execute_parsed
    from .run import execute

    ctx = click.get_current_context()
    own = given.pop("thresholds_file")
    thresholds, reference = read_overrides(own), read_reference(given.pop("reference"))
    if backend == "gloo" and (own is not None or reference):
        raise click.UsageError("--thresholds and --reference judge what GPUs do: they do not go with --backend gloo")
    said = {name for name in given if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE}
    _check(said, given, backend, parsed)
    values = {name: value for name, value in given.items() if value is not None}
    if parsed is not None or given["binary"] is not None:
        # A program has its collective in its name; only what was asked for by name may speak against it.
        values["file_collective"] = given["collective"] if "collective" in said else None
    values.update(thresholds=thresholds, thresholds_from="" if own is None else str(own))
    values.update(reference=reference, arguments=list(given["arguments"]))
    values["file_name"] = "" if parsed is None else parsed.name
    picture = None if plot is None else _Picture(plot, reference)

    # The options are named after the probe's parameters.
    def params(probe: Probe[Any, Any]) -> Any:
        return build(probe, base=values)

    if parsed is not None:
        return execute_parsed(settings, "nccl", parsed, params, view=render, then=picture)
    return execute(settings, PROBES[backend], params, view=render, then=picture, watched=watched())


def watched() -> tuple[Watch, ...]:
    """Return what is compared with the host's baseline; the time of small messages varies by a tenth without any cause.

    Wrong data need no comparison, and data that nobody looked at are no change for the worse.
    """
    from ..baselines import Watch

    return (
        Watch("ranks", level="unknown"),
        Watch("library_version", level="ok"),
        # Rows are told apart by their collective: a run of another one is compared with nothing.
        Watch("rows[collective,dtype,in_place,size_bytes].busbw_gbs", tolerance=0.15, worse="lower", unit="GB/s"),
    )


def _check(said: set[str], given: dict[str, Any], backend: str, parsed: Path | None) -> None:
    """Refuse options that do not go together."""
    if backend == "gloo" and (given["graph"] or given["binary"] is not None):
        raise click.UsageError("--graph and --binary need GPUs: they do not go with --backend gloo")
    if given["arguments"] and given["binary"] is None:
        raise click.UsageError("arguments are those of a program: give --binary PATH before them")
    if given["gpu"] is not None and parsed is None:
        raise click.UsageError("--gpu goes with --parse: a host says itself which GPUs it has")
    beside = sorted(said - {"collective", "gpu"})
    if parsed is not None and backend == "gloo":
        raise click.UsageError("--parse reads a file and measures nothing: leave --backend away")
    if parsed is not None and beside:
        raise click.UsageError(f"--parse reads a file and measures nothing: leave --{beside[0].replace('_', '-')} away")


class _Picture:
    """Draws what comes back; with several hosts, one file for each.

    Args:
        path: where to.
        reference: lines of the user's own table of bandwidths.
    """

    def __init__(self, path: Path, reference: list[str]) -> None:
        from ..views.plotting import check

        check(path)
        self._path = path
        self._reference = reference

    def __call__(self, outcome: Outcome[Any], *, alone: bool) -> None:
        from ..views.nccl_plot import draw
        from ..views.plotting import store

        path = self._path if alone else self._path.with_name(f"{self._path.stem}-{outcome.host}{self._path.suffix}")
        try:
            data = draw(outcome, path, published(outcome.answer, self._reference))
        except ValueError as error:
            click.echo(f"rdiag: {path} is not drawn: {error}", err=True)
            return
        store(path, data)


def published(result: Any, own: list[str]) -> tuple[Any, ...]:
    """Return the published course over sizes, or the user's, that a result can be compared with; empty without one."""
    from .parse import provide_probe_code

    provide_probe_code()
    from probes.lib.comm import expectation, reference, verdict

    known = verdict.conditions(
        [device.name for device in result.devices], ranks=result.ranks, nodes=1, collective=result.collective,
        settings=dict(result.settings),
    )  # fmt: skip
    return expectation.curve(known, reference.parse(own, own=True) if own else ())


def read_reference(path: Path | None) -> list[str]:
    """Return the lines of a user's table of bandwidths, checked; none for None.

    Raises:
        ConfigError: it cannot be read, or is no such table.
    """
    if path is None:
        return []
    from ..errors import ConfigError
    from ..files import read_file
    from .parse import provide_probe_code

    provide_probe_code()
    from probes.lib.comm.reference import parse

    try:
        lines = read_file(path, limit=1 << 20).decode("utf-8").splitlines()
        parse(lines, own=True)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}", hint="the columns are those of reference_busbw.csv") from error
    return lines
