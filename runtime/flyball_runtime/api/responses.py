"""The body of /v1/responses, and the chat that it stands for."""

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from flyball_protocol.quoting import quoted
from flyball_runtime.api.schemas import SamplingFields, is_same, without_noops
from flyball_runtime.core.errors import InvalidRequest

RESPONSE_NOOPS: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "context_management": (None,),
    "conversation": (None,),
    "max_tool_calls": (None,),
    "moderation": (None,),
    "prompt": (None,),
    "service_tier": (None, "auto", "default"),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
}

_AS_IN_CHATS = (*SamplingFields.__struct_fields__, "parallel_tool_calls", "chat_template_kwargs")

STATELESS: dict[str, tuple[Any, ...]] = {"store": (None, False), "previous_response_id": (None,)}


class _Fields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True): ...


class FunctionTool(_Fields, frozen=True, kw_only=True):
    type: Literal["function"]
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(_Fields, frozen=True, kw_only=True):
    type: Literal["function"]
    name: str


class ReasoningOptions(_Fields, frozen=True, kw_only=True):
    """``summary`` and ``generate_summary`` are accepted; reasoning is never summarized."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(_Fields, frozen=True, kw_only=True):
    """``response_format`` of chats, but flatter."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(_Fields, frozen=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(_Fields, frozen=True, kw_only=True):
    include_obfuscation: Literal[False] | None = None


class ResponseRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a response shall answer. Nothing is stored, so ``input`` has the whole conversation.

    Attributes:
        input: a text of the user, or items: messages, reasoning, function calls and their outputs.
        instructions: a message of the system before it.
        max_output_tokens: most output tokens. The default is what the context has room for.
        include: accepted; further data is not made.
        metadata: repeated in the answer.
        tools, tool_choice, parallel_tool_calls: as in chats, but for the flatter form of OpenAI's responses.
        reasoning: its effort, as ``reasoning_effort`` in chats.
        text: its format, as ``response_format`` in chats.
        chat_template_kwargs: further variables for the template, e.g. ``enable_thinking``.
    """

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def known_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ResponseRequest. Raises InvalidRequest naming any other one that asks for something."""
    for name, harmless in STATELESS.items():
        if not any(is_same(fields.get(name), value) for value in harmless):
            raise InvalidRequest(
                f"{name} is {quoted(fields[name])}, but this server stores no responses. Send store false, and the whole "
                "conversation as input.",
                param=name,
            )
    rest = {name: value for name, value in fields.items() if name not in STATELESS}
    return without_noops(rest, ResponseRequest.__struct_fields__, RESPONSE_NOOPS)


def chat_fields(body: ResponseRequest) -> dict[str, Any]:
    """The fields of the chat. Raises InvalidRequest naming an item of the input that is none."""
    choice = body.tool_choice
    fields: dict[str, Any] = {name: getattr(body, name) for name in _AS_IN_CHATS} | {
        "messages": _messages(body),
        "max_completion_tokens": body.max_output_tokens,
        "tools": None if body.tools is None else [_chat_tool(tool) for tool in body.tools],
        "tool_choice": _chat_choice(choice) if isinstance(choice, NamedFunction) else choice,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "response_format": _chat_format(body.text),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _chat_format(text: TextOptions | None) -> dict[str, Any] | None:
    if text is None or text.format is None:
        return None
    format: dict[str, Any] = msgspec.to_builtins(text.format)
    kind = format.pop("type")
    return {"type": kind} | ({"json_schema": format} if kind == "json_schema" else {})


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    function = {name: getattr(tool, name) for name in ("name", "description", "parameters", "strict")}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _chat_choice(choice: NamedFunction) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.name}}


def _messages(body: ResponseRequest) -> list[dict[str, Any]]:
    instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    if isinstance(body.input, str):
        return [*instructions, {"role": "user", "content": body.input}]
    conversation = _Conversation()
    for at, item in enumerate(body.input):
        conversation.add(_Item(item, f"input[{at}]"))
    return instructions + conversation.messages


class _Item:
    """An item of the input, whose fields are checked when they are read."""

    def __init__(self, fields: dict[str, Any], where: str) -> None:
        self.fields = fields
        self.where = where

    @property
    def type(self) -> str:
        return self.text("type", "message")

    def text(self, name: str, default: str | None = None) -> str:
        value = self.fields.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, "a text")
        return value

    def parts(self, name: str) -> str:
        """A text, or the texts of a list of parts, joined by newlines."""
        value = self.fields.get(name)
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise self.wrong(name, "a text or a list of parts with text")
        for at, part in enumerate(value):
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise self.wrong(f"{name}[{at}]", "a part with text; images, files and audio are not supported")
        return "\n".join(part["text"] for part in value)

    def wrong(self, name: str, allowed: str) -> InvalidRequest:
        where, value = f"{self.where}.{name}", self.fields.get(name.partition("[")[0])
        return InvalidRequest(f"{where} is {quoted(value)}; it must be {allowed}. Correct the item.", param=where)


class _Conversation:
    """Collects items into messages: what the assistant thought, said and called at one turn is one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add(self, item: _Item) -> None:
        match item.type:
            case "message":
                self._message(item)
            case "reasoning":
                reasoning = item.parts("content") if item.fields.get("content") else ""
                self._assistant(("reasoning_content", "content", "tool_calls"))["reasoning_content"] = reasoning
            case "function_call":
                function = {"name": item.text("name"), "arguments": item.text("arguments")}
                call = {"id": item.text("call_id"), "type": "function", "function": function}
                self._assistant(()).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                result = {"role": "tool", "tool_call_id": item.text("call_id"), "content": item.parts("output")}
                self.messages.append(result)
            case _:
                raise item.wrong("type", "message, reasoning, function_call or function_call_output")

    def _message(self, item: _Item) -> None:
        role, content = item.text("role"), item.parts("content")
        if role == "assistant":
            self._assistant(("content", "tool_calls"))["content"] = content
        elif role in ("user", "system", "developer"):
            self.messages.append({"role": role, "content": content})
        else:
            raise item.wrong("role", "user, assistant, system or developer")

    def _assistant(self, later: tuple[str, ...]) -> dict[str, Any]:
        """The assistant's message that is being collected, or a new one if it has a field that comes later."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(name in last for name in later):
            self.messages.append({"role": "assistant"})
        return self.messages[-1]


def echoed(body: ResponseRequest) -> dict[str, Any]:
    """The fields of the answer that repeat the request's."""
    fields: dict[str, Any] = msgspec.to_builtins(body)
    kept = ("instructions", "max_output_tokens", "temperature", "top_p")
    return {name: fields[name] for name in kept} | {
        "tools": fields["tools"] or [],
        "tool_choice": fields["tool_choice"] or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "text": {"format": (fields["text"] or {}).get("format") or {"type": "text"}},
        "metadata": body.metadata or {},
        "truncation": "disabled",
        "background": False,
        "store": False,
        "previous_response_id": None,
    }


_PARAMS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "structured_outputs": "text.format",
}


def in_terms_of_responses(error: InvalidRequest) -> InvalidRequest:
    """The error of the chat, about the field of the response that it comes from."""
    param = re.split(r"[.\[]", error.param or "")[0]
    if param == "tools":
        return InvalidRequest(
            error.message.replace(".function.", "."), param=(error.param or "").replace(".function", "")
        )
    return InvalidRequest(error.message, param=_PARAMS.get(param, error.param))
