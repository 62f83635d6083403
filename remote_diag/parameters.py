"""A probe's ``Params`` from what a user gave: ``--set key=value``, a parameter file, a mapping, or an instance.

Text is taken exactly as it was given, whatever is in it; only a NUL is refused, because no path, argument or
environment variable can hold one. Nothing is converted silently: a number is a number in JSON, a truth value is
``true`` or ``false``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import ConfigError, RdiagError, UsageProblem
from .files import read_file
from .param_values import ALLOWED, Unfit, checked, from_text, items_from_text, plain, without_nul
from .probe_fields import Field, without_none
from .text import safe

if TYPE_CHECKING:
    from .probe import Probe
    from .strict_yaml import Document

ParamsT = TypeVar("ParamsT")
ResultT = TypeVar("ResultT")

MAX_BYTES = 4 * 1024 * 1024
"""Largest parameters, bytes of JSON: they travel in one frame, beside the environment variables."""
_SHOWN = 60


def build(
    probe: Probe[ParamsT, ResultT],
    sets: Sequence[str] = (),
    params_file: Path | None = None,
    base: Mapping[str, Any] | None = None,
) -> ParamsT:
    """Return the ``Params`` of ``probe``; ``sets`` wins over ``params_file``, which wins over ``base``.

    Args:
        probe: whose parameters.
        sets: ``key=value`` each. For a text field the value is taken literally. A tuple grows with every further
            ``key=value``, or is given as a JSON array. ``key.name=value`` is one entry of a dict.
        params_file: YAML or JSON.
        base: values that a command got from options of its own.

    Raises:
        UsageProblem: a key or a value of ``sets`` or ``base`` does not fit, a parameter is missing, or the probe
            refuses the combination.
        ConfigError: the file is invalid; the message begins with ``file:line:column``.
    """
    fields = {field.name: field for field in probe.params_fields}
    values = _from_mapping(probe, fields, base or {})
    if params_file is not None:
        values.update(_from_file(probe, fields, params_file))
    _apply_sets(probe, fields, sets, values)
    return _construct(probe, fields, values)


def coerce(probe: Probe[ParamsT, ResultT], params: object) -> ParamsT:
    """Return ``params`` as the ``Params`` of ``probe``: an instance, a mapping, or None for all defaults.

    Raises:
        UsageProblem: it does not fit.
    """
    if params is None:
        return build(probe)
    if isinstance(params, Mapping):
        return build(probe, base=params)
    if isinstance(params, probe.Params) or _same_class_loaded_twice(probe, params):
        return build(probe, base={field.name: getattr(params, field.name) for field in probe.params_fields})
    raise UsageProblem(
        f"{type(params).__name__} is given where {probe.name} takes its Params or a mapping",
        hint=_overview(probe),
    )


def to_json(params: object) -> dict[str, Any]:
    """Return an instance of ``Params`` as the ``params`` object of a request: tuples are lists there."""
    return {field.name: plain(getattr(params, field.name)) for field in dataclasses.fields(params)}  # type: ignore[arg-type]


def describe(field: Field) -> str:
    """Return a parameter as one line: ``name: str = 'world' - Whom to greet.``."""
    default = "" if field.required else f" = {safe(repr(field.default), limit=_SHOWN)}"
    doc = " ".join(field.doc.split())
    return f"{field.name}: {field.type_text}{default} - {safe(doc)}"


def _same_class_loaded_twice(probe: Probe[Any, Any], params: object) -> bool:
    """Whether ``params`` is of the class ``Params`` of the same file, imported as a module of another name."""
    kind = type(params)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is None or kind.__name__ != "Params" or not dataclasses.is_dataclass(kind):
        return False
    return Path(file).resolve() == probe.path.resolve()


def _overview(probe: Probe[Any, Any]) -> str:
    lines = [describe(field) for field in probe.params_fields]
    return "\n".join((f"parameters of {probe.name}:", *lines)) if lines else f"{probe.name} has no parameters"


def _unknown(probe: Probe[Any, Any], key: str) -> tuple[str, str]:
    known = [field.name for field in probe.params_fields]
    from difflib import get_close_matches

    near = get_close_matches(key.replace("-", "_"), known, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"{probe.name} has no parameter '{safe(key, limit=_SHOWN)}'{meant}", _overview(probe)


def _complaint(field: Field, unfit: Unfit) -> tuple[str, str]:
    from .strict_json import path_text

    place = path_text((field.name, *unfit.path))
    given = safe(unfit.given if isinstance(unfit.given, str) else repr(unfit.given), limit=_SHOWN)
    return f"parameter {place}: '{given}' is given; {unfit.allowed}", describe(field)


# -- a mapping, or a file


def _from_mapping(probe: Probe[Any, Any], fields: Mapping[str, Field], given: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for key, value in given.items():
        if key not in fields:
            message, hint = _unknown(probe, str(key))
            raise UsageProblem(message, hint=hint)
        try:
            values[key] = checked(value, fields[key].annotation)
        except Unfit as unfit:
            message, hint = _complaint(fields[key], unfit)
            raise UsageProblem(message, hint=hint) from None
    return values


def _from_file(probe: Probe[Any, Any], fields: Mapping[str, Field], path: Path) -> dict[str, Any]:
    text = read_file(path)
    if (read := _from_json(fields, text)) is not None:
        return read
    from .strict_yaml import load

    document = load(text, source=str(path))
    if document.data is None:
        return {}
    if not isinstance(document.data, dict):
        raise document.error((), "a parameter file is a mapping of names to values", hint=_overview(probe))
    values = {}
    for key, value in document.data.items():
        if key not in fields:
            message, hint = _unknown(probe, key)
            raise document.error((key,), message, hint=hint, key=True)
        try:
            values[key] = checked(value, fields[key].annotation)
        except Unfit as unfit:
            raise _file_error(document, fields[key], unfit) from None
    return values


def _from_json(fields: Mapping[str, Field], text: bytes) -> dict[str, Any] | None:
    """Return the values of a file that is JSON and fits; None for every other, which YAML's reader explains better.

    That reader takes JSON too, by and large, and longer to be imported than most files take to be read.
    """
    if not text.lstrip().startswith(b"{"):
        return None
    from .strict_json import StrictJsonError, loads

    try:
        return {key: checked(value, fields[key].annotation) for key, value in loads(text).items()}
    except (StrictJsonError, Unfit, KeyError):
        return None


def _file_error(document: Document, field: Field, unfit: Unfit) -> ConfigError:
    path = (field.name, *unfit.path)
    message, hint = _complaint(field, unfit)
    written = document.text(path)
    if written is not None and unfit.allowed.startswith(ALLOWED[str]):
        hint = f"quote it: '{safe(written, limit=_SHOWN)}'\n{hint}"
    return document.error(path, message, hint=hint)


# -- --set key=value


def _apply_sets(
    probe: Probe[Any, Any], fields: Mapping[str, Field], sets: Sequence[str], values: dict[str, Any]
) -> None:
    """Put what ``sets`` say into ``values``."""
    begun: set[str] = set()
    for text in sets:
        whole, equals, value = text.partition("=")
        key, dot, entry = whole.partition(".")
        if not equals or not key:
            raise UsageProblem(
                f"--set '{safe(text, limit=_SHOWN)}' is not key=value", hint=f"write --set KEY=VALUE\n{_overview(probe)}"
            )
        key = key if key in fields else key.replace("-", "_")
        if key not in fields:
            message, hint = _unknown(probe, whole)
            raise UsageProblem(f"--set {safe(whole, limit=_SHOWN)}: {message}", hint=hint)
        field = fields[key]
        try:
            if dot:
                _set_entry(field, entry, value, values)
            else:
                _set_whole(field, value, values, again=key in begun)
        except Unfit as unfit:
            message, hint = _complaint(field, unfit)
            raise UsageProblem(message, hint=hint) from None
        begun.add(key)


def _set_entry(field: Field, entry: str, text: str, values: dict[str, Any]) -> None:
    inner, _ = without_none(field.annotation)
    if typing.get_origin(inner) is not dict:
        raise Unfit(f"{field.name}.{entry}", f"{field.name} is {field.type_text} and has no entries to set")
    try:
        value = from_text(text, typing.get_args(inner)[1])
    except Unfit as unfit:
        raise unfit.below(entry) from None
    values[field.name] = {**(values.get(field.name) or {}), without_nul(entry): value}


def _set_whole(field: Field, text: str, values: dict[str, Any], *, again: bool) -> None:
    inner, _ = without_none(field.annotation)
    if typing.get_origin(inner) is tuple:
        items = items_from_text(text, inner)
        values[field.name] = (*(values[field.name] if again and values[field.name] else ()), *items)
    elif again and typing.get_origin(inner) is not dict:
        raise Unfit(text, "one value is allowed, and this is the second")
    else:
        values[field.name] = from_text(text, field.annotation)


# -- the end


def _construct(probe: Probe[ParamsT, Any], fields: Mapping[str, Field], values: dict[str, Any]) -> ParamsT:
    missing = [field for field in fields.values() if field.required and field.name not in values]
    if missing:
        names = ", ".join(field.name for field in missing)
        plural = "s are" if len(missing) > 1 else " is"
        raise UsageProblem(
            f"{probe.name}: the parameter{plural} missing: {names}",
            hint=f"--set {missing[0].name}=...\n{_overview(probe)}",
        )
    try:
        params = probe.Params(**values)
    except Exception as error:  # __post_init__ is the probe's own code
        raise _refused(probe, error) from error
    size = len(json.dumps(to_json(params)))
    if size > MAX_BYTES:
        raise UsageProblem(
            f"the parameters of {probe.name} have {size} bytes; at most {MAX_BYTES} are allowed",
            hint="put the data into a file on the host and give its path",
        )
    return params


def _refused(probe: Probe[Any, Any], error: Exception) -> RdiagError:
    if isinstance(error, ValueError):
        return UsageProblem(f"{probe.name} refuses its parameters: {safe(str(error), limit=500)}", hint=_overview(probe))
    return ConfigError(
        f"{probe.path}: Params cannot be made: {type(error).__name__}: {error}",
        hint="__post_init__ raises ValueError for what it does not accept",
    )
