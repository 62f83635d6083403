"""Every exit code of rdiag, and the one function that folds the codes of several hosts.

Programs rely on these numbers; they never change meaning. 125 to 127 and 255 are left to shells and ssh.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """What the process status of ``rdiag`` means."""

    OK = 0
    """Everything asked for was done and nothing was found."""
    FINDINGS = 1
    """Ran completely; at least one finding says degraded or fail."""
    USAGE = 2
    """The command line is wrong; nothing was contacted."""
    CONFIG = 3
    """hosts.yaml, a probe file or a parameter file is invalid; nothing was run."""
    UNREACHABLE = 4
    """A host could not be reached, or the connection was lost: nothing is claimed about it."""
    AUTH = 5
    """Login refused, or the account has no usable shell."""
    HOST_KEY = 6
    """Unknown, changed or revoked host key; nothing was sent."""
    ENVIRONMENT = 7
    """Host reachable, environment unfit: python, venv, container, module, space, permission."""
    PROBE_ERROR = 8
    """The probe crashed or gave no valid result: a bug, not a finding."""
    REFUSED = 9
    """Running it could disturb something: a GPU is busy, or a lock is held."""
    UNKNOWN_STATE = 10
    """Could not be measured or established; neither ok nor failed."""
    JOB_FAILED = 11
    """A launched job ended with a non-zero status."""
    NOT_STOPPED = 12
    """A stop was asked for and something survives."""
    INTERNAL = 70
    """A bug in rdiag itself."""
    LOCAL_IO = 74
    """Writing on this machine failed."""
    DEADLINE = 124
    """The deadline of the operation passed."""
    HANGUP = 129
    """Ended by SIGHUP."""
    INTERRUPTED = 130
    """Ended by SIGINT (Ctrl-C)."""
    BROKEN_PIPE = 141
    """Whoever read the output went away."""
    TERMINATED = 143
    """Ended by SIGTERM."""


# Most serious first: a bug in rdiag outranks what it says of hosts, and "cannot tell" outranks "found something".
_SEVERITY: tuple[ExitCode, ...] = (
    ExitCode.INTERNAL,
    ExitCode.LOCAL_IO,
    ExitCode.TERMINATED,
    ExitCode.INTERRUPTED,
    ExitCode.HANGUP,
    ExitCode.BROKEN_PIPE,
    ExitCode.CONFIG,
    ExitCode.USAGE,
    ExitCode.HOST_KEY,
    ExitCode.AUTH,
    ExitCode.UNREACHABLE,
    ExitCode.UNKNOWN_STATE,
    ExitCode.NOT_STOPPED,
    ExitCode.ENVIRONMENT,
    ExitCode.PROBE_ERROR,
    ExitCode.DEADLINE,
    ExitCode.JOB_FAILED,
    ExitCode.REFUSED,
    ExitCode.FINDINGS,
    ExitCode.OK,
)


def fold(codes: Iterable[ExitCode]) -> ExitCode:
    """Return the one code that stands for several hosts: the most serious, OK for none."""
    return min(codes, key=_SEVERITY.index, default=ExitCode.OK)


def for_signal(number: int) -> ExitCode:
    """Return 128+n for the signals rdiag ends on (SIGHUP, SIGINT, SIGPIPE, SIGTERM)."""
    return ExitCode(128 + number)
