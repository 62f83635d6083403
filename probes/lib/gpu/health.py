"""The verdict: every check on every GPU, what the GPUs say together, and what the host says about them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from . import census, kernel_log_findings, nvlinks, owners, surroundings
from .checks import GPU_CHECKS
from .collect import gpus_of
from .judgement import Judgement
from .looking import NOT_PRINTED, WORST_FIRST, Case, Checked, run
from .missing import known
from .siblings import siblings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Iterable, Sequence

    from .census import Expected
    from .collect import Seen
    from .occupancy import GpuUse
    from .owners import Holder
    from .smi_reading import GpuReading
    from .thresholds import Thresholds

PER_GPU = {**GPU_CHECKS, "siblings": siblings}
HOST_CHECKS = ("count", "driver", "kernel-log", "processes", "nvlink", "limits", "modules", "numa", "acs", "iommu")
CHECKS = (*PER_GPU, *HOST_CHECKS)
"""Every name that ``--without`` takes."""
_BDF = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\Z")


@dataclass
class GpuReport:
    """One GPU's verdict."""

    reading: GpuReading
    status: str
    """ok, degraded, fail or unknown."""
    checks: dict[str, str]
    """Level of each check, by name."""
    use: GpuUse | None

    @property
    def free(self) -> bool | None:
        """Whether nobody uses it; None where that could not be found out."""
        if self.use is None:
            return None
        if self.use.processes:
            return False
        return self.use.free if self.use.idle is not None and self.use.memory_total_mib is not None else None


@dataclass
class Report:
    """The host's verdict."""

    gpus: list[GpuReport] = field(default_factory=list)
    checks: dict[str, str] = field(default_factory=dict)
    """Level of each check about the host, by name."""
    judgements: list[Judgement] = field(default_factory=list)
    """What there is to tell, the worst first."""
    holders: list[Holder] | None = None


def judge(
    seen: Seen,
    thresholds: Thresholds,
    expected: Expected | None = None,
    without: Sequence[str] = (),
    *,
    root: str = "/",
) -> Report:
    """Judge what was seen.

    Args:
        seen: everything that was found out.
        thresholds: what values are held against.
        expected: how many GPUs there should be; None where nobody said.
        without: names of checks that are left out, and count as skipped.
        root: where the host's files are.
    """
    everybody = owners.holders(seen)
    report = Report(holders=everybody)
    told: list[Judgement] = []
    for reading in seen.readings:
        others = [other for other in seen.readings if other is not reading and known(other.name) == known(reading.name) is not None]
        use = owners.use_of(reading, seen, everybody)
        case = Case(reading, others, thresholds, seen.around, use, saved_csv=seen.parsed and reading.source == "csv")
        results = _of_gpu(case, without)
        told += [judgement for result in results for judgement in result.judgements]
        report.gpus.append(GpuReport(reading, "unknown", {result.check: result.level for result in results}, use))
    told = _lacking_once(told) if len(seen.readings) > 1 and seen.source == "query_gpu_csv" else told
    for name, check in _host_checks(seen, report, thresholds, expected, root).items():
        judgements = [] if name in without else check()
        told += judgements
        report.checks[name] = _worst(judgement.level for judgement in judgements) if judgements else "skipped"
    _assign(report, told)
    report.judgements = sorted(_without_repetition(told), key=lambda judgement: WORST_FIRST.index(judgement.level))
    return report


def _lacking_once(told: Sequence[Judgement]) -> list[Judgement]:
    """Say once what no row of a saved table has: its columns are the same for every GPU."""
    found: list[Judgement] = []
    subjects: dict[tuple[str, str], list[str | None]] = {}
    for item in told:
        if item.action != NOT_PRINTED:
            found.append(item)
            continue
        alike = subjects.setdefault((item.code, item.message), [])
        alike.append(item.subject)
        if len(alike) == 1:
            found.append(item)
    return [
        item if len(subjects.get((item.code, item.message), ())) < 2 or item.action != NOT_PRINTED
        else item._replace(subject=None, value=len(subjects[item.code, item.message]), unit="GPUs")
        for item in found
    ]  # fmt: skip


def _of_gpu(case: Case, without: Sequence[str]) -> list[Checked]:
    results = run(PER_GPU, case, without)
    reached = next((result for result in results if result.check == "reachable"), None)
    if reached is None or not any(judgement.code in {"gpu-lost", "reading-damaged"} for judgement in reached.judgements):
        return results
    # Of a card that is not reached nothing else is known: that is one finding, not twenty.
    told = [judgement for judgement in reached.judgements if judgement.code != "reachable-unknown"]
    return [
        Checked(result.check, result.level, told) if result is reached
        else result if result.level == "skipped" else Checked(result.check, "unknown", [])
        for result in results
    ]  # fmt: skip


def _worst(levels: Iterable[str]) -> str:
    there = set(levels)
    return next((level for level in WORST_FIRST if level in there), "skipped")


def _host_checks(
    seen: Seen, report: Report, thresholds: Thresholds, expected: Expected | None, root: str
) -> dict[str, Callable[[], list[Judgement]]]:
    checks: dict[str, Callable[[], list[Judgement]]] = {
        "count": lambda: census.count(seen, expected),
        "driver": lambda: census.driver(seen),
        "processes": lambda: _processes(seen, report),
    }
    if seen.parsed:
        return checks
    buses = [bus for bus in (known(gpu.reading.bus_id) for gpu in report.gpus) if bus is not None]
    checks["nvlink"] = lambda: nvlinks.judge(seen)
    checks["kernel-log"] = lambda: _kernel_log(seen, root)
    checks["limits"] = lambda: surroundings.judge_limits(thresholds, root) if buses else []
    checks["modules"] = lambda: surroundings.judge_modules(len(buses) > 1, root) if buses else []
    checks["numa"] = lambda: surroundings.judge_numa(buses, root) if buses else []
    log = seen.log.contents if seen.log is not None else None
    bare = seen.around.virtual is None and not seen.around.wsl
    checks["iommu"] = lambda: surroundings.judge_iommu(buses, log.iommu_domain if log is not None else None, root) if len(buses) > 1 and bare else []
    checks["acs"] = lambda: _acs(seen, buses, root) if len(buses) > 1 else []
    return checks


def _kernel_log(seen: Seen, root: str) -> list[Judgement]:
    if seen.log is None or (not seen.readings and not gpus_of(seen.devices) and seen.module is None):
        return []
    names = {bus: reading.describe() for reading in seen.readings for bus in [known(reading.bus_id)] if bus is not None}
    for bus in gpus_of(seen.devices):
        names.setdefault(bus, "gpu ? %s" % bus)
    # An error of a slot's bridge is an error of the link to what is below it.
    links = {bridge: "bridge %s" % bridge for bridge in _bridges(names, root) if bridge not in names}
    return kernel_log_findings.judge(seen.log, names or None, links=links)


def _processes(seen: Seen, report: Report) -> list[Judgement]:
    told = []
    if seen.parsed and seen.processes is None:
        return []
    if seen.processes_why or (report.gpus and report.holders is None):
        told.append(
            Judgement(
                "unknown", "processes-unknown", "nobody can tell who is on the GPUs", evidence=(seen.processes_why or "not asked",),
                action="run on the host: nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv",
            )
        )  # fmt: skip
    dead = [holder for holder in report.holders or () if holder.alive is False]
    for holder in dead:
        gpu = next((one.reading.describe() for one in report.gpus if holder.uuid == known(one.reading.uuid)), None)
        told.append(
            Judgement(
                "degraded", "process-gone", "process %d (%s) has ended and still holds the GPU" % (holder.pid, holder.name), gpu, holder.pid,
                action="fuser -v /dev/nvidia* as root; reset the GPU when it is idle",
            )
        )  # fmt: skip
    if not told and report.holders is not None and report.gpus:
        busy = [gpu for gpu in report.gpus if gpu.use is not None and gpu.use.processes]
        users = sorted({holder.user or "somebody not seen from here" for holder in report.holders})
        message = "nobody computes on the GPUs" if not busy else "%d of %d GPUs are in use, by %s" % (len(busy), len(report.gpus), ", ".join(users))
        told.append(Judgement("ok", "processes", message, None, len(report.holders), "processes"))
    return told


def _bridges(buses: Iterable[str], root: str) -> list[str]:
    """Return the bridges and switches above some devices, as the folders of sysfs lie in one another."""
    found: dict[str, None] = {}
    for bus in buses:
        path = os.path.realpath(os.path.join(root, "sys/bus/pci/devices", bus))
        found.update((part, None) for part in path.split("/") if _BDF.match(part) and part != bus)
    return list(found)


def _acs(seen: Seen, buses: Sequence[str], root: str) -> list[Judgement]:
    """Traffic between GPUs below one switch must not be sent up to the root. In a guest it must: nothing to judge there."""
    if seen.devices is None or seen.around.virtual is not None or seen.around.wsl:
        return [Judgement("skipped", "acs", "ACS cannot be judged here", evidence=(seen.devices_why or "a virtual machine",))]
    looked = [seen.devices[bridge] for bridge in _bridges(buses, root) if bridge in seen.devices]
    if not looked or all(device.denied for device in looked):
        why = "lspci -vvv needs root for it" if looked else "the bridges above the GPUs are not visible"
        return [Judgement("skipped", "acs", "ACS cannot be judged: %s" % why, action="run rdiag topo as root for it")]
    on = [device.bus_id for device in looked if device.acs is not None and device.acs.redirects]
    if on:
        return [
            Judgement(
                "degraded", "acs-redirect", "bridges above the GPUs send traffic between them up to the root (ACS)", None, len(on), "bridges",
                evidence=tuple(on[:8]), action="switch ACS off in the BIOS, or with setpci, on a host that passes no GPU on to a guest",
            )
        ]  # fmt: skip
    return [Judgement("ok", "acs", "no bridge above the GPUs redirects traffic between them")]


def _assign(report: Report, told: Sequence[Judgement]) -> None:
    """Give each GPU its status: the worst of its own checks and of what else is said about it."""
    for gpu in report.gpus:
        bus = known(gpu.reading.bus_id)
        about = [item.level for item in told if item.subject is not None and (item.subject == gpu.reading.describe() or (bus and bus in item.subject.split()))]
        levels = [level for level in (*gpu.checks.values(), *about) if level != "skipped"]
        worst = _worst(levels)
        gpu.status = "unknown" if worst == "skipped" else worst


def _without_repetition(told: Sequence[Judgement]) -> list[Judgement]:
    found: list[Judgement] = []
    for judgement in told:
        if judgement.level != "skipped" and any((judgement.code, judgement.subject) == (other.code, other.subject) and judgement.message == other.message for other in found):
            continue
        found.append(judgement)
    return found
