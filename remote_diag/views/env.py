"""The environment: one sentence, the findings, then what is installed, what is set and by whom, and what is around."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..text import safe
from .outcome import findings, headline

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..outcome import Outcome

_LONG = 200


def render(outcome: Outcome[Any]) -> RenderableType:
    """Return the environment; 80 columns are enough."""
    result = outcome.answer
    if result is None:
        return headline(outcome)
    parts: list[RenderableType] = [headline(outcome, _sentence(result))]
    found = findings([item for item in outcome.findings if item.level != "ok" or item.evidence])
    if found is not None:
        parts.append(found)
    parts.append(_facts(result))
    for title, settings in (("set here", result.settings), ("set in the process", result.process_settings)):
        if settings:
            parts.append(_settings(title, settings))
    if result.packages:
        parts.append(Text("packages  " + safe(", ".join(f"{each.name} {each.version}" for each in result.packages), limit=2000)))
    return Group(*parts)


def _sentence(result: Any) -> str:
    driver, torch = result.driver, result.torch
    installed = next((each.version for each in result.packages if each.name == "torch"), None)
    words = [
        f"driver {driver.version}{' (open)' if driver.open_module else ''}" if driver.version else "no NVIDIA driver",
        f"torch {safe(torch.version)}" if torch else (f"torch {safe(installed)} (not asked)" if installed else "no torch"),
        f"NCCL {result.nccl_version}" if result.nccl_version else "no NCCL",
    ]
    return ", ".join(words)


def _facts(result: Any) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(result):
        if value:
            table.add_row(name, safe(value, limit=_LONG))
    return table


def _rows(result: Any) -> Iterator[tuple[str, str]]:
    driver, torch, machine = result.driver, result.torch, result.machine
    models = sorted(set(driver.models))
    yield "GPUs", ", ".join(f"{driver.models.count(model)} x {model}" for model in models)
    yield "CUDA of the driver", driver.cuda or ""
    yield "modules", ", ".join(driver.modules)
    yield "module parameters", ", ".join(f"{name}={value}" for name, value in driver.parameters.items())
    yield "daemons", ", ".join(driver.services)
    if torch is not None:
        yield "torch", f"{torch.version}, CUDA {torch.cuda or 'none'}, built with NCCL {torch.nccl or 'unknown'}"
        yield "architectures", " ".join(torch.arch_list)
    for library in result.nccl_libraries:
        yield "libnccl", f"{library.version or library.error or 'unknown'}  {library.path} ({library.origin})"
    yield "system", f"{machine.system}, kernel {machine.kernel}"
    yield "machine", ", ".join(filter(None, (machine.virtualisation, machine.container and f"in a container ({machine.container})")))
    nodes = f"{len(machine.numa_nodes)} NUMA nodes" if machine.numa_nodes else ""
    governors = ", ".join(f"{name} x {count}" for name, count in machine.governors.items())
    yield "CPUs", ", ".join(filter(None, (str(machine.cpus), machine.cpu_model, nodes, governors)))
    yield "kernel options", " ".join(machine.kernel_options)
    if machine.shm_total_bytes is not None:
        yield "shared memory", f"{machine.shm_total_bytes / 2**30:.2f} GiB, {(machine.shm_free_bytes or 0) / 2**30:.2f} free"
    yield "limits", ", ".join(f"{name} {'unlimited' if limit.soft is None else limit.soft}" for name, limit in machine.limits.items())
    yield "RDMA", ", ".join(machine.infiniband)
    yield "Python", f"{result.python_version}, {result.executable}"


def _settings(title: str, settings: Any) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column(title, style="cyan", overflow="fold")
    table.add_column("value", overflow="fold")
    table.add_column("by", overflow="fold")
    for setting in settings:
        places = f" {', '.join(setting.places)}" if setting.places else ""
        source = setting.source if not setting.source.startswith("conf file") else "conf file"
        table.add_row(
            Text(safe(setting.name), "" if setting.in_force else "dim"),
            safe(setting.value, limit=_LONG) + ("" if setting.in_force else " (not in force)"),
            safe(source + places, limit=_LONG),
        )
    return table
