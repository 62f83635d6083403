"""The files that a job takes along: found, hashed, and given the names that they have on the host."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .errors import ConfigError, LocalIOError

MAX_FILES = 20_000
MAX_TOTAL = 16 * 1024**3
"""Largest sum of all files, bytes; data belongs on the host, not into every attempt."""
_SKIPPED = frozenset({".git", ".hg", ".svn", "__pycache__", ".venv", "venv", "node_modules", ".ipynb_checkpoints"})
_PIECE = 1 << 20


@dataclass(frozen=True)
class JobFile:
    """One file to send."""

    local: Path
    path: str
    """Where it stands below the job's folder, with ``/``."""
    sha256: str
    size: int
    """Bytes."""
    mode: int
    """Permission bits on the host: the owner's as they are here, others never more than reading."""

    def as_dict(self) -> dict[str, object]:
        """Return it as the request carries it."""
        return {"path": self.path, "sha256": self.sha256, "bytes": self.size, "mode": self.mode}


def collect(
    named: Sequence[str | Path], base: Path, *, on_progress: Callable[[int], None] | None = None
) -> tuple[JobFile, ...]:
    """Return every file that ``named`` (files and folders, relative to ``base``) stand for, sorted by name.

    A folder brings everything in it, version control, virtual environments and caches left out. What lies below
    ``base`` keeps its relative name; anything else stands directly in the job's folder. Links to files are sent as
    the files they lead to, links to folders inside a folder are left out.

    Args:
        named: what the user asked for.
        base: folder that relative names begin at.
        on_progress: called with the number of bytes hashed so far.

    Raises:
        ConfigError: something is missing or no file, two files want one name, or it is too much.
        LocalIOError: a file cannot be read.
    """
    found: dict[str, Path] = {}
    for one in named:
        for path, local in _expanded(Path(base, one), base):
            other = found.setdefault(path, local)
            if other != local:
                raise ConfigError(f"{other} and {local} would both be {path} on the host", hint="rename one of them")
            if len(found) > MAX_FILES:
                raise ConfigError(
                    f"{one}: more than {MAX_FILES} files", hint="send what the job runs, not what it reads; name folders one by one"
                )
    _refuse_nested(found)
    return tuple(_hashed(sorted(found.items()), on_progress))


def _expanded(local: Path, base: Path) -> Iterator[tuple[str, Path]]:
    try:
        status = local.stat()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{local}: {reason}", hint="files are looked for beside the job file, or where you are") from None
    name = _name_below(local, base)
    if stat.S_ISDIR(status.st_mode):
        yield from _walk(local, name)
    elif stat.S_ISREG(status.st_mode):
        if not name.parts:
            raise ConfigError(f"{local}: has no name")
        yield name.as_posix(), local
    else:
        raise ConfigError(f"{local}: is neither a file nor a folder")


def _name_below(local: Path, base: Path) -> PurePosixPath:
    absolute = Path(os.path.normpath(base.absolute() / local))
    root = Path(os.path.normpath(base.absolute()))
    try:
        return PurePosixPath(absolute.relative_to(root))
    except ValueError:
        return PurePosixPath(absolute.name)


def _walk(folder: Path, name: PurePosixPath) -> Iterator[tuple[str, Path]]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise LocalIOError(f"{folder}: {error.strerror}") from None
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in _SKIPPED:
                yield from _walk(Path(entry.path), name / entry.name)
        elif entry.is_file():
            yield (name / entry.name).as_posix(), Path(entry.path)


def _refuse_nested(found: Iterable[str]) -> None:
    names = set(found)
    for name in names:
        for parent in PurePosixPath(name).parents:
            if parent.as_posix() in names:
                raise ConfigError(f"{parent} would be both a file and a folder on the host", hint="rename one of them")


def _hashed(
    found: Iterable[tuple[str, Path]], on_progress: Callable[[int], None] | None
) -> Iterator[JobFile]:
    total = 0
    for path, local in found:
        digest = hashlib.sha256()
        size = 0
        try:
            with local.open("rb") as stream:
                mode = os.fstat(stream.fileno()).st_mode
                while piece := stream.read(_PIECE):
                    digest.update(piece)
                    size += len(piece)
                    if on_progress is not None:
                        on_progress(total + size)
                    if total + size > MAX_TOTAL:
                        raise ConfigError(
                            f"{local}: the files have more than {MAX_TOTAL >> 30} GiB together",
                            hint="put data on the host once, and give the job its path",
                        )
        except OSError as error:
            raise LocalIOError(f"{local}: {error.strerror}", phase="config") from None
        total += size
        # Undecodable names travel as their bytes do in every JSON text here.
        yield JobFile(local, path, digest.hexdigest(), size, (mode & 0o755) | 0o400)


def parts(file: JobFile, size: int, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of ``file`` in pieces of ``size``; raise LocalIOError when it is shorter than it was.

    Args:
        file: the file.
        size: bytes of each piece but the last.
        start: bytes that the host has already.
    """
    offset = start
    try:
        with file.local.open("rb") as stream:
            stream.seek(start)
            while offset < file.size or file.size == 0:
                piece = stream.read(min(size, file.size - offset))
                if len(piece) < min(size, file.size - offset):
                    break
                yield offset, piece
                offset += len(piece)
                if file.size == 0:
                    return
    except OSError as error:
        raise LocalIOError(f"{file.local}: {error.strerror}", phase="upload") from None
    if offset < file.size:
        raise LocalIOError(f"{file.local}: became shorter while it was sent", phase="upload", hint="launch again")
