"""What ``flyball doctor`` says of a machine."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flyball_kernels import choose_backend
from flyball_kernels.cpu import library
from flyball_runtime import cli, doctor
from flyball_runtime.doctor import Report, Speed, count_parameters, lines, speeds

CHECKPOINT = Path(__file__).parents[2] / "examples" / "demo_model" / "checkpoint"


def test_the_report_names_what_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--no-measure", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ops"] == "cpp"
    assert report["instruction_set"]
    assert report["better_instruction_set"] is None  # it was compiled for this CPU
    assert set(report["arithmetic"]) == {"bf16", "int8", "w8a16", "int4"}
    assert report["num_cores"] >= report["num_threads"] >= 1
    assert report["available_bytes"] > 0
    assert report["speeds"] == []


def test_without_a_compiler_it_says_why_the_ops_are_slow(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("No C++ compiler: 'g++' is not on PATH.")

    monkeypatch.setattr(library, "load", fail)
    assert cli.main(["doctor", "--no-measure"]) == 0
    text = capsys.readouterr().out
    assert "CPU ops     torch; linear layers: torch" in text
    assert "No C++ compiler" in text


@pytest.mark.parametrize(("ops", "kinds"), [("cpp", ["bf16", "int8"]), ("torch", ["bf16"])])
def test_speeds_are_measured(ops: str, kinds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SECONDS", 0.01)
    backend = replace(choose_backend("cpu", ops), linear=ops)
    found = list(speeds(backend, features=64, working_set_bytes=100_000))
    assert [one.weights for one in found] == kinds
    assert all(one.read_bytes_per_s > 0 and one.operations_per_s > 0 for one in found)


def test_bounds_are_those_of_the_model() -> None:
    report = Report(
        version="1",
        cpu="a CPU",
        num_cores=2,
        num_numa_nodes=2,
        cpu_limit=1.5,
        num_threads=1,
        flags=[],
        available_bytes=2**30,
        gpus=[],
        ops="cpp",
        instruction_set="x86-64-v3",
        better_instruction_set="x86-64-v4",
        linear="torch",
        arithmetic={"bf16": "torch", "int8": "pairs of 16 bits"},
        reasons=["because"],
        speeds=[
            Speed(weights="bf16", read_bytes_per_s=40e9, operations_per_s=400e9),
            Speed(weights="int8", read_bytes_per_s=40e9, operations_per_s=800e9),
        ],
    )
    text = "\n".join(lines(report, "it", 2e9))
    assert "2 cores on 2 NUMA nodes, a limit of 1.5 CPUs, 1 threads for the engine" in text
    assert "compiled for x86-64-v3, and this CPU has x86-64-v4; linear layers: torch\n" in text
    assert "            bf16 weights by torch, int8 weights by pairs of 16 bits\n            because\n" in text
    assert "bf16: 10 tokens/s for one stream, 100 prompt tokens/s" in text
    assert "int8: 20 tokens/s for one stream, 200 prompt tokens/s" in text


def test_parameters_are_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from safetensors import safe_open

    with safe_open(CHECKPOINT / "model.safetensors", framework="pt") as tensors:
        assert count_parameters(CHECKPOINT) == sum(tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118
    assert cli.main(["doctor", "--no-measure", "--model", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err
