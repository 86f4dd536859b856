"""The angles of rotary position embeddings, one table per way to rotate."""

import math

import torch
from torch import Tensor

from flyball_runtime.core.rope import RopeConfig


def cos_sin_cache(rope: RopeConfig | None, head_dim: int, max_len: int, device: torch.device) -> Tensor:
    """Return ``[max_len, rotary_dim]`` fp32: a position's cosines in the first half of its row, its sines in the second.

    Args:
        rope: None for layers without positions, whose rows are empty.
    """
    if rope is None:
        return torch.empty(max_len, 0, device=device)
    # on the CPU whatever the device: the angles then have the same bits everywhere
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inverse_frequencies(rope, head_dim, max_len))
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor).to(device)


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_len: int) -> Tensor:
    """Return ``[rotary_dim / 2]`` fp32, radians per position.

    Args:
        max_len: longest sequence that will be served. ``dynamic`` and ``longrope`` depend on it: all sequences are rotated
            as the longest is, because the keys of a growing sequence stay in the cache as they were rotated.
    """
    dim = rope.rotary_dim(head_dim)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    inv_freq = 1.0 / rope.theta**exponents
    match rope.rope_type:
        case "default":
            return inv_freq
        case "linear":
            return inv_freq / rope.factor
        case "dynamic":
            return 1.0 / _dynamic_theta(rope, dim, max_len) ** exponents
        case "llama3":
            return _stretch_long_wavelengths(inv_freq, rope)
        case "yarn":
            kept = _kept_by_yarn(rope, dim)
            return kept * inv_freq + (1.0 - kept) * inv_freq / rope.factor
        case "longrope":
            is_long = max_len > rope.original_max_position_embeddings
            return inv_freq / torch.tensor(rope.long_factors if is_long else rope.short_factors)


def _dynamic_theta(rope: RopeConfig, dim: int, max_len: int) -> float:
    """Return the base that stretches the longest wavelength by how much longer than the original context max_len is."""
    original = rope.original_max_position_embeddings
    stretch = rope.factor * max(max_len, original) / original - (rope.factor - 1.0)
    return float(rope.theta * stretch ** (dim / (dim - 2)))


def _stretch_long_wavelengths(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1's scaling: ``kept`` is 1 for waves that repeat often in the original context, 0 for the longest."""
    repeats = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)
    kept = (repeats - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * inv_freq + (1.0 - kept) * inv_freq / rope.factor


def _kept_by_yarn(rope: RopeConfig, dim: int) -> Tensor:
    """Return ``[dim / 2]``: 1 for frequencies that YaRN leaves alone, 0 for those that it stretches by the whole factor."""

    def index(repeats: float) -> float:
        """Return which of the frequencies repeats this often in the original context."""
        wavelength = rope.original_max_position_embeddings / repeats
        return dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index(rope.beta_fast), index(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    return 1.0 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
