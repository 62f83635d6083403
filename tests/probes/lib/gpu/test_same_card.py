"""Several readings of one card, and cards that claim one identity."""

from __future__ import annotations

from probes.lib.gpu.missing import garbage
from probes.lib.gpu.same_card import confused, latest
from probes.lib.gpu.smi_csv import parse_gpu_csv
from probes.lib.gpu.smi_reading import GpuReading
from tests.support import smi_texts

CARDS = smi_texts.cards(3)


def reading(index: int, uuid: str = "GPU-a", bus_id: str = "0000:01:00.0", celsius: float = 30.0) -> GpuReading:
    return GpuReading(index=index, uuid=uuid, bus_id=bus_id, temperature_c=celsius)


def test_the_last_reading_of_a_card_counts_and_keeps_its_place() -> None:
    kept, times = latest([reading(0), reading(1, "GPU-b", "0000:02:00.0"), reading(0, celsius=90.0)])
    assert [(one.index, one.temperature_c, one.position) for one in kept] == [(0, 90.0, 0), (1, 30.0, 1)]
    assert times == 2
    assert latest([]) == ([], 0)


def test_a_later_reading_that_is_damaged_does_not_leave_the_earlier_one_standing() -> None:
    later = GpuReading(uuid="GPU-a", damaged="cut")
    kept, _ = latest([reading(3), later])
    assert [(one.index, one.bus_id, one.damaged) for one in kept] == [(3, "0000:01:00.0", "cut")]


def test_cards_that_differ_are_never_taken_for_one() -> None:
    others = [reading(0, "GPU-b"), reading(0, bus_id="0000:02:00.0"), reading(1), reading(0, "GPU-b", "0000:02:00.0")]
    for other in others:
        kept, times = latest([reading(0), other])
        assert (len(kept), times) == (2, 1)
        assert confused(kept)
    nameless = GpuReading(uuid=garbage("x"), bus_id=garbage("x"), index=0)
    assert len(latest([reading(0), nameless])[0]) == 2
    assert confused([reading(0), reading(1, "GPU-b", "0000:02:00.0")]) == []


def test_rows_that_are_glued_onto_one_line_are_all_named() -> None:
    lines = smi_texts.csv(CARDS).splitlines()
    for at in (1, 2):
        answer = parse_gpu_csv("\n".join([*lines[:at], lines[at] + lines[at + 1], *lines[at + 2 :], ""]))
        assert [one.uuid for one in answer.readings] == [smi_texts.uuid(card) for card in range(3)]
        assert [one.bus_id for one in answer.readings] == [smi_texts.bus_id(card)[4:].lower() for card in range(3)]
        assert [one.damaged is not None for one in answer.readings] == [place in {at - 1, at} for place in range(3)]
        assert [one.position for one in answer.readings] == [0, 1, 2]
