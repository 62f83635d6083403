"""``rdiag gpu``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import parse_option, pass_settings, running, save_baseline_option
from .run import execute
from .settings import Settings
from .thresholds import read_overrides, thresholds_option

if TYPE_CHECKING:
    from ..comparison import Comparison
    from ..host import Host
    from ..probe import Probe

PROBE = "gpu"


def watched() -> Comparison:
    """Return what is held against the host's baseline."""
    from ..comparison import Comparison, Watch

    watches = (
        Watch("gpus[uuid]", level="fail", worse="lower", action="find the card: lspci -d 10de:, dmesg; if it was taken out, save a new baseline"),
        Watch("gpus[uuid].bus_id", action="the card moved to another slot, or the slots are counted anew"),
        Watch("driver_version", level="ok"),
        Watch("gpus[uuid].vbios_version", level="ok"),
        Watch("gpus[uuid].power_limit_w", tolerance=0.005, worse="lower", unit="W"),
        Watch("gpus[uuid].clock_sm_max_mhz", tolerance=0.005, worse="lower", unit="MHz"),
        Watch("gpus[uuid].memory_total_mib", tolerance=0.005, worse="lower", unit="MiB"),
        Watch("gpus[uuid].pcie_width", worse="lower", unit="lanes", action="reseat the card; check riser and slot"),
        Watch("gpus[uuid].pcie_width_max", worse="lower", unit="lanes", action="reseat the card; check riser and slot"),
        Watch("gpus[uuid].pcie_gen_max", worse="lower", unit="PCIe gen", action="reseat the card; check riser, slot and BIOS"),
        Watch("gpus[uuid].ecc_enabled"),
        Watch("gpus[uuid].mig_enabled"),
        Watch("gpus[uuid].compute_mode"),
        Watch("gpus[uuid].persistence_enabled"),
        Watch("gpus[uuid].remap_uncorrectable", worse="higher", unit="rows", action="watch it: memory that wears out goes on wearing"),
        Watch("gpus[uuid].ecc_uncorrected_aggregate", worse="higher", unit="errors", action="look at Xid lines in dmesg"),
    )
    return Comparison(watches, places={"gpus": "bus_id"}, unlisted=_unlisted)


_HALF_ANSWERS = frozenset({"driver-hangs", "nvidia-smi-failed", "answer-damaged", "answer-incomplete", "cards-confused", "no-answer", "no-driver"})
"""Codes of findings after which the driver's list may lack cards that are there."""


def _unlisted(result: Mapping[str, Any], codes: frozenset[str]) -> str | None:
    """Say why a card that the driver does not list may be there all the same; None where its list is whole."""
    asked = [one for one in result.get("asked") or () if isinstance(one, dict)]
    of_driver = [one for one in asked if _asks_the_driver(one)]
    silent = [f"{_short(one)}: {one.get('outcome')}" for one in of_driver if one.get("outcome") != "ended"]
    half = sorted(codes & _HALF_ANSWERS)
    if result.get("source") == "nothing":
        if result.get("lspci_gpus") == [] and not silent:
            return None
        refused = [f"{_short(one)}: status {one.get('exit_status')}" for one in of_driver if one.get("exit_status")]
        return f"the driver gave no list ({(silent or refused or half or ['nothing answered'])[0]})"
    return f"the driver's list may not be whole ({(silent or half)[0]})" if silent or half else None


def _short(asked: Mapping[str, Any]) -> str:
    return str(asked.get("command")).partition("=")[0][:60]


def _asks_the_driver(asked: Mapping[str, Any]) -> bool:
    program = str(asked.get("command")).partition(" ")[0]
    return program == "NVML" or program.rpartition("/")[2] == "nvidia-smi"


@click.command()
@click.option("--gpus", type=click.IntRange(min=0), metavar="N", help="How many GPUs there should be.  [default: gpus in hosts.yaml]")
@click.option("--without", multiple=True, metavar="CHECK", help="Leave a check out, such as kernel-log; may be repeated.")
@click.option("--xid-ok", multiple=True, type=click.IntRange(min=0), metavar="CODE", help="An Xid that is no fault of the card, such as 92; may be repeated.")
@click.option("--xid-fail", multiple=True, type=click.IntRange(min=0), metavar="CODE", help="An Xid that fails the card, such as 63; may be repeated.")
@thresholds_option
@parse_option
@save_baseline_option
@running
@pass_settings
def command(
    settings: Settings,
    *,
    gpus: int | None,
    without: tuple[str, ...],
    xid_ok: tuple[int, ...],
    xid_fail: tuple[int, ...],
    thresholds_file: Path | None,
    parsed: Path | None,
) -> int:
    """Say which GPUs a host has, how they are, and who is on them. Touches none of them.

    \b
    rdiag gpu --host gpu8
    rdiag gpu --host gpu8 --save-baseline
    rdiag gpu --parse nvidia-smi.xml --json
    """
    from ..views.gpu import render

    overrides = read_overrides(thresholds_file)

    def build(probe: Probe[Any, Any]) -> Any:
        from ..parameters import build as build_params

        base = {"gpus": gpus, "thresholds": overrides or None, "without": list(without), "xid_ok": list(xid_ok), "xid_fail": list(xid_fail)}
        return build_params(probe, base=base)

    def for_host(params: Any, host: Host) -> Any:
        return params if params.gpus is not None else dataclasses.replace(params, gpus=host.gpus, gpus_from_inventory=host.gpus is not None)

    _check_names(without)
    if parsed is not None:
        if xid_ok or xid_fail:
            raise click.UsageError("--parse judges a file, which holds no kernel log: --xid-ok and --xid-fail change nothing there")
        from .parse import execute_parsed

        if settings.save_baseline or settings.hosts:
            raise click.UsageError("--parse judges a file: it takes no --host and saves no baseline")
        return execute_parsed(settings, PROBE, parsed, build, view=render)
    return execute(settings, PROBE, build, view=render, for_host=for_host, watched=watched())


def _check_names(without: tuple[str, ...]) -> None:
    if not without:
        return
    from .parse import provide_probe_code

    provide_probe_code()
    from probes.lib.gpu.health import CHECKS

    for name in without:
        if name not in CHECKS:
            raise click.BadParameter(f"there is no check {name!r}; there are {', '.join(CHECKS)}", param_hint="--without")
