"""Whatever is done to the output of nccl-tests, nothing turns ok because of it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from ...support import captures, nccl_output
from ...support.nccl_output import GENERATIONS, Run, text
from ...support.nccl_parsing import Parsed, parse

SENTINELS = (
    "N/A", "[N/A]", "[Not Supported]", "[Unknown Error]", "[GPU is lost]", "ERR!", "-", "", "nan", "-nan", "inf", "None", "0x10", "1,024",
    "-1", "GPU requires reset",
)  # fmt: skip
NOTHING: tuple[Any, ...] = (None, "nan", "N/A", "", -1, [], {}, True)
"""What stands in JSON in place of a value; None: the key is not there."""
GOOD, BAD, UNCHECKED = Run(), Run(wrong=3), Run(validation=0)
SLOW = Run(gbs=12.0)


def cells(line: str) -> Iterator[tuple[int, int]]:
    for found in re.finditer(r"\S+", line):
        yield found.span()


def row_lines(whole: str) -> list[int]:
    return [number for number, line in enumerate(whole.splitlines()) if re.match(r"(?:\S+:)?\s*\d+\s+\d+\s+float", line)]


def with_line(whole: str, number: int, line: str) -> str:
    lines = whole.splitlines()
    lines[number] = line
    return "\n".join(lines) + "\n"


def mutated_cells(whole: str) -> Iterator[tuple[str, str, str]]:
    """Yield (text with one cell of one row replaced, what it was, what it is)."""
    lines = whole.splitlines()
    for number in row_lines(whole):
        line = lines[number]
        for start, end in cells(line):
            for sentinel in SENTINELS:
                if line[start:end] != sentinel:
                    yield with_line(whole, number, line[:start] + sentinel + line[end:]), line[start:end], sentinel


def check_other_rows(parsed: Parsed, good: Parsed) -> None:
    """Every row that is told is one of those that the undamaged text tells."""
    known = {(row.size_bytes, row.in_place): row for row in good.result.rows}
    for row in parsed.result.rows:
        other = known[row.size_bytes, row.in_place]
        assert (row.time_us, row.busbw_gbs) == (other.time_us, other.busbw_gbs)
        assert row.wrong in {other.wrong, None}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_each_cell_becomes_each_sentinel(generation: str) -> None:
    good = parse(text(GOOD, generation))
    assert (good.result.correctness, good.result.damaged_rows) == ("ok", 0)
    tried = 0
    for mutated, was, becomes in mutated_cells(text(GOOD, generation)):
        parsed = parse(mutated)
        tried += 1
        assert parsed.result.correctness == "not_checked", (was, becomes)
        # N/A is what a row says that was not checked; everywhere else it is damage.
        unchecked = becomes == "N/A" and was in {"0", "0e+00"}
        assert parsed.result.damaged_rows == (0 if unchecked else 1), (was, becomes)
        assert len(parsed.result.rows) == (6 if unchecked else 4)
        assert parsed.status != "ok"
        check_other_rows(parsed, good)
    assert tried > 500


@pytest.mark.parametrize("generation", ["2.11", "2.19"])
@pytest.mark.parametrize(("run", "correctness"), [(BAD, "wrong"), (UNCHECKED, "not_checked")], ids=["wrong", "unchecked"])
def test_no_cell_hides_what_is_wrong(generation: str, run: Run, correctness: str) -> None:
    for mutated, was, becomes in mutated_cells(text(run, generation)):
        parsed = parse(mutated)
        assert parsed.result.correctness == correctness, (was, becomes)
        assert parsed.status != "ok"


def test_no_cell_makes_a_slow_run_fast() -> None:
    assert parse(text(SLOW)).codes["busbw"] == "fail"
    for mutated, was, becomes in mutated_cells(text(SLOW)):
        assert parse(mutated).codes.get("busbw") in {None, "fail"}, (was, becomes)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_columns_that_are_dropped(generation: str) -> None:
    """From one row, from all, and from the header: the rest is not read as if it were in its place."""
    whole = text(GOOD, generation)
    lines = whole.splitlines()
    header = next(number for number, line in enumerate(lines) if line.startswith("#") and "algbw" in line)
    rows = row_lines(whole)
    width = len(lines[rows[0]].split())
    for column in range(width):
        def without(line: str, column: int = column) -> str:
            words = line.replace("#", " ", 1).split() if line.startswith("#") else line.split()
            return ("# " if line.startswith("#") else " ") + " ".join(words[:column] + words[column + 1 :])

        for numbers in ([rows[1]], rows, [header], [header, *rows]):
            changed = list(lines)
            for number in numbers:
                changed[number] = without(changed[number])
            parsed = parse("\n".join(changed))
            gone = lines[header].replace("#", " ", 1).split()[column]
            if numbers == [header, *rows] and gone in {"count", "redop", "root", "type"}:
                # The table still says all that it needs; only what it no longer says is unknown.
                assert {row.time_us for row in parsed.result.rows} <= {row.time_us for row in parse(whole).result.rows}
                continue
            assert parsed.result.correctness != "ok", (column, numbers)
            check_other_rows(parsed, parse(whole))


@pytest.mark.parametrize(("run", "correctness"), [(BAD, "wrong"), (UNCHECKED, "not_checked")], ids=["wrong", "unchecked"])
@pytest.mark.parametrize("generation", ["2.11", "2.17"])
def test_lines_that_are_gone_and_texts_that_end(generation: str, run: Run, correctness: str) -> None:
    whole = text(run, generation)
    lines = whole.splitlines()
    for number in range(len(lines)):
        assert parse("\n".join(lines[:number] + lines[number + 1 :])).result.correctness != "ok"
    for end in range(len(whole) - 300, len(whole), 3):
        assert parse(whole[:end]).result.correctness != "ok"
    assert parse(whole).result.correctness == correctness


def test_a_good_text_that_ends_is_not_complete() -> None:
    whole = text(GOOD)
    footer = whole.index("# Out of bounds")
    rows = row_lines(whole)
    first = sum(len(line) + 1 for line in whole.splitlines()[: rows[0]])
    for end in range(first, footer, 5):
        parsed = parse(whole[:end])
        assert (parsed.result.complete, parsed.result.correctness) == (False, "not_checked"), end
        assert "incomplete" in parsed.codes


@pytest.mark.parametrize("glue", ["[1,0]<stdout>:", "[1,3]<stderr>:", "gpu8:1:2 [0] NCCL INFO x ", "0: "])
def test_labels_glued_into_rows(glue: str) -> None:
    whole = text(GOOD)
    good = parse(whole)
    for number in row_lines(whole):
        line = whole.splitlines()[number]
        for place in range(12, len(line), 3):
            parsed = parse(with_line(whole, number, line[:place] + glue + line[place:]))
            assert parsed.result.correctness == "not_checked", line[:place]
            assert parsed.result.damaged_rows == 1
            assert len(parsed.result.rows) == 4
            check_other_rows(parsed, good)


def test_two_rows_on_one_line() -> None:
    whole = text(GOOD)
    lines, (first, second, _) = whole.splitlines(), row_lines(whole)
    parsed = parse("\n".join([*lines[:first], lines[first] + lines[second], *lines[second + 1 :]]))
    assert (parsed.result.damaged_rows, parsed.result.correctness, parsed.result.complete) == (1, "not_checked", False)


def test_rows_without_a_header_are_damaged() -> None:
    lines = [line for line in text(GOOD).splitlines() if "algbw" not in line]
    parsed = parse("\n".join(lines))
    assert (parsed.result.damaged_rows, parsed.result.rows, parsed.result.correctness) == (3, (), "not_checked")


@pytest.mark.parametrize("count", ["N/A", "nan", "-1", "", "0x0", "zero"])
@pytest.mark.parametrize("word", ["OK", "FAILED", "", "N/A"])
def test_a_footer_that_says_nothing(count: str, word: str) -> None:
    whole = text(GOOD).replace("values : 0 OK", f"values : {count} {word}")
    assert parse(whole).result.correctness == ("wrong" if word == "FAILED" and count else "not_checked")


# JSON ----------------------------------------------------------------------------------------------------------------


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value below ``value``."""
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in below:
        yield (*path, key)
        yield from places(item, (*path, key))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> str:
    copy = json.loads(json.dumps(document))
    target = copy
    for key in path[:-1]:
        target = target[key]
    if value is None and path[-1] != "nwrong":
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return json.dumps(copy)


@pytest.mark.parametrize("run", [BAD, UNCHECKED, SLOW], ids=["wrong", "unchecked", "slow"])
def test_no_value_of_the_json_makes_it_ok(run: Run) -> None:
    document = nccl_output.document(run)
    for path in places(document):
        for value in NOTHING:
            try:
                parsed = parse(changed(document, path, value))
            except ValueError:
                continue
            if run is SLOW:
                assert parsed.codes.get("busbw") in {None, "fail"}, (path, value)
            else:
                assert parsed.result.correctness != "ok", (path, value)


def test_values_of_good_json_that_are_damaged() -> None:
    document = nccl_output.document(GOOD)
    good = parse(json.dumps(document))
    assert good.result.correctness == "ok"
    for path in places(document["results"], ("results",)):
        if path[-1] in {"actual_iterations", "experiment_name", "root", "redop"} or len(path) == 1:
            continue
        for value in (*NOTHING[1:], "12"):
            parsed = parse(changed(document, path, value))
            assert parsed.result.correctness == "not_checked", (path, value)
            check_other_rows(parsed, good)


# Captures ------------------------------------------------------------------------------------------------------------

@captures.needs_captures
@pytest.mark.parametrize("name", [name for name in captures.names("nccl_tests*") if name.endswith(".txt")])
def test_captures_after_damage(name: str) -> None:
    whole = captures.read(name)
    before = parse(whole).result.correctness
    chance = random.Random(name)  # noqa: S311 - the same places each time
    lines = whole.splitlines()
    for _ in range(80):
        number = chance.randrange(len(lines))
        spans = list(cells(lines[number]))
        if not spans:
            continue
        start, end = chance.choice(spans)
        line = lines[number][:start] + chance.choice(SENTINELS) + lines[number][end:]
        after = parse(with_line(whole, number, line)).result.correctness
        assert after == before or after != "ok", line
    for number in range(len(lines)):
        after = parse("\n".join(lines[:number] + lines[number + 1 :]) + "\n").result.correctness if len(lines) > 1 else before
        assert after == before or after != "ok", line
