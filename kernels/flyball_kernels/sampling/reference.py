"""Torch reference of sampling."""

import torch
from torch import Tensor

NO_TOKEN = -1
"""The id for a row whose largest logit is not finite (NaN or infinity), so that nothing can be sampled."""

GREEDY_BELOW = 1e-5
"""Lower temperatures mean greedy sampling, as in vLLM."""


def sample(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
) -> Tensor:
    ids = logits.argmax(dim=-1)
    top = logits.gather(1, ids.unsqueeze(1))  # NaN if the row has one: argmax takes the first NaN
    is_greedy = None if temperature is None else ~(temperature >= GREEDY_BELOW)
    if is_greedy is not None and (logits.is_cuda or not bool(is_greedy.all())):
        assert seeds is not None and positions is not None, "sample() has checked it"
        weights = (logits - top) / torch.where(is_greedy, 1.0, temperature).unsqueeze(1)
        weights = weights.exp().double()  # unnormalised, the likeliest is 1
        if _is_used(top_k, 0) or _is_used(top_p, 1) or _is_used(min_p, 0):
            weights = _filter(logits, weights, top_k, top_p, min_p)
        ids = torch.where(is_greedy, ids, _inverse_cdf(weights, uniform(seeds, positions)))
    return torch.where(top.squeeze(1).isfinite(), ids, NO_TOKEN)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return fp64 numbers in [0, 1), a function of (seed, position) alone.

    Two rounds of the SplitMix64 finaliser (Steele et al. 2014); int64 multiplication wraps as uint64's does.
    """
    bits = _mix(_mix(seeds) + positions)
    return _shift_right(bits, 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # torch shifts int64 arithmetically; drop the copied sign bits


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def _is_used(setting: Tensor | None, off: float) -> bool:
    # on CUDA, reading the values would wait for the device; there the caller passes None for unused settings
    return setting is not None and (setting.is_cuda or bool((setting != off).any()))


def _filter(
    logits: Tensor, weights: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """Return ``weights`` with zeros for the tokens that min_p, then top_k, then top_p drop. Equal logits rank by id."""
    ids = logits.sort(dim=-1, descending=True, stable=True).indices
    ranked = weights.gather(1, ids)
    if min_p is not None:
        ranked = ranked.where(ranked >= min_p.double().clamp(max=1).unsqueeze(1), 0.0)  # the top weight is 1
    if top_k is not None:
        ranks = torch.arange(ranked.shape[1], device=ranked.device)
        ranked = ranked.where((ranks < top_k.unsqueeze(1)) | (top_k.unsqueeze(1) <= 0), 0.0)
    if top_p is not None:
        before = ranked.cumsum(dim=-1) - ranked
        inside = before < top_p.double().unsqueeze(1) * ranked.sum(dim=-1, keepdim=True)
        inside[:, 0] = True
        ranked = ranked.where(inside | (top_p.unsqueeze(1) >= 1), 0.0)
    return torch.zeros_like(weights).scatter_(1, ids, ranked)


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first id whose cumulative weight, in id order, passes ``uniform * total``."""
    cumulative = weights.cumsum(dim=-1)
    target = uniforms.unsqueeze(1) * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return ids.clamp_(max=weights.shape[1] - 1)
