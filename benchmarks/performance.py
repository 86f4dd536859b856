"""Writes the charts and tables of docs/performance.md from results/*.json. What has not been measured is said to be so.

python benchmarks/performance.py
"""

import argparse
import importlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common import RESULTS
from machine import ROOT

DOCS = ROOT / "docs"
PAGE = DOCS / "performance.md"
NOT_MEASURED = "Not measured."
CLIENTS = ("1", "8", "32")
FIGURES = {
    "output_tokens_per_s": "tokens a second",
    "ttft_p50_ms": "TTFT p50, ms",
    "itl_p50_ms": "ITL p50, ms",
    "itl_p95_ms": "ITL p95, ms",
}
LAYERS = {"out": "768 -> 768", "gate_up": "768 -> 4096", "down": "2048 -> 768", "head": "768 -> 8192"}
BITS = {
    "bfloat16": "16 bits",
    "int8": "8 bits",
    "w8a16": "8 bits, inputs in 16",
    "int4": "4 bits",
    "w4a8": "4 bits, inputs in 8",
}
LOADS = {
    "64_decodes": "64 decodes",
    "256_decodes": "256 decodes",
    "prefill_16_x_128": "prompts of 128",
    "prefill_16_x_1024": "prompts of 1,024",
}
NAMED = {"linear": "linear layers", "paged_attention": "attention", "outside any op": "outside ops"}
OTHERS = "other ops"
PARTS = (*NAMED.values(), OTHERS)
"""The parts of a step's time. NAMED maps what the names of a part's ops contain to the part; OTHERS is the rest."""
COLORS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#999999")  # Okabe and Ito

Result = dict[str, Any]


def read(name: str) -> Result | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


# tables


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def where(result: Result) -> str:
    """Return the machine and the commit of a result, as they stand under a table."""
    environment = result["environment"]
    cores, commit, date = (environment[name] for name in ("cores", "commit", "date"))
    return f"{environment['device']}, {cores} cores, {environment['instruction_sets']}; commit {commit}, {date}."


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def listed(items: Iterable[str]) -> str:
    *others, last = items
    return f"{', '.join(others)} and {last}" if others else last


def beside(figures: Result, other: str) -> list[str]:
    """Return the medians of both sides and the ratio that is above 1 where Flyball is better."""
    return [
        number(figures["flyball"]["median"]),
        number(figures[other]["median"]),
        f"{figures[f'flyball_over_{other}']:.2f}x",
    ]


def clients_rows(by_concurrency: Result, other: str, *first: str) -> Iterator[list[str]]:
    for clients in CLIENTS:
        cells = [beside(by_concurrency[clients][figure], other) for figure in FIGURES]
        yield [*first, clients, *(" / ".join(column) for column in zip(*cells, strict=True))]


def online_rows(result: Result, other: str) -> Iterator[list[str]]:
    for clients, *cells in clients_rows(result["online_128_in_64_out"]["by_concurrency"], other):
        yield [f"online, {clients} {'client' if clients == '1' else 'clients'}", *cells]


def vllm_table(name: str = "versus_vllm") -> str:
    result = read(name)
    if result is None:
        return NOT_MEASURED
    offline = result.get("offline_output_tokens_per_s", {})
    rows = [[f"offline, {load.replace('x', ' x ')}", *beside(figures, "vllm")] for load, figures in offline.items()]
    rows += online_rows(result, "vllm")
    under = [f"vLLM {result['vllm']['vllm']}. {where(result)}", *bounds_lines(result)]
    return "\n\n".join([markdown(("Load", "Flyball", "vLLM", ""), rows), *under])


def arrivals_table(name: str) -> str:
    """Return what clients see that do not wait for each other."""
    result = read(name)
    if result is None:
        return NOT_MEASURED
    rows = []
    for rate, figures in result["arrivals_128_in"]["by_rate"].items():
        for figure in ("ttft", "itl"):
            cells = [beside(figures[key], "vllm") for key in figures if key.startswith(figure)]
            rows.append([rate, figure.upper(), *(" / ".join(column) for column in zip(*cells, strict=True))])
    header = ("Requests a second", "ms", "Flyball", "vLLM", "")
    return markdown(header, rows) + f"\n\nvLLM {result['vllm']['vllm']}. {where(result)}"


def bounds_lines(result: Result) -> list[str]:
    """Return what the machine reached in a run beside vLLM, and Flyball's shares of that; nothing of runs without."""
    if "bounds" not in result:
        return []
    product = result["bounds"]["matmul_gflop_per_s"]["median"]
    layers, head = (result["num_weights"][name] for name in ("of_layers", "of_head"))
    lines = [torch_reached(result), one_stream(result, result["online_128_in_64_out"]["by_concurrency"])]
    rates = {}
    for load, figures in result.get("offline_output_tokens_per_s", {}).items():
        _, num_input, num_output = map(int, load.split("x"))
        operations = 2 * (layers * (num_input + num_output - 1) / num_output + head)
        rates[load.replace("x", " x ")] = operations * figures["flyball"]["median"] * 1e-9
    if rates:
        shares = [f"{rate / product:.0%}" for rate in rates.values()]
        lines.append(
            f"Over the whole time of {listed(rates)}, linear layers multiply at {listed(map(number, rates.values()))} GFLOP/s "
            f"({listed(shares)} of the product), counted as if each computed all tokens."
        )
    return [" ".join(lines)]


def torch_reached(result: Result) -> str:
    copy, product = (number(result["bounds"][name]["median"]) for name in ("copy_gb_per_s", "matmul_gflop_per_s"))
    return f"In this run torch copied {copy} GB/s and multiplied {result['bounds']['product']} at {product} GFLOP/s."


def one_stream(result: Result, by_concurrency: Result) -> str:
    """Return how fast Flyball reads the weights, of 16 bits, for each token of one client."""
    itl_ms = by_concurrency["1"]["itl_p50_ms"]["flyball"]["median"]
    gb_per_s = 2 * sum(result["num_weights"].values()) / itl_ms * 1e-6
    share = gb_per_s / result["bounds"]["copy_gb_per_s"]["median"]
    return f"One stream reads weights at {number(gb_per_s)} GB/s ({share:.0%} of the copy)."


def step_tokens_table() -> str:
    result = read("step_tokens")
    if result is None:
        return NOT_MEASURED
    figures = ("output_tokens_per_s", "ttft_p50_ms", "itl_p50_ms", "itl_p95_ms", "itl_p99_ms")
    rows = [
        [clients, f"{int(budget):,}", *(number(one[figure]["median"]) for figure in figures)]
        for clients, by_budget in result["by_concurrency"].items()
        for budget, one in by_budget.items()
    ]
    header = (
        "Clients",
        "Tokens a step",
        "Tokens a second",
        "TTFT p50, ms",
        "ITL p50, ms",
        "ITL p95, ms",
        "ITL p99, ms",
    )
    return markdown(header, rows) + f"\n\n{where(result)}"


def quantization_table(name: str) -> str:
    """Each kind of weights: tokens a second by sequences, and how fast one sequence reads its weights."""
    result = read(name)
    if result is None:
        return NOT_MEASURED
    by_load, copy = result["output_tokens_per_s"], result["bounds"]["copy_gb_per_s"]["median"]
    rows = []
    for kind, weight_bytes in result["weight_bytes_of_a_token"].items():
        rates = [of_load[kind]["median"] for of_load in by_load.values()]
        ratios = [rate / of_load["none"]["median"] for rate, of_load in zip(rates, by_load.values(), strict=True)]
        gb_per_s = weight_bytes * rates[0] * 1e-9
        cells = [f"{number(rate)} ({ratio:.2f}x)" for rate, ratio in zip(rates, ratios, strict=True)]
        rows.append(
            [BITS["bfloat16" if kind == "none" else kind], *cells, f"{number(gb_per_s)} GB/s, {gb_per_s / copy:.0%}"]
        )
    header = ("Weights", *(load.replace("x", " x ") for load in by_load), "one sequence reads weights")
    return "\n\n".join([markdown(header, rows), where(result), torch_reached(result)])


def perplexity_table() -> str:
    """Each way to quantize, and below it transformers' layers that do the same."""
    result = read("perplexity")
    if result is None:
        return NOT_MEASURED
    rows = []
    for name, ours in result["flyball"].items():
        computed = {"Flyball": ours}
        for other, figures in result["transformers"].items():
            way, _, layers = other.partition(": ")
            if way == name:
                computed[layers or "transformers"] = figures
        rows += [[name, by, f"{one['perplexity']:.4f}", f"{one['moved_nats']:.4f}"] for by, one in computed.items()]
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    header = ("Linear layers", "Computed by", "Perplexity", "Log probability moves, nats")
    return markdown(header, rows) + f"\n\n{result['tokens']:,} tokens. {versions}. {where(result)}"


def api_process_table() -> str:
    result = read("api_process")
    if result is None:
        return NOT_MEASURED
    intervals = result["by_stream_interval"]
    rows = [
        [
            clients,
            *(
                number(of_interval[clients][figure]["median"])
                for of_interval in intervals.values()
                for figure in ("us_per_token", "tokens_per_core_s")
            ),
        ]
        for clients in next(iter(intervals.values()))
    ]
    header = ["Clients"]
    for interval in intervals:
        header += [f"us a token, {interval} sent at once", "tokens a second of a core"]
    return markdown(header, rows) + f"\n\n{where(result)}"


def llamacpp_table(name: str) -> str:
    result = read(name)
    if result is None:
        return NOT_MEASURED
    pairs = result["pairs"].items()
    rows = [row for bits, pair in pairs for row in clients_rows(pair["by_concurrency"], "llamacpp", bits)]
    under = f"llama.cpp {result['llamacpp'].removeprefix('version: ')}. {where(result)}"
    lines = bounds_of_16_bits(result)
    return "\n\n".join([markdown(("Bits", "Clients", "Flyball", "llama.cpp", ""), rows), under, *lines])


def bounds_of_16_bits(result: Result) -> list[str]:
    """Return what the machine reached in a run beside llama.cpp, and one stream's share; nothing of runs without."""
    if "bounds" not in result or "16 bits" not in result["pairs"]:
        return []
    stream = one_stream(result, result["pairs"]["16 bits"]["by_concurrency"])
    return [f"{torch_reached(result)} In 16 bits: {stream[0].lower()}{stream[1:]}"]


def checkout_table(name: str) -> str:
    """Return what this code reaches beside an older commit's."""
    result = read(name)
    if result is None:
        return NOT_MEASURED
    rows = []
    for load, figures in result["offline_output_tokens_per_s"].items():
        sides = [number(figures[side]["median"]) for side in ("now", "before")]
        rows.append([f"offline, {load.replace('x', ' x ')}", *sides, f"{figures['now_over_before']:.2f}x"])
    rows += online_rows(result, "before")
    under = f"Before: commit {result['before']}. {where(result)}"
    return "\n\n".join([markdown(("Load", "Flyball", "Before", ""), rows), under])


def openvino_table(name: str) -> str:
    result = read(name)
    if result is None:
        return NOT_MEASURED
    rows = [
        [bits, load.replace("x", " x "), *beside(figures, "openvino")]
        for bits, pair in result["pairs"].items()
        for load, figures in pair["output_tokens_per_s"].items()
    ]
    header = ("Bits", "Load", "Flyball", "OpenVINO GenAI", "")
    under = [f"OpenVINO GenAI {result['openvino']['openvino-genai']}. {where(result)}"]
    under += [torch_reached(result)] if "bounds" in result else []
    return "\n\n".join([markdown(header, rows), *under])


def linear_layers(bits: str, machine: str = "") -> list[Result]:
    """Return the measurements that have their bounds beside them."""
    result = read(f"linear_{bits}{machine}")
    return [one for one in (result["layers"] if result else []) if "share_of_copy" in one]


def linear_table(machine: str = "") -> str:
    measured = {bits: linear_layers(bits, machine) for bits in BITS}
    if not any(measured.values()):
        return NOT_MEASURED
    rows = []
    for layer, shape in LAYERS.items():
        for bits, name in BITS.items():
            of_layer = [one for one in measured[bits] if one["layer"] == layer]
            cells = [f"{one['share_of_copy']:.0%} / {one['share_of_matmul']:.0%}" for one in of_layer]
            rows += [[shape, name, *cells]] if cells else []
    num_rows = dict.fromkeys(str(one["num_rows"]) for one in next(filter(None, measured.values())))
    last = next(filter(None, (read(f"linear_{bits}{machine}") for bits in BITS if measured[bits])))
    return markdown(("Layer", "Weights", *num_rows), rows) + f"\n\n{last['threads']} threads. {where(last)}"


def attention_table(name: str = "paged_attention_decode") -> str:
    result = read(name)
    if result is None:
        return NOT_MEASURED
    return heads_side_by_side(
        "Sequences x context",
        result["decodes"],
        lambda one: f"{one['sequences']} x {one['context']:,}",
        lambda one: f"{one['gb_per_s']:.1f} GB/s, {one['share_of_copy']:.0%} ({one['share_of_copy_beyond_it']:.0%})",
        where(result),
    )


def prompts_table(name: str) -> str:
    result = read(name)
    if result is None:
        return NOT_MEASURED
    return heads_side_by_side(
        "Last tokens of a context",
        result["prompts"],
        lambda one: f"{one['tokens']:,} of {one['context']:,}",
        lambda one: f"{one['gflops']['median']:.0f} GFLOP/s, {one['share_of_matmul']['median']:.0%}",
        where(result),
    )


def heads_side_by_side(
    title: str,
    by_heads: dict[str, list[Result]],
    label: Callable[[Result], str],
    cell: Callable[[Result], str],
    under: str,
) -> str:
    """Return a table with a row for each measurement, which all heads have in the same order, and a column for each heads."""
    rows = [[label(same[0]), *(cell(one) for one in same)] for same in zip(*by_heads.values(), strict=True)]
    return markdown((title, *by_heads), rows) + f"\n\n{under}"


def time_table(name: str = "versus_vllm") -> str:
    result = read(name)
    if result is None:
        return NOT_MEASURED
    rows = [[LOADS[load], *(f"{x:.0%}" for x in parts.values())] for load, parts in shares_of_time(result).items()]
    return markdown(("", *PARTS), rows) + f"\n\n{where(result)}"


def shares_of_time(result: Result) -> dict[str, dict[str, float]]:
    """Return how much of the time each part takes, by load."""
    return {load: parts_of(result["share_of_time"][load]) for load in LOADS if load in result["share_of_time"]}


def parts_of(ops: dict[str, float]) -> dict[str, float]:
    """Return the share of each part from those of the longest ops; the others are the rest."""
    parts = {name: sum(share for op, share in ops.items() if key in op) for key, name in NAMED.items()}
    return parts | {OTHERS: 1.0 - sum(parts.values())}


def before_table(name: str) -> str:
    result = read(name)
    if result is None:
        return NOT_MEASURED
    rows = []
    for load in result["share_of_time"]["now"]:
        for side in ("before", "now"):
            ops = result["share_of_time"][side][load]
            token_us = 1e6 / ops["tokens_per_s"]
            times = [number(share * token_us) for share in parts_of(ops).values()]
            rows.append([LOADS[load], side, number(ops["tokens_per_s"]), *times])
    head = ("", f"{result['before']} and now", "tokens a second", *(f"{part}, us a token" for part in PARTS))
    return markdown(head, rows) + f"\n\n{where(result)}"


def host_table() -> str:
    result = read("host_time")
    if result is None:
        return NOT_MEASURED
    loads = result["microseconds_of_a_step"]
    medians = {
        (load, side): {part: figures["median"] for part, figures in of_side.items()}
        for load, sides in loads.items()
        for side, of_side in sorted(sides.items())  # before, if it was measured, and now
    }
    parts = [part for part in next(iter(medians.values())) if part != "model"]
    rows = []
    for (load, side), of_parts in medians.items():
        host = sum(of_parts[part] for part in parts)
        share = f"{host / (host + of_parts['model']):.1%}"
        rows.append([load, side, *(f"{of_parts[part]:.0f}" for part in parts), f"{host:.0f}", share])
    sides = f"{result['before']} and now" if "before" in result else ""
    head = ("", sides, *parts, "together", "of the step")
    return markdown(head, rows) + f"\n\n{where(result)}"


def instruction_sets_table() -> str:
    model, ops = (read(f"instruction_sets_{what}") for what in ("model", "ops"))
    if model is None or ops is None:
        return NOT_MEASURED
    rows = [
        [f"{load.replace('x', ' x ')}, tokens a second", *(f"{figures['median']:.0f}" for figures in sides.values())]
        for load, sides in model["output_tokens_per_s"].items()
    ]
    rows += [
        [f"{op}, us", *(number(figures["median"]) for figures in sides.values())]
        for op, sides in ops["microseconds"].items()
    ]
    names = next(iter(ops["microseconds"].values()))
    return markdown(("", *(f"`{name}`" for name in names)), rows) + f"\n\n{where(ops)}"


TABLES: dict[str, Callable[[], str]] = {
    "vllm": vllm_table,
    "vllm-zen4": partial(vllm_table, "versus_vllm_zen4"),
    "vllm-zen4-arrivals": partial(arrivals_table, "versus_vllm_zen4_arrivals"),
    "vllm-xeon": partial(vllm_table, "versus_vllm_xeon"),
    "vllm-zen4-plain": partial(vllm_table, "versus_vllm_zen4_plain"),
    "llamacpp": partial(llamacpp_table, "versus_llamacpp"),
    "vllm-avx2": partial(vllm_table, "versus_vllm_avx2"),
    "time-avx2": partial(time_table, "versus_vllm_avx2"),
    "llamacpp-avx2": partial(llamacpp_table, "versus_llamacpp_avx2"),
    "quantization": partial(quantization_table, "quantization"),
    "quantization-zen4": partial(quantization_table, "quantization_zen4"),
    "quantization-zen5": partial(quantization_table, "quantization_zen5"),
    "perplexity": perplexity_table,
    "api-process": api_process_table,
    "llamacpp-zen4": partial(llamacpp_table, "versus_llamacpp_zen4"),
    "llamacpp-zen5": partial(llamacpp_table, "versus_llamacpp_zen5"),
    "llamacpp-experts": partial(llamacpp_table, "versus_llamacpp_experts_avx2"),
    "llamacpp-experts-int8": partial(llamacpp_table, "versus_llamacpp_experts_int8_avx2"),
    "experts": partial(checkout_table, "versus_checkout_experts_avx2"),
    "openvino": partial(openvino_table, "versus_openvino"),
    "openvino-avx2": partial(openvino_table, "versus_openvino_avx2"),
    "linear": linear_table,
    "linear-avx2": partial(linear_table, "_avx2"),
    "linear-zen4": partial(linear_table, "_zen4"),
    "linear-zen5": partial(linear_table, "_zen5"),
    "attention": attention_table,
    "attention-avx2": partial(attention_table, "paged_attention_decode_avx2"),
    "attention-zen4": partial(attention_table, "paged_attention_decode_zen4"),
    "attention-layers-zen4": partial(attention_table, "paged_attention_layers_zen4"),
    "attention-zen5": partial(attention_table, "paged_attention_decode_zen5"),
    "prompts-avx2": partial(prompts_table, "paged_attention_prompts_avx2"),
    "prompts-zen4": partial(prompts_table, "paged_attention_prompts_zen4"),
    "step-tokens": step_tokens_table,
    "time": time_table,
    "time-before-zen4": partial(before_table, "versus_checkout_profile_zen4"),
    "time-before-avx2": partial(before_table, "versus_checkout_profile_avx2"),
    "host": host_table,
    "instruction-sets": instruction_sets_table,
}
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """Return the page with its tables as the results are now."""
    return BLOCK.sub(lambda block: f"{block[1]}\n{TABLES[block[2]]()}\n\n{block[3]}", page)


# charts


def bars(axes: Any, groups: Sequence[str], sides: dict[str, list[Result]]) -> None:
    """Draw medians of the sides beside each other, with what their runs spread over."""
    width = 0.8 / len(sides)
    for i, ((name, figures), color) in enumerate(zip(sides.items(), COLORS, strict=False)):
        medians = [figure["median"] for figure in figures]
        low = [figure["median"] - figure["min"] for figure in figures]
        high = [figure["max"] - figure["median"] for figure in figures]
        places = [group + (i - (len(sides) - 1) / 2) * width for group in range(len(groups))]
        axes.bar(places, medians, width, yerr=(low, high), label=name, color=color, capsize=2)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylim(
        0, 1.3 * max(figure["median"] for figures in sides.values() for figure in figures)
    )  # room for a legend
    axes.grid(axis="y", alpha=0.3)


def draw_clients(axes: Sequence[Any], by_concurrency: Result, names: dict[str, str]) -> None:
    """Draw each figure by the number of clients."""
    for one, (figure, title) in zip(axes, FIGURES.items(), strict=True):
        sides = {name: [by_concurrency[clients][figure][side] for clients in CLIENTS] for side, name in names.items()}
        bars(one, CLIENTS, sides)
        one.set(title=title, xlabel="clients")


def in_and_out(load: str, output_tokens_per_s: Result) -> Result:
    """Return the same figures with the prompts' tokens counted too."""
    _, num_input, num_output = map(int, load.split("x"))
    factor = (num_input + num_output) / num_output
    return {name: value * factor for name, value in output_tokens_per_s.items() if name != "runs"}


def draw_vllm(new_figure: Callable[..., Any]) -> Any:
    result = read("versus_vllm")
    if result is None:
        return None
    names = {"flyball": "Flyball", "vllm": f"vLLM {result['vllm']['vllm']}"}
    figure = new_figure(figsize=(16, 3.4), layout="constrained")
    axes = figure.subplots(1, 1 + len(FIGURES), width_ratios=(1.4, *[1] * len(FIGURES)))
    offline = result["offline_output_tokens_per_s"]
    sides = {name: [in_and_out(load, one[side]) for load, one in offline.items()] for side, name in names.items()}
    bars(axes[0], list(offline), sides)
    axes[0].set(title="offline, tokens in and out a second", xlabel="requests x input x output")
    axes[0].legend()
    draw_clients(axes[1:], result["online_128_in_64_out"]["by_concurrency"], names)
    return figure


def draw_llamacpp(new_figure: Callable[..., Any]) -> Any:
    result = read("versus_llamacpp")
    if result is None:
        return None
    figure = new_figure(figsize=(13, 8), layout="constrained")
    axes = figure.subplots(len(result["pairs"]), len(FIGURES), squeeze=False)
    for row, (bits, pair) in zip(axes, result["pairs"].items(), strict=True):
        draw_clients(row, pair["by_concurrency"], {"flyball": "Flyball", "llamacpp": f"llama.cpp {pair['gguf']}"})
        row[0].set_ylabel(bits)
        row[0].legend()
    return figure


def draw_openvino(new_figure: Callable[..., Any]) -> Any:
    result = read("versus_openvino")
    if result is None:
        return None
    pairs = result["pairs"]
    figure = new_figure(figsize=(10, 2.6 * len(pairs)), layout="constrained")
    for axes, (bits, pair) in zip(figure.subplots(len(pairs), 1), pairs.items(), strict=True):
        loads = pair["output_tokens_per_s"]
        names = {"flyball": "Flyball", "openvino": "OpenVINO GenAI"}
        sides = {name: [in_and_out(load, one[side]) for load, one in loads.items()] for side, name in names.items()}
        bars(axes, list(loads), sides)
        axes.set(title=f"{bits}: tokens in and out a second")
        axes.legend()
    return figure


def draw_linear(new_figure: Callable[..., Any]) -> Any:
    layers = {bits: [one for one in linear_layers(bits) if one["layer"] == "gate_up"] for bits in BITS}
    measured = {bits: rows for bits, rows in layers.items() if rows}
    if not measured:
        return None
    figure = new_figure(figsize=(10, 3.6), layout="constrained")
    for axes, (share, title) in zip(
        figure.subplots(1, 2),
        {
            "share_of_copy": "weights read, share of the copy's bytes a second",
            "share_of_matmul": "operations, share of torch's bf16 product",
        }.items(),
        strict=True,
    ):
        for (bits, rows), color in zip(measured.items(), COLORS, strict=False):
            xs, ys = [one["num_rows"] for one in rows], [one[share] for one in rows]
            axes.plot(xs, ys, marker="o", color=color, label=BITS[bits])
        axes.axhline(1.0, color=COLORS[-1], linestyle="--")
        axes.set(title=title, xscale="log", xlabel="rows (tokens of a step)", ylim=(0, None))
        axes.set_xticks(xs, xs)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def draw_attention(new_figure: Callable[..., Any]) -> Any:
    result = read("paged_attention_decode")
    if result is None:
        return None
    figure = new_figure(figsize=(10, 3.6), layout="constrained")
    all_axes = figure.subplots(1, len(result["decodes"]), sharey=True, squeeze=False)[0]
    for axes, (heads, rows) in zip(all_axes, result["decodes"].items(), strict=True):
        for sequences, color in zip(dict.fromkeys(one["sequences"] for one in rows), COLORS, strict=False):
            of_side = [one for one in rows if one["sequences"] == sequences]
            xs, ys = [one["context"] for one in of_side], [one["share_of_copy"] for one in of_side]
            axes.plot(xs, ys, marker="o", color=color, label=f"{sequences} sequences")
        axes.axhline(1.0, color=COLORS[-1], linestyle="--")
        axes.set(title=f"{heads}: share of the copy's bytes a second", xscale="log", xlabel="context", ylim=(0, None))
        axes.set_xticks(xs := sorted({one["context"] for one in rows}), xs)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def draw_time(new_figure: Callable[..., Any]) -> Any:
    result = read("versus_vllm")
    if result is None:
        return None
    shares = shares_of_time(result)
    figure = new_figure(figsize=(10, 2.4), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(shares)
    for part, color in zip(PARTS, COLORS, strict=False):
        widths = [100 * parts[part] for parts in shares.values()]
        axes.barh([LOADS[load] for load in shares], widths, left=left, label=part, color=color)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(xlabel="share of the time, %", xlim=(0, 100))
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.25), ncols=len(PARTS), frameon=False)
    return figure


def draw_instruction_sets(new_figure: Callable[..., Any]) -> Any:
    result = read("instruction_sets_model")
    if result is None:
        return None
    figure = new_figure(figsize=(10, 3), layout="constrained")
    loads = result["output_tokens_per_s"]
    for axes, (load, sides) in zip(figure.subplots(1, len(loads), squeeze=False)[0], loads.items(), strict=True):
        bars(axes, list(sides), {"Flyball": list(sides.values())})
        axes.set(title=f"{load.replace('x', ' x ')}, output tokens a second")
        axes.tick_params("x", labelrotation=20)
    return figure


CHARTS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "vllm": draw_vllm,
    "llamacpp": draw_llamacpp,
    "openvino": draw_openvino,
    "linear": draw_linear,
    "attention": draw_attention,
    "time": draw_time,
    "instruction-sets": draw_instruction_sets,
}


def write_charts(folder: Path) -> list[Path]:
    """Draw what has been measured; the same results give the same files."""
    matplotlib, kind = importlib.import_module("matplotlib"), importlib.import_module("matplotlib.figure").Figure
    written = []
    for name, draw in CHARTS.items():
        figure = draw(kind)
        if figure is not None:
            written.append(folder / f"performance-{name}.svg")
            with matplotlib.rc_context({"svg.hashsalt": "flyball"}):
                figure.savefig(written[-1], metadata={"Date": None})
    return written


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(with_tables(PAGE.read_text()))
    print(*(path.relative_to(ROOT) for path in [PAGE, *write_charts(DOCS)]), sep="\n")


if __name__ == "__main__":
    main()
