"""``rdiag topo``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import parse_option, pass_settings, running, save_baseline_option
from .picture import Picture, plot_option
from .settings import Settings

if TYPE_CHECKING:
    from ..comparison import Comparison
    from ..host import Host
    from ..probe import Probe

LEVELS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")


@click.command()
@parse_option
@click.option("--gpus", type=click.IntRange(0, 1024), metavar="N", help="How many there should be.  [default: the inventory's]")
@click.option("--p2p-level", type=click.Choice(LEVELS), help="Say what NCCL would do with this NCCL_P2P_LEVEL.")
@click.option("--root", metavar="FOLDER", help="Where the host's files are, in a container that mounts them.  [default: /]")
@plot_option("Also draw who is near whom")
@save_baseline_option
@running
@pass_settings
def command(settings: Settings, /, parsed: Path | None, plot: Path | None, **given: Any) -> int:
    """Show how the GPUs of a host are joined, and what NCCL will make of it.

    \b
    rdiag topo --host gpu8 --plot gpu8.html
    rdiag topo --host gpu8 --p2p-level SYS
    rdiag topo --parse topo-m.txt
    """
    from ..parameters import build
    from ..views.topo import render
    from ..views.topo_plot import draw
    from .parse import execute_parsed
    from .run import execute

    if parsed is not None and given["root"] is not None:
        raise click.UsageError("--parse reads a file and looks at no host: leave --root away")
    picture = None if plot is None else Picture(plot, draw)

    def params(probe: Probe[Any, Any]) -> Any:
        return build(probe, base={name: value for name, value in given.items() if value is not None})

    def for_host(params: Any, host: Host) -> Any:
        return replace(params, gpus=host.gpus, gpus_from_inventory=host.gpus is not None) if params.gpus is None else params

    if parsed is not None:
        return execute_parsed(settings, "topo", parsed, params, view=render, then=picture)
    return execute(settings, "topo", params, view=render, then=picture, for_host=for_host, watched=watched())


def watched() -> Comparison:
    """Return what is compared with the host's baseline; the speed of a link goes down in idle and is none of it."""
    from ..comparison import Comparison, Condition, Watch

    watches = (
        Watch("gpus[uuid]", level="fail", action="look which card is gone or new: rdiag gpu"),
        Watch("gpus[uuid].bus_id"),
        Watch("gpus[uuid].pcie_width", worse="lower", unit="lanes"),
        Watch("gpus[uuid].pcie_speed_max_gts", worse="lower", unit="GT/s"),
        Watch("gpus[uuid].numa_node"),
        Watch("links[a,b].link"),
        Watch("links[a,b].nvlinks", worse="lower", unit="NVLinks"),
        Watch("pairs[a,b].transport"),
        Watch("pairs[a,b].p2p_read"),
        Watch("pairs[a,b].p2p_write"),
        Watch("iommu"),
        Watch("bridges[bus_id].acs_redirect"),
        Watch("driver_version", level="ok"),
    )
    # Another level makes other transports of the same links.
    assumed = Condition("p2p_level", lambda _result, asked: asked.get("p2p_level"), "--p2p-level {}", usual="no --p2p-level")
    return Comparison(watches, (assumed,), places={"gpus": "bus_id"})
