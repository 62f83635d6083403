"""``rdiag p2p``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import pass_settings, running, save_baseline_option
from .settings import Settings
from .thresholds import read_overrides, thresholds_option

if TYPE_CHECKING:
    from ..comparison import Comparison
    from ..probe import Probe

def watched(thresholds: Mapping[str, float] | None = None, file: str = "", *, host_links: bool = True) -> Comparison:
    """Return what is compared with the host's baseline, and which runs can be compared at all.

    Args:
        thresholds: the user's own, by name.
        file: where they are from.
        host_links: whether copies from and to the host were asked for.
    """
    from ..comparison import Comparison, Condition, Watch
    from .parse import provide_probe_code

    provide_probe_code()
    from probes.lib.gpu.thresholds import Thresholds

    allowed = Thresholds(thresholds, file)["p2p.baseline_pct"]

    def bandwidth(path: str) -> Watch:
        return Watch(path, tolerance=allowed.value / 100, worse="lower", unit="GB/s", source=allowed.provenance, optional=True)

    watches = (
        Watch("gpus[index]", level="fail", worse="lower", action="look which card is gone: rdiag gpu"),
        Watch("pairs[source,target].can_access", optional=True),
        bandwidth("pairs[source,target].bandwidth_gbs"),
        *((bandwidth("host_links[gpu].h2d_gbs"), bandwidth("host_links[gpu].d2h_gbs")) if host_links else ()),
    )
    conditions = (
        Condition("gpus", _chosen, "GPUs {}", "all GPUs"),
        Condition("size_bytes", _size, "copies of {} bytes", "copies of 64 MiB"),
        Condition("device", lambda result, _asked: _names(result), usual="unknown devices"),
    )
    return Comparison(watches, conditions, align=_by_bus_id)


def _chosen(result: Mapping[str, Any], asked: Mapping[str, Any]) -> str | None:
    """Return the indices that were asked for; None for all. What was stored without them tells by gaps that it was not all."""
    there = sorted(gpu["index"] for gpu in _gpus(result))
    wanted = sorted(asked["gpus"]) if "gpus" in asked else [] if there == list(range(len(there))) else there
    return ",".join(map(str, wanted)) or None


def _size(_result: Mapping[str, Any], asked: Mapping[str, Any]) -> int | None:
    size = asked.get("size_bytes")
    return size if isinstance(size, int) and size != _SIZE else None


_SIZE = 64 << 20
"""Bytes of a copy, where nobody says otherwise."""


def _gpus(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    gpus = result.get("gpus")
    return [gpu for gpu in gpus if isinstance(gpu, dict) and isinstance(gpu.get("index"), int)] if isinstance(gpus, list) else []


def _names(result: Mapping[str, Any]) -> str | None:
    return ",".join(sorted({str(gpu.get("name")) for gpu in _gpus(result)})) or None


def _by_bus_id(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Name GPUs by their bus ids, where both results tell them: indices of those behind a lost one move up."""
    before, after = ({gpu["index"]: str(gpu.get("bus_id")) for gpu in _gpus(result)} for result in (old, new))
    if any("None" in names.values() or len(set(names.values())) < len(names) for names in (before, after)):
        return old, new
    return _renamed(old, before), _renamed(new, after)


def _renamed(result: Mapping[str, Any], names: Mapping[Any, str]) -> Mapping[str, Any]:
    changed = dict(result)
    for name, fields in (("gpus", ("index",)), ("pairs", ("source", "target")), ("host_links", ("gpu",))):
        items = result.get(name)
        if isinstance(items, list):
            changed[name] = [
                {**item, **{each: names.get(item.get(each), item.get(each)) for each in fields}} for item in items if isinstance(item, dict)
            ]
    return changed


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

    held = watched(given["thresholds"], given["thresholds_from"], host_links=given["host"])
    return execute(settings, "p2p", params, view=render, watched=held)
