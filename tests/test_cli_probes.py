from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from remote_diag import paths
from tests.support.cli import Ran
from tests.support.cli import rdiag as run_rdiag
from tests.support.probe_files import write_probe


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def rdiag(work: Path, *arguments: str) -> Ran:
    return run_rdiag(*arguments, home=work.parent / "home", cwd=work)


def in_a_pipe(work: Path, *arguments: str) -> Ran:
    """Run it where nobody said how wide the output may be."""
    return run_rdiag(*arguments, home=work.parent / "home", cwd=work, COLUMNS="")


def test_the_list(work: Path) -> None:
    write_probe(work / "probes", "my_own", "return Result('x')", effects=("cuda", "reads-files"))
    ran = in_a_pipe(work, "probes")
    assert (ran.code, ran.err) == (0, "")
    rows = {line.split()[0]: line for line in ran.out.splitlines()[1:] if not line.startswith(" ")}
    assert rows["hello"].split()[-2:] == ["none", "shipped"]
    assert "The probe my_own of a test." in rows["my-own"]
    assert rows["my-own"].split()[-3:] == ["cuda,", "reads-files", "./probes"]


def test_a_broken_file_is_told_and_the_others_are_shown(work: Path) -> None:
    (work / "probes").mkdir()
    (work / "probes" / "broken.py").write_text('"""Broken."""\nimport numpy\n')
    ran = rdiag(work, "probes")
    assert ran.code == 3
    assert "broken cannot be used: probes/broken.py:2: 'numpy' is imported at module level" in " ".join(ran.out.split())
    assert "\nhello " in ran.out
    answer = rdiag(work, "probes", "--json").json
    errors = {probe["name"]: probe["error"] for probe in answer["probes"]}
    assert errors["hello"] is None
    assert errors["broken"]["code"] == "CONFIG"
    assert rdiag(work, "probes", "hello").code == 0
    alone = rdiag(work, "probes", "broken")
    assert (alone.code, alone.out) == (3, "")
    assert "probes/broken.py:2: " in alone.err
    assert 'hint: move it into run(): numpy = context.require("numpy")' in alone.err


def test_shadowing_is_shown(work: Path) -> None:
    write_probe(work / "probes", "hello", "return Result('own')")
    ran = rdiag(work, "probes", "hello", "--json")
    assert ran.json["from"] == "./probes"
    assert ran.json["instead_of"] == str(paths.shipped_probes() / "hello.py")
    assert "instead of" in rdiag(work, "probes", "hello").out


def test_one_probe_in_full(work: Path) -> None:
    path = write_probe(
        work / "extra",
        "ranks",
        "return Result(())",
        params={"path": "str", "depth": "int | None = None"},
        result={"ranks": "tuple[Rank, ...]", "best": "dict[str, Rank | None]"},
        effects=("reads-files",),
    )
    rank = '@dataclass(frozen=True)\nclass Rank:\n    """One."""\n\n    __pydantic_config__ = _CONFIG\n\n'
    rank += '    gbps: float\n    """Bandwidth, GB/s."""\n\n\n'
    path.write_text(path.read_text().replace("@dataclass(frozen=True)\nclass Result", rank + "@dataclass(frozen=True)\nclass Result"))
    ran = rdiag(work, "probes", "ranks", "--probe-path", "extra")
    assert (ran.code, ran.err) == (0, "")
    lines = [line.split() for line in ran.out.splitlines()]
    assert ["effects", "reads-files"] in lines
    assert ["sha256", hashlib.sha256(path.read_bytes()).hexdigest()] in lines
    assert ["path", "str", "The", "path."] in lines
    assert ["depth", "int", "|", "None", "=", "None", "The", "depth."] in lines
    assert ["ranks[].gbps", "float", "Bandwidth,", "GB/s."] in lines
    assert ["best.*.gbps", "float", "Bandwidth,", "GB/s."] in lines

    answer = rdiag(work, "probes", "ranks", "--probe-path", "extra", "--json").json
    assert answer["schema_version"] == 1
    assert answer["params"][1] == {
        "name": "depth", "type": "int | None", "required": False, "default": None, "doc": "The depth."
    }  # fmt: skip
    assert [row["name"] for row in answer["result"]] == ["ranks", "ranks[].gbps", "best", "best.*.gbps"]


def test_the_schema_is_json_schema(work: Path) -> None:
    ran = rdiag(work, "probes", "hello", "--schema")
    schema: dict[str, Any] = ran.json
    assert sorted(schema) == ["params", "result"]
    assert schema["params"]["properties"]["name"]["default"] == "world"
    assert schema["result"]["required"] == ["greeting", "python", "executable", "system"]
    without = rdiag(work, "probes", "--schema")
    assert (without.code, without.out) == (2, "")


def test_an_unknown_probe(work: Path) -> None:
    ran = rdiag(work, "probes", "helo")
    assert (ran.code, ran.out) == (3, "")
    assert ran.err.startswith("rdiag: error: config: there is no probe 'helo'; did you mean 'hello'?\nhint: searched ")
    assert rdiag(work, "probes", "helo", "--json").json["error"]["exit"] == 3


def test_text_of_a_probe_cannot_steer_the_terminal(work: Path) -> None:
    path = write_probe(work / "probes", "evil", "return Result('x')", params={"name": "str = '\\x1b[2J'"})
    path.write_text(path.read_text().replace("The probe evil of a test.", "[red]\\x1b[31m \u202e"))
    for arguments in (("probes",), ("probes", "evil"), ("probes", "evil", "--json"), ("probes", "evil", "--schema")):
        out = rdiag(work, *arguments).out
        assert "\x1b" not in out
        assert "\u202e" not in out
    assert "[red]\\x1b[31m" in rdiag(work, "probes").out


def test_new_probe_then_run_then_describe(work: Path) -> None:
    ran = rdiag(work, "new-probe", "disk-room")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("wrote probes/disk_room.py\nwrote tests/test_disk_room.py\n")
    assert "\n  rdiag run disk-room\n" in ran.out
    assert ran.out.endswith(" -m pytest tests/test_disk_room.py\n")
    again = rdiag(work, "new-probe", "disk-room")
    assert (again.code, again.out) == (2, "")
    assert "exists already" in again.err
    result = rdiag(work, "run", "disk-room", "--set", "least_free=0", "--json").json
    assert (result["probe"], result["status"]) == ("disk-room", "ok")
    found = rdiag(work, "run", "disk-room", "--set", "least_free=1", "--json")
    assert (found.code, found.json["findings"][0]["code"]) == (1, "little-space")
    refused = rdiag(work, "run", "disk-room", "--set", "least_free=2")
    assert (refused.code, refused.out) == (2, "")
    assert "least_free is a fraction, between 0 and 1" in refused.err


def test_new_probe_elsewhere_is_run_by_its_path(work: Path) -> None:
    ran = rdiag(work, "new-probe", "disk-room", "--directory", "my probes", "--json")
    assert ran.json == {
        "schema_version": 1,
        "name": "disk-room",
        "probe": "my probes/disk_room.py",
        "test": "tests/test_disk_room.py",
    }
    shown = rdiag(work, "new-probe", "other", "--directory", "my probes")
    assert "\n  rdiag run 'my probes/other.py'\n" in shown.out
    assert rdiag(work, "run", "my probes/other.py", "--set", "least_free=0").code == 0


def test_new_probe_with_a_bad_name(work: Path) -> None:
    ran = rdiag(work, "new-probe", "../evil", "--json")
    assert ran.code == 2
    assert json.loads(ran.out)["error"]["code"] == "USAGE"
    assert list(work.iterdir()) == []


def test_a_narrow_list_breaks_between_words_and_a_pipe_gets_one_line_a_probe(work: Path) -> None:
    names = {probe["name"] for probe in rdiag(work, "probes", "--json").json["probes"]}
    piped = in_a_pipe(work, "probes").out.splitlines()
    assert [line.split()[0] for line in piped] == ["probe", *sorted(names)]
    narrow = run_rdiag("probes", home=work.parent / "home", cwd=work, COLUMNS="80").out.splitlines()
    assert max(map(len, narrow)) <= 80
    assert len(narrow) < 3 * len(piped)
    assert not [line for line in (*piped, *narrow) if line != line.rstrip()]
    assert {line.split()[0] for line in narrow[1:] if not line.startswith(" ")} == names


def test_no_line_of_a_table_ends_with_blanks(work: Path) -> None:
    for arguments in (("hosts",), ("probes", "gpu"), ("run", "hello"), ("env", "--no-torch"), ("jobs",)):
        lines = rdiag(work, *arguments).out.split("\n")
        assert lines.pop() == ""
        assert not [line for line in lines if line != line.rstrip()], arguments
