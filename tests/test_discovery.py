from __future__ import annotations

from pathlib import Path

import pytest

from remote_diag import discovery, paths
from remote_diag.errors import ConfigError
from tests.support.probe_files import write_probe


@pytest.fixture(autouse=True)
def work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Work in a folder of its own, with two shipped probes."""
    shipped = tmp_path / "shipped"
    write_probe(shipped, "hello", "return Result('shipped')")
    write_probe(shipped, "link_speed", "return Result('shipped')")
    (shipped / "__init__.py").write_text("raise RuntimeError\n")
    (shipped / "lib").mkdir()
    (shipped / "lib" / "mappings.py").write_text("raise RuntimeError\n")
    monkeypatch.setattr(paths, "shipped_probes", lambda: shipped)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def test_shipped_probes_are_found_without_a_probes_folder() -> None:
    assert discovery.names() == ["hello", "link-speed"]
    assert discovery.find("link-speed").summary == "The probe link_speed of a test."
    assert discovery.locate("hello").origin == "shipped"


def test_either_spelling_of_a_name(work: Path) -> None:
    assert discovery.find("link_speed") is discovery.find("link-speed")


def test_the_later_place_wins_and_says_what_it_hides(work: Path, tmp_path: Path) -> None:
    own = write_probe(work / "probes", "hello", "return Result('own')")
    extra = write_probe(tmp_path / "extra", "hello", "return Result('extra')")
    found = discovery.locate("hello")
    assert (found.path.resolve(), found.origin) == (own, "./probes")
    assert found.shadows == paths.shipped_probes() / "hello.py"
    found = discovery.locate("hello", [tmp_path / "extra"])
    assert (found.path, found.origin) == (extra, str(tmp_path / "extra"))
    assert found.shadows is not None
    assert found.shadows.resolve() == own
    assert discovery.find("hello", [tmp_path / "extra"]).source == extra.read_bytes()


def test_a_copy_hides_nothing(work: Path) -> None:
    (work / "probes").mkdir()
    copy = work / "probes" / "hello.py"
    copy.write_bytes((paths.shipped_probes() / "hello.py").read_bytes())
    assert discovery.locate("hello").shadows is None


def test_the_checkout_has_nothing_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "checkout").mkdir()
    (tmp_path / "shipped").rename(tmp_path / "checkout" / "probes")
    monkeypatch.setattr(paths, "shipped_probes", lambda: tmp_path / "checkout" / "probes")
    monkeypatch.chdir(tmp_path / "checkout")
    listed = discovery.listing([Path("probes"), tmp_path / "checkout" / "probes" / "hello.py"])
    assert [(item.found.name, item.found.origin, item.found.shadows) for item in listed] == [
        ("hello", "shipped", None),
        ("link-speed", "shipped", None),
    ]


def test_probe_path_may_be_a_file(tmp_path: Path) -> None:
    path = write_probe(tmp_path / "elsewhere", "mine", "return Result('x')")
    assert discovery.names([path]) == ["hello", "link-speed", "mine"]
    with pytest.raises(ConfigError, match="cannot be searched for probes: No such file"):
        discovery.names([tmp_path / "missing"])


def test_a_path_is_a_probe_directly(tmp_path: Path) -> None:
    path = write_probe(tmp_path / "elsewhere", "mine", "return Result('x')")
    assert discovery.find(str(path)).name == "mine"
    with pytest.raises(ConfigError, match="no such file"):
        discovery.find("probes/missing.py")
    with pytest.raises(ConfigError, match="there is no probe 'probes/hello'") as caught:
        discovery.find("probes/hello")
    assert "ends in .py: probes/hello.py" in (caught.value.hint or "")


def test_what_is_no_probe_is_left_out(work: Path) -> None:
    folder = work / "probes"
    write_probe(folder, "_private", "pass")
    write_probe(folder / "lib", "shared", "pass")
    (folder / ".hidden.py").write_text("")
    (folder / "notes.txt").write_text("")
    (folder / "folder.py").mkdir()
    assert discovery.names() == ["hello", "link-speed"]


def test_an_unknown_name_says_what_was_meant_and_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no probe 'helo'; did you mean 'hello'") as caught:
        discovery.find("helo", [tmp_path])
    assert caught.value.exit_code == 3
    hint = caught.value.hint or ""
    assert f"searched {paths.shipped_probes()}, probes, {tmp_path}" in hint
    assert "rdiag new-probe" in hint
    with pytest.raises(ConfigError) as caught:
        discovery.find("\x1b[31m" * 100)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 200


def test_finding_one_does_not_execute_the_others(work: Path) -> None:
    canary = work / "canary"
    for name in ("aaa", "zzz"):
        path = write_probe(work / "probes", name, "return Result('x')")
        path.write_text(path.read_text() + f"\nopen({str(canary)!r}, 'w').close()\n")
    discovery.find("hello")
    discovery.names()
    assert not canary.exists()
    discovery.listing()
    assert canary.exists()


def test_broken_files_are_listed_and_hide_nothing(work: Path) -> None:
    folder = work / "probes"
    write_probe(folder, "good", "return Result('x')")
    (folder / "broken.py").write_text("import numpy\n")
    (folder / "raises.py").write_text(write_probe(folder, "raises", "pass").read_text() + "\n1 / 0\n")
    (folder / "Bad Name.py").write_text("")
    (folder / "dangling.py").symlink_to("nowhere")
    listed = {item.found.name: item for item in discovery.listing()}
    assert sorted(listed) == ["Bad Name", "broken", "good", "hello", "link-speed", "raises"]
    errors = {name: item.error.message for name, item in listed.items() if item.error is not None}
    assert sorted(errors) == ["Bad Name", "broken", "raises"]
    assert "broken.py:1: the file has no docstring" in errors["broken"]
    assert "ZeroDivisionError" in errors["raises"]
    assert listed["good"].probe is not None
    assert discovery.find("good").name == "good"
