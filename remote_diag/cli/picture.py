"""``--plot FILE``: the option, and what draws an outcome into that file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from .options import CommandT

if TYPE_CHECKING:
    from ..outcome import Outcome

Draw: TypeAlias = "Callable[[Outcome[Any], Path], bytes]"
"""Returns the contents of a picture for a file of that name; raises ValueError, in words, where there is nothing to draw."""


def plot_option(what: str) -> Callable[[CommandT], CommandT]:
    """Give a command ``plot``, the file that is drawn into or None; ``what`` it shows, for the help."""
    return click.option(
        "--plot",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help=f"{what}: a .html, .svg or .png file here.",
    )


class Picture:
    """Draws what comes back; with several hosts, one file for each.

    Args:
        path: where to.
        draw: makes the contents.

    Raises:
        UsageProblem: nothing can be drawn there; said before anything else is done.
    """

    def __init__(self, path: Path, draw: Draw) -> None:
        from ..views.plotting import check

        check(path)
        self._path = path
        self._draw = draw

    def __call__(self, outcome: Outcome[Any], *, alone: bool) -> None:
        """Draw one outcome; ``alone``: whether it is the only one."""
        from ..views.plotting import store
        from .parse import NO_HOST

        path = self._path if alone else self._path.with_name(f"{self._path.stem}-{outcome.host}{self._path.suffix}")
        try:
            data = self._draw(outcome, path)
        except ValueError as error:
            host = "" if outcome.host == NO_HOST else f"{outcome.host}: "
            click.echo(f"rdiag: {host}{path} is not drawn: {error}", err=True)
            return
        store(path, data)
