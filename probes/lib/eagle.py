"""An EAGLE-3 drafter that can be run: fc, Llama layers of which the first is fed with two states, norm, head."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .files import Damaged, Unreadable
from .llama import Layer, read_sizes, rms_norm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

    from .drafter import Drafter

MAX_LAYERS = 8


@dataclass(frozen=True)
class Flags:
    """Conventions that config.json says, or leaves to whoever runs the drafter."""

    norm_before_residual: bool = False
    """Whether the first layer's residual is the normed state."""
    norm_output: bool = False
    """Whether a drafting step hands on the state after the final norm."""


class Eagle:
    """A drafter ready to run.

    Args:
        drafter: an open checkpoint; all but its embedding is read into memory in the types that it has there.
        device: torch's name of the device.

    Raises:
        Unreadable: not of a type that is known here.
        Damaged: its shapes contradict each other.
    """

    def __init__(self, drafter: Drafter, device: str) -> None:
        self.path = drafter.path
        self._drafter, self._device = drafter, device
        self._check_type()
        fc = drafter.entry("fc")
        if fc is None or len(fc.shape) != 2:
            raise Unreadable(self.path, "holds no fc, so it is no EAGLE-3 drafter that is fed with several layers")
        self.hidden, self.inputs = fc.shape
        """Width of the drafter; width of what fc takes: all aux layers together."""
        query, key = (drafter.entry("layers.0.self_attn.%s_proj" % which) for which in "qk")
        if query is None or key is None or len(query.shape) != 2:
            raise Unreadable(self.path, "holds no layer with q_proj and k_proj")
        if query.shape[1] != 2 * self.hidden:
            raise Damaged(self.path, "its first layer is %d wide at the entrance, fc gives %d" % (query.shape[1], self.hidden))
        self._sizes = read_sizes(drafter.config, self.path, query_rows=query.shape[0], key_rows=key.shape[0])
        self._layers = [Layer(self._reader(number), self._sizes) for number in range(self._count_layers())]
        self._small = {role: self._tensor(role) for role in ("fc", "fc.bias", "norm", "input_norm", *self._fc_norms())}
        if self._small["norm"] is None:
            raise Unreadable(self.path, "holds no final norm")
        self.head = self._tensor("lm_head")
        """[rows, hidden]; None where the checkpoint has none."""
        self.flags = self._flags()

    def start(self, aux: Any) -> Any:
        """Return the first state [B, S, hidden] from the aux layers [B, S, inputs]."""
        small = self._small
        if small["input_norm"] is not None:
            aux = rms_norm(aux, small["input_norm"], self._sizes.eps)
        parts = self._fc_norms()
        if parts:
            chunks = aux.chunk(len(parts), -1)
            import torch

            aux = torch.cat([rms_norm(x, small[name], self._sizes.eps) for x, name in zip(chunks, parts)], -1)
        out = aux.float() @ small["fc"].float().t()
        return out if small["fc.bias"] is None else out + small["fc.bias"].float()

    def steps(self, aux: Any, embedded: Any, count: int, flags: Flags) -> Iterator[Any]:
        """Yield the normed states [B, S, hidden] of ``count`` drafting steps, all positions at once.

        Args:
            aux: hidden states of the target, [B, S, inputs].
            embedded: embeddings of the tokens [B, S + count - 1, hidden]; the first one is that of the token after the one
                that the first aux is of. As in training the tokens drafted later are the true ones: up to the first wrong
                draft that is what serving does as well.
            count: drafting steps.
            flags: the conventions to go by.
        """
        import torch

        state, length = self.start(aux), aux.shape[1]
        earlier: list[list[tuple[Any, Any]]] = [[] for _ in self._layers]
        for step in range(count):
            first, words = self._layers[0], embedded[:, step : step + length]
            normed = first.norm("hidden_norm", state)
            both = torch.cat([first.norm("input_layernorm", words), normed], -1)
            x = (normed if flags.norm_before_residual else state) + first.attention(both, step, earlier[0])
            x = x + first.mlp(first.norm("post_attention_layernorm", x))
            for layer, seen in zip(self._layers[1:], earlier[1:]):
                x = layer.forward(x, step, seen)
            out = rms_norm(x, self._small["norm"], self._sizes.eps)
            yield out
            state = out if flags.norm_output else x

    def _check_type(self) -> None:
        roles = self._drafter.roles
        if any(role.endswith(("q_a_proj", "kv_a_proj_with_mqa")) for role in roles):
            raise Unreadable(self.path, "is a drafter with latent attention (MLA), which is not run here")
        if any(role.endswith(("weight_packed", "weight_scale", "qweight")) for role in roles):
            raise Unreadable(self.path, "is quantised", "give it in bfloat16")

    def _count_layers(self) -> int:
        numbers = {int(role.split(".")[1]) for role in self._drafter.roles if role.startswith("layers.")}
        if numbers != set(range(len(numbers))) or len(numbers) > MAX_LAYERS:
            raise Unreadable(self.path, "has the layers %s" % sorted(numbers)[:10])
        return len(numbers)

    def _fc_norms(self) -> list[str]:
        return sorted((role for role in self._drafter.roles if role.startswith("fc_norm.")), key=lambda role: int(role[8:]))

    def _reader(self, number: int) -> Any:
        optional = ("bias", "_norm")

        def read(name: str) -> Any:
            tensor = self._tensor("layers.%d.%s" % (number, name))
            if tensor is None and not (name.endswith(optional) and name != "hidden_norm"):
                raise Unreadable(self.path, "its layer %d has no %s" % (number, name))
            return tensor

        return read

    def _tensor(self, role: str) -> Any:
        import torch

        entry = self._drafter.entry(role)
        if entry is None:
            return None
        tensor = torch.from_numpy(self._drafter.read(role).copy())
        # bfloat16 arrives as float32, which takes twice the room.
        return tensor.to(device=self._device, dtype=torch.bfloat16 if entry.dtype == "bfloat16" else tensor.dtype)

    def _flags(self) -> Flags:
        config, flags = self._drafter.config, Flags()
        for name in ("norm_before_residual", "norm_output"):
            value = config.flag(name) if config is not None else None
            if value is not None:
                flags = replace(flags, **{name: value})
        return flags
