"""``flyball simulate``: what it writes, and what it says of bad input."""

import json
from pathlib import Path

import pytest

from flyball_cli import main
from flyball_protocol import endpoints
from flyball_simulation.oracle import grid

MANIFEST = """
apiVersion: flyball.dev/v1alpha1
kind: LLMDeployment
metadata: {name: x}
spec:
  model: {uri: "hf://a/b"}
  runtime: {dtype: bfloat16, maxNumSeqs: 64, maxNumBatchedTokens: 512}
  tuning:
    mode: Auto
    objectives: {ttftP95Milliseconds: 2000, interTokenLatencyP95Milliseconds: 50}
"""

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02d}.0000000,{100 + second},{5 + second % 7}\n" for second in range(40)
)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "m.yaml").write_text(MANIFEST)
    (tmp_path / "t.csv").write_text(TRACE)
    return tmp_path


def run(files: Path, *words: str, trace: bool = True) -> int:
    base = ["simulate", "--manifest", str(files / "m.yaml"), "--plant", "a100", "--output", str(files / "out.json")]
    return main([*base, *(["--trace", str(files / "t.csv")] if trace else []), *words])


def without_speed(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if "steps_per_s" not in line]


@pytest.mark.parametrize("controller", ["auto", "static", "vllm-default", "aimd", "rules"])
def test_a_trace_gives_a_result(files: Path, controller: str) -> None:
    assert run(files, "--controller", controller, "--trace-speed", "2") == endpoints.EXIT_OK
    out = json.loads((files / "out.json").read_bytes())
    assert out["controller"] == controller
    assert out["num_requests"] == 40
    assert 0 <= out["share_good"] <= 1
    assert {"goodput_per_s", "ttft_p95_s", "itl_p95_s", "num_changes", "final_limits", "steps_per_s"} <= out.keys()
    expected = {"vllm-default": (256, 2048)}.get(controller, (64, 512))
    if controller in ("static", "vllm-default"):
        limits = out["final_limits"]["replica-0"]
        assert (limits["max_num_seqs"], limits["max_num_batched_tokens"]) == expected


def test_static_takes_limits(files: Path) -> None:
    words = ("--controller", "static", "--limits", "max_num_seqs=8, max_num_batched_tokens=128", "--replicas", "2")
    assert run(files, *words, "--kv-tokens", "40000", "--minutes", "0.5") == endpoints.EXIT_OK
    out = json.loads((files / "out.json").read_bytes())
    assert out["final_limits"]["replica-1"]["max_num_batched_tokens"] == 128
    assert (out["num_requests"], out["duration_s"], out["kv_tokens"]) == (30, 30.0, 40000)


def test_the_same_seed_gives_the_same_file_but_for_the_speed(files: Path) -> None:
    words = ("--workload", "chat", "--request-rate", "4", "--minutes", "0.5", "--noise", "0.25", "--seed", "7")
    assert run(files, *words, trace=False) == endpoints.EXIT_OK
    first = without_speed(files / "out.json")
    assert run(files, *words, trace=False) == endpoints.EXIT_OK
    assert without_speed(files / "out.json") == first
    assert run(files, *words[:-1], "8", trace=False) == endpoints.EXIT_OK
    assert without_speed(files / "out.json") != first


def test_a_chart_is_drawn(files: Path) -> None:
    assert run(files, "--chart", str(files / "run.svg")) == endpoints.EXIT_OK
    assert "<svg" in (files / "run.svg").read_text()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--minutes", "0"], "--minutes is 0; it must be above 0"),
        (["--minutes", "nan"], "--minutes is nan"),
        (["--trace-speed", "-1"], "--trace-speed is -1; it must be above 0"),
        (["--trace-limit", "0"], "--trace-limit is 0; it must be at least 1"),
        (["--replicas", "0"], "--replicas is 0; it must be at least 1 and at most 256"),
        (["--kv-tokens", "0"], "--kv-tokens is 0"),
        (["--seed", "-1"], "--seed is -1"),
        (["--noise", "1.5"], "--noise is 1.5; it must be at least 0 and at most 1"),
        (["--slow-down", "2:5"], "write FACTOR:FROM:TO"),
        (["--slow-down", "2:5:1"], "FROM from 0 to below TO"),
        (["--limits", "max_num_seqs=8"], "only --controller static takes limits"),
        (["--controller", "static", "--limits", "seqs=8"], "the limits are max_num_seqs and max_num_batched_tokens"),
        (["--controller", "static", "--limits", "max_num_seqs=x"], "must be a whole number"),
        (["--controller", "static", "--limits", "max_num_seqs=8,max_num_seqs=9"], "max_num_seqs twice"),
        (["--controller", "static", "--limits", "max_num_seqs=0"], "--max-num-seqs is 0; it must be from 1 to 4096"),
        (["--controller", "static", "--limits", "max_num_batched_tokens=8"], "below --max-num-seqs 64"),
        (["--workload", "chat", "--request-rate", "1"], "both of --trace and --workload"),
        (["--request-rate", "1"], "--workload and --request-rate go together"),
        (["--chart", "run.pdf"], "must end in .png or .svg"),
        (["--output", "/no/such/folder/out.json"], "there is no folder"),
    ],
)
def test_bad_flags_are_named(files: Path, words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(files, *words) == endpoints.EXIT_CONFIG_ERROR
    assert problem in capsys.readouterr().err
    assert not (files / "out.json").exists()


def test_a_trace_that_bench_refuses_is_refused(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:00,0,5\n")
    assert run(files) == endpoints.EXIT_CONFIG_ERROR
    assert "t.csv:2: 0 input and 5 output tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "    objectives: {ttftP95Milliseconds: 2000, interTokenLatencyP95Milliseconds: 50}",
            "",
            "objectives is empty",
        ),
        (MANIFEST[MANIFEST.index("  tuning") :], "", "the LLMDeployment x has no objectives"),
        ("dtype: bfloat16", "dtype: bf16", "spec.runtime.dtype"),
        ("maxNumSeqs: 64", "maxModelLen: 500000", "one sequence of --max-model-len 500000 needs 31250 blocks"),
    ],
)
def test_a_manifest_that_cannot_be_simulated_is_refused(
    files: Path, old: str, new: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in MANIFEST
    (files / "m.yaml").write_text(MANIFEST.replace(old, new))
    assert run(files) == endpoints.EXIT_CONFIG_ERROR
    assert problem in capsys.readouterr().err


def test_a_file_of_two_deployments_is_refused(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "m.yaml").write_text(MANIFEST + "---" + MANIFEST.replace("name: x", "name: y"))
    assert run(files) == endpoints.EXIT_CONFIG_ERROR
    assert "has 2 LLMDeployments" in capsys.readouterr().err


def test_a_workload_asks_for_its_rate(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(files, "--workload", "chat", trace=False) == endpoints.EXIT_CONFIG_ERROR
    assert "give both" in capsys.readouterr().err
    assert run(files, trace=False) == endpoints.EXIT_CONFIG_ERROR
    assert "neither of --trace and --workload" in capsys.readouterr().err


@pytest.mark.slow
def test_an_oracle_with_a_chart_says_what_is_feasible(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--controller", "oracle", "--trace-limit", "12", "--replicas", "2", "--chart", str(files / "f.svg"))
    assert run(files, *words) == endpoints.EXIT_OK
    out = json.loads((files / "out.json").read_bytes())
    assert out["controller"] == "oracle"
    assert len(out["sweep"]) == len(grid())
    assert [(one["replicas"], one["is_feasible"]) for one in out["feasible"]] == [(1, True), (2, True)]
    assert "2 replicas: feasible" in capsys.readouterr().err
    assert "<svg" in (files / "f.svg").read_text()
