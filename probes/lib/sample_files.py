"""Which files hold samples, packed ones unpacked into bounded room, and the dataset that they were made from."""

from __future__ import annotations

import json
import os
import re
import zlib
from contextlib import contextmanager

from .files import Damaged, File, Unreadable, advice, cause, shown
from .samples import open_sample

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from .files import Meter
    from .samples import Sample

SUFFIXES = (".ckpt", ".ckpt.gz", ".pt", ".pt.gz", ".safetensors")
_OTHERS = ("token_freq", "vocab_mapping", "d2t", "t2d", "cache.pt", "training_state", "optimizer", "scheduler", "eagle_meta")
"""How files begin that lie among samples and are none."""
MAX_ENTRIES = 2_000_000
MAX_UNPACKED = 8 << 30
"""Bytes of an unpacked sample; 64,000 tokens of 4 times 7,168 numbers take 3.7 GB."""
MAX_LINE = 64 << 20
_PIECE = 4 << 20


def find_samples(paths: tuple[str, ...], limit: int) -> tuple[list[str], int]:
    """Return (at most ``limit`` files with samples, spread evenly over all that there are; how many there are).

    Files that were named themselves all count; folders are walked without following links.

    Raises:
        Unreadable: a path leads nowhere, or there is no sample below any.
    """
    named: list[str] = []
    walked: list[str] = []
    for path in paths:
        try:
            os.stat(path)
        except (OSError, ValueError) as error:
            raise Unreadable(path, cause(error), advice(path, error)) from None
        if os.path.isdir(path):
            walked += _walk(path)
        else:
            named.append(path)
    files = named + walked
    if not files:
        raise Unreadable(paths[0], "holds no samples", "files named %s are looked for" % ", ".join(SUFFIXES))
    if len(files) <= limit:
        return files, len(files)
    return [files[index * len(files) // limit] for index in range(limit)], len(files)


def _walk(folder: str) -> list[str]:
    found = []
    seen = 0
    for place, folders, names in os.walk(folder):
        folders.sort()
        seen += len(names) + len(folders)
        if seen > MAX_ENTRIES:
            raise Unreadable(folder, "more than %d files below it" % MAX_ENTRIES, "give one of the folders in it")
        found += [os.path.join(place, name) for name in names if name.endswith(SUFFIXES) and not name.startswith(_OTHERS)]
    return sorted(found, key=lambda path: (os.path.dirname(path), number_of(path) or 0, path))


def number_of(path: str) -> int | None:
    """Return the number of the conversation that a file name ends in, as in ``data_17.ckpt``; None for none."""
    name = os.path.basename(path).split(".", 1)[0]
    match = re.search(r"(\d{1,12})\Z", name)
    return int(match.group(1)) if match else None


@contextmanager
def opened_sample(path: str, meter: Meter, run_dir: str, hidden: int | None = None) -> Iterator[Sample]:
    """Open a sample; one that is packed with gzip is unpacked into ``run_dir`` for as long as it is open.

    Raises:
        Unreadable, Damaged: see :func:`open_sample`.
    """
    if not path.endswith(".gz"):
        with open_sample(path, meter, hidden) as sample:
            yield sample
        return
    unpacked = os.path.join(run_dir, "sample-%d%s" % (os.getpid(), os.path.splitext(path[:-3])[1]))
    try:
        with File(path, meter) as file:
            unpack(file, unpacked)
        with open_sample(unpacked, meter, hidden, path) as sample:
            yield sample
    finally:
        if os.path.lexists(unpacked):
            os.unlink(unpacked)


def unpack(file: File, path: str, limit: int = MAX_UNPACKED) -> None:
    """Write what the gzip file ``file`` holds to ``path``.

    Raises:
        Damaged: it is broken, cut, or grows beyond ``limit``.
        Unreadable: there is no room for it.
    """
    # 31: a gzip header and its checksum are wanted.
    inflate = zlib.decompressobj(31)
    written = offset = 0
    try:
        with open(path, "wb") as out:
            while offset < file.size and not inflate.eof:
                data = file.read(offset, min(_PIECE, file.size - offset))
                offset += len(data)
                while data and not inflate.eof:
                    piece = inflate.decompress(data, _PIECE)
                    data = inflate.unconsumed_tail
                    written += len(piece)
                    if written > limit:
                        raise Damaged(file.path, "more than %d bytes when unpacked" % limit)
                    _check_room(file.path, os.path.dirname(path))
                    out.write(piece)
    except zlib.error as error:
        raise Damaged(file.path, "not an intact gzip file: %s" % error) from None
    except OSError as error:
        raise Unreadable(file.path, "cannot be unpacked: %s" % cause(error)) from None
    if not inflate.eof:
        raise Damaged(file.path, "the gzip file is cut short")


def _check_room(path: str, folder: str) -> None:
    state = os.statvfs(folder or ".")
    if state.f_bavail * state.f_frsize < 1 << 30:
        raise Unreadable(path, "cannot be unpacked: less than 1 GiB is free in %s" % shown(folder))


class Dataset:
    """The tokens that samples were made from: a file of one JSON object a line, with ``input_ids`` and ``loss_mask``.

    Args:
        path: the file.
        wanted: numbers of the lines to keep, from 0.
        meter: told of every byte.

    Raises:
        Unreadable, Damaged: no such file, or no JSON in a line that is wanted.
    """

    def __init__(self, path: str, wanted: set[int], meter: Meter) -> None:
        self.path = path
        self.lines = 0
        """Lines that were looked at; all only where the last one was wanted or there are fewer."""
        self._kept: dict[int, tuple[NDArray[np.int64], NDArray[np.bool_] | None]] = {}
        if os.path.isdir(path) or path.endswith((".arrow", ".parquet")):
            raise Unreadable(path, "is no file of JSON lines", "write it as one: datasets.load_from_disk(...).to_json('data.jsonl')")
        last = max(wanted, default=-1)
        with File(path, meter) as file:
            for number, line in enumerate(_lines(file)):
                if number > last:
                    break
                self.lines = number + 1
                if number in wanted:
                    self._kept[number] = self._parse(number, line)

    def get(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None] | None:
        """Return (tokens, mask or None) of a line; None where there is no such line."""
        return self._kept.get(number)

    def _parse(self, number: int, line: bytes) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise Damaged(self.path, "line %d: %s" % (number + 1, error)) from None
        ids = _whole(content, "input_ids")
        ids = _whole(content, "token_ids") if ids is None else ids
        if ids is None:
            raise Unreadable(
                self.path, "line %d has no list input_ids" % (number + 1), "give the tokenized dataset, not the conversations"
            )
        mask = _whole(content, "loss_mask")
        return ids, None if mask is None else mask != 0


def _whole(content: Any, key: str) -> NDArray[np.int64] | None:
    import numpy as np

    value = content.get(key) if isinstance(content, dict) else None
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if not isinstance(value, list) or not value or not all(type(item) in (int, bool) for item in value):
        return None
    try:
        return np.array(value, np.int64)
    except OverflowError:
        return None


def _lines(file: File) -> Iterator[bytes]:
    rest, offset = b"", 0
    while offset < file.size:
        data = file.read(offset, min(_PIECE, file.size - offset))
        offset += len(data)
        parts = (rest + data).split(b"\n")
        rest = parts.pop()
        if len(rest) > MAX_LINE:
            raise Damaged(file.path, "a line of more than %d bytes" % MAX_LINE)
        yield from parts
    if rest.strip():
        yield rest
