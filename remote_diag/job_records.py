"""What this machine remembers of launched jobs: only where they are. What they do, the host knows.

One small file a job, below the user's state folder. A file that is damaged, or of another release, is passed over:
``rdiag jobs --host`` finds every job without it.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

from . import paths

SCHEMA_VERSION = 1
JOB_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}\.v[1-9][0-9]{0,8}\Z")
_MAX_BYTES = 64 * 1024


def _folder() -> Path:
    return paths.state_dir() / "jobs"


def remember(host: str, job: str, launch_id: str) -> None:
    """Note that ``job`` is on ``host``; that it cannot be noted is no reason to fail."""
    if not JOB_ID.match(job):
        return
    with suppress(OSError):
        folder = _folder() / host
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump({"schema_version": SCHEMA_VERSION, "host": host, "job": job, "launch_id": launch_id}, file)
            os.replace(temporary, folder / f"{job}.json")  # noqa: PTH105 - as short as it gets
        except OSError:
            Path(temporary).unlink(missing_ok=True)


def forget(host: str, job: str) -> None:
    """Remove the note of ``job``; harmless when there is none."""
    if JOB_ID.match(job):
        with suppress(OSError):
            (_folder() / host / f"{job}.json").unlink(missing_ok=True)


def hosts() -> list[str]:
    """Return the hosts that jobs were launched on from here, sorted."""
    with suppress(OSError):
        return sorted(
            entry.name for entry in _folder().iterdir() if entry.is_dir() and any(entry.glob("*.json"))
        )
    return []


def hosts_of(name: str) -> list[str]:
    """Return the hosts that have a job called ``name`` (``finetune.v2``, or ``finetune`` for any attempt).

    The host of the note that was written last comes first.
    """
    found: list[tuple[float, str]] = []
    for host in hosts():
        for file in (_folder() / host).glob("*.json"):
            job = file.name[: -len(".json")]
            if JOB_ID.match(job) and name in {job, job.rpartition(".v")[0]} and _is_sound(file, host, job):
                with suppress(OSError):
                    found.append((file.stat().st_mtime, host))
    return list(dict.fromkeys(host for _, host in sorted(found, reverse=True)))


def _is_sound(file: Path, host: str, job: str) -> bool:
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        with file.open("rb") as stream:
            fields = json.loads(stream.read(_MAX_BYTES))
        return bool(fields.get("host") == host and fields.get("job") == job)
    return False
