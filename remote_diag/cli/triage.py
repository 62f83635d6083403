"""``rdiag triage``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .loss_check import numbers
from .options import pass_settings, running
from .settings import Settings

if TYPE_CHECKING:
    from ..host import Host


@click.command()
@click.argument("case", required=False, type=click.Path(path_type=Path, dir_okay=False), metavar="[CASE.yaml]")
@click.option("--drafter-before", metavar="CKPT", help="The drafter that serves above chance.")
@click.option("--drafter-after", metavar="CKPT", help="The drafter as training has it.")
@click.option("--mapping", metavar="PATH", help="The mapping that training uses.")
@click.option("--target", metavar="MODEL", help="The target model.")
@click.option("--sample", "samples", multiple=True, metavar="FILE", help="Hidden states that it is trained on; may be repeated.")
@click.option("--serving-dump", multiple=True, metavar="FILE", help="The same texts' hidden states as served; may be repeated.")
@click.option("--counts", metavar="FILE", help="Token counts of the training text.")
@click.option("--log", metavar="FILE", help="The training's log.")
@click.option("--loss", callback=numbers, metavar="N,N...", help="Losses that training printed first, instead of a log: 19.2,18.7.")
@click.option("--accuracy", callback=numbers, metavar="N,N...", help="Accuracies likewise: 0.03,0.05 or 3%,5%.")
@click.option("--accept-length", "serving_accept_length", type=float, metavar="TOKENS", help="Mean acceptance length when served.")
@click.option("-s", "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Any other entry of the case.")
@running
@pass_settings
def command(settings: Settings, /, case: Path | None, sets: tuple[str, ...], **given: Any) -> int:
    """Find out why a drafter that serves above chance trains at chance.

    CASE.yaml says what is known; options win over it. Every hypothesis is looked at on the host, the cheapest and
    likeliest first, and all are ranked: supported, undecided or refuted, with the numbers. What the case lacks leaves
    a hypothesis undecided, and is named. Exit status: 1 a cause was found, 10 none could be decided on, 0 all is well.

    \b
    rdiag triage case.yaml
    rdiag triage --drafter-before drafter --drafter-after runs/7/0 \\
        --loss 18.9 --accuracy 0.01 --host gpu8
    """
    from .. import hypotheses, triage, triage_case
    from ..errors import UsageProblem

    declared, _ = hypotheses.find_all(settings.probe_paths)
    loaded = triage_case.load(case, given, sets, declared)
    if not loaded.values:
        known = triage_case.overview(triage_case.entries(declared))
        raise UsageProblem("the case says nothing: give CASE.yaml or options (rdiag triage --help)", hint=known)
    host = _host(settings, loaded.host)
    if settings.dry_run:
        return _dry_run(settings, host, loaded, declared)
    from ..session import Session
    from ..views.triage import next_steps, render
    from .output import Reporter, print_json, print_outcome

    with Reporter(settings) as reporter, Session(host) as session:
        outcome = triage.run(
            session, loaded, probe_paths=settings.probe_paths, timeout=settings.timeout, tell=reporter.tell
        )
    if settings.json:
        print_json(outcome.as_dict())
    else:
        print_outcome(outcome, render)
        for line in next_steps(outcome.result.hypotheses):
            click.echo(line)
    return int(outcome.exit_code)


def _host(settings: Settings, named: str | None) -> Host:
    from ..inventory import load

    names = settings.hosts or ((named,) if named else ("local",))
    hosts = load(settings.inventory).expand(names)
    if len(hosts) != 1:
        raise click.UsageError(f"a case is about one host, not {len(hosts)}")
    return hosts[0]


def _dry_run(settings: Settings, host: Host, case: Any, declared: Any) -> int:
    """Contact nothing; say what would be looked at, in which order, and what the case lacks."""
    from .output import print_json

    plan = [
        {
            "id": one.id,
            "claim": one.claim,
            "cost_s": one.cost_s,
            "likelihood": one.likelihood,
            "sha256": one.probe.sha256,
            "missing": [name for name in one.requires if case.get(name) is None],
        }
        for one in declared
    ]
    if settings.json:
        print_json({"schema_version": 1, "host": host.name, "probe": "triage", "case": dict(case.values), "plan": plan})
        return 0
    click.echo(f"host     {host.name}")
    for number, one in enumerate(plan, 1):
        lacking = f"; the case lacks {', '.join(one['missing'])}" if one["missing"] else ""
        click.echo(f"{number:>2}. {one['id']} (about {one['cost_s']:g} s, likelihood {one['likelihood']:g}): {one['claim']}{lacking}")
    return 0
