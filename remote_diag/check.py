"""``rdiag check``: looks at a host in steps, each with its own evidence; one that fails does not end the others.

::

    entry -> connection -> round trip -> survey by sh -> SFTP -> agent -> probe host-check

The survey needs no Python and no SFTP, the agent no SFTP, so a host that is broken in half still says what it can.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from . import check_rules as rules
from .agent.layout import DEFAULT_CACHE
from .errors import AuthError, ConnectionLost, EnvironmentUnfit, HostKeyError, InternalError, RdiagError
from .events import Event, Progress
from .exitcodes import ExitCode
from .findings import Finding, status
from .host import Host
from .host_survey import Survey, survey
from .messages import Hello
from .outcome import Outcome, Timing
from .paths import shipped_probes
from .session import Session, new_run_id
from .text import last_lines, safe
from .transport.base import ConnectionFacts, SafeCommand, SafePath, Transport, UploadUnavailable

NAME = "check"
"""What stands as ``probe`` in the report."""
PROBE_SECONDS = 90.0
"""Deadline of the probe; it looks at files and imports two small packages."""
_PINGS = 3
_PING_SECONDS = 5.0
_BY_SURVEY = ("login-shell", "login-noise", "cache", "disk-space", "inodes", "noexec", "umask", "clock", "limits")
_BY_PROBE = ("python", "numpy", "safetensors", "torch", "shared-memory")
_STEPS = ("connecting", "measuring the round trip", "looking with sh", "trying SFTP", "starting the agent", "looking with Python")

T = TypeVar("T")


@dataclass(frozen=True)
class CheckFacts:
    """Everything that was found out, whether or not a finding speaks of it; None is unknown."""

    target: str | None = None
    transport: str | None = None
    server_version: str | None = None
    host_key_type: str | None = None
    host_key_fingerprint: str | None = None
    host_key_source: str | None = None
    auth_method: str | None = None
    banner: str | None = None
    """The server's authentication banner, escaped."""
    round_trip_s: float | None = None
    survey: Survey | None = None
    sftp: str | None = None
    """``works``, ``not needed`` (local), or why it does not work."""
    agent: Hello | None = None
    environment: Any = None
    """The Result of the probe host-check."""


@dataclass(frozen=True)
class CheckReport(Outcome[CheckFacts]):
    """What :func:`check` returns: an Outcome that exists also where nothing could be reached."""

    error: RdiagError | None = None
    """The first error that kept a part of the check from being made."""

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of :attr:`error` where there is one, of the findings otherwise."""
        return super().exit_code if self.error is None else self.error.exit_code

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints; ``error`` is there when something kept the check from its end."""
        plain = super().as_dict()
        if self.error is not None:
            plain["error"] = self.error.as_dict()
        return plain


def check(
    host: Host, *, on_event: Callable[[Event], None] | None = None, transport: Transport | None = None
) -> CheckReport:
    """Look at ``host`` and report; never raises for anything that is wrong with the host or the way to it.

    Args:
        host: where to look.
        on_event: told how far the check is.
        transport: for tests.
    """
    return _Check(host, on_event or (lambda _: None), transport).report()


@dataclass
class _Found:
    """Filled step by step."""

    round_trip: float | None = None
    survey: Survey | None = None
    sftp: str | None = None
    hello: Hello | None = None
    probe: Outcome[Any] | None = None
    findings: list[Finding] = field(default_factory=list)
    sftp_finding: Finding | None = None
    error: RdiagError | None = None
    connect_s: float = 0.0


class _Check:
    """One check of one host."""

    def __init__(self, host: Host, tell: Callable[[Event], None], transport: Transport | None) -> None:
        self._host = host
        self._tell = tell
        self._given = transport
        self._run_id = new_run_id()
        self._found = _Found()
        self._facts = ConnectionFacts(transport=host.transport, target=host.address or host.ssh or host.name)
        self._cache = SafePath(host.cache_dir or DEFAULT_CACHE)

    def report(self) -> CheckReport:
        started = time.monotonic()
        session = self._attempt(self._open)
        if session is not None:
            try:
                self._look(session)
            finally:
                session.close()
        return self._summary(time.monotonic() - started)

    def _attempt(self, step: Callable[[], T], blame: Callable[[RdiagError], Finding] | None = None) -> T | None:
        """Do one step; an error becomes a finding and the reason of the report, and the step gives None."""
        try:
            return step()
        except RdiagError as error:
            problem = error
        except Exception as error:  # noqa: BLE001 - a bug in one step must not cost the others their answers
            problem = InternalError(f"{type(error).__name__}: {error}", host=self._host.name, hint="a bug in rdiag")
        if self._found.error is None:
            self._found.error = problem
        if blame is not None:
            self._found.findings.append(blame(problem))
        return None

    def _step(self, number: int) -> None:
        self._tell(Progress(number, len(_STEPS), "steps", _STEPS[min(number, len(_STEPS) - 1)]))

    def _add(self, findings: Iterable[Finding]) -> None:
        self._found.findings.extend(findings)

    def _open(self) -> Session:
        self._step(0)
        started = time.monotonic()
        session = None
        try:
            session = Session(self._host, on_event=self._tell_notes, transport=self._given)
            self._facts = session.transport.facts
            session.connect()
        except RdiagError as error:
            if session is not None:
                session.close()
            self._add((rules.config(self._host, self._facts.notes), *rules.connection(self._facts, error)))
            everything = ("round-trip", *_BY_SURVEY, "sftp", "agent", *_BY_PROBE, "gpus")
            refused = isinstance(error, (HostKeyError, AuthError))
            why = "not logged in to the host" if refused else "the host was not reached"
            self._add(rules.skipped(code, why) for code in everything)
            raise
        self._found.connect_s = time.monotonic() - started
        self._add((rules.config(self._host, self._facts.notes), *rules.connection(self._facts, None)))
        return session

    def _tell_notes(self, event: Event) -> None:
        # The probe's own progress would make the bar jump back.
        if not isinstance(event, Progress):
            self._tell(event)

    def _look(self, session: Session) -> None:
        transport, found = session.transport, self._found
        if self._facts.transport != "local":
            self._step(1)
            found.round_trip = self._attempt(lambda: self._ping(transport), lambda e: rules.failed("round-trip", e))
            if found.round_trip is not None:
                self._add((rules.round_trip(found.round_trip),))
        self._step(2)
        found.survey = self._attempt(
            lambda: survey(transport, self._cache), lambda e: rules.failed("login-shell", e)
        )
        self._step(3)
        sftp = self._attempt(lambda: self._try_upload(transport), lambda e: rules.failed("sftp", e))
        if found.survey is not None:
            broken = sftp is not None and sftp.level in {"degraded", "fail"}
            self._add(rules.survey(found.survey, self._host, sftp_broken=broken))
        if sftp is not None:
            self._add((sftp,))
        self._step(4)
        found.hello = self._attempt(session.hello, lambda e: rules.agent_failed(e, found.survey))
        if found.hello is None:
            self._without_agent()
            return
        self._add((rules.agent(found.hello, self._host, session.notes),))
        self._step(5)
        found.probe = self._attempt(lambda: self._run_probe(session), self._probe_failed)
        if found.probe is None:
            self._add(rules.skipped(code, "the probe gave no result") for code in _BY_PROBE)
        else:
            self._add(found.probe.findings)
        self._step(6)

    def _ping(self, transport: Transport) -> float:
        return min(transport.ping(_PING_SECONDS) for _ in range(_PINGS))

    def _without_agent(self) -> None:
        self._add(rules.skipped(code, "no agent answers") for code in _BY_PROBE)
        if self._found.survey is not None and self._found.survey.answered:
            self._add((rules.gpus_without_agent(self._found.survey, self._host.gpus),))

    def _probe_failed(self, error: RdiagError) -> Finding:
        return rules.failed("environment" if isinstance(error, EnvironmentUnfit) else "host-check", error)

    def _run_probe(self, session: Session) -> Outcome[Any]:
        # By path: a user's own probe of the same name must not answer here.
        probe = Path(shipped_probes() / "host_check.py")
        return session.run(probe, {"gpus": self._host.gpus}, timeout=PROBE_SECONDS)

    def _try_upload(self, transport: Transport) -> Finding:
        """Carry a small file, read it back through a command, and remove it."""
        local = self._facts.transport == "local"
        token = secrets.token_hex(16)
        path = SafePath(f"{self._cache}/check.{token}")
        try:
            transport.upload(f"{token}\n".encode(), path)
        except UploadUnavailable as unavailable:
            self._found.sftp = safe(str(unavailable)) or "not available"
            return rules.no_sftp(self._found.sftp, self._found.survey)
        except EnvironmentUnfit as error:
            self._found.sftp = error.message
            return rules.failed("sftp", error, level="degraded")
        read = _output(transport, SafeCommand(f"cat {path}"))
        _output(transport, SafeCommand(f"rm -f {path}"))
        if token.encode() not in read:
            self._found.sftp = "writes to another directory than commands see"
            return rules.sftp_elsewhere(str(path), tuple(last_lines(read)))
        self._found.sftp = "not needed" if local else "works"
        return Finding("ok", "sftp", "files are copied directly" if local else "a file was carried and read back")

    def _summary(self, total: float) -> CheckReport:
        found, facts = self._found, self._facts
        findings = tuple(found.findings)
        upload = 0.0 if found.probe is None else found.probe.timing.upload_s
        return CheckReport(
            host=self._host.name,
            probe=NAME,
            run_id=self._run_id,
            status=status(findings),
            answer=CheckFacts(
                target=safe(facts.target),
                transport=facts.transport,
                server_version=None if facts.server_version is None else safe(facts.server_version, limit=300),
                host_key_type=facts.host_key_type,
                host_key_fingerprint=facts.host_key_fingerprint,
                host_key_source=facts.host_key_source,
                auth_method=facts.auth_method,
                banner=safe(facts.banner, limit=2000) if facts.banner else None,
                round_trip_s=None if found.round_trip is None else round(found.round_trip, 6),
                survey=found.survey,
                sftp=found.sftp,
                agent=found.hello,
                environment=None if found.probe is None else found.probe.answer,
            ),
            findings=findings,
            timing=Timing(
                connect_s=found.connect_s,
                upload_s=upload,
                run_s=max(0.0, total - found.connect_s - upload),
                total_s=total,
                phases=dict(facts.phase_seconds),
            ),
            error=found.error,
        )


def _output(transport: Transport, command: SafeCommand) -> bytes:
    """Return the first 64 KiB that ``command`` prints to both streams; raises ConnectionLost when it does not end."""
    channel = transport.execute(command)
    output = bytearray()
    deadline = time.monotonic() + 10.0
    try:
        channel.send_eof()
        while (received := channel.receive(1.0)) is not None:
            output += b"".join(received)[: 64 * 1024 - len(output)]
            if time.monotonic() > deadline:
                raise ConnectionLost(f"{command.split()[0]} did not end within 10 s", phase="collect")
        return bytes(output)
    finally:
        channel.close()
