"""Whole recorded answers, damaged in every way: no check turns ok by it, and no other GPU's result is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from remote_diag.discovery import find
from remote_diag.findings import Finding, status
from remote_diag.testing import RecordingContext
from tests.support.fake_smi import SENTINELS, Gpu, h200, rtx_pro_6000, to_xml
from tests.support.gpu_faults import FAULTS, FAULTY, Fault, csv_text

KEPT = slice(FAULTY - 1, FAULTY + 3)
"""The faulty GPU and three of its siblings: as telling as eight, and half the time."""
PLACE = 1
"""Of the faulty one among them."""
FEW = ("[N/A]", "[Unknown Error]", "")


@lru_cache(maxsize=1)
def the_probe() -> Any:
    return find("gpu")


def some(make: Callable[[], list[Gpu]]) -> list[Gpu]:
    return make()[KEPT]


class Parsed:
    """What the probe makes of one text; None of a GPU that is not there."""

    def __init__(self, text: str, folder: Path) -> None:
        probe = the_probe()
        context = RecordingContext(folder)
        self.result: Any = probe.module.parse(text.encode(), probe.Params(gpus=4), context)
        self.findings: list[Finding] = context.findings
        self.by_uuid = {gpu.uuid: gpu for gpu in self.result.gpus if gpu.uuid is not None}

    @property
    def status(self) -> str:
        return status(self.findings)


def faulty(fault: Fault) -> list[Gpu]:
    gpus = some(fault.gpus)
    fault.plant(gpus[PLACE])
    return gpus


def changed(gpus: list[Gpu], field: str, text: str) -> list[Gpu]:
    return [{**gpu, field: text} if index == PLACE else gpu for index, gpu in enumerate(gpus)]


def others_are_whole(parsed: Parsed, gpus: list[Gpu]) -> bool:
    """Whether all that is known of the other GPUs is still known."""
    for index in range(len(gpus)):
        if index == PLACE:
            continue
        gpu = parsed.by_uuid.get(gpus[index]["uuid"])
        if gpu is None or gpu.temperature_c != float(gpus[index]["temperature.gpu"]) or f"{gpu.memory_total_mib:.0f} MiB" != gpus[index]["memory.total"]:
            return False
    return True


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_no_sentinel_in_any_cell_turns_a_fault_into_ok(fault: Fault, tmp_path: Path) -> None:
    gpus = faulty(fault)
    whole = Parsed(csv_text(gpus), tmp_path)
    assert whole.by_uuid[gpus[PLACE]["uuid"]].checks[fault.check] == fault.level
    assert others_are_whole(whole, gpus)
    healthy = some(fault.gpus)[PLACE]
    few = cycle(FEW)
    for field in gpus[0]:
        # The fault's own cells get every word, the others one.
        own = gpus[PLACE][field] != healthy[field]
        for text in SENTINELS if own else (next(few),):
            mutated = changed(gpus, field, text)
            parsed = Parsed(csv_text(mutated), tmp_path)
            assert parsed.status != "ok", (field, text)
            assert others_are_whole(parsed, gpus), (field, text)
            (gpu,) = [one for one in parsed.result.gpus if one.uuid not in {other["uuid"] for index, other in enumerate(gpus) if index != PLACE}]
            assert gpu.status != "ok", (field, text)
            if field != "mig.mode.current":
                assert gpu.checks[fault.check] not in {"ok"}, (field, text, gpu.checks[fault.check])


@pytest.mark.parametrize("gpus", [some(rtx_pro_6000), some(h200)], ids=["rtx-pro-6000", "h200"])
@pytest.mark.parametrize("layout", ["csv", "xml"])
def test_no_sentinel_in_a_healthy_answer_makes_a_check_better_or_another_gpu_worse(
    gpus: list[Gpu], layout: str, tmp_path: Path
) -> None:
    def parse(changed_gpus: list[Gpu]) -> Parsed:
        return Parsed(csv_text(changed_gpus) if layout == "csv" else to_xml(changed_gpus, []), tmp_path)

    before = parse(gpus)
    assert before.status == "ok", [finding for finding in before.findings if finding.level != "ok"]
    uuids = {gpu["uuid"] for index, gpu in enumerate(gpus) if index != PLACE}
    for field in gpus[0]:
        for text in SENTINELS if layout == "csv" and "H200" in gpus[0]["name"] else FEW:
            if text == gpus[PLACE][field]:
                continue
            parsed = parse(changed(gpus, field, text))
            assert others_are_whole(parsed, gpus), (field, text)
            for gpu in parsed.result.gpus:
                if gpu.uuid in uuids:
                    assert gpu.status == "ok", (field, text, gpu.index, gpu.checks)
                    continue
                # What was not checked for want of a value must not count as well.
                old = before.result.gpus[PLACE].checks
                better = [name for name, level in gpu.checks.items() if level == "ok" and old[name] != "ok"]
                assert not better, (field, text, better)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name != "unknown reason"], ids=lambda fault: fault.name)
def test_a_column_that_is_dropped_hides_no_fault(fault: Fault, tmp_path: Path) -> None:
    """Bits of clock reasons that are not known stand in one column only, and the others say enough without it."""
    gpus = faulty(fault)
    healthy = some(fault.gpus)[PLACE]
    own = [field for field in healthy if gpus[PLACE][field] != healthy[field]]
    for field in (*own, "driver_version", "name", "uuid", "pci.bus_id"):
        parsed = Parsed(csv_text([{name: text for name, text in gpu.items() if name != field} for gpu in gpus]), tmp_path)
        assert parsed.status != "ok", field
        if field != "uuid":
            gpu = parsed.by_uuid.get(gpus[PLACE]["uuid"])
            assert gpu is not None
            assert gpu.status != "ok", field
            assert gpu.checks[fault.check] != "ok", field


SHOWN_FAULTS = [fault for fault in FAULTS if fault.name in {"remap pending", "uncorrected ecc", "recovery reset", "link narrow", "requires reset"}]


@pytest.mark.parametrize("fault", SHOWN_FAULTS, ids=lambda fault: fault.name)
def test_a_text_that_is_cut_anywhere_is_never_ok(fault: Fault, tmp_path: Path) -> None:
    gpus = faulty(fault)
    for text in (csv_text(gpus), to_xml(gpus, [])):
        for length in (*range(200, len(text) - 1, len(text) // 40), len(text) - 1):
            try:
                parsed = Parsed(text[:length], tmp_path)
            except ValueError:
                continue
            assert parsed.status != "ok", length
            gpu = parsed.by_uuid.get(gpus[PLACE]["uuid"])
            assert gpu is None or gpu.checks[fault.check] != "ok", length


def test_lines_that_are_lost_cost_only_their_own_gpu(tmp_path: Path) -> None:
    gpus = some(h200)
    lines = csv_text(gpus).splitlines(keepends=True)
    for line in range(1, len(lines)):
        parsed = Parsed("".join(lines[:line] + lines[line + 1 :]), tmp_path)
        assert parsed.status == "fail"
        assert len(parsed.result.gpus) == 3
        assert {gpu.status for gpu in parsed.result.gpus} == {"ok"}
        parsed = Parsed("".join([*lines[:line], lines[line].replace(", ", " "), *lines[line + 1 :]]), tmp_path)
        assert parsed.status != "ok"
        assert sum(gpu.status == "ok" for gpu in parsed.result.gpus) == 3


LABELS = ("NCCL INFO", "node3: ", "GPU-", "\x1b[31m", "0")


def glued(lines: list[str], turn: int) -> Iterator[str]:
    """Yield a text with a label or a log line glued into each place of a row; over five turns each label in each place."""
    row = 1 + PLACE
    cells = lines[row].rstrip("\n").split(", ")
    for place in range(len(cells)):
        mutated = [*cells]
        mutated[place] = LABELS[(place + turn) % len(LABELS)] + cells[place]
        yield "".join([*lines[:row], ", ".join(mutated) + "\n", *lines[row + 1 :]])
        yield "".join([*lines[:row], ", ".join([*cells[:place], *cells[place + 1 :]]) + "\n", *lines[row + 1 :]])
    yield "".join([*lines[:row], lines[row].rstrip("\n"), *lines[row + 1 :]])


@pytest.mark.parametrize("turn", range(len(LABELS)))
def test_labels_glued_into_a_row_hide_no_fault(turn: int, tmp_path: Path) -> None:
    gpus = faulty(SHOWN_FAULTS[turn])
    for text in glued(csv_text(gpus).splitlines(keepends=True), turn):
        parsed = Parsed(text, tmp_path)
        assert parsed.status != "ok", text.splitlines()[1 + PLACE]
        known = sum(gpus[index]["uuid"] in parsed.by_uuid for index in range(4) if index != PLACE)
        assert known == 3, text.splitlines()[1 + PLACE]
        gpu = parsed.by_uuid.get(gpus[PLACE]["uuid"])
        assert gpu is None or gpu.status != "ok", text.splitlines()[1 + PLACE]
