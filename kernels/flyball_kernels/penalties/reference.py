"""What penalties mean, in torch."""

from collections.abc import Sequence

import torch
from torch import Tensor


def penalize(
    logits: Tensor,
    rows: Sequence[int],
    histories: Sequence[Tensor],
    num_prompt_tokens: Sequence[int],
    repetition: Sequence[float],
    presence: Sequence[float],
    frequency: Sequence[float],
) -> None:
    settings = zip(rows, histories, num_prompt_tokens, repetition, presence, frequency, strict=True)
    for row, history, num_prompt, divisor, once, each in settings:
        values, history = logits[row], history.long()
        seen = torch.zeros_like(values, dtype=torch.bool).index_fill_(0, history, True)
        output = history[num_prompt:]
        counts = torch.zeros_like(values).index_add_(0, output, torch.ones_like(output, dtype=torch.float32))
        repeated = torch.where(values > 0, values / divisor, values * divisor)
        values.copy_(torch.where(seen, repeated, values)).sub_(counts * each).sub_((counts > 0) * once)
