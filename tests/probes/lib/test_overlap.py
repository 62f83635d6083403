from __future__ import annotations

import math
import tempfile
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probes.lib.comm import lengths, overlap, trace_shares
from probes.lib.comm.lengths import Calls, extremes, of, percentile
from probes.lib.comm.overlap import Events, Share, Union, clipped, union
from probes.lib.comm.steps import Windows
from probes.lib.comm.trace_shares import DeviceShares, Kind, Work

MOMENTS = 60
"""Times are whole numbers below this, so that an oracle can look at each unit of time by itself."""
_PART = st.tuples(st.integers(0, MOMENTS - 1), st.integers(0, 20)).map(lambda pair: (pair[0], min(MOMENTS, sum(pair))))
_PARTS = st.lists(_PART, max_size=25)
KINDS = [Kind("gemm", None, None, None, None, None), Kind("nccl", "nccl", "all_reduce", None, None, None),
         Kind("custom", "custom", "all_gather", None, None, None), Kind("copy", None, None, None, None, None)]  # fmt: skip


def moments(parts: Sequence[tuple[float, float]]) -> set[int]:
    """Return the units of time in which any of ``parts`` runs."""
    return {moment for start, end in parts for moment in range(int(start), int(end))}


@settings(deadline=None, max_examples=300)
@given(_PARTS, _PARTS, _PARTS, _PARTS, _PARTS, st.integers(1, 7))
def test_every_measure_is_that_of_a_brute_force_count(  # noqa: PLR0917
    gemm: list[tuple[int, int]],
    nccl: list[tuple[int, int]],
    custom: list[tuple[int, int]],
    copies: list[tuple[int, int]],
    windows: list[tuple[int, int]],
    run: int,
) -> None:
    before, overlap.RUN = overlap.RUN, run
    try:
        work = Work()
        for key, (target, parts) in enumerate(
            ((work.compute, gemm), (work.communication, nccl), (work.communication, custom), (work.copies, copies))
        ):
            for start, end in parts:
                target.add(start, end, key)
        steps = Windows("annotation", "cpu", [(float(start), float(end)) for start, end in windows])
        shares = DeviceShares(work, KINDS, steps)
    finally:
        overlap.RUN = before
    within = moments(windows)
    computing, all_reduce, all_gather = (moments(parts) & within for parts in (gemm, nccl, custom))
    communicating = all_reduce | all_gather
    assert shares.compute_us == len(computing)
    assert shares.copies_us == len(moments(copies) & within)
    assert shares.all.total == len(communicating)
    assert shares.all.exposed == len(communicating - computing)
    assert shares.busy_us == len(computing | communicating | (moments(copies) & within))
    for (family, name), covered in ((("nccl", "all_reduce"), all_reduce), (("custom", "all_gather"), all_gather)):
        share = shares.collectives.get((family, name), Share())
        assert (share.total, share.exposed) == (len(covered), len(covered - computing))
    # Each step by itself, whatever overlaps or touches it.
    own = [moments([step]) for step in sorted(windows) if step[1] > step[0]]
    assert [list(found) for found in shares.all.shares()] == [
        [len(parts & step) / len(step) for step in own] for parts in (communicating, communicating - computing)
    ]
    begun = [(start, end) for start, end in nccl if any(begin <= start < finish for begin, finish in windows)]
    rows = shares.by_name(KINDS)
    assert rows.get(("nccl", "nccl"), (0, 0.0))[0] == len(begun)
    assert rows.get(("nccl", "nccl"), (0, 0.0))[1] == sum(len(moments([part]) & within) for part in nccl)
    if 1 in shares.calls:
        assert sorted(shares.calls[1].recent) == sorted(end - start for start, end in begun)


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 50)), max_size=300), st.integers(1, 20))
def test_events_come_back_by_their_start(parts: list[tuple[int, int]], run: int) -> None:
    before, overlap.RUN = overlap.RUN, run
    try:
        events = Events()
        for key, (start, length) in enumerate(parts):
            events.add(start, start + length, key)
        assert events.count == len(parts)
        drained = list(events.drain())
    finally:
        overlap.RUN = before
    assert sorted(drained) == sorted((start, start + length, key) for key, (start, length) in enumerate(parts))
    assert [event[0] for event in drained] == sorted(event[0] for event in drained)
    assert list(events.drain()) == []


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 50)), max_size=300), st.integers(1, 20), st.integers(0, 100), st.integers(1, 9))
def test_events_come_back_from_a_file_too(parts: list[tuple[int, int]], run: int, room: int, block: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "RUN", run)
        patch.setattr(overlap, "_BLOCK", block)
        scratch = overlap.Scratch(folder, room)
        several = [Events(scratch), Events(scratch)]
        for key, (start, length) in enumerate(parts):
            several[key % 2].add(start, start + length, key)
        for place, events in enumerate(several):
            drained = list(events.drain())
            expected = [(start, start + length, key) for key, (start, length) in enumerate(parts) if key % 2 == place]
            assert sorted(drained) == sorted(expected)
            assert [event[0] for event in drained] == sorted(event[0] for event in drained)


def test_without_a_place_for_the_file_events_stay_in_memory(tmp_path: Path) -> None:
    events = Events(overlap.Scratch(str(tmp_path / "absent"), 0))
    events.add(1, 2, 3)
    assert list(events.drain()) == [(1, 2, 3)]


@given(_PARTS, _PARTS)
def test_what_is_known_only_a_little_ahead_covers_the_same(parts: list[tuple[int, int]], asked: list[tuple[int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "_BLOCK", 1)
        ahead = overlap.Ahead((float(start), float(end), 0) for start, end in sorted(parts))
        for begin, end in sorted(asked):
            ahead.forget(begin)
            for start in (begin, min(begin + 2, end)):
                assert ahead.covered(start, end) == len(moments(parts) & moments([(start, end)]))
        assert ahead.total() == len(moments(parts))


def test_memory_does_not_grow_with_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "RUN", 1000)
    monkeypatch.setattr(trace_shares, "PENDING", 1000)
    peaks = []
    for count in (20_000, 200_000):
        tracemalloc.start()
        work = Work(overlap.Scratch(str(tmp_path), 0))
        for place in range(count):
            (work.compute if place % 8 == 0 else work.communication).add(2.0 * place, 2.0 * place + 1, 0 if place % 8 == 0 else 1)
        shares = DeviceShares(work, KINDS, Windows("span", "gpu", [(0.0, 2.0 * count)]))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert (shares.all.total, shares.compute_us, shares.busy_us) == (count * 7 / 8, count / 8, count)
        assert sum(map(len, shares.calls.values())) == count * 7 / 8
    # A few bytes about each run stay.
    assert peaks[1] < peaks[0] + 500_000


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=300), st.floats(0, 1))
def test_percentiles_of_many_are_those_of_sorting(values: list[float], share: float) -> None:
    expected = percentile(of(values), share)
    assert expected == sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(lengths, "_SORTED", 5)
        patch.setattr(lengths, "_BUCKETS", 7)
        patch.setattr(overlap, "RUN", 3)
        scratch = overlap.Scratch(folder)
        # In two collections, each in the file in parts.
        several = [Calls(), Calls()]
        for place, value in enumerate(values):
            several[place % 2].recent.append(value)
            if place % 11 == 0:
                several[place % 2].store(scratch)
        assert percentile(several, share) == expected
        assert extremes(several) == (min(values), max(values))
        assert sum(map(len, several)) == len(values)


@given(_PARTS, _PARTS)
def test_parts_keep_the_order_of_starts(parts: list[tuple[int, int]], windows: list[tuple[int, int]]) -> None:
    events = sorted((float(start), float(end), key) for key, (start, end) in enumerate(parts))
    found = list(clipped(events, union(windows)))
    assert [part[0] for part in found] == sorted(part[0] for part in found)


@given(_PARTS, _PART)
def test_a_union_covers_what_it_holds(parts: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    whole = Union()
    for start, end in sorted(parts):
        whole.add(start, end)
    assert whole.total == len(moments(parts))
    assert whole.covered(*asked) == len(moments(parts) & moments([asked]))


def test_a_long_wait_beside_many_short_kernels_takes_no_long_time() -> None:
    work = Work()
    work.communication.add(0, 200_000, 1)
    for place in range(50_000):
        work.communication.add(4 * place, 4 * place + 2, 2)
        work.compute.add(4 * place + 1, 4 * place + 3, 0)
    shares = DeviceShares(work, KINDS, Windows("span", "gpu", [(0.0, 200_000.0)]))
    assert (shares.all.total, shares.all.exposed) == (200_000, 100_000)
    assert shares.collectives["custom", "all_gather"].exposed == 50_000


@pytest.mark.parametrize(("share", "length"), [(0.0, 1), (0.5, 50), (0.99, 99), (1.0, 100)])
def test_percentiles_are_nearest_rank(share: float, length: float) -> None:
    assert percentile(of(float(value) for value in range(100, 0, -1)), share) == length
    assert percentile([Calls()], share) is None
