"""The pieces of a Llama-type decoder in plain torch, as small as a check needs them: no cache, no fused kernels.

Everything is computed in float32, whatever type the weights are stored in: what is looked for are wrong conventions, and
these must not be confused with rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .files import Unreadable
from .strict_json import count

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    from .config import Config

_YARN_SLOW, _YARN_FAST = 1.0, 32.0


@dataclass(frozen=True)
class Sizes:
    """What a decoder layer's config.json says."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    """Of all norms."""
    rotary: Any
    """Inverse frequencies in radians a token, torch float32 [head_dim / 2]."""
    scale: float
    """Factor of the rotated queries and keys; 1 but for YaRN."""


def read_sizes(config: Config | None, path: str, *, query_rows: int | None, key_rows: int | None) -> Sizes:
    """Return the sizes of a decoder's layers.

    Args:
        config: of the model.
        path: for errors.
        query_rows: rows of q_proj, where they are known: they must be ``heads * head_dim``.
        key_rows: rows of k_proj.

    Raises:
        Unreadable: config.json is missing, does not say enough, contradicts the weights, or asks for another kind of
            rotary embedding than is known.
    """
    if config is None:
        raise Unreadable(path, "there is no config.json beside it to tell its heads", "give the whole folder")
    layer = config.layer
    heads, hidden = count(layer.get("num_attention_heads")), config.hidden_size
    if not heads or not hidden:
        raise Unreadable(path, "its config.json does not say num_attention_heads and hidden_size")
    kv_heads = count(layer.get("num_key_value_heads")) or heads
    head_dim = count(layer.get("head_dim")) or hidden // heads
    if heads % kv_heads or head_dim % 2 or not head_dim:
        raise Unreadable(path, "its config.json has %d heads of %d for %d of keys" % (heads, head_dim, kv_heads))
    if query_rows not in (None, heads * head_dim) or key_rows not in (None, kv_heads * head_dim):
        raise Unreadable(
            path,
            "q_proj and k_proj have %s and %s rows, config.json needs %d and %d"
            % (query_rows, key_rows, heads * head_dim, kv_heads * head_dim),
        )
    eps = _positive(layer.get("rms_norm_eps")) or 1e-6
    rotary, scale = _rotary(layer, head_dim, path)
    return Sizes(heads, kv_heads, head_dim, eps, rotary, scale)


def _rotary(layer: dict[str, Any], head_dim: int, path: str) -> tuple[Any, float]:
    """Return (inverse frequencies, scale) as transformers computes them."""
    import torch

    given = layer.get("rope_parameters") or layer.get("rope_scaling")
    scaling: dict[str, Any] = given if isinstance(given, dict) else {}
    theta = _positive(layer.get("rope_theta")) or _positive(scaling.get("rope_theta")) or 10_000.0
    if theta <= 1:
        raise Unreadable(path, "its config.json has rope_theta %g" % theta)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    plain = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    factor = _positive(scaling.get("factor")) or 1.0
    trained = _positive(scaling.get("original_max_position_embeddings")) or _positive(layer.get("max_position_embeddings")) or 2048.0
    scale = 1.0
    # "dynamic" changes nothing within the trained length, which these checks stay in.
    if kind in ("default", "dynamic", "mrope"):
        result = plain
    elif kind == "linear":
        result = plain / factor
    elif kind == "llama3":
        result = _llama3(plain, factor, trained, scaling)
    elif kind == "yarn":
        result, scale = _yarn(plain, factor, trained, theta, scaling)
    else:
        raise Unreadable(path, "its rotary embedding is of the kind %s, which is not known here" % ascii(kind))
    return result.to(torch.float32), scale


def _llama3(plain: Any, factor: float, trained: float, scaling: dict[str, Any]) -> Any:
    low = _positive(scaling.get("low_freq_factor")) or 1.0
    high = _positive(scaling.get("high_freq_factor")) or 4.0
    turns = trained * plain / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (blend + (1 - blend) / factor)


def _yarn(plain: Any, factor: float, trained: float, theta: float, scaling: dict[str, Any]) -> tuple[Any, float]:
    import torch

    half = len(plain)

    def index(turns: float) -> float:
        return half * math.log(trained / (turns * 2 * math.pi)) / math.log(theta)

    low = max(0.0, math.floor(index(_positive(scaling.get("beta_fast")) or _YARN_FAST)))
    high = min(2.0 * half - 1, math.ceil(index(_positive(scaling.get("beta_slow")) or _YARN_SLOW)))
    stretched = ((torch.arange(half, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    rotary = plain * (1 - stretched) + plain / factor * stretched

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = _positive(scaling.get("attention_factor"))
    own, all_dim = _positive(scaling.get("mscale")), _positive(scaling.get("mscale_all_dim"))
    if given is not None:
        return rotary, given
    return rotary, mscale(own) / mscale(all_dim) if own and all_dim else mscale(1.0)


def _positive(value: Any) -> float | None:
    usable = type(value) in (int, float) and math.isfinite(value) and value > 0
    return float(value) if usable else None


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    """Return ``x`` [..., width] with a root mean square of 1, times ``weight`` [width]."""
    x = x.float()
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.float()


def rotate(x: Any, positions: Any, sizes: Sizes) -> Any:
    """Return ``x`` [..., S, head_dim] rotated by its ``positions`` [S]; the halves are pairs, as in transformers."""
    import torch

    angles = positions[:, None].float() * sizes.rotary.to(x.device)
    cos, sin = angles.cos() * sizes.scale, angles.sin() * sizes.scale
    half = sizes.head_dim // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Layer:
    """One decoder layer.

    Args:
        read: returns a weight by its name below the layer, without ``.weight``; None where there is none.
        sizes: of the layer.
    """

    def __init__(self, read: Callable[[str], Any], sizes: Sizes) -> None:
        self._weights: dict[str, Any] = {}
        self._read = read
        self.sizes = sizes

    def weight(self, name: str) -> Any:
        """Return a weight, None where there is none; read once."""
        if name not in self._weights:
            self._weights[name] = self._read(name)
        return self._weights[name]

    def linear(self, name: str, x: Any) -> Any:
        """Return ``x`` through a projection, with its bias where it has one."""
        out = x @ self.weight(name).float().t()
        bias = self.weight(name + ".bias")
        return out if bias is None else out + bias.float()

    def attention(self, x: Any, step: int, earlier: list[tuple[Any, Any]]) -> Any:
        """Return the attention of ``x`` [B, S, width], causal, and put its keys and values into ``earlier``.

        In drafting step k > 0 the token of position t stands k tokens further on. It sees the keys of the first step up to
        t, and of the other steps only those of its own draft.
        """
        import torch

        sizes, (batch, length, _) = self.sizes, x.shape
        positions = torch.arange(length, device=x.device) + step
        q = rotate(self._heads("q", x, sizes.heads), positions, sizes)
        k = rotate(self._heads("k", x, sizes.kv_heads), positions, sizes)
        v = self._heads("v", x, sizes.kv_heads)
        groups = sizes.heads // sizes.kv_heads
        earlier.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        keys, values = earlier[0]
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ keys.transpose(-1, -2)).masked_fill(future, float("-inf"))
        drafted = [(q * own).sum(-1, keepdim=True) for own, _ in earlier[1:]]
        weights = (torch.cat([scores, *drafted], -1) / math.sqrt(sizes.head_dim)).softmax(-1)
        out = weights[..., :length] @ values
        for index, (_, own) in enumerate(earlier[1:]):
            out = out + weights[..., length + index].unsqueeze(-1) * own
        return self.linear("self_attn.o_proj", out.transpose(1, 2).reshape(batch, length, -1))

    def mlp(self, x: Any) -> Any:
        """Return ``x`` through the gated feed-forward part."""
        import torch

        gate = torch.nn.functional.silu(self.linear("mlp.gate_proj", x))
        return self.linear("mlp.down_proj", gate * self.linear("mlp.up_proj", x))

    def norm(self, name: str, x: Any) -> Any:
        """Return ``x`` through one of the layer's norms."""
        return rms_norm(x, self.weight(name), self.sizes.eps)

    def forward(self, x: Any, step: int = 0, earlier: list[tuple[Any, Any]] | None = None) -> Any:
        """Return ``x`` [B, S, hidden] through the whole layer of a plain Llama."""
        x = x + self.attention(self.norm("input_layernorm", x), step, [] if earlier is None else earlier)
        return x + self.mlp(self.norm("post_attention_layernorm", x))

    def _heads(self, which: str, x: Any, heads: int) -> Any:
        out = self.linear("self_attn.%s_proj" % which, x)
        out = out.view(out.shape[0], out.shape[1], heads, self.sizes.head_dim)
        # Qwen3 norms queries and keys head by head.
        if which != "v" and self.weight("self_attn.%s_norm" % which) is not None:
            out = self.norm("self_attn.%s_norm" % which, out)
        return out.transpose(1, 2)
