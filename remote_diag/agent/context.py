"""What a probe's ``run(params, context)`` can ask for and say while it runs."""

from __future__ import annotations

import json
import os
import sys
from time import monotonic

from .protocol import ENVIRONMENT, MAX_FINDINGS, SKIPPED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Callable, NoReturn

    from .contract import Scalar

_BETWEEN_PROGRESS = 0.05
_MAX_WORDS = 200


class Leave(BaseException):
    """The probe ends early for a reason that it knows; like SystemExit, no ``except Exception`` stops it.

    Args:
        outcome: ``environment`` or ``skipped``.
        message: the reason.
        hint: what to do about it.
    """

    def __init__(self, outcome: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.message = message
        self.hint = hint


class Context:
    """The probe's link to the run. Made by rdiag; for the process and thread that ``run`` was called in.

    Args:
        run_id: name of the run.
        scratch: path of a private folder for temporary files, made when it is first asked for.
        until: when the run will be ended, on ``time.monotonic``.
        send: takes the kind and the payload of a message.
    """

    def __init__(self, run_id: str, scratch: str, until: float, send: Callable[[str, bytes], None]) -> None:
        self.run_id = run_id
        self._scratch = scratch
        self._until = until
        self._send = send
        self._findings = 0
        self._last_progress = float("-inf")

    @property
    def run_dir(self) -> str:
        """Private folder for temporary files, deleted after the run."""
        os.makedirs(self._scratch, mode=0o700, exist_ok=True)
        return self._scratch

    def progress(self, done: float, total: float | None = None, *, unit: str = "", label: str = "") -> None:
        """Report that ``done`` of ``total`` units are done; cheap enough to be called in a loop.

        At most 20 reports a second are passed on; the one that completes ``total`` always is.
        """
        now = monotonic()
        if now - self._last_progress < _BETWEEN_PROGRESS and (total is None or done < total):
            return
        self._last_progress = now
        values = {
            "done": _number("done", done),
            "total": None if total is None else _number("total", total),
            "unit": str(unit)[:_MAX_WORDS],
            "label": str(label)[:_MAX_WORDS],
        }
        self._send("progress", json.dumps(values).encode("ascii"))

    def finding(
        self,
        level: str,
        code: str,
        message: str,
        *,
        subject: str | None = None,
        value: Scalar = None,
        unit: str | None = None,
        threshold: Scalar = None,
        threshold_source: str | None = None,
        evidence: tuple[str, ...] = (),
        action: str | None = None,
    ) -> None:
        """Report one thing that was found out; the fields are those of :class:`contract.Finding`.

        Raises:
            ValueError: a field does not fit, or there are more than 1000 findings.
        """
        if self._findings >= MAX_FINDINGS:
            raise ValueError("finding: more than %d; report the worst and count the rest" % MAX_FINDINGS)
        from .contract import Finding

        payload = Finding(
            level, code, message, subject, value, unit, threshold, threshold_source, evidence, action
        ).to_json()
        self._findings += 1
        self._send("finding", payload)

    def require(self, name: str, hint: str | None = None) -> ModuleType:
        """Import and return the module ``name``; end the run as "environment unfit" when that fails.

        Args:
            name: dotted name, such as ``numpy`` or ``safetensors.numpy``.
            hint: what to do when it is missing, instead of the usual advice.
        """
        from importlib import import_module

        try:
            return import_module(name)
        except Exception as error:
            # A broken installation raises anything: OSError for a missing library, AttributeError, ...
            where = "%s (Python %d.%d.%d)" % (sys.executable, *sys.version_info[:3])
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing and (name + ".").startswith(missing + "."):
                message = "the module %r is not installed for %s" % (missing, where)
            else:
                message = "the module %r cannot be imported by %s: %s" % (name, where, last_line(error))
            raise Leave(ENVIRONMENT, message, hint or _how_to_install(name)) from error

    def unfit(self, message: str, hint: str | None = None) -> NoReturn:
        """End the run because this environment cannot run the probe."""
        raise Leave(ENVIRONMENT, message, hint)

    def skip(self, reason: str) -> NoReturn:
        """End the run because there is nothing to measure here; neither ok nor failed."""
        raise Leave(SKIPPED, reason)

    def remaining(self) -> float:
        """Return the seconds until the run will be ended; 0 when that is due."""
        return max(0.0, self._until - monotonic())


def last_line(error: BaseException) -> str:
    """Return the class of ``error`` and the last line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "%s: %s" % (type(error).__name__, lines[-1]) if lines else type(error).__name__


def _how_to_install(name: str) -> str:
    package = name.partition(".")[0]
    if _managed():
        return (
            "the system manages the packages of this Python; make a venv there (python3 -m venv DIR, then "
            "DIR/bin/pip install %s) and set environment: {venv: DIR} for this host in hosts.yaml" % package
        )
    return "%s -m pip install %s, or set environment: for this host in hosts.yaml to one that has it" % (
        sys.executable or "python3",
        package,
    )


def _managed() -> bool:
    """Return whether pip refuses to install here (PEP 668): a file says so, and a venv is free of it."""
    import sysconfig

    return sys.prefix == sys.base_prefix and os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED"))


def _number(name: str, value: float) -> float:
    """Return ``value`` as a plain finite number; counters that numpy made are welcome."""
    number = value if type(value) in (int, float) else float(value)
    if number - number != 0:
        raise ValueError("progress: %s is %r" % (name, value))
    return number


def forbid_other_processes(send: Callable[[str, bytes], None]) -> Callable[[str, bytes], None]:
    """Return ``send`` for this process only: two writers would garble each other's messages."""
    owner = os.getpid()

    def checked(kind: str, payload: bytes) -> None:
        if os.getpid() != owner:
            raise RuntimeError("the context belongs to the process that run() was called in; return values to it")
        send(kind, payload)

    return checked
