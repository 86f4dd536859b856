"""Our model over a paged cache against transformers' own, on the same checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

from checkpoints import ARCHITECTURES, MORE_ARCHITECTURES, VOCAB_SIZE
from flyball_kernels import Backend, choose_backend, kv_cache
from flyball_runtime.core.model_config import ModelConfig
from flyball_runtime.model import transformer
from flyball_runtime.model.loader import load_model
from flyball_runtime.model.transformer import CausalLM, DecoderLayer, StepInputs

MORE = [pytest.param(arch, marks=pytest.mark.slow) for arch in MORE_ARCHITECTURES]
WITH_EXPERTS = {"mixtral", "qwen2 moe", "qwen3 moe", "gpt-oss"}
WITH_MORE_THAN_THE_OP = {"gemma2", "gemma3", "olmo2", "granite", "gpt-oss"}  # other norms, a factor, sinks
BLOCK_SIZE = 16
NUM_BLOCKS = 64
# Logits here have a standard deviation near 1.7. Sums taken in another order move fp32 results by some 1e-6 of that; a
# wrong position, mask or block moves them by whole units.
FP32_TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama2", {"attention_bias": True, "mlp_bias": True}),
    ("llama2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    ("llama2", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 6, "tie_word_embeddings": True}),
    ("llama3", {"tie_word_embeddings": False, "hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 2}),
    ("mistral", {"sliding_window": None, "head_dim": None}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    ("qwen2", {"tie_word_embeddings": False, "head_dim": 16, "num_key_value_heads": 8}),
    ("phi3 longrope", {"original_max_position_embeddings": 32}),  # all 50 tokens are rotated by the long factors
    ("gemma2", {"attn_logit_softcapping": None, "query_pre_attn_scalar": 400}),
    ("gemma3", {"rope_parameters": None, "final_logit_softcapping": 2.0, "tie_word_embeddings": False}),
    ("granite", {"mlp_bias": True, "tie_word_embeddings": True}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 9, "attention_bias": True, "num_hidden_layers": 4}),
    ("qwen2 moe", {"use_sliding_window": True, "sliding_window": 9, "qkv_bias": False, "norm_topk_prob": True}),
    ("qwen3 moe", {"use_sliding_window": True, "sliding_window": 9, "decoder_sparse_step": 2, "norm_topk_prob": False}),
    ("gpt-oss", {"attention_bias": False, "tie_word_embeddings": True}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 80, "num_hidden_layers": 1}),
]


class Sequence:
    """Tokens, and where the driver put their keys and values."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.num_computed_tokens = 0
        self.block_tables: list[list[int]] = []


class PagedDriver:
    """Lays sequences out over shuffled blocks by hand; what nobody wrote in the cache is NaN."""

    def __init__(self, model: CausalLM, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        config = model.config
        shape = (NUM_BLOCKS, BLOCK_SIZE, config.num_key_value_heads, config.head_dim)
        empty = torch.full(shape, torch.nan, dtype=dtype, device=device)
        self.model = model
        self.kv = [(empty.clone(), empty.clone()) for _ in range(model.layout.num_tensors)]
        self.free_blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(7)).tolist()

    def step(self, batch: list[tuple[Sequence, int]], *, all_logits: bool = False) -> list[Tensor]:
        """Run the next n tokens of each sequence; per sequence the logits of its last token, or of all n."""
        for sequence, num_tokens in batch:
            self._allocate(sequence, sequence.num_computed_tokens + num_tokens)
        inputs = _inputs(batch, all_logits)
        logits = self.model.forward(_to(inputs, self.kv[0][0].device), self.kv)
        for sequence, num_tokens in batch:
            sequence.num_computed_tokens += num_tokens
        return list(logits.split([n for _, n in batch] if all_logits else [1] * len(batch)))

    def _allocate(self, sequence: Sequence, num_tokens: int) -> None:
        sequence.block_tables = sequence.block_tables or [[] for _ in self.model.layout.groups]
        for table in sequence.block_tables:
            while len(table) * BLOCK_SIZE < num_tokens:
                table.append(self.free_blocks.pop())


def _inputs(batch: list[tuple[Sequence, int]], all_logits: bool) -> StepInputs:
    spans = [range(seq.num_computed_tokens, seq.num_computed_tokens + n) for seq, n in batch]
    query_lens = torch.tensor([n for _, n in batch])
    context_lens = torch.tensor([span.stop for span in spans], dtype=torch.int32)
    cu_query_lens = torch.cat((torch.zeros(1), query_lens.cumsum(0))).int()
    by_group = list(zip(*(seq.block_tables for seq, _ in batch), strict=True))
    num_tokens = int(query_lens.sum())
    return StepInputs(
        token_ids=torch.tensor([seq.token_ids[i] for (seq, _), span in zip(batch, spans, strict=True) for i in span]),
        positions=torch.cat([torch.arange(span.start, span.stop) for span in spans]),
        slot_mappings=tuple(
            torch.tensor(
                [
                    table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE
                    for table, span in zip(tables, spans, strict=True)
                    for i in span
                ]
            )
            for tables in by_group
        ),
        # past its last block a table holds an id that does not exist: reading it would show
        block_tables=tuple(
            torch.nn.utils.rnn.pad_sequence([*map(torch.tensor, tables)], batch_first=True, padding_value=10**6).int()
            for tables in by_group
        ),
        cu_query_lens=cu_query_lens,
        context_lens=context_lens,
        logits_indices=torch.arange(num_tokens) if all_logits else cu_query_lens[1:].long() - 1,
        cu_logits_lens=cu_query_lens if all_logits else torch.arange(len(batch) + 1).int(),
        max_query_len=int(query_lens.max()),
        max_logits_len=int(query_lens.max()) if all_logits else 1,
        max_context_len=int(context_lens.max()),
    )


def _to(inputs: StepInputs, device: torch.device) -> StepInputs:
    values = inputs._asdict()
    moved = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
    moved |= {
        name: tuple(one.to(device) for one in value) for name, value in values.items() if isinstance(value, tuple)
    }
    return inputs._replace(**moved)


def _load(
    path: Path, dtype: torch.dtype = torch.float32, device: str = "cpu", backend: Backend | None = None
) -> CausalLM:
    config, backend = ModelConfig.from_dir(path), backend or choose_backend(device)
    return load_model(path, config, dtype=dtype, device=device, backend=backend, max_model_len=256)


def _tokens(num_tokens: int, seed: int) -> list[int]:
    return torch.randint(VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def _reference_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    return model(torch.tensor([token_ids]), use_cache=False).logits[0].float()


@pytest.fixture(params=[*ARCHITECTURES, *MORE])
def models(request: pytest.FixtureRequest, checkpoint: Callable, reference: Callable) -> tuple[CausalLM, Any]:
    """Ours and transformers', in fp32, of each architecture."""
    path = checkpoint(request.param)
    return _load(path), reference(path)


def test_whole_prompt(models) -> None:
    model, theirs = models
    token_ids = _tokens(100, seed=1)
    (logits,) = PagedDriver(model).step([(Sequence(token_ids), 100)], all_logits=True)
    assert logits.dtype == torch.float32
    assert_close(logits, _reference_logits(theirs, token_ids), **FP32_TOLERANCE)


@pytest.mark.parametrize(("arch", "overrides"), VARIANTS)
def test_variants_of_an_architecture(arch: str, overrides: dict, checkpoint: Callable, reference: Callable) -> None:
    path = checkpoint(arch, **overrides)
    token_ids = _tokens(50, seed=2)
    (logits,) = PagedDriver(_load(path)).step([(Sequence(token_ids), 50)], all_logits=True)
    assert_close(logits, _reference_logits(reference(path), token_ids), **FP32_TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
def test_chunked_prompt(models, chunk: int) -> None:
    model, theirs = models
    token_ids = _tokens(110, seed=3)
    driver, sequence, logits = PagedDriver(model), Sequence(token_ids), []
    for start in range(0, len(token_ids), chunk):
        logits += driver.step([(sequence, min(chunk, len(token_ids) - start))], all_logits=True)
    assert_close(torch.cat(logits), _reference_logits(theirs, token_ids), **FP32_TOLERANCE)


def test_ragged_batch_of_decodes_and_chunks(models) -> None:
    model, theirs = models
    driver = PagedDriver(model)
    sequences = [Sequence(_tokens(n, seed=n)) for n in (1, 17, 16, 45, 90, 33)]
    driver.step([(seq, n) for seq, n in zip(sequences[1:], (16, 15, 20, 64, 31), strict=True)])
    batch = list(zip(sequences, (1, 1, 1, 25, 26, 2), strict=True))  # fresh, decode, decode, chunk, chunk, chunk
    for (sequence, num_tokens), logits in zip(batch, driver.step(batch, all_logits=True), strict=True):
        assert sequence.num_computed_tokens == len(sequence.token_ids)
        assert_close(logits, _reference_logits(theirs, sequence.token_ids)[-num_tokens:], **FP32_TOLERANCE)


def test_greedy_tokens_equal_generate(models) -> None:
    model, theirs = models
    prompts = [_tokens(n, seed=100 + n) for n in (1, 15, 16, 40)]
    driver, sequences = PagedDriver(model), [Sequence(list(prompt)) for prompt in prompts]
    num_new_tokens = 20
    for _ in range(num_new_tokens):
        batch = [(seq, len(seq.token_ids) - seq.num_computed_tokens) for seq in sequences]
        for sequence, logits in zip(sequences, driver.step(batch), strict=True):
            sequence.token_ids.append(int(logits.argmax()))
    for prompt, sequence in zip(prompts, sequences, strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        expected = theirs.generate(ids, attention_mask=mask, max_new_tokens=num_new_tokens, do_sample=False)
        assert sequence.token_ids == expected[0].tolist()


def test_a_step_writes_its_slots_and_nothing_else(models) -> None:
    model, _ = models
    driver, sequence = PagedDriver(model), Sequence(_tokens(20, seed=4))
    driver.step([(sequence, 20)])
    for index, caches in enumerate(driver.kv):
        expected = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, dtype=torch.bool)
        for group, (first, second) in zip(model.layout.groups, sequence.block_tables, strict=True):
            if index < len(group.layers):
                expected[first] = expected[second, :4] = True
        for cache, order in zip(caches, kv_cache.orders(choose_backend("cpu")), strict=True):
            written = ~kv_cache.reordered(cache, order, "plain").isnan().flatten(2)
            assert torch.equal(written.all(-1), expected)
            assert torch.equal(written.any(-1), expected)


def test_a_step_that_samples_nothing_still_fills_the_cache(models) -> None:
    model, theirs = models
    token_ids = _tokens(20, seed=5)
    driver, sequence = PagedDriver(model), Sequence(token_ids)
    driver._allocate(sequence, 19)
    inputs = _inputs([(sequence, 19)], all_logits=False)
    none = {"logits_indices": torch.empty(0, dtype=torch.int64), "cu_logits_lens": torch.zeros(2, dtype=torch.int32)}
    inputs = inputs._replace(**none, max_logits_len=0)
    assert model.forward(inputs, driver.kv).shape == (0, VOCAB_SIZE)
    sequence.num_computed_tokens = 19
    (logits,) = driver.step([(sequence, 1)])
    assert_close(logits, _reference_logits(theirs, token_ids)[-1:], **FP32_TOLERANCE)


@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize("arch", [*ARCHITECTURES, *MORE])
def test_wanted_tokens_have_the_logits_that_they_have_among_all(arch: str, backend: str, checkpoint: Callable) -> None:
    """Behind its keys and values, the last layer computes no others."""
    model = _load(checkpoint(arch), backend=choose_backend("cpu", backend))
    steps = [(30, 7, 1), (1, 1, 1), (1, 20, 1)]  # prompts, decodes, and a chunk between decodes
    among_all, alone = (PagedDriver(model), PagedDriver(model))
    batches = [[Sequence(_tokens(60, seed=n)) for n in range(3)] for _ in range(2)]
    tolerance = {"atol": 0, "rtol": 0} if backend == "cpp" else FP32_TOLERANCE  # torch's bits depend on other rows
    for nums in steps:
        expected = among_all.step(list(zip(batches[0], nums, strict=True)), all_logits=True)
        actual = alone.step(list(zip(batches[1], nums, strict=True)))
        for one, other in zip(actual, expected, strict=True):
            assert_close(one, other[-1:], **tolerance)
    for caches, others in zip(alone.kv, among_all.kv, strict=True):
        for cache, other in zip(caches, others, strict=True):
            assert_close(cache, other, equal_nan=True, **tolerance)


def test_progress_is_told_after_each_layer(models, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = models
    events: list[str] = []
    compute = CausalLM._run

    def recorded(*args: Any) -> Any:
        events.append("layer")
        return compute(*args)

    monkeypatch.setattr(CausalLM, "_run", recorded)
    monkeypatch.setattr(transformer, "LAYERS_AT_ONCE", 1)  # see test_heartbeat.py for several
    driver, sequence = PagedDriver(model), Sequence(_tokens(20, seed=5))
    driver._allocate(sequence, 20)
    model.forward(_inputs([(sequence, 20)], all_logits=False), driver.kv, lambda: events.append("progress"))
    assert events == ["layer", "progress"] * model.config.num_hidden_layers


@pytest.mark.parametrize("arch", [*ARCHITECTURES, *MORE_ARCHITECTURES])
def test_which_layers_run_as_one_op(arch: str, checkpoint: Callable) -> None:
    model = _load(checkpoint(arch), backend=choose_backend("cpu", "cpp"))
    for layer in model.layers:
        assert (layer.op is not None) == (arch not in WITH_MORE_THAN_THE_OP)
    torchs = _load(checkpoint(arch), backend=Backend("cpp", linear="torch"))
    assert all(layer.op is None for layer in torchs.layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arch", [*ARCHITECTURES, "mixtral", "qwen2 moe", "qwen3 moe"])
def test_one_op_gives_the_bits_of_its_parts(
    arch: str, dtype: torch.dtype, checkpoint: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def logits_and_cache() -> list[Tensor]:
        model = _load(checkpoint(arch, dtype=dtype), dtype, backend=choose_backend("cpu", "cpp"))
        driver, sequences = PagedDriver(model, dtype), [Sequence(_tokens(60, seed=n)) for n in range(3)]
        steps = [(30, 7, 1), (1, 1, 1), (1, 20, 1)]  # prompts, decodes, and a chunk between decodes
        logits = [one for nums in steps for one in driver.step(list(zip(sequences, nums, strict=True)))]
        return logits + [cache for caches in driver.kv for cache in caches]

    together = logits_and_cache()
    monkeypatch.setattr(DecoderLayer, "_as_op", lambda _: None)
    for one, other in zip(together, logits_and_cache(), strict=True):
        assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arch", [*ARCHITECTURES, *(arch for arch in MORE if not WITH_EXPERTS & {*arch.values})])
def test_low_precision_is_as_close_to_fp32_as_transformers_is(
    arch: str, dtype: torch.dtype, checkpoint: Callable, reference: Callable
) -> None:
    path = checkpoint(arch, dtype=dtype)
    token_ids = _tokens(100, seed=6)
    (logits,) = PagedDriver(_load(path, dtype), dtype).step([(Sequence(token_ids), 100)], all_logits=True)
    exact = _reference_logits(reference(path), token_ids)  # the same rounded weights, computed in fp32
    rounded = _reference_logits(reference(path, dtype), token_ids)
    ours, theirs = (logits - exact).square().mean().sqrt(), (rounded - exact).square().mean().sqrt()
    # Both round every activation to dtype. We round less often (norm, RoPE and SwiGLU are computed in fp32 and rounded
    # once), so we may not be further from fp32 than transformers, with a margin for luck; and in bf16 no further than
    # 5 % of the logits' own spread, which is what 8 bits of mantissa leave after two such layers. Models with experts are
    # left out: rounding moves a router's choice between two that are nearly equal.
    assert ours < 1.1 * theirs
    assert ours < 0.05 * exact.std()


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_on_a_gpu(arch: str, checkpoint: Callable, reference: Callable) -> None:
    path = checkpoint(arch)
    token_ids = _tokens(110, seed=8)
    driver, sequence = PagedDriver(_load(path, device="cuda"), device="cuda"), Sequence(token_ids)
    logits = [driver.step([(sequence, n)], all_logits=True)[0].cpu() for n in (50, 1, 40, 19)]
    assert_close(torch.cat(logits), _reference_logits(reference(path), token_ids), **FP32_TOLERANCE)
