"""``rdiag check``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .options import common, complete_hosts, host_option, pass_settings
from .settings import Settings

if TYPE_CHECKING:
    from ..fleet import Answer
    from ..host import Host


@click.command()
@click.argument("names", nargs=-1, metavar="[HOST]...", shell_complete=complete_hosts)
@host_option
@common
@pass_settings
def command(settings: Settings, names: tuple[str, ...]) -> int:
    """Look at a host: connection, login shell, SFTP, Python, packages, disk, clock, limits.

    Each line says what was seen and what to do about it. Works on a host that is broken in half; starts nothing on a
    GPU.

    \b
    rdiag check gpu8
    rdiag check lab --json
    """
    from ..inventory import load

    hosts = load(settings.inventory).expand((*names, *settings.hosts) or ("local",))
    answers = _look(settings, hosts)
    _show(settings, hosts, answers)
    from .. import fleet

    return int(fleet.exit_code([answers[host.name] for host in hosts]))


def _look(settings: Settings, hosts: list[Host]) -> dict[str, Answer]:
    from .. import fleet
    from ..check import CheckReport, check
    from .output import Reporter

    several = len(hosts) > 1
    answers: dict[str, Answer] = {}
    with Reporter(settings, hosts=len(hosts)) as reporter:

        def look(host: Host) -> CheckReport:
            return check(host, on_event=reporter.teller(host.name if several else ""))

        for host, answer in fleet.run_on_all(hosts, look):
            answers[host.name] = answer
            reporter.arrived(host.name)
    return answers


def _show(settings: Settings, hosts: list[Host], answers: dict[str, Answer]) -> None:
    from .. import fleet
    from ..check import NAME, CheckReport
    from ..outcome import SCHEMA_VERSION
    from ..views.check import render
    from .output import print_error, print_json, show

    if settings.json:
        objects = [fleet.as_dict(host, answers[host.name]) for host in hosts]
        several = {"schema_version": SCHEMA_VERSION, "probe": NAME, "hosts": objects}
        print_json(objects[0] if len(objects) == 1 else several)
        return
    for host in hosts:
        answer = answers[host.name]
        if isinstance(answer, CheckReport):
            show(render(answer))
        elif isinstance(answer, Exception):
            print_error(answer, settings)
