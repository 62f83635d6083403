"""paramiko and fabric, imported on first use."""

from __future__ import annotations

from typing import Any


def paramiko() -> Any:
    """Return the module."""
    import paramiko as module

    return module


def fabric() -> Any:
    """Return the module."""
    import fabric as module

    return module
