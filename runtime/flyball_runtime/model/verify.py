"""Which drafts the model agrees with."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

NONE = -2
"""Stands behind a last draft: no token is equal to it."""


class Verified(NamedTuple):
    """What a step gives.

    Attributes:
        token_ids: ``[num_sampled]`` int64, the last new token of each entry.
        num_accepted: ``[num_drafted]`` int64, drafts before it, of each entry that has some.
    """

    token_ids: Tensor
    num_accepted: Tensor


@torch.inference_mode()
def verify(chosen: Tensor, drafts: np.ndarray, num_drafts: list[int]) -> Verified:
    """Accept drafts as long as they are what the model chose, and the choice behind the last accepted one.

    A draft that is certain is accepted with its probability by that, and what is chosen in its place comes from the rest
    of the distribution: this is rejection sampling (Leviathan et al. 2023). Each choice depends on seed and position alone,
    so the tokens are those that would have come one at a time.

    Args:
        chosen: ``[num_plain + sum(1 + num_drafts)]`` int64: the choices of entries without drafts, then those behind the last
            token and behind each draft of the others.
        drafts: ``[sum(num_drafts)]`` int64.
        num_drafts: of each entry that has some.
    """
    counts = np.array(num_drafts)
    ends = np.cumsum(counts + 1)  # behind the entries' last choices
    num_plain = len(chosen) - int(ends[-1])
    drafted = np.insert(drafts, np.cumsum(counts), NONE)
    at = np.minimum((ends - counts - 1)[:, None] + np.arange(counts.max() + 1), ends[:, None] - 1)
    agree = chosen[num_plain:] == _tensor(drafted, chosen)
    num_accepted = agree[_tensor(at, chosen)].long().cumprod(dim=1).sum(dim=1)
    last = chosen[num_plain + _tensor(ends - counts - 1, chosen) + num_accepted]
    return Verified(torch.cat((chosen[:num_plain], last)), num_accepted)


def _tensor(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device, non_blocking=True)
