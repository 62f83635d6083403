from __future__ import annotations

import pytest

from probes.lib.comm import bandwidth


@pytest.mark.parametrize(
    ("collective", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0), ("all_reduce", 8, 1.75), ("all_gather", 8, 0.875), ("reduce_scatter", 4, 0.75), ("alltoall", 2, 0.5),
        ("alltoallv", 8, 0.875), ("gather", 8, 0.875), ("scatter", 8, 0.875), ("broadcast", 8, 1.0), ("reduce", 3, 1.0),
        ("sendrecv", 2, 1.0), ("hypercube", 8, 1.0), *[(name, 1, 0.0) for name in bandwidth.FACTORS],
    ],
)  # fmt: skip
def test_the_factors(collective: str, ranks: int, factor: float) -> None:
    assert bandwidth.factor(collective, ranks) == factor


def test_gigabytes_are_decimal() -> None:
    assert bandwidth.algbw_gbs(8_589_934_592, 63_896) == pytest.approx(134.44, abs=0.005)
    assert bandwidth.busbw_gbs("all_reduce", 8, 8_589_934_592, 63_896) == pytest.approx(235.26, abs=0.005)
    assert bandwidth.algbw_gbs(0, 1.0) == 0


@pytest.mark.parametrize("time", [0.0, -1.0, float("nan"), float("inf")])
def test_no_bandwidth_of_no_time(time: float) -> None:
    with pytest.raises(ValueError, match="took"):
        bandwidth.algbw_gbs(8, time)


def test_what_is_none() -> None:
    with pytest.raises(ValueError, match="no collective"):
        bandwidth.factor("all_reduced", 8)
    with pytest.raises(ValueError, match="0 ranks"):
        bandwidth.factor("all_reduce", 0)
    with pytest.raises(ValueError, match="-8 bytes"):
        bandwidth.algbw_gbs(-8, 1.0)


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("AllReduce", "all_reduce"), ("/opt/x/all_reduce_perf", "all_reduce"), ("alltoall_perf_mpi", "alltoall"),
        ("all_to_all", "alltoall"), ("AllToAllv", "alltoallv"), ("send_recv", "sendrecv"), ("reduce-scatter", "reduce_scatter"),
        ("bw_perf", None), ("", None), ("all_reduce_perf.log", None),
    ],
)  # fmt: skip
def test_spellings(spelled: str, name: str | None) -> None:
    assert bandwidth.canonical(spelled) == name
