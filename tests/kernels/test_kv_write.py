import pytest
import torch

from flyball_kernels import kv_write
from flyball_kernels.kv_write import kernel, reference
from kernel_checks import DEVICE


def run_triton(key, value, k_cache, v_cache, slots):
    tensors = [x.to(DEVICE) for x in (key, value, k_cache, v_cache, slots)]
    kernel.kv_write(*tensors)
    k_cache.copy_(tensors[2])
    v_cache.copy_(tensors[3])


@pytest.fixture(params=[kv_write, run_triton], ids=["cpp", "triton"])
def run(request):
    return request.param


@pytest.mark.parametrize(("num_kv_heads", "head_dim", "block_size"), [(1, 1, 1), (4, 64, 16), (3, 80, 5), (8, 256, 2)])
def test_writes_its_slots_and_nothing_else(run, num_kv_heads, head_dim, block_size, dtype):
    caches = [torch.full((6, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype) for _ in range(4)]
    key, value = (torch.randn(4, num_kv_heads, head_dim, dtype=dtype) for _ in range(2))
    slots = torch.randperm(6 * block_size)[:4]
    run(key, value, *caches[:2], slots)
    reference.kv_write(key, value, *caches[2:], slots)
    for actual, expected in zip(caches[:2], caches[2:], strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_heads_of_a_fused_projection(run):
    qkv = torch.randn(3, 8, 16)
    k_cache, v_cache = torch.zeros(2, 4, 2, 16), torch.zeros(2, 4, 2, 16)
    run(qkv[:, 4:6], qkv[:, 6:], k_cache, v_cache, torch.tensor([7, 0, 2]))
    torch.testing.assert_close(k_cache.flatten(0, 1)[[7, 0, 2]], qkv[:, 4:6], rtol=0, atol=0)
    torch.testing.assert_close(v_cache.flatten(0, 1)[[7, 0, 2]], qkv[:, 6:], rtol=0, atol=0)


def test_no_tokens(run):
    cache = torch.ones(1, 2, 1, 4)
    run(torch.ones(0, 1, 4), torch.ones(0, 1, 4), cache, cache.clone(), torch.zeros(0, dtype=torch.int64))


def test_refuses_what_does_not_fit():
    cache, row, slot = torch.ones(1, 2, 1, 4), torch.ones(1, 1, 4), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="k_cache has strides"):
        kv_write(row, row, cache.transpose(1, 3), cache.transpose(1, 3), slot)
    with pytest.raises(ValueError, match=r"key has shape \[1, 1, 3\]; it must be \[1, 1, 4\]"):
        kv_write(row[..., :3], row, cache, cache, slot)
    with pytest.raises(ValueError, match=r"slot_mapping is torch\.int32"):
        kv_write(row, row, cache, cache, slot.int())
    with pytest.raises(ValueError, match=r"key is torch\.bfloat16; it must be torch\.float32"):
        kv_write(row.bfloat16(), row, cache, cache, slot)


@pytest.mark.parametrize("slot", [-1, 12, 2**40, -(2**63), 2**63 - 1])
def test_a_slot_outside_the_cache_is_an_error_and_nothing_is_written(slot):
    caches = [torch.zeros(3, 4, 2, 16) for _ in range(2)]
    row = torch.ones(2, 2, 16)
    with pytest.raises(IndexError, match=f"slot_mapping holds {slot}; its values must be at least 0 and below 12"):
        kv_write(row, row, *caches, torch.tensor([5, slot]))
    assert not any(cache.any() for cache in caches)


@pytest.mark.gpu
def test_large_cache_on_a_gpu():
    """Slots whose offsets, in elements, are past 2**31."""
    dtype = torch.bfloat16
    num_kv_heads, head_dim, num_slots = 8, 128, 2**21 + 4096
    caches = [torch.zeros(num_slots // 16, 16, num_kv_heads, head_dim, dtype=dtype, device="cuda") for _ in range(2)]
    key, value = (torch.randn(4096, num_kv_heads, head_dim, dtype=dtype, device="cuda") for _ in range(2))
    slots = torch.arange(num_slots - 4096, num_slots, device="cuda").flip(0)
    kernel.kv_write(key, value, *caches, slots)
    for cache, rows in zip(caches, (key, value), strict=True):
        torch.testing.assert_close(cache.flatten(0, 1)[slots], rows, rtol=0, atol=0)
        assert not cache.flatten(0, 1)[:-4096].any()
