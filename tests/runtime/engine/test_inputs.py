"""The index arithmetic of a step's tensors, against one written naively, token by token."""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flyball_runtime.core.request import Request
from flyball_runtime.core.sampling import SamplingParams
from flyball_runtime.core.sequence import Sequence
from flyball_runtime.engine.inputs import InputBuilder
from flyball_runtime.model.inputs import StepInputs
from flyball_runtime.scheduler import BatchPlan, BlockedBy

BLOCK_SIZE, MAX_LEN, MAX_SEQS = 4, 64, 5


def make_sequence(name: str, num_prompt_tokens: int, rng: random.Random) -> Sequence:
    prompt = [rng.randrange(100) for _ in range(num_prompt_tokens)]
    request = Request(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams())
    sequence = Sequence(request, max_model_len=MAX_LEN, eos_token_ids=frozenset())
    sequence.arrival_index = int(name)
    return sequence


def plan_of(chunks: list[tuple[Sequence, int]]) -> BatchPlan:
    """Decodes first, as the scheduler orders them."""
    is_decode = [len(seq.token_ids) - seq.num_computed_tokens == 1 for seq, _ in chunks]
    ordered = [c for c, d in zip(chunks, is_decode, strict=True) if d] + [
        c for c, d in zip(chunks, is_decode, strict=True) if not d
    ]
    return BatchPlan(
        sequences=tuple(seq for seq, _ in ordered),
        starts=tuple(seq.num_computed_tokens for seq, _ in ordered),
        num_scheduled=tuple(num for _, num in ordered),
        samples=tuple(seq.num_computed_tokens + num == len(seq.token_ids) for seq, num in ordered),
        num_decodes=sum(is_decode),
        num_tokens=sum(num for _, num in ordered),
        preempted=(),
        blocked_by=BlockedBy.NONE,
        num_prefix_queried_tokens=0,
        num_prefix_hit_tokens=0,
        num_recomputed_tokens=0,
    )


def check(inputs: StepInputs, plan: BatchPlan) -> None:
    token_ids, positions, slots, last = [], [], [], []
    for seq, start, num, samples in zip(plan.sequences, plan.starts, plan.num_scheduled, plan.samples, strict=True):
        for position in range(start, start + num):
            token_ids.append(seq.token_ids[position])
            positions.append(position)
            slots.append(seq.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        if samples:
            last.append(len(token_ids) - 1)
    assert inputs.token_ids.tolist() == token_ids
    assert inputs.positions.tolist() == positions
    assert inputs.slot_mapping.tolist() == slots
    assert inputs.logits_indices.tolist() == last
    for index, seq in enumerate(plan.sequences):
        query = slice(inputs.cu_query_lens[index], inputs.cu_query_lens[index + 1])
        assert query.stop - query.start == plan.num_scheduled[index]
        context_len = plan.starts[index] + plan.num_scheduled[index]
        assert inputs.context_lens[index] == context_len
        num_blocks = -(-context_len // BLOCK_SIZE)
        assert inputs.block_tables[index, :num_blocks].tolist() == seq.block_table[:num_blocks]
    assert inputs.max_query_len == max(plan.num_scheduled)
    assert inputs.max_context_len == int(inputs.context_lens.max())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_inputs_match_a_naive_layout_over_many_steps(seed: int) -> None:
    """Sequences start, chunk, decode, get preempted and leave, so that rows change owners."""
    rng = random.Random(seed)
    builder = InputBuilder(
        max_num_seqs=MAX_SEQS, max_model_len=MAX_LEN, block_size=BLOCK_SIZE, device=torch.device("cpu")
    )
    block_ids = iter(range(10**6))
    running: dict[int, Sequence] = {}
    waiting = [make_sequence(f"{index}", rng.randrange(1, 20), rng) for index in range(12)]
    for _ in range(40):
        for row in set(range(MAX_SEQS)) - set(running):
            if waiting and rng.random() < 0.6:
                seq = waiting.pop(0)
                seq.row, running[row] = row, seq
        chunks = []
        for seq in running.values():
            missing = len(seq.token_ids) - seq.num_computed_tokens
            num = rng.randint(0, missing)
            if num:
                while len(seq.block_table) * BLOCK_SIZE < seq.num_computed_tokens + num:
                    seq.block_table.append(next(block_ids))
                chunks.append((seq, num))
        if not chunks:
            continue
        plan = plan_of(chunks)
        check(builder.build(plan), plan)
        sampled = [seq for seq, samples in zip(plan.sequences, plan.samples, strict=True) if samples]
        new_tokens = [rng.randrange(100) for _ in sampled]
        builder.remember(
            torch.tensor([seq.row for seq in sampled]).numpy().astype("int64"),
            torch.tensor(new_tokens).numpy().astype("int64"),
        )
        for seq, num in chunks:
            seq.num_computed_tokens += num
        for seq, token in zip(sampled, new_tokens, strict=True):
            seq.token_ids.append(token)
        for row, seq in list(running.items()):
            if len(seq.token_ids) > 40 or rng.random() < 0.05:
                del running[row]
            elif rng.random() < 0.1:  # preempted: new blocks when it comes back
                del running[row]
                seq.block_table, seq.num_computed_tokens, seq.row = [], 0, None
                seq.num_preemptions += 1
                waiting.append(seq)
