"""The body of /v1/messages, which is Anthropic's Messages API, and the chat that it stands for."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from flyball_runtime.api.schemas import RequestFields
from flyball_runtime.core.errors import InvalidRequest

MESSAGE_NOOPS: dict[str, tuple[Any, ...]] = {
    "container": (None,),
    "context_management": (None,),
    "diagnostics": (None,),
    "inference_geo": (None,),
    "mcp_servers": (None, []),
    "service_tier": (None, "auto", "standard_only"),
    "speed": (None, "standard"),
}

_AS_IN_CHATS = (*RequestFields.__struct_fields__, "max_tokens", "stream", "temperature", "top_p", "top_k")


class _Fields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True): ...


class OnlyText(_Fields, frozen=True, kw_only=True):
    """A text where no other block can be."""

    type: Literal["text"]
    text: str
    cache_control: Any = None
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


class TextBlock(_Fields, frozen=True, kw_only=True, tag="text"):
    text: str
    cache_control: Any = None
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


class ThinkingBlock(_Fields, frozen=True, kw_only=True, tag="thinking"):
    """Reasoning of an earlier answer. Its ``signature`` is empty there, and not checked here."""

    thinking: str
    signature: str | None = None


class ToolUseBlock(_Fields, frozen=True, kw_only=True, tag="tool_use"):
    """A call in an earlier answer."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None
    caller: None = None


class ToolResultBlock(_Fields, frozen=True, kw_only=True, tag="tool_result"):
    """What a call gave. ``is_error`` is accepted; chat templates have no word for it, so the content has to say it."""

    tool_use_id: str
    content: str | list[OnlyText] | None = None
    is_error: bool | None = None
    cache_control: Any = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock

_BLOCKS_OF: dict[str, tuple[type, ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


class InputMessage(_Fields, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class CustomTool(_Fields, frozen=True, kw_only=True):
    """A function that the model may call. ``input_schema``: JSON schema of its arguments, an object."""

    type: Literal["custom"] | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None


class ToolOption(_Fields, frozen=True, kw_only=True):
    """Which tools to call; ``any`` is ``required`` of chats, and ``tool`` needs a ``name``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOption(_Fields, frozen=True, kw_only=True):
    """Whether to think, if the chat template knows ``enable_thinking``. ``budget_tokens`` is accepted and bounds nothing."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized"] | None = None


class OutputFormat(_Fields, frozen=True, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(_Fields, frozen=True, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class TokenCountRequest(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation whose tokens are counted.

    Attributes:
        messages: of the user and the assistant, in blocks: text, thinking, tool_use, tool_result. The answer continues the
            last one if that is the assistant's.
        system: a message of the system before them.
        tools, tool_choice: as in chats, but for Anthropic's form.
        thinking: ``disabled`` sets ``enable_thinking`` of the template to false, the others to true.
        output_config: its effort is ``reasoning_effort`` of chats, and its format ``response_format``.
        cache_control: accepted, here and in blocks; the prefix cache needs no marks.
        chat_template_kwargs: further variables for the template.
    """

    messages: list[InputMessage]
    system: str | list[OnlyText] | None = None
    tools: list[CustomTool] | None = None
    tool_choice: ToolOption | None = None
    thinking: ThinkingOption | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(TokenCountRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation to answer, in Anthropic's form.

    Attributes:
        stop_sequences: as ``stop`` in chats; the answer says which of them ended it.
    """

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


def chat_of_messages(body: TokenCountRequest) -> dict[str, Any]:
    """The fields of the chat. Raises InvalidRequest naming a block that is in the wrong place."""
    config = body.output_config or OutputConfig()
    fields: dict[str, Any] = {name: getattr(body, name, None) for name in _AS_IN_CHATS} | {
        "messages": _messages(body),
        "stop": getattr(body, "stop_sequences", None),
        "tools": None if body.tools is None else [_chat_tool(tool) for tool in body.tools],
        "reasoning_effort": config.effort,
        "response_format": None if config.format is None else _chat_format(config.format),
        "continue_final_message": _continues(body.messages) or None,
        "chat_template_kwargs": _template_variables(body),
    }
    return {name: value for name, value in (fields | _chat_choice(body.tool_choice)).items() if value is not None}


def _continues(messages: list[InputMessage]) -> bool:
    """Return whether the answer continues the last message. Raises InvalidRequest if that ends with a call."""
    if not messages or messages[-1].role != "assistant":
        return False
    if any(isinstance(block, ToolUseBlock) for block in messages[-1].content):
        raise InvalidRequest(
            "messages ends with a tool_use. Send a message of the user with its tool_result.",
            param=f"messages[{len(messages) - 1}]",
        )
    return True


def _template_variables(body: TokenCountRequest) -> dict[str, Any] | None:
    if body.thinking is None:
        return body.chat_template_kwargs
    return {"enable_thinking": body.thinking.type != "disabled"} | (body.chat_template_kwargs or {})


def _chat_format(format: OutputFormat) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": format.schema}}


def _chat_tool(tool: CustomTool) -> dict[str, Any]:
    fields = {
        "name": tool.name,
        "description": tool.description,
        "strict": tool.strict,
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def _chat_choice(option: ToolOption | None) -> dict[str, Any]:
    if option is None:
        return {}
    if (option.type == "tool") != (option.name is not None):
        raise InvalidRequest(
            "tool_choice has a name if its type is tool, and only then. Name the tool, or send another type.",
            param="tool_choice.name",
        )
    named = {"type": "function", "function": {"name": option.name}}
    choice: Any = {"any": "required", "tool": named}.get(option.type, option.type)
    return {"tool_choice": choice, "parallel_tool_calls": False if option.disable_parallel_tool_use else None}


def _messages(body: TokenCountRequest) -> list[dict[str, Any]]:
    system = [] if body.system is None else [{"role": "system", "content": _parts(_blocks(body.system))}]
    return system + [one for at, message in enumerate(body.messages) for one in _chat_messages(message, at)]


def _chat_messages(message: InputMessage, at: int) -> Iterator[dict[str, Any]]:
    """Yield results of tools, each as a message, and then the rest."""
    blocks = _blocks(message.content)
    for index, block in enumerate(blocks):
        if not isinstance(block, _BLOCKS_OF[message.role]):
            where = f"messages[{at}].content[{index}]"
            raise InvalidRequest(
                f"{where} is of the type {block.__struct_config__.tag}, which a message of the {message.role} cannot have. "
                "Put it where it belongs.",
                param=where,
            )
        if isinstance(block, ToolResultBlock):
            content = _parts(_blocks(block.content or ""))
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    rest = [block for block in blocks if not isinstance(block, ToolResultBlock)]
    if rest or not blocks:
        yield {"role": message.role, "content": _parts(rest)} | _of_assistant(rest)


def _of_assistant(blocks: list[Block]) -> dict[str, Any]:
    """The fields that only an assistant's blocks make."""
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    fields = {"reasoning_content": "\n".join(thoughts), "tool_calls": calls}
    return {name: value for name, value in fields.items() if value}


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()}
    return {"id": block.id, "type": "function", "function": function}


def _blocks(content: str | list[Any]) -> list[Any]:
    return [TextBlock(text=content)] if isinstance(content, str) else content


def _parts(blocks: list[Any]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": block.text} for block in blocks if isinstance(block, TextBlock | OnlyText)]


_PARAMS = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "structured_outputs": "output_config.format",
}


def in_terms_of_messages(error: InvalidRequest) -> InvalidRequest:
    """The error of the chat, about the field of the message that it comes from."""
    param = error.param or ""
    field = param.partition(".")[0]
    message = _renamed(error.message).replace("'required'", "'any'")
    if field in _PARAMS:
        message = re.sub(rf"\b{field}\b", _PARAMS[field], message)
    return InvalidRequest(message, param=_PARAMS.get(field, _renamed(param)) or None)


def _renamed(text: str) -> str:
    return text.replace(".function.parameters", ".input_schema").replace(".function.", ".")
