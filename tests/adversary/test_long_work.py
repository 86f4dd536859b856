"""Requests that are long, many or nested: whatever they cost, streams of other clients go on."""

import json
import select
import socket
from collections.abc import Callable, Iterator

import pytest

from adversary_kit.attacked import Attacked
from adversary_kit.raw import Answer, answer_of, ask, connections, post, post_head, read_all
from adversary_kit.witness import Seen
from replicas import wait_until

Undisturbed = Callable[[Seen], None]
MB = 1_000_000
LIMIT_BYTES = 4 * 1024 * 1024


def test_without_an_attack(server: Attacked, undisturbed: Undisturbed) -> None:
    """The figure that the others compare to."""
    undisturbed(server.under(lambda: [server.known_answer() for _ in range(10)] and None))


ONE_WORD = b'{"prompt": "' + "é".encode() * (LIMIT_BYTES // 2 - 100) + b'"}'


def nested(depth: int) -> bytes:
    return b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": %b%b}, "max_tokens": 1}' % (
        b"[" * depth,
        b"]" * depth,
    )


ATTACKS: dict[str, tuple[str, object]] = {
    "one long text": ("/v1/completions", {"prompt": "a" * (LIMIT_BYTES - 100)}),
    "one long text without spaces to split at": ("/v1/completions", ONE_WORD),
    "one long chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * (2 * MB)}]}),
    "one long text to tokenize": ("/tokenize", {"prompt": "ab " * MB}),
    "the strings of tokens": ("/tokenize", {"prompt": "ab " * MB, "return_token_strs": True}),
    "many prompts": ("/v1/completions", {"prompt": ["ab" * 2048] * 256, "max_tokens": 1}),
    "many prompts, each different": (
        "/v1/completions",
        {"prompt": [f"{index} " + "ab" * 2000 for index in range(256)], "max_tokens": 1},
    ),
    "very many empty prompts": ("/v1/completions", {"prompt": [""] * 1_300_000}),
    "very many prompts of ids": ("/v1/completions", {"prompt": [[1]] * 800_000}),
    "very many ids": ("/v1/completions", {"prompt": [1] * 1_300_000}),
    "very many ids to detokenize": ("/detokenize", b'{"tokens":[' + b"7," * 2_000_000 + b"7]}"),
    "a huge value for the template": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": "b" * (4 * MB)}},
    ),
    "many values for the template": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "a"}],
            "chat_template_kwargs": {f"k{index}": index for index in range(200_000)},
        },
    ),
    "very many messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 100_000}),
    "very many parts": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 120_000}]},
    ),
    "very many unknown fields": ("/v1/completions", {"prompt": "a", **{f"x{index}": 0 for index in range(300_000)}}),
    "very many stop strings": ("/v1/completions", {"prompt": "a", "stop": ["a"] * 1_000_000}),
    "very many stop tokens": ("/v1/completions", {"prompt": "a", "stop_token_ids": [1] * 1_900_000}),
    "brackets": ("/v1/completions", b"[" * LIMIT_BYTES),
    "deep values for the template": ("/v1/chat/completions", nested(500)),
    "deeper values for the template": ("/v1/chat/completions", nested(900)),
    "a long number": ("/v1/completions", b'{"prompt": "a", "seed": ' + b"9" * (4 * MB) + b"}"),
    "a long fraction": ("/v1/completions", b'{"prompt": "a", "temperature": 0.' + b"1" * (4 * MB) + b"}"),
    "escapes": ("/v1/completions", b'{"prompt": "' + b"\\u0001" * 690_000 + b'"}'),
    "a schema of many values": (
        "/v1/completions",
        {
            "prompt": "a",
            "max_tokens": 1,
            "structured_outputs": {"json": {"enum": [f"v {one}" for one in range(10_000)]}},
        },
    ),
    "a schema that takes minutes": (
        "/v1/completions",
        {
            "prompt": "a",
            "structured_outputs": {
                "json": {"allOf": [{"type": "string", "pattern": f"(.*a.{{{one}}}b)"} for one in range(1, 30)]}
            },
        },
    ),
    "a schema that overflows a stack": (
        "/v1/completions",
        {
            "prompt": "a",
            "structured_outputs": {
                "json": {
                    "$ref": "#/$defs/r0",
                    "$defs": {
                        f"r{one}": {"properties": {"a": {"$ref": f"#/$defs/r{one + 1}"}}, "required": ["a"]}
                        for one in range(2000)
                    },
                }
            },
        },
    ),
    "a regex that backtracks": (
        "/v1/completions",
        {"prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": "(x+x+)+y"}},
    ),
    "white space": ("/v1/completions", b" " * (4 * MB) + b'{"prompt": "a"}'),
}
FAST = {
    "one long text",
    "the strings of tokens",
    "many prompts",
    "very many empty prompts",
    "very many ids to detokenize",
    "a huge value for the template",
    "many values for the template",
    "very many unknown fields",
    "brackets",
    "deep values for the template",
    "a long number",
    "a schema of many values",
}


def is_well_refused(answer: Answer) -> bool:
    """The client's mistake, told in a few words."""
    return 400 <= answer.status < 500 and len(answer.body) < 2048 and bool(answer.code)


@pytest.mark.parametrize(
    "name", [pytest.param(n, id=n, marks=[] if n in FAST else [pytest.mark.slow]) for n in ATTACKS]
)
def test_costly_work_stops_nobody(server: Attacked, undisturbed: Undisturbed, name: str) -> None:
    path, body = ATTACKS[name]
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    assert len(encoded) < 6 * MB

    def attack() -> None:
        for _ in range(2):
            answer = server.post(path, encoded)
            assert answer.status == 200 or is_well_refused(answer), (answer.status, answer.body[:300])

    undisturbed(server.under(attack))


def test_many_costly_requests_at_once_stop_nobody(server: Attacked, undisturbed: Undisturbed) -> None:
    """What one client may have in work is bounded, not only each of its requests."""
    body = json.dumps({"prompt": "ab " * MB}).encode()
    request = post_head("/tokenize", len(body), "Connection: close") + body

    def attack() -> None:
        with connections(server.port, 6) as opened:
            for connection in opened:
                connection.sendall(request)
            for connection in opened:
                assert connection.recv(12).startswith(b"HTTP/1.1 ")

    undisturbed(server.under(attack))


MANY_IDS = b'{"prompt":[' + b"7," * (LIMIT_BYTES // 2 - 10) + b"7]}"
"""As many as a body can hold: all of them are decoded before they can be counted."""


def test_bodies_full_of_ids_that_are_complete_at_once_stop_nobody(server: Attacked, undisturbed: Undisturbed) -> None:
    request = post("/v1/completions", MANY_IDS)

    def attack() -> None:
        with connections(server.port, 8) as opened:
            for connection in opened:
                connection.sendall(request[:-1])
            for connection in opened:
                connection.sendall(request[-1:])
            for connection in opened:
                answer = answer_of(read_all(connection))
                assert answer is not None and is_well_refused(answer), answer

    undisturbed(server.under(attack))


def is_refused(connection: socket.socket) -> bool:
    readable, _, _ = select.select([connection], [], [], 0)
    return bool(readable) and connection.recv(12, socket.MSG_PEEK).endswith(b" 429")


def test_clients_that_leave_while_they_wait_make_room_for_others(server: Attacked) -> None:
    """One text is tokenized, 256 wait, and the others are told to come again. For those who left nothing is tokenized."""
    request = post("/tokenize", {"prompt": "a b " * 4_000})
    with connections(server.port, 270) as leaving:
        for connection in leaving:
            connection.sendall(request[:-1])
        for connection in leaving:
            connection.sendall(request[-1:])
        wait_until(lambda: any(map(is_refused, leaving)), "all of them could wait")
    with connections(server.port, 12) as staying:
        for connection in staying:
            connection.sendall(request)
        answers = [answer_of(read_all(connection)) for connection in staying]
    assert {answer and answer.status for answer in answers} == {200}, answers


def one_byte_chunks(path: str, body: bytes) -> Iterator[bytes]:
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    yield head.encode()
    for begin in range(0, len(body), 4096):
        yield b"".join(b"1\r\n%c\r\n" % byte for byte in body[begin : begin + 4096])
    yield b"0\r\n\r\n"


@pytest.mark.parametrize("num_bytes", [100_000, pytest.param(LIMIT_BYTES - 100, marks=pytest.mark.slow)])
def test_a_body_of_chunks_of_one_byte_stops_nobody(server: Attacked, undisturbed: Undisturbed, num_bytes: int) -> None:
    body = json.dumps({"prompt": "a" * num_bytes}).encode()

    def attack() -> None:
        answer = ask(server.port, one_byte_chunks("/v1/completions", body))
        assert answer is None or is_well_refused(answer), answer

    undisturbed(server.under(attack))


def test_chunks_with_long_extensions_stop_nobody(server: Attacked, undisturbed: Undisturbed) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        for _ in range(300):
            yield b"1;" + b"x" * 8000 + b"\r\na\r\n"
        yield b"0\r\n\r\n"

    def attack() -> None:
        answer = ask(server.port, pieces())
        assert answer is None or answer.status in (400, 413), answer

    undisturbed(server.under(attack))
