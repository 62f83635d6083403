"""How a check looks at a GPU, so that a value that is missing never passes for a good one.

A check asks for each value by name. One that is there counts as measured; one that is missing **and should be there**
makes the check ``unknown``. It should be there if the card must have it, if the card reports others of the same
family, or if a sibling reports it: a GeForce without ECC counters is no riddle, a data-centre card whose counter reads
``[Unknown Error]`` is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .judgement import Judgement
from .missing import Missing, known
from .smi_fields import METRICS
from .smi_reading import GpuReading
from .thresholds import Thresholds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Mapping, Sequence

    from .judgement import Scalar
    from .occupancy import GpuUse

WORST_FIRST = ("fail", "degraded", "unknown", "ok", "skipped")
_EXPLAINED = {"not-supported", "not-reported", "deprecated"}
"""Reasons that a card may have for good; every other one is an answer that failed."""

FAMILIES: tuple[frozenset[str], ...] = (
    frozenset({"ecc_enabled", "ecc_uncorrected_volatile", "ecc_corrected_volatile", "ecc_uncorrected_aggregate"}),
    frozenset({"remap_pending", "remap_failure", "remap_correctable", "remap_uncorrectable"}),
    frozenset({"retired_pending", "retired_single_bit", "retired_double_bit"}),
    frozenset({"pcie_width", "pcie_width_max", "pcie_gen", "pcie_gen_max"}),
    frozenset({"power_limit_w", "power_default_limit_w"}),
    frozenset({"fabric_state", "fabric_status"}),
    frozenset({"memory_total_mib", "memory_used_mib"}),
)
"""Values that a card has all of or none."""
ALWAYS = frozenset({"memory_total_mib", "memory_used_mib", "temperature_c", "uuid", "bus_id", "name"})
"""Every card has them, cut up (MIG) or not."""
NOT_OF_A_SHARE = frozenset({"temperature_c"})
"""But a guest that has a share of a card (vGPU) is not told them."""
ALWAYS_SINCE = {"recovery_action": 570, "inforom_valid": 0}
"""First driver (major version) that says it of every card; 0 where none does."""
NOT_PRINTED = "it is not in what was printed; nvidia-smi -q -x prints all that the driver tells"
"""What is advised where a saved answer lacks a value."""
IN_CSV = frozenset(metric.name for metric in METRICS if metric.csv)
CSV_SINCE = 590
"""From this driver on every field that is asked for is known: in saved csv a column that is not there was lost."""
NOT_UNDER_MIG = frozenset(
    {"remap_pending", "remap_failure", "remap_correctable", "remap_uncorrectable", "remap_banks_none", "utilization_pct"}
)


@dataclass
class Surroundings:
    """Where the host stands, as far as it changes what a value means."""

    container: str | None = None
    """docker, podman, kubernetes...; None outside."""
    virtual: str | None = None
    """Hypervisor, where the host is a guest."""
    wsl: bool = False


@dataclass
class Case:
    """One GPU to judge."""

    reading: GpuReading
    siblings: Sequence[GpuReading] = ()
    """The other cards of this host with the same name."""
    thresholds: Thresholds = field(default_factory=Thresholds)
    around: Surroundings = field(default_factory=Surroundings)
    use: GpuUse | None = None
    """How much it is used; None where that could not be found out."""
    saved_csv: bool = False
    """Whether it comes from saved csv, of which nobody knows what was asked."""

    @property
    def subject(self) -> str:
        """How findings name it."""
        return self.reading.describe()

    @property
    def mig(self) -> bool:
        """Whether it is cut up."""
        return self.reading.mig_enabled is True

    @property
    def vgpu(self) -> bool:
        """Whether it is a guest's share of a card."""
        mode, name = self.reading.virtualization_mode, self.reading.name
        return (isinstance(mode, str) and mode.lower().startswith("vgpu")) or (isinstance(name, str) and name.startswith("GRID "))

    @property
    def loaded(self) -> bool | None:
        """Whether it is at work, so that its link and clocks should be up; None where nobody knows."""
        load = self.reading.utilization_pct
        if isinstance(load, Missing):
            return None
        return load >= self.thresholds["gpu.busy_from_pct"].value

    @property
    def driver_major(self) -> int | None:
        """590 for 590.48.01."""
        version = self.reading.driver_version
        head = version.split(".")[0] if isinstance(version, str) else ""
        return int(head) if head.isdigit() else None

    def expected(self, name: str, reason: str) -> bool:
        """Whether a value that is missing for ``reason`` should be there."""
        if reason not in _EXPLAINED:
            return True
        if name in ALWAYS:
            return not (self.vgpu and name in NOT_OF_A_SHARE)
        major = self.driver_major
        if self.saved_csv and reason == "not-reported" and name in IN_CSV and (major is None or major >= CSV_SINCE):
            return True
        if (self.mig and name in NOT_UNDER_MIG) or (name.startswith("ecc_") and self.reading.ecc_enabled is False):
            return False
        if any(_has(sibling, name) and not _cut_otherwise(sibling, self.reading) for sibling in self.siblings):
            return True
        if any(name in family and any(_has(self.reading, other) for other in family) for family in FAMILIES):
            return True
        since = ALWAYS_SINCE.get(name, 0)
        # Without the driver's version nobody knows whether it should say it.
        return since > 0 and not self.vgpu and not self.around.wsl and (major is None or major >= since)


def _cut_otherwise(first: GpuReading, second: GpuReading) -> bool:
    """Whether one of them is cut up (MIG) and the other is not: then they report different things."""
    modes = {mode for mode in (first.mig_enabled, second.mig_enabled) if not isinstance(mode, Missing)}
    return len(modes) == 2


def _has(reading: GpuReading, name: str) -> bool:
    return not isinstance(getattr(reading, name), Missing)


class Checked(NamedTuple):
    """What one check found out about one GPU."""

    check: str
    level: str
    """``ok`` only where something was measured; ``skipped`` where the card has nothing to measure."""
    judgements: list[Judgement]


class Look:
    """One check at work on one GPU.

    Args:
        check: its name.
        case: the GPU.
    """

    def __init__(self, check: str, case: Case) -> None:
        self.check = check
        self.case = case
        self.judgements: list[Judgement] = []
        self._measured = False
        self._missing: dict[str, Missing] = {}

    def number(self, name: str) -> float | None:
        """Return a number; None where there is none, which counts against the check if there should be."""
        value = self._value(name)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def flag(self, name: str) -> bool | None:
        """Return a yes or no, or None as :meth:`number` does."""
        value = self._value(name)
        return value if isinstance(value, bool) else None

    def word(self, name: str) -> str | None:
        """Return a text, or None as :meth:`number` does."""
        value = self._value(name)
        return value if isinstance(value, str) else None

    def _value(self, name: str) -> object:
        value: object = getattr(self.case.reading, name)
        if not isinstance(value, Missing):
            self._measured = True
            return value
        if self.case.expected(name, value.reason):
            self._missing[name] = value
        return None

    def measured(self) -> None:
        """Say that something was looked at that is no metric."""
        self._measured = True

    def say(
        self,
        level: str,
        code: str,
        message: str,
        *,
        value: Scalar = None,
        unit: str | None = None,
        threshold: str | None = None,
        against: Scalar = None,
        source: str | None = None,
        evidence: tuple[str, ...] = (),
        action: str | None = None,
    ) -> None:
        """Note one finding about this GPU.

        Args:
            level: ok, degraded, fail, unknown.
            code: kebab-case.
            message: one sentence.
            value: what was measured.
            unit: of it.
            threshold: name of a threshold of the table that ``value`` was held against.
            against: instead: a value of the card's own.
            source: where ``against`` comes from.
            evidence: lines that support it.
            action: what to do.
        """
        if threshold is not None:
            limit = self.case.thresholds[threshold]
            against, source, unit = limit.value, limit.provenance, unit or limit.unit
        self.judgements.append(
            Judgement(level, code, message, self.case.subject, _plain(value), unit, _plain(against), source, evidence, action)
        )

    def done(self) -> Checked:
        """Return what came of it."""
        if self._missing:
            words = tuple("%s: %s%s" % (name, gap.reason, " (%s)" % gap.text if gap.text else "") for name, gap in self._missing.items())
            told = "%s cannot be told: %s" % (self.check, "; ".join(words))
            self.say(
                "unknown", "%s-unknown" % self.check, told[:300], evidence=words if len(told) > 300 else (),  # say it once
                action=_way_out(gap.reason for gap in self._missing.values()).replace("BUS_ID", known(self.case.reading.bus_id) or "BUS_ID"),
            )  # fmt: skip
        levels = {judgement.level for judgement in self.judgements}
        worst = next((level for level in WORST_FIRST if level in levels), "ok" if self._measured else "skipped")
        return Checked(self.check, worst, self.judgements)


def _plain(value: Scalar) -> Scalar:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _way_out(reasons: object) -> str:
    found = set(reasons)  # type: ignore[call-overload]
    if "not-permitted" in found:
        return "run it as a user who may ask the driver, or as root"
    if "timeout" in found:
        return "look why the driver does not answer: dmesg, ps -eo pid,stat,wchan,cmd | grep nvidia"
    if found == {"not-reported"}:
        return NOT_PRINTED
    return "ask the card alone: nvidia-smi -q -i BUS_ID; look into dmesg if it says the same there"


def run(checks: Mapping[str, Callable[[Look], None]], case: Case, without: Sequence[str] = ()) -> list[Checked]:
    """Run checks on one GPU, but for those in ``without``, which are skipped."""
    results = []
    for name, check in checks.items():
        if name in without:
            results.append(Checked(name, "skipped", []))
            continue
        look = Look(name, case)
        check(look)
        results.append(look.done())
    return results
