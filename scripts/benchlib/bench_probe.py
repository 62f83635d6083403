"""Summarise a list of named samples: the benchmark's unit of work.

About what a small diagnostic is: 5 KB of source, 1 KB of parameters, 2 KB of result, and next to no computing, so that
what is measured is the way there and back. It is run as it is by every contender: by rdiag as a probe, by the others
as a plain script (see workload.py).
"""

from __future__ import annotations

import hashlib
import math
import platform
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remote_diag.probe import Context

EFFECTS = ()

STRICT = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}


@dataclass(frozen=True)
class Params:
    """The samples."""

    __pydantic_config__ = STRICT

    names: tuple[str, ...]
    """One name a sample."""
    samples: tuple[float, ...]
    """Values, any unit; as many as there are names."""
    bins: int = 8
    """Number of bins of the histogram."""
    threshold: float = 0.5
    """Samples above it are outliers; same unit as the samples."""

    def __post_init__(self) -> None:
        """Refuse what cannot be summarised."""
        if len(self.names) != len(self.samples):
            raise ValueError("there must be as many names as samples")
        if not self.samples:
            raise ValueError("there must be at least one sample")
        if not 1 <= self.bins <= 100:
            raise ValueError("bins must be 1 to 100")


@dataclass(frozen=True)
class Bin:
    """One bin of the histogram."""

    __pydantic_config__ = STRICT

    lower: float
    """Lower edge, unit of the samples."""
    upper: float
    """Upper edge, unit of the samples."""
    count: int
    """Number of samples in it."""


@dataclass(frozen=True)
class Sample:
    """One sample and how far it is from the others."""

    __pydantic_config__ = STRICT

    name: str
    """Its name."""
    value: float
    """Its value, unit of the samples."""
    deviation: float
    """Distance from the mean, standard deviations; 0 where there is no spread."""
    outlier: bool
    """Whether it is above the threshold."""


@dataclass(frozen=True)
class Result:
    """The summary."""

    __pydantic_config__ = STRICT

    count: int
    """Number of samples."""
    mean: float
    """Mean, unit of the samples."""
    median: float
    """Median, unit of the samples."""
    deviation: float
    """Standard deviation of the population, unit of the samples."""
    smallest: float
    """Smallest sample, unit of the samples."""
    largest: float
    """Largest sample, unit of the samples."""
    histogram: tuple[Bin, ...]
    """Bins of equal width from the smallest to the largest sample."""
    samples: tuple[Sample, ...]
    """The samples in the order they came in."""
    python: str
    """Version of the Python that computed it."""
    digest: str
    """SHA-256 of names and samples: whoever has it knows that the parameters arrived whole."""


def digest(names: tuple[str, ...], samples: tuple[float, ...]) -> str:
    """Return the digest of the parameters, hex."""
    text = "\n".join(f"{name}={value!r}" for name, value in zip(names, samples))
    return hashlib.sha256(text.encode()).hexdigest()


def histogram(samples: tuple[float, ...], bins: int) -> tuple[Bin, ...]:
    """Return ``bins`` bins of equal width; the last one includes its upper edge."""
    low, high = min(samples), max(samples)
    width = (high - low) / bins or 1.0
    counts = [0] * bins
    for value in samples:
        counts[min(bins - 1, int((value - low) / width))] += 1
    return tuple(
        Bin(lower=round(low + index * width, 6), upper=round(low + (index + 1) * width, 6), count=count)
        for index, count in enumerate(counts)
    )


def described(name: str, value: float, mean: float, deviation: float, threshold: float) -> Sample:
    """Return one sample with its distance from the mean."""
    distance = (value - mean) / deviation if deviation else 0.0
    if not math.isfinite(distance):
        distance = 0.0
    return Sample(name=name, value=value, deviation=round(distance, 6), outlier=value > threshold)


def run(params: Params, context: Context) -> Result:
    """Summarise."""
    samples = params.samples
    mean = statistics.fmean(samples)
    deviation = statistics.pstdev(samples)
    result = Result(
        count=len(samples),
        mean=round(mean, 6),
        median=round(statistics.median(samples), 6),
        deviation=round(deviation, 6),
        smallest=min(samples),
        largest=max(samples),
        histogram=histogram(samples, params.bins),
        samples=tuple(
            described(name, value, mean, deviation, params.threshold)
            for name, value in zip(params.names, samples)
        ),
        python=platform.python_version(),
        digest=digest(params.names, samples),
    )
    context.progress(1, 1, unit="summaries")
    return result
