"""Bad words become the token sequences that would write them."""

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from flyball_runtime.core.errors import InvalidRequest
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.text.bad_words import with_bad_words

VOCAB = {"?": 0, "bad": 1, "Ġbad": 2, "big": 3, "Ġ": 4, "Ġbig": 5, "ly": 6}


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Words of up to two pieces; a space belongs to the word behind it, if there is such a piece."""
    tokenizer = Tokenizer(models.WordPiece({**VOCAB, "##ly": 7, "##big": 8}, unk_token="?"))
    tokenizer.normalizer = normalizers.Replace(" ", "Ġ")
    return tokenizer


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("bad",), ((1,), (2,))),
        ((" bad",), ((1,), (2,))),
        (("badly", "bad"), ((1, 7), (2, 7), (1,), (2,))),
        (("bigbig",), ((3, 8), (5, 8))),
        (("ly",), ((6,),)),  # behind a space it takes two tokens
    ],
)
def test_a_word_at_the_start_and_behind_a_space(
    tokenizer: Tokenizer, words: tuple[str, ...], expected: tuple[tuple[int, ...], ...]
) -> None:
    if words == ("ly",):
        tokenizer.pre_tokenizer = pre_tokenizers.Split("Ġ", "isolated")
    assert with_bad_words(SamplingParams(bad_words=words), tokenizer).bad_words_token_ids == expected


def test_a_word_without_tokens_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="bad_words has ' ', which has no tokens"):
        with_bad_words(SamplingParams(bad_words=(" ",)), tokenizer)
