"""guidellm: a load of streamed chats and responses with outputs of a fixed length; every request counts and has its times."""

import json
import os
import subprocess
import sys
from pathlib import Path

TOKENIZER = Path(__file__).parents[2] / "examples" / "demo_model" / "checkpoint"
NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 24, 64, 16


def measure(request_format: str) -> None:
    backend = {
        "kind": "openai_http",
        "target": os.environ["BASE_URL"],
        "api_key": os.environ["API_KEY"],
        "request_format": request_format,
    }
    report = Path(f"{request_format.replace('/', '_')}.json")
    command = [Path(sys.executable).with_name("guidellm"), "run", "--disable-console", "--backend", json.dumps(backend)]
    command += ["--tokenizer", f"kind=hf_auto,model={TOKENIZER}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"]
    command += ["--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    command += ["--output", f"kind=json,path={report}"]
    subprocess.run(command, check=True)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert not requests["errored"] and not requests["incomplete"], requests
    assert len(requests["successful"]) == NUM_REQUESTS
    for request in requests["successful"]:
        assert request["output_tokens"] == OUTPUT_TOKENS and request["prompt_tokens"] >= PROMPT_TOKENS, request
        assert 0 < request["time_to_first_token_ms"] <= request["request_latency"] * 1000, request
        assert request["inter_token_latency_ms"] is not None, request


for request_format in ("/v1/chat/completions", "/v1/responses"):
    measure(request_format)
