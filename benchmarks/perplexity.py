"""How much quantized linear layers change what a trained model says, beside transformers' own quantized layers.

    pip install torchao optimum-quanto     # what transformers quantizes by; Flyball does not need them
    python benchmarks/perplexity.py [--documents 200] [--seed 4000000]

The model is that of examples/demo_model, the texts are stories of the kind that it was trained on, with a seed that training
did not use. Both sides get the same token ids. For each way to quantize there are the perplexity, and how far the log
probability of a token moves from that of transformers in fp32 (root of the mean square, in nats). The model is small and knows
its texts well, so the second figure tells more.

transformers' output layer stays as it is; Flyball's is rounded too, to 8 bits. Writes results/perplexity.json.
"""

import argparse
import importlib
import importlib.metadata
import math
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import save
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.llm import LLM

DEMO_MODEL = Path(__file__).parents[1] / "examples" / "demo_model"
CHECKPOINT = DEMO_MODEL / "checkpoint"
PACKAGES = ("transformers", "torchao", "optimum-quanto")
OURS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {},
    "int8": {"quantization": "int8"},
    "w8a16": {"quantization": "w8a16"},
    "int4": {"quantization": "int4"},
    "w4a8": {"quantization": "w4a8"},
    "fp8": {"quantization": "fp8", "kernel_backend": "torch"},
    "keys and values in int8": {"kv_cache_dtype": "int8_per_token_head"},
}


def theirs() -> dict[str, dict[str, Any]]:
    """Return what is handed to transformers' ``from_pretrained``, by what of ours it is like and how it is done."""
    import transformers

    ao = importlib.import_module("torchao.quantization")
    groups = {bits: ao.PerGroup(size) for bits, size in (("int8", 128), ("int4", 32))}

    def weights(bits: str) -> Any:
        return ao.IntxWeightOnlyConfig(weight_dtype=getattr(torch, bits), granularity=groups[bits])

    by_torchao = {
        "int8: torchao's Int8DynamicActivationInt8WeightConfig": ao.Int8DynamicActivationInt8WeightConfig(),
        "w8a16: torchao's Int8WeightOnlyConfig": ao.Int8WeightOnlyConfig(),
        "w8a16: torchao's IntxWeightOnlyConfig, groups of 128": weights("int8"),
        "int4: torchao's IntxWeightOnlyConfig, groups of 32": weights("int4"),
        "w4a8: torchao's Int8DynamicActivationIntxWeightConfig, groups of 32": ao.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=groups["int4"]
        ),
    }
    by_quanto = {"w8a16: quanto's int8": "int8", "int4: quanto's int4, groups of 128": "int4"}
    return {
        "float32": {"dtype": torch.float32},
        "bfloat16": {},
        **{name: {"quantization_config": transformers.TorchAoConfig(one)} for name, one in by_torchao.items()},
        **{name: {"quantization_config": transformers.QuantoConfig(weights=one)} for name, one in by_quanto.items()},
    }


def our_logprobs(prompts: list[list[int]], **settings: Any) -> Tensor:
    """Return the log probability of each token but each prompt's first."""
    llm = LLM(CHECKPOINT, **({"dtype": "bfloat16"} | settings))
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0))
    found = [one.logprob for output in outputs for one in (output.prompt_logprobs or [])[1:] if one is not None]
    return torch.tensor(found, dtype=torch.float64)


@torch.inference_mode()
def their_logprobs(prompts: list[list[int]], **settings: Any) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, **({"dtype": torch.bfloat16} | settings))
    found = []
    for prompt in prompts:
        logits = model(torch.tensor([prompt])).logits[0, :-1].double()
        found.append(logits.log_softmax(dim=1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0])
    return torch.cat(found)


def stories(num: int, seed: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    sys.path.insert(0, str(DEMO_MODEL))
    corpus = importlib.import_module("corpus")
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    return [tokenizer(text)["input_ids"] for text in islice(corpus.documents(seed), num)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--seed", type=int, default=4_000_000)
    args = parser.parse_args()
    prompts = stories(args.documents, args.seed)
    exact = their_logprobs(prompts, dtype=torch.float32)

    def figures(logprobs: Tensor) -> dict[str, float]:
        if logprobs.shape != exact.shape:
            raise SystemExit(
                f"{len(logprobs)} log probabilities for {len(exact)} tokens: the sides differ in their prompts."
            )
        return {
            "perplexity": math.exp(-logprobs.mean()),
            "moved_nats": (logprobs - exact).square().mean().sqrt().item(),
        }

    results: dict[str, dict[str, dict[str, float]]] = {"flyball": {}, "transformers": {}}
    sides = (("flyball", our_logprobs, OURS), ("transformers", their_logprobs, theirs()))
    for side, logprobs, ways in sides:
        for name, settings in ways.items():
            found = results[side][name] = figures(logprobs(prompts, **settings))
            print(f"{side:12} {name:70} {found['perplexity']:.4f}  {found['moved_nats']:.4f} nats", flush=True)
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    settings = {"documents": args.documents, "seed": args.seed, "tokens": len(exact), "versions": versions}
    save("perplexity", settings | results)


if __name__ == "__main__":
    main()
