"""In which order sequences run.

A policy is a pure function of a sequence, asked once, when it is submitted: a sequence keeps its place, also when it is
preempted. So no queue is ever sorted anew, and whatever changes with time is made of what does not: a request that grows
older beside newer ones is one whose key contains its arrival. What does change, a deadline that can no longer be met, moves
a sequence to another lane (``queue.py``), and its key stays.

``level`` comes before everything, so a fair share never outweighs it; clients take turns within a level. ``rank`` orders one
client's sequences within a level. Its last part is the arrival: no two are equal.

Some running sequence is the first in this order. It is never preempted, so it finishes, and preemption cannot go in circles.
"""

from collections.abc import Callable, Iterable
from math import inf, log2
from typing import NamedTuple

from flyball_runtime.core.request import Sequence

Key = tuple[float | bytes, ...]


class Order(NamedTuple):
    """Where a policy puts a sequence; the smallest is first."""

    level: Key
    rank: Key


Policy = Callable[[Sequence], Order]

OUTPUT_TOKEN_AGE_S = 0.1
PROMPT_TOKEN_AGE_S = 0.01
"""A longer request is treated as if it had come so much later for each of its tokens. It waits no longer than for those that
come in that time, whatever comes after."""

PATIENCE_S = 60.0
"""When a request without a deadline is due, by ``edf``: it waits for urgent ones that come until then, and not for ever."""

WINDOW_S = 60.0
"""``dpr`` changes the order of requests that come within such a time, and of no others."""

NUM_NAMES = 32
"""``dpr`` compares as many blocks of a prompt, and of longer ones each so many-th."""


def fcfs(seq: Sequence) -> Order:
    """First come, first served."""
    return Order((), (seq.arrival_index,))


def priority(seq: Sequence) -> Order:
    """Lower ``Request.priority`` first; first come, first served among equals. Low priorities can starve: they asked to."""
    return Order((seq.priority,), (seq.arrival_index,))


def sjf(seq: Sequence) -> Order:
    """Shortest job first, by the output tokens that are predicted."""
    return Order((), (seq.arrived_s + OUTPUT_TOKEN_AGE_S * seq.num_predicted_tokens, seq.arrival_index))


def srpf(seq: Sequence) -> Order:
    """Shortest remaining prefill first, also among the prompts in progress."""
    return Order((), (seq.arrived_s + PROMPT_TOKEN_AGE_S * seq.num_prompt_tokens, seq.arrival_index))


def edf(seq: Sequence) -> Order:
    """Earliest deadline first, within a priority. What can no longer meet its own makes way for what can."""
    due_s = seq.due_s if seq.due_s < inf else seq.arrived_s + PATIENCE_S
    return Order((seq.priority,), (due_s, seq.arrival_index))


def dpr(seq: Sequence) -> Order:
    """Highest decode-to-prefill ratio first, those with a common prefix one after the other, for batches of known requests.

    After BatchLLM (Zheng et al., arXiv 2412.03594). Requests that decode long for a short prompt start first, so that their
    decodes fill the steps in which later prompts are computed, and a shared prefix is computed once and used while it is
    cached. Names of blocks cover all tokens before them, so sorting by them walks the tree of prefixes.
    """
    ratio = max(1.0, seq.num_predicted_tokens) / seq.num_prompt_tokens  # pooled ones have no output
    names = seq.block_hashes[:NUM_NAMES] + seq.block_hashes[2 * NUM_NAMES - 1 :: NUM_NAMES]
    return Order((), (seq.arrived_s // WINDOW_S, -round(log2(ratio) / 2), *names, b"", seq.arrival_index))


POLICIES: dict[str, Policy] = {
    "fcfs": fcfs,
    "priority": priority,
    "sjf": sjf,
    "srpf": srpf,
    "edf": edf,
    "dpr": dpr,
}


def order_of(seq: Sequence) -> tuple[Key, Key]:
    return seq.level, seq.rank


def choose_victim(running: Iterable[Sequence]) -> Sequence:
    """Return the sequence to preempt: of the last level, and never the first of all, one that is late or else the one with
    least to compute again."""
    _, *others = sorted(running, key=order_of)
    last = others[-1].level
    candidates = (seq for seq in others if seq.level == last)
    return min(candidates, key=lambda seq: (not seq.is_late, seq.num_computed_tokens, -seq.arrival_index))
