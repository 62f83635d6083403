"""Agent + shared probe code + entry script -> one reproducible, content-addressed archive.

The archive is a shell script that carries its files in here-documents, so that the host needs nothing but ``sh``,
``cat``, ``mkdir`` and ``mv`` to unpack it, whether it arrives over SFTP or over a channel's stdin.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from . import environment, paths
from .agent.digest import digest
from .agent.layout import AGENT, ENTER, LIBRARY, PROBES
from .errors import InternalError
from .host import Environment
from .private_cache import Folder
from .transport.base import SafePath

_CARRIED = (".py", ".json", ".csv")
"""Code, and the tables that code reads: thresholds, reference figures."""
_DIGESTS = Folder("bundles", b"rdiag bundle 1", kept=128)
_DIGEST = re.compile("[0-9a-f]{64}")
_SETTLED_NS = 2_000_000_000
"""Nanoseconds after which a file that is changed again has another time: some file systems count in two seconds."""


@dataclass(frozen=True)
class Bundle:
    """What is installed on a host for one environment and one version of rdiag."""

    files: tuple[tuple[str, bytes], ...]
    """(path relative to the bundle, contents), sorted by path."""
    digest: str
    """Hash over all files (see :mod:`remote_diag.agent.digest`), 64 hex digits; also the name of its directory there."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(len(data) for _, data in self.files)

    def listing(self) -> dict[str, object]:
        """Return hash, size and every file with its own hash, for ``rdiag run --dry-run``."""
        return {
            "sha256": self.digest,
            "bytes": self.size,
            "files": {name: hashlib.sha256(data).hexdigest() for name, data in self.files},
        }

    def installer(self) -> bytes:
        """Return the archive: a shell script for ``sh <file> CACHE NONCE [replace]``, the same bytes every time."""
        return b"".join(self._script())

    def _script(self) -> Iterator[bytes]:
        yield b"hash=%s\n" % self.digest.encode()
        yield paths.install_script().read_bytes()
        end = b"RDIAG_%s" % self.digest[:16].encode()
        yield b"make_folders() {\n"
        for directory in sorted({str(Path(name).parent) for name, _ in self.files} - {"."}):
            yield b'mkdir -p "$1/%s" || return 1\n' % SafePath(directory).encode()
        yield b"}\neach_file() {\n"
        for name, data in self.files:
            if not data.endswith(b"\n") or b"\0" in data or end in data:
                raise InternalError(f"bundle file {name} cannot be carried in a here-document")
            yield b"\"$1\" \"$2/%s\" <<'%s' || return 1\n" % (SafePath(name).encode(), end)
            yield data
            yield b"%s\n" % end
        yield b"}\n"
        yield b'install "$@"\n'


@dataclass(frozen=True)
class _Source:
    """One file of ours that is carried."""

    name: str
    """Where it goes, relative to the bundle."""
    path: Path
    status: os.stat_result


def _sources() -> list[_Source]:
    """Return what is carried, whatever the environment; raises OSError."""
    return [
        *_below(paths.agent_source(), AGENT),
        *_below(paths.shipped_probes() / "lib", f"{PROBES}/lib"),
        _Source(ENTER, paths.entry_script(), paths.entry_script().stat()),
    ]


def _below(root: Path, prefix: str) -> Iterator[_Source]:
    with os.scandir(root) as entries:
        for entry in entries:
            name = f"{prefix}/{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                if entry.name != "__pycache__":
                    yield from _below(root / entry.name, name)
            # Names with a dot in front are those of editors: a lock is a link to nowhere.
            elif entry.name.endswith(_CARRIED) and not entry.name.startswith("."):
                yield _Source(name, root / entry.name, entry.stat())


def _read(source: _Source) -> bytes:
    data = source.path.read_bytes()
    return data if data.endswith(b"\n") else data + b"\n"


def build(target: Environment) -> Bundle:
    """Return the bundle for a host whose environment is ``target``; raises ConfigError for bad values in it."""
    with _reading():
        return _built(target, _stamp(target, _sources()))


def digest_for(target: Environment) -> str:
    """Return the digest of :func:`build`, without reading the files where it is known what is in them.

    It is remembered in the user's cache folder by what ``stat`` says of every file: size, inode, and both times to the
    nanosecond. Whoever needs the contents reads them, and goes by the digest of what was read.

    Raises:
        ConfigError: bad values in ``target``.
    """
    with _reading():
        now = time.time_ns()
        sources = _sources()
        name = _stamp(target, sources)
        try:
            return _known(_DIGESTS.read(name))
        except (OSError, ValueError):
            built = _built(target, name)
            # What changed a moment ago may change once more and keep its times: they are only so fine.
            newest = max(max(each.status.st_mtime_ns, each.status.st_ctime_ns) for each in sources)
            if newest < now - _SETTLED_NS and _stamp(target, _sources()) == name:
                _DIGESTS.write(name, built.digest.encode("ascii"))
            return built.digest


@lru_cache(maxsize=8)
def _built(target: Environment, stamp: str) -> Bundle:  # noqa: ARG001 - it tells one state of our files from another
    """Return the bundle, read now; the same again for the same ``stamp``."""
    files = {source.name: _read(source) for source in _sources()}
    files.update(environment.entry_files(target))
    files[f"{PROBES}/__init__.py"] = b'"""Probe code on the host."""\n'
    library = {name: data for name, data in files.items() if name.startswith(f"{PROBES}/")}
    files[LIBRARY] = digest(library.items()).encode("ascii") + b"\n"
    ordered = tuple(sorted(files.items()))
    return Bundle(files=ordered, digest=digest(item for item in ordered if item[0] not in library))


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InternalError(f"rdiag's own files cannot be read: {error}") from error


def _stamp(target: Environment, sources: list[_Source]) -> str:
    """Return a name for all that a digest depends on: the environment, the files, and the code that puts them together."""
    here = Path(__file__)
    code = [_Source(path.name, path, path.stat()) for path in (here, here.with_name("environment.py"))]
    facts = [target.kind, target.value]
    for source in (*sorted(sources, key=lambda source: source.name), *code):
        status = source.status
        facts.append(f"{source.name} {status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}")
    return hashlib.sha256("\0".join(facts).encode("utf-8", "surrogateescape")).hexdigest()


def _known(body: bytes) -> str:
    text = body.decode("ascii")
    if not _DIGEST.fullmatch(text):
        raise ValueError("no digest")
    return text
