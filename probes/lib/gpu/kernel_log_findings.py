"""What the kernel log of this boot means: events gathered by card and kind, and judged.

One finding for each card and code, however often it came. Errors that a later Xid 154 declares recovered are history,
as are those of an earlier boot; a program's own errors are no fault of a card unless several programs share them on
that card alone. A log that cannot be read, or that reaches back less than a day, is ``unknown``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timezone

from probes.lib.gpu import xid
from probes.lib.gpu.judgement import Judgement

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterable, Mapping

    from probes.lib.gpu.kernel_log import Contents, Event
    from probes.lib.gpu.kernel_log_source import Log

ENOUGH_S = 24 * 3600.0
"""A log that does not reach back to the boot still tells enough from here on: a card that is broken speaks up again."""
CORRECTED_MANY = 10
"""Corrected PCIe errors of one device in a boot that are still no sign; links correct some by design."""
PROGRAM_CODES = (13, 31, 32)
"""Xids of programs that point to the card when several programs meet them there and nowhere else."""
SHOWN = 3


@dataclass
class Group:
    """The same thing on the same device."""

    kind: str
    code: int | None
    bus_id: str | None
    severity: str | None
    level: str
    meaning: str
    action: str
    classes: str | None
    events: list[Event] = field(default_factory=list)
    recovered: bool = False
    """Whether the driver said afterwards that the card needs no more action."""
    earlier_boot: bool = False
    """Whether all of it is older than this boot."""

    @property
    def name(self) -> str:
        """Such as ``Xid 79`` or ``pcie-error``."""
        return self.kind if self.code is None else "%s %d" % ("Xid" if self.kind == "xid" else "SXid", self.code)


def groups(contents: Contents, boot_time_s: float | None = None) -> list[Group]:
    """Gather events that say the same of the same device; in the order of their first."""
    cleared = _cleared(contents.events)
    found: dict[tuple[object, ...], Group] = {}
    for event in contents.events:
        recovered = event.bus_id is not None and event.line < cleared.get(event.bus_id, 0)
        earlier = boot_time_s is not None and event.time_s is not None and event.time_s < boot_time_s - 60
        action = xid.recovery_action(event.text) if event.code == 154 and event.kind == "xid" else None
        key = (event.kind, event.code, event.bus_id, event.severity, event.level, recovered, earlier, action)
        if key not in found:
            found[key] = Group(
                event.kind, event.code, event.bus_id, event.severity, event.level, event.meaning, event.action, event.classes,
                recovered=recovered, earlier_boot=earlier,
            )  # fmt: skip
        found[key].events.append(event)
    return _superseded(list(found.values()))


def _cleared(events: Iterable[Event]) -> dict[str, int]:
    """Return, by bus id, the line after which the card needs no action any more."""
    lines: dict[str, int] = {}
    for event in events:
        if event.kind == "xid" and event.code == 154 and event.bus_id is not None:
            if xid.recovery_action(event.text) == "none":
                lines[event.bus_id] = event.line
            else:
                lines.pop(event.bus_id, None)
    return lines


def _superseded(found: list[Group]) -> list[Group]:
    """Leave out what other lines say better: notices of PCIe errors that come with details, demands that changed."""
    detailed = {(group.bus_id, group.severity) for group in found if group.kind == "pcie-error"}
    last_demand = {group.bus_id: group for group in found if group.kind == "xid" and group.code == 154}
    return [
        group
        for group in found
        if not (group.kind == "pcie-error-received" and (group.bus_id, group.severity) in detailed)
        and not (group.kind == "xid" and group.code == 154 and last_demand[group.bus_id] is not group)
    ]


def judge(
    log: Log,
    gpus: Mapping[str, str] | None = None,
    *,
    links: Mapping[str, str] | None = None,
) -> list[Judgement]:
    """Judge the log of this boot.

    Args:
        log: as it was read.
        gpus: by bus id, how findings name each card (``gpu 3 0000:5d:00.0 GPU-...``); without it every device counts.
        links: by bus id, bridges and switches on the way to the cards; PCIe errors of other devices are not ours.

    Returns:
        Judgements, the worst first; one that says ok where there was nothing.
    """
    if log.state != "read":
        return [_unreadable(log)]
    found = [
        _group(group, gpus, links)
        for group in groups(log.contents, log.boot_time_s)
        if _ours(group, gpus, links)
    ]
    _program_errors(found, gpus)
    told = [judgement for _, judgement in found]
    if log.contents.unread_count:
        told.append(
            Judgement(
                "unknown", "kernel-log-unread", "lines of the kernel log look like errors of GPUs and cannot be read",
                value=log.contents.unread_count, unit="lines", evidence=tuple(log.contents.unread[:SHOWN]),
                action="read them: dmesg | grep -i xid",
            )
        )
    told.extend(_reach(log, any(item.level in {"fail", "degraded"} for item in told)))
    order = ("fail", "degraded", "unknown", "ok", "skipped")
    return sorted(told, key=lambda item: order.index(item.level))


def _unreadable(log: Log) -> Judgement:
    words = {
        "not-permitted": ("this user may not read the kernel log", "run as root, or put the user into the group adm or systemd-journal"),
        "absent": ("there is no kernel log here", "in a container: look at the host"),
        "timeout": ("the kernel log could not be read in time", "look at it on the host: dmesg"),
        "empty": ("the kernel log is empty, which no running kernel's is", "look at it on the host: dmesg"),
        "error": ("the kernel log could not be read", "look at it on the host: dmesg"),
    }  # fmt: skip
    message, action = words[log.state]
    return Judgement(
        "unknown", "kernel-log", "%s: Xids of this boot are not known" % message,
        evidence=tuple("%s: %s" % (attempt.source, attempt.reason) for attempt in log.attempts), action=action,
    )  # fmt: skip


def _ours(group: Group, gpus: Mapping[str, str] | None, links: Mapping[str, str] | None) -> bool:
    if gpus is None or group.kind not in {"pcie-error", "pcie-error-received", "pcie-limited"}:
        return True
    return group.bus_id in gpus or group.bus_id in (links or {})


def _group(group: Group, gpus: Mapping[str, str] | None, links: Mapping[str, str] | None) -> tuple[Group, Judgement]:
    level, action = group.level, group.action
    count = len(group.events)
    message = "%s: %s" % (group.name, group.meaning) if group.code is not None else group.meaning
    if group.kind == "pcie-limited":
        event = group.events[-1]
        message = "its PCIe link was limited at boot to x%s at %s GT/s by %s" % (event.width, event.speed_gts, event.at)
    if group.severity == "corrected":
        level = "degraded" if count > CORRECTED_MANY else "ok"
    if group.earlier_boot:
        level, message = "ok", message + "; before this boot"
    elif group.recovered and level in {"fail", "degraded"}:
        level, message = "degraded", message + "; recovered since, as Xid 154 says"
        action = "watch it; have the card looked at if it comes again"
    if group.bus_id is not None and "BUS_ID" in action:
        action = action.replace("BUS_ID", group.bus_id)
    code = "xid-%d" % group.code if group.kind == "xid" and group.code is not None else group.kind
    corrected = group.severity == "corrected"
    judgement = Judgement(
        level, code, message, subject=_subject(group, gpus, links), value=count, unit="events",
        threshold=CORRECTED_MANY if corrected else None,
        threshold_source="links correct single errors by design" if corrected else None,
        evidence=tuple(_line(event) for event in group.events[:SHOWN]) + _rest(group),
        action=None if level == "ok" and not _is_a_programs(group) else action,
    )  # fmt: skip
    return group, judgement


def _is_a_programs(group: Group) -> bool:
    """Whether it is an Xid of this boot that the table lays to a program: nothing is to be done about the card, and there is about that."""
    return group.kind == "xid" and group.code is not None and not group.earlier_boot and xid.meaning(group.code).level == "ok"


def _subject(group: Group, gpus: Mapping[str, str] | None, links: Mapping[str, str] | None) -> str | None:
    if group.bus_id is None:
        return group.events[0].process if group.kind == "nccl-crash" else None
    for named in (gpus, links):
        if named and group.bus_id in named:
            return named[group.bus_id]
    return ("nvswitch %d %s" % (group.events[0].unit or 0, group.bus_id)) if group.kind == "sxid" else group.bus_id


def _line(event: Event) -> str:
    when = datetime.fromtimestamp(event.time_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC ") if event.time_s is not None else ""
    return "%sline %d: %s" % (when, event.line, event.text[:240])


def _rest(group: Group) -> tuple[str, ...]:
    if len(group.events) <= SHOWN:
        return ()
    return ("%d more, the last one: %s" % (len(group.events) - SHOWN, _line(group.events[-1])),)


def _program_errors(found: list[tuple[Group, Judgement]], gpus: Mapping[str, str] | None) -> None:
    """Suspect a card whose program errors come from several programs, and on that card alone."""
    for code in PROGRAM_CODES:
        places = {group.bus_id for group, _ in found if group.kind == "xid" and group.code == code}
        if len(places) != 1 or (gpus is not None and len(gpus) < 2):
            continue
        for place, (group, judgement) in enumerate(found):
            names = {event.process for event in group.events if event.process is not None}
            if group.kind == "xid" and group.code == code and judgement.level == "ok" and len(names) > 1 and not group.earlier_boot:
                found[place] = (
                    group,
                    judgement._replace(
                        level="degraded",
                        message=judgement.message + "; on this card alone, from %d programs: %s" % (len(names), ", ".join(sorted(names))),
                        action="run one of them on another card; suspect this one if it passes there",
                    ),
                )


def _reach(log: Log, troubled: bool) -> list[Judgement]:
    covers = log.covers_s
    where = "kernel log (%s)" % log.source
    evidence = ("%d lines" % log.contents.lines, "boot id %s" % log.boot_id)
    if log.complete:
        if troubled:
            return []
        return [Judgement("ok", "kernel-log", "no error of a GPU or its link since the boot", evidence=(where, *evidence))]
    if covers is not None and covers >= ENOUGH_S:
        told = "errors" if troubled else "no error of a GPU or its link"
        return [
            Judgement(
                "ok", "kernel-log", "%s in the last %.0f h; older lines of this boot are gone" % (told, covers / 3600),
                value=round(covers / 3600, 1), unit="h", threshold=ENOUGH_S / 3600,
                threshold_source="a card that is broken speaks up again within a day of use", evidence=(where, *evidence),
            )
        ]
    reach = "nobody knows how far" if covers is None else "only %.1f h" % (covers / 3600)
    return [
        Judgement(
            "unknown", "kernel-log-incomplete", "the kernel log reaches back %s: older lines of this boot are gone" % reach,
            value=None if covers is None else round(covers / 3600, 2), unit="h", threshold=ENOUGH_S / 3600,
            threshold_source="a card that is broken speaks up again within a day of use", evidence=(where, *evidence),
            action="keep a journal of the kernel (journald), or raise log_buf_len",
        )
    ]
