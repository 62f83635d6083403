from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from probes.lib.archive import Archive
from probes.lib.files import Damaged, File, Meter


def archive(path: Path, data: bytes, meter: Meter | None = None) -> Archive:
    path.write_bytes(data)
    return Archive(File(str(path), meter or Meter()))


def zipped(members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return buffer.getvalue()


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_members_are_read(tmp_path: Path, compression: int) -> None:
    found = archive(tmp_path / "z", zipped({"a": b"x" * 5000, "b": b"yz"}, compression))
    assert found.names() == ["a", "b"]
    assert found.read("a", 5000, whole=True) == b"x" * 5000
    assert found.read("a", 3) == b"xxx"
    assert found.read("b", 100) == b"yz"


def test_only_the_member_asked_for_is_read(tmp_path: Path) -> None:
    meter = Meter()
    large = bytes(range(256)) * 40_000
    found = archive(tmp_path / "z", zipped({"large": large, "small": b"abc"}, zipfile.ZIP_STORED), meter)
    assert found.read("small", 3, whole=True) == b"abc"
    assert meter.bytes < len(large) // 20


@pytest.mark.parametrize("count", [4, 6])
def test_a_length_that_does_not_fit(tmp_path: Path, count: int) -> None:
    found = archive(tmp_path / "z", zipped({"a": b"12345"}))
    with pytest.raises(Damaged, match="5 bytes where"):
        found.read("a", count, whole=True)


def test_a_changed_member(tmp_path: Path) -> None:
    data = bytearray(zipped({"a": b"x" * 100}, zipfile.ZIP_STORED))
    data[data.index(b"xxxx") + 7] ^= 1
    found = archive(tmp_path / "z", bytes(data))
    with pytest.raises(Damaged, match="CRC"):
        found.read("a", 100, whole=True)


def test_a_bomb_is_read_no_further_than_it_says(tmp_path: Path) -> None:
    data = bytearray(zipped({"a": bytes(1 << 20)}))
    # Both the member's own header and the list of members say: 100 bytes.
    for place in (22, data.index(b"PK\x01\x02") + 24):
        data[place : place + 4] = (100).to_bytes(4, "little")
    found = archive(tmp_path / "z", bytes(data))
    with pytest.raises(Damaged):
        found.read("a", 100, whole=True)
    with pytest.raises(Damaged):
        found.read("a", 1 << 20, whole=True)


def test_a_name_twice(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("a", b"1")
        with pytest.warns(UserWarning, match="Duplicate"):
            file.writestr("a", b"2")
    with pytest.raises(Damaged, match="same name"):
        archive(tmp_path / "z", buffer.getvalue())


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressions_that_numpy_never_writes(tmp_path: Path, compression: int) -> None:
    found = archive(tmp_path / "z", zipped({"a": b"12345"}, compression))
    with pytest.raises(Damaged, match="compression"):
        found.read("a", 5)


def test_a_checksum_that_does_not_fit(tmp_path: Path) -> None:
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        data = bytearray(zipped({"a": bytes(range(256)) * 10}, compression))
        for place in (14, data.index(b"PK\x01\x02") + 16):
            data[place] ^= 1
        found = archive(tmp_path / "z", bytes(data))
        with pytest.raises(Damaged, match="CRC"):
            found.read("a", 2560, whole=True)


def test_a_list_of_members_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = zipped({f"member {number}": b"" for number in range(1000)})
    assert len(archive(tmp_path / "z", data).names()) == 1000
    monkeypatch.setattr("probes.lib.archive.MAX_DIRECTORY", 30_000)
    monkeypatch.setattr("probes.lib.archive._TAIL", 10_000)
    meter = Meter()
    with pytest.raises(Damaged, match="more than 40000 bytes"):
        archive(tmp_path / "z", data, meter)
    assert meter.bytes <= 40_000


def test_an_encrypted_member(tmp_path: Path) -> None:
    data = bytearray(zipped({"a": b"12345"}, zipfile.ZIP_STORED))
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    found = archive(tmp_path / "z", bytes(data))
    with pytest.raises(Damaged, match="encrypted"):
        found.read("a", 5)


def test_cut_or_changed_anywhere(tmp_path: Path) -> None:
    good = zipped({"a": b"12345", "b": b"67"})
    for end in range(len(good)):
        with pytest.raises(Damaged):
            archive(tmp_path / "z", good[:end])
    for place in range(len(good)):
        changed = bytearray(good)
        changed[place] ^= 0xFF
        try:
            found = archive(tmp_path / "z", bytes(changed))
            for name in found.names():
                assert len(found.read(name, 5)) <= 5
        except Damaged:
            pass
