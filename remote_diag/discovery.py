"""Where probes are found: shipped, in ``./probes``, in ``--probe-path``; the later one of a name wins.

Finding a probe looks at file names only; one that is asked for is loaded, the others are not touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import paths
from .errors import ConfigError
from .probe_source import name_of
from .text import safe

if TYPE_CHECKING:
    from .probe import Probe

SHIPPED = "shipped"
"""Origin of the probes that come with rdiag."""


@dataclass(frozen=True)
class Found:
    """A probe file by its name; not read yet."""

    name: str
    """Kebab-case, or the file's stem when that is no name for a probe."""
    path: Path
    origin: str
    """``shipped``, or the folder or file that was searched, as the user wrote it."""
    shadows: Path | None = None
    """The file of the same name, and other content, that this one wins over."""


@dataclass(frozen=True)
class Listed:
    """One line of ``rdiag probes``: a probe, or what is wrong with its file."""

    found: Found
    probe: Probe[Any, Any] | None
    error: ConfigError | None


def find(name: str, probe_paths: Sequence[Path] = ()) -> Probe[Any, Any]:
    """Return the probe called ``name``, loaded; no other probe file is read.

    Args:
        name: ``vocab-compare`` (or ``vocab_compare``), or the path of a probe file, which ends in ``.py``.
        probe_paths: further folders and files to search; the last one wins.

    Raises:
        ConfigError: there is no such probe, or its file breaks the contract.
    """
    from .probe import load

    return load(locate(name, probe_paths).path)


def locate(name: str, probe_paths: Sequence[Path] = ()) -> Found:
    """Return where the probe called ``name`` is, as :func:`find` does, without reading it."""
    if name.endswith(".py"):
        path = Path(name)
        return Found(name_of(path), path, str(path.parent))
    known = _all(probe_paths)
    wanted = name.replace("_", "-")
    if wanted in known:
        return known[wanted]
    raise _unknown(name, known, probe_paths)


def names(probe_paths: Sequence[Path] = ()) -> list[str]:
    """Return the names of all probes, sorted; files are not read."""
    return sorted(_all(probe_paths))


def listing(probe_paths: Sequence[Path] = (), *, below: str = "") -> list[Listed]:
    """Return every probe, sorted by name; a broken file is listed with its error and hides none of the others.

    Args:
        probe_paths: further folders and files to search; the last one wins.
        below: the folder of that name inside of each folder is searched instead of the folder itself.
    """
    from .probe import load

    listed = []
    for _, found in sorted(_all(probe_paths, below).items()):
        try:
            listed.append(Listed(found, load(found.path), None))
        except ConfigError as error:
            listed.append(Listed(found, None, error))
    return listed


def _all(probe_paths: Sequence[Path], below: str = "") -> dict[str, Found]:
    known: dict[str, Found] = {}
    for origin, path in _files(probe_paths, below):
        try:
            name = name_of(path)
        except ConfigError:
            # Listed under what it is called, where its error tells how to rename it.
            name = path.stem
        before = known.get(name)
        known[name] = Found(name, path, origin, None if before is None else _shadowed(before, path))
    return known


def _shadowed(before: Found, path: Path) -> Path | None:
    try:
        same = before.path.read_bytes() == path.read_bytes()
    except OSError:
        same = False
    return before.shadows if same else before.path


def _files(probe_paths: Sequence[Path], below: str) -> Iterator[tuple[str, Path]]:
    """Yield (origin, probe file), least important first; no file twice."""
    seen: set[Path] = set()
    places = [(SHIPPED, paths.shipped_probes()), (f"./{paths.user_probes()}", paths.user_probes())]
    for origin, place in (*places, *((str(path), path) for path in probe_paths)):
        searched = place / below if below else place
        for path in _in(searched, required=not below and place in probe_paths):
            resolved = path.resolve()
            if resolved not in seen:
                seen.add(resolved)
                yield origin, path


def _in(place: Path, *, required: bool) -> list[Path]:
    if place.suffix == ".py" and place.is_file():
        return [place]
    try:
        entries = sorted(place.iterdir())
    except OSError as error:
        if not required:
            return []
        raise ConfigError(
            f"{place}: cannot be searched for probes: {error.strerror}", hint="give --probe-path a folder or a .py file"
        ) from None
    return [path for path in entries if path.suffix == ".py" and not path.name.startswith((".", "_")) and path.is_file()]


def _unknown(name: str, known: dict[str, Found], probe_paths: Sequence[Path]) -> ConfigError:
    shown = safe(name, limit=80)
    if "/" in name:
        return ConfigError(f"there is no probe '{shown}'", hint=f"the path of a probe file ends in .py: {shown}.py")
    from difflib import get_close_matches

    near = get_close_matches(name.replace("_", "-"), known, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    searched = [str(paths.shipped_probes()), *(str(path) for path in (paths.user_probes(), *probe_paths))]
    return ConfigError(
        f"there is no probe '{shown}'{meant}",
        hint=f"searched {', '.join(searched)}; see: rdiag probes; or write one: rdiag new-probe NAME",
    )
