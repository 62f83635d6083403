"""Judges how the GPUs of a host are joined: the card that is not there, the matrix, and the way that NCCL will take.

What could not be looked at is ``unknown`` where a verdict needs it.
"""

from __future__ import annotations

from collections import Counter

from probes.lib.gpu import kernel_log_findings, nccl_paths, topo_bus_checks
from probes.lib.gpu.census import PASSED_ON
from probes.lib.gpu.judgement import Judgement
from probes.lib.gpu.missing import Missing
from probes.lib.gpu.topo_bus_checks import SIBLINGS
from probes.lib.gpu.topo_pairs import names
from probes.lib.gpu.topology import P2P_WORDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator, Sequence

    from probes.lib.gpu.census import Expected
    from probes.lib.gpu.nccl_paths import Level
    from probes.lib.gpu.topo_pairs import Pair
    from probes.lib.gpu.topo_reading import Facts, Gpu

SHM_FLOOR = 1 << 30
LINK_XIDS = {74, 79, 136, *range(144, 151), 155, 167}
"""Xids that speak of links; the others are for the check of the GPUs themselves."""


def judge(facts: Facts, limit: Level, found: Sequence[Pair], expected: Expected | None = None) -> list[Judgement]:
    """Return the findings, the worst first."""
    told = [*_count(facts, expected), *_inventory(facts), *_matrix(facts), *_capabilities(facts, found), *_ways(facts, limit, found), *_nvlinks(facts), *_nics(facts)]
    if facts.source == "host":
        told += [*topo_bus_checks.judge(facts, found), *_shm(facts, found), *_kernel_log(facts)]
    order = ("fail", "degraded", "unknown", "ok", "skipped")
    return sorted(told, key=lambda item: order.index(item.level))


def _count(facts: Facts, expected: Expected | None) -> Iterator[Judgement]:
    if expected is None:
        return
    count = sum(1 for gpu in facts.gpus if gpu.index is not None)
    unread = any(not line.startswith("lspci: ") for line in facts.damaged)
    known = facts.source == "saved" or (facts.smi_listed and (count >= expected.gpus or not unread))
    level = "unknown" if not known else "ok" if count == expected.gpus else "fail"
    yield Judgement(
        level, "gpu-count", "%d of %d GPUs are there" % (count, expected.gpus), value=count, unit="GPUs", threshold=expected.gpus,
        threshold_source=expected.source,
        action=None if level == "ok" else "look which bus id is not there: lspci, kernel log; %s" % expected.correction,
    )  # fmt: skip


def _inventory(facts: Facts) -> Iterator[Judgement]:
    for trouble in facts.troubles:
        subject = next((gpu.subject for gpu in facts.gpus if gpu.bus_id == trouble.bus_id), trouble.bus_id)
        yield Judgement(trouble.level, trouble.code, trouble.meaning, subject=subject, evidence=(trouble.text,), action=trouble.action)
    if facts.damaged:
        yield Judgement(
            "unknown", "list-unread", "lines of the list of devices could not be read", value=len(facts.damaged), unit="lines",
            evidence=tuple(facts.damaged[:3]),
        )  # fmt: skip
    if facts.source != "host":
        return
    if not facts.gpus:
        yield from _no_gpu(facts)
        return
    if not facts.smi_listed:
        yield Judgement(
            "unknown", "no-list", "nvidia-smi does not list the GPUs that are there", value=len(facts.gpus), unit="GPUs",
            evidence=(facts.smi_reason or "it printed nothing",), action=_then(facts, "run nvidia-smi on the host and read what it says"),
        )  # fmt: skip
    for gpu in facts.gpus:
        if gpu.lost is not None:
            yield Judgement(
                "fail", "gpu-lost", "does not answer on the bus", subject=gpu.subject, evidence=(gpu.lost,),
                action="power-cycle the host, since a reboot may not be enough; check power and slot",
            )  # fmt: skip
        elif facts.smi_listed and "nvidia-smi" not in gpu.sources:
            yield _not_listed(facts, gpu)
        elif facts.tree is not None and facts.tree.reason is None and "pci" not in gpu.sources:
            hidden = facts.virtual or facts.wsl or gpu.bus_id in facts.tree.damaged
            level = "unknown" if hidden else "fail"
            yield Judgement(
                level, "gpu-not-on-bus", "nvidia-smi lists it, and it is not on the PCI bus", subject=gpu.subject,
                action="it fell off the bus: power-cycle the host" if level == "fail" else "look at the host of this virtual machine, or again",
            )  # fmt: skip


def _not_listed(facts: Facts, gpu: Gpu) -> Judgement:
    evidence = ("listed by: %s" % (", ".join(gpu.sources) or "nobody"),)
    device = facts.tree.devices.get(gpu.bus_id) if facts.tree is not None else None
    if device is not None and device.driver in PASSED_ON:
        return Judgement("ok", "gpu-passed-on", "is handed to a virtual machine (%s)" % device.driver, subject=gpu.subject, evidence=evidence)
    if facts.container is not None and "driver" not in gpu.sources:
        return Judgement("ok", "gpu-not-here", "is in the machine and not in this container", subject=gpu.subject, evidence=evidence)
    # A line that could not be read may be this one's.
    unread = any(not line.startswith("lspci: ") for line in facts.damaged)
    return Judgement(
        "unknown" if unread else "fail", "gpu-not-listed", "is on the bus, and nvidia-smi does not list it", subject=gpu.subject, evidence=evidence,
        action="look for it in the kernel log; lost: power-cycle; another driver holds it: unbind it",
    )  # fmt: skip


def _no_gpu(facts: Facts) -> Iterator[Judgement]:
    evidence: tuple[str, ...] = (facts.smi_reason or "nvidia-smi listed nothing", facts.lspci_reason or "lspci shows no NVIDIA GPU")
    if facts.tree is not None and facts.tree.reason is not None:
        evidence += ("the PCI bus cannot be read: %s" % facts.tree.reason.text,)
    where = "WSL shows no PCI bus" if facts.wsl else "neither nvidia-smi, nor the driver, nor the PCI bus shows a GPU"
    yield Judgement(
        "unknown", "no-gpu", where, evidence=evidence, action="in a container: hand the GPUs in (--gpus all)",
    )  # fmt: skip


def _then(facts: Facts, action: str) -> str:
    """Return what to do, unless it would be one more question to a driver that hangs."""
    return "see to the driver first, then run it again" if facts.hung else action


def _matrix(facts: Facts) -> Iterator[Judgement]:
    matrix = facts.matrix
    if matrix is None:
        if len(facts.gpus) > 1:
            yield Judgement(
                "unknown", "no-matrix", "nvidia-smi gave no link matrix: how the GPUs are joined is known from the PCI bus alone",
                evidence=(facts.matrix_reason,),
                action=_then(facts, "nvidia-smi topo -m; a software RDMA device (rxe, siw) makes it fail: remove it"),
            )  # fmt: skip
        return
    for a, b, one, other in matrix.asymmetric:
        yield Judgement(
            "unknown", "matrix-asymmetric", "the matrix says %s one way and %s the other" % (one, other), subject="%s-%s" % (a, b),
            action="ask again: nvidia-smi topo -m",
        )  # fmt: skip
    if matrix.damaged:
        yield Judgement(
            "unknown", "matrix-damaged", "parts of the link matrix cannot be read", value=len(matrix.damaged), unit="parts",
            evidence=tuple(matrix.damaged[:5]), action="ask again: nvidia-smi topo -m",
        )  # fmt: skip
    listed = {gpu.label for gpu in facts.gpus if gpu.index is not None}
    if facts.smi_listed and listed != set(matrix.gpus):
        gone = sorted(listed - set(matrix.gpus)) or sorted(set(matrix.gpus) - listed)
        yield Judgement(
            "unknown", "matrix-other-gpus", "the link matrix and the list of GPUs do not name the same ones", evidence=tuple(gone[:16]),
            action="ask again: nvidia-smi topo -m",
        )  # fmt: skip
    elif matrix.complete:
        count = Counter(link.word for (a, b), link in matrix.links.items() if a in matrix.gpus and b in matrix.gpus and a < b)
        words = ", ".join("%d %s" % (number, word) for word, number in sorted(count.items())) or "one GPU"
        yield Judgement("ok", "matrix", "the link matrix is complete and symmetric: %s" % words, value=len(matrix.gpus), unit="GPUs")


def _capabilities(facts: Facts, found: Sequence[Pair]) -> Iterator[Judgement]:
    if facts.source != "host" or len([gpu for gpu in facts.gpus if gpu.index is not None]) < 2:
        return
    for capability in ("read", "write"):
        reason = facts.peers_reason.get(capability)
        damaged = facts.peers[capability].damaged if capability in facts.peers else []
        if reason is not None or damaged:
            yield Judgement(
                "unknown", "p2p-%s-unknown" % capability, "whether the driver allows P2P %ss is not known" % capability,
                evidence=(reason,) if reason is not None else tuple(damaged[:5]), action=_then(facts, "nvidia-smi topo -p2p %s" % capability[0]),
            )  # fmt: skip
    unsure = [pair for pair in found if "U" in {pair.read, pair.write}]
    if unsure:
        yield Judgement(
            "unknown", "p2p-undecided", "the driver does not know whether it allows P2P", subject=names(unsure), value=len(unsure),
            unit="pairs", action="measure it: rdiag p2p",
        )  # fmt: skip
    sided = [pair for pair in found if not {None, "U"} & {pair.read, pair.write} and pair.read != pair.write]
    if sided:
        yield Judgement(
            "degraded", "p2p-one-sided", "the driver allows P2P reads and not writes, or the other way round", subject=names(sided),
            value=len(sided), unit="pairs", evidence=tuple("%s: read %s, write %s" % (p.name, p.read, p.write) for p in sided[:4]),
            action="NCCL needs both; measure what works: rdiag p2p",
        )  # fmt: skip
    words = Counter(word for pair in found for word in {pair.read, pair.write} if word not in {None, "OK", "U"})
    for word, count in sorted((str(word), count) for word, count in words.items()):
        chosen = [pair for pair in found if word in {pair.read, pair.write}]
        yield Judgement(
            "degraded", "p2p-not-allowed", "the driver allows no P2P: %s (%s)" % (P2P_WORDS.get(word, word), word),
            subject=names(chosen), value=count, unit="pairs", action=_why_not(facts, word, chosen),
        )  # fmt: skip


def _why_not(facts: Facts, word: str, chosen: Sequence[Pair]) -> str:
    models = {gpu.name or "" for pair in chosen for gpu in (pair.a, pair.b)}
    if any("GeForce" in name for name in models):
        return "the driver refuses P2P on GeForce cards; a patched driver allows it, and then the data has to be verified: rdiag p2p"
    if word == "CNS":
        return "look at ACS, IOMMU and BIOS settings of the PCIe root; virtual machines often cannot"
    if word == "DR":
        return "look for a registry key that disables it: /proc/driver/nvidia/params, modprobe options"
    if facts.virtual:
        return "this is a virtual machine: its host decides"
    return "see the driver's support matrix for these cards"


def _ways(facts: Facts, limit: Level, found: Sequence[Pair]) -> Iterator[Judgement]:
    refused = [pair for pair in found if pair.way.transport == "refused"]
    if refused:
        yield Judgement(
            "fail", "nccl-refuses", "NCCL will not start: %s" % refused[0].way.reason, subject=names(refused), value=len(refused),
            unit="pairs", action="find out why the driver forbids P2P over NVLink: fabric manager, nvlink -s, kernel log",
        )  # fmt: skip
    far = [pair for pair in found if pair.way.transport in {"shm", "net"} and pair.way.allowed is not False]
    if far:
        needed = max((nccl_paths.KIND["NV" if (pair.link or "").startswith("NV") else pair.link or "SYS"] for pair in far),
                     key=nccl_paths.ORDER.index)  # fmt: skip
        sure = all(pair.way.allowed for pair in far)
        allowed = "the driver allows P2P" if sure else "the driver may allow P2P"
        yield Judgement(
            "degraded", "nccl-through-host", "NCCL will go through the host's memory although %s" % allowed, subject=names(far),
            value=len(far), unit="pairs",
            evidence=tuple("%s: %s" % (pair.name, pair.way.reason) for pair in far[:4]),
            action=_closer(limit, needed),
        )  # fmt: skip
    unknown = [pair for pair in found if pair.way.transport == "unknown"]
    if unknown:
        yield Judgement(
            "unknown", "nccl-unknown", "which way NCCL will take is not known: %s" % unknown[0].way.reason, subject=names(unknown),
            value=len(unknown), unit="pairs",
        )  # fmt: skip
    kinds = Counter(pair.way.transport for pair in found)
    if found and not refused and not far and not unknown:
        words = ", ".join("%d over %s" % (count, _WAYS[kind]) for kind, count in sorted(kinds.items()))
        unsure = sum(1 for pair in found if not pair.way.certain)
        remark = "" if not unsure else "; that the driver allows it is taken for granted" if facts.source == "saved" else ""
        level = "unknown" if unsure and facts.source == "host" else "ok"
        yield Judgement(
            level, "nccl", "pairs as NCCL will join them: %s%s" % (words, remark), value=len(found), unit="pairs",
            evidence=(found[0].way.reason, "what the driver allows is no proof that bytes arrive: rdiag p2p"),
        )  # fmt: skip
    yield from _amd(facts, found)
    yield from _hmm(facts, found)


_WAYS = {"nvlink": "NVLink", "p2p": "PCIe P2P", "shm": "the host's memory", "net": "the network", "refused": "nothing", "unknown": "?"}


def _closer(limit: Level, needed: str) -> str:
    if limit.name == "LOC":
        return "P2P is switched off (%s): take that away, and verify: rdiag p2p" % limit.source
    return (
        "NCCL_P2P_LEVEL=%s lets them talk directly; then verify with rdiag p2p, and go back to a lower level if jobs hang at full "
        "utilisation and little power" % needed
    )  # fmt: skip


def _amd(facts: Facts, found: Sequence[Pair]) -> Iterator[Judgement]:
    across = [pair for pair in found if pair.link in {"PHB", "NODE", "SYS"} and pair.way.transport == "p2p"]
    if facts.cpu_vendor != "amd" or not across or {"NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS"} & set(facts.settings):
        return
    yield Judgement(
        "ok", "nccl-amd-model", "NCCL takes 16 GB/s for the way between AMD host bridges, and may use two channels where more would pay",
        subject=names(across), value=len(across), unit="pairs",
        action="compare rdiag nccl with NCCL_MIN_CTAS=8 (NCCL_MIN_NCHANNELS before 2.17) and without",
    )  # fmt: skip


def _hmm(facts: Facts, found: Sequence[Pair]) -> Iterator[Judgement]:
    if facts.driver_params.get("nvidia_uvm.uvm_disable_hmm") == "N" and any(pair.way.transport == "p2p" for pair in found):
        yield Judgement(
            "ok", "uvm-hmm", "memory management that spans host and GPUs (HMM) is on: on some hosts P2P over PCIe hangs with it",
            action="only if P2P fails (rdiag p2p): options nvidia_uvm uvm_disable_hmm=1, then reload the driver",
        )  # fmt: skip


def _nics(facts: Facts) -> Iterator[Judgement]:
    """Find GPUs that have no NIC near, where most have one."""
    matrix = facts.matrix
    if matrix is None or not matrix.nics:
        return
    kinds = {
        gpu: {matrix.links[gpu, nic].kind for nic in matrix.nics if (gpu, nic) in matrix.links} for gpu in matrix.gpus
    }
    near = [gpu for gpu, found in kinds.items() if found & {"PIX", "PXB"}]
    if len(near) * 2 <= len(kinds):
        return
    for gpu, found in kinds.items():
        if found and gpu not in near:
            subject = next((item.subject for item in facts.gpus if item.label == gpu), gpu)
            yield Judgement(
                "degraded", "nic-far", "has no NIC below its own switch, as most of its siblings have: no GPUDirect RDMA for it",
                subject=subject, evidence=("nearest: %s" % ", ".join(sorted(found)),),
                action="is a NIC missing? lspci, rdma link; else leave it out of jobs over several hosts",
            )  # fmt: skip


def _nvlinks(facts: Facts) -> Iterator[Judgement]:
    matrix = facts.matrix
    if matrix is None:
        return
    totals = {
        gpu: sorted(link.nvlinks or 0 for (a, b), link in matrix.links.items() if a == gpu and b in matrix.gpus and link.kind == "NV")
        for gpu in matrix.gpus
    }
    usual = Counter(map(tuple, totals.values())).most_common(1)
    if not usual or usual[0][1] * 2 <= len(totals) or len(totals) < 3 or len(set(map(tuple, totals.values()))) < 2:
        return
    for gpu, links in totals.items():
        if tuple(links) != usual[0][0]:
            subject = next((item.subject for item in facts.gpus if item.label == gpu), gpu)
            yield Judgement(
                "degraded", "nvlink-outlier", "has other NVLinks than its siblings: %s" % (links or "none"), subject=subject,
                value=sum(links), unit="NVLinks to peers", threshold=sum(usual[0][0]), threshold_source=SIBLINGS,
                action="nvidia-smi nvlink -s, nvlink -e; look for Xid 74 and 144-150 in the kernel log",
            )  # fmt: skip


def _shm(facts: Facts, found: Sequence[Pair]) -> Iterator[Judgement]:
    using = [pair for pair in found if pair.way.transport == "shm"]
    if using and facts.shm_bytes is not None and facts.shm_bytes < SHM_FLOOR:
        yield Judgement(
            "degraded", "shm-small", "NCCL will go through /dev/shm, which is small", value=round(facts.shm_bytes / (1 << 20)), unit="MiB",
            threshold=SHM_FLOOR >> 20, threshold_source="a container gets 64 MiB unless told otherwise; eight ranks need more",
            action="start the container with --shm-size=1g or more, or --ipc=host",
        )  # fmt: skip


def _kernel_log(facts: Facts) -> Iterator[Judgement]:
    log = facts.log
    if log is None or facts.tree is None or not facts.gpus:
        return
    gpus = {gpu.bus_id: gpu.subject for gpu in facts.gpus}
    links = {bridge.bus_id: "bridge %s" % bridge.bus_id for gpu in facts.gpus for bridge in facts.tree.bridges_above(gpu.bus_id)}
    if log.state != "read":
        yield Judgement(
            "skipped", "kernel-log", "the kernel log cannot be read: errors of links in it are not known", evidence=(log.reason[:300],)
        )  # fmt: skip
        return
    wanted = {"sxid", "pcie-error", "pcie-error-received", "pcie-limited", "fallen-off-bus", *("xid-%d" % code for code in LINK_XIDS)}
    for judgement in kernel_log_findings.judge(log, gpus, links=links):
        if judgement.code not in wanted or judgement.level == "ok":
            continue
        if judgement.code == "pcie-limited" and _at_full_width(facts, judgement):
            continue
        yield judgement


def _at_full_width(facts: Facts, judgement: Judgement) -> bool:
    """Whether a link that was limited at boot has all its lanes now: what is left is its speed, which is judged apart."""
    for gpu in facts.gpus:
        device = facts.tree.devices.get(gpu.bus_id) if facts.tree is not None else None
        if gpu.subject == judgement.subject and device is not None and not isinstance(device.width, Missing):
            return device.width == device.width_max
    return False
