from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from probes import vocab_remap
from probes.vocab_remap import Params, Result
from remote_diag.findings import Finding, status
from remote_diag.paths import shipped_probes
from remote_diag.probe import load
from remote_diag.testing import Leave, RecordingContext

from ..support.checkpoints import (
    Raw,
    bfloat16,
    from_bfloat16,
    mask,
    offsets,
    safetensors,
    write_npy,
    write_npz,
    write_safetensors,
    write_sharded,
    write_torch,
)
from ..support.cli import rdiag

V, D, H = 400, 80, 16
RANDOM = np.random.default_rng(11)
A = np.sort(RANDOM.choice(V, D, replace=False)).astype(np.int64)
_SPARE = np.setdiff1d(np.arange(V), A)
B = np.sort(np.concatenate([np.delete(A, range(20, 32)), _SPARE[::30][:10]])).astype(np.int64)
"""78 tokens: 68 of A's, 10 others."""
HEAD = bfloat16(RANDOM.normal(size=(D, H)))
TARGET = bfloat16(3 * RANDOM.normal(size=(V, H)))


def bits(raw: Raw) -> NDArray[np.uint16]:
    return np.frombuffer(raw.data, "<u2").reshape(tuple(raw.shape))


def tensors(ids: Any = A, head: Any = HEAD, prefix: str = "", **more: Any) -> dict[str, Any]:
    return {
        prefix + "d2t": offsets(ids), prefix + "t2d": mask(ids, V), prefix + "lm_head.weight": head,
        prefix + "midlayer.mlp.up_proj.weight": bfloat16(RANDOM.normal(size=(3, H))),
        prefix + "norm.weight": np.array([1, np.nan, -0.0], np.float32), prefix + "fc.weight": np.ones((H, 3 * H), np.float16),
        **more,
    }  # fmt: skip


def write_source(folder: Path, content: Any = None, **config: Any) -> Path:
    config = {"vocab_size": V, "draft_vocab_size": D, "rope_theta": 50000.0, **config}
    return write_safetensors(folder, tensors() if content is None else content, **config)


def read_back(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Read a safetensors file without the code under test: name -> (type, shape, bytes)."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__")
    begin = 8 + size
    return {
        name: (entry["dtype"], entry["shape"], data[begin + entry["data_offsets"][0] : begin + entry["data_offsets"][1]])
        for name, entry in header.items()
    }


def metadata(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    found: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    return found


def new_ids(written: dict[str, Any], name: str = "d2t") -> NDArray[np.int64]:
    dtype, shape, data = written[name]
    assert dtype == "I64"
    values = np.frombuffer(data, "<i8")
    assert [len(values)] == shape
    return values + np.arange(len(values))


def naive(head: NDArray[Any], a: Any, b: Any) -> dict[int, NDArray[Any]]:
    """Return the rows that must have been moved, by their new place; one at a time."""
    places = {token: row for row, token in enumerate(a.tolist())}
    return {row: head[places[token]] for row, token in enumerate(b.tolist()) if token in places}


def run(tmp_path: Path, source: Path | None = None, **more: Any) -> tuple[Result, list[Finding]]:
    given: dict[str, Any] = {"mapping": str(tmp_path / "b"), "out": str(tmp_path / "out"), "missing": "mean", **more}
    if not (tmp_path / "b").exists():
        write_npy(tmp_path / "b", offsets(B), mask(B, V))
    context = RecordingContext(tmp_path / "scratch")
    result = vocab_remap.run(Params(source=str(source or tmp_path / "src"), **given), context)
    return result, context.findings


def codes(findings: list[Finding]) -> set[str]:
    return {finding.code for finding in findings}


def test_the_contract_holds(tmp_path: Path) -> None:
    probe = load(shipped_probes() / "vocab_remap.py")
    assert (probe.name, probe.effects) == ("vocab-remap", ("reads-files", "writes-files"))
    write_source(tmp_path / "src")
    result, _ = run(tmp_path)
    probe.result_adapter.validate_json(json.dumps(dataclasses.asdict(result), allow_nan=False), strict=True)


def test_rows_go_where_their_tokens_are(tmp_path: Path) -> None:
    source = write_source(tmp_path / "src")
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    result, findings = run(tmp_path)
    assert (result.rows_moved, result.rows_initialised, result.rows_dropped) == (68, 10, 12)
    assert (result.missing_policy, result.out, result.draft_vocab_size) == ("mean", str(tmp_path / "out"), 78)
    assert status(findings) == "ok"
    written, original = read_back(tmp_path / "out" / "model.safetensors"), read_back(source / "model.safetensors")
    assert new_ids(written).tolist() == B.tolist()
    assert np.array_equal(np.frombuffer(written["t2d"][2], bool), mask(B, V))
    assert written["lm_head.weight"][:2] == ("BF16", [78, H])
    head = np.frombuffer(written["lm_head.weight"][2], "<u2").reshape(78, H)
    for row, expected in naive(bits(HEAD), A, B).items():
        assert np.array_equal(head[row], expected)
    for name in ("midlayer.mlp.up_proj.weight", "norm.weight", "fc.weight"):
        assert written[name] == original[name]
    assert set(written) == set(original)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"vocab_size": V, "draft_vocab_size": 78, "rope_theta": 50000.0}
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_the_library_of_that_name_reads_it(tmp_path: Path) -> None:
    from safetensors import safe_open

    write_source(tmp_path / "src")
    run(tmp_path)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert file.get_tensor("d2t").numpy().tolist() == offsets(B).tolist()
        assert str(file.get_tensor("lm_head.weight").dtype) == "torch.bfloat16"


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_two_mappings_against_one_row_at_a_time(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    vocab = data.draw(st.integers(1, 60), "vocab")
    tokens = st.lists(st.integers(0, vocab - 1), min_size=1, unique=True)
    a, b = (np.array(data.draw(tokens, name), np.int64) for name in "ab")
    dtype = data.draw(st.sampled_from(["<u2", "<f2", "<f4", "<f8"]))
    width = data.draw(st.integers(1, 5))
    raw = np.random.default_rng(len(a)).integers(0, 256, (len(a), width * np.dtype(dtype).itemsize), np.uint8)
    raw[:, 1 :: np.dtype(dtype).itemsize] = 63
    head = raw.view(dtype)
    if dtype != "<u2":
        head = np.nan_to_num(head, nan=1.0, posinf=2.0, neginf=3.0).clip(-1000, 1000).astype(dtype)
    stored: Any = Raw("BF16", head.shape, head.tobytes()) if dtype == "<u2" else head
    folder = tmp_path_factory.mktemp("remap")
    write_safetensors(folder / "src", {"d2t": offsets(a), "t2d": mask(a, vocab), "lm_head.weight": stored})
    write_npz(folder / "b.npz", d2t=offsets(b), t2d=mask(b, vocab))
    missing = data.draw(st.sampled_from(["mean", "random"]))
    # A mapping of one row can be read both ways, and says the same.
    said: Any = {"encoding_source": "offset", "encoding_mapping": "offset"}
    result, _ = run(folder, mapping=str(folder / "b.npz"), missing=missing, **said)
    written = read_back(folder / "out" / "model.safetensors")
    found = np.frombuffer(written["lm_head.weight"][2], dtype).reshape(len(b), width)
    expected = naive(head, a, b)
    assert {row: found[row].tobytes() for row in expected} == {row: value.tobytes() for row, value in expected.items()}
    assert (result.rows_moved, result.rows_initialised) == (len(expected), len(b) - len(expected))
    assert new_ids(written).tolist() == b.tolist()


def test_there_and_back_is_where_it_was(tmp_path: Path) -> None:
    everything = np.arange(V)[::-1].astype(np.int64)
    write_source(tmp_path / "src")
    write_npz(tmp_path / "all.npz", d2t=offsets(everything), t2d=mask(everything, V))
    run(tmp_path, mapping=str(tmp_path / "all.npz"))
    run(tmp_path, tmp_path / "out", mapping=str(tmp_path / "src"), out=str(tmp_path / "back"))
    first, last = (read_back(tmp_path / name / "model.safetensors") for name in ("src", "back"))
    assert first == last
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads((tmp_path / "src" / "config.json").read_text())
    told = json.loads(metadata(tmp_path / "back" / "model.safetensors")["rdiag.vocab-remap"])
    assert json.loads(told["before"])["rows_moved"] == D


# New rows ------------------------------------------------------------------------------------------------------------


def new_rows(tmp_path: Path) -> NDArray[np.float32]:
    written = read_back(tmp_path / "out" / "model.safetensors")["lm_head.weight"]
    head = from_bfloat16(Raw("BF16", written[1], written[2])).reshape(written[1])
    return head[~np.isin(B, A)]


def test_the_verifiers_rows_as_they_are(tmp_path: Path) -> None:
    write_source(tmp_path / "src")
    write_safetensors(tmp_path / "target", {"language_model.lm_head.weight": TARGET}, vocab_size=V)
    result, _ = run(tmp_path, missing="verifier", verifier=str(tmp_path / "target"))
    expected = from_bfloat16(TARGET).reshape(V, H)[B[~np.isin(B, A)]]
    assert np.array_equal(new_rows(tmp_path), expected)
    assert result.verifier_scale is None


def test_the_verifiers_rows_brought_to_the_drafters_length(tmp_path: Path) -> None:
    write_source(tmp_path / "src")
    target = RANDOM.normal(size=(V, H)).astype(np.float32) * 7
    write_safetensors(tmp_path / "target", {"lm_head.weight": target}, vocab_size=V)
    result, findings = run(tmp_path, missing="verifier-scaled", verifier=str(tmp_path / "target"))
    head = from_bfloat16(HEAD).reshape(D, H)
    scale = np.median(np.linalg.norm(head, axis=1)) / np.median(np.linalg.norm(target[A], axis=1))
    assert result.verifier_scale == pytest.approx(scale, rel=1e-5)
    expected = target[B[~np.isin(B, A)]] * scale
    assert np.allclose(new_rows(tmp_path), expected, rtol=2**-8)
    assert "verifier-rows-foreign" in codes(findings)
    assert abs(result.verifier_cosine or 1) < 0.3


def test_a_head_that_was_made_from_the_verifiers(tmp_path: Path) -> None:
    own = from_bfloat16(TARGET).reshape(V, H)
    write_source(tmp_path / "src", tensors(head=bfloat16(own[A] * 0.5)))
    write_safetensors(tmp_path / "target", {"lm_head.weight": TARGET}, vocab_size=V)
    result, findings = run(tmp_path, missing="verifier-scaled", verifier=str(tmp_path / "target"))
    assert result.verifier_cosine == pytest.approx(1)
    assert result.verifier_scale == pytest.approx(0.5)
    assert np.array_equal(new_rows(tmp_path), own[B[~np.isin(B, A)]] * 0.5)
    assert "verifier-rows-foreign" not in codes(findings)


def test_the_mean_row(tmp_path: Path) -> None:
    write_source(tmp_path / "src")
    run(tmp_path, missing="mean")
    mean = from_bfloat16(HEAD).reshape(D, H).astype(np.float64).mean(axis=0)
    found = new_rows(tmp_path)
    assert len(found) == 10
    assert np.allclose(found, mean, rtol=2**-8)
    assert np.array_equal(found, np.broadcast_to(found[0], found.shape))


def test_random_rows_are_those_of_their_seed(tmp_path: Path) -> None:
    write_source(tmp_path / "src")
    digests = []
    for name, seed in (("one", 1), ("again", 1), ("two", 2)):
        run(tmp_path, missing="random", seed=seed, out=str(tmp_path / name))
        digests.append(hashlib.sha256((tmp_path / name / "model.safetensors").read_bytes()).hexdigest())
    assert digests[0] == digests[1] != digests[2]
    run(tmp_path, missing="random")
    assert 0.7 < new_rows(tmp_path).std() < 1.3


def test_without_a_verifier_the_default_asks_for_one(tmp_path: Path) -> None:
    write_source(tmp_path / "src")
    with pytest.raises(Leave, match="10 of its tokens have no row") as caught:
        run(tmp_path, missing="verifier-scaled")
    assert "--missing mean" in (caught.value.hint or "")
    assert not (tmp_path / "out").exists()


def test_nothing_to_fill_needs_no_verifier(tmp_path: Path) -> None:
    write_source(tmp_path / "src")
    write_npz(tmp_path / "fewer.npz", d2t=offsets(A[::2]), t2d=mask(A[::2], V))
    result, _ = run(tmp_path, missing="verifier-scaled", mapping=str(tmp_path / "fewer.npz"), verifier="/nowhere")
    assert (result.rows_moved, result.rows_initialised, result.missing_policy) == (40, 0, "verifier-scaled")


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ({"lm_head.weight": np.zeros((V, H + 1), np.float32)}, "17 wide, the drafter's head 16"),
        ({"lm_head.weight": np.zeros((V, H), np.float32)}, "no length to compare"),
        ({"lm_head.weight": np.ones((5, H), np.float32)}, "has 5 rows"),
        ({"lm_head.weight": np.full((V, H), np.nan, np.float32)}, "no length|infinities or NaN"),
        ({"lm_head.weight_packed": np.zeros((V, H), np.int32)}, "quantised"),
    ],
)
def test_verifiers_that_do_not_fit(tmp_path: Path, target: Any, reason: str) -> None:
    write_source(tmp_path / "src")
    write_safetensors(tmp_path / "target", target)
    with pytest.raises(Leave, match=reason):
        run(tmp_path, missing="verifier-scaled", verifier=str(tmp_path / "target"))
    assert sorted(os.listdir(tmp_path)) == ["b", "src", "target"]


# Shares of text ------------------------------------------------------------------------------------------------------


def test_shares_of_text_by_source(tmp_path: Path) -> None:
    write_source(tmp_path / "src")
    counts = RANDOM.integers(0, 1000, V)
    np.save(tmp_path / "counts.npy", counts)
    result, findings = run(tmp_path, counts=str(tmp_path / "counts.npy"))
    total = counts.sum()
    both = np.intersect1d(A, B)
    assert result.token_share_moved == pytest.approx(counts[both].sum() / total)
    assert result.token_share_initialised == pytest.approx(counts[np.setdiff1d(B, A)].sum() / total)
    assert result.token_share_without_row == pytest.approx(1 - counts[B].sum() / total)
    assert result.coverage_before == pytest.approx(counts[A].sum() / total)
    gain = (counts[B].sum() - counts[A].sum()) / total
    assert ("keeping-is-cheaper" in codes(findings)) == (gain < 0.01)


def test_counts_in_the_mappings_own_file_are_taken(tmp_path: Path) -> None:
    write_source(tmp_path / "src")
    freq = np.zeros(V, np.int64)
    freq[B] = 3
    write_npz(tmp_path / "b.npz", d2t=offsets(B), t2d=mask(B, V), freq=freq)
    result, _ = run(tmp_path, mapping=str(tmp_path / "b.npz"))
    assert result.counts_name == "freq"
    assert result.token_share_moved == pytest.approx(68 / 78)
    assert run(tmp_path, out=str(tmp_path / "other"))[0].token_share_moved is None


# Sources -------------------------------------------------------------------------------------------------------------


def written_head(tmp_path: Path, name: str = "lm_head.weight") -> NDArray[np.uint16]:
    written = read_back(tmp_path / "out" / "model.safetensors")[name]
    return np.frombuffer(written[2], "<u2").reshape(written[1])


def check_head(tmp_path: Path, name: str = "lm_head.weight") -> None:
    head = written_head(tmp_path, name)
    for row, expected in naive(bits(HEAD), A, B).items():
        assert np.array_equal(head[row], expected)


def test_a_sharded_source_becomes_one_file(tmp_path: Path) -> None:
    content = tensors()
    names = list(content)
    write_sharded(tmp_path / "src", [{name: content[name] for name in names[start::3]} for start in range(3)])
    result, _ = run(tmp_path)
    check_head(tmp_path)
    assert result.files_written == ("model.safetensors",)
    assert set(read_back(tmp_path / "out" / "model.safetensors")) == set(content)


@pytest.mark.parametrize("prefix", ["model.", "draft_model.", "_orig_mod.module."])
def test_prefixes_stay(tmp_path: Path, prefix: str) -> None:
    content = tensors(prefix=prefix)
    del content[prefix + "t2d"]
    write_source(tmp_path / "src", content)
    run(tmp_path)
    check_head(tmp_path, prefix + "lm_head.weight")
    written = read_back(tmp_path / "out" / "model.safetensors")
    assert set(written) == {*content, prefix + "t2d"}
    assert new_ids(written, prefix + "d2t").tolist() == B.tolist()


def test_a_file_instead_of_its_folder(tmp_path: Path) -> None:
    write_source(tmp_path / "src")
    run(tmp_path, tmp_path / "src" / "model.safetensors")
    check_head(tmp_path)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["draft_vocab_size"] == 78


def test_a_file_of_torch_becomes_safetensors(tmp_path: Path) -> None:
    strided = np.asfortranarray(RANDOM.normal(size=(4, 6)).astype(np.float32))
    write_torch(tmp_path / "src" / "pytorch_model.bin", {**tensors(), "midlayer.x.weight": np.ones(3)})
    import torch

    loaded = torch.load(tmp_path / "src" / "pytorch_model.bin", weights_only=True)
    loaded["midlayer.strided.weight"] = torch.from_numpy(strided.T.copy()).T
    loaded["midlayer.bf16.weight"] = loaded["lm_head.weight"][:6, :4].T
    torch.save(loaded, tmp_path / "src" / "pytorch_model.bin")
    (tmp_path / "src" / "config.json").write_text(json.dumps({"vocab_size": V, "draft_vocab_size": D}))
    run(tmp_path)
    check_head(tmp_path)
    written = read_back(tmp_path / "out" / "model.safetensors")
    assert written["midlayer.strided.weight"] == ("F32", [4, 6], np.ascontiguousarray(strided).tobytes())
    assert written["midlayer.bf16.weight"] == ("BF16", [4, 6], np.ascontiguousarray(bits(HEAD)[:6, :4].T).tobytes())
    assert written["midlayer.x.weight"][0] == "F64"


def test_a_drafter_of_the_full_vocabulary_is_cut(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "src", {"lm_head.weight": TARGET, "fc.weight": np.ones((2, 2))}, vocab_size=V)
    result, _ = run(tmp_path)
    assert (result.rows_moved, result.rows_initialised) == (78, 0)
    assert np.array_equal(written_head(tmp_path), bits(TARGET)[B])
    assert new_ids(read_back(tmp_path / "out" / "model.safetensors")).tolist() == B.tolist()
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"vocab_size": V, "draft_vocab_size": 78}


def test_a_bias_moves_along(tmp_path: Path) -> None:
    bias = RANDOM.normal(size=D).astype(np.float32)
    write_source(tmp_path / "src", {**tensors(), "lm_head.bias": bias})
    run(tmp_path)
    found = np.frombuffer(read_back(tmp_path / "out" / "model.safetensors")["lm_head.bias"][2], "<f4")
    places = np.searchsorted(A, B[np.isin(B, A)])
    assert np.array_equal(found[np.isin(B, A)], bias[places])
    assert np.allclose(found[~np.isin(B, A)], bias.mean())


def test_every_copy_of_the_head_moves_and_what_is_cut_from_the_target_goes(tmp_path: Path) -> None:
    more = {"model.lm_head.weight": HEAD, "verifier_lm_head.weight": HEAD, "selected_token_ids": A}
    write_source(tmp_path / "src", {**tensors(), **more})
    result, findings = run(tmp_path)
    check_head(tmp_path)
    check_head(tmp_path, "model.lm_head.weight")
    written = read_back(tmp_path / "out" / "model.safetensors")
    assert np.frombuffer(written["selected_token_ids"][2], "<i8").tolist() == B.tolist()
    assert "verifier_lm_head.weight" not in written
    assert result.tensors_dropped == ("verifier_lm_head.weight",)
    assert codes(findings) == {"remapped"}


def test_unknown_tensors_with_a_row_for_each_token_are_pointed_out(tmp_path: Path) -> None:
    write_source(tmp_path / "src", tensors(row_scales=np.ones(D, np.float32)))
    _, findings = run(tmp_path)
    assert {finding.code: finding.level for finding in findings}["unknown-tensors"] == "degraded"


def test_the_head_that_kept_its_rows_when_its_mapping_was_overwritten(tmp_path: Path) -> None:
    """What fine-tuning with another mapping leaves: rows by A, d2t and t2d by B."""
    write_npy(tmp_path / "a", offsets(A), mask(A, V))
    same_size = np.sort(np.concatenate([A[:-5], _SPARE[-5:]]))
    write_source(tmp_path / "src", tensors(ids=same_size))
    result, _ = run(tmp_path, head_mapping=str(tmp_path / "a"), mapping=str(tmp_path / "src"))
    assert (result.rows_moved, result.rows_initialised) == (75, 5)
    head = written_head(tmp_path)
    for row, expected in naive(bits(HEAD), A, same_size).items():
        assert np.array_equal(head[row], expected)


def test_other_files_go_along_or_are_named(tmp_path: Path) -> None:
    source = write_source(tmp_path / "src")
    for name in ("tokenizer.json", "generation_config.json", "tiktoken.model", "tokenization_kimi.py", "LICENSE"):
        (source / name).write_text(name)
    for name in ("training_state.pt", "optimizer_state_dict.pt", "d2t.npy", "cache.pt", "other.safetensors", "run.log"):
        (source / name).write_text(name)
    (source / "epoch_1").mkdir()
    os.mkfifo(source / "pipe.json")
    (source / "link.txt").symlink_to("/nonexistent")
    result, _ = run(tmp_path)
    assert sorted(result.files_written) == sorted(os.listdir(tmp_path / "out")) == [
        "LICENSE", "config.json", "generation_config.json", "model.safetensors", "tiktoken.model", "tokenization_kimi.py",
        "tokenizer.json",
    ]  # fmt: skip
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "tokenizer.json"
    left = dict(line.split(": ", 1) for line in result.files_left)
    assert set(left) == {
        "training_state.pt", "optimizer_state_dict.pt", "d2t.npy", "cache.pt", "other.safetensors", "run.log", "epoch_1",
        "pipe.json", "link.txt",
    }  # fmt: skip
    assert left["training_state.pt"] == "state of a training, which belongs to the old rows"
    assert result.bytes_written == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())


def test_config_json_stays_as_it_is_where_it_says_so_already(tmp_path: Path) -> None:
    same_size = np.sort(np.concatenate([A[:-5], _SPARE[-5:]]))
    write_npz(tmp_path / "b.npz", d2t=offsets(same_size), t2d=mask(same_size, V))
    source = write_source(tmp_path / "src")
    (source / "config.json").write_text('{\n "vocab_size":400, "draft_vocab_size" :80,"x": 1.50}')
    run(tmp_path, mapping=str(tmp_path / "b.npz"))
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_config_json_of_speculators(tmp_path: Path) -> None:
    nested = {"vocab_size": D, "hidden_size": H}
    source = write_safetensors(tmp_path / "src", tensors(), draft_vocab_size=D, transformer_layer_config=nested, x=[1e-05])
    run(tmp_path)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"draft_vocab_size": 78, "transformer_layer_config": {"vocab_size": 78, "hidden_size": H}, "x": [1e-05]}
    nested["vocab_size"] = V
    (source / "config.json").write_text(json.dumps({"draft_vocab_size": D, "transformer_layer_config": nested}))
    run(tmp_path, out=str(tmp_path / "new"))
    assert json.loads((tmp_path / "new" / "config.json").read_text())["transformer_layer_config"]["vocab_size"] == V


def test_metadata_says_where_it_comes_from(tmp_path: Path) -> None:
    data = safetensors(tensors())
    source = write_source(tmp_path / "src")
    size = int.from_bytes(data[:8], "little")
    header = {**json.loads(data[8 : 8 + size]), "__metadata__": {"format": "pt", "author": "ada"}}
    text = json.dumps(header).encode()
    (source / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    run(tmp_path, missing="random", seed=5)
    found = metadata(tmp_path / "out" / "model.safetensors")
    assert (found["format"], found["author"]) == ("pt", "ada")
    told = json.loads(found["rdiag.vocab-remap"])
    assert (told["rows_moved"], told["missing_policy"], told["seed"]) == (68, "random", 5)
    assert told["ids_sha256"] == hashlib.sha256(B.astype("<i8").tobytes()).hexdigest()
    assert (told["source"], told["mapping"]) == (str(source), str(tmp_path / "b"))


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    write_source(tmp_path / "src")
    run(tmp_path)
    run(tmp_path, out=str(tmp_path / "out2"))
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "out2" / "model.safetensors").read_bytes()


def test_whoever_may_read_the_source_may_read_the_copy(tmp_path: Path) -> None:
    source = write_source(tmp_path / "src")
    source.chmod(0o755)
    before = os.umask(0o077)
    try:
        run(tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o644}


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["folder", "empty", "file", "dangling"])
def test_nothing_is_overwritten(tmp_path: Path, what: str) -> None:
    write_source(tmp_path / "src")
    out = tmp_path / "out"
    if what == "file":
        out.write_text("mine")
    elif what == "dangling":
        out.symlink_to("/nonexistent")
    else:
        out.mkdir()
    if what == "folder":
        (out / "mine").write_text("mine")
    with pytest.raises(Leave, match="exists already"):
        run(tmp_path)
    assert os.path.lexists(out)
    assert what != "folder" or (out / "mine").read_text() == "mine"


@pytest.mark.parametrize("out", ["src/out", "src/../src/sub/x", "link/out"])
def test_nothing_is_written_into_the_source(tmp_path: Path, out: str) -> None:
    source = write_source(tmp_path / "src")
    (source / "sub").mkdir()
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(Leave, match="inside of the source"):
        run(tmp_path, out=str(tmp_path / out))


def test_a_parent_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    write_source(tmp_path / "src")
    with pytest.raises(Leave, match="no folder to make out in"):
        run(tmp_path, out=str(tmp_path / "new" / "out"))


def test_free_space_is_looked_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_source(tmp_path / "src")
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((*real(path)[:4], 1000, *real(path)[5:])))
    with pytest.raises(Leave, match="of free space"):
        run(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["b", "src"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_source(tmp_path / "src")

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(Leave, match="No space left"):
        run(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["b", "src"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({**tensors(), "t2d": mask(B, V)}, "stand for different tokens; nobody knows"),
        ({**tensors(), "d2t": np.zeros(D, np.int64)}, "d2t is uninitialised"),
        ({**tensors(), "lm_head.weight": bfloat16(np.ones((D + 1, H)))}, "lm_head.weight' has 81 rows, its mapping 80"),
        ({**tensors(), "lm_head.weight": TARGET}, "nothing has to be moved|it is the target's head"),
        ({**tensors(), "lm_head.weight": np.full((D, H), np.nan, np.float32)}, "was never filled"),
        ({**tensors(), "lm_head.weight": np.ones((D, H), np.int8)}, "quantised"),
        ({**tensors(), "lm_head.weight_scale": np.ones(D, np.float32)}, "quantised"),
        ({name: value for name, value in tensors().items() if "lm_head" not in name}, "no lm_head"),
        ({"d2t": offsets(A), "t2d": mask(A, V)}, "holds no weights"),
    ],
)
def test_sources_that_cannot_be_remapped(tmp_path: Path, content: Any, reason: str) -> None:
    write_safetensors(tmp_path / "src", content)
    with pytest.raises(Leave, match=reason):
        run(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["b", "src"]


def test_mappings_of_another_target_are_refused(tmp_path: Path) -> None:
    write_source(tmp_path / "src")
    write_npy(tmp_path / "b", offsets(B), mask(B, V + 8))
    with pytest.raises(Leave, match="a target of 408 tokens, the source to one of 400"):
        run(tmp_path)


def test_a_damaged_config_is_refused(tmp_path: Path) -> None:
    (write_source(tmp_path / "src") / "config.json").write_text('{"a": 1')
    with pytest.raises(Leave, match="has to be changed with it"):
        run(tmp_path)


def test_a_source_that_changes_meanwhile_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_source(tmp_path / "src")
    weights = source / "model.safetensors"
    from probes.lib import remap, remap_folder

    real = remap.verify_weights

    def meddle(*arguments: Any) -> None:
        data = bytearray(weights.read_bytes())
        data[data.index(HEAD.data[:64])] ^= 1
        weights.write_bytes(data)
        real(*arguments)

    monkeypatch.setattr(remap_folder, "verify_weights", meddle)
    with pytest.raises(Leave, match="is not what was written"):
        run(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["b", "src"]


@pytest.mark.parametrize("bad", [{"source": ""}, {"mapping": "a\0"}, {"out": ""}, {"verifier": ""}, {"seed": -1}])
def test_parameters_that_cannot_be(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Params(**{"source": "s", "mapping": "m", "out": "o", **bad})


# A kill at any moment ------------------------------------------------------------------------------------------------

_CALLS = ("open", "write", "fsync", "fdatasync", "mkdir", "rename", "chmod", "close", "preadv", "pread", "posix_fadvise")


def _killed_at(tmp_path: Path, call: int) -> bool:
    """Run in a child that dies before its ``call``-th call to the system; return whether it died."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = [call]

    def dying(real: Any) -> Any:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)
            return real(*arguments, **named)

        return wrapped

    try:
        for name in _CALLS:
            setattr(os, name, dying(getattr(os, name)))
        run(tmp_path)
        os._exit(0)
    finally:
        os._exit(3)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_kill_at_any_moment_leaves_nothing_or_the_whole(tmp_path: Path) -> None:
    write_source(tmp_path / "src")
    (tmp_path / "src" / "tokenizer.json").write_text("{}")
    run(tmp_path)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    seen = {"nothing": 0, "whole": 0}
    call = 0
    while True:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        died = _killed_at(tmp_path, call)
        if (tmp_path / "out").exists():
            assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == whole
            seen["whole"] += 1
        else:
            seen["nothing"] += 1
        leftovers = [name for name in os.listdir(tmp_path) if name.endswith(".rdiag-partial")]
        assert len(leftovers) <= 1
        if not died:
            break
        call += 1
    assert seen["nothing"] > 30
    assert seen["whole"] > 1
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".rdiag-partial")]


def test_what_a_killed_run_left_is_removed_but_not_that_of_a_living_one(tmp_path: Path) -> None:
    import fcntl

    write_source(tmp_path / "src")
    dead, living, other = (tmp_path / name for name in (".out.1.rdiag-partial", ".out.2.rdiag-partial", ".x.1.rdiag-partial"))
    for folder in (dead, living, other):
        folder.mkdir()
        (folder / "model.safetensors").write_text("half")
    descriptor = os.open(living, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        run(tmp_path)
    finally:
        os.close(descriptor)
    assert (dead.exists(), living.exists(), other.exists()) == (False, True, True)


def test_a_large_file_goes_to_the_disk_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from probes.lib import safetensors_writer

    monkeypatch.setattr(safetensors_writer, "_FLUSH", 1000)
    flushed: list[int] = []
    monkeypatch.setattr(os, "fdatasync", flushed.append)
    write_source(tmp_path / "src")
    run(tmp_path)
    assert flushed
    check_head(tmp_path)


def test_two_that_make_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_source(tmp_path / "src")
    real = os.rename

    def first_somebody_else(source: Any, target: Any) -> None:
        Path(target).mkdir()
        (Path(target) / "theirs").write_text("theirs")
        real(source, target)

    monkeypatch.setattr(os, "rename", first_somebody_else)
    with pytest.raises(Leave, match="appeared meanwhile"):
        run(tmp_path)
    assert os.listdir(tmp_path / "out") == ["theirs"]
    assert sorted(os.listdir(tmp_path)) == ["b", "out", "src"]


# The command ---------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path) -> None:
    write_source(tmp_path / "src")
    write_npy(tmp_path / "b", offsets(B), mask(B, V))
    write_safetensors(tmp_path / "target", {"lm_head.weight": TARGET}, vocab_size=V)
    paths = (str(tmp_path / "src"), "--mapping", str(tmp_path / "b"), "--verifier", str(tmp_path / "target"))
    ran = rdiag("vocab-remap", *paths, "--out", str(tmp_path / "one"), home=tmp_path)
    assert (ran.code, ran.err) == (0, "")
    first = ran.out.splitlines()[0]
    assert first == "local: vocab-remap: ok - 68 rows moved, 10 made anew (verifier-scaled); written and verified"
    ran = rdiag("vocab-remap", *paths, "--out", str(tmp_path / "two"), "--missing", "random", "--seed", "4", "--json", home=tmp_path)
    assert ran.code == 0
    result = ran.json["result"]
    assert {name: result[name] for name in ("rows_moved", "rows_initialised", "missing_policy", "token_share_moved", "out")} == {
        "rows_moved": 68, "rows_initialised": 10, "missing_policy": "random", "token_share_moved": None,
        "out": str(tmp_path / "two"),
    }  # fmt: skip
    ran = rdiag("vocab-remap", *paths, "--out", str(tmp_path / "two"), home=tmp_path)
    assert ran.code == 7
    assert "exists already; nothing is overwritten" in ran.err
