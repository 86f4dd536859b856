"""Joins what the parts of gpu.sh left into results/gpu_DEVICE.json and .md.

    python benchmarks/gpu_report.py PARTS_FOLDER [--results benchmarks/results]

A part is PARTS_FOLDER/kernels.xml and tokens.xml (JUnit), rates.json and throughput.json, each with NAME.status, its exit
code. A file that is missing belongs to a part that broke off.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from common import RESULTS, write
from machine import environment

CHECKS = {
    "kernels": "Triton kernels and GPU paths against their references",
    "tokens": "The engine's greedy tokens against transformers, fp32",
}


def read_check(folder: Path, name: str) -> dict[str, Any]:
    """Exit code, counts and failed tests; the exit code alone when the run did not get to writing its JUnit file."""
    check: dict[str, Any] = {"exit_code": read_status(folder, name)}
    path = folder / f"{name}.xml"
    if not path.exists():
        return check
    # a test that was interrupted has no name
    cases = [case for case in ElementTree.parse(path).getroot().iter("testcase") if case.get("name")]
    broken = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return check | {
        "passed": len(cases) - len(broken) - skipped,
        "failed": [f"{case.get('classname')}::{case.get('name')}" for case in broken],
        "skipped": skipped,
    }


def read_status(folder: Path, name: str) -> int | None:
    path = folder / f"{name}.status"
    return int(path.read_text()) if path.exists() else None


def read_parts(folder: Path) -> dict[str, Any]:
    return {
        "environment": environment(),
        "checks": {name: read_check(folder, name) for name in CHECKS},
        "rates_exit_code": read_status(folder, "rates"),
        "rates": read_result(folder, "rates"),
        "throughput_exit_code": read_status(folder, "throughput"),
        "throughput": read_result(folder, "throughput"),
    }


def read_result(folder: Path, name: str) -> dict[str, Any] | None:
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def markdown(result: dict[str, Any]) -> str:
    where = result["environment"]
    versions = ", ".join(f"{name} {where[name]}" for name in ("python", "torch", "triton", "transformers"))
    lines = [
        f"# GPU check on {where['device']}",
        "",
        f"Commit {where['commit']}, {where['date']}, {versions}. Made by `benchmarks/gpu.sh`.",
        "",
    ]
    lines += [f"- {title}: {_check_line(result['checks'][name])}" for name, title in CHECKS.items()]
    lines += ["", *_rate_lines(result["rates"]), "", *_throughput_lines(result["throughput"])]
    return "\n".join(lines) + "\n"


def _check_line(check: dict[str, Any]) -> str:
    ending = "" if check["exit_code"] == 0 else f" (exit code {check['exit_code']}; 124 is out of time)"
    if "passed" not in check:
        return f"broke off{ending}"
    line = f"{check['passed']} passed, {len(check['failed'])} failed, {check['skipped']} skipped{ending}"
    return "; ".join([line, *check["failed"][:10]])


def _rate_lines(result: dict[str, Any] | None) -> list[str]:
    if result is None or result["rates"] is None:
        return ["Rates of the kernels: not measured on a GPU."]
    copy, matmul = result["rates"]["copy_bytes_per_s"] * 1e-12, result["rates"]["matmul_flops_per_s"] * 1e-12
    lines = [
        f"Kernels in {result['dtype'].removeprefix('torch.')}, with cold caches, from a CUDA graph; where one cannot be made "
        f"(marked *), the time has that of launching them. A copy of 4 GiB reaches {copy:.2f} TB/s, "
        f"a matrix product {matmul:.0f} TFLOP/s; a kernel's bound is the slower of moving its bytes and multiplying its "
        "matrices at these rates. int8 is multiplied faster than bf16.",
        "",
        "| kernel | load | largest error | µs | bound | share of the bound |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["kernels"]:
        timed = (
            f"{row['us']:.1f}{'' if row['is_graph'] else '*'} | {row['bound']} | {row['share']:.0%}"
            if "us" in row
            else "wrong | |"
        )
        lines.append(f"| {row['kernel']} | {row['load']} | {row['largest_error']:.1e} | {timed} |")
    return lines


def _throughput_lines(throughput: dict[str, Any] | None) -> list[str]:
    if throughput is None:
        return ["Throughput was not measured."]
    load, speeds = throughput["load"], throughput["output_tokens_per_s"]
    low, high = load["lengths"]
    lines = [
        f"{load['num_seqs']} sequences, prompts and outputs of {low}-{high} random tokens, {load['shape']} shape with random "
        f"weights, {load['dtype']}; transformers' generate in static batches of {throughput['transformers']['batch']}.",
        "",
        "| | output tokens/s, median | min | max | runs |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {s['median']:.0f} | {s['min']:.0f} | {s['max']:.0f} | {s['runs']} |" for name, s in speeds.items()
    ]
    if "flyball_over_transformers" in throughput:
        lines += ["", f"Ratio of the medians: {throughput['flyball_over_transformers']:.2f}."]
    return lines


def slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    result = read_parts(args.parts)
    path = args.results / f"gpu_{slug(result['environment']['device'])}.json"
    write(path, result)
    path.with_suffix(".md").write_text(markdown(result))
    print(markdown(result))
    print(f"wrote {path} and {path.with_suffix('.md')}")


if __name__ == "__main__":
    main()
