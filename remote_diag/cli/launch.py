"""``rdiag launch``: start a job on a host, and follow it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..exitcodes import ExitCode
from ..text import safe
from .options import common, dry_run_option, force_launch_option, host_option, pass_settings
from .settings import Settings

if TYPE_CHECKING:
    from ..follower import Followed
    from ..host import Host
    from ..job_spec import JobFileSpec
    from ..jobs import JobRecord, JobSpec


class Gpus(click.ParamType):  # type: ignore[type-arg]
    """``8`` (how many), ``0-3`` or ``0,2`` (which)."""

    name = "gpus"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | tuple[int, ...]:
        """Return a count, or indexes."""
        from pydantic_core import PydanticCustomError

        from ..job_spec import parse_gpus

        try:
            return parse_gpus(value)
        except PydanticCustomError:
            self.fail(f"{value!r}: a count like 8, or which: 0-3, or 0,2", param, ctx)


@click.command()
@click.option("--name", metavar="NAME", help="Name of the job; then the command follows, and there is no JOB.yaml.")
@click.option("--file", "files", multiple=True, metavar="PATH", help="A file or folder to send along; may be repeated.")
@click.option("--env", "envs", multiple=True, metavar="KEY=VALUE", help="An environment variable; may be repeated.")
@click.option("--gpus", type=Gpus(), metavar="N|LIST", help="How many GPUs (8), or which (0-3). They have to be free.")
@click.option("--workdir", metavar="DIR", help="Working directory on the host.  [default: where the files are; the host's]")
@click.option("--detach", is_flag=True, help="Do not follow; return once the job runs.")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="JOB.yaml | -- COMMAND...")
@dry_run_option
@force_launch_option
@host_option
@common
@pass_settings
def command(
    settings: Settings,
    *,
    name: str | None,
    files: tuple[str, ...],
    envs: tuple[str, ...],
    gpus: int | tuple[int, ...] | None,
    workdir: str | None,
    detach: bool,
    words: tuple[str, ...],
) -> int:
    """Launch a job that outlives the connection, and follow its log until it ends.

    \b
    rdiag launch --host gpu8 finetune.yaml
    rdiag launch --host gpu8 --name finetune --file train.py --gpus 8 -- torchrun --nproc_per_node 8 train.py

    The command is passed on word by word; no shell reads it. In it, {files}, {logs}, {job}, {attempt} and {gpus} stand
    for the folder of the files, the one for logs of ranks (torchrun --log-dir), the job's id, its attempt, and the
    number of GPUs. Ctrl-C stops following; the job goes on.

    Exit status: 0 when the job ended well, 11 when it did not, 9 when it was not launched because it would disturb.
    """
    host = _one_host(settings)
    described = _described(name, words, files)
    spec = _spec(described, envs=envs, gpus=gpus, workdir=workdir)
    if settings.dry_run:
        return _dry_run(settings, host, spec)
    record = _launch(settings, host, spec)
    if detach:
        _tell_launched(settings, record)
        return int(ExitCode.OK)
    return _follow(settings, host, record)


def _one_host(settings: Settings) -> Host:
    from ..errors import UsageProblem
    from ..inventory import load

    hosts = load(settings.inventory).expand(settings.hosts or ("local",))
    if len(hosts) != 1:
        raise UsageProblem("a job is launched on one host", hint="give one --host")
    return hosts[0]


def _described(name: str | None, words: tuple[str, ...], files: tuple[str, ...]) -> JobFileSpec:
    from ..errors import UsageProblem
    from ..job_spec import JobFileSpec, load

    if name is not None:
        return JobFileSpec(_checked_name(name), words, files, Path())
    if len(words) != 1:
        raise UsageProblem(
            "a command needs --name", hint="rdiag launch --name NAME ... -- COMMAND; or: rdiag launch JOB.yaml"
        )
    if files:
        raise UsageProblem("--file belongs to --name", hint=f"list the files in {words[0]}, below files:")
    return load(Path(words[0]))


def _checked_name(name: str) -> str:
    from pydantic_core import PydanticCustomError

    from ..errors import UsageProblem
    from ..job_spec import check_job_name

    try:
        return check_job_name(name)
    except PydanticCustomError as error:
        context = error.context or {}
        raise UsageProblem(f"--name: {context['text']}", hint=context["hint"]) from None


def _spec(
    described: JobFileSpec, *, envs: tuple[str, ...], gpus: int | tuple[int, ...] | None, workdir: str | None
) -> JobSpec:
    from ..errors import UsageProblem
    from ..job_files import collect
    from ..jobs import JobSpec
    from ..provenance import launched_from

    env = dict(described.env)
    for one in envs:
        key, equals, value = one.partition("=")
        if not equals or not key or key.startswith("RDIAG_"):
            raise UsageProblem(f"--env {one!r} is not KEY=VALUE", hint="names that begin with RDIAG_ are taken")
        env[key] = value
    if workdir is not None and not workdir.startswith("/"):
        raise UsageProblem("--workdir is a folder on the host and begins with /")
    return JobSpec(
        name=described.name,
        argv=described.command,
        files=collect(described.files, described.base),
        env=env,
        workdir=workdir or described.workdir,
        gpus=described.gpus if gpus is None else gpus,
        disk_bytes=described.disk_bytes,
        shm_bytes=described.shm_bytes,
        launched=launched_from(described.base),
    )


def _launch(settings: Settings, host: Host, spec: JobSpec) -> JobRecord:
    from ..job_records import remember
    from ..jobs import launch_surely
    from ..session import Session
    from .output import Reporter

    with Reporter(settings) as reporter:
        try:
            record = launch_surely(
                lambda: Session(host, on_event=reporter.tell), spec, force=settings.force, tell=reporter.tell
            )
        except BaseException as error:
            if not isinstance(error, Exception):
                _note(f"interrupted; whether it was launched says: rdiag jobs --host {host.name}")
            raise
    remember(host.name, record.job, record.launch_id or "")
    if record.warning:
        _note(f"warning: {record.warning}")
    for one in record.forced:
        _note(f"forced: {one}")
    return record


def _tell_launched(settings: Settings, record: JobRecord) -> None:
    from .output import print_json

    if settings.json:
        print_json(record.as_dict())
        return
    gpus = "" if record.gpus is None else f", GPUs {','.join(map(str, record.gpus)) or 'none'}"
    sys.stdout.write(
        f"{record.job} is {record.state} on {record.host} (pid {record.pid}{gpus})\n"
        f"log     {safe(record.log or 'unknown')}\n"
        f"follow  rdiag logs {record.job} -f --host {record.host}\n"
        f"stop    rdiag stop {record.job} --host {record.host}\n"
    )


def _follow(settings: Settings, host: Host, record: JobRecord) -> int:
    from ..follower import Wanted
    from ..session import Session
    from .logs import LAST_SHOWN, show_logs
    from .output import print_json

    if not settings.json:
        _note(f"{record.job} is {record.state} on {host.name} (pid {record.pid}); Ctrl-C leaves it running")
    terminal = sys.stdout.isatty()
    wanted = Wanted(follow=True, show=not settings.json, show_last=LAST_SHOWN if terminal else None)
    followed = show_logs(settings, host, record.job, wanted, insist=True)
    with Session(host) as session:
        found = [one for one in session.jobs(record.job) if one.job == record.job]
    ended = found[0] if found else record
    if settings.json:
        print_json(ended.as_dict())
    else:
        _note(describe_end(ended))
        if ended.state == "failed":
            _tell_culprit(followed)
    return int(exit_code(ended))


def _tell_culprit(followed: Followed) -> None:
    """Name the rank that failed first: what the others say, they say because of it."""
    from ..metrics import first_failing_rank

    culprit = first_failing_rank({file.stream: file.path for file in followed.files if file.path is not None})
    if culprit is not None:
        _note(culprit)


def describe_end(record: JobRecord) -> str:
    """Return one sentence on how a job ended."""
    why = f": {record.message}" if record.message else ""
    code = f" with status {record.exit_code}" if record.exit_code is not None and not record.message else ""
    return f"{record.job} {record.state} on {record.host}{code}{why}"


def exit_code(record: JobRecord) -> ExitCode:
    """Return what a job that has ended makes of the exit status of ``rdiag launch``."""
    if record.state == "exited":
        return ExitCode.OK
    return ExitCode.JOB_FAILED if record.state in {"failed", "stopped"} else ExitCode.UNKNOWN_STATE


def _note(text: str) -> None:
    sys.stderr.write(f"rdiag: {safe(text)}\n")
    sys.stderr.flush()


def _dry_run(settings: Settings, host: Host, spec: JobSpec) -> int:
    import json

    from ..jobs import new_launch_id
    from .output import print_json

    request = spec.request(host, launch_id=new_launch_id(), force=settings.force)
    if settings.json:
        print_json({"schema_version": 1, "host": host.name, "request": request})
    else:
        lines = [f"host     {host.name}", "request  (on stdin, never on a command line)"]
        lines += [f"  {line}" for line in json.dumps(request, indent=2).splitlines()]
        sys.stdout.write("\n".join(lines) + "\n")
    return int(ExitCode.OK)
