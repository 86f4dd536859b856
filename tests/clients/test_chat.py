import io
import os
import signal
from collections.abc import Iterator

import pytest

from fake_openai import DONE, FakeServer, Reply, delta, event, usage
from flyball_clients import cli
from flyball_clients.chat import Answer
from flyball_clients.stream import decode_chunk


def run(*flags: str) -> int:
    return cli.main(["chat", *flags])


def greeting(text: str = "Hi there") -> Reply:
    words = [delta(content=piece) for piece in text.split(" ")]
    return Reply([delta(role="assistant", content=""), *words, delta("stop"), usage(5, len(words)), DONE])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def type_lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Lines that a person types; Ctrl-D follows the last one."""
    lines: list[str] = []

    def read(prompt: str) -> str:
        if not lines:
            raise EOFError
        return lines.pop(0)

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin", Terminal())
    yield lines


def test_one_question(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.script = lambda request: greeting()
    flags = ("--system", "be kind", "--temperature", "0.5", "--max-tokens", "9")
    assert run("hello", "--base-url", server.url, *flags) == 0
    out, err = capsys.readouterr()
    assert out == "Hithere\n"
    assert err.startswith("2 tokens, TTFT ")
    assert server.requests == [
        {
            "model": "demo",
            "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.5,
            "max_tokens": 9,
        }
    ]


@pytest.mark.parametrize(
    ("arrivals_s", "shown"),
    [
        ([0.2, 1.2, 2.2], "3 tokens, TTFT 200 ms, 1.0 tok/s"),
        ([0.2, 0.2001, 0.2002], "3 tokens, TTFT 200 ms"),
        ([0.2], "1 token, TTFT 200 ms"),
        ([], "0 tokens"),
    ],
    ids=["steady", "one burst", "one token", "none"],
)
def test_a_rate_is_shown_only_where_there_was_one(arrivals_s: list[float], shown: str) -> None:
    answer = Answer()
    for seconds in arrivals_s:
        answer.add(decode_chunk(b'{"choices": [{"delta": {"content": "x"}}]}'), seconds)
    assert str(answer) == shown


def test_the_question_may_come_on_stdin(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = lambda request: greeting("ok")
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    assert run("--base-url", server.url) == 0
    assert server.requests[0]["messages"] == [{"role": "user", "content": "from a pipe\n"}]
    assert "temperature" not in server.requests[0]
    assert capsys.readouterr().out == "ok\n"


def test_a_conversation_remembers_until_reset(server: FakeServer, type_lines: list[str]) -> None:
    server.script = lambda request: greeting("ok")
    type_lines += ["one", "", "two", "/nonsense", "/reset", "three", "/quit", "never"]
    assert run("--base-url", server.url, "--system", "s") == 0
    said = [[message["content"] for message in request["messages"]] for request in server.requests]
    assert said == [["s", "one"], ["s", "one", "ok", "two"], ["s", "three"]]


def test_ctrl_d_leaves(server: FakeServer, type_lines: list[str]) -> None:
    assert run("--base-url", server.url) == 0
    assert server.requests == []


def test_ctrl_c_aborts_the_request_and_keeps_what_came(
    server: FakeServer, type_lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replies = iter([Reply([delta(content="partial"), *[0.01] * 2000]), greeting("ok")])
    server.script = lambda request: next(replies)

    def write(text: str) -> None:
        if text == "partial":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("flyball_clients.chat._write", write)
    type_lines += ["tell me", "and now"]
    assert run("--base-url", server.url) == 0
    assert [message["content"] for message in server.requests[1]["messages"]] == ["tell me", "partial", "and now"]
    assert "stopped." in capsys.readouterr().err
    server.wait_until(lambda: server.disconnects == 1)


def test_ctrl_c_ends_a_single_question_with_130(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.script = lambda request: Reply([delta(content="partial"), *[0.01] * 2000])
    monkeypatch.setattr("flyball_clients.chat._write", lambda text: os.kill(os.getpid(), signal.SIGINT))
    assert run("hello", "--base-url", server.url) == 130
    server.wait_until(lambda: server.disconnects == 1)


def test_after_an_error_the_conversation_goes_on_without_it(
    server: FakeServer, type_lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    replies = iter(
        [
            Reply(status=400, body={"error": {"message": "prompt too long"}}),
            Reply([delta(content="x"), event({"error": {"message": "engine stopped"}})]),
            greeting("ok"),
        ]
    )
    server.script = lambda request: next(replies)
    type_lines += ["one", "two", "three"]
    assert run("--base-url", server.url) == 0
    assert [message["content"] for message in server.requests[2]["messages"]] == ["three"]
    err = capsys.readouterr().err
    assert "flyball chat: HTTP 400: prompt too long" in err
    assert "flyball chat: engine stopped" in err


def test_control_characters_do_not_reach_the_terminal(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.script = lambda request: greeting("a\x1b[2Jb\tc\nd\x9b")
    assert run("hello", "--base-url", server.url) == 0
    assert capsys.readouterr().out == "a[2Jb\tc\nd\n"


def test_no_server_says_how_to_start_one(dead_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("hello", "--base-url", dead_url) == 1
    err = capsys.readouterr().err
    assert f"flyball chat: no server answers at {dead_url}" in err
    assert "flyball serve MODEL" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["", "--base-url", "http://h"], "the prompt is empty"),
        (["x", "--base-url", "h"], "--base-url is 'h'"),
        (["x", "--temperature", "nan"], "--temperature is nan"),
        (["x", "--max-tokens", "0"], "--max-tokens is 0"),
        (["x", "--timeout", "-1"], "--timeout is -1"),
        (["x", "--api-key-env", "FLYBALL_NO_SUCH_KEY"], "FLYBALL_NO_SUCH_KEY"),
    ],
)
def test_a_wrong_flag_exits_with_2(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*flags) == 2
    assert message in capsys.readouterr().err
