"""SHA-256 of a file and of a whole bundle; both ends compute it with this code.

A bundle has two parts: what every run executes (the agent and what enters the environment), and the library that
some probes import, several times as large. The bundle's digest is taken over the first part, and in that part stands
the digest of the second, as the file ``library``. So it names the contents of both, and the agent can find its own
files whole without reading those that nobody asks for.
"""

from __future__ import annotations

import os
import sys

from .layout import LIBRARY, PROBES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterable


def _constructor() -> Callable[[bytes], Any]:
    # The interpreter's own implementation: hashlib loads OpenSSL, 3 ms for what takes 1 ms to hash.
    try:
        module = __import__("_sha2" if sys.version_info >= (3, 12) else "_sha256")
        return module.sha256  # type: ignore[no-any-return]
    except (ImportError, AttributeError):
        from hashlib import sha256

        return sha256


def sha256(data: bytes) -> str:
    """Return the SHA-256 of ``data`` as 64 hex digits."""
    return str(_constructor()(data).hexdigest())


def digest(files: Iterable[tuple[str, bytes]]) -> str:
    """Return the digest over files given as (path relative to the bundle with ``/``, content), in any order."""
    total = _constructor()(b"rdiag bundle 1\n")
    for path, content in sorted(files):
        name = path.encode("utf-8", "surrogateescape")
        total.update(b"%d %d\n" % (len(name), len(content)))
        total.update(name)
        total.update(content)
    return str(total.hexdigest())


def bundle_digest(directory: str) -> str:
    """Return the digest over all files below ``directory``, without the library itself and ``__pycache__`` folders.

    Anything that is neither a regular file nor a folder (a link, a pipe) counts as a difference: no bundle
    holds one. Raises OSError when a file cannot be read.
    """
    return digest(_files(directory, "", lambda name: name != PROBES))


def library_digest(directory: str) -> str:
    """Return the digest over the library of the bundle in ``directory``; otherwise as :func:`bundle_digest`."""
    return digest(_files(directory, "", lambda name: name == PROBES))


def expected_library(directory: str) -> str:
    """Return what :func:`library_digest` must be, as the bundle in ``directory`` says; raises OSError."""
    with open(os.path.join(directory, LIBRARY), "rb", 0) as stream:
        return stream.read().decode("ascii", "replace").strip()


def _files(
    directory: str, prefix: str, wanted: Callable[[str], bool] | None = None
) -> Iterable[tuple[str, bytes]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            path = prefix + entry.name
            if wanted is not None and not wanted(path):
                continue
            if entry.is_dir(follow_symlinks=False):
                if entry.name != "__pycache__":
                    yield from _files(entry.path, path + "/")
            elif entry.is_file(follow_symlinks=False):
                with open(entry.path, "rb", 0) as stream:
                    yield path, stream.read()
            else:
                yield path + " (neither file nor folder)", b""
