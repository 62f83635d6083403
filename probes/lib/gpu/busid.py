"""One spelling of PCI addresses: nvidia-smi, lspci, the kernel log and CUDA each have their own."""

from __future__ import annotations

import re

from .missing import Missing, garbage, missing

_BUS_ID = re.compile(
    r"(?:PCI:)?(?:(?P<domain>[0-9a-f]{1,8}):)?(?P<bus>[0-9a-f]{1,2}):(?P<device>[0-9a-f]{1,2})(?:\.(?P<function>[0-7]))?",
    re.IGNORECASE,
)


def normalise(text: str) -> str | None:
    """Return ``0000:1b:00.0`` for any spelling of it, None when it is no PCI address.

    Lower case, a domain of four digits (eight only where the upper four are not all zero), function 0 when none is
    given: the kernel log leaves it out.
    """
    match = _BUS_ID.fullmatch(text.strip())
    if match is None:
        return None
    domain, bus, device = (int(match.group(name) or "0", 16) for name in ("domain", "bus", "device"))
    if device > 0x1F:
        return None
    width = 8 if domain > 0xFFFF else 4
    return "%0*x:%02x:%02x.%s" % (width, domain, bus, device, match.group("function") or "0")


def bus_id(text: str) -> str | Missing:
    """Return a cell's PCI address, or why it has none."""
    reason = missing(text)
    if reason is not None:
        return reason
    address = normalise(text)
    return garbage(text) if address is None else address


def same(first: str, second: str) -> bool:
    """Whether two spellings name one device."""
    address = normalise(first)
    return address is not None and address == normalise(second)
