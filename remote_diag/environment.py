"""Host -> what enters its environment: one constant shell script, and data files that it reads.

The script never changes from host to host. Paths and names from hosts.yaml stand in files beside it, one value a
line, and are read with ``read -r`` into quoted variables: data for the script, never part of it.
"""

from __future__ import annotations

from .agent.layout import CONDA, CONTAINER, ENTER, PYTHON_CANDIDATES, VENV
from .errors import ConfigError
from .host import Environment
from .paths import entry_script

DEFAULT_PYTHONS = ("python3", "python", "/usr/bin/python3", "/usr/local/bin/python3", "/opt/conda/bin/python3")
"""Tried in this order on a host whose environment is not set; names are looked up on the login PATH."""

ENTRY_FAILURES: dict[str, str] = {
    "no-python": "no Python interpreter was found",
    "no-venv": "the virtual environment has no bin/python",
    "no-conda": "the conda environment was not found",
    "no-docker": "there is no docker command on the host, or its daemon does not answer",
    "no-container": "the container does not exist or is not running",
    "no-container-copy": "the agent could not be copied into the container (is there a tar in it, and room?)",
}
"""What the entry script can say instead of starting the agent, by frame kind."""


def _line(value: str, what: str) -> bytes:
    if not value or "\n" in value or "\0" in value:
        raise ConfigError(f"{what} {value!r} cannot be used: it must be one non-empty line")
    return value.encode("utf-8", "surrogateescape") + b"\n"


def entry_files(environment: Environment) -> dict[str, bytes]:
    """Return the files that enter ``environment``, by name in the bundle; raises ConfigError for bad values."""
    script = entry_script().read_bytes()
    files = {ENTER: script}
    value = environment.value
    if environment.kind == "conda":
        files[CONDA] = _line(value, "conda environment")
    elif environment.kind == "venv":
        files[VENV] = _line(value, "venv")
    elif environment.kind == "python":
        files[PYTHON_CANDIDATES] = _line(value, "python")
    else:
        files[PYTHON_CANDIDATES] = b"".join(_line(name, "python") for name in DEFAULT_PYTHONS)
    if environment.kind == "docker":
        files[CONTAINER] = _line(value, "container")
    return files


def explain(kind: str, environment: Environment) -> tuple[str, str]:
    """Return (message, hint) for the entry failure ``kind`` on a host with ``environment``."""
    reason = ENTRY_FAILURES[kind]
    if environment.kind == "venv":
        return (
            f"{reason}: {environment.value}/bin/python",
            f"on the host: python3 -m venv {environment.value}\nor correct environment: {{venv: ...}} in hosts.yaml",
        )
    if environment.kind == "python":
        return f"{reason}: {environment.value}", "correct environment: {python: ...} in hosts.yaml"
    if environment.kind == "conda":
        return (
            f"{reason}: {environment.value}",
            "list them on the host with: conda env list\nthen set environment: {conda: /path/of/the/prefix} in hosts.yaml",
        )
    if environment.kind == "docker":
        return f"{reason}: {environment.value}", "see what runs there with: docker ps"
    return (
        f"{reason}; tried {', '.join(DEFAULT_PYTHONS)}",
        "install Python 3.8 or newer on the host, or set environment: {python: /path/to/python3} in hosts.yaml",
    )
