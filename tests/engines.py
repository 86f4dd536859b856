"""Engines on tiny checkpoints, and what transformers says of the same prompts."""

import random
import sys
from array import array
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from flyball_kernels.linear.reference import Rounded, round_rows, round_to_float8
from flyball_protocol import LimitsChange, LimitsStatus, LimitsUpdate
from flyball_runtime.core.checkpoint import KVDType
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.kv_layout import KVLayout
from flyball_runtime.core.request import Finished, Request, Sequence
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.core.speculation import SpeculativeConfig
from flyball_runtime.core.stats import StepStats
from flyball_runtime.engine.engine import Engine
from flyball_runtime.engine.runner import start_engine
from flyball_runtime.model.loader import describe_model
from flyball_runtime.scheduler import Drafter

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def make_engine(path: Path, on_progress: Callable[[], object] = lambda: None, **settings: Any) -> Engine:
    defaults = {
        "device": "cpu",
        "dtype": "float32",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "max_model_len": 256,
    }
    config = EngineConfig(model=str(path), served_model_name="test", **(defaults | settings))
    return start_engine(config, on_progress=on_progress)


def kv_block_bytes(path: Path, max_model_len: int = 256, kv_dtype: KVDType = "float32") -> int:
    """Bytes of the KV blocks, one in each group of layers, of 16 tokens."""
    config = describe_model(path, "auto")
    layout = KVLayout.of(config.sliding_windows, max_model_len)
    return 16 * len(layout.groups) * layout.num_tensors * config.kv_bytes_per_layer(kv_dtype)


def random_prompts(lengths: list[int], seed: int = 0, vocab_size: int = 384) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, vocab_size) for _ in range(length)] for length in lengths]


def generate(
    engine: Engine,
    prompts: list[list[int]],
    sampling: SamplingParams = GREEDY,
    *,
    forked: bool = False,
    adapters: list[int | None] | None = None,
) -> list[list[int]]:
    """Run the prompts to their ends, all at once; return the output tokens. Every request must end exactly once.

    ``forked``: equal prompts are of one fork group. ``adapters``: number of the LoRA adapter of each prompt.
    """
    outputs: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    ended: list[str] = []
    for request_id, prompt, adapter in zip(outputs, prompts, adapters or [None] * len(prompts), strict=True):
        group = str(prompts.index(prompt)) if forked else None
        failed = engine.submit(
            Request(
                request_id=request_id, prompt_token_ids=prompt, sampling=sampling, fork_group=group, adapter=adapter
            )
        )
        if failed is not None:
            raise RuntimeError(failed.message)
    while engine.has_work():
        output = engine.step()
        for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
            outputs[request_id].append(token_id)
        for ending in output.endings:
            assert isinstance(ending, Finished)
            assert ending.num_output_tokens == len(outputs[ending.request_id])
            ended.append(ending.request_id)
    assert sorted(ended) == sorted(outputs)
    return list(outputs.values())


class Oracle(Drafter):
    """Knows the outputs, and is wrong now and then.

    Args:
        num_tokens: most drafts of a sequence in one step.
        sequences: prompts and the outputs behind them.
    """

    def __init__(self, num_tokens: int, sequences: list[list[int]]) -> None:
        super().__init__(SpeculativeConfig(num_speculative_tokens=num_tokens))
        self._num_tokens = num_tokens
        self._sequences = sequences
        self._num_calls = self.num_drafts = self.num_accepted = 0

    def draft(self, seq: Sequence) -> "array[int]":
        if not seq.sampling.allows_drafts:
            return array("I")
        num, token_ids = len(seq.token_ids), seq.token_ids.tolist()
        known = next((one for one in self._sequences if one[:num] == token_ids), [])
        drafts = known[num : min(num + self._num_tokens, seq.max_total_tokens - 1)]
        self._num_calls += 1
        if drafts and self._num_calls % 3 == 0:
            drafts[self._num_calls // 3 % len(drafts)] ^= 1
        return array("I", drafts)

    def verified(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted


def have_drafted(engine: Engine, oracle: Oracle) -> None:
    """Have the drafts of an engine come from an oracle, and pay whatever they cost. It was made with ``speculative``."""
    assert engine.scheduler._drafter is not None
    engine.scheduler._drafter = oracle
    engine.governor.tokens_per_s = lambda *_: None


INT8_KV = {"kv_cache_dtype": "int8_per_token_head"}
FP8_KV = {"kv_cache_dtype": "fp8_per_token_head"}


def _attend_rounded(
    round_vectors: Callable[[torch.Tensor], Rounded],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *rest: Any,
    **named: Any,
) -> Any:
    """Attend as the model's own code does, to keys and values rounded to 8 bits, each token's and head's by itself."""
    values = [round_vectors(x.flatten(0, 2)) for x in (key, value)]
    key, value = ((one.values.float() * one.scales[:, None]).view_as(key) for one in values)
    return sys.modules[type(module).__module__].eager_attention_forward(module, query, key, value, *rest, **named)


for _name, _round_vectors in (("int8", round_rows), ("fp8", round_to_float8)):
    AttentionInterface.register(f"flyball_{_name}_kv", partial(_attend_rounded, _round_vectors))
    AttentionMaskInterface.register(f"flyball_{_name}_kv", eager_mask)


class Reference:
    """Greedy tokens of transformers, one prompt at a time; ``kv``: with keys and values rounded to int8 or fp8."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32, *, kv: str | None = None) -> None:
        attention = {"attn_implementation": f"flyball_{kv}_kv"} if kv else {}
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **attention).eval()

    def generate(self, prompts: list[list[int]], max_tokens: int = 24) -> list[list[int]]:
        return [self._generate(prompt, max_tokens) for prompt in prompts]

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Return those behind the last token, ``[vocab_size]``."""
        return self._model(torch.tensor([token_ids])).logits[0, -1]

    @torch.inference_mode()
    def _generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        inputs = torch.tensor([prompt])
        output = self._model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
        )
        return output[0, len(prompt) :].tolist()


def tight(block_bytes: int, ahead: bool) -> dict[str, Any]:
    """Settings of an engine that lacks room for most of what is asked of it, and plans ahead or drafts."""
    return {
        "max_num_seqs": 6,
        "max_num_batched_tokens": 40,
        "max_model_len": 144,
        "kv_cache_memory_bytes": 18 * block_bytes,
        "swap_space_bytes": 60 * block_bytes,
        "kv_drain_timeout_s": 0.0,
        "async_scheduling": ahead,
        "speculative_config": None if ahead else SpeculativeConfig(num_speculative_tokens=5),
    }


def shake(engine: Engine, waiting: list[Request], expected: list[list[int]], rng: random.Random) -> None:
    """Run the requests to their ends, a few at a time, under a hundred resizes of the KV cache; now and then abort one whose id
    ends in "cancelled". The tokens must be those expected (an id begins with their index), and all that can happen must have.
    """
    outputs: dict[str, list[int]] = {one.request_id: [] for one in waiting}
    seen: Counter[str] = Counter()
    while engine.has_work() or waiting or seen["resizes"] < 100:
        if waiting and engine.scheduler.num_waiting < 4:
            assert engine.submit(waiting.pop()) is None
        if seen["resizes"] < 100 and rng.random() < 0.7:
            seen["resizes"] += 1
            fraction = rng.uniform(engine.scheduler.envelope.min_kv_cache_fraction, 1.0)
            update = LimitsUpdate(revision=seen["resizes"], limits=LimitsChange(kv_cache_fraction=fraction))
            assert engine.post_limits(update).status in (LimitsStatus.APPLIED, LimitsStatus.DEFERRED)
        engine.tick()
        if not engine.has_work():
            continue
        output = engine.step()
        for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
            outputs[request_id].append(token_id)
        for request_id in outputs:
            if request_id.endswith("cancelled") and rng.random() < 0.05 and engine.abort(request_id) is not None:
                seen["cancelled"] += 1
        seen += _counts(output.stats)
    for request_id, tokens in outputs.items():
        right = expected[int(request_id.split()[0])]
        assert tokens == right[: len(tokens)]
        assert tokens == right or request_id.endswith("cancelled")
    happened = ["cancelled", "hits", "host hits", "swapped out", "swapped in", "preempted"]
    drafted = () if engine.scheduler._drafter is None else ("accepted", "rejected")
    assert [one for one in (*happened, *drafted) if not seen[one]] == []
    assert engine.kv_cache.counts().used == 0


def _counts(stats: StepStats) -> Counter[str]:
    return Counter(
        {
            "hits": stats.num_prefix_hit_tokens,
            "host hits": stats.num_host_hit_tokens,
            "swapped out": stats.num_swapped_out_blocks,
            "swapped in": stats.num_swapped_in_blocks,
            "preempted": stats.num_preemptions,
            "accepted": stats.num_accepted_tokens,
            "rejected": stats.num_draft_tokens - stats.num_accepted_tokens,
        }
    )
