"""Refuse what can never run, before it reaches the scheduler."""

from flyball_runtime.core.errors import EmptyPrompt, PromptTooLong, TokenOutOfVocabulary
from flyball_runtime.core.request import Request


def validate_request(request: Request, *, max_model_len: int, vocab_size: int) -> None:
    """Check prompt ids, lengths and sampling values. Raises a RequestError that names the first fault."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise EmptyPrompt
    if len(prompt) >= max_model_len:
        raise PromptTooLong(len(prompt), None, max_model_len)
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise TokenOutOfVocabulary(next(i for i in prompt if not 0 <= i < vocab_size), vocab_size)
    request.sampling.validate(vocab_size)
    max_tokens = request.sampling.max_tokens
    if max_tokens is not None and len(prompt) + max_tokens > max_model_len:
        raise PromptTooLong(len(prompt), max_tokens, max_model_len)
