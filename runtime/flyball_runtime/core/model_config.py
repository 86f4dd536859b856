"""What a Hugging Face checkpoint directory says about its model, read once and checked; no torch."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

from flyball_protocol.quoting import quoted_list
from flyball_runtime.core.checkpoint import ServedModel, config_fields, eos_token_ids, read_dtype
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.families import FAMILIES, Activation, Family, MoEFields, NormNames
from flyball_runtime.core.json_fields import JsonFields
from flyball_runtime.core.quantization import UNQUANTIZED, Stored, read_quantization
from flyball_runtime.core.rope import MAX_POSITIONS, RopeConfig, read_ropes

MAX_LAYERS = 2**12
DEFAULT_MAX_WINDOW_LAYERS = 28

SUPPORTED_ARCHITECTURES = tuple(FAMILIES)


@dataclass(frozen=True)
class SwigluClamp:
    """The gate is at most ``limit``, up is within ``limit`` of 0, and the sigmoid is of ``alpha`` times the gate."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts in place of the MLP.

    Attributes:
        layers: by layer, whether it has one; the others have an MLP.
        intermediate_size: inner size of one expert.
        normalizes_weights: whether the weights of a token's experts are scaled to add up to 1.
        shared_intermediate_size: inner size of the expert that all tokens use; None if there is none.
        clamp: of the experts' SwiGLU; then their weights are stacked and have biases (gpt-oss). None elsewhere.
        block_name, expert_names: see ``MoEFields``.
    """

    layers: tuple[bool, ...]
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalizes_weights: bool
    shared_intermediate_size: int | None
    clamp: SwigluClamp | None
    block_name: str
    expert_names: tuple[str, str, str]


@dataclass(frozen=True)
class ModelConfig(ServedModel):
    """Shape of a decoder-only transformer that Flyball implements: RMSNorm, rotary attention, gated MLPs.

    Attributes:
        head_dim: even, and not always hidden_size / num_attention_heads.
        max_position_embeddings: as config.json says; see ``max_context_len`` for what the model can take.
        ropes: per layer, how queries and keys are rotated; None is not at all.
        qkv_bias, output_bias, mlp_bias: whether those projections add a bias.
        qk_norm: RMSNorm on queries and keys before RoPE, of each ``head`` (Qwen3) or of the whole ``width`` (OLMo 2).
        norm_names: which norms a layer has, before and after attention and MLP.
        norm_offset: added to the weights of norms (Gemma's are relative to 1).
        fused_projections: whether the checkpoint has q, k and v in one tensor, and gate and up.
        embedding_scale, residual_scale: factors on embeddings, and on what attention and MLP add to the residual.
        attention_scale, attention_softcap: factor on attention scores, then their bound: cap * tanh(score / cap).
        has_sinks: whether each head has a learned score of no key, which takes part in the softmax (gpt-oss).
        logits_divisor, logits_softcap: the same of the logits.
        moe: None if all layers have an MLP.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    rms_norm_eps: float
    ropes: tuple[RopeConfig | None, ...]
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: Literal["head", "width"] | None
    norm_names: NormNames
    norm_offset: float
    fused_projections: bool
    activation: Activation
    embedding_scale: float
    residual_scale: float
    attention_scale: float
    attention_softcap: float | None
    has_sinks: bool
    logits_divisor: float
    logits_softcap: float | None
    moe: MoEConfig | None

    @classmethod
    def from_dir(cls, path: str | Path) -> "ModelConfig":
        """Read ``config.json`` and, if there is one, ``generation_config.json``.

        Raises:
            ConfigError: no such directory or file, invalid JSON, or a model this runtime cannot serve; the message
                names the file, the field, its value and what is supported.
        """
        path = Path(path)
        fields = config_fields(path)
        architecture, family = _family(fields)
        _refuse_unsupported(fields, family)
        num_heads = fields.integer("num_attention_heads")
        num_layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
        attention_bias = "attention_bias" in family.bias_fields and fields.boolean(
            "attention_bias", family.attention_bias
        )
        windows = _sliding_windows(fields, family, num_layers)
        head_dim = _head_dim(fields, family, num_heads)
        config = cls(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=_num_kv_heads(fields, family, num_heads),
            head_dim=head_dim,
            max_position_embeddings=fields.integer("max_position_embeddings", high=MAX_POSITIONS),
            rms_norm_eps=fields.number("rms_norm_eps", family.rms_norm_eps),
            ropes=_ropes(fields, family, windows),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", family.tie_word_embeddings),
            qkv_bias=_qkv_bias(fields, family) or attention_bias,
            output_bias=attention_bias,
            mlp_bias="mlp_bias" in family.bias_fields and fields.boolean("mlp_bias", False),
            qk_norm=family.qk_norm,
            sliding_windows=windows,
            norm_names=family.norm_names,
            norm_offset=family.norm_offset,
            fused_projections=family.fused_projections,
            activation=family.activation,
            has_sinks=family.has_sinks,
            moe=_moe(fields, family.moe, num_layers),
            dtype=read_dtype(fields),
            eos_token_ids=eos_token_ids(fields, path),
            stored=_stored(fields, family),
            **_scales(fields, family, head_dim),
        )
        config._check_heads(fields)
        return config

    @property
    def max_context_len(self) -> int:
        """Tokens of prompt and output together that the model can take."""
        return max(rope.context_len(self.max_position_embeddings) for rope in self._rotations())

    @property
    def default_context_len(self) -> int:
        """Tokens to prepare for unless told. Dynamic RoPE rotates otherwise only where a longer context is asked for."""
        is_dynamic = any(rope.rope_type == "dynamic" for rope in self._rotations())
        return self.max_position_embeddings if is_dynamic else self.max_context_len

    def _rotations(self) -> list[RopeConfig]:
        return [rope for rope in self.ropes if rope is not None] or [RopeConfig()]

    def _check_heads(self, fields: JsonFields) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"{fields.source}: num_key_value_heads is {self.num_key_value_heads}; it must be a divisor of "
                f"num_attention_heads, {self.num_attention_heads}."
            )
        if self.head_dim % 2:
            raise ConfigError(f"{fields.source}: head_dim is {self.head_dim}; RoPE rotates pairs, so it must be even.")
        for rope in self._rotations():
            self._check_rotation(rope, fields)

    def _check_rotation(self, rope: RopeConfig, fields: JsonFields) -> None:
        dim = rope.rotary_dim(self.head_dim)
        least = 4 if rope.rope_type == "dynamic" else 2
        if dim % 2 or dim < least:
            raise ConfigError(
                f"{fields.source}: RoPE of type {rope.rope_type} would rotate {dim} of the {self.head_dim} elements of a "
                f"head; it must be an even number from {least}. Check head_dim and partial_rotary_factor."
            )
        for name, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
            if rope.rope_type == "longrope" and len(factors) != dim // 2:
                raise ConfigError(
                    f"{fields.source}: {name} has {len(factors)} numbers; it must have {dim // 2}, one for each pair that is "
                    "rotated."
                )


def is_native(path: Path, model_impl: str) -> bool:
    """Return whether Flyball's own implementation serves a checkpoint; if not, transformers' does.

    Raises:
        ConfigError: config.json cannot be read.
    """
    if model_impl != "auto":
        return model_impl == "flyball"
    named = config_fields(path).raw("architectures")
    return not isinstance(named, list) or any(isinstance(name, str) and name in FAMILIES for name in named)


def _family(fields: JsonFields) -> tuple[str, Family]:
    architectures = fields.raw("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise fields.error("architectures", f"a list with one of {', '.join(SUPPORTED_ARCHITECTURES)}")
    for name in architectures:
        if isinstance(name, str) and name in FAMILIES:
            return name, FAMILIES[name]
    raise ConfigError(
        f"{fields.source}: architecture {quoted_list(architectures)} is not supported; "
        f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}."
    )


_ACTIVATION_NAMES: dict[Activation, str] = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}


def _refuse_unsupported(fields: JsonFields, family: Family) -> None:
    activation = _ACTIVATION_NAMES[family.activation]
    if fields.raw(family.activation_field) not in (None, activation):
        raise fields.error(family.activation_field, repr(activation))
    if fields.raw("use_bidirectional_attention"):
        raise fields.error("use_bidirectional_attention", "false: tokens attend to those before them only")


def _stored(fields: JsonFields, family: Family) -> Stored:
    stored = read_quantization(fields)
    if stored != UNQUANTIZED and family.has_sinks:  # the experts are stacked in one tensor
        raise ConfigError(
            f"{fields.source}: quantized weights of this architecture are not supported. Use the unquantized model, with "
            "--quantization int8."
        )
    return stored


def _qkv_bias(fields: JsonFields, family: Family) -> bool:
    return fields.boolean("qkv_bias", True) if "qkv_bias" in family.bias_fields else family.qkv_bias


class _Scales(TypedDict):
    embedding_scale: float
    residual_scale: float
    attention_scale: float
    attention_softcap: float | None
    logits_divisor: float
    logits_softcap: float | None


def _scales(fields: JsonFields, family: Family, head_dim: int) -> _Scales:
    def multiplier(name: str, default: float = 1.0) -> float:
        return fields.number(name, 1.0) if family.has_multipliers else default

    def softcap(name: str, is_honoured: bool, default: float | None) -> float | None:
        if not is_honoured:
            return None
        if fields.raw(name) is None:
            return None if name in fields else default
        return fields.number(name)

    attended = head_dim if family.attention_scale_field is None else fields.number(family.attention_scale_field, 256.0)
    embedding_scale = math.sqrt(fields.integer("hidden_size")) if family.scales_embeddings else 1.0
    return {
        "embedding_scale": multiplier("embedding_multiplier", embedding_scale),
        "residual_scale": multiplier("residual_multiplier"),
        "attention_scale": multiplier("attention_multiplier", attended**-0.5),
        "attention_softcap": softcap(
            "attn_logit_softcapping", family.has_attention_softcap, family.default_attention_softcap
        ),
        "logits_divisor": multiplier("logits_scaling"),
        "logits_softcap": softcap("final_logit_softcapping", family.has_logits_softcap, family.default_logits_softcap),
    }


def _moe(fields: JsonFields, moe: MoEFields | None, num_layers: int) -> MoEConfig | None:
    if moe is None:
        return None
    # transformers 5 writes num_local_experts
    num_experts = fields.integer("num_local_experts" if "num_local_experts" in fields else "num_experts")
    return MoEConfig(
        layers=_layers_with_experts(fields, num_layers),
        num_experts=num_experts,
        experts_per_token=fields.integer("num_experts_per_tok", moe.experts_per_token, high=num_experts),
        intermediate_size=fields.integer(moe.intermediate_size),
        normalizes_weights=moe.normalizes_weights or fields.boolean("norm_topk_prob", False),
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size") if moe.has_shared_expert else None,
        clamp=_clamp(fields, moe.swiglu_limit),
        block_name=moe.block_name,
        expert_names=moe.expert_names,
    )


def _clamp(fields: JsonFields, limit: float | None) -> SwigluClamp | None:
    if limit is None:
        return None
    return SwigluClamp(alpha=fields.number("swiglu_alpha", 1.702), limit=fields.number("swiglu_limit", limit))


def _layers_with_experts(fields: JsonFields, num_layers: int) -> tuple[bool, ...]:
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise fields.error("mlp_only_layers", "a list of layers, counted from 0")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers))


def _head_dim(fields: JsonFields, family: Family, num_heads: int) -> int:
    hidden_size = fields.integer("hidden_size")
    if fields.raw("head_dim") is None and family.default_head_dim is None and hidden_size % num_heads:
        raise fields.error("hidden_size", f"a multiple of num_attention_heads, {num_heads}, when there is no head_dim")
    return fields.integer("head_dim", family.default_head_dim or hidden_size // num_heads)


def _num_kv_heads(fields: JsonFields, family: Family, num_heads: int) -> int:
    unsaid = "num_key_value_heads" not in fields
    return fields.integer("num_key_value_heads", (unsaid and family.default_num_kv_heads) or num_heads)


def _ropes(fields: JsonFields, family: Family, windows: tuple[int | None, ...]) -> tuple[RopeConfig | None, ...]:
    full, sliding = read_ropes(
        fields,
        theta=family.theta,
        sliding_theta=family.sliding_theta,
        is_partial=family.partial_rotation,
        default=family.default_rope,
    )
    # of a model whose layers differ in RoPE, those that would slide are told apart even where the window is null
    slides = _slides(fields, family, len(windows)) if full != sliding else (False,) * len(windows)
    rotated = _rotated_layers(fields, family, len(windows))
    return tuple(
        (sliding if slide else full) if is_rotated else None for slide, is_rotated in zip(slides, rotated, strict=True)
    )


def _rotated_layers(fields: JsonFields, family: Family, num_layers: int) -> list[bool]:
    if family.unrotated_interval is None:
        return [True] * num_layers
    said = fields.raw("no_rope_layers")  # 1 where there are positions
    if not said:
        interval = fields.integer("no_rope_layer_interval", family.unrotated_interval)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(said, list) or len(said) != num_layers or any(item not in (0, 1) for item in said):
        raise fields.error("no_rope_layers", f"{num_layers} entries (num_hidden_layers), each 0 or 1")
    return [bool(item) for item in said]


def _sliding_windows(fields: JsonFields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    slides = _slides(fields, family, num_layers)
    window = _window(fields, family) if any(slides) else None
    return tuple(window if slide else None for slide in slides)


def _slides(fields: JsonFields, family: Family, num_layers: int) -> tuple[bool, ...]:
    """Return, by layer, whether it has the model's window, if there is one."""
    layers = range(num_layers)
    match family.window:
        case "none":
            return (False,) * num_layers
        case "all":
            return (True,) * num_layers
        case "layer_types":
            pattern = fields.integer("sliding_window_pattern", family.sliding_pattern)
            return _layer_kinds(fields, [(layer + 1) % pattern != 0 for layer in layers])
    if not fields.boolean("use_sliding_window", False):
        return (False,) * num_layers
    border = fields.integer("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, low=0)
    match family.window:
        case "upper":
            return _layer_kinds(fields, [layer >= border for layer in layers])
        case "lower alternate":
            return _layer_kinds(fields, [layer % 2 == 0 and layer < border for layer in layers])
        case "unrotated":
            return _layer_kinds(fields, [not rotated for rotated in _rotated_layers(fields, family, num_layers)])
        case "all if used":
            return (True,) * num_layers


def _window(fields: JsonFields, family: Family) -> int | None:
    """Tokens; None where config.json says null, and the default only where it says nothing."""
    if fields.raw("sliding_window") is None:
        return None if "sliding_window" in fields else family.default_window
    return fields.integer("sliding_window", high=2**31 - 1)


def _layer_kinds(fields: JsonFields, otherwise: list[bool]) -> tuple[bool, ...]:
    """Return, by layer, whether ``layer_types`` says that it slides; ``otherwise`` when config.json has none."""
    kinds = fields.raw("layer_types")
    if kinds is None:
        return tuple(otherwise)
    known, num_layers = ("full_attention", "sliding_attention"), len(otherwise)
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise fields.error("layer_types", f"{num_layers} entries (num_hidden_layers), each one of {', '.join(known)}")
    return tuple(kind == "sliding_attention" for kind in kinds)
