"""Agent + shared probe code + entry script -> one reproducible, content-addressed archive.

The archive is a shell script that carries its files in here-documents, so that the host needs nothing but ``sh``,
``cat``, ``mkdir`` and ``mv`` to unpack it, whether it arrives over SFTP or over a channel's stdin.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from . import environment, paths
from .agent.digest import digest
from .agent.layout import AGENT, PROBES
from .errors import InternalError
from .host import Environment
from .transport.base import SafePath

_CARRIED = frozenset({".py", ".json", ".csv"})
"""Code, and the tables that code reads: thresholds, reference figures."""


@dataclass(frozen=True)
class Bundle:
    """What is installed on a host for one environment and one version of rdiag."""

    files: tuple[tuple[str, bytes], ...]
    """(path relative to the bundle, contents), sorted by path."""
    digest: str
    """Hash over all files, 64 hex digits; also the name of the bundle's directory on the host."""

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
        yield b"write_files() {\n"
        for directory in sorted({str(Path(name).parent) for name, _ in self.files} - {"."}):
            yield b'mkdir -p "$1/%s" || return 1\n' % SafePath(directory).encode()
        for name, data in self.files:
            end = b"RDIAG_%s" % self.digest[:16].encode()
            if not data.endswith(b"\n") or b"\0" in data or end in data:
                raise InternalError(f"bundle file {name} cannot be carried in a here-document")
            yield b"cat >\"$1/%s\" <<'%s' || return 1\n" % (SafePath(name).encode(), end)
            yield data
            yield b"%s\n" % end
        yield b"}\n"
        yield b'install "$@"\n'


def _source_files(root: Path, prefix: str) -> Iterator[tuple[str, bytes]]:
    for path in sorted(root.rglob("*")):
        if path.suffix in _CARRIED:
            data = path.read_bytes()
            yield f"{prefix}/{path.relative_to(root).as_posix()}", data if data.endswith(b"\n") else data + b"\n"


@lru_cache(maxsize=64)
def build(target: Environment) -> Bundle:
    """Return the bundle for a host whose environment is ``target``; raises ConfigError for bad values in it."""
    try:
        files = dict(_source_files(paths.agent_source(), AGENT))
        probes = paths.shipped_probes()
        files[f"{PROBES}/__init__.py"] = b'"""Probe code on the host."""\n'
        files.update(_source_files(probes / "lib", f"{PROBES}/lib"))
    except OSError as error:
        raise InternalError(f"rdiag's own files cannot be read: {error}") from error
    files.update(environment.entry_files(target))
    ordered = tuple(sorted(files.items()))
    return Bundle(files=ordered, digest=digest(ordered))
