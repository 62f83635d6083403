"""What can be known of a probe file without executing it: the file is read once, parsed, and held to the contract.

Errors carry ``file:line``, what is wrong, and a corrected example.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from .agent.protocol import EFFECTS
from .errors import ConfigError
from .files import read_file

MAX_BYTES = 1024 * 1024
"""Largest probe file, bytes."""
EFFECTS_EXAMPLE = f'EFFECTS = ("reads-files",)   # any of {", ".join(EFFECTS)}; () touches nothing'
RUN_EXAMPLE = "def run(params: Params, context: Context) -> Result:"
_NAME = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*\Z")
_MAX_NAME = 64
_GENERIC_BUILTINS = frozenset({"tuple", "dict", "list", "set", "frozenset", "type"})


@dataclass(frozen=True)
class FieldSource:
    """Where a field of a class stands, and its attribute docstring."""

    line: int
    doc: str


@dataclass(frozen=True)
class ClassSource:
    """Where a class stands, and its fields by name."""

    line: int
    fields: Mapping[str, FieldSource]


@dataclass(frozen=True)
class ProbeSource:
    """A probe file that was read and whose static part is in order."""

    name: str
    """Kebab-case: ``vocab-compare`` for ``vocab_compare.py``."""
    path: Path
    data: bytes
    sha256: str
    summary: str
    description: str
    """The docstring after the summary; may be empty."""
    effects: tuple[str, ...]
    classes: Mapping[str, ClassSource]
    """Classes at module level, by name."""

    def error(self, line: int, message: str, hint: str) -> ConfigError:
        """Return the ConfigError that says ``message`` about ``line`` of this file."""
        return ConfigError(f"{self.path}:{line}: {message}", hint=hint)


def name_of(path: Path) -> str:
    """Return the probe name that a file's name stands for; raises ConfigError when it stands for none."""
    stem = path.name.removesuffix(".py")
    if not _NAME.match(stem) or len(stem) > _MAX_NAME:
        raise ConfigError(
            f"{path}: {path.name!r} is no name for a probe file",
            hint=f"lower-case words joined by _, at most {_MAX_NAME} characters: link_speed.py is the probe link-speed",
        )
    return stem.replace("_", "-")


def read(path: Path) -> ProbeSource:
    """Read and check the probe file at ``path`` without executing any of it.

    Raises:
        ConfigError: the file is missing, too large, no UTF-8, not Python, or breaks the probe contract.
    """
    name = name_of(path)
    data = read_file(path, limit=MAX_BYTES)
    checker = _Checker(path)
    tree = checker.parse(data)
    docstring = checker.docstring(tree)
    checker.imports(tree.body)
    checker.run(tree)
    classes = {node.name: checker.fields(node) for node in tree.body if isinstance(node, ast.ClassDef)}
    checker.contract_classes(classes)
    checker.old_annotations(tree)
    summary, _, rest = docstring.partition("\n")
    return ProbeSource(
        name=name,
        path=path,
        data=data,
        sha256=hashlib.sha256(data).hexdigest(),
        summary=summary.strip(),
        description=rest.strip(),
        effects=checker.effects(tree),
        classes=classes,
    )


class _Checker:
    """The static rules, one method each; every one raises ConfigError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _refuse(self, line: int, message: str, hint: str) -> NoReturn:
        raise ConfigError(f"{self._path}:{line}: {message}", hint=hint) from None

    def parse(self, data: bytes) -> ast.Module:
        if b"\0" in data:
            self._refuse(data[: data.index(b"\0")].count(b"\n") + 1, "a NUL byte", "save the file as UTF-8 text")
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = data[: error.start].count(b"\n") + 1
            self._refuse(line, f"byte 0x{data[error.start]:02x} is not UTF-8", "save the file as UTF-8")
        if text.startswith("\ufeff"):
            self._refuse(1, "the file begins with a byte order mark", "save it as UTF-8 without BOM")
        try:
            return ast.parse(text, filename=str(self._path))
        except SyntaxError as error:
            self._refuse(error.lineno or 1, f"not Python: {error.msg}", "correct the syntax; see: python -m py_compile")
        except (ValueError, RecursionError, MemoryError) as error:
            self._refuse(1, f"not Python that can be parsed: {error}", "simplify the file")

    def docstring(self, tree: ast.Module) -> str:
        raw = ast.get_docstring(tree, clean=False)
        text = "" if raw is None else inspect.cleandoc(raw)
        if not text.strip():
            self._refuse(
                1,
                "the file has no docstring; its first line is the summary that `rdiag probes` shows",
                'begin the file with """Compare the link speed of all GPUs."""',
            )
        return text

    def imports(self, body: list[ast.stmt]) -> None:
        """Only the standard library at module level: the host needs nothing else to start the probe."""
        for node in _module_level(body):
            if isinstance(node, ast.ImportFrom) and node.level:
                self._refuse(
                    node.lineno,
                    "a relative import; a probe is one file and has no package on the host",
                    "shared code of shipped probes is imported inside run(): from probes.lib import mappings",
                )
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for name in names:
                top = name.partition(".")[0]
                if top not in sys.stdlib_module_names:
                    self._refuse(
                        node.lineno,
                        f"{top!r} is imported at module level and is not in the standard library",
                        _import_hint(name, top),
                    )

    def effects(self, tree: ast.Module) -> tuple[str, ...]:
        found = list(_assignments(tree, "EFFECTS"))
        if not found:
            self._refuse(1, "EFFECTS is missing: say what the probe touches", EFFECTS_EXAMPLE)
        if len(found) > 1:
            self._refuse(found[1][0].lineno, "EFFECTS is set twice", EFFECTS_EXAMPLE)
        node, value = found[0]
        if not isinstance(value, ast.Tuple):
            wrong = " (a comma makes a tuple)" if isinstance(value, ast.Constant) else ""
            self._refuse(node.lineno, f"EFFECTS must be a tuple of texts, written out{wrong}", EFFECTS_EXAMPLE)
        effects: list[str] = []
        for item in value.elts:
            if not isinstance(item, ast.Constant) or not isinstance(item.value, str):
                self._refuse(item.lineno, "EFFECTS must be a tuple of texts, written out", EFFECTS_EXAMPLE)
            effect = item.value
            if effect not in EFFECTS:
                from difflib import get_close_matches

                near = get_close_matches(effect, EFFECTS, n=1)
                meant = f"; did you mean {near[0]!r}?" if near else ""
                self._refuse(item.lineno, f"{effect!r} is no effect{meant}", EFFECTS_EXAMPLE)
            if effect in effects:
                self._refuse(item.lineno, f"the effect {effect!r} stands twice", EFFECTS_EXAMPLE)
            effects.append(effect)
        return tuple(effects)

    def contract_classes(self, classes: Mapping[str, ClassSource]) -> None:
        for name in ("Params", "Result"):
            if name not in classes:
                self._refuse(1, f"the class {name} is missing", class_example(name))

    def run(self, tree: ast.Module) -> None:
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        found = [node for node in tree.body if isinstance(node, functions) and node.name == "run"]
        if not found:
            self._refuse(1, "the function run is missing", RUN_EXAMPLE)
        node = found[-1]
        if isinstance(node, ast.AsyncFunctionDef):
            self._refuse(node.lineno, "run must be a plain function, not async", RUN_EXAMPLE)
        arguments = node.args
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        extra = bool(arguments.kwonlyargs or arguments.vararg or arguments.kwarg or arguments.defaults)
        if names != ["params", "context"] or extra:
            self._refuse(node.lineno, "run must take exactly (params, context)", RUN_EXAMPLE)

    def fields(self, node: ast.ClassDef) -> ClassSource:
        """Collect the annotated names of a class body, each with the text right below it."""
        fields: dict[str, FieldSource] = {}
        for statement, following in zip(node.body, (*node.body[1:], None), strict=True):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                doc = ""
                if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                    doc = following.value.value if isinstance(following.value.value, str) else ""
                fields[statement.target.id] = FieldSource(statement.lineno, inspect.cleandoc(doc))
        return ClassSource(node.lineno, fields)

    def old_annotations(self, tree: ast.Module) -> None:
        """Refuse annotations that Python 3.8 on a host would trip over while it loads the file."""
        futures = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
        if any(alias.name == "annotations" for node in futures for alias in node.names):
            return
        for annotation in _annotations(tree):
            for part in ast.walk(annotation):
                modern = isinstance(part, ast.BinOp) or (
                    isinstance(part, ast.Subscript)
                    and isinstance(part.value, ast.Name)
                    and part.value.id in _GENERIC_BUILTINS
                )
                if modern:
                    self._refuse(
                        annotation.lineno,
                        f"the annotation {ast.unparse(annotation)} cannot be evaluated by Python 3.8, which hosts may have",
                        "write this below the docstring: from __future__ import annotations",
                    )


def class_example(name: str) -> str:
    """Return how ``Params`` or ``Result``, or a dataclass inside of them, is written."""
    return "\n".join(
        (
            'STRICT = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}',
            "",
            "@dataclass(frozen=True)",
            f"class {name}:",
            f'    """What {"run needs to know" if name == "Params" else "was measured"}."""',
            "",
            "    __pydantic_config__ = STRICT",
            "",
            "    seconds: float",
            '    """How long it took, seconds."""',
        )
    )


def _import_hint(name: str, top: str) -> str:
    if top == "probes":
        return f"move it into run(): from {name} import ..."
    if top == "remote_diag":
        return "only types come from there, and only for type checkers: if TYPE_CHECKING: from remote_diag.probe import Context"
    return f'move it into run(): {top} = context.require("{name}")'


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when the module is loaded; not what stands in functions or for type checkers."""
    for node in body:
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            yield from _module_level(node.orelse)
            continue
        for part in ("body", "orelse", "finalbody"):
            yield from _module_level(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from _module_level(handler.body)
        for case in getattr(node, "cases", []):
            yield from _module_level(case.body)


def _assignments(tree: ast.Module, name: str) -> Iterator[tuple[ast.stmt, ast.expr]]:
    for node in _module_level(tree.body):
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            yield node, value


def _annotations(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield every annotation of the file."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.AnnAssign, ast.arg)):
            if node.annotation is not None:
                yield node.annotation
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.returns is not None:
            yield node.returns
