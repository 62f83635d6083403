"""The agent's first words: who and where it is, and that its files are what they were when they were sent."""

from __future__ import annotations

import os
import select
import sys
from time import monotonic

from . import wirejson
from .digest import bundle_digest, expected_library, library_digest
from .frames import encode
from .protocol import CHECK_AGENT, CHECK_WHOLE, PROTOCOL

_PATIENCE = 3600.0
"""Seconds that an agent waits for its client to want something; a session may have started it ahead of time."""
_NONCE = 32


def main(entry_nonce: str, bundle: str) -> int:
    """Serve one client on stdin and stdout; return the exit status.

    Args:
        entry_nonce: the nonce of the first frame, 32 hex digits.
        bundle: absolute path of the folder that this program was installed in.
    """
    for descriptor in (0, 1, 2):
        _ensure_open(descriptor)
    umask = os.umask(0o077)
    computed = bundle_digest(bundle)
    expected = os.path.basename(bundle)
    cache = os.path.dirname(bundle)
    if computed != expected:
        return _say_damaged(entry_nonce, computed, expected)
    # Read after that: the client may still be finding out what it will ask for.
    word, rest = _line(b"")
    if word not in (CHECK_AGENT, CHECK_WHOLE):
        return _refuse("the second line on stdin must be %r or %r" % (CHECK_AGENT, CHECK_WHOLE)) if word else 0
    if word == CHECK_WHOLE:
        wanted, found = expected_library(bundle), library_digest(bundle)
        if found != wanted:
            return _say_damaged(entry_nonce, found, wanted)
    _say(
        entry_nonce,
        "hello",
        {
            "protocol": PROTOCOL,
            "python": "%d.%d.%d" % sys.version_info[:3],
            "executable": _text(sys.executable),
            "bundle": computed,
            "cache": _text(cache),
            "cwd": _text(_working_directory()),
            "user": _text(os.environ.get("USER") or os.environ.get("LOGNAME") or str(os.geteuid())),
            "pid": os.getpid(),
        },
    )
    nonce, rest = _line(rest)
    if len(nonce) != _NONCE or nonce.strip("0123456789abcdef"):
        return _refuse("the third line on stdin must be a nonce of 32 hex digits") if nonce else 0
    from .supervisor import Supervisor

    return Supervisor(bundle, cache, nonce, rest, umask).serve()


def _ensure_open(descriptor: int) -> None:
    """Fill a closed standard descriptor, lest a pipe of ours takes its number."""
    try:
        os.fstat(descriptor)
    except OSError:
        os.open(os.devnull, os.O_RDWR)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""


def _text(value: str) -> str:
    """Return ``value`` without the surrogates that stand for undecodable bytes."""
    return os.fsencode(value).decode("utf-8", "backslashreplace")


def _say(nonce: str, kind: str, fields: dict[str, object]) -> None:
    data = memoryview(encode(nonce, 0, kind, wirejson.encode(fields)))
    while data:
        data = data[os.write(1, data) :]


def _say_damaged(nonce: str, found: str, expected: str) -> int:
    _say(nonce, "bundle-damaged", {"bundle": found, "expected": _text(expected)})
    return 0


def _refuse(cause: str) -> int:
    os.write(2, b"rdiag agent: %s\n" % cause.encode("ascii"))
    return 2


def _line(data: bytes) -> tuple[str, bytes]:
    """Return the next line and what came after it; empty when the client ends or says nothing.

    Args:
        data: what was read of it before.
    """
    until = monotonic() + _PATIENCE
    while b"\n" not in data and len(data) <= _NONCE:
        poller = select.poll()
        poller.register(0, select.POLLIN)
        poller.register(1, 0)
        ready = poller.poll(max(0.0, until - monotonic()) * 1000)
        if not any(descriptor == 0 for descriptor, _ in ready):
            # Too late, or nobody reads our stdout any more.
            return "", b""
        piece = os.read(0, 1 << 16)
        if not piece:
            return "", b""
        data += piece
    line, _, rest = data.partition(b"\n")
    return line.decode("ascii", "replace"), rest
