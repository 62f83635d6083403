"""The supervisor of one job, started by ``supervise_main.py``.

It starts the job, waits for everything that comes of it, and writes how it ended. It holds no connection, copies no
output (the job writes into its logs directly) and imports nothing after the start, so that neither the client nor
the agent, neither a lost network nor an update of rdiag touches it. It never starts a job twice: the file
``started`` can be made only once.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from time import monotonic, time

from .. import wirejson
from ..layout import JobPaths, boot_id
from ..processes import Ending, become_subreaper
from ..signals import name_of
from ..spawn import as_utf8, encoded
from . import record
from .oom import OomCounters
from .remove import remove_tree
from .tree import JobTree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

TERM_GRACE = 30.0
"""Seconds that the job gets when the supervisor itself is sent SIGTERM, as at a shutdown."""
_RETRY = 5.0
_LOOK = 0.05
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
_WAITED = (signal.SIGCHLD, signal.SIGTERM)
_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTTOU)
_PROTECTED = -500


class CannotStart(Exception):
    """The job's program does not run; the text says which step failed and why."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class Supervisor:
    """Runs one job to its end.

    Args:
        directory: the job's folder, with its record.
        handshake: pipe to the launcher.
    """

    def __init__(self, directory: str, handshake: int) -> None:
        self._paths = JobPaths(directory)
        self._handshake = handshake
        self._record: dict[str, Any] = record.read_record(self._paths.record) or {}
        self._state: dict[str, Any] = {}
        self._leader = -1
        self._status: int | None = None
        self._oom_score = _read_oom_score()

    def run(self) -> None:
        """Do it all."""
        try:
            os.close(os.open(self._paths.started, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
        except FileExistsError:
            self._tell({"again": True})
            return
        adopts = become_subreaper()
        self._counters = OomCounters()
        self._state = {
            "schema_version": record.SCHEMA_VERSION,
            "job": self._paths.job,
            "state": record.STARTING,
            "message": "",
            "marker": self._record.get("marker"),
            "boot_id": boot_id(),
            "node": record.node(),
            "supervisor_pid": os.getpid(),
            "supervisor_start_ticks": record.start_ticks(os.getpid()),
            "adopts": adopts,
            "pid": None,
            "start_ticks": None,
            "started_at": time(),
            "ended_at": None,
            "exit_code": None,
            "signal": None,
            "oom": None,
            "log_descriptors": None,
        }
        self._save()
        record.reserve(self._paths.state_spare)
        if os.path.lexists(self._paths.stop):
            self._end("it was stopped before it began")
            self._tell({"started": True, "state": self._state})
            return
        try:
            self._start()
        except CannotStart as error:
            # No half job: what was made for it goes, and its number is free again.
            remove_tree(self._paths.directory)
            self._tell({"failed": str(error), "hint": error.hint})
            return
        self._tell({"started": True, "state": self._state})
        self._watch()
        self._end()

    def _tell(self, answer: dict[str, Any]) -> None:
        """Answer the launcher, if it is still there."""
        with suppress(OSError):
            os.write(self._handshake, wirejson.encode(answer) + b"\n")
        os.close(self._handshake)

    def _save(self) -> None:
        """Write the state; as long as the disk does not take it, try again."""
        while True:
            try:
                record.write_record(self._paths.state, self._state, self._paths.state_spare)
                return
            except FileNotFoundError:
                # Somebody removed the folder; there is nobody left to tell.
                return
            except OSError:
                if self._state["state"] not in record.FINAL:
                    return
                signal.sigtimedwait((signal.SIGTERM,), _RETRY)

    # -- the start

    def _start(self) -> None:
        environment = (record.read_record(self._paths.environment) or {}).get("variables") or {}
        argv = [str(word) for word in self._record["argv"]]
        directory = str(self._record["workdir"])
        reader, writer = os.pipe()
        stdout = os.open(self._paths.stdout, _APPEND, 0o600)
        stderr = os.open(self._paths.stderr, _APPEND, 0o600)
        variables = {encoded(name): encoded(str(value)) for name, value in environment.items()}
        pid = os.fork()
        if pid == 0:
            self._become(argv, variables, directory, (stdout, stderr, writer))
        os.close(writer)
        # These stay open: by them a reader finds the job's logs though they were moved away, or deleted.
        self._state["log_descriptors"] = {"stdout": stdout, "stderr": stderr}
        self._leader = pid
        ticks = record.start_ticks(pid)
        with open(reader, "rb") as stream:
            failure = stream.read(4096)
        if failure:
            os.waitpid(pid, 0)
            message, _, hint = failure.decode("utf-8", "backslashreplace").partition("\0")
            raise CannotStart(message, hint or None)
        self._state.update(state=record.RUNNING, pid=pid, start_ticks=ticks)
        self._save()

    def _become(
        self, argv: list[str], variables: dict[bytes, bytes], directory: str, descriptors: tuple[int, int, int]
    ) -> NoReturn:
        """Turn the forked copy into the job's program; on failure report the step and leave."""
        stdout, stderr, failure = descriptors
        step, hint = "prepare the process", ""
        try:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            _write_oom_score(self._oom_score)
            step = "enter the working directory %s" % directory
            os.chdir(encoded(directory))
            os.umask(int(self._record.get("umask", 0o022)))
            step = "start %s" % argv[0]
            path = variables.get(b"PATH", os.fsencode(os.defpath))
            hint = "the PATH there is %s" % path.decode("utf-8", "backslashreplace")
            program = find_program(argv[0], path)
            hint = ""
            for number in (*_IGNORED, signal.SIGPIPE, signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            try:
                os.execve(program, [encoded(word) for word in argv], variables)  # noqa: S606 - no shell is meant
            except FileNotFoundError:
                raise FileNotFoundError(2, "the interpreter that its first line names does not exist") from None
            except OSError as error:
                if error.errno == 8:
                    hint = "a script begins with #! and its interpreter; no shell is asked to run it"
                raise
        except BaseException as error:  # noqa: BLE001 - this is a forked copy: nothing may return from here
            reason = getattr(error, "strerror", None) or str(error)
            os.write(failure, encoded("cannot %s: %s\0%s" % (step, reason, hint)))
        finally:
            os._exit(127)

    # -- while it runs

    def _watch(self) -> None:
        """Wait for everything that came of the job; return when nothing is left."""
        while self._reap():
            if signal.sigwait(_WAITED) == signal.SIGTERM:
                self._stop_by_host()
                return

    def _reap(self) -> bool:
        """Collect whoever has ended; return whether somebody is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._leader:
                self._status = status
                self._note_leader()

    def _note_leader(self) -> None:
        """Write down how the command itself ended, if others go on; they are given a moment to end as well."""
        until = monotonic() + 0.2
        while monotonic() < until:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                signal.sigtimedwait((signal.SIGCHLD,), _LOOK)
        self._tell_status()
        self._state["message"] = "the command itself has ended (%s); processes that it left behind go on" % (
            self._how_it_ended()
        )
        self._save()

    def _stop_by_host(self) -> None:
        """End the job because the supervisor was told to end."""
        with suppress(OSError):
            record.write_record(self._paths.stop, {"by": "SIGTERM to the supervisor", "at": time()})
        marker = self._record.get("marker")
        own = (os.getpid(), int(self._state["supervisor_start_ticks"] or 0))
        tree = JobTree(marker, own, (self._leader, int(self._state["start_ticks"] or 0)), own[1])
        ending = Ending(tree, monotonic(), TERM_GRACE)  # type: ignore[arg-type]
        while self._reap() and not ending.step(monotonic()):
            signal.sigtimedwait((signal.SIGCHLD,), _LOOK)

    # -- the end

    def _tell_status(self) -> None:
        if self._status is None:
            return
        if os.WIFSIGNALED(self._status):
            self._state["signal"] = os.WTERMSIG(self._status)
        else:
            self._state["exit_code"] = os.WEXITSTATUS(self._status)

    def _how_it_ended(self) -> str:
        number = self._state["signal"]
        return "exit status %s" % self._state["exit_code"] if number is None else name_of(number)

    def _end(self, message: str = "") -> None:
        self._tell_status()
        code, number = self._state["exit_code"], self._state["signal"]
        stopped = os.path.lexists(self._paths.stop)
        oom = self._counters.evidence()
        self._state["oom"] = oom
        self._state["ended_at"] = time()
        if stopped:
            self._state["state"] = record.STOPPED
        else:
            self._state["state"] = record.EXITED if code == 0 else record.FAILED
        self._state["message"] = message or ("" if stopped or code == 0 else explain(code, number, oom))
        self._state["oom_killed"] = not stopped and code != 0 and bool(oom["cgroup"] or (number == 9 and oom["host"]))
        self._save()


def explain(code: int | None, number: int | None, oom: dict[str, Any]) -> str:
    """Return why a job failed, as far as the kernel's counters tell."""
    ended = "exit status %s" % code if number is None else "ended by %s" % name_of(number)
    if oom["cgroup"]:
        return "%s; out of memory: the kernel killed %d process(es) of its cgroup (%s)" % (
            ended, oom["cgroup"], oom["source"],
        )  # fmt: skip
    if number == signal.SIGKILL:
        if oom["host"]:
            return "%s; out of memory: the kernel killed %d process(es) on this host (/proc/vmstat)" % (ended, oom["host"])
        return "%s, which rdiag did not send; the kernel counted no kill for lack of memory" % ended
    return ended


def find_program(name: str, path: bytes) -> bytes:
    """Return the program ``name``: as it is when it holds a slash, else the first on ``path``.

    Raises:
        FileNotFoundError: there is none.
    """
    wanted = encoded(name)
    if b"/" in wanted:
        if os.path.lexists(wanted):
            return wanted
        raise FileNotFoundError(2, "no such file")
    for folder in path.split(b":"):
        candidate = os.path.join(folder, wanted)
        if folder and os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return candidate
    raise FileNotFoundError(2, "no such program in the job's environment")


def _read_oom_score() -> str | None:
    try:
        with open("/proc/self/oom_score_adj") as stream:
            return stream.read().strip()
    except OSError:
        return None


def _write_oom_score(value: str | None) -> None:
    if value is None:
        return
    try:
        with open("/proc/self/oom_score_adj", "w") as stream:
            stream.write(value)
    except OSError:
        return


def main(directory: str, handshake: int, lock: int) -> int:
    """Supervise the job in ``directory``; return the exit status of the supervisor."""
    directory = as_utf8(directory)
    os.set_inheritable(handshake, False)  # noqa: FBT003 - the only way this call takes it
    os.set_inheritable(lock, False)  # noqa: FBT003 - see above
    os.umask(0o077)
    os.chdir("/")
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # Waited for one by one instead of handled: nothing is interrupted half-way.
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)
    supervisor = Supervisor(directory, handshake)
    # Before the kernel looks for somebody to kill for lack of memory it should find the job, not who reports on it.
    _write_oom_score(str(_PROTECTED))
    supervisor.run()
    return 0
