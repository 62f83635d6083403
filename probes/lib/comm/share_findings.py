"""What the shares of communication are worth: findings about a trace and each of its GPUs."""

from __future__ import annotations

from probes.lib.comm.share_words import CPU_STEPS, advice, boundness, called

TYPE_CHECKING = False
if TYPE_CHECKING:
    from probes.comm_share import Device, Params, PerStep, Result
    from probes.lib.comm.trace import Reader
    from probes.lib.comm.trace_shares import Gathered
    from remote_diag.findings import Level
    from remote_diag.probe import Context

EXPOSED_LIMIT = 0.5
"""Exposed communication / step from which on it is too much, unless the user says otherwise."""


def tell_completeness(reader: Reader, done: int, size: int, shrank: str | None, context: Context) -> None:
    """Report a trace that was not read to its end, or has none.

    Args:
        reader: that has read it.
        done: bytes that were read.
        size: bytes of the file.
        shrank: how the file became shorter meanwhile; None where it did not.
        context: of the run.
    """
    if reader.stopped:
        context.finding(
            "unknown", "trace-unread", "the deadline left time for %d of %d bytes: shares are those of the part" % (done, size),
            value=done, unit="bytes", threshold=size, threshold_source="size of the file", action="raise --timeout",
        )  # fmt: skip
    elif reader.cut is not None or shrank is not None:
        context.finding(
            "unknown", "trace-cut", "the trace is not whole: shares are those of the part that is there",
            evidence=(reader.cut or shrank or "",), action="wait until it is written, or copy it again",
        )  # fmt: skip


def judge(  # noqa: PLR0917
    params: Params, result: Result, gathered: Gathered, leaders: dict[int, tuple[float, str]], idle: list[int], context: Context
) -> None:
    """Report what the shares say.

    Args:
        params: of the run.
        result: what is reported.
        gathered: what the trace holds.
        leaders: GPU -> us and name of the collective that takes longest.
        idle: GPUs that do nothing within the steps.
        context: of the run.
    """
    if not result.gpu_events:
        context.finding(
            "unknown", "no-gpu-work", "the trace holds no work of a GPU: %d events of other kinds" % result.events,
            action="profile with ProfilerActivity.CUDA, and on a machine with GPUs",
        )  # fmt: skip
        return
    if not result.devices and idle:
        context.finding(
            "unknown", "empty-step", "no GPU does anything within the steps",
            evidence=("%d events of GPUs lie outside of %d steps" % (result.gpu_events, len(gathered.cpu_spans) + sum(map(len, gathered.gpu_spans.values()))),),
            action="name another annotation with --step, or trace longer: the GPU works later than the program asks it to",
        )  # fmt: skip
        return
    if not result.devices:
        names = ", ".join(result.annotations[:20])
        context.finding(
            "unknown", "no-such-step", "no annotation is called %r" % params.step,
            evidence=("annotations: %s" % (names or "none"),), action="name one of them with --step, or leave --step away",
        )  # fmt: skip
        return
    if gathered.spans_left_out:
        context.finding("unknown", "steps-left-out", "%d spans of the step are not counted" % gathered.spans_left_out)
    if result.unusable_events:
        context.finding(
            "unknown", "events-unusable", "%d events are damaged and left out" % result.unusable_events,
            value=result.unusable_events, unit="events",
        )  # fmt: skip
    for device in result.devices:
        if gathered.devices[device.device].mixed:
            context.finding(
                "unknown", "ranks-merged", "several processes have a GPU %d in this trace: their work is added up as if it were one GPU's" % device.device,
                subject="GPU %d" % device.device, evidence=tuple(sorted(gathered.devices[device.device].others))[:5],
                action="give the trace of one rank",
            )  # fmt: skip
        _judge_device(params, result, device, leaders[device.device], context)


def _judge_device(params: Params, result: Result, device: Device, leads: tuple[float, str], context: Context) -> None:
    subject = "GPU %d of %s" % (device.device, "the trace" if result.rank is None else "rank %d" % result.rank)
    if device.step_us <= 0:
        context.finding("unknown", "empty-step", "the steps have no length", subject=subject)
        return
    what = "the %s step" % result.step_name if params.step else ("the step" if result.step_name else "the traced span")
    leader = device.collectives[0] if device.collectives else None
    if leader is None:
        context.finding(
            "ok", "no-communication", "no kernel communicates in %s" % what, subject=subject, value=0.0, unit="of the step",
        )  # fmt: skip
        return
    over = device.exposed_share > params.exposed_limit
    level: Level = "degraded" if over else "ok"
    evidence = [
        "%d steps of %.1f us on average" % (device.steps, device.step_us / device.steps),
        *(() if device.per_step is None else (_spread(device.per_step),)),
        "all communication %.1f %%, NCCL's kernels %.1f %%; overlapped %.1f us, exposed %.1f us"
        % (100 * device.communication_share, 100 * device.nccl_share, device.overlapped_us, device.exposed_us),
        "a kernel's time includes its waiting for the other ranks; their traces tell who came late",
        *(boundness(row, params.small_bytes) for row in device.collectives[:3]),
        *(CPU_STEPS if device.clock == "cpu" else ()),
    ]
    context.finding(
        level, "communication-share",
        "%.1f %% of %s is %s; %.1f %% is communication that no computation hides"
        % (100 * min(1.0, leads[0] / device.step_us), what, called(leads[1]), 100 * device.exposed_share),
        subject=subject, value=round(device.exposed_share, 6), unit="of the step", threshold=params.exposed_limit,
        threshold_source="yours (exposed_limit)" if params.exposed_limit != EXPOSED_LIMIT else "exposed_limit: own judgement, nothing published",
        evidence=tuple(evidence),
        action=advice(leader) if over else None,
    )  # fmt: skip


def _spread(each: PerStep) -> str:
    parts = (
        ("communication", each.communication_min, each.communication_p50, each.communication_max),
        ("exposed", each.exposed_min, each.exposed_p50, each.exposed_max),
    )
    return "of single steps, least, median and most: " + "; ".join(
        "%s %s %%" % (name, " / ".join("%.1f" % (100 * share) for share in shares)) for name, *shares in parts
    )
