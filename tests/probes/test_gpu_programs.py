"""Running programs that may hang, the rule of a free GPU, and thresholds."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from probes.lib.gpu import run_smi
from probes.lib.gpu.occupancy import GpuUse, Inquiry, parse_apps
from probes.lib.gpu.thresholds import OVERRIDDEN, Thresholds, standard


def script(folder: Path, text: str, name: str = "nvidia-smi") -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def lives(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_output_status_and_both_streams(tmp_path: Path) -> None:
    said = run_smi.ask((script(tmp_path, "echo out; echo err >&2; exit 9"), "-L"), 20)
    assert (said.how, said.status, said.out, said.err, said.ok) == ("ended", 9, "out\n", "err\n", False)
    assert said.why == "nvidia-smi -L ended with status 9: out"
    assert run_smi.ask((script(tmp_path, "kill -9 $$"),), 20).status == -9
    assert run_smi.ask((script(tmp_path, "printf 'a\\377b'"),), 20).out == "a�b"


def test_the_whole_group_is_ended(tmp_path: Path) -> None:
    path = script(tmp_path, f"sleep 1000 & echo $! > {tmp_path}/child; wait")
    said = run_smi.ask((path,), 1.0)
    assert (said.how, said.pid) == ("timeout", None)
    child = int((tmp_path / "child").read_text())
    until = time.monotonic() + 10
    while time.monotonic() < until and lives(child):
        time.sleep(0.02)
    assert not lives(child)


def test_a_grandchild_that_keeps_the_pipe_holds_nothing_up(tmp_path: Path) -> None:
    begun = time.monotonic()
    said = run_smi.ask((script(tmp_path, f"sleep 1000 & echo $! > {tmp_path}/child; echo done"),), 30)
    assert (said.how, said.out) == ("ended", "done\n")
    assert time.monotonic() - begun < 15
    child = int((tmp_path / "child").read_text())
    until = time.monotonic() + 10
    while time.monotonic() < until and lives(child):
        time.sleep(0.02)
    assert not lives(child), "it outlives the question"


@pytest.mark.parametrize("stream", ["yes", "yes >&2"])
def test_endless_output_is_no_answer(tmp_path: Path, stream: str) -> None:
    said = run_smi.ask((script(tmp_path, stream),), 30, limit=100_000)
    assert said.how == "too-long"
    assert not said.ok


def test_what_hung_is_not_asked_again(tmp_path: Path) -> None:
    script(tmp_path, f"echo >> {tmp_path}/calls; exec sleep 1000")
    script(tmp_path, "echo fine", "lspci")
    programs = run_smi.Programs(60, str(tmp_path))
    assert programs.ask("nvidia-smi", seconds=0.5).how == "timeout"
    assert programs.ask("nvidia-smi", "-L").how == "not-asked"
    assert programs.stuck("nvidia-smi") is not None
    assert programs.ask("lspci").out == "fine\n"
    assert (tmp_path / "calls").read_text() == "\n"
    assert programs.ask("nvidia-smi-of-nobody").how == "not-found"


def test_no_time_left_means_no_question(tmp_path: Path) -> None:
    script(tmp_path, f"echo >> {tmp_path}/calls")
    assert run_smi.Programs(0.0, str(tmp_path)).ask("nvidia-smi").how == "not-asked"
    assert not (tmp_path / "calls").exists()


# -- a free GPU


def use(used: float | None, *load: float | None, total: float | None = 97887.0) -> GpuUse:
    return GpuUse(0, "GPU-a", "", total, used, list(load))


@pytest.mark.parametrize(
    ("gpu", "free"),
    [
        (use(0.0, 0.0, 0.0), True),
        (use(1957.0, 4.9, 0.0), True),
        (use(1958.0, 0.0, 0.0), False),
        (use(64.0, 0.0, 0.0, total=2048.0), True),
        (use(65.0, 0.0, 0.0, total=2048.0), False),
        (use(0.0, 0.0, 5.0), False),
        (use(0.0, 5.0, 0.0), False),
        (use(0.0, 99.0, 0.0, 0.0), True),
        (use(0.0, None, None), True),
        (use(0.0, 0.0), False),
        (use(0.0), False),
        (use(None, 0.0, 0.0), False),
        (use(0.0, 0.0, 0.0, total=None), False),
    ],
)
def test_the_rule_of_a_free_gpu(gpu: GpuUse, *, free: bool) -> None:
    assert gpu.free is free
    assert (gpu.busy is None) is free


def test_a_process_is_named_whatever_the_numbers_say() -> None:
    gpu = use(0.0, 0.0, 0.0)
    gpu.processes = parse_apps(["GPU-a, 1, /bin/x, with, commas, [N/A]"])
    assert gpu.busy is not None
    assert gpu.busy.startswith("pid 1 (/bin/x, with, commas, user ")


ROW = "0, GPU-a, 00000000:1B:00.0, 97887, 0, %s"


def test_the_inquiry_asks_for_load_until_it_is_settled() -> None:
    inquiry = Inquiry()
    pauses = []
    for answer in ([ROW % 0], [], [ROW % 0]):
        assert inquiry.question is not None
        pauses.append(inquiry.pause)
        inquiry.take(answer)
    assert inquiry.question is None
    assert inquiry.busy == []
    assert (pauses[0], pauses[1]) == (0.0, 0.0)
    assert pauses[2] > 0


def test_the_inquiry_gives_up_on_a_card_that_stays_at_work() -> None:
    inquiry = Inquiry()
    asked = 0
    while inquiry.question is not None:
        inquiry.take([] if "--query-compute-apps" in inquiry.question[0] else [ROW % 100])
        asked += 1
    assert asked == 5
    assert "it is at work" in inquiry.busy[0][1]


@pytest.mark.parametrize(
    "answers",
    [
        [[]], [["No devices were found"]], [[ROW % 0, ROW % 0]], [[ROW % 0], ["1, x, y"]], [[ROW % 0], [], []],
        [[ROW % 0], [], ["0, GPU-b, 00000000:1B:00.0, 97887, 0, 0"]], [[ROW % 0, (ROW % 0).replace("GPU-a", "GPU-b")]], [[ROW % "[GPU is lost]"]], [[ROW % ""]], [[ROW % "-1"]],
    ],
)  # fmt: skip
def test_answers_that_make_no_sense_are_never_free(answers: list[list[str]]) -> None:
    inquiry = Inquiry()
    with pytest.raises(ValueError, match=r".+"):  # noqa: PT012 - any of the answers may be the one
        for answer in answers:
            inquiry.take(answer)


# -- thresholds


def test_every_threshold_says_where_it_comes_from() -> None:
    for name, threshold in standard().items():
        assert name.count(".") == 1
        assert threshold.source
        assert threshold.unit
        assert len(threshold.as_of) == 7


def test_overrides_are_checked_and_named() -> None:
    mine = Thresholds({"gpu.temperature_c": 80})["gpu.temperature_c"]
    assert (mine.value, mine.provenance) == (80.0, OVERRIDDEN)
    for bad in ({"gpu.no": 1.0}, {"gpu.temperature_c": -1.0}, {"gpu.temperature_c": True}, {"gpu.temperature_c": float("nan")}):
        with pytest.raises(ValueError, match="threshold"):
            Thresholds(bad)
