"""Text to token ids and back, and chats to text."""

import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import tokenizers
from jinja2 import TemplateError

from flyball_protocol.quoting import one_line, quoted_list
from flyball_runtime.api.lane import Lane
from flyball_runtime.api.schemas import Chat, Message
from flyball_runtime.core.errors import ConfigError, InvalidRequest, PromptTooLong
from flyball_runtime.core.sampling import SamplingParams
from flyball_runtime.text.length_bound import max_chars_per_token
from flyball_runtime.text.output import OutputText

T = TypeVar("T")

PIECE_CHARS = 65536
MAX_LONG_CHARS = 4 * PIECE_CHARS
"""Longer texts have a lane of their own, so that a long prompt never waits behind a body of 4 MB."""

MAX_WAITING_LONG, MAX_WAITING_HUGE = 256, 16

CHARS_PER_TOKEN = 4
"""What turning a token into text costs, in characters to tokenize."""

ITEM_CHARS = 16
"""What a message or another value costs in a chat template, in characters to tokenize."""

# What a chat template raises on messages it was not written for: Python's own errors come from its expressions.
_TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)


class ChatTokenizer(Protocol):
    """The part of transformers' PreTrainedTokenizerFast that is used here."""

    chat_template: Any

    @property
    def backend_tokenizer(self) -> tokenizers.Tokenizer: ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> Any: ...


class TextCodec:
    """The model's tokenizer and chat template.

    Nothing here stops the event loop for long: short texts are done at once, long ones in a thread (``lane.py``), and what
    is certainly too long is refused before it is tokenized. Truncation and padding that a tokenizer.json may carry are
    turned off: a prompt is never cut silently.

    Args:
        max_inline_chars: longest text that is rendered and tokenized on the event loop.

    Raises:
        ConfigError: the tokenizer is not a fast one.
    """

    def __init__(self, tokenizer: ChatTokenizer, max_inline_chars: int) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise ConfigError(
                f"the tokenizer is a {type(tokenizer).__name__}; a fast one (tokenizer.json) is needed. "
                "Convert it with transformers' AutoTokenizer and save_pretrained."
            )
        backend.no_truncation()
        backend.no_padding()
        self._tokenizer = tokenizer
        self._backend = backend
        self._max_chars_per_token = max_chars_per_token(backend)
        self._max_inline_chars = max_inline_chars
        self._long = Lane("long-texts", MAX_WAITING_LONG)
        self._huge = Lane("huge-texts", MAX_WAITING_HUGE)
        self._template_arguments = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)

    async def encode(
        self, texts: list[str], *, add_special_tokens: bool, max_tokens: int, client: str
    ) -> list[list[int]]:
        """The token ids of each text.

        Args:
            max_tokens: longest text, in tokens.
            client: who asks; clients with long texts take turns.

        Raises:
            PromptTooLong: a text has more tokens; the error may count a part of them only.
        """
        for text in texts:
            self._check_length(text, max_tokens)
        return await self._run(
            sum(map(len, texts)), client, lambda: [self._encode(text, add_special_tokens, max_tokens) for text in texts]
        )

    async def encode_chat(self, chat: Chat, *, add_special_tokens: bool, max_tokens: int, client: str) -> list[int]:
        """The prompt of a chat, like ``encode``. Raises InvalidRequest when the template is missing or refuses it."""
        messages = [_template_message(message) for message in chat.messages]

        def work() -> list[int]:
            text = self._render(messages, chat)
            self._check_length(text, max_tokens)
            return self._encode(text, add_special_tokens, max_tokens)

        return await self._run(num_chars([messages, chat.chat_template_kwargs]), client, work)

    async def decode(self, token_ids: list[int], *, client: str) -> str:
        """The text of these ids, special tokens included."""
        return await self._run(
            CHARS_PER_TOKEN * len(token_ids),
            client,
            lambda: self._backend.decode_batch([token_ids], skip_special_tokens=False)[0],
        )

    async def token_strings(self, token_ids: list[int], *, client: str) -> list[str | None]:
        """The vocabulary's spelling of each id."""
        return await self._run(
            CHARS_PER_TOKEN * len(token_ids), client, lambda: list(map(self._backend.id_to_token, token_ids))
        )

    def output(self, sampling: SamplingParams) -> OutputText:
        return OutputText(self._backend, sampling)

    async def _run(self, num_chars: int, client: str, work: Callable[[], T]) -> T:
        if num_chars <= self._max_inline_chars:
            return work()
        lane = self._long if num_chars <= MAX_LONG_CHARS else self._huge
        return await lane.run(client, work)

    def _check_length(self, text: str, max_tokens: int) -> None:
        """Refuse what is too long by its length alone."""
        if self._max_chars_per_token is not None and len(text) > max_tokens * self._max_chars_per_token:
            raise PromptTooLong(-(-len(text) // self._max_chars_per_token), None, max_tokens, at_least=True)

    def _encode(self, text: str, add_special_tokens: bool, max_tokens: int) -> list[int]:
        if len(text) > MAX_LONG_CHARS:
            self._check_pieces(text, max_tokens)
        encoding = (
            self._backend.encode(text, add_special_tokens=add_special_tokens)
            if len(text) <= self._max_inline_chars
            else self._encode_unlocked(text, add_special_tokens)
        )
        if len(encoding) > max_tokens:
            raise PromptTooLong(len(encoding), None, max_tokens)
        ids: list[int] = encoding.ids
        return ids

    def _check_pieces(self, text: str, max_tokens: int) -> None:
        """Refuse what is too long by the tokens of its pieces.

        The tokenizer takes 150 bytes of memory for a token, 600 MB for a body of 4 MB. A cut changes the tokens next to it
        only; the quarter that is allowed for that is a thousand times as much.
        """
        num_tokens = 0
        for start in range(0, len(text), PIECE_CHARS):
            num_tokens += len(self._encode_unlocked(text[start : start + PIECE_CHARS], False))
            if num_tokens > max_tokens + max_tokens // 4 + PIECE_CHARS:
                raise PromptTooLong(max_tokens + 1, None, max_tokens, at_least=True)

    def _encode_unlocked(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        """Tokenize without Python's lock, which ``encode`` holds to its end."""
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def _render(self, messages: list[dict[str, str]], chat: Chat) -> str:
        variables = self._template_variables(chat)
        continues = bool(chat.continue_final_message)
        generates = not continues if chat.add_generation_prompt is None else chat.add_generation_prompt
        if self._tokenizer.chat_template is None:
            raise InvalidRequest(
                "this model has no chat template. Use /v1/completions with a prompt.", param="messages"
            )
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=generates,
                    continue_final_message=continues,
                    **variables,
                )
            )
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(
                f"the model's chat template refused the messages: {one_line(str(error))}. "
                "Change their roles, order or content.",
                param="messages",
            ) from error

    def _template_variables(self, chat: Chat) -> dict[str, Any]:
        variables = chat.chat_template_kwargs or {}
        reserved = sorted(self._template_arguments & variables.keys())
        if reserved:
            raise InvalidRequest(
                f"chat_template_kwargs has {quoted_list(reserved)}, which this server sets itself. Leave it out.",
                param="chat_template_kwargs",
            )
        return variables


def num_chars(value: object) -> int:
    """The characters of all texts in a JSON value, and ITEM_CHARS for each value in it: what a template has to do with it.

    Counting ends where the longest lane begins: millions of values would take as long here as in the template.
    """
    total, open_values = 0, [value]
    while open_values and total <= MAX_LONG_CHARS:
        total += ITEM_CHARS
        match open_values.pop():
            case str(text):
                total += len(text)
            case list(values):
                open_values += values
            case dict(fields):
                open_values += [*fields, *fields.values()]
    return total


def _template_message(message: Message) -> dict[str, str]:
    """A message as templates expect it: one string; text parts joined by newlines; developer is the newer name of system."""
    content = message.content if isinstance(message.content, str) else "\n".join(part.text for part in message.content)
    role = "system" if message.role == "developer" else message.role
    named = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": content} | named
