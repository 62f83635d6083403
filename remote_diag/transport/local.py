"""This machine as a host: the same agent, started as a child process, without a shell."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import selectors
import signal
import subprocess
import threading
import time
from pathlib import Path

from ..errors import ConnectionLost, EnvironmentUnfit
from ..host import Host
from .base import ConnectionFacts, SafeCommand, SafePath
from .channels import MAX_RECEIVED, SEND_TIMEOUT

_BUFFERED = 2 * 1024 * 1024
"""Output that is kept while nobody receives; as much as an ssh channel has."""


class LocalChannel:
    """A child process; satisfies :class:`remote_diag.transport.base.Channel`."""

    def __init__(self, process: subprocess.Popen[bytes], host: str) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None  # noqa: S101, PT018
        self._process = process
        self._host = host
        self._stdin = process.stdin
        self._buffers = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
        self._stdout, self._stderr = process.stdout.fileno(), process.stderr.fileno()
        self._open = {self._stdout, self._stderr}
        self._lock = threading.Lock()
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._awake, self._alarm = os.pipe()
        self._closed = False
        for stream in (process.stdin, process.stdout, process.stderr):
            os.set_blocking(stream.fileno(), False)

    def send(self, data: bytes) -> None:
        """Write all of ``data``; output that arrives meanwhile is kept, so that neither side waits for the other."""
        with self._sending:
            self._send(data)

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        deadline = time.monotonic() + SEND_TIMEOUT
        while view:
            if self._closed or self._stdin.closed:
                raise self._lost("the command no longer reads its input")
            try:
                view = view[os.write(self._stdin.fileno(), view[: 64 * 1024]) :]
                deadline = time.monotonic() + SEND_TIMEOUT
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise self._lost(f"the command did not read its input for {SEND_TIMEOUT:.0f} s") from None
                self._wait(deadline - time.monotonic(), writing=True)
            except OSError:
                raise self._lost("the command no longer reads its input") from None

    def send_eof(self) -> None:
        """Close the command's stdin; harmless when repeated."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    def receive(self, timeout: float) -> tuple[bytes, bytes] | None:
        """Return what arrived on (stdout, stderr); see :meth:`remote_diag.transport.base.Channel.receive`."""
        with self._receiving:
            return self._receive(timeout)

    def _receive(self, timeout: float) -> tuple[bytes, bytes] | None:
        deadline = time.monotonic() + timeout
        while True:
            if self._closed:
                raise self._lost("the channel is closed")
            out, err = self._taken(self._stdout), self._taken(self._stderr)
            if out or err:
                return out, err
            if not self._open:
                return None
            remaining = deadline - time.monotonic()
            # Look once even without time: what has arrived is to be returned.
            self._wait(max(0.0, remaining))
            if remaining <= 0 and not any(self._buffers.values()) and self._open:
                return b"", b""

    def exit_status(self, timeout: float) -> int | None:
        """Return the exit status, None when it is not known in time or after a signal."""
        try:
            status = self._process.wait(max(0.0, timeout))
        except subprocess.TimeoutExpired:
            return None
        return status if status >= 0 else None

    def close(self) -> None:
        """Close stdin, give the process a moment to end by itself, then end it and its process group."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        # Whoever waits in another thread is woken, and must be gone before the numbers of its files are free for others.
        os.write(self._alarm, b"!")
        with self._sending, contextlib.suppress(OSError):
            self._stdin.close()
        # The agent takes the end of its stdin as the order to end the run; killing it at once would orphan the rest.
        try:
            self._process.wait(0.8)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.2)
        with self._sending, self._receiving:
            for stream in (self._process.stdout, self._process.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
            os.close(self._awake)
            os.close(self._alarm)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def _taken(self, descriptor: int) -> bytes:
        buffer = self._buffers[descriptor]
        data = bytes(buffer[:MAX_RECEIVED])
        del buffer[:MAX_RECEIVED]
        return data

    def _wait(self, timeout: float, *, writing: bool = False) -> None:
        """Wait for one event, and read what can be read into the buffers."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._awake, selectors.EVENT_READ)
            for descriptor in self._open:
                if len(self._buffers[descriptor]) < _BUFFERED:
                    selector.register(descriptor, selectors.EVENT_READ)
            if writing:
                selector.register(self._stdin.fileno(), selectors.EVENT_WRITE)
            for key, _ in selector.select(timeout):
                if key.fd in self._open:
                    self._read(key.fd)

    def _read(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, MAX_RECEIVED)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._buffers[descriptor] += data
        else:
            self._open.discard(descriptor)

    def _lost(self, cause: str) -> ConnectionLost:
        return ConnectionLost(cause, host=self._host)


class LocalTransport:
    """This machine; satisfies :class:`remote_diag.transport.base.Transport`."""

    def __init__(self, host: Host) -> None:
        self.facts = ConnectionFacts(transport="local", target="this machine")
        self._host = host
        self._channels: list[LocalChannel] = []

    def prestart(self) -> None:
        """Do nothing: there is no network to be early at."""

    def connect(self) -> None:
        """Check that there is a home directory to start in."""
        if not self._home.is_dir():
            raise EnvironmentUnfit(
                f"the home directory {self._home} does not exist",
                host=self._host.name,
                phase="connect",
                hint="set HOME to a directory that exists",
            )

    def execute(self, command: SafeCommand) -> LocalChannel:
        """Start ``command``, split at its blanks, in the home directory; raise TypeError for any other type."""
        if not isinstance(command, SafeCommand):
            raise TypeError(f"only a SafeCommand is executed, not {type(command).__name__}")
        try:
            process = subprocess.Popen(
                command.split(" "),
                cwd=self._home,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                # Ctrl-C in the terminal goes to the client, which asks the agent to end the run.
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentUnfit(
                f"{command.split(' ')[0]} cannot be started: {error.strerror}", host=self._host.name
            ) from None
        self._channels = [channel for channel in self._channels if not channel.closed]
        channel = LocalChannel(process, self._host.name)
        self._channels.append(channel)
        return channel

    def upload(self, data: bytes, path: SafePath) -> None:
        """Create ``path`` holding ``data``; see :meth:`remote_diag.transport.base.Transport.upload`."""
        if not isinstance(path, SafePath):
            raise TypeError(f"only a SafePath is uploaded to, not {type(path).__name__}")
        target = self._home / path
        temporary = target.with_name(f"{target.name}.{secrets.token_hex(8)}.part")
        try:
            _make_directories(target.parent)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
                    file.write(data)
                temporary.replace(target)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise
        except OSError as error:
            raise EnvironmentUnfit(
                f"{target} cannot be written: {error.strerror or errno.errorcode.get(error.errno or 0, 'failed')}",
                host=self._host.name,
                phase="upload",
                hint="free space or fix permissions there, or set cache_dir in hosts.yaml",
            ) from None

    def ping(self, timeout: float) -> float:  # noqa: ARG002 - the interface
        """Return 0: there is no way to lose this machine."""
        return 0.0

    def close(self) -> None:
        """End every process that was started here."""
        for channel in self._channels:
            channel.close()
        self._channels.clear()

    @property
    def _home(self) -> Path:
        return Path(os.environ.get("HOME") or Path("~").expanduser())


def _make_directories(directory: Path) -> None:
    missing: list[Path] = []
    while not directory.exists():
        missing.append(directory)
        directory = directory.parent
    for one in reversed(missing):
        with contextlib.suppress(FileExistsError):
            one.mkdir(mode=0o700)
