"""Stop strings in a stream of text: what may be shown, and where to cut."""

from collections.abc import Iterator


class StopStrings:
    """Cuts one output at the first stop string to be completed; of several completed at once, at the one that began first.

    So the cut depends on the text only and not on how it was split into pieces. Text that may be the beginning of a
    stop string is held back until that is decided, never more than the longest stop string less one character.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """The text that may be shown now. Sets ``found`` at a stop; everything from the stop on is dropped."""
        text = self._held + text
        cut = self._find_stop(text)
        self.found = cut is not None
        shown = self._num_safe_chars(text) if cut is None else cut
        self._held = "" if self.found else text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The text held back, when the output ends without a stop."""
        held, self._held = self._held, ""
        return held

    def _find_stop(self, text: str) -> int | None:
        begins = ((text.find(stop), len(stop)) for stop in self._stops)
        matches = [(begin + length, begin) for begin, length in begins if begin >= 0]
        return min(matches)[1] if matches else None

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
