"""What host memory for evicted KV blocks is worth (``--swap-space``): chats whose tokens exceed the KV cache, in turns.

    python benchmarks/swap.py [--shape small] [--chats 24] [--turns 4] [--runs 6]

``off`` and ``on`` are one engine each, with a KV cache that holds a part of all chats. ``larger`` has no host memory either,
but a KV cache of as many tokens as both of ``on`` together: on a CPU, where they are the same memory, that is the other use of
it. A turn of a chat sends all that was said so far and ``--input`` tokens more, and gets ``--output`` tokens; all chats have
their turn at once, then all have the next one. So a chat comes back when the others have taken its blocks. Prompts are fresh in
each run (``--seed``), and all modes answer the same ones, each of them first in every third run. For each mode: prompt tokens
that were found, output tokens a second, and the time to the first token, which includes the wait of one chat for the others.
Writes results/swap.json.
"""

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

from common import make_checkpoint, save
from flyball_runtime.core.request import Request
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.engine.engine import Engine
from flyball_runtime.llm import LLM
from machine import median_of


def run(engine: Engine, prompts: list[list[int]], num_turns: int, input_len: int, output_len: int) -> dict[str, Any]:
    """Let every chat have its turns; return the figures and all that was said."""
    rng = random.Random(prompts[0][0])
    said = [list(prompt) for prompt in prompts]
    num_prompt = num_found = num_host = num_output = 0
    waits_s: list[float] = []
    start_s = time.perf_counter()
    for turn in range(num_turns):
        if turn:
            said = [[*one, *(rng.randrange(10, 8000) for _ in range(input_len))] for one in said]
        sampling = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        submitted_s, num_prompt = time.perf_counter(), num_prompt + sum(map(len, said))
        for index, prompt in enumerate(said):
            failed = engine.submit(Request(request_id=str(index), prompt_token_ids=list(prompt), sampling=sampling))
            if failed is not None:
                raise RuntimeError(failed.message)
        waiting = {str(index) for index in range(len(said))}
        while engine.has_work():
            output = engine.step()
            num_found += output.stats.num_prefix_hit_tokens
            num_host += output.stats.num_host_hit_tokens
            for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
                said[int(request_id)].append(token_id)
                num_output += 1
                if request_id in waiting:
                    waiting.remove(request_id)
                    waits_s.append(time.perf_counter() - submitted_s)
    return {
        "found_share": num_found / num_prompt,
        "host_share": num_host / num_prompt,
        "output_tokens_per_s": num_output / (time.perf_counter() - start_s),
        "ttft_s": statistics.median(waits_s),
        "said": said,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="small", choices=("small", "tiny"))
    parser.add_argument("--chats", type=int, default=24)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--input", type=int, default=128, help="tokens of a turn")
    parser.add_argument("--output", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--kv-tokens", type=int, default=4096, help="tokens that the KV cache holds")
    parser.add_argument("--swap-tokens", type=int, default=32768, help="tokens that host memory holds")
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--checkpoints", type=Path, default=Path("out/checkpoints"))
    args = parser.parse_args()
    path = make_checkpoint(args.checkpoints, args.shape, dtype=args.dtype)
    probe = LLM(path, dtype=args.dtype, max_model_len=2048, kv_cache_memory_bytes=2**28)
    token_bytes = probe.engine.info.kv_block_bytes // probe.engine.info.block_size
    engines = {
        mode: LLM(
            path, dtype=args.dtype, max_model_len=2048, max_num_seqs=8,
            kv_cache_memory_bytes=num_kv * token_bytes, swap_space_bytes=num_swap * token_bytes,
        ).engine
        for mode, (num_kv, num_swap) in {
            "off": (args.kv_tokens, 0),
            "on": (args.kv_tokens, args.swap_tokens),
            "larger": (args.kv_tokens + args.swap_tokens, 0),
        }.items()
    }  # fmt: skip
    figures: dict[str, dict[str, list[float]]] = {mode: {} for mode in engines}
    num_different = 0
    for index in range(args.runs + 1):  # the first is a warm-up
        rng = random.Random(f"{args.seed} {index}")
        prompts = [[rng.randrange(10, 8000) for _ in range(args.input)] for _ in range(args.chats)]
        said = {}
        first = index % len(engines)
        for mode in [*engines][first:] + [*engines][:first]:
            result = run(engines[mode], prompts, args.turns, args.input, args.output)
            said[mode] = result.pop("said")
            for name, value in result.items() if index else ():
                figures[mode].setdefault(name, []).append(value)
        for mode in ("on", "larger"):
            num_different += sum(one != other for one, other in zip(said["off"], said[mode], strict=True))
    medians = {mode: {name: median_of(values) for name, values in one.items()} for mode, one in figures.items()}
    for mode, one in medians.items():
        print(mode, {name: round(value["median"], 4) for name, value in one.items()})
    print(f"{num_different} chats differ")
    save("swap", {**vars(args), "checkpoints": str(args.checkpoints), "modes": medians, "num_different": num_different})


if __name__ == "__main__":
    main()
