"""What a token bitmask means, in torch."""

from collections.abc import Sequence

import torch
from torch import Tensor


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, rows: Sequence[int]) -> None:
    bits = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    allowed = ((bitmask.unsqueeze(-1) >> bits) & 1).flatten(1)[:, : logits.shape[1]].bool()
    for row, kept in zip(rows, allowed, strict=True):
        logits[row].masked_fill_(~kept, -torch.inf)
