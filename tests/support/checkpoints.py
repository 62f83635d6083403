"""Checkpoints and mappings in every format that is read, well made or broken on purpose.

The safetensors writer is our own, so that it can also write what the library refuses to.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "uint16": "U16",
    "uint32": "U32", "uint64": "U64", "float16": "F16", "float32": "F32", "float64": "F64",
}  # fmt: skip


@dataclass(frozen=True)
class Raw:
    """A tensor of a type that numpy lacks, as bytes; or whose bytes lie."""

    dtype: str
    shape: Sequence[int]
    data: bytes


Tensors = Mapping[str, "NDArray[Any] | Raw"]


def offsets(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return d2t as offsets."""
    return ids - np.arange(len(ids))


def mask(ids: NDArray[np.int64], vocab: int) -> NDArray[np.bool_]:
    """Return t2d as a mask."""
    marked = np.zeros(vocab, bool)
    marked[ids] = True
    return marked


def bfloat16(values: NDArray[Any]) -> Raw:
    """Return ``values`` cast to bfloat16, rounded to nearest even as torch does."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return Raw("BF16", values.shape, rounded.astype("<u2").tobytes())


def from_bfloat16(raw: Raw) -> NDArray[np.float32]:
    """Return the numbers that a bfloat16 tensor holds."""
    return (np.frombuffer(raw.data, "<u2").astype(np.uint32) << 16).view(np.float32)


def safetensors_file(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Return a file of this header (anything that JSON can say, or bytes as they are) and these data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def safetensors(tensors: Tensors) -> bytes:
    """Return a well made safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[bytes] = []
    end = 0
    for name, tensor in tensors.items():
        raw = tensor if isinstance(tensor, Raw) else Raw(_DTYPES[tensor.dtype.name], tensor.shape, tensor.tobytes())
        header[name] = {"dtype": raw.dtype, "shape": list(raw.shape), "data_offsets": [end, end + len(raw.data)]}
        parts.append(raw.data)
        end += len(raw.data)
    text = json.dumps(header).encode()
    return safetensors_file(text + b" " * (-len(text) % 8), b"".join(parts))


def write_safetensors(folder: Path, tensors: Tensors, *, name: str = "model.safetensors", **config: Any) -> Path:
    """Write a folder with one safetensors file, and config.json where ``config`` is given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(safetensors(tensors))
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_sharded(folder: Path, shards: Sequence[Tensors]) -> Path:
    """Write a folder with several safetensors files and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        (folder / name).write_bytes(safetensors(tensors))
        places.update(dict.fromkeys(tensors, name))
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_npy(folder: Path, d2t: NDArray[Any], t2d: NDArray[Any] | None = None) -> Path:
    """Write a folder with d2t.npy and t2d.npy."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "d2t.npy", d2t)
    if t2d is not None:
        np.save(folder / "t2d.npy", t2d)
    return folder


def write_npz(path: Path, *, compressed: bool = True, **arrays: NDArray[Any]) -> Path:
    """Write a .npz archive."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save = np.savez_compressed if compressed else np.savez
    save(path, **arrays)  # type: ignore[arg-type]
    return path


def write_sparse_checkpoint(path: Path, ids: NDArray[np.int64], vocab: int, *, head_bytes: int) -> Path:
    """Write a checkpoint of ``head_bytes`` and more that takes no room on disk: its head is a hole."""
    mapping = {"d2t": offsets(ids), "t2d": mask(ids, vocab)}
    width = head_bytes // (2 * len(ids))
    end = 2 * len(ids) * width
    header: dict[str, Any] = {
        "lm_head.weight": {"dtype": "BF16", "shape": [len(ids), width], "data_offsets": [0, end]}
    }
    for name, array in mapping.items():
        header[name] = {
            "dtype": _DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": [end, end + array.nbytes],
        }  # fmt: skip
        end += array.nbytes
    begin = safetensors_file(header)
    with path.open("wb") as file:
        file.write(begin)
        file.truncate(len(begin) + header["lm_head.weight"]["data_offsets"][1])
        file.seek(0, 2)
        for array in mapping.values():
            file.write(array.tobytes())
    return path


def write_torch(path: Path, content: Any, *, old: bool = False) -> Path:
    """Write what ``torch.save`` makes of ``content``, whose arrays become tensors; ``old`` as before torch 1.6."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(as_torch(content), path, _use_new_zipfile_serialization=not old)
    return path


def as_torch(content: Any) -> Any:
    """Return ``content`` with its arrays and :class:`Raw` bfloat16 as tensors."""
    import torch

    if isinstance(content, dict):
        return {name: as_torch(value) for name, value in content.items()}
    if isinstance(content, list):
        return [as_torch(value) for value in content]
    if isinstance(content, Raw):
        assert content.dtype == "BF16"
        return torch.frombuffer(bytearray(content.data), dtype=torch.bfloat16).reshape(tuple(content.shape))
    return torch.from_numpy(content.copy()) if isinstance(content, np.ndarray) else content


def write_sharded_torch(folder: Path, shards: Sequence[Tensors]) -> Path:
    """Write a folder with several files of torch and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = f"pytorch_model-{number:05}-of-{len(shards):05}.bin"
        write_torch(folder / name, dict(tensors))
        places.update(dict.fromkeys(tensors, name))
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder
