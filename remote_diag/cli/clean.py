"""``rdiag clean``: remove what old jobs and old releases of rdiag left on a host."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import click

from ..exitcodes import ExitCode
from ..text import safe
from .options import common, host_option, pass_settings
from .settings import Settings

if TYPE_CHECKING:
    from ..host import Host
    from ..jobs import Cleaned

_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhdw]?)\Z")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SHOWN = 20


class Age(click.ParamType):  # type: ignore[type-arg]
    """A length of time: ``14d``, ``12h``, ``90m``."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds."""
        if isinstance(value, float):
            return value
        match = _AGE.match(str(value))
        if match is None or len(str(value)) > 12:
            self.fail(f"{value!r} is no length of time, such as 14d or 12h", param, ctx)
        return float(match[1]) * _SECONDS[match[2]]


@click.command()
@click.option("--older-than", type=Age(), default="14d", show_default=True, metavar="AGE", help="Leave what is younger.")
@click.option("--dry-run", is_flag=True, help="Remove nothing; say what would be removed.")
@host_option
@common
@pass_settings
def command(settings: Settings, *, older_than: float, dry_run: bool) -> int:
    """Remove finished jobs, old releases of rdiag, and files that no job refers to any more.

    Only what rdiag made is touched, and nothing of a job that is not over. Logs that were mirrored here stay.

    \b
    rdiag clean --host gpu8 --dry-run
    rdiag clean --host gpu8 --older-than 30d
    """
    from .. import fleet, job_records
    from ..errors import RdiagError
    from ..inventory import load
    from ..session import Session
    from .output import Reporter, print_error, print_list

    hosts = load(settings.inventory).expand(settings.hosts or ("local",))
    done: list[Cleaned] = []
    failures: list[RdiagError] = []

    def work(host: Host) -> Cleaned:
        with Session(host) as session:
            return session.clean(older_than_s=older_than, dry_run=dry_run)

    with Reporter(settings, hosts=len(hosts)) as reporter:
        for host, answer in fleet.run_on_all(hosts, work):
            reporter.arrived(host.name)
            if isinstance(answer, RdiagError):
                failures.append(answer)
                continue
            done.append(answer)
            for what, name in answer.removed:
                if what == "job" and not dry_run:
                    job_records.forget(host.name, name)
    if settings.json:
        print_list([one.as_dict() for one in done])
    else:
        for one in done:
            sys.stdout.write("\n".join(_lines(one)) + "\n")
    for error in failures:
        print_error(error, settings)
    return int(fleet.exit_code(failures) if failures else ExitCode.OK)


def _lines(done: Cleaned) -> list[str]:
    verb = "would be removed" if done.dry_run else "removed"
    lines = [f"{done.host}: {len(done.removed)} things {verb}, {done.bytes / (1 << 20):.1f} MiB"]
    lines += [f"  {what} {safe(name, limit=80)}" for what, name in done.removed[:_SHOWN]]
    if len(done.removed) > _SHOWN:
        lines.append(f"  and {len(done.removed) - _SHOWN} more")
    lines += [f"  kept {safe(job, limit=80)}: {safe(why)}" for job, why in done.kept[:_SHOWN]]
    lines += [f"  not removed: {safe(problem, limit=200)}" for problem in done.problems[:_SHOWN]]
    return lines
