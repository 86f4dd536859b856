"""flyball batch at a server: what it sends and writes, how it goes on, and what it refuses."""

import errno
import fcntl
import json
import os
import signal
import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from fake_openai import FakeServer, Reply
from flyball_clients import cli
from flyball_clients.batch import output
from flyball_clients.batch import run as batch_run
from flyball_clients.batch.backend import _retry_after_s
from flyball_clients.batch.requests import Index

Line = dict[str, Any] | str


def request(name: str, *, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": {"prompt": name, "max_tokens": 2} | body}


def answer(body: dict[str, Any]) -> Reply:
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    return Reply(body={"text": f"re: {body['prompt']}", "usage": usage}, headers={"X-Request-Id": "id-1"})


REFUSAL = {"error": {"message": "queue full"}}


class Files:
    """The two files of a batch, and the command on them."""

    def __init__(self, folder: Path, url: str) -> None:
        self.source, self.target = folder / "in.jsonl", folder / "out.jsonl"
        self.url = url

    def write(self, *lines: Line) -> None:
        self.source.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))

    def run(self, *flags: str) -> int:
        return cli.main(["batch", str(self.source), str(self.target), "--base-url", self.url, *flags])

    def rows(self) -> dict[str, dict[str, Any]]:
        """The output by custom_id; each stands in it once."""
        rows = [json.loads(line) for line in self.target.read_text().splitlines()]
        assert len({row["custom_id"] for row in rows}) == len(rows)
        return {row["custom_id"]: row for row in rows}


@pytest.fixture
def files(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    monkeypatch.setattr(batch_run, "FIRST_PAUSE_S", 0.0)
    server.script = answer
    return Files(tmp_path, server.url)


def test_every_request_is_answered_in_openais_format(
    files: Files, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"request {number} é\n" for number in range(40)]
    files.write(*(request(name) for name in names[:-1]), "", request(names[-1], url="/v1/chat/completions"))
    assert files.run("--concurrency", "7") == 0
    rows = files.rows()
    assert rows.keys() == set(names)
    for name, row in rows.items():
        assert row.pop("id").startswith("batch_req_")
        body = {"text": f"re: {name}", "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
        response = {"status_code": 200, "request_id": "id-1", "body": body}
        assert row == {"custom_id": name, "response": response, "error": None}
    assert sorted(server.paths) == ["/v1/chat/completions"] + ["/v1/completions"] * 39
    out, _ = capsys.readouterr()
    assert "40 of 40 requests done, 0 failed" in out
    assert "120 prompt and 80 output tokens" in out


def test_tokens_are_counted_by_either_name(
    files: Files, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    usages: dict[str, Any] = {
        "a": {"prompt_tokens": 3, "completion_tokens": 2},
        "b": {"input_tokens": 30, "output_tokens": 20},
        "c": None,
        "d": "none",
    }
    server.script = lambda body: Reply(body={"usage": usages[body["prompt"]]})
    files.write(*map(request, usages))
    assert files.run() == 0
    assert "33 prompt and 22 output tokens" in capsys.readouterr().out


def test_no_more_requests_are_in_flight_than_asked_for(files: Files, server: FakeServer) -> None:
    server.script = lambda body: Reply([b"{}"], gate=3)
    files.write(*(request(str(number)) for number in range(9)))
    assert files.run("--concurrency", "3") == 0
    assert server.max_in_flight == 3


def test_failures_are_in_their_lines_and_in_the_exit_code(
    files: Files, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    replies = {
        "good": answer({"prompt": "good"}),
        "refused": Reply(status=400, body={"error": {"message": "max_tokens is -3"}}),
        "no json": Reply([b"<html>"]),
        "cut": Reply([b"{"], break_off=True),
    }
    server.script = lambda body: replies[body["prompt"]]
    files.write(*map(request, replies))
    assert files.run("--max-retries", "2") == 1
    rows = files.rows()
    assert rows["good"]["error"] is None
    assert rows["refused"]["response"]["body"] == {"error": {"message": "max_tokens is -3"}}
    assert rows["refused"]["error"] == {"code": "http_400", "message": "max_tokens is -3"}
    assert (rows["no json"]["response"]["body"], rows["no json"]["error"]["code"]) == (None, "bad_answer")
    assert (rows["cut"]["response"], rows["cut"]["error"]["code"]) == (None, "disconnected")
    assert [body["prompt"] for body in server.requests].count("cut") == 3
    out = capsys.readouterr().out
    assert "4 of 4 requests done, 3 failed" in out
    assert "1 http_400" in out
    assert files.run() == 1, "the failures of before count"
    assert len(server.requests) == 6, "and are not done again"


def test_a_request_that_takes_too_long_is_not_sent_again(files: Files, server: FakeServer) -> None:
    server.script = lambda body: Reply([60.0]) if body["prompt"] == "slow" else answer(body)
    files.write(request("slow", url="/v1/embeddings"), request("good", url="/v1/responses"))
    assert files.run("--timeout", "0.5") == 1
    rows = files.rows()
    assert rows["slow"]["error"]["code"] == "timeout"
    assert rows["good"]["error"] is None
    assert sorted(server.paths) == ["/v1/embeddings", "/v1/responses"]


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again(status: int, files: Files, server: FakeServer) -> None:
    busy = Reply(status=status, body=REFUSAL, headers={"Retry-After": "0"})
    server.script = lambda body: busy if len(server.requests) <= 8 else answer(body)
    files.write(request("a"), request("b"))
    assert files.run("--max-retries", "1") == 0
    assert files.rows().keys() == {"a", "b"}


def test_a_server_that_refuses_everything_ends_the_batch_which_goes_on_later(
    files: Files, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    full = Reply(status=429, body=REFUSAL, headers={"Retry-After": "0"})
    server.script = lambda body: answer(body) if body["prompt"] == "a" else full
    files.write(request("a"), request("b"))
    assert files.run("--give-up-after", "0.05", "--concurrency", "1") == 1
    err = capsys.readouterr().err
    assert "every request was refused for 0.05 s, the last one by: HTTP 429: queue full" in err
    assert "Requests left: 1. The same command goes on with them." in err
    assert files.rows().keys() == {"a"}
    server.script = answer
    assert files.run() == 0
    assert files.rows().keys() == {"a", "b"}


def test_a_wrong_key_ends_the_batch(files: Files, server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.script = lambda body: Reply(status=401, body={"error": {"message": "no key."}})
    files.write(request("a"), request("b"))
    assert files.run("--concurrency", "1") == 1
    err = capsys.readouterr().err
    assert "HTTP 401: no key. Name the environment variable that holds the key with --api-key-env." in err
    assert (len(server.requests), files.target.read_bytes()) == (1, b"")


def test_no_server_ends_the_batch(files: Files, dead_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    files.write(request("a"))
    files.url = dead_url
    assert files.run("--give-up-after", "0.01") == 1
    assert f"no server answers at {dead_url}" in capsys.readouterr().err
    assert files.target.read_bytes() == b""


def test_what_is_done_is_not_done_again_and_a_cut_line_is_repaired(files: Files, server: FakeServer) -> None:
    files.write(*(request(str(number)) for number in range(6)))
    assert files.run() == 0
    whole = files.target.read_bytes().splitlines(keepends=True)
    for cut in (b"", whole[4][:3], whole[4][:-1]):
        files.target.write_bytes(b"".join(whole[:4]) + cut)
        server.requests.clear()
        assert files.run() == 0
        assert files.target.read_bytes().startswith(b"".join(whole[:4]))
        assert files.rows().keys() == set(map(str, range(6)))
        assert len(server.requests) == 2


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(
    files: Files, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(body: dict[str, Any]) -> Reply:
        if body["prompt"] != "3":
            return answer(body)
        os.kill(os.getpid(), signal.SIGINT)
        return Reply([60.0])

    server.script = interrupt
    files.write(*(request(str(number)) for number in range(6)))
    assert files.run("--concurrency", "1") == 130
    out, err = capsys.readouterr()
    assert "3 of 6 requests done, 0 failed" in out
    assert "Requests left: 3. The same command goes on with them." in err
    server.script = answer
    assert files.run() == 0
    assert files.rows().keys() == set(map(str, range(6)))


def no_json(lines: list[Line]) -> None:
    lines[1] = '{"custom_id": "b", '


def unknown_url(lines: list[Any]) -> None:
    lines[1]["url"] = "/v1/images"


def same_name(lines: list[Any]) -> None:
    lines[1]["custom_id"] = "a"


def no_name(lines: list[Any]) -> None:
    del lines[1]["custom_id"]


def empty_name(lines: list[Any]) -> None:
    lines[1]["custom_id"] = ""


def get(lines: list[Any]) -> None:
    lines[1]["method"] = "GET"


def body_is_a_list(lines: list[Any]) -> None:
    lines[1]["body"] = [1]


def stream(lines: list[Any]) -> None:
    lines[1]["body"]["stream"] = True


def too_long(lines: list[Any]) -> None:
    lines[1]["body"]["prompt"] = "x" * 5000


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (no_json, "it is not a request: Input data was truncated"),
        (unknown_url, "its url is '/v1/images'; it must be one of /v1/chat/completions, /v1/completions"),
        (same_name, "its custom_id 'a' is that of line 1; each must be unique"),
        (no_name, "missing required field `custom_id`"),
        (empty_name, "Expected `str` of length >= 1"),
        (get, "its method is 'GET'; it must be POST"),
        (body_is_a_list, "Expected `object`, got `array`"),
        (stream, "its body asks for a stream"),
        (too_long, "it has more than 4000 bytes; shorten it or raise --max-body-bytes"),
    ],
)
def test_a_wrong_line_is_named_and_nothing_is_sent(
    spoil: Callable[[list[Any]], None],
    reason: str,
    files: Files,
    server: FakeServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = [request("a"), request("b"), request("c")]
    spoil(lines)
    files.write(*lines)
    assert files.run("--max-body-bytes", "4000") == 2
    err = capsys.readouterr().err
    assert f"line 2: {reason}" in err or ("line 2: it is not a request: " in err and reason in err)
    assert "so no request was sent" in err
    assert len(err.splitlines()) == 2
    assert not server.paths
    assert not files.target.exists()


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":' + b'{"a":' * 50_000 + b"}" * 50_001,
        b'{"custom_id":"\xff","method":"POST","url":"/v1/completions","body":{}}',
        b'{"custom_id":"\\ud800","method":"POST","url":"/v1/completions","body":{}}',
        b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"n":NaN}}',
        b"\0" * 1000,
    ],
    ids=["nested", "nested body", "not UTF-8", "half a character", "NaN", "zeros"],
)
def test_a_hostile_line_is_a_wrong_line(
    line: bytes, files: Files, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    files.source.write_bytes(line + b"\n")
    assert files.run() == 2
    err = capsys.readouterr().err
    assert "line 1: it is not a request: " in err
    assert len(err) < 1000
    assert not server.paths


def test_a_file_of_windows(files: Files, server: FakeServer) -> None:
    lines = [json.dumps(request(name)).encode() for name in "ab"]
    files.source.write_bytes(b"\xef\xbb\xbf" + lines[0] + b"\r\n\r\n" + lines[1])
    assert files.run() == 0
    assert files.rows().keys() == {"a", "b"}


def test_a_full_disk_ends_the_batch_which_goes_on_when_there_is_room(
    files: Files, server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files.write(*(request(str(number)) for number in range(5)))
    written = []

    class FullDisk:
        """os, for a disk that has room for two lines and a half."""

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def write(self, fd: int, data: memoryview) -> int:
            if len(written) == 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written.append(os.write(fd, data if len(written) < 2 else data[:40]))
            return written[-1]

    with monkeypatch.context() as patch:
        patch.setattr(output, "os", FullDisk())
        assert files.run("--concurrency", "1") == 2
    err = capsys.readouterr().err
    assert f"cannot write {files.target}: No space left on device. The same command goes on from there." in err
    assert len(files.target.read_bytes().splitlines()) == 3
    assert files.run() == 0
    assert files.rows().keys() == set("01234")


def test_a_full_folder_for_temporary_files_is_named(
    files: Files, server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Index, "add", full)
    files.write(request("a"))
    assert files.run() == 2
    assert "database or disk is full. Set TMPDIR to a folder that has room." in capsys.readouterr().err
    assert not server.paths


def test_when_a_server_says_to_come_back() -> None:
    assert _retry_after_s(None) is None
    assert _retry_after_s("7") == 7.0
    assert _retry_after_s("soon") is None
    assert _retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    in_an_hour = _retry_after_s(format_datetime(datetime.now(UTC) + timedelta(hours=1)))
    assert in_an_hour is not None
    assert 0 < in_an_hour <= 3600


def test_many_wrong_lines_are_counted(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.write(*["[]"] * 30)
    assert files.run() == 2
    err = capsys.readouterr().err
    assert "line 10: " in err
    assert "line 11: " not in err
    assert "and 20 more." in err


@pytest.mark.parametrize(
    ("foreign", "reason"),
    [
        (b'{"id":"batch_req_1","custom_id":"x","error":null}\n', "its line 1 answers 'x', which is not in the input"),
        (b"notes\n", "its line 1 is not an answer of a batch"),
        (b"notes", "its line 1 is not an answer of a batch"),
    ],
)
def test_an_output_of_another_input_is_left_as_it_is(
    foreign: bytes, reason: str, files: Files, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    files.write(request("a"))
    files.target.write_bytes(foreign)
    assert files.run() == 2
    assert f"is not one of this input: {reason}" in capsys.readouterr().err
    assert files.target.read_bytes() == foreign
    assert not server.paths


def test_files_that_cannot_be_used(files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert files.run() == 2
    assert f"the input {files.source} does not exist" in capsys.readouterr().err
    files.source.write_text("\n")
    assert files.run() == 2
    assert "has no requests" in capsys.readouterr().err
    files.write(request("a"))
    before = files.source.read_bytes()
    files.target.hardlink_to(files.source)
    assert files.run() == 2
    assert "is both the input and the output" in capsys.readouterr().err
    assert files.source.read_bytes() == before
    files.target = tmp_path / "none" / "out.jsonl"
    assert files.run() == 2
    assert "cannot write the output" in capsys.readouterr().err
    os.mkfifo(tmp_path / "fifo")
    files.target = tmp_path / "fifo"
    assert files.run() == 2
    assert f"the output {files.target} is not a file" in capsys.readouterr().err
    files.source = tmp_path
    assert files.run() == 2
    assert f"the input {tmp_path} is not a file" in capsys.readouterr().err


def test_two_batches_do_not_write_to_one_output(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.write(request("a"))
    with files.target.open("ab") as others:
        fcntl.flock(others, fcntl.LOCK_EX)
        assert files.run() == 2
    assert "another flyball batch writes to it" in capsys.readouterr().err
    assert files.run() == 0


def test_an_input_that_changes_meanwhile_ends_the_batch(
    files: Files, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def shorten(body: dict[str, Any]) -> Reply:
        files.write(request("b"))
        return answer(body)

    server.script = shorten
    files.write(request("a"), request("long", suffix="x" * 2**20), request("b"))
    assert files.run("--concurrency", "1") == 2
    assert "was changed: request 'long' is not where it was" in capsys.readouterr().err
    assert files.rows().keys() == {"a"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--concurrency", "0"], "--concurrency is 0; it must be from 1 to 65536"),
        (["--timeout", "nan"], "--timeout is nan"),
        (["--max-num-seqs", "4"], "unknown flag --max-num-seqs; flags of an engine need --model CHECKPOINT"),
        (["--model", "somewhere"], "give one kind"),
        (["--api-key-env", "FLYBALL_NO_SUCH_KEY"], "FLYBALL_NO_SUCH_KEY, which is not set"),
    ],
)
def test_a_wrong_flag(flags: list[str], message: str, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.write(request("a"))
    assert files.run(*flags) == 2
    assert message in capsys.readouterr().err
