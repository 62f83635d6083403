"""Operation ``launch``: from a request to a job that runs, or to nothing at all.

A launch has an id that the client chose. Whatever is lost on the way, the client can ask again with the same id: the
file ``launches/<id>`` is made once, and names the one job that this launch became.
"""

from __future__ import annotations

import fcntl
import os
import sys
from time import monotonic, time

from .. import wirejson
from ..layout import JOB_MARKER, JOB_NUMBERS, JOBS, LAUNCH_LOCK, LAUNCHES, MARKER, JobPaths, boot_id, smi_lock
from ..operations import Failure, Gone
from ..protocol import ENVIRONMENT, REFUSED
from ..spawn import as_utf8, entered, inherited_environment
from ..storage import StorageError, create, private_directory
from . import detach, names, record
from .checks import GpuChoice, check_room
from .files import JobFiles
from .listing import describe
from .packages import installed_packages
from .remove import remove_tree
from .request import LaunchRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..operations import Peer
    from .record import Job

_LOCK_WITHIN = 60.0
_START_WITHIN = 60.0
_FORCE = "--force launches it all the same"
_ACTIVE = (record.STARTING, record.RUNNING)


def launch(fields: dict[str, Any], peer: Peer, bundle: str, cache: str, umask: int) -> dict[str, Any]:
    """Launch what ``fields`` ask for; return the report on the job.

    Raises:
        Failure: it cannot be, or must not be, launched; then there is no job.
        Gone: the client went away before the job was started; then there is no job either.
    """
    return Launch(LaunchRequest(fields), peer, bundle, cache, umask).run()


class Launch:
    """One request to launch a job.

    Args:
        request: what to launch.
        peer: who wants it.
        bundle: folder of this release on the host.
        cache: the cache folder.
        umask: the file mode mask that the job gets.
    """

    def __init__(self, request: LaunchRequest, peer: Peer, bundle: str, cache: str, umask: int) -> None:
        self._request = request
        self._peer = peer
        self._bundle = bundle
        self._cache = cache
        self._umask = umask
        self._folder = os.path.join(cache, JOBS)
        self._claim = os.path.join(cache, LAUNCHES, request.launch_id)
        self._overridden: list[str] = []
        self._warning: str | None = None

    def run(self) -> dict[str, Any]:
        """Do it all; see :func:`launch`."""
        try:
            for folder in (self._cache, self._folder, os.path.dirname(self._claim)):
                private_directory(folder)
        except StorageError as error:
            raise Failure(ENVIRONMENT, str(error), error.hint) from None
        earlier = self._earlier()
        if earlier is not None and earlier.happened:
            return self._report_earlier(earlier)
        files = JobFiles(self._cache, self._request.files, self._peer)
        files.receive_missing()
        lock = self._take_turn()
        try:
            earlier = self._earlier()
            if earlier is None:
                return self._launch(files)
            if earlier.happened:
                return self._report_earlier(earlier)
            # Whoever launched it was ended between the claim and the start.
            return self._start(earlier.paths, _lock(earlier.paths.lock))
        finally:
            os.close(lock)

    # -- once, and only once

    def _earlier(self) -> Job | None:
        """Return the job that this launch has become already."""
        claim = record.read_record(self._claim)
        if claim is None:
            return None
        job = record.text(claim, "job")
        if job is not None and names.split(job) is not None and os.path.isdir(os.path.join(self._folder, job)):
            return record.Job(os.path.join(self._folder, job))
        # What could not be started was removed.
        self._unclaim()
        return None

    def _claim_for(self, job: str) -> bool:
        temporary = "%s.%s" % (self._claim, os.urandom(4).hex())
        create(temporary, wirejson.encode({"job": job, "at": time()}))
        try:
            # Unlike a rename, a link never replaces anything.
            os.link(temporary, self._claim)
        except FileExistsError:
            return False
        except OSError:
            # No hard links here (some network file systems); the lock of launches keeps others away.
            os.rename(temporary, self._claim)
            return True
        os.unlink(temporary)
        record.sync_directory(os.path.dirname(self._claim))
        return True

    def _unclaim(self) -> None:
        try:
            os.unlink(self._claim)
        except OSError:
            return

    def _report_earlier(self, job: Job) -> dict[str, Any]:
        until = monotonic() + _START_WITHIN
        while monotonic() < until:
            job.look_again()
            if job.state.get("state") not in (None, record.STARTING) or not job.supervised():
                break
            self._peer.next(0.02)
        if not os.path.isdir(job.paths.directory):
            raise Failure(ENVIRONMENT, "this launch failed before: its program could not be started")
        return {**self._report(job.paths), "again": True}

    def _take_turn(self) -> int:
        """Wait until no other launch is being decided on this host; return the lock's descriptor."""
        path = os.path.join(self._cache, LAUNCH_LOCK)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        until = monotonic() + _LOCK_WITHIN
        try:
            while not _try_lock(lock) and monotonic() < until:
                self._peer.next(0.02)
        except Gone:
            os.close(lock)
            raise
        if monotonic() >= until:
            os.close(lock)
            raise Failure(REFUSED, "another launch on this host has been going on for %g s" % _LOCK_WITHIN)
        return lock

    # -- a new job

    def _launch(self, files: JobFiles) -> dict[str, Any]:
        request = self._request
        jobs = record.all_jobs(self._cache)
        running = [job for job in jobs if job.happened and not job.is_final and job.judge()["state"] in _ACTIVE]
        self._refuse_twins(running)
        env = self._variables()
        gpus: list[int] | None = None
        if request.gpus is not None:
            choice = GpuChoice(request.gpus, env, running, force=request.force, peer=self._peer, smi_lock=smi_lock(self._cache))
            gpus = choice.choose()
            self._overridden += choice.overridden
        self._check_room(has_gpus=bool(gpus))
        # The last moment at which a client that went away leaves nothing behind.
        self._peer.next(0.0)
        paths = self._number(jobs)
        try:
            lock = _lock(paths.lock)
            files.place(paths.files)
            self._write_records(paths, env, gpus)
            claimed = self._claim_for(paths.job)
        except OSError as error:
            remove_tree(paths.directory)
            raise Failure(ENVIRONMENT, "cannot write to %s: %s" % (paths.directory, error.strerror)) from None
        except BaseException:
            remove_tree(paths.directory)
            raise
        if not claimed:
            remove_tree(paths.directory)
            earlier = self._earlier()
            if earlier is None:
                raise Failure(ENVIRONMENT, "two launches with one id met, and both failed; launch again")
            return self._report_earlier(earlier)
        return self._start(paths, lock)

    def _refuse_twins(self, running: list[Job]) -> None:
        for job in running:
            if (names.split(job.id) or ("",))[0] == self._request.name:
                self._object(
                    REFUSED,
                    "%s is %s on this host (pid %s)" % (job.id, job.judge()["state"], job.state.get("pid")),
                    "choose another name, or stop it first: rdiag stop %s; %s" % (job.id, _FORCE),
                )

    def _check_room(self, *, has_gpus: bool) -> None:
        request = self._request
        place = request.workdir if request.workdir is not None and os.path.isdir(request.workdir) else self._cache
        for problem in check_room(place, request.disk_bytes, request.shm_bytes, has_gpus=has_gpus):
            self._object(ENVIRONMENT, problem, "make room, or say what the job really needs (needs: in its file); " + _FORCE)

    def _object(self, outcome: str, message: str, hint: str) -> None:
        if not self._request.force:
            raise Failure(outcome, message, hint)
        self._overridden.append(message)

    def _variables(self) -> dict[str, str]:
        env = entered(inherited_environment(), sys.executable)
        for name in (MARKER, JOB_MARKER):
            env.pop(name, None)
        # What a job printed last matters most when it dies; Python would keep it back in a file.
        env["PYTHONUNBUFFERED"] = "1"
        env.update(self._request.env)
        return env

    def _number(self, jobs: list[Job]) -> JobPaths:
        """Make the folder of the next attempt; that it could be made is what gives it its number."""
        name = self._request.name
        taken = [number for job in jobs for one, number in [names.split(job.id) or ("", 0)] if one == name]
        cleaned = record.read_record(os.path.join(self._folder, JOB_NUMBERS, name)) or {}
        attempt = max([0, record.integer(cleaned, "last") or 0, *taken])
        while True:
            attempt += 1
            directory = os.path.join(self._folder, names.compose(name, attempt))
            try:
                os.mkdir(directory, 0o700)
            except FileExistsError:
                continue
            except OSError as error:
                raise Failure(ENVIRONMENT, "cannot make %s: %s" % (directory, error.strerror)) from None
            return JobPaths(directory)

    def _write_records(self, paths: JobPaths, env: dict[str, str], gpus: list[int] | None) -> None:
        request = self._request
        marker = "%s:%s" % (paths.job, os.urandom(16).hex())
        os.mkdir(paths.ranks, 0o700)
        if gpus is not None:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
            # Otherwise CUDA counts the fastest first, and nvidia-smi by slot.
            env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        words = {"{files}": paths.files, "{logs}": paths.ranks, "{job}": paths.job, "{attempt}": paths.job.rpartition(".v")[2]}
        if gpus is not None:
            words["{gpus}"] = str(len(gpus))
        env.update({name: _filled_in(env[name], words) for name in request.env})
        env.update({JOB_MARKER: marker, "RDIAG_JOB_FILES": paths.files, "RDIAG_JOB_LOG_DIR": paths.ranks})
        snapshot = {
            "schema_version": record.SCHEMA_VERSION,
            "variables": env,
            "python": {"executable": as_utf8(sys.executable), "version": sys.version},
            "packages": installed_packages(sys.executable),
            "system": list(os.uname()),
        }
        record.write_record(paths.environment, snapshot)
        launched = dict(request.launched)
        diff = launched.pop("dirty_diff", None)
        if isinstance(diff, str) and diff:
            create(paths.diff, diff.encode("utf-8", "surrogateescape"))
        job = {
            "schema_version": record.SCHEMA_VERSION,
            "job": paths.job,
            "name": request.name,
            "attempt": int(paths.job.rpartition(".v")[2]),
            "launch_id": request.launch_id,
            "argv": [_filled_in(word, words) for word in request.argv],
            "env": request.env,
            "workdir": request.workdir or paths.files,
            "files": [one.as_dict() for one in request.files],
            "environment": request.environment,
            "gpus": gpus,
            "gpus_asked": request.gpus,
            "forced": self._overridden,
            "umask": self._umask,
            "launched": launched,
            "marker": marker,
            "boot_id": boot_id(),
            "node": record.node(),
            "bundle": os.path.basename(self._bundle),
            "created_at": time(),
        }
        record.write_record(paths.record, job)
        record.sync_directory(self._folder)

    # -- the start

    def _start(self, paths: JobPaths, lock: int) -> dict[str, Any]:
        """Start the supervisor and wait until it says that the job runs. From here on the client does not matter."""
        reader, writer = os.pipe()
        env = {name: value for name, value in os.environ.items() if name not in (MARKER, JOB_MARKER)}
        try:
            prefix, self._warning = detach.scope_prefix(paths.job, env)
            argv = prefix + detach.command(self._bundle, paths.directory, writer, lock)
            detach.start(argv, env, paths.supervisor_log, (writer, lock))
        except OSError as error:
            os.close(reader)
            remove_tree(paths.directory)
            self._unclaim()
            raise Failure(ENVIRONMENT, "cannot start another process: %s" % error.strerror) from None
        finally:
            os.close(writer)
            os.close(lock)
        answer = self._await(reader)
        os.close(reader)
        if "failed" in answer:
            self._unclaim()
            hint = answer.get("hint")
            raise Failure(ENVIRONMENT, str(answer["failed"]), None if hint is None else str(hint))
        if not answer and not os.path.lexists(paths.started):
            told = _tail(paths.supervisor_log)
            remove_tree(paths.directory)
            self._unclaim()
            raise Failure(ENVIRONMENT, "the supervisor did not start%s" % (": " + told if told else ""))
        return {**self._report(paths), "again": "again" in answer}

    def _await(self, reader: int) -> dict[str, Any]:
        os.set_blocking(reader, False)
        answer = b""
        until = monotonic() + _START_WITHIN
        listening = True
        while monotonic() < until:
            if listening:
                try:
                    self._peer.next(1.0, reader)
                except Gone:
                    listening = False
            else:
                _wait_for(reader)
            try:
                piece = os.read(reader, 1 << 16)
            except BlockingIOError:
                continue
            answer += piece
            if not piece or answer.endswith(b"\n"):
                break
        try:
            value = wirejson.decode(answer)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def _report(self, paths: JobPaths) -> dict[str, Any]:
        return {**describe(record.Job(paths.directory)), "warning": self._warning}


def _filled_in(text: str, words: dict[str, str]) -> str:
    """Return ``text`` with the few words in braces that stand for places of the job; other braces stay."""
    for word, value in words.items():
        text = text.replace(word, value)
    return text


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # No locks on this file system; mkdir and link still keep launches apart.
        return True
    return True


def _lock(path: str) -> int:
    """Return the descriptor of the job's lock, held; it says that somebody looks after the job."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    # A reader that looks whether it is held holds it for an instant.
    until = monotonic() + 1.0
    while not _try_lock(descriptor) and monotonic() < until:
        _pause()
    return descriptor


def _pause() -> None:
    from time import sleep

    sleep(0.001)


def _wait_for(descriptor: int) -> None:
    import select

    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    poller.poll(1000)


def _tail(path: str) -> str:
    try:
        with open(path, "rb") as stream:
            lines = stream.read(65536).decode("utf-8", "backslashreplace").splitlines()
    except OSError:
        return ""
    return lines[-1][:500] if lines else ""
