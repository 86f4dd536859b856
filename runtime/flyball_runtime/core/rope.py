"""Rotary position embeddings (Su et al. 2021) as config.json describes them; no torch. The angles: ``model/rope.py``."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.json_fields import JsonFields

MAX_POSITIONS = 2**24
"""Tokens of the longest context that a config.json may have."""

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True)
class RopeConfig:
    """How the heads of a layer are rotated, and how the rotation was stretched to longer contexts.

    Attributes:
        theta: base of the wavelengths.
        factor: how many times longer the context became; 1 for ``default``.
        low_freq_factor, high_freq_factor: ``llama3`` only: wavelengths above original / low are stretched, those below
            original / high are left alone, the others are interpolated.
        original_max_position_embeddings: tokens of the context before it became longer.
        attention_factor: cosines and sines are multiplied by it (``yarn``, ``longrope``).
        beta_fast, beta_slow, truncate: ``yarn`` only: wavelengths that fit more often than beta_fast into the original
            context are left alone, those that fit less often than beta_slow are stretched; truncate rounds the borders.
        short_factors, long_factors: ``longrope`` only: factors that stretch each wavelength, ``rotary_dim / 2`` numbers;
            short ones for contexts up to the original, long ones beyond.
        rotated_share: how much of a head is rotated; the rest passes through.
    """

    rope_type: RopeType = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    rotated_share: float = 1.0

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many elements of a head are rotated."""
        return int(head_dim * self.rotated_share)

    def context_len(self, max_position_embeddings: int) -> int:
        """Return the longest context in tokens, given ``max_position_embeddings`` of config.json."""
        match self.rope_type:
            case "linear" | "dynamic":  # max_position_embeddings is the length before stretching
                return int(max_position_embeddings * self.factor)
            case "yarn":  # checkpoints have either length in that field
                return int(self.original_max_position_embeddings * self.factor)
            case _:
                return max_position_embeddings


def read_ropes(
    config: JsonFields,
    *,
    theta: float,
    sliding_theta: float | None,
    is_partial: bool,
    default: Mapping[str, object] | None = None,
) -> tuple[RopeConfig, RopeConfig]:
    """Return the RoPE of layers that attend to all tokens, and that of layers with a sliding window.

    Reads ``rope_parameters`` (transformers 5), flat or one object per kind of layer, or ``rope_scaling`` beside
    ``rope_theta`` (transformers 4).

    Args:
        theta, sliding_theta: used if config.json has none. Without a ``sliding_theta`` both kinds are rotated alike.
        default: rope_parameters to use if config.json has none.
        is_partial: whether the architecture has ``partial_rotary_factor``.
    Raises:
        ConfigError: a type that is not supported, or a field that is missing or out of range.
    """
    rope = config.child("rope_scaling" if config.raw("rope_scaling") else "rope_parameters", default)
    theta = config.number("rope_theta", theta)
    if sliding_theta is not None:
        sliding_theta = config.number("rope_local_base_freq", sliding_theta)
    if "full_attention" in rope or "sliding_attention" in rope:
        return (
            _read_rope(config, rope.child("full_attention"), theta, is_partial),
            _read_rope(config, rope.child("sliding_attention"), sliding_theta or theta, is_partial),
        )
    full = _read_rope(config, rope, theta, is_partial)
    return full, full if sliding_theta is None else RopeConfig(theta=sliding_theta)


def _read_rope(config: JsonFields, rope: JsonFields, theta: float, is_partial: bool) -> RopeConfig:
    share = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if share != 1.0 and not (is_partial and share < 1.0):
        accepted = "from 0 to 1" if is_partial else "1 for this architecture"
        raise ConfigError(f"{rope.source}: partial_rotary_factor is {share:g}; it must be {accepted}.")
    return replace(_scaled(config, rope, rope.number("rope_theta", theta)), rotated_share=share)


def _scaled(config: JsonFields, rope: JsonFields, theta: float) -> RopeConfig:
    match _rope_type(rope):
        case "default":
            return RopeConfig(theta=theta)
        case "linear":
            return RopeConfig("linear", theta, rope.number("factor"))
        case "dynamic":
            original = _max_positions(config)
            return RopeConfig("dynamic", theta, rope.number("factor"), original_max_position_embeddings=original)
        case "llama3":
            return _llama3(config, rope, theta)
        case "yarn":
            return _yarn(config, rope, theta)
        case "longrope":
            return _longrope(config, rope, theta)


def _rope_type(rope: JsonFields) -> RopeType:
    key = "rope_type" if rope.raw("rope_type") is not None else "type"
    value = rope.raw(key)
    if value is None:
        return "default"
    if value == "su":  # longrope's former name
        return "longrope"
    if value not in get_args(RopeType):
        raise ConfigError(
            f"{rope.source}: RoPE type {value!r} is not supported; supported are {', '.join(get_args(RopeType))}. "
            "Use a checkpoint with one of these."
        )
    return cast(RopeType, value)


def _llama3(config: JsonFields, rope: JsonFields, theta: float) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", f"above low_freq_factor, {low:g}")
    return RopeConfig("llama3", theta, rope.number("factor"), low, high, _original(config, rope))


def _yarn(config: JsonFields, rope: JsonFields, theta: float) -> RopeConfig:
    """YaRN (Peng et al. 2023)."""
    original = _original(config, rope)
    factor = rope.number("factor", _max_positions(config) / original)
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original_max_position_embeddings=original,
        attention_factor=rope.number("attention_factor", _yarn_attention_factor(rope, factor)),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.boolean("truncate", True),
    )


def _yarn_attention_factor(rope: JsonFields, factor: float) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if rope.raw("mscale") and rope.raw("mscale_all_dim"):
        return scale(rope.number("mscale")) / scale(rope.number("mscale_all_dim"))
    return scale(1.0)


def _longrope(config: JsonFields, rope: JsonFields, theta: float) -> RopeConfig:
    """LongRoPE (Ding et al. 2024)."""
    original = _original(config, rope)
    factor = rope.number("factor", _max_positions(config) / original)
    is_longer = factor > 1.0 and original > 1
    stretch = math.sqrt(1.0 + math.log(factor) / math.log(original)) if is_longer else 1.0
    return RopeConfig(
        "longrope",
        theta,
        factor,
        original_max_position_embeddings=original,
        attention_factor=rope.number("attention_factor", stretch),
        short_factors=rope.numbers("short_factor"),
        long_factors=rope.numbers("long_factor"),
    )


def _max_positions(config: JsonFields) -> int:
    return config.integer("max_position_embeddings", high=MAX_POSITIONS)


def _original(config: JsonFields, rope: JsonFields) -> int:
    """Return the original context in tokens; a field outside the RoPE object takes precedence, as in transformers."""
    outside = config.raw("original_max_position_embeddings") is not None
    default = None if outside else _max_positions(config)
    return (config if outside else rope).integer("original_max_position_embeddings", default, high=MAX_POSITIONS)
