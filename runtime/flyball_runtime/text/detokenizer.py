"""Token ids to text, one token at a time, and never half a character."""

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

MAX_HELD_TOKENS = 16
"""Tokens that wait for the rest of a character. One takes at most four bytes, so after so many the output is not UTF-8;
DecodeStream would keep them all and decode all of them anew for every token."""


class Detokenizer:
    """The text of one output as its tokens come.

    Characters that span tokens are held until complete; special tokens have no text. The pieces, ``flush`` included, add
    up to what decoding all tokens at once gives, except in runs of more than MAX_HELD_TOKENS tokens that are not UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held: list[int] = []
        self._shown: list[int] = []

    def add(self, token_id: int) -> str:
        """The text that became complete with this token; often the token's own, or empty."""
        self._held.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # noqa: BLE001  pyo3's bare Exception: earlier text changed (byte fallback, on bytes not UTF-8)
            return self.flush()  # decodes the same tokens, so an error of another kind comes again
        if text is None:
            return self.flush() if len(self._held) > MAX_HELD_TOKENS else ""
        self._shown, self._held = self._held, []
        return text

    def flush(self) -> str:
        """The text of the tokens still held, incomplete characters as U+FFFD. Decoding starts anew after it."""
        if not self._held:
            return ""
        # Decoders strip a leading space, so the held tokens are decoded behind the ones shown last.
        before = self._decode(self._shown)
        both = self._decode(self._shown + self._held)
        text = both.removeprefix(before) if both.startswith(before) else self._decode(self._held)
        self._stream = DecodeStream(skip_special_tokens=True)
        self._shown, self._held = self._held, []
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)
