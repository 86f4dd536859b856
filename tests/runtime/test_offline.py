"""`flyball batch --model`: the engine of a batch, and the API in front of it without sockets."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from checkpoints import make_checkpoint
from flyball_clients import cli as clients_cli
from flyball_runtime import cli as runtime_cli
from flyball_runtime.llm import LLM, SamplingParams

SETTINGS = ["--dtype", "float32", "--kv-cache-memory-bytes", "64MiB", "--num-threads", "1", "--max-num-seqs", "4"]
PROMPTS = [f"A flyball governor {number}" for number in range(12)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama3", max_position_embeddings=8192)


def url_of(body: dict[str, Any]) -> str:
    urls = {
        "prompt": "/v1/completions",
        "messages": "/v1/chat/completions",
        "encoding_format": "/v1/embeddings",
        "input": "/v1/responses",
        "text_1": "/v1/score",
    }
    return next(url for field, url in urls.items() if field in body)


def write(path: Path, requests: dict[str, dict[str, Any]]) -> Path:
    lines = [
        {"custom_id": name, "method": "POST", "url": url_of(body), "body": body} for name, body in requests.items()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.slow
def test_a_batch_with_its_own_engine_answers_like_the_library(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    greedy = {"model": "tiny", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    requests: dict[str, dict[str, Any]] = {prompt: {"prompt": prompt} | greedy for prompt in PROMPTS}
    requests["chat"] = {"messages": [{"role": "user", "content": "Hello. " * 700}]} | greedy
    requests["fork"] = {"prompt": PROMPTS[0], "n": 3} | greedy
    requests["response"] = {"model": "tiny", "input": "Hello.", "max_output_tokens": 6, "temperature": 0}
    requests["embed"] = {"model": "tiny", "input": [[5, 6, 7], [8] * 100], "encoding_format": "float"}
    requests["score"] = {"model": "tiny", "text_1": "Hello.", "text_2": ["Hello.", "steam"]}
    requests["bad"] = {"prompt": "x", "temperature": -1}
    files = [str(write(tmp_path / "in.jsonl", requests)), str(tmp_path / "out.jsonl")]
    command = ["batch", *files, "--model", str(model), "--served-model-name", "tiny", *SETTINGS]
    assert clients_cli.main(command) == 1
    assert "18 of 18 requests done, 1 failed" in capfd.readouterr().out
    rows = {row["custom_id"]: row for row in map(json.loads, Path(files[1]).read_text().splitlines())}
    assert rows.keys() == requests.keys()
    assert rows["bad"]["error"]["code"] == "http_400"
    assert rows["chat"]["response"]["body"]["usage"]["completion_tokens"] == 6
    assert rows["response"]["response"]["body"]["usage"]["output_tokens"] <= 6
    check_embeddings(model, rows["embed"]["response"]["body"])
    same, other = (one["score"] for one in rows["score"]["response"]["body"]["data"])
    assert same == pytest.approx(1.0) and other < 0.999
    library = LLM(model, dtype="float32", kv_cache_memory_bytes=2**26, num_threads=1)
    expected = library.generate(PROMPTS, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    for prompt, output in zip(PROMPTS, expected, strict=True):
        assert rows[prompt]["response"]["body"]["choices"][0]["text"] == output.text
    forks = rows["fork"]["response"]["body"]["choices"]
    assert [choice["text"] for choice in forks] == [expected[0].text] * 3


@torch.inference_mode()
def check_embeddings(model: Path, answer: dict[str, Any]) -> None:
    reference = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    assert answer["usage"]["prompt_tokens"] == 103
    for prompt, one in zip(([5, 6, 7], [8] * 100), answer["data"], strict=True):
        expected = reference(torch.tensor([prompt])).last_hidden_state[0, -1]
        assert one["embedding"] == pytest.approx((expected / expected.norm()).tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs is 0; it must be from 1 to 4096"),
        (["--port", "8000"], "flyball batch --model: error: unrecognized arguments: --port 8000"),
        (["--concurrency", "-1"], "--concurrency is -1"),
    ],
)
def test_a_wrong_flag_of_the_engine(
    flags: list[str], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(write(tmp_path / "in.jsonl", {"a": {"prompt": "x"}})), str(tmp_path / "out.jsonl")]
    try:
        code = clients_cli.main(["batch", *files, "--model", str(model), *flags])
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == 2
    assert message in capsys.readouterr().err


def test_a_checkpoint_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(write(tmp_path / "in.jsonl", {"a": {"prompt": "x"}})), str(tmp_path / "out.jsonl")]
    assert clients_cli.main(["batch", *files, "--model", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err


def test_the_engine_of_a_batch_orders_its_requests_for_throughput() -> None:
    parse = runtime_cli._offline_parser().parse_args
    assert parse(["m", *runtime_cli._OFFLINE_DEFAULTS]).scheduling_policy == "dpr"
    assert parse(["m", *runtime_cli._OFFLINE_DEFAULTS, "--scheduling-policy", "fcfs"]).scheduling_policy == "fcfs"
