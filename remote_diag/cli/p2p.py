"""``rdiag p2p``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..baselines import Watch
from .options import pass_settings, running, save_baseline_option
from .settings import Settings
from .thresholds import read_overrides, thresholds_option

if TYPE_CHECKING:
    from ..probe import Probe

WATCHED = (
    Watch("gpus[index]", level="fail"),
    Watch("pairs[source,target].can_access", level="degraded"),
    Watch("pairs[source,target].bandwidth_gbs", tolerance=0.1, worse="lower", unit="GB/s"),
    Watch("host_links[gpu].h2d_gbs", tolerance=0.1, worse="lower", unit="GB/s"),
    Watch("host_links[gpu].d2h_gbs", tolerance=0.1, worse="lower", unit="GB/s"),
)


def indices(ctx: click.Context, parameter: click.Parameter, given: str | None) -> list[int]:
    """Read ``0,3,5``."""
    parts = [part.strip() for part in given.split(",")] if given is not None else []
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise click.BadParameter(f"{given!r} are no indices; write them with commas between: 0,3", ctx=ctx, param=parameter)
    return [int(part) for part in parts]


@click.command()
@click.option("--gpus", callback=indices, metavar="N,N...", help="Indices in the order of bus ids.  [default: all]")
@click.option("--host-links/--no-host-links", "host", default=True, show_default=True, help="Copies from and to the host too.")
@click.option("--pair-timeout", "pair_timeout_s", type=click.FloatRange(1, 600), default=30.0, show_default=True,
              metavar="SECONDS", help="What one pair may take before it counts as hanging.")  # fmt: skip
@save_baseline_option
@thresholds_option
@running
@pass_settings
def command(settings: Settings, /, thresholds_file: Path | None, **given: Any) -> int:
    """Copy known bytes between all pairs of GPUs and see what arrives: contents, peer access, latency, bandwidth.

    \b
    rdiag p2p --host gpu8
    rdiag p2p --gpus 2,5 --no-host-links --host gpu8
    """
    from ..parameters import build
    from ..views.p2p import render
    from .run import execute

    given["thresholds"] = read_overrides(thresholds_file)
    given["thresholds_from"] = "" if thresholds_file is None else str(thresholds_file)

    # The options are named after the probe's parameters.
    def params(probe: Probe[Any, Any]) -> Any:
        return build(probe, base=given)

    return execute(settings, "p2p", params, view=render, watched=WATCHED)
