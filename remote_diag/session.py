"""A host, opened: the only module that speaks to the agent."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from . import environment, installation
from .agent.layout import DEFAULT_CACHE
from .bundle import Bundle, build, digest_for
from .errors import AuthError, ConnectionLost, EnvironmentUnfit, RdiagError
from .events import Event, Note
from .host import Host
from .link import AgentLink, EntryFailed
from .messages import Hello, parse_hello, parse_too_old
from .outcome import Outcome, Timing
from .text import last_lines
from .transport import for_host
from .transport.base import SafeCommand, SafePath, Transport

if TYPE_CHECKING:
    from .jobs import Cleaned, JobRecord, JobSpec, Stopped
    from .probe import Probe, ProbeModule

ParamsT = TypeVar("ParamsT")
ResultT = TypeVar("ResultT")
EventHandler = Callable[[Event], None]
START_LIMIT = 10.0
"""Seconds from a command that was accepted to an agent that answers; the connect_timeout where that is more."""


def new_run_id() -> str:
    """Return a fresh run id: UTC time to the second and 32 random bits, sortable, safe as a file name."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + "-" + os.urandom(4).hex()


class Session:
    """A host that probes can be run on; a context manager.

    Args:
        host: where to.
        on_event: called with every :mod:`event <remote_diag.events>`, in the calling thread.
        transport: for tests; by default the one that the host's inventory entry names.
    """

    def __init__(
        self, host: Host, *, on_event: EventHandler | None = None, transport: Transport | None = None
    ) -> None:
        self.host = host
        self.transport = transport or for_host(host)
        self._tell = on_event or (lambda _: None)
        self._bundle: Bundle | None = None
        self._digest: str | None = None
        self._cache: SafePath | None = None
        self._temporary = False
        self._connected = False
        self._entered: AgentLink | None = None
        self._ready: tuple[AgentLink, Hello] | None = None
        self._preparing: threading.Thread | None = None
        self._prepare_error: BaseException | None = None
        self._upload_seconds = 0.0
        self._connect_seconds = 0.0
        self.notes: list[str] = []

    def __enter__(self) -> Session:
        """Connect."""
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    @property
    def bundle(self) -> Bundle:
        """What is, or will be, installed on the host; its files are read when this is first asked for."""
        if self._bundle is None:
            self._bundle = build(self.host.environment)
        return self._bundle

    @property
    def bundle_digest(self) -> str:
        """The digest of :attr:`bundle`, known without reading its files as a rule."""
        if self._bundle is not None:
            return self._bundle.digest
        if self._digest is None:
            self._digest = digest_for(self.host.environment)
        return self._digest

    @property
    def enter_command(self) -> SafeCommand:
        """The one command that the host's login shell gets to see."""
        cache = self._cache or SafePath(self.host.cache_dir or DEFAULT_CACHE)
        return SafeCommand(f"sh {cache}/{self.bundle_digest}/enter")

    def connect(self) -> None:
        """Connect to the host; raises an :class:`RdiagError` by phase. Nothing is executed there yet."""
        if not self._connected:
            started = time.monotonic()
            self.transport.connect()
            self._connect_seconds += time.monotonic() - started
            self._connected = True

    def prepare(self) -> None:
        """Begin, in the background, all that does not depend on a probe: connect, and start an agent."""
        if self._preparing is None and self._entered is None and self._ready is None:
            # Here and not in the thread: two threads that import at once only take turns.
            self.transport.prestart()
            self._preparing = threading.Thread(target=self._prepare, name=f"prepare {self.host.name}", daemon=True)
            self._preparing.start()

    def close(self) -> None:
        """End the connection and everything that runs on the host through it; idempotent."""
        if self._preparing is not None and self._preparing.is_alive():
            # Closing the transport makes the thread's current step fail, so it ends soon.
            self.transport.close()
            self._preparing.join(2.0)
        for link in (self._entered, self._ready[0] if self._ready else None):
            if link is not None:
                link.close()
        self._entered = self._ready = None
        if self._temporary and self._cache is not None:
            installation.remove_temporary(self.transport, self._cache)
            self._temporary = False
        self.transport.close()
        self._connected = False

    def hello(self) -> Hello:
        """Return what the agent says of itself: interpreter, user, directories. Starts one if none waits."""
        self._ready = self._take()
        return self._ready[1]

    def agent(self, *, library: bool = True) -> AgentLink:
        """Return an agent that waits for a request, for whatever is not the run of a probe; the caller closes it.

        Args:
            library: whether the request may make it use the shared probe code, which is then known to be whole.
        """
        return self._take(library=library)[0]

    @overload
    def run(
        self,
        probe: Probe[ParamsT, ResultT],
        params: ParamsT | Mapping[str, Any] | None = ...,
        *,
        timeout: float | None = ...,
        keep: bool = ...,
        force: bool = ...,
    ) -> Outcome[ResultT]: ...
    @overload
    def run(
        self,
        probe: ProbeModule[ParamsT, ResultT],
        params: ParamsT | Mapping[str, Any] | None = ...,
        *,
        timeout: float | None = ...,
        keep: bool = ...,
        force: bool = ...,
    ) -> Outcome[ResultT]: ...
    @overload
    def run(
        self,
        probe: str | Path,
        params: object = ...,
        *,
        timeout: float | None = ...,
        keep: bool = ...,
        force: bool = ...,
    ) -> Outcome[Any]: ...

    def run(
        self,
        probe: Any,
        params: Any = None,
        *,
        timeout: float | None = None,
        keep: bool = False,
        force: bool = False,
    ) -> Outcome[Any]:
        """Run a probe on the host and return its validated result.

        Args:
            probe: a name (``"vocab-compare"``), a path of a probe file, a loaded Probe, or a probe module.
            params: the probe's ``Params``, or a mapping they are built from; None for all defaults.
            timeout: deadline of the run, seconds; the host's ``timeout`` by default.
            keep: leave the run's directory on the host.
            force: run although a GPU is busy, or nobody can tell; recorded in the request.

        Raises:
            RdiagError: see :mod:`remote_diag.errors`; ``ConnectionLost`` means that the outcome is unknown.
        """
        from .conversation import Conversation
        from .parameters import coerce

        loaded = self._load(probe)
        conversation = Conversation(
            host=self.host,
            probe=loaded,
            params=coerce(loaded, params),
            run_id=new_run_id(),
            timeout=self.host.timeout if timeout is None else timeout,
            keep=keep,
            force=force,
            tell=self._tell,
        )
        uploaded, connecting = self._upload_seconds, self._connect_seconds
        started = time.monotonic()
        conversation.warm()
        link, hello = self._take(conversation.ask, library=conversation.needs_library)
        entered = time.monotonic()
        try:
            conversation.hold(link)
        finally:
            link.close()
        ended = time.monotonic()
        upload = conversation.upload_seconds + self._upload_seconds - uploaded
        # A prepared session did its connecting before this call; that time belongs to the first run all the same.
        connect = max(entered - started - (self._upload_seconds - uploaded), connecting)
        self._connect_seconds = self._upload_seconds = 0.0
        timing = Timing(
            connect_s=connect,
            upload_s=upload,
            run_s=ended - entered - conversation.upload_seconds,
            total_s=connect + upload + (ended - entered - conversation.upload_seconds),
            phases=dict(self.transport.facts.phase_seconds),
        )
        return conversation.outcome(
            timing=timing,
            hello=hello,
            bundle_dir=f"{hello.cache}/{hello.bundle}",
            notes=(*self.transport.facts.notes, *self.notes),
        )

    def launch(self, spec: JobSpec, *, force: bool = False, launch_id: str | None = None) -> JobRecord:
        """Launch a job that outlives this session; see :func:`remote_diag.jobs.launch`."""
        from . import jobs

        return jobs.launch(self, spec, launch_id=launch_id or jobs.new_launch_id(), force=force, tell=self._tell)

    def jobs(self, name: str | None = None, *, launch_id: str | None = None) -> list[JobRecord]:
        """Return the jobs of the host; see :func:`remote_diag.jobs.jobs`."""
        from . import jobs

        return jobs.jobs(self, name, launch_id=launch_id, tell=self._tell)

    def stop(self, job: str, *, grace: float = 30.0, by: str = "") -> Stopped:
        """End every process of a job; see :func:`remote_diag.jobs.stop`."""
        from . import jobs

        return jobs.stop(self, job, grace=grace, by=by, tell=self._tell)

    def clean(self, *, older_than_s: float, dry_run: bool = False) -> Cleaned:
        """Remove old finished jobs and caches from the host; see :func:`remote_diag.jobs.clean`."""
        from . import jobs

        return jobs.clean(self, older_than_s=older_than_s, dry_run=dry_run, tell=self._tell)

    def read_log(self, job: str, *, stream: str = "stdout", offset: int = 0, follow: bool = False) -> Iterator[bytes]:
        """Yield the bytes of one log of a job; see :func:`remote_diag.logs.read`."""
        from . import logs

        return logs.read(self, job, stream=stream, offset=offset, follow=follow)

    def _load(self, probe: Any) -> Probe[Any, Any]:
        from .discovery import find
        from .probe import Probe, from_module

        if isinstance(probe, Probe):
            return probe
        return find(str(probe)) if isinstance(probe, (str, Path)) else from_module(probe)

    def _prepare(self) -> None:
        try:
            self._entered = self._enter()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self._prepare_error = error

    def _enter(self, *, anew: bool = False) -> AgentLink:
        """Ask the host to start an agent; whether one answers is seen later.

        Args:
            anew: bring the agent into a container again, where that is the environment.
        """
        self.connect()
        started = time.monotonic()
        command = self.enter_command
        if anew and self.host.environment.kind == "docker":
            command = SafeCommand(f"{command} anew")
        link = AgentLink(self.transport.execute(command), self.host.name)
        link.greet()
        self._connect_seconds += time.monotonic() - started
        return link

    def _take(
        self, ask: Callable[[AgentLink], None] = lambda _: None, *, library: bool = True
    ) -> tuple[AgentLink, Hello]:
        """Return an agent that has said hello and was asked; install the bundle on the way when the host lacks it.

        Args:
            ask: writes the request; called again for another agent when the first one did not answer.
            library: whether the shared probe code must be whole; an agent that said hello before has seen to it.
        """
        if self._ready is not None:
            ready, self._ready = self._ready, None
            ask(ready[0])
            return ready
        failure: EntryFailed | None = None
        for attempt in range(2):
            link = self._prepared() or self._enter(anew=attempt > 0)
            try:
                link.require(library=library)
                ask(link)
                hello, failure = self._answer(link)
            except BaseException:
                link.close()
                raise
            if hello is not None:
                return link, hello
            link.close()
            if attempt == 0:
                self._install(replace=failure is None)
        raise self._no_agent(failure)

    def _prepared(self) -> AgentLink | None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
            if self._prepare_error is not None:
                error, self._prepare_error = self._prepare_error, None
                raise error
        link, self._entered = self._entered, None
        return link

    def _answer(self, link: AgentLink) -> tuple[Hello | None, EntryFailed | None]:
        """Return the agent's hello, or why there is none, which an installation may mend.

        ``(None, None)`` means that what is installed is damaged.
        """
        started = time.monotonic()
        try:
            frame = link.first(started + max(START_LIMIT, self.host.connect_timeout))
        except EntryFailed as error:
            return None, error
        if frame.kind == "hello":
            self._connect_seconds += time.monotonic() - started
            return parse_hello(frame.payload), None
        if frame.kind == "bundle-damaged":
            return None, None
        raise self._unfit(frame.kind, frame.payload)

    def _install(self, *, replace: bool) -> None:
        started = time.monotonic()
        size = self.bundle.size // 1024
        self._tell(Note(f"installing the agent on {self.host.name} ({size} KiB, once per version and environment)"))
        cache, note = installation.install(
            self.transport, self.host, self.bundle, cache=self._cache, replace=replace
        )
        if note is not None:
            self._temporary = True
            self.notes.append(note)
            self._tell(Note(note))
        self._cache = cache
        self._upload_seconds += time.monotonic() - started

    def _unfit(self, kind: str, payload: bytes) -> RdiagError:
        if kind == "python-too-old":
            version, executable = parse_too_old(payload)
            return EnvironmentUnfit(
                f"{executable} is Python {version}; the agent needs 3.8 or newer",
                host=self.host.name,
                hint="install a newer Python there and set environment: {python: /path/to/python3} or {venv: ...} "
                "in hosts.yaml",
            )
        if kind in environment.ENTRY_FAILURES:
            message, hint = environment.explain(kind, self.host.environment)
            return EnvironmentUnfit(message, host=self.host.name, hint=hint)
        if kind == "request":
            return AuthError(
                "the account runs no commands: it sends back what it is sent",
                host=self.host.name,
                phase="start",
                hint="log in by hand and look: the login shell must be a real one",
            )
        return ConnectionLost(
            f"the agent began with a frame of kind {kind!r}", host=self.host.name, phase="start"
        )

    def _no_agent(self, failure: EntryFailed | None) -> RdiagError:
        if failure is None:
            return EnvironmentUnfit(
                "the agent's files are damaged again right after they were installed",
                host=self.host.name,
                hint="look at the disk of the host: dmesg, df, and the cache directory",
            )
        details = tuple(last_lines(failure.stderr + b"\n" + failure.noise))
        cause = f": {details[-1]}" if details else ""
        if failure.exit_status == 65:
            return EnvironmentUnfit(
                "the entry line did not reach the entry script: something that runs at login read it first",
                host=self.host.name,
                hint="look for commands that read stdin in .zshenv, .bashrc, config.fish or .cshrc there",
                details=details,
            )
        if b"unknown option" in failure.stderr.lower():
            return EnvironmentUnfit(
                "the interpreter is too old: it does not know -I; the agent needs Python 3.8 or newer",
                host=self.host.name,
                hint="set environment: {python: /path/to/python3} or {venv: ...} in hosts.yaml",
                details=details,
            )
        if failure.exit_status in {126, 127, None}:
            return EnvironmentUnfit(
                f"the interpreter does not start (exit status {failure.exit_status}){cause}",
                host=self.host.name,
                hint=f"try it there by hand; see: rdiag check {self.host.name}",
                details=details,
            )
        # The agent was installed a moment ago, so the account has a shell that runs commands.
        wanted = self.host.environment
        said = wanted.value if wanted.kind == "python" else "the interpreter"
        return EnvironmentUnfit(
            f"{said} ended without running the agent (exit status {failure.exit_status}){cause}",
            host=self.host.name,
            hint="is it a Python that works? Try it there by hand, or correct environment in hosts.yaml; "
            f"see: rdiag check {self.host.name}",
            details=details,
        )

