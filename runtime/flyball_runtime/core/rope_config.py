"""Which rotary position embedding a model uses."""

from dataclasses import dataclass
from typing import Literal, cast, get_args

from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.json_fields import JsonFields

MAX_POSITIONS = 2**24
"""Tokens: the longest context that a config.json may name."""

RopeType = Literal["default", "linear", "llama3"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and how it was stretched to longer contexts.

    Attributes:
        theta: base of the wavelengths.
        factor: how many times longer the context became; 1 for ``default``.
        low_freq_factor, high_freq_factor, original_max_position_embeddings: ``llama3`` only: wavelengths above
            original / low are stretched, those below original / high are left alone, the others are interpolated.
    """

    rope_type: RopeType = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0

    @classmethod
    def from_fields(cls, config: JsonFields) -> "RopeConfig":
        """Read ``rope_parameters`` (transformers 5) or ``rope_scaling`` beside ``rope_theta`` (transformers 4)."""
        rope = config.child("rope_scaling" if config.raw("rope_scaling") else "rope_parameters")
        theta = rope.number("rope_theta", config.number("rope_theta", cls.theta))
        _refuse_partial_rotation(config, rope)
        match _rope_type(rope):
            case "default":
                return cls(theta=theta)
            case "linear":
                return cls("linear", theta, rope.number("factor"))
            case "llama3":
                return _llama3(rope, theta)


def _llama3(rope: JsonFields, theta: float) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", f"above low_freq_factor, {low:g}")
    original = rope.integer("original_max_position_embeddings", high=MAX_POSITIONS)
    return RopeConfig("llama3", theta, rope.number("factor"), low, high, original)


def _rope_type(rope: JsonFields) -> RopeType:
    key = "rope_type" if rope.raw("rope_type") is not None else "type"
    value = rope.raw(key)
    if value is None:
        return "default"
    if value not in get_args(RopeType):
        raise ConfigError(
            f"{rope.source}: RoPE type {value!r} is not supported; supported are {', '.join(get_args(RopeType))}. "
            "Use a checkpoint with one of these."
        )
    return cast(RopeType, value)


def _refuse_partial_rotation(config: JsonFields, rope: JsonFields) -> None:
    factor = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if factor != 1.0:
        raise ConfigError(f"{rope.source}: partial_rotary_factor is {factor:g}; only 1 is supported.")
