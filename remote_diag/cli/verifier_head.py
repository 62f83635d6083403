"""``rdiag verifier-head``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .options import pass_settings, running
from .settings import Settings

if TYPE_CHECKING:
    from ..probe import Probe


@click.command()
@click.argument("drafter", metavar="CKPT")
@click.option("--target", required=True, metavar="MODEL", help="The target model on the host: a folder with its lm_head.")
@click.option("--mapping", metavar="PATH", help="Another mapping on the host that the head may follow.")
@click.option("--previous", metavar="CKPT", help="The drafter that this one was started from.")
@click.option("--counts", metavar="FILE", help="Token counts on the host: also tries the order of frequency.")
@click.option("--seed", type=int, default=0, show_default=True, help="For the rows that are sampled.")
@running
@pass_settings
def command(settings: Settings, /, **given: Any) -> int:
    """Say which mapping the head of the drafter CKPT follows, by holding it against the target's head.

    Rows are compared bit for bit, by direction, and by their neighbourhood. Exit status 1 means that the head follows
    another mapping than the checkpoint has, or that its rows are not the target's where they should be.

    \b
    rdiag verifier-head /models/drafter --target /models/Kimi-K2.5 --host gpu8
    rdiag verifier-head run7/3 --target target --mapping a --previous drafter-a
    """
    from ..parameters import build
    from ..views.verifier_head import render
    from .run import execute

    # The options are named after the probe's parameters.
    def params(probe: Probe[Any, Any]) -> Any:
        return build(probe, base=given)

    return execute(settings, "verifier-head", params, view=render)
