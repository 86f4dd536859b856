"""The text of one engine request: its tokens detokenized and cut at stop strings and stop tokens."""

from tokenizers import Tokenizer

from flyball_runtime.core.request import SamplingParams
from flyball_runtime.text.detokenizer import Detokenizer
from flyball_runtime.text.stop_strings import StopStrings


class OutputText:
    """Feeds tokens through the detokenizer and the stop strings.

    Attributes:
        num_tokens: tokens taken so far; none after a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._stops = StopStrings(sampling.stop) if sampling.stop else None
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._stops is not None and self._stops.found

    def add(self, token_ids: list[int]) -> str:
        """The text that may be shown after these tokens; tokens behind a stop string do not count."""
        pieces = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            if token_id not in self._stop_token_ids:  # it ends the output and is no part of its text
                pieces.append(self._cut(self._detokenizer.add(token_id)))
        return "".join(pieces)

    def finish(self) -> str:
        """The rest of the text, when the engine has ended the request."""
        if self.stopped:
            return ""
        rest = self._cut(self._detokenizer.flush())
        return rest if self._stops is None or self.stopped else rest + self._stops.flush()

    def _cut(self, text: str) -> str:
        return text if self._stops is None or not text else self._stops.add(text)
