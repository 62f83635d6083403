"""Output of nccl-tests, as it should be and as it comes: generations, labels, several tables, JSON and its traps."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ...support import nccl_output
from ...support.nccl_output import GENERATIONS, GPU, Run, text
from ...support.nccl_parsing import parse

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast", "reduce", "sendrecv")
RUN = Run()


@pytest.mark.parametrize("generation", GENERATIONS)
def test_each_generation(generation: str) -> None:
    parsed = parse(text(RUN, generation))
    result = parsed.result
    assert (result.collective, result.ranks, result.complete) == ("all_reduce", 8, True)
    assert (result.correctness, result.damaged_rows, result.source, result.failure) == ("ok", 0, "file", None)
    assert [(row.size_bytes, row.in_place) for row in result.rows] == [(size, place) for size in RUN.sizes for place in (False, True)]
    assert {row.wrong for row in result.rows} == {0}
    for row in result.rows:
        assert row.time_us == pytest.approx(RUN.time_us(row.size_bytes, in_place=row.in_place), rel=2e-3)
        assert row.busbw_gbs == pytest.approx(row.size_bytes / row.time_us / 1000 * 1.75)  # type: ignore[operator]
        assert row.reported_busbw_gbs == pytest.approx(row.busbw_gbs, rel=0.01, abs=0.01)
        assert (row.dtype, row.redop, row.root) == ("float", "sum", None)
    assert [device.name for device in result.devices] == [GPU] * 8
    assert result.devices[1].bus_id == ("0000:20:00.0" if generation in {"2.16", "2.17", "2.19"} else None)
    assert parsed.codes["busbw"] == "ok"


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("generation", ["2.11", "2.13", "2.17"])
def test_each_collective(collective: str, generation: str) -> None:
    result = parse(text(RUN.but(collective=collective), generation), file_name=f"{collective}.log").result
    assert (result.collective, result.ranks, result.damaged_rows, result.complete) == (collective, 8, 0, True)
    assert result.correctness == "ok"
    assert result.rows[-1].busbw_gbs == pytest.approx(40, rel=0.02)


def test_a_collective_that_nothing_tells() -> None:
    anonymous = text(RUN.but(collective="all_gather"), "2.13")
    parsed = parse(anonymous)
    assert parsed.result.collective == "unknown"
    assert parsed.result.rows[-1].busbw_gbs == parsed.result.rows[-1].reported_busbw_gbs
    assert "--collective" in parsed.finding("no-expectation").message
    assert parse(anonymous, file_collective="all_gather").result.collective == "all_gather"
    # The name of a file tells it only where the numbers agree.
    assert parse(anonymous, file_name="broadcast.log").result.collective == "unknown"


@pytest.mark.parametrize(
    "label", ["[1,0]<stdout>:", "[gpu8:0] ", "0: ", "gpu-8: ", "[1,0]<stdout>:gpu8: ", "\x1b[32m", "rank0: "]
)
def test_labels_of_launchers(label: str) -> None:
    labelled = "".join(f"{label}{line}\n" for line in text(RUN).splitlines())
    assert parse(labelled).result == parse(text(RUN)).result


def test_lines_of_others_between_rows() -> None:
    noisy = []
    for line in text(RUN).splitlines():
        noisy += [line, "gpu8:101:102 [3] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", "1 more process has sent help message"]
        noisy += ["slurmstepd: error: *** STEP 12.0 ON gpu8 ***", "[host4:416596] PMIX ERROR: ERROR in file x.c at line 168", ""]
    parsed = parse("\r\n".join(noisy))
    assert (parsed.result.damaged_rows, parsed.result.correctness, len(parsed.result.rows)) == (0, "ok", 6)
    assert any("P2P/CUMEM" in note for note in parsed.result.notes)


def test_without_any_hash_and_device() -> None:
    bare = "\n".join(re.sub(r"^# ?", " ", line) for line in text(RUN).splitlines() if "Rank" not in line)
    parsed = parse(bare)
    assert (parsed.result.ranks, parsed.result.correctness, parsed.result.complete) == (8, "ok", True)
    assert any("ratio" in note for note in parsed.result.notes)
    assert "--gpu" in parsed.finding("no-expectation").message
    assert parse(bare, gpu=GPU).codes["busbw"] == "ok"


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 16, 72])
def test_the_ranks_follow_from_both_bandwidths(ranks: int) -> None:
    bare = "\n".join(line for line in text(RUN.but(ranks=ranks, gbs=400.0)).splitlines() if "Rank" not in line)
    assert parse(bare).result.ranks == ranks


def test_several_tables_in_one_log() -> None:
    both = text(RUN) + text(RUN.but(collective="all_gather", validation=0))
    result = parse(both).result
    assert {row.collective for row in result.rows} == {"all_reduce", "all_gather"}
    assert (len(result.rows), result.complete, result.correctness) == (12, True, "not_checked")
    assert parse(text(RUN) + text(RUN.but(wrong=3))).result.correctness == "wrong"
    cut = parse(text(RUN) + "\n".join(nccl_output.head(RUN, "2.17")))
    assert (cut.result.complete, cut.codes["incomplete"]) == (False, "unknown")


@pytest.mark.parametrize("label", ["[1,0]<stdout>:", "[1,0]<stdout>: ", "0: "])
def test_a_label_alone_is_an_empty_line(label: str) -> None:
    lines = [f"{label}{line}" for line in text(RUN).splitlines()]
    among_rows = next(place for place, line in enumerate(lines) if "(GB/s)" in line) + 2
    result = parse("\n".join([*lines[:among_rows], label, *lines[among_rows:]])).result
    assert result == parse(text(RUN)).result


def test_two_ranks_that_print_at_once_are_told_apart_by_their_labels() -> None:
    one, other = text(RUN).splitlines(), text(RUN.but(gbs=20.0)).splitlines()
    mixed = "".join(f"[1,0]<stdout>:{a}\n[1,1]<stdout>:{b}\n" for a, b in zip(one, other, strict=True))
    result = parse(mixed).result
    assert (len(result.rows), result.damaged_rows, result.correctness) == (12, 0, "ok")


def test_single_calls() -> None:
    run = RUN.but(single_calls=True)
    rows = parse(text(run, "2.19")).result.rows
    assert [row.latency is not None for row in rows] == [True] * 6
    latency = rows[0].latency
    assert latency is not None
    assert (latency.iterations, latency.p50_us) == (20, None)
    assert latency.min_us < latency.p99_us < latency.max_us
    other = parse(nccl_output.json_text(run, 2)).result.rows[0].latency
    assert other is not None
    assert other.p50_us == pytest.approx(run.time_us(run.sizes[0], in_place=False))


def test_single_calls_that_spread_are_told() -> None:
    noisy = re.sub(r"1\.20\b", "18.60", text(RUN.but(single_calls=True), "2.19"))
    finding = parse(noisy).finding("times-vary")
    assert (finding.level, finding.value, finding.threshold) == ("degraded", 18.6, 5)
    assert len(finding.evidence) == 4


def test_a_single_call_that_is_too_long_is_held_against_its_own_threshold() -> None:
    found = parse(
        text(RUN.but(single_calls=True), "2.19"), thresholds={"nccl.outlier_ratio": 1.01}, thresholds_from="own.yaml"
    ).finding("times-vary")
    assert (found.threshold, found.threshold_source, found.unit) == (1.01, "yours (own.yaml)", "longest / mean")
    assert isinstance(found.value, float)
    assert 1.01 < found.value < 1.1


# Contents ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generation", ["2.13", "2.17", "2.19"])
def test_wrong_data(generation: str) -> None:
    parsed = parse(text(RUN.but(wrong=50), generation))
    finding = parsed.finding("wrong-data")
    assert (parsed.result.correctness, parsed.status, finding.level, finding.value) == ("wrong", "fail", "fail", 100)
    assert [row.wrong for row in parsed.result.rows] == [0, 0, 50, 50, 0, 0]
    assert "4194304 bytes" in finding.evidence[0]


def test_deviations_of_old_versions_are_judged_by_the_count_below() -> None:
    assert parse(text(RUN.but(wrong=50), "2.11")).result.correctness == "wrong"
    small = text(RUN, "2.11").replace("0e+00", "2e-05")
    parsed = parse(small)
    assert (parsed.result.correctness, {row.wrong for row in parsed.result.rows}) == ("ok", {None})


def test_unchecked_is_never_ok() -> None:
    for generation in GENERATIONS:
        parsed = parse(text(RUN.but(validation=0), generation))
        assert (parsed.result.correctness, parsed.codes["not-checked"]) == ("not_checked", "unknown")
    # Some versions print 0 although nothing was checked.
    zeros = text(RUN.but(validation=0)).replace("N/A", "  0")
    assert parse(zeros).result.correctness == "not_checked"


def without_parameters(whole: str) -> str:
    return "".join(line for line in whole.splitlines(keepends=True) if "validation" not in line)


@pytest.mark.parametrize(
    ("generation", "correctness"),
    # The second and third are from when some builds printed 0 without having looked.
    [("2.11", "ok"), ("2.13", "not_checked"), ("2.13.4", "not_checked"), ("2.16", "ok"), ("2.17", "ok"), ("2.19", "ok")],
)
def test_without_its_parameters_a_count_of_none_is_not_always_a_check(generation: str, correctness: str) -> None:
    whole = without_parameters(text(RUN, generation))
    parsed = parse(whole)
    assert parsed.result.correctness == correctness
    assert {row.wrong for row in parsed.result.rows} == {0 if correctness == "ok" else None}
    if correctness != "ok":
        assert "builds print 0" in parsed.finding("not-checked").message
    assert parse(without_parameters(text(RUN.but(wrong=2), generation))).result.correctness == "wrong"


@pytest.mark.parametrize("sentinel", ["N/A", "", "ERR!"])
def test_parameters_that_are_damaged_do_not_say_that_it_checked(sentinel: str) -> None:
    for was in ("validation: 1", "validation:"):
        parsed = parse(text(RUN, "2.13").replace(was, sentinel))
        assert (parsed.result.correctness, parsed.status) == ("not_checked", "unknown")


def test_rows_that_were_not_checked_have_no_count() -> None:
    # Builds of August 2022 print 0 here.
    parsed = parse(text(RUN, "2.13").replace("validation: 1", "validation: 0"))
    assert {row.wrong for row in parsed.result.rows} == {None}
    assert parsed.result.correctness == "not_checked"


def test_a_row_that_is_there_twice_stands_for_no_other() -> None:
    lines = text(RUN).splitlines()
    place = next(number for number, line in enumerate(lines) if line.split()[:1] == ["4194304"])
    lines[place] = lines[place + 1]
    parsed = parse("\n".join(lines))
    assert (parsed.result.complete, parsed.result.correctness) == (False, "not_checked")
    assert parsed.codes["incomplete"] == "unknown"


@pytest.mark.parametrize("sizes", [tuple(1 << power for power in range(16, 30)), tuple(range(1 << 20, 9 << 20, 1 << 20))])
def test_a_step_between_sizes_that_is_too_large_without_parameters(sizes: tuple[int, ...]) -> None:
    lines = without_parameters(text(RUN.but(sizes=sizes))).splitlines()
    assert parse("\n".join(lines)).result.complete
    for gone in sizes[1:-1]:
        parsed = parse("\n".join(line for line in lines if line.split()[:1] != [str(gone)]))
        assert (parsed.result.complete, parsed.result.correctness) == (False, "not_checked"), gone


def test_text_saved_by_a_shell_of_windows() -> None:
    for encoding in ("utf-16", "utf-8-sig"):
        parsed = parse(text(RUN).replace("\n", "\r\n").encode(encoding))
        assert (len(parsed.result.rows), parsed.result.correctness, parsed.result.damaged_rows) == (6, "ok", 0)


@pytest.mark.parametrize("generation", GENERATIONS[1:])
def test_nobody_checks_sendrecv_in_place(generation: str) -> None:
    parsed = parse(text(RUN.but(collective="sendrecv"), generation))
    assert {(row.in_place, row.wrong) for row in parsed.result.rows} == {(False, 0), (True, None)}
    assert parsed.result.correctness == "ok"


def test_an_all_to_all_in_place_cannot_be_checked() -> None:
    good = text(RUN.but(collective="alltoall"))
    assert good.count("N/A") == 3
    assert parse(good).result.correctness == "ok"
    assert parse(text(RUN).replace("          0\n", "        N/A\n")).result.correctness == "not_checked"


# Whole, or not -------------------------------------------------------------------------------------------------------


def test_killed_before_the_first_row() -> None:
    parsed = parse("\n".join(nccl_output.head(RUN, "2.17")))
    assert (parsed.result.complete, parsed.result.correctness, parsed.result.rows) == (False, "not_checked", ())
    assert parsed.result.failure is not None
    assert (parsed.result.failure.kind, parsed.codes["incomplete"]) == ("truncated", "unknown")


def test_killed_between_rows() -> None:
    lines = [*nccl_output.head(RUN, "2.17"), *nccl_output.rows(RUN, "2.17")[:2]]
    parsed = parse("\n".join(lines))
    assert (parsed.result.complete, len(parsed.result.rows), parsed.result.correctness) == (False, 4, "not_checked")


def test_a_size_that_is_missing() -> None:
    lines = text(RUN).splitlines()
    del lines[next(number for number, line in enumerate(lines) if line.split()[:1] == ["4194304"])]
    assert parse("\n".join(lines)).result.complete is False
    # A larger size that did not fit is not missing.
    reduced = text(RUN).replace(f"maxBytes {RUN.sizes[-1]}", f"maxBytes {RUN.sizes[-1] * 128}").replace(
        "# Using devices", f"# Reducing maxBytes to {RUN.sizes[-1]} due to memory limitation\n# Using devices"
    )
    assert parse(reduced).result.complete is True


def test_rows_that_somebody_left_out() -> None:
    lines = text(RUN).splitlines()
    place = next(number for number, line in enumerate(lines) if line.split()[:1] == ["4194304"])
    parsed = parse("\n".join([*lines[:place], "...", *lines[place + 1 :]]))
    assert parsed.result.damaged_rows == 0
    assert any("dots" in note for note in parsed.result.notes)


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("gpu8: Test CUDA failure common.cu:291 'out of memory'", "fail"),
        (" .. gpu8 pid 12: Test failure common.cu:401", "fail"),
        ("gpu8: Test NCCL failure common.cu:958 'unhandled cuda error / '", "fail"),
        ("Test timeout (60s) common.cu:1", "fail"),
    ],
)
def test_failures_that_it_says(line: str, level: str) -> None:
    lines = [*nccl_output.head(RUN, "2.17"), *nccl_output.rows(RUN, "2.17")[:1], line]
    parsed = parse("\n".join(lines))
    assert parsed.codes["program-failed"] == level
    assert parsed.result.failure is not None
    assert parsed.result.failure.kind == "error"


def test_what_never_began() -> None:
    parsed = parse("Invalid number of GPUs: 8 requested but only 7 were found.\n")
    assert parsed.result.failure is not None
    assert (parsed.result.failure.kind, parsed.codes["no-table"]) == ("not-started", "unknown")


def test_the_average_is_never_judged() -> None:
    low = text(RUN).replace("17.4321", "0.0001 FAILED") + " .. gpu8 pid 1: Test failure common.cu:1126\n"
    parsed = parse(low)
    assert (parsed.codes["busbw"], parsed.codes["minimum-missed"]) == ("ok", "unknown")
    assert "program-failed" not in parsed.codes
    assert parse(text(RUN.but(gbs=8.0)).replace("17.4321", "999 OK")).codes["busbw"] == "fail"


# Numbers against each other ------------------------------------------------------------------------------------------


def test_a_wrong_number_of_ranks_is_noticed() -> None:
    lines = [line for line in text(RUN).splitlines() if "Rank  7" not in line]
    parsed = parse("\n".join(lines))
    assert "computed for 8" in parsed.finding("ranks-disagree").message
    assert "busbw" not in parsed.codes


def test_one_rank_says_nothing_about_links() -> None:
    parsed = parse(text(RUN.but(ranks=1)))
    assert (parsed.result.ranks, {row.busbw_gbs for row in parsed.result.rows}) == (1, {0.0})
    assert "MPI=1" in str(parsed.finding("one-rank").action)


def test_one_rank_that_was_asked_for_is_no_doubt() -> None:
    parsed = parse(text(RUN.but(ranks=1)))
    assert (parsed.codes["one-rank"], parsed.status) == ("skipped", "ok")


@pytest.mark.parametrize("collective", ["broadcast", "reduce", "sendrecv"])
def test_a_list_of_devices_that_lost_its_end_tells_no_ranks(collective: str) -> None:
    lines = [line for line in text(RUN.but(collective=collective)).splitlines() if "Rank  7" not in line]
    parsed = parse("\n".join(lines))
    assert parsed.result.ranks is None
    assert "busbw" not in parsed.codes


def test_mpirun_with_a_program_built_without_mpi() -> None:
    one = text(RUN.but(ranks=1)).splitlines()
    labelled = "".join(f"[1,{rank}]<stdout>:{line}\n" for line in one for rank in range(4))
    parsed = parse(labelled)
    assert "4 runs of one rank" in parsed.finding("one-rank").message
    assert parsed.codes["one-rank"] == "unknown"
    assert (len(parsed.result.rows), parsed.result.peak_busbw_gbs) == (24, None)


def test_lines_without_end_cost_little() -> None:
    long = ("1 " * 50_000 + "\n") * 200
    parsed = parse(text(RUN) + long)
    assert (parsed.result.damaged_rows, parsed.result.correctness) == (200, "not_checked")


@pytest.mark.parametrize(("was", "becomes"), [("  4194304 ", "  4194305 "), (" 1048576 ", " 1048577 ")])
def test_rows_that_contradict_themselves_are_damaged(was: str, becomes: str) -> None:
    good = text(RUN)
    assert good.count(was) == 1
    parsed = parse(good.replace(was, becomes))
    assert (parsed.result.damaged_rows, parsed.result.correctness) == (1, "not_checked")


# JSON ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2, 3])
def test_json(version: int) -> None:
    parsed = parse(nccl_output.json_text(RUN, version))
    result = parsed.result
    assert (result.collective, result.ranks, result.complete, result.correctness) == ("all_reduce", 8, True, "ok")
    assert (len(result.rows), result.damaged_rows, result.library_version) == (6, 0, "2.28.9")
    assert (result.devices[0].bus_id, parsed.codes["busbw"]) == ("0000:10:00.0", "ok")


def test_json_and_text_of_a_run_agree() -> None:
    by_size = [
        {(row.size_bytes, row.in_place): row.busbw_gbs for row in parse(each).result.rows}
        for each in (text(RUN), nccl_output.json_text(RUN))
    ]
    assert by_size[0] == pytest.approx(by_size[1], rel=1e-3)


def test_the_environment_is_not_kept() -> None:
    env = ["HF_TOKEN=hunter2", "NCCL_DEBUG=WARN", "CUDA_VISIBLE_DEVICES=0,1", "MY_NCCL_SECRET=hunter2", "AWS_SECRET=NCCL_X=hunter2"]
    parsed = parse(nccl_output.json_text(RUN, env=env))
    assert dict(parsed.result.settings) == {"NCCL_DEBUG": "WARN", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert "hunter2" not in repr(parsed)


def test_json_that_ends_too_early() -> None:
    whole = nccl_output.json_text(RUN)
    seen = set()
    for end in range(200, len(whole) - 1, 7):
        try:
            result = parse(whole[:end]).result
        except ValueError:
            continue
        assert (result.complete, result.correctness) == (False, "not_checked")
        seen.add(len(result.rows))
    assert seen == {0, 2, 4, 6}


def test_json_that_says_something_twice() -> None:
    twice = nccl_output.json_text(RUN.but(wrong=3)).replace('"nwrong": 3.0', '"nwrong": 3.0, "nwrong": 0.0')
    parsed = parse(re.sub(r'"out_of_bounds": \{[^}]*\}', '"out_of_bounds": {"count": 0, "okay": "true"}', twice))
    assert parsed.result.damaged_rows >= 1
    assert (parsed.result.correctness, parsed.result.complete) == ("not_checked", False)


def test_json_without_mpi_lists_one_device() -> None:
    document = nccl_output.document(RUN)
    del document["config"]["devices"][1:]
    assert parse(json.dumps(document)).result.ranks == 8


def test_numbers_of_json_that_are_none() -> None:
    for bad in ('"nan"', "inf", "-inf", "NaN", "Infinity", "null", "true", '"12"', "-3"):
        document = json.dumps(nccl_output.document(RUN))
        time = re.search(r'"time": ([\d.]+)', document)
        assert time is not None
        parsed = parse(document[: time.start(1)] + bad + document[time.end(1) :])
        assert (parsed.result.damaged_rows, parsed.result.correctness, len(parsed.result.rows)) == (1, "not_checked", 4), bad


def test_nothing_was_checked_although_it_says_okay() -> None:
    document = nccl_output.document(RUN.but(validation=0))
    assert document["out_of_bounds"] == {"count": 0, "okay": "true"}
    assert parse(json.dumps(document)).result.correctness == "not_checked"
    document["config"]["validation"] = 1
    assert parse(json.dumps(document)).result.correctness == "not_checked"


@pytest.mark.parametrize("okay", [True, "yes", None, 1, "TRUE"])
def test_only_its_own_true_is_true(okay: Any) -> None:
    document = nccl_output.document(RUN)
    document["out_of_bounds"]["okay"] = okay
    assert parse(json.dumps(document)).result.correctness == "not_checked"


def test_a_version_that_is_not_known_is_read_and_told() -> None:
    document = nccl_output.document(RUN)
    document["version"] = 9
    assert any("9" in note for note in parse(json.dumps(document)).result.notes)


@pytest.mark.parametrize("other", ["", "\n\n", "hello\n", "{}", '{"results": []}', "[1, 2]", "{" * 5000, '{"communicators": []}', "\x00\xff"])
def test_what_is_something_else_is_refused(other: str) -> None:
    with pytest.raises(ValueError, match=r"nccl-tests|nothing in it"):
        parse(other)


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("gpu8:1:2 [0] NCCL INFO NCCL_P2P_DISABLE set by environment to 1", "NCCL_P2P_DISABLE=1 is set"),
        ("gpu8:1:2 [0] NCCL INFO NCCL_P2P_DISABLE set by environment to 0", "1 channel goes via SHM"),
        ("", "1 channel goes via SHM"),
    ],
)
def test_a_setting_that_slows_is_named_before_anything_else(line: str, advice: str) -> None:
    channel = "gpu8:1:2 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct"
    slow = parse(f"{line}\n{channel}\n{text(RUN.but(gbs=9.0))}").finding("busbw")
    assert slow.level == "fail"
    assert (slow.action or "").startswith(advice)


def test_a_name_that_is_no_gpus_is_answered_with_names_that_are() -> None:
    bare = "\n".join(line for line in text(RUN).splitlines() if "Rank" not in line)
    near = parse(bare, gpu="H100").finding("no-expectation").action or ""
    assert near.startswith("known names of GPUs are H100-NVL, H100-PCIe, H100-SXM; ")
    for gpu in (None, "banana"):
        assert "RTX PRO 6000 Blackwell, RTX 5090" in (parse(bare, gpu=gpu).finding("no-expectation").action or "")
