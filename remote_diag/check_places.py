"""The findings of ``rdiag check`` about a directory: writable, executable, roomy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .findings import Finding, Level
from .host_survey import Place

OURS = "rdiag's own"
"""Source of a threshold that nobody else has set."""


class _Room(NamedTuple):
    """What there should be enough of."""

    code: str
    unit: str
    scale: int
    floor: int
    """Below it is degraded."""
    needed: int
    """Below it the agent and a run may not fit."""
    command: str


_SPACE = _Room("disk-space", "MiB", 1 << 20, 1 << 30, 8 << 20, "du -xh -d1")
_INODES = _Room("inodes", "inodes", 1, 1000, 100, "du -x --inodes -d1")


def place(place: Place, code: str) -> Iterator[Finding]:
    """Yield whether the directory can be written to, whether programs start there, and what is left of it."""
    where = place.path or place.wanted
    mounted: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    if place.mount_point is not None:
        mounted = (f"{place.file_system} on {place.mount_point}",)
        options = (f"{mounted[0]} ({','.join(place.mount_options)})",)
    yield _writable(place, code, where, options)
    yield _noexec(place, where, options)
    yield _enough(_SPACE, where, place.free_bytes, mounted)
    if place.free_inodes is None and place.free_bytes is not None:
        yield Finding("ok", "inodes", "not counted by this file system", subject=where, evidence=mounted)
    else:
        yield _enough(_INODES, where, place.free_inodes, mounted)


def _writable(place: Place, code: str, where: str, mounted: tuple[str, ...]) -> Finding:
    if place.writable is None:
        return Finding("unknown", code, f"{where} was not tried", evidence=mounted)
    if place.writable:
        return Finding("ok", code, f"{where} can be written to", evidence=mounted)
    said = () if place.error is None else (place.error,)
    return Finding(
        "degraded",
        code,
        f"{place.wanted} cannot be written to",
        evidence=(*said, *mounted),
        action="fix its permissions, space or quota, or set cache_dir in hosts.yaml; until then rdiag uses a temporary "
        "directory for each session"
        if code == "cache"
        else "fix its permissions (usually mode 1777) or space, or set TMPDIR in the login's start-up file",
    )


def _noexec(place: Place, where: str, mounted: tuple[str, ...]) -> Finding:
    option = "noexec" in place.mount_options
    if place.executable is None and not option:
        return Finding("skipped", "noexec", "no program could be put there", subject=where, evidence=mounted)
    if place.executable and not option:
        return Finding("ok", "noexec", "programs start there", subject=where)
    said = () if place.error is None else (place.error,)
    return Finding(
        "degraded",
        "noexec",
        "programs cannot be started there; rdiag is not affected, Triton and compiled torch extensions are",
        subject=where,
        evidence=(*said, *mounted),
        action="mount it without noexec, or point TRITON_CACHE_DIR and TORCH_EXTENSIONS_DIR elsewhere (env in hosts.yaml)",
    )


def _enough(room: _Room, where: str, free: int | None, mounted: tuple[str, ...]) -> Finding:
    if free is None:
        return Finding("unknown", room.code, "df does not say", subject=where, evidence=mounted)
    level: Level = "fail" if free < room.needed else "degraded" if free < room.floor else "ok"
    return Finding(
        level,
        room.code,
        f"{free // room.scale:,} {room.unit} free",
        subject=where,
        value=free // room.scale,
        unit=room.unit,
        threshold=(room.needed if level == "fail" else room.floor) // room.scale,
        threshold_source="less than the agent and one run need" if level == "fail" else OURS,
        evidence=mounted,
        action=None if level == "ok" else f"delete or move files there; see: {room.command} {where}",
    )
