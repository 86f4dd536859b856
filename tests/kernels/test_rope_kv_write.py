import pytest
import torch

from flyball_kernels import backend, rope_kv_write
from flyball_kernels.rope_kv_write import reference
from kernel_checks import DEVICE, assert_close


@pytest.fixture(params=["cpp", "triton"])
def device(request, monkeypatch):
    """Where the op runs, with the backend under test in force there for this test."""
    device = "cpu" if request.param == "cpp" else DEVICE
    monkeypatch.setitem(backend._in_force, device, request.param)
    return device


def inputs(num_tokens, num_q_heads, num_kv_heads, head_dim, rotary_dim, dtype):
    return {
        "qkv": torch.randn(num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim, dtype=dtype),
        "positions": torch.randint(0, 50, (num_tokens,)),
        "cos_sin_cache": torch.randn(50, rotary_dim),
        "slot_mapping": torch.randperm(8 * 5)[:num_tokens],
    }


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1, 2, 2), (7, 12, 4, 64, 64), (40, 8, 1, 80, 20)])
def test_equals_the_composition(shape, norm, dtype, device):
    tensors = inputs(*shape, dtype)
    num_kv_heads, head_dim = shape[2:4]
    norms = [torch.randn(head_dim, dtype=dtype) if norm else None for _ in range(2)]
    caches = [torch.full((8, 5, num_kv_heads, head_dim), float("nan"), dtype=dtype) for _ in range(4)]
    run = {**tensors, "k_cache": caches[0], "v_cache": caches[1], "q_norm": norms[0], "k_norm": norms[1]}
    run = {name: tensor if tensor is None else tensor.to(device) for name, tensor in run.items()}
    query = rope_kv_write(**run, eps=1e-6)
    expected = reference.rope_kv_write(
        **tensors, k_cache=caches[2], v_cache=caches[3], q_norm=norms[0], k_norm=norms[1], eps=1e-6
    )
    assert_close(query.cpu(), expected)
    for actual, want in zip((run["k_cache"].cpu(), run["v_cache"].cpu()), caches[2:], strict=True):
        torch.testing.assert_close(actual.isnan(), want.isnan())  # the same slots, all others untouched
        assert_close(actual.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize(("name", "limit"), [("positions", 50), ("slot_mapping", 40)])
def test_an_index_out_of_range_is_an_error_and_nothing_is_written(name, limit):
    tensors = inputs(3, 4, 2, 16, 16, torch.float32)
    caches = [torch.zeros(8, 5, 2, 16) for _ in range(2)]
    for bad in (-1, limit):
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
