"""``rdiag vocab-keep``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .options import pass_settings, running
from .settings import Settings

if TYPE_CHECKING:
    from ..probe import Probe


@click.command()
@click.argument("source", metavar="SRC")
@click.option("--out", required=True, metavar="DIR", help="The folder to make on the host; it must not exist.")
@click.option("--mapping", metavar="B", help="The mapping that would be used instead: tells what keeping SRC's costs.")
@click.option("--counts", metavar="FILE", help="Token counts on the host: adds coverage.  [default: those in B]")
@click.option("--look-in", multiple=True, metavar="DIR", help="Also search this folder of the host for mappings; repeatable.")
@running
@pass_settings
def command(settings: Settings, /, **given: Any) -> int:
    """Write the drafter SRC's own mapping as d2t.npy and t2d.npy, so that its trainer keeps it.

    The alternative to vocab-remap: no row of the head moves, none is lost. Lists the files around SRC, and in the folders
    of --look-in (data, cache), that trainers would take another mapping from; exit status 1 means that there are some.

    \b
    rdiag vocab-keep drafter --out mapping --mapping /data/run7 \\
        --look-in /data/run7 --look-in /train/cache --host gpu8
    """
    from ..parameters import build
    from ..views.vocab_keep import render
    from .run import execute

    # The options are named after the probe's parameters.
    def params(probe: Probe[Any, Any]) -> Any:
        return build(probe, base=given)

    return execute(settings, "vocab-keep", params, view=render)
