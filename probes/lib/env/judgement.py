"""Traps in the settings of a host: each one a rule of its own over what was found."""

from __future__ import annotations

import re

from probes.lib.env.machine import SHM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator, Mapping, Sequence

    Found = dict[str, Any]

P2P_LEVELS = {"0": "LOC", "1": "PIX", "2": "PXB", "3": "PHB", "4": "SYS", "5": "SYS"}
"""What NCCL makes of the numbers that it still takes; NVL has none."""
P2P_NAMES = frozenset({"LOC", "NVL", "PIX", "PXB", "PHB", "SYS"})
SHM_FLOOR = 1 << 30
MEMLOCK_FLOOR = 64 << 30
OPEN_FILES_FLOOR = 4096
ACCELERATE_DRIVER = (550, 40, 7)
_OFF = {
    ("NCCL_P2P_DISABLE", "1"): "GPUs exchange nothing directly, all goes through host memory",
    ("NCCL_SHM_DISABLE", "1"): "GPUs without a direct way use the network stack instead of shared memory",
    ("NCCL_IB_DISABLE", "1"): "InfiniBand and RoCE are not used",
    ("NCCL_NVLS_ENABLE", "0"): "reductions inside NVSwitch are off: about a third less bandwidth on NVSwitch boxes",
    ("NCCL_NET_GDR_LEVEL", "LOC"): "the network does not reach GPU memory directly",
    ("NCCL_CUMEM_ENABLE", "0"): "NVLS and fast registration need cuMem",
    ("CUDA_LAUNCH_BLOCKING", "1"): "every kernel waits for the one before: for debugging only",
    ("TORCH_NCCL_BLOCKING_WAIT", "1"): "every collective blocks the program",
    ("NCCL_DEBUG", "TRACE"): "NCCL writes very much and slows down",
}
_DEPRECATED = {"NCCL_MIN_NCHANNELS": "NCCL_MIN_CTAS", "NCCL_MAX_NCHANNELS": "NCCL_MAX_CTAS", "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
               "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT"}  # fmt: skip
_ARCHITECTURES = (
    (r"B300|GB300", (10, 3)), (r"\bG?B200|\bB100", (10, 0)), (r"RTX PRO \d|RTX 50[5-9]0", (12, 0)), (r"\bG?H[12]00|\bH800|\bH20\b", (9, 0)),
    (r"L40|\bL4\b|\bL20\b|RTX 40[5-9]0|RTX \d000 (?:SFF )?Ada|RTX 6000 Ada", (8, 9)),
    (r"\bA100|\bA800|\bA30\b", (8, 0)), (r"\bA(?:2|10|16|40)\b|RTX A\d000|RTX 30[5-9]0", (8, 6)), (r"\bT4\b|RTX 20[6-8]0|Quadro RTX", (7, 5)), (r"V100", (7, 0)),
)  # fmt: skip
"""GPU names and their compute capability, from NVIDIA's table of CUDA GPUs; unknown names are not judged."""


def version_tuple(text: str | None) -> tuple[int, ...] | None:
    """Return 570.124.06 as numbers; driver versions have two or three parts."""
    if not text or not re.match(r"\d+(\.\d+)*", text):
        return None
    return tuple(int(part) for part in re.match(r"\d+(?:\.\d+)*", text)[0].split("."))  # type: ignore[index]


def capability(model: str) -> tuple[int, int] | None:
    """Return the compute capability of a GPU by its name; None for one that is not known."""
    return next((found for pattern, found in _ARCHITECTURES if re.search(pattern, model)), None)


def runs_on(arch_list: Sequence[str], wanted: tuple[int, int]) -> bool:
    """Return whether code built for ``arch_list`` (sm_90, compute_120...) runs on a GPU of this capability."""
    for arch in arch_list:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
        if match is None:
            continue
        built = int(match[2]), int(match[3])
        if match[4] == "a":
            fits = built == wanted
        elif match[1] == "sm" or match[4] == "f":
            # Machine code runs on later minor versions of the same major one.
            fits = built[0] == wanted[0] and built[1] <= wanted[1]
        else:
            fits = built <= wanted
        if fits:
            return True
    return False


class Judge:
    """Applies the rules.

    Args:
        tell: a probe's ``context.finding``.
        found: what there is: variables (name -> (value, source)), models, driver, ...
    """

    def __init__(self, tell: Callable[..., None], found: Found) -> None:
        self._tell = tell
        self.found = found

    def all(self) -> None:
        """Apply every rule."""
        for rule in (
            self._driver, self._torch, self._nccl, self._switches, self._p2p_level, self._forced, self._device_order, self._conf_files,
            self._startup_files, self._accelerate, self._shm, self._limits, self._governor, self._process,
        ):  # fmt: skip
            rule()

    def _variables(self) -> Iterator[tuple[str, str, str]]:
        """Yield name, value and source of every setting that is in force."""
        variables: Mapping[str, tuple[str, str]] = self.found["variables"]
        for name, (value, source) in sorted(variables.items()):
            yield name, value, source

    def _driver(self) -> None:
        module, libraries = self.found["driver_version"], self.found["library_versions"]
        if module is None:
            if self.found["models"] or self.found["gpu_devices"]:
                self._tell("unknown", "driver", "the driver's version cannot be read here")
            else:
                self._tell("skipped", "driver", "no NVIDIA driver is loaded")
            return
        kind = {True: "open", False: "proprietary", None: "unknown"}[self.found["open_module"]]
        evidence = ("/proc/driver/nvidia/version: %s, %s kernel module" % (module, kind),)
        wrong = [library for library in libraries if version_tuple(library) != version_tuple(module)]
        # A kernel module and a library of one release may differ in how many parts they print.
        if libraries and len(wrong) == len(libraries) and not any(_same(library, module) for library in libraries):
            self._tell(
                "fail", "driver-library-mismatch", "the loaded kernel module is %s, the driver's library %s" % (module, ", ".join(libraries)),
                value=module, threshold=libraries[0], threshold_source="version in the name of libnvidia-ml", evidence=evidence,
                action="reboot, or unload and reload the nvidia modules: the driver was upgraded while it was loaded",
            )  # fmt: skip
        else:
            self._tell("ok", "driver", "NVIDIA driver %s" % module, value=module, evidence=evidence)
        blackwell = [model for model in self.found["models"] if (capability(model) or (0, 0)) >= (10, 0)]
        if blackwell and self.found["open_module"] is False:
            self._tell(
                "fail", "driver-not-open", "%s needs the open kernel module, the proprietary one is loaded" % blackwell[0],
                evidence=evidence, action="install the open variant of the driver (nvidia-open)",
            )  # fmt: skip

    def _torch(self) -> None:
        torch, error = self.found["torch"], self.found["torch_error"]
        if torch is None:
            if not self.found["torch_asked"]:
                self._tell("skipped", "torch", "torch was not to be asked")
            elif error is None:
                self._tell("skipped", "torch", "torch is not installed in this environment")
            else:
                self._tell("unknown", "torch", "torch could not be asked: %s" % error, action="import torch by hand in this environment")
            return
        if torch["cuda"] is None:
            if self.found["models"] or self.found["gpu_devices"]:
                self._tell(
                    "degraded", "torch-without-cuda", "torch %s is built without CUDA, and there are GPUs" % torch["version"],
                    value=torch["version"], action="install a build of torch for CUDA",
                )  # fmt: skip
            else:
                self._tell("ok", "torch", "torch %s, built without CUDA" % torch["version"], value=torch["version"])
            return
        self._tell("ok", "torch", "torch %s for CUDA %s" % (torch["version"], torch["cuda"]), value=torch["version"],
                   evidence=("built for %s" % (" ".join(torch["arch_list"]) or "unknown architectures"),))  # fmt: skip
        for model in dict.fromkeys(self.found["models"]):
            wanted = capability(model)
            if wanted is not None and torch["arch_list"] and not runs_on(torch["arch_list"], wanted):
                self._tell(
                    "fail", "torch-lacks-architecture", "torch has no code for %s (compute capability %d.%d)" % (model, *wanted),
                    subject=model, value=" ".join(torch["arch_list"]), threshold="sm_%d%d" % wanted,
                    threshold_source="NVIDIA's table of compute capabilities", action="install a build of torch that has it",
                )  # fmt: skip
        driver = version_tuple(self.found["driver_cuda"])
        built = version_tuple(torch["cuda"])
        if driver and built and driver[0] < built[0]:
            self._tell(
                "fail", "driver-too-old", "torch is built for CUDA %s, the driver supports CUDA %s" % (torch["cuda"], self.found["driver_cuda"]),
                value=self.found["driver_cuda"], threshold=torch["cuda"], threshold_source="torch.version.cuda",
                action="upgrade the driver, or install torch for an older CUDA",
            )  # fmt: skip

    def _nccl(self) -> None:
        runs, why, built = self.found["nccl_runs"], self.found["nccl_from"], self.found["nccl_built"]
        libraries = self.found["nccl_libraries"]
        evidence = tuple("%s: %s (%s)" % (library.path, library.version or library.error or "unknown", library.origin) for library in libraries)
        if runs is None:
            if libraries or built:
                self._tell("unknown", "nccl", "which NCCL runs cannot be told", evidence=evidence)
            return
        if built is not None and built != runs:
            self._tell(
                "degraded", "nccl-mismatch", "NCCL %s runs, torch was built with %s" % (runs, built), value=runs, threshold=built,
                threshold_source="torch's own build", evidence=(why, *evidence),
                action="take the folder of the other libnccl out of LD_LIBRARY_PATH, or uninstall it, unless it is meant",
            )  # fmt: skip
        else:
            self._tell("ok", "nccl", "NCCL %s runs" % runs, value=runs, evidence=(why, *evidence))

    def _switches(self) -> None:
        for name, value, source in self._variables():
            why = _OFF.get((name, value.strip().upper()))
            if why is not None:
                self._tell("degraded", "setting-slows", "%s=%s: %s" % (name, value, why), subject=name, value=value,
                           evidence=("set by: %s" % source,), action="remove it where it is set, unless it is a workaround that is still needed")  # fmt: skip
            if name in _DEPRECATED:
                self._tell("ok", "setting-deprecated", "%s is an old name; today it is %s" % (name, _DEPRECATED[name]), subject=name,
                           evidence=("set by: %s" % source,))  # fmt: skip

    def _p2p_level(self) -> None:
        for name, value, source in self._variables():
            if name not in {"NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL"}:
                continue
            plain = value.strip()
            if plain.lstrip("-").isdigit():
                meaning = P2P_LEVELS.get(plain)
                told = "NCCL takes it as %s" % meaning if meaning else "NCCL knows no such number"
                self._tell(
                    "degraded", "p2p-level-number", "%s=%s is a number of an old scheme: %s" % (name, plain, told), subject=name, value=plain,
                    threshold="LOC, NVL, PIX, PXB, PHB, SYS", threshold_source="NCCL's documentation",
                    evidence=("set by: %s" % source, "0 LOC, 1 PIX, 2 PXB, 3 PHB, 4 SYS; NVL has no number"),
                    action="write the name%s" % (" %s" % meaning if meaning else ""),
                )  # fmt: skip
            elif plain.upper() not in P2P_NAMES:
                self._tell(
                    "degraded", "p2p-level-unknown", "%s=%s is no level that NCCL knows" % (name, value), subject=name, value=value,
                    threshold="LOC, NVL, PIX, PXB, PHB, SYS", threshold_source="NCCL's documentation", evidence=("set by: %s" % source,),
                )  # fmt: skip

    def _forced(self) -> None:
        for name, value, source in self._variables():
            if name == "NCCL_PROTO" and "LL128" in value.upper() and not value.startswith("^"):
                self._tell(
                    "degraded", "protocol-forced", "NCCL_PROTO=%s forces LL128: where NCCL would not choose it, data can be corrupted" % value,
                    subject=name, value=value, evidence=("set by: %s" % source,), action="remove it",
                )  # fmt: skip
            elif name in {"NCCL_PROTO", "NCCL_ALGO"}:
                self._tell("degraded", "algorithm-forced", "%s=%s takes the choice from NCCL" % (name, value), subject=name, value=value,
                           evidence=("set by: %s" % source,), action="remove it, and measure with rdiag nccl before and after")  # fmt: skip
            elif name == "LD_PRELOAD" and "nccl" in value:
                self._tell("degraded", "nccl-preloaded", "LD_PRELOAD puts a libnccl before all others", subject=name, value=value,
                           evidence=("set by: %s" % source,))  # fmt: skip

    def _device_order(self) -> None:
        models = self.found["models"]
        if len(models) < 2:
            return
        order = self.found["variables"].get("CUDA_DEVICE_ORDER", ("", ""))[0]
        if order == "PCI_BUS_ID":
            return
        mixed = len(set(models)) > 1
        self._tell(
            "degraded" if mixed else "ok", "device-order",
            "CUDA_DEVICE_ORDER is not PCI_BUS_ID: CUDA's numbers %s those of nvidia-smi" % ("are not" if mixed else "may differ from"),
            value=order or "not set", threshold="PCI_BUS_ID", threshold_source="CUDA's default is FASTEST_FIRST",
            evidence=(", ".join(sorted(set(models))),), action="set CUDA_DEVICE_ORDER=PCI_BUS_ID" if mixed else None,
        )  # fmt: skip

    def _conf_files(self) -> None:
        for path, reason in self.found["conf_errors"]:
            self._tell("unknown", "conf-file-unreadable", "%s cannot be read: %s" % (path, reason), subject=path)
        for line in self.found["conf_lines"]:
            where = "%s:%d" % (line.file, line.line)
            if not line.read:
                self._tell(
                    "degraded", "conf-line-ignored", "%s: NCCL ignores %s: spaces around the name are part of it" % (where, line.name),
                    subject=line.name, evidence=(where,), action="write %s=VALUE without spaces" % line.name,
                )  # fmt: skip

    def _startup_files(self) -> None:
        variables = self.found["variables"]
        absent: dict[str, list[str]] = {}
        for mention in self.found["mentions"]:
            if mention.name.startswith(("NCCL_", "TORCH_NCCL_", "CUDA_")) and mention.name not in variables:
                absent.setdefault(mention.name, []).append("%s:%d" % (mention.file, mention.line))
        for name, places in sorted(absent.items()):
            self._tell(
                "degraded", "setting-not-here", "%s is set in a startup file, and not in this environment" % name, subject=name,
                evidence=tuple(places[:5]),
                action="shells by hand may have it, programs started by ssh have not: set it in env of this host in hosts.yaml, or delete it",
            )  # fmt: skip

    def _accelerate(self) -> None:
        driver, version = version_tuple(self.found["driver_version"]), self.found["packages"].get("accelerate")
        cards = [model for model in self.found["models"] if "RTX 40" in model]
        if version is None or not cards or driver is None or driver >= ACCELERATE_DRIVER:
            return
        self._tell(
            "degraded", "accelerate-disables-p2p",
            "accelerate sets NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 in what it launches, without saying so: %s, driver below 550.40.07" % cards[0],
            value=self.found["driver_version"], threshold="550.40.07", threshold_source="accelerate's own rule for cards called RTX 40",
            evidence=("accelerate %s" % version,), action="upgrade the driver, or launch with torchrun",
        )  # fmt: skip

    def _shm(self) -> None:
        total = self.found["shm_total"]
        if total is None:
            self._tell("skipped", "shared-memory", "there is no %s here" % SHM)
        elif total < SHM_FLOOR:
            self._tell(
                "degraded", "shared-memory", "%s is small: NCCL without P2P, and data loaders, run out of it" % SHM, value=round(total / 2**20), unit="MiB",
                threshold=SHM_FLOOR >> 20, threshold_source="NCCL asks for 1 GB in containers (docker --shm-size=1g)",
                action="docker run --shm-size=16g or --ipc=host, or remount it larger",
            )  # fmt: skip

    def _limits(self) -> None:
        locked = self.found["limits"]["locked_memory_bytes"][0]
        devices = self.found["infiniband"]
        if devices and locked is not None and locked < MEMLOCK_FLOOR:
            self._tell(
                "degraded", "locked-memory", "locked memory is limited, and RDMA has to lock its buffers", value=locked, unit="bytes",
                threshold="unlimited", threshold_source="NCCL's documentation", evidence=(", ".join(devices[:8]),),
                action="ulimit -l unlimited in /etc/security/limits.conf, docker --ulimit memlock=-1, or LimitMEMLOCK of the service",
            )  # fmt: skip
        opened = self.found["limits"]["open_files"][0]
        if opened is not None and opened < OPEN_FILES_FLOOR:
            self._tell(
                "degraded", "open-files", "few files may be open at once: many ranks and data loaders need more", value=opened, unit="files",
                threshold=OPEN_FILES_FLOOR, threshold_source="own judgement", action="ulimit -n 65536",
            )  # fmt: skip

    def _governor(self) -> None:
        governors, driver = self.found["governors"], self.found["scaling_driver"] or ""
        slow = sum(count for name, count in governors.items() if name == "powersave")
        # intel_pstate and amd-pstate-epp call their dynamic mode powersave.
        if slow and "pstate" not in driver:
            self._tell(
                "degraded", "cpu-governor", "%d CPUs run in powersave" % slow, value="powersave", threshold="performance",
                threshold_source="launching kernels and NCCL's proxy threads need fast cores", evidence=("driver %s" % (driver or "unknown"),),
                action="cpupower frequency-set -g performance",
            )  # fmt: skip

    def _process(self) -> None:
        differing = self.found["process_differs"]
        if differing:
            self._tell(
                "ok", "process-differs", "process %d was started with other settings than a new login gets" % self.found["pid"],
                subject="pid %d" % self.found["pid"], evidence=tuple(differing[:20]),
            )  # fmt: skip


def _same(library: str, module: str) -> bool:
    """Return whether two versions are one release: 570.124 and 570.124.06 are."""
    shorter, longer = sorted((library.split("."), module.split(".")), key=len)
    return len(shorter) < len(longer) and longer[: len(shorter)] == shorter
