"""Log probabilities in the two shapes that OpenAI's endpoints give them, and in vLLM's for prompts."""

import itertools
from typing import Any

from flyball_runtime.core.request import TokenLogprobs
from flyball_runtime.text.token_text import TokenText


def chat_logprobs(tokens: list[TokenLogprobs], text: TokenText) -> dict[str, Any]:
    """An entry per token, each with the likeliest in its place."""
    return {
        "content": [
            _chat_entry(token.token_id, token.logprob, text)
            | {
                "top_logprobs": [
                    _chat_entry(token_id, logprob, text)
                    for token_id, logprob in zip(token.top_ids, token.top_logprobs, strict=True)
                ]
            }
            for token in tokens
        ],
        "refusal": None,
    }


def _chat_entry(token_id: int, logprob: float | None, text: TokenText) -> dict[str, Any]:
    return {"token": text.text_of(token_id), "logprob": logprob, "bytes": list(text.bytes_of(token_id))}


def completion_logprobs(tokens: list[TokenLogprobs], text: TokenText, offset: int) -> dict[str, Any]:
    """A list per property.

    Args:
        offset: characters of the tokens before these.
    """
    spelled = [text.text_of(token.token_id) for token in tokens]
    offsets = []
    for one in spelled:
        offsets.append(offset)
        offset += len(one)
    return {
        "tokens": spelled,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_likeliest(token, text) for token in tokens],
        "text_offset": offsets,
    }


def prompt_logprobs(tokens: list[TokenLogprobs], text: TokenText) -> list[dict[str, Any] | None]:
    """For each token, it and the likeliest by their ids; None for the first, which has none."""
    return [None if token.logprob is None else _by_id(token, text) for token in tokens]


def _by_id(token: TokenLogprobs, text: TokenText) -> dict[str, Any]:
    likeliest = zip(token.top_ids, token.top_logprobs, itertools.count(1), strict=False)
    return {
        str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": text.text_of(token_id)}
        for token_id, logprob, rank in [(token.token_id, token.logprob, token.rank), *likeliest]
    }


def _likeliest(token: TokenLogprobs, text: TokenText) -> dict[str, float] | None:
    """The likeliest and the chosen by their texts; of two with the same text, the likelier. None without a probability."""
    if token.logprob is None:
        return None
    likeliest: dict[str, float] = {}
    ids, logprobs = [*token.top_ids, token.token_id], [*token.top_logprobs, token.logprob]
    for token_id, logprob in zip(ids, logprobs, strict=True):
        likeliest.setdefault(text.text_of(token_id), logprob)
    return likeliest
