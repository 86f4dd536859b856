"""Rules that span fields of a spec. The CRD states the simple ones as CEL too, for kubectl apply."""

from collections.abc import Iterator

from flyball_operator import quantity
from flyball_operator.spec import DeploymentSpec, EnvVar, Objectives, Range
from flyball_protocol.endpoints import ADMIN_TOKEN_ENV

MANAGED_FLAGS = frozenset(
    {
        "--host",
        "--port",
        "--admin-host",
        "--admin-port",
        "--admin-token-file",
        "--served-model-name",
        "--revision",
        "--dtype",
        "--device",
        "--max-model-len",
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--gpu-memory-utilization",
        "--kv-cache-memory-bytes",
        "--drain-timeout",
    }
)
"""Flags of ``flyball serve`` that follow from spec fields; extraArgs may not repeat them."""


def problems(spec: DeploymentSpec) -> list[str]:
    """Return one line for each rule that ``spec`` breaks."""
    return [*_runtime_problems(spec), *_resource_problems(spec), *_tuning_problems(spec)]


def _runtime_problems(spec: DeploymentSpec) -> Iterator[str]:
    runtime = spec.runtime
    if runtime.kv_cache_memory is not None and runtime.kv_cache_memory_percent is not None:
        yield "spec.runtime.kvCacheMemory and kvCacheMemoryPercent are both set; keep one of them"
    if runtime.kv_cache_memory_percent is not None and spec.accelerator.count == 0:
        yield (
            f"spec.runtime.kvCacheMemoryPercent is {runtime.kv_cache_memory_percent}, a share of the accelerator's memory, "
            "but spec.accelerator.count is 0; set kvCacheMemory instead"
        )
    if runtime.max_num_batched_tokens < runtime.max_num_seqs:
        yield (
            f"spec.runtime.maxNumBatchedTokens is {runtime.max_num_batched_tokens}, less than maxNumSeqs "
            f"{runtime.max_num_seqs}; each running sequence decodes one token a step, so raise it or lower maxNumSeqs"
        )
    for i, argument in enumerate(runtime.extra_args):
        yield from _extra_arg_problems(i, argument)
    yield from _env_problems(runtime.env)


def _extra_arg_problems(index: int, argument: str) -> Iterator[str]:
    flag = argument.partition("=")[0]
    if not flag.startswith("--") or flag == "--":
        yield f"spec.runtime.extraArgs[{index}] is {argument!r}; write --flag or --flag=value"
        return
    managed = sorted(known for known in MANAGED_FLAGS if known.startswith(flag))  # argparse takes abbreviations
    if managed:
        yield f"spec.runtime.extraArgs[{index}] is {argument!r}; {managed[0]} is set from other fields of spec, remove it here"


def _env_problems(env: tuple[EnvVar, ...]) -> Iterator[str]:
    seen = set()
    for i, variable in enumerate(env):
        if variable.name in seen:
            yield f"spec.runtime.env[{i}].name {variable.name!r} is given twice; keep one of them"
        if variable.name == ADMIN_TOKEN_ENV:
            yield f"spec.runtime.env[{i}].name is {ADMIN_TOKEN_ENV}, which the operator sets from a Secret; remove it"
        seen.add(variable.name)


def _resource_problems(spec: DeploymentSpec) -> Iterator[str]:
    for kind, amounts in (("requests", spec.resources.requests), ("limits", spec.resources.limits)):
        if spec.accelerator.resource_name in amounts:
            yield (
                f"spec.resources.{kind} asks for {spec.accelerator.resource_name}; "
                "say how many in spec.accelerator.count and remove it here"
            )
    limit, kv_cache = spec.resources.limits.get("memory"), spec.runtime.kv_cache_memory
    if limit is not None and kv_cache is not None and spec.accelerator.count == 0:
        yield from _memory_problems(kv_cache, limit)


def _memory_problems(kv_cache: str | int, limit: str | int) -> Iterator[str]:
    try:
        if quantity.to_bytes(kv_cache) >= quantity.to_bytes(limit):
            yield (
                f"spec.runtime.kvCacheMemory is {kv_cache}, and spec.resources.limits.memory only {limit}; "
                "raise the limit (the weights need room too) or lower kvCacheMemory"
            )
    except ValueError as error:
        yield f"spec.resources.limits.memory: {error}"


def _tuning_problems(spec: DeploymentSpec) -> Iterator[str]:
    tuning = spec.tuning
    if tuning.mode != "Off" and tuning.objectives == Objectives():
        yield (
            f"spec.tuning.mode is {tuning.mode} and spec.tuning.objectives is empty; "
            "set ttftP95Milliseconds or interTokenLatencyP95Milliseconds"
        )
    envelopes = (
        ("maxNumSeqs", tuning.bounds.max_num_seqs, spec.runtime.max_num_seqs),
        ("maxNumBatchedTokens", tuning.bounds.max_num_batched_tokens, spec.runtime.max_num_batched_tokens),
        ("kvCachePercent", tuning.bounds.kv_cache_percent, 100),
    )
    for name, bounds, envelope in envelopes:
        yield from _bounds_problems(f"spec.tuning.bounds.{name}", bounds, name, envelope)


def _bounds_problems(path: str, bounds: Range, name: str, envelope: int) -> Iterator[str]:
    if bounds.min is not None and bounds.max is not None and bounds.min > bounds.max:
        yield f"{path}.min is {bounds.min}, more than its max {bounds.max}; swap or widen them"
    for side, value in (("min", bounds.min), ("max", bounds.max)):
        if value is not None and value > envelope:
            yield (
                f"{path}.{side} is {value}; live limits stay inside the envelope, and spec.runtime.{name} is {envelope}. "
                "Lower the bound or raise the envelope"
            )
