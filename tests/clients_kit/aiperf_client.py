"""aiperf: a load of streamed chats and completions with outputs of a fixed length, and what it reads at /metrics."""

import json
import os
import subprocess
import sys
from pathlib import Path

TOKENIZER = Path(__file__).parents[2] / "examples" / "demo_model" / "checkpoint"
NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 24, 64, 16


def measure(endpoint_type: str) -> None:
    command = [Path(sys.executable).with_name("aiperf"), "profile", "--model", "test", "--endpoint-type", endpoint_type]
    command += ["--url", os.environ["BASE_URL"].removesuffix("/v1"), "--api-key", os.environ["API_KEY"], "--streaming"]
    command += ["--tokenizer", TOKENIZER, "--use-server-token-count", "--random-seed", "1"]
    command += ["--isl", str(PROMPT_TOKENS), "--osl", str(OUTPUT_TOKENS), "--extra-inputs", "ignore_eos:true"]
    command += ["--request-count", str(NUM_REQUESTS), "--concurrency", "4", "--workers-max", "2"]
    command += ["--artifact-dir", endpoint_type, "--ui", "none", "--no-gpu-telemetry"]
    subprocess.run(command, check=True)
    figures = json.loads((Path(endpoint_type) / "profile_export_aiperf.json").read_text())
    assert figures["request_count"]["avg"] == NUM_REQUESTS and not figures["error_summary"], figures
    assert figures["is_complete"] and not figures["was_cancelled"], figures
    output, prompt = figures["output_sequence_length"], figures["input_sequence_length"]
    assert output["min"] == output["max"] == OUTPUT_TOKENS and prompt["min"] >= PROMPT_TOKENS, (output, prompt)
    assert 0 < figures["time_to_first_token"]["min"] <= figures["request_latency"]["max"], figures
    assert ended(Path(endpoint_type) / "server_metrics_export.json") == {"length": NUM_REQUESTS}


def ended(export: Path) -> dict[str, int]:
    """Requests that ended during the run, by outcome, as the server counted them."""
    series = json.loads(export.read_text())["metrics"]["flyball_requests"]["series"]
    return {row["labels"]["outcome"]: int(row["stats"]["total"]) for row in series if row["stats"]["total"]}


for endpoint_type in ("chat", "completions"):
    measure(endpoint_type)
