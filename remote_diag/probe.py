"""A probe: one Python file that travels to a host, and the contract between it and this machine.

::

    probe = load(Path("probes/vocab_compare.py"))
    probe.name, probe.summary, probe.effects
    probe.Params(a="/data/old", b="/data/new")

What a probe file must look like, and why, is said by the errors of :func:`load`; ``rdiag new-probe`` writes one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import linecache
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, Protocol, TypeVar

from . import probe_fields, probe_source
from .errors import ConfigError
from .findings import Finding, Measured
from .param_values import Unfit, checked
from .probe_fields import Field

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = ["Context", "Field", "Finding", "Probe", "ProbeModule", "from_module", "load"]

ParamsT = TypeVar("ParamsT")
ResultT = TypeVar("ResultT")
ParamsT_contra = TypeVar("ParamsT_contra", contravariant=True)
ResultT_co = TypeVar("ResultT_co", covariant=True)


class Context(Protocol):
    """What ``run(params, context)`` can ask for and say on the host."""

    @property
    def run_id(self) -> str:
        """Name of the run."""

    @property
    def run_dir(self) -> str:
        """A private folder for temporary files, deleted after the run."""

    def progress(self, done: float, total: float | None = None, *, unit: str = "", label: str = "") -> None:
        """Say that ``done`` of ``total`` units are done; cheap enough for a loop."""

    def finding(
        self,
        level: Literal["ok", "degraded", "fail", "unknown", "skipped"],
        code: str,
        message: str,
        *,
        subject: str | None = None,
        value: Measured = None,
        unit: str | None = None,
        threshold: Measured = None,
        threshold_source: str | None = None,
        evidence: tuple[str, ...] = (),
        action: str | None = None,
    ) -> None:
        """Report one thing that was established; the fields are those of :class:`remote_diag.findings.Finding`."""

    def require(self, name: str, hint: str | None = None) -> Any:
        """Import and return the module ``name``; without it the run ends as "environment unfit" (exit 7)."""

    def unfit(self, message: str, hint: str | None = None) -> NoReturn:
        """End the run because this environment cannot run the probe (exit 7)."""

    def skip(self, reason: str) -> NoReturn:
        """End the run because there is nothing to measure here; neither ok nor failed."""

    def remaining(self) -> float:
        """Return the seconds until the run will be ended."""


class ProbeModule(Protocol[ParamsT_contra, ResultT_co]):
    """An imported probe file, for typed calls: ``host.run(my_probe, my_probe.Params(...))``."""

    def run(self, params: ParamsT_contra, context: Context) -> ResultT_co:
        """Run on the host."""


@dataclass(frozen=True, eq=False)
class Probe(Generic[ParamsT, ResultT]):
    """A probe file that was read, checked and loaded.

    ``Params`` and ``Result`` are the file's own dataclasses: what a run takes and returns.
    """

    name: str
    """Kebab-case."""
    path: Path
    source: bytes = field(repr=False)
    """The file as it travels to the host."""
    sha256: str
    """Of ``source``, 64 hex digits."""
    summary: str
    """First line of the docstring."""
    description: str = field(repr=False)
    """The rest of it."""
    effects: tuple[str, ...]
    """What it touches: see :data:`remote_diag.agent.protocol.EFFECTS`."""
    Params: type[ParamsT]
    Result: type[ResultT]
    module: ModuleType = field(repr=False)
    parsed: probe_source.ProbeSource = field(repr=False)

    @cached_property
    def params_fields(self) -> tuple[Field, ...]:
        """The parameters, in order."""
        return self.fields(self.Params)

    @cached_property
    def result_fields(self) -> tuple[Field, ...]:
        """The fields of the result, in order."""
        return self.fields(self.Result)

    def fields(self, kind: type[Any]) -> tuple[Field, ...]:
        """Return the fields of one of the probe's dataclasses."""
        return probe_fields.fields_of(self.parsed, kind, self.module)

    @cached_property
    def result_adapter(self) -> TypeAdapter[ResultT]:
        """Pydantic's view of ``Result``, to validate with; pydantic is imported only when this is asked for.

        It knows no descriptions: to find those pydantic parses the whole file once more for every class in it, which
        takes longer than all the rest.
        """
        with _without_descriptions(self.module):
            return self._adapter(self.Result)

    def _adapter(self, kind: type[Any]) -> TypeAdapter[Any]:
        from pydantic import TypeAdapter

        try:
            return TypeAdapter(kind)
        except Exception as error:  # a bug in the probe's dataclasses that our own checks did not foresee
            raise ConfigError(
                f"{self.path}: no validator can be made of {kind.__name__}: {error}",
                hint=probe_source.class_example(kind.__name__),
            ) from error

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schemas of parameters and result: ``{"params": ..., "result": ...}``."""
        # Not while another thread has taken the descriptions away.
        with _describing:
            return {
                "params": self._adapter(self.Params).json_schema(),
                "result": self._adapter(self.Result).json_schema(mode="serialization"),
            }


_loaded: dict[tuple[Path, str], Probe[Any, Any]] = {}
_numbers = itertools.count(1)
_describing = threading.Lock()


def load(path: Path | str) -> Probe[Any, Any]:
    """Read, check and load the probe file at ``path``; the same file gives the same Probe again.

    Nothing of the file is executed before its static part is in order: imports at module level from the standard
    library only, docstring, ``EFFECTS``, ``Params``, ``Result`` and ``run``.

    Raises:
        ConfigError: with ``file:line``, what is wrong, and a corrected example.
    """
    source = probe_source.read(Path(path))
    key = (source.path.resolve(), source.sha256)
    if key not in _loaded:
        _loaded[key] = _probe(source, _execute(source))
    return _loaded[key]


def from_module(module: ProbeModule[ParamsT, ResultT]) -> Probe[ParamsT, ResultT]:
    """Return the probe of a module that was imported: its ``Params`` and ``Result`` keep their types.

    Raises:
        ConfigError: the module has no file, or breaks the contract as in :func:`load`.
    """
    file = getattr(module, "__file__", None)
    if not isinstance(module, ModuleType) or not isinstance(file, str) or not file.endswith(".py"):
        raise ConfigError(
            f"{getattr(module, '__name__', module)!r} is no module with a .py file",
            hint="give a probe's name, the path of its file, or the imported module",
        )
    source = probe_source.read(Path(file))
    key = (source.path.resolve(), f"{source.sha256} {module.__name__} {id(module)}")
    if key not in _loaded:
        _loaded[key] = _probe(source, module)
    return _loaded[key]


def _probe(source: probe_source.ProbeSource, module: ModuleType) -> Probe[Any, Any]:
    params, result = getattr(module, "Params", None), getattr(module, "Result", None)
    probe_fields.check(source, params, result, module)
    probe: Probe[Any, Any] = Probe(
        name=source.name,
        path=source.path,
        source=source.data,
        sha256=source.sha256,
        summary=source.summary,
        description=source.description,
        effects=source.effects,
        Params=params,  # type: ignore[arg-type]  # checked to be a dataclass
        Result=result,  # type: ignore[arg-type]
        module=module,
        parsed=source,
    )
    for parameter in probe.params_fields:
        _check_default(probe, parameter)
    return probe


def _check_default(probe: Probe[Any, Any], parameter: Field) -> None:
    if parameter.required:
        return
    try:
        checked(parameter.default, parameter.annotation)
    except Unfit as unfit:
        raise probe.parsed.error(
            parameter.line,
            f"the default of Params.{parameter.name}, {unfit.given!r}, does not fit its type {parameter.type_text}",
            unfit.allowed,
        ) from None


@contextlib.contextmanager
def _without_descriptions(module: ModuleType) -> Iterator[None]:
    """Let pydantic take no docstrings from the dataclasses of ``module`` meanwhile."""
    with _describing:
        configured: dict[type[Any], Any] = {
            kind: vars(kind)["__pydantic_config__"]
            for kind in vars(module).values()
            if isinstance(kind, type) and dataclasses.is_dataclass(kind) and "__pydantic_config__" in vars(kind)
        }
        try:
            for kind, config in configured.items():
                type.__setattr__(kind, "__pydantic_config__", {**config, "use_attribute_docstrings": False})
            yield
        finally:
            for kind, config in configured.items():
                type.__setattr__(kind, "__pydantic_config__", config)


def _execute(source: probe_source.ProbeSource) -> ModuleType:
    """Execute the very bytes that were checked, as a module of its own."""
    filename = str(source.path)
    module = ModuleType(f"rdiag_probe_{source.name.replace('-', '_')}_{next(_numbers)}")
    module.__file__ = filename
    lines = source.data.decode("utf-8").splitlines(keepends=True)
    # Pydantic reads attribute docstrings through linecache: it shall see what was executed, not what the file is now.
    linecache.cache[filename] = (len(source.data), None, lines, filename)
    sys.modules[module.__name__] = module
    try:
        exec(compile(source.data, filename, "exec", dont_inherit=True), vars(module))  # noqa: S102
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        line = _line_in(error, filename)
        raise source.error(
            line,
            f"loading the file raised {type(error).__name__}: {error}",
            "keep module level to imports, constants, dataclasses and functions; the rest belongs into run()",
        ) from error
    return module


def _line_in(error: BaseException, filename: str) -> int:
    """Return the innermost line of ``filename`` that ``error`` came through."""
    line = getattr(error, "lineno", None) or 1
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == filename:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line
