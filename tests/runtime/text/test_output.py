"""Tokens become text as they come: never half a character, and cut at stop strings and stop tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from checkpoints import make_tokenizer
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.text.output import MAX_HELD_TOKENS, Detokenizer, OutputText, StopStrings, whole_text


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with few merges, so that most non-ASCII characters span several tokens."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """A Llama-2-like tokenizer: word pieces with a leading space mark, and one token per byte."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁Hello": 256, "▁world": 257, "!": 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def pieces_of(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.flush()]


@settings(deadline=None)
@given(text=st.text(max_size=40))
def test_pieces_add_up_and_no_character_is_split(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    pieces = pieces_of(tokenizer.backend_tokenizer, encode(tokenizer, text))
    shown = text
    for special in tokenizer.all_special_tokens:
        shown = shown.replace(special, "")
    assert "".join(pieces) == shown
    if "�" not in text:
        assert not any("�" in piece for piece in pieces)


@settings(deadline=None)
@given(token_ids=st.lists(st.integers(0, 305), max_size=MAX_HELD_TOKENS))
def test_any_tokens_add_up(tokenizer: PreTrainedTokenizerFast, token_ids: list[int]) -> None:
    backend = tokenizer.backend_tokenizer
    assert "".join(pieces_of(backend, token_ids)) == backend.decode(token_ids, skip_special_tokens=True)


@settings(deadline=None)
@given(token_ids=st.lists(st.integers(0, 258), max_size=2 * MAX_HELD_TOKENS))
def test_any_byte_fallback_tokens_add_up(byte_fallback: Tokenizer, token_ids: list[int]) -> None:
    shown, whole = "".join(pieces_of(byte_fallback, token_ids)), byte_fallback.decode(token_ids)
    # One bad byte makes this decoder replace its whole run of bytes, characters shown before it included.
    assert shown == whole or "�" in whole


@settings(deadline=None)
@given(st.text(alphabet="aé€😀\x00", max_size=20))
def test_byte_fallback_text_adds_up(byte_fallback: Tokenizer, text: str) -> None:
    pieces = pieces_of(byte_fallback, list(text.encode()))
    assert "".join(pieces) == text and not any("�" in piece for piece in pieces)


@settings(deadline=None)
@given(token_ids=st.lists(st.integers(0, 258), max_size=3 * MAX_HELD_TOKENS), stop=st.integers(0, 258))
def test_whole_text_is_what_pieces_add_up_to(byte_fallback: Tokenizer, token_ids: list[int], stop: int) -> None:
    sampling = SamplingParams(stop_token_ids=(stop,))
    output = OutputText(byte_fallback, sampling)
    pieces = [output.add([token_id]) for token_id in token_ids]
    assert whole_text(byte_fallback, sampling, token_ids) == "".join(pieces) + output.finish()


def test_a_cut_character_takes_no_other_away(byte_fallback: Tokenizer) -> None:
    token_ids = list("€€".encode())[:-1]
    assert byte_fallback.decode(token_ids) == "�����"
    assert whole_text(byte_fallback, SamplingParams(), token_ids) == "€��"


def test_leading_spaces_are_kept_behind_the_first_token(byte_fallback: Tokenizer) -> None:
    assert pieces_of(byte_fallback, [256, 257, 0xE2, 0x82, 0xAC, 257, 0xE2]) == [
        "Hello", " world", "", "", "€", " world", "", "�",
    ]  # fmt: skip


def test_bytes_that_are_no_text_are_held_for_few_tokens_only(byte_fallback: Tokenizer) -> None:
    pieces = pieces_of(byte_fallback, [0xFF] * 1000)
    assert "".join(pieces).startswith("�" * 900)
    longest_wait = max(len(run) for run in "".join("x" if piece else "." for piece in pieces).split("x"))
    assert longest_wait <= MAX_HELD_TOKENS


@settings(deadline=None)
@given(text=st.text(alphabet="ab €😀", max_size=30), stop=st.text(alphabet="ab €😀", min_size=1, max_size=4))
def test_stop_strings_across_tokens(tokenizer: PreTrainedTokenizerFast, text: str, stop: str) -> None:
    output = OutputText(tokenizer.backend_tokenizer, SamplingParams(stop=(stop,)))
    shown = "".join(output.add([token_id]) for token_id in encode(tokenizer, text)) + output.finish()
    assert shown == text.split(stop)[0]
    assert output.stopped == (stop in text)


texts = st.text(alphabet="ab€", max_size=24)
stop_lists = st.lists(st.text(alphabet="ab€", min_size=1, max_size=5), min_size=1, max_size=4)


def cut_whole(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The naive meaning: read character by character until some stop string is complete; cut before the longest one."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


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


def test_a_stop_string_in_the_first_tokens_does_not_count(tokenizer: PreTrainedTokenizerFast) -> None:
    token_ids = encode(tokenizer, "!?!?!?")
    num_first = next(n for n in range(len(token_ids)) if tokenizer.decode(token_ids[:n]) == "!?!")
    output = OutputText(tokenizer.backend_tokenizer, SamplingParams(stop=("?",), min_tokens=num_first))
    assert output.add(token_ids) == "!?!" and output.stopped
