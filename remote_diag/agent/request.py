"""The client's request, checked by hand: nothing of it is used before all of it fits."""

from __future__ import annotations

from . import wirejson
from .frames import MAX_PAYLOAD
from .protocol import ACTIVE_EFFECTS, EFFECTS, ENVIRONMENT_KINDS, PROTOCOL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SAFE = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_HEX = frozenset("0123456789abcdef")
_MONTH = 31 * 24 * 3600.0


class RequestError(ValueError):
    """The request cannot be followed; the text says which part and why."""


def is_safe_name(text: object) -> bool:
    """Whether ``text`` may become one component of a path: 1 to 64 of ``A-Za-z0-9._-``, no dot or dash first."""
    return isinstance(text, str) and 0 < len(text) <= 64 and text[0] not in ".-" and set(text) <= _SAFE


def is_sha256(text: object) -> bool:
    """Whether ``text`` is 64 lower-case hex digits."""
    return isinstance(text, str) and len(text) == 64 and set(text) <= _HEX


class Request:
    """One run as the client asked for it. Times are seconds, sizes bytes."""

    def __init__(self, payload: bytes) -> None:
        """Parse and check ``payload``; raise RequestError naming the first part that does not fit."""
        self.payload = payload
        fields = _Fields(payload)
        self.run_id: str = fields.take("run_id", is_safe_name, "1 to 64 letters, digits, '.', '_' or '-'")
        probe = fields.take("probe", lambda value: isinstance(value, dict), "an object")
        if not is_safe_name(probe.get("name")) or not is_sha256(probe.get("sha256")):
            raise RequestError("the request's 'probe' needs a 'name' and a 'sha256' of 64 hex digits")
        self.probe_name: str = probe["name"]
        self.probe_sha256: str = probe["sha256"]
        self.params: dict[str, Any] = fields.take("params", lambda value: isinstance(value, dict), "an object")
        self.effects: tuple[str, ...] = tuple(
            fields.take("effects", _is_effects, "a list of " + ", ".join(EFFECTS))
        )
        self.env: dict[str, str] = fields.take("env", _is_environment, "names and values without NUL, no '=' in a name")
        self.workdir: str | None = fields.take("workdir", _is_path_or_none, "a path without NUL, or null")
        self.deadline_s: float = float(fields.take("deadline_s", _is_seconds, "a positive number of seconds"))
        self.lease_s: float = float(fields.take("lease_s", _is_seconds, "a positive number of seconds"))
        self.keep: bool = fields.take("keep", lambda value: isinstance(value, bool), "true or false")
        self.force: bool = fields.take("force", lambda value: isinstance(value, bool), "true or false")
        self.output_bytes: int = fields.take("output_bytes", lambda value: _is_size(value, 1 << 40), "a size in bytes")
        self.result_bytes: int = fields.take(
            "result_bytes", lambda value: _is_size(value, MAX_PAYLOAD), "a size of at most %d bytes" % MAX_PAYLOAD
        )
        environment = fields.take("environment", _is_kind, "an object with 'kind' and 'value'")
        self.environment_kind: str = environment["kind"]
        self.environment_value: str = environment["value"]
        fields.nothing_left()

    @property
    def active(self) -> bool:
        """Whether the probe needs the GPUs of the host for itself."""
        return any(effect in ACTIVE_EFFECTS for effect in self.effects)


class _Fields:
    def __init__(self, payload: bytes) -> None:
        try:
            fields = wirejson.decode(payload)
        except ValueError as error:
            raise RequestError("the request is not valid JSON: %s" % error) from None
        if not isinstance(fields, dict):
            raise RequestError("the request is not a JSON object")
        fields.pop("client", None)  # the client's version, for whoever reads request.json
        protocol = fields.pop("protocol", None)
        if protocol != PROTOCOL:
            raise RequestError(
                "the client speaks protocol %s and this agent protocol %d; "
                "they come from different releases of rdiag" % (str(protocol)[:20], PROTOCOL)
            )
        self._fields = fields

    def take(self, name: str, fits: Any, expected: str) -> Any:
        if name not in self._fields:
            raise RequestError("the request lacks %r" % name)
        value = self._fields.pop(name)
        if not fits(value):
            raise RequestError("the request's %r must be %s" % (name, expected))
        return value

    def nothing_left(self) -> None:
        if self._fields:
            raise RequestError("the request has unknown parts: %s" % ", ".join(sorted(self._fields))[:200])


def _is_effects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and item in EFFECTS for item in value)


def _is_environment(value: object) -> bool:
    return isinstance(value, dict) and all(
        name and "=" not in name and _is_text(name) and _is_text(content) for name, content in value.items()
    )


def _is_text(value: object) -> bool:
    """Whether ``value`` can be handed to another program: text without NUL that has an encoding."""
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def _is_path_or_none(value: object) -> bool:
    return value is None or (value != "" and _is_text(value))


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= _MONTH


def _is_size(value: object, largest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= largest


def _is_kind(value: object) -> bool:
    return isinstance(value, dict) and value.get("kind") in ENVIRONMENT_KINDS and isinstance(value.get("value"), str)
