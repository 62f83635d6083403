"""Which GPU kernels communicate, and what they do, told by their names and by what the profiler recorded beside them.

The algorithm and protocol in the name of an NCCL kernel (RING_LL) are not read: NCCL starts one kernel for many of them.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple

    class Named(NamedTuple):
        """What a communication kernel is."""

        family: str
        collective: str
else:
    from collections import namedtuple

    Named = namedtuple("Named", "family collective")

ELEMENT_BYTES = {
    "bool": 1, "byte": 1, "char": 1, "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1, "short": 2, "int16": 2, "half": 2, "float16": 2, "bfloat16": 2, "int": 4, "int32": 4, "float": 4,
    "float32": 4, "long": 8, "int64": 8, "double": 8, "float64": 8, "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip
"""Bytes of one element, by the lower-case name of c10 or torch."""

_NCCL = re.compile(r"(?:^|[^a-z])(?:nccl|rccl)", re.IGNORECASE)
_CUSTOM = re.compile(
    r"cross_device_reduce|multimem_(?:all_reduce|all_gather|reduce_scatter|one_shot)|(?:one|two)_?shot_?all_?reduce"
    r"|all_?reduce_?(?:fusion|kernel|lamport|one_?shot|two_?shot|\d)|(?:fused|lamport)_?all_?reduce|quick_?reduce|qr_all_reduce"
    r"|mscclpp|nvshmem|deep_ep::|all_?gather_?kernel|reduce_?scatter_?kernel|all_?to_?all_?kernel|moe_?all_?to_?all",
    re.IGNORECASE,
)
_COLLECTIVES = (
    ("reduce_scatter", re.compile(r"reduce_?scatter", re.IGNORECASE)),
    ("all_reduce", re.compile(r"all_?reduce|cross_device_reduce|quick_?reduce", re.IGNORECASE)),
    ("all_gather", re.compile(r"all_?gather", re.IGNORECASE)),
    ("all_to_all", re.compile(r"all_?to_?all", re.IGNORECASE)),
    ("broadcast", re.compile(r"broadcast", re.IGNORECASE)),
    ("send_recv", re.compile(r"send_?recv|^_?i?send$|^_?i?recv|deep_ep", re.IGNORECASE)),
    ("barrier", re.compile(r"barrier", re.IGNORECASE)),
    ("gather", re.compile(r"gather", re.IGNORECASE)),
    ("scatter", re.compile(r"scatter", re.IGNORECASE)),
    ("reduce", re.compile(r"reduce", re.IGNORECASE)),
)


def communication(name: str, recorded: object = None) -> Named | None:
    """Return what a kernel communicates; None for one that computes.

    Args:
        name: the kernel's name, demangled or not.
        recorded: "Collective name" of the profiler; it wins over what the name tells, as a grouped kernel is generic.
    """
    # Only the kernel's own name counts, not the types that its template takes.
    own = name.split("<", 1)[0] if not name.startswith("<") else name
    if _NCCL.search(own):
        family = "nccl"
    elif _CUSTOM.search(own):
        family = "custom"
    else:
        return None
    told = _collective(recorded) if isinstance(recorded, str) else None
    return Named(family, told or _collective(own) or "unnamed")


def element_bytes(dtype: object) -> int | None:
    """Return the bytes of one element; None for a dtype that is not known."""
    return ELEMENT_BYTES.get(dtype.lower().rpartition(".")[2]) if isinstance(dtype, str) else None


def _collective(text: str) -> str | None:
    for name, pattern in _COLLECTIVES:
        if pattern.search(text):
            return name
    return None
