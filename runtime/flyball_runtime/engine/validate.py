"""Refuse what can never run, before it reaches the scheduler."""

from flyball_runtime.core.errors import EmptyPrompt, InvalidRequest, PromptTooLong, TokenOutOfVocabulary
from flyball_runtime.core.request import Request

MAX_CACHE_SALT_CHARS = 1024


def validate_request(request: Request, *, max_model_len: int, vocab_size: int) -> None:
    """Check prompt ids, lengths, sampling values and salt. Raises a RequestError that names the first fault."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise EmptyPrompt
    if len(prompt) >= max_model_len:
        raise PromptTooLong(len(prompt), None, max_model_len)
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise TokenOutOfVocabulary(next(i for i in prompt if not 0 <= i < vocab_size), vocab_size)
    request.sampling.validate(vocab_size)
    validate_cache_salt(request.cache_salt)
    max_tokens = request.sampling.max_tokens
    if max_tokens is not None and len(prompt) + max_tokens > max_model_len:
        raise PromptTooLong(len(prompt), max_tokens, max_model_len)


def validate_cache_salt(salt: str | None) -> None:
    """Raise InvalidRequest unless ``salt`` is None or a text of allowed length. The message does not repeat it."""
    if salt is not None and not 1 <= len(salt) <= MAX_CACHE_SALT_CHARS:
        raise InvalidRequest(
            f"cache_salt has {len(salt)} characters; it may have 1 to {MAX_CACHE_SALT_CHARS}. "
            "Send a random text that only its tenant knows, or leave it out.",
            param="cache_salt",
        )
