"""Says what a saved text is, so that ``rdiag gpu --parse`` reads it or refuses it by name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .smi_csv import parse_gpu_csv
from .smi_errors import recognise, troubles
from .smi_fields import BY_FIELD
from .smi_reading import Answer
from .smi_tree import Refused, parse_q, parse_xml

if TYPE_CHECKING:
    from typing import Callable

MAX_LOOK = 65536
"""Characters in which a text must show what it is."""

MAX_LINE = 4096


@dataclass(frozen=True)
class Kind:
    """What a text is."""

    name: str
    meaning: str
    reader: str
    """The command that reads it, or why none does."""


GPU = "rdiag gpu --parse"
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("smi_xml", "nvidia-smi -q -x", GPU),
        Kind("query_gpu_csv", "nvidia-smi --query-gpu", GPU),
        Kind("smi_q", "nvidia-smi -q", GPU),
        Kind("smi_error", "an error message of nvidia-smi", GPU),
        Kind("query_apps_csv", "nvidia-smi --query-compute-apps", "it says nothing about a GPU's health"),
        Kind("query_retired_csv", "nvidia-smi --query-retired-pages", "it says nothing else about a GPU; save -q -x"),
        Kind("help_query_gpu", "nvidia-smi --help-query-gpu", "it lists fields, no values"),
        Kind("smi_list", "nvidia-smi -L", "it also lists GPUs that are lost; save -q -x"),
        Kind("smi_version", "nvidia-smi --version", "it says nothing about a GPU; save -q -x"),
        Kind("smi_table", "the table of nvidia-smi", "its columns move and it cuts names; save -q -x"),
        Kind("nvlink_s", "nvidia-smi nvlink -s", "it says nothing else about a GPU; save -q -x"),
        Kind("dmon", "nvidia-smi dmon", "it says nothing about a GPU's health; save -q -x"),
        Kind("pmon", "nvidia-smi pmon", "it says nothing about a GPU's health; save -q -x"),
        Kind("dcgmi_diag_json", "dcgmi diag -j", "it is a diagnosis by itself"),
        Kind("topo_m", "nvidia-smi topo -m", "rdiag topo --parse"),
        Kind("topo_p2p", "nvidia-smi topo -p2p", "it does not say how they are joined: save nvidia-smi topo -m"),
        Kind("nccl_tests", "nccl-tests", "rdiag nccl --parse"),
        Kind("nccl_tests_json", "nccl-tests -J", "rdiag nccl --parse"),
        Kind("nccl_debug", "a log of NCCL_DEBUG", "it holds no measurement"),
        Kind("ncclras_json", "ncclras", "it describes running communicators, not GPUs"),
        Kind("kernel_log", "a kernel log", "it is read on the host: rdiag gpu --host HOST"),
        Kind("lspci", "lspci", "it is read on the host: rdiag topo --host HOST"),
        Kind("fabricmanager_log", "a log of the fabric manager", "it is read on the host: rdiag gpu --host HOST"),
        Kind("busbw_table", "a table of bus bandwidths", "it is a reference, not a measurement"),
        Kind("mpirun_error", "an error message of mpirun", "it did not start anything: there is nothing to read"),
        Kind("empty", "nothing at all", "there is nothing to read"),
        Kind("unknown", "nothing that is known here", "save nvidia-smi -q -x"),
    )
}


def _has(pattern: str, flags: int = re.MULTILINE) -> Callable[[str], bool]:
    compiled = re.compile(pattern, flags)
    return lambda text: compiled.search(text) is not None


def _csv(text: str) -> bool:
    """Whether a line near the top names fields of ``--query-gpu``."""
    for line in text.split("\n")[:20]:
        cells = [re.sub(r" \[[^\]]*\]$", "", cell.strip()) for cell in line.split(",")]
        names = sum(cell in BY_FIELD for cell in cells)
        if names and (names * 2 >= len(cells) or names >= 4):
            return True
    return False


def _p2p(text: str) -> bool:
    """Whether a row of a matrix holds P2P states: topo -m has the same shape with other words."""
    for line in text.split("\n")[:200]:
        tokens = line.split()
        if len(tokens) > 2 and re.fullmatch(r"GPU\d{1,3}", tokens[0]) and not tokens[1].startswith("GPU"):
            return any(token in {"OK", "CNS", "GNS", "TNS", "NS", "DR", "U"} for token in tokens[1:])
    return False


def _only_errors(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    known = [line for line in lines if recognise(line) is not None]
    return bool(known) and len(lines) <= 3 * len(known)


_TESTS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("smi_xml", _has(r"<nvidia_smi_log\b")),
    ("smi_q", _has(r"^=+NVSMI LOG=+")),
    ("dcgmi_diag_json", _has(r'"DCGM (?:GPU )?Diagnostic')),
    ("ncclras_json", _has(r'"communicators_count"')),
    ("nccl_tests_json", _has(r'"(?:out_of_bounds|average_bus_bandwidi?th|out_of_place)"\s*:')),
    ("nccl_tests_json", _has(r'^\s*\{\s*"version"\s*:.*"(?:nthreads|nccl_version|args)"', re.DOTALL)),
    ("help_query_gpu", _has(r'^List of valid properties to query for the switch "--query-gpu')),
    ("query_retired_csv", _has(r"^(?:[A-Za-z_.]+, )*retired_pages\.(?:address|cause)\b")),
    ("query_apps_csv", _has(r"^(?:[a-z_]+, )*(?:pid|process_name), [a-z_, ]+")),
    ("busbw_table", lambda text: {"busbw_gbs", "source"} <= set(text.split("\n", 1)[0].split(","))),
    ("query_gpu_csv", _csv),
    ("dmon", _has(r"^#\s*gpu\b(?![^\n]*\bpid\b)[^\n]*\n#\s*Idx\b")),
    ("pmon", _has(r"^#\s*gpu\s[^\n]*\bpid\b")),
    ("topo_p2p", _p2p),
    ("topo_m", _has(r"^(?:\x1b\[4m|[ \t])*(?:\x1b\[4m)?\s*GPU0\b[^\n]*\b(?:CPU Affinity|NUMA Affinity|GPU\d)")),
    ("topo_m", _has(r"\bCPU Affinity\b[^\n]*\bNUMA Affinity\b")),
    ("nccl_tests", _has(r"algbw\b[^\n]{0,200}busbw|^#\s*nThread|Test (?:NCCL|CUDA|MPI) failure |^#? *Out of bounds values")),
    ("nccl_debug", _has(r"\b(?:NCCL|RCCL) (?:INFO|WARN|TRACE|version)\b|\bINFO (?:NET|GRAPH|INIT|ENV|COLL|P2P)\b")),
    ("smi_table", _has(r"^\|\s*NVIDIA-SMI \d")),
    ("smi_version", _has(r"^(?:NVIDIA-SMI|NVML|DRIVER|KMD) version\s*:", re.MULTILINE | re.IGNORECASE)),
    ("nvlink_s", _has(r"^GPU \d+: [^\n]*\(UUID: [^\n]*\)\s*\n\s*(?:Link \d|NVML: |Nvlink |Device does not|all links)", re.MULTILINE | re.IGNORECASE)),
    ("smi_list", _has(r"^GPU \d+: [^\n]*\(UUID: ")),
    ("fabricmanager_log", _has(r"^\[?[A-Z][a-z]{2} \d{2} \d{4} \d{2}:\d{2}:\d{2}\]? \[(?:INFO|ERROR|WARNING|FATAL|DEBUG)\] \[tid|[Ff]abric ?[Mm]anager version")),
    ("kernel_log", _has(r"NVRM: S?Xid\b|\bSXid \(PCI")),
    ("smi_error", _only_errors),
    ("mpirun_error", _has(r"^There are not enough slots available|\bmpirun (?:was unable|detected|noticed)|\bORTE_ERROR")),
    ("kernel_log", _has(r"NVRM: |\bkernel: |SXid \(PCI|^\[ *\d+\.\d+\] |pcieport |\bkern\s*:")),
    ("lspci", _has(r"^(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] ")),
)  # fmt: skip


def identify(text: str) -> Kind:
    """Return what a text is: one of :data:`KINDS`, ``unknown`` for anything else."""
    if not text.strip():
        return KINDS["empty"]
    head = "\n".join(line[:MAX_LINE] for line in text[:MAX_LOOK].split("\n"))
    for name, test in _TESTS:
        if test(head):
            return KINDS[name]
    return KINDS["unknown"]


def parse(text: str) -> Answer:
    """Read a saved text that says how GPUs are.

    Raises:
        Refused: it is something else (said by name, with what reads it), or it is too damaged to be read at all.
    """
    text = text.lstrip("\ufeff")
    kind = identify(text)
    if kind.name == "smi_xml":
        return parse_xml(text)
    if kind.name == "smi_q":
        return parse_q(text)
    if kind.name == "query_gpu_csv":
        return parse_gpu_csv(text)
    if kind.name == "smi_error":
        return Answer("smi_error", troubles=troubles(text.splitlines()))
    raise Refused("this is %s (%s): %s" % (kind.meaning, kind.name, kind.reader), hint=_instead(kind))


def _instead(kind: Kind) -> str:
    if kind.reader.startswith("rdiag "):
        return kind.reader if kind.reader.endswith("HOST") else "%s FILE" % kind.reader
    live = re.search(r"rdiag \w+ --host HOST", kind.reader)
    return live.group() if live else "save it on the host: nvidia-smi -q -x > FILE"
