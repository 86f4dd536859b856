"""Offline throughput: output tokens per second of one engine on N random prompts, all submitted at once.

    python benchmarks/offline.py flyball|transformers|transformers-cb|vllm|openvino --load 96x128x64 [--load ...] [--runs 3]

A load is NUM x INPUT x OUTPUT tokens. With ``--serve`` loads are read from stdin, one a line, and answered by a line of
JSON each, so that ``versus_vllm.py`` and ``versus_openvino.py`` can run two engines in turns. ``vllm`` and ``openvino`` need
the Python of an environment that has them, and ``openvino`` a model that optimum-cli has exported.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

Run = Callable[[list[list[int]], int], int]
"""Generates so many tokens for each prompt; returns how many came out."""


def flyball(path: Path, args: argparse.Namespace) -> Run:
    from flyball_runtime.core.sampling_params import SamplingParams
    from flyball_runtime.llm import LLM

    settings = {"dtype": args.dtype, "quantization": args.quantization, "max_model_len": args.max_model_len}
    llm = LLM(path, enable_prefix_caching=False, **settings)

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
            output = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
            )
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


def vllm(path: Path, args: argparse.Namespace) -> Run:
    from vllm import LLM, SamplingParams

    llm = LLM(str(path), dtype=args.dtype, max_model_len=args.max_model_len, enable_prefix_caching=False)

    def run(prompts: list[list[int]], num_tokens: int) -> int:
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return run


def openvino(path: Path, args: argparse.Namespace) -> Run:
    import numpy as np
    from openvino import Tensor
    from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

    scheduler = SchedulerConfig()
    scheduler.cache_size = 2  # GB
    scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 256, 2048  # what Flyball has offline
    scheduler.enable_prefix_caching = False
    pipeline = ContinuousBatchingPipeline(str(path), scheduler, "CPU", json.loads(args.openvino_properties))

    def run(prompts: list[list[int]], num_tokens: int) -> int:
        config = GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True, do_sample=False)
        inputs = [Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        handles = [pipeline.add_request(i, prompt, config) for i, prompt in enumerate(inputs)]
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return sum(len(output.generated_ids) for handle in handles for output in handle.read_all())

    return run


ENGINES = {
    "flyball": flyball,
    "transformers": transformers,
    "transformers-cb": transformers_cb,
    "vllm": vllm,
    "openvino": openvino,
}


def measure(run: Run, load: str, seed: int) -> float:
    """Output tokens per second of one load; every run has prompts of its own."""
    num, num_input, num_output = map(int, load.split("x"))
    rng = random.Random(seed)
    prompts = [[rng.randrange(10, 8000) for _ in range(num_input)] for _ in range(num)]
    start_s = time.perf_counter()
    num_tokens = run(prompts, num_output)
    return num_tokens / (time.perf_counter() - start_s)


def answer_loads(run: Run) -> None:
    print("READY", flush=True)
    for seed, line in enumerate(sys.stdin):
        print("RESULT", json.dumps({"tokens_per_s": measure(run, line.strip(), seed)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--checkpoint", type=Path, help="default: a random one of --shape")
    parser.add_argument("--shape", default="small")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none", help="of flyball")
    parser.add_argument("--openvino-properties", default="{}", metavar="JSON")
    parser.add_argument("--load", action="append", metavar="NxINxOUT")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--batch", type=int, default=32, help="batch size of transformers' static batches")
    parser.add_argument("--max-model-len", type=int, default=4096)
    args = parser.parse_args()
    if args.checkpoint is None:
        from common import make_checkpoint  # here: vLLM's environment lacks what it imports

        args.checkpoint = make_checkpoint(Path("out/checkpoints"), args.shape)
    run = ENGINES[args.engine](args.checkpoint, args)
    measure(run, "4x16x4", seed=0)  # warm-up
    if args.serve:
        return answer_loads(run)
    for load in args.load or ["96x128x64"]:
        speeds = [measure(run, load, seed) for seed in range(args.runs)]
        print(f"{args.engine} {load}: {statistics.median(speeds):.0f} output tok/s, median of {len(speeds)}")
    return None


if __name__ == "__main__":
    main()
