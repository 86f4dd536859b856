"""What ``flyball doctor`` says of a machine."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from flyball_kernels import choose_backend
from flyball_kernels.cpu import library
from flyball_runtime import bounds, cli, doctor
from flyball_runtime.bounds import MIN_RUNS, Bounds, Reached, median_seconds
from flyball_runtime.core.quantization import Quantization
from flyball_runtime.doctor import Report, Speed, bytes_per_weight, count_parameters, in_json, lines, speeds

CHECKPOINT = Path(__file__).parents[2] / "examples" / "demo_model" / "checkpoint"

KINDS = ["bf16", "int8", "w8a16", "int4", "w4a8"]


def speed(weights: str, bytes_per_weight: float, read: float, operations: float) -> Speed:
    """Return figures in G/s beside a copy of 50 GB/s and a product of 200 G operations/s."""
    return Speed(
        weights=weights,
        bytes_per_weight=bytes_per_weight,
        read_bytes_per_s=read * 1e9,
        operations_per_s=operations * 1e9,
        bounds=Reached(copy_bytes_per_s=50e9, product_operations_per_s=200e9, product="float32"),
    )


REPORT = Report(
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
    arithmetic={"bf16": "torch", "int8": "pairs of 16 bits", "attention": "fp32 FMA"},
    reasons=["because"],
    speeds=[speed("bf16", 2.0, 40, 400), speed("int8", 1.0, 25, 800), speed("w4a8", 0.625, 20, 99)],
)


def text_of(**changes: Any) -> str:
    return "\n".join(lines(msgspec.structs.replace(REPORT, **changes), "it", 2e9))


def test_the_report_names_what_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--no-measure", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ops"] == "cpp"
    assert report["instruction_set"]
    assert report["better_instruction_set"] is None  # it was compiled for this CPU
    assert list(report["arithmetic"]) == [*KINDS, "attention"]
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
    assert " by " not in text  # no arithmetic of ops that do not run
    assert "GB/s" not in text


@pytest.mark.parametrize(
    ("bf16", "chosen", "int8", "int4", "expected"),
    [
        ("pairs of 16 bits", "blocks", "pairs of 16 bits", "pairs of bytes", ("pairs of bytes", "fp32 FMA")),
        ("AVX512_VNNI", "blocks", "AVX512_VNNI", "AVX512_VNNI", ("AVX512_VNNI", "fp32 FMA")),
        ("AVX512_BF16", "dot", "AVX512_VNNI", "AVX512_VNNI", ("AVX512_VNNI", "AVX512_BF16")),
        ("AMX", "dot", "AVX512_VNNI, AMX for many rows", "AVX512_VNNI", ("AVX512_VNNI", "AMX")),
        ("fp32 FMA", "fma", "one byte at a time", "fp32 FMA", ("one byte at a time", "fp32 FMA")),
    ],
)
def test_w4a8_and_attention_are_named_for_each_kind_of_cpu(
    bf16: str, chosen: str, int8: str, int4: str, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = SimpleNamespace(
        linear_bf16_arithmetic=lambda: bf16,
        linear_arithmetic=lambda _: chosen,
        linear_int8_arithmetic=lambda: int8,
        linear_grouped_arithmetic=lambda bits: int4 if bits == 4 else "w8a16",
    )
    monkeypatch.setattr(torch.ops, "flyball", ops)
    for linear in ("cpp", "torch"):
        named = doctor._arithmetic(linear)
        assert (named["w4a8"], named["attention"]) == expected
        assert named["bf16"] == (bf16 if linear == "cpp" else "torch")


@pytest.mark.parametrize(("ops", "kinds"), [("cpp", KINDS), ("torch", ["bf16"])])
def test_speeds_are_measured(ops: str, kinds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SECONDS", 0.01)
    backend = replace(choose_backend("cpu", ops), linear=ops)
    found = list(speeds(backend, features=64, working_set_bytes=100_000, bounds=Bounds(copied_bytes=4096, matrix=16)))
    assert [one.weights for one in found] == kinds
    assert all(one.read_bytes_per_s > 0 and one.operations_per_s > 0 for one in found)
    assert all(one.share_of_copy > 0 and one.share_of_product > 0 for one in found)


def test_each_layer_that_is_measured_reads_memory_of_its_own() -> None:
    weight = torch.randn(64, 64, dtype=torch.bfloat16)
    make = doctor._maker("none", weight, choose_backend("cpu", "torch"))
    assert len({layer._weight.data_ptr() for layer in (make(), make())} | {weight.data_ptr()}) == 3


@pytest.mark.parametrize("quantization", ["none", "int8", "w8a16", "int4", "w4a8"])
def test_a_layer_holds_the_bytes_that_are_counted(quantization: Quantization) -> None:
    weight = torch.randn(512, 512, dtype=torch.bfloat16)
    held = doctor._maker(quantization, weight, replace(choose_backend("cpu", "cpp"), linear="cpp"))()._weight
    num_bytes = sum(part.nbytes for part in (held if isinstance(held, (list, tuple)) else [held]))
    # int8 has a scale and a sum for each output feature, and blocks of bf16 have exponents
    assert num_bytes == pytest.approx(weight.numel() * bytes_per_weight(quantization), rel=0.05)


def test_bounds_count_bytes_and_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "median_seconds", lambda run, seconds: (run(), 0.5)[1])
    found = Bounds(copied_bytes=4000, matrix=10).measure()
    assert found.copy_bytes_per_s == 16_000  # read and written, in half a second
    assert found.product_operations_per_s == 4_000
    assert found.product in ("bfloat16", "float32")


def test_a_slow_call_is_not_repeated_for_long() -> None:
    calls: list[None] = []
    assert median_seconds(lambda: calls.append(None), 0) >= 0
    assert len(calls) == MIN_RUNS


def test_the_report_is_rendered() -> None:
    text = text_of()
    assert "2 cores on 2 NUMA nodes, a limit of 1.5 CPUs, 1 threads for the engine" in text
    assert "compiled for x86-64-v3, and this CPU has x86-64-v4; linear layers: torch\n" in text
    assert "            bf16 by torch, int8 by pairs of 16 bits, attention by fp32 FMA\n            because\n" in text
    assert "of 512, beside its matrix product in float32:\n" in text


def test_shares_are_those_of_the_bounds() -> None:
    text = text_of()
    assert (
        "bf16: weights are read at 40.0 GB/s, 80% of the copy's 50.0; 400 G operations/s, 200% of the product's 200"
        in text
    )
    assert (
        "int8: weights are read at 25.0 GB/s, 50% of the copy's 50.0; 800 G operations/s, 400% of the product's 200"
        in text
    )
    figures = in_json(REPORT)["speeds"][2]
    assert figures["weights"] == "w4a8"
    assert (figures["share_of_copy"], figures["share_of_product"]) == (pytest.approx(0.4), pytest.approx(0.495))
    assert figures["bounds"] == {"copy_bytes_per_s": 50e9, "product_operations_per_s": 200e9, "product": "float32"}


def test_tokens_are_those_of_the_model() -> None:
    text = text_of()
    assert "bf16: 10 tokens/s for one stream (12.5), 100 prompt tokens/s (50)" in text
    assert "int8: 12.5 tokens/s for one stream (25), 200 prompt tokens/s (50)" in text
    assert "w4a8: 16 tokens/s for one stream (40), 24.8 prompt tokens/s (50)" in text


def test_a_low_share_comes_with_what_to_do() -> None:
    low = "Less than 50% is reached by w4a8 with 1 token, w4a8 with 512 tokens. "
    assert f"{low}Have FLYBALL_CPU_LIBRARY name C++ ops for x86-64-v4, or unset it.\n" in text_of()
    assert f"{low}Run this again" in text_of(better_instruction_set=None)
    assert f"{low}The C++ ops, which are faster, do not run here" in text_of(
        instruction_set=None, better_instruction_set=None
    )
    assert "Less than" not in text_of(speeds=REPORT.speeds[:2])  # half of a bound is not less than it


def test_parameters_are_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from safetensors import safe_open

    with safe_open(CHECKPOINT / "model.safetensors", framework="pt") as tensors:
        assert count_parameters(CHECKPOINT) == sum(tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118
    assert cli.main(["doctor", "--no-measure", "--model", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err
