"""Paged attention on CPU against torch's scaled_dot_product_attention.

Prefill: sdpa gets contiguous keys and values, which a paged cache does not have. Decode: sdpa gets them by gathering
each sequence's blocks and padding to the longest, which is how one would do it in torch.

With ``--decode``: contexts of 1k to 16k against the bytes a second that torch copies, and those that it reads where it only
reads (for the largest number of a tensor), measured in turns in the same run. As many calls as a small model has layers follow
each other, as in a step of it: a call just after a copy finds threads asleep, and nothing in the CPU's caches. Keys and values
come from memory: the sequences change from call to call. With ``--layers`` too: as it is served, in decoder layers that are one
op. Their linear layers are small, and all of a layer's time counts.

With ``--prompts``: prompts, and chunks of them, as a share of the rate that torch's matrix product reaches in the same run
(see Bounds), and against fp32 FMAs where the CPU has a bf16 dot product.

With ``--kv-dtype int8``: decodes of long contexts, and chunks of prompts, with a KV cache of int8 against one of bf16. Layers
take turns, as in a model, so that no cache of the CPU keeps their keys and values. Beside them what a copy in the same run
reads and writes.

    python benchmarks/paged_attention.py [--dtype bfloat16]
    python benchmarks/paged_attention.py --decode [--layers]
    python benchmarks/paged_attention.py --prompts
    python benchmarks/paged_attention.py --kv-dtype int8
"""

import argparse
import itertools
import mmap
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from common import save
from flyball_kernels import (
    Backend,
    DecoderLayer,
    DecoderStack,
    PackedLinear,
    choose_backend,
    kv_cache,
    paged_attention,
)
from flyball_runtime.bounds import COPIED_BYTES, MATRIX, Bounds
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
DECODES = (
    (1, 1024),
    (1, 4096),
    (1, 16384),
    (8, 1024),
    (8, 4096),
    (8, 16384),
    (32, 1024),
    (32, 4096),
)  # sequences, context
LAYERS = 12
STEPS = 4  # of all layers, which follow each other
HIDDEN = 64  # sizes of the layers around attention
CACHE_BYTES = 2**28
"""Of keys, and of values: more than CPUs' caches hold."""

LONG = (
    (1, 1, 1024),
    (1, 1, 4096),
    (1, 1, 16384),
    (8, 1, 1024),
    (8, 1, 4096),
    (1, 512, 512),
    (1, 512, 4608),
)  # sequences, tokens, context
WORKING_SET_BYTES = 192 * 2**20  # of keys and values in bf16; more than the CPU keeps


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


def in_huge_pages(part: Tensor, count: int) -> Tensor:
    """Return copies of blocks, one after the other, in memory like that of the runtime's pool (see MmapPool)."""
    memory = mmap.mmap(-1, count * part.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    blocks = torch.frombuffer(memory, dtype=part.dtype).view(count, *part.shape)
    return blocks.copy_(part.expand_as(blocks)).flatten(0, 1)


def repeat(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()


def scattered_contexts(
    heads: tuple[int, int, int], num_seqs: int, context_len: int, most_caches: int = 1
) -> tuple[list[tuple[Tensor, Tensor]], Iterator[Tensor]]:
    """Return caches of keys and values, and block tables without end: of other sequences each time.

    Caches have CACHE_BYTES of keys together, or those of one call if they are more. So there may be fewer than are asked for.
    """
    _, kv_heads, head_dim = heads
    blocks_of_call = num_seqs * -(-context_len // BLOCK)
    bytes_of_call = 2 * blocks_of_call * BLOCK * kv_heads * head_dim
    num_caches = min(most_caches, max(1, CACHE_BYTES // bytes_of_call))
    num_calls = max(1, CACHE_BYTES // num_caches // bytes_of_call)
    noise = torch.randn(2, 64, BLOCK, kv_heads, head_dim, dtype=torch.bfloat16)
    num_blocks = num_calls * blocks_of_call
    caches = []
    for _ in range(num_caches):
        k_cache, v_cache = (in_huge_pages(part, -(-num_blocks // len(part))) for part in noise)
        caches.append((k_cache, v_cache))
    return caches, itertools.cycle(torch.randperm(num_blocks).int().view(num_calls, num_seqs, -1))


def decode_lengths(num_seqs: int, context_len: int) -> tuple[Tensor, Tensor]:
    """Return cu_query_lens and context_lens where each sequence has one token to compute."""
    return torch.arange(num_seqs + 1, dtype=torch.int32), torch.full((num_seqs,), context_len, dtype=torch.int32)


def decoding_calls(
    backend: Backend, heads: tuple[int, int, int], num_seqs: int, context_len: int
) -> Callable[[], object]:
    """Return a function that calls attention LAYERS times for a token of each of so many sequences: other ones each time."""
    q_heads, _, head_dim = heads
    [(k_cache, v_cache)], tables = scattered_contexts(heads, num_seqs, context_len)
    query = torch.randn(num_seqs, q_heads, head_dim, dtype=torch.bfloat16)
    lengths = decode_lengths(num_seqs, context_len)
    scale = head_dim**-0.5
    return partial(
        repeat,
        lambda: paged_attention(
            query, k_cache, v_cache, next(tables), *lengths, scale=scale, max_query_len=1, backend=backend
        ),
        LAYERS,
    )


def decoding_layers(
    backend: Backend, heads: tuple[int, int, int], num_seqs: int, context_len: int
) -> Callable[[], object]:
    """Return a function that decodes a token of each of so many sequences in LAYERS layers: other ones each time."""
    q_heads, kv_heads, head_dim = heads
    caches, tables = scattered_contexts(heads, num_seqs, context_len, most_caches=LAYERS)
    position = context_len - 1

    def linear(out_features: int, in_features: int) -> PackedLinear:
        weight = torch.randn(out_features, in_features).mul(in_features**-0.5)
        return PackedLinear(weight.to(torch.bfloat16), None, backend=backend)

    norm = torch.ones(HIDDEN, dtype=torch.bfloat16)
    layers = [
        DecoderLayer(
            qkv=linear((q_heads + 2 * kv_heads) * head_dim, HIDDEN),
            output=linear(HIDDEN, q_heads * head_dim),
            gate_up=linear(2 * HIDDEN, HIDDEN),
            down=linear(HIDDEN, HIDDEN),
            attention_norm=norm,
            mlp_norm=norm,
            cos_sin_cache=torch.randn(context_len, head_dim),
            eps=1e-6,
            scale=head_dim**-0.5,
        )
        for _ in range(LAYERS)
    ]
    stack = DecoderStack(layers, [caches[i % len(caches)] for i in range(LAYERS)], [0] * LAYERS)
    x = torch.randn(num_seqs, HIDDEN, dtype=torch.bfloat16)
    positions = torch.full((num_seqs,), position)
    lengths = decode_lengths(num_seqs, context_len)

    def run() -> object:
        table = next(tables)
        slots = table[:, -1].long() * BLOCK + position % BLOCK
        return stack(x, None, positions, [slots], [table], *lengths)

    return run


def measure_decode(
    backend: Backend, bounds: Bounds, heads: tuple[int, int, int], num_seqs: int, context_len: int, *, in_layers: bool
) -> dict[str, Any]:
    """Return medians of rounds in turns with a copy, for the attention of one layer."""
    decode, num_steps = (decoding_layers, STEPS) if in_layers else (decoding_calls, 1)
    run, shortest = (
        partial(repeat, decode(backend, heads, num_seqs, length), num_steps) for length in (context_len, BLOCK)
    )
    read = 4e-9 * num_seqs * context_len * heads[1] * heads[2]  # keys and values, two bytes each
    more = read * (1 - BLOCK / context_len)
    rounds = []
    for _ in range(ROUNDS):
        run_s, copy_s = compare(run, bounds.copy, seconds=0.3)
        shortest_s, read_s = compare(shortest, bounds.read, seconds=0.2)
        layer_s, block_s = run_s / (num_steps * LAYERS), shortest_s / (num_steps * LAYERS)
        copied, only_read = 2e-9 * COPIED_BYTES / copy_s, 1e-9 * COPIED_BYTES / read_s
        rounds.append(
            {
                "us": 1e6 * layer_s,
                "gb_per_s": read / layer_s,
                "copy_gb_per_s": copied,
                "read_gb_per_s": only_read,
                "share_of_copy": read / layer_s / copied,
                "share_of_read": read / layer_s / only_read,
                "us_of_one_block": 1e6 * block_s,
                "share_of_copy_beyond_it": more / (layer_s - block_s) / copied,
                "share_of_read_beyond_it": more / (layer_s - block_s) / only_read,
            }
        )
    medians = {figure: statistics.median(one[figure] for one in rounds) for figure in rounds[0]}
    return {"sequences": num_seqs, "context": context_len, **medians}


def measure_decodes(backend: Backend, *, in_layers: bool) -> None:
    result = {}
    bounds = Bounds()
    for heads in HEADS:
        name = "{}/{} heads of {}".format(*heads)
        result[name] = [measure_decode(backend, bounds, heads, *lengths, in_layers=in_layers) for lengths in DECODES]
        for row in result[name]:
            print(
                f"{name}  {row['sequences']:2} x {row['context']:5}  {row['us']:8.0f} us  {row['gb_per_s']:5.1f} GB/s  "
                f"{row['share_of_copy']:5.1%} of the copy's {row['copy_gb_per_s']:5.1f}, "
                f"{row['share_of_read']:5.1%} of the {row['read_gb_per_s']:5.1f} that are only read; beyond the "
                f"{row['us_of_one_block']:.0f} us of one block {row['share_of_copy_beyond_it']:5.1%} and "
                f"{row['share_of_read_beyond_it']:5.1%}",
                flush=True,
            )
    save(
        "paged_attention_layers" if in_layers else "paged_attention_decode",
        {"instruction_set": torch.ops.flyball.instruction_set(), "medians_of": ROUNDS, "decodes": result},
    )


def measure_prompt(
    backend: Backend, bounds: Bounds, heads: tuple[int, int, int], query_len: int, context_len: int
) -> dict[str, Any]:
    """Return medians of rounds in turns for the last tokens of one context, and of torch's matrix product between them."""
    inputs = batch(1, query_len, context_len, torch.bfloat16, heads)
    run = partial(paged_attention, **inputs, scale=heads[2] ** -0.5, max_query_len=query_len, backend=backend)
    times = []
    for _ in range(ROUNDS):
        ours, fma = compare(run, partial(run, dot=False))
        times.append((ours, fma, compare(bounds.matmul, lambda: None, seconds=0.2)[0]))
    seen = query_len * context_len - query_len * (query_len - 1) / 2  # pairs of a token and a key that it sees
    work = 4e-9 * seen * heads[0] * heads[2]
    matmul = 2e-9 * MATRIX**3
    return {
        "tokens": query_len,
        "context": context_len,
        "gflops": median_of(work / ours for ours, _, _ in times),
        "matmul_gflops": median_of(matmul / seconds for _, _, seconds in times),
        "share_of_matmul": median_of(work / ours / (matmul / seconds) for ours, _, seconds in times),
        "fma_gflops": median_of(work / fma for _, fma, _ in times),
        "over_fma": median_of(fma / ours for ours, fma, _ in times),
    }


def measure_prompts(backend: Backend) -> None:
    result = {}
    bounds = Bounds()
    for heads in HEADS:
        name = "{}/{} heads of {}".format(*heads)
        result[name] = [measure_prompt(backend, bounds, heads, *lengths) for lengths in PROMPTS]
        for row in result[name]:
            print(
                f"{name}  {row['tokens']:4} tokens of {row['context']:4}  {row['gflops']['median']:6.1f} GFLOP/s  "
                f"{row['share_of_matmul']['median']:5.1%} of torch's {row['matmul_gflops']['median']:6.1f}  "
                f"{row['over_fma']['median']:5.2f}x of fp32 FMAs",
                flush=True,
            )
    save(
        "paged_attention_prompts",
        {
            "instruction_set": torch.ops.flyball.instruction_set(),
            "causal_work": "4 x tokens and keys seen x query heads x head size",
            "product": str(bounds.dtype).removeprefix("torch."),
            "prompts": result,
        },
    )


def int8_cache(cache: Tensor) -> Tensor:
    """Return an int8 cache of as many blocks. All have the same content, on which times do not depend."""
    num_blocks, block_size, kv_heads, head_dim = cache.shape
    block = torch.zeros(1, block_size, kv_heads, head_dim + kv_cache.SCALE_BYTES, dtype=torch.int8)
    kv_cache.write(block, torch.arange(block_size), cache[0])
    return block.repeat(num_blocks, 1, 1, 1)


def layers_in_turn(layers: list[dict[str, Tensor]], backend: Backend, query_len: int) -> Callable[[], object]:
    """Return a function that attends in one layer after the other, one a call."""
    turns = itertools.cycle(layers)
    scale = layers[0]["query"].shape[-1] ** -0.5
    return lambda: paged_attention(**next(turns), scale=scale, max_query_len=query_len, backend=backend)


def compare_caches(
    backend: Backend, heads: tuple[int, int, int], num_seqs: int, query_len: int, context_len: int
) -> dict[str, Any]:
    """Return medians of rounds in turns with a cache of bf16 and of int8, and of a copy between them."""
    bf16_bytes = 2 * num_seqs * context_len * heads[1] * heads[2] * 2
    num_layers = max(2, WORKING_SET_BYTES // bf16_bytes)
    bf16 = [batch(num_seqs, query_len, context_len, torch.bfloat16, heads) for _ in range(num_layers)]
    int8 = [one | {name: int8_cache(one[name]) for name in ("k_cache", "v_cache")} for one in bf16]
    ours, theirs = (layers_in_turn(layers, backend, query_len) for layers in (int8, bf16))
    source, target = (torch.zeros(WORKING_SET_BYTES // 4, dtype=torch.int32) for _ in range(2))
    rounds = []
    for _ in range(ROUNDS):
        rounds.append((*compare(ours, theirs, seconds=0.4), compare(lambda: target.copy_(source), int, seconds=0.1)[0]))
    copied = 2e-9 * WORKING_SET_BYTES
    int8_bytes = bf16_bytes * (heads[2] + kv_cache.SCALE_BYTES) / (2 * heads[2])
    return {
        "sequences": num_seqs,
        "tokens": query_len,
        "context": context_len,
        "layers": num_layers,
        "bf16_ms": median_of(1e3 * theirs for _, theirs, _ in rounds),
        "int8_ms": median_of(1e3 * ours for ours, _, _ in rounds),
        "bf16_gb_per_s": median_of(1e-9 * bf16_bytes / theirs for _, theirs, _ in rounds),
        "int8_gb_per_s": median_of(1e-9 * int8_bytes / ours for ours, _, _ in rounds),
        "copy_gb_per_s": median_of(copied / seconds for _, _, seconds in rounds),
        "bf16_over_int8": median_of(theirs / ours for ours, theirs, _ in rounds),
    }


def measure_caches(backend: Backend) -> None:
    result = {}
    for heads in HEADS:
        name = "{}/{} heads of {}".format(*heads)
        result[name] = [compare_caches(backend, heads, *lengths) for lengths in LONG]
        for row in result[name]:
            print(
                f"{name}  {row['sequences']} x {row['tokens']:3} tokens of {row['context']:5}  "
                f"bf16 {row['bf16_ms']['median']:7.3f} ms {row['bf16_gb_per_s']['median']:5.1f} GB/s  "
                f"int8 {row['int8_ms']['median']:7.3f} ms {row['int8_gb_per_s']['median']:5.1f} GB/s  "
                f"{row['bf16_over_int8']['median']:5.2f}x  copy {row['copy_gb_per_s']['median']:5.1f} GB/s",
                flush=True,
            )
    save("int8_kv_cache", {"threads": torch.get_num_threads(), "attention": result})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--prompts", action="store_true", help="prompts against the rate of a matrix product")
    parser.add_argument("--decode", action="store_true", help="decodes against the bytes a second of a copy")
    parser.add_argument("--layers", action="store_true", help="with --decode: as decoder layers that are one op run it")
    parser.add_argument("--kv-dtype", choices=["int8"], help="a KV cache of int8 against one of bf16")
    options = parser.parse_args()
    if options.layers and not options.decode:
        parser.error("--layers is about decodes: give --decode too.")
    dtype = getattr(torch, options.dtype)
    backend = choose_backend("cpu")
    print(f"{describe()}; backend {backend.name}; {dtype}, {Q_HEADS}/{KV_HEADS} heads of {HEAD_DIM}")
    if options.kv_dtype:
        measure_caches(backend)
        return
    if options.decode:
        measure_decodes(backend, in_layers=options.layers)
        return
    if options.prompts:
        measure_prompts(backend)
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
