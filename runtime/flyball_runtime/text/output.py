"""The text of one engine request: its tokens detokenized, never half a character, and cut at stop strings and stop tokens."""

from collections.abc import Iterator

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from flyball_runtime.core.sampling_params import SamplingParams

MAX_HELD_TOKENS = 16
"""Tokens that wait for the rest of a character. One takes at most four bytes, so after so many the output is not UTF-8;
DecodeStream would keep them all and decode all of them anew for every token."""


class Detokenizer:
    """The text of one output as its tokens come.

    Characters that span tokens are held until complete; special tokens have no text. The pieces, ``flush`` included, add
    up to what decoding all tokens at once gives, except in runs of more than MAX_HELD_TOKENS tokens that are not UTF-8.

    Args:
        hidden: the tokens without text; None: all special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int] | None = None) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden or frozenset()
        self._skips_special = hidden is None
        self._stream = DecodeStream(skip_special_tokens=self._skips_special)
        self._held: list[int] = []
        self._shown: list[int] = []

    def add(self, token_id: int) -> str:
        """The text that became complete with this token; often the token's own, or empty."""
        if token_id in self._hidden:
            return ""
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
        self._stream = DecodeStream(skip_special_tokens=self._skips_special)
        self._shown, self._held = self._held, []
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special)


class StopStrings:
    """Cuts one output at the first stop string to be completed; of several completed at once, at the one that began first.

    So the cut depends on the text only and not on how it was split into pieces. Text that may be the beginning of a
    stop string is held back until that is decided, never more than the longest stop string less one character.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None

    def add(self, text: str) -> str:
        """The text that may be shown now. Sets ``found`` to a stop; everything from the stop on is dropped."""
        text = self._held + text
        cut, self.found = self._find_stop(text)
        shown = self._num_safe_chars(text) if self.found is None else cut
        self._held = text[shown:] if self.found is None else ""
        return text[:shown]

    def flush(self) -> str:
        """The text held back, when the output ends without a stop."""
        held, self._held = self._held, ""
        return held

    def _find_stop(self, text: str) -> tuple[int, str | None]:
        """Return where the stop string begins that was completed first, and which one it is."""
        begins = ((text.find(stop), stop) for stop in self._stops)
        matches = [(begin + len(stop), begin, stop) for begin, stop in begins if begin >= 0]
        return min(matches)[1:] if matches else (len(text), None)

    def _num_safe_chars(self, text: str) -> int:
        return min((self._open_prefix(text, stop) for stop in self._stops), default=len(text))

    @staticmethod
    def _open_prefix(text: str, stop: str) -> int:
        """Where the longest ending of ``text`` that begins ``stop`` starts, or ``len(text)``."""
        for begin in _positions(text, stop[0], max(0, len(text) - len(stop) + 1)):
            if stop.startswith(text[begin:]):
                return begin
        return len(text)


def _positions(text: str, char: str, start: int) -> Iterator[int]:
    begin = text.find(char, start)
    while begin >= 0:
        yield begin
        begin = text.find(char, begin + 1)


class OutputText:
    """Feeds tokens through the detokenizer and the stop strings.

    Args:
        hidden: as in Detokenizer.

    Attributes:
        num_tokens: tokens taken so far; none after a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, *, hidden: frozenset[int] | None = None) -> None:
        self._detokenizer = Detokenizer(tokenizer, hidden)
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._stops = StopStrings(sampling.stop) if sampling.stop else None
        self._min_tokens = sampling.min_tokens
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self.stop_string is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return None if self._stops is None else self._stops.found

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
        """Look for stop strings in all text but that of the first ``min_tokens`` tokens."""
        if self._stops is None or not text or self.num_tokens <= self._min_tokens:
            return text
        return self._stops.add(text)


def whole_text(tokenizer: Tokenizer, sampling: SamplingParams, token_ids: list[int]) -> str:
    """Return the text of an output that has ended and has no stop strings, in a fraction of the time of ``OutputText``.

    Where not all is text, decoding at once may lose characters beside what is none: then it is decoded token by token.
    """
    hidden = frozenset(sampling.stop_token_ids)
    text = tokenizer.decode([one for one in token_ids if one not in hidden], skip_special_tokens=True)
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return text
    output = OutputText(tokenizer, sampling)
    return output.add(token_ids) + output.finish()
