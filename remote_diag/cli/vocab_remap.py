"""``rdiag vocab-remap``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .options import pass_settings, running
from .settings import Settings

if TYPE_CHECKING:
    from ..probe import Probe

_ENCODINGS = click.Choice(["auto", "offset", "absolute"])


@click.command()
@click.argument("source", metavar="SRC")
@click.option("--mapping", required=True, metavar="B", help="The mapping that the drafter shall have: file or folder on the host.")
@click.option("--out", required=True, metavar="DIR", help="The folder to make on the host; it must not exist.")
@click.option(
    "--missing",
    type=click.Choice(["verifier", "verifier-scaled", "mean", "random"]),
    default="verifier-scaled",
    show_default=True,
    help="How to make rows for tokens that SRC has none for.",
)
@click.option("--verifier", metavar="MODEL", help="The target model on the host, whose head gives those rows.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="For random rows.")
@click.option("--counts", metavar="FILE", help="Token counts on the host: adds shares of text.  [default: those in B]")
@click.option("--head-mapping", metavar="A", help="The mapping that SRC's head really follows, where its d2t is not that.")
@click.option("--encoding-source", type=_ENCODINGS, default="auto", help="What d2t of SRC holds, where no file tells.")
@click.option("--encoding-mapping", type=_ENCODINGS, default="auto", help="What d2t of B holds, where no file tells.")
@running
@pass_settings
def command(settings: Settings, /, **given: Any) -> int:
    """Write the drafter SRC under the mapping B as a new folder: rows of lm_head moved by token id.

    d2t, t2d and config.json change with them; every other tensor stays as it is, bit for bit. SRC is only read, nothing
    is overwritten, and what was written is read again and compared before it gets its name.

    \b
    rdiag vocab-remap drafter --mapping /data/run7 --out drafter-run7 \\
        --verifier /models/Kimi-K2.5 --host gpu8
    rdiag vocab-remap drafter --mapping b.npz --out remapped --missing mean
    # trained on under another mapping, while the head kept its rows:
    rdiag vocab-remap run7/3 --head-mapping drafter --mapping run7/3 --out fixed
    """
    from ..parameters import build
    from ..views.vocab_remap import render
    from .run import execute

    # The options are named after the probe's parameters.
    def params(probe: Probe[Any, Any]) -> Any:
        return build(probe, base=given)

    return execute(settings, "vocab-remap", params, view=render)
