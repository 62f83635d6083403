"""What can go wrong, by cause; each class knows its exit code.

::

    RdiagError
    ├── UsageProblem            2  the command line
    ├── ConfigError             3  hosts.yaml, a probe file, a parameter file
    ├── UnreachableError        4  resolve, connect, banner, key exchange
    │   └── ConnectionLost      4  was connected; the outcome is unknown
    ├── AuthError               5  login refused, no usable shell
    ├── HostKeyError            6  unknown, changed, revoked
    ├── EnvironmentUnfit        7  python, venv, container, module, space, permission
    ├── ProbeError              8  crashed, no result, invalid result
    ├── Refused                 9  would disturb something
    ├── StateUnknown           10
    ├── InternalError          70
    ├── LocalIOError           74
    └── DeadlineExceeded      124
"""

from __future__ import annotations

from typing import ClassVar

from .exitcodes import ExitCode
from .text import safe

PHASES = ("config", "resolve", "connect", "host-key", "auth", "upload", "start", "run", "collect", "output")
"""The phases of an operation, in order; every error names the one it happened in."""


class RdiagError(Exception):
    """Something rdiag can explain.

    Args:
        message: the cause, one sentence, in plain text (escaped here, so text from a host may be part of it).
        host: inventory name of the host, or None when no host is involved.
        phase: one of :data:`PHASES`.
        hint: what to do next: a command to type or a setting to change.
        details: further lines for ``--verbose``, for example the last lines of a probe's stderr.
        retryable: whether the same call may succeed later without a change.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL
    default_phase: ClassVar[str] = "run"

    def __init__(
        self,
        message: str,
        *,
        host: str | None = None,
        phase: str | None = None,
        hint: str | None = None,
        details: tuple[str, ...] = (),
        retryable: bool = False,
    ) -> None:
        self.message = safe(message)
        self.host = host
        self.phase = phase or self.default_phase
        self.hint = None if hint is None else safe(hint, keep_newlines=True)
        self.details = tuple(safe(line) for line in details)
        self.retryable = retryable
        super().__init__(self.message)

    @property
    def code(self) -> str:
        """Stable name of the cause, for programs: the name of the exit code."""
        return self.exit_code.name

    def one_line(self) -> str:
        """Return ``<host>: <phase>: <cause>`` without the host when there is none."""
        return ": ".join(part for part in (self.host, self.phase, self.message) if part)

    def as_dict(self) -> dict[str, object]:
        """Return the error as the ``error`` object of ``--json``."""
        return {
            "code": self.code,
            "exit": int(self.exit_code),
            "host": self.host,
            "phase": self.phase,
            "message": self.message,
            "hint": self.hint,
            "details": list(self.details),
            "retryable": self.retryable,
        }


class UsageProblem(RdiagError):
    """The command line asks for something that cannot be."""

    exit_code = ExitCode.USAGE
    default_phase = "config"


class ConfigError(RdiagError):
    """A file that rdiag reads on this machine is invalid."""

    exit_code = ExitCode.CONFIG
    default_phase = "config"


class UnreachableError(RdiagError):
    """The host could not be reached."""

    exit_code = ExitCode.UNREACHABLE
    default_phase = "connect"


class ConnectionLost(UnreachableError):
    """The connection ended before the answer did: neither ok nor failed."""

    default_phase = "run"


class AuthError(RdiagError):
    """Login refused, or no usable shell behind it."""

    exit_code = ExitCode.AUTH
    default_phase = "auth"


class HostKeyError(RdiagError):
    """The host's key is unknown, changed or revoked."""

    exit_code = ExitCode.HOST_KEY
    default_phase = "host-key"


class EnvironmentUnfit(RdiagError):
    """The host answers, but its environment cannot run the probe."""

    exit_code = ExitCode.ENVIRONMENT
    default_phase = "start"


class ProbeError(RdiagError):
    """The probe crashed, or gave no valid result."""

    exit_code = ExitCode.PROBE_ERROR


class Refused(RdiagError):
    """Running this could disturb something on the host."""

    exit_code = ExitCode.REFUSED
    default_phase = "start"


class StateUnknown(RdiagError):
    """Something could not be established."""

    exit_code = ExitCode.UNKNOWN_STATE


class InternalError(RdiagError):
    """A bug in rdiag."""

    exit_code = ExitCode.INTERNAL


class LocalIOError(RdiagError):
    """Reading or writing on this machine failed."""

    exit_code = ExitCode.LOCAL_IO
    default_phase = "output"


class DeadlineExceeded(RdiagError):
    """The operation's deadline passed."""

    exit_code = ExitCode.DEADLINE
