"""What one step computes."""

from dataclasses import dataclass, field

from flyball_runtime.core.sequence import Sequence
from flyball_runtime.scheduler.blocked_by import BlockedBy


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step, decided. The i-th sequence computes its tokens ``[starts[i], starts[i] + num_scheduled[i])``.

    The first ``num_decodes`` sequences are decodes: one token each, and each samples. Chunks of prompts (and of
    recomputed sequences) follow.

    Attributes:
        samples: True where the chunk reaches the sequence's last token, so that its logits give a new one.
        preempted: sequences that lost their blocks for this step.
        blocked_by: why the head of the queue is not in it.
        num_prefix_queried_tokens, num_prefix_hit_tokens: prompt tokens of the sequences first admitted in this step,
            and how many of them the prefix cache held.
        num_recomputed_tokens: tokens that sequences readmitted in this step had computed before their preemption and
            must compute again.
    """

    sequences: tuple[Sequence, ...]
    starts: tuple[int, ...]
    num_scheduled: tuple[int, ...]
    samples: tuple[bool, ...]
    num_decodes: int
    num_tokens: int
    preempted: tuple[Sequence, ...]
    blocked_by: BlockedBy
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int
    num_recomputed_tokens: int

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that sample, in the plan's order."""
        return [seq for seq, samples in zip(self.sequences, self.samples, strict=True) if samples]

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens - self.num_decodes

    def num_cached_tokens(self) -> dict[str, int]:
        """Return prompt tokens found in the prefix cache by request id, for sequences first admitted in this step."""
        admissions = zip(self.sequences[self.num_decodes :], self.starts[self.num_decodes :], strict=True)
        return {seq.request_id: start for seq, start in admissions if 0 < start == seq.num_cached_tokens}


@dataclass(slots=True)
class BatchDraft:
    """A plan while it grows."""

    sequences: list[Sequence]
    starts: list[int]
    num_scheduled: list[int]
    samples: list[bool]
    num_decodes: int
    num_tokens: int
    preempted: list[Sequence] = field(default_factory=list)
    blocked_by: BlockedBy = BlockedBy.NONE
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_recomputed_tokens: int = 0

    @classmethod
    def of_decodes(cls, decodes: list[Sequence], starts: list[int]) -> "BatchDraft":
        """Start with one token of each of ``decodes``; takes the lists over."""
        num = len(decodes)
        return cls(decodes, starts, [1] * num, [True] * num, num_decodes=num, num_tokens=num)

    def add_chunk(self, seq: Sequence, num_tokens: int) -> None:
        start = seq.num_computed_tokens
        self.sequences.append(seq)
        self.starts.append(start)
        self.num_scheduled.append(num_tokens)
        self.samples.append(start + num_tokens == len(seq.token_ids))
        self.num_tokens += num_tokens

    def freeze(self) -> BatchPlan:
        return BatchPlan(
            sequences=tuple(self.sequences),
            starts=tuple(self.starts),
            num_scheduled=tuple(self.num_scheduled),
            samples=tuple(self.samples),
            num_decodes=self.num_decodes,
            num_tokens=self.num_tokens,
            preempted=tuple(self.preempted),
            blocked_by=self.blocked_by,
            num_prefix_queried_tokens=self.num_prefix_queried_tokens,
            num_prefix_hit_tokens=self.num_prefix_hit_tokens,
            num_recomputed_tokens=self.num_recomputed_tokens,
        )
