"""The architectures that are served, and what each fixes beyond its config.json. Defaults are transformers'; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]

NormNames = tuple[tuple[str | None, str | None], tuple[str | None, str | None]]
"""Of attention and of the MLP: the norm before it and the norm after it, as the checkpoint calls them."""

NORMS_BEFORE: NormNames = (("input_layernorm", None), ("post_attention_layernorm", None))
NORMS_AFTER: NormNames = ((None, "post_attention_layernorm"), (None, "post_feedforward_layernorm"))
NORMS_AROUND: NormNames = (
    ("input_layernorm", "post_attention_layernorm"),
    ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)


@dataclass(frozen=True)
class MoEFields:
    """Where a family with experts has their size, and what it calls their tensors.

    Attributes:
        intermediate_size: field of config.json with the inner size of an expert.
        experts_per_token: default of num_experts_per_tok.
        normalizes_weights: whether the weights of a token's experts always add up to 1; else norm_topk_prob says so.
        swiglu_limit: default of that field, where experts are stacked in one tensor for each projection and their SwiGLU
            is clamped (gpt-oss); None elsewhere.
        has_shared_expert: whether all tokens use one more expert, through a gate of its own.
        block_name, expert_names: of the tensors; gate, up and down projection.
    """

    intermediate_size: str = "moe_intermediate_size"
    experts_per_token: int = 8
    normalizes_weights: bool = False
    has_shared_expert: bool = False
    swiglu_limit: float | None = None
    block_name: str = "mlp"
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Family:
    """What an architecture fixes, and which optional fields of config.json it honours.

    Attributes:
        bias_fields: ``attention_bias`` gives q, k, v and o a bias; ``mlp_bias`` gives gate, up and down one; ``qkv_bias``
            can take that of q, k and v away.
        attention_bias: default of that field.
        qk_norm: RMSNorm on queries and keys before RoPE: of each head (``head``) or of all together (``width``).
        default_head_dim: head_dim when config.json has none; None is hidden_size / num_attention_heads.
        default_num_kv_heads: num_key_value_heads when config.json has no word of it; None is num_attention_heads.
        window: which layers slide: ``none``; ``all``; ``layer_types``: all but each n-th, where n is sliding_window_pattern
            (Gemma). If use_sliding_window says so, too: the ``upper`` ones; every other of the lower ones (``lower
            alternate``); those without positions (``unrotated``); all (``all if used``). The field layer_types counts
            more than these rules, where a family has it.
        default_window: tokens, when config.json says nothing; None is no window.
        sliding_pattern: n when config.json has no sliding_window_pattern.
        sliding_theta: of layers with a window, where they are rotated in another way than the others.
        default_rope: rope_parameters when config.json has none; None is no scaling.
        partial_rotation: whether partial_rotary_factor is honoured.
        unrotated_interval: each n-th layer has no positions, unless no_rope_layers says otherwise; None: all have them.
        norm_names, norm_offset: see ``ModelConfig``.
        activation_field: where config.json names the activation.
        scales_embeddings: by the square root of hidden_size (Gemma).
        attention_scale_field: a field whose inverse square root scales attention scores (Gemma); None: that of head_dim.
        default_logits_softcap, default_attention_softcap: None where config.json says nothing or null.
        has_logits_softcap, has_attention_softcap: whether the fields are honoured.
        has_sinks: whether each head has one more score, of no key (gpt-oss).
        has_multipliers: Granite's four multipliers.
    """

    bias_fields: frozenset[str] = frozenset()
    qkv_bias: bool = False
    attention_bias: bool = False
    qk_norm: Literal["head", "width"] | None = None
    default_head_dim: int | None = None
    default_num_kv_heads: int | None = None
    window: Literal["none", "all", "layer_types", "upper", "lower alternate", "unrotated", "all if used"] = "none"
    default_window: int | None = 4096
    sliding_pattern: int = 2
    theta: float = 10_000.0
    sliding_theta: float | None = None
    default_rope: Mapping[str, object] | None = None
    partial_rotation: bool = False
    unrotated_interval: int | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    norm_names: NormNames = NORMS_BEFORE
    norm_offset: float = 0.0
    activation: Activation = "silu"
    activation_field: str = "hidden_act"
    scales_embeddings: bool = False
    attention_scale_field: str | None = None
    has_attention_softcap: bool = False
    default_attention_softcap: float | None = None
    has_sinks: bool = False
    has_logits_softcap: bool = False
    default_logits_softcap: float | None = None
    has_multipliers: bool = False
    fused_projections: bool = False
    moe: MoEFields | None = None


_ATTENTION_BIAS = frozenset({"attention_bias"})
_BOTH_BIASES = frozenset({"attention_bias", "mlp_bias"})


_GEMMA = Family(
    bias_fields=_ATTENTION_BIAS,
    default_head_dim=256,
    default_num_kv_heads=4,
    window="layer_types",
    tie_word_embeddings=True,
    norm_names=NORMS_AROUND,
    norm_offset=1.0,
    activation="gelu_tanh",
    activation_field="hidden_activation",
    scales_embeddings=True,
    attention_scale_field="query_pre_attn_scalar",
    has_logits_softcap=True,
)

FAMILIES = {
    "LlamaForCausalLM": Family(bias_fields=_BOTH_BIASES),
    "MistralForCausalLM": Family(default_num_kv_heads=8, window="all"),
    "Qwen2ForCausalLM": Family(qkv_bias=True, default_num_kv_heads=32, window="upper"),
    "Qwen3ForCausalLM": Family(
        bias_fields=_ATTENTION_BIAS, qk_norm="head", default_head_dim=128, default_num_kv_heads=32, window="upper"
    ),
    "Gemma2ForCausalLM": replace(
        _GEMMA, has_attention_softcap=True, default_attention_softcap=50.0, default_logits_softcap=30.0
    ),
    "Gemma3ForCausalLM": replace(_GEMMA, qk_norm="head", theta=1_000_000.0, sliding_theta=10_000.0, sliding_pattern=6),
    "Phi3ForCausalLM": Family(
        window="all", default_window=None, partial_rotation=True, rms_norm_eps=1e-5, fused_projections=True
    ),
    "GraniteForCausalLM": Family(bias_fields=_BOTH_BIASES, has_multipliers=True),
    "Olmo2ForCausalLM": Family(bias_fields=_ATTENTION_BIAS, qk_norm="width", rms_norm_eps=1e-5, norm_names=NORMS_AFTER),
    "SmolLM3ForCausalLM": Family(
        bias_fields=_BOTH_BIASES,
        default_num_kv_heads=4,
        window="unrotated",
        default_window=None,
        theta=2_000_000.0,
        unrotated_interval=4,
        tie_word_embeddings=True,
    ),
    "MixtralForCausalLM": Family(
        default_num_kv_heads=8,
        window="all",
        default_window=None,
        theta=1_000_000.0,
        rms_norm_eps=1e-5,
        moe=MoEFields(
            intermediate_size="intermediate_size",
            experts_per_token=2,
            normalizes_weights=True,
            block_name="block_sparse_moe",
            expert_names=("w1", "w3", "w2"),
        ),
    ),
    "Qwen2MoeForCausalLM": Family(
        bias_fields=frozenset({"qkv_bias"}),
        qkv_bias=True,
        default_num_kv_heads=16,
        window="lower alternate",
        moe=MoEFields(experts_per_token=4, has_shared_expert=True),
    ),
    "Qwen3MoeForCausalLM": Family(
        bias_fields=_ATTENTION_BIAS,
        qk_norm="head",
        default_num_kv_heads=4,
        window="all if used",
        moe=MoEFields(),
    ),
    "GptOssForCausalLM": Family(
        bias_fields=_ATTENTION_BIAS,
        attention_bias=True,
        default_head_dim=64,
        default_num_kv_heads=8,
        window="layer_types",
        default_window=128,
        theta=150_000.0,
        default_rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        rms_norm_eps=1e-5,
        has_sinks=True,
        moe=MoEFields(
            intermediate_size="intermediate_size", experts_per_token=4, normalizes_weights=True, swiglu_limit=7.0
        ),
    ),
}
