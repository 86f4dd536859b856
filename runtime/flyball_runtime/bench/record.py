"""What one request did. Times are seconds from the start of the run."""

from msgspec import Struct


class RequestRecord(Struct, kw_only=True):
    """Filled in while the request runs.

    Attributes:
        arrival_s: when it was due: the schedule of an open loop, the moment of sending in a closed one.
        sent_s: when it was sent. ``sent_s - arrival_s`` is the generator's lateness.
        first_token_s, last_token_s: arrival of the first and last chunk with a token; None when none came.
        gaps_s: times between consecutive chunks with tokens. A chunk may hold several tokens; the gap is not divided.
        input_tokens, output_tokens: the server's ``usage``; without one, output is the count of chunks and input None.
        tokens_from_usage: which of the two.
        error: kind of failure, None for success.
    """

    index: int
    arrival_s: float
    sent_s: float
    end_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float | None = None
    gaps_s: list[float] = []
    input_tokens: int | None = None
    output_tokens: int = 0
    tokens_from_usage: bool = False
    error: str | None = None
    error_message: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ttft_s(self) -> float | None:
        """From sending."""
        return None if self.first_token_s is None else self.first_token_s - self.sent_s

    @property
    def ttft_from_arrival_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float | None:
        """From sending to the last token."""
        return None if self.last_token_s is None else self.last_token_s - self.sent_s

    @property
    def e2e_from_arrival_s(self) -> float | None:
        return None if self.last_token_s is None else self.last_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for fewer than two tokens."""
        if self.first_token_s is None or self.last_token_s is None or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)
