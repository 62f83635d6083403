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
    r"cross_device_|multimem_(?:all_reduce|all_gather|reduce_scatter|one_shot)|(?<!block)(?<!warp)(?<!block_)(?<!warp_)all_?reduce(?!d)|quick_?reduce"
    r"|msccl|nvshmem|deep_ep::|userbuffers|all_?gather_?(?:kernel|ll|one_?shot)|reduce_?scatter_?kernel|all_?to_?all_?kernel|moe_?all_?to_?all|moeA2A(?:Dispatch|Combine)",
    re.IGNORECASE,
)
# Inductor names a kernel by all that went into it: triton_poi_fused_add_all_reduce_0 adds what was reduced before.
_FUSED_BY_NAME = re.compile(r"triton_[a-z]+_fused")
_TEMPLATE = re.compile(r"<[^<>]*>")
_DEEPEST = 30
_LONGEST = 20_000
_COLLECTIVES = (
    ("reduce_scatter", re.compile(r"reduce_?scatter", re.IGNORECASE)),
    ("all_reduce", re.compile(r"all_?reduce|cross_device_reduce|quick_?reduce", re.IGNORECASE)),
    ("all_gather", re.compile(r"all_?gather", re.IGNORECASE)),
    ("all_to_all", re.compile(r"all_?to_?all|moeA2A", re.IGNORECASE)),
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
    own = _own(name)
    if _FUSED_BY_NAME.match(own):
        return None
    if _NCCL.search(own):
        family = "nccl"
    elif _CUSTOM.search(own):
        family = "custom"
    else:
        return None
    told = _collective(recorded) if isinstance(recorded, str) else None
    return Named(family, told or _collective(own) or "unnamed")


def _own(name: str) -> str:
    """Return the kernel's own name, without the types that its template and itself take, and those that it returns."""
    own = name[:_LONGEST].replace("(anonymous namespace)", "")
    for _ in range(_DEEPEST):
        own, found = _TEMPLATE.subn("", own)
        if not found:
            break
    # A name that was cut has brackets that never close.
    return own.partition("<")[0].partition("(")[0] or own


def element_bytes(dtype: object) -> int | None:
    """Return the bytes of one element; None for a dtype that is not known."""
    return ELEMENT_BYTES.get(dtype.lower().rpartition(".")[2]) if isinstance(dtype, str) else None


def _collective(text: str) -> str | None:
    for name, pattern in _COLLECTIVES:
        if pattern.search(text):
            return name
    return None
