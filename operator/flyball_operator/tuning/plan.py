"""What the limits of one replica should be, from what it has learned of its steps and of its requests. Closed forms; pure.

In a balanced step, each decoding sequence brings the prompt tokens of its successor: ``i / o`` of them, for prompts of ``i``
computed tokens and outputs of ``o`` tokens. By Little's law, ``D`` sequences and a step of ``t`` seconds serve ``D / (o * t)``
requests a second. All times are seconds.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

from flyball_protocol import Envelope, Lengths, Objectives, StepModel

MISSES = 0.05
"""Share of requests that may miss an objective for the 95th percentile."""

GAMMA = 0.9
"""With KV as the bottleneck, steps aim at this share of the balanced step of as many sequences as fit."""

CROWD_MARGIN = 1.06
"""And at this many times the step of their decodes alone, at least."""

SEQS_MARGIN = 1.15
TOKENS_MARGIN = 1.25
MOST_DECODES = 1 << 16
FEW_SEQS, FEW_TOKENS, FEW_MARGIN = 4, 16, 1.06
LEAST_SHARE = 0.35
"""The step-time target is never below this share of the inter-token objective."""


@dataclass(frozen=True)
class Plan:
    """The limits that the model asks for.

    Attributes:
        step_s: target of the step time that keeps the inter-token objective; inf without that objective. If even one sequence
            alone misses the objective: the shortest step that costs little throughput.
        least_step_s: the shortest target with which a few sequences run, or that the objective allows.
        kv_step_s: the shorter target that KV pressure asks for: shorter steps free KV blocks sooner.
        aim_s: the target without KV pressure: ``step_s``, or shorter where the KV pool is full before steps are so long.
        num_fitting: sequences whose context the KV pool holds.
        num_decoding: most sequences that decode within ``step_s`` and fit, their successors' prefill included.
        max_num_seqs, max_num_batched_tokens: limits with a margin above them.
        capacity_per_s: requests a second that one replica serves within the objectives.
    """

    step_s: float
    least_step_s: float
    kv_step_s: float
    aim_s: float
    num_fitting: float
    num_decoding: float
    max_num_seqs: int
    max_num_batched_tokens: int
    capacity_per_s: float


def make_plan(
    model: StepModel, lengths: Lengths, objectives: Objectives, envelope: Envelope, *, kv_tokens: int, trim: float = 1.0
) -> Plan:
    """Plan for one replica.

    Args:
        kv_tokens: tokens that the KV pool holds at its present capacity.
        trim: factor of the step time that observed latency asks for, 1 where the model is right.
    """
    itl_s = math.inf if objectives.itl_s is None else objectives.itl_s
    least_step_s = least_target_s(model, lengths, itl_s)
    step_s = max(trim * itl_s / margin(model, lengths), least_step_s)
    if is_infeasible := itl_s < least_itl_s(model, lengths):
        step_s = max(least_step_s, model.efficient_s)
    num_fitting, num_at_most = _fitting(lengths, kv_tokens)
    num_decoding = max(1.0, min(most_decodes(model, lengths, step_s), num_fitting, envelope.max_num_seqs))
    balanced_s = balanced_step_s(model, lengths, num_decoding)
    kv_step_s, aim_s = (
        min(step_s, max(trim * crowded_step_s(model, lengths, min(one, envelope.max_num_seqs)), least_step_s))
        for one in (num_fitting, num_at_most)
    )
    max_num_seqs = min(envelope.max_num_seqs, math.ceil(SEQS_MARGIN * num_decoding))
    prefill = most_prefill(model, step_s, envelope.max_num_batched_tokens)
    tokens = min(envelope.max_num_batched_tokens, _ladder(max_num_seqs + TOKENS_MARGIN * prefill))
    return Plan(
        step_s=step_s,
        least_step_s=least_step_s,
        kv_step_s=kv_step_s,
        aim_s=step_s if is_infeasible or num_at_most >= envelope.max_num_seqs else aim_s,
        num_fitting=num_fitting,
        num_decoding=num_decoding,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(tokens, envelope.min_num_batched_tokens),
        capacity_per_s=num_decoding / (max(1.0, lengths.output_tokens) * balanced_s) if balanced_s > 0 else math.inf,
    )


def _fitting(lengths: Lengths, kv_tokens: int) -> tuple[float, float]:
    """Return how many sequences the KV pool holds, and how many if they all share what they found in the prefix cache."""
    context, cached = lengths.context_tokens, max(0.0, lengths.prompt_tokens - lengths.computed_prompt_tokens)
    alone, sharing = (max(1.0, kv_tokens / max(1.0, one)) for one in (context, context - cached))
    return alone, sharing


def least_target_s(model: StepModel, lengths: Lengths, itl_s: float) -> float:
    """Return the shortest step-time target that is of use: a few sequences run under it, if the objective allows so many.

    A small chunk of a prompt is beside them, which is no longer than prompts are: of longer ones the model knows nothing.
    """
    tokens = max(1, min(FEW_TOKENS, round(lengths.computed_prompt_tokens)))
    few_s = FEW_MARGIN * model.predict(tokens, FEW_SEQS, round(FEW_SEQS * lengths.context_tokens), tokens**2)
    return few_s if itl_s < least_itl_s(model, lengths) else min(itl_s, few_s)


def balanced_step_s(model: StepModel, lengths: Lengths, decodes: float) -> float:
    """Return the seconds of a step in which ``decodes`` sequences decode and their successors prefill."""
    computed, output = lengths.computed_prompt_tokens, max(1.0, lengths.output_tokens)
    cached: float = max(0.0, lengths.prompt_tokens - computed)
    pairs = computed * cached + lengths.computed_prompt_tokens_squared / 2
    return model.predict(
        round(decodes * computed / output),
        round(decodes),
        round(decodes * lengths.context_tokens),
        round(decodes * pairs / output),
    )


def crowded_step_s(model: StepModel, lengths: Lengths, decodes: float) -> float:
    """Return the seconds that steps aim at while the KV pool is full with ``decodes`` sequences.

    Shorter steps end them sooner as long as it is prefill that makes way. Below the knee prefill takes no time, and a
    target that decodes alone fill would only keep the next prompts out.
    """
    return max(GAMMA * balanced_step_s(model, lengths, decodes), CROWD_MARGIN * decode_step_s(model, lengths, decodes))


def decode_step_s(model: StepModel, lengths: Lengths, decodes: float) -> float:
    """Return the seconds of a step without prefill."""
    return model.predict(0, round(decodes), round(decodes * lengths.context_tokens), 0)


def most_decodes(model: StepModel, lengths: Lengths, step_s: float) -> float:
    """Return how many sequences decode in a balanced step of ``step_s``; 0 when even one takes longer."""
    return _most(lambda decodes: balanced_step_s(model, lengths, decodes) <= step_s, MOST_DECODES)


def most_decodes_alone(model: StepModel, lengths: Lengths, step_s: float) -> float:
    """Return how many sequences decode in a step of ``step_s`` without prefill; 0 when even one takes longer."""
    return _most(lambda decodes: decode_step_s(model, lengths, decodes) <= step_s, MOST_DECODES)


def most_prefill(model: StepModel, step_s: float, at_most: int) -> int:
    """Return how many prompt tokens one step computes within ``step_s`` beside no decode."""
    return _most(lambda tokens: model.predict(tokens, 0, 0, tokens * tokens // 2) <= step_s, at_most)


def margin(model: StepModel, lengths: Lengths | None) -> float:
    """Return how far the step-time target stays below an objective, as a factor: steps spread around their predictions.

    A request meets the objective when 95 % of its own gaps do. An output of a few tokens has no gap to spare, so the
    margin grows as outputs get shorter. The runtime keeps a margin of half a standard deviation itself.
    """
    spread = 0.0 if model.residual_p95 is None else min(0.5, model.residual_p95) / NormalDist().inv_cdf(0.975)
    num_gaps = 100.0 if lengths is None else max(1.0, lengths.output_tokens - 1)
    needed = 1.0 + NormalDist().inv_cdf(1.0 - spare_share(num_gaps)) * spread
    return max(1.0, needed / (1.0 + max(0.02, 0.5 * spread)))


def spare_share(num_gaps: float) -> float:
    """Return the share of gaps that may be over, so that 95 % of requests with ``num_gaps`` keep their own p95."""
    none_over = -math.expm1(math.log1p(-MISSES) / num_gaps)
    some_over = MISSES - 1.645 * math.sqrt(MISSES * (1 - MISSES) / num_gaps)
    return max(none_over, some_over)


def least_itl_s(model: StepModel, lengths: Lengths) -> float:
    """Return the shortest inter-token latency: of one sequence alone."""
    return decode_step_s(model, lengths, 1)


def least_ttft_s(model: StepModel, lengths: Lengths, itl_s: float | None, at_most: int) -> float:
    """Return the shortest time to first token of a mean prompt that finds one sequence decoding.

    Args:
        itl_s: inter-token objective that the prompt's chunks must leave to that sequence, or None.
        at_most: most tokens of a step.
    """
    tokens = max(1, round(lengths.computed_prompt_tokens))
    context = round(lengths.context_tokens)
    step_s = math.inf if itl_s is None else itl_s
    mean_context = max(1, tokens // 2)
    chunk = _most(lambda one: model.predict(one, 1, context, one * mean_context) <= step_s, min(at_most, tokens))
    if chunk == 0:
        return math.inf
    num_chunks = math.ceil(tokens / chunk)
    return num_chunks * model.predict(min(chunk, tokens), 1, context, min(chunk, tokens) * mean_context)


def _most(fits: Callable[[int], bool], at_most: int) -> int:
    """Return the largest whole number up to ``at_most`` that fits, by bisection; 0 when 1 does not."""
    low, high = 0, at_most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _ladder(tokens: float) -> int:
    """Return the next power of two, at least 256: budgets that differ by less are the same to a step-time target."""
    return max(256, 1 << math.ceil(math.log2(max(1.0, tokens))))
