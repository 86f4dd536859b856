"""`flyball serve` as users meet it: real processes, real sockets, bad clients, signals, death."""

import concurrent.futures
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from checkpoints import make_checkpoint
from flyball_protocol import endpoints
from flyball_runtime.serve import SHUTDOWN_GRACE_S
from ports import free_port
from replicas import ADMIN_TOKEN, Replica, environment, replica, wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", max_position_embeddings=8192)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    with replica(model, log=tmp_path_factory.mktemp("log") / "server.log") as running:
        yield running


def test_the_openai_client_streams_and_counts(server: Replica) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["test"]
    messages: Any = [{"role": "user", "content": "hello"}]
    whole = client.chat.completions.create(model="test", messages=messages, max_tokens=12, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model="test",
            messages=messages,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    with pytest.raises(openai.BadRequestError, match="this model takes 8192"):
        client.completions.create(model="test", prompt=[5] * 9000)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nobody", prompt="hi")


def test_many_streams_at_once_end_whole(server: Replica) -> None:
    def stream(index: int) -> str:
        body = {"model": "test", "prompt": [5 + index % 300], "max_tokens": 20, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            return list(response.iter_lines())[-2]

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        assert set(pool.map(stream, range(96))) == {"data: [DONE]"}


def test_a_disconnect_mid_stream_frees_the_blocks(server: Replica) -> None:
    body = {"model": "test", "prompt": [5] * 50, "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()  # kept: an iterator that is dropped closes the response
        next(lines)
        assert server.kv_blocks_used() >= 4
    wait_until(lambda: server.kv_blocks_used() == 0, "blocks of a dropped request were not freed")


def test_a_beam_search_ends_when_its_client_leaves(server: Replica) -> None:
    body = {
        "model": "test",
        "prompt": [5] * 50,
        "max_tokens": 8000,
        "ignore_eos": True,
        "use_beam_search": True,
        "n": 4,
    }
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.5)
    wait_until(lambda: server.kv_blocks_used() == 0, "blocks of a dropped search were not freed")
    answer = server.client.post("/v1/completions", json=body | {"max_tokens": 5}).json()
    scores = [choice["sequence_score"] for choice in answer["choices"]]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) == 4
    assert answer["usage"] == answer["usage"] | {"prompt_tokens": 50, "completion_tokens": 20}


def test_half_sent_requests_and_slow_readers_harm_nobody(server: Replica) -> None:
    address = ("127.0.0.1", server.port)
    with socket.create_connection(address) as half, socket.create_connection(address) as slow:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        body = json.dumps({"model": "test", "prompt": [5], "max_tokens": 2000, "ignore_eos": True, "stream": True})
        slow.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        assert [server.complete().status_code for _ in range(5)] == [200] * 5
    wait_until(lambda: server.kv_blocks_used() == 0, "blocks of a slow reader that left were not freed")


@pytest.mark.parametrize(
    ("content", "status", "says"),
    [
        (b"{", 400, "JSON"),
        (b"\xff\xfe{}", 400, "UTF-8"),
        (b'{"model": "test", "prompt": "' + b"x" * (5 * 2**20) + b'"}', 413, "bytes"),
        (b'{"model": "test", "prompt": []}', 400, "prompt"),
        (b'{"model": "test", "prompt": [5], "temperature": NaN}', 400, ""),
        (b'{"model": "test", "prompt": [5], "temperature": -1}', 400, "temperature is -1"),
        (b'{"model": "test", "prompt": [5], "max_tokens": 9000}', 400, "this model takes 8192"),
        (b'{"model": "test", "prompt": [99999]}', 400, "token id 99999"),
        (b'{"model": "test", "prompt": [5], "best_of": 3, "n": 4}', 400, "best_of"),
        (b'{"model": "nobody", "prompt": [5]}', 404, "nobody"),
    ],
)
def test_bad_bodies_get_an_error_that_tells_the_way_out(
    server: Replica, content: bytes, status: int, says: str
) -> None:
    response = server.client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == status
    assert says in response.json()["error"]["message"]


def test_limits_move_live_over_the_admin_port(server: Replica) -> None:
    path = endpoints.ADMIN_LIMITS_PATH
    before = server.admin.get(path).json()
    revision = before["revision"] + 10
    applied = server.admin.post(path, json={"revision": revision, "limits": {"max_num_seqs": 4}})
    assert (applied.status_code, applied.json()["status"]) == (200, "applied")
    assert server.admin.get(path).json()["effective"]["max_num_seqs"] == 4
    assert 'flyball_limit_target{limit="max_num_seqs"} 4.0' in server.client.get("/metrics").text
    stale = server.admin.post(path, json={"revision": revision - 1, "limits": {"max_num_seqs": 8}})
    assert (stale.status_code, stale.json()["status"]) == (409, "stale")
    outside = server.admin.post(path, json={"revision": revision + 1, "limits": {"max_num_seqs": 100000}})
    assert (outside.status_code, outside.json()["status"]) == (422, "rejected")
    assert "100000" in outside.json()["reason"]
    unknown = server.admin.post(path, json={"revision": revision + 1, "limits": {"max_seqs": 4}})
    assert unknown.status_code == 400
    for huge in ({"revision": 2**64, "limits": {}}, {"revision": revision + 1, "limits": {"max_num_seqs": 10**30}}):
        assert server.admin.post(path, json=huge).status_code == 400
    forwarded = {"X-Forwarded-For": "10.0.0.9"}  # says nothing about who may use a bearer token
    assert server.admin.get(path, headers=forwarded).status_code == 200
    bare = httpx.post(f"http://127.0.0.1:{server.admin_port}{path}", json={})
    assert bare.status_code == 401
    server.admin.post(path, json={"revision": revision + 1, "limits": {"max_num_seqs": 256}})


@pytest.mark.slow
def test_a_replica_starts_with_its_boot_prior(model: Path, tmp_path: Path) -> None:
    prior = {"revision": 7, "limits": {"max_num_seqs": 4, "kv_cache_fraction": 0.5, "max_num_batched_tokens": 64}}
    (tmp_path / "limits.json").write_text(json.dumps(prior))
    with replica(model, f"--boot-prior={tmp_path}/limits.json", "--max-model-len=512", log=tmp_path / "log") as server:
        report = server.admin.get(endpoints.ADMIN_LIMITS_PATH).json()
        assert (report["revision"], report["envelope"]["max_num_seqs"]) == (7, 256)
        assert report["target"] == report["effective"] == report["last_known_good"]
        assert report["target"] == {**prior["limits"], "step_time_target_ms": None}
        evidence = server.admin.get(endpoints.ADMIN_EVIDENCE_PATH).json()
        assert (evidence["revision"], evidence["target"]["max_num_seqs"]) == (7, 4)
        assert server.metric("flyball_limits_revision") == 7


@pytest.mark.slow
def test_a_boot_prior_with_huge_numbers_does_not_stop_a_replica(model: Path, tmp_path: Path) -> None:
    limits = {"max_num_seqs": 10**30, "kv_cache_fraction": 0.5, "max_num_batched_tokens": 64}
    (tmp_path / "limits.json").write_text(json.dumps({"revision": 2**64, "limits": limits}))
    with replica(model, f"--boot-prior={tmp_path}/limits.json", "--max-model-len=512", log=tmp_path / "log") as server:
        assert server.admin.get(endpoints.ADMIN_LIMITS_PATH).json()["revision"] == 0
        assert server.complete().status_code == 200


@pytest.mark.slow
def test_sigterm_drains_even_when_the_engine_gets_it_too(model: Path, tmp_path: Path) -> None:
    with replica(model, log=tmp_path / "log") as server:
        body = {"model": "test", "prompt": [5], "max_tokens": 500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(server.engine_pid(), signal.SIGTERM)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.client.get("/readyz").status_code == 503, "still ready while draining")
            refused = server.complete()
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.process.wait(30) == endpoints.EXIT_OK


@pytest.mark.slow
def test_a_drain_takes_what_load_balancers_that_are_behind_still_send(model: Path, tmp_path: Path) -> None:
    with replica(model, "--drain-quiet=300", "--drain-timeout=600", log=tmp_path / "log") as server:
        assert "connection" not in server.complete().headers
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.client.get("/readyz").status_code == 503, "still ready while draining")
        wait_until(lambda: server.client.get("/livez").headers.get("connection") == "close", "connections stay open")
        assert server.complete().status_code == 200
        server.process.send_signal(signal.SIGTERM)  # enough of that
        assert server.process.wait(60) == endpoints.EXIT_OK


@pytest.mark.slow
def test_a_drain_ends_when_no_request_comes_any_more(model: Path, tmp_path: Path) -> None:
    with replica(model, "--drain-quiet=0.5", log=tmp_path / "log") as server:
        assert server.complete().status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == endpoints.EXIT_OK


@pytest.mark.slow
def test_a_drain_waits_for_slow_readers(model: Path, tmp_path: Path) -> None:
    with replica(model, log=tmp_path / "log") as server, socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", server.port))
        fields = {"model": "test", "prompt": [5], "ignore_eos": True, "stream": True, "max_tokens": 800, "n": 32}
        body = json.dumps(fields | {"stream_options": {"continuous_usage_stats": True}})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        reader.sendall((head + body).encode())
        answer = reader.recv(4096)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "every accepted request was finished" in server.log.read_text(), "no drain")
        time.sleep(SHUTDOWN_GRACE_S + 1)  # the reader sleeps longer than a shutdown without a drain would wait
        while packet := reader.recv(2**16):
            answer += packet
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert server.process.wait(30) == endpoints.EXIT_OK


@pytest.mark.slow
def test_a_drain_that_takes_too_long_says_so_in_the_exit_code(model: Path, tmp_path: Path) -> None:
    with replica(model, "--drain-timeout", "0.2", log=tmp_path / "log") as server:
        body = {"model": "test", "prompt": [5], "max_tokens": 8000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert any('"error"' in line for line in lines)
        assert server.process.wait(30) == endpoints.EXIT_DRAIN_TIMEOUT
        assert "1 unfinished requests get an error" in server.log.read_text()


def test_a_killed_engine_fails_requests_turns_livez_red_and_ends_the_server(model: Path, tmp_path: Path) -> None:
    with replica(model, log=tmp_path / "log") as server:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            pending = pool.submit(server.complete, max_tokens=8000)
            wait_until(lambda: server.kv_blocks_used() > 0, "the request did not start")
            os.kill(server.engine_pid(), signal.SIGKILL)
            response = pending.result()
        assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_dead")
        assert server.client.get("/livez").status_code == 503
        assert server.process.wait(30) == endpoints.EXIT_ENGINE_DIED


@pytest.mark.slow
def test_a_stuck_engine_says_where_and_holds_no_drain_up(model: Path, tmp_path: Path) -> None:
    """SIGSTOP is what a deadlock looks like from outside; the stacks come when it goes on."""
    with replica(model, "--max-heartbeat-age", "1", "--drain-timeout", "600", log=tmp_path / "log") as server:

        def is_live() -> bool:
            return server.client.get("/livez").status_code == 200

        body = {"model": "test", "prompt": [5], "max_tokens": 8000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(server.engine_pid(), signal.SIGSTOP)
            wait_until(lambda: "has made no progress for" in server.log.read_text(), "nobody noticed")
            assert not is_live()
            os.kill(server.engine_pid(), signal.SIGCONT)
            wait_until(lambda: "makes progress again" in server.log.read_text(), "it did not go on")
            assert "most recent call first" in server.log.read_text() and is_live()
            os.kill(server.engine_pid(), signal.SIGSTOP)
            wait_until(lambda: not is_live(), "nobody noticed the second time")
            server.process.send_signal(signal.SIGTERM)
            assert any('"error"' in line for line in lines)
        assert server.process.wait(60) == endpoints.EXIT_ENGINE_DIED
        assert "a stuck engine ended the drain; 1 unfinished requests get an error" in server.log.read_text()


@pytest.mark.slow
def test_a_killed_server_takes_its_engine_along_even_while_it_loads(model: Path, tmp_path: Path) -> None:
    server = Replica(model, log=tmp_path / "log")
    try:
        wait_until(server.has_engine, "no engine was started")
        engine = server.engine_pid()
        server.process.kill()
        wait_until(lambda: gone(engine), "the engine lives on")
    finally:
        server.close()


def gone(pid: int) -> bool:
    """Whether a process has ended, waited for or not."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def serve(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flyball_runtime.cli", "serve", *arguments]
    return subprocess.run(command, env=environment(**env), capture_output=True, text=True, timeout=60)


def corrupt(model: Path, copy: Path, change: Any) -> Path:
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    change(copy)
    return copy


def _truncate(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def _rename_architecture(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["Mamba3ForCausalLM"]}))


@pytest.mark.parametrize(
    ("change", "flags", "says"),
    [
        (lambda path: (path / "config.json").unlink(), [], "config.json"),
        pytest.param(lambda path: (path / "model.safetensors").unlink(), [], "safetensors", marks=pytest.mark.slow),
        pytest.param(_truncate, [], "model.safetensors", marks=pytest.mark.slow),
        pytest.param(_rename_architecture, [], "Mamba3ForCausalLM", marks=pytest.mark.slow),
        (lambda path: (path / "tokenizer.json").unlink(), [], "no tokenizer"),
        pytest.param(lambda path: None, ["--kv-cache-memory-bytes", "100"], "--max-model-len", marks=pytest.mark.slow),
        (lambda path: None, ["--kv-cache-memory-bytes", "2 bananas"], "2 bananas"),
        (lambda path: None, ["--admin-token-file", "/nowhere/token"], "/nowhere/token"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(
    model: Path, tmp_path: Path, change: Any, flags: list[str], says: str
) -> None:
    path = corrupt(model, tmp_path / "copy", change)
    result = serve(str(path), "--port", str(free_port()), *flags)
    assert result.returncode == endpoints.EXIT_CONFIG_ERROR
    last_line = result.stderr.strip().splitlines()[-1]
    assert last_line.startswith("flyball serve: ")
    assert says in last_line
    assert "Traceback" not in result.stderr


def test_a_taken_port_is_told_before_the_model_loads(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = serve(str(model), "--host", "127.0.0.1", "--port", str(port))
    assert result.returncode == endpoints.EXIT_CONFIG_ERROR
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr


@pytest.mark.slow
def test_a_request_that_says_nothing_is_sampled_as_the_checkpoint_asks(model: Path, tmp_path: Path) -> None:
    path = corrupt(model, tmp_path / "copy", lambda path: None)
    (path / "generation_config.json").write_text('{"temperature": 0.0, "typical_p": 0.5}')
    with replica(path, log=tmp_path / "log") as server:
        greedy = server.complete(max_tokens=20).json()["choices"]
        assert server.complete(max_tokens=20, temperature=None, seed=1).json()["choices"] == greedy
        assert server.complete(max_tokens=20, temperature=2, seed=1).json()["choices"] != greedy
    assert "sets typical_p 0.5, which this engine does not support" in server.log.read_text()


def test_logprobs_come_out_of_the_engines_process(server: Replica) -> None:
    choice = server.complete(max_tokens=5, temperature=0, logprobs=2, ignore_eos=True).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == 5
    assert [max(top.values()) for top in logprobs["top_logprobs"]] == logprobs["token_logprobs"]


def test_the_admin_port_is_off_without_a_token_and_no_token_is_logged(server: Replica) -> None:
    assert ADMIN_TOKEN not in server.log.read_text()
    assert b"a-test-token" not in Path(f"/proc/{server.process.pid}/cmdline").read_bytes()


def test_the_log_has_a_first_request_that_is_answered(server: Replica) -> None:
    (line,) = (line for line in server.log.read_text().splitlines() if " try it: curl " in line)
    _, url, _, body = shlex.split(line.partition("try it: ")[2])
    answer = httpx.post(url, content=body, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] >= 1
