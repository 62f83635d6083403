"""The help of every command fits a terminal of 80 columns."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from remote_diag.cli.entry import COMMANDS

DOCTOR = ("drafter-check", "hidden-states", "loss-check", "replay", "triage", "vocab-compare", "vocab-keep", "vocab-remap", "verifier-head")


def test_what_is_looked_at_exists() -> None:
    assert set(DOCTOR) <= set(COMMANDS)


@pytest.mark.parametrize("name", [*DOCTOR, "nccl", "p2p"])
def test_no_line_is_wider_than_a_terminal(name: str) -> None:
    from importlib import import_module

    command: click.Command = import_module(f"remote_diag.cli.{COMMANDS[name][0]}").command
    shown = CliRunner().invoke(command, ["--help"], terminal_width=80, max_content_width=80).output
    assert shown.startswith("Usage:")
    assert [line for line in shown.splitlines() if len(line) > 80] == []
