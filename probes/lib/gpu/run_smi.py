"""Runs the programs that know about GPUs without ever waiting for one that cannot be ended.

In a driver that hangs nvidia-smi enters the kernel and does not come out: SIGKILL is noted and changes nothing, and
every further nvidia-smi joins it. So each program gets a process group of its own and a deadline, is killed and left
behind after it, and the same program is not asked again (:class:`Programs`) - not by later runs either, as long as it
is there (:mod:`.one_at_a_time`).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from dataclasses import dataclass, replace
from time import monotonic, sleep

from . import where
from .one_at_a_time import PATIENCE, PAUSE, Busy, Turn, condition, lock_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, Mapping, Sequence

    How = Literal["ended", "timeout", "not-found", "not-started", "not-asked", "too-long"]

find = where.find
SMI = "nvidia-smi"
SMI_SECONDS = 20.0
"""Seconds for one question; eight GPUs without persistence mode take several."""
LSPCI_SECONDS = 10.0
MAX_OUTPUT = 8 << 20
"""Bytes of each stream; ``-q -x`` of sixteen GPUs is under 1 MiB."""
_AFTER_KILL = 0.2


@dataclass(frozen=True)
class Said:
    """What came of asking one program."""

    command: str
    """The program and its arguments, for evidence."""
    how: How
    """``ended`` by itself, ``timeout``, ``not-found`` on the PATH, ``not-started``, ``not-asked`` because it, or who
    asked before, hangs, ``too-long`` an answer."""
    status: int | None
    """Exit status; minus the number of the signal that ended it; None unless it ended."""
    out: str
    """stdout, undecodable bytes replaced. Programs of the driver write their errors here too."""
    err: str
    seconds: float
    pid: int | None = None
    """Of a program that was left behind, by this run or an earlier one."""
    state: str | None = None
    """What a program that was left behind does, as /proc says: ``D`` is stuck in the kernel."""
    waits_in: str | None = None
    """The kernel function that it is stuck in, where that may be read."""
    earlier: str | None = None
    """Who was in the way when this was to be asked; None when nobody was."""

    @property
    def hung(self) -> bool:
        """Whether it, or who was asked before it, did not answer in time."""
        return self.how == "timeout" or self.earlier is not None

    @property
    def ok(self) -> bool:
        """Whether it ended with status 0."""
        return self.how == "ended" and self.status == 0

    @property
    def ending(self) -> str:
        """Say how it ended: ``status 9``, ``signal 11``."""
        return _status(self.status)

    @property
    def why(self) -> str:
        """Say how it went wrong, in one line."""
        if self.how == "timeout":
            stuck = ""
            if self.pid is not None:
                place = ", in the kernel in %s" % self.waits_in if self.waits_in else ""
                stuck = "; pid %d cannot be killed (state %s%s)" % (self.pid, self.state or "unknown", place)
            return "%s did not answer within %.0f s%s" % (self.command, self.seconds, stuck)
        if self.how == "ended":
            words = next((line.strip() for line in (self.out + "\n" + self.err).splitlines() if line.strip()), "")
            return "%s ended with %s: %s" % (self.command, _status(self.status), words[:300] or "nothing said")
        if self.earlier is not None:
            return "%s: not asked, because %s" % (self.command, self.earlier)
        return "%s: %s" % (self.command, _REASONS.get(self.how, self.err))


_REASONS = {
    "not-found": "not on the PATH",
    "not-asked": "not asked, because it hung before",
    "too-long": "its answer is too long to be one",
}


def _status(status: int | None) -> str:
    if status is not None and status < 0:
        return "signal %d" % -status
    return "status %s" % status


def ask(
    arguments: Sequence[str],
    seconds: float,
    *,
    env: Mapping[str, str] | None = None,
    limit: int = MAX_OUTPUT,
    turn: Turn | None = None,
) -> Said:
    """Run a program to its end or to a deadline.

    Args:
        arguments: an absolute path and its arguments.
        seconds: after which it is killed, and left behind if that does not end it.
        env: environment variables instead of ours; the language is set to C in any case.
        limit: bytes of either stream after which it is killed.
        turn: what the program holds while it is there; ended here.
    """
    command = _command(arguments)
    begun = monotonic()
    variables = dict(os.environ if env is None else env)
    variables.update(LC_ALL="C", LANG="C")
    turn = Turn(None, command, seconds) if turn is None else turn
    try:
        child = subprocess.Popen(
            list(arguments),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=turn.inherited,
        )
    except OSError as error:
        turn.end(over=True)
        return Said(command, "not-started", None, "", "cannot be started: %s" % error.strerror, monotonic() - begun)
    try:
        turn.started(child.pid)
        return _hear(child, command, begun, seconds, limit)
    finally:
        turn.end(over=child.returncode is not None)


def ask_driver(arguments: Sequence[str], seconds: float, remaining: float = 600.0, name: str | None = None) -> Said:
    """Like :func:`ask`, for programs that enter the GPU driver: only when nobody else asks it on this machine.

    Args:
        arguments: an absolute path and its arguments.
        seconds: that the answer may take.
        remaining: seconds for the wait and the answer together.
        name: of the question, for evidence; the command by default.
    """
    begun = monotonic()
    command = _command(arguments) if name is None else name
    turn = Turn(lock_path(), command, seconds, min(PATIENCE, remaining))
    try:
        while not turn.ready():
            sleep(PAUSE)
    except Busy as busy:
        stuck = busy.unkillable
        which = (None, None, None) if stuck is None else (stuck.pid, stuck.state, stuck.place)
        return Said(command, "not-asked", None, "", "", monotonic() - begun, *which, earlier=str(busy))
    except BaseException:
        turn.end(over=True)
        raise
    said = ask(arguments, min(seconds, begun + remaining - monotonic()), turn=turn)
    return replace(said, command=command)


def _command(arguments: Sequence[str]) -> str:
    command = " ".join([os.path.basename(arguments[0]), *arguments[1:]])
    return command if len(command) <= 200 else command[:197] + "..."


def _hear(child: subprocess.Popen[bytes], command: str, begun: float, seconds: float, limit: int) -> Said:
    """Take what a program says until it ends or has to be ended."""
    out, err, complete = _read(child, begun + seconds, limit)
    took = monotonic() - begun
    how: How = "ended" if complete else "too-long" if max(len(out), len(err)) > limit else "timeout"
    status = _wait(child, begun + seconds) if complete else None
    if complete and status is None:
        how = "timeout"
    texts = out.decode("utf-8", "replace"), err.decode("utf-8", "replace")
    if how == "ended":
        return Said(command, how, status, *texts, took)
    survives = _end(child)
    state, place = condition(child.pid) if survives else (None, None)
    return Said(command, how, None, *texts, monotonic() - begun, child.pid if survives else None, state, place)


def _read(child: subprocess.Popen[bytes], until: float, limit: int) -> tuple[bytes, bytes, bool]:
    """Return (stdout, stderr, whether both were read to their end); closes them."""
    assert child.stdout is not None and child.stderr is not None  # noqa: S101, PT018 - both are pipes
    pieces: dict[int, list[bytes]] = {child.stdout.fileno(): [], child.stderr.fileno(): []}
    sizes = dict.fromkeys(pieces, 0)
    waiting = set(pieces)
    poller = select.poll()
    for descriptor in waiting:
        poller.register(descriptor, select.POLLIN)
    while waiting:
        left = until - monotonic()
        if left <= 0 or max(sizes.values()) > limit:
            break
        if child.poll() is not None:
            # A grandchild may hold the pipe for ever: what is there now is all that is read.
            left = min(left, 0.1)
        ready = poller.poll(min(left, 0.5) * 1000)
        if not ready and child.poll() is not None:
            waiting.clear()
            _end_group(child.pid)
        for descriptor, _ in ready:
            piece = os.read(descriptor, 1 << 16)
            if piece:
                pieces[descriptor].append(piece)
                sizes[descriptor] += len(piece)
            else:
                waiting.discard(descriptor)
                poller.unregister(descriptor)
    first, second = (b"".join(pieces[stream.fileno()]) for stream in (child.stdout, child.stderr))
    child.stdout.close()
    child.stderr.close()
    return first, second, not waiting


def _wait(child: subprocess.Popen[bytes], until: float) -> int | None:
    """Return its exit status; None when it does not end although it has closed its output."""
    while True:
        status = child.poll()
        if status is not None or monotonic() >= until:
            return status
        sleep(0.002)


def _end(child: subprocess.Popen[bytes]) -> bool:
    """Kill the whole group; return whether the program is still there shortly after."""
    if not _end_group(child.pid):
        child.kill()
    until = monotonic() + _AFTER_KILL
    while child.poll() is None:
        if monotonic() >= until:
            return True
        sleep(0.005)
    return False


def _end_group(group: int) -> bool:
    """Kill what is left of a process group; return whether there was anything that could be."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


class Programs:
    """Asks programs one after the other; one that hung is not asked again.

    Args:
        remaining: gives the seconds that are left for all of them.
        path: the PATH to look for them on, ours by default.
    """

    def __init__(self, remaining: float = 600.0, path: str | None = None) -> None:
        self._until = monotonic() + remaining
        self._path = path
        self._stuck: dict[str, Said] = {}
        self.asked: list[Said] = []
        """Every answer, in order."""

    def has(self, program: str) -> bool:
        """Whether there is such a program."""
        return find(program, self._path) is not None

    def stuck(self, program: str) -> Said | None:
        """Return the question that ``program`` hung in."""
        return self._stuck.get(program)

    def ask(self, program: str, *arguments: str, seconds: float | None = None) -> Said:
        """Ask ``program``; the answer says why where there is none."""
        command = " ".join((program, *arguments))[:200]
        if seconds is None:
            seconds = SMI_SECONDS if program == SMI else LSPCI_SECONDS
        path = find(program, self._path)
        seconds = min(seconds, self._until - monotonic())
        if program in self._stuck or seconds <= 0:
            said = Said(command, "not-asked", None, "", "", 0.0)
        elif path is None:
            said = Said(command, "not-found", None, "", "", 0.0)
        else:
            left = self._until - monotonic()
            said = ask_driver((path, *arguments), seconds, left) if program == SMI else ask((path, *arguments), seconds)
        if said.hung:
            self._stuck[program] = said
        self.asked.append(said)
        return said
