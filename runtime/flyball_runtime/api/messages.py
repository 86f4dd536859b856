"""What a chat is made of: messages, tools and calls of tools, their checks, and what chat templates make of them."""

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from flyball_protocol.quoting import MAX_QUOTED_CHARS, one_line, quoted
from flyball_runtime.core.errors import InvalidRequest, RequestError

MAX_TOOLS = 1024
"""Tools of one request. OpenAI allows 128; every tool is a part of the prompt."""

MAX_NAME_CHARS = 128

_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_NAME_CHARS}}}")

_SCHEMA_TYPES = {"array", "boolean", "integer", "null", "number", "object", "string"}


class _Fields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True): ...


class Function(_Fields, frozen=True, kw_only=True):
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of its arguments, an object. Without one it has none.
        strict: whether the arguments must have the schema.
    """

    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Fields, frozen=True, kw_only=True):
    type: Literal["function"]
    function: Function


class FunctionName(_Fields, frozen=True, kw_only=True):
    name: str


class NamedTool(_Fields, frozen=True, kw_only=True):
    """The one tool to call."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(_Fields, frozen=True, kw_only=True):
    """``arguments``: a JSON object, as a text. ``parsed_arguments``: openai's client sends them back; not used."""

    name: str
    arguments: str | None = None
    parsed_arguments: Any = None


class ToolCall(_Fields, frozen=True, kw_only=True):
    """A call in an earlier answer. ``index``: of streams, which some clients send back."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class TextPart(_Fields, frozen=True, kw_only=True):
    type: Literal["text"]
    text: str


class Message(_Fields, frozen=True, kw_only=True):
    """A chat message. The fields that are only ever empty here let an assistant's answer be sent back as it came.

    Attributes:
        content: may be left out of an assistant's message that has calls or reasoning.
        reasoning_content, reasoning: of an assistant's message; two names of one thing.
        tool_call_id: of a tool's message, the call that it answers.
        parsed: openai's client sends it back; not used.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    parsed: Any = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """The messages as chat templates expect them.

    Content is one text, its parts joined by newlines; developer is the newer name of system; arguments are objects.

    Raises:
        InvalidRequest: naming the field of a message that lacks its content, or of arguments that are no object.
    """
    return [_template_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def content_text(message: Message) -> str:
    content = message.content
    return "\n".join(part.text for part in content) if isinstance(content, list) else content or ""


def _template_message(message: Message, where: str) -> dict[str, Any]:
    _check_role(message, where)
    shown: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content_text(message),
    }
    reasoning = message.reasoning_content or message.reasoning
    optional = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": reasoning,
        "reasoning": reasoning,
        "tool_calls": [_template_call(call) for call in message.tool_calls or ()] or None,
    }
    return shown | {name: value for name, value in optional.items() if value is not None}


def _check_role(message: Message, where: str) -> None:
    if message.role != "assistant":
        for name in ("tool_calls", "reasoning_content", "reasoning"):
            if getattr(message, name):
                raise InvalidRequest(
                    f"{where} has the role {quoted(message.role)} and {name}, which only an assistant's message may have. "
                    "Leave it out.",
                    param=f"{where}.{name}",
                )
    if message.role != "tool" and message.tool_call_id is not None:
        raise InvalidRequest(
            f"{where} has the role {quoted(message.role)} and a tool_call_id, which only a tool's message may have. "
            "Leave it out.",
            param=f"{where}.tool_call_id",
        )
    if message.content is None and not (message.tool_calls or message.reasoning_content or message.reasoning):
        raise InvalidRequest(
            f"{where} has no content; only an assistant's message with tool_calls needs none. Send a text.",
            param=f"{where}.content",
        )


def _template_call(call: ToolCall) -> dict[str, Any]:
    called = {"type": "function", "function": {"name": call.function.name, "arguments": _arguments(call)}}
    return called if call.id is None else {"id": call.id} | called


def _arguments(call: ToolCall) -> dict[str, Any] | str:
    """The object that templates want, or the text that the model wrote if it is none, as after an output was cut off."""
    text = call.function.arguments or "{}"
    try:
        arguments = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text


def arguments_in(messages: Iterable[Message]) -> bytes:
    """The arguments of all calls, one after another: their structure is bounded like that of the body."""
    calls = (call for message in messages for call in message.tool_calls or ())
    return "".join(call.function.arguments or "" for call in calls).encode(errors="replace")


def check_tools(tools: list[Tool], choice: ToolChoice | None) -> None:
    """Raise InvalidRequest naming the field of a tool that cannot be called, or of a choice that names none of them."""
    names: dict[str, int] = {}
    for at, tool in enumerate(tools):
        name = _checked_name(tool.function.name, f"tools[{at}].function.name")
        if (first := names.setdefault(name, at)) != at:
            raise InvalidRequest(
                f"tools[{at}] and tools[{first}] are both named {quoted(name)}. Give each tool a name of its own.",
                param=f"tools[{at}].function.name",
            )
        check_schema(tool.function.parameters or {}, f"tools[{at}].function.parameters")
    _check_choice(choice, names)


def _check_choice(choice: ToolChoice | None, names: dict[str, int]) -> None:
    if isinstance(choice, NamedTool):
        name, where = choice.function.name, "tool_choice.function.name"
        if name not in names:
            raise InvalidRequest(
                f"tool_choice names the tool {quoted(name)}, which tools does not have. Add it, or name another.",
                param=where,
            )
    elif choice == "required" and not names:
        raise InvalidRequest(
            "tool_choice is 'required' without tools. Send tools, or leave it out.", param="tool_choice"
        )


def _checked_name(name: str | None, where: str) -> str:
    if name is None or not _NAME.fullmatch(name):
        found = "missing" if name is None else quoted(name)
        raise InvalidRequest(
            f"{where} is {found}; it must have 1 to {MAX_NAME_CHARS} letters, digits, dots, dashes and underscores. "
            "Name the tool.",
            param=where,
        )
    return name


def check_schema(schema: dict[str, Any], where: str) -> None:
    """Raise InvalidRequest unless the outermost keywords say that ``schema`` is the JSON schema of an object."""
    kind, properties, required = schema.get("type", "object"), schema.get("properties", {}), schema.get("required", [])
    if kind != "object":
        raise _no_schema(f"{where}.type", kind, "'object', since arguments have names")
    if not isinstance(properties, dict):
        raise _no_schema(f"{where}.properties", properties, "an object of schemas")
    for name, one in properties.items():
        at = f"{where}.properties.{one_line(name, MAX_QUOTED_CHARS)}"
        if not isinstance(one, dict | bool):
            raise _no_schema(at, one, "a JSON schema: an object, true or false")
        if isinstance(one, dict):
            _check_types(one.get("type", "object"), f"{at}.type")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _no_schema(f"{where}.required", required, "a list of names")


def _check_types(kind: object, where: str) -> None:
    kinds = kind if isinstance(kind, list) and kind else [kind]
    if not all(isinstance(one, str) and one in _SCHEMA_TYPES for one in kinds):
        raise _no_schema(where, kind, "one or more of " + ", ".join(sorted(_SCHEMA_TYPES)))


def _no_schema(where: str, value: object, allowed: str) -> RequestError:
    return InvalidRequest(f"{where} is {quoted(value)}; it must be {allowed}. Correct the schema.", param=where)


def template_tools(tools: list[Tool]) -> list[dict[str, Any]]:
    """The tools as chat templates expect them: what the client sent, without ``strict``."""
    return [{"type": "function", "function": _shown(tool.function)} for tool in tools]


def _shown(function: Function) -> dict[str, Any]:
    fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {name: value for name, value in fields.items() if value is not None}
