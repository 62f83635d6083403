"""``rdiag run``, and the way that every command goes which runs a probe."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from ..exitcodes import ExitCode
from .options import pass_settings, running
from .settings import Settings

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..comparison import Comparison
    from ..fleet import Answer
    from ..host import Host
    from ..outcome import Outcome
    from ..probe import Probe
    from ..session import Session
    from .redact import StandIns

ParamsBuilder = Callable[["Probe[Any, Any]"], Any]
ForHost = Callable[[Any, "Host"], Any]
View = Callable[["Outcome[Any]"], "RenderableType"]


class Then(Protocol):
    """Something that is done with each answer before it is printed."""

    def __call__(self, outcome: Outcome[Any], *, alone: bool) -> None:
        """``alone``: whether it is the only host's."""


def complete_probes(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001
    """Return the probes whose names begin with ``incomplete``."""
    from ..discovery import names

    try:
        return sorted(name for name in names() if name.startswith(incomplete))
    except Exception:  # noqa: BLE001 - a completion must never print
        return []


@click.command()
@click.argument("probe", shell_complete=complete_probes)
@click.option("-s", "--set", "sets", multiple=True, metavar="KEY=VALUE", help="A parameter; may be repeated.")
@click.option(
    "--params",
    "params_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Parameters from a YAML or JSON file; --set wins.",
)
@running
@pass_settings
def command(settings: Settings, probe: str, sets: tuple[str, ...], params_file: Path | None) -> int:
    """Run PROBE, the name of a probe or a probe file, on one host or several.

    \b
    rdiag run hello --set name=Ada
    rdiag run ./probes/mine.py --host gpu8 --params mine.yaml
    """

    def build(loaded: Probe[Any, Any]) -> Any:
        from ..parameters import build as build_params

        return build_params(loaded, sets, params_file)

    return execute(settings, probe, build)


def execute(
    settings: Settings,
    probe: str,
    build: ParamsBuilder,
    *,
    view: View | None = None,
    then: Then | None = None,
    for_host: ForHost | None = None,
    watched: Comparison | None = None,
    like: str | None = None,
    redact: bool = False,
) -> int:
    """Run ``probe`` on the hosts of ``settings``, print what came of it, and return the exit code.

    Args:
        settings: the common options.
        probe: name or path of the probe.
        build: gets the loaded probe and returns its ``Params``.
        view: renders the Outcome for people; the generic table by default.
        then: is called with every Outcome that has an answer.
        for_host: gets the ``Params`` and a host, and returns what that host is sent.
        watched: what is compared with the host's baseline, and when, for commands that have ``--save-baseline``.
        like: compare with the baseline of this host instead.
        redact: whether hosts get other names on stdout.
    """
    from ..inventory import load

    hosts = load(settings.inventory).expand(settings.hosts or ("local",))
    task = _Task(settings, probe, build, view, then, for_host, watched, like, _stand_ins(hosts) if redact else None)
    if settings.dry_run:
        return _dry_run(task, hosts)
    return _run_on_one(task, hosts[0]) if len(hosts) == 1 else _run_on_several(task, hosts)


def _stand_ins(hosts: Sequence[Host]) -> StandIns:
    from .redact import StandIns

    return StandIns(hosts)


@dataclass(frozen=True)
class _Task:
    """What :func:`execute` was asked for."""

    settings: Settings
    name: str
    build: ParamsBuilder
    view: View | None
    then: Then | None
    for_host: ForHost | None
    watched: Comparison | None
    like: str | None = None
    stand_ins: StandIns | None = None

    def load(self) -> Probe[Any, Any]:
        """Return the probe; a note says when it stands in the place of another."""
        from ..discovery import locate
        from ..probe import load
        from .output import warn

        found = locate(self.name, self.settings.probe_paths)
        if found.shadows is not None:
            warn(f"{found.name} is {found.path}, in place of {found.shadows}")
        return load(found.path)

    def params(self, params: Any, host: Host) -> Any:
        """Return what ``host`` is sent."""
        return params if self.for_host is None else self.for_host(params, host)

    def run(self, session: Session, probe: Probe[Any, Any], params: Any) -> Outcome[Any]:
        """Run the probe on one host, and hold the answer against the host's baseline."""
        settings = self.settings
        asked = self.params(params, session.host)
        if self.watched is not None and (settings.save_baseline or self.like is not None):
            from ..baselines import check_like, check_writable

            if settings.save_baseline:
                check_writable(session.host.name, probe.name)
            elif self.like is not None:
                check_like(self.like, probe.name)
        outcome = session.run(probe, asked, timeout=settings.timeout, keep=settings.keep, force=settings.force)
        if self.watched is None:
            return outcome
        from ..baselines import apply

        return apply(outcome, self.watched, asked=vars(asked), save_now=settings.save_baseline, like=self.like)

    def shown(self, outcome: Outcome[Any]) -> Outcome[Any]:
        """Return the outcome as it may be shown."""
        return outcome if self.stand_ins is None else self.stand_ins.outcome(outcome)

    def entry(self, host: Host, answer: Answer) -> dict[str, Any]:
        """Return one entry of the list of hosts that ``--json`` prints."""
        from ..fleet import as_dict

        if self.stand_ins is None or not isinstance(answer, Exception):
            return as_dict(host, answer)
        return self.stand_ins.entry(as_dict(host, self.stand_ins.error(answer)))


def _run_on_one(task: _Task, host: Host) -> int:
    from ..transport import for_host

    # The network works while this process still imports what the session and the probe need.
    transport = for_host(host)
    transport.prestart()
    from ..errors import RdiagError
    from ..session import Session
    from .output import Reporter, print_json, print_outcome

    settings, view = task.settings, task.view
    with Reporter(settings) as reporter:
        session = Session(host, on_event=reporter.tell, transport=transport)
        try:
            session.prepare()
            loaded = task.load()
            params = task.build(loaded)
            if not settings.json:
                from ..views import outcome as _  # noqa: F401 - rich loads while the network is waited for
            outcome = task.shown(task.run(session, loaded, params))
        except RdiagError as error:
            if task.stand_ins is not None and settings.json:
                # The error takes the place of the answer on stdout.
                raise task.stand_ins.error(error) from error
            raise
        finally:
            session.close()
    if task.then is not None and outcome.answer is not None:
        task.then(outcome, alone=True)
    if settings.json:
        print_json(outcome.as_dict())
    else:
        print_outcome(outcome, view)
    return int(outcome.exit_code)


def _run_on_several(task: _Task, hosts: list[Host]) -> int:
    from .. import fleet
    from ..outcome import SCHEMA_VERSION
    from ..session import Session
    from .output import Reporter, print_error, print_json, print_outcome

    settings, view = task.settings, task.view
    loaded = task.load()
    params = task.build(loaded)
    answers: dict[str, fleet.Answer] = {}
    with Reporter(settings, hosts=len(hosts)) as reporter:

        def run(host: Host) -> Outcome[Any]:
            with Session(host, on_event=reporter.teller(host.name)) as session:
                return task.run(session, loaded, params)

        for host, answer in fleet.run_on_all(hosts, run):
            answers[host.name] = answer
            reporter.arrived(host.name)
    told = {name: answer if isinstance(answer, Exception) else task.shown(answer) for name, answer in answers.items()}
    ordered = [(host, told[host.name]) for host in hosts]
    for _, answer in ordered:
        if task.then is not None and not isinstance(answer, Exception) and answer.answer is not None:
            task.then(answer, alone=False)
    if settings.json:
        print_json(
            {
                "schema_version": SCHEMA_VERSION,
                "probe": loaded.name,
                "hosts": [task.entry(host, answer) for host, answer in ordered],
            }
        )
    else:
        for _, answer in ordered:
            if isinstance(answer, Exception):
                print_error(answer, settings)
            else:
                print_outcome(answer, view)
    return int(fleet.exit_code([answer for _, answer in ordered]))


def _dry_run(task: _Task, hosts: list[Host]) -> int:
    from ..conversation import build_request
    from ..outcome import SCHEMA_VERSION
    from ..redaction import shown_environment
    from ..session import Session, new_run_id
    from .output import print_json, print_plan

    settings, loaded = task.settings, task.load()
    params = task.build(loaded)
    plans: list[dict[str, Any]] = []
    for host in hosts:
        session = Session(host)
        request = build_request(
            host=host,
            probe=loaded,
            params=task.params(params, host),
            run_id=new_run_id(),
            timeout=settings.timeout or host.timeout,
            keep=settings.keep,
            force=settings.force,
        )
        request["env"] = shown_environment(request["env"].items())
        plans.append(
            {
                "host": host.name,
                "target": session.transport.facts.target,
                "command": str(session.enter_command),
                "bundle": session.bundle.listing(),
                "probe": {"name": loaded.name, "path": str(loaded.path), "sha256": loaded.sha256},
                "request": request,
            }
        )
    if settings.json:
        # One host gives one object, as everywhere; several give a list of them.
        print_json({"schema_version": SCHEMA_VERSION, **(plans[0] if len(plans) == 1 else {"hosts": plans})})
    else:
        for plan in plans:
            print_plan(plan, json.dumps(plan["request"], indent=2))
    return int(ExitCode.OK)
