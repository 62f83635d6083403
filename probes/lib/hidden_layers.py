"""The target's own hidden states of a few tokens, computed layer by layer out of its files: which layer is which?

Works for dense targets of the Llama kind. No more than one layer's weights is in memory at any time; what a token's state
is depends on earlier tokens only, so the beginning of a sample is enough.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .files import Unreadable
from .hidden_scan import cosines, normed
from .llama import Layer, read_sizes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from .samples import Sample
    from .target import Target

TOKENS = 64
"""Tokens of a sample that are run through the target."""
MAX_BYTES = 64 << 30
"""Bytes of weights that are read for it."""
OFFSETS = (0, 1, -1, -2)
"""By how many tokens states may be moved against the tokens; the first one is right."""
_KINDS = ("llama", "mistral", "qwen2", "qwen3")
_ENOUGH = 0.97


@dataclass(frozen=True)
class Match:
    """The layer that a part of a sample comes from."""

    layer: int | None
    """The state is the input of this layer; the number of all layers stands for the last one's output. None: no layer's."""
    cosine: float
    """Mean over the tokens, with the best layer."""
    offset: int
    """Tokens by which the states are early (above 0) or late."""
    normed: bool = False
    """Whether it is the last layer's output after the final norm."""


def match_layers(target: Target, sample: Sample, tell: Callable[[int, int], None]) -> dict[str, Match]:
    """Return for each part of ``sample`` the layer that it comes from.

    Raises:
        Unreadable: the target is of another kind, too large, or there is no torch.
    """
    import numpy as np

    if sample.ids is None or sample.width != target.head().columns:
        raise Unreadable(sample.path, "holds no tokens, or states of another width than the target's")
    count = min(TOKENS, sample.tokens, len(sample.ids))
    at = np.arange(count)
    parts = {part.name: part.take(at) for part in sample.parts}
    best: dict[str, tuple[float, Match]] = {}
    weight = target.norm_weight()
    for layer, total, states in _states(target, sample.ids[:count]):
        tell(layer, total)
        forms = [(states, False)]
        if layer == total and weight is not None:
            forms.append((normed(states, weight, target.norm_eps), True))
        for form, is_normed in forms:
            for name, part in parts.items():
                for offset in OFFSETS:
                    # The first token's state is unlike all others, and the same in many layers.
                    low, high = max(1, 1 - offset), min(count, count - offset)
                    if high - low < 4:
                        continue
                    ours, theirs = part[low:high], form[low + offset : high + offset]
                    error = float(np.linalg.norm(ours - theirs) / max(float(np.linalg.norm(theirs)), 1e-9))
                    if name not in best or error < best[name][0]:
                        best[name] = (error, Match(layer, float(cosines(ours, theirs).mean()), offset, is_normed))
    return {name: match if match.cosine >= _ENOUGH else Match(None, match.cosine, 0) for name, (_, match) in best.items()}


def _states(target: Target, ids: NDArray[np.int64]) -> Iterator[tuple[int, int, NDArray[np.float32]]]:
    """Yield (k, number of layers, input of layer k) and last the output of the last layer."""
    import numpy as np

    try:
        import torch
    except ImportError:
        raise Unreadable(target.path, "its layers cannot be run: there is no torch on this host") from None
    kind = target.config.layer.get("model_type") if target.config else None
    if kind not in _KINDS:
        raise Unreadable(target.path, "is a model of the kind %s; only %s are run here" % (ascii(kind), ", ".join(_KINDS)))
    prefix, total = _layers(target)
    names = set(target.checkpoint.names())

    def entry(name: str) -> Any:
        return target.checkpoint.entry(name) if name in names else None

    shapes = {which: entry("%s0.self_attn.%s_proj.weight" % (prefix, which)) for which in "qk"}
    size = sum(entry(name).elements * 2 for name in names if name.startswith(prefix + "0.")) * total
    if size > MAX_BYTES or any(shape is None for shape in shapes.values()) or entry(prefix + "0.mlp.gate_proj.weight") is None:
        raise Unreadable(target.path, "its layers are of another kind than is run here, or take %d GB" % (size >> 30))
    sizes = read_sizes(target.config, target.path, query_rows=shapes["q"].shape[0], key_rows=shapes["k"].shape[0])
    x = torch.from_numpy(np.asarray(target.embedding().take(ids), np.float32))[None]
    for number in range(total):
        yield number, total, x[0].numpy()
        with torch.no_grad():
            x = Layer(_reader(target, names, "%s%d." % (prefix, number)), sizes).forward(x)
    yield total, total, x[0].numpy()


def _layers(target: Target) -> tuple[str, int]:
    """Return (what stands before the numbers of the decoder layers, how many there are)."""
    found: dict[str, set[int]] = {}
    for name in target.checkpoint.names():
        match = re.match(r"((?:language_model\.|model\.|text_model\.)*layers\.)(\d{1,4})\.self_attn\.", name)
        if match:
            found.setdefault(match.group(1), set()).add(int(match.group(2)))
    for prefix, numbers in found.items():
        if numbers == set(range(len(numbers))) and target.layers in (None, len(numbers)):
            return prefix, len(numbers)
    raise Unreadable(target.path, "its decoder layers are not all there, or not where they are looked for")


def _reader(target: Target, names: set[str], prefix: str) -> Callable[[str], Any]:
    import torch

    def read(name: str) -> Any:
        full = prefix + name if name.endswith(".bias") else prefix + name + ".weight"
        return torch.from_numpy(target.checkpoint.read(full).copy()) if full in names else None

    return read
