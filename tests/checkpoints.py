"""Tiny random-weight Hugging Face checkpoints, one per supported architecture, made with transformers' own classes.

They say nothing sensible, but everything that a real checkpoint has is there: config.json, generation_config.json,
safetensors, a byte-level BPE tokenizer and a chat template. transformers itself is then the outside reference.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    GlmConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)

VOCAB_SIZE = 384
BOS, EOS, TURN, TURN_END = "<s>", "</s>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (BOS, EOS, TURN, TURN_END)
BOS_ID, EOS_ID, TURN_ID, TURN_END_ID = range(4)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TEXT = (
    "A flyball governor keeps an engine at its speed: two balls swing out as the shaft turns faster, and their sleeve "
    "closes the valve. Watt fitted one to a steam engine in 1788; Maxwell wrote the theory eighty years later. "
    "When the load grows, the balls fall, the valve opens, and the engine takes more steam. Nobody has to watch it."
)

# Sizes that no two dimensions share, so that a mixed-up axis is a shape error or a wrong number.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    # wide enough that attention is far from uniform: a wrong position or mask then changes the logits
    "initializer_range": 0.2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # with head_dim 16 this leaves wavelengths on both sides of the band and one inside it
    "original_max_position_embeddings": 64,
}

ARCHITECTURES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama2": (LlamaConfig, {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama3": (LlamaConfig, {"rope_parameters": _LLAMA3_ROPE, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}),
    "mistral": (MistralConfig, {"sliding_window": 24, "head_dim": 20}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True, "num_attention_heads": 8, "head_dim": 8}),
    "qwen3": (Qwen3Config, {"head_dim": 24}),
    "qwen3 windows": (  # the first layer attends to all tokens: three groups of one layer each
        Qwen3Config,
        {
            "head_dim": 24,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
        },
    ),
}

_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}

# What differs from ARCHITECTURES in the description of the model only; one fast test each, the deep ones are slow.
MORE_ARCHITECTURES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama dynamic": (LlamaConfig, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "qwen3 yarn": (
        Qwen3Config,
        {
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "gemma2": (
        Gemma2Config,
        {
            "head_dim": 24,
            "num_hidden_layers": 3,
            "sliding_window": 20,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            "head_dim": 24,
            "num_hidden_layers": 3,
            "sliding_window": 20,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": (Phi3Config, {"pad_token_id": 0, "sliding_window": 40}),
    "phi3 longrope": (
        Phi3Config,
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.1, 1.5, 2.0],
                "long_factor": [1.5, 2.0, 4.0, 8.0],
            },
        },
    ),
    "granite": (
        GraniteConfig,
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.4,
            "logits_scaling": 5.0,
            "attention_bias": True,
        },
    ),
    "olmo2": (Olmo2Config, {}),
    "smollm3": (SmolLM3Config, {"pad_token_id": 0, "no_rope_layer_interval": 2, "num_hidden_layers": 3}),
    "mixtral": (MixtralConfig, {"num_local_experts": 5, "sliding_window": 40}),
    "qwen2 moe": (
        Qwen2MoeConfig,
        {**_EXPERTS, "shared_expert_intermediate_size": 56, "mlp_only_layers": [0], "num_hidden_layers": 3},
    ),
    "gpt-oss": (
        GptOssConfig,
        {
            "head_dim": 24,
            "num_hidden_layers": 3,
            "sliding_window": 20,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3 moe": (Qwen3MoeConfig, {**_EXPERTS, "head_dim": 24, "norm_topk_prob": True}),
}

# Left to transformers: Flyball has no code for them.
OTHER_ARCHITECTURES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "starcoder2": (Starcoder2Config, {"sliding_window": 24}),
    "gpt-neox": (GPTNeoXConfig, {}),
    "cohere2": (
        Cohere2Config,
        {
            "pad_token_id": 0,
            "sliding_window": 20,
            "num_hidden_layers": 3,
            "logit_scale": 0.5,  # the default of 1/16 makes tokens nearly as likely as one another
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "glm": (GlmConfig, {"pad_token_id": 0, "head_dim": 24}),
    "olmoe": (OlmoeConfig, {"pad_token_id": 0, "num_experts": 6, "num_experts_per_tok": 2}),
}

ALL_ARCHITECTURES = ARCHITECTURES | MORE_ARCHITECTURES | OTHER_ARCHITECTURES


def make_checkpoint(
    directory: Path,
    arch: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write a checkpoint of ``arch``, a key of ``ALL_ARCHITECTURES``, into ``directory``; returns it.

    ``overrides`` replace fields of the transformers config. A small ``max_shard_size`` ("100KB") gives several
    safetensors files with an index. The same arguments give the same weights.
    """
    config_class, own_sizes = ALL_ARCHITECTURES[arch]
    config = config_class(**{**_SIZES, **own_sizes, **overrides})
    model = _random_model(config, seed).to(dtype)
    model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=[EOS_ID, TURN_END_ID])
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    make_tokenizer().save_pretrained(directory)
    return directory


def poison(directory: Path, token_id: int) -> None:
    """Make the embedding of ``token_id`` NaN in a checkpoint of one file: a sequence that holds it has NaN logits."""
    file = directory / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][token_id] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of VOCAB_SIZE entries with a chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_bpe_json()),
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[TURN, TURN_END],
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )


def _random_model(config: PreTrainedConfig, seed: int) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        # transformers starts norms at one and biases at zero, where leaving them out would go unnoticed
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model.eval()


@cache
def _bpe_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    return str(tokenizer.to_str())
