from __future__ import annotations

import json
from pathlib import Path

import pytest

from probes.lib.gpu import xid


def test_every_code_has_a_class_a_level_and_an_action() -> None:
    table = xid.table()
    assert len(table) >= 50
    for code, known in table.items():
        assert known.code == code
        assert set(known.kind.split("/")) <= {"app", "hw", "sw", "info", "varies"}
        assert known.level in {*xid.LEVELS, "by-severity", "by-recovery-action"}
        assert len(known.meaning) > 10
        assert len(known.action) >= 7


def test_the_table_says_where_it_is_from() -> None:
    content = json.loads(Path(xid.TABLE).read_text())
    assert "NVIDIA" in content["source"]
    assert content["as_of"]


@pytest.mark.parametrize(
    ("code", "level"),
    [(13, "ok"), (31, "ok"), (43, "ok"), (45, "ok"), (48, "fail"), (63, "degraded"), (64, "fail"), (74, "fail"), (79, "fail"),
     (92, "degraded"), (94, "degraded"), (95, "fail"), (109, "degraded"), (119, "fail"), (143, "fail"), (158, "fail")],
)  # fmt: skip
def test_levels(code: int, level: str) -> None:
    assert xid.judge(code, "pid=1, name=x, text")[0] == level


@pytest.mark.parametrize("code", [1, 14, 102, 99999])
def test_a_code_that_nobody_knows_is_unknown(code: int) -> None:
    level, _, action = xid.judge(code, "something")
    assert level == "unknown"
    assert "catalogue" in action


@pytest.mark.parametrize("code", range(144, 151))
def test_nvlink_errors_go_by_the_severity_in_the_line(code: int) -> None:
    assert xid.judge(code, "RLW_REMAP Nonfatal XC0 i0 Link 00 (0x4)")[0] == "degraded"
    assert xid.judge(code, "NETIR_LINK_EVT  Fatal   XC0 i0 Link 01")[0] == "fail"
    assert xid.judge(code, "something else")[0] == "unknown"


@pytest.mark.parametrize(
    ("words", "level", "action"),
    [("None", "ok", "nothing"), ("GPU Reset Required", "fail", "reset"), ("Node Reboot Required", "fail", "reboot"),
     ("Drain P2P", "fail", "peers"), ("Drain and Reset", "fail", "end all work"), ("Something New", "unknown", "read the line")],
)  # fmt: skip
def test_what_154_asks_for(words: str, level: str, action: str) -> None:
    text = f"GPU recovery action changed from 0x0 (None) to 0x4 ({words})"
    found = xid.judge(154, text)
    assert found[0] == level
    assert action in found[2]
    assert xid.judge(154, "cut off")[0] == "unknown"


def test_the_text_wins_where_it_says_that_the_card_is_gone() -> None:
    assert xid.judge(31, "GPU has fallen off the bus")[0] == "fail"


def test_sets_can_be_overridden() -> None:
    policy = xid.policy({"fail": [63, 92], "ok": [109, 102]})
    assert xid.judge(63, "", policy)[0] == "fail"
    assert xid.judge(109, "", policy)[0] == "ok"
    assert xid.judge(102, "", policy)[0] == "ok"
    assert xid.judge(64, "", policy)[0] == "fail"


@pytest.mark.parametrize("sets", [{"fail": [63], "ok": [63]}, {"bad": [63]}, {"fail": ["63"]}, {"fail": [True]}, {"ok": [-1]}])
def test_sets_that_make_no_sense_are_refused(sets: dict[str, list[int]]) -> None:
    with pytest.raises(ValueError, match="Xid"):
        xid.policy(sets)
