"""What clients choose reaches log and answer quoted and cut."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from adversary_kit.attacked import Attacked
from adversary_kit.condition import FORGED
from adversary_kit.raw import ask, post, post_head
from flyball_protocol import endpoints
from replicas import ADMIN_TOKEN

EVIL = (
    f"x\n{FORGED} 2026-01-01 00:00:00,000 INFO flyball: all is well\r\x1b[2J\x1b[31m\x00\x7f\x9b31m\u2028\u202e\ud7ff"
)
LONG = "y" * 1_000_000
CHAT = [{"role": "user", "content": "a"}]
MOST_ANSWER_BYTES = 4096

Place = Callable[[str], tuple[str, Any]]
PLACES: dict[str, Place] = {
    "a field": lambda name: ("/v1/completions", {"prompt": "a", name: 1}),
    "a field of a chat": lambda name: ("/v1/chat/completions", {"messages": CHAT, name: 1}),
    "many fields": lambda name: ("/v1/completions", {"prompt": "a", **{name[:2000] + str(i): 1 for i in range(500)}}),
    "a field of a message": lambda name: ("/v1/chat/completions", {"messages": [CHAT[0] | {name: 1}]}),
    "a field of a part": lambda name: (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", name: 1}]}]},
    ),
    "a field of stream_options": lambda name: (
        "/v1/completions",
        {"prompt": "a", "stream": True, "stream_options": {name: True}},
    ),
    "a field of /tokenize": lambda name: ("/tokenize", {"prompt": "a", name: 1}),
    "a field of a chat to /tokenize": lambda name: ("/tokenize", {"messages": CHAT, name: 1}),
    "a field of /detokenize": lambda name: ("/detokenize", {"tokens": [5], name: 1}),
    "a role": lambda name: ("/v1/chat/completions", {"messages": [{"role": name, "content": "a"}]}),
    "a type of a part": lambda name: (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": name, "text": "a"}]}]},
    ),
    "a model": lambda name: ("/v1/completions", {"prompt": "a", "model": name}),
    "a model to tokenize": lambda name: ("/tokenize", {"prompt": "a", "model": name}),
    "a stop string": lambda name: ("/v1/completions", {"prompt": "a", "stop": [name]}),
    "a variable of the template": lambda name: (
        "/v1/chat/completions",
        {"messages": CHAT, "chat_template_kwargs": {name: 1, "tokenize": True}, "max_tokens": 1},
    ),
    "a number that is a text": lambda name: ("/v1/completions", {"prompt": "a", "temperature": name}),
    "a refused value": lambda name: ("/v1/completions", {"prompt": "a", "response_format": {"type": name}}),
    "a body": lambda name: ("/v1/completions", name),
}


@pytest.mark.parametrize("name", [EVIL, LONG], ids=["evil", "long"])
@pytest.mark.parametrize("place", PLACES)
def test_a_name_is_quoted_and_cut(server: Attacked, place: str, name: str) -> None:
    answer = server.post(*PLACES[place](name))
    if answer.status != 200:  # a stop string may be odd
        assert answer.status in (400, 404, 413), answer.body[:500]
        check_error(answer.body)


def check_error(body: bytes) -> None:
    """A well-formed error that is short, and safe to print once it has been parsed."""
    assert len(body) <= MOST_ANSWER_BYTES, f"{len(body)} bytes"
    error = json.loads(body)["error"]
    assert {"message", "type", "param", "code"} == set(error)
    for text in (error["message"], error["param"] or ""):
        assert text.isprintable(), f"not printable: {text!r}"


PATHS = ["/" + "z" * 15_000, "/a%0aFORGED%0d%1b%5b31m%00", "/v1/models/%0aFORGED%1b%5b2J", "/v1/models/" + "m" * 15_000]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path[:24])
@pytest.mark.parametrize("method", ["GET", "POST", "X" * 20])
def test_a_path_is_quoted_and_cut(server: Attacked, path: str, method: str) -> None:
    answer = ask(server.port, post_head(path, 0, "Connection: close", method=method))
    assert answer is not None
    assert answer.status in (404, 405)
    check_error(answer.body)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path[:24])
def test_a_path_of_the_admin_port_is_quoted_and_cut(server: Attacked, path: str) -> None:
    token = f"Authorization: Bearer {ADMIN_TOKEN}"
    answer = ask(server.admin_port, post_head(path, 0, "Connection: close", token))
    assert answer is not None
    assert answer.status == 404
    check_error(answer.body)


@pytest.mark.parametrize("name", [EVIL, LONG[:60_000]], ids=["evil", "long"])
def test_a_name_on_the_admin_port_is_quoted_and_cut(server: Attacked, name: str) -> None:
    token = f"Authorization: Bearer {ADMIN_TOKEN}"
    for body in ({"revision": 1, "limits": {name: 1}}, {"revision": 1, "limits": {}, name: 1}):
        answer = ask(server.admin_port, post(endpoints.ADMIN_LIMITS_PATH, body, token))
        assert answer is not None
        assert answer.status == 400
        check_error(answer.body)


@pytest.mark.parametrize("header", ["X-Request-Id: a\x1b[31m", "X-Request-Id: " + "i" * 10_000, "X-Request-Id: a\tb"])
def test_a_request_id_is_safe(server: Attacked, header: str) -> None:
    answer = ask(server.port, post_head("/v1/completions", 0, "Connection: close", header))
    assert answer is not None
    assert answer.status == 400
