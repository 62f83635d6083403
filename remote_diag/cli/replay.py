"""``rdiag replay``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .options import pass_settings, running
from .settings import Settings

if TYPE_CHECKING:
    from ..probe import Probe


@click.command()
@click.argument("checkpoint", metavar="CKPT")
@click.argument("samples", metavar="SAMPLE...", nargs=-1, required=True)
@click.option("--target", metavar="MODEL", help="The target model on the host: what drafts are held against.")
@click.option("--mapping", metavar="B", help="Another mapping on the host that the drafter's rows may stand for.")
@click.option(
    "--hypothesis",
    "hypotheses",
    multiple=True,
    metavar="KEY=VALUE,...",
    help="What to try: mapping=A|B, norm=on|off, shift=-1|0|1|2, aux=2-1-0, residual=on|off. May be repeated.  [default: search]",
)
@click.option("--steps", type=click.IntRange(1, 8), default=3, show_default=True, help="Tokens drafted in a row.")
@click.option("--limit", type=click.IntRange(1, 256), default=8, show_default=True, help="Samples to use at most.")
@click.option("--tokens", type=click.IntRange(8, 4096), default=128, show_default=True, help="Tokens of each at most.")
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="cuda refuses while a GPU is busy."
)
@running
@pass_settings
def command(settings: Settings, /, device: str, **given: Any) -> int:
    """Run the drafter CKPT over stored hidden states SAMPLE under several hypotheses, and say which one fits.

    A drafter predicts well only under the mapping, norm, shift and order of layers that it was trained with. Exit status 1
    means that another hypothesis fits than what the files declare, or none.

    \b
    rdiag replay drafter /data/hidden_states --target /models/Kimi-K2.5 \\
        --mapping /data/run7 --host gpu8
    rdiag replay drafter data_0.pt --target target --hypothesis shift=0,norm=off
    """
    from ..parameters import build
    from ..views.replay import render
    from .run import execute

    given["samples"], given["hypotheses"] = list(given["samples"]), list(given["hypotheses"])

    # The options are named after the probe's parameters.
    def params(probe: Probe[Any, Any]) -> Any:
        return build(probe, base=given)

    return execute(settings, "replay" if device == "cpu" else "replay-cuda", params, view=render)
