"""Store a step's keys and values in the paged KV cache."""

import torch
from torch import Tensor

from flyball_kernels.backend import backend_for
from flyball_kernels.checks import check_contiguous, check_dtype, check_shape
from flyball_kernels.kv_write import reference


def kv_write(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's key and value to its slot, in place.

    Args:
        key, value: ``[num_tokens, num_kv_heads, head_dim]``, each token's row contiguous.
        k_cache, v_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``, contiguous, dtype of ``key``.
        slot_mapping: ``[num_tokens]`` int64, ``block_id * block_size + offset``; no slot twice.
    Raises:
        ValueError: a shape, dtype or layout is not as above.
        IndexError: a slot is outside the cache, on CPU. A GPU does not check them.
    """
    check_cache(k_cache, v_cache)
    check_shape("key", key, slot_mapping.shape[0], *k_cache.shape[2:])
    check_shape("value", value, *key.shape)
    check_shape("slot_mapping", slot_mapping, None)
    check_dtype("key", key, k_cache.dtype)
    check_dtype("value", value, k_cache.dtype)
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    tensors = (key, value, k_cache, v_cache, slot_mapping)
    backend = backend_for(key)
    if backend == "cpp":
        torch.ops.flyball.kv_write(*tensors)
    elif backend == "triton":
        from flyball_kernels.kv_write import kernel  # triton is there on Linux only

        kernel.kv_write(*tensors)
    else:
        reference.kv_write(*tensors)


def check_cache(k_cache: Tensor, v_cache: Tensor) -> None:
    """Raise ValueError unless the two are contiguous caches of one shape and dtype."""
    check_shape("k_cache", k_cache, None, None, None, None)
    check_shape("v_cache", v_cache, *k_cache.shape)
    check_dtype("v_cache", v_cache, k_cache.dtype)
    check_contiguous("k_cache", k_cache)
    check_contiguous("v_cache", v_cache)
