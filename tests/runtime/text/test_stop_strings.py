"""Stop strings: cut where a reader of the whole text would cut, however the text was split."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyball_runtime.text.stop_strings import StopStrings

texts = st.text(alphabet="ab€", max_size=24)
stop_lists = st.lists(st.text(alphabet="ab€", min_size=1, max_size=5), min_size=1, max_size=4)


def cut_whole(text: str, stops: list[str]) -> tuple[str, bool]:
    """The naive meaning: read character by character until some stop string is complete; cut before the longest one."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def feed(pieces: list[str], stops: list[str]) -> tuple[list[str], StopStrings]:
    matcher = StopStrings(tuple(stops))
    shown = []
    for piece in pieces:
        shown.append(matcher.add(piece))
        if matcher.found:
            return shown, matcher
    return [*shown, matcher.flush()], matcher


@settings(deadline=None)
@given(st.lists(texts, max_size=8), stop_lists)
def test_any_split_is_cut_like_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    shown, matcher = feed(pieces, stops)
    assert ("".join(shown), matcher.found) == cut_whole("".join(pieces), stops)


@settings(deadline=None)
@given(texts, stop_lists)
def test_exactly_the_possible_beginning_of_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher, shown = StopStrings(tuple(stops)), ""
    for end in range(1, len(text) + 1):
        shown += matcher.add(text[end - 1])
        if matcher.found:
            return
        endings = [text[begin:end] for begin in range(end)]
        held = next((ending for ending in endings if any(stop.startswith(ending) for stop in stops)), "")
        assert shown + held == text[:end]


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["ab", "c"], ["abc", "b"], ["a"]),
        (["x\n", "\ny"], ["\n\n"], ["x", ""]),
        (["aaab"], ["aab"], ["a"]),
        (["a", "a", "a", "c"], ["aab"], ["", "", "a", "aac", ""]),
    ],
)
def test_cases(pieces: list[str], stops: list[str], expected: list[str]) -> None:
    assert feed(pieces, stops)[0] == expected
