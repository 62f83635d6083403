"""Operation ``clean``: old finished jobs, old releases of rdiag, files that no job refers to, what runs left behind.

Only names of the patterns that rdiag gives are looked at, only what belongs to this user is touched, nothing is
reached through a link, and whatever belongs to a job that is not over stays.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from time import time

from ..layout import BLOBS, JOB_NUMBERS, JOBS, LAUNCHES, RUNS, SMI_LOCK, boot_id
from ..operations import Failure, Gone
from ..processes import all_processes
from ..protocol import ENVIRONMENT
from ..request import is_sha256
from . import names, record
from .remove import Removal, open_folder, remove_entry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    from ..operations import Peer

_FINISHED = (*record.FINAL, record.LOST)
_HEX = frozenset("0123456789abcdef")
_STALE = 86400.0
"""Seconds after which what a launch or an installation left half done counts as abandoned."""


def clean(fields: dict[str, Any], peer: Peer, bundle: str, cache: str) -> dict[str, Any]:
    """Remove what is older than ``older_than_s``; return what was, or with ``dry_run`` would be, removed.

    The client hears that this goes on; when it goes away, what was begun is done all the same.
    """
    age, dry_run = fields.get("older_than_s"), fields.get("dry_run")
    if not isinstance(age, (int, float)) or isinstance(age, bool) or age < 0 or not isinstance(dry_run, bool):
        raise Failure(ENVIRONMENT, "the request needs 'older_than_s' and 'dry_run'")

    def pulse() -> None:
        with suppress(Gone):
            peer.pulse()

    cleaning = _Cleaning(cache, os.path.basename(bundle), time() - age, pulse, dry_run=dry_run)
    cleaning.jobs()
    cleaning.bundles()
    cleaning.blobs()
    cleaning.leftovers()
    cleaning.locks()
    return {
        "removed": cleaning.removed,
        "bytes": cleaning.removal.bytes,
        "kept": cleaning.kept,
        "problems": cleaning.removal.problems[:100],
        "dry_run": dry_run,
    }


class _Cleaning:
    def __init__(self, cache: str, bundle: str, before: float, pulse: Callable[[], None], *, dry_run: bool) -> None:
        self._cache = cache
        self._bundle = bundle
        self._before = before
        self._dry_run = dry_run
        self.removal = Removal(pulse)
        self.removed: list[dict[str, str]] = []
        self.kept: list[dict[str, str]] = []
        self._jobs: list[record.Job] = []

    def jobs(self) -> None:
        """Remove jobs that ended long enough ago; remember which numbers were used."""
        for job in record.all_jobs(self._cache):
            reason = self._keep(job)
            if reason is not None:
                self.kept.append({"what": "job", "name": job.id, "why": reason})
                self._jobs.append(job)
                continue
            self._remove(JOBS, job.id, "job")
            if not self._dry_run:
                # Only now: on a full disk there is room for it after something went.
                self._remember_number(job.id)

    def _keep(self, job: record.Job) -> str | None:
        """Return why a job stays; None when it goes."""
        if not job.happened:
            return None if _older(job.paths.directory, min(self._before, time() - _STALE)) else "is being launched"
        state = job.judge()["state"]
        if state not in _FINISHED:
            return str(state)
        if job.tree().members():
            return "processes of it are alive"
        ended = record.number(job.state, "ended_at") or _mtime(job.paths.directory)
        return "too young" if ended is None or ended > self._before else None

    def _remember_number(self, job: str) -> None:
        name, attempt = names.split(job) or ("", 0)
        folder = os.path.join(self._cache, JOBS, JOB_NUMBERS)
        path = os.path.join(folder, name)
        last = record.integer(record.read_record(path) or {}, "last") or 0
        if attempt <= last:
            return
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            record.write_record(path, {"last": attempt})
        except OSError as error:
            self.removal.problems.append("%s: its number may be given again: %s" % (job, error.strerror))

    def bundles(self) -> None:
        """Remove releases of rdiag that nobody uses; the present one stays."""
        used = {self._bundle, *(str(job.record.get("bundle")) for job in self._jobs), *_bundles_at_work()}
        for name in self._names(""):
            parts = name.split(".")
            if is_sha256(name) and name not in used:
                self._remove_if_old("", name, "release", self._before)
            elif is_sha256(parts[0]) and len(parts) > 1 and set(parts[1]) <= _HEX and name not in used:
                self._remove_if_old("", name, "half an installation", min(self._before, time() - _STALE))

    def blobs(self) -> None:
        """Remove files kept by their hash that no remaining job was launched with."""
        used = {str(one.get("sha256")) for job in self._jobs for one in job.record.get("files") or []}
        for name in self._names(BLOBS):
            if is_sha256(name) and name not in used:
                self._remove_if_old(BLOBS, name, "file", self._before)
            elif name.startswith(".") and is_sha256(name[1:65]):
                self._remove_if_old(BLOBS, name, "half a file", min(self._before, time() - _STALE))

    def leftovers(self) -> None:
        """Remove what was half removed before, old claims of launches, and folders of old runs."""
        for folder in (JOBS, RUNS):
            for name in self._names(folder):
                if name.startswith(".gone-"):
                    self._remove(folder, name, "leftover")
        for name in self._names(RUNS):
            if name[:8].isdigit() and name[8:9] == "T" and "Z-" in name:
                self._remove_if_old(RUNS, name, "run", min(self._before, time() - _STALE))
        for name in self._names(LAUNCHES):
            if names.is_launch_id(name[:32]):
                claim = record.read_record(os.path.join(self._cache, LAUNCHES, name)) or {}
                if str(claim.get("job")) not in {job.id for job in self._jobs}:
                    self._remove_if_old(LAUNCHES, name, "launch", min(self._before, time() - _STALE))

    def locks(self) -> None:
        """Remove locks of GPU drivers that have ended with their boot; other machines may share this folder."""
        before, after = SMI_LOCK.split("%s")
        for name in self._names(""):
            mine = name.startswith(before + boot_id() + after)
            if name.startswith(before) and after in name and not mine and not _held(os.path.join(self._cache, name)):
                self._remove_if_old("", name, "lock", min(self._before, time() - _STALE))

    def _names(self, folder: str) -> list[str]:
        descriptor = open_folder(os.path.join(self._cache, folder) if folder else self._cache)
        if descriptor is None:
            return []
        try:
            return sorted(os.listdir(descriptor))
        finally:
            os.close(descriptor)

    def _remove_if_old(self, folder: str, name: str, what: str, before: float) -> None:
        if _older(os.path.join(self._cache, folder, name), before):
            self._remove(folder, name, what)

    def _remove(self, folder: str, name: str, what: str) -> None:
        outer = open_folder(os.path.join(self._cache, folder) if folder else self._cache)
        if outer is None:
            return
        problems = len(self.removal.problems)
        try:
            status = os.stat(name, dir_fd=outer, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                remove_entry(outer, name, self.removal, dry_run=self._dry_run)
            elif stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                if not self._dry_run:
                    os.unlink(name, dir_fd=outer)
                self.removal.bytes += status.st_size
            else:
                self.removal.problems.append("%s: a link, or something else that rdiag does not make" % name)
        except OSError as error:
            self.removal.problems.append("%s: %s" % (name, error.strerror))
        finally:
            os.close(outer)
        if len(self.removal.problems) == problems:
            self.removed.append({"what": what, "name": name})


def _mtime(path: str) -> float | None:
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return None


def _older(path: str, before: float) -> bool:
    changed = _mtime(path)
    return changed is not None and changed <= before


def _held(path: str) -> bool:
    """Whether somebody has locked the file ``path``, on another machine perhaps; or nobody can tell."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _bundles_at_work(read: Callable[[int], bytes] | None = None) -> set[str]:
    """Return the releases that a process runs from, by its command line."""
    found: set[str] = set()
    for pid in all_processes():
        try:
            words = (read or _command_line)(pid).split(b"\0")
        except OSError:
            continue
        for word in words:
            found.update(part for part in word.decode("utf-8", "replace").split("/") if is_sha256(part))
    return found


def _command_line(pid: int) -> bytes:
    with open("/proc/%d/cmdline" % pid, "rb", 0) as stream:
        return stream.read(65536)
