"""``rdiag loss-check``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .options import pass_settings, running
from .run import execute
from .settings import Settings

if TYPE_CHECKING:
    from ..probe import Probe


def numbers(ctx: click.Context, parameter: click.Parameter, given: str | None) -> tuple[float, ...]:
    """Read ``19.2,18.7``; a percent sign divides by 100."""
    found = []
    for text in given.split(",") if given is not None else ():
        plain = text.strip().removesuffix("%")
        try:
            number = float(plain) / (100 if text.strip().endswith("%") else 1)
        except ValueError:
            number = float("nan")
        if number - number != 0:
            raise click.BadParameter(
                f"{text.strip()!r} is no finite number; write them with commas between: 19.2,18.7", ctx=ctx, param=parameter
            )
        found.append(number)
    return tuple(found)


@click.command()
@click.argument("log", required=False)
@click.option("--loss", callback=numbers, metavar="N,N...", help="Losses in order, instead of a log: 19.2,18.7.")
@click.option("--accuracy", callback=numbers, metavar="N,N...", help="Accuracies in order, instead of a log: 0.03,0.05 or 3%,5%.")
@click.option("--draft-vocab-size", type=int, metavar="D", help="Rows of the drafter's head, such as 32000.")
@click.option("--target-vocab-size", type=int, metavar="V", help="Rows of the target's head, such as 163840.")
@click.option("--mask-density", type=float, metavar="SHARE", help="Supervised positions / all positions, 0 to 1.")
@click.option("--ceiling", type=float, metavar="ACC", help="Accuracy that a mapping mismatch leaves; see vocab-compare.")
@click.option("--coverage", type=float, metavar="SHARE", help="Share of training tokens in the draft vocabulary.")
@click.option("--ttt-steps", type=int, metavar="K", help="Steps that training unrolls.")
@click.option("--ttt-decay", type=float, metavar="W", help="Weight of a step relative to the one before.")
@click.option(
    "--loss-is",
    type=click.Choice(["auto", "step", "total"]),
    default="auto",
    show_default=True,
    help="Whether a loss without number is one step's or a sum.",
)
@click.option(
    "--start",
    type=click.Choice(["auto", "fresh", "warm"]),
    default="auto",
    show_default=True,
    help="Whether training began from a trained drafter.",
)
@click.option("--max-points", type=int, metavar="N", help="Points of each series in the result.  [default: 200]")
@running
@pass_settings
def command(settings: Settings, /, log: str | None, **options: Any) -> int:
    """Say what the loss and accuracy of a training mean: LOG is a file on the host, or give numbers.

    \b
    rdiag loss-check run/train.log --host gpu8 --draft-vocab-size 32000
    rdiag loss-check --loss 19.2,18.7 --accuracy 0.03 --draft-vocab-size 32000
    """
    from ..views.loss_check import render

    if log is None and not options["loss"] and not options["accuracy"]:
        raise click.UsageError("give a LOG on the host, or numbers: --loss 19.2,18.7 --accuracy 0.03,0.05")
    values = {name: value for name, value in options.items() if value is not None}
    if log is not None:
        values["path"] = log

    def build(probe: Probe[Any, Any]) -> Any:
        from ..parameters import build as build_params

        return build_params(probe, base=values)

    return execute(settings, "loss-check", build, view=render)
