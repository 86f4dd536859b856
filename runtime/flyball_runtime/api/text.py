"""Text to token ids and back, and chats to text."""

import inspect
from typing import Any, Protocol

import tokenizers
from jinja2 import TemplateError

from flyball_protocol.quoting import one_line, quoted_list
from flyball_runtime.api.messages import template_messages, template_tools
from flyball_runtime.api.schemas import Chat, offered_tools
from flyball_runtime.core.errors import ConfigError, InvalidRequest, PromptTooLong
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.text.bad_words import with_bad_words
from flyball_runtime.text.output import OutputText
from flyball_runtime.text.token_text import TokenText
from flyball_runtime.text.tokenizer import max_chars_per_token

MAX_LOCKED_CHARS = 4096
"""Longer texts are tokenized without Python's lock. For short ones the threads that this starts cost more than they save."""

PIECE_CHARS = 65536
MAX_WHOLE_CHARS = 4 * PIECE_CHARS
"""Longer texts are tokenized in pieces first, to refuse them before they take memory."""

# Errors that a chat template raises on messages that it does not support; Python's own ones come from its expressions.
_TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)


class ChatTokenizer(Protocol):
    """The part of transformers' PreTrainedTokenizerFast that is used here."""

    chat_template: Any

    @property
    def backend_tokenizer(self) -> tokenizers.Tokenizer: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...


def template_text(chat_template: Any) -> str:
    """Return the text of a tokenizer's chat template. If it has several by name, they are joined."""
    if isinstance(chat_template, dict):
        return "\n".join(map(str, chat_template.values()))
    return str(chat_template or "")


class TextCodec:
    """The model's tokenizer and chat template.

    A text that is certainly too long is refused before it is tokenized. Long texts take long, so any thread may call these
    methods. Truncation and padding in a tokenizer.json are turned off: a prompt is never cut silently.

    Attributes:
        special_ids: of the vocabulary's special tokens, by their text.

    Raises:
        ConfigError: the tokenizer is not a fast one.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise ConfigError(
                f"the tokenizer is a {type(tokenizer).__name__}; Flyball needs a fast tokenizer (tokenizer.json). "
                "Convert it with transformers' AutoTokenizer and save_pretrained."
            )
        backend.no_truncation()
        backend.no_padding()
        self._tokenizer = tokenizer
        self._backend = backend
        self._max_chars_per_token = max_chars_per_token(backend)
        self.special_ids = {
            token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        }
        self.token_text = TokenText(backend)
        self.chat_template = template_text(tokenizer.chat_template)
        self._template_arguments = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)

    def encode(self, texts: list[str], *, add_special_tokens: bool, max_tokens: int) -> list[list[int]]:
        """Return the token ids of each text.

        Args:
            max_tokens: longest text, in tokens.

        Raises:
            PromptTooLong: a text has more tokens; the error may count a part of them only.
        """
        for text in texts:
            self._check_length(text, max_tokens)
        return [self._encode(text, add_special_tokens, max_tokens) for text in texts]

    def encode_chat(self, chat: Chat, *, add_special_tokens: bool, max_tokens: int) -> list[int]:
        """Return the token ids of a chat, like ``encode``. Raises InvalidRequest if no template accepts it."""
        (ids,) = self.encode([self.render(chat)], add_special_tokens=add_special_tokens, max_tokens=max_tokens)
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of these ids, special tokens included."""
        return self._backend.decode_batch([token_ids], skip_special_tokens=False)[0]

    def token_strings(self, token_ids: list[int]) -> list[str | None]:
        """Return the vocabulary's spelling of each id; None for ids without one."""
        return [
            self._backend.id_to_token(token_id) for token_id in token_ids
        ]  # map() would keep Python's lock to the end

    def with_bad_words(self, sampling: SamplingParams) -> SamplingParams:
        """Return ``sampling`` with the token ids of its ``bad_words``; see ``text/bad_words.py``."""
        return with_bad_words(sampling, self._backend)

    def output(self, sampling: SamplingParams, markers: tuple[str, ...] = ()) -> OutputText:
        """Return an OutputText that leaves out special tokens, except ``markers``."""
        return OutputText(self._backend, sampling, hidden=self._hidden(markers))

    def _hidden(self, markers: tuple[str, ...]) -> frozenset[int] | None:
        """Return the special tokens to leave out of an output, or None for all of them."""
        shown = {self.special_ids[marker] for marker in markers if marker in self.special_ids}
        return frozenset(self.special_ids.values()) - shown if shown else None

    def _check_length(self, text: str, max_tokens: int) -> None:
        """Refuse a text whose number of characters alone shows that it is too long."""
        if self._max_chars_per_token is not None and len(text) > max_tokens * self._max_chars_per_token:
            raise PromptTooLong(-(-len(text) // self._max_chars_per_token), None, max_tokens, at_least=True)

    def _encode(self, text: str, add_special_tokens: bool, max_tokens: int) -> list[int]:
        if len(text) > MAX_WHOLE_CHARS:
            self._check_pieces(text, max_tokens)
        encoding = (
            self._backend.encode(text, add_special_tokens=add_special_tokens)
            if len(text) <= MAX_LOCKED_CHARS
            else self._encode_unlocked(text, add_special_tokens)
        )
        if len(encoding) > max_tokens:
            raise PromptTooLong(len(encoding), None, max_tokens)
        ids: list[int] = encoding.ids
        return ids

    def _check_pieces(self, text: str, max_tokens: int) -> None:
        """Refuse a text whose pieces have too many tokens.

        The tokenizer takes 150 bytes of memory for a token, 600 MB for a body of 4 MB. A cut changes only the tokens next to
        it; the margin of a quarter is a thousand times as much.
        """
        num_tokens = 0
        for start in range(0, len(text), PIECE_CHARS):
            num_tokens += len(self._encode_unlocked(text[start : start + PIECE_CHARS], False))
            if num_tokens > max_tokens + max_tokens // 4 + PIECE_CHARS:
                raise PromptTooLong(max_tokens + 1, None, max_tokens, at_least=True)

    def _encode_unlocked(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        """Tokenize without Python's lock, which the backend's ``encode`` would hold until it returns."""
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def render(self, chat: Chat) -> str:
        """Return the prompt of a chat as text. Raises as ``encode_chat`` does."""
        messages, tools = template_messages(chat.messages), template_tools(offered_tools(chat))
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
                    tools=tools or None,
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
        effort = chat.reasoning_effort
        efforts: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        if effort == "none":
            efforts["enable_thinking"] = False
        variables = efforts | (chat.chat_template_kwargs or {})
        reserved = sorted(self._template_arguments & variables.keys())
        if reserved:
            raise InvalidRequest(
                f"chat_template_kwargs has {quoted_list(reserved)}, which this server sets itself. Leave it out.",
                param="chat_template_kwargs",
            )
        return variables
