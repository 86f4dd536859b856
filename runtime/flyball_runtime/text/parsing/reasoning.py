"""Reasoning between ``<think>`` and ``</think>``, before the content. The line ends around it are dropped."""

from flyball_runtime.text.parsing.events import Content, Reasoning
from flyball_runtime.text.parsing.source import Parser, Reading, Source

OPENING, CLOSING = "<think>", "</think>"


class ThinkParser(Parser):
    """Args:
    prompt: what the model continues. A prompt that ends with one of the markers says what comes next: some templates
        open the reasoning, or open and close it when there shall be none.
    in_message: whether the model continues a message, ``prompt``, which has its reasoning behind it or is in it.
    """

    markers = (OPENING, CLOSING)
    reasons_unasked = False
    """Whether the output begins with reasoning when neither it nor the prompt has a marker."""

    def __init__(self, prompt: str, *, in_message: bool = False) -> None:
        prompt = prompt.rstrip()
        self._opened = prompt.rfind(OPENING) > prompt.rfind(CLOSING) if in_message else prompt.endswith(OPENING)
        self._closed = not self._opened if in_message else prompt.endswith(CLOSING)
        super().__init__()

    def read(self, source: Source) -> Reading[None]:
        if not self._closed and (yield from self._opens(source)):
            yield from self._skip_lines(source)
            yield from source.until(CLOSING, lambda text: self.emit(Reasoning(text)), drops="\n")
            yield from self._skip_lines(source)
        yield from source.rest(lambda text: self.emit(Content(text)))

    def _opens(self, source: Source) -> Reading[bool]:
        yield from source.skip_space()
        has_marker = yield from source.literal(OPENING)
        if has_marker:
            source.take()
        return has_marker or self._opened or self.reasons_unasked

    @staticmethod
    def _skip_lines(source: Source) -> Reading[None]:
        source.take()
        while (yield from source.literal("\n")):
            source.take()


class Qwen3(ThinkParser):
    """Reasoning needs its marker, in the prompt or in the output."""


class DeepSeekR1(ThinkParser):
    """The output begins with reasoning unless the prompt closes it."""

    reasons_unasked = True
