import pytest

from flyball_runtime.client.sse import SSEParser

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
