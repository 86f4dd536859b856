"""Paged attention by FlashAttention 3 (Shah et al. 2024), if that is installed: github.com/Dao-AILab/flash-attention, hopper/.

Its ``flash_attn_with_kvcache`` reads the same cache by the same block tables as the Triton kernel.
"""

from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

MODULE = "flash_attn_interface"
"""Which the wheels of ``flash_attn_3`` install."""

MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8
"""It copies keys and values by 16 bytes."""

DTYPES = (torch.float16, torch.bfloat16)
OF_HOPPER = 9
"""Major number of the compute capability of the GPUs that it is compiled for."""


def check_can_run(device: torch.device) -> None:
    """Raise ValueError if it is not installed, or is not for this device."""
    if device.type != "cuda":
        raise ValueError(f"attention backend 'flash_attn' runs on cuda, not on {device.type}; use 'flyball' or 'auto'.")
    if find_spec(MODULE) is None:
        raise ValueError(
            f"attention backend 'flash_attn' needs the module {MODULE}, which is not installed. Install FlashAttention 3 "
            "(flash_attn_3) for this torch and CUDA, or use 'flyball' or 'auto'."
        )
    capability = torch.cuda.get_device_capability(device)
    if capability[0] != OF_HOPPER:
        raise ValueError(
            f"attention backend 'flash_attn' runs on GPUs of compute capability {OF_HOPPER}.0 (Hopper); this one has "
            f"{capability[0]}.{capability[1]}. Use 'flyball' or 'auto'."
        )


def check_can_attend(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, has_sinks: bool) -> None:
    """Raise ValueError if it has no code for a model."""
    found = [
        *([f"computes in {dtype}"] if dtype not in DTYPES else []),
        *([f"keeps keys and values in {kv_dtype}"] if kv_dtype != dtype else []),
        *([f"has heads of {head_dim}"] if head_dim > MAX_HEAD_DIM or head_dim % HEAD_DIM_MULTIPLE else []),
        *(["has attention sinks"] if has_sinks else []),
    ]
    if found:
        raise ValueError(
            f"attention backend 'flash_attn' takes float16 and bfloat16, a KV cache of the same dtype, heads of at most "
            f"{MAX_HEAD_DIM} that are a multiple of {HEAD_DIM_MULTIPLE}, and no sinks; this model {', '.join(found)}. "
            "Use 'flyball' or 'auto'."
        )


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_query_lens: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    max_query_len: int,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """See ``flyball_kernels.paged_attention``; the result is a new tensor."""
    out: Tensor = import_module(MODULE).flash_attn_with_kvcache(
        query,
        k_cache,
        v_cache,
        cache_seqlens=context_lens,
        page_table=block_tables,
        cu_seqlens_q=cu_query_lens,
        max_seqlen_q=max_query_len,
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
        softcap=softcap or 0.0,
    )
    return out
