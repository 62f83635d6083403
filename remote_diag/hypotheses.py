"""The hypotheses of ``rdiag triage``: probe files in ``hypotheses`` folders, and what each declares of itself.

A hypothesis is a probe like any other, with three promises more:

* the fields of its ``Params`` are named after entries of the case (:mod:`remote_diag.triage_case`): what it does not
  declare it does not get, and without what it requires it is not run;
* its ``Result`` has the fields of :data:`RESULT_FIELDS`;
* the constant ``HYPOTHESIS`` says what looking costs and how likely the cause is::

      HYPOTHESIS = {"cost_s": 2.0, "likelihood": 0.3}

The docstring's first line is the claim; the file's name is the id. Files are found beside the shipped ones in
``./probes/hypotheses`` and in the folder ``hypotheses`` of every ``--probe-path``; the later one of a name wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ConfigError

if TYPE_CHECKING:
    from .probe import Probe

FOLDER = "hypotheses"
"""Name of the folders that are searched."""
RESULT_FIELDS = ("verdict", "evidence", "explains", "accuracy", "loss", "next_command", "missing")
"""What every hypothesis answers."""
_EXAMPLE = 'HYPOTHESIS = {"cost_s": 2.0, "likelihood": 0.3}   # seconds it takes; how often it is the cause, 0 to 1'


@dataclass(frozen=True)
class Declared:
    """One hypothesis, ready to be run."""

    id: str
    claim: str
    cost_s: float
    """What looking costs, seconds."""
    likelihood: float
    """How often this is the cause, above 0 to 1: an estimate made before anything was looked at."""
    probe: Probe[Any, Any]

    @property
    def requires(self) -> tuple[str, ...]:
        """Entries of the case without which it cannot be run."""
        return tuple(field.name for field in self.probe.params_fields if field.required)


@dataclass(frozen=True)
class Broken:
    """A file in a folder of hypotheses that is none."""

    id: str
    error: ConfigError


def find_all(probe_paths: Sequence[Path] = ()) -> tuple[list[Declared], list[Broken]]:
    """Return all hypotheses in the order in which they are looked at, and the files that are broken.

    Args:
        probe_paths: as for :func:`remote_diag.discovery.find`.
    """
    from .discovery import listing

    declared: list[Declared] = []
    broken: list[Broken] = []
    for listed in listing(probe_paths, below=FOLDER):
        if listed.probe is None:
            broken.append(Broken(listed.found.name, listed.error or ConfigError(f"{listed.found.path}: cannot be loaded")))
            continue
        try:
            declared.append(declare(listed.probe))
        except ConfigError as error:
            broken.append(Broken(listed.found.name, error))
    return in_order(declared), broken


def declare(probe: Probe[Any, Any]) -> Declared:
    """Return what the probe declares; raise ConfigError, with an example, when it is no hypothesis."""
    given = getattr(probe.module, "HYPOTHESIS", None)
    if not isinstance(given, dict) or set(given) != {"cost_s", "likelihood"}:
        raise ConfigError(f"{probe.path}: HYPOTHESIS is missing or is not a dict of cost_s and likelihood", hint=_EXAMPLE)
    cost, likelihood = given["cost_s"], given["likelihood"]
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (cost, likelihood))
    if not numbers or not 0 < cost < float("inf") or not 0 < likelihood <= 1:
        raise ConfigError(
            f"{probe.path}: HYPOTHESIS: cost_s must be above 0, likelihood above 0 and at most 1", hint=_EXAMPLE
        )
    missing = [name for name in RESULT_FIELDS if name not in {field.name for field in probe.result_fields}]
    if missing:
        raise ConfigError(
            f"{probe.path}: Result lacks {', '.join(missing)}",
            hint=f"the Result of a hypothesis has {', '.join(RESULT_FIELDS)}; see the shipped ones",
        )
    return Declared(probe.name, probe.summary.rstrip("."), float(cost), float(likelihood), probe)


def in_order(declared: Sequence[Declared]) -> list[Declared]:
    """Return hypotheses in the order that is expected to meet the cause soonest: by cost for each chance of a hit."""
    return sorted(declared, key=lambda one: (one.cost_s / one.likelihood, one.id))
