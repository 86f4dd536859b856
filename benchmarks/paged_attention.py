"""Paged attention on CPU against torch's scaled_dot_product_attention.

Prefill: sdpa gets contiguous keys and values, which a paged cache does not have. Decode: sdpa gets them by gathering
each sequence's blocks and padding to the longest, which is how one would do it in torch.

    python benchmarks/paged_attention.py [--dtype bfloat16]
"""

import argparse

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flyball_kernels import choose_backend, paged_attention
from machine import compare, describe

Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK = 12, 4, 64, 16


def batch(num_seqs: int, query_len: int, context_len: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return inputs whose blocks lie scattered in the cache."""
    num_blocks = -(-context_len // BLOCK)
    return {
        "query": torch.randn(num_seqs * query_len, Q_HEADS, HEAD_DIM, dtype=dtype),
        "k_cache": torch.randn(num_seqs * num_blocks, BLOCK, KV_HEADS, HEAD_DIM, dtype=dtype),
        "v_cache": torch.randn(num_seqs * num_blocks, BLOCK, KV_HEADS, HEAD_DIM, dtype=dtype),
        "block_tables": torch.randperm(num_seqs * num_blocks).int().view(num_seqs, num_blocks),
        "cu_query_lens": torch.arange(0, num_seqs * query_len + 1, query_len, dtype=torch.int32),
        "context_lens": torch.full((num_seqs,), context_len, dtype=torch.int32),
    }


def gathered_sdpa(inputs: dict[str, Tensor]) -> Tensor:
    """Decode one token a sequence with torch alone."""
    tables = inputs["block_tables"]
    keys, values = (inputs[name][tables].flatten(1, 2).transpose(1, 2) for name in ("k_cache", "v_cache"))
    return scaled_dot_product_attention(inputs["query"].unsqueeze(2), keys, values, enable_gqa=True)


def contiguous_sdpa(inputs: dict[str, Tensor], length: int) -> Tensor:
    """Prefill with torch on tensors that happen to be contiguous."""
    query, keys, values = (inputs[name].flatten(0, -3)[:length] for name in ("query", "k_cache", "v_cache"))
    heads = (x.transpose(0, 1).unsqueeze(0) for x in (query, keys, values))
    return scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)


def report(name: str, ours: float, theirs: float, gigabytes: float, gigaflops: float) -> None:
    print(
        f"{name:24} ours {ours * 1e3:8.3f} ms  sdpa {theirs * 1e3:8.3f} ms  {theirs / ours:5.2f}x   "
        f"{gigabytes / ours:6.1f} GB/s {gigaflops / ours:7.1f} GFLOP/s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    dtype = getattr(torch, parser.parse_args().dtype)
    backend = choose_backend("cpu")
    print(f"{describe()}; backend {backend.name}; {dtype}, {Q_HEADS}/{KV_HEADS} heads of {HEAD_DIM}")
    for num_seqs, context_len in ((1, 600), (1, 8192), (8, 600), (64, 128), (64, 600), (256, 300)):
        inputs = batch(num_seqs, 1, context_len, dtype)
        ours, theirs = compare(
            lambda inputs=inputs: paged_attention(**inputs, scale=0.125, max_query_len=1, backend=backend),
            lambda inputs=inputs: gathered_sdpa(inputs),
        )
        kv_gigabytes = 2e-9 * num_seqs * context_len * KV_HEADS * HEAD_DIM * dtype.itemsize
        work = 4e-9 * num_seqs * context_len * Q_HEADS * HEAD_DIM
        report(f"decode {num_seqs} x {context_len}", ours, theirs, kv_gigabytes, work)
    for length in (32, 128, 256, 512, 1024, 2048):
        inputs = batch(1, length, length, dtype)
        ours, theirs = compare(
            lambda inputs=inputs, n=length: paged_attention(**inputs, scale=0.125, max_query_len=n, backend=backend),
            lambda inputs=inputs, n=length: contiguous_sdpa(inputs, n),
        )
        report(f"prefill {length}", ours, theirs, 0.0, 2e-9 * length * length * Q_HEADS * HEAD_DIM)


if __name__ == "__main__":
    main()
