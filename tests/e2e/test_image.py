"""The image runs what the checkout runs on the same machine: no figure is published that its users do not get."""

import asyncio
import random
import re
import string
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from checkpoints import make_checkpoint
from e2e_kit.answers import Answer, Ask
from e2e_kit.models import SERVED_NAME, from_folder
from e2e_kit.node import Node
from e2e_kit.work import new_session
from flyball_kernels.cpu import build
from replicas import replica

SIZES = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
"""The 88 million parameters of the benchmarks, less their vocabulary."""
NUM_THREADS = "--num-threads=2"
ROUNDS, NUM_REQUESTS, PROMPT_CHARACTERS, OUTPUT_TOKENS = 5, 16, 64, 24
CHOICES = r"C\+\+ ops: (\S+)", r"CPU linear layers: (\S+)", r"(\S+ on cpu, kernels \S+, attention \S+),"


def test_the_image_runs_the_kernels_of_the_checkout(
    operator: Node, namespace: str, tmp_path: Path, figures: dict[str, Any]
) -> None:
    """Both are measured too, in turns. Their rates are shown and not judged: a pod and a process of this test do not get
    equal shares of a machine that has other work.
    """
    folder = make_checkpoint(tmp_path / "model", "llama3", dtype=torch.bfloat16, **SIZES)
    for path in (tmp_path, *folder.iterdir()):
        path.chmod(0o755)  # pods run as another user
    runtime = {"dtype": "bfloat16", "kvCacheMemory": "128Mi", "extraArgs": [NUM_THREADS]}
    model = from_folder(operator, namespace, folder, runtime=runtime)
    model.apply()
    model.wait_ready()
    build.build()  # a server that finds no library compiles one while it should start
    flags = ("--served-model-name", SERVED_NAME, "--dtype", "bfloat16", "--kv-cache-memory-bytes", "128Mi")
    limits = ("--max-num-seqs", "16", "--max-num-batched-tokens", "256")
    with replica(folder, *flags, *limits, NUM_THREADS, log=tmp_path / "log") as native:
        urls = {"image": model.url, "checkout": native.url}
        found: dict[str, list[float]] = {name: [] for name in urls}
        for seed in range(ROUNDS):
            for name, url in urls.items():
                found[name].append(asyncio.run(tokens_per_s(url, seed)))
    figures |= {f"{name}_tokens_per_s": median(rates) for name, rates in found.items()}
    pairs = zip(found["image"], found["checkout"], strict=True)
    figures["image_over_checkout"] = median(image / checkout for image, checkout in pairs)
    of_image = choices(model.kubectl("logs", f"deployment/{model.name}"))
    assert of_image == choices((tmp_path / "log").read_text())
    assert of_image[1] == "cpp"


async def tokens_per_s(url: str, seed: int) -> float:
    """Send prompts that no earlier round has sent, all at once; return the rate of output."""
    chance = random.Random(seed)
    prompts = ["".join(chance.choices(string.ascii_letters, k=PROMPT_CHARACTERS)) for _ in range(NUM_REQUESTS)]
    answers = [Answer(Ask(prompt, OUTPUT_TOKENS, streamed=False)) for prompt in prompts]
    start_s = time.monotonic()
    async with new_session() as session:
        await asyncio.gather(*(answer.fetch(session, url) for answer in answers))
    assert not (problems := [one.problem for one in answers if one.problem]), problems
    return NUM_REQUESTS * OUTPUT_TOKENS / (time.monotonic() - start_s)


def choices(log: str) -> list[str]:
    """Return what a runtime's log says of the kernels that it runs: instruction set, linear layers, dtype and attention."""
    found = [re.search(pattern, log) for pattern in CHOICES]
    assert all(found), log
    return [one[1] for one in found if one]
