"""``rdiag nccl``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from .options import parse_option, pass_settings, running, save_baseline_option
from .picture import Picture, plot_option
from .settings import Settings
from .thresholds import read_overrides, thresholds_option

if TYPE_CHECKING:
    from ..comparison import Comparison
    from ..probe import Probe

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast", "reduce", "sendrecv")
DTYPES = ("bf16", "fp16", "fp32", "fp64", "int32", "int64", "uint8")
PROBES = {"nccl": "nccl", "gloo": "collectives-cpu"}
"""Backend -> the probe that measures with it; only the first is guarded against busy GPUs."""


def checked_sizes(ctx: click.Context, parameter: click.Parameter, given: str | None) -> str | None:
    """Refuse sizes that no host could measure before one is asked."""
    from .parse import provide_probe_code

    if given is not None:
        provide_probe_code()
        from probes.lib.comm.plan import parse_sizes

        try:
            parse_sizes(given)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx=ctx, param=parameter) from error
        # Between sizes, blanks do no harm; the probe knows none.
        return "".join(given.split())
    return None


@click.command()
@click.option(
    "--collective", type=click.Choice(COLLECTIVES), default="all_reduce", show_default=True, metavar="NAME",
    help=", ".join(COLLECTIVES) + ".",
)  # fmt: skip
@click.option(
    "--sizes", metavar="FROM:TO", callback=checked_sizes, help="Bytes: 8:4G, 8:4G:2 with a factor, or a list 32K,1M.  [default: 8:4G, gloo 8:16M]"
)
@click.option("--dtype", type=click.Choice(DTYPES), metavar="TYPE", help=", ".join(DTYPES) + ".  [default: bf16, gloo fp32]")
@click.option("--graph", is_flag=True, help="Take latency from replayed CUDA graphs: without the cost of launching.")
@click.option(
    "--backend", type=click.Choice(list(PROBES)), default="nccl", show_default=True, help="gloo runs the same on the CPU."
)
@click.option("--ranks", type=click.IntRange(1, 64), metavar="N", help="Processes.  [default: one a GPU, gloo 2]")
@click.option("--iterations", type=click.IntRange(5, 10_000), metavar="N", help="Calls that latency is taken from.")
@click.option("--check/--no-check", default=True, show_default=True, help="Whether contents are checked before timing.")
@click.option("--control/--no-control", default=True, show_default=True, help="Whether a failure is repeated without P2P.")
@click.option("--step-timeout", "step_timeout_s", type=click.FloatRange(1, 3600), metavar="SECONDS",
              help="What one size may take.  [default: 60]")  # fmt: skip
@click.option("--port", type=click.IntRange(1, 65_535), metavar="N", help="Where ranks meet.  [default: a free port]")
@click.option("--reference", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="CSV with bandwidths of your own; they win over published ones.")  # fmt: skip
@click.option("--binary", metavar="PATH", help="Run this program of nccl-tests on the host in place of rdiag's own ranks.")
@click.argument("arguments", nargs=-1, metavar="[-- ARGUMENTS...]")
@parse_option
@click.option("--gpu", metavar="NAME", help="With --parse: the GPUs that the file is from, where it does not say: H100-SXM.")
@plot_option("Also draw bandwidth and latency against size")
@thresholds_option
@save_baseline_option
@running
@pass_settings
def command(settings: Settings, /, backend: str, parsed: Path | None, plot: Path | None, **given: Any) -> int:
    """Measure a collective over all GPUs of a host: contents first, then latency, then bandwidth, then a verdict.

    \b
    rdiag nccl --host gpu8
    rdiag nccl --collective all_gather --sizes 32K,1M,1G --host gpu8
    rdiag nccl --backend gloo --ranks 8
    rdiag nccl --binary /opt/all_reduce_perf --host gpu8 -- -e 1G -g 8
    rdiag nccl --parse all_reduce.log --plot all_reduce.html
    """
    from ..parameters import build
    from ..views.nccl import render
    from ..views.nccl_plot import draw
    from .parse import execute_parsed
    from .run import execute

    ctx = click.get_current_context()
    own = given.pop("thresholds_file")
    thresholds, reference = read_overrides(own), read_reference(given.pop("reference"))
    if backend == "gloo" and (own is not None or reference):
        raise click.UsageError("--thresholds and --reference judge what GPUs do: they do not go with --backend gloo")
    said = {name for name in given if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE}
    _check(said, given, backend, parsed)
    values = {name: value for name, value in given.items() if value is not None}
    if parsed is not None or given["binary"] is not None:
        # A program has its collective in its name; only what was asked for by name may speak against it.
        values["file_collective"] = given["collective"] if "collective" in said else None
    values.update(thresholds=thresholds, thresholds_from="" if own is None else str(own))
    values.update(reference=reference, arguments=list(given["arguments"]))
    values["file_name"] = "" if parsed is None else parsed.name
    picture = None if plot is None else Picture(plot, lambda outcome, path: draw(outcome, path, published(outcome.answer, reference)))

    # The options are named after the probe's parameters.
    def params(probe: Probe[Any, Any]) -> Any:
        return build(probe, base=values)

    if parsed is not None:
        return execute_parsed(settings, "nccl", parsed, params, view=render, then=picture)
    return execute(settings, PROBES[backend], params, view=render, then=picture,
                   watched=watched(backend, thresholds, "" if own is None else str(own)))  # fmt: skip


def watched(backend: str = "nccl", thresholds: Mapping[str, float] | None = None, file: str = "") -> Comparison:
    """Return what is compared with the host's baseline, and which runs can be compared at all.

    Wrong data need no comparison, and data that nobody looked at are no change for the worse. The latency of gloo is
    none: it says who else used the CPUs.

    Args:
        backend: nccl or gloo.
        thresholds: the user's own, by name.
        file: where they are from.
    """
    from ..comparison import Comparison, Condition, Watch
    from .parse import provide_probe_code

    provide_probe_code()
    from probes.lib.gpu.thresholds import Thresholds

    limits = Thresholds(thresholds, file)

    def of_rows(name: str, limit: str, worse: Literal["lower", "higher"], unit: str) -> Watch:
        allowed = limits[limit]
        path = f"rows[collective,dtype,in_place,size_bytes].{name}"
        return Watch(path, tolerance=allowed.value / 100, worse=worse, unit=unit, source=allowed.provenance, optional=True)

    latency = (
        of_rows("latency.p50_us", "nccl.baseline_p50_pct", "higher", "us"),
        of_rows("latency.p99_us", "nccl.baseline_p99_pct", "higher", "us"),
    )
    return Comparison(
        (
            Watch("library_version", level="ok"),
            Watch("settings", level="ok"),
            of_rows("busbw_gbs", "nccl.baseline_busbw_pct", "lower", "GB/s"),
            *(latency if backend == "nccl" else ()),
        ),
        (
            Condition("collective", lambda result, _asked: result.get("collective")),
            Condition("ranks", lambda result, _asked: result.get("ranks"), "{} ranks", "an unknown number of ranks", option="ranks"),
            Condition("dtype", lambda result, _asked: _each(result.get("rows"), "dtype"), usual="an unknown type"),
            Condition("backend", lambda result, _asked: None if result.get("backend") == "nccl" else result.get("backend"), usual="nccl"),
            Condition("device", lambda result, _asked: _each(result.get("devices"), "name"), usual="unknown devices"),
            Condition("graph", lambda _result, asked: "CUDA graphs" if asked.get("graph") else None, usual="no CUDA graphs"),
            Condition("p2p", lambda result, _asked: _p2p_arm(result.get("settings")), usual="P2P as NCCL decides"),
            Condition("visible", lambda result, _asked: _setting(result, "CUDA_VISIBLE_DEVICES"), "CUDA_VISIBLE_DEVICES={}", "all devices visible"),
            Condition("program", lambda result, _asked: "nccl-tests" if result.get("source") == "binary" else None, usual="rdiag's own ranks"),
            Condition("arguments", lambda _result, asked: _arguments(asked.get("arguments")), "the arguments {}", "no arguments"),
        ),
    )  # fmt: skip


def _each(items: Any, name: str) -> str | None:
    """Return the different values of a field of all items, with commas between."""
    known = [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    values = {str(item[name]) for item in known if item.get(name) is not None}
    return ",".join(sorted(values)) or None


def _setting(result: Mapping[str, Any], name: str) -> str | None:
    settings = result.get("settings")
    return settings.get(name) if isinstance(settings, dict) else None


def _p2p_arm(settings: Any) -> str | None:
    """Return what was said to NCCL about P2P."""
    if not isinstance(settings, dict):
        return None
    if settings.get("NCCL_P2P_DISABLE") == "1":
        return "P2P off"
    level = settings.get("NCCL_P2P_LEVEL")
    return None if level is None else f"NCCL_P2P_LEVEL={level}"


def _arguments(words: Any) -> str | None:
    """Return the arguments of a program without those that choose sizes: rows are compared size by size."""
    found: list[str] = []
    skip = False
    for word in words or ():
        if skip or word in {"-b", "-e", "-f", "-i"}:
            skip = not skip
        else:
            found.append(word)
    return " ".join(found) or None


def _check(said: set[str], given: dict[str, Any], backend: str, parsed: Path | None) -> None:
    """Refuse options that do not go together."""
    if backend == "gloo" and (given["graph"] or given["binary"] is not None):
        raise click.UsageError("--graph and --binary need GPUs: they do not go with --backend gloo")
    if given["arguments"] and given["binary"] is None:
        raise click.UsageError("arguments are those of a program: give --binary PATH before them")
    if given["gpu"] is not None and parsed is None:
        raise click.UsageError("--gpu goes with --parse: a host says itself which GPUs it has")
    beside = sorted(said - {"collective", "gpu"})
    if parsed is not None and backend == "gloo":
        raise click.UsageError("--parse reads a file and measures nothing: leave --backend away")
    if parsed is not None and beside:
        raise click.UsageError(f"--parse reads a file and measures nothing: leave --{beside[0].replace('_', '-')} away")


def published(result: Any, own: list[str]) -> tuple[Any, ...]:
    """Return the published course over sizes, or the user's, that a result can be compared with; empty without one."""
    from .parse import provide_probe_code

    provide_probe_code()
    from probes.lib.comm import expectation, reference, verdict

    known = verdict.conditions(
        [device.name for device in result.devices], ranks=result.ranks, nodes=1, collective=result.collective,
        settings=dict(result.settings),
    )  # fmt: skip
    return expectation.curve(known, reference.parse(own, own=True) if own else ())


def read_reference(path: Path | None) -> list[str]:
    """Return the lines of a user's table of bandwidths, checked; none for None.

    Raises:
        ConfigError: it cannot be read, or is no such table.
    """
    if path is None:
        return []
    from ..errors import ConfigError
    from ..files import read_file
    from .parse import provide_probe_code

    provide_probe_code()
    from probes.lib.comm.reference import parse

    try:
        lines = read_file(path, limit=1 << 20).decode("utf-8").splitlines()
        parse(lines, own=True)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}", hint="the columns are those of reference_busbw.csv") from error
    return lines
