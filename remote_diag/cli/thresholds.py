"""``--thresholds FILE``: a user's own numbers in the place of the shipped ones, checked before anything is contacted."""

from __future__ import annotations

from pathlib import Path

import click

thresholds_option = click.option(
    "--thresholds",
    "thresholds_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="YAML or JSON with thresholds of your own, such as gpu.temperature_c: 85 or nccl.ok_ratio: 0.95.",
)
"""Gives the command ``thresholds_file``, for :func:`read_overrides`."""


def read_overrides(path: Path | None) -> dict[str, float]:
    """Return the thresholds in a user's file, by name; none for None.

    The file maps names of thresholds.json to numbers; ``gpu: {temperature_c: 85}`` is the same as
    ``gpu.temperature_c: 85``.

    Raises:
        ConfigError: with ``file:line:column``: an unknown name, or a value that is no number.
    """
    if path is None:
        return {}
    from ..strict_yaml import load_file
    from .parse import provide_probe_code

    provide_probe_code()
    from probes.lib.gpu.thresholds import Thresholds

    document = load_file(path)
    if not isinstance(document.data, dict):
        raise document.error((), "a mapping of thresholds is expected", hint="write, for example, gpu.temperature_c: 85")
    found: dict[str, float] = {}
    for name, value in document.data.items():
        nested = value if isinstance(value, dict) else None
        for below, number in {None: value}.items() if nested is None else nested.items():
            full = name if below is None else f"{name}.{below}"
            where = (name,) if below is None else (name, below)
            try:
                Thresholds({full: number})  # type: ignore[dict-item]
            except ValueError as error:
                raise document.error(where, str(error), hint="the names and their units are in thresholds.json") from None
            if full in found:
                raise document.error(where, f"{full} stands here twice", hint="keep one of them")
            found[full] = float(number)  # type: ignore[arg-type]
    try:
        Thresholds(found)
    except ValueError as error:
        raise document.error((), str(error), hint="the names and their units are in thresholds.json") from None
    return found
