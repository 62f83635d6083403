from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from probes.lib.config import Config
from probes.lib.files import Unreadable
from probes.lib.llama import Sizes, read_sizes, rms_norm, rotate

PLAIN = 10_000.0 ** -(torch.arange(0, 16, 2) / 16)


def sizes(**layer: Any) -> Sizes:
    values = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 1024, **layer}
    return read_sizes(Config("c", "flat", None, None, values), "model", query_rows=None, key_rows=None)


def test_plain() -> None:
    found = sizes()
    assert (found.heads, found.kv_heads, found.head_dim, found.eps, found.scale) == (4, 4, 16, 1e-6, 1.0)
    assert torch.allclose(found.rotary, PLAIN)


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_linear(place: str) -> None:
    assert torch.allclose(sizes(**{place: {"rope_type": "linear", "factor": 4.0}}).rotary, PLAIN / 4)


def test_theta_within_the_parameters() -> None:
    found = sizes(rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    assert torch.allclose(found.rotary, 500.0 ** -(torch.arange(0, 16, 2) / 16))


def test_llama3_stretches_slow_turns_only() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 1024}  # fmt: skip
    found = sizes(rope_scaling=scaling).rotary
    for mine, plain in zip(found.tolist(), PLAIN.tolist(), strict=True):
        turns = 1024 * plain / (2 * math.pi)
        if turns > 4:
            expected = plain
        elif turns < 1:
            expected = plain / 8
        else:
            smooth = (turns - 1) / 3
            expected = (1 - smooth) * plain / 8 + smooth * plain
        assert mine == pytest.approx(expected, rel=1e-5)


def test_yarn() -> None:
    """Numbers worked out by hand from the paper's ramp: fast turns stay, slow ones are divided, attention is scaled."""
    scaling = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
    found = sizes(rope_theta=50_000.0, rope_scaling=scaling)
    plain = 50_000.0 ** -(torch.arange(0, 16, 2) / 16)
    # 8 ln(4096 / (32 * 2 pi)) / ln 50000 = 2.23; 8 ln(4096 / 2 pi) / ln 50000 = 4.79.
    low, high = 2, 5
    ramp = ((torch.arange(8) - low) / (high - low)).clamp(0, 1)
    assert torch.allclose(found.rotary, plain * (1 - ramp) + plain / 64 * ramp)
    assert found.scale == pytest.approx(0.1 * math.log(64) + 1)
    same = sizes(rope_scaling={**scaling, "mscale": 1.0, "mscale_all_dim": 1.0})
    assert same.scale == 1.0


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope', which is not known"),
        ({"num_attention_heads": None}, "does not say"),
        ({"num_key_value_heads": 3}, "for 3 of keys"),
        ({"head_dim": 7}, "4 heads of 7"),
        ({"rope_theta": 1.0}, "rope_theta 1"),
    ],
)
def test_what_is_refused(layer: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unreadable, match=reason):
        sizes(**layer)


def test_no_config() -> None:
    with pytest.raises(Unreadable, match=r"no config\.json"):
        read_sizes(None, "model", query_rows=None, key_rows=None)


def test_norm_and_rotation() -> None:
    x = torch.randn(2, 3, 5, 16) * 7
    assert torch.allclose(rms_norm(x, torch.ones(16), 0.0).pow(2).mean(-1), torch.ones(2, 3, 5))
    turned = rotate(x, torch.arange(5), sizes())
    assert torch.allclose(turned[:, :, 0], x[:, :, 0])
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-4)
    # Only the distance between two tokens matters.
    q, k = torch.randn(16), torch.randn(16)
    dots = [
        float((rotate(q[None], torch.tensor([at + 3]), sizes()) * rotate(k[None], torch.tensor([at]), sizes())).sum()) for at in (0, 40)
    ]
    assert dots[0] == pytest.approx(dots[1], abs=1e-3)
