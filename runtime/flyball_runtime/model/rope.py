"""Cosines and sines of rotary position embedding, computed once per model."""

import math

import torch
from torch import Tensor

from flyball_runtime.core.model_config import RopeConfig


def cos_sin_cache(rope: RopeConfig, head_dim: int, max_len: int, device: torch.device) -> Tensor:
    """``[max_len, head_dim]`` fp32: a position's cosines in the first half of its row, its sines in the second."""
    # on the CPU whatever the device: the angles then have the same bits everywhere
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """``[head_dim / 2]`` fp32, radians per position."""
    inv_freq = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match rope.rope_type:
        case "default":
            return inv_freq
        case "linear":
            return inv_freq / rope.factor
        case "llama3":
            return _stretch_long_wavelengths(inv_freq, rope)


def _stretch_long_wavelengths(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1's scaling: ``kept`` is 1 for waves that repeat often in the original context, 0 for the longest."""
    repeats = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)
    kept = (repeats - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * inv_freq + (1.0 - kept) * inv_freq / rope.factor
