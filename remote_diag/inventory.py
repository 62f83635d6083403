"""hosts.yaml: which file is used, and the hosts and groups in it.

The file is looked for at ``-i/--inventory``, ``RDIAG_HOSTS``, ``./hosts.yaml`` and in the user's configuration folder;
the first one wins and the others are not read. A host called ``local`` always exists. Names are lower-case, because
they become parts of paths on this machine, and file systems differ in whether case matters.

A file that was validated once is remembered by its hash (:mod:`inventory_cache`), so that the next command neither
imports nor runs the validation before its network work starts.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import inventory_cache, paths
from .errors import ConfigError
from .files import read_file
from .host import Environment, Host

ENVIRONMENT_VARIABLE = "RDIAG_HOSTS"
ALL = "all"
"""Stands for every host of the file where hosts and groups are named."""
OWN_PYTHON = Environment("python", sys.executable) if sys.executable else Environment()
"""Environment of this machine unless the file sets another one: what was installed along with rdiag is there."""
BUILT_IN = Host(name="local", transport="local", environment=OWN_PYTHON)
"""Exists without a file, and beside the hosts of a file that has no ``local``; takes none of its defaults."""


@dataclass(frozen=True)
class Found:
    """A place where an inventory is looked for."""

    path: Path | None
    """The file, as it was named; None for the built-in inventory."""
    why: str
    """What makes it the one: ``-i/--inventory``, ``RDIAG_HOSTS``, ``./hosts.yaml`` ..."""
    named: bool = False
    """Whether somebody named it for this call, so that it must exist."""


@dataclass(frozen=True)
class Inventory:
    """Everything that hosts.yaml says, with defaults filled in."""

    path: Path | None = None
    why: str = "built in: no hosts.yaml was found"
    hosts: Mapping[str, Host] = field(default_factory=lambda: {BUILT_IN.name: BUILT_IN})
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """How errors call this inventory."""
        return "the built-in inventory" if self.path is None else str(self.path)

    def host(self, name: str) -> Host:
        """Return the host called ``name``; raises ConfigError, with the nearest names, when there is none."""
        try:
            return self.hosts[name]
        except KeyError:
            if name in self.groups:
                members = ", ".join(self.groups[name])
                raise ConfigError(
                    f"{name!r} is a group, and one host is needed", hint=f"name one of its hosts: {members}"
                ) from None
            raise self._unknown(name, self.hosts, "host") from None

    def expand(self, names: Sequence[str]) -> list[Host]:
        """Return the hosts that ``names`` (hosts, groups, ``all``) stand for, each once, in order of first mention.

        ``all`` is every host of the file; the built-in ``local`` is part of it only when there is no other.
        """
        chosen: dict[str, Host] = {}
        for name in names:
            for member in self._members(name):
                chosen.setdefault(member, self.hosts[member])
        return list(chosen.values())

    def groups_of(self, name: str) -> list[str]:
        """Return the groups that hold the host ``name``."""
        return [group for group, members in self.groups.items() if name in members]

    def _members(self, name: str) -> Iterable[str]:
        if name in self.hosts:
            return (name,)
        if name in self.groups:
            return self.groups[name]
        if name == ALL:
            written = [host for host in self.hosts if self.hosts[host] is not BUILT_IN]
            return written or self.hosts
        raise self._unknown(name, (*self.hosts, *self.groups), "host or group")

    def _unknown(self, name: str, known: Iterable[str], what: str) -> ConfigError:
        from difflib import get_close_matches

        candidates = list(known)
        near = get_close_matches(name[:200].lower(), candidates, n=1)
        if near:
            hint = f"did you mean {near[0]}?"
        else:
            shown = ", ".join(candidates[:12]) + (", ..." if len(candidates) > 12 else "")
            hint = f"known are: {shown}\n`rdiag hosts` shows the inventory"
        return ConfigError(f"there is no {what} called {name[:200]!r} in {self.title}", hint=hint)


def candidates(explicit: Path | None = None) -> Iterator[Found]:
    """Yield the places where an inventory is looked for, in order; whether they exist is not asked."""
    if explicit is not None:
        yield Found(_expanded(explicit), "-i/--inventory", named=True)
    variable = os.environ.get(ENVIRONMENT_VARIABLE)
    if variable:
        yield Found(_expanded(Path(variable)), ENVIRONMENT_VARIABLE, named=True)
    yield Found(paths.working_inventory(), "./hosts.yaml")
    yield Found(paths.user_inventory(), "the user's configuration folder")


def find(explicit: Path | None = None) -> Found:
    """Return the inventory to use: the first place that was named or that exists, else the built-in one."""
    for place in candidates(explicit):
        if place.path is not None and (place.named or os.path.lexists(place.path)):
            return place
    return Found(None, Inventory().why)


def overlooked(explicit: Path | None = None) -> list[Found]:
    """Return the inventories that exist and are not used, because an earlier place won."""
    present = [
        place for place in candidates(explicit) if place.path is not None and (place.named or os.path.lexists(place.path))
    ]
    return [place for place in present[1:] if not _same(place.path, present[0].path)]


def _same(one: Path | None, other: Path | None) -> bool:
    try:
        return one is not None and other is not None and one.samefile(other)
    except (OSError, ValueError):
        return False


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def load(explicit: Path | None = None) -> Inventory:
    """Find, read and validate the inventory.

    Args:
        explicit: the file that the user named, if any.

    Raises:
        ConfigError: the file is missing though it was named, cannot be read, or is invalid; the message names
            file, line and column.
    """
    found = find(explicit)
    if found.path is None:
        return Inventory()
    if not found.named:
        _require_ours(found.path)
    try:
        data = read_file(found.path)
    except ConfigError as error:
        if found.named and not os.path.lexists(found.path):
            raise _missing(found) from None
        raise ConfigError(f"{error.message} (it was chosen by {found.why})", hint=error.hint) from None
    source = str(found.path)
    key = inventory_cache.key(data, source)
    contents = inventory_cache.read(key)
    if contents is None:
        # Imported here: yaml and pydantic take longer than everything else before the network work.
        from .inventory_models import parse
        from .strict_yaml import load as load_yaml

        contents = parse(load_yaml(data, source=source))
        inventory_cache.write(key, contents)
    hosts, groups = contents
    hosts = {name: _with_own_python(host) for name, host in hosts.items()}
    return Inventory(found.path, found.why, {**_built_in_unless(hosts), **hosts}, groups)


def _with_own_python(host: Host) -> Host:
    # Done here and not when the file is parsed: what is remembered must not depend on who read it.
    if host.transport == "local" and host.environment.kind == "default":
        return replace(host, environment=OWN_PYTHON)
    return host


def _built_in_unless(hosts: Mapping[str, Host]) -> dict[str, Host]:
    return {} if BUILT_IN.name in hosts else {BUILT_IN.name: BUILT_IN}


def _missing(found: Found) -> ConfigError:
    hint = "check the path"
    if found.why == ENVIRONMENT_VARIABLE:
        hint = f"{ENVIRONMENT_VARIABLE} names a file; to name a host, use --host or RDIAG_HOST"
    return ConfigError(f"{found.path}: there is no such file; it was named by {found.why}", hint=hint)


def _require_ours(path: Path) -> None:
    """Refuse a file that somebody else may have put in our way: it says what is run on this machine.

    Only for files that nobody named: ``./hosts.yaml`` in a shared folder such as /tmp, above all.
    """
    hint = f"if you trust it, name it: rdiag -i {path}"
    try:
        status, folder = path.stat(), path.absolute().parent.stat()
    except (OSError, ValueError):
        return  # read_file explains
    if not stat.S_ISREG(status.st_mode):
        return
    if status.st_mode & stat.S_IWOTH:
        raise ConfigError(f"{path}: everybody may write to this file", hint=f"chmod o-w {path}\n{hint}")
    if status.st_uid not in {os.geteuid(), 0} and folder.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"{path}: belongs to another user (uid {status.st_uid}), in a folder that everybody may write to", hint=hint
        )
