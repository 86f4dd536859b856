"""Messages in the style of each model, in pieces of any size; what is not of the form is content, and nothing is lost."""

import json
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyball_runtime.text.parsing.calls import CallList, ForcedCall, Hermes, Llama3Json, Mistral
from flyball_runtime.text.parsing.events import Arguments, CallStart, Content, Event, Reasoning, merged
from flyball_runtime.text.parsing.message import (
    CALL_PARSERS,
    MessageParser,
    call_format_of,
    reasoning_format_of,
)
from flyball_runtime.text.parsing.reasoning import DeepSeekR1, Qwen3
from flyball_runtime.text.parsing.source import Parser

NewParser = Callable[[], Parser | MessageParser]

FORMATS: dict[str, NewParser] = {
    **CALL_PARSERS,
    "list": CallList,
    "forced": lambda: ForcedCall("f"),
    "qwen3": lambda: Qwen3(""),
    "deepseek_r1": lambda: DeepSeekR1(""),
    "qwen3 with calls": lambda: MessageParser(Qwen3("<think>\n"), Hermes()),
}


def parse(parser: Parser | MessageParser, *pieces: str) -> list[Event]:
    events = [event for piece in pieces for event in parser.feed(piece)]
    return merged(events + parser.finish())


def call(name: str, arguments: str) -> list[Event]:
    return [CallStart(name), Arguments(arguments)]


WEATHER = '{"city": "Paris \\"}]\\\\", "days": [1, {"a": null}]}'


@pytest.mark.parametrize(
    ("new_parser", "text", "events"),
    [
        (
            Hermes,
            '<tool_call>\n{"name": "weather", "arguments": ' + WEATHER + "}\n</tool_call>",
            call("weather", WEATHER),
        ),
        (
            Hermes,
            'Let me see.\n<tool_call>{"name":"a","arguments":{}}</tool_call>\n<tool_call>{"arguments": {"x": 1}, "name": "b"}'
            "</tool_call>\n\nDone. ",
            [Content("Let me see.\n"), *call("a", "{}"), *call("b", '{"x": 1}'), Content("\n\nDone. ")],
        ),
        (Hermes, '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>', call("a", '{"x": 1}')),
        (Hermes, '<tool_call>{"arguments": null, "name": "a"}', call("a", "{}")),
        (Hermes, '<tool_call>{"name": "a", "arguments": {"x": "cut of', call("a", '{"x": "cut of')),
        (Llama3Json, '{"name": "weather", "parameters": ' + WEATHER + "}", call("weather", WEATHER)),
        (
            Llama3Json,
            '<|python_tag|>{"type": "function", "name": "a", "parameters": {}}; {"name": "b", "parameters": {"x": 2}}',
            [*call("a", "{}"), *call("b", '{"x": 2}')],
        ),
        (
            Llama3Json,
            'I will. <|python_tag|>{"name": "a", "parameters": {}}',
            [Content("I will. "), *call("a", "{}")],
        ),
        (
            Mistral,
            '[TOOL_CALLS] [{"name": "a", "arguments": {"x": 1}, "id": "abcdefghi"}, {"name": "b", "arguments": {}}]',
            [*call("a", '{"x": 1}'), *call("b", "{}")],
        ),
        (
            Mistral,
            "Both.[TOOL_CALLS]weather" + WEATHER + "[TOOL_CALLS]b{}",
            [Content("Both."), *call("weather", WEATHER), *call("b", "{}")],
        ),
        (Mistral, '[TOOL_CALLS]a[CALL_ID]abcdefghi[ARGS]{"x": 1}', call("a", '{"x": 1}')),
        (
            CallList,
            ' [{"name": "a", "parameters": {}}, {"name": "b", "parameters": {}}]\n',
            [*call("a", "{}"), *call("b", "{}")],
        ),
        (lambda: ForcedCall("f"), '{"x": 1}', call("f", '{"x": 1}')),
        (lambda: ForcedCall("f"), "", [CallStart("f")]),
        (lambda: Qwen3(""), "<think>\nHm.\n\nSo.\n</think>\n\nYes.", [Reasoning("Hm.\n\nSo."), Content("Yes.")]),
        (lambda: Qwen3(""), "Yes. <think>", [Content("Yes. <think>")]),
        (lambda: Qwen3("user<think>\n"), "Hm.</think>Yes.", [Reasoning("Hm."), Content("Yes.")]),
        (lambda: Qwen3("<think>\n\n</think>\n\n"), "<think>", [Content("<think>")]),
        (lambda: DeepSeekR1(""), "Hm.\n", [Reasoning("Hm.\n")]),
        (lambda: DeepSeekR1(""), "<think>\nHm.</think>\nYes.", [Reasoning("Hm."), Content("Yes.")]),
        (lambda: DeepSeekR1("</think>"), "Yes.", [Content("Yes.")]),
        (
            lambda: MessageParser(Qwen3(""), Hermes()),
            '<think>\nMaybe <tool_call>?\n</think>\n\n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>',
            [Reasoning("Maybe <tool_call>?"), *call("a", "{}")],
        ),
        (lambda: MessageParser(None, None), "<think> <tool_call>", [Content("<think> <tool_call>")]),
    ],
)
def test_messages_in_the_style_of_each_model(new_parser: NewParser, text: str, events: list[Event]) -> None:
    assert parse(new_parser(), text) == events
    assert parse(new_parser(), *text) == events


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call>{'name': 'a'}</tool_call>"),
        ("hermes", '<tool_call>{"name": "a"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a", "argu'),
        ("hermes", '<tool_call>{"result": 1, "name": "a", "arguments": {}}</tool_call>'),
        ("hermes", " \n"),
        ("llama3_json", '{"answer": 42}'),
        ("llama3_json", '<|python_tag|>search.call(query="a")'),
        ("llama3_json", 'A call is {"name": "a", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS] []"),
        ("mistral", "[TOOL_CALLS]a"),
        ("mistral", "[TOOL_CALLS]a (1)"),
        ("mistral", '{"name": "a", "arguments": {}}'),
    ],
)
def test_what_is_no_call_is_content(format: str, text: str) -> None:
    assert parse(FORMATS[format](), *text) == [Content(text)]


def test_after_text_that_is_no_call_a_call_is_found() -> None:
    text = '<tool_call> no <tool_call><tool_call>{"name": "a", "arguments": {}}</tool_call> x </tool_call>'
    assert parse(Hermes(), *text) == [
        Content("<tool_call> no <tool_call>"),
        *call("a", "{}"),
        Content(" x </tool_call>"),
    ]


def test_arguments_and_content_are_passed_on_as_they_come() -> None:
    parser = Hermes()
    assert parser.feed("Wait") == [Content("Wait")]
    assert parser.feed('.<tool_call>{"name": "a", "arguments": {"x"') == [Content("."), *call("a", '{"x"')]
    assert parser.feed(": 1") == [Arguments(": 1")]
    assert parser.feed("}}") == [Arguments("}")]


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool_"),
    *('{"name": "', '{"name":"', '", "arguments": {', '", "parameters":{"', '{"arguments": {"', '}, "name": "'),
    *("{", "}", "[", "]", '"', "\\", ":", ",", ";", " ", "\n", "}}", '"}', "null", "é"),
]
WORDS = re.compile(r"w\d+")


@st.composite
def noise(draw: st.DrawFn) -> str:
    """Pieces of the formats in any order, with words between them that are all different."""
    picks = draw(st.lists(st.sampled_from([*FRAGMENTS, "word"]), max_size=24))
    return "".join(f"w{number} " if pick == "word" else pick for number, pick in enumerate(picks))


@st.composite
def calls(draw: st.DrawFn) -> str:
    """Calls as the models write them, with noise between them."""
    values = st.dictionaries(st.text(max_size=3), st.text(max_size=8) | st.integers(), max_size=2)
    name, arguments = draw(st.sampled_from("ab")), json.dumps(draw(values))
    known = f'{{"name": "{name}", "arguments": {arguments}}}'
    forms = [
        f"<tool_call>\n{known}\n</tool_call>",
        known,
        f"[TOOL_CALLS] [{known}, {known}]",
        f"[TOOL_CALLS]{name}{arguments}",
    ]
    return draw(noise()) + draw(st.sampled_from(forms)) + draw(noise())


@pytest.mark.parametrize("format", FORMATS)
@given(text=noise() | calls(), data=st.data())
@settings(max_examples=25, deadline=None)
def test_pieces_do_not_matter_and_nothing_is_lost(format: str, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    events = parse(FORMATS[format](), text)
    assert parse(FORMATS[format](), *pieces) == events
    assert parse(FORMATS[format](), *text) == events
    shown = "".join(event.name if isinstance(event, CallStart) else event.text for event in events)
    assert sorted(WORDS.findall(text)) == sorted(WORDS.findall(shown))


@given(st.text())
@settings(max_examples=25, deadline=None)
def test_text_without_markers_is_content(text: str) -> None:
    for format in ("hermes", "mistral", "qwen3"):
        assert parse(FORMATS[format](), *text) == ([Content(text)] if text else [])


def test_a_long_message_of_markers_takes_time_in_proportion() -> None:
    for text in ('<tool_call>{"name": "' * 800, "<tool_call>" * 800, "<" * 8000, '{"arguments": "' * 600):
        assert parse(Hermes(), *text) == [Content(text)]


QWEN = "{% if tools %}<tool_call>{% endif %}{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        (QWEN, "hermes", "qwen3"),
        ("{% for message in messages %}<|im_start|>{% endfor %}", None, None),
        ("{{ tools }}<tool_call>\n<function=name>", None, None),
        ("{{ tools }}<|start_header_id|>ipython{'name': n, 'parameters': p}", "llama3_json", None),
        ("{{ tools }}[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral", None),
        ("<｜Assistant｜><think>\n", None, "deepseek_r1"),
    ],
)
def test_formats_by_template(template: str, calls: str | None, reasoning: str | None) -> None:
    assert (call_format_of(template), reasoning_format_of(template)) == (calls, reasoning)
