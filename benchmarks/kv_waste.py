"""KV memory that is held and not filled, when chat-like requests go through the real scheduler.

    python benchmarks/kv_waste.py [--trace AzureLLMInferenceTrace_conv.csv.gz] [--num-requests 5000]

The queue never runs empty and the model is free: each request gets exactly the output length that the load says.
After every step: waste = 1 - tokens held / (used blocks * block size), averaged over steps. A used block's unfilled
slots are the sequence's last block and the part of its prompt still to be computed. Beside it, what the same running
sequences would waste if each reserved ``max_model_len`` tokens, as static allocation does, and how many would fit.

Lengths come from a trace (CSV with ContextTokens and GeneratedTokens; Azure Public Dataset, CC-BY 4.0), or else are
drawn from quantiles of the Azure conversation trace of November 2023, prompt and output independently. Writes
results/kv_waste.json.
"""

import argparse
import csv
import gzip
import random
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from common import save
from flyball_runtime.core.request import Request, Sequence, SequenceStatus
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.kv_cache import KVCache
from flyball_runtime.scheduler import Scheduler, SchedulerConfig

Lengths = tuple[int, int]

QUANTILES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
PROMPT_TOKENS = (2, 29, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2734, 4083, 4142, 14050)
OUTPUT_TOKENS = (7, 16, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 601, 1000)


def read_trace(path: Path) -> list[Lengths]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(lines)]


def draw(table: tuple[int, ...], rng: random.Random) -> int:
    share = rng.random()
    i = next(i for i in range(1, len(QUANTILES)) if share <= QUANTILES[i])
    inside = (share - QUANTILES[i - 1]) / (QUANTILES[i] - QUANTILES[i - 1])
    return round(table[i - 1] + inside * (table[i] - table[i - 1]))


def make_sequences(lengths: list[Lengths], max_model_len: int) -> Iterator[Sequence]:
    for number, (num_prompt_tokens, num_output_tokens) in enumerate(lengths):
        prompt = [number] * num_prompt_tokens  # differs from every other prompt in its first token: no block is shared
        sampling = SamplingParams(max_tokens=num_output_tokens, ignore_eos=True)
        request = Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling)
        yield Sequence(request, max_model_len=max_model_len, eos_token_ids=frozenset())


def replay(scheduler: Scheduler, kv: KVCache, sequences: Iterator[Sequence]) -> Iterator[tuple[int, int, int, int]]:
    """Run everything; yield sequences running, tokens held, used blocks and preemptions after each step."""
    unfinished: list[Sequence] = []
    while True:
        while scheduler.num_waiting < 8 and (seq := next(sequences, None)) is not None:
            scheduler.submit(seq)
            unfinished.append(seq)
        plan = scheduler.plan()
        if plan is None:
            return
        scheduler.commit(plan, [7] * sum(plan.samples))
        unfinished = [seq for seq in unfinished if seq.status is not SequenceStatus.FINISHED]
        held = sum(seq.num_computed_tokens for seq in unfinished)
        if scheduler.num_running:
            yield scheduler.num_running, held, kv.counts().used, len(plan.preempted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--num-requests", type=int, default=5000)
    parser.add_argument("--kv-tokens", type=int, default=262_144, help="size of the KV cache")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=16_384)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    args = parser.parse_args()

    rng = random.Random(0)
    if args.trace:
        lengths, source = read_trace(args.trace)[: args.num_requests], args.trace.name
    else:
        lengths = [(draw(PROMPT_TOKENS, rng), draw(OUTPUT_TOKENS, rng)) for _ in range(args.num_requests)]
        source = "built-in quantiles"
    config = SchedulerConfig(
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )
    kv = KVCache(args.kv_tokens // args.block_size, args.block_size)
    scheduler = Scheduler(config, kv)
    steps = list(replay(scheduler, kv, make_sequences(lengths, args.max_model_len)))

    paged = statistics.mean(1 - held / (used * args.block_size) for _, held, used, _ in steps)
    static = statistics.mean(1 - held / (running * args.max_model_len) for running, held, _, _ in steps)
    running = statistics.mean(running for running, _, _, _ in steps)
    num_preempted = sum(preempted for _, _, _, preempted in steps)
    print(f"{len(lengths)} requests ({source}), {len(steps)} steps, KV cache of {args.kv_tokens} tokens")
    print(
        f"blocks of {args.block_size}: waste {paged:.2%}, {running:.0f} sequences running, {num_preempted} preemptions"
    )
    print(
        f"static, {args.max_model_len} tokens each: waste {static:.2%}, "
        f"{args.kv_tokens // args.max_model_len} sequences fit"
    )
    save(
        "kv_waste",
        {
            "lengths": source,
            "requests": len(lengths),
            "steps": len(steps),
            "kv_tokens": args.kv_tokens,
            "paged": {
                "block_size": args.block_size,
                "waste": paged,
                "mean_running": running,
                "preemptions": num_preempted,
            },
            "static": {
                "max_model_len": args.max_model_len,
                "waste": static,
                "fit": args.kv_tokens // args.max_model_len,
            },
        },
    )
    if paged >= 0.04:
        sys.exit(f"KV waste is {paged:.2%}; it must stay below 4 %.")


if __name__ == "__main__":
    main()
