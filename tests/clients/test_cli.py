import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fake_openai import FakeServer, Reply, answer_in_full
from flyball_clients import cli


def run(*flags: str) -> int:
    return cli.main(["bench", *flags])


def test_a_table_on_stdout(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--base-url", server.url + "/v1", "--num-requests", "5", "--output-len", "3", "--slo", "ttft=60s") == 0
    out, err = capsys.readouterr()
    for word in ("demo", "closed loop, 8 in flight", "TTFT", "ITL", "TPOT", "E2E", "p99", "Good requests", "100.0%"):
        assert word in out
    assert "from arrival" not in out
    assert max(map(len, out.splitlines())) <= 80
    assert err == ""


def test_an_open_loop_shows_both_clocks(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--request-rate", "500", "--arrival", "gamma", "--burstiness", "0.5", "--num-requests", "5")
    assert run("--base-url", server.url, "--output-len", "3", *flags) == 0
    out = capsys.readouterr().out
    for word in (
        "open loop, 500 requests/s, gamma (shape 0.5)",
        "TTFT from arrival",
        "E2E from arrival",
        "Sent late by",
    ):
        assert word in out
    assert max(map(len, out.splitlines())) <= 80


def test_json_on_stdout_and_in_a_file(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.json"
    flags = ("--num-requests", "2", "--output-len", "2", "--json", "--output", str(file), "--save-requests")
    assert run("--base-url", server.url, *flags) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(file.read_text())
    assert len(json.loads(file.read_text())["records"]) == 2


def test_a_run_in_which_all_fails_exits_with_1(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    refusal = Reply(status=429, body={"error": {"message": "queue [full]"}})
    server.script = lambda request: answer_in_full(request) if request["max_tokens"] == 1 else refusal
    assert run("--base-url", server.url, "--num-requests", "4") == 1
    out = capsys.readouterr().out
    assert "4 failed, http_429: HTTP 429: queue [full]" in out
    assert "TTFT" not in out


def test_no_server_exits_with_1(dead_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--base-url", dead_url) == 1
    assert f"flyball bench: no server answers at {dead_url}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--concurrency", "0"], "--concurrency is 0"),
        (["--trace", "t.txt"], "--trace is t.txt"),
        (["--slo", "fast"], "--slo has 'fast'"),
        (["--extra-body", "[1]"], "--extra-body is '[1]', not a JSON object"),
        (["--extra-body", '{"stream": false}'], "--extra-body has stream"),
        (["--output", "no/such/folder/r.json"], "in a folder that does not exist"),
        (["--api-key-env", "FLYBALL_NO_SUCH_KEY"], "FLYBALL_NO_SUCH_KEY, which is not set"),
        (["--tokenizer", "no/such/tokenizer"], "--tokenizer is no/such/tokenizer"),
    ],
)
def test_a_wrong_flag_exits_with_2_and_sends_nothing(
    server: FakeServer, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--base-url", server.url, *flags) == 2
    assert message in capsys.readouterr().err
    assert server.requests == []


def test_a_result_that_cannot_be_written_is_still_shown(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--base-url", server.url, "--num-requests", "1", "--output", str(tmp_path)) == 2
    out, err = capsys.readouterr()
    assert "TTFT" in out
    assert f"cannot write {tmp_path}" in err


def test_ctrl_c_stops_the_run(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    def script(request: dict[str, Any]) -> Reply:
        if request["max_tokens"] > 1:
            os.kill(os.getpid(), signal.SIGINT)
        return answer_in_full(request, gap_s=0.01)

    server.script = script
    assert run("--base-url", server.url, "--concurrency", "1", "--output-len", "2000") == 130
    assert "interrupted" in capsys.readouterr().err
    server.wait_until(lambda: server.disconnects == 1)


def test_the_parser_loads_nothing_heavy() -> None:
    code = (
        "import sys; from flyball_clients.cli import build_parser; build_parser();"
        "print(sorted({'aiohttp', 'numpy', 'rich', 'torch'} & set(sys.modules)))"
    )
    path = ":".join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
