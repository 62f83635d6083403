"""What ``nvidia-smi topo`` prints of a box of GPUs: made up in its form, never copied.

The matrix of links (``topo -m``), and one matrix for each question about P2P (``topo -p2p r``, w, n, a, p).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

LEGEND = """
Legend:

  X    = the device itself
  NV#  = a number of NVLinks
"""


def allowed(_first: int, _second: int) -> str:
    """What a driver says that allows everything."""
    return "OK"


def matrix(
    names: Sequence[str],
    link: Callable[[int, int], str],
    *,
    numa: Sequence[int | None] = (),
    nics: Sequence[str] = (),
    pasted: bool = False,
) -> str:
    """Return a ``topo -m``: raw with tabs and escapes, or as it looks when pasted.

    Args:
        names: GPUs, then NICs.
        link: gives the cell of two places.
        numa: NUMA node of each GPU.
        nics: device names of the NICs, for their legend.
        pasted: blanks in the place of tabs and no escapes.
    """
    header = "\t\x1b[4m" + "\t".join([*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]) + "\x1b[0m"
    rows = []
    for place, name in enumerate(names):
        cells = [" X " if place == other else link(place, other) for other in range(len(names))]
        node = numa[place] if place < len(numa) else None
        near = [] if not name.startswith("GPU") else ["N/A", "N/A"] if node is None else [f"{node * 64}-{node * 64 + 63}", str(node)]
        rows.append("\t".join([name, *cells, *([*near, "", "N/A"] if near else ["", "", "", ""])]))
    legend = "".join(f"  NIC{place}: {name}\n" for place, name in enumerate(nics))
    text = "\n".join([header, *rows]) + "\n" + LEGEND + (f"\nNIC Legend:\n\n{legend}" if nics else "")
    if pasted:
        text = text.replace("\x1b[4m", "").replace("\x1b[0m", "").replace("\t", "    ")
    return text


def peers(count: int, word: Callable[[int, int], str] = allowed) -> str:
    """Return one ``topo -p2p``."""
    header = " \t" + "\t".join(f"GPU{place}" for place in range(count)) + "\t"
    rows = [
        f" GPU{a}\t" + "\t".join("X" if a == b else word(a, b) for b in range(count)) + "\t" for a in range(count)
    ]
    return "\n".join([header, *rows, "", "Legend:", "", "  X    = Self", "  OK   = Status Ok", "  CNS  = Chipset not supported", ""])


def two_switches(a: int, b: int) -> str:
    """PIX within each half of eight GPUs, SYS between the halves."""
    return "PIX" if a // 4 == b // 4 else "SYS"


def dgx(a: int, b: int) -> str:
    """Eight GPUs on NVSwitches and eight NICs, pairs of both below a switch each."""
    if a < 8 and b < 8:
        return "NV18"
    first, second = (place % 8 // 2 for place in (a, b))
    return "PIX" if first == second else "NODE" if first // 2 == second // 2 else "SYS"


def no_nvlink(_first: int, _second: int) -> str:
    """What is said of NVLink, and of atomic operations, where GPUs hang on PCIe alone."""
    return "NS"


def topology(gpus: Sequence[dict[str, str]], nics: Sequence[str] = ()) -> dict[str, object]:
    """Return the answers to all questions of ``topo``: ``m``, and ``p2p`` by its letter.

    Cards on NVSwitches are joined by NV18, and each two of them share a switch with two NICs; cards on PCIe hang below a
    switch for each four, one switch on each NUMA node.
    """
    count, half = len(gpus), (len(gpus) + 1) // 2 if len(gpus) > 4 else 4
    switched = any(gpu.get("fabric.state") == "Completed" for gpu in gpus)

    def place(device: int) -> float:
        """Return where along the board a device is, in GPUs."""
        return device if device < count else (device - count) * count / max(1, len(nics))

    def link(a: int, b: int) -> str:
        if switched and max(a, b) < count:
            return "NV18"
        first, second = place(a), place(b)
        if first // half != second // half:
            return "SYS"
        if switched:
            return "PIX" if first // 2 == second // 2 else "NODE"
        return "PIX" if max(a, b) < count else "NODE"

    names = [*(f"GPU{gpu['index']}" for gpu in gpus), *(f"NIC{number}" for number in range(len(nics)))]
    numa = [number // half for number in range(count)]
    words = {"r": allowed, "w": allowed, "n": allowed if switched else no_nvlink, "a": allowed if switched else no_nvlink, "p": allowed}
    return {"m": matrix(names, link, numa=numa, nics=nics), "p2p": {letter: peers(count, word) for letter, word in words.items()}}
