"""``rdiag nccl --parse`` and ``--binary`` from the command line."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest

from remote_diag.errors import LocalIOError
from remote_diag.views.plotting import store

from .support import nccl_output, stand_in_perf
from .support.cli import Ran, command, environment, rdiag
from .support.nccl_output import GPU, Run, text

NAMES = {"collective", "ranks", "complete", "correctness", "damaged_rows", "rows"}
ROW_NAMES = {"size_bytes", "in_place", "time_us", "algbw_gbs", "busbw_gbs", "wrong"}


def parse(folder: Path, whole: str, *arguments: str, name: str = "x.log") -> Ran:
    (folder / name).write_text(whole)
    return rdiag("nccl", "--parse", name, *arguments, home=folder)


def test_the_object_that_programs_read(tmp_path: Path) -> None:
    ran = parse(tmp_path, text(Run()), "--json")
    assert (ran.code, ran.err) == (0, "")
    answer = ran.json
    assert (answer["probe"], answer["status"], answer["host"], answer["schema_version"]) == ("nccl", "ok", "-", 1)
    assert set(answer["result"]) >= NAMES
    assert len(answer["result"]["rows"]) == 6
    assert all(set(row) >= ROW_NAMES for row in answer["result"]["rows"])
    same = parse(tmp_path, nccl_output.json_text(Run()), "--json").json
    assert set(same["result"]) == set(answer["result"])


@pytest.mark.parametrize(
    ("run", "code", "first"),
    [
        (Run(), 0, "x.log: nccl: ok - all_reduce over 8 ranks, data correct, peak 40"),
        (Run(wrong=3), 1, "x.log: nccl: fail - all_reduce over 8 ranks, WRONG DATA"),
        (Run(gbs=9), 1, "x.log: nccl: fail - all_reduce over 8 ranks, data correct"),
        (Run(validation=0), 10, "x.log: nccl: unknown - all_reduce over 8 ranks, data not checked"),
        (Run(gpu="Tesla T4"), 10, "x.log: nccl: unknown - all_reduce over 8 ranks, data correct"),
    ],
    ids=["good", "wrong", "slow", "unchecked", "not known"],
)
def test_verdicts(tmp_path: Path, run: Run, code: int, first: str) -> None:
    ran = parse(tmp_path, text(run))
    assert ran.code == code
    assert ran.out.startswith(first)


def test_from_stdin_without_any_host(tmp_path: Path) -> None:
    done = subprocess.run(
        command("nccl", "--parse", "-", "--json"), input=text(Run()).encode(), capture_output=True, cwd=tmp_path,
        env=environment(tmp_path), timeout=60,
    )  # fmt: skip
    assert (done.returncode, json.loads(done.stdout)["status"]) == (0, "ok")
    done = subprocess.run(
        command("nccl", "--parse", "-"), input=text(Run()).encode(), capture_output=True, cwd=tmp_path, env=environment(tmp_path), timeout=60
    )  # fmt: skip
    assert done.stdout.startswith(b"stdin: nccl: ok - ")
    done = subprocess.run(
        command("nccl", "--parse", "-"), input=b"", capture_output=True, cwd=tmp_path, env=environment(tmp_path), timeout=60
    )
    assert done.returncode == 3
    assert done.stderr.startswith(b"rdiag: error: config: stdin: nothing in it")
    # No host was asked: nothing was installed anywhere.
    assert not (tmp_path / ".cache" / "rdiag").exists()


@pytest.mark.parametrize("whole", ["", "hello\n", "{}", '{"communicators": []}'])
def test_what_is_something_else(tmp_path: Path, whole: str) -> None:
    ran = parse(tmp_path, whole, name="odd.txt")
    assert ran.code == 3
    assert "odd.txt" in ran.err
    ran = parse(tmp_path, whole, "--json", name="odd.txt")
    assert (ran.code, set(ran.json)) == (3, set(ran.json) | {"error"})


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    ran = rdiag("nccl", "--parse", "gone.log", home=tmp_path)
    assert ran.code == 3
    assert "gone.log" in ran.err


def test_what_a_file_does_not_say(tmp_path: Path) -> None:
    bare = "\n".join(line for line in text(Run(collective="all_gather"), "2.13").splitlines() if "Rank" not in line)
    assert parse(tmp_path, bare, "--json").json["result"]["collective"] == "unknown"
    assert parse(tmp_path, bare, "--json", name="all-gather-1.log").json["result"]["collective"] == "all_gather"
    told = parse(tmp_path, bare, "--json", "--collective", "all_gather", "--gpu", GPU).json["result"]
    assert (told["collective"], told["expectation"]["kind"]) == ("all_gather", "physics")


def test_figures_and_thresholds_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(
        "gpu,gpus,nodes,link,layout,settings,collective,algorithm,size_bytes,busbw_gbs,source\n"
        "Tesla T4,8,1,pcie,,,all_reduce,ring,536870912,50,acceptance\n"
    )
    slow = parse(tmp_path, text(Run(gpu="Tesla T4")), "--reference", "own.csv", "--json")
    assert slow.code == 0
    assert slow.json["result"]["expectation"]["source"] == "yours: acceptance"
    (tmp_path / "own.yaml").write_text("nccl.note_ratio: 0.95\n")
    strict = parse(tmp_path, text(Run(gpu="Tesla T4")), "--reference", "own.csv", "--thresholds", "own.yaml", "--json")
    assert (strict.code, strict.json["status"]) == (1, "degraded")
    (busbw,) = [each for each in strict.json["findings"] if each["code"] == "busbw"]
    assert busbw["threshold_source"] == "0.95 (nccl.note_ratio, yours (own.yaml)) of 50: yours: acceptance"
    (tmp_path / "own.yaml").write_text("nccl: {ok_ratio: 0.5, note_ratio: 0.6}\n")
    clash = parse(tmp_path, text(Run()), "--thresholds", "own.yaml")
    assert (clash.code, "own.yaml" in clash.err, "must not be above" in clash.err) == (3, True, True)
    (tmp_path / "own.csv").write_text("gpu\nx\n")
    wrong = parse(tmp_path, text(Run()), "--reference", "own.csv")
    assert (wrong.code, "own.csv" in wrong.err) == (3, True)


def test_a_picture_that_cannot_be_written_whole_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "x.html"
    picture.write_text("the old one")

    def half(path: Path, contents: bytes) -> int:
        with path.open("wb") as file:
            file.write(contents[:4])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(LocalIOError, match="No space"):
        store(picture, b"the new one")
    assert [path.name for path in tmp_path.iterdir()] == ["x.html"]
    assert picture.read_text() == "the old one"


def test_a_name_that_would_steer_the_terminal(tmp_path: Path) -> None:
    ran = parse(tmp_path, text(Run()), name="x\x1b[2J.log")
    assert ran.code == 0
    assert "\x1b" not in ran.out
    assert ran.out.startswith("x\\x1b[2J.log: nccl: ok")


@pytest.mark.parametrize("sizes", ["0", "8:4", "8:64:1", "8:64:+2", "8:64:1_0", "8,0", "x", "", "\u0663", "1:1G:2,8", "9" * 5000])
def test_sizes_that_nobody_could_measure_ask_no_host(tmp_path: Path, sizes: str) -> None:
    ran = rdiag("nccl", "--backend", "gloo", "--sizes", sizes, home=tmp_path)
    assert (ran.code, ran.out) == (2, "")
    assert "--sizes" in ran.err
    assert "Traceback" not in ran.err


def test_blanks_between_sizes_do_no_harm(tmp_path: Path) -> None:
    assert rdiag("nccl", "--backend", "gloo", "--sizes", " 8 : 64 : 2", "--dry-run", home=tmp_path).code == 0


def test_pictures(tmp_path: Path) -> None:
    ran = parse(tmp_path, text(Run()), "--plot", "x.html", "--json")
    assert (ran.code, ran.json["status"]) == (0, "ok")
    assert "Bus bandwidth" in (tmp_path / "x.html").read_text()
    assert parse(tmp_path, text(Run()), "--plot", "x.svg").code == 0
    assert "Bus bandwidth" in (tmp_path / "x.svg").read_text()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["x.html", "x.log", "x.svg"]
    assert parse(tmp_path, text(Run()), "--plot", "x.pdf").code == 2
    assert parse(tmp_path, text(Run()), "--plot", "gone/x.html").code == 2
    ran = parse(tmp_path, "Test timeout (60s) x\n", "--plot", "none.html")
    assert (ran.code, (tmp_path / "none.html").exists()) == (10, False)
    assert "is not drawn" in ran.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--parse", "x.log", "--sizes", "8:8"), ("--parse", "x.log", "--binary", "/x/all_reduce_perf"), ("--parse", "x.log", "--graph"),
        ("--gpu", "x"), ("--", "-b", "8"), ("--backend", "gloo", "--binary", "/x/all_reduce_perf"), ("--parse", "x.log", "--backend", "gloo"),
        ("--backend", "gloo", "--thresholds", "own.yaml"),
        ("--parse", "x.log", "--save-baseline"), ("--parse", "x.log", "-H", "local"), ("--parse", "x.log", "--dry-run"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "x.log").write_text(text(Run()))
    (tmp_path / "own.yaml").write_text("nccl.ok_ratio: 0.95\n")
    assert rdiag("nccl", *arguments, home=tmp_path).code == 2


def test_a_program_on_a_host(tmp_path: Path) -> None:
    path = stand_in_perf.write(tmp_path, "wrong")
    ran = rdiag("nccl", "--binary", str(path), "--force", "--json", "--", "-b", "8", "-e", "$(x)", home=tmp_path)
    assert ran.code == 1, ran.err
    result = ran.json["result"]
    assert (result["source"], result["correctness"], len(result["rows"])) == ("binary", "wrong", 6)
    assert Path(f"{path}.arguments").read_text() == "['-b', '8', '-e', '$(x)']"


def test_a_program_is_not_started_where_nobody_knows_whether_gpus_are_free(tmp_path: Path) -> None:
    path = stand_in_perf.write(tmp_path, "ok")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    ran = rdiag("nccl", "--binary", str(path), home=tmp_path, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert ran.code == 9, ran.err
    assert not Path(f"{path}.arguments").exists()


def test_a_program_that_never_ends_and_its_rows(tmp_path: Path) -> None:
    path = stand_in_perf.write(tmp_path, "deaf")
    ran = rdiag("nccl", "--binary", str(path), "--force", "--timeout", "9", "--json", home=tmp_path)
    assert ran.code == 10, ran.err
    assert len(ran.json["result"]["rows"]) == 4
    assert ran.json["result"]["failure"]["kind"] == "deadline"


def test_baselines(tmp_path: Path) -> None:
    fast, slow = stand_in_perf.write(tmp_path, "ok"), tmp_path / "slow"
    slow.mkdir()
    ran = rdiag("nccl", "--binary", str(fast), "--force", "--save-baseline", "--json", home=tmp_path)
    assert (ran.code, ran.json["baseline"]["differences"]) == (0, [])
    same = rdiag("nccl", "--binary", str(fast), "--force", "--json", home=tmp_path)
    assert (same.code, same.json["baseline"]["differences"]) == (0, [])
    unchecked = stand_in_perf.write(slow, "ok", run=Run(validation=0))
    ran = rdiag("nccl", "--binary", str(unchecked), "--force", "--json", home=tmp_path)
    assert (ran.code, ran.json["status"], ran.json["baseline"]["differences"]) == (10, "unknown", [])
    slower = stand_in_perf.write(slow, "ok", run=Run(gbs=33.0))
    ran = rdiag("nccl", "--binary", str(slower), "--force", "--json", home=tmp_path)
    assert (ran.code, ran.json["status"]) == (1, "degraded")
    changed = [each["key"] for each in ran.json["baseline"]["differences"]]
    large = [f"rows[all_reduce/float/{in_place}/{size}].busbw_gbs" for in_place in (False, True) for size in Run().sizes[1:]]
    assert sorted(changed) == sorted(large)
