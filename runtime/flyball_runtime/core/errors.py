"""The three families of errors. Each message gives the value, the limit and the way out."""

from flyball_protocol.quoting import quoted


class FlyballError(Exception):
    """Base of every error that Flyball raises on purpose."""


class ConfigError(FlyballError):
    """A setting, the model or the machine makes start-up impossible; the process stops with EXIT_CONFIG_ERROR."""


class EngineError(FlyballError):
    """The engine loop is dead; pending requests fail and nothing new is accepted."""


class RequestError(FlyballError):
    """One request fails and the engine goes on.

    Attributes:
        status: HTTP status.
        code: OpenAI error code, e.g. ``context_length_exceeded``.
        param: the field at fault, or None.
        retry_after_s: what to send as Retry-After, or None.
    """

    status: int = 400
    code: str = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def message(self) -> str:
        return str(self)


class InvalidRequest(RequestError):
    """A field has a value that this server cannot take."""


class UnfitPrompt(RequestError):
    """This engine can never run the prompt."""


class PromptTooLong(UnfitPrompt):
    code = "context_length_exceeded"

    def __init__(
        self, num_prompt_tokens: int, max_tokens: int | None, max_model_len: int, *, at_least: bool = False
    ) -> None:
        asked = f"prompt has {'at least ' if at_least else ''}{num_prompt_tokens} tokens"
        way_out = "Shorten the prompt"
        if max_tokens is not None:
            asked += f" and max_tokens is {quoted(max_tokens)}, {quoted(num_prompt_tokens + max_tokens)} together"
            way_out += ", lower max_tokens,"
        super().__init__(
            f"{asked}; this model takes {max_model_len}. {way_out} or raise --max-model-len.",
            param="messages" if max_tokens is None else "max_tokens",
        )


class EmptyPrompt(UnfitPrompt):
    code = "empty_prompt"

    def __init__(self) -> None:
        super().__init__("the prompt has 0 tokens; at least 1 is needed. Send some text or token ids.", param="prompt")


class TokenOutOfVocabulary(UnfitPrompt):
    code = "token_out_of_vocabulary"

    def __init__(self, token_id: int, vocab_size: int) -> None:
        super().__init__(
            f"token id {quoted(token_id)} is outside the vocabulary; ids go from 0 to {vocab_size - 1}. Check the tokenizer.",
            param="prompt",
        )


class QueueFull(RequestError):
    status, code = 429, "queue_full"

    def __init__(self, max_queued_requests: int, retry_after_s: int) -> None:
        super().__init__(
            f"{max_queued_requests} requests are waiting, the limit of this replica (--max-queued-requests). "
            f"Retry after {retry_after_s} s or add replicas.",
            retry_after_s=retry_after_s,
        )


class QueuedTokensFull(RequestError):
    status, code = 429, "queue_full"

    def __init__(self, num_queued: int, num_wanted: int, max_queued_tokens: int, retry_after_s: int) -> None:
        super().__init__(
            f"prompts of {num_queued} tokens are waiting, and this one has {num_wanted}; the limit of this replica is "
            f"{max_queued_tokens} (--max-queued-tokens). Retry after {retry_after_s} s or add replicas.",
            retry_after_s=retry_after_s,
        )


class TooManyPromptTokens(UnfitPrompt):
    code = "too_many_prompt_tokens"

    def __init__(self, num_tokens: int, most: int) -> None:
        super().__init__(
            f"the prompts of this request have {num_tokens} tokens, each prompt counted n times; at most {most} may wait "
            "(--max-queued-tokens). Lower n, or send fewer or shorter prompts in one request.",
            param="n",
        )


class Draining(RequestError):
    status, code = 503, "draining"

    def __init__(self, retry_after_s: int = 1) -> None:
        super().__init__(
            f"this replica is draining and takes no new requests. Retry after {retry_after_s} s; another replica will answer.",
            retry_after_s=retry_after_s,
        )


class NotReady(RequestError):
    status, code = 503, "not_ready"

    def __init__(self, retry_after_s: int = 2) -> None:
        super().__init__(
            f"the model is still loading. Retry after {retry_after_s} s or watch /readyz.", retry_after_s=retry_after_s
        )


class InvalidLogits(RequestError):
    status, code = 500, "invalid_logits"

    def __init__(self, num_output_tokens: int) -> None:
        super().__init__(
            f"the model gave no usable logits after {num_output_tokens} output tokens: they hold NaN or infinity. This "
            "request was ended; others go on. Check the checkpoint, or serve it with another --dtype (float16 overflows "
            "first)."
        )


class InvalidHiddenStates(RequestError):
    status, code = 500, "invalid_hidden_states"

    def __init__(self) -> None:
        super().__init__(
            "the model gave no usable hidden states for this prompt: they hold NaN or infinity. This request was ended; "
            "others go on. Check the checkpoint, or serve it with another --dtype (float16 overflows first)."
        )


class GrammarsBusy(RequestError):
    status, code = 429, "too_many_grammars"

    def __init__(self, most: int, retry_after_s: int = 5) -> None:
        super().__init__(
            f"{most} new schemas, regexes, choices or grammars wait to be compiled, the limit of this replica. Retry after "
            f"{retry_after_s} s; those that it has compiled before do not wait.",
            retry_after_s=retry_after_s,
        )


class GrammarsUnavailable(RequestError):
    status, code = 503, "grammars_unavailable"

    def __init__(self, retry_after_s: int = 5) -> None:
        super().__init__(
            "the process that compiles schemas and grammars did not start; the log of this replica says why. Retry after "
            f"{retry_after_s} s, or send the request without structured output.",
            retry_after_s=retry_after_s,
        )


class NoTokenLeft(RequestError):
    """A sequence under a grammar cannot go on."""

    def __init__(self, num_output_tokens: int, reason: str) -> None:
        super().__init__(
            f"no token can follow after {num_output_tokens} output tokens: {reason}. This request was ended; others go on.",
            param="structured_outputs",
        )


class InvalidAdapter(RequestError):
    """A LoRA adapter cannot be loaded."""

    code = "invalid_adapter"


class AdapterNotFound(RequestError):
    status, code = 404, "adapter_not_found"


class EngineDead(RequestError):
    status, code = 500, "engine_dead"

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the engine stopped ({reason}); this replica must be restarted. The request was not finished."
        )
