"""One question to the GPU driver at a time on one machine, whoever asks: probes, the guard, a launch.

In a driver that hangs nvidia-smi cannot be killed, and every further one joins it. So whoever asks takes a turn first:
a file, locked with flock, whose descriptor the program that asks **inherits**. The lock thus lives exactly as long as
what is stuck, even if the agent that started it was killed. In the file stands who that is, which counts by itself:

* The recorded process lives (same pid, same start): it is in the way, with or without the lock. A process that is
  stuck in its own end may have lost its descriptors already.
* The lock is held and the recorded process is gone: something that it started has kept the descriptor. After a second
  that does not count any more; from then on the record alone tells who asks.
* The lock is held and no process is recorded: whoever asks was ended between two lines of :meth:`Turn.started`. That
  counts.

Turns are given at a gate, a second lock that nothing inherits: who stands in it is next, and has recorded its program
before the next one looks. Who asks many questions in a row cannot keep the others out.

Without a folder to lock in (it is read-only, or not known because a probe was started by hand) nobody waits for anybody.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
from time import monotonic, time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VARIABLE = "RDIAG_SMI_LOCK"
"""Environment variable with the path of the lock; the agent sets it for probes (:mod:`remote_diag.agent.layout`)."""
GATE = ".next"
"""What is added to the path of the lock."""
PAUSE = 0.02
"""Seconds between two looks whether it is one's turn."""
PATIENCE = 30.0
"""Seconds to wait for a turn: longer than any one question may take."""
_LATE = 1.0
"""Seconds after its deadline at which a question counts as left behind: whoever asked it would have ended it by then."""
_DYING = 0.3
"""Seconds that a killed process gets to be gone."""
_LEAKED = 1.0
"""Seconds for which a lock counts whose recorded holder is gone: it may be let go of this very moment."""
_RECORD = 2048
"""Bytes of the record, always the same: it is written at once, and later without need of room on the disk."""
_SIGKILL = 1 << (signal.SIGKILL - 1)


class Holder:
    """Whoever asks the driver at this moment."""

    __slots__ = ("asked", "asked_for", "killed", "overdue", "pid", "place", "started", "state")

    def __init__(self, record: dict[str, Any]) -> None:
        self.pid: int | None = record.get("pid")
        """None where nothing is recorded."""
        self.started: int | None = record.get("started")
        """Clock ticks after boot; with the pid it names one process for good."""
        self.asked = str(record.get("asked") or "what it asks is not recorded")
        self.asked_for = max(0, int(time()) - int(record.get("since") or time()))
        """Seconds since it was started."""
        self.overdue = monotonic() > float(record.get("until") or float("inf")) + _LATE
        """Whether its own deadline has passed."""
        self.killed = False
        """Whether it was sent SIGKILL and is there all the same."""
        self.state: str | None = None
        """As /proc says: ``D`` is stuck in the kernel."""
        self.place: str | None = None
        """The kernel function that it is in, where that may be read."""

    def describe(self) -> str:
        """Say who it is, in a few words."""
        words = []
        if self.killed:
            words.append("killed and still there")
        if self.state is not None:
            words.append("state %s" % self.state)
        if self.place is not None:
            words.append("in the kernel in %s" % self.place)
        who = "pid unknown" if self.pid is None else "pid %d" % self.pid
        return "%s%s, asked %d s ago: %s" % (who, " (%s)" % ", ".join(words) if words else "", self.asked_for, self.asked)


class Busy(Exception):
    """It is not one's turn, and more waiting makes no sense; the text says who is in the way.

    Args:
        holder: who asks; None when it is not known.
        waited: seconds.
    """

    def __init__(self, holder: Holder | None, waited: float) -> None:
        self.holder = holder
        if holder is not None and (holder.killed or holder.overdue):
            super().__init__("an earlier question has no answer yet, the driver may hang: %s" % holder.describe())
        else:
            who = "" if holder is None else ", now %s" % holder.describe()
            super().__init__("others have been asking the driver for %.0f s%s" % (waited, who))

    @property
    def unkillable(self) -> Holder | None:
        """The holder, if it was killed and is there all the same."""
        return self.holder if self.holder is not None and self.holder.killed else None


class Turn:
    """One question to the driver, from the wait for its turn to its end.

    ::

        turn = Turn(lock_path(), "nvidia-smi -L", 20.0)
        while not turn.ready():
            sleep(PAUSE)
        ... start the program with the descriptors turn.inherited ...
        turn.started(pid)
        ... in all cases, the failure to start included ...
        turn.end(over=...)

    Args:
        path: of the lock; None for no lock.
        asked: the question, for evidence.
        seconds: that the question may take.
        patience: seconds to wait for the turn at most.
    """

    def __init__(self, path: str | None, asked: str, seconds: float, patience: float = PATIENCE) -> None:
        self._path = path
        self._asked = asked
        self._seconds = seconds
        self._begun = monotonic()
        self._until = self._begun + patience
        self._gate = -1
        self._file = -1
        self._locked = False
        self._gone_since: float | None = None
        self._dying: tuple[tuple[int | None, int | None], float] | None = None
        self._killed: tuple[int | None, int | None] | None = None

    def ready(self) -> bool:
        """Return whether the question may be asked now; if not, call again after :data:`PAUSE`.

        Raises:
            Busy: somebody is in the way and will not go.
        """
        if self._path is None or self._file >= 0:
            return True
        try:
            if self._gate < 0:
                self._gate = _enter(self._path + GATE)
            file, locked = _take(self._path, lock=self._gate >= 0)
        except OSError:
            # No folder, a read-only one, something else in the place of the file: as without a lock.
            self.end(over=True)
            self._path = None
            return True
        try:
            holder = self._in_the_way(file, locked=locked)
            if holder is None and self._gate >= 0:
                self._record(file, {})
                self._file, self._locked = file, locked
                return True
            self._judge(holder)
        except BaseException:
            self._close_gate()
            raise
        finally:
            if self._file < 0:
                os.close(file)
        return False

    @property
    def inherited(self) -> tuple[int, ...]:
        """The descriptors that the program must inherit."""
        return (self._file,) if self._locked and self._file >= 0 else ()

    def started(self, pid: int) -> None:
        """Record the program; the next one in line may look now."""
        if self._file >= 0:
            process = _stat(pid)
            self._record(self._file, {"pid": pid, "started": None if process is None else process[1]})
        self._close_gate()

    def end(self, *, over: bool) -> None:
        """Let go.

        Args:
            over: whether the program has ended, or was never started. Otherwise it keeps the lock.
        """
        if self._file >= 0:
            if over and self._locked:
                # Not only our descriptor: whatever the program started may have one as well.
                try:  # noqa: SIM105 - contextlib would be one more import
                    fcntl.flock(self._file, fcntl.LOCK_UN)
                except OSError:
                    pass
            os.close(self._file)
            self._file = -1
        self._close_gate()

    def _close_gate(self) -> None:
        if self._gate >= 0:
            os.close(self._gate)
            self._gate = -1

    def _record(self, file: int, fields: dict[str, Any]) -> None:
        now = monotonic()
        record = {"asked": self._asked[:200], "since": int(time()), "until": now + self._seconds, "namespace": _namespace(), **fields}
        try:
            os.pwrite(file, json.dumps(record).encode("ascii").ljust(_RECORD - 1) + b"\n", 0)
        except OSError:
            # What stands there is about somebody else: better nothing.
            try:  # noqa: SIM105 - contextlib would be one more import
                os.ftruncate(file, 0)
            except OSError:
                pass

    def _in_the_way(self, file: int, *, locked: bool) -> Holder | None:
        """Return whoever asks now; None when nobody does."""
        record = _read(file)
        holder = Holder(record)
        if holder.pid is None or holder.started is None or record.get("namespace") != _namespace():
            # Nothing recorded, or nothing that could be looked up here: the lock decides.
            return None if locked else holder
        process = _stat(holder.pid)
        if process is not None and process[1] == holder.started and not process[2]:
            self._gone_since = None
            holder.state, holder.place = condition(holder.pid)
            holder.killed = _is_killed(holder.pid) or self._killed == (holder.pid, holder.started)
            return holder
        if locked:
            return None
        now = monotonic()
        if self._gone_since is None:
            self._gone_since = now
        holder.state = "gone"
        return None if now >= self._gone_since + _LEAKED else holder

    def _judge(self, holder: Holder | None) -> None:
        """Raise Busy when there is nothing to wait for; end a question that was left behind."""
        now = monotonic()
        if holder is not None and holder.state != "gone":
            identity = (holder.pid, holder.started)
            left_behind = holder.overdue and self._gate >= 0
            if left_behind and not holder.killed and holder.state is not None:
                _kill(holder)
                self._killed = identity
            if not (holder.killed or left_behind):
                self._dying = None
            elif self._dying is None or self._dying[0] != identity:
                self._dying = (identity, now)
            elif now >= self._dying[1] + _DYING:
                raise Busy(holder, now - self._begun)
        if now >= self._until:
            raise Busy(holder, now - self._begun)


def lock_path() -> str | None:
    """Return the path of the lock, as the agent told this process; None where it did not."""
    return os.environ.get(VARIABLE) or None


def condition(pid: int) -> tuple[str | None, str | None]:
    """Return (state, kernel function) of a process, as far as /proc tells."""
    process = _stat(pid)
    if process is None:
        return None, None
    try:
        with open("/proc/%d/wchan" % pid, encoding="ascii", errors="replace") as file:
            words = file.read(100).strip()
    except OSError:
        words = ""
    return process[0], words if words not in {"", "0"} else None


def _enter(path: str) -> int:
    """Return the descriptor of the gate, held; -1 while somebody else stands in it."""
    file, locked = _take(path, lock=True)
    if locked:
        return file
    os.close(file)
    return -1


def _take(path: str, *, lock: bool) -> tuple[int, bool]:
    """Return a descriptor of the file ``path`` and whether it is locked by it; raise OSError when there is none.

    On a file system without locks it counts as locked: then the record alone tells who asks.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if not lock:
            return file, False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return file, False
        try:
            if os.path.samestat(os.fstat(file), os.lstat(path)):
                return file, True
        except FileNotFoundError:
            pass
        # It was removed meanwhile, as an old one (rdiag clean).
        os.close(file)


def _read(file: int) -> dict[str, Any]:
    """Return the record; empty where there is none or it makes no sense."""
    try:
        record = json.loads(os.pread(file, _RECORD, 0) or b"{}")
        fits = isinstance(record, dict) and all(
            record.get(name) is None or type(record[name]) in kinds
            for name, kinds in (("pid", (int,)), ("started", (int,)), ("since", (int,)), ("until", (int, float)))
        )
    except ValueError:
        return {}
    return record if fits else {}


def _stat(pid: int) -> tuple[str, int, bool, int] | None:
    """Return (state, start in ticks after boot, whether only its exit status is left, process group) of a process."""
    try:
        with open("/proc/%d/stat" % pid, "rb", 0) as stream:
            text = stream.read(4096)
        fields = text[text.rindex(b")") + 2 :].split()
        state = fields[0].decode("ascii", "replace")
        # A leader that ended before its threads is not dead: one of them may be what is stuck.
        return state, int(fields[19]), state in {"Z", "X", "x"} and int(fields[17]) <= 1, int(fields[2])
    except (OSError, ValueError, IndexError):
        return None


def _is_killed(pid: int) -> bool:
    """Whether SIGKILL was sent to a process and has not ended it yet."""
    try:
        with open("/proc/%d/status" % pid, "rb", 0) as stream:
            lines = stream.read(1 << 16).splitlines()
        pending = [int(line.split()[1], 16) for line in lines if line.startswith((b"SigPnd:", b"ShdPnd:"))]
    except (OSError, ValueError, IndexError):
        return False
    return any(signals & _SIGKILL for signals in pending)


def _kill(holder: Holder) -> None:
    """End a question whose time is over and whose asker has not ended it, as that one would have."""
    process = None if holder.pid is None else _stat(holder.pid)
    if holder.pid is None or process is None or process[1] != holder.started:
        return
    try:
        if process[3] == holder.pid:
            os.killpg(holder.pid, signal.SIGKILL)
        else:
            os.kill(holder.pid, signal.SIGKILL)
    except OSError:
        return


def _namespace() -> str:
    """Return in which namespace process numbers are those of here; a container has one of its own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
