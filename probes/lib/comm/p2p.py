"""Copies between all pairs of GPUs and between each GPU and the host: what arrives, against what the driver promises.

Copies are made by a process of their own. One that hangs, crashes or freezes is replaced, so that a pair costs its own
result and no other's.
"""

from __future__ import annotations

import os
import tempfile
from time import monotonic

from ..gpu.busid import normalise
from ..gpu.thresholds import Thresholds
from . import faults, load, plan, workers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping, Sequence

    from remote_diag.probe import Context

    Fields = dict[str, Any]

HOST = -1
PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "p2p_main.py")
LAYER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "p2p_torch.py")
_RESERVE = 10.0
_START = 120.0
_CALLS = 20
_CHECKED = 16 << 20
_MOST_STARTS = 3
"""Processes in a row that do not even start, after which nothing more is tried."""
PCIE_GBS = {3: 12.0, 4: 24.0, 5: 54.0}
"""GB/s that copies from and to pinned memory reach over 16 lanes, by generation: published runs of single cards."""


def measure(context: Context, *, layer: str = LAYER, **given: Any) -> Fields:
    """Copy; return the fields of a result, and report what was found.

    Args:
        context: of the run.
        layer: file with the device layer.
        given: the parameters of the probe.
    """
    try:
        thresholds = Thresholds(given["thresholds"], given.get("thresholds_from", ""))
    except ValueError as error:
        context.unfit(str(error))
    if layer == LAYER:
        from importlib.util import find_spec

        if find_spec("torch") is None:
            # Says who misses it, and how to install it. Otherwise only the copying process imports it.
            context.require("torch")
    run = _Run(context, layer, given)
    report = run.all()
    _judge_pairs(context, report, thresholds)
    _judge_host_links(context, report, thresholds)
    if not report["complete"]:
        left = sum(1 for each in (*report["pairs"], *report["host_links"]) if each["outcome"] == "not-run")
        context.finding("unknown", "not-all-copied", "%d copies were not made: no time, or nothing starts any more" % left,
                        action="raise --timeout, or name fewer GPUs")  # fmt: skip
    return report


class _Run:
    """All copies of one run."""

    def __init__(self, context: Context, layer: str, given: Mapping[str, Any]) -> None:
        self._context, self._layer, self._given = context, layer, given
        self._until = monotonic() + max(1.0, context.remaining() - _RESERVE)
        self._folder = tempfile.mkdtemp(prefix="copies-", dir=context.run_dir)
        self._group: workers.Group | None = None
        self._ready: Fields = {}
        self._failed_starts = 0
        self._done = self._total = 0

    def all(self) -> Fields:
        try:
            return self._all()
        finally:
            self._close(ask=True)

    def _all(self) -> Fields:
        trouble = self._start()
        if trouble is not None:
            self._cannot_start(trouble)
        devices = self._ready["devices"]
        chosen = list(self._given["gpus"]) or list(range(len(devices)))
        if not devices or max(chosen) >= len(devices):
            self._context.unfit("torch sees %d GPUs, and GPU %d was asked for" % (len(devices), max(chosen, default=0)))
        orders = [(source, target) for source in chosen for target in chosen if source != target]
        orders = orders or [(chosen[0], chosen[0])]
        links = [(gpu, way) for gpu in chosen for way in ("h2d", "d2h")] if self._given["host"] else []
        self._total = len(orders) + len(links)
        host_links: dict[int, Fields] = {}
        for gpu, way in links:
            told = self._copy(*((HOST, gpu) if way == "h2d" else (gpu, HOST)))
            _add_way(host_links.setdefault(gpu, _host_link(gpu)), way, told)
        pairs = [self._copy(source, target) for source, target in orders]
        results = [*pairs, *host_links.values()]
        outcomes = [each["outcome"] for each in results]
        right = all(outcome == "ok" for outcome in outcomes)
        return {
            "gpus": tuple({"index": index, **device} for index, device in enumerate(devices) if index in chosen),
            "pairs": tuple(pairs),
            "host_links": tuple(host_links.values()),
            "complete": "not-run" not in outcomes,
            "correctness": "wrong" if "wrong" in outcomes else "ok" if right else "not_checked",
            "torch_version": self._ready["version"],
        }

    def _cannot_start(self, trouble: workers.Trouble) -> None:
        last = "" if not trouble.evidence else trouble.evidence[-1][:300]
        why = trouble.text[:600] if not last or last in trouble.text else "%s (%s)" % (trouble.text[:600], last)
        self._context.unfit(
            "torch sees no GPU that it can use: %s" % why, "rdiag env says which CUDA torch is built for, which the driver has, and what is hidden"
        )

    def _start(self) -> workers.Trouble | None:
        """Begin a new process; return what kept it from starting."""
        self._close()
        spec = {"layer": self._layer}
        env = {"CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER") or "PCI_BUS_ID"}
        try:
            self._group = workers.Group(spec, 1, self._folder, env=env, program=PROGRAM)
            self._ready = self._group.answers(min(self._until, monotonic() + _START))[0]
        except workers.Trouble as trouble:
            self._close()
            return trouble
        except OSError as error:
            return workers.Trouble("not-started", None, "start", "cannot start a process: %s" % error.strerror)
        return None

    def _close(self, *, ask: bool = False) -> None:
        if self._group is not None:
            self._group.end(ask=ask)
            self._group = None

    def _copy(self, source: int, target: int) -> Fields:
        """Return the fields of a Pair, whatever became of it."""
        self._done += 1
        self._context.progress(self._done, self._total, unit="copies", label="%s to %s" % (_name(source), _name(target)))
        if self._group is None and self._failed_starts < _MOST_STARTS and monotonic() < self._until:
            trouble = self._start()
            self._failed_starts = 0 if trouble is None else self._failed_starts + 1
        if self._group is None or monotonic() >= self._until:
            return _pair(source, target, outcome="not-run", text="not copied")
        both = source < target and HOST not in (source, target)
        size = self._given["size_bytes"]
        self._group.order(
            do="pair", source=source, target=target, size=size, checked=min(_CHECKED, size), calls=_CALLS, both=both
        )
        try:
            told = self._group.answers(min(self._until, monotonic() + self._given["pair_timeout_s"]))[0]
        except workers.Trouble as trouble:
            found = self._group.workers[0].found or {}
            self._close()
            code, hint = faults.environment_fault(" ".join((trouble.text, *trouble.evidence))) or ("", None)
            if code == "not-built-for-gpu":
                # No copy can be checked then, and each would cost the start of another process.
                self._context.unfit("torch cannot compute on these GPUs: %s" % trouble.text[:600], hint)
            wrong = found.get("wrong_bytes")
            outcome = "wrong" if wrong else {"killed": "crashed", "exited": "crashed", "hang": "hang", "frozen": "hang"}.get(
                trouble.kind, "error"
            )
            text = "%s, in phase %s" % (trouble.text[:600], trouble.phase)
            more = {name: found.get(name) for name in ("can_access", "wrong_bytes")}
            return _pair(source, target, outcome=outcome, text=text, **more)
        del told["done"]
        return _pair(source, target, outcome="wrong" if told["wrong_bytes"] else "ok", text="", **told)


def _pair(source: int, target: int, *, outcome: str, text: str, **more: Any) -> Fields:
    fields: Fields = {
        "source": source, "target": target, "outcome": outcome, "text": text, "can_access": None, "wrong_bytes": None,
        "latency_us": None, "bandwidth_gbs": None, "both_ways_gbs": None,
    }  # fmt: skip
    return {**fields, **more}


def _host_link(gpu: int) -> Fields:
    return {"gpu": gpu, "outcome": "ok", "text": "", "wrong_bytes": None, "h2d_gbs": None, "d2h_gbs": None}


_WORST = ("wrong", "crashed", "hang", "error", "not-run", "ok")


def _add_way(link: Fields, way: str, told: Fields) -> None:
    """Put what came of one direction into the fields of a HostLink; the worse outcome counts."""
    link[way + "_gbs"] = told["bandwidth_gbs"]
    if told["wrong_bytes"] is not None:
        link["wrong_bytes"] = (link["wrong_bytes"] or 0) + told["wrong_bytes"]
    if _WORST.index(told["outcome"]) < _WORST.index(link["outcome"]):
        link["outcome"] = told["outcome"]
        link["text"] = "%s: %s" % ("to the GPU" if way == "h2d" else "from the GPU", told["text"])


def _name(index: int) -> str:
    return "host" if index == HOST else "gpu %d" % index


# -- verdicts


_WORDS = {"wrong": "wrong bytes arrive", "hang": "the copy hangs", "crashed": "the copying process dies", "error": "the copy fails"}


def _judge_pairs(context: Context, report: Fields, thresholds: Thresholds) -> None:
    pairs = report["pairs"]
    for pair in pairs:
        if pair["outcome"] in _WORDS:
            _tell_bad_pair(context, report, pair)
    good = [pair for pair in pairs if pair["outcome"] == "ok"]
    real = [pair for pair in pairs if pair["source"] != pair["target"]]
    if good and len(good) == len(pairs):
        what = "%d pairs of GPUs" % len(pairs) if real else "one GPU, from its memory to its memory"
        context.finding("ok", "bytes-arrive", "every byte arrived: %s" % what, value=0, unit="wrong bytes")
    told = [pair for pair in real if pair["can_access"] is not None]
    refused = [pair for pair in told if not pair["can_access"]]
    if refused:
        some = len(refused) < len(told)
        context.finding(
            "degraded" if some else "ok",
            "no-peer-access",
            "the driver refuses peer access for %s: copies go through memory of the host"
            % ("%d of %d pairs" % (len(refused), len(told)) if some else "all %d pairs" % len(told)),
            evidence=tuple("gpu %d to gpu %d" % (pair["source"], pair["target"]) for pair in refused[:12]) if some else (),
            action="see rdiag topo: another root, chipset or NVLink bridge; GeForce drivers grant none" if some else None,
        )
    _judge_slow_pairs(context, [pair for pair in real if pair["bandwidth_gbs"] is not None], thresholds)


def _tell_bad_pair(context: Context, report: Fields, pair: Fields) -> None:
    granted = {True: "although the driver grants peer access", False: "without peer access", None: ""}[pair["can_access"]]
    evidence = (pair["text"],) if pair["text"] else ()
    context.finding(
        "fail",
        "copy-" + pair["outcome"],
        "%s %s" % (_WORDS[pair["outcome"]], granted),
        subject="%s to %s" % (_subject(report, pair["source"]), _subject(report, pair["target"])),
        value=pair["wrong_bytes"],
        unit=None if pair["wrong_bytes"] is None else "wrong bytes",
        evidence=evidence,
        action="use these two without P2P (NCCL_P2P_DISABLE=1); on bare metal: iommu=pt, ACS off (rdiag topo)"
        if pair["can_access"]
        else "look at rdiag gpu: Xid, ECC, lost GPUs",
    )


def _subject(report: Fields, index: int) -> str:
    for gpu in report["gpus"]:
        if gpu["index"] == index:
            return " ".join(str(part) for part in ("gpu", index, gpu["bus_id"], gpu["uuid"]) if part is not None)
    return _name(index)


def _judge_slow_pairs(context: Context, pairs: Sequence[Fields], thresholds: Thresholds) -> None:
    if len(pairs) < 2:
        return
    limit = thresholds["p2p.sibling_pct"]
    middle = plan.median([pair["bandwidth_gbs"] for pair in pairs])
    least = middle * (1 - limit.value / 100)
    slow = sorted((pair for pair in pairs if pair["bandwidth_gbs"] < least), key=lambda pair: pair["bandwidth_gbs"])
    if slow:
        context.finding(
            "degraded",
            "slow-pairs",
            "%d of %d pairs copy more than %g %% slower than the median of %.3g GB/s" % (len(slow), len(pairs), limit.value, middle),
            value=round(slow[0]["bandwidth_gbs"], 3),
            unit="GB/s",
            threshold=round(least, 3),
            threshold_source=limit.provenance,
            evidence=tuple("gpu %d to gpu %d: %.3g GB/s" % (pair["source"], pair["target"], pair["bandwidth_gbs"]) for pair in slow[:12]),
            action="rdiag topo says what is between them: another socket, ACS redirect, a link that trained low",
        )


def _judge_host_links(context: Context, report: Fields, thresholds: Thresholds) -> None:
    links = report["host_links"]
    for link in links:
        if link["outcome"] in _WORDS:
            context.finding(
                "fail", "host-copy-" + link["outcome"], "between host and GPU: %s" % _WORDS[link["outcome"]],
                subject=_subject(report, link["gpu"]), value=link["wrong_bytes"],
                unit=None if link["wrong_bytes"] is None else "wrong bytes", evidence=(link["text"],) if link["text"] else (),
                action="look at rdiag gpu: Xid, ECC, PCIe errors; reseat the card",
            )  # fmt: skip
    possible = _possible(context, report) if links else {}
    for way, words in (("h2d_gbs", "to the GPU"), ("d2h_gbs", "from the GPU")):
        known = [link for link in links if link[way] is not None]
        middle = plan.median([link[way] for link in known]) if len(known) > 1 else None
        for link in known:
            _judge_host_link(context, report, link, link[way], words, possible, middle, thresholds)


def _judge_host_link(  # noqa: PLR0917 - one number and all that it is held against
    context: Context, report: Fields, link: Fields, measured: float, words: str,
    possible: Mapping[int, tuple[float, str]], middle: float | None, thresholds: Thresholds,
) -> None:  # fmt: skip
    siblings, share = thresholds["nccl.sibling_pct"], thresholds["p2p.host_share"]
    expected, what = possible.get(link["gpu"], (None, ""))
    if expected is not None and measured < share.value * expected:
        least, source = share.value * expected, "%g of %.3g GB/s, %s: %s" % (share.value, expected, what, share.provenance)
        text = "copies %s are slow for this link" % words
    elif middle is not None and measured < middle * (1 - siblings.value / 100):
        least, source = middle * (1 - siblings.value / 100), siblings.provenance
        text = "copies %s are more than %g %% slower than the median of all GPUs" % (words, siblings.value)
    else:
        return
    context.finding(
        "degraded", "slow-host-link", text, subject=_subject(report, link["gpu"]), value=round(measured, 3), unit="GB/s",
        threshold=round(least, 3), threshold_source=source,
        action="the link may have trained low: rdiag gpu, rdiag topo; the other socket's memory is slower too (numactl)",
    )  # fmt: skip


def _possible(context: Context, report: Fields) -> dict[int, tuple[float, str]]:
    """Return what the link of each GPU could carry, and in words what that link is; only for those that tell it."""
    found, problem = load.sample(min(15.0, max(1.0, context.remaining() - 5.0)))
    if problem is not None:
        context.finding("unknown", "link-unknown", "what the links can do is not known: %s" % problem)
    by_bus = {each["bus_id"]: each for each in found}
    possible = {}
    for gpu in report["gpus"]:
        link = by_bus.get(normalise(gpu["bus_id"] or "") or "")
        if link is None or link["pcie_width_max"] is None or link["pcie_gen_max"] not in PCIE_GBS:
            continue
        generation, width = link["pcie_gen_max"], link["pcie_width_max"]
        possible[gpu["index"]] = PCIE_GBS[generation] * width / 16, "PCIe Gen%d x%d" % (generation, width)
    untold = [_subject(report, gpu["index"]) for gpu in report["gpus"] if gpu["index"] not in possible]
    if untold and problem is None:
        context.finding("unknown", "link-unknown", "what the links of %d GPUs can do is not known: their copies are held against each other only"
                        % len(untold), evidence=tuple(untold[:12]))  # fmt: skip
    return possible
