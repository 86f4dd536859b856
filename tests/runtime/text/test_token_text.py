"""Single tokens as bytes: put together, they are the text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from checkpoints import EOS, EOS_ID, make_tokenizer
from flyball_runtime.text.token_text import TokenText

BYTE_LEVEL = make_tokenizer().backend_tokenizer


@settings(deadline=None)
@given(text=st.text(max_size=30))
def test_bytes_of_byte_level_tokens_add_up(text: str) -> None:
    tokens = TokenText(BYTE_LEVEL)
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    assert b"".join(map(tokens.bytes_of, ids)) == text.encode()


def test_special_and_unknown_tokens() -> None:
    tokens = TokenText(BYTE_LEVEL)
    assert tokens.text_of(EOS_ID) == EOS
    assert tokens.text_of(10**6) == ""


@pytest.mark.parametrize(("token_id", "expected"), [(0, b" world"), (1, b"\xc3"), (2, b"<0xC3"), (3, b"a")])
def test_byte_fallback_and_space_marks(token_id: int, expected: bytes) -> None:
    vocab = {"▁world": 0, "<0xC3>": 1, "<0xC3": 2, "a": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert TokenText(tokenizer).bytes_of(token_id) == expected


def test_half_a_character_is_marked() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"Ã": 0}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokens = TokenText(tokenizer)
    assert (tokens.bytes_of(0), tokens.text_of(0)) == (b"\xc3", "\ufffd")
