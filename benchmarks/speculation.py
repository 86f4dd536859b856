"""What drafts are worth (``--speculative-config``), from n-grams and of a draft model: engines with and without, in turns.

    python benchmarks/speculation.py [--shape small] [--load 1x64x192 ...] [--runs 5]

A load is NUM x INPUT x OUTPUT tokens, all submitted at once. The model computes what one of its shape does, and its weights
are set so that the next token depends on the last one alone, in three kinds of text:

- repeated: a token always has the same successor, and 64 tokens make a circle. Every draft is right.
- ambiguous: two successors, equally likely, among 32 tokens. There is always a draft, and most of its tokens are wrong, or
  behind a wrong one.
- free: 7,000 successors. N-grams hardly ever give a draft, and drafts of a draft model are wrong.

``mixed`` gives half of the clients repeated text and half free text. The draft model has the shape ``tiny`` and knows one
successor of each token: it is always right, half of the time, and never. How often a real one is right depends on the two
models; what a share of accepted tokens is worth is what this shows.

Prompts and seeds are fresh in each run. Both modes answer the same prompts with the same seeds, and their tokens are compared.
``on_over_off`` is the ratio of the medians of output tokens per second, ``accepted`` the share of drafted tokens. Where drafts
do not pay, the engine makes few, which the figures show too. Writes results/speculation.json.
"""

import argparse
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import make_checkpoint, save
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.core.stats import StepOutput
from flyball_runtime.llm import LLM
from modes import Requests, on_over_off

LOADS = ("1x64x192", "8x64x128")
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
DRAFT_MODEL = {"method": "draft_model", "num_speculative_tokens": 4}
DRAFT_SHAPE = "tiny"

REPEATED, AMBIGUOUS, FREE = range(10, 74), range(100, 132), range(1000, 8000)
KINDS = {"repeated": (REPEATED,), "ambiguous": (AMBIGUOUS,), "free": (FREE,), "mixed": (REPEATED, FREE)}
LOGIT = 40.0
"""Of each successor; other tokens have 0, so that they never come."""


def successors(token_id: int) -> Sequence[int]:
    """Return what may follow a token."""
    if token_id in REPEATED:
        return [REPEATED[(REPEATED.index(token_id) + 1) % len(REPEATED)]]
    if token_id in AMBIGUOUS:
        return random.Random(token_id).sample(AMBIGUOUS, 2)
    return FREE


def make_chain(folder: Path, shape: str, dtype: str, most: int | None = None) -> Path:
    """Write a checkpoint whose layers add nothing, and whose head gives the successors; an existing one is reused.

    ``most``: how many successors of a token it knows; None: all.
    """
    import torch
    from safetensors.torch import load_file, save_file

    source = make_checkpoint(folder, shape, dtype=dtype)
    path = folder / f"{source.name}-chain{most or ''}"
    if (path / "model.safetensors").exists():
        return path
    weights = load_file(source / "model.safetensors")
    embedding, head = weights["model.embed_tokens.weight"].zero_(), weights["lm_head.weight"].zero_()
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    hidden_size = embedding.shape[1]  # behind the norm, the one number that is not 0 is its square root
    for at, token_id in enumerate((*REPEATED, *AMBIGUOUS, FREE[0])):
        embedding[token_id, at] = 1.0
        head[torch.tensor(successors(token_id)[:most]), at] = LOGIT / hidden_size**0.5
    embedding[FREE[0] : FREE[-1] + 1] = embedding[FREE[0]].clone()
    path.mkdir()
    for file in source.iterdir():
        if file.suffix == ".json":
            (path / file.name).write_text(file.read_text())
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def make_prompt(kind: range, length: int, rng: random.Random) -> list[int]:
    tokens = [rng.choice(kind)]
    while len(tokens) < length:
        tokens.append(rng.choice(successors(tokens[-1])))
    return tokens


def measure(name: str, llms: dict[str, LLM], kind: str, load: str, runs: int) -> dict[str, Any]:
    num, input_len, output_len = map(int, load.split("x"))

    def requests(index: int) -> Requests:
        rng = random.Random(1000 * index + num)
        prompts = [make_prompt(KINDS[kind][at % len(KINDS[kind])], input_len, rng) for at in range(num)]
        seeds = range(1000 * index, 1000 * index + num)
        return prompts, [SamplingParams(max_tokens=output_len, ignore_eos=True, seed=seed) for seed in seeds]

    counts: Counter[str] = Counter()
    with counted(llms["on"], counts):
        result = on_over_off(f"{name} {kind} {load}", llms, runs, requests)
    return result | {"drafted": counts["drafted"], "accepted": counts["accepted"] / max(1, counts["drafted"])}


@contextmanager
def counted(llm: LLM, counts: Counter[str]) -> Iterator[None]:
    """Count the drafted and the accepted tokens of all steps, the warm-up's too."""
    plain = llm.engine.step

    def step() -> StepOutput:
        output = plain()
        counts["drafted"] += output.stats.num_draft_tokens
        counts["accepted"] += output.stats.num_accepted_tokens
        return output

    llm.engine.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        llm.engine.step = plain  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="small", choices=("small", "tiny"))
    parser.add_argument("--kind", action="append", choices=KINDS, help="of text; default: all")
    parser.add_argument("--load", action="append", help=f"default: {', '.join(LOADS)}")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--checkpoints", type=Path, default=Path("out/checkpoints"))
    args = parser.parse_args()
    path = make_chain(args.checkpoints, args.shape, args.dtype)
    draft = make_chain(args.checkpoints, DRAFT_SHAPE, args.dtype, most=1)

    def engine(config: dict[str, object] | None) -> LLM:
        return LLM(
            path, dtype=args.dtype, max_model_len=2048, kv_cache_memory_bytes=2**29, enable_prefix_caching=False,
            speculative_config=config, num_scheduler_steps=1,  # as in a server
        )  # fmt: skip

    off = engine(None)
    results = {}
    for name, config in {"ngram": NGRAM, "draft_model": DRAFT_MODEL | {"model": str(draft)}}.items():
        llms = {"off": off, "on": engine(config)}
        results[name] = {
            kind: {load: measure(name, llms, kind, load, args.runs) for load in args.load or LOADS}
            for kind in args.kind or KINDS
        }
    settings = {"ngram": NGRAM, "draft_model": DRAFT_MODEL | {"shape": DRAFT_SHAPE}}
    save("speculation", {"shape": args.shape, "dtype": args.dtype, "runs": args.runs, **settings, "results": results})


if __name__ == "__main__":
    main()
