"""``rdiag new-probe``: a small working probe and its test, as files of the user's own."""

from __future__ import annotations

import json
import keyword
from dataclasses import dataclass
from pathlib import Path

from . import paths
from .errors import ConfigError, LocalIOError, UsageProblem
from .probe_source import name_of

_STEM = "sample_probe"
_NAME = "sample-probe"


@dataclass(frozen=True)
class Scaffold:
    """What was written."""

    name: str
    """Kebab-case."""
    probe: Path
    test: Path


def create(name: str, directory: Path) -> Scaffold:
    """Write ``<directory>/<name>.py`` and, in the folder ``tests`` beside ``directory``, its test.

    Raises:
        UsageProblem: ``name`` is no name for a probe, or one of the files exists: nothing is overwritten.
        LocalIOError: a file cannot be written.
    """
    stem = name.removesuffix(".py").replace("-", "_")
    if "/" in name:
        raise UsageProblem(f"{name!r} is a path, not a name", hint="say where with --directory")
    try:
        kebab = name_of(Path(f"{stem}.py"))
    except ConfigError as error:
        raise UsageProblem(f"{name!r} is no name for a probe", hint=error.hint) from None
    if keyword.iskeyword(stem):
        raise UsageProblem(f"{stem!r} is a word of Python", hint=f"add another word: {stem}-check")
    folder = directory.resolve()
    written = Scaffold(kebab, directory / f"{stem}.py", _beside(directory) / f"test_{stem}.py")
    for path in (written.probe, written.test):
        if path.exists() or path.is_symlink():
            raise UsageProblem(f"{path} exists already", hint="choose another name, or move the file away")
    for path, template in ((written.probe, f"{_STEM}.py"), (written.test, f"test_{_STEM}.py")):
        text = (paths.templates() / template).read_text(encoding="utf-8")
        text = text.replace(_STEM, stem).replace(_NAME, kebab)
        _write(path, text.replace('/ "probes" /', f"/ {json.dumps(folder.name)} /"))
    return written


def _beside(directory: Path) -> Path:
    parent = directory.parent if directory.name not in {"", ".."} else directory.resolve().parent
    return parent / "tests"


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise LocalIOError(f"{path} cannot be written: {error.strerror}", hint="choose another --directory") from None
