"""``rdiag vocab-compare``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import pass_settings, running
from .picture import Picture, plot_option
from .settings import Settings

if TYPE_CHECKING:
    from ..probe import Probe

_ENCODINGS = click.Choice(["auto", "offset", "absolute"])


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--counts", metavar="FILE", help="Token counts on the host (.npy, .npz, token_freq.pt): adds shares of text.")
@click.option(
    "--first", type=click.IntRange(0, 1000), default=20, show_default=True, metavar="N", help="How many rows to show."
)
@click.option("--encoding-a", type=_ENCODINGS, default="auto", help="What d2t of A holds, where no file tells.")
@click.option("--encoding-b", type=_ENCODINGS, default="auto", help="What d2t of B holds, where no file tells.")
@click.option("--accuracy", type=click.FloatRange(0, 1), metavar="X", help="Accuracy of the drafter under A: scales the ceiling.")
@click.option("--tokenizer", metavar="PATH", help="Tokenizer on the host, for the texts of tokens.  [default: beside A or B]")
@click.option(
    "--top", type=click.IntRange(0, 1000), default=10, show_default=True, metavar="N",
    help="How many tokens to show that only one of them has.",
)  # fmt: skip
@plot_option("Also draw it")
@running
@pass_settings
def command(settings: Settings, /, plot: Path | None, **given: Any) -> int:
    """Compare the draft vocabularies of two EAGLE-3 checkpoints A and B.

    A is the mapping that the drafter's head was trained with, B the one it is used with: files or folders on the host
    (safetensors; .bin and .pt of torch; both also sharded; d2t.npy with t2d.npy; .npz). Only the mapping is read, never the whole checkpoint. Exit
    status 1 means that they differ.

    \b
    rdiag vocab-compare /models/drafter /data/run7 --host gpu8
    rdiag vocab-compare a.npz b.npz --counts b.npz --json
    rdiag vocab-compare a.npz b.npz --tokenizer /models/target --plot shift.html
    rdiag vocab-compare -- -odd-name other
    """
    from ..parameters import build
    from ..views.vocab_compare import render
    from ..views.vocab_picture import POINTS, draw
    from .run import execute

    picture = None if plot is None else Picture(plot, draw)

    # The options are named after the probe's parameters.
    def params(probe: Probe[Any, Any]) -> Any:
        return build(probe, base={**given, "points": POINTS if picture else 0})

    return execute(settings, "vocab-compare", params, view=render, then=picture)
