"""``rdiag hidden-states``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .options import pass_settings, running
from .settings import Settings

if TYPE_CHECKING:
    from ..probe import Probe


@click.command()
@click.argument("samples", metavar="SAMPLE...", nargs=-1, required=True)
@click.option("--target", metavar="MODEL", help="The target model on the host; without it most cannot be told.")
@click.option("--serving", metavar="DUMP", help="Hidden states of the same tokens out of the serving engine.")
@click.option("--dataset", metavar="FILE", help="The tokenized dataset as JSON lines (input_ids, loss_mask).")
@click.option("--drafter", metavar="CKPT", help="A drafter: its layer ids, fc and flags are held against the samples.")
@click.option("--layers", metavar="N,N,N", help="Layers whose inputs the aux states should be.  [default: the drafter's]")
@click.option(
    "--trainer-norm",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
    show_default=True,
    help="Whether the trainer applies the final norm.",
)
@click.option("--limit", type=click.IntRange(1, 1024), default=16, show_default=True, help="Samples to read at most.")
@click.option("--positions", type=click.IntRange(16, 8192), default=256, show_default=True, help="Tokens to ask the head about.")
@click.option("--seed", type=click.IntRange(0, (1 << 32) - 1), default=0, show_default=True, help="For their choice.")
@running
@pass_settings
def command(settings: Settings, /, layers: str | None, **given: Any) -> int:
    """Find out what is wrong with stored hidden states: files or folders on the host, of any trainer.

    Thirteen mismatches are looked for, each with the number that shows it: normed or not, wrong or shuffled layers, shifted
    tokens, empty masks, NaN, widths, differences to serving. Exit status 1 means that one was found.

    \b
    rdiag hidden-states /data/hidden_states --target /models/Kimi-K2.5 --host gpu8
    rdiag hidden-states data_0.pt data_1.pt --target target --serving dump
    """
    from ..parameters import build
    from ..views.hidden_states import render
    from .run import execute

    if layers is not None:
        try:
            given["layers"] = [int(layer) for layer in layers.split(",")]
        except ValueError:
            raise click.BadParameter("numbers with commas between them, as in 2,30,58", param_hint="--layers") from None
    given["samples"] = list(given["samples"])

    # The options are named after the probe's parameters.
    def params(probe: Probe[Any, Any]) -> Any:
        return build(probe, base=given)

    return execute(settings, "hidden-states", params, view=render)
