"""Bringing a bundle to a host: by SFTP, or through a channel's stdin where there is no SFTP."""

from __future__ import annotations

import os
import time

from .agent.frames import Decoder, FrameError
from .agent.layout import DEFAULT_CACHE
from .bundle import Bundle
from .errors import AuthError, ConnectionLost, EnvironmentUnfit
from .host import Host
from .text import last_lines
from .transport.base import Channel, SafeCommand, SafePath, Transport, UploadUnavailable

_TEMPORARY_ROOTS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - below them only a directory with a random name
_INSTALL_TIMEOUT = 60.0
_REASONS = {
    "cannot-create": "a directory cannot be created",
    "cannot-write": "the files cannot be written",
}


def install(
    transport: Transport, host: Host, bundle: Bundle, *, cache: SafePath | None, replace: bool
) -> tuple[SafePath, str | None]:
    """Unpack ``bundle`` on the host; return (cache directory, note for the user or None).

    Without a ``cache_dir`` of its own in hosts.yaml, a host whose home directory cannot be written to gets the
    bundle into a directory with a random name, made for this session alone.

    Raises:
        AuthError: the account runs no commands.
        EnvironmentUnfit: no place can be written to.
    """
    chosen = cache or SafePath(host.cache_dir or DEFAULT_CACHE)
    try:
        _install_at(transport, host, bundle, chosen, replace=replace)
        return chosen, None
    except EnvironmentUnfit as error:
        if host.cache_dir is not None:
            raise
        problem = error
    for root in _TEMPORARY_ROOTS:
        place = SafePath(f"{root}/rdiag.{os.urandom(16).hex()}")
        try:
            _install_at(transport, host, bundle, place, replace=False, over_sftp=False)
        except EnvironmentUnfit:
            continue
        return place, (
            f"{problem.message}; using {place} for this session (set cache_dir for {host.name} in hosts.yaml to keep "
            "the agent there)"
        )
    raise problem


def remove_temporary(transport: Transport, cache: SafePath) -> None:
    """Remove a directory that :func:`install` made for one session; never raises."""
    try:
        channel = transport.execute(SafeCommand(f"rm -rf {cache}"))
        channel.send_eof()
        channel.exit_status(5.0)
        channel.close()
    except Exception:  # noqa: BLE001 - leaving a folder in a temporary directory is no reason to fail
        return


def _install_at(
    transport: Transport, host: Host, bundle: Bundle, cache: SafePath, *, replace: bool, over_sftp: bool = True
) -> None:
    nonce = os.urandom(16).hex()
    mode = "replace" if replace else "keep"
    archive = bundle.installer()
    if over_sftp:
        script = SafePath(f"{cache}/{bundle.digest}.{nonce}.install")
        try:
            transport.upload(archive, script)
        except UploadUnavailable:
            pass
        else:
            channel = transport.execute(SafeCommand(f"sh {script} {cache} {nonce} {mode} {script}"))
            channel.send_eof()
            answer = _converse(channel, host, nonce)
            if answer[0] is not None:
                _expect_installed(answer, host)
                return
            # SFTP and commands may start in different directories (a login script that changes it, a chroot);
            # through a channel the archive lands where commands start.
    channel = transport.execute(SafeCommand(f"sh -s {cache} {nonce} {mode}"))
    try:
        channel.send(archive)
        channel.send_eof()
    except ConnectionLost:
        # The command ended early; what it printed explains more than the broken pipe does.
        pass
    _expect_installed(_converse(channel, host, nonce), host)


def _expect_installed(answer: tuple[str | None, int | None, bytes], host: Host) -> None:
    kind, status, output = answer
    if kind == "installed":
        return
    details = tuple(last_lines(output))
    if kind is not None:
        told = details[-1] if details else _REASONS.get(kind, kind)
        raise EnvironmentUnfit(
            f"the agent cannot be installed: {told}",
            host=host.name,
            phase="upload",
            hint="free space or fix permissions there, or set cache_dir in hosts.yaml to a directory that can be written",
            details=details,
        )
    raise AuthError(
        f"the account runs no commands: {details[-1]}" if details else "the account runs no commands",
        host=host.name,
        phase="start",
        hint=f"log in by hand and look: the login shell must be a real one (exit status {status})",
        details=details,
    )


def _converse(channel: Channel, host: Host, nonce: str) -> tuple[str | None, int | None, bytes]:
    """Return (kind of the frame that answered, exit status, everything else that was printed)."""
    decoder = Decoder(nonce)
    kind: str | None = None
    errors = bytearray()
    deadline = time.monotonic() + max(_INSTALL_TIMEOUT, host.connect_timeout)
    try:
        while (received := channel.receive(1.0)) is not None:
            errors += received[1][: 64 * 1024 - len(errors)]
            for frame in decoder.feed(received[0]):
                kind = frame.kind
            if time.monotonic() > deadline:
                raise ConnectionLost("the installation did not end in time", host=host.name, phase="upload")
        return kind, channel.exit_status(2.0), bytes(decoder.noise + decoder.rest() + errors)
    except FrameError as error:
        raise ConnectionLost(f"the answer is damaged: {error}", host=host.name, phase="upload") from error
    finally:
        channel.close()
