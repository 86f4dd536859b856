"""Log probabilities in the two shapes that OpenAI's endpoints give them."""

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


def _chat_entry(token_id: int, logprob: float, text: TokenText) -> dict[str, Any]:
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


def _likeliest(token: TokenLogprobs, text: TokenText) -> dict[str, float]:
    """The likeliest and the chosen by their texts; of two with the same text, the likelier."""
    likeliest: dict[str, float] = {}
    ids, logprobs = [*token.top_ids, token.token_id], [*token.top_logprobs, token.logprob]
    for token_id, logprob in zip(ids, logprobs, strict=True):
        likeliest.setdefault(text.text_of(token_id), logprob)
    return likeliest
