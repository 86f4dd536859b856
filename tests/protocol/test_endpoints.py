"""The `curl` line that a server prints."""

import json
import shlex

import pytest

from flyball_protocol.endpoints import base_url, curl_line


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("fe80::1", "http://[fe80::1]:8000"),
        ("10.0.0.7", "http://10.0.0.7:8000"),
    ],
)
def test_an_address_that_means_all_is_asked_on_loopback(host: str, url: str) -> None:
    assert base_url(host, 8000) == url


@pytest.mark.parametrize(
    ("chat", "path", "field"), [(True, "chat/completions", "messages"), (False, "completions", "prompt")]
)
def test_the_line_survives_a_shell_whatever_the_models_name(chat: bool, path: str, field: str) -> None:
    name = 'it\'s a "name" $HOME'
    program, url, flag, body = shlex.split(curl_line("http://127.0.0.1:8000", name, chat=chat))
    assert (program, url, flag) == ("curl", f"http://127.0.0.1:8000/v1/{path}", "-d")
    asked = json.loads(body)
    *_, header, flag, _ = shlex.split(curl_line("http://127.0.0.1:8000", name, chat=chat, needs_key=True))
    assert (header, flag) == ("Authorization: Bearer $FLYBALL_API_KEY", "-d")
    assert asked["model"] == name
    assert field in asked
