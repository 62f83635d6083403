"""Validated inventories, kept by the hash of what was validated.

Reading one needs neither yaml nor pydantic. Whatever cannot be trusted (see :mod:`remote_diag.private_cache`) counts as
absent, and the inventory is validated again. Entries may hold what hosts.yaml holds, environment variables included.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias

from . import private_cache
from .host import Environment, Host

Contents: TypeAlias = tuple[dict[str, Host], dict[str, tuple[str, ...]]]
"""Hosts and groups, by name."""

_ENTRIES = private_cache.Folder("inventory", b"rdiag inventory 1", kept=8)
_VALIDATORS = (
    "host.py",
    "inventory_cache.py",
    "inventory_fields.py",
    "inventory_models.py",
    "strict_yaml.py",
    "transport/base.py",
)
"""The modules that decide what a file means; an entry made by another version of one of them is not used."""
_FIELDS: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "transport": (str,),
    "ssh": (str, type(None)),
    "address": (str, type(None)),
    "user": (str, type(None)),
    "port": (int, type(None)),
    "identity_file": (str, type(None)),
    "jump": (str, type(None)),
    "known_hosts": (str, type(None)),
    "host_key": (str, type(None)),
    "environment": (list,),
    "workdir": (str, type(None)),
    "env": (list,),
    "gpus": (int, type(None)),
    "cache_dir": (str, type(None)),
    "connect_timeout": (float,),
    "timeout": (float,),
    "lease": (float,),
    "source": (str,),
}
_PATHS = ("identity_file", "known_hosts")


def key(data: bytes, source: str) -> str | None:
    """Return the name of the entry for a file's bytes, or None when nothing can be remembered.

    The bytes alone do not determine the outcome: so do the file's name (it is part of errors and ``source``), the
    home directory (``~``), and the code that validates.
    """
    digest = hashlib.sha256()
    here = Path(__file__).parent
    try:
        stamps = [(here / name).stat() for name in _VALIDATORS]
    except OSError:
        return None
    facts = [source, os.environ.get("HOME", ""), *(f"{stamp.st_size} {stamp.st_mtime_ns}" for stamp in stamps)]
    for part in (*(fact.encode("utf-8", "surrogateescape") for fact in facts), data):
        digest.update(b"%d:" % len(part) + part)
    return digest.hexdigest()


def read(name: str | None) -> Contents | None:
    """Return what was kept as ``name``; None when there is nothing that can be trusted."""
    if name is None:
        return None
    try:
        return _decode(_ENTRIES.read(f"{name}.json"))
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None


def write(name: str | None, contents: Contents) -> None:
    """Keep ``contents`` as ``name``, in one step; where that is impossible, nothing happens."""
    if name is not None:
        # What has no JSON (a name that is no Unicode) is not kept.
        with contextlib.suppress(ValueError):
            _ENTRIES.write(f"{name}.json", _encode(contents))


def _encode(contents: Contents) -> bytes:
    hosts, groups = contents
    return json.dumps({"hosts": [_record(host) for host in hosts.values()], "groups": groups}).encode("ascii")


def _decode(body: bytes) -> Contents:
    stored = json.loads(body)
    if type(stored["groups"]) is not dict:
        raise TypeError("groups are no mapping")
    hosts = [_host(record) for record in stored["hosts"]]
    groups = {name: tuple(_text(member) for member in members) for name, members in stored["groups"].items()}
    return {host.name: host for host in hosts}, groups


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("not text")
    return value


def _record(host: Host) -> dict[str, Any]:
    record = {each.name: getattr(host, each.name) for each in fields(host)}
    for name in _PATHS:
        record[name] = None if record[name] is None else str(record[name])
    record["environment"] = [host.environment.kind, host.environment.value]
    return record


def _host(record: Mapping[str, Any]) -> Host:
    if record.keys() != _FIELDS.keys():
        raise ValueError("other fields than this version has")
    for name, types in _FIELDS.items():
        if type(record[name]) not in types:
            raise ValueError(f"{name} is of another type")
    values = dict(record)
    for name in _PATHS:
        values[name] = None if values[name] is None else Path(values[name])
    kind, value = values["environment"]
    values["environment"] = Environment(kind, _text(value))
    values["env"] = tuple((_text(variable), _text(text)) for variable, text in values["env"])
    return Host(**values)
