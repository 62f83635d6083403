"""The fields of ``Params`` and ``Result``: which types they may have, and what is known of each."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Union

from .errors import ConfigError
from .probe_source import ProbeSource, class_example

CONFIG: Mapping[str, object] = types.MappingProxyType(
    {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}
)
"""What ``__pydantic_config__`` of every dataclass of a probe holds, at least."""
SCALARS = (str, int, float, bool)
_MAX_NESTING = 16

_INSTEAD: dict[object, str] = {
    Any: "write the type that it has: str, int, float, bool",
    object: "write the type that it has: str, int, float, bool",
    list: "a result does not change any more; write tuple[{item}, ...]",
    set: "write tuple[{item}, ...], sorted",
    frozenset: "write tuple[{item}, ...], sorted",
    bytes: "write str: hex digits, or text",
    bytearray: "write str: hex digits, or text",
    complex: "write two float fields",
}
_INSTEAD_BY_NAME: dict[str, str] = {
    "datetime": "write float, seconds since the epoch (UTC), and say so in the field's docstring",
    "date": "write str, as 2026-01-31",
    "time": "write float, seconds",
    "timedelta": "write float, seconds",
    "Path": "write str",
    "PosixPath": "write str",
    "PurePath": "write str",
    "Decimal": "write str or float",
    "Sequence": "write tuple[{item}, ...]",
    "Iterable": "write tuple[{item}, ...]",
    "Mapping": "write dict[str, {item}]",
    "defaultdict": "write dict[str, {item}]",
    "OrderedDict": "write dict[str, {item}]",
}
_ALLOWED_PARAMS = "parameters are str, int, float, bool, Literal, T | None, tuple[T, ...] and dict[str, T] of those"
_ALLOWED_RESULT = "results are frozen dataclasses, tuples, dict[str, T], Literal, str, int, float, bool and None"


@dataclass(frozen=True)
class Field:
    """One field of a probe's dataclass."""

    name: str
    annotation: Any
    """The evaluated type."""
    doc: str
    line: int
    required: bool
    default: Any = None
    """Meaningful only when not ``required``."""

    @property
    def type_text(self) -> str:
        """The type as people write it."""
        return type_text(self.annotation)


def type_text(annotation: Any) -> str:
    """Return an evaluated type as it stands in a probe: ``tuple[int, ...]``, ``str | None``, ``Literal['a']``."""
    if annotation is type(None):
        return "None"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if is_union(annotation):
        return " | ".join(type_text(argument) for argument in arguments)
    if origin is Literal:
        return "Literal[" + ", ".join(repr(value) for value in arguments) + "]"
    if origin is not None and arguments:
        inside = ", ".join("..." if argument is ... else type_text(argument) for argument in arguments)
        return f"{getattr(origin, '__name__', origin)}[{inside}]"
    return getattr(annotation, "__name__", None) or str(annotation)


def is_union(annotation: Any) -> bool:
    """Whether ``annotation`` is a union, however it was written."""
    return typing.get_origin(annotation) in (Union, types.UnionType)


def without_none(annotation: Any) -> tuple[Any, bool]:
    """Return (type, whether None is allowed besides it) of a parameter's annotation."""
    if not is_union(annotation):
        return annotation, False
    rest = [argument for argument in typing.get_args(annotation) if argument is not type(None)]
    return rest[0], len(rest) < len(typing.get_args(annotation))


def check(source: ProbeSource, params: object, result: object, module: types.ModuleType) -> None:
    """Check ``Params`` and ``Result`` and every dataclass that they reach.

    Raises:
        ConfigError: with ``file:line`` of the class or field.
    """
    checker = _Checker(source, module)
    checker.check(params, "Params", is_params=True)
    checker.check(result, "Result", is_params=False)


def fields_of(source: ProbeSource, kind: type[Any], module: types.ModuleType) -> tuple[Field, ...]:
    """Return the fields of a dataclass of the probe, in order."""
    hints = typing.get_type_hints(kind, globalns=vars(module))
    found = []
    for field in dataclasses.fields(kind):
        line, doc = 0, ""
        for base in kind.__mro__:
            declared = source.classes.get(base.__name__)
            if declared is not None and field.name in declared.fields:
                line, doc = declared.fields[field.name].line, declared.fields[field.name].doc
                break
        default = field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        required = default is dataclasses.MISSING
        found.append(Field(field.name, hints[field.name], doc, line, required, None if required else default))
    return tuple(found)


class _Checker:
    def __init__(self, source: ProbeSource, module: types.ModuleType) -> None:
        self._source = source
        self._module = module
        self._done: set[type[Any]] = set()

    def check(self, kind: object, name: str, *, is_params: bool) -> None:
        """Check one dataclass, then those inside of it."""
        if isinstance(kind, type) and kind in self._done:
            return
        declared = self._source.classes.get(name)
        line = declared.line if declared else 1
        if not isinstance(kind, type) or not dataclasses.is_dataclass(kind) or "__dataclass_fields__" not in vars(kind):
            self._refuse(line, f"{name} is not a dataclass", class_example(name))
        self._done.add(kind)
        if declared is None:
            self._refuse(line, f"the dataclass {name} is not defined at module level of this file", class_example(name))
        if not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            self._refuse(line, f"the dataclass {name} is not frozen", class_example(name))
        self._check_config(kind, name, line)
        for field in self._fields(kind, name, line):
            self._check_field(field, name, is_params=is_params)

    def _refuse(self, line: int, message: str, hint: str) -> NoReturn:
        raise self._source.error(line, message, hint) from None

    def _check_config(self, kind: type[Any], name: str, line: int) -> None:
        config = getattr(kind, "__pydantic_config__", None)
        if not isinstance(config, dict):
            self._refuse(line, f"{name} has no __pydantic_config__", class_example(name))
        for key, value in CONFIG.items():
            if config.get(key) != value:
                self._refuse(
                    line, f"__pydantic_config__ of {name} must hold {key!r}: {value!r}", class_example(name)
                )

    def _fields(self, kind: type[Any], name: str, line: int) -> tuple[Field, ...]:
        for plain in dataclasses.fields(kind):
            if not plain.init:
                self._refuse(line, f"{name}.{plain.name} has init=False", "make it a property, or a field with a value")
        try:
            fields = fields_of(self._source, kind, self._module)
        except NameError as error:
            self._refuse(
                line,
                f"an annotation in {name} cannot be evaluated: {error}",
                "types of fields come from this file or the standard library, not from a TYPE_CHECKING block",
            )
        except Exception as error:  # noqa: BLE001 - annotations and default factories are the probe's own code
            self._refuse(line, f"the fields of {name} cannot be read: {type(error).__name__}: {error}", class_example(name))
        for field in fields:
            if not field.line:
                self._refuse(
                    line,
                    f"{name}.{field.name} does not stand in the file",
                    "the module is older than its file: import it again; fields are written out, not generated",
                )
        return fields

    def _check_field(self, field: Field, owner: str, *, is_params: bool) -> None:
        where = f"{owner}.{field.name}"
        if not field.doc:
            self._refuse(
                field.line,
                f"{where} has no docstring",
                f'{field.name}: {field.type_text}\n"""What it is, with its unit or shape."""',
            )
        if field.name.startswith("_"):
            self._refuse(field.line, f"{where} begins with _", "rename it; every field is part of the contract")
        self._check_type(field.annotation, where, field.line, is_params=is_params, depth=0)

    def _check_type(self, annotation: Any, where: str, line: int, *, is_params: bool, depth: int) -> None:
        if annotation in SCALARS or (annotation is type(None) and not is_params):
            return
        if depth > _MAX_NESTING:
            self._refuse(line, f"{where} is nested too deeply", "flatten it")
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            if is_params:
                self._refuse(line, f"{where} is a dataclass", f"flatten it: {_ALLOWED_PARAMS}")
            self.check(annotation, annotation.__name__, is_params=False)
            return
        for part in self._parts(annotation, where, line, is_params=is_params):
            self._check_type(part, where, line, is_params=is_params, depth=depth + 1)

    def _parts(self, annotation: Any, where: str, line: int, *, is_params: bool) -> list[Any]:
        """Return the types that a compound type is made of."""
        origin, arguments = typing.get_origin(annotation), list(typing.get_args(annotation))
        if is_union(annotation):
            parts = [argument for argument in arguments if argument is not type(None)]
            if is_params and len(parts) != 1:
                self._refuse(line, f"{where} is a union of several types", _ALLOWED_PARAMS)
            return parts
        if origin is Literal:
            if not all(value is None or type(value) in SCALARS for value in arguments):
                self._refuse(line, f"{where} has a Literal of something else than str, int, bool", _ALLOWED_PARAMS)
            return []
        if origin is tuple and arguments:
            variable = len(arguments) == 2 and arguments[1] is ...
            if is_params and not variable:
                self._refuse(line, f"{where} is a tuple of fixed length", "write tuple[T, ...]")
            return arguments[:1] if variable else arguments
        if origin is dict:
            if arguments[0] is not str:
                self._refuse(line, f"the keys of {where} are not str", "write dict[str, T]: JSON has no other keys")
            return arguments[1:]
        raise self._not_allowed(annotation, where, line, is_params=is_params)

    def _not_allowed(self, annotation: Any, where: str, line: int, *, is_params: bool) -> ConfigError:
        origin, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
        item = type_text(arguments[-1]) if arguments else "T"
        name = getattr(origin, "__name__", str(origin))
        if origin in (tuple, dict):
            hint = "write tuple[T, ...]" if origin is tuple else "write dict[str, T]"
            return self._source.error(line, f"{where} is a {name} of unknown items", hint)
        instead = next((text for kind, text in _INSTEAD.items() if kind is origin), None)
        hint = instead or _INSTEAD_BY_NAME.get(name) or (_ALLOWED_PARAMS if is_params else _ALLOWED_RESULT)
        return self._source.error(
            line, f"{where} has the type {type_text(annotation)}, which is not allowed", hint.format(item=item)
        )
