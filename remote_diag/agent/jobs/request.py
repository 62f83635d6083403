"""The client's request to launch a job, checked by hand: nothing of it is used before all of it fits."""

from __future__ import annotations

from .. import wirejson
from ..operations import Failure
from ..protocol import ENVIRONMENT
from ..request import is_sha256
from .names import is_launch_id, is_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_FILES = 20_000
MAX_WORDS = 10_000
MAX_GPUS = 1024
_MAX_TEXT = 120 * 1024
_MAX_RECORDED = 2 << 20


class SentFile:
    """One file of the launching folder.

    Args:
        path: relative, with ``/``, without ``.`` and ``..``.
        sha256: of its bytes, 64 hex digits.
        size: bytes.
        mode: permission bits.
    """

    __slots__ = ("mode", "path", "sha256", "size")

    def __init__(self, path: str, sha256: str, size: int, mode: int) -> None:
        self.path = path
        self.sha256 = sha256
        self.size = size
        self.mode = mode

    def as_dict(self) -> dict[str, Any]:
        """Return it as it is recorded."""
        return {"path": self.path, "sha256": self.sha256, "bytes": self.size, "mode": self.mode}


class LaunchRequest:
    """What is to be launched. Sizes are bytes."""

    def __init__(self, fields: dict[str, Any]) -> None:
        """Check ``fields``; raise Failure that names the first part that does not fit."""
        self.launch_id: str = _take(fields, "launch_id", is_launch_id, "32 hex digits")
        self.name: str = _take(fields, "name", is_name, "[a-z0-9][a-z0-9._-]{0,62} without .v<number> at its end")
        self.argv: list[str] = _take(fields, "argv", _is_argv, "a list of texts without NUL, the first one not empty")
        self.env: dict[str, str] = _take(fields, "env", _is_environment, "names and values without NUL")
        self.workdir: str | None = _take(fields, "workdir", _is_workdir, "an absolute path, or null")
        self.gpus: int | list[int] | None = _take(fields, "gpus", _is_gpus, "a count, a list of indexes, or null")
        self.files: list[SentFile] = [
            SentFile(one["path"], one["sha256"], one["bytes"], one["mode"])
            for one in _take(fields, "files", _is_files, "a list of files with path, sha256, bytes and mode")
        ]
        self.force: bool = _take(fields, "force", lambda value: isinstance(value, bool), "true or false")
        needs = _take(fields, "needs", _is_needs, "an object with disk_bytes and shm_bytes")
        self.disk_bytes: int | None = needs.get("disk_bytes")
        self.shm_bytes: int | None = needs.get("shm_bytes")
        self.environment: dict[str, Any] = _take(
            fields, "environment", lambda value: isinstance(value, dict), "an object"
        )
        self.launched: dict[str, Any] = _take(fields, "launched", _is_recordable, "an object of at most 2 MiB")


def _take(fields: dict[str, Any], name: str, fits: Any, expected: str) -> Any:
    value = fields.get(name)
    if not fits(value):
        raise Failure(ENVIRONMENT, "the request's %r must be %s" % (name, expected))
    return value


def is_text(value: object, limit: int = _MAX_TEXT) -> bool:
    """Whether ``value`` can be handed to another program."""
    if not isinstance(value, str) or "\0" in value or len(value) > limit:
        return False
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def is_relative_path(value: object) -> bool:
    """Whether ``value`` names a file below a folder, without a way out of it."""
    return is_text(value, 4096) and all(part not in ("", ".", "..") for part in str(value).split("/"))


def _is_argv(value: object) -> bool:
    return isinstance(value, list) and 0 < len(value) <= MAX_WORDS and value[0] != "" and all(map(is_text, value))


def _is_environment(value: object) -> bool:
    return isinstance(value, dict) and all(
        name and "=" not in name and is_text(name) and is_text(content) for name, content in value.items()
    )


def _is_workdir(value: object) -> bool:
    return value is None or (is_text(value, 4096) and str(value).startswith("/"))


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_GPUS


def _is_gpus(value: object) -> bool:
    if isinstance(value, list):
        return 0 < len(value) == len(set(value)) <= MAX_GPUS and all(map(_is_index, value))
    return value is None or _is_index(value)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1 << 60


def _is_needs(value: object) -> bool:
    return isinstance(value, dict) and all(
        value.get(name) is None or _is_size(value[name]) for name in ("disk_bytes", "shm_bytes")
    )


def _is_files(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= MAX_FILES
        and all(
            isinstance(one, dict)
            and is_relative_path(one.get("path"))
            and is_sha256(one.get("sha256"))
            and _is_size(one.get("bytes"))
            and _is_size(one.get("mode"))
            and one["mode"] <= 0o777
            for one in value
        )
        and _do_not_collide([one["path"] for one in value])
    )


def _do_not_collide(paths: list[str]) -> bool:
    """Whether no path is there twice, or is a folder on the way to another one."""
    files = set(paths)
    if len(files) != len(paths):
        return False
    return all(
        path[:position] not in files for path in paths for position, letter in enumerate(path) if letter == "/"
    )


def _is_recordable(value: object) -> bool:
    return isinstance(value, dict) and len(wirejson.encode(value)) <= _MAX_RECORDED
