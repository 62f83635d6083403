"""The text in which servers count what they do (Prometheus), and what SGLang and vLLM mean by it.

Names were read in the sources of both. SGLang: ``sglang:`` from 0.4 on; ``spec_accept_rate`` is younger than
``spec_accept_length``. vLLM: engine V1 counts drafts and tokens (``spec_decode_num_*_total``), V0 had gauges of the rate;
``gpu_cache_usage_perc`` became ``kv_cache_usage_perc``.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, NamedTuple

    class Sample(NamedTuple):
        """One line."""

        labels: dict[str, str]
        value: float
else:
    from collections import namedtuple

    Sample = namedtuple("Sample", "labels value")

MAX_SAMPLES = 200_000
MOST = 1e18
"""No server counts as far as that, and none below zero."""
_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+([^\s{}]+)(?:\s+-?\d+)?\s*\Z")
_LABEL = re.compile(r'\s*([A-Za-z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|\Z)')
_RANKS = ("tp_rank", "pp_rank", "moe_ep_rank")


class Metrics:
    """Samples by name.

    Args:
        text: what /metrics says.
    """

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[Sample]] = {}
        self.unread = 0
        """Lines that are none of the format."""
        count = 0
        for line in text.splitlines():
            if not line or line.startswith("#"):
                continue
            count += 1
            match = _LINE.match(line) if len(line) < 10_000 and count <= MAX_SAMPLES else None
            labels = _labels(match[2]) if match else None
            value = _number(match[3]) if match else None
            if match is None or labels is None or value is None:
                self.unread += 1
                continue
            self._samples.setdefault(match[1].replace(":", "_", 1), []).append(Sample(labels, value))

    def __bool__(self) -> bool:
        """Return whether anything was read."""
        return bool(self._samples)

    def has(self, prefix: str) -> bool:
        """Return whether any name begins with ``prefix``; the colon after the server's name may be ``_``."""
        return any(name.startswith(prefix.replace(":", "_", 1)) for name in self._samples)

    def samples(self, *names: str) -> list[Sample]:
        """Return the finite samples of the first of ``names`` that has any, of each engine's first rank only."""
        for name in names:
            found = [sample for sample in self._samples.get(name.replace(":", "_", 1), ()) if abs(sample.value) < MOST]
            if found:
                # All ranks of one engine count the same work. Which rank is an engine's first differs where each has its own.
                first: dict[frozenset[tuple[str, str]], Sample] = {}
                for sample in found:
                    engine = frozenset(label for label in sample.labels.items() if label[0] not in _RANKS)
                    if engine not in first or _rank(sample) < _rank(first[engine]):
                        first[engine] = sample
                return list(first.values())
        return []

    def total(self, *names: str) -> float | None:
        """Return the sum over engines."""
        return self._over(sum, names)

    def largest(self, *names: str) -> float | None:
        """Return the largest value of any engine."""
        return self._over(max, names)

    def mean(self, *names: str) -> float | None:
        """Return the mean of the engines that have a value above zero; 0 if none has."""
        return self._over(lambda values: sum(values) / (sum(1 for value in values if value > 0) or 1), names)

    def label(self, name: str, label: str) -> str | None:
        """Return the label of the first sample that has it."""
        return next((sample.labels[label] for sample in self.samples(name) if label in sample.labels), None)

    def models(self) -> list[str]:
        """Return names of models in labels."""
        return sorted({sample.labels["model_name"] for found in self._samples.values() for sample in found if "model_name" in sample.labels})

    def _over(self, fold: Callable[[list[float]], float], names: tuple[str, ...]) -> float | None:
        found = [sample.value for sample in self.samples(*names)]
        value = float(fold(found)) if found else None
        return value if value is not None and 0 <= value < MOST else None


def _rank(sample: Sample) -> list[tuple[int, str]]:
    ranks = [sample.labels.get(rank, "") for rank in _RANKS]
    return [(len(rank), rank) for rank in ranks]


def _labels(text: str | None) -> dict[str, str] | None:
    found: dict[str, str] = {}
    place = 0
    text = text or ""
    while place < len(text.rstrip()):
        match = _LABEL.match(text, place)
        if match is None:
            return None
        found[match[1]] = match[2]
        place = match.end()
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
