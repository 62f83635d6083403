"""Files that ``torch.save`` wrote (``.bin``, ``.pt``), taken apart without loading them.

A pickle is a program. Only ``torch.load(weights_only=True)`` of torch 2.10 or later runs it, on the ``meta`` device: that
gives each tensor's type, shape and place in the file, and no byte of its numbers. These are then read like those of any
other file, in bounded pieces. What torch refuses is refused here as well; there is no second way to load it.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import warnings
from dataclasses import dataclass

from .archive import Archive, Window
from .files import Damaged, Unreadable, quoted, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

    from numpy.typing import NDArray

    from .archive import Member
    from .files import File

TORCH = (2, 10)
"""Older releases have known ways around ``weights_only``."""
_PLACES_ON_META = (2, 13)
"""From here on torch tells where numbers lie without its fake tensors, which take a second to import."""
MAX_PICKLE = 64 << 20
"""Bytes of the pickle itself; that of 200,000 tensors takes about 20 MB."""
MAX_OLD = 256 << 20
"""Bytes of a file from before torch 1.6, which has to be read whole."""
MAX_NUMBERS = 1 << 24
"""Numbers in a Python list; no vocabulary is larger."""
MAX_TENSORS = 200_000
_MAX_DEPTH = 4
_CHECKED = 64 << 20
"""Bytes of a tensor up to which its checksum is compared when it is read."""
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
_ZIP = b"PK\x03\x04"
CONVERT = (
    "where there is a torch %d.%d or later, write it as safetensors: python -c \"import sys, torch; from safetensors.torch "
    "import save_file; t = torch.load(sys.argv[1], map_location='cpu', weights_only=True); "
    "t = t if isinstance(t, dict) else {'d2t': t}; "
    "save_file({k: v.clone().contiguous() for k, v in t.items() if isinstance(v, torch.Tensor)}, sys.argv[2])\" "
    "FILE converted.safetensors" % TORCH
)
"""What to do with a pickle that is not read on this host."""


@dataclass(frozen=True)
class Part:
    """One tensor of a file."""

    dtype: str
    """As torch calls it: ``int64``, ``bool``, ``bfloat16``."""
    shape: tuple[int, ...]
    offset: int
    """Of its first number, in bytes from the beginning of the file."""
    size: int
    """Bytes of its numbers."""
    strides: tuple[int, ...] | None = None
    """Distances between neighbours in numbers; None where row follows row without gaps."""
    member: Member | None = None
    """The archive's member that it lies in."""
    held: bytes | None = None
    """Its bytes, where they had to be read together with the pickle."""


class TorchFile:
    """The tensors of one file.

    Args:
        file: it must stay open.

    Raises:
        Unreadable: no torch or one that is too old; the pickle asks for more than plain tensors.
        Damaged: no file of torch, or one that contradicts itself.
    """

    def __init__(self, file: File) -> None:
        self._file = file
        begin = file.read(0, min(file.size, 64))
        if begin.startswith(b"version https://git-lfs"):
            raise Unreadable(file.path, "is a Git LFS placeholder, not the file itself", "fetch it with: git lfs pull")
        self._archive = Archive(file) if begin.startswith(_ZIP) else None
        torch = _torch(file.path)
        if self._archive is not None:
            members = _members(file.path, self._archive)
            content = _load(torch, file, Window(file, MAX_PICKLE, "what torch reads before any tensor"))
        elif file.size > MAX_OLD:
            raise Unreadable(file.path, "%d bytes in the form from before torch 1.6, which cannot be read in parts" % file.size, CONVERT)
        else:
            members = {}
            content = _load(torch, file, io.BytesIO(file.read(0, file.size)))
        self.parts: dict[str, Part] = {}
        """Name -> tensor, in the order of the file."""
        for name, value in _flatten(content, _lone_name(file.path)):
            if len(self.parts) >= MAX_TENSORS:
                raise Damaged(file.path, "more than %d tensors" % MAX_TENSORS)
            self.parts[name] = self._part(torch, name, value, members)

    def raw(self, part: Part) -> bytes:
        """Return the bytes of a tensor, row after row; raise Damaged or Unreadable."""
        if part.held is not None:
            return part.held
        member = part.member
        if self._archive is not None and member is not None and member.size <= _CHECKED:
            data = self._archive.read(member.name, member.size, whole=True)
            begin = part.offset - member.offset
            return data[begin : begin + part.size]
        return self._file.read(part.offset, part.size)

    def _part(self, torch: Any, name: str, value: Any, members: dict[int, Member]) -> Part:
        if not isinstance(value, torch.Tensor):
            array = _vector(self._file.path, name, value)
            return Part(array.dtype.name, array.shape, 0, array.nbytes, held=array.tobytes())
        where = "tensor %s " % quoted(name)
        if value.layout != torch.strided or value.is_quantized:
            raise Unreadable(self._file.path, where + "is sparse or quantised, which is not read")
        dtype, width, shape = str(value.dtype).split(".")[-1], value.element_size(), tuple(value.shape)
        if self._archive is None:
            held = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            return Part(dtype, shape, 0, len(held), held=held)
        member = members.get(getattr(value.untyped_storage(), "_checkpoint_offset", -1))
        if member is None or value.untyped_storage().nbytes() != member.size:
            raise Damaged(self._file.path, where + "does not lie in a member of the archive")
        strides = None if value.is_contiguous() else tuple(value.stride())
        reach = _reach(shape, tuple(value.stride()))
        begin = value.storage_offset() * width
        if value.numel() > max(reach, 0) or begin + reach * width > member.size:
            raise Damaged(self._file.path, where + "%s needs more numbers than are stored for it" % list(shape))
        return Part(dtype, shape, member.offset + begin, reach * width, strides, member)


def _torch(path: str) -> Any:
    try:
        import torch
    except ImportError as error:
        raise Unreadable(path, "is a pickle, and there is no torch to read it with (%s)" % error, CONVERT) from None
    if _version(torch) < TORCH:
        raise Unreadable(path, "is a pickle, which torch %s is not trusted to load safely" % torch.__version__, CONVERT)
    return torch


def _version(torch: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])


def _members(path: str, archive: Archive) -> dict[int, Member]:
    """Return the archive's members by the offset of their data, after looking at what torch will be let loose on."""
    members = archive.members()
    sizes = {member.name.split("/", 1)[-1]: member.size for member in members}
    if "data.pkl" not in sizes:
        raise Damaged(path, "a zip archive that torch.save did not write: no data.pkl in it")
    if "constants.pkl" in sizes:
        raise Unreadable(path, "is a program (TorchScript), not a file of tensors")
    packed = next((member.name for member in members if member.packed), None)
    if packed is not None:
        raise Damaged(path, "member %s is compressed; torch stores all as it is" % quoted(packed))
    if sizes["data.pkl"] > MAX_PICKLE:
        raise Damaged(path, "a pickle of %d bytes; more than %d are not read" % (sizes["data.pkl"], MAX_PICKLE))
    order = next((member for member in members if member.name.split("/", 1)[-1] == "byteorder"), None)
    if order is not None and archive.read(order.name, 16).strip() != b"little":
        raise Unreadable(path, "was written on a big-endian machine", "convert it to safetensors there")
    return {member.offset: member for member in members}


def _load(torch: Any, file: File, source: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if isinstance(source, io.BytesIO):
                return torch.load(source, map_location="cpu", weights_only=True)
            if _version(torch) >= _PLACES_ON_META:
                return torch.load(source, map_location="meta", weights_only=True)
            from torch._subclasses.fake_tensor import FakeTensorMode

            with FakeTensorMode():
                return torch.load(source, weights_only=True)
        except pickle.UnpicklingError as error:
            raise Unreadable(file.path, _refusal(str(error))) from None
        except (Damaged, Unreadable):
            raise
        except Exception as error:  # noqa: BLE001 - whatever hostile bytes make torch raise
            told = (str(error).strip().splitlines() or [""])[0]
            raise Damaged(file.path, "torch cannot read it: %s: %s" % (type(error).__name__, told[:200])) from None


def _refusal(told: str) -> str:
    found = re.search(r"GLOBAL ([\w.]+)", told)
    if found is None:
        return "torch refuses to load it: it is damaged, or holds more than plain tensors"
    return (
        "asks to call %s when it is loaded, which plain tensors never need: refused. If it is from a source "
        "that you trust, convert it where it was written" % quoted(found.group(1))
    )


def _lone_name(path: str) -> str:
    """Return what a tensor is called that is the whole content of its file."""
    name = os.path.basename(path).lower()
    if "t2d" in name:
        return "t2d"
    return "counts" if "freq" in name or "count" in name else "d2t"


def _flatten(content: Any, lone: str, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor or Python numbers) for all that is of use in a loaded file."""
    if isinstance(content, dict):
        if content and all(type(key) is int for key in content):
            yield prefix + "counts", content
            return
        for key, value in content.items():
            if not isinstance(key, str):
                continue
            if isinstance(value, dict) and depth < _MAX_DEPTH:
                wrapper = key in _WRAPPERS and depth == 0
                yield from _flatten(value, lone, prefix if wrapper else prefix + key + ".", depth + 1)
            elif hasattr(value, "untyped_storage") or _are_numbers(value):
                yield prefix + key, value
            elif isinstance(value, (list, tuple)) and len(value) <= MAX_TENSORS:
                # The hidden states of several layers.
                for index, item in enumerate(value):
                    if hasattr(item, "untyped_storage"):
                        yield "%s%s.%d" % (prefix, key, index), item
    elif hasattr(content, "untyped_storage") or _are_numbers(content):
        yield prefix + lone, content


def _are_numbers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(type(item) is int for item in value)


def _vector(path: str, name: str, value: Any) -> NDArray[Any]:
    """Return Python's list of numbers, or dict of counts by token, as an array."""
    import numpy as np

    keys = list(value) if isinstance(value, dict) else []
    size = max(keys, default=-1) + 1 if keys else len(value)
    if size > MAX_NUMBERS or any(key < 0 for key in keys):
        raise Damaged(path, "%s: more numbers than any vocabulary has, or negative ids" % quoted(name))
    try:
        if not keys:
            return np.array(list(value), np.int64)
        counts = np.zeros(size, np.int64)
        for key in keys:
            counts[key] = value[key]
    except (OverflowError, TypeError, ValueError) as error:
        raise Damaged(path, "%s: %s" % (quoted(name), shown(str(error))[:200])) from None
    return counts


def _reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return how many numbers lie between the first and the last of a tensor, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((dimension - 1) * stride for dimension, stride in zip(shape, strides))
