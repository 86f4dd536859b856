"""Checkpoints of a given shape, random prompts, result files."""

import itertools
import json
import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from machine import environment

RESULTS = Path(__file__).parent / "results"
MACHINE_VARIABLE = "BENCHMARK_MACHINE"
"""If set, names of result files end in it, so that results of several machines stand beside each other."""

SHAPES: dict[str, dict[str, int]] = {
    # 88M parameters with an 8k vocabulary: what a 2-core machine can serve at a useful rate
    "small": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    # 250M parameters in experts, of which a token uses a quarter
    "qwen3-moe": {
        "hidden_size": 768,
        "intermediate_size": 2048,  # of no layer
        "moe_intermediate_size": 256,
        "num_experts": 32,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    # the shape of Qwen3-0.6B
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
}


def make_checkpoint(folder: Path, shape: str, *, dtype: str = "bfloat16", seed: int = 0) -> Path:
    """Write a random-weight checkpoint with a small byte-level tokenizer; an existing one is reused.

    ``qwen3-moe`` is Qwen3 with experts, other ``qwen3-*`` shapes are Qwen3, the rest are Llama.
    """
    path = folder / f"{shape}-{dtype}"
    if (path / "model.safetensors").exists():
        return path
    import torch
    import transformers

    torch.manual_seed(seed)
    family = "Qwen3Moe" if shape == "qwen3-moe" else "Qwen3" if shape.startswith("qwen3") else "Llama"
    config_class, model_class = getattr(transformers, f"{family}Config"), getattr(transformers, f"{family}ForCausalLM")
    defaults = {"vocab_size": 8192, "max_position_embeddings": 16384, "tie_word_embeddings": False}
    sizes = defaults | SHAPES[shape]
    config = config_class(**sizes, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model_class(config).to(getattr(torch, dtype)).save_pretrained(path)
    _make_tokenizer(sizes["vocab_size"]).save_pretrained(path)
    return path


def _make_tokenizer(vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|endoftext|>": 0} | {character: index + 1 for index, character in enumerate(alphabet)}
    # Filler entries, so that every id a random model samples has a text.
    vocabulary |= {f"<{index}>": index for index in range(len(vocabulary), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    return fast


def random_prompts(
    num_prompts: int, lengths: Iterable[int], *, vocab_size: int = 8000, seed: int = 0
) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, vocab_size) for _ in range(length)] for length in itertools.islice(lengths, num_prompts)]


def save(name: str, result: dict[str, Any]) -> Path:
    """Write ``results/NAME.json``, or ``NAME_MACHINE.json`` (MACHINE_VARIABLE), with the environment beside the figures."""
    machine = os.environ.get(MACHINE_VARIABLE)
    path = RESULTS / (f"{name}_{machine}.json" if machine else f"{name}.json")
    write(path, {"environment": environment(), **result})
    print(f"wrote {path.relative_to(RESULTS.parent.parent)}")
    return path


def write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
