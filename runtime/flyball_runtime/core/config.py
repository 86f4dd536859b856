"""What the user sets at start-up: parsed once, checked once, never changed."""

import logging
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec

from flyball_protocol import BootPrior
from flyball_runtime.core.checkpoint import DType, KVDType
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.lora import LoraConfig
from flyball_runtime.core.quantization import Quantization
from flyball_runtime.core.speculation import SpeculativeConfig

logger = logging.getLogger(__name__)

MODEL_IMPLS = ("auto", "flyball", "transformers")
QUANTIZATIONS = get_args(Quantization)
DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_CACHE_DTYPES: dict[str, KVDType | None] = {"auto": None, "int8_per_token_head": "int8", "fp8_per_token_head": "fp8"}
"""Names as in vLLM, and what they mean; None: the dtype of the weights."""
DEVICES = ("auto", "cpu", "cuda")
KERNEL_BACKENDS = ("auto", "cpp", "torch", "triton")
ATTENTION_BACKENDS = ("auto", "flyball", "flash_attn")
SCHEDULING_POLICIES = ("fcfs", "priority", "sjf", "srpf", "edf", "dpr")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
BLOCK_SIZES = (8, 16, 32, 64, 128)
CPU_BATCHED_TOKENS, GPU_BATCHED_TOKENS = 256, 2048
"""Tokens of a step unless told. A CPU computes hardly faster in larger steps, and running streams wait for a step's end."""
OFFLINE_BATCHED_TOKENS, OFFLINE_SCHEDULER_STEPS = 2048, 16
"""The same where no stream waits for a step's end, and how many decodes are planned together there."""

LOOPBACK_PROXIES = "127.0.0.1,::1"
"""Proxies on this machine, such as local mode's balancer."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engine's settings; ``max_num_seqs``, ``max_num_batched_tokens`` and the KV memory form the envelope.

    Attributes:
        model: directory of a Hugging Face checkpoint.
        served_model_name: the name that requests use.
        model_impl: whose code runs the model; auto is Flyball's where it has the architecture, else transformers'.
        dtype: weights and activations; auto takes the checkpoint's.
        quantization: int8: linear layers round weights and inputs to 8 bits; w8a16: weights alone; int4: weights alone to 4;
            w4a8: weights to 4 and inputs to 8; fp8: weights alone to e4m3. Weights of a checkpoint that are quantized stay
            as they are.
        max_model_len: longest prompt plus output in tokens; None takes the checkpoint's maximum.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens one step computes; None takes what suits the device (``step_tokens``).
        gpu_memory_utilization: share of the device's total memory for weights, activations and KV cache, in (0, 1].
        kv_cache_memory_bytes: size of the KV cache at the start; None derives it from the device's memory.
        kv_cache_memory_max_bytes: what live limits may raise it to; None is its size at the start.
        kv_cache_dtype: of keys and values in the KV cache; auto is that of the weights, int8_per_token_head and
            fp8_per_token_head (e4m3) round to 8 bits with a scale for each token and head.
        kv_drain_timeout_s: how long running sequences hold up a lowered KV limit before some are preempted for it.
        block_size: tokens per KV block.
        async_scheduling: the next step is planned while one runs, and runs without a pause after it.
        num_scheduler_steps: most tokens that running sequences get between two looks at what else there is to do, where
            nobody waits and only tokens are asked for. For callers that take an output as a whole, as ``LLM`` does.
        fair_share: clients take turns, by tokens, within what the policy treats alike.
        max_queued_requests: most requests that wait; more are refused with 429. With ``fair_share`` twice as many may wait
            in all: a client below its share of a full queue is still taken.
        max_queued_tokens: most prompt tokens of requests that have no output yet, each choice counted, and one longest
            prompt in any case. More are refused with 429, a single HTTP request of more with 400. Clients share it like
            ``max_queued_requests``.
        num_threads: CPU threads of the engine; None: one for each core, no more than a CPU limit keeps busy, and fewer while
            other processes use the cores.
        numa_node: whose cores and memory the engine uses; None: those of all.
        seed: of the seeds that requests without one get; None draws it, so that each start and each replica differ.
        boot_prior: live limits to start with; None starts with the whole envelope.
        speculative_config: how tokens are drafted; None drafts none.
        lora: of adapters; None serves none.
        swap_space_bytes: host memory that keeps evicted KV blocks; 0: they are lost.
    """

    model: str
    served_model_name: str
    model_impl: str = "auto"
    dtype: str = "auto"
    quantization: Quantization = "none"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    kv_cache_memory_max_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    kv_drain_timeout_s: float = 30.0
    block_size: int = 16
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"
    fair_share: bool = True
    async_scheduling: bool = False
    num_scheduler_steps: int = 1
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4 * 1024 * 1024
    kernel_backend: str = "auto"
    attention_backend: str = "auto"
    num_threads: int | None = None
    numa_node: int | None = None
    seed: int | None = None
    log_level: str = "info"
    boot_prior: BootPrior | None = None
    speculative_config: SpeculativeConfig | None = None
    lora: LoraConfig | None = None
    swap_space_bytes: int = 0

    def __post_init__(self) -> None:
        _check_choice("model-impl", self.model_impl, MODEL_IMPLS)
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("quantization", self.quantization, QUANTIZATIONS)
        _check_choice("kv-cache-dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _check_choice("device", self.device, DEVICES)
        _check_choice("kernel-backend", self.kernel_backend, KERNEL_BACKENDS)
        _check_choice("attention-backend", self.attention_backend, ATTENTION_BACKENDS)
        _check_choice("scheduling-policy", self.scheduling_policy, SCHEDULING_POLICIES)
        _check_choice("log-level", self.log_level, LOG_LEVELS)
        _check_choice("block-size", self.block_size, BLOCK_SIZES)
        _check_range("max-model-len", self.max_model_len, 2, 2**24)
        _check_range("max-num-seqs", self.max_num_seqs, 1, 4096)
        _check_range("max-num-batched-tokens", self.max_num_batched_tokens, 1, 2**20)
        _check_range("num-scheduler-steps", self.num_scheduler_steps, 1, 1024)
        _check_range("max-queued-requests", self.max_queued_requests, 1, 2**20)
        _check_range("max-queued-tokens", self.max_queued_tokens, 1, 2**40)
        _check_range("num-threads", self.num_threads, 1, 1024)
        _check_range("numa-node", self.numa_node, 0, 1023)
        _check_range("kv-cache-memory-bytes", self.kv_cache_memory_bytes, 1, 2**50)
        _check_range("kv-cache-memory-max", self.kv_cache_memory_max_bytes, 1, 2**50)
        _check_range("swap-space", self.swap_space_bytes, 0, 2**50)
        if self.swap_space_bytes and not self.enable_prefix_caching:
            raise ConfigError(
                f"--swap-space is {self.swap_space_bytes} bytes with --no-enable-prefix-caching: host memory keeps blocks by "
                "the hashes of the prefix cache. Leave one of the two flags out."
            )
        if not 0.0 <= self.kv_drain_timeout_s <= 86_400.0:
            raise ConfigError(f"--kv-drain-timeout is {self.kv_drain_timeout_s}; it must be from 0 to 86400 seconds.")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"--gpu-memory-utilization is {self.gpu_memory_utilization}; it must be in (0, 1].")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}, below --max-num-seqs {self.max_num_seqs}: "
                "a step could not give each running sequence its token. Raise the first or lower the second."
            )
        if self.speculative_config is not None:
            self.speculative_config.validate()
            if self.async_scheduling:
                raise ConfigError(
                    "--speculative-config and --async-scheduling exclude each other: tokens are drafted from those of the "
                    "step before, which the next step would not wait for. Leave one of them out."
                )
        if self.num_scheduler_steps > 1 and (self.async_scheduling or self.speculative_config is not None):
            raise ConfigError(
                f"num_scheduler_steps is {self.num_scheduler_steps} with async_scheduling or a speculative_config: either of "
                "them decides in its own way how many tokens are planned at once. Leave one of them out."
            )

    def kv_dtype(self, dtype: DType) -> KVDType:
        """Return the dtype of the KV cache of a model with weights of ``dtype``."""
        return KV_CACHE_DTYPES[self.kv_cache_dtype] or dtype

    def step_tokens(self, device: str, max_model_len: int) -> int:
        """Return the most tokens that one step computes on a device: cpu or cuda."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        whole = 0 if self.enable_chunked_prefill else max_model_len
        return max(default_step_tokens(device), self.max_num_seqs, whole)

    @property
    def max_num_sampled(self) -> int:
        """Most tokens of one step whose logits are wanted."""
        if self.speculative_config is None:
            return self.max_num_seqs
        num_drafting = min(self.max_num_seqs, self.speculative_config.disable_by_batch_size)
        return max(self.max_num_seqs, num_drafting * (1 + self.speculative_config.num_speculative_tokens))


def default_step_tokens(device: str) -> int:
    return CPU_BATCHED_TOKENS if device == "cpu" else GPU_BATCHED_TOKENS


def _check_choice(name: str, value: object, choices: Collection[object]) -> None:
    if value not in choices:
        raise ConfigError(f"--{name} is {value!r}; it must be one of {', '.join(map(str, choices))}.")


def _check_range(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise ConfigError(f"--{name} is {value}; it must be from {low} to {high}.")


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str) -> int:
    """Parse a size such as ``2GiB``, ``512Mi``, ``1.5G`` or ``4096`` into bytes. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{text!r} is not a size; write bytes with an optional unit, such as 2GiB or 500M.")
    number, unit = match.groups()
    return int(float(number) * _UNITS[(unit or "").lower()])


def read_boot_prior(path: Path) -> BootPrior | None:
    """Return what the file holds; None, and a line in the log, when there is nothing to start with.

    A replica without a prior serves all the same, so nothing that is wrong with the file stops it.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=BootPrior)
    except FileNotFoundError:
        logger.info("--boot-prior %s does not exist: starting with the whole envelope", path)
    except OSError as error:
        logger.error("cannot read --boot-prior %s (%s): starting with the whole envelope", path, error.strerror)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        logger.error(
            '--boot-prior %s is not {"revision": N, "limits": {...}}: %s. Starting with the whole envelope; '
            "correct the file or delete it.",
            *(path, error),
        )
    return None
