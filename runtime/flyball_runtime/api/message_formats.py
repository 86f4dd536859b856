"""How the served model writes tool calls and reasoning, and what is made of the answer to one chat."""

import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from flyball_runtime.api.forced_calls import SPACE_IN_CALLS, calls_or_answer, forced_schema
from flyball_runtime.api.messages import NamedTool, content_text
from flyball_runtime.api.schemas import ChatRequest, offered_tools
from flyball_runtime.core.errors import InvalidRequest
from flyball_runtime.core.grammar import Grammar
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.text.parsing.calls import CallList, CallParser, ForcedCall, Hermes, Mistral
from flyball_runtime.text.parsing.message import (
    AUTO,
    CALL_PARSERS,
    NONE,
    REASONING_PARSERS,
    MessageParser,
    call_format_of,
    reasoning_format_of,
)
from flyball_runtime.text.parsing.reasoning import ThinkParser

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Parsing:
    """How the answers to one chat are parsed.

    Attributes:
        markers: texts that the parsers need even where they are special tokens.
        one_call: further calls are dropped (``parallel_tool_calls`` is false).
        forced: a grammar makes the answer a call.
        named: the client named the tool; its call is no reason to have finished, as in OpenAI's API.
    """

    new_parser: Callable[[], MessageParser]
    markers: tuple[str, ...]
    new_call_id: Callable[[], str]
    one_call: bool = False
    forced: bool = False
    named: bool = False


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _short_call_id() -> str:
    """Mistral's templates refuse ids that have not nine letters and digits."""
    return uuid.uuid4().hex[:9]


class MessageFormats:
    """The formats of the served model.

    Args:
        template: the chat template, all of them where there are several.
        call_format, reasoning_format: a name of CALL_PARSERS and REASONING_PARSERS, ``auto`` to look at the template, or
            ``none``.
        calls_by_default: whether the model may call tools when the client leaves that to it.
    """

    def __init__(self, template: str, call_format: str, reasoning_format: str, *, calls_by_default: bool) -> None:
        call = call_format_of(template) if call_format == AUTO else call_format
        reasoning = reasoning_format_of(template) if reasoning_format == AUTO else reasoning_format
        self._calls: type[CallParser] | None = CALL_PARSERS.get(call or NONE)
        self._reasoning: type[ThinkParser] | None = REASONING_PARSERS.get(reasoning or NONE)
        self._calls_by_default = calls_by_default
        self._new_call_id = _short_call_id if self._calls is Mistral else _call_id
        logger.info("tool calls: %s; reasoning: %s", _how(call, call_format), _how(reasoning, reasoning_format))

    def check(self, chat: ChatRequest) -> None:
        """Raise InvalidRequest for tools that the model may call, but not in a form that is known."""
        if not offered_tools(chat) or forces_call(chat):
            return
        if self._calls is None or not self._calls_by_default:
            why = (
                "the format of this model's tool calls is not known (--tool-call-parser)"
                if self._calls is None
                else "--no-enable-auto-tool-choice is set"
            )
            raise InvalidRequest(
                f"tools are offered, but {why}. Leave tools out, or send the tool_choice 'none'.", param="tools"
            )

    def no_parsing(self) -> Parsing:
        """The whole text is content."""
        return Parsing(new_parser=lambda: MessageParser(None, None), markers=(), new_call_id=_call_id)

    def parsing(self, chat: ChatRequest, prompt: str, *, has_grammar: bool) -> Parsing | None:
        """How to parse the answers to ``prompt``; None if they are content as they come.

        Args:
            has_grammar: their form is given, so that they have neither reasoning nor the model's own form of calls.
        """
        if forces_call(chat):
            return self._forced(chat)
        reasoning, calls = self._reasoning, self._calls if offered_tools(chat) else None
        if has_grammar:
            return self._calls_or_answer(chat) if self._may_call_instead(chat) else None
        if reasoning is None and calls is None:
            return None
        in_message = bool(chat.continue_final_message)
        if in_message:
            prompt = content_text(chat.messages[-1])

        def new_parser() -> MessageParser:
            return MessageParser(
                None if reasoning is None else reasoning(prompt, in_message=in_message),
                None if calls is None else calls(),
            )

        return Parsing(
            new_parser=new_parser,
            markers=tuple(marker for parser in (reasoning, calls) if parser for marker in parser.markers),
            new_call_id=self._new_call_id,
            one_call=chat.parallel_tool_calls is False,
        )

    def with_calls(self, chat: ChatRequest, sampling: SamplingParams, special_ids: Mapping[str, int]) -> SamplingParams:
        """The same settings, with the grammar of the call that is forced, or that may come in the place of a form's answer.

        Args:
            special_ids: of the vocabulary's special tokens.
        """
        if forces_call(chat):
            return with_forced_call(chat, sampling)
        if sampling.grammar is None or not self._may_call_instead(chat):
            return sampling
        markers = (f"<[{special_ids[one]}]>" if one in special_ids else f'"{one}"' for one in Hermes.markers)
        one_call = chat.parallel_tool_calls is False
        grammar = calls_or_answer(sampling.grammar, offered_tools(chat), *markers, one_call=one_call)
        return msgspec.structs.replace(sampling, grammar=grammar)

    def _may_call_instead(self, chat: ChatRequest) -> bool:
        """Whether the answer may be calls although it has a form: structured_outputs is about the whole output."""
        return self._calls is Hermes and bool(offered_tools(chat)) and chat.structured_outputs is None

    def _calls_or_answer(self, chat: ChatRequest) -> Parsing:
        return Parsing(
            new_parser=lambda: MessageParser(None, Hermes(anywhere=False)),
            markers=Hermes.markers,
            new_call_id=self._new_call_id,
            one_call=chat.parallel_tool_calls is False,
        )

    def _forced(self, chat: ChatRequest) -> Parsing:
        choice = chat.tool_choice
        name = choice.function.name if isinstance(choice, NamedTool) else None
        return Parsing(
            new_parser=lambda: MessageParser(None, CallList() if name is None else ForcedCall(name)),
            markers=(),
            new_call_id=self._new_call_id,
            forced=True,
            named=name is not None,
        )


def forces_call(chat: ChatRequest) -> bool:
    """Whether the answer must be a call, in a form that a grammar gives."""
    return chat.tool_choice not in (None, "auto", "none")


def with_forced_call(chat: ChatRequest, sampling: SamplingParams) -> SamplingParams:
    """The same settings, with the grammar of the call that the answer must be; it comes before any other form."""
    if not forces_call(chat):
        return sampling
    choice = chat.tool_choice if isinstance(chat.tool_choice, NamedTool) else None
    schema = forced_schema(chat.tools or [], choice, one_call=chat.parallel_tool_calls is False)
    if chat.structured_outputs is not None:
        raise InvalidRequest(
            "structured_outputs gives the whole output a form, and tool_choice forces a call. Leave one of them out.",
            param="structured_outputs",
        )
    if sampling.ignore_eos:
        raise InvalidRequest(
            "ignore_eos asks to go on after the end, and a forced call has an end. Leave one of them out.",
            param="ignore_eos",
        )
    return msgspec.structs.replace(
        sampling, grammar=Grammar("json", msgspec.json.encode(schema).decode(), SPACE_IN_CALLS)
    )


def _how(format: str | None, asked: str) -> str:
    return f"{format or NONE} (by the chat template)" if asked == AUTO else asked
