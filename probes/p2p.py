"""Copy between all pairs of GPUs, and between each GPU and the host: do the bytes really arrive?

What the driver grants (peer access) is only a promise, and has been given where data was lost. So every pair moves known
bytes, in both directions, and what arrived is compared; then latency and bandwidth are taken, and those of pinned memory
of the host to each GPU and back. Copies are made by a process of their own with a time limit a pair. Refuses to start
while a GPU is busy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from remote_diag.probe import Context

EFFECTS = ("runs-commands", "cuda")

Outcome = Literal["ok", "wrong", "hang", "crashed", "error", "not-run"]


@dataclass(frozen=True)
class Params:
    """What to copy."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    gpus: tuple[int, ...] = ()
    """Indices of GPUs as torch counts them, in the order of bus ids; nothing: all."""
    size_bytes: int = 67_108_864
    """Bytes of a copy whose bandwidth is taken, 1 KiB to 1 GiB."""
    host: bool = True
    """Whether copies from and to pinned memory of the host are made too."""
    pair_timeout_s: float = 30.0
    """Seconds that one pair may take, 1 to 600, before it counts as hanging."""
    thresholds: dict[str, float] = field(default_factory=dict)
    """Thresholds in place of the shipped ones, by their name in thresholds.json."""
    thresholds_from: str = ""
    """The file that they are from, as findings name it."""

    def __post_init__(self) -> None:
        """Check what can be checked without the host."""
        if len(set(self.gpus)) != len(self.gpus) or any(not 0 <= gpu < 64 for gpu in self.gpus):
            raise ValueError("gpus must be different indices from 0 to 63")
        if not 1024 <= self.size_bytes <= 1 << 30:
            raise ValueError("size_bytes must be 1 KiB to 1 GiB")
        if not 1 <= self.pair_timeout_s <= 600:
            raise ValueError("pair_timeout_s must be 1 to 600")


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    index: int
    """As torch counts them."""
    name: str
    """As the driver tells it."""
    bus_id: str | None
    """Such as 0000:1b:00.0; null where torch does not say."""
    uuid: str | None
    """GPU-...; null where torch does not say."""


@dataclass(frozen=True)
class Pair:
    """Copies from one GPU to another; with a single GPU, within its memory."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    source: int
    """Index of the GPU that bytes come from."""
    target: int
    """Index of the GPU that they go to."""
    outcome: Outcome
    """What became of it: wrong as soon as one byte is."""
    text: str
    """What went wrong, in words; empty when nothing did."""
    can_access: bool | None
    """Whether the driver grants peer access; null within one GPU or where it was not asked."""
    wrong_bytes: int | None
    """Bytes that arrived with another value, of two rounds of 4 B and of up to 16 MiB; null when that is not known."""
    latency_us: float | None
    """Microseconds of a copy of 4 bytes, one after the other, launch included."""
    bandwidth_gbs: float | None
    """GB/s (1e9 bytes) in this direction alone."""
    both_ways_gbs: float | None
    """GB/s of both directions together at the same time; told for the pair that begins with the lower index."""


@dataclass(frozen=True)
class HostLink:
    """Copies between pinned memory of the host and one GPU."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    gpu: int
    """Index."""
    outcome: Outcome
    """The worse one of both directions."""
    text: str
    """What went wrong, in words; empty when nothing did."""
    wrong_bytes: int | None
    """Bytes that arrived with another value, in both directions; null when that is not known."""
    h2d_gbs: float | None
    """GB/s from the host to the GPU."""
    d2h_gbs: float | None
    """GB/s from the GPU to the host."""


@dataclass(frozen=True)
class Result:
    """All copies."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    gpus: tuple[Gpu, ...]
    """Those that took part."""
    pairs: tuple[Pair, ...]
    """Every ordered pair."""
    host_links: tuple[HostLink, ...]
    """Each GPU; empty when the host was left out."""
    complete: bool
    """Whether every copy was made, whatever came of it."""
    correctness: Literal["ok", "wrong", "not_checked"]
    """wrong as soon as one byte is; ok only if all arrived everywhere."""
    torch_version: str | None
    """Version of torch."""


def run(params: Params, context: Context) -> Result:
    """Copy, and put what came of it into the result."""
    from probes.lib.comm import p2p

    return build_result(p2p.measure(context, **vars(params)))


def build_result(report: dict[str, Any]) -> Result:
    """Return the result whose fields are those of ``report``, nested objects as dicts."""
    return Result(
        **{
            **report,
            "gpus": tuple(Gpu(**gpu) for gpu in report["gpus"]),
            "pairs": tuple(Pair(**pair) for pair in report["pairs"]),
            "host_links": tuple(HostLink(**link) for link in report["host_links"]),
        }
    )
