"""What it means that a question was not answered, or not to its end."""

from __future__ import annotations

from .run_smi import SMI
from .smi_errors import STATUSES, recognise
from .smi_reading import Trouble

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .collect import Seen
    from .run_smi import Said


def broken_off(said: Said, rows: int) -> Trouble:
    """An exit status that no word of the answer explains: there may be more to tell than was told."""
    ending = said.ending if said.how == "ended" else said.how
    meaning = STATUSES.get(said.status, ending) if said.status is not None else ending
    if not said.command.startswith(SMI):
        return Trouble(
            "answer-incomplete", "%s after %d GPUs: %s" % (ending, rows, said.command), "NVML broke off before it had told of all GPUs: %s" % ending,
            "run on the host: nvidia-smi -L; look into dmesg", "unknown", "host",
        )  # fmt: skip
    return Trouble(
        "nvidia-smi-failed", "%s after %d rows: %s" % (ending, rows, said.command),
        "nvidia-smi failed after it had answered: %s" % meaning, "run it on the host: nvidia-smi; echo $?; look into dmesg", "unknown", "host",
    )  # fmt: skip


def cannot(seen: Seen, said: Said) -> None:
    """Note why the driver gave no list of GPUs."""
    seen.cannot_ask = said
    if said.hung:
        seen.troubles.append(hang(said))
        return
    if said.how != "ended":
        return
    found = [trouble for trouble in map(recognise, (said.out + "\n" + said.err).splitlines()) if trouble is not None]
    seen.troubles += [trouble for trouble in found if trouble not in seen.troubles]
    if not seen.troubles and said.status:
        meaning = STATUSES.get(said.status, "an error that its manual does not list")
        seen.troubles.append(
            Trouble("nvidia-smi-failed", said.why, "nvidia-smi failed: %s" % meaning, "run it on the host: nvidia-smi; look into dmesg", "unknown", "host")
        )


def tell_hang(seen: Seen, said: Said) -> None:
    """Note that a question was not answered in time, if so."""
    if said.hung:
        seen.troubles.append(hang(said))


def hang(said: Said) -> Trouble:
    """Return what a question means that was not answered in time, or not put because an earlier one was not."""
    unkillable = said.pid is not None
    return Trouble(
        "driver-hangs", said.why,
        "the driver does not answer" + (", and what asked it cannot be killed" if unkillable else ""),
        "look at /proc/%s/wchan and /proc/%s/stack and into dmesg; end the jobs, reboot the host" % (said.pid, said.pid) if unkillable
        else "run nvidia-smi on the host: a driver without persistence mode may be slow, one that hangs needs a reboot; look into dmesg",
        "fail" if unkillable else "unknown", "host",
    )  # fmt: skip
