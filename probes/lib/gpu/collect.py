"""Asks everything that knows about the host's GPUs, one question after the other, and keeps every answer or its reason.

NVML where the environment has nvidia-ml-py, else nvidia-smi: its help says which fields this driver knows, one question
asks them all, and a card that spoils the answer is asked alone. ``-q -x``, lspci, /proc and the kernel log stand beside
it. A program that hangs is left behind and not asked again.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field, replace
from time import monotonic, sleep

from . import kernel_log_source, lspci, owners, procfs
from .busid import normalise
from .looking import Surroundings
from .missing import NOT_REPORTED, Missing, known, number
from .naming import name_the_nameless
from .occupancy import GPUS_QUESTION, Inquiry
from .run_smi import SMI, SMI_SECONDS, Programs, Said, ask_driver
from .same_card import confused, latest
from .smi_csv import QUERY, askable, parse_gpu_csv, refused_field, without
from .smi_errors import recognise
from .smi_lists import APPS_FIELDS, NvLinkStatus, parse_apps, parse_nvlink
from .smi_reading import Answer, GpuReading, SmiProcess, Trouble
from .smi_tree import Refused, parse_xml
from .surroundings import look_around
from .unanswered import broken_off, cannot, hang, tell_hang

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Sequence

    from .xid import Policy

HELP_SECONDS = 5.0
SOURCES = {"nvml": "NVML"}
LOST = Missing("gpu-lost", "the driver cannot reach it")
_MAX_REFUSALS = 40
_MAX_EVIDENCE = 4000


@dataclass
class Seen:
    """Everything that was found out about a host's GPUs."""

    readings: list[GpuReading] = field(default_factory=list)
    """One for each GPU that anything speaks of as the driver's, lost ones too; in the driver's order."""
    source: str = "nothing"
    """nvml, nvidia-smi, or nothing."""
    troubles: list[Trouble] = field(default_factory=list)
    """What the driver's tools said is wrong."""
    notes: list[str] = field(default_factory=list)
    """Lines that make no sense, fields that the driver does not know."""
    repeated: int = 1
    """How many readings of one card the answer held; the last one of each is kept."""
    unread: list[str] = field(default_factory=list)
    """Lines of the main answer that name no GPU and may be about one."""
    cut: str = ""
    """Why the list of GPUs may go on; empty where it is whole."""
    cannot_ask: Said | None = None
    """Why nvidia-smi gave no list of GPUs."""
    hung: Said | None = None
    """The question that nvidia-smi hung in."""
    processes: list[SmiProcess] | None = None
    """Who computes; None where that could not be found out."""
    processes_why: str = ""
    nvlinks: NvLinkStatus | None = None
    """What ``nvlink -s`` says; None where it gave no answer."""
    nvlinks_why: str = ""
    load: dict[str, list[float | None]] = field(default_factory=dict)
    """Samples of utilization, %, by UUID; None where the card has no such counter."""
    cuda_version: str | None = None
    module: procfs.KernelModule | None = None
    proc_gpus: dict[str, procfs.GpuInformation] | None = None
    """By bus id; None where /proc/driver/nvidia is not there."""
    devices: dict[str, lspci.Device] | None = None
    """What lspci lists, by bus id; None where it could not be asked."""
    devices_why: str = ""
    log: kernel_log_source.Log | None = None
    around: Surroundings = field(default_factory=Surroundings)
    asked: list[Said] = field(default_factory=list)
    xml: str = ""
    parsed: bool = False
    """Whether it comes from a saved answer instead of a host."""


def collect(
    remaining: float, progress: Callable[[float, float, str], None], *, root: str = "/", overrides: Policy | None = None
) -> Seen:
    """Ask everything.

    Args:
        remaining: seconds for all of it.
        progress: is told how many of how many steps are done, and which one is next.
        root: where the host's files are.
        overrides: Xids that are judged in another way than the table does.
    """
    programs = Programs(remaining)
    seen = Seen(around=look_around(root))
    steps: list[tuple[str, Callable[[], None]]] = [
        ("lspci and /proc", lambda: _other_lists(seen, programs, root)),
        ("NVML", lambda: _nvml(seen, remaining)),
        ("nvidia-smi", lambda: _smi(seen, programs)),
        ("kernel log", lambda: _log(seen, programs, overrides)),
    ]
    for place, (label, step) in enumerate(steps):
        progress(place, len(steps), label)
        step()
    progress(len(steps), len(steps), "")
    seen.asked += programs.asked
    seen.hung = seen.hung or programs.stuck(SMI)
    return seen


def _other_lists(seen: Seen, programs: Programs, root: str) -> None:
    said = programs.ask("lspci", "-D", "-nn", "-vvv")
    if not said.ok and said.how == "ended":
        said = programs.ask("lspci", "-D", "-nn")
    if said.ok:
        seen.devices, damaged = lspci.parse(said.out)
        seen.notes += ["lspci: %s" % line for line in damaged[:5]]
        if damaged and not seen.devices:
            seen.devices, seen.devices_why = None, "lspci: %s" % damaged[0]
    else:
        seen.devices_why = said.why
    seen.module = procfs.kernel_module(root)
    seen.proc_gpus = procfs.gpus(root)


def _log(seen: Seen, programs: Programs, overrides: Policy | None) -> None:
    seen.log = kernel_log_source.read(programs, overrides=overrides)


# -- NVML


def _nvml(seen: Seen, remaining: float) -> None:
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "nvml_read.py")
    code = "import sys, runpy; sys.path[:] = sys.argv[2:]; runpy.run_path(sys.argv[1], run_name='__main__')"
    arguments = (sys.executable, "-I", "-S", "-c", code, program, *sys.path)
    said = ask_driver(arguments, min(SMI_SECONDS, remaining), remaining, "NVML (nvidia-ml-py)")
    lines = []
    for line in said.out.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            lines.append(value)
    said = replace(said, out="")
    if not lines and (said.earlier is not None or said.pid is not None):
        # Nobody asks the driver as long as this, or an earlier question, is stuck in it.
        seen.asked.append(said)
        seen.hung = said
        cannot(seen, said)
        return
    if not lines and said.hung:
        # It could be ended: nvidia-smi may fare better, and that NVML did not answer stays a finding.
        seen.asked.append(said)
        seen.troubles.append(hang(said))
        return
    if not lines or "absent" in lines[0]:
        seen.notes.append("NVML is not used: %s" % (lines[0]["absent"] if lines else said.why))
        return
    seen.asked.append(said)
    if said.hung:
        seen.hung = said
        seen.troubles.append(hang(said))
    if "failed" in lines[0]:
        trouble = recognise(str(lines[0]["failed"]))
        if trouble is not None:
            seen.troubles.append(trouble)
        return
    seen.source = "nvml"
    for fields in lines:
        _take_nvml(seen, fields)
    count = lines[0].get("count")
    if isinstance(count, int) and len(seen.readings) < count:
        seen.cut = said.why
        if not said.hung:
            seen.troubles.append(broken_off(said, len(seen.readings)))
    _samples_of_nvml(seen, lines)


def _take_nvml(seen: Seen, line: dict[str, object]) -> None:
    cells = line.get("cells")
    index = line.get("index")
    if isinstance(cells, dict) and all(isinstance(text, str) for text in cells.values()):
        rows = "%s\n%s\n" % (", ".join(cells), ", ".join(text.replace(",", " ") for text in cells.values()))
        answer = parse_gpu_csv(rows, tuple(cells))
        for reading in answer.readings:
            reading.source, reading.position = "nvml", len(seen.readings)
            seen.readings.append(reading)
            for one in line.get("processes") or () if isinstance(line.get("processes"), list) else ():  # type: ignore[attr-defined]
                memory = number(str(one.get("memory") or "[N/A]"), "MiB")
                reading.processes.append(SmiProcess(int(one["pid"]), NOT_REPORTED, memory, "C", reading.uuid, reading.bus_id))
    elif isinstance(line.get("lost"), str) and isinstance(index, int):
        seen.readings.append(lost_reading(index, None, "nvml", str(line.get("word") or "")))
        trouble = recognise(str(line["lost"]))
        seen.troubles += [trouble] if trouble is not None else []


def _samples_of_nvml(seen: Seen, lines: Sequence[dict[str, object]]) -> None:
    later = next((line["samples"] for line in lines if isinstance(line.get("samples"), dict)), {})
    assert isinstance(later, dict)  # noqa: S101 - see the line above
    for reading in seen.readings:
        uuid, index = known(reading.uuid), known(reading.index)
        if uuid is None:
            continue
        samples = [reading.utilization_pct]
        if str(index) in later:
            samples.append(number(str(later[str(index)]), "%"))
        _keep_samples(seen, uuid, samples)


def _keep_samples(seen: Seen, uuid: str, samples: Sequence[float | Missing]) -> None:
    for sample in samples:
        if not isinstance(sample, Missing):
            seen.load.setdefault(uuid, []).append(sample)
        elif sample.reason in {"not-supported", "deprecated"}:
            seen.load.setdefault(uuid, []).append(None)


def lost_reading(index: int | None, bus_id: str | None, source: str, text: str = "") -> GpuReading:
    """Return a reading of a GPU that the driver cannot reach: nothing of it is known, and why."""
    reading = GpuReading(source=source)
    gone = Missing("gpu-lost", text or LOST.text)
    for name, _ in list(reading.metrics()):
        setattr(reading, name, gone)
    reading.index = gone if index is None else index
    reading.bus_id = gone if bus_id is None else bus_id
    return reading


# -- nvidia-smi


def _smi(seen: Seen, programs: Programs) -> None:
    if seen.hung is not None:
        # NVML hangs in the same driver.
        return
    if not seen.readings:
        _query(seen, programs)
    if programs.stuck(SMI) is None and programs.has(SMI):
        _apps(seen, programs)
        _samples(seen, programs)
        _nvlinks(seen, programs)
        _evidence(seen, programs)
    elif seen.source == "nvml":
        seen.processes = [process for reading in seen.readings for process in reading.processes]
    name_the_nameless(seen, programs, set(gpus_of(seen.devices)) or set(seen.proc_gpus or ()))


def _query(seen: Seen, programs: Programs) -> None:
    helped = programs.ask(SMI, "--help-query-gpu", seconds=HELP_SECONDS)
    if helped.hung:
        cannot(seen, helped)
        return
    fields: tuple[str, ...] = ()
    if helped.ok:
        fields, unknown = askable(QUERY, helped.out)
        if unknown and fields:
            seen.notes.append("this driver does not know: %s" % ", ".join(unknown))
    fields = fields or QUERY
    said, fields = _ask_fields(programs, fields)
    answer = parse_gpu_csv(said.out, fields)
    seen.troubles += answer.troubles
    seen.notes += answer.notes
    take(seen, answer.readings)
    if not answer.readings:
        cannot(seen, said)
        if not _is_about_one_card(answer.troubles):
            return
    seen.source = "nvidia-smi"
    if said.hung:
        seen.cut = said.why
        seen.troubles.append(hang(said))
    elif not said.ok and not answer.troubles:
        seen.cut = said.why
        seen.troubles.append(broken_off(said, len(answer.readings)))
    seen.unread = [note for note in answer.notes if note.startswith("not a row")]
    _ask_alone(seen, programs, fields)


def _ask_fields(programs: Programs, fields: tuple[str, ...], *more: str) -> tuple[Said, tuple[str, ...]]:
    """Ask for ``fields``, without those that the driver refuses; return its answer and what was asked in the end."""
    said = programs.ask(SMI, *more, "--query-gpu=" + ",".join(fields), "--format=csv")
    for _ in range(_MAX_REFUSALS):
        refused = refused_field(said.out)
        if refused is None or refused not in fields or len(fields) == 1:
            break
        fields = without(fields, refused)
        said = programs.ask(SMI, *more, "--query-gpu=" + ",".join(fields), "--format=csv")
    return said, fields


def take(seen: Seen, readings: Sequence[GpuReading]) -> None:
    """Keep the last reading of each card, and note what two of them cannot have in common."""
    seen.readings, seen.repeated = latest(readings)
    both = confused(seen.readings)
    if both:
        seen.troubles.append(
            Trouble(
                "cards-confused", "; ".join(both)[:500], "two GPUs claim to be the same one: nobody can tell which of them is judged",
                "compare nvidia-smi -L with lspci -d 10de:; ask each alone: nvidia-smi -q -i BUS_ID", "unknown", "host",
            )
        )  # fmt: skip


def _is_about_one_card(troubles: Sequence[Trouble]) -> bool:
    return bool(troubles) and all(trouble.scope == "gpu" for trouble in troubles)


def _ask_alone(seen: Seen, programs: Programs, fields: tuple[str, ...]) -> None:
    """Ask each card alone that the common answer does not tell whole."""
    whole = {known(reading.bus_id) for reading in seen.readings if _whole(reading)}
    wanted = [known(reading.bus_id) for reading in seen.readings if not _whole(reading)]
    wanted += [trouble.bus_id for trouble in seen.troubles if trouble.scope == "gpu"]
    if seen.unread or any(bus is None for bus in wanted):
        wanted += sorted(seen.proc_gpus or ())
    for bus in dict.fromkeys(wanted):
        if bus is None or bus in whole or programs.stuck(SMI) is not None:
            continue
        said, asked = _ask_fields(programs, fields, "-i", bus)
        answer = parse_gpu_csv(said.out, asked)
        tell_hang(seen, said)
        alone = [reading for reading in answer.readings if known(reading.bus_id) in {bus, None}]
        if alone and _whole(alone[0]) and (said.ok or answer.troubles):
            _put(seen, bus, alone[0])
            seen.troubles += [trouble for trouble in answer.troubles if trouble not in seen.troubles]
            continue
        lost = next((trouble for trouble in (*answer.troubles, *seen.troubles) if trouble.code == "gpu-lost" and trouble.bus_id in {bus, None}), None)
        if lost is not None:
            _put(seen, bus, lost_reading(None, bus, "nvidia-smi", lost.text))
            seen.troubles += [trouble for trouble in answer.troubles if trouble not in seen.troubles]


def _whole(reading: GpuReading) -> bool:
    gaps = (value for _, value in reading.metrics() if isinstance(value, Missing))
    return reading.damaged is None and known(reading.uuid) is not None and not any(gap.reason in {"error", "empty"} for gap in gaps)


def _put(seen: Seen, bus: str, reading: GpuReading) -> None:
    """Put a reading in the place of the one that there is of this card; keep what only that one tells."""
    for place, old in enumerate(seen.readings):
        if known(old.bus_id) == bus:
            if known(reading.index) is None and known(old.index) is not None:
                reading.index = old.index
            if known(reading.uuid) is None and known(old.uuid) is not None:
                reading.uuid = old.uuid
            reading.position = old.position
            seen.readings[place] = reading
            return
    reading.position = len(seen.readings)
    seen.readings.append(reading)


def _apps(seen: Seen, programs: Programs) -> None:
    said = programs.ask(SMI, "--query-compute-apps=" + ",".join(APPS_FIELDS), "--format=csv,noheader")
    found = parse_apps(said.out, APPS_FIELDS)
    if not said.ok or found.damaged or not found.complete:
        seen.processes_why = said.why if not said.ok else "a line that is no process: %s" % (found.damaged or ["the last one is cut"])[0]
        seen.processes = found.processes or None
        tell_hang(seen, said)
        return
    seen.processes = found.processes


def _samples(seen: Seen, programs: Programs) -> None:
    """Ask for the load again, as often as the one rule of who is free wants to know it."""
    begun = monotonic()
    everybody = owners.holders(seen) or []
    undecided: dict[str, Inquiry] = {}
    for reading in seen.readings:
        uuid = known(reading.uuid)
        if uuid is not None and uuid not in seen.load:
            _keep_samples(seen, uuid, [reading.utilization_pct])
        use = owners.use_of(reading, seen, everybody)
        if use is not None and use.utilization_pct:
            undecided[use.uuid] = Inquiry.going_on(use)
    while True:
        undecided = {uuid: inquiry for uuid, inquiry in undecided.items() if inquiry.question is not None}
        if not undecided or programs.stuck(SMI) is not None:
            return
        sleep(max(0.0, max(inquiry.pause for inquiry in undecided.values()) - (monotonic() - begun)))
        begun = monotonic()
        said = programs.ask(SMI, *GPUS_QUESTION)
        tell_hang(seen, said)
        lines = {cells[1].strip(): line for line in said.out.splitlines() for cells in [line.split(",")] if len(cells) > 1}
        for uuid, inquiry in list(undecided.items()):
            try:
                inquiry.take([lines[uuid]])
            except (KeyError, ValueError):
                # What is asked again and does not answer is not known to be free.
                del undecided[uuid]
            else:
                seen.load[uuid] = list(inquiry.gpus[0].utilization_pct)


def _nvlinks(seen: Seen, programs: Programs) -> None:
    if programs.stuck(SMI) is not None:
        return
    said = programs.ask(SMI, "nvlink", "-s")
    seen.nvlinks_why = "" if said.ok else said.why
    seen.nvlinks = parse_nvlink(said.out) if said.how == "ended" else None
    tell_hang(seen, said)


def _evidence(seen: Seen, programs: Programs) -> None:
    if programs.stuck(SMI) is not None:
        return
    said = programs.ask(SMI, "-q", "-x")
    tell_hang(seen, said)
    seen.xml = said.out
    try:
        answer = parse_xml(said.out)
    except Refused as refusal:
        seen.notes.append("nvidia-smi -q -x: %s" % refusal)
        return
    seen.cuda_version = known(answer.cuda_version)
    add_detail(seen.readings, answer)
    _add_left_out(seen, answer)
    if said.ok and {known(reading.bus_id) for reading in answer.readings} <= {known(reading.bus_id) for reading in seen.readings}:
        seen.cut = ""


def _add_left_out(seen: Seen, answer: Answer) -> None:
    """Take cards that only the long answer has: the short one was broken off, or they came back meanwhile."""
    listed = {known(reading.bus_id) for reading in seen.readings}
    nameless = any(known(reading.bus_id) is None for reading in seen.readings)
    left_out = [reading for reading in answer.readings if known(reading.bus_id) not in listed | {None}]
    if not left_out or nameless:
        return
    for reading in left_out:
        reading.position = len(seen.readings)
        seen.readings.append(reading)
    seen.troubles.append(
        Trouble(
            "answer-incomplete", "only nvidia-smi -q -x has: %s" % ", ".join(reading.describe() for reading in left_out)[:400],
            "%s told of fewer GPUs than there are" % SOURCES.get(seen.source, seen.source), "run it again; look into dmesg whether a card comes and goes", "unknown", "host",
        )
    )  # fmt: skip


def add_detail(readings: Sequence[GpuReading], answer: Answer) -> None:
    """Take from the long answer what the short one does not report."""
    by_bus = {known(reading.bus_id): reading for reading in answer.readings if reading.damaged is None}
    for reading in readings:
        detail = by_bus.get(known(reading.bus_id))
        if detail is None or known(reading.bus_id) is None:
            continue
        if known(detail.uuid) not in {None, known(reading.uuid)}:
            continue
        reading.fill(detail)


def gpus_of(devices: dict[str, lspci.Device] | None) -> dict[str, lspci.Device]:
    """Return the NVIDIA GPUs among what lspci lists."""
    return {normalise(bus) or bus: device for bus, device in (devices or {}).items() if device.is_gpu and device.vendor_id == lspci.NVIDIA}
