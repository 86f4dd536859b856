"""What a mixture of experts means (Shazeer et al. 2017)."""

from typing import NamedTuple

import torch
from torch import Tensor

from flyball_kernels.linear.reference import Assignment


class Routing(NamedTuple):
    """The experts of each token, ``[num_tokens, experts_per_token]``.

    Attributes:
        weights: fp32.
        experts: int32, no expert twice in a row.
    """

    weights: Tensor
    experts: Tensor


def route(logits: Tensor, experts_per_token: int, normalizes: bool) -> Routing:
    weights, experts = logits.float().softmax(dim=-1).topk(experts_per_token, dim=-1)
    if normalizes:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return Routing(weights, experts.int())


def assign(experts: Tensor, num_experts: int) -> Assignment:
    of_rows = experts.flatten()
    order = of_rows.argsort(stable=True)
    starts = torch.searchsorted(of_rows[order], torch.arange(num_experts + 1, device=experts.device))
    return Assignment(order.int(), starts.int())


def clamped_swiglu(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    gate, up = gate_up.float().unflatten(1, (-1, 2)).unbind(-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1.0) * gate * torch.sigmoid(gate * alpha)).to(gate_up.dtype)


def weighted_sum(outputs: Tensor, weights: Tensor, shared: Tensor | None, shared_gate: Tensor | None) -> Tensor:
    total = outputs[:, 0].float() * weights[:, 0, None]
    for index in range(1, outputs.shape[1]):  # one after another, so that a token's sum is the same in any batch
        total += outputs[:, index].float() * weights[:, index, None]
    if shared is not None and shared_gate is not None:
        total += shared_gate.float().sigmoid() * shared.float()
    return total.to(outputs.dtype)
