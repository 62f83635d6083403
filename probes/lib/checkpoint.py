"""One way to read tensors out of every kind of file that checkpoints and their mappings come in.

:func:`open_checkpoint` looks at a file or folder and says what kind it found and why. Nothing but headers is read until
a tensor is asked for by name, and then only its bytes. New kinds are one more subclass of :class:`Checkpoint`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from . import npy, safetensors
from .files import Damaged, File, Unreadable, quoted, read_small
from .floats import widen
from .strict_json import parse_object

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterable

    from numpy.typing import NDArray

    from .archive import Archive
    from .files import Meter
    from .pickles import Part, TorchFile

MAX_INDEX = 32 << 20
"""Bytes of an index.json; 200,000 names take about 20 MB."""

_NUMPY = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8", "I64": "<i8",
    "F16": "<f2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip
_WORDS = {"b": "bool", "i": "int", "u": "uint", "f": "float"}
_SAFETENSORS_WORDS = {"BOOL": "bool", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Entry:
    """What a header says of one tensor."""

    dtype: str
    """``int64``, ``bool``, ``bfloat16``; the format's own name where there is no common one."""
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        product = 1
        for dimension in self.shape:
            product *= dimension
        return product


@dataclass(frozen=True)
class Place:
    """Where a tensor's bytes lie, row after row."""

    file: File
    offset: int
    """Of the first byte, from the beginning of the file."""


class Checkpoint:
    """Tensors by name. Use it in a ``with`` statement.

    Args:
        path: what was asked for.
        kind: ``safetensors``, ``safetensors-sharded``, ``torch``, ``torch-sharded``, ``npy``, ``npz``.
        reason: how the kind was recognised.
    """

    def __init__(self, path: str, kind: str, reason: str) -> None:
        self.path = path
        self.kind = kind
        self.reason = reason
        self._open: list[File] = []

    def __enter__(self) -> Checkpoint:
        """Return the checkpoint."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close its files."""
        self.close()

    def load(self) -> None:
        """Read what :meth:`names` needs; raise Damaged or Unreadable."""

    def close(self) -> None:
        """Close all files."""
        for file in self._open:
            file.close()

    @property
    def folder(self) -> str:
        """Where config.json and its like are looked for."""
        return self.path if os.path.isdir(self.path) else os.path.dirname(self.path) or "."

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        raise NotImplementedError

    def entry(self, name: str) -> Entry:
        """Return what the header says of a tensor; raise Damaged or Unreadable."""
        raise NotImplementedError

    def peek(self, name: str) -> Entry | None:
        """Return :meth:`entry` when no further file must be opened for it, None otherwise."""
        return self.entry(name)

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor; bfloat16 as float32, which holds it exactly. Raise Damaged or Unreadable."""
        raise NotImplementedError

    def place(self, name: str) -> Place:
        """Return where a tensor lies, for those who read a part of it; raise Damaged or Unreadable.

        Raises:
            Unreadable: its bytes do not lie row after row in a file (compressed, or in Fortran's order).
        """
        raise Unreadable(self.path, "tensor %s cannot be read in parts" % quoted(name), "store it as safetensors")

    def _file(self, path: str, meter: Meter) -> File:
        file = File(path, meter)
        self._open.append(file)
        return file


class _Sharded(Checkpoint):
    """Tensors in one file, or in several of which each is opened when a tensor in it is asked for.

    Args:
        path, kind, reason: see :class:`Checkpoint`.
        meter: told of every byte.
        places: tensor name -> path of the file; None when ``single`` holds them all.
        single: path of the only file.
    """

    def __init__(
        self,
        path: str,
        kind: str,
        reason: str,
        meter: Meter,
        *,
        single: str | None = None,
        places: dict[str, str] | None = None,
    ) -> None:
        super().__init__(path, kind, reason)
        self._meter = meter
        self._single = single
        self._places = places or {}

    def load(self) -> None:
        """Read what the only file says of itself; shards wait until they are needed."""
        if self._single is not None:
            self._places = dict.fromkeys(self._held(self._single), self._single)

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._places)

    def peek(self, name: str) -> Entry | None:
        """Return the entry when its shard is open already."""
        return self.entry(name) if self._is_open(self._places[name]) else None

    def _held(self, path: str) -> Iterable[str]:
        """Return the names of the tensors in a file, which is opened for it."""
        raise NotImplementedError

    def _is_open(self, path: str) -> bool:
        raise NotImplementedError


class Safetensors(_Sharded):
    """A safetensors checkpoint; see :class:`_Sharded`."""

    def __init__(self, path: str, kind: str, reason: str, meter: Meter, **where: Any) -> None:
        super().__init__(path, kind, reason, meter, **where)
        self._headers: dict[str, tuple[File, dict[str, safetensors.Tensor]]] = {}

    def entry(self, name: str) -> Entry:
        """Return what the header says of a tensor."""
        tensor = self._tensor(name)[1]
        return Entry(_word(tensor.dtype), tensor.shape)

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor."""
        import numpy as np

        file, tensor = self._tensor(name)
        if tensor.dtype != "BF16" and tensor.dtype not in _NUMPY:
            raise Unreadable(file.path, "tensor %s has the type %s, which is not read" % (quoted(name), quoted(tensor.dtype)))
        data = file.read(tensor.offset, tensor.size)
        if tensor.dtype == "BF16":
            return widen(np.frombuffer(data, "<u2"), "bfloat16").reshape(tensor.shape)
        return _array(data, _NUMPY[tensor.dtype], file.path, name).reshape(tensor.shape)

    def place(self, name: str) -> Place:
        """Return where a tensor lies."""
        file, tensor = self._tensor(name)
        return Place(file, tensor.offset)

    def metadata(self) -> dict[str, str]:
        """Return what the header says besides tensors; of several files, the first one's. Raise Damaged or Unreadable."""
        path = next(iter(self._places.values()), self._single)
        return {} if path is None else safetensors.read_metadata(self._shard(path)[0])

    def _held(self, path: str) -> Iterable[str]:
        return self._shard(path)[1]

    def _is_open(self, path: str) -> bool:
        return path in self._headers

    def _tensor(self, name: str) -> tuple[File, safetensors.Tensor]:
        file, header = self._shard(self._places[name])
        if name not in header:
            raise Damaged(file.path, "the index promises tensor %s here, which is not in it" % quoted(name))
        return file, header[name]

    def _shard(self, path: str) -> tuple[File, dict[str, safetensors.Tensor]]:
        if path not in self._headers:
            file = self._file(path, self._meter)
            self._headers[path] = (file, safetensors.read_header(file))
        return self._headers[path]


class Torch(_Sharded):
    """Files that torch.save wrote; see :class:`_Sharded`."""

    def __init__(self, path: str, kind: str, reason: str, meter: Meter, **where: Any) -> None:
        super().__init__(path, kind, reason, meter, **where)
        self._shards: dict[str, tuple[File, TorchFile]] = {}

    def entry(self, name: str) -> Entry:
        """Return what the file says of a tensor."""
        part = self._part(name)[2]
        return Entry(part.dtype, part.shape)

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor."""
        import numpy as np

        file, archive, part = self._part(name)
        stored = {"bool": "?", "uint8": "u1", "int8": "i1", "bfloat16": "<u2", "int16": "<i2", "int32": "<i4",
                  "int64": "<i8", "float16": "<f2", "float32": "<f4", "float64": "<f8"}.get(part.dtype)  # fmt: skip
        if stored is None:
            raise Unreadable(file.path, "tensor %s has the type %s, which is not read" % (quoted(name), quoted(part.dtype)))
        flat = _array(archive.raw(part), stored, file.path, name)
        if part.strides is None:
            array = flat.reshape(part.shape)
        else:
            steps = tuple(stride * flat.itemsize for stride in part.strides)
            array = np.lib.stride_tricks.as_strided(flat, part.shape, steps, writeable=False).copy()
        return widen(array, part.dtype) if part.dtype == "bfloat16" else array

    def place(self, name: str) -> Place:
        """Return where a tensor lies."""
        file, _, part = self._part(name)
        if part.held is not None or part.strides is not None:
            return super().place(name)
        return Place(file, part.offset)

    def _held(self, path: str) -> Iterable[str]:
        return self._shard(path)[1].parts

    def _is_open(self, path: str) -> bool:
        return path in self._shards

    def _part(self, name: str) -> tuple[File, TorchFile, Part]:
        file, archive = self._shard(self._places[name])
        if name not in archive.parts:
            raise Damaged(file.path, "the index promises tensor %s here, which is not in it" % quoted(name))
        return file, archive, archive.parts[name]

    def _shard(self, path: str) -> tuple[File, TorchFile]:
        from .pickles import TorchFile

        if path not in self._shards:
            file = self._file(path, self._meter)
            self._shards[path] = (file, TorchFile(file))
        return self._shards[path]


class NpyFiles(Checkpoint):
    """Arrays in ``.npy`` files of their own.

    Args:
        path, reason: see :class:`Checkpoint`.
        places: array name -> path.
        meter: told of every byte.
    """

    def __init__(self, path: str, reason: str, places: dict[str, str], meter: Meter) -> None:
        super().__init__(path, "npy", reason)
        self._places = places
        self._meter = meter
        self._files: dict[str, File] = {}
        self._headers: dict[str, npy.Header] = {}

    def load(self) -> None:
        """Open all files."""
        for name, place in self._places.items():
            self._files[name] = self._file(place, self._meter)

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._files)

    def entry(self, name: str) -> Entry:
        """Return what the header says of a tensor."""
        return _npy_entry(self._header(name))

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor."""
        file, header = self._files[name], self._header(name)
        return _npy_array(file.read(header.data, header.size), header, file.path, name)

    def _header(self, name: str) -> npy.Header:
        if name not in self._headers:
            file = self._files[name]
            try:
                header = npy.read_header(lambda offset, count: file.read(offset, max(0, min(count, file.size - offset))))
            except ValueError as error:
                raise Damaged(file.path, str(error)) from None
            if header.data + header.size != file.size:
                raise Damaged(file.path, "%d bytes, its header needs %d" % (file.size, header.data + header.size))
            self._headers[name] = header
        return self._headers[name]


class Npz(Checkpoint):
    """Arrays in a ``.npz`` archive.

    Args:
        path, reason: see :class:`Checkpoint`.
        file: path of the archive.
        meter: told of every byte.
    """

    def __init__(self, path: str, reason: str, file: str, meter: Meter) -> None:
        super().__init__(path, "npz", reason)
        self._path = file
        self._meter = meter
        self._archive: Archive
        self._members: dict[str, str] = {}
        self._headers: dict[str, npy.Header] = {}

    def load(self) -> None:
        """Read the list of members."""
        from .archive import Archive

        self._archive = Archive(self._file(self._path, self._meter))
        self._members = {name[:-4]: name for name in self._archive.names() if name.endswith(".npy")}

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._members)

    def entry(self, name: str) -> Entry:
        """Return what the header says of a tensor."""
        return _npy_entry(self._header(name))

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor."""
        header = self._header(name)
        data = self._archive.read(self._members[name], header.data + header.size, whole=True)
        return _npy_array(data[header.data :], header, self._path, name)

    def _header(self, name: str) -> npy.Header:
        if name not in self._headers:
            begin = self._archive.read(self._members[name], npy.MAX_HEADER + 12)
            try:
                self._headers[name] = npy.read_header(lambda offset, count: begin[offset : offset + count])
            except ValueError as error:
                raise Damaged(self._path, "member %s: %s" % (quoted(self._members[name]), error)) from None
        return self._headers[name]


def open_checkpoint(path: str, meter: Meter) -> Checkpoint:
    """Return the checkpoint at ``path``, a file or a folder.

    Raises:
        Unreadable: there is nothing, or nothing of a kind that is read.
        Damaged: there is, and it is broken.
    """
    from .locate import locate

    found = locate(path, meter)
    if found.kind == "safetensors":
        return _loaded(Safetensors(path, found.kind, found.reason, meter, single=found.files[""]))
    if found.kind == "safetensors-sharded":
        places = _read_index(found.files[""], meter)
        return _loaded(Safetensors(path, found.kind, found.reason, meter, places=places))
    if found.kind == "torch":
        return _loaded(Torch(path, found.kind, found.reason, meter, single=found.files[""]))
    if found.kind == "torch-sharded":
        return _loaded(Torch(path, found.kind, found.reason, meter, places=_read_index(found.files[""], meter)))
    if found.kind == "npz":
        return _loaded(Npz(path, found.reason, found.files[""], meter))
    return _loaded(NpyFiles(path, found.reason, found.files, meter))


def open_array(path: str, name: str, meter: Meter) -> Checkpoint:
    """Return the array in a ``.npy`` file, whatever the file is called, as a checkpoint of one tensor ``name``."""
    return _loaded(NpyFiles(path, "a file named .npy", {name: path}, meter))


def _loaded(checkpoint: Checkpoint) -> Checkpoint:
    try:
        checkpoint.load()
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def _read_index(path: str, meter: Meter) -> dict[str, str]:
    try:
        places = parse_object(read_small(path, meter, MAX_INDEX)).get("weight_map")
    except ValueError as error:
        raise Damaged(path, str(error)) from None
    if not isinstance(places, dict):
        raise Damaged(path, "no weight_map in it: not the index of a checkpoint")
    folder = os.path.dirname(path)
    resolved: dict[str, str] = {}
    for name, file in places.items():
        # An index from elsewhere must not lead to files outside of its folder.
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\0" in file:
            raise Damaged(path, "weight_map[%s] is not the name of a file beside it" % quoted(name))
        resolved[name] = os.path.join(folder, file)
    return resolved


def _word(dtype: str) -> str:
    if dtype in _SAFETENSORS_WORDS:
        return _SAFETENSORS_WORDS[dtype]
    word = {"I": "int", "U": "uint", "F": "float"}.get(dtype[:1])
    return word + dtype[1:] if word and dtype[1:].isdigit() else dtype


def _npy_entry(header: npy.Header) -> Entry:
    kind, width = header.dtype[-2], int(header.dtype[-1])
    return Entry("bool" if kind == "b" else "%s%d" % (_WORDS[kind], width * 8), header.shape)


def _npy_array(data: bytes, header: npy.Header, path: str, name: str) -> NDArray[Any]:
    array = _array(data, header.dtype, path, name)
    return array.reshape(header.shape, order="F" if header.fortran_order else "C")


def _array(data: bytes, dtype: str, path: str, name: str) -> NDArray[Any]:
    import numpy as np

    kind = np.dtype(dtype)
    if kind.kind == "b" and (np.frombuffer(data, np.uint8) > 1).any():
        raise Damaged(path, "%s: bytes other than 0 and 1 in an array of truth values" % quoted(name))
    # Native byte order: what follows is faster, and a stray >i8 surprises nobody.
    return np.frombuffer(data, kind).astype(kind.newbyteorder("="), copy=False)
