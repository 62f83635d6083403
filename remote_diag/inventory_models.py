"""The models of hosts.yaml, and how a document becomes hosts and groups.

Every problem is reported at its line and column with a likely correction; the first one is the error, the others are
its details. Imported only when a file was not validated before: see :mod:`inventory_cache`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from . import inventory_fields as checked
from .errors import ConfigError
from .host import Environment, EnvironmentKind, Host
from .inventory_cache import Contents
from .strict_yaml import Document, Key

_MAX_DETAILS = 6


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class EnvironmentModel(_Model):
    """Where probes run; exactly one of these."""

    python: checked.Python | None = None
    venv: checked.Venv | None = None
    conda: checked.Conda | None = None
    docker: checked.Container | None = None


class DefaultsModel(_Model):
    """Fields that a host takes over unless it has its own; ``env`` is merged, the host's values win."""

    user: checked.User | None = None
    port: checked.Port | None = None
    identity_file: checked.LocalPath | None = None
    jump: checked.Jump | None = None
    known_hosts: checked.LocalPath | None = None
    environment: EnvironmentModel | None = None
    workdir: checked.RemotePath | None = None
    env: dict[checked.EnvName, checked.EnvValue] = {}
    gpus: checked.Gpus | None = None
    cache_dir: checked.CacheDir | None = None
    connect_timeout: checked.ConnectTimeout | None = None
    timeout: checked.Timeout | None = None
    lease: checked.Lease | None = None


class HostModel(DefaultsModel):
    """One host."""

    transport: Literal["ssh", "local"] = "ssh"
    ssh: checked.Alias | None = None
    address: checked.Address | None = None
    host_key: checked.HostKey | None = None


class InventoryModel(_Model):
    """The whole file."""

    defaults: DefaultsModel = DefaultsModel()
    hosts: dict[checked.Name, HostModel] = {}
    groups: dict[checked.Name, list[str]] = {}


_SSH_ONLY = ("ssh", "address", "user", "port", "identity_file", "jump", "known_hosts", "host_key")
_ENVIRONMENT_KINDS: tuple[EnvironmentKind, ...] = ("python", "venv", "conda", "docker")
_FIELDS_OF = {
    "file": tuple(InventoryModel.model_fields),
    "defaults": tuple(DefaultsModel.model_fields),
    "host": ("transport", "ssh", "address", "host_key", *DefaultsModel.model_fields),
    "environment": _ENVIRONMENT_KINDS,
}
_OTHER_NAMES = {
    "hostname": "address",
    "host_name": "address",
    "host": "address",
    "ip": "address",
    "alias": "ssh",
    "ssh_alias": "ssh",
    "username": "user",
    "login": "user",
    "identityfile": "identity_file",
    "key": "identity_file",
    "ssh_key": "identity_file",
    "key_file": "identity_file",
    "private_key": "identity_file",
    "proxyjump": "jump",
    "proxy_jump": "jump",
    "jump_host": "jump",
    "hostkey": "host_key",
    "fingerprint": "host_key",
    "userknownhostsfile": "known_hosts",
    "known_hosts_file": "known_hosts",
    "cwd": "workdir",
    "working_directory": "workdir",
    "directory": "workdir",
    "gpu": "gpus",
    "gpu_count": "gpus",
    "cache": "cache_dir",
    "connecttimeout": "connect_timeout",
    "deadline": "timeout",
    "type": "transport",
    "connection": "transport",
    "virtualenv": "venv",
    "interpreter": "python",
    "container": "docker",
}


@dataclass(frozen=True)
class _Problem:
    """Something wrong in the file."""

    path: tuple[Key, ...]
    message: str
    hint: str | None = None
    key: bool = False
    """Whether the place of the key is meant rather than its value's."""
    subject: tuple[Key, ...] | None = None
    """What the message is about, where that is not ``path`` itself."""


def parse(document: Document) -> Contents:
    """Validate a document and return its hosts and groups, in the order of the file.

    Raises:
        ConfigError: with the first problem at ``file:line:column``, and the others as details.
    """
    if document.data is None:
        raise document.error((), "the file holds nothing", hint=_EXAMPLE)
    if not isinstance(document.data, dict):
        raise document.error((), "the file must begin with hosts:", hint=_EXAMPLE)
    problems = list(_empty_values(document))
    model: InventoryModel | None = None
    if not problems:
        try:
            model = InventoryModel.model_validate(_prepared(document))
        except ValidationError as error:
            problems = [_explain(document, each) for each in error.errors()]
        else:
            problems = [*_host_problems(model), *_group_problems(model)]
    if problems or model is None:
        raise _error(document, problems)
    hosts = {name: _host(document, name, host, model.defaults) for name, host in model.hosts.items()}
    return hosts, {name: tuple(members) for name, members in model.groups.items()}


_EXAMPLE = "the smallest useful file is:\nhosts:\n  gpu8: {address: 203.0.113.7, user: root}"


def _error(document: Document, problems: Sequence[_Problem]) -> ConfigError:
    ordered = sorted(problems, key=lambda problem: document.position(problem.path, key=problem.key))
    first, *others = ordered
    more = f" (and {len(others)} more)" if others else ""
    return ConfigError(
        f"{document.where(first.path, key=first.key)}: {_named(first)}{more}",
        hint=first.hint,
        details=tuple(
            f"{document.where(other.path, key=other.key)}: {_named(other)}" for other in others[:_MAX_DETAILS]
        ),
    )


def _named(problem: _Problem) -> str:
    """Return the message behind the field it is about, as ``hosts.gpu8.port: ...``."""
    subject = problem.path if problem.subject is None else problem.subject
    parts = [f"[{part}]" if isinstance(part, int) else part for part in subject]
    name = ".".join(parts).replace(".[", "[")
    return f"{name}: {problem.message}" if name else problem.message


def _empty_values(document: Document) -> Iterator[_Problem]:
    """Find keys without a value; only the sections of the file may be empty, all their lines commented out."""
    todo: list[tuple[tuple[Key, ...], Any]] = [((), document.data)]
    while todo:
        path, value = todo.pop()
        if value is None and not (len(path) == 1 and path[0] in InventoryModel.model_fields):
            tilde = document.text(path) == "~"
            hint = "a lone ~ means nothing in YAML; write the path out" if tilde else "give a value or remove the line"
            yield _Problem(path, "is empty", hint)
        elif isinstance(value, dict):
            todo += [((*path, key), below) for key, below in value.items()]
        elif isinstance(value, list):
            todo += [((*path, index), below) for index, below in enumerate(value)]


def _prepared(document: Document) -> dict[str, Any]:
    """Return the data for the models: without empty sections, and with integers in ``env`` as they were written."""
    prepared: dict[str, Any] = {
        key: node.value for key, node in document.root.members.items() if node.value is not None
    }
    if isinstance(prepared.get("defaults"), dict):
        prepared["defaults"] = _with_env_as_text(document, ("defaults",), prepared["defaults"])
    if isinstance(prepared.get("hosts"), dict):
        prepared["hosts"] = {
            name: _with_env_as_text(document, ("hosts", name), host) for name, host in prepared["hosts"].items()
        }
    return prepared


def _with_env_as_text(document: Document, path: tuple[str, ...], fields: Any) -> Any:
    if not isinstance(fields, dict) or not isinstance(fields.get("env"), dict):
        return fields
    env = {
        name: document.text((*path, "env", name)) if type(value) is int else value
        for name, value in fields["env"].items()
    }
    return {**fields, "env": env}


def _explain(document: Document, error: Mapping[str, Any]) -> _Problem:
    """Turn one of pydantic's errors into words for people who never heard of it."""
    location: tuple[Key, ...] = tuple(error["loc"])
    kind, context = error["type"], error.get("ctx", {})
    is_key = bool(location) and location[-1] == "[key]"
    path = location[:-1] if is_key else location
    if kind == "rdiag":
        return _Problem(path, context["text"], context["hint"], key=is_key, subject=path[:-1] if is_key else None)
    if kind == "extra_forbidden":
        return _unknown_field(path, error["input"])
    if kind == "literal_error":
        return _not_one_of(document, path, ("ssh", "local"))
    for name, text in (("greater_than", "more than {gt}"), ("greater_than_equal", "at least {ge}"), ("less_than_equal", "at most {le}")):
        if kind == name:
            return _Problem(path, f"{error['input']} is out of range", "it must be " + _number(text, context))
    return _wrong_type(document, path, kind, error["input"])


def _number(text: str, context: Mapping[str, Any]) -> str:
    return text.format(**{name: f"{value:g}" for name, value in context.items()})


def _level(path: Sequence[Key]) -> str:
    """Return which kind of mapping a field at ``path`` stands in."""
    if len(path) >= 2 and path[-2] == "environment":
        return "environment"
    return "file" if len(path) == 1 else "defaults" if path[0] == "defaults" else "host"


def _unknown_field(path: tuple[Key, ...], value: Any) -> _Problem:
    name, level = str(path[-1]), _level(path)
    fields = _FIELDS_OF[level]
    bare = name.lower().replace("-", "_")
    meant = _OTHER_NAMES.get(bare, "")
    near = [meant] if meant in fields else get_close_matches(bare, fields, n=1)
    if level in {"host", "defaults"} and bare in _ENVIRONMENT_KINDS:
        hint = f"write environment: {{{bare}: ...}}"
    elif level == "defaults" and bare in _FIELDS_OF["host"]:
        hint = f"{bare} belongs to a host, not to the defaults"
    elif "passw" in bare:
        hint = "passwords are never read from files; use a key or an ssh agent"
    elif near:
        hint = f"did you mean {near[0]}?"
    elif level == "file" and isinstance(value, dict):
        hint = "write hosts below hosts:, indented"
    else:
        hint = f"allowed are: {', '.join(fields)}"
    return _Problem(path, f"unknown field {name!r}", hint, key=True, subject=path[:-1])


def _not_one_of(document: Document, path: tuple[Key, ...], allowed: Sequence[str]) -> _Problem:
    node = document.text(path) or ""
    near = get_close_matches(node.lower(), allowed, n=1)
    hint = f"did you mean {near[0]}?" if near else f"write {' or '.join(allowed)}"
    return _Problem(path, f"must be {' or '.join(allowed)}", hint)


_WHOLE = "a whole number"
_SECONDS = "a number of seconds"
_EXPECTED = {
    "string_type": "text",
    "int_type": _WHOLE,
    "int_from_float": _WHOLE,
    "float_type": _SECONDS,
    "dict_type": "a mapping (name: value)",
    "model_type": "a mapping (name: value)",
    "list_type": "a list",
}


def _wrong_type(document: Document, path: tuple[Key, ...], kind: str, value: Any) -> _Problem:
    expected = _EXPECTED.get(kind, "something else")
    found = _kind_of(value)
    written = document.text(path)
    hint = None
    if kind == "string_type" and written is not None:
        hint = f"quote it: '{written}'"
    elif isinstance(value, str) and value.strip().isdecimal() and expected in {_WHOLE, _SECONDS}:
        hint = f"write it without quotes: {value.strip()[:20]}"
    elif expected in {_WHOLE, _SECONDS}:
        hint = "write a number, like " + {"port": "22", "gpus": "8"}.get(str(path[-1]), "600")
    elif kind == "list_type" and isinstance(value, str):
        hint = f"write it in brackets: [{value}]"
    elif path[-1:] == ("environment",):
        hint = f"one of {{python: ...}}, {{venv: ...}}, {{conda: ...}}, {{docker: ...}}{_environment_guess(value)}"
    elif kind in {"dict_type", "model_type"}:
        hint = "write `name: value` lines below it, indented, or {name: value}"
    return _Problem(path, f"must be {expected}, not {found}", hint)


def _environment_guess(value: Any) -> str:
    if isinstance(value, str) and value.startswith("/"):
        return f"; for example {{venv: {value}}}"
    return ""


def _kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return f"the truth value {str(value).lower()}"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return "text"
    return "a list" if isinstance(value, list) else "a mapping"


def _host_problems(model: InventoryModel) -> Iterator[_Problem]:
    if model.defaults.environment is not None:
        yield from _environment_problems(("defaults", "environment"), model.defaults.environment)
    for name, host in model.hosts.items():
        path = ("hosts", name)
        if host.environment is not None:
            yield from _environment_problems((*path, "environment"), host.environment)
        given = [field for field in _SSH_ONLY if field in host.model_fields_set]
        if host.transport == "local":
            for field in given:
                yield _Problem((*path, field), "has no meaning for transport: local", "remove the line", key=True)
        elif host.ssh is not None and host.address is not None:
            yield _Problem(
                (*path, "address"), "ssh and address are both given", "keep one: ssh takes the address from ~/.ssh/config", key=True
            )
        elif host.ssh is None and host.address is None:
            hint = "write transport: local" if name == "local" else f"write address: ..., or ssh: {name} for an alias in ~/.ssh/config"
            yield _Problem(path, "has neither address nor ssh", hint, key=True)
        for variable, value in {**model.defaults.env, **host.env}.items():
            if len(f"{variable}={value}".encode()) > checked.MAX_ENVIRONMENT_BYTES:
                yield _Problem((*path, "env", variable), "is larger than an environment variable can be (128 KiB)")


def _environment_problems(path: tuple[Key, ...], environment: EnvironmentModel) -> Iterator[_Problem]:
    given = [kind for kind in _ENVIRONMENT_KINDS if kind in environment.model_fields_set]
    if len(given) != 1:
        found, hint = " and ".join(given) or "none", "keep one of them" if given else "write one, or remove the line"
        yield _Problem(path, f"needs exactly one of {', '.join(_ENVIRONMENT_KINDS)}; found {found}", hint)


def _group_problems(model: InventoryModel) -> Iterator[_Problem]:
    known = {"local", *model.hosts}
    for name, members in model.groups.items():
        path = ("groups", name)
        if name in known:
            yield _Problem(path, f"{name!r} is a host too", "give the group another name", key=True, subject=path[:-1])
        if not members:
            yield _Problem(path, "the group is empty", "name a host, or remove the group")
        for index, member in enumerate(members):
            place = (*path, index)
            if member in members[:index]:
                yield _Problem(place, f"{member!r} is named twice", "remove one of the two")
            elif member not in known and member in model.groups:
                yield _Problem(place, f"{member!r} is a group; groups hold hosts only", "write its hosts out")
            elif member not in known:
                near = get_close_matches(member.lower(), sorted(known), n=1)
                hint = f"did you mean {near[0]}?" if near else f"hosts are: {', '.join(sorted(known)[:12])}"
                yield _Problem(place, f"there is no host {member!r}", hint)


def _host(document: Document, name: str, host: HostModel, defaults: DefaultsModel) -> Host:
    given = {field: getattr(host, field) for field in host.model_fields_set}
    inherited = {field: getattr(defaults, field) for field in defaults.model_fields_set}
    if host.transport == "local":
        inherited = {field: value for field, value in inherited.items() if field not in _SSH_ONLY}
    values: dict[str, Any] = {**inherited, **given}
    for field in ("identity_file", "known_hosts"):
        if field in values:
            values[field] = checked.expand(values[field])
    for field in ("connect_timeout", "timeout", "lease"):
        if field in values:
            values[field] = float(values[field])
    if "environment" in values:
        values["environment"] = _environment(values["environment"])
    values["env"] = tuple({**defaults.env, **host.env}.items())
    line = document.position(("hosts", name), key=True).line
    return Host(name=name, source=f"{document.source}:{line}", **values)


def _environment(model: EnvironmentModel) -> Environment:
    kind = next(kind for kind in _ENVIRONMENT_KINDS if kind in model.model_fields_set)
    return Environment(kind, getattr(model, kind))
