"""What a host says of itself through nothing but its ``sh``: works where there is no Python, and where SFTP is off."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import ConnectionLost
from .paths import survey_script
from .text import safe
from .transport.base import SafeCommand, SafePath, Transport

SURVEY_SECONDS = 20.0
"""How long the survey may take; what has not arrived by then is unknown."""
_MAX_BYTES = 1024 * 1024
_MAX_VALUE = 2000
_MAX_REPEATS = 100
_NOISE_LINES = 5
_LIMITS = {
    "Max open files": "open_files",
    "Max processes": "processes",
    "Max locked memory": "locked_memory_bytes",
    "Max core file size": "core_file_bytes",
    "Max file size": "file_bytes",
    "Max stack size": "stack_bytes",
    "Max address space": "address_space_bytes",
}
_LIMIT = re.compile(r"(Max [a-z ]+?)\s+(\d+|unlimited)\s+(\d+|unlimited)")
_DF = re.compile(r"\s(\d+)\s+(\d+)\s+(-?\d+)\s+(\d+%|-)\s")
_TIME = re.compile(r"(\d{9,11})(?:\.(\d{1,9})?(?:%?N)?)?")


@dataclass(frozen=True)
class Limit:
    """A resource limit of the login; None means unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True)
class Place:
    """A directory of the host, and what can be done in it."""

    wanted: str
    path: str | None = None
    """Where it really is, links followed; the nearest existing parent when it could not be made."""
    mount_point: str | None = None
    file_system: str | None = None
    mount_options: tuple[str, ...] = ()
    total_bytes: int | None = None
    free_bytes: int | None = None
    """What this user may still fill."""
    total_inodes: int | None = None
    """None where the file system does not count them (btrfs says 0)."""
    free_inodes: int | None = None
    writable: bool | None = None
    executable: bool | None = None
    """Whether a program that was written there started; None when none could be written."""
    error: str | None = None
    """What the host said when something could not be made there."""


@dataclass(frozen=True)
class Clock:
    """The host's clock against this machine's, seconds; positive: the host is ahead."""

    offset_s: float
    uncertainty_s: float
    """Half the time in which the host may have read its clock, and the resolution of what it said."""


@dataclass(frozen=True)
class Survey:
    """The survey of one host; every text is escaped, None is unknown."""

    answered: bool = False
    """Whether ``sh`` ran the survey at all."""
    complete: bool = False
    stopped_at: str | None = None
    """The step that did not end, when the survey is not complete."""
    exit_status: int | None = None
    shell_seconds: float | None = None
    """From the request to the first byte of ``sh``: one round trip, and the start-up files of the login shell."""
    noise_bytes: int = 0
    """What others printed to stdout before the survey did."""
    noise: tuple[str, ...] = ()
    stderr_bytes: int = 0
    stderr: tuple[str, ...] = ()
    shell: str | None = None
    """``$SHELL``."""
    account_shell: str | None = None
    """The login shell in the account database."""
    parent: str | None = None
    """The process that started ``sh``; ``sshd`` where the login shell replaced itself."""
    system: str | None = None
    hostname: str | None = None
    user: str | None = None
    uid: int | None = None
    umask: int | None = None
    directory: str | None = None
    """Where commands start."""
    home: str | None = None
    home_exists: bool | None = None
    path: str | None = None
    """``$PATH`` of the login."""
    clock: Clock | None = None
    limits: Mapping[str, Limit] = field(default_factory=dict)
    programs: Mapping[str, str] = field(default_factory=dict)
    pythons: tuple[str, ...] = ()
    """Interpreters outside the PATH, too."""
    gpus_driver: int | None = None
    """GPUs that the loaded NVIDIA driver lists; None where no driver is loaded."""
    gpu_devices: int | None = None
    """``/dev/nvidia<N>`` files."""
    cache: Place | None = None
    temporary: Place | None = None
    linger: bool | None = None
    kill_user_processes: bool | None = None
    """Whether the session manager ends the user's processes at logout."""


def survey(transport: Transport, cache: SafePath, *, timeout: float = SURVEY_SECONDS) -> Survey:
    """Run the survey on a connected ``transport``; raises ConnectionLost only when the connection itself is gone."""
    nonce = secrets.token_hex(16)
    began_at = time.time()
    began = time.monotonic()
    channel = transport.execute(SafeCommand(f"sh -s {nonce} {cache}"))
    mark = b"%s begin\n" % nonce.encode()
    output, errors = bytearray(), bytearray()
    heard_at = first = None
    try:
        try:
            channel.send(survey_script().read_bytes())
            channel.send_eof()
        except ConnectionLost:
            # The command ended without reading; what it printed says more.
            pass
        status: int | None = None
        while time.monotonic() - began < timeout and len(output) + len(errors) < _MAX_BYTES:
            received = channel.receive(min(1.0, timeout))
            if received is None:
                status = channel.exit_status(2.0)
                break
            output += received[0]
            errors += received[1]
            if first is None and mark in output:
                first = time.monotonic() - began
                heard_at = time.time()
    finally:
        channel.close()
    return parse(
        bytes(output),
        nonce,
        stderr=bytes(errors),
        exit_status=status,
        shell_seconds=first,
        window=None if heard_at is None else (began_at, heard_at),
    )


def parse(
    output: bytes,
    nonce: str,
    *,
    stderr: bytes = b"",
    exit_status: int | None = None,
    shell_seconds: float | None = None,
    window: tuple[float, float] | None = None,
) -> Survey:
    """Return the survey that ``output`` holds; ``window`` is the local time between which the host read its clock."""
    values, noise, complete = _lines(output, nonce)

    def last(key: str) -> str | None:
        return values[key][-1] if key in values else None

    account = last("account")
    return Survey(
        answered=noise is not None,
        complete=complete,
        stopped_at=None if complete or noise is None else last("stage") or "the first step",
        exit_status=exit_status,
        shell_seconds=shell_seconds,
        noise_bytes=len(output if noise is None else noise),
        noise=_shown(output if noise is None else noise),
        stderr_bytes=len(stderr),
        stderr=_shown(stderr),
        shell=last("shell"),
        account_shell=None if account is None else account.rsplit(":", 1)[-1] or "/bin/sh",
        parent=last("parent"),
        system=last("system"),
        hostname=last("hostname"),
        user=last("user"),
        uid=_number(last("uid")),
        umask=_number(last("umask"), 8),
        directory=last("directory"),
        home=last("home"),
        home_exists=None if "home" not in values else "home.exists" in values,
        path=last("path"),
        clock=_clock(last("now"), window),
        limits=_limits(values),
        programs={key[8:]: found[-1] for key, found in values.items() if key.startswith("program.")},
        pythons=tuple(values.get("python", ())),
        gpus_driver=_number(last("gpus.driver")),
        gpu_devices=_number(last("gpus.devices")),
        cache=_place(values, "cache"),
        temporary=_place(values, "tmp"),
        linger=_yes_or_no(last("linger")),
        kill_user_processes=_yes_or_no(last("killed")),
    )


def _lines(output: bytes, nonce: str) -> tuple[dict[str, list[str]], bytes | None, bool]:
    """Return (values by key, what came before the survey or None when it never began, whether it ended)."""
    mark = b"\n%s begin\n" % nonce.encode()
    start = output.find(mark)
    if start < 0:
        return {}, None, False
    values: dict[str, list[str]] = {}
    complete = False
    prefix = f"{nonce} ".encode()
    # The piece after the last newline is a line cut short, or empty.
    for line in output[start + len(mark) :].split(b"\n")[:-1]:
        # An audited shell may echo commands between our lines; those do not carry the nonce.
        if not line.startswith(prefix):
            continue
        rest = line[len(prefix) :]
        if rest == b"end":
            complete = True
            break
        key, equals, value = rest.partition(b"=")
        if equals:
            kept = values.setdefault(safe(key, limit=40), [])
            if len(kept) < _MAX_REPEATS:
                kept.append(safe(value.strip(), limit=_MAX_VALUE))
    return values, output[:start], complete


def _shown(data: bytes) -> tuple[str, ...]:
    lines = [line for line in data[: 64 * 1024].splitlines() if line.strip()]
    return tuple(safe(line, limit=200) for line in lines[:_NOISE_LINES])


def _number(text: str | None, base: int = 10) -> int | None:
    return int(text, base) if text and len(text) <= 20 and re.fullmatch(r"[0-7]+" if base == 8 else r"[0-9]+", text) else None


def _yes_or_no(text: str | None) -> bool | None:
    return {"yes": True, "no": False}.get(text or "")


def _clock(text: str | None, window: tuple[float, float] | None) -> Clock | None:
    match = _TIME.fullmatch(text or "")
    if match is None or window is None:
        return None
    whole, fraction = match.groups()
    earliest = float(f"{whole}.{fraction or 0}")
    # Where date knows no %N, the clock may stand anywhere in that second.
    latest = earliest + (0.0 if fraction else 1.0)
    low, high = earliest - window[1], latest - window[0]
    return Clock(offset_s=round((low + high) / 2, 3), uncertainty_s=round((high - low) / 2, 3))


def _limits(values: Mapping[str, list[str]]) -> dict[str, Limit]:
    limits: dict[str, Limit] = {}
    for line in values.get("limit", ()):
        match = _LIMIT.match(line)
        if match and match[1] in _LIMITS:
            soft, hard = (None if word == "unlimited" else int(word) for word in match.groups()[1:])
            limits[_LIMITS[match[1]]] = Limit(soft, hard)
    files = _number(values["nofile"][-1]) if "nofile" in values else None
    if files is not None:
        limits.setdefault("open_files", Limit(files, None))
    return limits


def _place(values: Mapping[str, list[str]], name: str) -> Place | None:
    def last(key: str) -> str | None:
        return values[f"{name}.{key}"][-1] if f"{name}.{key}" in values else None

    wanted = last("wanted")
    if wanted is None:
        return None
    mount = (last("mount") or "").split(" ")
    known = len(mount) == 4
    space, inodes = _df(last("space")), _df(last("inodes"))
    writable, program, error = last("writable"), last("program"), last("error")
    started = (program or "").split(" ", 1)
    if program is not None and started[0] != "0" and len(started) == 2:
        error = started[1]
    return Place(
        wanted=wanted,
        path=last("path"),
        mount_point=mount[1] if known else None,
        file_system=mount[2] if known else None,
        mount_options=tuple(mount[3].split(",")) if known else (),
        total_bytes=None if space is None else space[0] * 1024,
        free_bytes=None if space is None else max(0, space[1]) * 1024,
        total_inodes=inodes[0] if inodes and inodes[0] else None,
        free_inodes=max(0, inodes[1]) if inodes and inodes[0] else None,
        # A directory that could not be made is one that cannot be written to.
        writable=_yes_or_no(writable) if writable else False if error else None,
        executable=None if program is None else started[0] == "0",
        error=error,
    )


def _df(line: str | None) -> tuple[int, int] | None:
    match = _DF.search(line or "")
    return None if match is None else (int(match[1]), int(match[3]))
