"""HTTP requests to a server that need not be a friend: bounded in time, in size, and never sent on to somewhere else."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
from time import monotonic
from urllib.parse import urlsplit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CONNECT_SECONDS = 5.0
MAX_BODY = 8 << 20
"""Bytes; the metrics of a large server have a few hundred KiB."""
SHORTEST_KEY = 6
_HEADERS = {"Accept": "application/json, text/plain", "User-Agent": "rdiag", "Connection": "close"}


class NoAnswer(Exception):
    """The server gave none that can be used; the text says why.

    Args:
        why: what happened.
        status: HTTP status, if there was one.
        reached: whether anything listens there.
    """

    def __init__(self, why: str, *, status: int | None = None, reached: bool = True) -> None:
        super().__init__(why)
        self.status = status
        self.reached = reached


class Url:
    """An address of a server.

    Args:
        text: ``http://HOST:PORT[/PATH]`` or https; without credentials, query and fragment.

    Raises:
        ValueError: it is no such address.
    """

    def __init__(self, text: str) -> None:
        if "@" in text:
            raise ValueError("the address must not hold a name or password; see --api-key-file")
        parts = urlsplit(text if "://" in text else "http://" + text)
        if parts.scheme not in {"http", "https"}:
            raise ValueError("the address must begin with http:// or https://")
        if parts.query or parts.fragment:
            raise ValueError("the address must not have a query or a fragment")
        if not parts.hostname or any(ord(char) <= 32 or ord(char) == 127 for char in text):
            raise ValueError("the address names no host")
        self.secure = parts.scheme == "https"
        self.host = parts.hostname
        try:
            port = parts.port
        except ValueError:
            raise ValueError("the port must be a number up to 65535") from None
        self.port = port if port is not None else (443 if self.secure else 80)
        self.path = parts.path.rstrip("/")

    def __str__(self) -> str:
        """Return it as it is shown."""
        host = "[%s]" % self.host if ":" in self.host else self.host
        return "%s://%s:%d%s" % ("https" if self.secure else "http", host, self.port, self.path)


class Client:
    """Asks one server.

    Args:
        url: its address.
        key: sent as bearer token, if any.
        seconds: for a whole request, from the connection to the last byte.
    """

    def __init__(self, url: Url, key: str | None, seconds: float) -> None:
        self.url = url
        self.seconds = seconds
        # What is short, or a number, may stand in an answer by itself.
        self._key = key if key is not None and len(key) >= SHORTEST_KEY and not key.isdigit() else None
        self._headers = {**_HEADERS, **({"Authorization": "Bearer " + key} if key else {})}

    def get(self, path: str) -> bytes:
        """Return the body at ``path``.

        Raises:
            NoAnswer: anything but a whole answer with status 200 in time.
        """
        return self._without_key(self._ask("GET", path, None, self.seconds))

    def post(self, path: str, body: Any, seconds: float) -> Any:
        """Send ``body`` as JSON, and return the JSON that comes back; raise as :meth:`get` does."""
        return parse(self._without_key(self._ask("POST", path, json.dumps(body).encode("ascii"), seconds)))

    def _without_key(self, data: bytes) -> bytes:
        """Return an answer without our key: a server that repeats it must not have it shown."""
        return data.replace(self._key.encode("ascii"), b"(hidden)") if self._key else data

    def _ask(self, method: str, path: str, body: bytes | None, seconds: float) -> bytes:
        until = monotonic() + seconds
        connection = self._connection(min(CONNECT_SECONDS, seconds))
        # A server that sends a byte now and then never lets a socket's own timeout pass.
        expired = threading.Event()
        watch = threading.Timer(max(0.01, seconds), _cut, (connection, expired))
        watch.daemon = True
        watch.start()
        reached = False
        try:
            connection.connect()
            reached = True
            if expired.is_set():
                # The watch found no socket to cut, and will not come again.
                raise TimeoutError
            connection.sock.settimeout(max(0.1, until - monotonic()))
            headers = dict(self._headers)
            if body is not None:
                headers["Content-Type"] = "application/json"
            connection.request(method, self.url.path + path, body, headers)
            response = connection.getresponse()
            data = self._body(response, until, path, self._key)
            if not expired.is_set():
                return data
            # Cut off: without a length the rest would not be missed.
            raise TimeoutError
        except NoAnswer:
            if expired.is_set():
                raise NoAnswer("%s: no whole answer within %.0f s" % (path, seconds)) from None
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            if expired.is_set() or isinstance(error, socket.timeout):
                raise NoAnswer("%s: no whole answer within %.0f s" % (path, seconds), reached=reached) from None
            # Somebody listens there, who speaks no TLS or is not trusted.
            raise NoAnswer("%s: %s" % (path, _cause(error)), reached=reached or isinstance(error, ssl.SSLError)) from None
        finally:
            watch.cancel()
            connection.close()

    def _connection(self, seconds: float) -> http.client.HTTPConnection:
        if self.url.secure:
            return http.client.HTTPSConnection(self.url.host, self.url.port, timeout=seconds, context=ssl.create_default_context())
        return http.client.HTTPConnection(self.url.host, self.url.port, timeout=seconds)

    @staticmethod
    def _body(response: http.client.HTTPResponse, until: float, path: str, key: str | None) -> bytes:
        if response.status != 200:
            where = response.headers.get("Location", "")
            where = where.replace(key, "(hidden)") if key else where
            more = " to %s, which is not followed" % ascii(where[:200]) if where else ""
            raise NoAnswer("%s: HTTP status %d%s" % (path, response.status, more), status=response.status)
        parts = []
        size = 0
        while True:
            if monotonic() > until:
                raise NoAnswer("%s: the answer does not end in time" % path, status=200)
            part = response.read1(1 << 16)
            if not part:
                break
            size += len(part)
            if size > MAX_BODY:
                raise NoAnswer("%s: the answer has more than %d MiB" % (path, MAX_BODY >> 20), status=200)
            parts.append(part)
        if response.length:
            raise NoAnswer("%s: the answer ends %d bytes too early" % (path, response.length), status=200)
        return b"".join(parts)


def parse(data: bytes) -> Any:
    """Return the JSON value in ``data``; raise NoAnswer where there is none."""
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        raise NoAnswer("the answer is no JSON: it begins with %s" % ascii(data[:60]), status=200) from None


def _cut(connection: http.client.HTTPConnection, expired: threading.Event) -> None:
    expired.set()
    sock = connection.sock
    if sock is not None:
        with contextlib.suppress(OSError):
            # That of TLS would take the session away from under whoever reads.
            socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _cause(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return ascii(text)[1:-1][:200]
