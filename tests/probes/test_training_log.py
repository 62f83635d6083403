from __future__ import annotations

import math
import random
import tracemalloc
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probes.lib.training_dialects import DIALECTS
from probes.lib.training_log import MAX_LINE, Event, Milestone, Point, Reader
from probes.lib.training_milestones import FAULTS
from probes.lib.training_series import MAX_SERIES, SPREAD, Gathered, Series
from probes.lib.training_values import Metric, canonical, number, read_mapping, scan_pairs
from tests.support.training_logs import MILESTONES, WRITERS, Expected, Written, wrapped


def read(*chunks: bytes) -> tuple[list[Event], Reader]:
    reader = Reader()
    events = [event for chunk in chunks for event in reader.feed(chunk)]
    return events + reader.finish(), reader


def points(data: bytes) -> list[Point]:
    events, _ = read(data)
    return [event for event in events if isinstance(event, Point)]


def found(events: Iterable[Event]) -> list[Expected]:
    return [
        Expected(point.metric, point.position, point.value, point.split, point.step, point.epoch)
        for point in events
        if isinstance(point, Point)
    ]


def written(dialect: str, count: int = 4, seed: int = 0) -> Written:
    source = random.Random(seed)  # noqa: S311 - reproducible, not secret
    out = Written()
    for n in range(1, count + 1):
        more = WRITERS[dialect](source, n)
        out.lines += more.lines
        out.expected += more.expected
    return out


@pytest.mark.parametrize("dialect", WRITERS)
def test_each_dialect_reads_back(dialect: str) -> None:
    text = written(dialect)
    events, reader = read(text.data)
    assert found(events) == text.expected
    assert {point.dialect for point in events if isinstance(point, Point)} == {dialect}
    assert reader.statistics.unread == 0
    assert reader.statistics.metric_lines == len(text.lines)
    (seen,) = reader.dialects()
    assert seen.confidence == ("high" if DIALECTS[dialect].distinctive else "low")
    assert seen.family == DIALECTS[dialect].family


@pytest.mark.parametrize("line", MILESTONES)
def test_each_milestone_is_told(line: str) -> None:
    kind, dialect = MILESTONES[line]
    events, reader = read(line.encode() + b"\n")
    assert [event.kind for event in events if isinstance(event, Milestone)] == [kind]
    assert [seen.name for seen in reader.dialects()] == ([dialect] if dialect else [])
    assert (dialect is None) == (kind in FAULTS)
    assert not reader.statistics.metric_lines


def test_every_dialect_has_a_generator() -> None:
    told = {dialect for _, dialect in MILESTONES.values() if dialect}
    assert set(DIALECTS) == set(WRITERS) | told


def test_values_of_milestones() -> None:
    events, _ = read(b"top 32000 token frequency ratio: 95.12%\n  rank      : 3 (local_rank: 1)\nFinetuning from base model: /a b\n")
    coverage, failed, warm = (event for event in events if isinstance(event, Milestone))
    assert coverage.top == 32000
    assert coverage.value == pytest.approx(0.9512)
    assert failed.value == 3
    assert warm.subject == "/a b"


@pytest.mark.parametrize("width", [64, 80, 81, 100, 200])
@pytest.mark.parametrize("time", [True, False])
@pytest.mark.parametrize("dialect", ["speculators", "speculators-kl", "nemo", "specforge-step"])
def test_what_a_log_handler_wrapped_is_joined_again(dialect: str, width: int, *, time: bool) -> None:
    text = written(dialect)
    page = "".join(wrapped(line, width, time=time) for line in text.lines).encode()
    events, reader = read(page)
    assert found(events) == text.expected
    assert reader.statistics.rejoined == (len(text.lines) if width <= 100 else reader.statistics.rejoined)
    assert reader.statistics.metric_lines == len(text.lines)


def test_wrapped_lines_of_several_ranks_do_not_mix() -> None:
    one, two = written("speculators", 1, seed=1), written("speculators", 1, seed=2)
    first = [f"[rank0]:{line}" for line in wrapped(one.lines[0], 80).splitlines()]
    second = [f"[rank1]:{line}" for line in wrapped(two.lines[0], 80).splitlines()]
    mixed = [line for pair in zip(first, second, strict=True) for line in pair]
    events, _ = read("\n".join(mixed).encode())
    for rank, text in ((0, one), (1, two)):
        assert found(event for event in events if event.where.rank == rank) == text.expected


@pytest.mark.parametrize("width", range(52, 90))
def test_words_longer_than_the_column_are_cut_and_joined(width: int) -> None:
    line = "train/loss_0=12.345678901234567890, train/full_acc_0=0.123456789012345678901234567890, epoch=0"
    (loss, acc) = points(wrapped(line, width).encode())
    assert loss.value == 12.345678901234567890
    assert acc.value == 0.123456789012345678901234567890
    assert acc.where.text == line


def test_a_follower_need_not_wait_for_the_next_line() -> None:
    text = written("speculators", 1)
    reader = Reader()
    assert reader.feed(wrapped(text.lines[0], 80).encode()) == []
    assert found(reader.settle()) == text.expected
    assert reader.finish() == []


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [("[rank3]: ", 3), ("[default12]:", 12), ("[1,5]<stdout>:", 5), ("rank 2: ", 2), ("[2025-08-20] [Rank 7] ", 7), ("", None)],
)
def test_ranks(prefix: str, rank: int | None) -> None:
    (point,) = points(f"{prefix}Eval - Step 1 [2/10], position 0, pLoss: 3.5\n".encode())
    assert point.where.rank == rank
    assert point.value == 3.5


def test_running_numbers_are_counted_per_rank() -> None:
    data = b"".join(b"[rank%d]: acc=0.1, sim_acc_len=1.%d\n" % (rank, turn) for turn in range(3) for rank in range(2))
    ordinals = [(point.where.rank, point.ordinal) for point in points(data) if point.metric == "acc"]
    assert ordinals == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


def test_colours_and_titles_are_taken_off() -> None:
    line = b"\x1b]0;training\x07\x1b[1;32mtrain/lo\x1b[0mss_0\x1b[0m=\x1b[38;5;9m2.345\x1b[K, epoch=0\n"
    (point,) = points(line)
    assert (point.metric, point.position, point.value) == ("loss", 0, 2.345)
    assert point.where.text == "train/loss_0=2.345, epoch=0"


def test_a_progress_bar_that_returns_to_the_start_of_the_line() -> None:
    bar = "Training Epoch 0:  {n}%|#| {n}/100 [00:0{n}<01:00,  1.0s/it, loss={loss}]"
    states = [bar.format(n=n, loss=f"{10 - n}.00") for n in (1, 1, 2, 3, 3)]
    events, reader = read(("\r" + "\r".join(states) + "\nnext line loss=1.5\n").encode())
    assert [point.value for point in events if isinstance(point, Point)] == [9, 8, 7, 1.5]
    assert reader.statistics.repeated == 2
    assert [event.where.line for event in events] == [1, 1, 1, 2]


def test_a_bar_without_numbers_says_nothing() -> None:
    events, reader = read(b" 50%|##  | 5/10 [00:10<00:10, 1.0it/s]\n")
    assert events == []
    assert reader.statistics.unread == 0


def test_line_numbers_and_offsets_point_into_the_log() -> None:
    data = b"first\r\n\r\n\xff\xfe\nloss=1.5\r\nlast loss=2.5"
    events, _ = read(data)
    assert [event.where.line for event in events] == [4, 5]
    for event in events:
        assert data[event.where.offset :].startswith(event.where.text.encode())


def test_summary_of_a_run_is_no_point_of_the_curve() -> None:
    (point,) = points(b"{'train_runtime': 12.5, 'train_loss': 4.25, 'epoch': 1.0}\n")
    assert point.split == "summary"


def test_what_looks_like_metrics_and_cannot_be_read_is_counted() -> None:
    events, reader = read(b"loss=<Tensor at 0x7f>\nacc_0: oops\nnothing here\nloss_type=ce\n" + b"loss: ?\n" * 10)
    assert events == []
    assert reader.statistics.unread == 12
    assert [where.line for where in reader.statistics.unread_samples] == [1, 2, 5, 6, 7]


def test_values_that_are_not_finite() -> None:
    events, reader = read(b"step 1: {'loss': nan, 'acc_0': -inf, 'ploss_1': tensor(2.5, device='cuda:0')}\n")
    values = {point.raw: point.value for point in events if isinstance(point, Point)}
    assert math.isnan(values["loss"])
    assert values["acc_0"] == -math.inf
    assert values["ploss_1"] == 2.5
    assert reader.statistics.not_finite == 2


def _sample() -> bytes:
    parts: list[bytes] = []
    for seed, dialect in enumerate(WRITERS):
        text = written(dialect, 2, seed)
        parts += [text.data, text.data.replace(b"\n", b"\r\n"), b"\x1b[32m" + text.data + b"\x1b[0m"]
        parts.append("".join(wrapped(line, 80) for line in text.lines).encode())
        parts += [b"[rank%d]: " % seed + line.encode() + b"\r" for line in text.lines]
    parts += [line.encode() + b"\n" for line in MILESTONES]
    parts += [b"loss=oops\n", b"\0\0\xff\n\n\r\r\n", b"x" * 5000 + b"\nloss=3"]
    return b"".join(parts)


SAMPLE = _sample()
WHOLE, WHOLE_READER = read(SAMPLE)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, len(SAMPLE)), max_size=60))
def test_how_the_bytes_are_cut_makes_no_difference(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(SAMPLE)]
    events, reader = read(*(SAMPLE[start:end] for start, end in pairwise(edges)))
    # NaN is not equal to itself: compared as text.
    assert repr(events) == repr(WHOLE)
    assert reader.statistics == WHOLE_READER.statistics
    assert reader.dialects() == WHOLE_READER.dialects()


def test_byte_by_byte() -> None:
    head = SAMPLE[:6000]
    assert repr(read(*(head[place : place + 1] for place in range(len(head))))[0]) == repr(read(head)[0])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=40), st.sampled_from([line.encode() for line in MILESTONES] + SAMPLE.split(b"\n")))))
def test_any_bytes_are_read_without_an_error(parts: list[bytes]) -> None:
    data = b"".join(parts)
    events, reader = read(data)
    assert reader.statistics.bytes == len(data)
    assert reader.statistics.lines == data.count(b"\n")
    assert all(0 <= event.where.offset < len(data) for event in events)


NASTY = (
    b"x", b"\0", b"{", b"'", b"{'a': [", b"\\'", b" ", b"\x1b[1;", b"\x1b]", b"loss ", b"loss=", b"loss: ", b"position , ",
    b"it [it/s ", b"100%|s/it", b"1", b"loss=nan(", b"accept len: ", b"Mean acceptance length: 1 ", b"grad norm", b"INFO ",
    b"rank ", b"NCCL WARN ", b"loss nan ", b"step 1: {", b"Step 1 Training Acc: [[", b"train/loss", b"epoch 1/1 ", b"[rank",
    b"top 1 token frequency ratio: ", b"a:1 ", b".py:1 INFO ",
)  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", NASTY)
def test_a_line_of_a_mebibyte_is_read_in_linear_time(piece: bytes) -> None:
    # Anything quadratic would take hours.
    _, reader = read(piece * (MAX_LINE // len(piece)) + b"\n" + b"loss=1.5\n")
    assert reader.statistics.lines == 2
    assert reader.statistics.metric_lines >= 1


def test_a_line_of_a_hundred_megabytes_costs_no_memory() -> None:
    chunk = b"loss=1 " * (MAX_LINE // 7)
    reader = Reader()
    tracemalloc.start()
    try:
        for _ in range(100):
            assert reader.feed(chunk) == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * MAX_LINE
    events = reader.feed(b"\nloss=2.5\n")
    assert reader.statistics.long_lines == 1
    assert isinstance(events[-1], Point)
    assert (events[-1].value, events[-1].where.offset) == (2.5, 100 * len(chunk) + 1)


def test_a_million_series_cost_no_memory() -> None:
    reader, gathered = Reader(), Gathered()
    for start in range(0, 70_000, 10_000):
        for event in reader.feed(b"".join(b"[rank%d]: loss=1\n" % rank for rank in range(start, start + 10_000))):
            assert isinstance(event, Point)
            gathered.add(event)
    assert reader.statistics.undated == 70_000 - (1 << 16)
    assert len(gathered.series) == MAX_SERIES
    assert gathered.left_out == 70_000 - MAX_SERIES


@pytest.mark.parametrize(
    ("raw", "metric"),
    [
        ("train/loss_0", Metric("loss", 0, "train")),
        ("val/full_acc_2_epoch", Metric("full_acc", 2, "val")),
        ("ploss_3", Metric("loss", 3, None)),
        ("eval_loss", Metric("loss", None, "val")),
        ("lr/AdamW", Metric("lr", None, None)),
        ("Grad Norm", Metric("grad_norm", None, None)),
        ("loss_type", None),
        ("loss_64", None),
        ("step_1", None),
        ("", None),
        ("a" * 65, None),
    ],
)
def test_names(raw: str, metric: Metric | None) -> None:
    assert canonical(raw) == metric


@pytest.mark.parametrize(("text", "resolution"), [("0.00", 0.005), ("5", 0.5), ("1.00e-04", 5e-7), ("1e400", 0.5)])
def test_how_exactly_a_number_is_printed(text: str, resolution: float) -> None:
    assert number(text).resolution == pytest.approx(resolution, rel=1e-6, abs=1e-12) or text == "1e400"


def test_units_are_no_part_of_a_number() -> None:
    assert scan_pairs("time=3.46s, loss=2.5. acc=12.5%, lr=1e-4, n=3/4") == [
        ("loss", (2.5, 0.05)),
        ("acc", (0.125, 0.0005)),
        ("lr", (1e-4, pytest.approx(5e-5))),
        ("n", (3.0, 0.5)),
    ]


_NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=12)
_FLOATS = st.floats(width=32)


@given(st.dictionaries(_NAMES, st.one_of(_FLOATS, st.dictionaries(_NAMES, _FLOATS, max_size=3)), max_size=5))
def test_a_printed_dict_reads_back(values: dict[str, float | dict[str, float]]) -> None:
    flat: list[tuple[str, float]] = []
    for name, value in values.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        flat += [(f"{repr(name)[1:-1]}/{repr(key)[1:-1]}" if isinstance(value, dict) else repr(name)[1:-1], item) for key, item in inner]
    mapping = read_mapping(repr(values), 0)
    assert mapping.whole
    assert repr([(name, got.value) for name, got in mapping.pairs]) == repr(flat)


def _series(values: Iterable[float]) -> Series:
    gathered = Gathered()
    for point in points("".join(f"step={n} loss={value!r}\n" for n, value in enumerate(values)).encode()):
        gathered.add(point)
    (series,) = gathered.series.values()
    return series


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=400), st.integers(2, 50))
def test_thinning_keeps_the_extremes_and_the_order(values: list[int], most: int) -> None:
    series = _series(float(value) for value in values)
    thin = series.thinned(most)
    assert len(thin) <= most
    assert [point.ordinal for point in thin] == sorted(point.ordinal for point in thin)
    if len(values) > 1:
        assert {min(values), max(values)} <= {point.value for point in thin}
    assert all(values[point.ordinal] == point.value for point in thin)
    assert series.count == len(values)


def test_a_long_series_stays_small() -> None:
    series = _series([5.0] * 3000 + [0.25] + [5.0] * 3000 + [99.0] + [5.0] * 3000)
    assert series.count == 9002
    thin = series.thinned(1 << 20)
    assert len(thin) <= SPREAD
    assert {point.value for point in thin} == {5.0, 0.25, 99.0}


def test_start_and_end_are_not_decided_by_one_batch() -> None:
    series = _series([90.0, 10.0, 10.0, 10.0, 11.0, *[5.0] * 20, 2.0, 2.0, 2.0, 2.0, 70.0])
    assert (series.start, series.end) == (10.0, 2.0)
