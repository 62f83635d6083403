from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from probes.lib.shifts import curves, heaviest, shifts

IDS = st.lists(st.integers(0, 80), min_size=1, max_size=60, unique=True)


def naive(a: list[int], b: list[int]) -> dict[int, int]:
    """Token -> place in B less place in A."""
    return {token: b.index(token) - row for row, token in enumerate(a) if token in b}


def stretches(ids: list[int], other: list[int]) -> int:
    found = ["x" if token in other else "o" for token in ids]
    return len([part for part in "".join(found).split("x") if part])


@given(IDS, IDS, st.lists(st.integers(0, 9), min_size=1, max_size=100))
def test_against_one_token_at_a_time(a: list[int], b: list[int], counted: list[int]) -> None:
    counts = np.array(counted)
    found = shifts(np.array(a), np.array(b), counts)
    moved = naive(a, b)
    far = sorted(map(abs, moved.values()))
    assert found.inserted == stretches(b, a)
    assert found.deleted == stretches(a, b)
    assert sum(piece.tokens for piece in found.bins) == len(moved)
    for piece in found.bins:
        inside = [token for token, shift in moved.items() if piece.low <= shift <= piece.high]
        assert len(inside) == piece.tokens > 0
        if counts.sum():
            mass = sum(counted[token] for token in inside if token < len(counted))
            assert piece.share is not None
            assert abs(piece.share - mass / counts.sum()) < 1e-12
        else:
            assert piece.share is None
    edges = [edge for piece in found.bins for edge in (piece.low, piece.high)]
    assert edges == sorted(edges)
    for share, value in ((0.5, found.median), (0.95, found.p95)):
        if not far:
            assert value is None
            continue
        assert value is not None
        assert sum(distance <= value for distance in far) >= share * len(far)
        assert sum(distance < value for distance in far) < share * len(far)
    suffix = 0
    while suffix < min(len(a), len(b)) and a[-1 - suffix] == b[-1 - suffix]:
        suffix += 1
    assert found.suffix == suffix


def test_bins_double_with_the_distance() -> None:
    a = np.arange(20)
    b = np.concatenate([[0], np.arange(100, 105), np.arange(1, 20)])
    found = shifts(a, b, None)
    assert [(piece.low, piece.high, piece.tokens, piece.share) for piece in found.bins] == [(0, 0, 1, None), (4, 7, 19, None)]
    back = shifts(b, a, None)
    assert [(piece.low, piece.high, piece.tokens) for piece in back.bins] == [(-7, -4, 19), (0, 0, 1)]
    assert (found.inserted, found.deleted, found.suffix, found.median, found.p95) == (1, 0, 19, 5, 5)


@given(IDS, IDS, st.integers(2, 70), st.integers(1, 120))
def test_points_of_a_picture(a: list[int], b: list[int], points: int, vocab: int) -> None:
    found = curves(np.array(a), np.array(b), vocab, points)
    assert len(found.rows) == len(found.a) == len(found.b) <= points
    assert found.rows[0] == 0
    assert found.rows[-1] == max(len(a), len(b)) - 1
    for ids, shown in ((a, found.a), (b, found.b)):
        assert list(shown) == [ids[row] if row < len(ids) else None for row in found.rows]
    moved = naive(a, b)
    assert len(found.tokens) == len(found.low) == len(found.high) <= points
    assert list(found.tokens) == sorted(found.tokens)
    lows = [low for low in found.low if low is not None]
    assert min(lows, default=0) == min(moved.values(), default=0)
    assert max([high for high in found.high if high is not None], default=0) == max(moved.values(), default=0)
    assert [low is None for low in found.low] == [high is None for high in found.high]


@given(IDS, IDS, st.lists(st.integers(0, 9), min_size=1, max_size=100), st.integers(0, 20))
def test_the_heaviest_tokens_of_one_side(a: list[int], b: list[int], counted: list[int], count: int) -> None:
    alone = [row for row, token in enumerate(a) if token not in b]
    weight = {row: counted[a[row]] if a[row] < len(counted) else 0 for row in alone}
    expected = sorted(alone, key=lambda row: (-weight[row], row))[:count]
    assert heaviest(np.array(a), np.array(b), np.array(counted), count).tolist() == expected
    assert heaviest(np.array(a), np.array(b), None, count).tolist() == alone[:count]
