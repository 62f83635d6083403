"""Asks NVML through nvidia-ml-py, as a program of its own: a call into a driver that hangs must not take the probe along.

Prints one JSON object a line and GPU, as soon as it is known. Values are spelled as csv prints them, errors as the words
that csv prints in their place, so that one reader reads both; every call fails by itself.
"""

from __future__ import annotations

import json
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

SAMPLE_GAP = 0.5
_ERRORS = {
    3: "[Not Supported]", 4: "[Insufficient Permissions]", 13: "[Not Supported]", 14: "[InfoROM is corrupted]",
    15: "[GPU is lost]", 16: "[GPU requires reset]",
}  # fmt: skip
_RECOVERY = {0: "None", 1: "Reset", 2: "Reboot", 3: "Drain P2P", 4: "Drain and Reset", 5: "Recover IMEX Domain"}
_COMPUTE = {0: "Default", 1: "Exclusive_Thread", 2: "Prohibited", 3: "Exclusive_Process"}
_FABRIC = {0: "Not Supported", 1: "Not Started", 2: "In Progress", 3: "Completed"}
_MIB = 1 << 20


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _word(error: Exception) -> str:
    code = getattr(error, "value", None)
    return _ERRORS.get(code if isinstance(code, int) else -1, "[Unknown Error]")


class Card:
    """One GPU's answers, by the csv field that they equal.

    Args:
        nvml: the module pynvml.
        handle: of the GPU.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self.cells: dict[str, str] = {}

    def ask(self, fields: str | tuple[str, ...], function: str, *arguments: Any, show: Callable[[Any], Any] = _text) -> None:
        """Call ``function`` and keep what ``show`` makes of it: one value, or one for each of several fields."""
        names = (fields,) if isinstance(fields, str) else fields
        try:
            call = getattr(self._nvml, function, None)
            if call is None:
                return
            shown = show(call(self._handle, *arguments))
            texts = (shown,) if isinstance(fields, str) else shown
            self.cells.update(zip(names, (_text(text) for text in texts)))
        except Exception as error:  # noqa: BLE001 - a library's own errors; each is one value that is missing
            self.cells.update(dict.fromkeys(names, _word(error)))

    def field(self, name: str, number: int, show: Callable[[Any], Any]) -> None:
        """Ask for a value that has a number instead of a function."""

        def value(found: Any) -> Any:
            if found[0].nvmlReturn != 0:
                raise self._nvml.NVMLError(found[0].nvmlReturn)
            return show(found[0].value.uiVal)

        self.ask(name, "nvmlDeviceGetFieldValues", [number], show=value)

    def everything(self) -> None:
        """Ask all there is to ask."""
        ask = self.ask

        def on(value: Any) -> str:
            return "Enabled" if value else "Disabled"

        ask("uuid", "nvmlDeviceGetUUID")
        ask("pci.bus_id", "nvmlDeviceGetPciInfo", show=lambda info: _text(info.busId))
        ask("name", "nvmlDeviceGetName")
        ask("serial", "nvmlDeviceGetSerial")
        ask("vbios_version", "nvmlDeviceGetVbiosVersion")
        self._memory()
        ask(("utilization.gpu", "utilization.memory"), "nvmlDeviceGetUtilizationRates",
            show=lambda rates: ("%d %%" % rates.gpu, "%d %%" % rates.memory))  # fmt: skip
        ask("temperature.gpu", "nvmlDeviceGetTemperature", 0)
        ask("temperature.gpu.tlimit", "nvmlDeviceGetMarginTemperature", show=lambda margin: getattr(margin, "marginTemperature", margin))
        self.field("temperature.memory", 82, lambda value: value)
        ask("fan.speed", "nvmlDeviceGetFanSpeed", show=lambda value: "%d %%" % value)
        for name, function in (
            ("power.draw", "nvmlDeviceGetPowerUsage"), ("power.limit", "nvmlDeviceGetPowerManagementLimit"),
            ("enforced.power.limit", "nvmlDeviceGetEnforcedPowerLimit"),
            ("power.default_limit", "nvmlDeviceGetPowerManagementDefaultLimit"),
        ):  # fmt: skip
            ask(name, function, show=lambda value: "%.2f W" % (value / 1000.0))
        ask(("power.min_limit", "power.max_limit"), "nvmlDeviceGetPowerManagementLimitConstraints",
            show=lambda pair: tuple("%.2f W" % (value / 1000.0) for value in pair))  # fmt: skip
        for name, function, kind in (
            ("clocks.current.sm", "nvmlDeviceGetClockInfo", 1), ("clocks.current.memory", "nvmlDeviceGetClockInfo", 2),
            ("clocks.max.sm", "nvmlDeviceGetMaxClockInfo", 1), ("clocks.max.memory", "nvmlDeviceGetMaxClockInfo", 2),
        ):  # fmt: skip
            ask(name, function, kind, show=lambda value: "%d MHz" % value)
        ask("pstate", "nvmlDeviceGetPerformanceState", show=lambda value: "P%d" % value)
        new = "nvmlDeviceGetCurrentClocksEventReasons"
        ask("clocks_event_reasons.active", new if hasattr(self._nvml, new) else "nvmlDeviceGetCurrentClocksThrottleReasons",
            show=lambda value: "0x%016x" % value)  # fmt: skip
        for name, function in (
            ("pcie.link.gen.current", "nvmlDeviceGetCurrPcieLinkGeneration"), ("pcie.link.gen.max", "nvmlDeviceGetMaxPcieLinkGeneration"),
            ("pcie.link.gen.gpumax", "nvmlDeviceGetGpuMaxPcieLinkGeneration"),
            ("pcie.link.width.current", "nvmlDeviceGetCurrPcieLinkWidth"), ("pcie.link.width.max", "nvmlDeviceGetMaxPcieLinkWidth"),
        ):  # fmt: skip
            ask(name, function)
        self._errors()
        self.field("gpu_recovery_action", 230, lambda value: _RECOVERY.get(value, "action %d" % value))
        ask(("mig.mode.current", "mig.mode.pending"), "nvmlDeviceGetMigMode", show=lambda pair: tuple(on(value) for value in pair))
        ask("compute_mode", "nvmlDeviceGetComputeMode", show=lambda value: _COMPUTE.get(value, "mode %d" % value))
        ask("persistence_mode", "nvmlDeviceGetPersistenceMode", show=on)
        ask("inforom.checksum_validation", "nvmlDeviceValidateInforom", show=lambda _: "valid")
        if self.cells.get("inforom.checksum_validation") == "[InfoROM is corrupted]":
            self.cells["inforom.checksum_validation"] = "invalid"
        self._fabric()

    def _memory(self) -> None:
        # Version 2 tells what the driver reserves for itself from what is used.
        names = ("memory.total", "memory.used", "memory.reserved", "memory.free")
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        if version is None:
            self.cells.update(dict.fromkeys(names, "[Not Supported]"))
            return
        try:
            info = self._nvml.nvmlDeviceGetMemoryInfo(self._handle, version=version)
            for name, part in zip(names, ("total", "used", "reserved", "free")):
                self.cells[name] = "%d MiB" % (getattr(info, part) // _MIB)
        except Exception as error:  # noqa: BLE001 - see ask()
            self.cells.update(dict.fromkeys(names, _word(error)))

    def _errors(self) -> None:
        self.ask(("ecc.mode.current", "ecc.mode.pending"), "nvmlDeviceGetEccMode",
                 show=lambda pair: tuple("Enabled" if value else "Disabled" for value in pair))  # fmt: skip
        for kind, name in enumerate(("corrected", "uncorrected")):
            for counter, span in enumerate(("volatile", "aggregate")):
                self.ask("ecc.errors.%s.%s.total" % (name, span), "nvmlDeviceGetTotalEccErrors", kind, counter)
        rows = ("correctable", "uncorrectable", "pending", "failure")
        self.ask(tuple("remapped_rows." + name for name in rows), "nvmlDeviceGetRemappedRows",
                 show=lambda four: (four[0], four[1], "Yes" if four[2] else "No", "Yes" if four[3] else "No"))  # fmt: skip
        parts = ("max", "high", "partial", "low", "none")
        self.ask(tuple("remapped_rows.histogram." + name for name in parts), "nvmlDeviceGetRowRemapperHistogram",
                 show=lambda histogram: tuple(getattr(histogram, name) for name in parts))  # fmt: skip
        for cause, name in enumerate(("retired_pages.single_bit_ecc.count", "retired_pages.double_bit.count")):
            self.ask(name, "nvmlDeviceGetRetiredPages", cause, show=len)
        self.ask("retired_pages.pending", "nvmlDeviceGetRetiredPagesPendingStatus", show=lambda value: "Yes" if value else "No")

    def _fabric(self) -> None:
        try:
            info = self._nvml.c_nvmlGpuFabricInfo_t()
            self._nvml.nvmlDeviceGetGpuFabricInfo(self._handle, self._nvml.byref(info))
            state = _FABRIC.get(info.state, "state %d" % info.state)
            self.cells["fabric.state"] = state
            self.cells["fabric.status"] = "N/A" if state == "Not Supported" else "Success" if info.status == 0 else "error %d" % info.status
        except AttributeError:
            return
        except Exception as error:  # noqa: BLE001 - see ask()
            self.cells["fabric.state"] = self.cells["fabric.status"] = _word(error)

    def processes(self) -> list[dict[str, Any]] | None:
        """Return who computes on it; None where the driver does not say."""
        try:
            found = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
            return [
                {"pid": int(one.pid), "memory": None if one.usedGpuMemory is None else "%d MiB" % (one.usedGpuMemory // _MIB)}
                for one in found
            ]
        except Exception:  # noqa: BLE001 - see ask()
            return None

    def load(self) -> str:
        """Return one sample of utilization as csv spells it."""
        try:
            return "%d %%" % self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu
        except Exception as error:  # noqa: BLE001 - see ask()
            return _word(error)


def main() -> int:
    """Print a first line about the driver, one of each GPU, and a last one that says how many there were."""

    def say(**fields: Any) -> None:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()

    try:
        import pynvml  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except Exception as error:  # noqa: BLE001 - a broken installation raises anything
        say(absent=str(error)[:200])
        return 0
    if not hasattr(pynvml, "nvmlMemory_v2"):
        say(absent="the module pynvml is not that of nvidia-ml-py: it lacks memory v2")
        return 0
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
    except Exception as error:  # noqa: BLE001 - the reason is what matters
        say(failed="Failed to initialize NVML: %s" % error)
        return 0
    say(driver_version=driver, count=count)
    cards = []
    for index in range(count):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        except Exception as error:  # noqa: BLE001 - one lost card must not hide the others
            say(index=index, lost="Unable to determine the device handle for GPU %d: %s" % (index, error), word=_word(error))
            continue
        card = Card(pynvml, handle)
        cards.append((index, card))
        card.everything()
        card.cells.update(index=str(index), driver_version=driver)
        say(index=index, cells=card.cells, processes=card.processes())
    time.sleep(SAMPLE_GAP)
    say(samples={str(index): card.load() for index, card in cards})
    say(end=count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
