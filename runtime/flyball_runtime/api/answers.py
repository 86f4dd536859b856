"""The shapes of answers, for /openapi.json. Answers are written elsewhere; tests read them back strictly as these."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class TokenDetails(Struct, kw_only=True):
    """Attributes:
    cached_tokens: tokens of the prompt that the prefix cache had.
    """

    cached_tokens: int


class Usage(Struct, kw_only=True):
    """How many tokens a request took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails


class TokenLogprob(Struct, kw_only=True):
    """A token, its log probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob, kw_only=True):
    """A token of the answer, with the likeliest in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct, kw_only=True):
    """Log probabilities in the shape of chats."""

    content: list[ChatTokenLogprob]
    refusal: None


class CompletionLogprobs(Struct, kw_only=True):
    """Log probabilities in the shape of completions: a list per property, with an entry per token.

    The first token of a prompt, which ``echo`` shows, has none.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct, kw_only=True):
    """The log probability of a token in a place of the prompt, and its rank there, from 1 on."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt, by token id; null for the first. They come with ``prompt_logprobs``."""


class AnswerFunction(Struct, kw_only=True):
    """``arguments`` is a JSON object, as a text."""

    name: str
    arguments: str


class AnswerCall(Struct, kw_only=True):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: AnswerFunction


class AnswerMessage(Struct, kw_only=True):
    """What the assistant says. ``reasoning_content`` and ``reasoning`` are two names of one thing."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    """One answer to a chat. ``token_ids`` comes with ``return_token_ids``, ``sequence_score`` with ``use_beam_search``."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: list[int] | UnsetType = UNSET
    sequence_score: float | UnsetType = UNSET


class ChatAnswer(Struct, kw_only=True):
    """An answer to a chat. ``prompt_token_ids`` comes with ``return_token_ids``."""

    id: str
    created: int
    model: str
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(Struct, kw_only=True):
    """The name comes once; the arguments come in parts."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CallDelta(Struct, kw_only=True):
    """What is new of a call."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(Struct, kw_only=True):
    """What is new since the last chunk."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    """One answer's part of a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    """The data of one server-sent event; the last event is ``[DONE]``."""

    id: str
    created: int
    model: str
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(Struct, kw_only=True):
    """One completion of one prompt, or its part of a chunk. The token ids come with ``return_token_ids``.

    ``sequence_score`` comes with ``use_beam_search``.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    sequence_score: float | UnsetType = UNSET


class CompletionAnswer(Struct, kw_only=True):
    """Completions of the prompts, or the data of one server-sent event, where ``usage`` may be absent."""

    id: str
    created: int
    model: str
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET


class PromptUsage(Struct, kw_only=True):
    """How many tokens a request without output took."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails


class Embedding(Struct, kw_only=True):
    """A vector of length 1: numbers, or with ``encoding_format`` base64 a text."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class EmbeddingList(Struct, kw_only=True):
    """The embeddings of the prompts, in their order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: PromptUsage


class Score(Struct, kw_only=True):
    """The cosine of the embeddings of two texts."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(Struct, kw_only=True):
    """The scores of the pairs, in their order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage


class InputTokenDetails(Struct, kw_only=True):
    """Attributes:
    cached_tokens: tokens of the input that the prefix cache had.
    """

    cached_tokens: int


class OutputTokenDetails(Struct, kw_only=True):
    """Attributes:
    reasoning_tokens: always 0; those of reasoning are counted as output tokens.
    """

    reasoning_tokens: int


class ResponseUsage(Struct, kw_only=True):
    """How many tokens a response took."""

    input_tokens: int
    input_tokens_details: InputTokenDetails
    output_tokens: int
    output_tokens_details: OutputTokenDetails
    total_tokens: int


class ResponseFailure(Struct, kw_only=True):
    """Why a response failed after its stream had begun."""

    code: Literal["server_error"]
    message: str


class IncompleteDetails(Struct, kw_only=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseAnswer(Struct, kw_only=True):
    """A response. ``output`` has OpenAI's items: reasoning, message, function_call. Many fields repeat the request's."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "in_progress", "incomplete", "failed"]
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage | None
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    text: dict[str, Any]
    metadata: dict[str, str]
    truncation: Literal["disabled"]
    background: Literal[False]
    store: Literal[False]
    previous_response_id: None


class ResponseEvent(Struct, kw_only=True):
    """The data of one server-sent event, with more fields by its type, as OpenAI has them. The last has the response."""

    type: str
    sequence_number: int


class MessageText(Struct, kw_only=True, tag="text"):
    text: str


class MessageThinking(Struct, kw_only=True, tag="thinking"):
    """Reasoning; ``signature`` is empty."""

    thinking: str
    signature: Literal[""]


class MessageToolUse(Struct, kw_only=True, tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Struct, kw_only=True):
    """How many tokens a message took.

    Attributes:
        input_tokens: of the prompt, without those that the prefix cache had, which are ``cache_read_input_tokens``.
    """

    input_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(Struct, kw_only=True):
    """An answer in Anthropic's form."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageText | MessageThinking | MessageToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(Struct, kw_only=True):
    """The data of one server-sent event, with more fields by its type, as Anthropic has them."""

    type: str


class TokenCount(Struct, kw_only=True):
    """The tokens of a conversation, with what the chat template adds."""

    input_tokens: int


class ModelCard(Struct, kw_only=True):
    """A served model or adapter. ``root`` is the checkpoint or the adapter's folder, ``parent`` the model of an adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(Struct, kw_only=True):
    """The served models."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(Struct, kw_only=True):
    """Token ids; ``token_strs`` comes with ``return_token_strs``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizedText(Struct, kw_only=True):
    """The text of token ids."""

    prompt: str


class Status(Struct, kw_only=True):
    """The answer of a probe."""

    status: str


class ErrorFields(Struct, kw_only=True):
    """What was wrong: the value, the limit and the way out; ``param`` names the field."""

    message: str
    type: str
    param: str | None
    code: str


class Error(Struct, kw_only=True):
    """Every answer that is no success."""

    error: ErrorFields


class MessageError(Struct, kw_only=True):
    """The same under /v1/messages."""

    type: Literal["error"]
    error: ErrorFields
