"""Which files make up a checkpoint: decided by names first, then by how the file begins."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from itertools import islice

from . import npy
from .files import File, Unreadable, advice, cause, quoted, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .files import Meter

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MODEL = "model.safetensors"
_INDEX = ".safetensors.index.json"
_MAX_ENTRIES = 100_000
_CONVERT = (
    "write its mapping as safetensors, in an environment with torch: python -c \"import sys, torch; from safetensors.torch "
    "import save_file; t = torch.load(sys.argv[1], map_location='cpu', weights_only=True); save_file({k: v.contiguous() "
    "for k, v in t.items() if k.split('.')[-1] in ('d2t', 't2d')}, sys.argv[2])\" FILE mapping.safetensors"
)


@dataclass(frozen=True)
class Found:
    """What a path leads to."""

    kind: str
    """``safetensors``, ``safetensors-sharded``, ``npy``, ``npz``."""
    reason: str
    """How that was recognised."""
    files: dict[str, str]
    """Array name -> path; with the one name "" where one file (or index) stands for all."""


def locate(path: str, meter: Meter) -> Found:
    """Return what ``path`` leads to; raise Unreadable when it is nothing that is read."""
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except (OSError, ValueError) as error:
        raise Unreadable(path, cause(error), advice(path, error)) from None
    return _in_folder(path) if is_folder else _by_file(path, meter)


def _by_file(path: str, meter: Meter) -> Found:
    name = os.path.basename(path).lower()
    if name.endswith(".safetensors"):
        return Found("safetensors", "a file named .safetensors", {"": path})
    if name.endswith(".json"):
        return Found("safetensors-sharded", "an index of safetensors files", {"": path})
    if name.endswith(".npz"):
        return Found("npz", "a file named .npz", {"": path})
    if name.endswith(".npy"):
        return _npy_pair(path, "a file named .npy")
    if name.endswith(PICKLES):
        raise Unreadable(path, "is a pickle by its name; rdiag does not read those yet", _CONVERT)
    return _by_beginning(path, meter)


def _by_beginning(path: str, meter: Meter) -> Found:
    with File(path, meter) as file:
        begin = file.read(0, min(file.size, 16))
    if begin.startswith(npy.MAGIC):
        return Found("npy", "it begins like a .npy file", {"d2t": path})
    if begin.startswith(b"PK\x03\x04"):
        return Found("npz", "it begins like a zip archive", {"": path})
    if begin[8:9] == b"{":
        return Found("safetensors", "it begins like a safetensors file", {"": path})
    if begin.startswith(b"version https://"):
        raise Unreadable(path, "is a Git LFS placeholder, not the file itself", "fetch it with: git lfs pull")
    raise Unreadable(path, "is of no kind that is read", "safetensors, an index.json of them, .npy and .npz are read")


def _npy_pair(path: str, reason: str) -> Found:
    folder, name = os.path.split(path)
    if "d2t" not in name and "t2d" in name:
        raise Unreadable(path, "holds t2d; the mapping is in d2t", "give the d2t.npy beside it")
    files = {"d2t": path}
    other = os.path.join(folder, name.replace("d2t", "t2d"))
    if other != path and os.path.lexists(other):
        files["t2d"] = other
        reason += ", with %s beside it" % quoted(os.path.basename(other))
    return Found("npy", reason, files)


def _in_folder(path: str) -> Found:
    names = _entries(path)
    by_suffix = {
        suffix: [name for name in names if name.endswith(suffix)] for suffix in (_INDEX, ".safetensors", ".npz", *PICKLES)
    }
    weights = [_MODEL] if _MODEL in names else []
    # As transformers has it: one whole file comes before an index.
    if not weights and len(by_suffix[_INDEX]) == 1:
        index = by_suffix[_INDEX][0]
        return Found("safetensors-sharded", "a folder with %s" % quoted(index), {"": os.path.join(path, index)})
    weights = weights or by_suffix[".safetensors"]
    if len(weights) == 1:
        return Found("safetensors", "a folder with %s" % quoted(weights[0]), {"": os.path.join(path, weights[0])})
    if len(weights) > 1:
        what = "%d indexes" % len(by_suffix[_INDEX]) if by_suffix[_INDEX] else "no index of them"
        raise Unreadable(
            path, "holds %d safetensors files and %s" % (len(weights), what), "give the file, or the index, that holds d2t"
        )
    arrays = ["d2t.npy"] if "d2t.npy" in names else [n for n in names if n.startswith("d2t") and n.endswith(".npy")]
    if len(arrays) == 1:
        return _npy_pair(os.path.join(path, arrays[0]), "a folder with %s" % quoted(arrays[0]))
    archives = by_suffix[".npz"]
    if len(archives) == 1 and not arrays:
        return Found("npz", "a folder with %s" % quoted(archives[0]), {"": os.path.join(path, archives[0])})
    if arrays or archives:
        raise Unreadable(path, "holds several mappings", "give one of: %s" % _list(arrays or archives))
    raise _nothing(path, names, [name for suffix in PICKLES for name in by_suffix[suffix]])


def _nothing(path: str, names: list[str], pickles: list[str]) -> Unreadable:
    if pickles:
        return Unreadable(path, "holds only pickles (%s); rdiag does not read those yet" % _list(pickles), _CONVERT)
    folders = [name for name in names[:200] if os.path.isdir(os.path.join(path, name))]
    hint = "give one of the folders in it: %s" % _list(folders) if folders else None
    return Unreadable(path, "holds no checkpoint and no mapping", hint)


def _entries(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in islice(entries, _MAX_ENTRIES))
    except OSError as error:
        raise Unreadable(path, cause(error), advice(path, error)) from None


def _list(names: list[str]) -> str:
    more = ", and %d more" % (len(names) - 6) if len(names) > 6 else ""
    return ", ".join(shown(name[:80]) for name in names[:6]) + more
