"""``rdiag hosts``: the inventory, and which file it came from."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from .. import paths
from ..exitcodes import ExitCode
from ..redaction import shown_environment
from ..text import safe
from .options import common, pass_settings
from .settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from ..host import Host
    from ..inventory import Inventory


def _complete_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001
    from ..inventory import load

    try:
        return sorted(name for name in load(ctx.params.get("inventory")).hosts if name.startswith(incomplete))
    except Exception:  # noqa: BLE001 - a completion must never print
        return []


@click.command()
@click.argument("name", required=False, shell_complete=_complete_names)
@click.option("--example", is_flag=True, help="Print a sample hosts.yaml to start from.")
@common
@pass_settings
def command(settings: Settings, name: str | None, *, example: bool) -> int:
    """Show the hosts of the inventory, or everything about the host NAME. Contacts nothing.

    \b
    rdiag hosts
    rdiag hosts gpu8
    rdiag hosts --example > my-hosts.yaml
    """
    if example:
        # Before anything is read: the shell has already created the file that this is written to.
        sys.stdout.write(paths.shipped_inventory().read_text(encoding="utf-8"))
        return int(ExitCode.OK)
    from ..inventory import load, overlooked
    from .output import print_json, show

    inventory = load(settings.inventory)
    lost = [(str(place.path.absolute()), place.why) for place in overlooked(settings.inventory) if place.path]
    chosen = list(inventory.hosts.values()) if name is None else [inventory.host(name)]
    if settings.json:
        print_json(_as_dict(inventory, chosen, lost))
        return int(ExitCode.OK)
    for line in _origin(inventory, lost):
        sys.stdout.write(f"{safe(line)}\n")
    show(_table(inventory) if name is None else _details(inventory, chosen[0]))
    return int(ExitCode.OK)


def _origin(inventory: Inventory, lost: Iterable[tuple[str, str]]) -> list[str]:
    if inventory.path is None:
        return [f"inventory  {inventory.why}; `rdiag hosts --example` prints one to start from"]
    return [
        f"inventory  {inventory.path.absolute()}  (from {inventory.why})",
        *(f"not read   {path}  (from {why})" for path, why in lost),
    ]


def _as_dict(inventory: Inventory, hosts: list[Host], lost: Iterable[tuple[str, str]]) -> dict[str, Any]:
    from ..outcome import SCHEMA_VERSION

    return {
        "schema_version": SCHEMA_VERSION,
        "inventory": {
            "path": None if inventory.path is None else str(inventory.path.absolute()),
            "why": inventory.why,
            "not_read": [{"path": path, "why": why} for path, why in lost],
        },
        "hosts": [{**_fields(host), "groups": inventory.groups_of(host.name)} for host in hosts],
        "groups": {name: list(members) for name, members in inventory.groups.items()},
    }


def _fields(host: Host) -> dict[str, Any]:
    """Return every field as JSON has it; ``environment`` as in hosts.yaml, None for the default."""
    from dataclasses import fields

    values: dict[str, Any] = {each.name: getattr(host, each.name) for each in fields(host)}
    for name in ("identity_file", "known_hosts"):
        values[name] = None if values[name] is None else str(values[name])
    kind = host.environment.kind
    values["environment"] = None if kind == "default" else {kind: host.environment.value}
    values["env"] = shown_environment(host.env)
    return values


def target(host: Host) -> str:
    """Return who is connected to, for people: ``root@203.0.113.7:22``, ``ssh alias``, ``this machine``."""
    if host.transport == "local":
        return "this machine"
    where = host.ssh or host.address or ""
    if host.port is not None:
        where = f"[{where}]:{host.port}" if ":" in where else f"{where}:{host.port}"
    return f"{host.user}@{where}" if host.user else where


def _table(inventory: Inventory) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table("host", "transport", "target", "environment", "GPUs", "groups", box=None, pad_edge=False)
    for host in inventory.hosts.values():
        environment = f"{host.environment.kind} {host.environment.value}".strip()
        cells = (
            host.name,
            host.transport,
            target(host),
            environment,
            "" if host.gpus is None else str(host.gpus),
            ", ".join(inventory.groups_of(host.name)),
        )
        table.add_row(*(Text(safe(cell), overflow="fold") for cell in cells))
    return table


def _details(inventory: Inventory, host: Host) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    values = {**_fields(host), "groups": inventory.groups_of(host.name)}
    for name, value in values.items():
        for index, line in enumerate(_lines(value)):
            table.add_row(Text("" if index else name), Text(safe(line), overflow="fold"))
    return table


def _lines(value: Any) -> list[str]:
    if value is None or value in ({}, []):
        return ["-"]
    if isinstance(value, dict):
        return [f"{key}: {below}" for key, below in value.items()]
    if isinstance(value, list):
        return [", ".join(value)]
    return [f"{value:g} s"] if isinstance(value, float) else [str(value)]
