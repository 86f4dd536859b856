"""What a Hugging Face checkpoint directory says about its model, read once and checked; no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.json_fields import JsonFields, read_json_object

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


DType = Literal["bfloat16", "float16", "float32"]
DTYPE_BYTES: dict[DType, int] = {"bfloat16": 2, "float16": 2, "float32": 4}

MAX_LAYERS = 2**12
DEFAULT_SLIDING_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class _Family:
    """What an architecture fixes, and which optional fields of config.json it honours. Defaults are transformers'.

    Attributes:
        bias_fields: ``attention_bias`` gives q, k, v and o a bias; ``mlp_bias`` gives gate, up and down one.
        default_head_dim: head_dim when config.json has none; None is hidden_size / num_attention_heads.
        default_num_kv_heads: num_key_value_heads when config.json has no word of it; None is num_attention_heads.
        window: which layers slide: none, all (Mistral), or the upper ones if config.json says so (Qwen).
    """

    bias_fields: frozenset[str] = frozenset()
    qkv_bias: bool = False
    qk_norm: bool = False
    default_head_dim: int | None = None
    default_num_kv_heads: int | None = None
    window: Literal["none", "all", "upper"] = "none"


_FAMILIES = {
    "LlamaForCausalLM": _Family(bias_fields=frozenset({"attention_bias", "mlp_bias"})),
    "MistralForCausalLM": _Family(default_num_kv_heads=8, window="all"),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, default_num_kv_heads=32, window="upper"),
    "Qwen3ForCausalLM": _Family(
        bias_fields=frozenset({"attention_bias"}),
        qk_norm=True,
        default_head_dim=128,
        default_num_kv_heads=32,
        window="upper",
    ),
}
SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only transformer: RMSNorm, rotary attention with grouped KV heads, SwiGLU.

    Attributes:
        head_dim: elements of one head; even, and not always hidden_size / num_attention_heads.
        max_position_embeddings: as config.json says; see ``max_context_len`` for what the model can take.
        qkv_bias, output_bias, mlp_bias: whether those projections add a bias.
        qk_norm: RMSNorm over head_dim on queries and keys before RoPE (Qwen3).
        sliding_windows: per layer, how many of the latest tokens are attended to (the query's own included);
            None is all of them.
        dtype: what the weights were saved in; float32 when config.json is silent.
        eos_token_ids: ids that end a sequence, from config.json and generation_config.json together.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    dtype: DType
    eos_token_ids: frozenset[int]

    @classmethod
    def from_dir(cls, path: str | Path) -> "ModelConfig":
        """Read ``config.json`` and, if there is one, ``generation_config.json``.

        Raises:
            ConfigError: no such directory or file, invalid JSON, or a model this runtime cannot serve; the message
                names the file, the field, its value and what is supported.
        """
        path = Path(path)
        fields = JsonFields(*_config_json(path))
        architecture, family = _family(fields)
        _refuse_unsupported(fields)
        num_heads = fields.integer("num_attention_heads")
        num_layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
        attention_bias = "attention_bias" in family.bias_fields and fields.boolean("attention_bias", False)
        config = cls(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=_num_kv_heads(fields, family, num_heads),
            head_dim=_head_dim(fields, family, num_heads),
            max_position_embeddings=fields.integer("max_position_embeddings", high=MAX_POSITIONS),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=RopeConfig.from_fields(fields),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            qkv_bias=family.qkv_bias or attention_bias,
            output_bias=attention_bias,
            mlp_bias="mlp_bias" in family.bias_fields and fields.boolean("mlp_bias", False),
            qk_norm=family.qk_norm,
            sliding_windows=_sliding_windows(fields, family, num_layers),
            dtype=_dtype(fields),
            eos_token_ids=_eos_token_ids(fields) | _generation_eos_token_ids(path),
        )
        config._check_heads(fields)
        return config

    @property
    def max_context_len(self) -> int:
        """Tokens of prompt and output together that the model was made for."""
        # linear scaling leaves max_position_embeddings at the length before stretching; llama3 updates it
        stretch = self.rope.factor if self.rope.rope_type == "linear" else 1.0
        return int(self.max_position_embeddings * stretch)

    @property
    def num_parameters(self) -> int:
        """Weights and biases; tied embeddings count once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * self._parameters_per_layer() + self.hidden_size

    def kv_bytes_per_layer(self, dtype: DType) -> int:
        """Bytes of keys and values of one token in one layer."""
        return 2 * self.num_key_value_heads * self.head_dim * DTYPE_BYTES[dtype]

    def _parameters_per_layer(self) -> int:
        hidden, inner = self.hidden_size, self.intermediate_size
        q_size, kv_size = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        weights = hidden * (2 * q_size + 2 * kv_size) + 3 * hidden * inner
        norms = 2 * hidden + (2 * self.head_dim if self.qk_norm else 0)
        biases = self.qkv_bias * (q_size + 2 * kv_size) + self.output_bias * hidden
        return weights + norms + biases + self.mlp_bias * (2 * inner + hidden)

    def _check_heads(self, fields: JsonFields) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"{fields.source}: num_key_value_heads is {self.num_key_value_heads}; it must be a divisor of "
                f"num_attention_heads, {self.num_attention_heads}."
            )
        if self.head_dim % 2:
            raise ConfigError(f"{fields.source}: head_dim is {self.head_dim}; RoPE rotates pairs, so it must be even.")


def check_tokenizer_files(path: str | Path) -> None:
    """Raise ConfigError, naming what was looked for, when a checkpoint directory holds no tokenizer."""
    if not any((Path(path) / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"{path} holds no tokenizer: looked for {', '.join(TOKENIZER_FILES)}. "
            "Copy the tokenizer files that belong to the model into it."
        )


def _config_json(path: Path) -> tuple[Path, dict[str, object]]:
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory. Give a directory with config.json and *.safetensors in it.")
    source = path / "config.json"
    if not source.is_file():
        raise ConfigError(f"{path} has no config.json, so it is not a Hugging Face checkpoint directory.")
    return source, read_json_object(source)


def _family(fields: JsonFields) -> tuple[str, _Family]:
    architectures = fields.raw("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise fields.error("architectures", f"a list with one of {', '.join(SUPPORTED_ARCHITECTURES)}")
    for name in architectures:
        if isinstance(name, str) and name in _FAMILIES:
            return name, _FAMILIES[name]
    raise ConfigError(
        f"{fields.source}: architecture {', '.join(map(str, architectures))} is not supported; "
        f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}."
    )


def _refuse_unsupported(fields: JsonFields) -> None:
    for key in ("quantization_config", "compression_config"):
        if fields.raw(key) is not None:
            raise ConfigError(
                f"{fields.source} has {key}: quantized checkpoints are not supported. "
                "Use the unquantized model in bfloat16, float16 or float32."
            )
    if fields.raw("hidden_act") not in (None, "silu"):
        raise fields.error("hidden_act", "'silu'")


def _head_dim(fields: JsonFields, family: _Family, num_heads: int) -> int:
    hidden_size = fields.integer("hidden_size")
    if fields.raw("head_dim") is None and family.default_head_dim is None and hidden_size % num_heads:
        raise fields.error("hidden_size", f"a multiple of num_attention_heads, {num_heads}, when there is no head_dim")
    return fields.integer("head_dim", family.default_head_dim or hidden_size // num_heads)


def _num_kv_heads(fields: JsonFields, family: _Family, num_heads: int) -> int:
    unsaid = "num_key_value_heads" not in fields
    return fields.integer("num_key_value_heads", (unsaid and family.default_num_kv_heads) or num_heads)


def _sliding_windows(fields: JsonFields, family: _Family, num_layers: int) -> tuple[int | None, ...]:
    match family.window:
        case "none":
            return (None,) * num_layers
        case "all":
            return (_window(fields),) * num_layers
        case "upper":
            window = _window(fields) if fields.boolean("use_sliding_window", False) else None
            slides = _sliding_layers(fields, num_layers)
            return tuple(window if slide else None for slide in slides)


def _window(fields: JsonFields) -> int | None:
    """Tokens; None where config.json says null, and the default only where it says nothing."""
    if "sliding_window" in fields and fields.raw("sliding_window") is None:
        return None
    return fields.integer("sliding_window", DEFAULT_SLIDING_WINDOW, high=2**31 - 1)


def _sliding_layers(fields: JsonFields, num_layers: int) -> list[bool]:
    kinds = fields.raw("layer_types")
    if kinds is None:
        first = fields.integer("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, low=0)
        return [layer >= first for layer in range(num_layers)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise fields.error("layer_types", f"{num_layers} entries (num_hidden_layers), each one of {', '.join(known)}")
    return [kind == "sliding_attention" for kind in kinds]


def _dtype(fields: JsonFields) -> DType:
    key = "dtype" if fields.raw("dtype") is not None else "torch_dtype"
    value = fields.raw(key)
    name = "float32" if value is None else str(value).removeprefix("torch.")
    if name not in get_args(DType):
        raise fields.error(key, f"one of {', '.join(get_args(DType))}")
    return cast(DType, name)


def _generation_eos_token_ids(path: Path) -> frozenset[int]:
    source = path / "generation_config.json"
    if not source.is_file():
        return frozenset()
    return _eos_token_ids(JsonFields(source, read_json_object(source)))


def _eos_token_ids(fields: JsonFields) -> frozenset[int]:
    value = fields.raw("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
        raise fields.error("eos_token_id", "a token id or a list of them")
    return frozenset(ids)
