"""lm-eval: log likelihoods by `local-completions` equal those of its `hf` backend (transformers) on the same checkpoint."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "examples" / "demo_model" / "checkpoint"
NUM_TEXTS, NUM_WORDS, NUM_CHOICES, MAX_LENGTH = 25, 45, 4, 256
TASKS: dict[str, dict[str, Any]] = {
    "next_words": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{begun}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "whole_texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
}


def write_tasks() -> None:
    """Write both tasks, and texts of a page: how one goes on has to be told from how others do."""
    words = (ROOT / "docs" / "decisions.md").read_text().split()
    texts = [words[at : at + NUM_WORDS] for at in range(0, NUM_TEXTS * NUM_WORDS, NUM_WORDS)]
    rng = random.Random(0)
    with Path("texts.jsonl").open("w") as lines:
        for text in texts:
            wrong = rng.sample([other for other in texts if other is not text], NUM_CHOICES - 1)
            ends = [" " + " ".join(one[20:25]) for one in (text, *wrong)]
            choices = rng.sample(ends, NUM_CHOICES)
            doc = {"text": " ".join(text), "begun": " ".join(text[:20]), "choices": choices}
            lines.write(json.dumps(doc | {"answer": choices.index(ends[0])}) + "\n")
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(Path("texts.jsonl").resolve())}}}
    for name, task in TASKS.items():  # JSON is YAML
        Path(f"{name}.yaml").write_text(json.dumps({"task": name, "test_split": "test", **data, **task}))


def evaluate(backend: str, /, **model_args: object) -> dict[str, list[list[Any]]]:
    """Return what came back for each sample, by task."""
    command = [Path(sys.executable).with_name("lm-eval"), "run", "--model", backend, "--tasks", *TASKS]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in model_args.items())]
    command += ["--include_path", ".", "--log_samples", "--output_path", backend, "--device", "cpu"]
    variables = os.environ | {"OPENAI_API_KEY": os.environ["API_KEY"], "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, env=variables)
    samples = {}
    for name in TASKS:
        (file,) = Path(backend).rglob(f"samples_{name}_*.jsonl")
        rows = sorted(map(json.loads, file.read_text().splitlines()), key=lambda row: row["doc_id"])
        samples[name] = [answer for row in rows for answer in row["filtered_resps"]]
    return samples


def check(name: str, ours: list[Any], theirs: list[Any], tolerance: float) -> None:
    assert len(ours) == len(theirs) >= NUM_TEXTS
    largest = max(abs(float(one) - float(other)) for one, other in zip(ours, theirs, strict=True))
    print(
        f"{name}: {len(ours)} log likelihoods, from {min(map(float, theirs)):.1f}; they differ by at most {largest:.1e}"
    )
    assert largest <= tolerance


write_tasks()
url = os.environ["BASE_URL"] + "/completions"
served = evaluate(
    "local-completions", model="test", base_url=url, tokenizer=CHECKPOINT, num_concurrent=4, max_length=MAX_LENGTH
)
local = evaluate("hf", pretrained=CHECKPOINT, dtype="float32", max_length=MAX_LENGTH)
answers = [(float(logprob), is_greedy) for logprob, is_greedy in served["next_words"]]
expected = [(float(logprob), is_greedy) for logprob, is_greedy in local["next_words"]]
check("answers", [one for one, _ in answers], [one for one, _ in expected], 1e-4)
assert [is_greedy for _, is_greedy in answers] == [is_greedy for _, is_greedy in expected]
check("whole texts", served["whole_texts"], local["whole_texts"], 1e-3)
