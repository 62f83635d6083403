"""Judges the PCIe links, bridges and IOMMU between the GPUs and the root of a host.

Idle-aware: a card that does nothing lowers the speed of its link, and that is no fault; it never gives up lanes. A
switch does neither.
"""

from __future__ import annotations

from collections import Counter

from probes.lib.gpu import lspci, pci
from probes.lib.gpu.judgement import Judgement
from probes.lib.gpu.missing import Missing
from probes.lib.gpu.topo_pairs import names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator, Sequence

    from probes.lib.gpu.topo_pairs import Pair
    from probes.lib.gpu.topo_reading import Facts, Gpu

BAR1_SMALL = 256 << 20
SIBLINGS = "the other GPUs of the same name on this host"
_BOTH_ENDS = "what both ends of the link say they can do"


def judge(facts: Facts, found: Sequence[Pair]) -> list[Judgement]:
    """Return the findings about the bus of a host that was looked at."""
    direct = any(pair.way.transport == "p2p" or not (pair.link or "").startswith("NV") for pair in found)
    return [
        *_unseen(facts), *_widths(facts), *_speeds(facts), *_siblings(facts), *_numa(facts), *_acs(facts, direct), *_iommu(facts, found),
        *_bar1(facts, found),
    ]  # fmt: skip


def _unseen(facts: Facts) -> Iterator[Judgement]:
    """Say which GPUs have links that nobody could look at."""
    if facts.tree is None or facts.wsl:
        return
    if facts.tree.reason is not None:
        if facts.gpus:
            yield Judgement(
                "unknown", "bus-unknown", "the PCIe tree cannot be read: links, bridges and NUMA nodes are not known",
                evidence=(facts.tree.reason.text,), action="look from outside of the container, or hand /sys in",
            )  # fmt: skip
        return
    for gpu in facts.gpus:
        if gpu.bus_id not in facts.tree.devices and gpu.lost is None and "pci" in gpu.sources:
            yield Judgement("unknown", "bus-unknown", "its PCIe link cannot be looked at", subject=gpu.subject, action="lspci -vvv")


def _links(facts: Facts) -> Iterator[tuple[str, pci.Device, pci.Device | None, Gpu]]:
    """Yield (subject, device, the bridge above it, GPU) of each link between a GPU and the root, once."""
    if facts.tree is None:
        return
    seen = set()
    for gpu in facts.gpus:
        device = facts.tree.devices.get(gpu.bus_id)
        if device is None or gpu.lost is not None:
            continue
        above = facts.tree.bridges_above(gpu.bus_id)
        yield gpu.subject, device, above[-1] if above else None, gpu
        for place in range(len(above) - 2, -1, -2):
            # Bridges come in pairs: the two ports of a switch. Only the link above its upstream port is a cable.
            lower = above[place]
            if lower.bus_id not in seen and place > 0:
                seen.add(lower.bus_id)
                yield "switch %s above %s" % (lower.bus_id, gpu.label), lower, above[place - 1], gpu


def _possible(device: pci.Device, bridge: pci.Device | None, name: str) -> float | None:
    """Return what both ends of a link could do; None where neither tells."""
    values = [getattr(end, name) for end in (device, bridge) if end is not None]
    known = [float(value) for value in values if not isinstance(value, Missing)]
    return min(known) if known else None


def _widths(facts: Facts) -> Iterator[Judgement]:
    good, whole = 0, 0
    for subject, device, bridge, gpu in _links(facts):
        most, now = _possible(device, bridge, "width_max"), device.width
        whole += 1
        if most is None or isinstance(now, Missing):
            if facts.virtual:
                continue
            yield Judgement(
                "unknown", "width-unknown", "how many lanes its PCIe link has is not known", subject=subject,
                evidence=(now.text or now.reason,) if isinstance(now, Missing) else (),
            )  # fmt: skip
        elif now < most:
            yield Judgement(
                "degraded", "pcie-width", "its PCIe link has fewer lanes than both ends could use", subject=subject, value=now, unit="lanes",
                threshold=int(most), threshold_source=_BOTH_ENDS + "; lanes do not go away in idle",
                action="reseat the card, check riser, cable and slot; reboot", evidence=("above it: %s" % (bridge.bus_id if bridge else "-"),),
            )  # fmt: skip
        else:
            good += 1
        del gpu
    if whole and good == whole:
        yield Judgement("ok", "pcie-width", "every PCIe link has all its lanes", value=good, unit="links")


def _speeds(facts: Facts) -> Iterator[Judgement]:
    slow, good = [], 0
    for subject, device, bridge, gpu in _links(facts):
        most, now = _possible(device, bridge, "speed_max_gts"), device.speed_gts
        if most is None or isinstance(now, Missing):
            continue
        if now >= most:
            good += 1
        elif device.bus_id != gpu.bus_id:
            yield Judgement(
                "degraded", "pcie-speed", "the link above the switch is slower than it could be", subject=subject, value=now,
                unit="GT/s", threshold=most, threshold_source=_BOTH_ENDS, action="check cable and riser; set the slot's generation in the BIOS",
            )  # fmt: skip
        elif gpu.idle:
            slow.append(gpu.label)
        elif gpu.idle is None:
            yield Judgement(
                "unknown", "pcie-speed", "its PCIe link is slower than it could be, and nobody knows whether that is for want of work",
                subject=subject, value=now, unit="GT/s", threshold=most, threshold_source=_BOTH_ENDS,
                action="look again while it copies: rdiag nccl, rdiag p2p",
            )  # fmt: skip
        else:
            yield Judgement(
                "degraded", "pcie-speed", "its PCIe link is slower than it could be while the card works", subject=subject, value=now,
                unit="GT/s", threshold=most, threshold_source=_BOTH_ENDS,
                action="reseat the card, check riser and cable; set the slot's generation in the BIOS",
            )  # fmt: skip
    if slow or good:
        idle = "" if not slow else "; idle and slower for that: %s" % ", ".join(slow[:16])
        yield Judgement("ok", "pcie-speed", "%d PCIe links run as fast as they can%s" % (good, idle), value=good, unit="links")


def _siblings(facts: Facts) -> Iterator[Judgement]:
    if facts.tree is None:
        return
    for name in sorted({gpu.name for gpu in facts.gpus if gpu.name}):
        same = [(gpu, facts.tree.devices.get(gpu.bus_id)) for gpu in facts.gpus if gpu.name == name]
        for what, words, unit in (
            ("width_max", "its slot gives it fewer lanes than its siblings have", "lanes"),
            ("speed_max_gts", "its slot is slower than those of its siblings", "GT/s"),
        ):
            best = {gpu.bus_id: at_best(facts, device, what) for gpu, device in same if device is not None}
            values = {bus_id: value for bus_id, value in best.items() if value is not None}
            usual = Counter(values.values()).most_common(1)
            if len(values) < 3 or not usual or usual[0][1] * 2 <= len(values):
                continue
            for gpu, _ in same:
                if gpu.bus_id in values and values[gpu.bus_id] < usual[0][0]:
                    yield Judgement(
                        "degraded", "sibling-outlier", words, subject=gpu.subject,
                        value=values[gpu.bus_id], unit=unit, threshold=usual[0][0], threshold_source=SIBLINGS,
                        action="is it in another kind of slot? move it, or check riser and BIOS",
                    )  # fmt: skip


def at_best(facts: Facts, device: pci.Device, name: str) -> float | None:
    """Return what a device and the port above it could both do: ``speed_max_gts`` or ``width_max``; None where neither tells."""
    above = facts.tree.bridges_above(device.bus_id) if facts.tree is not None else ()
    return _possible(device, above[-1] if above else None, name)


def _numa(facts: Facts) -> Iterator[Judgement]:
    if facts.tree is None or (facts.numa_nodes or 1) < 2:
        return
    for gpu in facts.gpus:
        device = facts.tree.devices.get(gpu.bus_id)
        if device is not None and isinstance(device.numa_node, Missing):
            yield Judgement(
                "degraded", "numa-unknown", "the firmware does not tell which NUMA node it belongs to: processes will not be pinned near it",
                subject=gpu.subject, evidence=("%d NUMA nodes" % (facts.numa_nodes or 0),),
                action="update the BIOS, or pin by hand; in a virtual machine give it the topology",
            )  # fmt: skip


def _acs(facts: Facts, direct: bool) -> Iterator[Judgement]:
    if facts.tree is None or len(facts.gpus) < 2:
        return
    above = {bridge.bus_id: bridge for gpu in facts.gpus for bridge in facts.tree.bridges_above(gpu.bus_id)}
    if not above:
        return
    states = {name: acs_of(facts, bridge) for name, bridge in above.items()}
    redirecting = sorted(name for name, acs in states.items() if not isinstance(acs, Missing) and acs.redirects)
    hidden = sorted(name for name, acs in states.items() if isinstance(acs, Missing) and acs.reason != "not-supported")
    if redirecting:
        if facts.virtual:
            yield Judgement("ok", "acs", "ACS redirects traffic between peers, as it has to in a virtual machine", value=len(redirecting), unit="bridges")
        else:
            yield Judgement(
                "degraded" if direct else "ok", "acs-redirect", "ACS sends traffic between peers up to the root instead of across the switch",
                subject=", ".join(redirecting[:4]), value=len(redirecting), unit="bridges",
                evidence=tuple("%s: %s" % (name, _flags(states[name])) for name in redirecting[:4]),
                action="switch ACS off in the BIOS, or on each bridge: setpci -s %s ECAP_ACS+6.w=0000 (until the next boot)" % redirecting[0],
            )  # fmt: skip
    if hidden and direct and not facts.virtual:
        first = states[hidden[0]]
        yield Judgement(
            "unknown", "acs-unknown", "whether ACS redirects traffic between peers is not known: that needs root", value=len(hidden),
            unit="bridges", evidence=(first.text,) if isinstance(first, Missing) and first.text else (),
            action="run it as root, or on the host: sudo lspci -vvv | grep ACSCtl",
        )  # fmt: skip
    if not redirecting and not hidden:
        yield Judgement("ok", "acs", "no bridge above the GPUs redirects traffic between peers", value=len(above), unit="bridges")


def acs_of(facts: Facts, bridge: pci.Device) -> pci.Maybe[lspci.Acs]:
    """Return what lspci or the configuration space says of a bridge's ACS."""
    told = facts.devices.get(bridge.bus_id)
    if told is not None and told.acs is not None:
        return told.acs
    if isinstance(bridge.acs, Missing) and bridge.acs.reason == "not-reported" and told is not None:
        if told.denied:
            return Missing("not-permitted", "lspci: access denied")
        return bridge.acs if told.has_acs else Missing("not-supported", "no such capability")
    return bridge.acs


def _flags(acs: object) -> str:
    return " ".join(name + "+" for name in getattr(acs, "flags", ())) or "nothing"


def _iommu(facts: Facts, found: Sequence[Pair]) -> Iterator[Judgement]:
    iommu = facts.iommu
    if iommu is None or len(facts.gpus) < 2 or facts.virtual:
        return
    direct = [pair for pair in found if pair.way.transport == "p2p"]
    if iommu.mode == "translated":
        yield Judgement(
            "degraded" if direct or not found else "ok", "iommu-translated",
            "the IOMMU translates what devices send: P2P over PCIe may be slow, hang, or damage data", value=iommu.mode,
            evidence=(iommu.source, "GPUs that use it: %s" % names(direct) if direct else "no pair uses P2P over PCIe"),
            action="iommu=pt on the kernel's command line, or switch it off in the BIOS; then verify: rdiag p2p",
        )  # fmt: skip
    elif iommu.mode == "unknown":
        yield Judgement(
            "unknown" if direct else "ok", "iommu-unknown", "whether the IOMMU translates is not known", evidence=(iommu.source,),
            action="dmesg | grep -i 'default domain type'",
        )  # fmt: skip
    else:
        yield Judgement("ok", "iommu", "the IOMMU is %s" % ("off" if iommu.mode == "off" else "passing through"), evidence=(iommu.source,))


def _bar1(facts: Facts, found: Sequence[Pair]) -> Iterator[Judgement]:
    if facts.tree is None or not any(pair.way.transport == "p2p" for pair in found):
        return
    for gpu in facts.gpus:
        device = facts.tree.devices.get(gpu.bus_id)
        if device is not None and not isinstance(device.bar1_bytes, Missing) and device.bar1_bytes <= BAR1_SMALL:
            yield Judgement(
                "degraded", "bar1-small", "its BAR1 is small: peers reach only a part of its memory at a time", subject=gpu.subject,
                value=device.bar1_bytes >> 20, unit="MiB", threshold=BAR1_SMALL >> 20, threshold_source="size without resizable BAR",
                action="enable resizable BAR and above-4G decoding in the BIOS",
            )  # fmt: skip
