"""``rdiag comm-share``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .options import pass_settings, running
from .run import execute
from .settings import Settings

if TYPE_CHECKING:
    from ..probe import Probe


@click.command()
@click.argument("trace", required=False)
@click.option("--pid", type=int, metavar="PID", help="Read the newest finished trace that this process has written.")
@click.option("--step", metavar="NAME", help="Annotation whose spans are the steps; * and ? allowed.  [default: ProfilerStep]")
@click.option("--small-bytes", type=int, metavar="N", help="Messages up to N bytes count as bound by latency.  [default: 1 MiB]")
@click.option("--exposed-limit", type=float, metavar="SHARE", help="Exposed communication that is too much.  [default: 0.5]")
@click.option("--top", type=int, metavar="N", help="Kernels and messages listed for each GPU.  [default: 10]")
@running
@pass_settings
def command(settings: Settings, /, trace: str | None, **options: Any) -> int:
    """Say which share of a step communication takes: TRACE is a file of torch.profiler on the host (.json, .json.gz).

    For each GPU: time in kernels of NCCL and of other libraries that move data between GPUs, what computation hides
    of it and what is exposed, by collective and message size. Traces of many gigabytes are read as a stream.

    With --pid nothing is attached to the process and no profiler is started: rdiag looks for traces in files that the
    process has open, its working folder, and folders that its environment names (SGLANG_TORCH_PROFILER_DIR...).

    \b
    rdiag comm-share /data/prof/rank0.pt.trace.json.gz --host gpu8
    rdiag comm-share /data/prof/TP-0.trace.json.gz --step 'verify*' --host gpu8
    """
    from ..views.comm_share import render

    if (trace is None) == (options["pid"] is None):
        raise click.UsageError("give a TRACE on the host, or --pid of a process that has written one")
    values = {name: value for name, value in options.items() if value is not None}
    if trace is not None:
        values["path"] = trace

    def build(probe: Probe[Any, Any]) -> Any:
        from ..parameters import build as build_params

        return build_params(probe, base=values)

    return execute(settings, "comm-share", build, view=render)
