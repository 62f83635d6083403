"""The hash that names a bundle: the same from memory and from disk, different for any difference."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_diag.agent.digest import bundle_digest, digest, expected_library, library_digest, sha256

FILES = {"enter": b"#!/bin/sh\n", "agent/a.py": b"", "agent/b.py": b"x = 1\n", "agent/probes/c.py": b"\0\xff"}
LIBRARY = {"probes/__init__.py": b"", "probes/lib/d.py": b"d = 1\n"}


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


@given(st.binary(max_size=500))
def test_sha256_is_sha256(data: bytes) -> None:
    assert sha256(data) == hashlib.sha256(data).hexdigest()


def test_memory_and_disk_agree_whatever_the_order(tmp_path: Path) -> None:
    assert bundle_digest(str(write(tmp_path, FILES))) == digest(FILES.items()) == digest(reversed(FILES.items()))


def test_the_library_has_a_digest_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, {**FILES, **LIBRARY})
    assert library_digest(str(tmp_path)) == digest(LIBRARY.items())
    assert bundle_digest(str(tmp_path)) == digest(FILES.items())


def test_what_the_library_must_be_is_part_of_the_bundle(tmp_path: Path) -> None:
    before = bundle_digest(str(write(tmp_path, {**FILES, "library": b"12ab\n"})))
    assert expected_library(str(tmp_path)) == "12ab"
    (tmp_path / "library").write_bytes(b"12ac\n")
    assert bundle_digest(str(tmp_path)) != before


@pytest.mark.parametrize("left", [{}, {"probes/__init__.py": b""}])
def test_a_library_that_is_gone_is_a_difference(tmp_path: Path, left: dict[str, bytes]) -> None:
    assert library_digest(str(write(tmp_path, {**FILES, **left}))) != digest(LIBRARY.items())


def test_a_link_in_place_of_the_library_is_a_difference(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", LIBRARY)
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "probes").symlink_to(tmp_path / "elsewhere" / "probes")
    assert library_digest(str(tmp_path / "bundle")) != digest(LIBRARY.items())


def test_compiled_files_do_not_count(tmp_path: Path) -> None:
    before = bundle_digest(str(write(tmp_path, FILES)))
    write(tmp_path, {"agent/__pycache__/a.cpython-311.pyc": b"anything", "__pycache__/b.pyc": b""})
    assert bundle_digest(str(tmp_path)) == before


@pytest.mark.parametrize(
    "change",
    [
        {"agent/a.py": b"\n"},
        {"agent/extra.py": b""},
        {"agent/b.py": b"x = 2\n"},
        {"agent/a.pyx = ": b"1\n"},
    ],
)
def test_any_difference_shows(change: dict[str, bytes]) -> None:
    assert digest({**FILES, **change}.items()) != digest(FILES.items())


def test_bytes_moved_between_a_name_and_a_content_show() -> None:
    assert digest([("a", b"bc")]) != digest([("ab", b"c")])


def test_a_link_is_a_difference(tmp_path: Path) -> None:
    before = bundle_digest(str(write(tmp_path, FILES)))
    content = tmp_path / "agent" / "b.py"
    moved = tmp_path.parent / (tmp_path.name + "-elsewhere")
    content.rename(moved)
    content.symlink_to(moved)
    assert bundle_digest(str(tmp_path)) != before
