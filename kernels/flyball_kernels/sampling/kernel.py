"""Triton kernel for sampling: one program per row, and no sort.

The filters top_k and top_p each keep the tokens above some logit, and the first few of those that equal it. That logit is
found by search over the ordered bits of fp32: each pass over the row counts and weighs what is above several pivots at once.
FlashInfer and vLLM search so too; here it ends on the exact token, ties included, because both backends have to draw the same.
Sums run in an order that depends on the row alone.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from flyball_kernels.sampling.reference import GREEDY_BELOW, NO_TOKEN
from flyball_kernels.spec import Spec

BLOCK = 1024
PIVOTS = 4
OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}


@triton.jit
def sample_kernel(
    logits_ptr,  # [n, vocab] fp32, rows row_stride apart
    temperature_ptr,  # [n] fp32, or None; so are the next three, top_k in int64
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,  # [n] int64
    positions_ptr,  # [n] int64
    ids_ptr,  # [n] int64, written
    row_stride,
    vocab,
    GREEDY_BELOW: tl.constexpr,
    NO_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + index * row_stride
    top, token, is_valid = _likeliest(row_ptr, vocab, BLOCK)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + index)
        if is_valid & (temperature >= GREEDY_BELOW):
            least = 0.0
            if min_p_ptr is not None:
                least = tl.minimum(tl.load(min_p_ptr + index), 1.0)
            row = (row_ptr, vocab, top, 1.4426950408889634 / temperature, least)  # log2(e)
            count, mass = _total(row, BLOCK)
            # a token this far from the likeliest has no weight in fp32
            kept = (_order(top - 110.0 * temperature) - 1, 0, count, mass)
            if top_k_ptr is not None:
                top_k = tl.load(top_k_ptr + index)
                if (top_k > 0) & (top_k < count):
                    kept = _likeliest_until(row, kept, top_k, False, BLOCK, PIVOTS)
            if top_p_ptr is not None:
                top_p = tl.load(top_p_ptr + index)
                if top_p < 1.0:
                    kept = _likeliest_until(row, kept, top_p * kept[3], True, BLOCK, PIVOTS)
            threshold, num_equal, _, mass = kept
            last_equal = -1
            if num_equal > 0:
                last_equal = _first_past(row, threshold, -1, (num_equal - 1).to(tl.float64), True, BLOCK)
            number = _uniform(tl.load(seeds_ptr + index), tl.load(positions_ptr + index))
            token = _first_past(row, threshold, last_equal, number * mass, False, BLOCK)
    tl.store(ids_ptr + index, tl.where(is_valid, token, NO_TOKEN).to(tl.int64))


@triton.jit
def _likeliest(row_ptr, vocab, BLOCK: tl.constexpr):
    """Return the largest logit, its lowest id, and whether the row gives a distribution."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_ids = tl.zeros([BLOCK], tl.int32)
    num_bad = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf"))
        is_better = logits > best
        best_ids = tl.where(is_better, ids, best_ids)
        best = tl.where(is_better, logits, best)
        num_bad += tl.where(logits < float("inf"), 0, 1)  # NaN is not below
    top = tl.max(best, axis=0)
    token = tl.min(tl.where(best == top, best_ids, vocab), axis=0)
    return top, token, (tl.sum(num_bad, axis=0) == 0) & (top > float("-inf"))


@triton.jit
def _order(logits):
    """Return int32 numbers that compare as the logits do; 0.0 equals -0.0."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _tile(row, start, BLOCK: tl.constexpr):
    """Return ids, the order of their logits, and weights relative to the likeliest token's, 0 where min_p drops one."""
    row_ptr, vocab, top, scale, least = row
    ids = start + tl.arange(0, BLOCK)
    logits = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf"))
    is_possible = logits > float("-inf")
    distance = tl.maximum(tl.where(is_possible, logits, top) - top, -3e38)  # finite, so that times 0 is 0
    weights = tl.where(is_possible, tl.exp2(distance * scale), 0.0)
    return ids, _order(logits), tl.where(weights < least, 0.0, weights)


@triton.jit
def _total(row, BLOCK: tl.constexpr):
    """Return how many tokens have weight, and the sum of weights."""
    counts = tl.zeros([BLOCK], tl.int32)
    masses = tl.zeros([BLOCK], tl.float32)
    for start in range(0, row[1], BLOCK):
        _, _, weights = _tile(row, start, BLOCK)
        counts += tl.where(weights > 0, 1, 0)
        masses += weights
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0)


@triton.jit
def _above(row, pivots, BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    """Return how many tokens with weight are above each pivot, and the sum of their weights."""
    counts = tl.zeros([BLOCK, PIVOTS], tl.int32)
    masses = tl.zeros([BLOCK, PIVOTS], tl.float32)
    for start in range(0, row[1], BLOCK):
        _, order, weights = _tile(row, start, BLOCK)
        is_above = (order[:, None] > pivots[None, :]) & (weights > 0)[:, None]
        counts += tl.where(is_above, 1, 0)
        masses += tl.where(is_above, weights[:, None], 0.0)
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0)


@triton.jit
def _likeliest_until(row, kept, limit, BY_MASS: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    """Return what is left of ``kept`` when it ends with the token at which the number, or the mass, reaches the limit.

    ``kept`` is a threshold, how many tokens that equal it are kept beside all that are above it, and the number and the mass
    of all these. The threshold to be found is above ``low`` and at most ``high``: above ``low`` there is enough, above ``high``
    there is not.
    """
    threshold, num_equal, low_count, low_mass = kept
    first_low = threshold.to(tl.int64) - tl.where(num_equal > 0, 1, 0)
    low = first_low
    high = _order(row[2]).to(tl.int64)
    high_count = tl.zeros([], tl.int32)
    high_mass = tl.zeros([], tl.float32)
    while (high - low > 1) & (low_count - high_count > 1):
        pivots = low + (high - low) * (tl.arange(0, PIVOTS) + 1) // (PIVOTS + 1)
        counts, masses = _above(row, pivots.to(tl.int32), BLOCK, PIVOTS)
        is_enough = masses >= limit if BY_MASS else counts >= limit
        is_low = is_enough & (pivots > low)
        low = tl.maximum(low, tl.max(tl.where(is_low, pivots, low), axis=0))
        low_count = tl.min(tl.where(is_low, counts, low_count), axis=0)
        low_mass = tl.min(tl.where(is_low, masses, low_mass), axis=0)
        is_high = (is_enough == 0) & (pivots > low)
        high = tl.min(tl.where(is_high, pivots, high), axis=0)
        high_count = tl.max(tl.where(is_high, counts, high_count), axis=0)
        high_mass = tl.max(tl.where(is_high, masses, high_mass), axis=0)
    num_between = low_count - high_count
    if num_between > 1:  # equal logits
        weight = (low_mass - high_mass) / num_between
        if BY_MASS:
            needed = tl.minimum(tl.maximum(tl.ceil((limit - high_mass) / weight), 1.0), num_between).to(tl.int32)
        else:
            needed = (limit - high_count).to(tl.int32)
        threshold = high.to(tl.int32)
        num_equal = needed
        low_count = high_count + needed
        low_mass = high_mass + needed * weight
    elif low > first_low:
        threshold = low.to(tl.int32)
        num_equal = 0
    return threshold, num_equal, low_count, low_mass


@triton.jit
def _first_past(row, threshold, last_equal, target, COUNT_EQUAL: tl.constexpr, BLOCK: tl.constexpr):
    """Return the first id whose cumulative weight, in id order, passes the target; the last with any weight if none does.

    Tokens above the threshold have weight, and those that equal it up to the id ``last_equal``; or else, to COUNT_EQUAL, those
    that equal it, each a weight of 1.
    """
    before = tl.zeros([], tl.float64)
    # not `before`: Triton takes two names of one value for one variable of the loop
    before_used = tl.zeros([], tl.float64)
    used = 0
    start = 0
    is_past = False
    while (start < row[1]) & (is_past == 0):
        _, weights = _kept_tile(row, start, threshold, last_equal, COUNT_EQUAL, BLOCK)
        part = tl.sum(weights, axis=0)
        if part > 0:
            used = start
            before_used = before
            is_past = before + part > target
        before += part
        start += BLOCK
    ids, weights = _kept_tile(row, used, threshold, last_equal, COUNT_EQUAL, BLOCK)
    passes = (before_used + tl.cumsum(weights, axis=0) > target) & (weights > 0)
    last = tl.max(tl.where(weights > 0, ids, 0), axis=0)
    return tl.min(tl.where(passes, ids, last), axis=0)


@triton.jit
def _kept_tile(row, start, threshold, last_equal, COUNT_EQUAL: tl.constexpr, BLOCK: tl.constexpr):
    ids, order, weights = _tile(row, start, BLOCK)
    is_equal = order == threshold
    if COUNT_EQUAL:
        weights = tl.where(is_equal & (weights > 0), 1.0, 0.0)
    else:
        weights = tl.where((order > threshold) | (is_equal & (ids <= last_equal)), weights, 0.0)
    return ids, weights


@triton.jit
def _uniform(seed, position):
    """Return the number of reference.uniform."""
    bits = _mix(_mix(seed.to(tl.uint64)) + position.to(tl.uint64))
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2**-53


@triton.jit
def _mix(x):
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


def sample(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
) -> Tensor:
    """Launch the kernel; arguments as the public op, already checked."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    settings = [one if one is None else one.contiguous() for one in (temperature, top_k, top_p, min_p)]
    num_rows, vocab = logits.shape
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        sample_kernel[(num_rows,)](
            logits,
            *settings,
            ids if seeds is None else seeds.contiguous(),  # greedy rows read neither
            ids if positions is None else positions.contiguous(),
            ids,
            logits.stride(0),
            vocab,
            GREEDY_BELOW=GREEDY_BELOW,
            NO_TOKEN=NO_TOKEN,
            BLOCK=BLOCK,
            PIVOTS=PIVOTS,
            **OPTIONS,
        )
    return ids


def specs() -> Iterator[Spec]:
    """Yield the variants to compile ahead of time: greedy rows alone, and all filters."""
    types = {"logits_ptr": "*fp32", "seeds_ptr": "*i64", "positions_ptr": "*i64", "ids_ptr": "*i64"}
    types |= {"row_stride": "i32", "vocab": "i32"}
    constants = {"GREEDY_BELOW": GREEDY_BELOW, "NO_TOKEN": NO_TOKEN, "BLOCK": BLOCK, "PIVOTS": PIVOTS}
    settings = {"temperature_ptr": "*fp32", "top_k_ptr": "*i64", "top_p_ptr": "*fp32", "min_p_ptr": "*fp32"}
    yield Spec("sample greedy", sample_kernel, types, constants | dict.fromkeys(settings), OPTIONS)
    plain = {name: None for name in settings if name != "temperature_ptr"}
    yield Spec("sample", sample_kernel, types | {"temperature_ptr": "*fp32"}, constants | plain, OPTIONS)
    yield Spec("sample filtered", sample_kernel, types | settings, constants, OPTIONS)
