"""Each Triton kernel on this GPU: whether it is right, then how near it comes to what the GPU can do.

A kernel has to move some bytes and to multiply some matrices. At the rate of a large copy and of a large matrix product,
measured in the same run, the longer of the two takes the time that is the bound; a kernel's share is the bound over its own
time. Caches are cleared before each run that is timed. The result is written after every kernel, so that what was measured
survives an interruption. Ends with 1 if a kernel was wrong; wrong kernels are not timed.

    python benchmarks/gpu_kernels.py --out out/gpu/rates.json
    TRITON_INTERPRET=1 python benchmarks/gpu_kernels.py --out rates.json    # without a GPU: small shapes, no times
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import write
from flyball_kernels import (
    Backend,
    CacheBlocks,
    Float8Linear,
    GroupedLinear,
    Int8Linear,
    PackedLinear,
    add_rms_norm,
    apply_token_bitmask,
    choose_backend,
    experts,
    kv_cache,
    paged_attention,
    penalize,
    rms_norm,
    rope_kv_write,
    sample,
    step_layout,
    swiglu,
)
from machine import environment

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32  # the interpreter does not round to bf16 as a GPU does
TOLERANCE = {torch.bfloat16: (2**-6, 2**-7), torch.float32: (1e-4, 1e-4)}[DTYPE]
"""Relative and absolute, as in tests/kernels: results and softmax weights are rounded to the dtype."""

EIGHT_BITS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
ONE_STEP = (2**-3, 2**-5)
"""By how much numbers of 8 bits may differ: a value between two of them may be rounded to either."""

BLOCK_SIZE = 16
COPY_BYTES, MATMUL_SIZE = 2**33, 8192


@dataclass(frozen=True)
class Case:
    """One kernel on one load.

    Attributes:
        run: computes with a backend, and returns all that was written.
        num_bytes: what has to be read and written at least.
        num_flops: of matrix products.
        values: what is compared of that which was written.
        tolerance: relative and absolute, of floating-point values.
        num_may_differ: of token ids; rounding decides about one in some thousand rows of so large a vocabulary.
    """

    kernel: str
    load: str
    run: Callable[[Backend], Sequence[Tensor]]
    num_bytes: int
    num_flops: int = 0
    values: Callable[[Sequence[Tensor]], Sequence[Tensor]] = tuple
    tolerance: tuple[float, float] = TOLERANCE
    num_may_differ: int = 0


@dataclass(frozen=True)
class Mixture:
    """The experts of a model's layer."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    experts_per_token: int


@dataclass(frozen=True)
class Shape:
    """A model's layer, and the loads."""

    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    num_tokens: tuple[int, ...]
    decodes: tuple[tuple[int, int], ...]  # sequences, context
    prompts: tuple[tuple[int, int], ...]  # tokens, context
    mixed: tuple[int, int, int]  # decoding sequences, their context, tokens of a prompt
    vocab_size: int
    num_layers: int
    window: int  # of keys that a token sees, where it does not see all
    mixture: Mixture


QWEN3_8B = Shape(
    hidden_size=4096,
    intermediate_size=12288,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    num_tokens=(1, 256, 8192),
    decodes=((1, 1024), (1, 32768), (16, 4096), (64, 2048), (256, 1024)),
    prompts=((512, 512), (4096, 4096), (1024, 16384)),
    mixed=(64, 2048, 1984),
    vocab_size=151_936,
    num_layers=36,
    window=1024,
    mixture=Mixture(hidden_size=2048, intermediate_size=768, num_experts=128, experts_per_token=8),  # Qwen3-30B-A3B
)
TINY = Shape(
    hidden_size=48,
    intermediate_size=40,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_tokens=(3,),
    decodes=((2, 600),),
    prompts=((40, 50),),
    mixed=(2, 20, 40),
    vocab_size=100,
    num_layers=2,
    window=30,
    mixture=Mixture(hidden_size=48, intermediate_size=40, num_experts=5, experts_per_token=2),
)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device=DEVICE)


def elementwise(shape: Shape) -> Iterator[Case]:
    """Yield what lies between the matrix products."""
    item = DTYPE.itemsize
    num_heads = shape.num_q_heads + 2 * shape.num_kv_heads
    cache_shape = (-(-max(shape.num_tokens) // BLOCK_SIZE), BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    for n in shape.num_tokens:
        x, residual, weight = random(n, shape.hidden_size), random(n, shape.hidden_size), random(shape.hidden_size)
        yield Case(
            "rms_norm",
            f"{n} tokens",
            lambda backend, x=x, w=weight: (rms_norm(x, w, 1e-6, backend=backend),),
            2 * x.numel() * item,
        )
        yield Case(
            "add_rms_norm",
            f"{n} tokens",
            lambda backend, x=x, r=residual, w=weight: add_rms_norm(x, r, w, 1e-6, backend=backend),
            4 * x.numel() * item,
        )
        gate_up = random(n, 2 * shape.intermediate_size)
        for name, activation in (("swiglu", "silu"), ("swiglu, GELU", "gelu_tanh")):
            yield Case(
                name,
                f"{n} tokens",
                lambda backend, x=gate_up, name=activation: (swiglu(x, backend=backend, activation=name),),
                3 * gate_up.numel() // 2 * item,
            )
        qkv = random(n, num_heads * shape.head_dim)
        caches = [torch.zeros(cache_shape, dtype=DTYPE, device=DEVICE) for _ in range(2)]
        num_bytes = 2 * qkv.numel() * item
        yield Case("rope_kv_write", f"{n} tokens", _rope_kv_write(qkv, caches), num_bytes)
        for name, numbers in EIGHT_BITS.items():
            rounded = [kv_cache.rounded(cache, numbers) for cache in caches]
            saved = 2 * n * shape.num_kv_heads * (shape.head_dim * (item - 1) - kv_cache.SCALE_BYTES)
            yield Case(
                f"rope_kv_write, {name} KV",
                f"{n} tokens",
                _rope_kv_write(qkv, rounded),
                num_bytes - saved,
                values=lambda written: (written[0], *map(kv_cache.read, written[1:])),
                tolerance=ONE_STEP,
            )


def _rope_kv_write(qkv: Tensor, caches: list[Tensor]) -> Callable[[Backend], Sequence[Tensor]]:
    head_dim, num_tokens = kv_cache.head_dim_of(caches[0]), len(qkv)
    positions = torch.arange(num_tokens, device=DEVICE)
    angles = positions[:, None] * 1e6 ** -(torch.arange(0, head_dim, 2, device=DEVICE) / head_dim)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    slots = torch.randperm(len(caches[0]) * BLOCK_SIZE, device=DEVICE)[:num_tokens]
    norms = {"q_norm": random(head_dim), "k_norm": random(head_dim)}

    def run(backend: Backend) -> Sequence[Tensor]:
        return rope_kv_write(qkv, positions, table, *caches, slots, **norms, backend=backend), *caches

    return run


def attention(shape: Shape) -> Iterator[Case]:
    """Yield what ``attention_of_16_bits`` does, also by FlashAttention 3 if that can run here, and decodes from 8 bits."""
    flash = flash_backend()
    for case in attention_of_16_bits(shape):
        yield case
        if flash is not None:
            yield replace(
                case,
                kernel=f"{case.kernel}, FlashAttention 3",
                run=lambda backend, case=case: case.run(flash if backend.name == flash.name else backend),
            )
    for num_seqs, context in shape.decodes:
        for name, numbers in EIGHT_BITS.items():
            load = f"{num_seqs} x {context}"
            yield _attention(shape, f"decode, {name} KV", load, [(1, context)] * num_seqs, numbers)


def flash_backend() -> Backend | None:
    """Return the backend with FlashAttention 3's attention, if it can run here."""
    try:
        return choose_backend(DEVICE, "triton", "flash_attn")
    except ValueError:
        return None


def attention_of_16_bits(shape: Shape) -> Iterator[Case]:
    """Yield decodes, prompts, the last tokens of long ones, some with a window or a soft cap, and decodes beside a prompt."""
    for num_seqs, context in shape.decodes:
        yield _attention(shape, "decode", f"{num_seqs} x {context}", [(1, context)] * num_seqs)
    for num_tokens, context in shape.prompts:
        yield _attention(shape, "prefill", f"{num_tokens} of {context}", [(num_tokens, context)])
    num_seqs, context = shape.decodes[-1]
    num_tokens, prompt = shape.prompts[-1]
    special: dict[str, dict[str, Any]] = {"window": {"sliding_window": shape.window}, "soft cap": {"softcap": 50.0}}
    for name, settings in special.items():
        yield _attention(shape, f"decode, {name}", f"{num_seqs} x {context}", [(1, context)] * num_seqs, **settings)
        yield _attention(shape, f"prefill, {name}", f"{num_tokens} of {prompt}", [(num_tokens, prompt)], **settings)
    num_seqs, context, num_tokens = shape.mixed
    load = f"{num_seqs} decodes of {context}, prompt of {num_tokens}"
    yield _attention(shape, "mixed", load, [(1, context)] * num_seqs + [(num_tokens, num_tokens)])


def _attention(
    shape: Shape,
    kind: str,
    load: str,
    sequences: list[tuple[int, int]],
    numbers: torch.dtype | None = None,
    **special: Any,
) -> Case:
    """Attend to blocks that lie scattered in the cache.

    Args:
        sequences: query and context length of each.
        numbers: what keys and values are rounded to, if they are.
        special: the op's sliding_window and softcap.
    """
    query_lens, context_lens = zip(*sequences, strict=True)
    num_blocks = -(-max(context_lens) // BLOCK_SIZE)
    cache = (len(sequences) * num_blocks, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    tensors = (
        random(sum(query_lens), shape.num_q_heads, shape.head_dim),
        *(random(*cache) if numbers is None else kv_cache.rounded(random(*cache), numbers) for _ in range(2)),
        torch.randperm(cache[0], device=DEVICE).int().view(len(sequences), num_blocks),
        torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int(),
        torch.tensor(context_lens, dtype=torch.int32, device=DEVICE),
    )
    settings = {"scale": shape.head_dim**-0.5, "max_query_len": max(query_lens), **special}
    window = special.get("sliding_window", max(context_lens))
    seen = sum(pairs_seen(n, context, window) for n, context in sequences)
    num_keys = sum(min(context, n - 1 + window) for n, context in sequences)
    per_vector = shape.head_dim * DTYPE.itemsize if numbers is None else shape.head_dim + kv_cache.SCALE_BYTES
    per_key = 2 * shape.num_kv_heads * per_vector
    return Case(
        f"paged_attention, {kind}",
        load,
        lambda backend: (paged_attention(*tensors, **settings, backend=backend),),
        num_keys * per_key + 2 * tensors[0].numel() * DTYPE.itemsize,
        4 * seen * shape.num_q_heads * shape.head_dim,
    )


def pairs_seen(num_tokens: int, context: int, window: int) -> int:
    """Return how many pairs there are of one of a context's last tokens and a key that it sees."""
    return sum(min(window, length) for length in range(context - num_tokens + 1, context + 1))


LAYERS: dict[str, tuple[Callable[..., Any], float]] = {
    "int8": (Int8Linear, 1.0),
    "w8a16": (partial(GroupedLinear, bits=8), 1.0 + 2 / 128),
    "int4": (GroupedLinear, 0.5 + 2 / 32),  # groups of 32 have a scale of 16 bits
    "fp8": (Float8Linear, 1.0),
}
"""Layers of 8 and 4 bits, and the bytes of a weight."""


def layouts(shape: Shape) -> Iterator[Case]:
    """Yield the layout of a step: of decodes, and of a prompt's last tokens. The time has the copy from the host in it."""
    steps = {f"{num_seqs} x {context}": (num_seqs, 1, context) for num_seqs, context in shape.decodes}
    steps |= {f"{num_tokens} of {context}": (1, num_tokens, context) for num_tokens, context in shape.prompts}
    for load, (num_seqs, num_tokens, context) in steps.items():
        tables = torch.randint(0, 1000, (1, num_seqs, -(-context // BLOCK_SIZE)), dtype=torch.int32, device=DEVICE)
        entries = torch.tensor(
            [range(num_seqs), *([number] * num_seqs for number in (context - num_tokens, num_tokens, 1))]
        )
        num_decodes = num_seqs if num_tokens == 1 else 0
        token_ids = torch.randint(0, shape.vocab_size, (num_seqs * num_tokens - num_decodes,))
        last_token_ids = torch.randint(0, shape.vocab_size, (num_seqs,), device=DEVICE)

        def run(
            backend: Backend, inputs: tuple[Any, ...] = (entries, num_decodes, token_ids, tables, last_token_ids)
        ) -> Sequence[Tensor]:
            layout = step_layout(*inputs, BLOCK_SIZE, backend=backend)
            return *layout[:2], *layout.slot_mappings, *layout.block_tables, *layout[4:7]

        yield Case("step_layout", load, run, 2 * tables.numel() * 4 + 4 * num_seqs * num_tokens * 8)


def quantized_linear(shape: Shape) -> Iterator[Case]:
    """Yield layers of 8 and 4 bits: the gate and up projections, with few rows and with many."""
    weight = random(2 * shape.intermediate_size, shape.hidden_size)
    out_features, in_features = weight.shape
    for name, (layer, bytes_per_weight) in LAYERS.items():
        by_backend = {backend: layer(weight, backend=Backend(backend)) for backend in ("triton", "torch")}
        for n in shape.num_tokens:
            x = random(n, in_features)
            yield Case(
                f"linear, {name}",
                f"{n} tokens",
                lambda backend, layers=by_backend, x=x: (layers[backend.name](x),),
                int(weight.numel() * bytes_per_weight) + n * (in_features + out_features) * DTYPE.itemsize,
                2 * n * weight.numel(),
            )


def mixtures(shape: Shape) -> Iterator[Case]:
    """Yield what a mixture of experts has beside norms: routing, gate and up projections of its experts, and the sum."""
    mixture, item = shape.mixture, DTYPE.itemsize
    per_token, size = mixture.experts_per_token, mixture.intermediate_size
    weights = random(mixture.num_experts, 2 * size, mixture.hidden_size)
    kinds = {f"{DTYPE}".removeprefix("torch."): (PackedLinear, float(item)), **LAYERS}
    for n in shape.num_tokens:
        logits = random(n, mixture.num_experts).float()
        yield Case(
            "experts, route",
            f"{n} tokens",
            lambda backend, x=logits: experts.route(x, per_token, normalizes=True, backend=backend),
            logits.numel() * 4 + n * per_token * 8,
        )
        chosen = experts.route(logits, per_token, normalizes=True, backend=Backend("torch")).experts
        yield Case(
            "experts, assign",
            f"{n} tokens",
            lambda backend, x=chosen: experts.assign(x, mixture.num_experts, backend=backend),
            2 * n * per_token * 4,
        )
        gate_up = random(n * per_token, 2 * size)
        yield Case(
            "experts, clamped SwiGLU",
            f"{n} tokens",
            lambda backend, x=gate_up: (experts.clamped_swiglu(x, 7.0, 1.702, backend=backend),),
            3 * gate_up.numel() // 2 * item,
        )
        outputs, shares = random(n, per_token, mixture.hidden_size), torch.rand(n, per_token, device=DEVICE)
        yield Case(
            "experts, sum",
            f"{n} tokens",
            lambda backend, x=outputs, shares=shares: (experts.weighted_sum(x, shares, backend=backend),),
            (outputs.numel() + n * mixture.hidden_size) * item,
        )
    for name, (layer, bytes_per_weight) in kinds.items():
        layers = {
            backend: experts.ExpertLinear(
                [layer(weight, backend=Backend(backend)) for weight in weights], backend=Backend(backend)
            )
            for backend in ("triton", "torch")
        }
        for n in shape.num_tokens:
            yield _experts(mixture, f"experts, linear, {name}", layers, n, int(weights[0].numel() * bytes_per_weight))


def _experts(mixture: Mixture, kernel: str, layers: dict[str, Any], num_tokens: int, bytes_per_expert: int) -> Case:
    """Have each token use experts by chance, all as likely."""
    order = torch.rand(num_tokens, mixture.num_experts, device=DEVICE).argsort(dim=1)
    chosen = order[:, : mixture.experts_per_token].int()
    assignment = experts.assign(chosen, mixture.num_experts, backend=Backend("torch"))
    x = random(num_tokens, mixture.hidden_size)
    num_features = x.numel() + chosen.numel() * 2 * mixture.intermediate_size
    return Case(
        kernel,
        f"{num_tokens} tokens",
        lambda backend: (layers[backend.name](x, assignment),),
        len(chosen.unique()) * bytes_per_expert + num_features * DTYPE.itemsize,
        2 * chosen.numel() * 2 * mixture.intermediate_size * mixture.hidden_size,
    )


def sampling(shape: Shape) -> Iterator[Case]:
    """Yield what follows the layers: each row of logits is read at least once."""
    for n in (1, 64):
        logits = torch.randn(n, shape.vocab_size, device=DEVICE) * 3
        settings = {
            "temperature": torch.full((n,), 0.8, device=DEVICE),
            "top_k": torch.full((n,), 50, device=DEVICE),
            "top_p": torch.full((n,), 0.95, device=DEVICE),
            "min_p": None,
            "seeds": torch.arange(n, device=DEVICE),
            "positions": torch.arange(n, device=DEVICE),
        }
        unfiltered = settings | dict.fromkeys(("top_k", "top_p"))
        kinds = {
            "filtered": settings,
            "min_p": unfiltered | {"min_p": torch.full((n,), 0.05, device=DEVICE)},
            "unfiltered": unfiltered,
            "greedy": unfiltered | {"temperature": None},
        }
        for name, some in kinds.items():
            yield Case(
                f"sample, {name}",
                f"{n} rows",
                lambda backend, logits=logits, some=some: (sample(logits, **some, backend=backend),),
                logits.numel() * 4,
                num_may_differ=int(name == "unfiltered" and n > 1),
            )
        histories = list(torch.randint(0, shape.vocab_size, (n, 1000), dtype=torch.int32, device=DEVICE))
        penalties = [100] * n, [1.1] * n, [0.1] * n, [0.1] * n
        yield Case(
            "penalties",
            f"{n} rows, 1000 tokens",
            lambda backend, logits=logits, histories=histories, penalties=penalties: _changed(
                logits, lambda x: penalize(x, range(len(x)), histories, *penalties, backend=backend)
            ),
            2 * logits.numel() * 4,  # the copy; and the table of counts is cleared
        )
        bitmask = torch.randint(-(2**31), 2**31, (n, -(-shape.vocab_size // 32)), device=DEVICE).int()
        yield Case(
            "token_bitmask",
            f"{n} rows",
            lambda backend, logits=logits, bitmask=bitmask: _changed(
                logits, lambda x: apply_token_bitmask(x, bitmask, range(len(x)), backend=backend)
            ),
            2 * logits.numel() * 4,
        )


def _changed(logits: Tensor, change: Callable[[Tensor], None]) -> Sequence[Tensor]:
    copy = logits.clone()
    change(copy)
    return (copy,)


def blocks(shape: Shape) -> Iterator[Case]:
    """Yield copies of blocks in all layers, and the two halves of a move to other memory and back."""
    num_blocks, block = 64, (BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    tensors = [random(2 * num_blocks, *block) for _ in range(2 * shape.num_layers)]
    pairs = [(2 * index, 2 * index + 1) for index in range(num_blocks)]
    by_backend = {backend: CacheBlocks(tensors, backend=Backend(backend)) for backend in ("triton", "torch")}

    def run(backend: Backend) -> Sequence[Tensor]:
        by_backend[backend.name].copy(pairs)
        return tensors[0], tensors[-1]

    num_bytes = num_blocks * sum(tensor[0].numel() * DTYPE.itemsize for tensor in tensors)
    yield Case("cache_blocks, copy", f"{num_blocks} blocks", run, 2 * num_bytes)
    sources, targets = (list(ids) for ids in zip(*pairs, strict=True))
    yield Case(
        "cache_blocks, gather",
        f"{num_blocks} blocks",
        lambda backend: (by_backend[backend.name].gather(sources),),
        2 * num_bytes,
    )
    content = by_backend["torch"].gather(sources)

    def scatter(backend: Backend) -> Sequence[Tensor]:
        by_backend[backend.name].scatter(targets, content)
        return tensors[0], tensors[-1]

    yield Case("cache_blocks, scatter", f"{num_blocks} blocks", scatter, 2 * num_bytes)


GROUPS: list[Callable[[Shape], Iterator[Case]]] = [
    elementwise,
    attention,
    layouts,
    quantized_linear,
    mixtures,
    sampling,
    blocks,
]


def largest_error(case: Case) -> tuple[float, bool]:
    """Return the largest difference from the reference, and whether all are within the tolerance."""
    actual = [x.clone() for x in case.values(case.run(Backend("triton")))]
    expected = case.values(case.run(Backend("torch")))
    pairs = list(zip(actual, expected, strict=True))
    error = max(float(torch.where(a == e, 0, a - e).abs().max()) for a, e in pairs)
    rtol, atol = case.tolerance
    return error, all(
        torch.allclose(a, e, rtol=rtol, atol=atol)
        if a.is_floating_point()
        else int((a != e).sum()) <= case.num_may_differ
        for a, e in pairs
    )


def seconds_of(run: Callable[[], object]) -> tuple[float, bool]:
    """Return the median time on the GPU, each run with cold caches, and whether it is that of a CUDA graph.

    A graph leaves out what it takes the host to launch kernels, which is longer than small ones run. What copies from the host
    cannot be captured in one.
    """
    run()  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        torch.cuda.synchronize()
        return _timed(run), False
    return _timed(graph.replay), True


def _timed(run: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(run, warmup=10, rep=50, return_mode="median")) * 1e-3


def bounds() -> dict[str, float]:
    """Return bytes a second of a copy, read and written, and operations a second of a matrix product."""
    source, target = (torch.empty(COPY_BYTES // 2, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    left, right = random(MATMUL_SIZE, MATMUL_SIZE), random(MATMUL_SIZE, MATMUL_SIZE)
    return {
        "copy_bytes_per_s": COPY_BYTES / _timed(lambda: target.copy_(source)),  # in no graph: there it is slower
        "matmul_flops_per_s": 2 * MATMUL_SIZE**3 / _timed(lambda: left @ right),
    }


def share_of_bound(case: Case, seconds: float, rates: dict[str, float]) -> dict[str, Any]:
    """Return a kernel's time, which rate bounds it, and its share of the bound."""
    bound_s = {
        "copy": case.num_bytes / rates["copy_bytes_per_s"],
        "matmul": case.num_flops / rates["matmul_flops_per_s"],
    }
    bound = max(bound_s, key=lambda name: bound_s[name])
    return {"us": round(seconds * 1e6, 2), "bound": bound, "share": round(bound_s[bound] / seconds, 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    torch.manual_seed(0)
    rates = bounds() if HAS_GPU else None
    rows: list[dict[str, Any]] = []
    for group in GROUPS:
        for case in group(QWEN3_8B if HAS_GPU else TINY):
            error, is_right = largest_error(case)
            row = {"kernel": case.kernel, "load": case.load, "is_right": is_right, "largest_error": error}
            if rates is not None and is_right:
                seconds, row["is_graph"] = seconds_of(lambda case=case: case.run(Backend("triton")))
                row |= share_of_bound(case, seconds, rates)
            rows.append(row)
            print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            write(out, {"environment": environment(), "dtype": str(DTYPE), "rates": rates, "kernels": rows})
    return 0 if all(row["is_right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
