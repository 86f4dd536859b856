from functools import partial

import pytest
import torch

import flyball_kernels
from flyball_kernels import Backend, kv_cache
from flyball_kernels.rope_kv_write import reference
from kernel_checks import CPP, DEVICE, TOLERANCES, TRITON, assert_close, poisoned

rope_kv_write = partial(flyball_kernels.rope_kv_write, backend=CPP)


BOTH = pytest.mark.parametrize(("backend", "device"), [(CPP, "cpu"), (TRITON, DEVICE)], ids=["cpp", "triton"])


E4M3 = torch.float8_e4m3fn
WRITERS = {
    "cpp-int8": (CPP, "cpu", torch.int8),
    "triton-int8": (TRITON, DEVICE, torch.int8),
    "triton-fp8": (TRITON, DEVICE, E4M3),
}
REFERENCE = {"torch-fp8": (Backend("torch"), "cpu", E4M3)}


def plain(caches, backend):
    """Return what a backend has written in plain order, on the CPU."""
    return [
        kv_cache.reordered(cache.cpu(), order, "plain")
        for cache, order in zip(caches, kv_cache.orders(backend), strict=True)
    ]


def rounded_by(writers):
    return pytest.mark.parametrize(("backend", "device", "kv_dtype"), writers.values(), ids=writers)


def inputs(num_tokens, num_q_heads, num_kv_heads, head_dim, rotary_dim, dtype, table_dtype=torch.float32):
    return {
        "qkv": torch.randn(num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim, dtype=dtype),
        "positions": torch.randint(0, 50, (num_tokens,)),
        "cos_sin_cache": torch.randn(50, rotary_dim, dtype=table_dtype),
        "slot_mapping": torch.randperm(8 * 5)[:num_tokens],
    }


@BOTH
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "shape", [(0, 2, 1, 4, 4), (1, 1, 1, 2, 2), (7, 12, 4, 64, 64), (9, 4, 2, 96, 10), (40, 8, 1, 80, 20)]
)
def test_equals_the_reference(shape, norm, dtype, backend, device):
    check_equal(inputs(*shape, dtype), shape, norm, dtype, backend, device)


@BOTH
@pytest.mark.parametrize("normed", [(True, False), (False, True)], ids=["query", "key"])
def test_one_norm_alone(normed, backend, device):
    shape = (5, 4, 2, 48, 32)
    check_equal(inputs(*shape, torch.float32), shape, normed, torch.float32, backend, device)


@BOTH
def test_norm_with_an_offset(dtype, backend, device):
    shape = (5, 4, 1, 32, 32)
    check_equal(inputs(*shape, dtype), shape, True, dtype, backend, device, norm_offset=1.0)


@BOTH
@pytest.mark.parametrize("shape", [(3, 71, 1, 16, 16), (2, 5, 5, 256, 64), (2, 1, 1, 128, 2)])
def test_numbers_of_heads_and_rotary_dimensions(shape, backend, device):
    check_equal(inputs(*shape, torch.float32), shape, True, torch.float32, backend, device)


@BOTH
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # numpy's, in the interpreter
def test_values_stay_the_same_bits_whatever_they_are(backend, device):
    tensors, caches = inputs(2, 2, 1, 8, 8, torch.float32), [torch.zeros(8, 5, 1, 8, device=device) for _ in range(2)]
    values = torch.tensor([float("inf"), float("nan"), -float("inf"), -0.0, 1e-40, 3e38, 1.0, 2.0])
    tensors["qkv"][:, -8:] = values
    run = {name: tensor.to(device) for name, tensor in tensors.items()}
    query = rope_kv_write(**run, k_cache=caches[0], v_cache=caches[1], backend=backend)
    assert query.isfinite().all() and caches[0].isfinite().all()
    written = plain(caches, backend)[1].flatten(0, 1)[tensors["slot_mapping"]]
    torch.testing.assert_close(written, values.expand(2, 1, 8), rtol=0, atol=0, equal_nan=True)


@BOTH
def test_rows_of_a_wider_matrix(backend, device):
    shape = (6, 4, 2, 16, 16)
    tensors = inputs(*shape, torch.float32)
    tensors["qkv"] = torch.randn(6, 200)[:, 9 : 9 + 8 * 16]
    check_equal(tensors, shape, True, torch.float32, backend, device)


@BOTH
def test_table_of_the_model_dtype(backend, device):
    shape = (4, 2, 2, 32, 32)
    check_equal(inputs(*shape, torch.bfloat16, torch.bfloat16), shape, False, torch.bfloat16, backend, device)


def check_equal(tensors, shape, normed, dtype, backend, device, norm_offset=0.0):
    """Compare the queries and the caches.

    Args:
        normed: whether queries and keys are normed, or one bool for both.
    """
    num_kv_heads, head_dim = shape[2:4]
    both = (normed, normed) if isinstance(normed, bool) else normed
    norms = [torch.randn(head_dim, dtype=dtype) if one else None for one in both]
    caches = [torch.full((8, 5, num_kv_heads, head_dim), float("nan"), dtype=dtype) for _ in range(4)]
    run = {**tensors, "k_cache": caches[0], "v_cache": caches[1], "q_norm": norms[0], "k_norm": norms[1]}
    run = {name: tensor if tensor is None else tensor.to(device) for name, tensor in run.items()}
    with poisoned():
        query = rope_kv_write(**run, eps=1e-6, norm_offset=norm_offset, backend=backend)
    expected = reference.rope_kv_write(
        **tensors,
        k_cache=caches[2],
        v_cache=caches[3],
        q_norm=norms[0],
        k_norm=norms[1],
        eps=1e-6,
        norm_offset=norm_offset,
    )
    assert_close(query.cpu(), expected)
    for actual, want in zip(plain((run["k_cache"], run["v_cache"]), backend), caches[2:], strict=True):
        torch.testing.assert_close(actual.isnan(), want.isnan())  # the same slots, all others untouched
        assert_close(actual.nan_to_num(), want.nan_to_num())


@rounded_by(WRITERS)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(0, 2, 1, 4, 4), (1, 1, 1, 1, 0), (7, 12, 4, 64, 64), (9, 4, 2, 96, 10), (40, 8, 1, 80, 20), (5, 3, 3, 33, 2)],
)
def test_8_bits_equal_the_reference(shape, norm, dtype, backend, device, kv_dtype):
    tensors, (num_kv_heads, head_dim) = inputs(*shape, dtype), shape[2:4]
    norms = [torch.randn(head_dim, dtype=dtype) if norm else None for _ in range(2)]
    size = (10, 4, num_kv_heads, head_dim + kv_cache.SCALE_BYTES)
    untouched = torch.randint(-128, 128, size, dtype=torch.int8).view(kv_dtype)
    orders = kv_cache.orders(backend)
    caches = [
        *(kv_cache.reordered(untouched, "plain", order) for order in orders),
        untouched.clone(),
        untouched.clone(),
    ]
    run = {**tensors, "q_norm": norms[0], "k_norm": norms[1], "eps": 1e-6}
    on_device = {name: one.to(device) if isinstance(one, torch.Tensor) else one for name, one in run.items()}
    written = [cache.to(device) for cache in caches[:2]]
    with poisoned():
        query = rope_kv_write(**on_device, k_cache=written[0], v_cache=written[1], backend=backend)
    query, caches[:2] = query.cpu(), plain(written, backend)
    expected = reference.rope_kv_write(**run, k_cache=caches[2], v_cache=caches[3])
    assert_close(query, expected)
    torch.testing.assert_close(caches[1].view(torch.int8), caches[3].view(torch.int8), rtol=0, atol=0)
    slots = tensors["slot_mapping"]
    keys, wanted = (kv_cache.read(cache).flatten(0, 1)[slots] for cache in (caches[0], caches[2]))
    # an fp32 rotation that differs in its last bit, rounded to 16 bits, may be rounded to the next number
    most = wanted.abs().amax(-1, keepdim=True)
    step = most / 127 if kv_dtype == torch.int8 else torch.maximum(wanted.abs() / 8, most / 448 / 512)
    assert ((keys - wanted).abs() <= 1.01 * step + TOLERANCES[dtype]["rtol"] * wanted.abs() + 1e-6).all()
    kept = torch.ones(40, dtype=torch.bool).index_fill(0, slots, False)
    bits = kv_cache.read(untouched).flatten(0, 1)[kept]
    for cache in caches:
        torch.testing.assert_close(kv_cache.read(cache).flatten(0, 1)[kept], bits, rtol=0, atol=0, equal_nan=True)


@rounded_by(WRITERS | REFERENCE)
def test_8_bits_are_half_a_unit_off_at_most(dtype, backend, device, kv_dtype):
    """And so is zero, and what is too small for a scale; what is not finite gives NaN, for its own vector alone."""
    vectors = torch.randn(40, 3, 33).to(dtype) * torch.logspace(-6, 3, 40).to(dtype)[:, None, None]
    vectors[3] = 0.0
    vectors[7, 1, 5], vectors[8, 2, 0] = float("nan"), float("-inf")
    qkv = torch.cat((torch.zeros(40, 3, 33, dtype=dtype), vectors, vectors), dim=1).flatten(1)
    slots = torch.randperm(40)
    positions, table = torch.zeros(40, dtype=torch.int64), torch.zeros(1, 0)
    run = [tensor.to(device) for tensor in (qkv, positions, table)]
    size = (10, 4, 3, 33 + kv_cache.SCALE_BYTES)
    caches = [torch.zeros(size, dtype=torch.int8, device=device).view(kv_dtype) for _ in range(2)]
    rope_kv_write(*run, *caches, slots.to(device), backend=backend)
    for cache in plain(caches, backend):
        found = kv_cache.read(cache).flatten(0, 1)[slots]
        bad = ~vectors.isfinite().all(-1)
        assert found[bad].isnan().all() and bad.sum() == 2
        most = vectors.float().abs().amax(-1, keepdim=True)
        units = most / 127 if kv_dtype == torch.int8 else torch.maximum(vectors.float().abs() / 8, most / 448 / 512)
        # a unit and its reciprocal are rounded, so a tie may go either way
        assert ((found - vectors.float()).abs() <= 0.50005 * units)[~bad].all()


@pytest.mark.parametrize(("backend", "device"), [(TRITON, DEVICE), (Backend("torch"), "cpu")], ids=["triton", "torch"])
def test_e4m3_is_rounded_as_torch_does_it(backend, device):
    """Every number of 16 bits in its range, every tie and what is next to it. The largest of each vector makes its unit 1."""
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).float()
    numbers = torch.arange(0, 127, dtype=torch.uint8).view(E4M3).float()
    ties = (numbers[1:] + numbers[:-1]) / 2
    ties = torch.cat([ties, *(torch.nextafter(ties, torch.tensor(end)) for end in (0.0, 448.0))])
    values = torch.cat([halves[halves.abs() <= 448.0], ties, -ties])
    values = torch.nn.functional.pad(values, (0, -len(values) % 255)).view(-1, 1, 255)
    vectors = torch.nn.functional.pad(values, (0, 1), value=448.0)
    num_tokens = len(vectors)
    qkv = torch.cat((torch.zeros_like(vectors), vectors, vectors), dim=1).flatten(1).to(device)
    positions, slots = (
        torch.zeros(num_tokens, dtype=torch.int64, device=device),
        torch.arange(num_tokens, device=device),
    )
    size = (-(-num_tokens // 4), 4, 1, 256 + kv_cache.SCALE_BYTES)
    caches = [torch.zeros(size, dtype=torch.int8, device=device).view(E4M3) for _ in range(2)]
    rope_kv_write(qkv, positions, torch.zeros(1, 0, device=device), *caches, slots, backend=backend)
    expected = vectors.to(E4M3).float()
    for cache in caches:
        torch.testing.assert_close(kv_cache.read(cache.cpu()).flatten(0, 1)[:num_tokens], expected, rtol=0, atol=0)


def test_rotates_as_transformers_does():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    query, key, positions = torch.randn(5, 3, 16), torch.randn(5, 1, 16), torch.arange(4, 9)
    angles = torch.arange(10).float()[:, None] * 10000.0 ** (-torch.arange(0, 16, 2).float() / 16)
    cos, sin = (torch.cat([half, half], dim=-1)[positions] for half in (angles.cos(), angles.sin()))
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    for heads, expected in zip((query, key), apply_rotary_pos_emb(query, key, cos, sin), strict=True):
        assert_close(reference.rope(positions, heads, table), expected)


@pytest.mark.parametrize(("name", "limit"), [("positions", 50), ("slot_mapping", 40)])
def test_an_index_out_of_range_is_an_error_and_nothing_is_written(name, limit):
    tensors = inputs(3, 4, 2, 16, 16, torch.float32)
    caches = [torch.zeros(8, 5, 2, 16) for _ in range(2)]
    for bad in (-1, limit, 2**40, -(2**63), 2**63 - 1):
        tensors[name][1] = bad
        with pytest.raises(IndexError, match=f"{name} holds {bad}; its values must be at least 0 and below {limit}"):
            rope_kv_write(**tensors, k_cache=caches[0], v_cache=caches[1])
    assert not any(cache.any() for cache in caches)


def test_rows_must_hold_whole_heads():
    tensors = inputs(2, 4, 2, 16, 16, torch.float32)
    cache = torch.zeros(8, 5, 2, 16)
    for width in (4 * 16, 100):
        with pytest.raises(ValueError, match=f"qkv has rows of {width}; they must hold query heads and 2"):
            rope_kv_write(**{**tensors, "qkv": torch.ones(2, width)}, k_cache=cache, v_cache=cache.clone())


@pytest.mark.parametrize("rotary_dim", [3, 34])
def test_table_must_fit_the_head(rotary_dim):
    cache = torch.zeros(8, 5, 2, 32)
    with pytest.raises(ValueError, match=f"rotary_dim {rotary_dim}; it must be even and at most head_dim 32"):
        rope_kv_write(**inputs(1, 4, 2, 32, rotary_dim, torch.float32), k_cache=cache, v_cache=cache.clone())


def test_refuses_what_does_not_fit():
    tensors, cache = inputs(2, 4, 2, 16, 16, torch.float32), torch.zeros(8, 5, 2, 16)
    with pytest.raises(ValueError, match="k_cache has strides"):
        rope_kv_write(**tensors, k_cache=cache.transpose(1, 2), v_cache=cache.transpose(1, 2))
    for name in ("slot_mapping", "positions"):
        with pytest.raises(ValueError, match=rf"{name} is torch\.int32"):
            rope_kv_write(**{**tensors, name: tensors[name].int()}, k_cache=cache, v_cache=cache)
    with pytest.raises(ValueError, match=r"qkv is torch\.bfloat16; it must be torch\.float32"):
        rope_kv_write(**{**tensors, "qkv": tensors["qkv"].bfloat16()}, k_cache=cache, v_cache=cache)


def test_e4m3_is_not_for_cpp():
    tensors, cache = inputs(2, 4, 2, 16, 16, torch.float32), torch.zeros(8, 5, 2, 20, dtype=torch.int8).view(E4M3)
    with pytest.raises(ValueError, match=r"float8_e4m3fn is for the triton and torch backends; this is cpp\. Use int8"):
        rope_kv_write(**tensors, k_cache=cache, v_cache=cache.clone())


def test_an_int8_cache_must_have_room_for_scales():
    tensors, cache = inputs(2, 4, 2, 16, 16, torch.float32), torch.zeros(8, 5, 2, 4, dtype=torch.int8)
    with pytest.raises(ValueError, match="has vectors of 4 bytes; they must be 4 more than head_dim"):
        rope_kv_write(**tensors, k_cache=cache, v_cache=cache.clone())


@pytest.mark.gpu
def test_large_cache_on_a_gpu():
    """Slots whose offsets, in elements, are past 2**31."""
    dtype = torch.bfloat16
    num_kv_heads, head_dim, num_slots = 8, 128, 2**21 + 4096
    caches = [torch.zeros(num_slots // 16, 16, num_kv_heads, head_dim, dtype=dtype, device="cuda") for _ in range(2)]
    qkv = torch.randn(4096, 3 * num_kv_heads * head_dim, dtype=dtype, device="cuda")
    slots = torch.arange(num_slots - 4096, num_slots, device="cuda").flip(0)
    turned_by_nothing = torch.tensor([1.0, 0.0], device="cuda").repeat_interleave(head_dim // 2)[None]
    positions = torch.zeros(4096, dtype=torch.int64, device="cuda")
    rope_kv_write(qkv, positions, turned_by_nothing, *caches, slots, backend=TRITON)
    _, key, value = qkv.unflatten(1, (3, num_kv_heads, head_dim)).unbind(1)
    for cache, rows in zip(caches, (key, value), strict=True):
        torch.testing.assert_close(cache.flatten(0, 1)[slots], rows, rtol=0, atol=0)
        assert not cache.flatten(0, 1)[:-4096].any()
