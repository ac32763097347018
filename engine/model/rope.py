"""Rotary position embedding (RoFormer, Su et al. 2021) and its stretched variants.

A head's channel pair (i, i + head_dim/2) is turned by the angle position * frequency[i]. Cosine and sine
are computed for the positions of a step, once for all layers; there is no table that could be too short.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.model.config import ModelConfig


def rope_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Frequencies, float32 [head_dim / 2], and the factor on cosine and sine (1.0 except for yarn)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies, 1.0
    if scaling["rope_type"] == "linear":  # position interpolation, Chen et al. 2023
        return frequencies / scaling["factor"], 1.0
    if scaling["rope_type"] == "llama3":
        return _llama3(frequencies, scaling), 1.0
    return _yarn(frequencies, config)


def _llama3(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Llama 3.1: slow channels are slowed by `factor`, fast ones kept, those between blended."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling["factor"]


def _yarn(frequencies: Tensor, config: ModelConfig) -> tuple[Tensor, float]:
    """YaRN, Peng et al. 2023: the blend is a ramp over channels, and attention is sharpened."""
    scaling = config.rope_scaling or {}
    original, factor = scaling["original_max_position_embeddings"], scaling.get("factor")
    if factor is None:
        factor = config.max_position_embeddings / original

    def channel_that_turns(times: float) -> float:
        """The (fractional) channel pair that makes this many turns over the original context."""
        turns = original / (times * 2 * math.pi)
        return config.head_dim * math.log(turns) / (2 * math.log(config.rope_theta))

    first = channel_that_turns(scaling.get("beta_fast") or 32)
    last = channel_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    pairs = torch.arange(config.head_dim // 2, dtype=torch.float32)
    slow = ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
    stretched = slow * frequencies / factor + (1 - slow) * frequencies

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention_factor = temperature(1.0)
        if mscale and all_dim:
            attention_factor = temperature(mscale) / temperature(all_dim)
    return stretched, float(attention_factor)


def rope_cos_sin(
    positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine for `apply_rope`, both [T, 1, head_dim]. positions: int64 [T].

    Angles are float32 whatever the model's dtype: bfloat16 cannot even count to 257.
    """
    angles = positions.float().unsqueeze(-1) * frequencies
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return (
        torch.cat([cos, cos], dim=-1).unsqueeze(1).to(dtype),
        torch.cat([-sin, sin], dim=-1).unsqueeze(1).to(dtype),
    )


def apply_rope(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn heads [T, H, head_dim] in place."""
    tokens, count, width = heads.shape
    swapped = heads.unflatten(-1, (2, width // 2)).flip(-2).view(tokens, count, width)
    heads.mul_(cos).addcmul_(swapped, sin)
