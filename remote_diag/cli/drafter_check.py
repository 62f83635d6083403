"""``rdiag drafter-check``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .options import pass_settings, running
from .settings import Settings

if TYPE_CHECKING:
    from ..probe import Probe


@click.command()
@click.argument("drafter", metavar="CKPT")
@click.option("--target", metavar="MODEL", help="The target model's folder on the host: adds all checks against it.")
@click.option(
    "--encoding",
    type=click.Choice(["auto", "offset", "absolute"]),
    default="auto",
    help="What d2t holds, where no file tells.",
)
@click.option("--near", multiple=True, metavar="DIR", help="A folder to search for stale mappings; may be repeated.")
@click.option("--seed", type=int, default=0, show_default=True, help="For the rows that are sampled.")
@running
@pass_settings
def command(settings: Settings, /, **given: Any) -> int:
    """Check the checkpoint CKPT of a drafter, on its own or against its target.

    Looks for everything that breaks a drafter without an error: mappings never loaded, rounded or contradicting
    themselves, empty or repeated rows, missing tensors, layer ids of the other convention, forgotten norms, random
    embeddings, special tokens it cannot propose, stale mappings nearby. Exit status 1 means that something is wrong.

    \b
    rdiag drafter-check /models/drafter --host gpu8
    rdiag drafter-check drafter --target Kimi-K2.5 --near /data/run7 --json
    """
    from ..parameters import build
    from ..views.drafter_check import render
    from .run import execute

    # The options are named after the probe's parameters.
    def params(probe: Probe[Any, Any]) -> Any:
        return build(probe, base=given)

    return execute(settings, "drafter-check", params, view=render)
