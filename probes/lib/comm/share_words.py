"""What the shares of communication mean, in words."""

from __future__ import annotations

from probes.lib.legible import legible

TYPE_CHECKING = False
if TYPE_CHECKING:
    from probes.comm_share import Collective

MAX_PROPERTY = 100
"""Characters of a property of a trace that are kept."""
CPU_STEPS = ("the steps are the program's: what it asked for may run on the GPU later, in the next step or in none",)
"""Said of steps that are on the clock of the program."""


def called(collective: str) -> str:
    """Return how a collective is called in a sentence."""
    return "communication without a name" if collective == "unnamed" else collective


def boundness(row: Collective, small_bytes: int) -> str:
    """Return whether a collective is bound by latency or by bandwidth, as far as sizes were recorded."""
    total = row.latency_bound_us + row.bandwidth_bound_us + row.unsized_us or 1.0
    text = "%s (%s): %d calls, median %s us" % (row.name, row.family, row.calls, "-" if row.p50_us is None else "%.1f" % row.p50_us)
    if row.unsized_us >= total:
        return text + "; sizes were not recorded (CUDA graphs leave them out), so latency and bandwidth cannot be told apart"
    return text + "; %.0f %% of their time in messages up to %d bytes, %.0f %% in larger ones, %.0f %% of unknown size" % (
        100 * row.latency_bound_us / total, small_bytes, 100 * row.bandwidth_bound_us / total, 100 * row.unsized_us / total,
    )  # fmt: skip


def advice(leader: Collective) -> str:
    """Return what helps against too much of a collective."""
    if leader.latency_bound_us > leader.bandwidth_bound_us and leader.latency_bound_us >= leader.unsized_us:
        return (
            "messages are small: measure their latency with rdiag nccl, then fewer or fused calls, a one-shot all-reduce,"
            " or less tensor parallelism help; more bandwidth does not"
        )
    if leader.bandwidth_bound_us >= leader.unsized_us:
        return "messages are large: compare their bandwidth with rdiag nccl, look at rdiag topo, and overlap them with computation"
    return "record sizes (a trace without CUDA graphs) to tell latency from bandwidth; rdiag nccl measures both on this host"


def count_of(value: object) -> int | None:
    """Return a count that a trace names; None for anything else."""
    return value if type(value) is int and 0 <= value < 1 << 31 else None


def text_of(value: object) -> str | None:
    """Return a text that a trace names, cut to MAX_PROPERTY characters; None for anything else."""
    return legible(value[:MAX_PROPERTY]) if isinstance(value, str) else None
