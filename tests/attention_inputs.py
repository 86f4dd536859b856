"""Ragged batches for the attention tests: scattered blocks, garbage wherever nothing may be read."""

import torch
from torch import Tensor

from flyball_kernels import Backend, kv_cache

PLAIN = Backend("torch")


def attention_inputs(
    query_lens: list[int],
    context_lens: list[int],
    *,
    num_q_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Return the tensors of one call. Slots that hold no token are NaN, and so are the unused blocks.

    ``kv_dtype``: keys and values are rounded to it; what is NaN are the scales.
    """
    num_blocks = [-(-length // block_size) for length in context_lens]
    ids = torch.randperm(sum(num_blocks) + 3)
    shape = (len(ids), block_size, num_kv_heads, head_dim)
    caches = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(2)]
    tables = torch.full((len(context_lens), max(num_blocks, default=0) + 1), 2**30, dtype=torch.int32)
    for i, (count, length) in enumerate(zip(num_blocks, context_lens, strict=True)):
        mine, ids = ids[:count], ids[count:]
        tables[i, :count] = mine
        for cache in caches:
            for j, block in enumerate(mine.tolist()):
                used = min(block_size, length - j * block_size)
                cache[block, :used] = torch.randn(used, num_kv_heads, head_dim)
    cu_query_lens = torch.tensor([0, *query_lens]).cumsum(0).int()
    return {
        "query": torch.randn(sum(query_lens), num_q_heads, head_dim).to(dtype),
        "k_cache": caches[0] if kv_dtype is None else kv_cache.rounded(caches[0], kv_dtype),
        "v_cache": caches[1] if kv_dtype is None else kv_cache.rounded(caches[1], kv_dtype),
        "block_tables": tables,
        "cu_query_lens": cu_query_lens,
        "context_lens": torch.tensor(context_lens, dtype=torch.int32),
    }


def ordered_for(backend: Backend, inputs: dict[str, Tensor], *, before: Backend = PLAIN) -> dict[str, Tensor]:
    """Return the tensors with caches in the order of a backend; ``before``: whose order they have."""
    caches = {
        name: kv_cache.reordered(inputs[name], order, to)
        for name, order, to in zip(
            ("k_cache", "v_cache"), kv_cache.orders(before), kv_cache.orders(backend), strict=True
        )
    }
    return inputs | caches
