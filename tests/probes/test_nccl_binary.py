"""`rdiag nccl --binary`: programs that end well, badly, or never."""

from __future__ import annotations

import ast
import json
import time
from pathlib import Path
from typing import Any

import pytest

from probes import collectives_cpu, nccl
from remote_diag.testing import Leave, RecordingContext

from ..support import nccl_output, stand_in_perf
from ..support.nccl_output import Run
from ..support.nccl_parsing import Parsed


def run(folder: Path, binary: Path | str, *, seconds: float = 60.0, **params: Any) -> Parsed:
    context = RecordingContext(folder, seconds=seconds)
    result = nccl.run(nccl.Params(binary=str(binary), **params), context)
    return Parsed(result, tuple(context.findings))


def test_one_that_ends_well(tmp_path: Path) -> None:
    parsed = run(tmp_path, stand_in_perf.write(tmp_path, "ok"))
    result = parsed.result
    assert (result.source, result.correctness, result.complete, len(result.rows)) == ("binary", "ok", True, 6)
    assert (result.failure, parsed.status, parsed.codes["busbw"]) == (None, "ok", "ok")
    assert result.notes[0].startswith("ran all_reduce_perf -b 8 -e 4G -f 4 -g ")


@pytest.mark.parametrize(
    ("kind", "code", "failure", "rows"),
    [
        ("wrong", "wrong-data", None, 6),
        ("slow", "busbw", None, 6),
        ("dead", "program-killed", "killed", 4),
        ("early", "program-killed", "killed", 0),
        ("fails", "program-failed", "exited", 0),
        ("silent", "program-failed", "exited", 0),
        ("crash", "program-killed", "killed", 0),
    ],
)
def test_others(tmp_path: Path, kind: str, code: str, failure: str | None, rows: int) -> None:
    parsed = run(tmp_path, stand_in_perf.write(tmp_path, kind))
    assert (parsed.codes[code], parsed.status) == ("fail", "fail")
    assert (parsed.result.failure and parsed.result.failure.kind, len(parsed.result.rows)) == (failure, rows)
    assert [finding.code for finding in parsed.findings].count(code) == 1
    assert (parsed.result.correctness == "ok") == (kind == "slow")


@pytest.mark.parametrize("kind", ["hang", "deaf"])
def test_one_that_never_ends_is_ended_and_its_rows_are_kept(tmp_path: Path, kind: str) -> None:
    begun = time.monotonic()
    parsed = run(tmp_path, stand_in_perf.write(tmp_path, kind), seconds=7.0)
    assert time.monotonic() - begun < 30
    assert (len(parsed.result.rows), parsed.result.complete, parsed.result.correctness) == (4, False, "not_checked")
    assert parsed.result.failure is not None
    assert (parsed.result.failure.kind, parsed.codes["deadline"]) == ("deadline", "unknown")
    assert "4 rows" in parsed.finding("deadline").message


def test_what_nccl_says_between_rows(tmp_path: Path) -> None:
    parsed = run(tmp_path, stand_in_perf.write(tmp_path, "noisy"))
    assert (parsed.result.damaged_rows, parsed.result.correctness) == (0, "ok")
    assert any("SHM/direct/direct" in note for note in parsed.result.notes)


def test_its_arguments(tmp_path: Path) -> None:
    path = stand_in_perf.write(tmp_path, "ok")
    said = tmp_path / "all_reduce_perf.arguments"
    run(tmp_path, path, sizes="1M:64M:2", dtype="fp16", ranks=8, graph=True, check=False, iterations=50)
    assert ast.literal_eval(said.read_text()) == [
        "-b", "1M", "-e", "64M", "-f", "2", "-g", "8", "-d", "half", "-c", "0", "-G", "1", "-n", "50",
    ]  # fmt: skip
    run(tmp_path, path, arguments=("-b", "8; touch x", "$(id)"))
    assert ast.literal_eval(said.read_text()) == ["-b", "8; touch x", "$(id)"]


@pytest.mark.parametrize("version", [1, 2, 3])
def test_one_that_writes_json_is_asked_for_it(tmp_path: Path, version: int) -> None:
    measured = Run(single_calls=True)
    # A build without MPI lists its first device only.
    document = nccl_output.document(measured, version, ["NCCL_ALGO=Ring", "TOKEN=hunter2"])
    document["config"]["devices"] = document["config"]["devices"][:1]
    parsed = run(tmp_path, stand_in_perf.write(tmp_path, "noisy", run=measured, written=json.dumps(document)))
    result = parsed.result
    assert (result.correctness, result.complete, len(result.rows), len(result.devices)) == ("ok", True, 6, 8)
    assert parsed.status == "ok"
    assert result.rows[0].time_us == pytest.approx(measured.time_us(32 << 10, in_place=False), abs=1e-6)
    assert (result.rows[0].latency is not None) == (version > 1)
    assert any("numbers are those of the JSON" in note for note in result.notes)
    assert result.settings["NCCL_ALGO"] == "Ring"
    assert "hunter2" not in repr(parsed)
    # Its environment stands in the file: that is gone.
    assert [path.name for path in tmp_path.rglob("*.json")] == []


def test_json_that_says_something_else(tmp_path: Path) -> None:
    document = nccl_output.document(Run(), 3, [])
    document["results"][2]["out_of_place"]["bus_bw"] *= 2
    parsed = run(tmp_path, stand_in_perf.write(tmp_path, "ok", written=json.dumps(document)))
    assert (parsed.status, parsed.codes["json-differs"], parsed.finding("json-differs").value) == ("unknown", "unknown", 1)
    # What is shown is the table, with its digits.
    assert (parsed.result.rows[-1].time_us, parsed.result.correctness) == (23277.0, "ok")
    document["results"][1]["in_place"]["nwrong"] = 4.0
    parsed = run(tmp_path, stand_in_perf.write(tmp_path, "ok", written=json.dumps(document)))
    assert (parsed.status, parsed.result.correctness, parsed.finding("json-differs").value) == ("fail", "wrong", 2)
    assert any("4 written" in line for line in parsed.finding("json-differs").evidence)
    del document["results"][2]
    parsed = run(tmp_path, stand_in_perf.write(tmp_path, "ok", written=json.dumps(document)))
    assert sum("only printed" in line for line in parsed.finding("json-differs").evidence) == 2


@pytest.mark.parametrize("kind", ["ok", "dead", "silent"])
@pytest.mark.parametrize("written", ["", "{", "nonsense", "[]", '{"version": 3}', "\0" * 99])
def test_json_that_is_none_costs_nothing(tmp_path: Path, kind: str, written: str) -> None:
    plain = run(tmp_path, stand_in_perf.write(tmp_path, kind))
    parsed = run(tmp_path, stand_in_perf.write(tmp_path, kind, written=written))
    assert (parsed.codes, parsed.result.rows) == (plain.codes, plain.result.rows)


def test_json_that_got_further_than_what_was_printed(tmp_path: Path) -> None:
    whole = nccl_output.json_text(Run())
    path = stand_in_perf.write(tmp_path, "dead", written=whole[: whole.rindex("experiment_name")])
    parsed = run(tmp_path, path)
    assert (len(parsed.result.rows), parsed.result.complete, parsed.codes["program-killed"]) == (4, False, "fail")
    path = stand_in_perf.write(tmp_path, "silent", written=whole)
    parsed = run(tmp_path, path)
    assert (len(parsed.result.rows), parsed.codes["program-failed"]) == (6, "fail")


def test_json_of_ones_own_is_left_to_its_place(tmp_path: Path) -> None:
    path = stand_in_perf.write(tmp_path, "ok", written=nccl_output.json_text(Run()))
    mine = tmp_path / "mine.json"
    parsed = run(tmp_path, path, arguments=("-g", "8", "-J", str(mine)))
    assert mine.exists()
    assert not any("numbers are those of the JSON" in note for note in parsed.result.notes)


@pytest.mark.parametrize("binary", ["/nowhere/all_reduce_perf", "/bin/sh", "rm", "all_reduce_perf", "/tmp", "/etc/passwd_perf"])
def test_what_is_no_such_program(tmp_path: Path, binary: str) -> None:
    with pytest.raises(Leave) as left:
        run(tmp_path, binary)
    assert left.value.outcome == "environment"


def test_one_that_may_not_be_executed(tmp_path: Path) -> None:
    path = stand_in_perf.write(tmp_path, "ok")
    path.chmod(0o644)
    with pytest.raises(Leave, match="may not be executed"):
        run(tmp_path, path)
    path.chmod(0o755)
    path.write_text("#!/nowhere/python\n")
    assert run(tmp_path, path).codes["program-not-started"] == "unknown"


def test_a_list_of_sizes_is_none_for_a_program(tmp_path: Path) -> None:
    with pytest.raises(Leave, match="no list"):
        run(tmp_path, stand_in_perf.write(tmp_path, "ok"), sizes="32K,1M")


@pytest.mark.parametrize(
    "params", [{"arguments": ("-b", "8")}, {"binary": "x", "arguments": ("\0",)}, {"binary": "x", "arguments": ("x",) * 101}]
)
def test_parameters_that_do_not_go_together(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="arguments"):
        nccl.Params(**params)


def test_no_program_on_the_cpu() -> None:
    with pytest.raises(ValueError, match="GPUs"):
        collectives_cpu.Params(binary="/opt/all_reduce_perf")
