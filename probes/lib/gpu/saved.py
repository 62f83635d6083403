"""A saved answer of nvidia-smi as if it had just been given."""

from __future__ import annotations

from .collect import Seen, lost_reading, take
from .missing import NOT_REPORTED, Missing, known
from .saved_text import decode
from .smi_identify import parse


def read(data: bytes) -> Seen:
    """Return what a saved answer says.

    Where it does not number the GPUs (XML, ``-q``) they are counted in its order, which is nvidia-smi's own, as long as
    nothing of it is damaged.

    Raises:
        ValueError: it is no answer about GPUs; the message names what it is.
    """
    answer = parse(decode(data))
    seen = Seen(
        source=answer.kind,
        troubles=answer.troubles,
        notes=answer.notes,
        cuda_version=known(answer.cuda_version),
        parsed=True,
    )
    take(seen, answer.readings)
    seen.unread = [note for note in answer.notes if note.startswith("not a row")]
    if not answer.complete:
        seen.unread.append("the answer does not end where it should")
    attached = known(answer.attached_gpus)
    if attached is not None and attached != len(seen.readings):
        seen.unread.append("%d GPUs are attached and %d are described" % (attached, len(seen.readings)))
    whole = not seen.unread and not any(reading.damaged for reading in seen.readings)
    for reading in seen.readings:
        if whole and isinstance(reading.index, Missing) and reading.index == NOT_REPORTED:
            reading.index = reading.position
        if isinstance(reading.driver_version, Missing):
            reading.driver_version = answer.driver_version
    _add_lost(seen)
    if answer.processes or any(reading.processes for reading in answer.readings):
        seen.processes = answer.processes
    return seen


def _add_lost(seen: Seen) -> None:
    """Give a GPU that is named only in words of error a place among the others."""
    listed = {known(reading.bus_id) for reading in seen.readings}
    for trouble in seen.troubles:
        if trouble.code != "gpu-lost" or trouble.bus_id is None:
            continue
        lost = lost_reading(None, trouble.bus_id, seen.source, trouble.text)
        if trouble.bus_id not in listed:
            lost.position = len(seen.readings)
            seen.readings.append(lost)
            listed.add(trouble.bus_id)
            continue
        for place, reading in enumerate(seen.readings):
            if known(reading.bus_id) == trouble.bus_id and known(reading.uuid) is None:
                lost.position, lost.index = reading.position, reading.index
                seen.readings[place] = lost
