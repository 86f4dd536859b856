"""Why the head of the queue is still waiting."""

from enum import StrEnum


class BlockedBy(StrEnum):
    """What kept the head of the queue out of a step: the limit to raise if it should wait less.

    When several do, the first in this order that applies: seats and blocks stay short for many steps, while a spent
    budget is back in the next one, and raising it would not help a request that has no seat or no blocks.
    """

    NONE = "none"
    """Nobody waits."""
    SEQS = "seqs"
    """max_num_seqs sequences are running."""
    KV = "kv"
    """Too few KV blocks for the prompt, or running sequences had to be preempted for blocks in this step."""
    BUDGET = "budget"
    """The step's tokens are spent; without chunked prefill: too few are left for the whole prompt."""
    STEP_TIME = "step_time"
    """The step would be predicted to take longer than the target. Said by a step-time governor."""
