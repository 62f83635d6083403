from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from remote_diag.errors import ConfigError, UsageProblem
from remote_diag.triage_case import ENTRIES, OBSERVED, load


def write(folder: Path, text: str) -> Path:
    path = folder / "case.yaml"
    path.write_text(text)
    return path


def test_a_whole_case(tmp_path: Path) -> None:
    path = write(tmp_path, "host: gpu8\ndrafter_before: /m/a\nsamples: [/d/0.pt, /d/1.pt]\nloss: 18.9\naccuracy: [0.02, 0.03]\nmask_density: 1\n")
    case = load(path, {}, [])
    assert case.host == "gpu8"
    assert dict(case.values) == {
        "drafter_before": "/m/a", "samples": ("/d/0.pt", "/d/1.pt"), "loss": (18.9,), "accuracy": (0.02, 0.03), "mask_density": 1.0,
    }  # fmt: skip
    assert case.get("target") is None


def test_options_win_over_the_file_and_empty_ones_do_not(tmp_path: Path) -> None:
    path = write(tmp_path, "drafter_before: /m/a\ntarget: /m/t\nloss: [1.0]\n")
    case = load(path, {"drafter_before": "/m/b", "target": None, "loss": ()}, ["loss=2", "loss=3", "draft-vocab-size=32000"])
    assert dict(case.values) == {"drafter_before": "/m/b", "target": "/m/t", "loss": (2.0, 3.0), "draft_vocab_size": 32_000}


def test_null_and_empty_lists_say_nothing(tmp_path: Path) -> None:
    assert dict(load(write(tmp_path, "target: null\nsamples: []\n"), {}, []).values) == {}


@pytest.mark.parametrize(
    ("text", "where", "message", "hint"),
    [
        ("target: /t\ndrafter_befor: /a\n", "2:1", "did you mean 'drafter_before'?", "a case may have:"),
        ("target: 7\n", "1:9", "target: '7' is given; a text is allowed", "quote it: '7'"),
        ("samples:\n  - /a\n  - 5\n", "3:5", "samples: '5' is given", "samples: files"),
        ("trainer: deepspeed\n", "1:10", "one of speculators", "trainer: the program"),
        ("accuracy: 3\n", "1:11", "fractions between 0 and 1", ""),
        ("mask_density: 0\n", "1:15", "above 0", ""),
        ("target: ''\n", "1:9", "target is empty", ""),
        ("host: [a]\n", "1:7", "the host is a name", "host: local"),
        ("observed_loss: 3\n", "1:1", "found out from loss, accuracy or log", ""),
        ("- a\n", "1:1", "a mapping of names to values", "a case may have:"),
        ("target: /t\ntarget: /u\n", "2:1", "duplicate key", ""),
        ("draft_vocab_size: 1\n", "1:19", "2 or more", ""),
    ],
)
def test_errors_name_the_place(tmp_path: Path, text: str, where: str, message: str, hint: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path, {}, [])
    assert caught.value.message.startswith(f"{path}:{where}: ")
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("given", "sets", "message"),
    [
        ({}, ["target"], "not key=value"),
        ({}, ["colour=red"], "no entry of a case"),
        ({}, ["loss=low"], "loss: 'low' is given"),
        ({"accuracy": (3.0,)}, [], "fractions"),
        ({"log": "/l", "loss": (1.0,)}, [], "a log and numbers"),
    ],
)
def test_options_that_do_not_fit(given: dict[str, Any], sets: list[str], message: str) -> None:
    with pytest.raises(UsageProblem, match=message):
        load(None, given, sets)


def test_what_becomes_known_adds_and_never_takes_away() -> None:
    case = load(None, {"target": "/t"}, []).with_values(observed_loss=1.0, trainer=None, samples=())
    assert dict(case.values) == {"target": "/t", "observed_loss": 1.0}


def test_every_entry_is_described() -> None:
    assert all(entry.doc and entry.doc[0].islower() for entry in (*ENTRIES.values(), *OBSERVED.values()))
    assert not ENTRIES.keys() & OBSERVED.keys()
