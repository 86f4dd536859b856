"""Text to token ids and back, and chats to text."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import tokenizers
from jinja2 import TemplateError

from flyball_protocol.quoting import one_line, quoted_list
from flyball_runtime.api.schemas import Chat, Message
from flyball_runtime.core.errors import ConfigError, InvalidRequest
from flyball_runtime.core.sampling import SamplingParams
from flyball_runtime.text.output import OutputText

T = TypeVar("T")

# What a chat template raises on messages it was not written for: Python's own errors come from its expressions.
_TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


class ChatTokenizer(Protocol):
    """The part of transformers' PreTrainedTokenizerFast that is used here."""

    chat_template: Any

    @property
    def backend_tokenizer(self) -> tokenizers.Tokenizer: ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> Any: ...


class TextCodec:
    """The model's tokenizer and chat template, safe to use from threads.

    Truncation and padding that a tokenizer.json may carry are turned off: a prompt is never cut silently.

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
        self._max_inline_chars = max_inline_chars
        self._template_arguments = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return await self._run(len(text), lambda: self._encode(text, add_special_tokens))

    async def encode_chat(self, chat: Chat, *, add_special_tokens: bool) -> list[int]:
        """The prompt of a chat. Raises InvalidRequest when the template is missing or refuses the messages."""
        messages = [_template_message(message) for message in chat.messages]
        num_chars = sum(len(message["content"]) for message in messages)
        return await self._run(num_chars, lambda: self._encode(self._render(messages, chat), add_special_tokens))

    def decode(self, token_ids: list[int]) -> str:
        """The text of these ids, special tokens included."""
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def token_strings(self, token_ids: list[int]) -> list[str | None]:
        """The vocabulary's spelling of each id."""
        return [self._backend.id_to_token(token_id) for token_id in token_ids]

    def output(self, sampling: SamplingParams) -> OutputText:
        return OutputText(self._backend, sampling)

    async def _run(self, num_chars: int, work: Callable[[], T]) -> T:
        return work() if num_chars <= self._max_inline_chars else await asyncio.to_thread(work)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

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


def _template_message(message: Message) -> dict[str, str]:
    """A message as templates expect it: one string; text parts joined by newlines; developer is the newer name of system."""
    content = message.content if isinstance(message.content, str) else "\n".join(part.text for part in message.content)
    role = "system" if message.role == "developer" else message.role
    named = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": content} | named
