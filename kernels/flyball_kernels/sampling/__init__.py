"""Choose the next token of each row."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from flyball_kernels.backend import Backend
from flyball_kernels.checks import check_dtype, check_shape
from flyball_kernels.sampling import reference
from flyball_kernels.sampling.reference import NO_TOKEN

__all__ = ["NO_TOKEN", "sample"]


def sample(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
    *,
    backend: Backend,
) -> Tensor:
    """Sample one token id per row; a row's id depends on nothing else in the batch.

    A row of temperature below 1e-5 takes the argmax (lowest id of equals), the limit of ever lower temperatures. Any
    other row scales its logits by 1 / temperature, filters by min_p, then top_k, then top_p on what is left (vLLM's
    order; equal logits rank by lower id first), and inverts the cumulative distribution, in id order, at one uniform
    number hashed from (seed, position). The likeliest token passes every filter.

    Logits give a distribution if each is finite or -inf and one is finite. Other rows get NO_TOKEN, greedy or not.
    Settings outside the ranges below are safe, but what they choose is not defined.

    Args:
        logits: ``[n, vocab]`` fp32, bf16 or fp16, vocab at least 1. What is computed of them is fp32.
        temperature: ``[n]`` fp32, >= 0; None means that every row is greedy.
        top_k: ``[n]`` int64; 0 is off. None means that no row uses it; likewise below.
        top_p: ``[n]`` fp32 in (0, 1]; 1 is off.
        min_p: ``[n]`` fp32 in [0, 1]; 0 is off.
        seeds: ``[n]`` int64, the request's seed; may be None, as ``positions`` may, if ``temperature`` is.
        positions: ``[n]`` int64, how many tokens come before the sampled one; makes each step's number new.
    Returns:
        ``[n]`` int64, NO_TOKEN (-1) for a row whose logits give no distribution.
    Raises:
        ValueError: a shape or dtype is not as above.
    """
    if backend.name == "cpp":  # which makes these checks itself
        return _cpp()(logits, temperature, top_k, top_p, min_p, seeds, positions)
    check_shape("logits", logits, None, None)
    check_dtype("logits", logits, torch.float32, torch.bfloat16, torch.float16)
    if logits.shape[1] == 0:
        raise ValueError(f"logits has shape {list(logits.shape)}; a row needs at least 1 logit.")
    _check_rows(logits.shape[0], torch.float32, temperature=temperature, top_p=top_p, min_p=min_p)
    _check_rows(logits.shape[0], torch.int64, top_k=top_k, seeds=seeds, positions=positions)
    if temperature is not None and (seeds is None or positions is None):
        raise ValueError("rows with a temperature need seeds and positions.")
    logits = logits.float()
    if backend.name == "triton":
        from flyball_kernels.sampling import kernel  # triton is there on Linux only

        return kernel.sample(logits, temperature, top_k, top_p, min_p, seeds, positions)
    return reference.sample(logits, temperature, top_k, top_p, min_p, seeds, positions)


@cache
def _cpp() -> Any:
    return torch.ops.flyball.sample  # to find it takes as long as a part of the op


def _check_rows(num_rows: int, dtype: torch.dtype, **settings: Tensor | None) -> None:
    for name, setting in settings.items():
        if setting is not None:
            check_shape(name, setting, num_rows)
            check_dtype(name, setting, dtype)
