"""Offline throughput of the engine against transformers' generate, in turns, on prompts and outputs of random length.

    python benchmarks/engine_throughput.py --shape qwen3-0.6b --num-seqs 256 --min-len 100 --max-len 1024

Both get the same random weights, prompts and output lengths, greedy and without end-of-sequence. The engine takes all
requests at once (``LLM.generate``, text included). ``generate`` takes padded batches in order and, being static, computes
each until its longest output is done; only tokens that were asked for count. The result is written after every run, so
that what was measured survives an interruption.
"""

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from common import RESULTS, make_checkpoint, random_prompts, write
from flyball_runtime.core.checkpoint import DTYPE_BYTES
from flyball_runtime.core.model_config import ModelConfig
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.llm import LLM
from machine import environment, median_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Load:
    """Requests: prompts, and how many tokens each one asks for."""

    prompts: list[list[int]]
    output_lens: list[int]

    @classmethod
    def draw(cls, num_seqs: int, min_len: int, max_len: int, seed: int = 0) -> "Load":
        """Lengths of prompts and outputs, both uniform from ``min_len`` to ``max_len``."""
        rng = random.Random(seed)
        input_lens, output_lens = ([rng.randint(min_len, max_len) for _ in range(num_seqs)] for _ in range(2))
        return cls(random_prompts(num_seqs, input_lens, seed=seed), output_lens)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.prompts)) + sum(self.output_lens)


Run = Callable[[Load], None]


def flyball(path: Path, load: Load, args: argparse.Namespace) -> tuple[Run, dict[str, Any]]:
    """The engine with a KV cache for the whole load, or for as much of it as half the GPU's free memory holds."""
    llm = LLM(
        path,
        device=DEVICE,
        dtype=args.dtype,
        max_model_len=2 * args.max_len,
        max_num_seqs=args.num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        kv_cache_memory_bytes=_kv_bytes(path, load, args.dtype),
        enable_prefix_caching=False,
        num_threads=args.num_threads,
    )

    def run(load: Load) -> None:
        sampling = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in load.output_lens]
        outputs = llm.generate(load.prompts, sampling)
        _check_lengths([len(output.token_ids) for output in outputs], load.output_lens)

    info = llm.engine.info
    return run, {
        "kernel_backend": info.kernel_backend,
        "num_kv_blocks": info.num_kv_blocks,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "startup_s": info.startup_s,
    }


def _kv_bytes(path: Path, load: Load, dtype: str) -> int:
    num_tokens = load.num_tokens + 16 * len(load.prompts)  # the last block of each is not full
    config = ModelConfig.from_dir(path)
    wanted = num_tokens * config.num_hidden_layers * config.kv_bytes_per_layer(dtype)  # type: ignore[arg-type]
    return wanted if DEVICE == "cpu" else min(wanted, torch.cuda.mem_get_info()[0] // 2)


def transformers(path: Path, batch: int, dtype: str) -> tuple[Run, dict[str, Any]]:
    """``generate`` over batches of ``batch`` requests, padded on the left."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval().to(DEVICE)
    model.generation_config.eos_token_id = None

    def run(load: Load) -> None:
        for start in range(0, len(load.prompts), batch):
            end = start + batch
            _generate(model, load.prompts[start:end], max(load.output_lens[start:end]))
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    return run, {"batch": batch, "attention": model.config._attn_implementation}


@torch.inference_mode()
def _generate(model: Any, prompts: list[list[int]], num_tokens: int) -> None:
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    output = model.generate(
        ids.to(DEVICE), attention_mask=mask.to(DEVICE), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
    )
    _check_lengths([output.shape[1] - longest], [num_tokens])


def _check_lengths(actual: list[int], wanted: list[int]) -> None:
    if actual != wanted:
        raise RuntimeError(f"asked for {wanted} output tokens, got {actual}: the comparison would not be fair")


def measure(
    peers: dict[str, Run], load: Load, args: argparse.Namespace, save: Callable[[dict[str, Any]], None]
) -> None:
    """Run the peers in turns; a round that would end past the time limit is left out."""
    for run in peers.values():
        run(Load(load.prompts[:4], [8] * 4))  # warm-up
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    start_s = time.perf_counter()
    for index in range(args.rounds):
        round_s = sum(max(times, default=0.0) for times in seconds.values())
        if time.perf_counter() - start_s + round_s > args.time_limit_s:
            print(f"{args.time_limit_s} s are nearly over after {index} of {args.rounds} rounds", flush=True)
            return
        for name, run in peers.items():
            begin_s = time.perf_counter()
            run(load)
            seconds[name].append(time.perf_counter() - begin_s)
            print(f"round {index + 1}: {name} {seconds[name][-1]:.1f} s", flush=True)
            save(figures(seconds, sum(load.output_lens)))


def figures(seconds: dict[str, list[float]], num_output_tokens: int) -> dict[str, Any]:
    """Output tokens per second of each peer that has run, and the ratio of the medians once both have."""
    speeds = {name: median_of(num_output_tokens / s for s in times) for name, times in seconds.items() if times}
    result: dict[str, Any] = {"output_tokens_per_s": speeds}
    if len(speeds) == len(seconds):
        ours, theirs = (speed["median"] for speed in speeds.values())
        result["flyball_over_transformers"] = ours / theirs
    return result


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPE_BYTES)
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--min-len", type=int, default=100, help="shortest prompt and output, in tokens")
    parser.add_argument("--max-len", type=int, default=1024, help="longest prompt and output")
    parser.add_argument("--batch", type=int, default=128, help="requests in a batch of transformers' generate")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--time-limit-s", type=float, default=3600, help="start no round that would end later")
    parser.add_argument("--num-threads", type=int, help="CPU threads; default: all")
    parser.add_argument("--checkpoints", type=Path, default=Path("out/checkpoints"))
    parser.add_argument("--out", type=Path, default=RESULTS / "engine_throughput.json")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.num_threads is not None:
        torch.set_num_threads(args.num_threads)
    load = Load.draw(args.num_seqs, args.min_len, args.max_len)
    path = make_checkpoint(args.checkpoints, args.shape, dtype=args.dtype)
    our_run, ours = flyball(path, load, args)
    their_run, theirs = transformers(path, args.batch, args.dtype)
    facts = {
        "environment": environment() | {"cuda": torch.version.cuda},
        "load": {
            "shape": args.shape,
            "dtype": args.dtype,
            "num_seqs": args.num_seqs,
            "lengths": [args.min_len, args.max_len],
            "num_prompt_tokens": sum(map(len, load.prompts)),
            "num_output_tokens": sum(load.output_lens),
        },
        "flyball": ours,
        "transformers": theirs,
    }
    measure({"flyball": our_run, "transformers": their_run}, load, args, lambda result: write(args.out, facts | result))
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
