"""A traceback for people: the probe's own lines and where it ended, nothing of the machinery around it."""

from __future__ import annotations

import os
import traceback

_MAX_FRAMES = 12


def describe(error: BaseException, probe: str) -> tuple[str, ...]:
    """Return the lines of ``error`` and of what caused it.

    Args:
        error: what was raised.
        probe: path of the probe's file.
    """
    lines: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and len(seen) < 4:
        seen.add(id(current))
        if lines:
            lines.append("caused by:")
        lines += _frames(current, probe)
        lines += [line for line in "".join(_exception_only(current)).splitlines() if line.strip()][:10]
        cause = current.__cause__
        current = cause if cause is not None or current.__suppress_context__ else current.__context__
    return tuple(lines)


def _exception_only(error: BaseException) -> list[str]:
    try:
        return traceback.format_exception_only(type(error), error)
    except Exception:  # noqa: BLE001 - an exception whose str() raises
        return [type(error).__name__]


def _frames(error: BaseException, probe: str) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__)
    agent = os.path.dirname(os.path.abspath(__file__)) + os.sep
    library = os.path.join(os.path.dirname(os.path.dirname(agent)), "probes") + os.sep
    foreign = [frame for frame in frames if not frame.filename.startswith(agent) and "importlib" not in frame.filename]
    own = [frame for frame in foreign if frame.filename == probe or frame.filename.startswith(library)]
    if foreign and foreign[-1] not in own:
        own.append(foreign[-1])
    lines = []
    if len(own) > _MAX_FRAMES:
        lines.append("... %d more frames" % (len(own) - _MAX_FRAMES))
        own = own[-_MAX_FRAMES:]
    for frame in own:
        name = os.path.basename(frame.filename) if frame.filename == probe else frame.filename
        lines.append("%s:%s in %s: %s" % (name, frame.lineno, frame.name, frame.line or ""))
    return lines
