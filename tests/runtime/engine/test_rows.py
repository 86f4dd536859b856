"""The index arithmetic of a step's tensors, against one written naively, token by token."""

import random
from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from flyball_kernels import choose_backend
from flyball_runtime.core.speculation import SpeculativeConfig
from flyball_runtime.engine.rows import Rows, entries_of
from flyball_runtime.kv_cache import KVCache
from flyball_runtime.model.transformer import StepInputs
from flyball_runtime.scheduler import Drafter, Scheduler, SchedulerConfig, Step
from sequences import make_sequence

BLOCK_SIZE, MAX_LEN, MAX_SEQS = 4, 64, 5


def check(inputs: StepInputs, step: Step) -> None:
    token_ids, positions, slots, last, ends = [], [], [], [], [0]
    drafts = dict(step.drafted)
    for seq, start, num, samples in zip(step.sequences, step.starts, step.num_scheduled, step.samples, strict=True):
        known = seq.token_ids + drafts.get(seq, array("I"))
        for position in range(start, start + num):
            token_ids.append(known[position])
            positions.append(position)
            slots.append(seq.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        if seq in drafts:
            last += range(len(token_ids) - num, len(token_ids))
        elif samples:
            last.append(len(token_ids) - 1)
        ends.append(len(last))
    assert inputs.token_ids.tolist() == token_ids
    assert inputs.positions.tolist() == positions
    assert inputs.slot_mappings[0].tolist() == slots
    assert inputs.logits_indices.tolist() == last
    assert inputs.cu_logits_lens.tolist() == ends
    assert inputs.max_logits_len == int(inputs.cu_logits_lens.diff().max())
    for index, seq in enumerate(step.sequences):
        query = slice(inputs.cu_query_lens[index], inputs.cu_query_lens[index + 1])
        assert query.stop - query.start == step.num_scheduled[index]
        context_len = step.starts[index] + step.num_scheduled[index]
        assert inputs.context_lens[index] == context_len
        num_blocks = -(-context_len // BLOCK_SIZE)
        assert inputs.block_tables[0][index, :num_blocks].tolist() == seq.block_table[:num_blocks]
    assert inputs.max_query_len == max(step.num_scheduled)
    assert inputs.max_context_len == int(inputs.context_lens.max())
    assert [t.dtype for t in (inputs.token_ids, inputs.positions, inputs.slot_mappings[0])] == [torch.int64] * 3
    narrow = (inputs.block_tables[0], inputs.cu_query_lens, inputs.context_lens, inputs.cu_logits_lens)
    assert [t.dtype for t in narrow] == [torch.int32] * 4
    assert inputs.block_tables[0].is_contiguous()


def make_rows(backend: str, max_num_seqs: int) -> Rows:
    return Rows(
        max_num_seqs=max_num_seqs,
        max_model_len=MAX_LEN,
        block_size=BLOCK_SIZE,
        device=torch.device("cpu"),
        backend=choose_backend("cpu", backend),
    )


@pytest.mark.parametrize("backend", ["cpp", "torch", pytest.param("triton", marks=pytest.mark.slow)])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_inputs_match_a_naive_layout_over_many_steps(backend: str, seed: int) -> None:
    """Sequences start, chunk, decode, get preempted and leave, so that rows change owners."""
    rng = random.Random(seed)
    config = SchedulerConfig(max_model_len=MAX_LEN, max_num_seqs=MAX_SEQS, max_num_batched_tokens=rng.randint(5, 30))
    kv_cache = KVCache(rng.randint(16, 30), BLOCK_SIZE, enable_prefix_caching=rng.random() < 0.5)
    drafting = SpeculativeConfig(num_speculative_tokens=rng.randint(1, 6), prompt_lookup_min=1)
    scheduler = Scheduler(config, kv_cache, drafter=Drafter(drafting) if rng.random() < 0.5 else None)
    rows = make_rows(backend, MAX_SEQS)
    names = []
    for _ in range(12 if backend == "triton" else 60):  # in Triton's interpreter, which is slow
        if rng.random() < 0.3:
            prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
            seq = make_sequence(prompt, max_tokens=rng.randint(1, 24), max_model_len=MAX_LEN)
            scheduler.submit(seq)
            names.append(seq.request_id)
        if names and rng.random() < 0.05:
            scheduler.abort(rng.choice(names))
        step = scheduler.plan()
        if step is None:
            continue
        rows.apply(step.plan)
        check(rows.inputs(step.plan, entries_of(step.plan)), step)
        tokens = [rng.randrange(6) for _ in step.sampled]
        rows.remember([seq.row for seq in step.sampled], torch.tensor(tokens, dtype=torch.int64))
        scheduler.commit(step, tokens, num_accepted=[rng.randint(0, len(drafts)) for drafts in step.drafts])


@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_a_row_without_a_token_goes_on_with_one_that_a_model_can_take(backend: str) -> None:
    rows = make_rows(backend, 2)
    rows.remember([1, 0], torch.tensor([-1, 7]))
    step = Step.of_decodes([], [])
    step.seal(0)
    plan = structs.replace(
        step.plan, rows=[1, 0], starts=[3, 2], num_scheduled=[1, 1], samples=[True, True], num_decodes=2
    )
    assert rows.inputs(plan, entries_of(plan)).token_ids.tolist() == [0, 7]
