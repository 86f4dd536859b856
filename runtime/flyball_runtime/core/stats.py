"""What the engine reports after its steps; the API process turns it into metrics and evidence."""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from flyball_protocol import HitPoint, KVBlocks, Lengths, Limits, StepModel
from flyball_runtime import __version__
from flyball_runtime.core.request import Failed, Finished, Hypothesis, TokenLogprobs


class StepStats(Struct, frozen=True, kw_only=True, array_like=True):
    """State after one step, and what that step did. An idle engine sends one every half second with ``num_tokens`` 0.

    Attributes:
        duration_s: plan, run and commit together.
        blocked_by: why the head of the queue was not admitted in this step: none, seqs, kv, reserve, budget, step_time,
            adapters.
        num_prefix_queried_tokens, num_prefix_hit_tokens: prompt tokens looked up at admission in this step, and found.
        max_num_seqs: most running sequences that live limits may allow.
        num_allocated_kv_blocks: those that there is memory for.
        predicted_s: time from the end of the step before to its own, as predicted when it was launched; None without a model.
        num_drafts: sequences with drafts; ``num_decodes`` counts them too.
        num_swapped_out_blocks, num_swapped_in_blocks: KV blocks that the step copied to host memory, and back.
        num_host_hit_tokens: tokens of the sequences started in this step whose blocks it copied back.
        host_usage: share of the swap space that holds blocks.
        num_cpu_threads: that computed the latest step; 0 before the first one, and on a GPU.
        num_draft_tokens, num_accepted_tokens: drafts that the step verified, and those that the model agreed with.
        step_model, lengths, prefix_hits: what has been learned so far; None, or empty, if it was reported a few steps
            before, or nothing is known.
    """

    duration_s: float
    num_tokens: int
    num_prefill_tokens: int
    num_decodes: int
    num_running: int
    num_waiting: int
    blocked_by: str
    kv_blocks: KVBlocks
    num_preemptions: int
    num_recomputed_tokens: int
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int
    revision: int
    target: Limits
    effective: Limits
    max_num_seqs: int
    predicted_s: float | None = None
    step_model: StepModel | None = None
    lengths: Lengths | None = None
    prefix_hits: tuple[HitPoint, ...] = ()
    num_allocated_kv_blocks: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_host_hit_tokens: int = 0
    host_usage: float = 0.0
    num_cpu_threads: int = 0


class Sampled(NamedTuple):
    """What a step computed, for each entry of its plan that samples.

    Attributes:
        token_ids: None where the logits give no distribution.
        logprobs: by index into ``token_ids``, for those that ask for them; None when nobody does.
        prompt_logprobs: by entry of the plan, those of prompt tokens; None when nobody asks for them.
        stuck: by index into ``token_ids``, why a grammar lets none follow, where that is so.
        pooled: by entry of the plan, the vector of a prompt that ends there, 32-bit floats; None where it is not finite.
        num_accepted: how many drafts are accepted, for each entry of the plan that has some.
        drafts: what a draft model has drafted, of all entries one after another; empty if the plan has the drafts.
        drafting_s: seconds of the step in which it did.
        swapping_s: seconds of the step in which KV blocks were copied to host memory and back.
        num_cpu_threads: that computed it; 0 on a GPU.
    """

    token_ids: list[int | None]
    logprobs: dict[int, TokenLogprobs] | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None
    stuck: dict[int, str] | None = None
    pooled: dict[int, bytes | None] = {}  # noqa: RUF012  never changed
    num_accepted: Sequence[int] = ()
    drafts: Sequence[int] = ()
    drafting_s: float = 0.0
    swapping_s: float = 0.0
    num_cpu_threads: int = 0


class StepOutput(Struct, frozen=True, tag=True):
    """Everything one step produced: ``token_ids[i]`` is a new token of ``request_ids[i]``; endings come after tokens.

    A request has several in a row if drafts of it were accepted.

    ``num_cached_tokens``: prompt tokens found in the prefix cache, of the requests first admitted in this step that had any.
    ``logprobs``: of the new tokens of the requests that ask for them. ``prompt_logprobs``: of more of their prompts' tokens.
    ``hypotheses``: what beam searches have found, of the requests that end with it.
    Between two steps the engine sends one with endings alone, or with nothing but its state.
    """

    request_ids: list[str]
    token_ids: list[int]
    endings: list[Finished | Failed]
    stats: StepStats
    num_cached_tokens: dict[str, int] = {}
    logprobs: dict[str, TokenLogprobs] = {}
    prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
    hypotheses: dict[str, list[Hypothesis]] = {}


class EngineInfo(Struct, frozen=True, kw_only=True):
    """Facts fixed once the engine is up.

    Attributes:
        max_num_batched_tokens: most tokens one step computes.
        startup_s: seconds by stage: import, config, vocabulary, weights, warm_up, kv_cache.
        longest_pause_s: estimate of the longest time for which a step shows no progress (see ``engine/start_up.py``).
        kv_windows: how many of the latest tokens each group of layers attends to; None is all.
        num_kv_blocks: most that there may be.
        num_start_kv_blocks: how many of them there is memory for at the start.
        device_name: which GPU, or which CPU with how many threads; "" if nobody said.
        kv_block_bytes: memory of one KV block in all its layers; 0 if nobody said.
        kernel_backend: which implementation the ops run: cpp, torch or triton.
        attention_backend: whose attention: flyball, or flash_attn.
        draft_model: as ``--speculative-config`` names it; "" without one.
        num_swap_slots: how many KV blocks host memory holds.
        block_copy_s: seconds that copying one of them in one direction takes, as measured; 0.0 if nobody said.
        quantization: of linear layers: none, int8, w8a16, int4, w4a8 or fp8.
        kv_cache_dtype: of keys and values: auto is ``dtype``, int8_per_token_head and fp8_per_token_head round them.
    """

    model: str
    dtype: str
    device: str
    kernel_backend: str
    max_model_len: int
    max_num_batched_tokens: int
    vocab_size: int
    block_size: int
    kv_windows: tuple[int | None, ...]
    num_kv_blocks: int
    num_start_kv_blocks: int
    num_parameters: int
    startup_s: dict[str, float]
    longest_pause_s: float
    kv_block_bytes: int = 0
    device_name: str = ""
    draft_model: str = ""
    num_swap_slots: int = 0
    block_copy_s: float = 0.0
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    attention_backend: str = "flyball"

    @property
    def kv_dtype(self) -> str:
        """What keys and values are kept in."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def key(self) -> str:
        """What step times depend on; see ``Evidence.key``."""
        model = f"{self.model}+{self.draft_model}" if self.draft_model else self.model
        dtype = self.dtype if self.quantization == "none" else f"{self.dtype}+{self.quantization}"
        if self.kv_cache_dtype != "auto":
            dtype += f"+kv_{self.kv_cache_dtype}"
        return f"{model}/{dtype}/{self.device_name or self.device}/{__version__}"
