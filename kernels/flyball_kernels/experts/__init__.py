"""Mixtures of experts: which ones a token uses, their linear layers (``ExpertLinear``), and the sum of what they make."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flyball_kernels.backend import Backend
from flyball_kernels.checks import check_dtype, check_shape
from flyball_kernels.experts import reference
from flyball_kernels.experts.reference import Routing
from flyball_kernels.linear.experts import ExpertLinear
from flyball_kernels.linear.reference import Assignment

__all__ = [
    "Assignment",
    "ExpertLinear",
    "Routing",
    "Shared",
    "assign",
    "clamped_swiglu",
    "mixture",
    "route",
    "weighted_sum",
]

MAX_EXPERTS = 1024


def route(logits: Tensor, experts_per_token: int, *, normalizes: bool, backend: Backend) -> Routing:
    """Return each token's experts, those of the largest logits, and the softmax of their logits.

    Args:
        logits: ``[num_tokens, num_experts]``, at most MAX_EXPERTS.
        experts_per_token: at most num_experts.
        normalizes: whether a token's weights are scaled to add up to 1.
    Returns:
        Of equal logits the first is taken, by the ``torch`` backend any. A row that is no distribution, with a NaN, an
        infinity or nothing above minus infinity, has weights of NaN, beside experts that there are.
    Raises:
        ValueError: the shape does not fit.
    """
    check_shape("logits", logits, None, None)
    num_experts = logits.shape[1]
    if not 1 <= experts_per_token <= num_experts <= MAX_EXPERTS:
        raise ValueError(
            f"experts_per_token is {experts_per_token} of {num_experts} experts; there must be at least 1 for a token, "
            f"and at most {MAX_EXPERTS} altogether."
        )
    if backend.name == "cpp":
        return Routing(*torch.ops.flyball.experts_route(logits, experts_per_token, normalizes))
    if backend.name == "triton":
        from flyball_kernels.experts import kernel  # triton is there on Linux only

        return kernel.route(logits, experts_per_token, normalizes)
    return reference.route(logits, experts_per_token, normalizes)


def assign(experts: Tensor, num_experts: int, *, backend: Backend) -> Assignment:
    """Return the rows that each expert computes, where a token has a row for each of its experts.

    Args:
        experts: ``[num_tokens, experts_per_token]`` int32, from 0 to num_experts - 1; a GPU does not check that.
    Raises:
        IndexError: there is no such expert.
        ValueError: the shape or dtype does not fit.
    """
    check_shape("experts", experts, None, None)
    check_dtype("experts", experts, torch.int32)
    if backend.name == "cpp":
        return Assignment(*torch.ops.flyball.experts_assign(experts, num_experts))
    if backend.name == "triton":
        from flyball_kernels.experts import kernel

        return kernel.assign(experts, num_experts)
    return reference.assign(experts, num_experts)


def clamped_swiglu(gate_up: Tensor, limit: float, alpha: float, *, backend: Backend) -> Tensor:
    """Return ``(up + 1) * gate * sigmoid(alpha * gate)``, the gated unit of gpt-oss.

    Args:
        gate_up: ``[num_tokens, 2 * size]``, where gates and ups take turns.
        limit: gates are clamped to at most this, ups to between this and its negative.
    Returns:
        A new ``[num_tokens, size]``; computed in fp32 and rounded once.
    Raises:
        ValueError: gate_up is not two-dimensional or its rows have odd length.
    """
    check_shape("gate_up", gate_up, None, None)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up has rows of {gate_up.shape[1]}; the length must be even: gate and up in turns.")
    if backend.name == "cpp":
        return torch.ops.flyball.clamped_swiglu(gate_up, limit, alpha)
    if backend.name == "triton":
        from flyball_kernels.experts import kernel

        return kernel.clamped_swiglu(gate_up, limit, alpha)
    return reference.clamped_swiglu(gate_up, limit, alpha)


class Shared(NamedTuple):
    """What the expert that all tokens use makes of them, and how much of it is added.

    Attributes:
        output: ``[num_tokens, size]``.
        gate: ``[num_tokens, 1]``, whose sigmoid multiplies it.
    """

    output: Tensor
    gate: Tensor


def weighted_sum(outputs: Tensor, weights: Tensor, shared: Shared | None = None, *, backend: Backend) -> Tensor:
    """Return the sum of what a token's experts make of it.

    Args:
        outputs: ``[num_tokens, experts_per_token, size]``.
        weights: ``[num_tokens, experts_per_token]`` fp32.
    Returns:
        A new ``[num_tokens, size]``; added in fp32 in the order of the experts, and rounded once.
    Raises:
        ValueError: a shape or dtype does not fit.
    """
    check_shape("outputs", outputs, None, None, None)
    num_tokens, experts_per_token, size = outputs.shape
    check_shape("weights", weights, num_tokens, experts_per_token)
    check_dtype("weights", weights, torch.float32)
    if shared is not None:
        check_shape("shared.output", shared.output, num_tokens, size)
        check_shape("shared.gate", shared.gate, num_tokens, 1)
        check_dtype("shared.output", shared.output, outputs.dtype)
        check_dtype("shared.gate", shared.gate, outputs.dtype)
    output, gate = shared or (None, None)
    if backend.name == "cpp":
        return torch.ops.flyball.experts_sum(outputs, weights, output, gate)
    if backend.name == "triton":
        from flyball_kernels.experts import kernel

        return kernel.weighted_sum(outputs, weights, output, gate)
    return reference.weighted_sum(outputs, weights, output, gate)


def mixture(
    x: Tensor,
    logits: Tensor,
    experts: Callable[[Tensor, Assignment], Tensor],
    experts_per_token: int,
    *,
    normalizes: bool,
    shared: Shared | None = None,
    backend: Backend,
) -> Tensor:
    """Return what a mixture of experts makes of each token: ``route``, ``assign``, the experts and ``weighted_sum``.

    Args:
        x: ``[num_tokens, size]``.
        logits: ``[num_tokens, num_experts]``, the router's.
        experts: return ``[num_rows, size]`` of ``x`` and the rows of each expert.
        experts_per_token, normalizes: see ``route``.
        shared: see ``weighted_sum``.
    Raises:
        ValueError: a shape or dtype does not fit.
    """
    weights, chosen = route(logits, experts_per_token, normalizes=normalizes, backend=backend)
    outputs = experts(x, assign(chosen, logits.shape[1], backend=backend))
    return weighted_sum(outputs.unflatten(0, chosen.shape), weights, shared, backend=backend)
