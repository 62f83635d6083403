"""How torch names a GPU, as the kernel and nvidia-smi name it."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def describe(known: Any) -> dict[str, Any]:
    """Return name, bus_id and uuid from the properties of a GPU; torch before 2.5 tells only the first."""
    uuid, bus = getattr(known, "uuid", None), getattr(known, "pci_bus_id", None)
    bus_id = None
    if isinstance(bus, int):
        numbers = getattr(known, "pci_domain_id", 0), bus, getattr(known, "pci_device_id", 0)
        bus_id = "%04x:%02x:%02x.0" % numbers
    return {"name": str(known.name), "bus_id": bus_id, "uuid": None if uuid is None else "GPU-%s" % uuid}
