"""The ranks of a group, as their starter sees them: told what to do, listened to, and ended, whatever state they are in.

Nothing here waits for longer than it is told to. Ranks answer through pipes of their own, so that it is known which of
them got how far when the group itself hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from time import monotonic, sleep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Mapping

    Event = dict[str, Any]

PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker_main.py")
SILENT = 10.0
"""Seconds without a sign of life after which a rank counts as frozen; it shows one every half second."""
BEGINNING = ("start", "import", "devices")
"""Phases in which threads that would show signs of life may have to wait: while modules are loaded, and while CUDA begins,
which without persistence mode takes seconds for each GPU of the host."""
_STOPPED_FOR = 1.0
"""Seconds for which a rank must be seen stopped."""
_AFTERMATH = 1.0
"""Seconds after the first trouble in which its cause may still show: others fail because one is gone."""
_LEAVE = 5.0
"""Seconds to leave the group in order."""
_GONE = 3.0
"""Seconds that killed ranks get to be gone; what is stuck in a driver stays."""
_TURN = 0.25
_MAX_LINE = 8 << 20
_TAIL = 1 << 20


class Trouble(Exception):
    """A rank, or the group, does not go on.

    Args:
        kind: killed, exited, frozen, hang, error.
        rank: which one; None when it is not one rank's.
        phase: what was being done.
        text: what is known, in words.
        evidence: lines of its output that tell more.
    """

    def __init__(self, kind: str, rank: int | None, phase: str, text: str, evidence: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.kind, self.rank, self.phase, self.text, self.evidence = kind, rank, phase, text, evidence


@dataclass
class Worker:
    """One rank."""

    rank: int
    process: subprocess.Popen[bytes]
    pipe: int
    """Where it says things."""
    log: str
    """File with its stdout and stderr."""
    phase: str = "start"
    heard: float = field(default_factory=monotonic)
    stopped_since: float | None = None
    open: bool = True
    left: bool = False
    """Whether it left in order."""
    error: tuple[str, str] | None = None
    """(class, text) of the exception that ended it."""
    answers: list[Event] = field(default_factory=list)
    found: Event | None = None
    """What it said on the way to an answer that has not come yet."""
    _rest: bytes = b""

    def take(self, data: bytes) -> None:
        """Take what it said; lines that are not JSON objects count as silence."""
        self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        if len(self._rest) > _MAX_LINE:
            self._rest = b""
        for line in lines:
            try:
                event = json.loads(line.decode("ascii"))
            except ValueError:
                continue
            if isinstance(event, dict):
                self._hear(event)

    def _hear(self, event: Event) -> None:
        self.heard = monotonic()
        if "phase" in event:
            self.phase = str(event["phase"])
        elif "error" in event:
            self.error = str(event["error"]), str(event.get("text", ""))
        elif isinstance(event.get("found"), dict):
            self.found = event["found"]
        elif "done" in event or "ready" in event:
            self.found = None
            self.left = self.left or event.get("done") == "stop"
            self.answers.append(event)

    @property
    def state(self) -> str:
        """One letter of /proc/<pid>/stat: T is stopped, D stuck in the kernel; ``?`` where it cannot be read."""
        try:
            with open("/proc/%d/stat" % self.process.pid, "rb") as file:
                return file.read(4096).rpartition(b")")[2].split()[0].decode("ascii")
        except (OSError, IndexError):
            return "?"

    def words(self) -> tuple[str, ...]:
        """Return the lines of its output that tell why: the first warnings of NCCL, then the last lines."""
        try:
            with open(self.log, "rb") as file:
                start = file.read(_TAIL)
                file.seek(max(len(start), os.path.getsize(self.log) - 65_536))
                text = (start + file.read()).decode("utf-8", "replace")
        except OSError:
            return ()
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        warnings = [line for line in lines if "NCCL WARN" in line][:2]
        last = [line for line in lines if line not in warnings][-2:]
        return tuple("rank %d: %s" % (self.rank, line[:400]) for line in (*warnings, *last))


class Group:
    """All ranks of one group; a context manager that ends them.

    Args:
        spec: what every rank gets, without its own numbers.
        ranks: how many.
        folder: where their files go.
        env: environment variables beyond ours.
        program: what is started for each rank.
        idle: called now and then while ranks are waited for.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        ranks: int,
        folder: str,
        *,
        env: Mapping[str, str],
        program: str = PROGRAM,
        idle: Callable[[], None] | None = None,
    ) -> None:
        self.workers: list[Worker] = []
        self.survivors: tuple[int, ...] = ()
        """Ranks that even SIGKILL did not end."""
        self._idle = idle
        self._selector = selectors.DefaultSelector()
        try:
            for rank in range(ranks):
                self._start({**spec, "rank": rank, "ranks": ranks, "parent": os.getpid()}, folder, env, program)
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Group:
        """Return it; the ranks run."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End all ranks; after an exception without asking them first."""
        self.end(ask=kind is None)

    def _start(self, spec: dict[str, Any], folder: str, env: Mapping[str, str], program: str) -> None:
        rank = spec["rank"]
        reader, writer = os.pipe()
        try:
            path = os.path.join(folder, "rank-%d.json" % rank)
            with open(path, "w") as file:
                json.dump({**spec, "descriptor": writer}, file)
            log = os.path.join(folder, "rank-%d.log" % rank)
            with open(log, "wb") as output:
                process = subprocess.Popen(
                    [sys.executable, program, path],
                    env={**os.environ, **env},
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(writer,),
                    start_new_session=True,
                )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        os.set_blocking(reader, False)
        worker = Worker(rank, process, reader, log)
        self.workers.append(worker)
        self._selector.register(reader, selectors.EVENT_READ, worker)

    # -- talking

    def order(self, **what: Any) -> None:
        """Tell all ranks what to do."""
        line = (json.dumps(what) + "\n").encode("ascii")
        for worker in self.workers:
            assert worker.process.stdin is not None  # noqa: S101 - a pipe
            try:
                worker.process.stdin.write(line)
                worker.process.stdin.flush()
            except OSError:
                # It is gone; who listens for the answer finds out how.
                continue

    def answers(self, until: float) -> list[Event]:
        """Return one answer of each rank, by rank.

        Raises:
            Trouble: a rank ended, is frozen, or not all answered before ``until`` (monotonic).
        """
        while not all(worker.answers for worker in self.workers):
            self._listen(min(_TURN, max(0.0, until - monotonic())))
            if self._idle is not None:
                self._idle()
            if any(self._in_trouble(worker) for worker in self.workers if not worker.answers):
                self._wait_for_the_cause()
                raise self._trouble()
            if monotonic() >= until:
                raise self._late()
        return [worker.answers.pop(0) for worker in self.workers]

    def _listen(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            worker = key.data
            try:
                data = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            if data:
                worker.take(data)
            else:
                self._selector.unregister(key.fd)
                worker.open = False

    # -- what went wrong

    def _in_trouble(self, worker: Worker) -> bool:
        if worker.error is not None or not worker.open or worker.process.poll() is not None:
            return True
        return self._frozen(worker)

    @staticmethod
    def _frozen(worker: Worker) -> bool:
        now = monotonic()
        if worker.state not in ("T", "t"):
            worker.stopped_since = None
        elif worker.stopped_since is None:
            worker.stopped_since = now
        elif now - worker.stopped_since >= _STOPPED_FOR:
            return True
        return worker.phase not in BEGINNING and now - worker.heard > SILENT

    def _wait_for_the_cause(self) -> None:
        until = monotonic() + _AFTERMATH
        while monotonic() < until:
            self._listen(0.1)
            if any((worker.process.poll() or 0) < 0 for worker in self.workers):
                return

    def _trouble(self) -> Trouble:
        """Return the cause, not its consequences: first who was killed, then who ended, froze, or failed."""
        for worker in self.workers:
            status = worker.process.poll()
            if status is not None and status < 0:
                text = "rank %d (pid %d) was killed by %s" % (worker.rank, worker.process.pid, _signal(-status))
                return Trouble("killed", worker.rank, worker.phase, text, worker.words())
        for worker in self.workers:
            if self._frozen(worker):
                return self._freeze(worker)
        for worker in self.workers:
            status = worker.process.poll()
            if status is not None and worker.error is None and not worker.left:
                text = "rank %d (pid %d) ended with status %d" % (worker.rank, worker.process.pid, status)
                return Trouble("exited", worker.rank, worker.phase, text, worker.words())
        failed = [worker for worker in self.workers if worker.error is not None]
        if failed:
            first = failed[0]
            assert first.error is not None  # noqa: S101 - see above
            text = "rank %d: %s: %s" % (first.rank, *first.error)
            return Trouble("error", first.rank if len(failed) == 1 else None, first.phase, text, first.words())
        (first, *_) = [worker for worker in self.workers if not worker.open] or self.workers
        return Trouble("exited", first.rank, first.phase, "rank %d closed its pipe" % first.rank, first.words())

    @staticmethod
    def _freeze(worker: Worker) -> Trouble:
        state = worker.state
        how = {"T": "stopped", "t": "stopped by a debugger", "D": "stuck in the kernel"}.get(state, "without a sign of life")
        text = "rank %d (pid %d) is frozen: %s (state %s), last heard %.0f s ago" % (
            worker.rank, worker.process.pid, how, state, monotonic() - worker.heard,
        )  # fmt: skip
        return Trouble("frozen", worker.rank, worker.phase, text, worker.words())

    def _late(self) -> Trouble:
        """Return who is behind, when all are alive and some do not answer."""
        waiting = [worker for worker in self.workers if not worker.answers]
        stuck = [worker for worker in waiting if worker.state in ("T", "t", "D")]
        if stuck:
            return self._freeze(stuck[0])
        phases = [worker.phase for worker in waiting]
        # One alone in another phase than all others is who they wait for.
        rare = [worker for worker in waiting if phases.count(worker.phase) == 1]
        alone = rare[0] if len(rare) == 1 and len(self.workers) > 2 else None
        alone = waiting[0] if alone is None and len(waiting) == 1 else alone
        phase = (alone or waiting[0]).phase
        who = "rank %d" % alone.rank if alone is not None else "ranks %s" % ", ".join(str(worker.rank) for worker in waiting)
        if alone is None and len(waiting) == len(self.workers):
            who = "all %d ranks" % len(waiting)
        text = "%s did not come back from phase %s in time; alive, and no signal ended it" % (who, phase)
        return Trouble("hang", None if alone is None else alone.rank, phase, text, waiting[0].words())

    # -- the end

    def end(self, *, ask: bool = False) -> None:
        """End all ranks by SIGKILL; where ``ask`` is set, those that are idle may leave the group in order before."""
        if ask and not any(self._in_trouble(worker) for worker in self.workers):
            self.order(do="stop")
            until = monotonic() + _LEAVE
            while monotonic() < until and any(worker.process.poll() is None for worker in self.workers):
                self._listen(0.05)
                if any(worker.error for worker in self.workers):
                    break
        for worker in self.workers:
            self._kill(worker)
        until = monotonic() + _GONE
        while monotonic() < until and any(worker.process.poll() is None for worker in self.workers):
            sleep(0.02)
        self.survivors = tuple(worker.rank for worker in self.workers if worker.process.poll() is None)
        for worker in self.workers:
            if worker.process.stdin is not None:
                with contextlib.suppress(OSError):
                    worker.process.stdin.close()
            if worker.pipe >= 0:
                os.close(worker.pipe)
                worker.pipe = -1
        self._selector.close()

    @staticmethod
    def _kill(worker: Worker) -> None:
        """Kill what is left of a rank's session: itself, and what it started."""
        try:
            os.killpg(worker.process.pid, signal.SIGKILL)
        except OSError:
            return


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "signal %d" % number
