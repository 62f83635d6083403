"""Starting a supervisor that nothing ties to the connection: another session, another parent, no descriptor of ours.

:func:`start` is all that launching needs. A scheduler (Slurm) can take its place: it gets the same argument vector,
and the supervisor writes the same records.
"""

from __future__ import annotations

import os
import re
import sys
from time import monotonic, sleep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_SUPERVISE = "supervise_main.py"
_ANSWER_WITHIN = 3.0
_CONFIGURATION = (
    "/etc/systemd/logind.conf",
    "/etc/systemd/logind.conf.d",
    "/run/systemd/logind.conf.d",
    "/usr/lib/systemd/logind.conf.d",
)


class LogoutKills(Exception):
    """A logout would kill the job and nothing can be done about it here; the text says what to do."""


def command(bundle: str, directory: str, handshake: int, lock: int) -> list[str]:
    """Return the argument vector of the supervisor of the job in ``directory``."""
    program = os.path.join(bundle, "agent", "jobs", _SUPERVISE)
    return [sys.executable, "-E", "-s", "-S", program, directory, str(handshake), str(lock)]


def start(argv: list[str], env: Mapping[str, str], log: str, keep: tuple[int, ...]) -> None:
    """Start ``argv`` detached: forked twice, in a session of its own, its output in the file ``log``.

    Args:
        argv: an absolute path and its arguments.
        env: its environment variables.
        log: file for what it prints, which should be nothing.
        keep: descriptors that it inherits; every other one is closed.

    Raises:
        OSError: no more processes are to be had.
    """
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            if os.fork() == 0:
                _become(argv, env, log, keep)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def _become(argv: list[str], env: Mapping[str, str], log: str, keep: tuple[int, ...]) -> None:
    try:
        os.chdir("/")
        null = os.open(os.devnull, os.O_RDONLY)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        first = 3
        for descriptor in sorted(keep):
            os.closerange(first, descriptor)
            os.set_inheritable(descriptor, True)  # noqa: FBT003 - the only way this call takes it
            first = descriptor + 1
        os.closerange(first, 65536)
        os.execve(argv[0], argv, dict(env))  # noqa: S606 - no shell is meant
    except OSError as error:
        os.write(2, ("cannot start the supervisor: %s\n" % error).encode("utf-8", "backslashreplace"))
    finally:
        os._exit(127)


def scope_prefix(job: str, env: Mapping[str, str]) -> tuple[list[str], str | None]:
    """Return (what to put before the supervisor's argument vector, a warning or None).

    Where systemd-logind kills what a user leaves behind, the supervisor is started in a scope of the user's own
    service manager; that one lives on after the logout only with lingering enabled.
    """
    if not logout_kills(env):
        return [], None
    path = env.get("PATH") or os.defpath
    runner = _which("systemd-run", path)
    if runner is None:
        return [], "this host kills what a user leaves behind at logout, and there is no systemd-run to prevent it"
    prefix = [runner, "--user", "--scope", "--quiet", "--collect", "--unit", _unit(job), "--"]
    loginctl = _which("loginctl", path)
    answer = "" if loginctl is None else _ask([loginctl, "show-user", str(os.geteuid()), "-p", "Linger"], env)
    if "Linger=yes" in answer:
        return prefix, None
    return prefix, (
        "lingering is off for this user: the host ends the job when the last session is closed; "
        "on the host, run: loginctl enable-linger"
    )


def _unit(job: str) -> str:
    return "rdiag-%s-%s" % (job, os.urandom(4).hex())


def logout_kills(env: Mapping[str, str], cgroup: str = "/proc/self/cgroup") -> bool:
    """Whether systemd-logind would kill this process's offspring when the user logs out."""
    try:
        with open(cgroup) as stream:
            if not re.search(r"/session-[^/]+\.scope", stream.read(65536)):
                return False
    except OSError:
        return False
    busctl = _which("busctl", env.get("PATH") or os.defpath)
    if busctl is not None:
        answer = _ask(
            [busctl, "get-property", "org.freedesktop.login1", "/org/freedesktop/login1",
             "org.freedesktop.login1.Manager", "KillUserProcesses"],
            env,
        )  # fmt: skip
        if answer.strip() in ("b true", "b false"):
            return answer.strip() == "b true" and os.geteuid() != 0
    return configured_to_kill(_CONFIGURATION) and os.geteuid() != 0


def configured_to_kill(places: tuple[str, ...]) -> bool:
    """Return what logind's configuration files say of KillUserProcesses; False when they say nothing."""
    verdict = False
    for place in places:
        files = [place]
        if os.path.isdir(place):
            files = [os.path.join(place, name) for name in sorted(os.listdir(place)) if name.endswith(".conf")]
        for path in files:
            try:
                with open(path, errors="replace") as stream:
                    found = re.findall(r"(?mi)^\s*KillUserProcesses\s*=\s*(\S+)", stream.read(1 << 20))
            except OSError:
                continue
            if found:
                verdict = found[-1].lower() in ("yes", "true", "1", "on")
    return verdict


def _which(program: str, path: str) -> str | None:
    for folder in path.split(os.pathsep):
        candidate = os.path.join(folder, program)
        if folder and os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return candidate
    return None


def _ask(argv: list[str], env: Mapping[str, str]) -> str:
    """Return what a program prints; nothing when it fails or takes too long. It is never waited for."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    try:
        pid = os.posix_spawn(
            argv[0],
            argv,
            dict(env),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, writer, 1),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ],
        )
    except OSError:
        os.close(reader)
        return ""
    finally:
        os.close(writer)
    output = b""
    until = monotonic() + _ANSWER_WITHIN
    while monotonic() < until:
        try:
            piece = os.read(reader, 4096)
        except BlockingIOError:
            sleep(0.005)
            continue
        if not piece:
            break
        output += piece
    os.close(reader)
    ended, _ = os.waitpid(pid, os.WNOHANG)
    if not ended:
        sleep(0.01)
        if not os.waitpid(pid, os.WNOHANG)[0]:
            os.kill(pid, 9)
    return output.decode("utf-8", "replace")
