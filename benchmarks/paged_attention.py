"""Paged attention on CPU against torch's scaled_dot_product_attention.

Prefill: sdpa gets contiguous keys and values, which a paged cache does not have. Decode: sdpa gets them by gathering
each sequence's blocks and padding to the longest, which is how one would do it in torch.

With ``--arithmetic``: prompts, and chunks of them, by the bf16 dot product against fp32 FMAs, and their share of the rate
that torch's bf16 matrix product reaches in the same run. Needs a CPU with AVX512_BF16.

    python benchmarks/paged_attention.py [--dtype bfloat16]
    python benchmarks/paged_attention.py --arithmetic
"""

import argparse
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from common import save
from flyball_kernels import Backend, choose_backend, paged_attention
from machine import compare, describe, median_of

Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK = 12, 4, 64, 16
HEADS = ((12, 4, 64), (16, 8, 128))  # query heads, KV heads, size of a head
PROMPTS = (
    (128, 128),
    (512, 512),
    (1024, 1024),
    (2048, 2048),
    (128, 4224),
    (512, 4608),
    (2048, 6144),
)  # tokens, context
ROUNDS = 5


def batch(
    num_seqs: int,
    query_len: int,
    context_len: int,
    dtype: torch.dtype,
    heads: tuple[int, int, int] = (Q_HEADS, KV_HEADS, HEAD_DIM),
) -> dict[str, Tensor]:
    """Return inputs whose blocks lie scattered in the cache."""
    q_heads, kv_heads, head_dim = heads
    num_blocks = -(-context_len // BLOCK)
    return {
        "query": torch.randn(num_seqs * query_len, q_heads, head_dim, dtype=dtype),
        "k_cache": torch.randn(num_seqs * num_blocks, BLOCK, kv_heads, head_dim, dtype=dtype),
        "v_cache": torch.randn(num_seqs * num_blocks, BLOCK, kv_heads, head_dim, dtype=dtype),
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


def compare_arithmetics(
    backend: Backend, heads: tuple[int, int, int], query_len: int, context_len: int
) -> dict[str, Any]:
    """Return medians of rounds in turns for the last tokens of one context, and of torch's matrix product between them."""
    inputs = batch(1, query_len, context_len, torch.bfloat16, heads)
    run = partial(paged_attention, **inputs, scale=heads[2] ** -0.5, max_query_len=query_len, backend=backend)
    left, right = (torch.randn(1536, 1536, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(ROUNDS):
        dot, fma = compare(lambda: run(dot=True), lambda: run(dot=False))
        times.append((dot, fma, compare(lambda: torch.mm(left, right), lambda: None, seconds=0.2)[0]))
    seen = query_len * context_len - query_len * (query_len - 1) / 2  # pairs of a token and a key that it sees
    work = 4e-9 * seen * heads[0] * heads[2]
    matmul = 2e-9 * len(left) ** 3
    return {
        "tokens": query_len,
        "context": context_len,
        "dot_gflops": median_of(work / dot for dot, _, _ in times),
        "fma_gflops": median_of(work / fma for _, fma, _ in times),
        "matmul_gflops": median_of(matmul / seconds for _, _, seconds in times),
        "dot_over_fma": median_of(fma / dot for dot, fma, _ in times),
        "dot_over_matmul": median_of(work / dot / (matmul / seconds) for dot, _, seconds in times),
    }


def measure_arithmetics(backend: Backend) -> None:
    result = {}
    for heads in HEADS:
        name = "{}/{} heads of {}".format(*heads)
        result[name] = [compare_arithmetics(backend, heads, *lengths) for lengths in PROMPTS]
        for row in result[name]:
            print(
                f"{name}  {row['tokens']:4} tokens of {row['context']:4}  dot {row['dot_gflops']['median']:6.1f} GFLOP/s  "
                f"fma {row['fma_gflops']['median']:6.1f}  {row['dot_over_fma']['median']:5.2f}x  "
                f"{row['dot_over_matmul']['median']:5.1%} of torch's {row['matmul_gflops']['median']:6.1f}",
                flush=True,
            )
    save("paged_attention", {"causal_work": "4 x tokens and keys seen x query heads x head size", "prompts": result})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--arithmetic", action="store_true", help="the bf16 dot product against fp32 FMAs")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    backend = choose_backend("cpu")
    print(f"{describe()}; backend {backend.name}; {dtype}, {Q_HEADS}/{KV_HEADS} heads of {HEAD_DIM}")
    if options.arithmetic:
        measure_arithmetics(backend)
        return
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
