"""Whether torch's linear layer is faster than the C++ one on this machine.

A library compiled for other CPUs, or by a compiler that makes little of it, can be many times slower than torch.
"""

import logging
import time
from collections.abc import Callable
from functools import cache

import torch
from torch.nn import functional as F

logger = logging.getLogger(__name__)

ROWS = (8, 64)  # a step of decodes, a chunk of a prompt
FEATURES = 1024
REPEATS = 5
SLACK = 1.25  # between equals, noise must not decide


@cache
def torch_is_faster(dtype: torch.dtype, dot: bool) -> bool:
    """Time one layer both ways on one thread, once per process (some milliseconds); log and return the outcome.

    A layer that wins at one number of rows and loses at the other is kept: only the C++ op gives a row the same bits
    whatever rows stand beside it.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = [_times_s(rows, dtype, dot) for rows in ROWS]
    finally:
        torch.set_num_threads(num_threads)
    figures = ", ".join(
        f"{rows} rows {ours * 1e6:.0f} us (torch {theirs * 1e6:.0f} us)"
        for rows, (ours, theirs) in zip(ROWS, times, strict=True)
    )
    is_faster = all(ours > SLACK * theirs for ours, theirs in times)
    if is_faster:
        logger.warning("C++ linear layers of %s are slower than torch's here, which run instead: %s", dtype, figures)
    else:
        logger.info("C++ linear layers of %s: %s", dtype, figures)
    return is_faster


def _times_s(rows: int, dtype: torch.dtype, dot: bool) -> tuple[float, float]:
    """Return the least seconds of the C++ layer and of torch's, measured in turn."""
    weight, x = torch.full((FEATURES, FEATURES), 0.5, dtype=dtype), torch.full((rows, FEATURES), 0.5, dtype=dtype)
    packed = torch.ops.flyball.linear_pack(weight, dot)
    calls: tuple[Callable[[], object], ...] = (
        lambda: torch.ops.flyball.linear(x, packed, None, FEATURES, dot),
        lambda: F.linear(x, weight),
    )
    best = [float("inf"), float("inf")]
    for _ in range(1 + REPEATS):  # the first warms up, and is never the best
        for index, call in enumerate(calls):
            start_s = time.perf_counter()
            call()
            best[index] = min(best[index], time.perf_counter() - start_s)
    return best[0], best[1]
