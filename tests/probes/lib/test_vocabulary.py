from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes.lib import config
from probes.lib.files import Damaged, Meter, Unreadable
from probes.lib.roles import bare_name
from probes.lib.vocabulary import Stored, read_counts, read_stored

from ...support.checkpoints import Raw, write_npy, write_npz, write_safetensors, write_sharded

D2T = np.array([3, 3, 5])
T2D = np.arange(9) > 5


def stored(path: Path) -> Stored:
    return read_stored(str(path), Meter())


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("d2t", "d2t"),
        ("model.d2t", "d2t"),
        ("draft_model.d2t", "d2t"),
        ("eagle_module.d2t", "d2t"),
        ("module._orig_mod.model.d2t", "d2t"),
        ("draft_d2t", "draft_d2t"),
        ("model.draft_d2t", "draft_d2t"),
        ("other.d2t", "other.d2t"),
        ("d2t.weight", "d2t.weight"),
        ("model.lm_head.weight", "lm_head.weight"),
    ],
)
def test_names_without_the_prefixes_of_wrappers(name: str, bare: str) -> None:
    assert bare_name(name) == bare


@pytest.mark.parametrize("prefix", ["", "model.", "draft_model.", "eagle_module.", "module.", "_orig_mod.", "module.model."])
def test_a_mapping_behind_a_prefix(tmp_path: Path, prefix: str) -> None:
    decoys = {"draft_d2t": D2T + 1, "x.d2t": D2T + 2, prefix + "lm_head.weight": np.zeros((3, 2), np.float16)}
    found = stored(write_safetensors(tmp_path, {**decoys, prefix + "d2t": D2T, prefix + "t2d": T2D}))
    assert found.d2t_name == prefix + "d2t"
    assert np.array_equal(found.d2t, D2T)
    assert found.t2d is not None
    assert np.array_equal(found.t2d, T2D)
    assert found.lm_head_rows == 3


def test_what_only_looks_like_a_mapping_is_not_taken(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="only 'draft_d2t', 'my_t2d'"):
        stored(write_safetensors(tmp_path, {"draft_d2t": D2T, "my_t2d": T2D}))


def test_two_copies_must_be_equal(tmp_path: Path) -> None:
    assert stored(write_safetensors(tmp_path / "x", {"d2t": D2T, "model.d2t": D2T.astype(np.int32)})).d2t_name == "d2t"
    with pytest.raises(Damaged, match="different values"):
        stored(write_safetensors(tmp_path / "y", {"d2t": D2T, "model.d2t": D2T + 1}))


@pytest.mark.parametrize(
    "tensor", [np.zeros((3, 1), np.int64), np.array(5), Raw("F8_E4M3", [3], b"123"), Raw("C64", [1], bytes(8))]
)
def test_a_d2t_of_another_shape_or_type_is_damage(tmp_path: Path, tensor: Any) -> None:
    with pytest.raises(Damaged):
        stored(write_safetensors(tmp_path, {"d2t": tensor}))


def test_a_d2t_beyond_any_vocabulary_is_not_read(tmp_path: Path) -> None:
    np.save(tmp_path / "d2t.npy", np.zeros((1 << 24) + 1, np.bool_))
    meter = Meter()
    with pytest.raises(Damaged, match="shape"):
        read_stored(str(tmp_path), meter)
    assert meter.bytes < 1000


def test_a_broken_t2d_leaves_d2t(tmp_path: Path) -> None:
    found = stored(write_safetensors(tmp_path, {"d2t": D2T, "t2d": T2D.reshape(3, 3)}))
    assert found.t2d is None
    assert "shape" in (found.t2d_problem or "")
    assert stored(write_npy(tmp_path / "x", D2T)).t2d_problem is None


def test_the_head_is_looked_at_only_where_it_costs_nothing(tmp_path: Path) -> None:
    head = {"lm_head.weight": np.zeros((3, 2), np.float16)}
    assert stored(write_sharded(tmp_path / "x", [head, {"d2t": D2T}])).lm_head_rows is None
    assert stored(write_sharded(tmp_path / "y", [{**head, "d2t": D2T}])).lm_head_rows == 3


FULL: dict[str, Any] = {"vocab_size": 9}
PRUNED: dict[str, Any] = {"vocab_size": 9, "draft_vocab_size": 3}


@pytest.mark.parametrize(
    ("settings", "head_rows", "zeros"),
    [(FULL, 9, 9), (FULL, None, 9), ({**FULL, "draft_vocab_size": 9}, 9, 9), (PRUNED, 3, 3), (PRUNED, None, 3)],
)
def test_without_d2t_servers_assume_zeros(
    tmp_path: Path, settings: dict[str, Any], head_rows: int | None, zeros: int
) -> None:
    head: dict[str, Any] = {"fc.weight": D2T} if head_rows is None else {"lm_head.weight": np.zeros((head_rows, 2))}
    found = stored(write_safetensors(tmp_path, head, **settings))
    assert found.d2t_name is None
    assert found.d2t.tolist() == [0] * zeros


@pytest.mark.parametrize(("settings", "head_rows"), [({}, 9), (FULL, 3), (PRUNED, 9), ({"vocab_size": 1 << 40}, None)])
def test_without_d2t_nothing_is_made_up(tmp_path: Path, settings: dict[str, Any], head_rows: int | None) -> None:
    head: dict[str, Any] = {"fc.weight": D2T} if head_rows is None else {"lm_head.weight": np.zeros((head_rows, 2))}
    with pytest.raises(Unreadable, match="no d2t"):
        stored(write_safetensors(tmp_path, head, **settings))


def test_a_mapping_beside_a_checkpoint_without_one_is_pointed_at(tmp_path: Path) -> None:
    write_npy(tmp_path, D2T)
    with pytest.raises(Unreadable) as caught:
        stored(write_safetensors(tmp_path, {"fc.weight": D2T}))
    assert "d2t.npy lies beside" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"vocab_size": 9, "draft_vocab_size": 3}, ("flat", 9, 3)),
        ({"vocab_size": 9, "draft_vocab_size": None}, ("flat", 9, None)),
        ({"text_config": {"vocab_size": 9}}, ("flat", 9, None)),
        ({"transformer_layer_config": {"vocab_size": 9}, "draft_vocab_size": 3}, ("speculators", 9, 3)),
        ({"speculators_model_type": "eagle3", "vocab_size": "9", "draft_vocab_size": True}, ("speculators", None, None)),
        ({"vocab_size": -1, "draft_vocab_size": 0}, ("flat", None, None)),
        ({"transformer_layer_config": [1], "text_config": 5}, ("speculators", None, None)),
    ],
)
def test_configurations(tmp_path: Path, settings: dict[str, Any], expected: tuple[str, int | None, int | None]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    found, problem = config.read(str(tmp_path), Meter())
    assert problem is None
    assert found is not None
    assert (found.dialect, found.target_vocab_size, found.draft_vocab_size) == expected


def test_no_configuration_and_broken_ones(tmp_path: Path) -> None:
    assert config.read(str(tmp_path), Meter()) == (None, None)
    for text in (b"{", b"[]", b'{"a": 1, "a": 1}', b" " * (5 << 20)):
        (tmp_path / "config.json").write_bytes(text)
        found, problem = config.read(str(tmp_path), Meter())
        assert found is None
        assert problem
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to("gone")
    assert config.read(str(tmp_path), Meter())[1]


COUNTS = np.array([5, 0, 2])


def test_counts_in_every_format(tmp_path: Path) -> None:
    np.save(tmp_path / "c.npy", COUNTS)
    write_npz(tmp_path / "freq.npz", d2t=D2T, t2d=T2D, freq=COUNTS, other=D2T)
    write_npz(tmp_path / "counts.npz", counts=COUNTS.astype(np.float32), other=D2T)
    write_npz(tmp_path / "first.npz", d2t=D2T, matrix=np.zeros((2, 2), int), x=COUNTS, y=D2T)
    write_safetensors(tmp_path, {"w": np.zeros(3, np.float32), "x": COUNTS}, name="c.safetensors")
    for name, array in (
        ("c.npy", "counts"), ("freq.npz", "freq"), ("counts.npz", "counts"), ("first.npz", "x"), ("c.safetensors", "x"),
    ):  # fmt: skip
        counts, found = read_counts(str(tmp_path / name), Meter())
        assert found == array
        assert counts.tolist() == [5, 0, 2]


@pytest.mark.parametrize("counts", [np.array([1, -1]), np.array([1.0, np.nan]), np.array([np.inf]), np.ones((2, 2))])
def test_what_cannot_be_counts(tmp_path: Path, counts: Any) -> None:
    np.save(tmp_path / "c.npy", counts)
    with pytest.raises(Damaged):
        read_counts(str(tmp_path / "c.npy"), Meter())


def test_files_without_counts(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="no vector of counts"):
        read_counts(str(write_npz(tmp_path / "m.npz", d2t=D2T, t2d=T2D)), Meter())
    with pytest.raises(Unreadable, match="folder"):
        read_counts(str(tmp_path), Meter())
