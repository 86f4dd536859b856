"""Offline throughput: output tokens per second of one peer on N random prompts, all submitted at once.

    python benchmarks/offline.py flyball|transformers|transformers-cb --shape small --num 96 --input 128 --output 64

Peers that live in another environment (vLLM) run their own script; ``versus_vllm.py`` pairs them.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

from common import make_checkpoint, random_prompts

Run = Callable[[list[list[int]], int], int]
"""Generates so many tokens for each prompt; returns how many came out."""


def flyball(path: Path, args: argparse.Namespace) -> Run:
    from flyball_runtime.core.sampling import SamplingParams
    from flyball_runtime.llm import LLM

    llm = LLM(path, dtype=args.dtype, max_model_len=args.max_model_len, enable_prefix_caching=False)

    def run(prompts: list[list[int]], num_tokens: int) -> int:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        return sum(len(output.token_ids) for output in llm.generate(prompts, sampling))

    return run


def transformers(path: Path, args: argparse.Namespace) -> Run:
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, args.dtype)).eval().to(device)

    @torch.inference_mode()
    def run(prompts: list[list[int]], num_tokens: int) -> int:
        total = 0
        for start in range(0, len(prompts), args.batch):
            inputs = torch.tensor(prompts[start : start + args.batch], device=device)
            output = model.generate(inputs, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
            total += output.shape[0] * (output.shape[1] - inputs.shape[1])
        return total

    return run


def transformers_cb(path: Path, args: argparse.Namespace) -> Run:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, args.dtype)).eval()

    def run(prompts: list[list[int]], num_tokens: int) -> int:
        config = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        outputs = model.generate_batch(prompts, generation_config=config, progress_bar=False)
        return sum(len(output.generated_tokens) for output in outputs.values())

    return run


PEERS = {"flyball": flyball, "transformers": transformers, "transformers-cb": transformers_cb}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--checkpoints", type=Path, default=Path("out/checkpoints"))
    parser.add_argument("--shape", default="small")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num", type=int, default=96)
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32, help="batch size of transformers' static batches")
    parser.add_argument("--max-model-len", type=int, default=4096)
    args = parser.parse_args()
    run = PEERS[args.peer](make_checkpoint(args.checkpoints, args.shape), args)
    prompts = random_prompts(args.num, [args.input] * args.num)
    run(prompts[:4], 4)  # warm-up
    start_s = time.perf_counter()
    num_tokens = run(prompts, args.output)
    seconds = time.perf_counter() - start_s
    print(
        json.dumps(
            {"peer": args.peer, "num_tokens": num_tokens, "seconds": seconds, "tokens_per_s": num_tokens / seconds}
        )
    )


if __name__ == "__main__":
    main()
