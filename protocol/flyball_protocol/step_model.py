"""How long a step of the engine takes, as a function of what it computes."""

from typing import Annotated

from msgspec import Meta, Struct

NonNegative = Annotated[float, Meta(ge=0)]


class StepModel(Struct, frozen=True, kw_only=True):
    """A model of the step time, learned by a runtime from the steps it took. Times are seconds.

    Attributes:
        base_s: of any step.
        token_s: of each token above the knee, prompt or decode.
        knee_tokens: tokens that a step computes for no more than its base (it reads all weights in any case).
        context_token_s: of each cached token that a decode reads.
        attention_pair_s: of each pair of a prompt token and a token that it attends to.
        interaction_s: of each pair of a prompt token and a decode in the same step.
        residual_p50, residual_p95: quantiles of ``|measured - predicted| / predicted`` over recent steps, each predicted
            before it was learned from; None before the first.
        num_steps: learned from.
        covariance: of the coefficients ``(base, token, context, pair)``, each scaled to the cost of a typical step; upper
            triangle, row by row; empty if unknown.
        settled: whether the predictions can be planned with.
    """

    base_s: NonNegative
    token_s: NonNegative
    knee_tokens: NonNegative = 0.0
    context_token_s: NonNegative = 0.0
    attention_pair_s: NonNegative = 0.0
    interaction_s: NonNegative = 0.0
    residual_p50: NonNegative | None = None
    residual_p95: NonNegative | None = None
    num_steps: Annotated[int, Meta(ge=0)] = 0
    covariance: tuple[float, ...] = ()
    settled: bool = False

    def predict(self, prefill_tokens: int, decodes: int, context_tokens: int, attention_pairs: int) -> float:
        """Return the seconds that a step takes; it never falls when an argument grows.

        Args:
            prefill_tokens: P, prompt tokens.
            decodes: D, sequences that get their next token.
            context_tokens: K, tokens in the cache that the decodes read, their own included.
            attention_pairs: Q, pairs of a prompt token and a token that it attends to.
        """
        return (
            self.base_s
            + self.token_s * max(0.0, prefill_tokens + decodes - self.knee_tokens)
            + self.context_token_s * context_tokens
            + self.attention_pair_s * attention_pairs
            + self.interaction_s * prefill_tokens * decodes
        )
