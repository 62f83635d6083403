"""``rdiag new-probe``: write a small working probe, and its test."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import click

from ..exitcodes import ExitCode
from .options import common, pass_settings
from .settings import Settings


@click.command()
@click.argument("name")
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("probes"),
    show_default=True,
    help="The folder for the probe; its test goes into the folder tests beside it.",
)
@common
@pass_settings
def command(settings: Settings, name: str, directory: Path) -> int:
    """Write a small working probe called NAME, and its test. Nothing is overwritten.

    \b
    rdiag new-probe link-speed
    """
    from ..outcome import SCHEMA_VERSION
    from ..paths import user_probes
    from ..scaffold import create
    from .output import print_json

    written = create(name, directory)
    if settings.json:
        print_json(
            {
                "schema_version": SCHEMA_VERSION,
                "name": written.name,
                "probe": str(written.probe),
                "test": str(written.test),
            }
        )
        return int(ExitCode.OK)
    found_by_name = directory.resolve() == user_probes().resolve()
    handle = written.name if found_by_name else shlex.quote(str(written.probe))
    missing = "" if find_spec("pytest") else "   # pip install pytest first"
    lines = (
        f"wrote {written.probe}",
        f"wrote {written.test}",
        "",
        "next:",
        f"  rdiag run {handle}",
        f"  rdiag probes {handle}",
        f"  {shlex.quote(sys.executable)} -m pytest {shlex.quote(str(written.test))}{missing}",
    )
    sys.stdout.write("\n".join(lines) + "\n")
    return int(ExitCode.OK)
