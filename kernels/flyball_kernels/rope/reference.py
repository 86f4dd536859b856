"""What rotary position embedding means (Su et al. 2021), in the half-split layout of GPT-NeoX and HF Llama."""

import torch
from torch import Tensor


def rope(positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin_cache[positions].float().unsqueeze(1).chunk(2, dim=-1)  # each [num_tokens, 1, rotary_dim / 2]
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    x1, x2, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    return torch.cat([(x1 * cos - x2 * sin).to(x.dtype), (x2 * cos + x1 * sin).to(x.dtype), rest], dim=-1)
