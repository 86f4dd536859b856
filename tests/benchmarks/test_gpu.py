"""What benchmarks/gpu.sh runs, as far as a machine without a GPU can show it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def run(*command: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = ENVIRONMENT | variables
    arguments = [str(argument) for argument in command]
    return subprocess.run(
        arguments, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.slow
def test_throughput_of_a_tiny_model(tmp_path: Path) -> None:
    out = tmp_path / "out" / "throughput.json"
    flags = "--shape tiny --num-seqs 6 --min-len 4 --max-len 12 --batch 4 --rounds 2 --num-threads 1"
    paths = ("--checkpoints", tmp_path, "--out", out)
    result = run(sys.executable, "benchmarks/engine_throughput.py", *flags.split(), *paths, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr
    written = json.loads(out.read_text())
    speeds = {name: speed["median"] for name, speed in written["output_tokens_per_s"].items()}
    assert written["flyball_over_transformers"] == speeds["flyball"] / speeds["transformers"]
    assert written["output_tokens_per_s"]["flyball"]["runs"] == 2
    assert 6 * 4 <= written["load"]["num_output_tokens"] <= 6 * 12


@pytest.mark.slow
def test_every_kernel_is_checked_in_the_interpreter(tmp_path: Path) -> None:
    out = tmp_path / "rates.json"
    command = (sys.executable, "benchmarks/gpu_kernels.py", "--out", out)
    result = run(*command, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stderr
    written = json.loads(out.read_text())
    assert written["rates"] is None
    assert all(row["is_right"] and "us" not in row for row in written["kernels"])
    kernels = {row["kernel"] for row in written["kernels"]}
    assert kernels == {
        *("rms_norm", "add_rms_norm", "swiglu", "swiglu, GELU"),
        *("rope_kv_write", "rope_kv_write, int8 KV", "rope_kv_write, fp8 KV"),
        *(f"paged_attention, {kind}" for kind in ("decode", "prefill", "mixed", "decode, int8 KV", "decode, fp8 KV")),
        *(f"paged_attention, {kind}, {name}" for kind in ("decode", "prefill") for name in ("window", "soft cap")),
        "step_layout",
        *(f"linear, {kind}" for kind in ("int8", "w8a16", "int4", "fp8")),
        *(f"experts, linear, {kind}" for kind in ("float32", "int8", "w8a16", "int4", "fp8")),
        *(f"experts, {part}" for part in ("route", "assign", "clamped SwiGLU", "sum")),
        *("sample, filtered", "sample, min_p", "sample, unfiltered", "sample, greedy", "penalties", "token_bitmask"),
        *("cache_blocks, copy", "cache_blocks, gather", "cache_blocks, scatter"),
    }


@pytest.mark.slow
def test_share_of_the_slower_bound() -> None:
    code = """
from gpu_kernels import Case, share_of_bound
rates = {"copy_bytes_per_s": 2e12, "matmul_flops_per_s": 1e15}
decode = Case("decode", "", print, num_bytes=10**8, num_flops=10**9)
prompt = Case("prompt", "", print, num_bytes=10**8, num_flops=4 * 10**11)
print(share_of_bound(decode, 1e-4, rates), share_of_bound(prompt, 1e-3, rates))
"""
    path = os.pathsep.join((str(ROOT / "benchmarks"), *sys.path))
    result = run(sys.executable, "-c", code, CUDA_VISIBLE_DEVICES="", PYTHONPATH=path)
    assert result.stdout.strip() == (
        "{'us': 100.0, 'bound': 'copy', 'share': 0.5} {'us': 1000.0, 'bound': 'matmul', 'share': 0.4}"
    ), result.stderr


@pytest.mark.slow
def test_report_joins_the_parts(tmp_path: Path) -> None:
    cases = [
        '<testcase classname="tests.kernels.test_a" name="test_b[1]"><failure/></testcase>',
        '<testcase classname="c" name="d"/>',
        '<testcase classname="c" name="e"><skipped/></testcase>',
        '<testcase time="0.0"/>',  # interrupted
    ]
    (tmp_path / "kernels.xml").write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    (tmp_path / "kernels.status").write_text("1\n")
    (tmp_path / "tokens.status").write_text("124\n")
    speed = {"median": 2000.0, "min": 1900.0, "max": 2100.0, "runs": 3}
    load = {"num_seqs": 256, "lengths": [100, 1024], "shape": "qwen3-0.6b", "dtype": "bfloat16"}
    throughput = {
        "load": load,
        "transformers": {"batch": 64},
        "output_tokens_per_s": {"flyball": speed, "transformers": speed | {"median": 800.0}},
        "flyball_over_transformers": 2.5,
    }
    (tmp_path / "throughput.json").write_text(json.dumps(throughput))
    rows = [
        {"kernel": "swiglu", "load": "8 tokens", "is_right": True, "largest_error": 1e-3}
        | {"us": 12.34, "is_graph": True, "bound": "copy", "share": 0.876},
        {"kernel": "rope", "load": "8 tokens", "is_right": True, "largest_error": 0.0}
        | {"us": 20.0, "is_graph": False, "bound": "copy", "share": 0.5},
        {"kernel": "add_rms_norm", "load": "8 tokens", "is_right": False, "largest_error": 2.0},
    ]
    rates = {"copy_bytes_per_s": 2.6e12, "matmul_flops_per_s": 7e14}
    measured = {"dtype": "torch.bfloat16", "rates": rates, "kernels": rows}
    (tmp_path / "rates.json").write_text(json.dumps(measured))
    result = run(sys.executable, "benchmarks/gpu_report.py", tmp_path, "--results", tmp_path / "results")
    assert result.returncode == 0, result.stderr
    (path,) = (tmp_path / "results").glob("gpu_*.json")
    written = json.loads(path.read_text())
    assert written["checks"]["kernels"] == {
        "exit_code": 1,
        "passed": 1,
        "failed": ["tests.kernels.test_a::test_b[1]"],
        "skipped": 1,
    }
    assert written["throughput"] == throughput
    assert written["rates"] == measured
    page = path.with_suffix(".md").read_text()
    assert "1 passed, 1 failed, 1 skipped (exit code 1" in page
    assert "fp32: broke off (exit code 124; 124 is out of time)" in page
    assert "A copy of 4 GiB reaches 2.60 TB/s, a matrix product 700 TFLOP/s" in page
    assert "| swiglu | 8 tokens | 1.0e-03 | 12.3 | copy | 88% |" in page
    assert "| rope | 8 tokens | 0.0e+00 | 20.0* | copy | 50% |" in page
    assert "| add_rms_norm | 8 tokens | 2.0e+00 | wrong | | |" in page
    assert "| flyball | 2000 | 1900 | 2100 | 3 |" in page
    assert "Ratio of the medians: 2.50." in page


@pytest.mark.slow
def test_report_says_what_was_not_measured(tmp_path: Path) -> None:
    result = run(sys.executable, "benchmarks/gpu_report.py", tmp_path, "--results", tmp_path / "results")
    assert result.returncode == 0, result.stderr
    assert "Rates of the kernels: not measured on a GPU." in result.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with gpu.sh alone, so that its parts can be played."""
    (tmp_path / "benchmarks").mkdir()
    shutil.copy(ROOT / "benchmarks/gpu.sh", tmp_path / "benchmarks")
    return tmp_path


def play(checkout: Path, *, failing: str) -> tuple[int, str, list[str]]:
    """Run gpu.sh with a Python that fails where its arguments hold ``failing``; return code, errors and all calls."""
    python = checkout / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@" >> "{checkout}/calls"\ncase "$*" in {failing}) echo it broke >&2; exit 3;; esac\n'
    )
    python.chmod(0o755)
    result = run("bash", checkout / "benchmarks/gpu.sh", "--batch", "7", PYTHON=str(python))
    return result.returncode, result.stderr, (checkout / "calls").read_text().splitlines()


def test_a_part_that_fails_leaves_the_others_running(checkout: Path) -> None:
    code, errors, calls = play(checkout, failing="*test_tokens*")
    assert code == 1
    assert "FAILED: tokens" in errors
    words = ("tests/kernels", "gpu_kernels", "test_tokens", "--batch 7", "gpu_report")
    assert all(word in call for word, call in zip(words, calls[2:], strict=True))
    parts = checkout / "out/gpu"
    names = ("kernels", "rates", "tokens", "throughput")
    assert [int((parts / f"{name}.status").read_text()) for name in names] == [0, 0, 3, 0]
    assert "it broke" in (parts / "tokens.log").read_text()


def test_all_parts_pass(checkout: Path) -> None:
    code, errors, _ = play(checkout, failing="nothing")
    assert (code, errors) == (0, "")


def test_nothing_runs_where_the_preflight_fails(checkout: Path) -> None:
    code, _, calls = play(checkout, failing="*preflight*")
    assert code == 3
    assert len(calls) == 2


@pytest.mark.slow
def test_preflight_asks_for_a_gpu() -> None:
    result = run(sys.executable, "benchmarks/gpu_preflight.py", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 1
    assert "finds no CUDA device. Check nvidia-smi" in result.stderr


def test_preflight_names_what_is_missing() -> None:
    script = "import gpu_preflight as preflight; preflight.PACKAGES['no_such'] = 'no-such'; preflight.main()"
    result = run(sys.executable, "-c", script, PYTHONPATH="benchmarks")
    assert result.returncode == 1
    assert "lacks: no-such\n" in result.stderr
    assert "PYTHONPATH=$PWD/site benchmarks/gpu.sh" in result.stderr
