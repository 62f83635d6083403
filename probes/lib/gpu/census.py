"""Are all GPUs there? nvidia-smi, lspci and /proc/driver/nvidia each list them; what one lacks is named."""

from __future__ import annotations

from dataclasses import dataclass

from .collect import gpus_of
from .judgement import Judgement
from .missing import NOT_REPORTED, Missing, known

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .collect import Seen
    from .lspci import Device
    from .smi_reading import GpuReading, Trouble

_LOST = (
    "end what still runs on it, then power-cycle the host (a reboot may not be enough); look for Xid 79 in dmesg; "
    "check power, seat and heat; have it replaced if it comes again"
)
INVENTORY = "gpus in hosts.yaml"
GIVEN = "gpus given for this run"
PASSED_ON = ("vfio-pci", "xen-pciback", "pci-stub")


@dataclass(frozen=True)
class Expected:
    """How many GPUs there should be, and who says so."""

    gpus: int
    source: str
    """:data:`INVENTORY` or :data:`GIVEN`."""

    @property
    def correction(self) -> str:
        """What to do where it is the number that is wrong."""
        return "correct %s if it is wrong" % self.source if self.source == INVENTORY else "or ask for another number: --gpus"


def expectation(gpus: int | None, *, from_inventory: bool) -> Expected | None:
    """Return how many GPUs there should be; None where nobody said."""
    return None if gpus is None else Expected(gpus, INVENTORY if from_inventory else GIVEN)


def usable(reading: GpuReading) -> bool:
    """Whether the driver reaches it."""
    named = known(reading.uuid) is not None or (reading.uuid == NOT_REPORTED and known(reading.name) is not None)
    return reading.damaged is None and named and not _says(reading, "gpu-lost")


def _says(reading: GpuReading, reason: str) -> bool:
    return any(isinstance(value, Missing) and value.reason == reason for _, value in reading.metrics())


def count(seen: Seen, expected: Expected | None) -> list[Judgement]:
    """Hold the number of GPUs that the driver reaches against what is expected and against what else is listed."""
    reached = [reading for reading in seen.readings if usable(reading)]
    number, physical = len(reached), gpus_of(seen.devices)
    evidence = (
        "%s: %d, reached %d" % (seen.source, len(seen.readings), number),
        "lspci: %s" % (seen.devices_why or "not asked" if seen.devices is None else len(physical)),
        "/proc/driver/nvidia/gpus: %s" % ("not there" if seen.proc_gpus is None else len(seen.proc_gpus)),
    )
    told = [] if seen.parsed else [*_physical(seen, physical), *_in_proc(seen)]
    if expected is not None and number < expected.gpus:
        message = "the driver reaches %d of %d GPUs" % (number, expected.gpus)
        action = "look at the findings about single cards, at Xid lines in dmesg and at the container's --gpus; %s" % expected.correction
        level = "unknown" if seen.unread or seen.cut or (not seen.readings and seen.cannot_ask is not None) else "fail"
        told.append(
            Judgement(level, "gpu-count", message, None, number, "GPUs", expected.gpus, expected.source, evidence, action)
        )
    elif expected is not None and number > expected.gpus:
        told.append(
            Judgement("degraded", "gpu-count", "%d GPUs where %d are expected" % (number, expected.gpus), None, number, "GPUs", expected.gpus,
                      expected.source, evidence, expected.correction)
        )  # fmt: skip
    elif len(reached) == len(seen.readings) and reached and not told and not seen.unread and not seen.cut:
        told.append(
            Judgement("ok", "gpu-count", "%d NVIDIA GPUs" % number, None, number, "GPUs", None if expected is None else expected.gpus,
                      None if expected is None else expected.source, evidence)
        )  # fmt: skip
    if seen.unread:
        told.append(
            Judgement(
                "unknown", "answer-damaged", "lines of the answer name no GPU and may be about one", None, len(seen.unread), "lines",
                evidence=tuple(seen.unread[:5]), action="run it again; look at nvidia-smi -L on the host",
            )
        )  # fmt: skip
    if seen.repeated > 1:
        told.append(
            Judgement("ok", "readings-repeated", "the answer has up to %d readings of a GPU; the last one of each is judged" % seen.repeated,
                      None, seen.repeated, "readings")
        )  # fmt: skip
    return told


def _physical(seen: Seen, physical: dict[str, Device]) -> list[Judgement]:
    known_to_driver = {known(reading.bus_id) for reading in seen.readings}
    told = []
    for bus, device in sorted(physical.items()):
        if bus in known_to_driver:
            continue
        subject = "gpu ? %s" % bus
        line = "%s %s%s" % (bus, device.name, ", slot %s" % device.slot if device.slot else "")
        if device.lost:
            told.append(Judgement("fail", "gpu-lost", "it has fallen off the bus: lspci reads nothing but ones", subject, evidence=(line,), action=_LOST))
        elif device.driver in PASSED_ON:
            told.append(Judgement("ok", "gpu-passed-on", "it is handed to a virtual machine (%s)" % device.driver, subject, evidence=(line,)))
        elif seen.source == "nothing" or seen.cut:
            # The driver has not spoken, or not to the end: nobody knows whose it is.
            continue
        elif seen.around.container is not None:
            told.append(Judgement("ok", "gpu-not-here", "it is in the machine and not in this container", subject, evidence=(line,)))
        else:
            told.append(
                Judgement(
                    "fail", "gpu-without-driver", "lspci lists it and the driver does not", subject, evidence=(line, "driver in use: %s" % (device.driver or "not shown")),
                    action="look for its bus id in dmesg (Xid 79, RmInitAdapter failed); reboot, then power-cycle the host",
                )
            )  # fmt: skip
    if seen.devices is None or not physical:
        return told
    for reading in seen.readings:
        bus = known(reading.bus_id) or ""
        if bus and bus not in physical and usable(reading):
            told.append(
                Judgement(
                    "degraded", "gpu-not-in-lspci", "the driver lists it and lspci does not", reading.describe(),
                    action="look at lspci -d 10de: and dmesg: it may be about to fall off the bus",
                )
            )  # fmt: skip
        elif bus in physical and physical[bus].lost:
            told.append(Judgement("fail", "gpu-lost", "it has fallen off the bus: lspci reads nothing but ones", reading.describe(), action=_LOST))
    return told


def _in_proc(seen: Seen) -> list[Judgement]:
    known_to_driver = {known(reading.bus_id) for reading in seen.readings}
    if seen.source == "nothing" or seen.cut:
        return []
    return [
        Judgement(
            "fail", "gpu-not-listed", "the kernel module has it and %s does not list it" % seen.source, "gpu ? %s %s" % (bus, information.uuid or ""),
            evidence=("/proc/driver/nvidia/gpus/%s" % bus,), action="look for its bus id in dmesg; reset it or reboot the host",
        )
        for bus, information in sorted((seen.proc_gpus or {}).items())
        if bus not in known_to_driver
    ]  # fmt: skip


def driver(seen: Seen) -> list[Judgement]:
    """Judge the driver as a whole: what its tools complain of, and whether its parts are of one version."""
    told = []
    for trouble in seen.troubles:
        if trouble.scope == "gpu":
            told += _of_one_card(seen, trouble)
            continue
        if trouble.scope == "query" and trouble.code == "field-not-known":
            continue
        if trouble.code == "nvml-version":
            continue
        action = trouble.action
        told.append(
            Judgement(trouble.level, trouble.code, trouble.meaning, None, evidence=(trouble.text, *_loaded(seen)), action=action)
        )
    versions = sorted({version for version in (known(reading.driver_version) for reading in seen.readings) if version is not None})
    if seen.module is not None and versions and not _fits(seen.module.version, versions[0]):
        told.append(
            Judgement(
                "fail", "driver-library-mismatch", "the kernel module is %s, the driver's libraries are %s" % (seen.module.version, versions[0]),
                None, versions[0], None, seen.module.version, "/proc/driver/nvidia/version",
                action="reboot the host or reload the nvidia modules",
            )
        )  # fmt: skip
    if not told and versions:
        shown = "driver %s" % versions[0] + ("" if seen.cuda_version is None else ", CUDA up to %s" % seen.cuda_version)
        told.append(Judgement("ok", "driver", shown, None, versions[0], evidence=_loaded(seen)))
    elif not told and seen.readings:
        told.append(Judgement("unknown", "driver", "nobody says which version the driver has", action="look at nvidia-smi --version"))
    if not seen.readings and not any(item.level in {"fail", "unknown"} for item in told):
        told.append(_no_driver(seen))
    return told


def _of_one_card(seen: Seen, trouble: Trouble) -> list[Judgement]:
    """What the driver's tools say of one card, unless that card's own findings say it."""
    level, meaning = trouble.level, trouble.meaning
    if trouble.bus_id is None:
        subject = None
        if any(not usable(reading) or _says(reading, "reset-required") for reading in seen.readings):
            return []
    else:
        reading = next((reading for reading in seen.readings if known(reading.bus_id) == trouble.bus_id), None)
        subject = "gpu ? %s" % trouble.bus_id if reading is None else reading.describe()
        if reading is not None and trouble.code in {"gpu-lost", "gpu-reset-required"}:
            if not usable(reading) or _says(reading, "reset-required"):
                return []
            level, meaning = "degraded", meaning + "; asked again it answered"
        if reading is not None and trouble.code == "inforom-corrupted" and reading.inforom_valid is False:
            return []
    return [Judgement(level, trouble.code, meaning, subject, evidence=(trouble.text,), action=trouble.action.replace("BUS_ID", trouble.bus_id or "BUS_ID"))]


def _loaded(seen: Seen) -> tuple[str, ...]:
    if seen.module is None:
        return ()
    return ("kernel module %s%s" % (seen.module.version, " (open)" if seen.module.open else ""),)


def _fits(module: str, library: str) -> bool:
    # One of them may leave the last number out.
    return all(int(first) == int(second) for first, second in zip(module.split("."), library.split(".")))


def _no_driver(seen: Seen) -> Judgement:
    physical = gpus_of(seen.devices)
    why = seen.cannot_ask.why if seen.cannot_ask is not None else "nvidia-smi lists none"
    how = "not-found" if seen.cannot_ask is None else seen.cannot_ask.how
    if physical and seen.module is None and how not in {"too-long", "not-started", "not-asked"}:
        return Judgement(
            "fail", "no-driver", "lspci lists %d NVIDIA GPUs and no driver answers for them" % len(physical), None, len(physical), "GPUs",
            evidence=(why, *sorted(physical)[:8]), action="install the driver, or modprobe nvidia; look into dmesg",
        )  # fmt: skip
    if seen.module is not None or seen.proc_gpus:
        return Judgement(
            "unknown", "no-answer", "the driver is loaded and nothing here can ask it", None, evidence=(why, *_loaded(seen)),
            action="put nvidia-smi on the PATH; in a container use the NVIDIA container runtime with the capability utility",
        )  # fmt: skip
    if physical:
        return Judgement(
            "unknown", "no-answer", "lspci lists %d NVIDIA GPUs and nvidia-smi gives no answer about them" % len(physical), None, len(physical), "GPUs",
            evidence=(why, *sorted(physical)[:8]), action="run it on the host: nvidia-smi; type -a nvidia-smi; look into dmesg",
        )  # fmt: skip
    if seen.devices is not None:
        return Judgement("skipped", "no-gpus", "there is no NVIDIA GPU here", None, 0, "GPUs", evidence=(why, "lspci lists none"))
    return Judgement(
        "unknown", "no-answer", "nobody can tell whether there are GPUs here", None, evidence=(why, seen.devices_why or "lspci was not asked"),
        action="install pciutils, or put nvidia-smi on the PATH",
    )  # fmt: skip


