"""Runs the programs that know about GPUs without ever waiting for one that cannot be ended.

In a driver that hangs nvidia-smi enters the kernel and does not come out: SIGKILL is noted and changes nothing, and
every further nvidia-smi joins it. So each program gets a process group of its own and a deadline, is killed and left
behind after it, and the same program is not asked again (:class:`Programs`).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from dataclasses import dataclass
from time import monotonic, sleep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, Mapping, Sequence

    How = Literal["ended", "timeout", "not-found", "not-started", "not-asked", "too-long"]

SMI = "nvidia-smi"
SMI_SECONDS = 20.0
"""Seconds for one question; eight GPUs without persistence mode take several."""
LSPCI_SECONDS = 10.0
MAX_OUTPUT = 8 << 20
"""Bytes of each stream; ``-q -x`` of sixteen GPUs is under 1 MiB."""
_MORE_PATH = ("/usr/bin", "/usr/local/bin", "/usr/sbin", "/sbin", "/bin", "/usr/lib/wsl/lib", "/opt/bin")
"""Looked at after the PATH: lspci is in /usr/sbin, which is not on everybody's PATH; WSL keeps nvidia-smi apart."""
_AFTER_KILL = 0.2


@dataclass(frozen=True)
class Said:
    """What came of asking one program."""

    command: str
    """The program and its arguments, for evidence."""
    how: How
    """``ended`` by itself, ``timeout``, ``not-found`` on the PATH, ``not-started``, ``not-asked`` because it hung
    before, ``too-long`` an answer."""
    status: int | None
    """Exit status; minus the number of the signal that ended it; None unless it ended."""
    out: str
    """stdout, undecodable bytes replaced. Programs of the driver write their errors here too."""
    err: str
    seconds: float
    pid: int | None = None
    """Of a program that was left behind."""
    state: str | None = None
    """What a program that was left behind does, as /proc says: ``D`` is stuck in the kernel."""
    waits_in: str | None = None
    """The kernel function that it is stuck in, where that may be read."""

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


def find(program: str, path: str | None = None) -> str | None:
    """Return the first executable ``program`` on ``path`` (the PATH), then in the usual folders."""
    folders = (os.environ.get("PATH", os.defpath) if path is None else path).split(os.pathsep)
    for folder in (*folders, *_MORE_PATH):
        candidate = os.path.join(folder, program)
        if folder and os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return candidate
    return None


def ask(arguments: Sequence[str], seconds: float, *, env: Mapping[str, str] | None = None, limit: int = MAX_OUTPUT) -> Said:
    """Run a program to its end or to a deadline.

    Args:
        arguments: an absolute path and its arguments.
        seconds: after which it is killed, and left behind if that does not end it.
        env: environment variables instead of ours; the language is set to C in any case.
        limit: bytes of either stream after which it is killed.
    """
    command = " ".join([os.path.basename(arguments[0]), *arguments[1:]])
    command = command if len(command) <= 200 else command[:197] + "..."
    begun = monotonic()
    variables = dict(os.environ if env is None else env)
    variables.update(LC_ALL="C", LANG="C")
    try:
        child = subprocess.Popen(
            list(arguments),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return Said(command, "not-started", None, "", "cannot be started: %s" % error.strerror, monotonic() - begun)
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
    state, place = _condition(child.pid) if survives else (None, None)
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


def _condition(pid: int) -> tuple[str | None, str | None]:
    state = place = None
    try:
        with open("/proc/%d/stat" % pid, "rb") as stream:
            text = stream.read(4096)
        state = text[text.rindex(b")") + 2 :].split()[0].decode("ascii", "replace")
        with open("/proc/%d/wchan" % pid, encoding="ascii", errors="replace") as file:
            words = file.read(100).strip()
        place = words if words not in {"", "0"} else None
    except (OSError, ValueError, IndexError):
        pass
    return state, place


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
            said = ask((path, *arguments), seconds)
        if said.how == "timeout":
            self._stuck[program] = said
        self.asked.append(said)
        return said
