"""Turns what nccl-tests printed or wrote into the fields of the result of the probe nccl, and into findings.

Verdicts come from contents and from the peak. The average over all sizes that the program prints at its end is no
measure of anything (a card that peaks at 235 GB/s prints 68), and is never judged.
"""

from __future__ import annotations

import codecs
import re

from . import bandwidth, nccl_beside, nccl_check, nccl_debug, nccl_json, nccl_text, tables, verdict
from .nccl_log import Log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Sequence

    from ..gpu.thresholds import Thresholds
    from .nccl_check import Reading
    from .nccl_debug import Said
    from .reference import Reference

    Findings = list[dict[str, Any]]

UNKNOWN = "unknown"
_EVIDENCE = 5
_NOISY_FROM = 1 << 20
"""Bytes from which on a spread of single calls tells of more than the cost of launching them."""
_SPELLED = re.compile(
    "|".join(
        sorted((name.replace("_", "[_-]?") for name in (*bandwidth.FACTORS, "all_to_all", "send_recv")), key=len, reverse=True)
    )
)


class Given:
    """What is known apart from the text.

    Args:
        thresholds: Bounds of verdicts.
        source: file or binary.
        name: The file's name, which may hold that of a collective.
        collective: What the user says that it is.
        gpu: What the user says that it ran on.
        own: The user's figures.
    """

    def __init__(
        self, thresholds: Thresholds, *, source: str = "file", name: str = "", collective: str | None = None,
        gpu: str | None = None, own: Sequence[Reference] = (),
    ) -> None:  # fmt: skip
        self.thresholds = thresholds
        self.source = source
        self.name = name
        self.collective = collective
        self.gpu = gpu
        self.own = own


def parse(data: bytes, given: Given, written: bytes | None = None) -> tuple[dict[str, Any], Findings]:
    """Read text or JSON of nccl-tests, or a log of NCCL.

    Args:
        data: What was printed, or a file.
        given: What is known apart from it.
        written: JSON of the run that printed ``data``.

    Returns:
        The fields of the result, and findings as arguments of `context.finding`.

    Raises:
        ValueError: It is neither; says what it is where that is known.
    """
    text = _decoded(data)
    more: Findings = []
    if nccl_json.looks_like(text):
        log, said = nccl_json.read(text), nccl_debug.Said()
    else:
        log, said = nccl_text.read(text), nccl_debug.read(text.splitlines())
        if written is not None:
            log, more = nccl_beside.join(log, _decoded(written))
        if not (log.tables or log.stray or log.failures or log.command or said.recognised):
            raise ValueError("nothing in it was printed by nccl-tests or by NCCL")
    readings = [nccl_check.understand(log, table, given.collective) for table in log.tables]
    readings = [_by_file_name(reading, log, given) for reading in readings]
    fields, findings = report(log, said, readings, given)
    return fields, findings + more


def _decoded(data: bytes) -> str:
    """Return the text; shells of Windows save UTF-16, and say so by its first bytes."""
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16" if wide else "utf-8", errors="replace")


def _by_file_name(reading: Reading, log: Log, given: Given) -> Reading:
    """Let the name of the file tell a collective that nothing in it does."""
    names = {bandwidth.canonical(found) for found in _SPELLED.findall(given.name.rsplit("/", 1)[-1].lower())}
    if reading.collective is not None or len(names) != 1 or not reading.lines:
        return reading
    again = nccl_check.understand(log, reading.table, names.pop())
    fits = again.disagreement is None and len(again.damaged) == len(reading.damaged)
    return nccl_check.told_by(again, "the name of the file") if fits else reading


def report(log: Log, said: Said, readings: Sequence[Reading], given: Given) -> tuple[dict[str, Any], Findings]:
    """Put together what all tables say."""
    findings: Findings = []
    first = readings[0] if readings else None
    settings = {**said.settings, **log.settings}
    damaged = len(log.stray) + sum(len(reading.damaged) for reading in readings)
    complete = bool(readings) and all(reading.complete for reading in readings)
    correctness = _correctness(readings, len(log.stray))
    findings += _contents(readings, correctness)
    findings += _whole(log, readings, said, complete=complete, damaged=damaged)
    peak, held = None, None
    apart = len(readings) > 1 and all(reading.ranks == 1 for reading in readings)
    if apart:
        findings.append(_one_rank(UNKNOWN, f"there are {len(readings)} runs of one rank each"))
    for reading in () if apart else readings:
        judged, best, against = _speed(reading, settings, said, given)
        findings += judged
        if peak is None:
            peak, held = best, against
    collective = (first.collective if first is not None else bandwidth.canonical(log.command or "")) or UNKNOWN
    fields = tables.report(
        given.source, "nccl", collective,
        rows=[row for reading in readings for row in _rows(reading)],
        complete=complete,
        correctness=correctness,
        ranks=first.ranks if first is not None else said.ranks,
        damaged_rows=damaged,
        peak_busbw_gbs=None if peak is None else peak[1],
        peak_size_bytes=None if peak is None else peak[0],
        expectation=held,
        devices=tuple(
            {"rank": device.rank, "name": device.name, "bus_id": device.bus_id, "uuid": None}
            for device in (first.table.devices if first is not None else ())
        ),
        failure=_failure(log, readings, complete=complete),
        library_version=next((r.table.nccl_version for r in readings if r.table.nccl_version), said.version),
        settings=settings,
        notes=tuple(_notes(log, said, readings)),
    )  # fmt: skip
    return fields, findings


def _correctness(readings: Sequence[Reading], stray: int) -> str:
    values = {reading.correctness for reading in readings}
    if nccl_check.WRONG in values:
        return nccl_check.WRONG
    return nccl_check.OK if values == {nccl_check.OK} and not stray else nccl_check.NOT_CHECKED


def _rows(reading: Reading) -> list[dict[str, Any]]:
    found = []
    asked = reading.table.config.iterations
    for line in reading.lines:
        for side in line.sides:
            calls = (side.spread.calls if side.spread is not None else None) or line.iterations or asked
            found.append(
                tables.row(
                    reading.collective or UNKNOWN, line.size_bytes, in_place=side.in_place, time_us=side.time_us.value,
                    algbw_gbs=bandwidth.algbw_gbs(line.size_bytes, side.time_us.value),
                    busbw_gbs=reading.busbw_gbs(line, side), wrong=reading.wrong(side), count=line.count, dtype=line.dtype,
                    redop=line.redop, root=line.root, reported_algbw_gbs=side.algbw_gbs.value,
                    reported_busbw_gbs=side.busbw_gbs.value, iterations=line.iterations or asked,
                    latency=None if side.spread is None or not calls else {
                        "iterations": calls, "min_us": side.spread.min_us, "p50_us": side.spread.p50_us,
                        "p99_us": side.spread.p99_us, "max_us": side.spread.max_us, "slowest_rank": None,
                        "slowest_share": None,
                    },
                )
            )  # fmt: skip
    return found


def _failure(log: Log, readings: Sequence[Reading], *, complete: bool) -> dict[str, Any] | None:
    if complete:
        return None
    kind = "truncated" if readings and not log.failures else "error"
    if not readings:
        kind = "not-started"
    sizes = [line.size_bytes for reading in readings for line in reading.lines]
    text = log.failures[0] if log.failures else ("it ends before its footer" if readings else "it holds no table")
    return {"kind": kind, "rank": None, "phase": "start" if not readings else "burst",
            "size_bytes": sizes[-1] if sizes else None, "text": text}  # fmt: skip


# Findings about contents and about the text ---------------------------------------------------------------------------


def _finding(level: str, code: str, message: str, **more: Any) -> dict[str, Any]:
    return {"level": level, "code": code, "message": message, **more}


def _contents(readings: Sequence[Reading], correctness: str) -> Findings:
    if correctness == nccl_check.OK:
        rows = sum(len(reading.lines) for reading in readings)
        return [_finding("ok", "data-correct", f"every element was right in all of {rows} rows", value=0, unit="wrong elements")]
    if correctness == nccl_check.WRONG:
        bad = [
            f"{line.size_bytes} bytes{' in place' if side.in_place else ''}: {side.wrong} wrong"
            for reading in readings
            for line in reading.table.lines
            for side in line.sides
            if side.wrong
        ]
        counted = max((reading.table.out_of_bounds or 0 for reading in readings), default=0)
        return [
            _finding(
                "fail", "wrong-data", f"data arrived wrong: {len(bad)} of the placements that can be read have wrong elements",
                value=counted or len(bad), unit="out of bounds" if counted else "placements", threshold=0,
                threshold_source="a collective is exact on the data of nccl-tests", evidence=tuple(bad[:_EVIDENCE]),
                action="do not use these GPUs together; repeat with NCCL_P2P_DISABLE=1, and see rdiag p2p and rdiag topo for IOMMU and ACS",
            )
        ]  # fmt: skip
    why = "not every row is there and says that it was checked"
    if any(reading.table.config.validation == 0 for reading in readings):
        why = "validation was off"
    elif any(reading.lines and not nccl_check.says_that_it_checked(reading.table) for reading in readings):
        why = "it does not say that validation was on, and some builds print 0 when it was off"
    return [
        _finding("unknown", "not-checked", f"whether data arrived right is not known: {why}", action="run it with -c 1")
    ] if readings else []  # fmt: skip


def _whole(log: Log, readings: Sequence[Reading], said: Said, *, complete: bool, damaged: int) -> Findings:
    found: Findings = []
    evidence = tuple(log.failures[:_EVIDENCE])
    explained = any(r.table.average_ok is False or r.correctness == nccl_check.WRONG for r in readings)
    if not readings:
        what = "the program did not get as far as a table" if log.failures or log.command else "there is no table of nccl-tests"
        warned = (said.first_warning,) if said.first_warning else ()
        found.append(_finding("unknown", "no-table", what, evidence=evidence + warned))
    elif log.failures and not (complete and explained):
        found.append(_finding("fail", "program-failed", f"nccl-tests ended with an error: {log.failures[0]}", evidence=evidence))
    elif not complete:
        rows = sum(len(reading.lines) for reading in readings)
        found.append(
            _finding("unknown", "incomplete", f"it ends, or sizes are missing, after {rows} rows", value=rows, unit="rows",
                     action="run it again; what is there is shown")
        )
    if damaged:
        samples = [damage for reading in readings for damage in reading.damaged] + log.stray
        found.append(
            _finding(
                "unknown", "damaged-rows", f"{damaged} row{'s' * (damaged != 1)} cannot be read, and nothing was guessed from them",
                value=damaged, unit="rows", threshold=0, threshold_source="each row must fit the header above it, and itself",
                evidence=tuple(f"line {each.number}: {each.why}: {each.text}" for each in samples[:_EVIDENCE]),
                action="write the output of each rank to its own file (mpirun --output-filename, srun --output)",
            )
        )  # fmt: skip
    for reading in readings:
        if reading.disagreement is not None:
            found.append(_finding("unknown", "ranks-disagree", reading.disagreement))
        if reading.table.average_ok is False:
            found.append(
                _finding("unknown", "minimum-missed", "its average is below the NCCL_TESTS_MIN_BW that it was given; an average over"
                         " sizes says nothing, and is not judged here")
            )
    return found


def _notes(log: Log, said: Said, readings: Sequence[Reading]) -> list[str]:
    notes = list(log.notes)
    for reading in readings:
        if reading.collective_from and reading.table.program is None:
            notes.append(f"the collective ({reading.collective}) is known from {reading.collective_from}")
        if reading.ranks is not None and not reading.table.devices:
            notes.append(f"the number of ranks ({reading.ranks}) is known from {reading.ranks_from}")
        if reading.table.left_out:
            notes.append("somebody left rows out and put dots there")
    if log.json_path is not None:
        notes.append(f"it wrote JSON to {log.json_path}")
    if said.network is not None:
        notes.append(f"NCCL uses the network {said.network}")
    if said.nvls:
        notes.append("NCCL lets the switch reduce (NVLS)")
    if said.algorithms:
        notes.append("NCCL chose " + ", ".join(f"{name} ({calls} calls)" for name, calls in sorted(said.algorithms.items())))
    if said.ways:
        notes.append("channels go via " + ", ".join(f"{way} ({count})" for way, count in sorted(said.ways.items())))
    if said.first_warning is not None:
        notes.append(f"NCCL warned {said.warnings} times, first: {said.first_warning}")
    if said.harmless:
        notes.append(f"{said.harmless} warnings come from ranks that end one after the other, and mean nothing")
    return list(dict.fromkeys(notes))


# Findings about speed ------------------------------------------------------------------------------------------------


def _speed(
    reading: Reading, settings: dict[str, str], said: Said, given: Given
) -> tuple[Findings, tuple[int, float] | None, dict[str, Any] | None]:
    """Judge one table by its peak; returns findings, the peak, and what it was held against."""
    if not reading.lines or reading.disagreement is not None:
        return [], None, None
    if reading.ranks == 1:
        return [_one_rank("skipped", "there was one rank")], None, None
    names = [given.gpu] if given.gpu else [device.name for device in reading.table.devices]
    # Nobody has more than eight GPUs in a host without saying so.
    hosts = reading.hosts or (1 if reading.ranks is not None and reading.ranks <= 8 else None)
    known = verdict.conditions(names, ranks=reading.ranks, nodes=hosts, collective=reading.collective, settings=settings)
    points = [(line.size_bytes, reading.busbw_gbs(line, side)) for line in reading.lines for side in line.sides]
    times = [(line.size_bytes, min(side.time_us.value for side in line.sides)) for line in reading.lines]
    found, best, held = verdict.of_peak(
        points, known, given.thresholds, own=given.own, through_memory=said.transports.get("SHM", 0),
        settings=settings,
    )
    found += verdict.of_small(times, known, given.thresholds, what="mean of a burst")
    return found + _noise(reading, given.thresholds), best, held


def _one_rank(level: str, what: str) -> dict[str, Any]:
    return _finding(
        level, "one-rank", f"{what}: nothing crossed a link, and the bus bandwidth is 0 by definition",
        action="if several GPUs were meant: -g N, or nccl-tests built with MPI=1; without it mpirun starts N tests of one GPU each",
    )  # fmt: skip


def _noise(reading: Reading, thresholds: Thresholds) -> Findings:
    cv, outlier = thresholds["nccl.spread_pct"], thresholds["nccl.outlier_ratio"]
    noisy = [
        (line, side)
        for line in reading.lines
        for side in line.sides
        if side.spread is not None
        and line.size_bytes >= _NOISY_FROM
        and (side.spread.cv_pct > cv.value or side.spread.max_us > outlier.value * side.time_us.value)
    ]
    if not noisy:
        return []
    worst = max(side.spread.cv_pct for _, side in noisy if side.spread is not None)
    value, unit, limit = worst, "% (standard deviation / mean)", cv
    if worst <= cv.value:
        # Only single calls are too long: that is what was held against a threshold.
        value = round(max(side.spread.max_us / side.time_us.value for _, side in noisy if side.spread is not None), 3)
        unit, limit = "longest / mean", outlier
    return [
        _finding(
            "degraded", "times-vary", f"single calls spread in {len(noisy)} placements from 1 MiB on", value=value, unit=unit,
            threshold=limit.value, threshold_source=limit.provenance,
            evidence=tuple(
                f"{line.size_bytes} bytes: {side.spread.min_us:g} to {side.spread.max_us:g} us"
                for line, side in noisy[:_EVIDENCE] if side.spread is not None
            ),
            action="look for other work on these GPUs and on the links, and for clocks that are held down (rdiag gpu)",
        )
    ]  # fmt: skip


def nothing(given: Given) -> tuple[dict[str, Any], Findings]:
    """Return what there is to say of a program that printed nothing known."""
    return report(Log("text", command=given.name), nccl_debug.Said(), [], given)
