"""The probe's process: its environment variables, and the fork that starts it."""

from __future__ import annotations

import os
import sys

from .layout import MARKER, SMI_LOCK_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from .request import Request

_NICENESS = 10
_SIGKILL = 9
"""Importing its name would cost milliseconds."""
_FIRST_TO_BE_KILLED = 1000
"""Value of oom_score_adj at which the kernel takes this process before any other."""


def as_utf8(text: str) -> str:
    """Return a path or value that the system gave us as the text that :func:`encoded` turns into the same bytes.

    Only in a locale that is not UTF-8 is that another text.
    """
    return os.fsencode(text).decode("utf-8", "surrogateescape")


def inherited_environment() -> dict[str, str]:
    """Return the environment variables of the agent, which are those of the login."""
    return {as_utf8(name): as_utf8(value) for name, value in os.environ.items()}


def child_environment(
    request: Request, inherited: dict[str, str], executable: str, smi_lock: str | None = None
) -> dict[str, str]:
    """Return the environment variables of the probe: the login's, the interpreter's, the host's, and ours.

    ``request.env`` outranks what :func:`entered` sets.

    Args:
        request: what the client asked for.
        inherited: environment variables of the agent.
        executable: the interpreter.
        smi_lock: path of the lock of the GPU driver; None where there is none.
    """
    env = entered(inherited, executable)
    env.update(request.env)
    if not request.active:
        env["CUDA_VISIBLE_DEVICES"] = ""
    if sys.getfilesystemencoding().lower() not in ("utf-8", "utf8"):
        # Values travel as UTF-8; in another locale the probe would read something else than the user wrote.
        env.setdefault("PYTHONUTF8", "1")
    env[MARKER] = request.run_id
    if smi_lock is not None:
        env[SMI_LOCK_VARIABLE] = as_utf8(smi_lock)
    return env


def entered(inherited: dict[str, str], executable: str) -> dict[str, str]:
    """Return ``inherited`` as it is inside the environment of the interpreter ``executable``.

    A virtual or conda environment is recognised by the files beside ``executable`` and entered as its own
    activation would: its ``bin`` first on PATH, VIRTUAL_ENV or CONDA_PREFIX set.
    """
    env = dict(inherited)
    place = os.path.dirname(os.path.dirname(executable))
    is_venv = os.path.isfile(os.path.join(place, "pyvenv.cfg"))
    is_conda = not is_venv and os.path.isdir(os.path.join(place, "conda-meta"))
    binaries, prefix = as_utf8(os.path.dirname(executable)), as_utf8(place)
    if is_venv or is_conda:
        path = env.get("PATH") or os.defpath
        if path.split(os.pathsep)[0] != binaries:
            env["PATH"] = binaries + os.pathsep + path
        env.pop("PYTHONHOME", None)
    if is_venv:
        env["VIRTUAL_ENV"] = prefix
    elif is_conda:
        env["CONDA_PREFIX"] = prefix
        env["CONDA_DEFAULT_ENV"] = os.path.basename(prefix)
    return env


def encoded(text: str) -> bytes:
    """Return ``text`` as the bytes that a program receives: UTF-8, undecodable bytes as they were."""
    return text.encode("utf-8", "surrogateescape")


class Spawned:
    """A started process and the ends of the pipes that lead to it."""

    __slots__ = ("failure", "gate", "life", "messages", "pid", "stderr", "stdout")

    def __init__(
        self, pid: int, failure: int, stdout: int, stderr: int, messages: int, *, life: int, gate: int
    ) -> None:
        self.pid = pid
        self.failure = failure
        """Ends without a byte once the program runs; otherwise says why it does not."""
        self.stdout = stdout
        self.stderr = stderr
        self.messages = messages
        self.life = life
        """Never written to; when the last descriptor of it is closed, the process and its group are killed."""
        self.gate = gate
        """Gets one byte once everything is ready for the code of the probe; until then the process waits."""


def spawn(argv: list[str], env: dict[str, str], directory: str | None, umask: int) -> Spawned:
    """Start ``argv`` in its own session, at low priority, stdin empty.

    Three numbers are appended to ``argv``: of the message pipe, of the pipe that ends with the agent, and of the one
    through which a byte comes when the probe may begin.

    Raises:
        OSError: no more processes or descriptors are to be had.
    """
    pipes = [os.pipe() for _ in range(4)]
    readers = [reader for reader, _ in pipes]
    writers = [writer for _, writer in pipes]
    lifeline, life = os.pipe()
    entrance, gate = os.pipe()
    arguments = [encoded(argument) for argument in (*argv, str(writers[3]), str(lifeline), str(entrance))]
    variables = {encoded(name): encoded(value) for name, value in env.items()}
    pid = os.fork()
    if pid == 0:
        os.close(life)
        os.set_inheritable(entrance, True)  # noqa: FBT003 - the only way this call takes it
        _become(arguments, variables, directory, umask, writers, lifeline=lifeline)
    for descriptor in (*writers, lifeline, entrance):
        os.close(descriptor)
    for descriptor in readers:
        os.set_blocking(descriptor, False)
    return Spawned(pid, *readers, life=life, gate=gate)


def _become(
    arguments: list[bytes],
    variables: dict[bytes, bytes],
    directory: str | None,
    umask: int,
    pipes: list[int],
    *,
    lifeline: int,
) -> NoReturn:
    """Turn the forked copy into the program; on failure report the step and leave."""
    failure, stdout, stderr, messages = pipes
    step = "prepare the process"
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.set_inheritable(messages, True)  # noqa: FBT003 - the only way this call takes it
        _lower_priority()
        _die_with_the_agent(lifeline)
        if directory is not None:
            step = "enter the working directory %s" % directory
            os.chdir(encoded(directory))
        step = "start %s" % arguments[0].decode("utf-8", "surrogateescape")
        os.umask(umask)
        os.execve(arguments[0], arguments, variables)  # noqa: S606 - no shell is meant
    except BaseException as error:  # noqa: BLE001 - this is a forked copy: nothing may return from here
        reason = getattr(error, "strerror", None) or str(error)
        os.write(failure, encoded("%s: %s" % (step, reason)))
    finally:
        os._exit(127)


def _die_with_the_agent(lifeline: int) -> None:
    """Have the kernel kill this process group when the agent is gone, however it went.

    Closing the other end of a pipe is an event on this one; whose signal, and to whom, can be chosen. Unlike
    PR_SET_PDEATHSIG this needs no ctypes, and it reaches the group. It holds while anybody has ``lifeline`` open.
    """
    import fcntl

    try:
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, _SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_RDONLY | os.O_ASYNC | os.O_NONBLOCK)
        os.set_inheritable(lifeline, True)  # noqa: FBT003 - the only way this call takes it
    except (OSError, AttributeError):
        # A system without these calls; the agent ends its runs by itself in all cases but its own sudden death.
        return


def _lower_priority() -> None:
    import resource

    try:
        os.nice(_NICENESS)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with open("/proc/self/oom_score_adj", "w") as adjustment:
            adjustment.write(str(_FIRST_TO_BE_KILLED))
    except OSError:
        pass
