"""What an executor is told of a sequence's tokens when the sequence starts to run."""

from msgspec import Struct

from flyball_runtime.core.request import Sequence


class Past(Struct, frozen=True, array_like=True):
    """What a sequence had when it took its row over, as far as its sampling looks at it.

    Attributes:
        num_prompt_tokens: of all its tokens.
        prompt_token_ids: empty unless the prompt is penalized.
        output_token_ids: those so far: none, unless it was preempted.
        stop_token_ids: what ends it; empty unless it has to go on for a while.
    """

    num_prompt_tokens: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    stop_token_ids: list[int]

    @classmethod
    def of(cls, seq: Sequence) -> "Past | None":
        """Return the past of a sequence all of whose tokens are known; None if its sampling does not look at it."""
        sampling, num_prompt = seq.sampling, seq.num_prompt_tokens
        if not sampling.changes_logits:
            return None
        return cls(
            num_prompt_tokens=num_prompt,
            prompt_token_ids=seq.token_ids[:num_prompt].tolist() if sampling.repetition_penalty != 1.0 else [],
            output_token_ids=seq.token_ids[num_prompt:].tolist(),
            stop_token_ids=sorted(seq.stop_token_ids) if sampling.min_tokens else [],
        )
