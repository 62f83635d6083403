"""``rdiag env``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .options import pass_settings, running, save_baseline_option
from .run import execute
from .settings import Settings

if TYPE_CHECKING:
    from ..comparison import Comparison
    from ..probe import Probe


@click.command()
@click.option("--pid", type=int, metavar="PID", help="Also the settings that this running process was started with.")
@click.option("--redact", is_flag=True, help="Hide names of hosts and user, home folders, addresses and UUIDs on stdout; hosts become host-1, host-2... in the order asked for.")
@click.option("--torch/--no-torch", default=True, show_default=True, help="Import torch on the host, in a process that sees no GPU.")
@click.option("--like", metavar="HOST", help="Compare with the baseline of another host, instead of this one's own.")
@save_baseline_option
@running
@pass_settings
def command(settings: Settings, /, pid: int | None, redact: bool, torch: bool, like: str | None) -> int:
    """Describe the environment of GPU programs: driver, CUDA, torch, NCCL, their settings and who makes them.

    Variables of an allow-list only (NCCL_, TORCH_NCCL_, CUDA_ and a few more); what sounds like a secret is hidden.
    No CUDA context is started. With --save-baseline the answer is kept, and later runs say what changed since.

    \b
    rdiag env --host gpu8
    rdiag env --host gpu8 --pid 4711 --redact --json
    rdiag env --host gpu8 --save-baseline && rdiag env --host gpu9 --like gpu8
    """
    from ..views.env import render

    values: dict[str, Any] = {"redact": redact, "torch": torch}
    if pid is not None:
        values["pid"] = pid
    if redact and (settings.save_baseline or like):
        raise click.UsageError("baselines need the real names: leave --redact away")
    if redact and (settings.keep or settings.dry_run):
        raise click.UsageError("a kept run and the plan of --dry-run hold the real names: leave --redact away")
    if like and settings.save_baseline:
        raise click.UsageError("give --like or --save-baseline")

    def build(probe: Probe[Any, Any]) -> Any:
        from ..parameters import build as build_params

        return build_params(probe, base=values)

    return execute(settings, "env", build, view=render, watched=None if redact else watched(like, torch=torch), like=like, redact=redact)


def watched(like: str | None = None, *, torch: bool = True) -> Comparison:
    """Return what is compared with the host's baseline, or with that of another host.

    Args:
        like: the other host; what is another one on each host is left out.
        torch: whether torch was asked; without it, what only torch tells is left out.
    """
    from ..comparison import Comparison, Watch

    # Of these there may be none, and that is an answer.
    null_says = {"driver.cuda", "torch.cuda", "machine.container"}
    watches = (
        *(
            Watch(path, null_says=path in null_says)
            for path in (
                "driver.version", "driver.open_module", "driver.cuda", "driver.modules", "driver.parameters", "driver.services",
                "driver.models", *(("torch.version", "torch.cuda", "torch.arch_list", "nccl_version") if torch else ()),
                "settings[name,source]", "settings[name,source].value", "settings[name,source].in_force", "machine.kernel",
                "machine.virtualisation", "machine.container", "machine.cpu_model", "machine.governors", "machine.numa_nodes",
                "machine.kernel_options", "machine.limits", "machine.infiniband",
            )
        ),
        Watch("machine.shm_total_bytes", tolerance=0.01, unit="bytes"),
        Watch("packages[name]", level="ok"),
        Watch("packages[name].version"),
        Watch("python_version", level="ok"),
        *(() if like else (Watch("machine.boot_id", level="ok", action="the host was started again since"),)),
    )  # fmt: skip
    return Comparison(watches)
