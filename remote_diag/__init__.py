"""Safe diagnostics for GPU hosts: probes travel as files, run in the host's environment, and answer typed results.

::

    import remote_diag

    with remote_diag.connect("gpu8") as host:
        outcome = host.run("vocab-compare", {"a": "/data/old", "b": "/data/new"})
        print(outcome.status, outcome.result.positional_matches)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from collections.abc import Callable

    from .errors import RdiagError as RdiagError
    from .events import Event
    from .findings import Finding as Finding
    from .host import Host as Host
    from .outcome import Outcome as Outcome
    from .probe import Context as Context
    from .probe import Probe as Probe
    from .session import Session as Session

__all__ = ["Context", "Finding", "Host", "Outcome", "Probe", "RdiagError", "Session", "__version__", "connect", "load_probe"]

_HOME = {
    "Context": "probe",
    "Finding": "findings",
    "Host": "host",
    "Outcome": "outcome",
    "Probe": "probe",
    "RdiagError": "errors",
    "Session": "session",
}


def connect(
    host: str | Host, *, inventory: Path | str | None = None, on_event: Callable[[Event], None] | None = None
) -> Session:
    """Return a session with ``host``; use it in a ``with`` statement, which connects and closes it.

    Args:
        host: a name in the inventory (``local`` always exists), or a Host.
        inventory: a hosts.yaml; by default the one that ``rdiag hosts`` would show.
        on_event: called with progress, log bytes and notes while a probe runs.

    Raises:
        ConfigError: the inventory is invalid, or has no such host.
    """
    from .host import Host as _Host
    from .inventory import load
    from .session import Session as _Session

    if not isinstance(host, _Host):
        host = load(None if inventory is None else Path(inventory)).host(host)
    return _Session(host, on_event=on_event)


def load_probe(name: str | Path) -> Probe:  # type: ignore[type-arg]
    """Return the probe called ``name``, shipped or in ``./probes``, or the one in the file ``name``."""
    from .discovery import find

    return find(str(name))


def __getattr__(name: str) -> object:
    # Importing the package stays cheap: the command line starts its network work before the heavy imports.
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
