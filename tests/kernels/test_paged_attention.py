import math
import platform
import random
from functools import partial
from pathlib import Path

import pytest
import torch

import flyball_kernels
from attention_inputs import attention_inputs, ordered_for
from flyball_kernels import Backend, kv_cache
from flyball_kernels.paged_attention import kernel, reference
from kernel_checks import CPP, DEVICE, TOLERANCES, assert_close, assert_guards_intact, guarded, poisoned


def paged_attention(*, query, k_cache, v_cache, **arguments):
    """The op in C++, with caches in plain order."""
    caches = ordered_for(CPP, {"k_cache": k_cache, "v_cache": v_cache})
    return flyball_kernels.paged_attention(query, **caches, **arguments, backend=CPP)


ONE_KV_HEAD = {
    "num_q_heads": 3,
    "num_kv_heads": 1,
}  # half the work for Triton's interpreter; test_head_groups has others
RAGGED = ([1, 7, 1, 33, 130, 0, 1], [1, 7, 65, 200, 130, 40, 17])


def prefers_dot():
    """Return whether bf16 goes by the bf16 dot product or by matrix units here."""
    is_amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    is_fast = platform.machine() != "x86_64" or is_amd or torch.ops.flyball.linear_bf16_arithmetic() == "AMX"
    return torch.ops.flyball.has_dot() and is_fast


def run_triton(*, out, **arguments):
    arguments = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    with poisoned():  # what splits leave for each other
        out.copy_(kernel.paged_attention(**arguments, out=out.to(DEVICE)))


ROUNDED = {
    "cpp-int8": (paged_attention, torch.int8),
    "triton-int8": (run_triton, torch.int8),
    "triton-fp8": (run_triton, torch.float8_e4m3fn),
}


@pytest.fixture(params=ROUNDED)
def check_rounded(request):
    """``check`` with a KV cache of 8 bits that the op under test can read."""
    run, kv_dtype = ROUNDED[request.param]
    return partial(check, run, kv_dtype=kv_dtype)


@pytest.fixture(params=[paged_attention, run_triton], ids=["cpp", "triton"])
def run(request):
    """The op under test: C++ through the public op, or the Triton kernel in the interpreter, on a GPU if there is one."""
    return request.param


def check(
    run,
    query_lens,
    context_lens,
    sliding_window=None,
    softcap=None,
    scale=None,
    sinks=None,
    dot=None,
    num_splits=None,
    **shape,
):
    inputs = attention_inputs(query_lens, context_lens, **shape)
    scale = scale or inputs["query"].shape[-1] ** -0.5
    bounds = {"sliding_window": sliding_window, "softcap": softcap, "sinks": sinks}
    out, buffer = guarded(*inputs["query"].shape, dtype=inputs["query"].dtype)
    chosen = {name: value for name, value in (("dot", dot), ("num_splits", num_splits)) if value is not None}
    run(**inputs, scale=scale, max_query_len=max(query_lens, default=0), **bounds, **chosen, out=out)
    expected = reference.paged_attention(
        **inputs, scale=scale, **bounds, out=torch.full_like(inputs["query"], float("nan"))
    )
    # Triton and the bf16 dot product round the softmax weights to the dtype of the values, as every flash attention does.
    # Each weight moves by at most 2**-9 of itself in bf16 (2**-12 in fp16), so a result moves by at most that part of the
    # weighted mean distance between values and result: with values of a normal distribution below 4, the absolute
    # tolerance. It is of the size of the output's own rounding, but relative to the values and not to the result.
    rounds = run is run_triton or (out.dtype == torch.bfloat16 and (prefers_dot() if dot is None else dot))
    slack = 2.0 if rounds and out.dtype != torch.float32 else 1.0
    # Triton rounds weights of values in 8 bits to bf16 if the query is fp16
    dtype = torch.bfloat16 if slack == 2.0 and kv_cache.is_rounded(inputs["v_cache"]) else out.dtype
    atol = TOLERANCES[dtype]["atol" if slack == 1.0 else "rtol"]
    torch.testing.assert_close(out, expected, rtol=TOLERANCES[dtype]["rtol"] * slack, atol=atol)
    assert_guards_intact(buffer)


def test_prefill_chunks_and_decodes_in_one_call(run, dtype):
    check(run, *RAGGED, dtype=dtype)


@pytest.mark.parametrize("head_dim", [1, 16, 20, 80, 96, 128, 256])
def test_head_sizes(run, head_dim):
    check(run, [1, 9, 40], [70, 9, 41], head_dim=head_dim)


@pytest.mark.parametrize("head_dim", [1, 20, 64, 80])
def test_head_sizes_of_16_bits(run, head_dim):
    check(run, [1, 9, 40], [70, 9, 41], head_dim=head_dim, dtype=torch.bfloat16)
    check(run, [1, 9, 40], [70, 9, 41], head_dim=head_dim, dtype=torch.float16)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (3, 1), (8, 1), (16, 2), (9, 1), (14, 2), (100, 1)])
def test_head_groups(run, heads):
    check(run, [1, 20, 3], [130, 20, 77], num_q_heads=heads[0], num_kv_heads=heads[1])


@pytest.mark.parametrize("block_size", [1, 5, 16, 128])
def test_block_sizes(run, block_size):
    check(run, *RAGGED, block_size=block_size, **ONE_KV_HEAD)


@pytest.mark.parametrize("context_len", [15, 16, 17, 63, 64, 65, 511, 512, 513, 1025, 1500])
def test_contexts_that_cross_blocks_tiles_and_splits(run, context_len):
    check(run, [1, 2], [context_len, context_len], **ONE_KV_HEAD)


@pytest.mark.parametrize("sliding_window", [1, 2, 16, 63, 64, 100, 1000])
def test_sliding_window(run, sliding_window):
    check(run, [1, 7, 1, 90, 2], [900, 7, 65, 200, 700], sliding_window=sliding_window, **ONE_KV_HEAD)


@pytest.mark.parametrize("sliding_window", [90, 100])
def test_a_window_that_begins_shortly_before_a_split(run, sliding_window):
    check(run, [1, 2], [600, 602], sliding_window=sliding_window, **ONE_KV_HEAD)


@pytest.mark.parametrize("softcap", [0.5, 50.0])
@pytest.mark.parametrize("scale", [0.125, 4.0])
def test_softcap(run, softcap, scale):
    check(run, [1, 7, 1, 90], [600, 7, 65, 200], softcap=softcap, scale=scale, sliding_window=100, **ONE_KV_HEAD)


@pytest.mark.parametrize("sliding_window", [None, 100])
def test_sinks(run, sliding_window):
    sinks = torch.tensor([0.5, -200.0, 3.0])
    check(run, [1, 7, 1, 90], [600, 7, 65, 200], sinks=sinks, sliding_window=sliding_window, **ONE_KV_HEAD)


def test_a_sink_takes_all(run):
    check(run, [1, 40], [600, 40], sinks=torch.full((6,), 300.0))


TINY = {**ONE_KV_HEAD, "head_dim": 16}
check_triton = partial(check, run_triton)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 64])
def test_triton_splits_contexts(num_splits):
    """Contexts with fewer keys than splits, and none for a sequence without tokens."""
    check_triton([1, 0, 1], [1, 5, 300], num_splits=num_splits, **TINY)
    check_triton([3, 2], [3, 130], num_splits=num_splits, **TINY)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_triton_tiles_of_decodes_and_prefill_chunks(num_splits):
    """In any order, with a last tile of one row and of all rows."""
    check_triton([1, 22, 0, 43, 1, 21], [70, 40, 9, 43, 7, 21], num_splits=num_splits, **TINY)


def test_triton_splits_of_16_bits(dtype):
    check_triton([1, 9, 2], [70, 40, 141], num_splits=3, head_dim=20, dtype=dtype, num_kv_heads=2, num_q_heads=4)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_triton_splits_of_windows_with_sinks_and_softcap(num_splits):
    bounds = {"sliding_window": 70, "softcap": 2.0, "sinks": torch.tensor([0.5, -200.0, 300.0])}
    check_triton([1, 30, 2], [200, 90, 100], num_splits=num_splits, **bounds, **TINY)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_triton_searches_sequences_in_turns(num_splits, monkeypatch):
    shape = kernel.tile_shape
    monkeypatch.setattr(kernel, "tile_shape", lambda *arguments: shape(*arguments) | {"SEARCH": 2})
    check_triton([1, 22, 1, 0, 25, 1], [30, 22, 7, 3, 30, 1], num_splits=num_splits, **TINY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_key_that_is_not_a_number_shows_in_the_rows_that_see_it(dtype):
    inputs = attention_inputs([1, 40], [70, 70], **ONE_KV_HEAD, dtype=dtype)
    for sequence in range(2):
        inputs["k_cache"][inputs["block_tables"][sequence, 50 // 16], 50 % 16] = float("nan")
    out = torch.zeros_like(inputs["query"])
    paged_attention(**inputs, scale=0.125, max_query_len=40, out=out)
    sees_it = torch.tensor([True] + [position >= 50 for position in range(30, 70)])
    assert out.isnan().flatten(1).all(1).tolist() == sees_it.tolist()
    assert out.isfinite().flatten(1).all(1).tolist() == (~sees_it).tolist()


def test_blocks_before_a_window_are_not_read(run):
    inputs = attention_inputs([1, 20], [200, 120], **TINY)
    spare = (set(range(len(inputs["k_cache"]))) - set(inputs["block_tables"].flatten().tolist())).pop()
    out, expected = (torch.full_like(inputs["query"], float("nan")) for _ in range(2))
    settings = {"scale": 0.25, "sliding_window": 30}
    reference.paged_attention(**inputs, **settings, out=expected)
    for sequence, first_key in enumerate((200 - 30, 120 - 20 + 1 - 30)):
        inputs["block_tables"][sequence, : first_key // 16] = spare  # all of it NaN
    run(**inputs, **settings, max_query_len=20, out=out)
    assert_close(out, expected)


@pytest.mark.parametrize(
    ("num_programs", "max_context_len", "split_bytes", "expected"),
    [
        (8, 32768, 2**13, 33),  # one sequence with 8 KV heads: two programs for each of 132 multiprocessors
        (8, 1000, 2**13, 3),  # too few keys for more
        (8, 100, 2**13, 1),
        (64, 4096, 2**16, 4),
        (264, 4096, 2**18, 1),  # filled without
        (2048, 40000, 2**20, 3),  # filled, but long contexts would hold up the others
        (2048, 131072, 2**24, 4),  # as many as there is scratch memory for
        (1, 10**6, 2**10, 64),
    ],
)
def test_number_of_splits(num_programs, max_context_len, split_bytes, expected):
    assert kernel.choose_num_splits(num_programs, max_context_len, 132, split_bytes) == expected


def test_programs_are_hardly_more_than_tiles(monkeypatch):
    """One for each tile where no sequence has two, otherwise at most one more for each sequence."""
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *arguments, **constants: None

    monkeypatch.setattr(kernel, "paged_attention_kernel", Kernel())
    for lens in ([1] * 50, [1] * 48 + [1000, 1000], [10, 30, 500]):
        inputs = attention_inputs(lens, lens, num_q_heads=8, num_kv_heads=2, head_dim=16, dtype=torch.float16)
        out = torch.empty_like(inputs["query"])
        settings = {"scale": 1.0, "max_query_len": max(lens), "sliding_window": None, "num_splits": 1}
        kernel.paged_attention(**inputs, **settings, out=out)
        tokens = kernel.tile_shape(torch.float16, 4, 16, max(lens))["BLOCK_M"] // 4
        num_tiles = sum(-(-length // tokens) for length in lens)
        programs, splits = grids.pop()
        assert splits == 1
        assert 2 * num_tiles <= programs <= 2 * (num_tiles + (0 if max(lens) <= tokens else len(lens)))


def test_softcap_of_16_bits(run):
    check(run, [1, 9, 40], [70, 9, 41], softcap=5.0, scale=1.0, dtype=torch.bfloat16)


@pytest.fixture(params=[False, True], ids=["fma", "dot"])
def dot(request):
    """Either arithmetic of bf16."""
    if request.param and not torch.ops.flyball.has_dot():
        pytest.skip("this CPU has no bf16 dot product instruction")
    return request.param


check_bf16 = partial(check, paged_attention, dtype=torch.bfloat16)


@pytest.mark.parametrize("head_dim", [1, 2, 15, 16, 20, 33, 64, 72, 80, 96, 128, 256])
def test_head_sizes_of_bf16(dot, head_dim):
    check_bf16([1, 9, 40, 3], [70, 9, 141, 65], head_dim=head_dim, dot=dot)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (3, 1), (7, 1), (16, 2), (9, 1), (14, 2), (100, 1)])
def test_head_groups_of_bf16(dot, heads):
    check_bf16([1, 20, 3], [130, 20, 77], num_q_heads=heads[0], num_kv_heads=heads[1], dot=dot)


@pytest.mark.parametrize("block_size", [1, 5, 16, 128])
@pytest.mark.parametrize("sliding_window", [None, 1, 2, 15, 64, 100])
def test_blocks_and_windows_of_bf16(dot, block_size, sliding_window):
    check_bf16(*RAGGED, block_size=block_size, sliding_window=sliding_window, dot=dot)


@pytest.mark.parametrize("context_len", [*range(60, 70), 127, 128, 129, 513, 1500])
def test_contexts_that_end_within_a_pair_of_keys(dot, context_len):
    check_bf16([1, 2, 13, 40, 60], [context_len] * 5, dot=dot)


@pytest.mark.parametrize("softcap", [None, 0.5, 50.0])
@pytest.mark.parametrize("scale", [0.125, 1.0])
def test_softcap_and_sinks_of_bf16(dot, softcap, scale):
    sinks = torch.tensor([0.5, -200.0, 3.0, 0.0, 1.0, 300.0])
    check_bf16([1, 7, 90], [600, 65, 200], softcap=softcap, scale=scale, sinks=sinks, sliding_window=100, dot=dot)


def test_weights_that_are_rounded_sum_to_one(dot):
    inputs = attention_inputs([1, 50, 90], [300, 50, 777], dtype=torch.bfloat16)
    inputs["v_cache"][:] = 3.0
    out = paged_attention(**inputs, scale=0.125, max_query_len=90, dot=dot)
    torch.testing.assert_close(out, torch.full_like(out, 3.0), rtol=0, atol=0)


SAME_BITS = {
    "heads of 64": {},
    "one query head for each KV head": {"num_q_heads": 2},
    "many query heads": {"num_q_heads": 14},
    "more query heads than rows of a tile": {"num_q_heads": 104, "num_kv_heads": 1},
    "heads of 80": {"head_dim": 80},
    "heads of 33": {"head_dim": 33},
    "blocks of 5": {"block_size": 5},
    "blocks of 32": {"block_size": 32},
}


@pytest.mark.parametrize("shape", SAME_BITS.values(), ids=SAME_BITS)
@pytest.mark.parametrize("sliding_window", [None, 70, 530])
def test_a_token_is_the_same_bits_in_any_chunk(dtype, shape, sliding_window):
    """Alone, as in a decode, among few, as with drafts, or among many; in the first run of keys or a later one."""
    for dot in (False, True) if dtype == torch.bfloat16 and torch.ops.flyball.has_dot() else (None,):
        check_chunks(700, dot, sliding_window, **shape, dtype=dtype)


def check_chunks(length, dot, sliding_window, **shape):
    inputs = attention_inputs([length], [length], **shape)
    sinks = torch.linspace(-1.0, 1.0, inputs["query"].shape[1])
    run = partial(paged_attention, scale=0.125, dot=dot, sliding_window=sliding_window, sinks=sinks)
    whole = run(**inputs, max_query_len=length)
    end = length
    while end > 0:
        begin = max(0, end - random.choice((1, 1, 2, 3, 5, 9, 17, 64, 150)))
        lens = {"cu_query_lens": torch.tensor([0, end - begin]).int(), "context_lens": torch.tensor([end]).int()}
        out = run(**{**inputs, "query": inputs["query"][begin:end], **lens}, max_query_len=end - begin)
        torch.testing.assert_close(out, whole[begin:end], rtol=0, atol=0)
        end = begin if random.random() < 0.5 else begin - random.randrange(60)


def test_the_dot_product_is_chosen_where_it_is_faster():
    """On AMD's cores, and with AMX; Intel's issue half as many a cycle."""
    inputs = attention_inputs([90, 1], [300, 300], dtype=torch.bfloat16)
    run = partial(paged_attention, **inputs, scale=0.125, max_query_len=90)
    torch.testing.assert_close(run(), run(dot=prefers_dot()), rtol=0, atol=0)


def test_dot_is_refused_where_there_is_none():
    with pytest.raises(ValueError, match="the bf16 dot product takes bfloat16 and a CPU with AVX512_BF16"):
        paged_attention(**attention_inputs([1], [1]), scale=1.0, max_query_len=1, dot=True)
    with pytest.raises(ValueError, match="dot=True is for the cpp backend; this is torch"):
        flyball_kernels.paged_attention(
            **attention_inputs([1], [1]), scale=1.0, max_query_len=1, dot=True, backend=Backend("torch")
        )


@pytest.mark.parametrize("head_dim", [1, 2, 15, 16, 20, 33, 64, 80, 96, 128, 256])
def test_head_sizes_of_8_bits(check_rounded, dtype, head_dim):
    check_rounded([1, 9, 40, 3], [70, 9, 141, 65], head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (3, 1), (8, 1), (16, 2), (9, 1), (14, 2), (100, 1)])
def test_head_groups_of_int8(run, heads):
    check(run, [1, 20, 3], [130, 20, 77], num_q_heads=heads[0], num_kv_heads=heads[1], kv_dtype=torch.int8)


@pytest.mark.parametrize("block_size", [1, 5, 16, 128])
@pytest.mark.parametrize("sliding_window", [None, 1, 2, 15, 64, 100])
def test_blocks_and_windows_of_int8(run, block_size, sliding_window):
    check(run, *RAGGED, block_size=block_size, sliding_window=sliding_window, kv_dtype=torch.int8)


@pytest.mark.parametrize("context_len", [15, 16, 17, 63, 64, 65, 511, 512, 513, 1500])
def test_contexts_of_int8(run, context_len):
    check(run, [1, 2, 13], [context_len, context_len, context_len], kv_dtype=torch.int8)


@pytest.mark.parametrize("context_len", [*range(60, 70), 127, 129, 1500])
def test_contexts_of_bf16_on_int8(dot, context_len):
    check(paged_attention, [13, 40, 60, 1], [context_len] * 4, dot=dot, dtype=torch.bfloat16, kv_dtype=torch.int8)


@pytest.mark.parametrize("head_dim", [1, 2, 15, 20, 33, 72])
def test_head_sizes_of_bf16_on_int8(dot, head_dim):
    lens = [1, 9, 40, 3], [70, 9, 141, 65]
    check(paged_attention, *lens, head_dim=head_dim, dot=dot, dtype=torch.bfloat16, kv_dtype=torch.int8)


@pytest.mark.parametrize("softcap", [None, 0.5, 50.0])
def test_softcap_and_sinks_of_8_bits(check_rounded, dtype, softcap):
    sinks = torch.tensor([0.5, -200.0, 3.0, 0.0, 1.0, 300.0])
    bounds = {"softcap": softcap, "sinks": sinks, "sliding_window": 100}
    check_rounded([1, 7, 90], [600, 65, 200], **bounds, dtype=dtype)


@pytest.mark.parametrize("num_splits", [2, 3])
@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
def test_triton_splits_of_8_bits(dtype, num_splits, kv_dtype):
    check_triton([1, 9, 2], [70, 40, 141], num_splits=num_splits, dtype=dtype, kv_dtype=kv_dtype, **TINY)


def test_triton_reads_e4m3():
    check_triton([1, 9, 2], [70, 40, 141], dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, **TINY)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
def test_rounding_to_8_bits_moves_an_output_no_further_than_its_bound(dtype, kv_dtype):
    """Each score moves by half a unit of its key times the sum of the query's magnitudes; with e the largest of them, each
    weight by a factor within exp(+-2e) (numerator and sum), and each value by half a unit of its own.

    The largest unit of e4m3 is 32 of 448, between 256 and 448."""
    lens = [1, 7, 90], [600, 65, 200]
    torch.manual_seed(0)
    exact = attention_inputs(*lens, dtype=dtype)
    rounded = {**exact, **{name: kv_cache.rounded(exact[name], kv_dtype) for name in ("k_cache", "v_cache")}}
    run = partial(flyball_kernels.paged_attention, backend=Backend("torch"))
    run = partial(paged_attention if kv_dtype == torch.int8 else run, scale=0.125, max_query_len=90)
    half_unit = {torch.int8: 1 / 254, torch.float8_e4m3fn: 16 / 448}[kv_dtype]
    most_key, most_value = (exact[name].nan_to_num().abs().max().item() for name in ("k_cache", "v_cache"))
    most_query = exact["query"].float().abs().sum(-1).max().item()
    weights = math.exp(2 * 0.125 * most_query * most_key * half_unit) - 1
    bound = most_value * (weights + half_unit) + most_value * 2**-7 * (dtype != torch.float32)
    moved = (run(**rounded).float() - run(**exact).float()).abs().max().item()
    assert 0 < moved < bound
    assert moved < (0.05 if kv_dtype == torch.int8 else 0.2)  # in fact far less: the errors of elements and keys cancel


def test_weights_of_an_int8_cache_sum_to_one(dot):
    inputs = attention_inputs([1, 50, 90], [300, 50, 777], dtype=torch.bfloat16)
    inputs["v_cache"][:] = 3.0
    inputs["k_cache"], inputs["v_cache"] = kv_cache.rounded(inputs["k_cache"]), kv_cache.rounded(inputs["v_cache"])
    out = paged_attention(**inputs, scale=0.125, max_query_len=90, dot=dot)
    torch.testing.assert_close(out, torch.full_like(out, 3.0), rtol=0, atol=0)


def test_an_int8_cache_of_zeros_gives_zeros(dtype):
    inputs = attention_inputs([1, 50], [300, 50], dtype=dtype)
    for name in ("k_cache", "v_cache"):
        inputs[name] = torch.zeros_like(kv_cache.rounded(inputs[name]))
    assert not paged_attention(**inputs, scale=0.125, max_query_len=50).any()


@pytest.mark.parametrize("sliding_window", [None, 100])
def test_int8_of_a_token_is_the_same_bits_in_any_chunk(dot, sliding_window):
    for shape in ({}, {"block_size": 5}, {"head_dim": 33}):
        check_chunks(700, dot, sliding_window, **shape, dtype=torch.bfloat16, kv_dtype=torch.int8)
    check_chunks(700, None, sliding_window, kv_dtype=torch.int8)


def test_an_int8_cache_must_have_room_for_scales():
    inputs = attention_inputs([1], [1], kv_dtype=torch.int8)
    with pytest.raises(ValueError, match=r"k_cache has shape \[4, 16, 2, 67\]; it must be \[any, any, any, 68\]"):
        paged_attention(**{**inputs, "k_cache": inputs["k_cache"][..., 1:].contiguous()}, scale=1.0, max_query_len=1)
    with pytest.raises(ValueError, match=r"v_cache is torch\.float32; it must be torch\.int8"):
        paged_attention(**{**inputs, "v_cache": inputs["v_cache"].float()}, scale=1.0, max_query_len=1)


def test_e4m3_is_not_for_cpp():
    inputs = attention_inputs([1], [1], kv_dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"float8_e4m3fn is for the triton and torch backends; this is cpp\. Use int8"):
        paged_attention(**inputs, scale=1.0, max_query_len=1)


def test_scales_must_lie_where_a_gpu_can_read_them():
    inputs = attention_inputs([1], [1], num_q_heads=1, num_kv_heads=1, head_dim=3, block_size=5, kv_dtype=torch.int8)
    with pytest.raises(ValueError, match="triton has blocks of 35 bytes; they must be a multiple of 4"):
        flyball_kernels.paged_attention(**inputs, scale=1.0, max_query_len=1, backend=Backend("triton"))


def test_no_sequences(run):
    check(run, [], [])


def test_agrees_with_torch():
    inputs = attention_inputs([50], [50], block_size=50)
    block = inputs["block_tables"][0, 0]
    query, key, value = (
        x.transpose(0, 1) for x in (inputs["query"], inputs["k_cache"][block], inputs["v_cache"][block])
    )
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert_close(paged_attention(**inputs, scale=64**-0.5, max_query_len=50), expected.transpose(0, 1))


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("sliding_window", [None, 100])
@pytest.mark.parametrize("heads", [(5, 5), (12, 4), (16, 8), (12, 6)])
def test_decodes_with_several_heads_in_a_task(dtype, heads, sliding_window, kv_dtype):
    """There are many of them, so that few threads have enough to do without splitting their heads."""
    context_lens = [700, 64, 65, 1, 128, 513, 1, 33, 600, 2, 127, 66]
    sinks = torch.linspace(-3.0, 3.0, heads[0])  # tells the heads apart
    shape = {"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 32, "dtype": dtype, "kv_dtype": kv_dtype}
    check(paged_attention, [1] * 11 + [2], context_lens, sliding_window=sliding_window, sinks=sinks, **shape)


def test_a_decode_is_the_same_bits_in_any_batch(dtype):
    inputs = attention_inputs([1] * 6 + [40], [5, 64, 700, 513, 1100, 90, 40], dtype=dtype)
    together = paged_attention(**inputs, scale=0.125, max_query_len=40)
    for i in range(6):
        alone = {
            **inputs,
            "query": inputs["query"][i : i + 1],
            "block_tables": inputs["block_tables"][i : i + 1],
            "cu_query_lens": torch.tensor([0, 1], dtype=torch.int32),
            "context_lens": inputs["context_lens"][i : i + 1],
        }
        torch.testing.assert_close(
            paged_attention(**alone, scale=0.125, max_query_len=1), together[i : i + 1], rtol=0, atol=0
        )


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("sliding_window", [None, 100])
def test_a_decode_is_the_same_bits_however_many_heads_its_task_has(dtype, sliding_window, kv_dtype, set_num_threads):
    """Without a window, tasks of 17 runs of keys have all 7 KV heads, up to 4, up to 2, or one."""
    query_lens, context_lens = [1] * 11 + [2], [700, 64, 65, 1, 128, 513, 1, 1100, 600, 2, 127, 66]
    shape = {"num_q_heads": 14, "num_kv_heads": 7, "head_dim": 32, "dtype": dtype, "kv_dtype": kv_dtype}
    inputs = attention_inputs(query_lens, context_lens, **shape)
    run = partial(paged_attention, **inputs, scale=0.125, max_query_len=2, sliding_window=sliding_window)
    outs = []
    for num_threads in (1, 7, 14, 28):
        set_num_threads(num_threads)
        outs.append(run())
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=0, atol=0)


def test_large_scores_do_not_overflow():
    inputs = attention_inputs([1, 30], [100, 30])
    inputs["query"] *= 1e4
    out = paged_attention(**inputs, scale=1.0, max_query_len=30)
    expected = reference.paged_attention(**inputs, scale=1.0, sliding_window=None, out=torch.empty_like(out))
    # scores near 1e5 leave 2**-7 of absolute precision in fp32, and so does the exponential of their difference
    torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("query", lambda x: x[:, :5], "query has 5 heads; it must be a multiple of the cache's 2"),
        ("query", lambda x: x.bfloat16(), r"k_cache is torch\.float32; it must be torch\.bfloat16"),
        ("query", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), "query has strides"),
        ("v_cache", lambda x: x[:-1], "v_cache has shape"),
        ("block_tables", lambda x: x.long(), r"block_tables is torch\.int64; it must be torch\.int32"),
        ("block_tables", lambda x: x[:1], r"block_tables has shape \[1, .*it must be \[2, any\]"),
        ("cu_query_lens", lambda x: x[1:], r"cu_query_lens has shape \[2\]; it must be \[3\]"),
        ("context_lens", lambda x: x[0], "context_lens has shape"),
    ],
)
def test_refuses_what_does_not_fit(name, change, message):
    inputs = attention_inputs([1, 5], [8, 9])
    inputs[name] = change(inputs[name])
    with pytest.raises(ValueError, match=message):
        paged_attention(**inputs, scale=1.0, max_query_len=5)


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("block_tables", (1, 0), -1, "block_tables holds -1; its values must be at least 0 and below 5"),
        ("block_tables", (0, 0), 5, "block_tables holds 5; its values must be at least 0 and below 5"),
        (
            "context_lens",
            1,
            33,
            "sequence 1 has 5 query tokens and a context of 33; .* within the 32 of its block table",
        ),
        ("context_lens", 1, 4, "sequence 1 has 5 query tokens and a context of 4"),
        ("context_lens", 0, -1, "sequence 0 has 1 query tokens and a context of -1"),
        ("cu_query_lens", 1, 7, "sequence 1 has -1 query tokens"),
        ("cu_query_lens", 2, 7, "cu_query_lens goes from 0 to 7; it must go from 0 to 6"),
        ("cu_query_lens", 0, -1, "cu_query_lens goes from -1 to 6"),
    ],
)
def test_lengths_and_blocks_out_of_range_are_errors(name, index, value, message):
    inputs = attention_inputs([1, 5], [8, 9])
    inputs[name][index] = value
    with pytest.raises(IndexError, match=message):
        paged_attention(**inputs, scale=1.0, max_query_len=5)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # numpy's, in Triton's interpreter
def test_a_sequence_of_nan_leaves_the_others_alone(run, dtype):
    inputs = attention_inputs(*RAGGED, dtype=dtype, **ONE_KV_HEAD)
    clean, dirty = (torch.zeros_like(inputs["query"]) for _ in range(2))
    run(**inputs, scale=0.125, max_query_len=130, sliding_window=None, out=clean)
    bad = 3
    for block in inputs["block_tables"][bad, : -(-RAGGED[1][bad] // 16)].tolist():
        inputs["k_cache"][block] = inputs["v_cache"][block] = float("nan")
    run(**inputs, scale=0.125, max_query_len=130, sliding_window=None, out=dirty)
    rows = slice(inputs["cu_query_lens"][bad], inputs["cu_query_lens"][bad + 1])
    assert dirty[rows].isnan().all()
    dirty[rows] = clean[rows]
    torch.testing.assert_close(dirty, clean, rtol=0, atol=0)


def test_a_sequence_of_nan_scales_leaves_the_others_alone(dtype):
    inputs = attention_inputs(*RAGGED, dtype=dtype, kv_dtype=torch.int8)
    run = partial(paged_attention, scale=0.125, max_query_len=130)
    clean, bad = run(**inputs), 3
    blocks = inputs["block_tables"][bad, : -(-RAGGED[1][bad] // 16)].long()
    for name in ("k_cache", "v_cache"):
        inputs[name][blocks] = kv_cache.rounded(torch.full((len(blocks), 16, 2, 64), float("nan")))
    dirty = run(**inputs)
    rows = slice(inputs["cu_query_lens"][bad], inputs["cu_query_lens"][bad + 1])
    assert dirty[rows].isnan().all()
    dirty[rows] = clean[rows]
    torch.testing.assert_close(dirty, clean, rtol=0, atol=0)


def test_window_of_no_tokens():
    with pytest.raises(ValueError, match="sliding_window is 0; it must be at least 1"):
        paged_attention(**attention_inputs([1], [1]), scale=1.0, max_query_len=1, sliding_window=0)


def test_sinks_of_other_heads():
    with pytest.raises(ValueError, match=r"sinks has shape \[2\]; it must be \[6\]"):
        paged_attention(**attention_inputs([1], [1]), scale=1.0, max_query_len=1, sinks=torch.zeros(2))


def test_softcap_of_nothing():
    with pytest.raises(ValueError, match=r"softcap is 0\.0; it must be above 0, or None"):
        paged_attention(**attention_inputs([1], [1]), scale=1.0, max_query_len=1, softcap=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_large_batch_on_a_gpu(dtype):
    check_triton([1] * 60 + [700, 1, 333], [*range(1, 1200, 20), 1500, 4000, 333], head_dim=128, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(16, 8), (32, 4), (8, 8)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_decodes_on_a_gpu(heads, head_dim):
    shape = {"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim, "dtype": torch.bfloat16}
    check_triton([1], [20000], **shape)
    check_triton([1, 1, 5], [9000, 17, 300], **shape)
    check_triton([1] * 40 + [600], [*range(100, 4100, 100), 900], sliding_window=500, **shape)
