"""``rdiag nccl``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import pass_settings, running
from .settings import Settings
from .thresholds import read_overrides, thresholds_option

if TYPE_CHECKING:
    from ..probe import Probe

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast", "reduce", "sendrecv")
DTYPES = ("bf16", "fp16", "fp32", "fp64", "int32", "int64", "uint8")
PROBES = {"nccl": "nccl", "gloo": "collectives-cpu"}
"""Backend -> the probe that measures with it; only the first is guarded against busy GPUs."""


@click.command()
@click.option(
    "--collective", type=click.Choice(COLLECTIVES), default="all_reduce", show_default=True, help="Which collective."
)
@click.option(
    "--sizes", metavar="FROM:TO", help="Bytes: 8:4G, 8:4G:2 with a factor, or a list 32K,1M.  [default: 8:4G, gloo 8:16M]"
)
@click.option("--dtype", type=click.Choice(DTYPES), help="Type of the elements.  [default: bf16, gloo fp32]")
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
@thresholds_option
@running
@pass_settings
def command(
    settings: Settings, /, backend: str, reference: Path | None, thresholds_file: Path | None, **given: Any
) -> int:
    """Measure a collective over all GPUs of a host: contents first, then latency, then bandwidth, then a verdict.

    \b
    rdiag nccl --host gpu8
    rdiag nccl --collective all_gather --sizes 32K,1M,1G --host gpu8
    rdiag nccl --backend gloo --ranks 8
    """
    from ..parameters import build
    from ..views.nccl import render
    from .run import execute

    if given["graph"] and backend == "gloo":
        raise click.UsageError("--graph needs GPUs: it does not go with --backend gloo")
    values = {name: value for name, value in given.items() if value is not None}
    values["thresholds"] = read_overrides(thresholds_file)
    values["reference"] = read_reference(reference)

    # The options are named after the probe's parameters.
    def params(probe: Probe[Any, Any]) -> Any:
        return build(probe, base=values)

    return execute(settings, PROBES[backend], params, view=render)


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
