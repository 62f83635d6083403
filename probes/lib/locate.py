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
META = ("eagle_meta.pt", "eagle3_meta.pt")
"""Where NeMo keeps the ids of a drafter's rows; the second is the older name."""
MAPPINGS = ("d2t.pt", "vocab_mapping.pt", "cache.pt")
"""Mappings of their own: ModelOpt's, SpecForge's and AngelSlim's, SafeAI's."""
NOT_WEIGHTS = ("training_state", "optimizer", "scheduler", "rng_state", "scaler", "training_args", "trainer_state", "random_states")
"""How files begin that lie beside weights, can be huge, and hold none."""
_MODEL = "model.safetensors"
_INDEX = ".safetensors.index.json"
_TORCH_MODEL = "pytorch_model.bin"
_TORCH_INDEX = ".bin.index.json"
_MAX_ENTRIES = 100_000
_ZIP_MEMBER = 64


@dataclass(frozen=True)
class Found:
    """What a path leads to."""

    kind: str
    """``safetensors``, ``safetensors-sharded``, ``torch``, ``torch-sharded``, ``npy``, ``npz``."""
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
    if name.endswith(_TORCH_INDEX):
        return Found("torch-sharded", "an index of torch files", {"": path})
    if name.endswith(".json"):
        return Found("safetensors-sharded", "an index of safetensors files", {"": path})
    if name.endswith(".npz"):
        return Found("npz", "a file named .npz", {"": path})
    if name.endswith(".npy"):
        return _npy_pair(path, "a file named .npy")
    if name.endswith(PICKLES):
        return Found("torch", "a file named %s" % os.path.splitext(name)[1], {"": path})
    return _by_beginning(path, meter)


def _by_beginning(path: str, meter: Meter) -> Found:
    with File(path, meter) as file:
        begin = file.read(0, min(file.size, _ZIP_MEMBER))
    if begin.startswith(npy.MAGIC):
        return Found("npy", "it begins like a .npy file", {"d2t": path})
    if begin.startswith(b"PK\x03\x04"):
        # The first member of torch's archives is NAME/data.pkl.
        if b"/data.pkl" in begin:
            return Found("torch", "it begins like a file of torch.save", {"": path})
        return Found("npz", "it begins like a zip archive", {"": path})
    if begin[8:9] == b"{":
        return Found("safetensors", "it begins like a safetensors file", {"": path})
    if begin.startswith(b"version https://"):
        raise Unreadable(path, "is a Git LFS placeholder, not the file itself", "fetch it with: git lfs pull")
    raise Unreadable(
        path,
        "is of no kind that is read",
        "safetensors, .bin and .pt of torch, an index.json of them, .npy and .npz are read",
    )


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
        suffix: [name for name in names if name.endswith(suffix)]
        for suffix in (_INDEX, ".safetensors", _TORCH_INDEX, ".bin", ".npz", *PICKLES)
    }
    found = _weights(path, "safetensors", _MODEL, by_suffix[_INDEX], by_suffix[".safetensors"])
    if found is None:
        binaries = [name for name in by_suffix[".bin"] if not name.startswith(NOT_WEIGHTS)]
        found = _weights(path, "torch", _TORCH_MODEL, by_suffix[_TORCH_INDEX], binaries)
    if found is not None:
        return found
    arrays = ["d2t.npy"] if "d2t.npy" in names else [n for n in names if n.startswith("d2t") and n.endswith(".npy")]
    if len(arrays) == 1:
        return _npy_pair(os.path.join(path, arrays[0]), "a folder with %s" % quoted(arrays[0]))
    pickles = _mapping_pickles([name for suffix in PICKLES for name in by_suffix[suffix]])
    others = by_suffix[".npz"] + pickles
    if len(others) == 1 and not arrays:
        kind = "npz" if by_suffix[".npz"] else "torch"
        return Found(kind, "a folder with %s" % quoted(others[0]), {"": os.path.join(path, others[0])})
    if arrays or others:
        raise Unreadable(path, "holds several mappings", "give one of: %s" % _list(arrays + others))
    raise _nothing(path, names)


def _weights(path: str, kind: str, whole: str, indexes: list[str], files: list[str]) -> Found | None:
    """Return the weights of one kind in a folder, None where there are none."""
    # As transformers has it: one whole file comes before an index.
    chosen = [whole] if whole in files else []
    if not chosen and len(indexes) == 1:
        index = indexes[0]
        return Found(kind + "-sharded", "a folder with %s" % quoted(index), {"": os.path.join(path, index)})
    chosen = chosen or files
    if len(chosen) == 1:
        return Found(kind, "a folder with %s" % quoted(chosen[0]), {"": os.path.join(path, chosen[0])})
    if not chosen:
        return None
    what = "%d indexes" % len(indexes) if indexes else "no index of them"
    raise Unreadable(
        path, "holds %d %s files and %s" % (len(chosen), kind, what), "give the file, or the index, that holds d2t"
    )


def _mapping_pickles(names: list[str]) -> list[str]:
    """Return which of a folder's pickles may be the mapping: those with a known name, else all that are not something else."""
    known = [name for name in META if name in names][:1] + [name for name in MAPPINGS if name in names]
    return known or [name for name in names if not name.startswith((*NOT_WEIGHTS, "token_freq"))]


def _nothing(path: str, names: list[str]) -> Unreadable:
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
