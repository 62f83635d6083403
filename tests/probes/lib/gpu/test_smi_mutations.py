"""Damage to what nvidia-smi prints: no number is ever wrong because of it, and no other GPU's reading is lost.

Every change to the output of three GPUs touches GPU 1. Each of its metrics must afterwards be what it
was or be missing with a reason; all of the others' must be what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from probes.lib.gpu.missing import Missing, missing
from probes.lib.gpu.smi_csv import QUERY, parse_gpu_csv
from probes.lib.gpu.smi_fields import BY_FIELD
from probes.lib.gpu.smi_identify import identify, parse
from probes.lib.gpu.smi_reading import Answer, GpuReading
from probes.lib.gpu.smi_tree import Refused, parse_q, parse_xml
from tests.support import smi_texts

SENTINELS = (
    "[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", "Unknown Error", "[GPU is lost]", "[GPU requires reset]",
    "[Insufficient Permissions]", "[Requested functionality has been deprecated]", "", "ERR!",
)  # fmt: skip
LABELS = ("[1,0]<stdout>:", "node-7: ", "3: ", "rank0:", "\x1b[31m", "GPU 1: ")
HIT = 1
FREE_TEXT = {"name", "serial", "fabric_status", "fabric_health", "architecture"}
"""Words without a shape: something glued to them is another word, never a number."""
CARDS = smi_texts.cards(3)


def values(reading: GpuReading) -> dict[str, object]:
    return dict(reading.metrics())


def of_card(answer: Answer, card: int) -> GpuReading | None:
    address = smi_texts.bus_id(card)[4:].lower()
    found = [
        reading for reading in answer.readings if reading.bus_id == address or reading.uuid == smi_texts.uuid(card)
    ]
    assert len(found) <= 1
    return found[0] if found else None


def assert_harmless(before: Answer, after: Answer, *, words: bool = False) -> None:
    """GPU 1 tells the truth or nothing; all others are as they were."""
    for card in range(len(CARDS)):
        old, new = of_card(before, card), of_card(after, card)
        assert old is not None
        if card != HIT:
            assert new is not None, f"GPU {card} is lost"
            assert values(new) == values(old)
        elif new is not None:
            for name, value in values(new).items():
                if isinstance(value, Missing) or (words and name in FREE_TEXT):
                    continue
                assert value == values(old)[name], name


def damaged_row(text: str, change: Callable[[str], str]) -> str:
    """Change the line of GPU 1 in csv with a header."""
    lines = text.split("\n")
    lines[HIT + 1] = change(lines[HIT + 1])
    return "\n".join(lines)


FORMS = {
    "header, units": (True, True),
    "no header, units": (False, True),
    "no header, no units": (False, False),
    "header, no units": (True, False),
}


def printed(form: str, cards: Sequence[smi_texts.Card] = CARDS) -> str:
    header, units = FORMS[form]
    return smi_texts.csv(cards, header=header, units=units)


@pytest.mark.parametrize("form", FORMS)
def test_csv_of_every_form_says_the_same(form: str) -> None:
    answer = parse_gpu_csv(printed(form), QUERY)
    plain = parse_gpu_csv(smi_texts.csv(CARDS))
    assert [values(one) for one in answer.readings] == [values(one) for one in plain.readings]
    assert not answer.notes
    assert not answer.troubles
    reading = plain.readings[HIT]
    for name in QUERY:
        assert not isinstance(values(reading)[BY_FIELD[name].name], Missing), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sentinel", SENTINELS)
def test_a_sentinel_in_any_csv_cell_is_that_metrics_reason_and_nothing_else(form: str, sentinel: str) -> None:
    before = parse_gpu_csv(printed(form), QUERY)
    expected = missing(sentinel)
    assert expected is not None
    for name in QUERY:
        cards = smi_texts.cards(3)
        cards[HIT].cells[name] = sentinel
        after = parse_gpu_csv(printed(form, cards), QUERY)
        assert_harmless(before, after)
        new = after.readings[HIT]
        assert len(after.readings) == len(CARDS)
        changed = {key for key, value in values(new).items() if value != values(before.readings[HIT])[key]}
        assert changed == {BY_FIELD[name].name}
        value = values(new)[BY_FIELD[name].name]
        assert isinstance(value, Missing)
        assert value.reason == expected.reason


def test_a_column_that_is_not_there_is_not_reported_and_costs_nothing_else() -> None:
    before = parse_gpu_csv(smi_texts.csv(CARDS))
    for name in QUERY:
        fields = [field for field in QUERY if field != name]
        for answer in (
            parse_gpu_csv(smi_texts.csv(CARDS, fields)),
            parse_gpu_csv(smi_texts.csv(CARDS, fields), QUERY),
            parse_gpu_csv(smi_texts.csv(CARDS, fields, header=False), fields),
        ):
            metric = BY_FIELD[name].name
            for old, new in zip(before.readings, answer.readings, strict=True):
                gone = {key for key, value in values(new).items() if value != values(old)[key]}
                assert gone == {metric}
                assert values(new)[metric] == Missing("not-reported")


@pytest.mark.parametrize("form", FORMS)
def test_a_row_that_lost_or_won_a_cell_gives_no_number(form: str) -> None:
    text = printed(form)
    before = parse_gpu_csv(text, QUERY)
    lines = text.split("\n")
    at = HIT + (1 if FORMS[form][0] else 0)
    cells = lines[at].split(", ")
    for place in range(len(cells)):
        for changed in (cells[:place] + cells[place + 1 :], [*cells[:place], "7", *cells[place:]]):
            damaged = [*lines[:at], ", ".join(changed), *lines[at + 1 :]]
            after = parse_gpu_csv("\n".join(damaged), QUERY)
            assert_harmless(before, after)
            hit = of_card(after, HIT)
            assert hit is not None, "its UUID or its address still says whose row it is"
            assert hit.damaged
            assert isinstance(hit.temperature_c, Missing)
            assert hit.temperature_c.reason == "error"


def test_a_row_cut_anywhere_says_the_truth_or_nothing() -> None:
    text = smi_texts.csv(CARDS)
    before = parse_gpu_csv(text)
    row = text.split("\n")[HIT + 1]
    for length in range(0, len(row), 2):
        assert_harmless(before, parse_gpu_csv(damaged_row(text, lambda line, length=length: line[:length])))  # type: ignore[misc]


@pytest.mark.parametrize("form", FORMS)
def test_a_csv_cut_anywhere_keeps_whole_rows_and_invents_nothing(form: str) -> None:
    text = printed(form, CARDS[:2])
    whole = parse_gpu_csv(text, QUERY)
    for length in range(0, len(text), 11):
        answer = parse_gpu_csv(text[:length], QUERY)
        rows = text[:length].count("\n") - (1 if FORMS[form][0] else 0)
        assert len(answer.readings) >= rows
        for old, new in zip(whole.readings, answer.readings, strict=False):
            for name, value in values(new).items():
                assert isinstance(value, Missing) or value == values(old)[name], (length, name)
        assert [values(one) for one in answer.readings[: max(rows, 0)]] == [
            values(one) for one in whole.readings[: max(rows, 0)]
        ]


@pytest.mark.parametrize("label", LABELS)
def test_a_label_glued_to_any_cell_spoils_only_that_cell(label: str) -> None:
    text = smi_texts.csv(CARDS)
    before = parse_gpu_csv(text)
    for place in range(len(QUERY)):

        def glue(line: str, place: int = place) -> str:
            cells = line.split(", ")
            cells[place] = label + cells[place]
            return ", ".join(cells)

        assert_harmless(before, parse_gpu_csv(damaged_row(text, glue)), words=True)


def test_a_label_before_every_line_makes_no_number_wrong() -> None:
    text = smi_texts.csv(CARDS)
    before = parse_gpu_csv(text)
    labelled = "".join(f"[1,0]<stdout>:{line}\n" for line in text.split("\n") if line)
    after = parse_gpu_csv(labelled)
    assert len(after.readings) == len(CARDS)
    for old, new in zip(before.readings, after.readings, strict=True):
        assert all(isinstance(value, Missing) or value == values(old)[name] for name, value in values(new).items())
        assert new.temperature_c == old.temperature_c


def test_a_header_with_another_unit_spoils_that_column() -> None:
    text = smi_texts.csv(CARDS, units=False).replace("memory.used [MiB]", "memory.used [KiB]")
    answer = parse_gpu_csv(text)
    assert all(isinstance(reading.memory_used_mib, Missing) for reading in answer.readings)
    assert answer.readings[0].memory_total_mib == 97887.0


ERROR_LINES = (
    "Unable to determine the device handle for GPU{}: Unknown Error",
    "Unable to determine the device handle for GPU {}: GPU is lost.  Reboot the system to recover this GPU",
    "Unable to determine the device handle for gpu {}: Not Found",
)


@pytest.mark.parametrize("line", ERROR_LINES)
@pytest.mark.parametrize("row", [True, False])
def test_an_error_between_rows_names_its_gpu_and_costs_no_other(line: str, row: bool) -> None:
    before = parse_gpu_csv(smi_texts.csv(CARDS))
    lines = smi_texts.csv(CARDS).split("\n")
    address = smi_texts.bus_id(HIT)[4:]
    errors = ", ".join("[Unknown Error]" for _ in QUERY)
    lines[HIT + 1 : HIT + 2] = [line.format(address), *([errors] if row else [])]
    after = parse_gpu_csv("\n".join(lines))
    assert_harmless(before, after)
    assert [(one.code, one.scope, one.bus_id) for one in after.troubles] == [("gpu-lost", "gpu", address.lower())]
    hit = of_card(after, HIT)
    assert (hit is not None) is row
    if hit is not None:
        assert values(hit)["index"] == Missing("error", "[Unknown Error]")


XML_PARSERS = {layout: smi_texts.xml(CARDS, layout) for layout in smi_texts.LAYOUTS}


@pytest.mark.parametrize("layout", smi_texts.LAYOUTS)
def test_xml_of_every_layout_says_what_csv_says(layout: str) -> None:
    csv = parse_gpu_csv(smi_texts.csv(CARDS)).readings
    xml = parse_xml(XML_PARSERS[layout])
    assert xml.complete
    assert not xml.notes
    assert xml.driver_version == "595.58.03"
    never = {"index", "compute_capability", "gsp_enabled", "inforom_valid"}
    older = {"power_average_w", "power_instant_w"} if layout in {"before-535", "535"} else set()
    for one, other in zip(csv, xml.readings, strict=True):
        for name, value in values(one).items():
            if not isinstance(value, Missing):
                expected = Missing("not-reported") if name in never | older else value
                assert values(other)[name] == expected, name


def test_q_says_what_csv_says() -> None:
    csv = parse_gpu_csv(smi_texts.csv(CARDS)).readings
    text = parse_q(smi_texts.q(CARDS))
    assert text.driver_version == "595.58.03"
    told = 0
    for one, other in zip(csv, text.readings, strict=True):
        for name, value in values(other).items():
            if not isinstance(value, Missing) and name not in {"minor_number", "pcie_replays"}:
                told += 1
                assert values(one)[name] == value, name
    assert told > 40 * len(CARDS)


def leaves(text: str, *, address: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each value within the block of one GPU."""
    start = text.index(address)
    end = text.find("</gpu>", start) if "</gpu>" in text else text.find("\nGPU ", start)
    end = len(text) if end < 0 else end
    place = start
    for line in text[start:end].split("\n"):
        if "</" in line and not line.strip().startswith("</"):
            yield place + line.index(">") + 1, place + line.rindex("</")
        elif ": " in line and "<" not in line:
            yield place + line.index(": ") + 2, place + len(line)
        place += len(line) + 1


@pytest.mark.parametrize("kind", ["570", "q"])
def test_a_sentinel_in_any_element_makes_nothing_wrong(kind: str) -> None:
    text = smi_texts.q(CARDS[:2]) if kind == "q" else smi_texts.xml(CARDS[:2], kind)
    reader = parse_q if kind == "q" else parse_xml
    before = reader(text)
    count = 0
    for start, end in leaves(text, address=smi_texts.bus_id(HIT)):
        for sentinel in SENTINELS:
            count += 1
            assert_same_or_better(before, reader(text[:start] + sentinel + text[end:]), text[start:end])
    assert count > 40 * len(SENTINELS)


@pytest.mark.parametrize("layout", [layout for layout in smi_texts.LAYOUTS if layout != "570"])
def test_sentinels_take_turns_in_the_other_layouts(layout: str) -> None:
    text = smi_texts.xml(CARDS[:2], layout)
    before = parse_xml(text)
    for turn, (start, end) in enumerate(leaves(text, address=smi_texts.bus_id(HIT))):
        sentinel = SENTINELS[turn % len(SENTINELS)]
        assert_same_or_better(before, parse_xml(text[:start] + sentinel + text[end:]), text[start:end])


@pytest.mark.parametrize("kind", [*smi_texts.LAYOUTS, "q"])
def test_labels_glued_to_elements_take_turns(kind: str) -> None:
    text = smi_texts.q(CARDS[:2]) if kind == "q" else smi_texts.xml(CARDS[:2], kind)
    reader = parse_q if kind == "q" else parse_xml
    before = reader(text)
    for turn, (start, _) in enumerate(leaves(text, address=smi_texts.bus_id(HIT))):
        label = LABELS[turn % len(LABELS)]
        if kind != "q":
            label = label.replace("<", "&lt;").replace("\x1b", "")
        after = reader(text[:start] + label + text[start:])
        old, new = of_card(before, HIT), of_card(after, HIT)
        assert old is not None
        assert new is not None
        for name, value in values(new).items():
            assert isinstance(value, Missing) or name in {*FREE_TEXT, "power_w"} or value == values(old)[name], name
        assert values(after.readings[0]) == values(before.readings[0])


def test_a_label_before_every_line_of_xml_leaves_every_gpu_named() -> None:
    for label in LABELS:
        labelled = "".join(label + line + "\n" for line in XML_PARSERS["570"].split("\n"))
        after = parse_xml(labelled)
        assert len(after.readings) == len(CARDS)
        for card in range(len(CARDS)):
            assert of_card(after, card) is not None


@pytest.mark.parametrize("text", [smi_texts.csv(CARDS), smi_texts.xml(CARDS), smi_texts.q(CARDS)])
def test_files_saved_on_windows_say_the_same(text: str) -> None:
    saved = "\ufeff" + text.replace("\n", "\r\n")
    assert [values(one) for one in parse(saved).readings] == [values(one) for one in parse(text).readings]


def assert_same_or_better(before: Answer, after: Answer, what: str) -> None:
    """As assert_harmless; another source for the same value (an average for the draw) may take its place."""
    for card in range(len(before.readings)):
        old, new = of_card(before, card), of_card(after, card)
        assert old is not None
        assert new is not None
        for name, value in values(new).items():
            if card == HIT and (isinstance(value, Missing) or name == "power_w"):
                continue
            assert value == values(old)[name], (card, name, what)


@pytest.mark.parametrize("layout", smi_texts.LAYOUTS)
def test_xml_cut_anywhere_keeps_whole_gpus_and_invents_nothing(layout: str) -> None:
    text = smi_texts.xml(CARDS[:2], layout)
    whole = parse_xml(text)
    first_ends = text.index("</gpu>") + len("</gpu>")
    for length in range(text.index("<gpu "), len(text) - 1, 61):
        try:
            answer = parse_xml(text[:length])
        except Refused:
            assert length < first_ends
            continue
        assert not answer.complete or length >= len(text) - 1
        for old, new in zip(whole.readings, answer.readings, strict=False):
            for name, value in values(new).items():
                assert isinstance(value, Missing) or value == values(old)[name], (length, name)
        if length >= first_ends:
            assert values(answer.readings[0]) == values(whole.readings[0])


@pytest.mark.parametrize("layout", smi_texts.LAYOUTS)
def test_an_element_that_is_gone_is_not_reported(layout: str) -> None:
    text = XML_PARSERS[layout]
    before = parse_xml(text)
    for start, end in leaves(text, address=smi_texts.bus_id(HIT)):
        line = text.rindex("\n", 0, start), text.index("\n", end)
        after = parse_xml(text[: line[0]] + text[line[1] :])
        assert_same_or_better(before, after, text[start:end])


def test_one_gpus_broken_xml_costs_no_other() -> None:
    text = XML_PARSERS["570"]
    at = text.index("<fan_speed>", text.index(smi_texts.bus_id(HIT)))
    for broken in ("<fan_speed", "&nosuch;", "\x00", "</gpu_power>", "<"):
        after = parse_xml(text[:at] + broken + text[at:])
        assert_harmless(parse_xml(text), after)
        hit = of_card(after, HIT)
        assert hit is not None
        assert hit.damaged
        assert isinstance(hit.temperature_c, Missing)


def test_q_cut_anywhere_invents_nothing() -> None:
    text = smi_texts.q(CARDS[:2])
    whole = parse_q(text)
    for length in range(text.index("GPU 0"), len(text), 13):
        for old, new in zip(whole.readings, parse_q(text[:length]).readings, strict=False):
            for name, value in values(new).items():
                assert isinstance(value, Missing) or value == values(old)[name], (length, name, value)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=400))
@example('<nvidia_smi_log><gpu id="x">')
@example("==============NVSMI LOG==============\nGPU 00000000:1B:00.0\n    : : :\n")
@example("index, uuid\n, ,,,")
def test_no_text_breaks_a_parser(text: str) -> None:
    identify(text)
    parse_gpu_csv(text)
    parse_gpu_csv(text, QUERY)
    for reader in (parse_xml, parse_q, parse):
        for each in (text, "<nvidia_smi_log>" + text + "</nvidia_smi_log>"):
            with suppress(Refused):
                reader(each)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_damage_to_one_row_stays_in_that_row(data: st.DataObject) -> None:
    text = smi_texts.csv(CARDS)
    before = parse_gpu_csv(text)
    row = text.split("\n")[HIT + 1]
    at = data.draw(st.integers(0, len(row)))
    width = data.draw(st.integers(0, 30))
    junk = data.draw(st.text(st.characters(exclude_categories=["Nd", "Cs"], exclude_characters="\n,-."), max_size=10))
    after = parse_gpu_csv(damaged_row(text, lambda line: line[:at] + junk + line[at + width :]))
    for card in range(len(CARDS)):
        if card != HIT:
            old, new = of_card(before, card), of_card(after, card)
            assert old is not None
            assert new is not None
            assert values(new) == values(old)
