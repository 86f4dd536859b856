import pytest
import torch

from flyball_kernels import rope
from flyball_kernels.rope import reference
from kernel_checks import assert_close


def cos_sin_cache(max_pos, rotary_dim, dtype=torch.float32):
    inverse = 10000.0 ** (-torch.arange(0, rotary_dim, 2).float() / rotary_dim)
    angles = torch.arange(max_pos).float()[:, None] * inverse
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 80), (6, 2), (128, 64), (96, 10)])
@pytest.mark.parametrize("num_heads", [(1, 1), (12, 4)])
def test_equals_the_reference(head_dim, rotary_dim, num_heads, dtype):
    query, key = (torch.randn(7, n, head_dim, dtype=dtype) for n in num_heads)
    positions = torch.tensor([0, 5, 1, 99, 50, 3, 3])
    table = cos_sin_cache(100, rotary_dim)
    for actual, expected in zip(
        rope(positions, query, key, table), reference.rope(positions, query, key, table), strict=True
    ):
        assert_close(actual, expected)


def test_agrees_with_transformers():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    query, key, positions = torch.randn(5, 3, 16), torch.randn(5, 1, 16), torch.arange(4, 9)
    table = cos_sin_cache(10, 16)
    cos, sin = (torch.cat([half, half], dim=-1)[positions] for half in table.chunk(2, dim=-1))
    expected = apply_rotary_pos_emb(query, key, cos, sin)
    for actual, want in zip(rope(positions, query, key, table), expected, strict=True):
        assert_close(actual, want)


def test_table_of_the_model_dtype():
    query, key = torch.randn(2, 2, 2, 32).bfloat16()
    positions, table = torch.tensor([1, 3]), cos_sin_cache(4, 32, torch.bfloat16)
    for actual, expected in zip(
        rope(positions, query, key, table), reference.rope(positions, query, key, table), strict=True
    ):
        assert_close(actual, expected)


@pytest.mark.parametrize("position", [-1, 4, 2**62])
def test_a_position_outside_the_table_is_an_error(position):
    heads = torch.ones(1, 1, 32)
    with pytest.raises(IndexError, match=f"positions holds {position}; its values must be at least 0 and below 4"):
        rope(torch.tensor([position]), heads, heads, cos_sin_cache(4, 32))


@pytest.mark.parametrize("rotary_dim", [3, 34])
def test_table_must_fit_the_head(rotary_dim):
    with pytest.raises(ValueError, match=f"rotary_dim {rotary_dim}; it must be even and at most head_dim 32"):
        rope(torch.zeros(1, dtype=torch.int64), torch.ones(1, 1, 32), torch.ones(1, 1, 32), torch.ones(2, rotary_dim))


def test_positions_must_be_int64():
    with pytest.raises(ValueError, match=r"positions is torch\.int32"):
        rope(torch.zeros(1, dtype=torch.int32), torch.ones(1, 1, 32), torch.ones(1, 1, 32), torch.ones(2, 32))
