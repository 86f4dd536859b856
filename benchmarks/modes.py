"""One engine with something on and another with it off, in turns, on the same requests."""

import time
from collections.abc import Callable
from typing import Any

from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.llm import LLM
from machine import median_of

Requests = tuple[list[list[int]], list[SamplingParams]]
"""Prompts as token ids, and how to sample after each."""


def on_over_off(name: str, llms: dict[str, LLM], runs: int, requests: Callable[[int], Requests]) -> dict[str, Any]:
    """Run the modes ``off`` and ``on`` in turns, the first one first in every other run, and compare speeds and tokens.

    Args:
        requests: by the number of the run, of which 0 is a warm-up. All are submitted at once; none ends before its max_tokens.
    """
    speeds: dict[str, list[float]] = {mode: [] for mode in llms}
    num_different = 0
    for index in range(runs + 1):
        prompts, sampling = requests(index)
        tokens = {}
        for mode in list(llms)[:: 1 if index % 2 else -1]:
            speed, tokens[mode] = _run(llms[mode], prompts, sampling)
            if index:
                speeds[mode].append(speed)
        num_different += sum(one != other for one, other in zip(tokens["off"], tokens["on"], strict=True))
    figures = {mode: median_of(values) for mode, values in speeds.items()}
    ratio = figures["on"]["median"] / figures["off"]["median"]
    print(f"{name}: on/off {ratio:.3f}, {num_different} outputs differ", flush=True)
    return {"output_tokens_per_s": figures, "on_over_off": ratio, "num_outputs_that_differ": num_different}


def _run(llm: LLM, prompts: list[list[int]], sampling: list[SamplingParams]) -> tuple[float, list[list[int]]]:
    """Return output tokens per second, and the tokens."""
    start_s = time.perf_counter()
    outputs = [output.token_ids for output in llm.generate(prompts, sampling)]
    return sum(map(len, outputs)) / (time.perf_counter() - start_s), outputs
