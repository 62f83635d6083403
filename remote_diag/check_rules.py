"""Facts about a host -> findings: what each one was held against, where that came from, and what to do about it.

Pure functions; :mod:`check` gathers the facts. Texts of the host are escaped already where they come in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from . import check_places
from .check_places import OURS
from .errors import RdiagError
from .findings import Finding, Level
from .host import Host
from .host_survey import Limit, Survey
from .messages import Hello
from .text import safe
from .transport.base import ConnectionFacts

SLOW_PHASE_S = 3.0
SLOW_SHELL_S = 1.0
CLOCK_S = 2.0
OPEN_FILES_SOFT = 1024
OPEN_FILES_HARD = 4096
PROCESSES_FLOOR = 1024
LOCKED_MEMORY_FLOOR = 64 << 20
_PHASES = ("resolve", "connect", "host-key", "auth")
_QUIET_POSIX = "case $- in *i*) ;; *) return ;; esac"
_QUIET = {"fish": "status is-interactive; or exit", "csh": "if (! $?prompt) exit", "tcsh": "if (! $?prompt) exit"}
"""What ends a start-up file early where nobody types, by shell."""
_POSIX_SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "ash", "mksh"}


def skipped(code: str, why: str) -> Finding:
    """Return the row of a check that could not be made."""
    return Finding("skipped", code, why)


def failed(code: str, error: RdiagError, *, level: Level = "fail", evidence: Iterable[str] = ()) -> Finding:
    """Return the row of a check that ended with ``error``."""
    return Finding(level, code, error.message, evidence=(*error.details[-6:], *evidence), action=error.hint)


# --- the connection ---------------------------------------------------------------------------------------------


def config(host: Host, notes: Iterable[str]) -> Finding:
    """Say which entry was used, and what a person should know of the ssh settings."""
    return Finding("ok", "config", f"entry {host.name}", evidence=(f"from {host.source}", *map(safe, notes)))


def connection(facts: ConnectionFacts, error: RdiagError | None) -> Iterator[Finding]:
    """Yield the rows of connecting, up to and including the phase that failed."""
    if facts.transport == "local" and error is None:
        yield Finding("ok", "connect", f"{safe(facts.target)}: no connection is needed")
        return
    reached = _PHASES.index(error.phase) if error is not None and error.phase in _PHASES else len(_PHASES)
    if error is not None and reached == len(_PHASES):
        yield failed(error.phase, error, evidence=_times(facts))
        return
    if error is not None and reached <= 1:
        yield failed("connect", error, evidence=_times(facts))
        return
    yield _connected(facts)
    if error is not None and reached == 2:
        yield failed("host-key", error)
        return
    yield _host_key(facts)
    if error is not None:
        yield failed("auth", error)
        return
    yield Finding("ok", "auth", f"accepted: {safe(facts.auth_method or 'method unknown')}")


def _times(facts: ConnectionFacts) -> tuple[str, ...]:
    return tuple(f"{name} {seconds * 1000:.1f} ms" for name, seconds in facts.phase_seconds.items())


def _connected(facts: ConnectionFacts) -> Finding:
    slowest = max(facts.phase_seconds, key=lambda name: facts.phase_seconds[name], default=None)
    seconds = 0.0 if slowest is None else facts.phase_seconds[slowest]
    slow = seconds > SLOW_PHASE_S
    return Finding(
        "degraded" if slow else "ok",
        "connect",
        f"the phase {slowest} is slow" if slow else f"reached {safe(facts.target)}",
        value=round(seconds, 4) if slow else None,
        unit="s" if slow else None,
        threshold=SLOW_PHASE_S if slow else None,
        threshold_source=OURS if slow else None,
        evidence=(", ".join(_times(facts)), *_server(facts)),
        action="on the server, look at UseDNS and GSSAPIAuthentication in sshd_config, and at its DNS" if slow else None,
    )


def _server(facts: ConnectionFacts) -> Iterator[str]:
    if facts.server_version:
        yield f"server says {safe(facts.server_version, limit=120)}"
    if facts.banner:
        first = safe(facts.banner.strip().split(b"\n", 1)[0], limit=80)
        yield f"banner of {len(facts.banner)} bytes: {first}"


def _host_key(facts: ConnectionFacts) -> Finding:
    if facts.host_key_fingerprint is None:
        return Finding("unknown", "host-key", "the transport does not say which key the host has")
    return Finding(
        "ok",
        "host-key",
        f"known, {facts.host_key_type or 'type unknown'}",
        evidence=(facts.host_key_fingerprint, f"from {facts.host_key_source or 'an unknown place'}"),
    )


def round_trip(seconds: float) -> Finding:
    """Return the row of the fastest replied round trip."""
    return Finding("ok", "round-trip", f"{seconds * 1000:.1f} ms", value=round(seconds * 1000, 3), unit="ms")


# --- the login --------------------------------------------------------------------------------------------------


def survey(found: Survey, host: Host, *, sftp_broken: bool) -> Iterator[Finding]:
    """Yield what the survey of the host's ``sh`` says."""
    if not found.answered:
        yield _no_answer(found)
        return
    if not found.complete:
        yield Finding(
            "degraded",
            "survey",
            f"looking at the host stopped at {found.stopped_at}",
            evidence=("what comes after it is unknown",),
            action=f"run there: df {found.stopped_at} (a network file system or directory service that hangs?)",
        )
    yield _login_shell(found)
    yield _shell_time(found)
    yield _noise(found, sftp_broken=sftp_broken)
    yield Finding(
        "ok" if found.system else "unknown",
        "system",
        found.system or "the host does not say",
        evidence=(f"host name {found.hostname}, user {found.user} ({found.uid})",),
    )
    yield _umask(found.umask)
    yield _home(found)
    for place, code in ((found.cache, "cache"), (found.temporary, "temporary")):
        if place is None:
            yield Finding("unknown", code, "the survey did not get that far")
        else:
            yield from check_places.place(place, code)
    yield _clock(found)
    yield from _limits(found, host)
    yield _after_logout(found)
    yield _programs(found)


def _no_answer(found: Survey) -> Finding:
    evidence = found.stderr + found.noise
    if found.exit_status is None:
        message = "the login shell does not come to run a command"
        action = "look for a start-up file that waits for input, or a hanging directory service or file system there"
    elif found.noise_bytes or found.stderr_bytes:
        message = f"the account does not run commands: {evidence[-1] if evidence else 'see its output'}"
        action = "give the account a real login shell (chsh), or remove the forced command from its key"
    else:
        message = "the account runs no commands and says nothing"
        action = "look at ForceCommand in sshd_config, at the key's options, and for start-up files that read stdin"
    return Finding("fail", "login-shell", message, value=found.exit_status, evidence=evidence, action=action)


def _shell_name(found: Survey) -> str:
    return (found.shell or found.account_shell or "").rsplit("/", 1)[-1]


def _login_shell(found: Survey) -> Finding:
    shell = found.shell or found.account_shell
    name = _shell_name(found)
    evidence = [f"sh was started by {found.parent}"] if found.parent else []
    if found.account_shell is not None and found.account_shell != shell:
        evidence.append(f"the account database says {found.account_shell}: a ForceCommand or start-up file changed it")
    if name and name not in _POSIX_SHELLS:
        evidence.append("not a POSIX shell; rdiag sends it one plain command and is not affected")
    return Finding("ok" if shell else "unknown", "login-shell", shell or "unknown", value=shell, evidence=tuple(evidence))


def _shell_time(found: Survey) -> Finding:
    seconds = found.shell_seconds
    if seconds is None:
        return Finding("unknown", "shell-start", "not measured")
    slow = seconds > SLOW_SHELL_S
    return Finding(
        "degraded" if slow else "ok",
        "shell-start",
        f"a command starts after {seconds * 1000:.0f} ms",
        value=round(seconds, 3),
        unit="s",
        threshold=SLOW_SHELL_S,
        threshold_source=OURS,
        evidence=("every command pays this: start-up files such as .zshenv, .bashrc, config.fish",) if slow else (),
        action="move conda init, nvm, module load and the like behind a test for an interactive shell" if slow else None,
    )


def _noise(found: Survey, *, sftp_broken: bool) -> Finding:
    total = found.noise_bytes + found.stderr_bytes
    if not total:
        return Finding("ok", "login-noise", "the login prints nothing", value=0, unit="bytes")
    harmful = bool(found.noise_bytes) and sftp_broken
    return Finding(
        "degraded" if harmful else "ok",
        "login-noise",
        f"the login prints {found.noise_bytes} bytes to stdout and {found.stderr_bytes} to stderr"
        + (", which breaks SFTP, scp and rsync" if harmful else "; rdiag reads past it"),
        value=total,
        unit="bytes",
        threshold=0 if harmful else None,
        threshold_source="SFTP and scp speak on the same stream" if harmful else None,
        evidence=found.noise + found.stderr,
        action=f"print only to terminals: begin the start-up file with  {_QUIET.get(_shell_name(found), _QUIET_POSIX)}"
        if harmful
        else None,
    )


def _umask(mask: int | None) -> Finding:
    if mask is None:
        return Finding("unknown", "umask", "the host does not say")
    text = f"{mask:04o}"
    problem = None
    if mask & 0o700:
        problem = "takes rights from the owner: files cannot be read back"
    elif not mask & 0o002:
        problem = "lets everybody on the host write to new files"
    return Finding(
        "degraded" if problem else "ok",
        "umask",
        f"{text} {problem}" if problem else text,
        value=text,
        threshold="others must not write, the owner must" if problem else None,
        threshold_source=OURS if problem else None,
        action="set umask 022 or 077 in the login's start-up file or /etc/login.defs" if problem else None,
    )


def _home(found: Survey) -> Finding:
    if found.home is None:
        return Finding("unknown", "home", "the host does not say")
    evidence = (f"commands start in {found.directory}",)
    if not found.home_exists:
        return Finding(
            "degraded",
            "home",
            f"{found.home or 'HOME, which is empty,'} does not exist",
            value=found.home,
            evidence=evidence,
            action="create the home directory (mkhomedir_helper), or set cache_dir in hosts.yaml",
        )
    return Finding("ok", "home", found.home, value=found.home, evidence=evidence)


# --- clock, limits, programs ------------------------------------------------------------------------------------


def _clock(found: Survey) -> Finding:
    if found.clock is None:
        return Finding("unknown", "clock", "the host does not say what time it is")
    offset, doubt = found.clock.offset_s, found.clock.uncertainty_s
    level: Level = "ok" if abs(offset) + doubt <= CLOCK_S else "degraded" if abs(offset) - doubt > CLOCK_S else "unknown"
    side = "ahead of" if offset > 0 else "behind"
    return Finding(
        level,
        "clock",
        f"{abs(offset):.1f} s {side} this machine, give or take {doubt:.1f} s"
        if level != "ok"
        else f"agrees with this machine within {abs(offset) + doubt:.3f} s",
        value=offset,
        unit="s",
        threshold=CLOCK_S,
        threshold_source=f"{OURS}; log lines of several hosts are compared by time",
        action=None if level == "ok" else "look at timedatectl on both machines; one of them is not synchronised",
    )


def _limits(found: Survey, host: Host) -> Iterator[Finding]:
    if not found.limits:
        yield Finding("unknown", "limits", "the host does not say")
        return
    files = found.limits.get("open_files")
    if files is not None:
        small = _under(files.soft, OPEN_FILES_SOFT) or _under(files.hard, OPEN_FILES_HARD)
        yield _limit(
            "open-files",
            files,
            "files",
            small=small,
            floor=OPEN_FILES_HARD,
            source="data loader workers and NCCL open hundreds each",
            fix="raise nofile in /etc/security/limits.conf",
        )
    processes = found.limits.get("processes")
    if processes is not None:
        yield _limit(
            "processes",
            processes,
            "processes",
            small=_under(processes.soft, PROCESSES_FLOOR),
            floor=PROCESSES_FLOOR,
            source="threads count, and every rank starts dozens",
            fix="raise nproc in /etc/security/limits.conf",
        )
    locked = found.limits.get("locked_memory_bytes")
    if locked is not None:
        gpus = bool(host.gpus or found.gpus_driver or found.gpu_devices)
        yield _limit(
            "locked-memory",
            Limit(_mebibytes(locked.soft), _mebibytes(locked.hard)),
            "MiB",
            small=gpus and _under(locked.soft, LOCKED_MEMORY_FLOOR),
            floor=_mebibytes(LOCKED_MEMORY_FLOOR),
            source="InfiniBand and GPUDirect pin the buffers they use",
            fix="set memlock to unlimited in /etc/security/limits.conf",
        )
    size = found.limits.get("file_bytes")
    if size is not None and size.soft is not None:
        yield _limit(
            "file-size",
            Limit(_mebibytes(size.soft), _mebibytes(size.hard)),
            "MiB",
            small=True,
            floor=None,
            source="checkpoints are larger than any limit",
            fix="set fsize to unlimited in /etc/security/limits.conf",
        )
    core = found.limits.get("core_file_bytes")
    if core is not None:
        yield Finding("ok", "core-files", "none are written" if core.soft == 0 else f"up to {_amount(_mebibytes(core.soft), 'MiB')}")


def _under(value: int | None, floor: int) -> bool:
    return value is not None and value < floor


def _mebibytes(value: int | None) -> int | None:
    return None if value is None else value >> 20


def _amount(value: int | None, unit: str) -> str:
    return "unlimited" if value is None else f"{value} {unit}"


def _limit(
    code: str, limit: Limit, unit: str, *, small: bool, floor: int | None, source: str, fix: str
) -> Finding:
    return Finding(
        "degraded" if small else "ok",
        code,
        f"{_amount(limit.soft, unit)}, may be raised to {_amount(limit.hard, unit)}",
        value="unlimited" if limit.soft is None else limit.soft,
        unit=unit,
        threshold="unlimited" if floor is None else floor,
        threshold_source=source,
        evidence=("/proc/self/limits of the login",),
        action=f"{fix}, then log in anew" if small else None,
    )


def _after_logout(found: Survey) -> Finding:
    if found.kill_user_processes is None:
        return Finding("ok", "after-logout", "no session manager says that jobs end with the login")
    if found.kill_user_processes and not found.linger:
        return Finding(
            "degraded",
            "after-logout",
            "the session manager ends what this user leaves running at logout, launched jobs too",
            evidence=(f"KillUserProcesses=yes, Linger={'unknown' if found.linger is None else 'no'}",),
            action=f"before launching a job: loginctl enable-linger {found.user}",
        )
    linger = "unknown" if found.linger is None else "yes" if found.linger else "no"
    killed = "yes" if found.kill_user_processes else "no"
    return Finding(
        "ok", "after-logout", "jobs outlive the login", evidence=(f"KillUserProcesses={killed}, Linger={linger}",)
    )


def _programs(found: Survey) -> Finding:
    names = ", ".join(found.programs) or "none of those looked for"
    return Finding("ok", "programs", f"on the PATH: {names}", evidence=(f"PATH is {found.path}",))


# --- carrying files, and the agent ---------------------------------------------------------------------------------


def no_sftp(reason: str, found: Survey | None) -> Finding:
    """Return the row of an SFTP that does not work; whose fault it is shows in what the login prints."""
    noisy = found is not None and found.noise_bytes > 0
    return Finding(
        "degraded",
        "sftp",
        "SFTP does not work; rdiag carries files through a command instead",
        evidence=(reason, *(("the login prints before sftp-server does, see login-noise",) if noisy else ())),
        action="silence the start-up file that prints"
        if noisy
        else "set in sshd_config:  Subsystem sftp internal-sftp  (and look for a ForceCommand that ignores it)",
    )


def sftp_elsewhere(path: str, said: tuple[str, ...]) -> Finding:
    """Return the row of an SFTP whose files commands do not see."""
    return Finding(
        "degraded",
        "sftp",
        "SFTP works in another directory than commands do; rdiag carries files through a command instead",
        evidence=(f"the uploaded {path} was not found by cat, and was left there", *said),
        action="look for ChrootDirectory or -d in sshd_config, and for a cd in the login's start-up files",
    )


def agent(hello: Hello, host: Host, notes: Iterable[str]) -> Finding:
    """Return the row of an agent that answered: the environment that probes run in."""
    problems = tuple(safe(note) for note in notes)
    wanted = host.environment
    asked = "the default environment" if wanted.kind == "default" else f"{wanted.kind} {safe(wanted.value)}"
    return Finding(
        "degraded" if problems else "ok",
        "agent",
        f"answers in {asked}",
        value=safe(hello.executable),
        evidence=(
            *problems,
            f"Python {safe(hello.python)} at {safe(hello.executable)}, as {safe(hello.user)}",
            f"its files are in {safe(hello.cache)}",
        ),
        action="see the row cache" if problems else None,
    )


def gpus_without_agent(found: Survey, expected: int | None) -> Finding:
    """Count GPUs from the login, for a host where no probe can run."""
    count = found.gpu_devices if found.gpus_driver is None else found.gpus_driver
    evidence = ("seen from the login shell, as no probe runs",)
    source = None if expected is None else "gpus in hosts.yaml"
    if count is None:
        return Finding("unknown", "gpus", "GPUs cannot be counted", threshold=expected, threshold_source=source)
    if expected is not None and count != expected:
        return Finding(
            "degraded",
            "gpus",
            f"{count} NVIDIA GPUs where {expected} are expected",
            value=count,
            threshold=expected,
            threshold_source=source,
            evidence=evidence,
            action="look for Xid lines in dmesg, and correct gpus in hosts.yaml if it is wrong",
        )
    return Finding(
        "ok", "gpus", f"{count} NVIDIA GPUs", value=count, threshold=expected, threshold_source=source, evidence=evidence
    )


def agent_failed(error: RdiagError, found: Survey | None) -> Finding:
    """Return the row of an agent that does not start, with what the survey saw that helps."""
    others = () if found is None else found.pythons
    evidence = [f"the host has {path}" for path in others[:6]]
    if found is not None and found.path and not others:
        evidence.append(f"PATH is {found.path}")
    return failed("agent", error, evidence=evidence)
