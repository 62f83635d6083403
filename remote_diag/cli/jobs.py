"""``rdiag jobs``: every job of the hosts, and its state."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from ..exitcodes import ExitCode
from .options import common, job_host_option, pass_settings
from .settings import Settings

if TYPE_CHECKING:
    from ..errors import RdiagError
    from ..host import Host
    from ..jobs import JobRecord


@click.command()
@click.argument("name", required=False)
@click.option("--launch", "launch_id", metavar="ID", help="Only the job that this launch became.")
@job_host_option
@common
@pass_settings
def command(settings: Settings, name: str | None, launch_id: str | None) -> int:
    """List jobs: what they do now, or how they ended, as their hosts say.

    NAME (finetune, or finetune.v2) narrows the list down. Without --host, the hosts that jobs were launched on from
    this machine are asked, and this machine itself.

    \b
    rdiag jobs
    rdiag jobs --host gpu8 --json
    """
    from .. import fleet
    from ..session import Session
    from .output import Reporter, print_error, print_list, show

    hosts = known_hosts(settings)
    answers: dict[str, list[JobRecord] | RdiagError] = {}

    def ask(host: Host) -> list[JobRecord]:
        with Session(host) as session:
            return session.jobs(name, launch_id=launch_id)

    with Reporter(settings, hosts=len(hosts)) as reporter:
        for host, answer in fleet.run_on_all(hosts, ask):
            answers[host.name] = answer
            reporter.arrived(host.name)
    found = [record for host in hosts for record in _records(answers[host.name])]
    failures = [one for host in hosts if not isinstance(one := answers[host.name], list)]
    if settings.json:
        print_list([record.as_dict() for record in found])
    elif found:
        from ..views.jobs import render

        show(render(found))
    elif len(failures) < len(hosts):
        answered = [host.name for host in hosts if isinstance(answers[host.name], list)]
        sys.stdout.write(f"no jobs on {', '.join(answered)}\n")
    for error in failures:
        print_error(error, settings)
    return int(fleet.exit_code(failures) if failures else ExitCode.OK)


def _records(answer: list[JobRecord] | RdiagError) -> list[JobRecord]:
    return answer if isinstance(answer, list) else []


def known_hosts(settings: Settings) -> list[Host]:
    """Return the hosts of the options; without any, those that this machine launched jobs on, and itself."""
    from .. import job_records
    from ..inventory import load

    inventory = load(settings.inventory)
    if settings.hosts:
        return inventory.expand(settings.hosts)
    return inventory.expand([*(name for name in job_records.hosts() if name in inventory.hosts and name != "local"), "local"])


def host_with(settings: Settings, job: str) -> Host:
    """Return the host of the options; without one, the host on which this machine launched ``job`` last."""
    from .. import job_records
    from ..errors import UsageProblem
    from ..inventory import load

    inventory = load(settings.inventory)
    if settings.hosts:
        hosts = inventory.expand(settings.hosts)
        if len(hosts) != 1:
            raise UsageProblem("a job is on one host", hint="give one --host")
        return hosts[0]
    places = [name for name in job_records.hosts_of(job) if name in inventory.hosts]
    if len(places) > 1:
        raise UsageProblem(
            f"{job} was launched on several hosts: {', '.join(places)}", hint=f"name one: --host {places[0]}"
        )
    return inventory.host(places[0] if places else "local")
