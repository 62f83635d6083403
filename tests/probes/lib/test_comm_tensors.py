"""Contents of collectives: what must arrive is known exactly, and every way to lose some of it is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from probes.lib.comm import plan
from probes.lib.comm.tensors import Collective, period

RANKS = 4


def make(name: str, dtype: str, size: int, ranks: int = RANKS) -> list[Any]:
    (whole,) = plan.possible([size], name, ranks, plan.ELEMENT[dtype])
    group = [
        Collective(torch, name, dtype, whole, rank=rank, ranks=ranks, device=torch.device("cpu"), lists=True)
        for rank in range(ranks)
    ]
    for each in group:
        each.fill()
    return group


def carry_out(name: str, group: list[Any]) -> None:
    """Do what the collective means, without a group: the definition, in plain torch."""
    inputs = [each._in.clone() for each in group]
    ranks = len(group)
    part = group[0]._part
    for rank, each in enumerate(group):
        if name in ("all_reduce", "reduce"):
            each._in.copy_(sum(inputs[1:], inputs[0]) if name == "all_reduce" or rank == 0 else inputs[rank])
        elif name == "all_gather":
            each._out.copy_(torch.cat(inputs))
        elif name == "reduce_scatter":
            each._out.copy_(sum(inputs[1:], inputs[0])[rank * part : (rank + 1) * part])
        elif name == "alltoall":
            each._out.copy_(torch.cat([one[rank * part : (rank + 1) * part] for one in inputs]))
        elif name == "broadcast":
            each._in.copy_(inputs[0])
        else:
            each._out.copy_(inputs[(rank - 1) % ranks])


@pytest.mark.parametrize("dtype", list(plan.ELEMENT))
@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast", "reduce", "sendrecv"])
def test_what_arrives_is_right_and_nothing_else(name: str, dtype: str) -> None:
    group = make(name, dtype, 4096)
    if name != "reduce":
        # Before the call something is missing everywhere (a root has its own already).
        assert all(each.wrong() > 0 for each in (group[1:] if name == "broadcast" else group))
    carry_out(name, group)
    assert [each.wrong() for each in group] == [0] * RANKS
    group[0]._out[5] += 1
    group[0]._out[-1] += 1
    assert group[0].wrong() == 2


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "uint8"])
def test_sums_are_exact(dtype: str, ranks: int) -> None:
    group = make("all_reduce", dtype, 8192, ranks)
    carry_out("all_reduce", group)
    assert group[0].wrong() == 0
    assert period(dtype, ranks) > 1


@pytest.mark.parametrize("distance", [1, 2, 64, 512, 1024, 4096])
def test_a_block_that_lands_elsewhere_is_seen(distance: int) -> None:
    (first, *_) = group = make("all_reduce", "bf16", 32_768, 8)
    carry_out("all_reduce", group)
    first._in.copy_(first._in.roll(distance))
    assert first.wrong() > 0


def test_a_rank_that_did_not_take_part_is_seen() -> None:
    group = make("all_reduce", "fp32", 4096)
    inputs = [each._in.clone() for each in group]
    group[0]._in.copy_(inputs[0] + inputs[1] + inputs[2])
    assert group[0].wrong() > 0
    # Nor may one take part twice in the place of another.
    group[0]._in.copy_(inputs[0] + inputs[1] + inputs[2] + inputs[2])
    assert group[0].wrong() > 0


def test_not_a_number_is_wrong() -> None:
    group = make("all_reduce", "bf16", 4096)
    carry_out("all_reduce", group)
    group[1]._in[7] = float("nan")
    assert group[1].wrong() == 1


def test_large_buffers_are_compared_to_their_end() -> None:
    group = make("broadcast", "uint8", (3 << 20) + 17, 2)
    carry_out("broadcast", group)
    assert [each.wrong() for each in group] == [0, 0]
    group[1]._in[-1] += 1
    assert group[1].wrong() == 1


def test_timing_starts_from_zeros() -> None:
    group = make("all_reduce", "fp16", 4096)
    group[0].clear()
    assert float(group[0]._in.abs().sum()) == 0
