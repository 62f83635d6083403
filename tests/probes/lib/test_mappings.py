from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from probes.lib.mappings import (
    Membership,
    compare,
    find_rows,
    is_ascending,
    rounded_like,
    shares,
    understand_d2t,
    understand_t2d,
)

from ...support import mission
from ...support.checkpoints import bfloat16, from_bfloat16, mask, offsets

Ids = NDArray[np.int64]
V, D = 4000, 800
CHOICE = np.random.default_rng(0)
SORTED: Ids = np.sort(CHOICE.choice(V, D, replace=False)).astype(np.int64)
FREQUENCY: Ids = CHOICE.permutation(SORTED)
# Every other token from the low half: valid as offsets as well.
LOW: Ids = np.arange(D, dtype=np.int64) * 2
LARGE_V, LARGE_D = 163_840, 32_000
LARGE: Ids = np.sort(np.random.default_rng(1).choice(LARGE_V, LARGE_D, replace=False)).astype(np.int64)


def membership(ids: Ids, vocab: int = V) -> Membership:
    return understand_t2d(mask(ids, vocab))


@pytest.mark.parametrize(
    ("name", "stored", "t2d", "encoding", "ids"),
    [
        ("offsets, ascending", offsets(SORTED), None, "offset", SORTED),
        ("offsets, ascending, with t2d", offsets(SORTED), mask(SORTED, V), "offset", SORTED),
        ("offsets in order of frequency", offsets(FREQUENCY), None, "offset", FREQUENCY),
        ("ids, ascending", SORTED, None, "absolute", SORTED),
        ("ids, ascending, with t2d", SORTED, mask(SORTED, V), "absolute", SORTED),
        ("ids in order of frequency", FREQUENCY, None, "absolute", FREQUENCY),
        ("low ids, without t2d", LOW, None, "ambiguous", None),
        ("low ids, with t2d", LOW, mask(LOW, V), "absolute", LOW),
        ("offsets like low ids, with t2d", LOW, mask(LOW + np.arange(D), V), "offset", LOW + np.arange(D)),
        ("low ids, t2d marks everything", LOW, np.ones(V, bool), "ambiguous", None),
        ("low ids, t2d marks one more", LOW, mask(np.r_[LOW, V - 1], V), "ambiguous", None),
        ("low ids, t2d of another mapping", LOW, mask(SORTED, V), "ambiguous", None),
        ("zeros", np.zeros(D, np.int64), None, "uninitialised", None),
        ("zeros, t2d all true (SpecForge)", np.zeros(D, np.int64), np.ones(V, bool), "uninitialised", None),
        ("zeros, t2d all false (speculators)", np.zeros(D, np.int64), np.zeros(V, bool), "uninitialised", None),
        ("zeros, t2d of a mapping", np.zeros(D, np.int64), mask(SORTED, V), "uninitialised", None),
        ("zeros that are meant", np.zeros(D, np.int64), mask(np.arange(D), V), "offset", np.arange(D)),
        ("zeros, D == V", np.zeros(V, np.int64), None, "offset", np.arange(V)),
        ("ids 0..V-1", np.arange(V), None, "absolute", np.arange(V)),
        ("ids 0..D-1, without t2d", np.arange(D), None, "ambiguous", None),
        ("ids 0..D-1, with t2d", np.arange(D), mask(np.arange(D), V), "absolute", np.arange(D)),
        ("an id twice", np.r_[FREQUENCY[:-1], FREQUENCY[0]], None, "corrupt", None),
        ("an id beyond", np.r_[offsets(SORTED)[:-1], V], None, "corrupt", None),
        ("negative ids", offsets(SORTED) - V, None, "corrupt", None),
        ("nothing", np.zeros(0, np.int64), None, "corrupt", None),
        ("truth values", np.ones(D, bool), None, "corrupt", None),
        ("halves", offsets(SORTED) + 0.5, None, "corrupt", None),
        ("NaN", np.r_[offsets(SORTED)[:-1], np.nan], None, "corrupt", None),
        ("beyond any vocabulary", np.full(D, 2**62), None, "corrupt", None),
        ("beyond int64", np.full(D, 2**64 - 1, np.uint64), None, "corrupt", None),
    ],
)
def test_encodings(name: str, stored: Any, t2d: Any, encoding: str, ids: Any) -> None:
    found = understand_d2t(stored, V, None if t2d is None else understand_t2d(t2d))
    assert found.encoding == encoding, found.reason
    assert found.reason
    assert (None if found.ids is None else found.ids.tolist()) == (None if ids is None else ids.tolist())


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64, np.uint16, np.uint32, np.uint64, np.float32, np.float64])
@pytest.mark.parametrize("t2d_dtype", [np.bool_, np.uint8, np.int8, np.int32, np.int64, np.float32])
def test_types_do_not_matter_while_the_numbers_are_exact(dtype: Any, t2d_dtype: Any) -> None:
    found = understand_d2t(offsets(SORTED).astype(dtype), V, understand_t2d(mask(SORTED, V).astype(t2d_dtype)))
    assert found.encoding == "offset"
    assert np.array_equal(found.ids, SORTED)  # type: ignore[arg-type]
    assert found.ids.dtype == np.int64  # type: ignore[union-attr]


def test_without_a_vocabulary_size() -> None:
    assert understand_d2t(offsets(SORTED), None).encoding == "offset"
    assert understand_d2t(FREQUENCY, None).encoding == "absolute"
    # Only the size of the vocabulary rules offsets out here.
    assert understand_d2t(SORTED, V).encoding == "absolute"
    assert understand_d2t(SORTED, None).encoding == "ambiguous"
    assert understand_d2t(np.zeros(D, np.int64), None).encoding == "ambiguous"


def test_what_the_user_says_is_believed_as_far_as_it_can_be() -> None:
    assert np.array_equal(understand_d2t(LOW, V, claimed="absolute").ids, LOW)  # type: ignore[arg-type]
    assert np.array_equal(understand_d2t(LOW, V, claimed="offset").ids, LOW + np.arange(D))  # type: ignore[arg-type]
    assert understand_d2t(offsets(SORTED), V, claimed="absolute").encoding == "corrupt"
    assert understand_d2t(np.zeros(D, np.int64), V, claimed="offset").encoding == "offset"


@pytest.mark.parametrize("t2d", [None, mask(LARGE, LARGE_V)])
@pytest.mark.parametrize("cast_back", [False, True])
def test_a_cast_to_bfloat16_is_found_although_the_ids_stay_unique(t2d: Any, cast_back: bool) -> None:
    cast: NDArray[Any] = from_bfloat16(bfloat16(offsets(LARGE)))
    stored = cast.astype(np.int64) if cast_back else cast
    rows = np.arange(LARGE_D)
    assert len(np.unique(stored.astype(np.int64) + rows)) == LARGE_D  # what a test for uniqueness would miss
    found = understand_d2t(stored, LARGE_V + 512, None if t2d is None else understand_t2d(t2d))
    assert found.encoding == "corrupt"
    assert "bfloat16" in found.reason
    if t2d is not None:
        assert f"t2d has {int(understand_t2d(t2d).holds(stored.astype(np.int64) + rows).sum())} of its" in found.reason


def test_a_cast_to_float16() -> None:
    with np.errstate(over="ignore"):
        cast = offsets(LARGE).astype(np.float16)
    assert "infinite" in understand_d2t(cast, LARGE_V).reason
    small = LARGE[LARGE - np.arange(LARGE_D) < 60_000]
    found = understand_d2t(offsets(small).astype(np.float16).astype(np.int64), LARGE_V)
    assert found.encoding == "corrupt"
    assert "float16" in found.reason
    assert "bfloat16" not in found.reason


def test_a_cast_that_lost_nothing_is_accepted() -> None:
    few = np.arange(500, dtype=np.int64) + 256  # one offset, exact in bfloat16
    found = understand_d2t(from_bfloat16(bfloat16(offsets(few))), V, membership(few))
    assert found.encoding == "offset"
    assert np.array_equal(found.ids, few)  # type: ignore[arg-type]


def test_round_numbers_that_t2d_confirms_are_no_cast() -> None:
    blocks: Ids = (np.arange(0, 163_000, 1024 + 64)[:, None] + np.arange(64)).reshape(-1).astype(np.int64)
    assert rounded_like(offsets(blocks)) is not None
    assert understand_d2t(offsets(blocks), LARGE_V, membership(blocks, LARGE_V)).encoding == "offset"


@given(st.lists(st.integers(-(2**20), 2**20), min_size=100, max_size=300, unique=True))
def test_real_offsets_are_not_taken_for_a_cast(values: list[int]) -> None:
    odd = np.array([value | 1 for value in values])
    assert rounded_like(odd) is None or np.abs(odd).max() < 256


@pytest.mark.parametrize("kept", [8, 11])
def test_rounded_values_are_recognised(kept: int) -> None:
    values = np.array([(1 << (kept - 1) | n) << 7 for n in range(100)])
    assert rounded_like(values) == {8: "bfloat16", 11: "float16"}[kept]
    assert rounded_like(-values) == rounded_like(values)
    assert rounded_like(np.r_[values, values[0] + 1]) is None


def test_round_ids_that_may_be_offsets_are_no_cast() -> None:
    assert understand_d2t(np.arange(100) * 1024, LARGE_V).encoding == "ambiguous"
    assert understand_d2t(np.arange(160) * 1024, 162_900).encoding == "absolute"


def test_masks() -> None:
    found = membership(SORTED)
    assert (found.kind, found.selected) == ("mask", D)
    assert found.agrees(SORTED)
    assert found.agrees(FREQUENCY)
    assert found.in_order(SORTED)
    assert not found.in_order(FREQUENCY)
    wrong = SORTED.copy()
    wrong[5] = next(token for token in range(V) if token not in set(SORTED.tolist()))
    assert not found.agrees(wrong)
    assert np.flatnonzero(~found.holds(wrong)).tolist() == [5]
    assert not found.agrees(SORTED[:-1])
    assert found.holds(np.array([-1, V, V + 5])).tolist() == [False] * 3


@pytest.mark.parametrize("filler", [-1, 0, D])
@pytest.mark.parametrize("ids", [SORTED, FREQUENCY])
def test_index_maps(filler: int, ids: Ids) -> None:
    values = np.full(V, filler)
    values[ids] = np.arange(D)
    found = understand_t2d(values.astype(np.int32))
    assert (found.kind, found.selected) == ("index-map", None)
    assert found.agrees(ids)
    assert found.in_order(ids)
    assert not found.agrees(ids[::-1].copy())
    assert understand_d2t(offsets(ids), V, found).encoding == "offset"


@pytest.mark.parametrize("values", [np.array([0.5, 1.0]), np.array([np.nan]), np.zeros(0, np.int64), np.array([2**40])])
def test_what_cannot_be_t2d(values: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        understand_t2d(values)


def naive(a: list[int], b: list[int]) -> dict[str, Any]:
    """Compare as slowly and as plainly as possible."""
    pairs = list(zip(a, b, strict=False))
    prefix = next((row for row, (x, y) in enumerate(pairs) if x != y), len(pairs))
    shared = [token for token in a if token in b]
    relation = (
        "identical" if a == b
        else "permutation" if set(a) == set(b)
        else "subset" if set(a) < set(b)
        else "superset" if set(a) > set(b)
        else "different"
    )  # fmt: skip
    return {
        "positional_matches": sum(x == y for x, y in pairs),
        "shared_targets": len(shared),
        "common_prefix": prefix,
        "rows_without_source": sum(token not in a for token in b),
        "order_preserved": shared == [token for token in b if token in a],
        "max_shift": max((abs(a.index(token) - b.index(token)) for token in shared), default=None),
        "relation": relation,
    }


mappings = st.lists(st.integers(0, 40), unique=True, min_size=1, max_size=30)
related = mappings.flatmap(lambda a: st.tuples(st.just(a), st.one_of(mappings, st.permutations(a), st.just(a), st.just(sorted(a)))))


@settings(max_examples=400)
@given(related)
def test_comparison_against_a_naive_one(pair: tuple[list[int], list[int]]) -> None:
    a, b = pair
    assert vars(compare(np.array(a), np.array(b))) == naive(a, b)


@settings(max_examples=200)
@given(related, st.lists(st.integers(0, 10**9), max_size=60))
def test_shares_against_naive_ones(pair: tuple[list[int], list[int]], counted: list[int]) -> None:
    a, b = pair
    found = shares(np.array(a), np.array(b), np.array(counted, np.int64))
    total = sum(counted)
    if total == 0:
        assert found is None
        return
    assert found is not None

    def share(tokens: list[int]) -> float:
        return sum(counted[token] for token in tokens if token < len(counted)) / total

    assert found.coverage_a == pytest.approx(share(a))
    assert found.coverage_b == pytest.approx(share(b))
    assert found.shared == pytest.approx(share([token for token in a if token in b]))
    assert found.positional == pytest.approx(share([x for x, y in zip(a, b, strict=False) if x == y]))


@given(mappings, mappings)
def test_rows_are_found(wanted: list[int], ids: list[int]) -> None:
    found = find_rows(np.array(wanted), np.array(ids))
    assert found.tolist() == [ids.index(token) if token in ids else -1 for token in wanted]


@settings(max_examples=200)
@given(st.data())
def test_what_was_written_is_read_back(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 200))
    ids = np.array(data.draw(st.lists(st.integers(0, vocab - 1), unique=True, min_size=1)), np.int64)
    encoding = data.draw(st.sampled_from(["offset", "absolute"]))
    stored = ids if encoding == "absolute" else offsets(ids)
    found = understand_d2t(stored, vocab, membership(ids, vocab))
    # With t2d at hand the answer is right, or there is none.
    assert found.encoding in {encoding, "ambiguous", "uninitialised"} or np.array_equal(found.ids, ids)  # type: ignore[arg-type]
    if found.ids is not None:
        assert np.array_equal(found.ids, ids)


def test_the_case_that_started_it() -> None:
    a, b = mission.mappings()
    assert len(a) == len(b) == mission.ROWS
    assert is_ascending(a)
    assert is_ascending(b)
    assert max(a.max(), b.max()) < mission.VOCAB
    found = compare(a, b)
    assert found.positional_matches == 252
    assert found.shared_targets == 25_750
    assert found.rows_without_source == 6_250
    assert found.common_prefix == 50
    assert found.order_preserved
    assert found.relation == "different"
    assert a[:50].tolist() == b[:50].tolist()
