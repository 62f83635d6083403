"""One host as the rest of rdiag sees it: resolved from the inventory, immutable, plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

EnvironmentKind = Literal["default", "python", "venv", "conda", "docker"]


@dataclass(frozen=True)
class Environment:
    """Where probes run: which Python, and what surrounds it.

    ``value`` is a path (``python``, ``venv``), a name or prefix (``conda``), a container (``docker``), and empty
    for ``default`` (the first ``python3`` on the login PATH).
    """

    kind: EnvironmentKind = "default"
    value: str = ""


@dataclass(frozen=True)
class Host:
    """A host of the inventory; every default is filled in. Times are seconds."""

    name: str
    transport: Literal["ssh", "local"] = "ssh"
    ssh: str | None = None
    """Alias for ``ssh -G``; then user, port and so on come from there unless set here."""
    address: str | None = None
    user: str | None = None
    port: int | None = None
    identity_file: Path | None = None
    jump: str | None = None
    """``[user@]host[:port]``, several separated by commas, as ProxyJump has them."""
    known_hosts: Path | None = None
    """Read instead of the files that ssh would read."""
    host_key: str | None = None
    """Pinned key: ``SHA256:...`` or ``<type> <base64>``; then no file is read."""
    environment: Environment = field(default_factory=Environment)
    workdir: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    gpus: int | None = None
    """How many GPUs this host should have."""
    cache_dir: str | None = None
    """Where rdiag keeps its files on the host; inside the safe class, relative to the login directory or absolute."""
    connect_timeout: float = 10.0
    timeout: float = 600.0
    """Deadline of one probe run."""
    lease: float = 30.0
    """How long the agent goes on without hearing from the client."""
    source: str = "built in"
    """Where this entry stands, ``file:line``."""
