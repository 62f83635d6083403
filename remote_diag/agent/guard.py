"""Keeps active probes away from GPUs that somebody uses: one lock a host, and a look at who is on them.

What makes a GPU free is decided by :mod:`probes.lib.gpu.occupancy`, which travels to the host beside the agent.

nvidia-smi is asked without ever being waited for: in a driver that hangs it cannot even be killed. At most one
question is open at a time, on the whole machine; one that stays without an answer ends the guarding, it is never
asked twice, nor while what an earlier run has asked has no answer (:mod:`probes.lib.gpu.one_at_a_time`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from time import monotonic, time

from . import wirejson
from .layout import ACTIVE_LOCK, smi_lock
from .protocol import REFUSED
from .verdict import Verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from probes.lib.gpu.occupancy import GpuProcess, Inquiry
    from probes.lib.gpu.one_at_a_time import Turn

    from .processes import Children, Tree
    from .request import Request

PROGRAM = "nvidia-smi"
ANSWER_WITHIN = 10.0
"""Seconds after which nvidia-smi counts as stuck. Without persistence mode eight GPUs take several."""
EVERY = 2.0
"""Seconds between an answer and the next question while the probe runs."""
_MAX_ANSWER = 1 << 20
_MAX_NAMED = 8
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
_FORCE = "--force runs it all the same"


class Question:
    """One nvidia-smi at work.

    Args:
        path: the program.
        env: its environment variables.
        children: who waits for it.
        arguments: what it is asked.
        turn: the turn that it takes, which is ready; ended with the question.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, path: str, env: dict[str, str], children: Children, arguments: tuple[str, ...], turn: Turn
    ) -> None:
        try:
            self.descriptor, writer = os.pipe()
        except OSError:
            turn.end(over=True)
            raise
        os.set_blocking(self.descriptor, False)
        self._children = children
        self._asked = monotonic()
        self._answer = b""
        self._complete = False
        self._turn = turn
        for descriptor in turn.inherited:
            os.set_inheritable(descriptor, True)  # noqa: FBT003 - the only way this call takes it
        try:
            self._pid = os.posix_spawn(
                path,
                (path, *arguments),
                env,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, writer, 1),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ],
                setpgroup=0,
            )
        except OSError:
            os.close(self.descriptor)
            turn.end(over=True)
            raise
        finally:
            os.close(writer)
            for descriptor in turn.inherited:
                # Nothing else that this process starts may have it.
                os.set_inheritable(descriptor, False)  # noqa: FBT003 - see above
        turn.started(self._pid)
        children.await_(self._pid)

    def read(self) -> None:
        """Take what it says."""
        try:
            piece = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return
        self._answer += piece
        self._complete = not piece or len(self._answer) > _MAX_ANSWER

    @property
    def reading(self) -> bool:
        """Whether more may come."""
        return not self._complete

    @property
    def late(self) -> float:
        """When, on the monotonic clock, it counts as stuck."""
        return self._asked + ANSWER_WITHIN

    def lines(self) -> list[str] | None:
        """Return what it said, blank lines left out; None while it has not ended.

        Raises:
            ValueError: it failed, or says too much.
        """
        self._children.reap()
        if len(self._answer) > _MAX_ANSWER:
            raise ValueError("it says too much")
        if not self._complete or self._pid not in self._children.ended:
            return None
        status = self._children.ended.pop(self._pid)
        lines = [line for line in self._answer.decode("utf-8", "replace").splitlines() if line.strip()]
        if status != 0:
            raise ValueError("it failed: %s" % (lines[0] if lines else "without a word")[:200])
        return lines

    def abandon(self) -> None:
        """Kill it and what it started, without waiting to see it die."""
        os.close(self.descriptor)
        if self._pid in self._children.pending() or not self._complete:
            # Not reaped yet, or what it started keeps its output open: the number is still that of its group.
            try:  # noqa: SIM105 - contextlib would be one more import
                os.killpg(self._pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        self._children.reap()
        self._turn.end(over=self._pid not in self._children.pending())


class Guard:
    """Decides whether an active probe may start, and whether it may go on.

    Args:
        cache: folder that holds the lock.
        request: what is to run; its ``force`` switches off everything but the lock.
        env: environment variables of the probe, by whose PATH nvidia-smi is found.
        children: who waits for our children.
    """

    def __init__(self, cache: str, request: Request, env: dict[str, str], children: Children) -> None:
        self._path = os.path.join(cache, ACTIVE_LOCK)
        self._smi_lock = smi_lock(cache)
        self._request = request
        self._env = env
        self._children = children
        self._lock: int | None = None
        self._turn: Turn | None = None
        self._question: Question | None = None
        self._next_question: float | None = None
        self._tree: Tree | None = None
        self._invisible: set[int] = set()
        self._inquiry: Inquiry | None = None
        self.free = request.force
        """Whether the probe may start."""

    def begin(self) -> Verdict | None:
        """Take the lock and begin to ask who is there; return a refusal when that cannot be."""
        refusal = self._take_lock()
        if refusal is None and not self._request.force:
            from probes.lib.gpu.occupancy import Inquiry

            self._inquiry = Inquiry()
            refusal = self._ask()
        return refusal

    def protects(self, tree: Tree) -> None:
        """From now on the processes of ``tree`` may compute, and nobody else."""
        self._tree = tree
        self._inquiry = None
        if not self._request.force:
            self._next_question = monotonic() + EVERY

    @property
    def descriptor(self) -> int | None:
        """What to wait on, readable when nvidia-smi says something."""
        return self._question.descriptor if self._question is not None and self._question.reading else None

    def read(self) -> None:
        """Take what nvidia-smi says."""
        if self._question is not None:
            self._question.read()

    def next_time(self) -> float | None:
        """Return the monotonic time at which :meth:`step` has something to do."""
        return self._question.late if self._question is not None else self._next_question

    def step(self, now: float) -> Verdict | None:
        """Judge an answer that came, ask when it is time; return a refusal when the probe must not run (on)."""
        if self._question is not None:
            return self._judge(now)
        if self._next_question is not None and now >= self._next_question:
            self._next_question = None
            return self._ask()
        return None

    def rest(self) -> None:
        """Ask no more: the run is being ended. The lock stays."""
        if self._question is not None:
            self._dismiss(self._question)
        if self._turn is not None:
            self._turn.end(over=True)
            self._turn = None
        self._next_question = None

    def close(self) -> None:
        """Let go of everything; the lock goes with it."""
        self.rest()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take_lock(self) -> Verdict | None:
        try:
            lock = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            return Verdict(REFUSED, "cannot open the lock of active probes, %s: %s" % (self._path, error.strerror))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(lock, 4096)
            os.close(lock)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                return Verdict(REFUSED, "cannot lock %s: %s" % (self._path, error.strerror))
            return Verdict(
                REFUSED,
                "another active probe is running on this host: %s" % _describe_holder(holder),
                "wait for it to end; one at a time uses the GPUs, with --force too",
            )
        holder = wirejson.encode(
            {
                "pid": os.getpid(),
                "probe": self._request.probe_name,
                "run_id": self._request.run_id,
                "since": int(time()),
            }
        )
        os.ftruncate(lock, 0)
        os.write(lock, holder)
        self._lock = lock
        return None

    def _ask(self) -> Verdict | None:
        """Ask when it is our turn, which others may have first; return a refusal when that cannot be."""
        from probes.lib.gpu.occupancy import APPS_QUESTION
        from probes.lib.gpu.one_at_a_time import PAUSE, Busy, Turn

        arguments = APPS_QUESTION if self._inquiry is None else self._inquiry.question
        assert arguments is not None  # noqa: S101 - an inquiry that is over is not asked
        if self._turn is None:
            self._turn = Turn(self._smi_lock, " ".join((PROGRAM, *arguments)), ANSWER_WITHIN)
        try:
            path = locate(self._env)
            if not self._turn.ready():
                self._next_question = monotonic() + PAUSE
                return None
        except (Busy, ValueError) as error:
            self.rest()
            return self._cannot_tell(str(error))
        turn, self._turn = self._turn, None
        try:
            self._question = Question(path, self._env, self._children, arguments, turn)
        except OSError as error:
            return self._cannot_tell("%s cannot be started: %s" % (path, error.strerror))
        return None

    def _judge(self, now: float) -> Verdict | None:
        question = self._question
        assert question is not None  # noqa: S101 - only called with one
        try:
            lines = question.lines()
            if lines is None:
                if now < question.late:
                    return None
                self._dismiss(question)
                return self._cannot_tell(
                    "%s did not answer within %g s: the driver may hang" % (PROGRAM, ANSWER_WITHIN)
                )
            self._dismiss(question)
            return self._take(lines, now)
        except ValueError as error:
            if self._question is not None:
                self._dismiss(question)
            return self._cannot_tell("the answer of %s makes no sense; %s" % (PROGRAM, error))

    def _take(self, lines: list[str], now: float) -> Verdict | None:
        """Take an answer; raise ValueError when it makes no sense."""
        from probes.lib.gpu.occupancy import parse_apps

        if self._inquiry is not None:
            self._inquiry.take(lines)
            if self._inquiry.question is None:
                return self._judge_before(self._inquiry)
            self._next_question = now + self._inquiry.pause
            return None
        assert self._tree is not None  # noqa: S101 - without an inquiry the probe runs
        processes = parse_apps(lines)
        self._next_question = now + EVERY
        return self._judge_during(processes, self._tree)

    def _dismiss(self, question: Question) -> None:
        question.abandon()
        self._question = None

    def _judge_before(self, inquiry: Inquiry) -> Verdict | None:
        from probes.lib.gpu.occupancy import describe

        reasons = ["GPU %d: %s" % (gpu.index, reason) for gpu, reason in inquiry.busy]
        if inquiry.strangers:
            reasons.append(describe(inquiry.strangers))
        self._inquiry = None
        if not reasons:
            self.free = True
            return None
        more = "" if len(reasons) <= _MAX_NAMED else "; and %d more" % (len(reasons) - _MAX_NAMED)
        return Verdict(
            REFUSED,
            "a GPU is in use: %s%s" % ("; ".join(reasons[:_MAX_NAMED]), more),
            "wait until it is free, or stop its owner; " + _FORCE,
        )

    def _judge_during(self, processes: list[GpuProcess], tree: Tree) -> Verdict | None:
        tree.members()
        strangers = [process for process in processes if not tree.knows(process.pid)]
        invisible = {process.pid for process in strangers if not os.path.exists("/proc/%d" % process.pid)}
        # Who cannot be seen has just ended (and may have been ours), unless it is there again the next time. In a
        # container that proves nothing: the driver may list our own processes by the numbers they have outside.
        hidden = invisible & self._invisible if _sees_every_process() else set()
        self._invisible = invisible
        newcomers = [process for process in strangers if process.pid not in invisible or process.pid in hidden]
        if not newcomers:
            return None
        from probes.lib.gpu.occupancy import describe

        return Verdict(
            REFUSED,
            "somebody began to use a GPU while the probe ran, which was ended to make room: %s" % describe(newcomers),
            "run it again when the GPUs are free; " + _FORCE,
        )

    def _cannot_tell(self, cause: str) -> Verdict:
        longer = "cannot tell any longer" if self._tree is not None else "cannot tell"
        return Verdict(REFUSED, "%s whether the GPUs are free: %s" % (longer, cause), "if you know that they are, " + _FORCE)


def locate(env: dict[str, str]) -> str:
    """Return the path of nvidia-smi, found as probes find it; raise ValueError when there is none."""
    from probes.lib.gpu.where import find

    path = find(PROGRAM, env.get("PATH") or os.defpath)
    if path is None:
        raise ValueError("%s is not on the PATH, nor where it usually is" % PROGRAM)
    return path


def _describe_holder(content: bytes) -> str:
    from probes.lib.gpu.occupancy import owner

    try:
        holder = wirejson.decode(content)
        return "probe %s, run %s, agent %s, user %s, since %d s" % (
            str(holder["probe"])[:64],
            str(holder["run_id"])[:64],
            "pid %d" % holder["pid"],
            owner(int(holder["pid"])) or "unknown",
            max(0, int(time()) - int(holder["since"])),
        )
    except (ValueError, KeyError, TypeError):
        return "its holder has not said who it is"


def _sees_every_process() -> bool:
    """Whether process numbers here are those that the driver knows: not so inside a container."""
    try:
        return os.readlink("/proc/self/ns/pid") == _INITIAL_PID_NAMESPACE
    except OSError:
        return True
