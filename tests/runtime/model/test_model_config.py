"""ModelConfig against transformers' own reading of the same config.json, and every way a directory can be refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from checkpoints import ARCHITECTURES, EOS_ID, MORE_ARCHITECTURES, TURN_END_ID, make_checkpoint
from flyball_runtime.core.checkpoint import check_tokenizer_files
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.model_config import SUPPORTED_ARCHITECTURES, ModelConfig
from flyball_runtime.core.rope import RopeConfig

ALL = [*ARCHITECTURES, *(pytest.param(arch, marks=pytest.mark.slow) for arch in MORE_ARCHITECTURES)]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {"rope_type": "longrope", "factor": 2, "short_factor": [1] * 8, "long_factor": [2] * 8}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 16}
MINIMAL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}


@pytest.fixture
def write_config(tmp_path: Path):
    """Write MINIMAL with changes (None removes a field) as config.json; returns its directory."""

    def write(**changes: Any) -> Path:
        fields = {key: value for key, value in {**MINIMAL, **changes}.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return tmp_path

    return write


@pytest.mark.parametrize("arch", ALL)
def test_agrees_with_transformers(arch: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, arch)
    ours, theirs = ModelConfig.from_dir(path), AutoConfig.from_pretrained(path)
    same_names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "max_position_embeddings rms_norm_eps tie_word_embeddings"
    )
    for name in same_names.split():
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    kinds = getattr(theirs, "layer_types", None) or [""] * ours.num_hidden_layers
    for rope, kind in zip(ours.ropes, kinds, strict=True):
        expected = theirs.rope_parameters.get(kind, theirs.rope_parameters)
        assert rope is None or (rope.theta, rope.rope_type) == (expected["rope_theta"], expected["rope_type"])
    assert ours.dtype == "float32"
    assert ours.eos_token_ids == {EOS_ID, TURN_END_ID}  # the second is in generation_config.json only


def test_kv_bytes_per_layer(write_config) -> None:
    config = ModelConfig.from_dir(write_config(num_key_value_heads=2))
    assert config.kv_bytes_per_layer("float32") == 2 * 2 * 16 * 4  # k and v, heads, head_dim, bytes
    assert config.kv_bytes_per_layer("bfloat16") == 2 * 2 * 16 * 2


def test_a_minimal_config_gets_the_defaults_of_transformers(write_config) -> None:
    config = ModelConfig.from_dir(write_config())
    assert config.head_dim == 16
    assert config.rms_norm_eps == 1e-6
    assert config.ropes == (RopeConfig("default", 10_000.0),) * 2
    assert config.dtype == "float32"
    assert config.eos_token_ids == frozenset()
    assert config.sliding_windows == (None, None)
    assert not (config.tie_word_embeddings or config.qkv_bias or config.output_bias or config.mlp_bias)
    assert ModelConfig.from_dir(write_config(architectures=["Qwen3ForCausalLM"])).head_dim == 128


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig("default", 5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeConfig("default", 5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, RopeConfig("linear", 1e4, 4.0)),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE}, RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 64)),
        ({"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5}}, RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 64)),
    ],
)
def test_rope_of_transformers_4_and_5(write_config, fields: dict[str, Any], rope: RopeConfig) -> None:
    assert ModelConfig.from_dir(write_config(**fields)).ropes == (rope, rope)


@pytest.mark.parametrize(
    ("rope_type", "longest", "default"),
    [("linear", 2048, 2048), ("llama3", 256, 256), ("dynamic", 2048, 256), ("yarn", 512, 512)],
)
def test_how_far_scaling_stretches_the_context(write_config, rope_type: str, longest: int, default: int) -> None:
    config = ModelConfig.from_dir(write_config(rope_parameters={**LLAMA3_ROPE, "rope_type": rope_type}))
    assert (config.max_context_len, config.default_context_len) == (longest, default)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_under_either_name(write_config, key: str) -> None:
    assert ModelConfig.from_dir(write_config(**{key: "bfloat16"})).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("architecture", "fields", "windows"),
    [
        ("MistralForCausalLM", {"sliding_window": 8}, (8, 8)),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": False}, (None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8)),
        (
            "Qwen3ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
            (8, None),
        ),
        ("LlamaForCausalLM", {"sliding_window": 8}, (None, None)),
    ],
)
def test_sliding_windows(write_config, architecture: str, fields: dict[str, Any], windows: tuple) -> None:
    assert ModelConfig.from_dir(write_config(architectures=[architecture], **fields)).sliding_windows == windows


OPTIONAL = (
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings"),
    *("sliding_window", "use_sliding_window", "max_window_layers"),
)
MODEL_TYPES = {
    "Gemma3ForCausalLM": "gemma3_text",
    "GptOssForCausalLM": "gpt_oss",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
EXPERTS = {"num_experts": 16, "num_local_experts": 16, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
UNSAID = [(arch, key, "nothing") for arch in SUPPORTED_ARCHITECTURES for key in OPTIONAL]
UNSAID += [(arch, "sliding_window", "null") for arch in SUPPORTED_ARCHITECTURES]
UNSAID += [(f"{family}ForCausalLM", "num_key_value_heads", "null") for family in ("Llama", "Qwen2", "Qwen3")]
UNSAID += [(f"{family}ForCausalLM", "head_dim", "null") for family in ("Llama", "Mistral")]


@pytest.mark.parametrize(("architecture", "key", "said"), UNSAID)
def test_what_config_json_leaves_out_is_what_transformers_takes(
    tmp_path: Path, architecture: str, key: str, said: str
) -> None:
    model_type = MODEL_TYPES.get(architecture, architecture.removesuffix("ForCausalLM").lower())
    sizes = {"num_attention_heads": 32, "num_key_value_heads": 4, "num_hidden_layers": 30, "hidden_size": 64}
    fields = {**MINIMAL, **sizes, "architectures": [architecture], "model_type": model_type, "rms_norm_eps": 1e-5}
    fields |= {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 29, "head_dim": 4}
    fields |= {"tie_word_embeddings": True, **EXPERTS, key: None}
    if said == "nothing":
        del fields[key]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    ours, theirs = ModelConfig.from_dir(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.sliding_windows == their_windows(theirs)


def their_windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    if config.model_type in ("llama", "granite", "olmo2"):
        return (None,) * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in kinds)


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_rope_that_config_json_leaves_out(tmp_path: Path, architecture: str) -> None:
    model_type = MODEL_TYPES.get(architecture, architecture.removesuffix("ForCausalLM").lower())
    fields = {**MINIMAL, **EXPERTS, "architectures": [architecture], "model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    ours, theirs = ModelConfig.from_dir(tmp_path), AutoConfig.from_pretrained(tmp_path)
    kinds = getattr(theirs, "layer_types", None) or [""] * ours.num_hidden_layers
    expected = [theirs.rope_parameters.get(kind, theirs.rope_parameters) for kind in kinds]
    for rope, said in zip(ours.ropes, expected, strict=True):
        assert rope is not None
        assert (rope.rope_type, rope.theta, rope.factor) == (
            said["rope_type"],
            said["rope_theta"],
            said.get("factor", 1.0),
        )


def test_end_of_sequence_ids_of_both_files_count(write_config) -> None:
    path = write_config(eos_token_id=[7, 8])
    (path / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert ModelConfig.from_dir(path).eos_token_ids == {7, 8, 9}


def test_not_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is not a directory"):
        ModelConfig.from_dir(tmp_path / "nowhere")


def test_no_config_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"vocab_size": ', "is not valid JSON"),
        (b"\xff\xfe\x00", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[1, 2]", "holds a JSON list"),
    ],
)
def test_unreadable_json(write_config, name: str, content: bytes, message: str) -> None:
    path = write_config()
    (path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name} {message}"):
        ModelConfig.from_dir(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel", "X" * 10**6]},
            r"architecture 'GPT2LMHeadModel', 'X.{,200} is not supported; supported are "
            rf"{', '.join(SUPPORTED_ARCHITECTURES)}\.$",
        ),
        ({"architectures": None}, "architectures is None; it must be a list with one of LlamaForCausalLM"),
        ({"vocab_size": None}, "has no vocab_size"),
        ({"hidden_size": "64"}, "hidden_size is '64'; it must be a whole number from 1 to 1048576"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a whole number from 1 to 4096"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; it must be"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000; it must be a whole number from 1 to 1048576"),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings is 1099511627776; it must be"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_attention_heads": 5}, "hidden_size is 64; it must be a multiple of num_attention_heads, 5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must be a divisor of num_attention_heads, 4"),
        ({"head_dim": 15}, "head_dim is 15; .* must be even"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be a number above 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be 'silu'"),
        ({"dtype": "int8"}, "dtype is 'int8'; it must be one of bfloat16, float16, float32"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype is 'float8_e4m3fn'; it must be one of bfloat16"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quantization_config ..bitsandbytes..: of quantized checkpoints only W8A8",
        ),
        ({"quantization_config": {"quant_method": "mxfp4"}}, r"\(mxfp4, .*Mxfp4Config\(dequantize=True\)"),
        ({"rope_scaling": {"rope_type": "axial"}}, "RoPE type 'axial' is not supported; .*llama3, yarn, longrope"),
        ({"rope_scaling": {**LONGROPE, "short_factor": [1, -1]}}, r"short_factor is \[1, -1\]; .* numbers above 0"),
        ({"rope_scaling": {**LONGROPE, "long_factor": [1]}}, "long_factor has 1 numbers; it must have 8"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2}, "head_dim": 2},
            "type dynamic would rotate 2 of the 2",
        ),
        ({"rope_scaling": {"type": "linear"}}, r"has no rope_scaling\.factor"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be an object"),
        ({"rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 1.0}}, "high_freq_factor is 1.0; .*above"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; it must be 1 for this"),
        ({**MIXTRAL, "num_experts_per_tok": 17}, "num_experts_per_tok is 17; it must be a whole number from 1 to 16"),
        ({**MIXTRAL, "num_local_experts": None}, "has no num_experts, which this architecture needs"),
        ({**MIXTRAL, "mlp_only_layers": ["0"]}, "mlp_only_layers is .'0'.; it must be a list of layers"),
        ({"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "gelu"}, "hidden_activation is 'gelu'; .*_tanh"),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]},
            "no_rope_layers is .1.; it must be 2 entries",
        ),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; it must be a token id"),
        ({"eos_token_id": [1, -1]}, "eos_token_id is"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["full_attention"]},
            "layer_types is .* it must be 2 entries",
        ),
    ],
)
def test_unsupported_or_malformed_fields(write_config, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dir(write_config(**fields))


def test_tokenizer_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no tokenizer: looked for tokenizer\.json, tokenizer\.model"):
        check_tokenizer_files(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    check_tokenizer_files(tmp_path)
