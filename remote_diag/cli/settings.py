"""What the common options said; one object travels through a call of the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Settings:
    """Filled by the option callbacks of :mod:`options`."""

    json: bool = False
    verbose: int = 0
    debug: bool = False
    inventory: Path | None = None
    hosts: tuple[str, ...] = ()
    probe_paths: tuple[Path, ...] = field(default=())
    timeout: float | None = None
    keep: bool = False
    force: bool = False
    dry_run: bool = False
    save_baseline: bool = False
