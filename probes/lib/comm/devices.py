"""Which GPUs torch has, and how it names one, as the kernel and nvidia-smi name it."""

from __future__ import annotations

from ..gpu.busid import normalise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def count(torch: Any) -> tuple[int, str]:
    """Return how many GPUs CUDA gives out, and what torch says where that fails.

    Before CUDA is used torch's own count is that of NVML, which holds GPUs that CUDA does not give: of those in MIG mode
    a process has one instance at most.
    """
    import warnings

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        number = int(getattr(torch._C, "_cuda_getDeviceCount", torch.cuda.device_count)())
    if number:
        return number, ""
    if not torch.backends.cuda.is_built():
        return 0, "it was built without CUDA"
    return 0, " ".join(str(told[0].message).split())[:600] if told else ""


def describe(known: Any, index: int | None = None) -> dict[str, Any]:
    """Return name, bus_id and uuid from the properties of a GPU, as far as they are told.

    Args:
        known: the properties; torch before 2.8 tells no address in them, before 2.4 no uuid.
        index: of the GPU, as torch counts them; the driver is asked for its address then.
    """
    uuid, bus = getattr(known, "uuid", None), getattr(known, "pci_bus_id", None)
    bus_id = None
    if isinstance(bus, int):
        numbers = getattr(known, "pci_domain_id", 0), bus, getattr(known, "pci_device_id", 0)
        bus_id = "%04x:%02x:%02x.0" % numbers
    elif index is not None:
        bus_id = _address(index)
    return {"name": str(known.name), "bus_id": bus_id, "uuid": None if uuid is None else "GPU-%s" % uuid}


def _address(index: int) -> str | None:
    """Return what the driver says of a GPU by its number in this process, which has begun to use CUDA."""
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
        device, text = ctypes.c_int(), ctypes.create_string_buffer(64)
        if driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetPCIBusId(text, len(text), device):
            return None
    except (OSError, AttributeError):
        return None
    return normalise(text.value.decode("ascii", "replace"))
