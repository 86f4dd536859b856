"""What moving blocks means, in torch; also what runs on CPU. Tensors are ``[num_blocks, numel]``."""

from collections.abc import Sequence

import torch
from torch import Tensor


def copy(tensors: Sequence[Tensor], sources: Tensor, targets: Tensor) -> None:
    for tensor in tensors:
        tensor.index_copy_(0, targets, tensor.index_select(0, sources))


def gather(tensors: Sequence[Tensor], blocks: Tensor) -> Tensor:
    return torch.cat([tensor.index_select(0, blocks) for tensor in tensors], dim=1)


def scatter(tensors: Sequence[Tensor], blocks: Tensor, content: Tensor) -> None:
    parts = content.split([tensor.shape[1] for tensor in tensors], dim=1)
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.index_copy_(0, blocks, part)
