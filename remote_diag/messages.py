"""What the agent says, checked by hand: everything on the wire comes from a host and may be hostile.

The first messages arrive before the heavy imports are done, so nothing but the standard library is used. Every text,
number and list is bounded; unknown and missing fields are refused, which is safe because a client and its agent
always come from one release (the bundle's hash is part of the command).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from .agent.protocol import LEVELS, OUTCOMES, PROTOCOL
from .findings import Finding, Level, Measured
from .strict_json import StrictJsonError, loads
from .text import safe

MAX_MESSAGE = 2 * 1024 * 1024
"""Largest JSON message, bytes; only a ``result`` may be larger."""
_TEXT = 16 * 1024
_PATH = 4096
_LIST = 1000
_HEX = frozenset("0123456789abcdef")
_CODE = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")


class MessageError(ValueError):
    """A message of the agent is not what the protocol promises; the text says which part, escaped and bounded."""


@dataclass(frozen=True)
class Hello:
    """The agent is there: where, and in which Python."""

    python: str
    """Version, ``3.11.7``."""
    executable: str
    bundle: str
    """Hash of the agent's files as the agent computed it, 64 hex digits."""
    cache: str
    """Absolute path of the cache directory."""
    cwd: str
    user: str
    pid: int
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Started:
    """The probe's process runs."""

    pid: int
    run_dir: str


@dataclass(frozen=True)
class Progress:
    """How far the probe says it is."""

    done: float
    total: float | None
    unit: str
    label: str


@dataclass(frozen=True)
class Survivor:
    """A process of the run that outlived it."""

    pid: int
    name: str
    state: str
    """One letter, as in ``/proc/<pid>/stat``: ``D`` is uninterruptible."""


@dataclass(frozen=True)
class End:
    """How a run ended; the last frame of every run."""

    outcome: str
    """One of :data:`remote_diag.agent.protocol.OUTCOMES`."""
    message: str
    hint: str | None
    details: tuple[str, ...]
    exit_status: int | None
    signal: int | None
    result_sha256: str | None
    result_bytes: int
    survivors: tuple[Survivor, ...]
    run_dir: str | None
    """Set only when the run's directory was kept."""
    elapsed_s: float
    """Seconds from the request to the end, on the host's monotonic clock."""


def parse_hello(payload: bytes) -> Hello:
    """Return a ``hello``; raises MessageError for anything else, and for another protocol."""
    fields = Fields(payload, "hello")
    protocol = fields.integer("protocol", 0, 1_000_000)
    if protocol != PROTOCOL:
        raise MessageError(f"the agent speaks protocol {protocol} and this client protocol {PROTOCOL}")
    hello = Hello(
        python=fields.text("python", 64),
        executable=fields.text("executable", _PATH),
        bundle=fields.digest("bundle"),
        cache=fields.text("cache", _PATH),
        cwd=fields.text("cwd", _PATH),
        user=fields.text("user", 256),
        pid=fields.integer("pid", 1, 2**31),
    )
    fields.nothing_left()
    return hello


def parse_too_old(payload: bytes) -> tuple[str, str]:
    """Return (version, executable) of a ``python-too-old``; raises MessageError."""
    fields = Fields(payload, "python-too-old")
    answer = fields.text("python", 64), fields.text("executable", _PATH)
    fields.nothing_left()
    return answer


def parse_damaged(payload: bytes) -> tuple[str, str]:
    """Return (computed, expected) hash of a ``bundle-damaged``; raises MessageError."""
    fields = Fields(payload, "bundle-damaged")
    answer = fields.text("bundle", 256), fields.text("expected", 256)
    fields.nothing_left()
    return answer


def parse_need(payload: bytes) -> str:
    """Return the SHA-256 that a ``need`` asks for, 64 hex digits; raises MessageError."""
    fields = Fields(payload, "need")
    digest = fields.digest("sha256")
    fields.nothing_left()
    return digest


def parse_started(payload: bytes) -> Started:
    """Return a ``started``; raises MessageError."""
    fields = Fields(payload, "started")
    started = Started(pid=fields.integer("pid", 1, 2**31), run_dir=fields.text("run_dir", _PATH))
    fields.nothing_left()
    return started


def parse_progress(payload: bytes) -> Progress:
    """Return a ``progress``; raises MessageError."""
    fields = Fields(payload, "progress")
    progress = Progress(
        done=fields.number("done"),
        total=fields.optional_number("total"),
        unit=fields.text("unit", 256),
        label=fields.text("label", 1024),
    )
    fields.nothing_left()
    return progress


def parse_finding(payload: bytes) -> Finding:
    """Return a ``finding``; raises MessageError."""
    fields = Fields(payload, "finding")
    finding = Finding(
        level=cast(Level, fields.choice("level", LEVELS)),
        code=fields.code("code"),
        message=fields.text("message", _TEXT),
        subject=fields.optional_text("subject", _PATH),
        value=fields.measured("value"),
        unit=fields.optional_text("unit", 256),
        threshold=fields.measured("threshold"),
        threshold_source=fields.optional_text("threshold_source", _PATH),
        evidence=fields.texts("evidence"),
        action=fields.optional_text("action", _TEXT),
    )
    fields.nothing_left()
    return finding


def parse_end(payload: bytes) -> End:
    """Return an ``end``; raises MessageError."""
    fields = Fields(payload, "end")
    end = End(
        outcome=fields.choice("outcome", OUTCOMES),
        message=fields.text("message", _TEXT),
        hint=fields.optional_text("hint", _TEXT),
        details=fields.texts("details"),
        exit_status=fields.optional_integer("exit_status", 0, 255),
        signal=fields.optional_integer("signal", 1, 255),
        result_sha256=fields.optional_digest("result_sha256"),
        result_bytes=fields.integer("result_bytes", 0, 2**40),
        survivors=fields.survivors("survivors"),
        run_dir=fields.optional_text("run_dir", _PATH),
        elapsed_s=float(fields.number("elapsed_s", low=0)),
    )
    fields.nothing_left()
    return end


class Fields:
    """The fields of one message; each is taken once, by the kind it must have."""

    def __init__(self, payload: bytes, kind: str) -> None:
        self._kind = kind
        if len(payload) > MAX_MESSAGE:
            raise MessageError(f"{kind}: {len(payload)} bytes; at most {MAX_MESSAGE} are allowed")
        try:
            value = loads(payload)
        except StrictJsonError as error:
            raise MessageError(f"{kind}: {error}") from None
        self._members = self._object(value)

    def _object(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise MessageError(f"{self._kind}: not an object")
        return value

    def _refuse(self, name: str, expected: str) -> MessageError:
        return MessageError(f"{self._kind}: {name!r} must be {expected}")

    def _take(self, name: str) -> Any:
        if name not in self._members:
            raise MessageError(f"{self._kind}: {name!r} is missing")
        return self._members.pop(name)

    def text(self, name: str, limit: int) -> str:
        """Take a text of at most ``limit`` characters."""
        return self._text(name, self._take(name), limit)

    def _text(self, name: str, value: Any, limit: int) -> str:
        if not isinstance(value, str) or len(value) > limit:
            raise self._refuse(name, f"a text of at most {limit} characters")
        # A lone surrogate stands for a byte that is no character (file names have them); shown, it can be encoded.
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode("utf-8")

    def optional_text(self, name: str, limit: int) -> str | None:
        """Take a text or null."""
        return None if self._null(name) else self.text(name, limit)

    def _null(self, name: str) -> bool:
        if name in self._members and self._members[name] is None:
            del self._members[name]
            return True
        return False

    def texts(self, name: str) -> tuple[str, ...]:
        """Take a list of texts."""
        value = self._take(name)
        if not isinstance(value, list) or len(value) > _LIST:
            raise self._refuse(name, f"a list of at most {_LIST} texts")
        return tuple(self._text(name, item, _TEXT) for item in value)

    def integer(self, name: str, low: int, high: int) -> int:
        """Take an integer in [low, high]."""
        value = self._take(name)
        if type(value) is not int or not low <= value <= high:
            raise self._refuse(name, f"an integer between {low} and {high}")
        return value

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        """Take an integer in [low, high], or null."""
        return None if self._null(name) else self.integer(name, low, high)

    def number(self, name: str, low: float = -1e30) -> float:
        """Take a finite number of at least ``low``."""
        value = self._take(name)
        if type(value) not in {int, float} or not low <= value <= 1e30:
            raise self._refuse(name, f"a number between {low:g} and 1e30")
        return cast(float, value)

    def optional_number(self, name: str) -> float | None:
        """Take a finite number or null."""
        return None if self._null(name) else self.number(name)

    def measured(self, name: str) -> Measured:
        """Take what a probe measured: null, a truth value, a finite number or a text."""
        value = self._take(name)
        if isinstance(value, str):
            return self._text(name, value, _PATH)
        if value is not None and type(value) not in {bool, int, float}:
            raise self._refuse(name, "null, true, false, a number or a text")
        return cast(Measured, value)

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        """Take one of ``allowed``."""
        value = self._take(name)
        if not isinstance(value, str) or value not in allowed:
            raise self._refuse(name, "one of " + ", ".join(allowed))
        return value

    def code(self, name: str) -> str:
        """Take a kebab-case name."""
        value = self._take(name)
        if not isinstance(value, str) or not 0 < len(value) <= 100 or not set(value) <= _CODE:
            raise self._refuse(name, "a kebab-case name")
        return value

    def digest(self, name: str) -> str:
        """Take a SHA-256, 64 lower-case hex digits."""
        value = self._take(name)
        if not isinstance(value, str) or len(value) != 64 or not set(value) <= _HEX:
            raise self._refuse(name, "64 hex digits")
        return value

    def optional_digest(self, name: str) -> str | None:
        """Take a SHA-256 or null."""
        return None if self._null(name) else self.digest(name)

    def survivors(self, name: str) -> tuple[Survivor, ...]:
        """Take the list of processes that outlived the run."""
        value = self._take(name)
        if not isinstance(value, list) or len(value) > _LIST:
            raise self._refuse(name, f"a list of at most {_LIST} processes")
        return tuple(self._survivor(self._object(item)) for item in value)

    def _survivor(self, members: dict[str, Any]) -> Survivor:
        outer, self._members = self._members, members
        survivor = Survivor(
            pid=self.integer("pid", 1, 2**31), name=self.text("name", 1024), state=self.text("state", 16)
        )
        self.nothing_left()
        self._members = outer
        return survivor

    def nothing_left(self) -> None:
        """Refuse fields that nobody asked for."""
        if self._members:
            names = ", ".join(sorted(safe(name, limit=60) for name in list(self._members)[:5]))
            raise MessageError(f"{self._kind}: unknown fields: {names}")
