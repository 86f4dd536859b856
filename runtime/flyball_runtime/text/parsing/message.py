"""Which formats a model writes, by its chat template, and the parser of a whole message."""

from flyball_runtime.text.parsing.calls import CallParser, Hermes, Llama3Json, Mistral
from flyball_runtime.text.parsing.events import Content, Event, merged
from flyball_runtime.text.parsing.reasoning import DeepSeekR1, Qwen3, ThinkParser

AUTO, NONE = "auto", "none"
"""Names beside those of the formats: what the chat template says, and no parsing."""

CALL_PARSERS: dict[str, type[CallParser]] = {"hermes": Hermes, "llama3_json": Llama3Json, "mistral": Mistral}
REASONING_PARSERS: dict[str, type[ThinkParser]] = {"qwen3": Qwen3, "deepseek_r1": DeepSeekR1}


def call_format_of(template: str) -> str | None:
    """The tool call format that a chat template teaches its model, or None if it is none of CALL_PARSERS."""
    if "tools" not in template:
        return None
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template and "<function=" not in template:  # Qwen3-Coder writes XML
        return "hermes"
    if "<|start_header_id|>" in template and "parameters" in template:
        return "llama3_json"
    return None


def reasoning_format_of(template: str) -> str | None:
    """The reasoning format that a chat template knows, or None."""
    if "</think>" not in template and "<think>" not in template:
        return None
    return "deepseek_r1" if "<｜Assistant｜>" in template else "qwen3"


class MessageParser:
    """The parts of one message: reasoning first, tool calls in what comes behind it."""

    def __init__(self, reasoning: ThinkParser | None, calls: CallParser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    def feed(self, text: str) -> list[Event]:
        return merged(self._with_calls([Content(text)] if self._reasoning is None else self._reasoning.feed(text)))

    def finish(self) -> list[Event]:
        events = [] if self._reasoning is None else self._with_calls(self._reasoning.finish())
        return merged(events + ([] if self._calls is None else self._calls.finish()))

    def _with_calls(self, events: list[Event]) -> list[Event]:
        if self._calls is None:
            return events
        parsed = [self._calls.feed(one.text) if isinstance(one, Content) else [one] for one in events]
        return [event for part in parsed for event in part]
