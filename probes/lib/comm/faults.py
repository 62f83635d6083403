"""What went wrong in a group of ranks, told as findings: who, where, and what to do next."""

from __future__ import annotations

import re

from .workers import BEGINNING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Literal, Mapping

    from remote_diag.probe import Context

    from .collectives import Arm
    from .workers import Trouble

_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.I)
_NOT_MADE_FOR = re.compile(r"invalid scalar type|not implemented|not supported|unsupported|does not support", re.I)
_NO_MEMORY = re.compile(r"out of memory|cannot allocate memory|can't allocate memory", re.I)

# kind -> (level, what to do)
_ADVICE: dict[str, tuple[Literal["fail", "unknown"], str]] = {
    "killed": ("fail", "look for its reason in the kernel log (out of memory?): rdiag gpu; then run it again"),
    "exited": ("fail", "run it again with --keep and read rank-N.log in the run's folder"),
    "frozen": ("fail", "state T: somebody stopped it; state D: the driver hangs, see rdiag gpu and /proc/PID/stack"),
    "hang": ("fail", "see the control run without P2P, then rdiag p2p for the pair, and rdiag topo for ACS and IOMMU"),
    "error": ("fail", "the first warning of NCCL among the evidence says why; more with NCCL_DEBUG=INFO in env of the host"),
    "port-taken": ("unknown", "leave --port away, or name a free one"),
    "not-started": ("unknown", "look at the limits of processes and memory: rdiag check"),
    "deadline": ("unknown", "raise --timeout, or measure fewer sizes"),
}


_ENVIRONMENT = (
    (
        re.compile(r"no kernel image is available", re.I),
        "not-built-for-gpu",
        "this torch, or its NCCL, was not built for these GPUs: rdiag env shows which it was built for; install one that names them",
    ),
    (
        re.compile(r"system not yet initialized", re.I),
        "fabric-not-ready",
        "NVSwitches are not ready: look at nvidia-fabricmanager, of the driver's very version, and at fabric.state (rdiag gpu)",
    ),
    (
        re.compile(r"driver on your system is too old|driver version is insufficient|forward compatibility was attempted", re.I),
        "driver-too-old",
        "the driver is older than this torch needs: a newer driver, or a torch built for an older CUDA (rdiag env)",
    ),
    (
        re.compile(r"uncorrectable ECC", re.I),
        "gpu-memory-error",
        "rdiag gpu names the GPU whose memory failed: reset it once nothing runs there",
    ),
    (
        re.compile(r"invalid device ordinal|devices are busy or unavailable", re.I),
        "gpu-unavailable",
        "CUDA does not give out all of these GPUs: see MIG and the compute mode in rdiag gpu, and CUDA_VISIBLE_DEVICES in rdiag env",
    ),
)
"""What CUDA says where P2P and links have no part in it -> code, what to do."""


_CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL", "SIGTRAP")
_CRASHED = "it crashed: run it again with --keep and read rank-N.log in the run's folder; versions: rdiag env"


def environment_fault(text: str) -> tuple[str, str] | None:
    """Return (code, what to do) where a text tells of a fault that no link and no collective can cause."""
    return next(((code, action) for pattern, code, action in _ENVIRONMENT if pattern.search(text)), None)


def is_port_taken(trouble: Trouble) -> bool:
    """Whether ranks could not meet because somebody else has the port."""
    return trouble.phase == "meet" and _PORT_TAKEN.search(_words(trouble)) is not None


def _words(trouble: Trouble) -> str:
    return " ".join((trouble.text, *trouble.evidence))


def failure(arm: Arm) -> dict[str, Any] | None:
    """Return the fields of a Failure; None when all went well."""
    trouble = arm.trouble
    if trouble is None:
        return None
    return {"kind": trouble.kind, "rank": trouble.rank, "phase": trouble.phase, "size_bytes": arm.size, "text": trouble.text}


def tell(context: Context, report: Mapping[str, Any], arm: Arm) -> None:
    """Report the trouble, wrong data, and what speaks for the whole."""
    rows = report["rows"]
    if arm.trouble is not None:
        _tell_trouble(context, report["backend"], arm.trouble, arm.size, len(rows))
    if arm.survivors:
        context.finding(
            "fail",
            "rank-unkillable",
            "ranks %s could not be killed: they are stuck in the kernel" % ", ".join(map(str, arm.survivors)),
            action="the driver hangs; save nvidia-bug-report.log.gz if that still works, and reboot",
        )
    wrong = [row for row in rows if row["wrong"]]
    if wrong:
        first = wrong[0]
        context.finding(
            "fail",
            "wrong-data",
            "%s gave wrong data in %d of %d sizes, first at %d bytes" % (report["collective"], len(wrong), len(rows), first["size_bytes"]),
            value=sum(row["wrong"] for row in wrong),
            unit="elements",
            threshold=0,
            threshold_source="sums of small integers are exact",
            evidence=tuple("%d bytes: %d elements wrong, over all ranks" % (row["size_bytes"], row["wrong"]) for row in wrong[:8]),
            action="trust no result of these GPUs together; rdiag p2p names the pair, rdiag topo shows ACS and IOMMU",
        )
    elif report["correctness"] == "ok" and arm.trouble is None:
        context.finding(
            "ok",
            "data-correct",
            "%s over %s gave exact results in all of %s"
            % (report["collective"], _many(report["ranks"], "rank"), _many(len(rows), "size")),
        )
    elif rows and any(row["wrong"] is None for row in rows):
        context.finding(
            "unknown", "not-checked", "whether data arrived right is not known: nobody looked", action="leave --no-check away"
        )
    if report["ranks"] == 1 and rows:
        context.finding("skipped", "one-rank", "there was one rank: nothing crossed a link, there is no bus bandwidth to judge")
    if arm.left_out and arm.trouble is None:
        context.finding("unknown", "sizes-left-out", "%d sizes were not measured: too little memory is free" % len(arm.left_out))


def _many(number: int, what: str) -> str:
    return "%d %s%s" % (number, what, "" if number == 1 else "s")


def _tell_trouble(context: Context, backend: str, trouble: Trouble, size: int | None, rows: int) -> None:
    level, action = _ADVICE[trouble.kind]
    code = "rank-" + trouble.kind if trouble.kind in ("killed", "exited", "frozen") else trouble.kind
    text = _words(trouble)
    if trouble.kind == "hang":
        code = "collective-hang"
        if backend == "gloo":
            action = "raise --step-timeout if a size may take that long here; else look at what loads this host's CPUs (rdiag check)"
        if trouble.phase in BEGINNING:
            # No collective was called yet.
            action = "no collective has begun: look at rdiag check for a slow disk or busy CPUs"
            if backend != "gloo":
                action += ", at rdiag gpu for a driver that hangs and for persistence mode"
    elif trouble.kind == "error":
        code = "collective-failed"
        if _NO_MEMORY.search(text):
            level, code, action = "unknown", "out-of-memory", "somebody uses the memory: rdiag gpu names who"
            if backend == "gloo":
                action = "measure smaller sizes (--sizes) or fewer ranks, or free memory of this host"
        elif (known := environment_fault(text)) is not None:
            code, action = known
        elif backend == "gloo" and _NOT_MADE_FOR.search(text):
            level, code, action = "unknown", "not-supported", "choose another --dtype or --collective: this gloo has not got it"
        elif trouble.phase == "import":
            level, code, action = "unknown", "no-torch", "torch cannot be imported here: rdiag env"
    if trouble.kind == "killed" and "SIGKILL" not in trouble.text:
        action = _CRASHED if any(name in trouble.text for name in _CRASHES) else "somebody ended it: run it again"
    where = "in phase %s" % trouble.phase + ("" if size is None else " of %d bytes" % size)
    kept = "; %s begun until then" % _many(rows, "size") if rows else ""
    context.finding(
        level,
        code,
        "%s, %s%s" % (trouble.text[:600], where, kept),
        subject=None if trouble.rank is None else "rank %d" % trouble.rank,
        evidence=trouble.evidence[:8],
        action=action,
    )


def asks_for_control(report: Mapping[str, Any], arm: Arm) -> bool:
    """Whether the failure is one that P2P can cause."""
    if report["correctness"] == "wrong":
        return True
    failed = report["failure"]
    if failed is None or report["ranks"] == 1 or _NO_MEMORY.search(failed["text"]):
        return False
    if arm.trouble is not None and environment_fault(_words(arm.trouble)):
        return False
    if failed["kind"] == "killed":
        return "SIGKILL" not in failed["text"] and "SIGTERM" not in failed["text"]
    return failed["kind"] in ("hang", "error", "exited") and failed["phase"] not in BEGINNING


def tell_control(context: Context, arm: Arm, settings: Mapping[str, str]) -> dict[str, Any]:
    """Report what the run without P2P says; return the fields of a Control."""
    wrong = any(row["wrong"] for row in arm.rows)
    if arm.trouble is None and not wrong:
        outcome = "healthy"
        text = "without P2P the same collective is correct: P2P between these GPUs is at fault"
    else:
        outcome = "wrong" if wrong else "hang" if arm.trouble is not None and arm.trouble.kind in ("hang", "frozen") else "failed"
        text = "without P2P it fails too: P2P alone is not the cause"
    names = " ".join("%s=%s" % pair for pair in settings.items())
    context.finding(
        "fail" if outcome == "healthy" else "unknown",
        "p2p-at-fault" if outcome == "healthy" else "control-fails-too",
        "%s (%s)" % (text, names),
        evidence=() if arm.trouble is None else (arm.trouble.text[:400], *arm.trouble.evidence[:3]),
        action="work with %s until it is mended; on bare metal look at ACS and iommu=pt (rdiag topo)" % names
        if outcome == "healthy"
        else "look at rdiag gpu and rdiag env: driver, shared memory, NCCL_ variables",
    )
    return {"settings": dict(settings), "outcome": outcome, "text": text}


def tell_no_time(context: Context) -> None:
    """Report that there was no time for the run without P2P."""
    context.finding("unknown", "no-control", "no time was left for the control run without P2P", action="raise --timeout")

