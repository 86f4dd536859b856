import pytest

from fake_openai import delta, token, usage
from flyball_clients.errors import BadAnswer, ServerError
from flyball_clients.stream import Chunk, SSEParser, decode_chunk, error_message

STREAM = (
    'data: {"text": "é 日本 🙂"}\n\n: ping\n\ndata:two\r\n\r\nevent: x\nid: 3\ndata: a\ndata: b\n\ndata: [DONE]\n\n'
).encode()
EVENTS = ['{"text": "é 日本 🙂"}'.encode(), b"two", b"a\nb", b"[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 16, 1000])
def test_any_cut_of_the_stream_gives_the_same_events(size: int) -> None:
    parser = SSEParser()
    packets = [STREAM[i : i + size] for i in range(0, len(STREAM), size)]
    assert [event for packet in packets for event in parser.feed(packet)] == EVENTS


def test_an_event_is_out_as_soon_as_its_blank_line_is_in() -> None:
    parser = SSEParser()
    assert parser.feed(b"data: 1\n") == []
    assert parser.feed(b"\n") == [b"1"]


def test_comments_and_blank_lines_alone_are_no_events() -> None:
    assert SSEParser().feed(b": keep-alive\n\n\n\nretry: 5\n\n") == []


def test_one_leading_space_belongs_to_the_field_and_not_to_the_data() -> None:
    assert SSEParser().feed(b"data:  two\n\ndata:\n\n") == [b" two", b""]


def decoded(event: bytes) -> Chunk:
    return decode_chunk(event.removeprefix(b"data: ").rstrip())


@pytest.mark.parametrize(
    ("event", "carries", "text"),
    [
        (token("hi"), True, "hi"),
        (token("", None), True, ""),  # a token whose bytes are not yet a character
        (token("", "stop"), False, ""),
        (token("end", "stop"), True, "end"),
        (delta(role="assistant", content=""), False, ""),
        (delta(role="assistant", content="hi"), True, "hi"),
        (delta(content="hi"), True, "hi"),
        (delta(reasoning_content="hm"), True, ""),
        (delta(reasoning="hm"), True, ""),
        (delta(tool_calls=[{"index": 0}]), True, ""),
        (delta("stop"), False, ""),
        (usage(3, 4), False, ""),
    ],
)
def test_which_chunks_carry_a_token(event: bytes, carries: bool, text: str) -> None:
    chunk = decoded(event)
    assert (chunk.carries_token, chunk.text) == (carries, text)


def test_usage_and_ending_are_read() -> None:
    counted = decoded(usage(3, 4)).usage
    assert counted is not None
    assert (counted.prompt_tokens, counted.completion_tokens) == (3, 4)
    assert decoded(token("x", "length")).finished
    assert not decoded(token("x")).finished


@pytest.mark.parametrize("data", [b"", b"nonsense", b"[1]", b'{"choices": 3}', b'{"choices": [{"text": "\xff"}]}'])
def test_what_is_no_chunk_is_named(data: bytes) -> None:
    with pytest.raises(BadAnswer, match="not a completion chunk"):
        decode_chunk(data)


def test_an_error_object_in_the_stream_raises_its_message() -> None:
    with pytest.raises(ServerError, match=r"^engine stopped$"):
        decode_chunk(b'{"error": {"message": "engine stopped", "code": 500}}')


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no"}}', "no"),
        (b'{"error": "no"}', "no"),
        (b'{"object": "error", "message": "no"}', "no"),
        (b"Bad Gateway", "Bad Gateway"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"", "no body"),
        (b"[]", "[]"),
    ],
)
def test_the_message_of_any_error_body(body: bytes, message: str) -> None:
    assert error_message(body) == message
