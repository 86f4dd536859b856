"""What FlashAttention 3 documents of ``flash_attn_with_kvcache``, in a few lines of torch."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch import Tensor


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """Attend as hopper/flash_attn_interface.py says of a paged cache and queries of several lengths.

    The mask is aligned to the last key. A query sees the keys from ``window_size[0]`` before it to ``window_size[1]`` behind
    it, itself included; -1 is no bound. ``causal`` bounds it at itself.
    """
    out = torch.empty_like(q)
    groups = q.shape[1] // k_cache.shape[2]
    for index, num_keys in enumerate(cache_seqlens.tolist()):
        begin, end = cu_seqlens_q[index : index + 2].tolist()
        assert end - begin <= max_seqlen_q, "the grid would leave queries out"
        pages = page_table[index, : -(-num_keys // k_cache.shape[1])].long()
        keys, values = (
            cache[pages].flatten(0, 1)[:num_keys].float().repeat_interleave(groups, dim=1)
            for cache in (k_cache, v_cache)
        )
        scores = softmax_scale * torch.einsum("qhd,khd->hqk", q[begin:end].float(), keys)
        if softcap > 0.0:
            scores = softcap * torch.tanh(scores / softcap)
        behind = torch.arange(num_keys) - (torch.arange(end - begin)[:, None] + num_keys - (end - begin))
        left, right = window_size[0], 0 if causal else window_size[1]
        hidden = (behind < -left) & (left >= 0) | (behind > right) & (right >= 0)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have it in the place of the library."""
    module = ModuleType("flash_attn_interface")
    module.__spec__ = ModuleSpec(module.__name__, None)
    vars(module)["flash_attn_with_kvcache"] = flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, module.__name__, module)
