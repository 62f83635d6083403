"""Words in which the driver's tools say what is wrong: what they mean, whom they are about and what to do.

nvidia-smi prints them to stdout, also between rows of data. Programs that use CUDA or NCCL print the others.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .busid import normalise
from .smi_reading import Trouble

if TYPE_CHECKING:
    from typing import Iterable

MAX_LINE = 500
_ADDRESS = r"(?P<bus>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-7])?)"


@dataclass(frozen=True)
class Known:
    """One kind of error text."""

    code: str
    pattern: str
    """Looked for anywhere in a line, in any letter case; a group ``bus`` names the GPU."""
    meaning: str
    action: str
    level: str = "fail"
    """fail, degraded or unknown."""
    scope: str = "host"
    """gpu: one card; host: all of them; query: only the question; program: the program that printed it."""


_RESET = "end the work on it, then nvidia-smi -r -i BUS_ID; reboot the host where that is not supported"
_REBOOT = "reboot the host, cut its power if that does not help; see Xid 79 in the kernel log"
_SHM = "give the container more shared memory (--shm-size, --ipc=host) or enlarge /dev/shm"

ERRORS: tuple[Known, ...] = (
    # nvidia-smi, the whole host.
    Known(
        "driver-not-loaded",
        r"couldn'?t communicate with the NVIDIA driver|initialize NVML: Driver Not Loaded",
        "the kernel module is not loaded, or there is none for this kernel",
        "modprobe nvidia; rebuild the module (dkms) after a kernel update; look for secure boot in dmesg",
    ),
    Known(
        "driver-library-mismatch",
        r"Driver/library version mismatch|RM has detected an NVML/RM version mismatch",
        "the driver's libraries were upgraded while the old kernel module stays loaded",
        "reboot the host or reload the nvidia modules; /proc/driver/nvidia/version says which is loaded",
    ),
    Known(
        "nvml-version",
        r"^NVML library version:",
        "the version of the library that does not fit",
        "reboot the host or reload the nvidia modules",
    ),
    Known(
        "nvml-not-permitted",
        r"initialize NVML: Insufficient Permissions?",
        "the device nodes may not be opened by this user",
        "add the user to the group of /dev/nvidia*, or ask as root",
        level="unknown",
    ),
    Known(
        "nvml-unknown-error",
        r"initialize NVML: (?:Unknown Error|GPU access blocked)",
        "the driver does not answer; in a container its device cgroup was lost (systemctl daemon-reload does that)",
        "restart the container; without one look at the kernel log",
    ),
    Known(
        "nvml-failed",
        r"Failed to initialize NVML",
        "the driver's library does not start",
        "look at the kernel log; compare /proc/driver/nvidia/version with the libraries",
    ),
    Known(
        "nvml-library-missing",
        r"couldn'?t find libnvidia-ml|NVML Shared Library Not Found|libnvidia-ml\.so(?:\.1)?: cannot open shared object",
        "the driver's library is not installed, or not on the library path",
        "install the driver's user space; in a container use the NVIDIA container runtime",
    ),
    Known(
        "no-devices",
        r"No devices were found|No supported GPUs were found",
        "no usable GPU: passed on to a virtual machine (VFIO), off the bus, or not initialised",
        "compare with lspci -d 10de: and the kernel log",
    ),
    Known(
        "gpu-power-cables",
        r"external power cables? (?:are|is) not (?:properly )?(?:attached|connected)|power connector is not connected",
        "a card has no power from its connector",
        "connect the power cables, then cut the power",
        scope="gpu",
    ),
    Known(
        "gpu-interrupt",
        r"interrupt issue with a GPU",
        "the kernel found an interrupt problem with a card",
        "look at the kernel log; reboot the host",
    ),
    # nvidia-smi, one card.
    Known(
        "gpu-lost",
        r"Unable to determine the device handle for (?:GPU|gpu) ?" + _ADDRESS + r"?[^:]*: *(?:Unknown Error|GPU is lost|Not Found|[^:]*)",
        "this card does not answer: it has most likely fallen off the bus",
        _REBOOT,
        scope="gpu",
    ),
    Known(
        "gpu-lost",
        r"GPU is lost|fallen off the bus",
        "a card does not answer: it has fallen off the bus",
        _REBOOT,
        scope="gpu",
    ),
    Known(
        "gpu-reset-required",
        r"GPU requires (?:a )?reset|GPU reset required",
        "a card works again only after a reset",
        _RESET,
        scope="gpu",
    ),
    Known(
        "inforom-corrupted",
        r"infoROM is corrupted",
        "the card's own description of itself is damaged",
        "reset the card; replace it if that stays",
        level="degraded",
        scope="gpu",
    ),
    # nvidia-smi, the question.
    Known(
        "field-not-known",
        r"Field \"[^\"]{1,100}\" is not a valid field to query",
        "this driver does not know a field",
        "ask again without it",
        level="unknown",
        scope="query",
    ),
    Known(
        "topology-failed",
        r"Failed to run topology matrix",
        "the driver gave up on the topology, for all cards; a software RDMA device does that",
        "look for rxe or siw devices (rdma link); lspci and sysfs still show the topology",
        level="unknown",
        scope="query",
    ),
    Known(
        "option-refused",
        r"Invalid combination of input arguments|Option \S{1,40} is not recognized|is not a valid option",
        "this nvidia-smi does not know what it was asked",
        "ask in another way",
        level="unknown",
        scope="query",
    ),
    Known(
        "not-permitted",
        r"Insufficient Permissions",
        "this user may not see that",
        "ask as root",
        level="unknown",
        scope="query",
    ),
    # Programs that use CUDA.
    Known(
        "cuda-ecc",
        r"uncorrectable ECC error encountered",
        "a memory error killed the program: Xid 48, 94 or 95",
        "find the card in the kernel log, end the work on it and reset it",
        scope="gpu",
    ),
    Known(
        "cuda-out-of-memory",
        r"Test CUDA failure [^']*'out of memory'|CUDA error: out of memory|CUDA out of memory",
        "the memory of a GPU is in use",
        "see who holds it: rdiag gpu",
        level="unknown",
        scope="program",
    ),
    Known(
        "cuda-illegal-access",
        r"an illegal memory access|device-side assert",
        "the program reached outside its memory (Xid 13, 31): its own fault first",
        "run it under compute-sanitizer",
        level="unknown",
        scope="program",
    ),
    Known(
        "cuda-not-initialized",
        r"system not yet initialized",
        "CUDA error 802: the NVLink fabric is not up, or the fabric manager is not running",
        "systemctl status nvidia-fabricmanager, and its version against the driver's; see fabric.state",
    ),
    Known(
        "cuda-driver-too-old",
        r"driver version is insufficient for CUDA runtime version",
        "the program was built for a newer driver",
        "upgrade the driver, or use a build for an older CUDA",
    ),
    Known(
        "cuda-no-kernel-image",
        r"no kernel image is available for execution on the device",
        "the program was not built for this card",
        "compare torch.cuda.get_arch_list() with the card's compute capability",
        scope="program",
    ),
    Known(
        "cuda-initialization",
        r"Unexpected error from cudaGetDeviceCount",
        "CUDA does not start: a mismatch of versions, the fabric (802) or MIG",
        "look at the number after Error",
    ),
    # NCCL and the programs around it.
    Known(
        "nccl-peer-mapping",
        r"peer mapping resources exhausted",
        "more peers than a card can map",
        "use at most 8 GPUs without NVSwitch a process group, or NCCL_P2P_DISABLE=1",
        scope="program",
    ),
    Known(
        "nccl-shared-memory",
        r"Error while creating shared memory segment /dev/shm/nccl-|failed to extend /dev/shm/nccl-",
        "the shared memory (/dev/shm) is too small for NCCL",
        _SHM,
    ),
    Known(
        "no-space",
        r"No space left on device",
        "a file system is full; of NCCL it is /dev/shm",
        _SHM,
        level="unknown",
        scope="program",
    ),
    Known(
        "collective-timeout",
        r"Watchdog caught collective operation timeout|detected by watchdog at work: \d+",
        "a collective did not end: a rank never arrived, or the transport hangs",
        "compare SeqNum or the last enqueued work of all ranks: the one behind is the cause",
        scope="program",
    ),
    Known(
        "nccl-error",
        r"unhandled cuda error|unhandled system error|NCCL [^\n]{0,40}internal error|ncclInternalError|invalid usage"
        r"|remote process exited or there was a network error",
        "NCCL gave up; its first WARN line says why, not the last",
        "run with NCCL_DEBUG=WARN and read the first WARN line",
        scope="program",
    ),
    # The kernel's own words.
    Known(
        "switch-fault",
        r"nvidia-nvswitch\d+: SXid \([^)]*\): \d+, Fatal",
        "an NVSwitch reported a fatal error",
        "end all work, reset all GPUs and switches; power-cycle if that stays",
    ),
    Known(
        "pcie-error",
        r"AER: [^\n]*Uncorrected \((?:Fatal|Non-Fatal)\)|PCIe Bus Error: severity=",
        "a PCIe link reported errors",
        "count them by severity and address; reseat the card or its riser",
        level="degraded",
    ),
    Known(
        "pcie-limited",
        r"available PCIe bandwidth, limited by ",
        "a link came up slower than its card at boot",
        "check the link under load first: an idle card sinks on purpose",
        level="degraded",
        scope="gpu",
    ),
)  # fmt: skip
"""In the order of their precedence: the first that fits a line names it."""

_COMPILED = tuple((known, re.compile(known.pattern, re.IGNORECASE)) for known in ERRORS)


def recognise(line: str) -> Trouble | None:
    """Return what one line says is wrong; None when it says nothing known."""
    text = line.strip()[:MAX_LINE]
    for known, pattern in _COMPILED:
        match = pattern.search(text)
        if match is not None:
            address = match.groupdict().get("bus") or _named_gpu(text)
            bus_id = normalise(address) if address else None
            return Trouble(known.code, text, known.meaning, known.action, known.level, known.scope, bus_id)
    return None


def troubles(lines: Iterable[str]) -> list[Trouble]:
    """Return what each of some lines says is wrong, in their order."""
    return [trouble for trouble in map(recognise, lines) if trouble is not None]


def _named_gpu(text: str) -> str | None:
    match = re.search(r"GPU ?(?:at )?(?:PCI:?)?" + _ADDRESS, text, re.IGNORECASE)
    return match.group("bus") if match else None


STATUSES = {
    0: "no error",
    2: "an argument that it does not know",
    3: "not available on this card",
    4: "no permission",
    6: "no such GPU",
    8: "a card's power cables are not attached",
    9: "the driver is not loaded",
    10: "an interrupt problem with a card",
    12: "the driver's library was not found",
    13: "the driver's library lacks a function",
    14: "a card's InfoROM is corrupted",
    15: "a GPU has fallen off the bus",
    18: "driver and library are of different versions",
    255: "another error of the driver",
}
"""Exit statuses of nvidia-smi; 18 and 255 as seen, the others as its manual lists them."""
