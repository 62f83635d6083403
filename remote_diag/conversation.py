"""One run of one probe, as the client sees it: the request, the frames that answer it, and what they add up to."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from .agent.frames import Frame
from .agent.protocol import ACTIVE_EFFECTS
from .errors import (
    ConnectionLost,
    DeadlineExceeded,
    EnvironmentUnfit,
    ProbeError,
    RdiagError,
    Refused,
)
from .events import Event, Log, Note
from .findings import Finding, status
from .host import Host
from .link import AgentLink
from .messages import (
    End,
    Hello,
    MessageError,
    parse_end,
    parse_finding,
    parse_need,
    parse_progress,
    parse_started,
)
from .outcome import Outcome, Timing
from .text import last_lines, safe

if TYPE_CHECKING:
    from .probe import Probe

PROTOCOL = 1
OUTPUT_BYTES = 8 * 1024 * 1024
"""How much a probe may print, stdout and stderr each, before it is ended."""
RESULT_BYTES = 8 * 1024 * 1024 - 1024
"""How large a result may be as JSON."""
MAX_FINDINGS = 10_000
_ENDING_GRACE = 20.0
_CANCEL_WAIT = 12.0
_OUTPUT_TAIL = 64 * 1024


class Conversation:
    """Holds one run over an :class:`AgentLink` and keeps what came of it."""

    def __init__(
        self,
        *,
        host: Host,
        probe: Probe[Any, Any],
        params: Any,
        run_id: str,
        timeout: float,
        keep: bool,
        force: bool,
        tell: Callable[[Event], None],
    ) -> None:
        self.host = host
        self.probe = probe
        self.run_id = run_id
        self.upload_seconds = 0.0
        self._timeout = timeout
        self._tell = tell
        self._request = build_request(
            host=host, probe=probe, params=params, run_id=run_id, timeout=timeout, keep=keep, force=force
        )
        self._warming = threading.Thread(target=lambda: probe.result_adapter, name="schema", daemon=True)
        self._findings: list[Finding] = []
        self._result: bytes | None = None
        self._end: End | None = None
        self._output = {"stdout": bytearray(), "stderr": bytearray()}

    @property
    def needs_library(self) -> bool:
        """Whether anything of the shared probe code may be imported on the host: by the probe, or to guard the GPUs.

        A probe imports it as ``probes.lib``. That word somewhere else, in a text or a comment, costs a check too many;
        a probe that puts the name together from pieces is not noticed, and runs on files that nobody checked.
        """
        return b"probes" in self.probe.source or any(effect in ACTIVE_EFFECTS for effect in self.probe.effects)

    def warm(self) -> None:
        """Build what the result will be checked with, pydantic's import included, while others are waited for."""
        self._warming.start()

    def ask(self, link: AgentLink) -> None:
        """Send the request; it may go ahead of the agent's hello, which saves a round trip.

        What is written to a command that already ended is lost: what it said before tells more.
        """
        with contextlib.suppress(ConnectionLost):
            link.begin()
            link.send("request", request_bytes(self._request))

    def hold(self, link: AgentLink) -> None:
        """Read frames until the end of the run.

        On any exception that is not an RdiagError (Ctrl-C, a signal) the agent is asked to end the run, and given a
        few seconds to say what is left of it, before the exception goes on.
        """
        try:
            for frame in link.frames(time.monotonic() + self._timeout + _ENDING_GRACE):
                self._take(link, frame)
                if self._end is not None:
                    return
        except MessageError as error:
            raise self._error(ConnectionLost, f"the agent's answer cannot be understood: {error}") from error
        except RdiagError:
            raise
        except BaseException:
            self._cancel(link)
            raise
        details = tuple(last_lines(bytes(link.stderr)))
        raise self._error(
            ConnectionLost,
            "the connection ended before the end of the run; whether it finished is not known",
            hint="run it again; the agent ends what is left of the first run by itself",
            details=details,
            retryable=True,
        )

    def outcome(self, *, timing: Timing, hello: Hello, bundle_dir: str, notes: tuple[str, ...]) -> Outcome[Any]:
        """Return the Outcome of a run that ended well; raise the error that its end stands for otherwise."""
        end = self._end
        if end is None:
            raise self._error(ConnectionLost, "the run has not ended")
        if end.outcome not in {"ok", "skipped"}:
            raise self._failure(end, hello)
        result = None if end.outcome == "skipped" else self._parsed_result(end)
        findings = tuple(self._findings)
        kept = end.run_dir
        return Outcome(
            host=self.host.name,
            probe=self.probe.name,
            run_id=self.run_id,
            status=status(findings, skipped=end.outcome == "skipped"),
            answer=result,
            findings=findings,
            timing=timing,
            message=end.message,
            kept=kept,
            rerun=None if kept is None else f"{hello.executable} {bundle_dir}/agent/probe_main.py {kept}",
            notes=notes,
        )

    def _take(self, link: AgentLink, frame: Frame) -> None:
        if frame.kind == "log":
            self._log(frame.payload)
        elif frame.kind in {"progress", "finding"}:
            self._take_from_probe(frame)
        elif frame.kind == "need":
            self._send_probe(link, parse_need(frame.payload))
        elif frame.kind == "started":
            self._tell(parse_started(frame.payload))
        elif frame.kind == "result":
            if self._result is not None:
                raise self._error(ProbeError, "two results arrived for one run")
            self._result = frame.payload
        elif frame.kind == "end":
            self._end = parse_end(frame.payload)
        elif frame.kind != "beat":
            raise self._error(ConnectionLost, f"a frame of kind {frame.kind!r} arrived; is the agent a newer one?")

    def _take_from_probe(self, frame: Frame) -> None:
        try:
            if frame.kind == "progress":
                self._tell(parse_progress(frame.payload))
                return
            if len(self._findings) >= MAX_FINDINGS:
                raise self._error(ProbeError, f"the probe gave more than {MAX_FINDINGS} findings")
            self._findings.append(parse_finding(frame.payload))
        except MessageError as error:
            raise self._error(ProbeError, f"the probe gave an invalid {frame.kind}: {error}") from error

    def _log(self, payload: bytes) -> None:
        stream = "stdout" if payload[:1] == b"o" else "stderr"
        data = payload[1:]
        kept = self._output[stream]
        kept += data
        if len(kept) > _OUTPUT_TAIL:
            del kept[:-_OUTPUT_TAIL]
        self._tell(Log("stdout" if stream == "stdout" else "stderr", data))

    def _send_probe(self, link: AgentLink, wanted: str) -> None:
        if wanted != self.probe.sha256:
            raise self._error(ConnectionLost, "the agent asked for a file that this run does not have")
        started = time.monotonic()
        link.send("file", wanted.encode("ascii") + b"\n" + self.probe.source)
        self.upload_seconds += time.monotonic() - started

    def _cancel(self, link: AgentLink) -> None:
        """Ask the agent to end the run; report what it says, in bounded time."""
        try:
            link.send("cancel")
            for frame in link.frames(time.monotonic() + _CANCEL_WAIT):
                if frame.kind == "end":
                    end = parse_end(frame.payload)
                    left = ", ".join(f"{one.pid} {safe(one.name)} ({one.state})" for one in end.survivors)
                    self._tell(
                        Note(f"still running on {self.host.name}: {left}", urgent=True)
                        if left
                        else Note(f"ended on {self.host.name}; nothing of the run is left there")
                    )
                    return
        except (RdiagError, MessageError):
            self._tell(Note(f"the connection to {self.host.name} is gone; the agent there ends the run by itself"))

    def _parsed_result(self, end: End) -> Any:
        from .results import parse

        # Not twice at once: the schema is built on first use.
        if self._warming.is_alive():
            self._warming.join()
        if self._result is None:
            raise self._error(ProbeError, "the run ended well, and no result came with it")
        digest = hashlib.sha256(self._result).hexdigest()
        if end.result_bytes != len(self._result) or end.result_sha256 != digest:
            raise self._error(ConnectionLost, "the result arrived damaged: its size or hash is not what was sent")
        try:
            return parse(self.probe, self._result)
        except RdiagError as error:
            error.host = self.host.name
            raise

    def _failure(self, end: End, hello: Hello) -> RdiagError:
        kinds: dict[str, type[RdiagError]] = {
            "environment": EnvironmentUnfit,
            "refused": Refused,
            "deadline": DeadlineExceeded,
            "lease": ConnectionLost,
            "cancelled": ConnectionLost,
        }
        kind = kinds.get(end.outcome, ProbeError)
        output = tuple(f"stderr: {line}" for line in last_lines(bytes(self._output["stderr"])))
        survivors = tuple(f"still running: {one.pid} {one.name} ({one.state})" for one in end.survivors)
        hint = end.hint
        if kind is DeadlineExceeded and hint is None:
            hint = "give it longer with --timeout, or set timeout for the host in hosts.yaml"
        if kind is EnvironmentUnfit and hint is None:
            hint = f"the environment there is {hello.executable} (Python {hello.python})"
        return self._error(
            kind,
            end.message or end.outcome,
            hint=hint,
            details=(*end.details, *output, *survivors, *self._kept_note(end)),
        )

    def _kept_note(self, end: End) -> tuple[str, ...]:
        return (f"kept: {end.run_dir}",) if end.run_dir else ()

    def _error(self, kind: type[RdiagError], message: str, **more: Any) -> RdiagError:
        return kind(message, host=self.host.name, **more)


def build_request(
    *,
    host: Host,
    probe: Probe[Any, Any],
    params: Any,
    run_id: str,
    timeout: float,
    keep: bool,
    force: bool,
) -> dict[str, Any]:
    """Return the request of a run, as ``rdiag run --dry-run`` shows it and the agent takes it."""
    from .parameters import to_json

    return {
        "protocol": PROTOCOL,
        "client": __version__,
        "run_id": run_id,
        "probe": {"name": probe.name, "sha256": probe.sha256},
        "params": to_json(params),
        "effects": list(probe.effects),
        "env": dict(host.env),
        "workdir": _working_directory(host),
        "deadline_s": timeout,
        "lease_s": host.lease,
        "keep": keep,
        "force": force,
        "output_bytes": OUTPUT_BYTES,
        "result_bytes": RESULT_BYTES,
        "environment": {"kind": host.environment.kind, "value": host.environment.value},
    }


def _working_directory(host: Host) -> str | None:
    """Return where the probe runs; on this machine that is here, as for every other command a person types.

    A container of this machine has folders of its own: there it is where the container starts programs.
    """
    if host.workdir is None and host.transport == "local" and host.environment.kind != "docker":
        with contextlib.suppress(FileNotFoundError):
            return str(Path.cwd())
    return host.workdir


def request_bytes(request: Mapping[str, Any]) -> bytes:
    """Return a request as the agent takes it: JSON, all ASCII, so that lone surrogates survive as escapes."""
    return json.dumps(request, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode("ascii")
