"""Request bodies of the OpenAI endpoints, and their translation into SamplingParams.

A field that is null counts as absent, as OpenAI's clients mean it. Sampling defaults are the checkpoint's (its
generation_config.json), else OpenAI's: temperature 1, top_p 1.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct, structs

from flyball_protocol.quoting import MAX_QUOTED_CHARS, one_line, quoted, quoted_list
from flyball_runtime.api.messages import Message, Tool, ToolChoice
from flyball_runtime.api.structured_outputs import ResponseFormat, StructuredOutputs, grammar_of
from flyball_runtime.core.beam_search import BeamSearch, EarlyStopping
from flyball_runtime.core.errors import InvalidRequest
from flyball_runtime.core.request import validate_deadlines
from flyball_runtime.core.sampling_params import DEFAULT_SAMPLING, MAX_LOGPROBS, MAX_SEED, SamplingParams

# Fields that clients know and this server does not serve, of three kinds. Values that ask for nothing are let through, so that
# clients which always send a field work. Hints about who asks and how to cache cannot change an answer and are ignored.
# Everything else is refused by name: an answer that silently lacks what was asked for is worse than an error.

IGNORED_HINTS = frozenset(
    {
        "user",
        "safety_identifier",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
    }
)

_COMMON_NOOPS: dict[str, tuple[Any, ...]] = {
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "include_stop_str_in_output": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "truncate_prompt_tokens": (None,),
}

CHAT_NOOPS: dict[str, tuple[Any, ...]] = _COMMON_NOOPS | {
    "echo": (None, False),
    "functions": (None, []),
    "function_call": (None, "auto", "none"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "moderation": (None,),
    "verbosity": (None, "medium"),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "web_search_options": (None,),
}

COMPLETION_NOOPS: dict[str, tuple[Any, ...]] = _COMMON_NOOPS | {"suffix": (None, "")}

RENAMED = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json_object": "structured_outputs.json_object",
    "guided_whitespace_pattern": "structured_outputs.whitespace_pattern",
}
"""Fields that vLLM had before its version 0.12, and what they are called since."""


def without_noops(
    body: Mapping[str, Any], known: Collection[str], noops: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """The fields of ``body`` that are ``known``. Raises InvalidRequest naming every other one that asks for something."""
    others = [name for name in body if name not in known and name not in IGNORED_HINTS]
    others = [name for name in others if name not in RENAMED or body[name] is not None]
    if renamed := next((name for name in others if name in RENAMED), None):
        raise InvalidRequest(f"{renamed} is called {RENAMED[renamed]} now. Send that instead.", param=renamed)
    unknown = [name for name in others if name not in noops]
    if unknown:
        raise InvalidRequest(
            f"unknown field {quoted_list(unknown)}. Check the spelling or leave it out.",
            param=one_line(unknown[0], MAX_QUOTED_CHARS),
        )
    asking = [name for name in others if not any(is_same(body[name], value) for value in noops[name])]
    if asking:
        raise InvalidRequest(
            f"{quoted_list(asking)} is not supported by this server. Leave it out or send its default.", param=asking[0]
        )
    return {name: value for name, value in body.items() if name in known}


def is_same(value: object, noop: object) -> bool:
    """Whether a value is this one and not another that is equal: ``logprobs`` 0 asks for the chosen token's, false for none."""
    return isinstance(value, bool) == isinstance(noop, bool) and value == noop


DEFAULT_COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions when the field is absent, OpenAI's default; null asks for all the context allows."""

MAX_PRIORITY = 2**31
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, lt=MAX_PRIORITY)]


class StreamOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``continuous_usage_stats`` (vLLM): running usage in every chunk. ``include_obfuscation`` is accepted when off."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class RequestFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all requests have in common whose prompts the engine computes.

    Attributes:
        priority: lower runs first, under ``--scheduling-policy priority`` and ``edf``.
        ttft_deadline_ms, e2e_deadline_ms: milliseconds to the first and to the last token, under ``edf``.
        cache_salt: keeps the prefix cache of those who share it apart from everyone else's.
    """

    model: str | None = None
    priority: Priority | None = None
    ttft_deadline_ms: float | None = None
    e2e_deadline_ms: float | None = None
    cache_salt: str | None = None


class SamplingFields(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What chats, completions and responses have in common; see SamplingParams for meanings and ranges.

    Attributes:
        top_k: -1 is off too, as vLLM's clients send it.
        logit_bias: by token id, written as a text, as JSON has it.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    stream: bool | None = None


class GenerationFields(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What chat and plain completions have in common.

    Attributes:
        prompt_logprobs: of each prompt token, and of so many of the likeliest in its place. Not for streams, as in vLLM.
        response_format, structured_outputs: the form of the output; the second has more kinds.
        return_token_ids: answer with the token ids of prompt and output too.
        add_special_tokens: let the tokenizer add its own (BOS); chats leave that to the template by default.
        use_beam_search: answer with the likeliest outputs, in the place of sampling.
        best_of: how many outputs are sampled, or followed by a beam search, of which the best ``n`` are told. The default is
            ``n``.
        length_penalty: a beam search scores outputs by the sum of their log probabilities over their length to this power.
        early_stopping: when a beam search ends that has found enough outputs: ``true`` at once, ``false`` when no better one
            is expected, ``never`` when there can be none.
    """

    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    n: int | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    best_of: int | None = None
    length_penalty: float | None = None
    early_stopping: EarlyStopping | None = None

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def num_outputs(self) -> int:
        """Outputs for each prompt, from which the answers are chosen."""
        return self.num_choices if self.best_of is None else self.best_of

    @property
    def num_requests(self) -> int:
        """Engine requests for each prompt."""
        return 1 if self.use_beam_search else self.num_outputs

    def beam_search(self) -> BeamSearch | None:
        """Return the settings of the search, if one is asked for. Raises InvalidRequest for what does not go together."""
        self._check_best_of()
        if self.use_beam_search:
            penalty = 1.0 if self.length_penalty is None else self.length_penalty
            return BeamSearch(
                width=self.num_outputs, length_penalty=penalty, early_stopping=self.early_stopping or False
            )
        asking = {
            "length_penalty": self.length_penalty not in (None, 1.0),
            "early_stopping": bool(self.early_stopping),
        }
        if name := next((name for name, asks in asking.items() if asks), None):
            raise InvalidRequest(
                f"{name} is {quoted(getattr(self, name))}, but no beam search is asked for. Send use_beam_search too, or leave "
                f"{name} out.",
                param=name,
            )
        return None

    def _check_best_of(self) -> None:
        num, most = self.num_choices, self.num_outputs
        if most < num:
            raise InvalidRequest(
                f"best_of is {quoted(most)}, below n, which is {num}: so many answers are chosen from it. Raise it or leave "
                "it out.",
                param="best_of",
            )
        if self.stream and (self.use_beam_search or most > num):
            name = "beam search" if self.use_beam_search else "best_of above n"
            raise InvalidRequest(
                f"stream does not go with {name}: which outputs are the likeliest is known when all have ended. Leave one of "
                "them out.",
                param="stream",
            )

    def check_stream_options(self) -> None:
        """Raise InvalidRequest for what only streams have, or cannot have, and for stream_options that ask for obfuscation."""
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs cannot be streamed. Leave out stream; or, for completions, send echo with logprobs instead.",
                param="prompt_logprobs",
            )
        if self.stream_options is None:
            return
        if not self.stream:
            raise InvalidRequest("stream_options needs stream to be true. Leave it out.", param="stream_options")
        if self.stream_options.include_obfuscation:
            raise InvalidRequest(
                "stream_options.include_obfuscation is not supported by this server. Leave it out or send false.",
                param="stream_options.include_obfuscation",
            )


class Urgency(NamedTuple):
    """How soon a request wants to be served; see ``core.request.Request``."""

    priority: int
    ttft_deadline_ms: float | None
    e2e_deadline_ms: float | None


_URGENCY_HEADERS = {
    "X-Priority": ("priority", int),
    "X-TTFT-Deadline-Ms": ("ttft_deadline_ms", float),
    "X-E2E-Deadline-Ms": ("e2e_deadline_ms", float),
}


def urgency_of(body: RequestFields, headers: Mapping[str, str]) -> Urgency:
    """Return what the headers say, and the body where they say nothing: a gateway knows better than its clients.

    Raises:
        InvalidRequest: a header that is not a number, or out of range.
    """
    wanted: dict[str, Any] = {
        "priority": body.priority or 0,
        "ttft_deadline_ms": body.ttft_deadline_ms,
        "e2e_deadline_ms": body.e2e_deadline_ms,
    }
    for header, (name, number) in _URGENCY_HEADERS.items():
        if (text := headers.get(header)) is None:
            continue
        try:
            wanted[name] = number(text)
        except ValueError:
            kind = "a whole number" if number is int else "a number"
            raise InvalidRequest(f"the header {header} is {quoted(text)}; it must be {kind}.", param=name) from None
    if not -MAX_PRIORITY <= wanted["priority"] < MAX_PRIORITY:
        raise InvalidRequest(
            f"priority is {quoted(wanted['priority'])}; it must be from {-MAX_PRIORITY} to {MAX_PRIORITY - 1}.",
            param="priority",
        )
    validate_deadlines(wanted["ttft_deadline_ms"], wanted["e2e_deadline_ms"])
    return Urgency(**wanted)


class CompletionRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt to complete.

    Attributes:
        prompt: a text, token ids, or a list of texts or of lists of token ids.
        logprobs: of how many of the likeliest tokens, beside the chosen one; false is off too.
        echo: answer with the prompt in front of the output, and with its ``logprobs``. ``max_tokens`` may then be 0.
    """

    prompt: str | list[str | int | list[int]]
    logprobs: int | bool | None = None
    echo: bool | None = None
    max_tokens: int | None = DEFAULT_COMPLETION_TOKENS

    @property
    def only_echoes(self) -> bool:
        """Whether the prompt is all that is wanted."""
        return bool(self.echo) and self.max_tokens == 0

    def prompts(self) -> tuple[list[str], list[list[int]]]:
        """Like ``texts_or_ids``."""
        return texts_or_ids("prompt", self.prompt)


def texts_or_ids(param: str, value: str | list[str | int | list[int]]) -> tuple[list[str], list[list[int]]]:
    """Return the prompts of a field as texts, or as lists of ids. One of the two is empty.

    Raises:
        InvalidRequest: no prompts, or kinds mixed.
    """
    items: list[Any] = [value] if isinstance(value, str) else value
    kinds = set(map(type, items))  # without a turn of Python's for each of a million ids
    if kinds == {str}:
        return items, []
    if kinds == {int}:
        return [], [items]
    if kinds == {list}:
        return [], items
    raise InvalidRequest(
        f"{param} is empty, or mixes texts, token ids and lists of token ids. Send a text, a list of texts, a list of "
        "token ids, or a list of such lists.",
        param=param,
    )


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A chat to answer.

    Attributes:
        logprobs: of each token of the answer, and of the ``top_logprobs`` likeliest in its place.
        add_generation_prompt: end the prompt where the assistant's turn begins; the default unless a message is continued.
        continue_final_message: leave the last message open, so that the answer continues it.
        chat_template_kwargs: further variables for the template, e.g. ``enable_thinking``.
        reasoning_effort: a variable for the template too; ``none`` sets ``enable_thinking`` to false as well.
        tools: what the model may call.
        tool_choice: ``none`` keeps the tools from the model; the default is ``auto``.
        parallel_tool_calls: if false, an answer has one call at most.
    """

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class TokenizeTextRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A chat to tokenize; fields as in ChatRequest."""

    messages: list[Message]
    model: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


Chat = ChatRequest | TokenizeChatRequest


def offered_tools(chat: Chat) -> list[Tool]:
    """The tools that the model is told of."""
    return [] if isinstance(chat, ChatRequest) and chat.tool_choice == "none" else chat.tools or []


class DetokenizeRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


def sampling_params(body: GenerationFields, defaults: SamplingParams, vocab_size: int) -> SamplingParams:
    """The checked SamplingParams of a request. Raises InvalidRequest naming the first field out of range.

    Args:
        defaults: temperature, top_p, top_k, min_p and repetition_penalty where the request has none. A beam search has no
            use for them.
    """
    beam_search = body.beam_search()
    if beam_search is not None:
        defaults = DEFAULT_SAMPLING
    params = SamplingParams(
        max_tokens=_max_tokens(body),
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        top_k=_top_k(defaults.top_k if body.top_k is None else body.top_k, vocab_size),
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        seed=body.seed,
        stop=_stop_strings(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=(
            defaults.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty
        ),
        logit_bias=_logit_bias(body.logit_bias),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        bad_words=tuple(body.bad_words or ()),
        logprobs=_num_logprobs(body),
        prompt_logprobs=_num_prompt_logprobs(body),
        grammar=grammar_of(body.response_format, body.structured_outputs),
        beam_search=beam_search,
    )
    params.validate(vocab_size)
    return params


def _num_logprobs(body: GenerationFields) -> int | None:
    if isinstance(body, ChatRequest):
        return _num_chat_logprobs(body)
    wanted = body.logprobs if isinstance(body, CompletionRequest) else None
    if wanted is True:
        raise InvalidRequest(
            "logprobs is true; here it is the number of the likeliest tokens to list, like 1.", param="logprobs"
        )
    return None if wanted is False else wanted


def _num_prompt_logprobs(body: GenerationFields) -> int | None:
    """Those that are asked for as such, or by an echo with logprobs."""
    asked, echoed = body.prompt_logprobs, None
    if isinstance(body, CompletionRequest) and body.echo:
        echoed = _num_logprobs(body)
    if asked is None or echoed is None or asked == echoed:
        return echoed if asked is None else asked
    raise InvalidRequest(
        f"prompt_logprobs is {quoted(asked)} and logprobs is {quoted(echoed)}; with echo both are of the prompt. "
        "Send one of them, or the same number.",
        param="prompt_logprobs",
    )


def _num_chat_logprobs(body: ChatRequest) -> int | None:
    num_top = body.top_logprobs or 0
    if not 0 <= num_top <= MAX_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs is {quoted(num_top)}; it must be from 0 to {MAX_LOGPROBS}.", param="top_logprobs"
        )
    if num_top and not body.logprobs:
        raise InvalidRequest(
            "top_logprobs needs logprobs to be true. Send both, or leave it out.", param="top_logprobs"
        )
    return num_top if body.logprobs else None


def choice_sampling(params: SamplingParams, choice: int) -> SamplingParams:
    """Sampling of the ``choice``-th of n answers to one prompt: seed + choice, so that they differ and repeat."""
    if params.seed is None or choice == 0:
        return params
    seed = params.seed + choice
    return structs.replace(params, seed=seed if seed <= MAX_SEED else seed - 2 * (MAX_SEED + 1))


def _max_tokens(body: GenerationFields) -> int | None:
    if isinstance(body, CompletionRequest) and body.only_echoes:
        return 1  # the engine samples behind each prompt; the answer leaves it out
    newer = body.max_completion_tokens if isinstance(body, ChatRequest) else None
    if newer is None or body.max_tokens is None:
        return newer if body.max_tokens is None else body.max_tokens
    if newer != body.max_tokens:
        raise InvalidRequest(
            f"max_tokens is {quoted(body.max_tokens)} and max_completion_tokens is {quoted(newer)}; they mean the same. "
            "Send one of them.",
            param="max_completion_tokens",
        )
    return newer


def _top_k(top_k: int, vocab_size: int) -> int:
    return 0 if top_k == -1 else min(top_k, vocab_size)


def _logit_bias(biases: dict[str, float] | None) -> dict[int, float]:
    wrong = next((key for key in biases or () if not (key.isascii() and key.isdigit() and len(key) <= 10)), None)
    if wrong is not None:
        raise InvalidRequest(
            f'logit_bias has the key {quoted(wrong)}; its keys must be token ids, like "42".', param="logit_bias"
        )
    return {int(key): bias for key, bias in (biases or {}).items()}


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)
