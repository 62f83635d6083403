"""Names cards that are lost: ``nvidia-smi -L``, /proc and lspci still know number, UUID and address of them."""

from __future__ import annotations

from .missing import known
from .run_smi import SMI
from .smi_lists import parse_list

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .collect import Seen
    from .run_smi import Programs


def name_the_nameless(seen: Seen, programs: Programs, there: set[str]) -> None:
    """Find index, UUID and address of cards that lack one of them.

    Args:
        seen: whose readings are completed.
        programs: to ask for the list.
        there: bus ids of all GPUs of the machine.
    """
    for reading in seen.readings:
        information = (seen.proc_gpus or {}).get(known(reading.bus_id) or "")
        if known(reading.uuid) is None and information is not None and information.uuid:
            reading.uuid = information.uuid
    _by_list(seen, programs)
    _by_place(seen, there)


def _by_list(seen: Seen, programs: Programs) -> None:
    nameless = [reading for reading in seen.readings if known(reading.uuid) is None or known(reading.index) is None]
    if not nameless or programs.stuck(SMI) is not None or not programs.has(SMI) or seen.source == "nothing":
        return
    listed = parse_list(programs.ask(SMI, "-L").out).gpus
    index_of = {known(one.uuid): one.index for one in listed}
    uuid_of = {known(one.index): one.uuid for one in listed}
    named = {known(reading.uuid) for reading in seen.readings} | {None}
    for reading in nameless:
        uuid, index = known(reading.uuid), known(reading.index)
        if index is None and uuid is not None and uuid in index_of:
            reading.index = index_of[uuid]
        if uuid is None and index is not None and known(uuid_of.get(index, reading.uuid)) not in named:
            reading.uuid = uuid_of[index]
    taken = {known(reading.index) for reading in seen.readings}
    left = [one for one in listed if known(one.index) not in taken]
    nameless = [reading for reading in nameless if known(reading.index) is None]
    # Both lists are in the order of the cards; with as many on both sides each is clear.
    if len(left) == len(nameless):
        for one, reading in zip(left, nameless):
            reading.index = one.index
            reading.uuid = reading.uuid if known(reading.uuid) is not None else one.uuid


def _by_place(seen: Seen, there: set[str]) -> None:
    bus_of = {information.uuid: bus for bus, information in (seen.proc_gpus or {}).items() if information.uuid}
    for reading in seen.readings:
        uuid = known(reading.uuid)
        if known(reading.bus_id) is None and uuid in bus_of:
            reading.bus_id = bus_of[uuid]
    left = there - {known(reading.bus_id) for reading in seen.readings}
    placeless = [reading for reading in seen.readings if known(reading.bus_id) is None]
    if len(placeless) == len(left) == 1 and len(there) == len(seen.readings):
        placeless[0].bus_id = left.pop()
