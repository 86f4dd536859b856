"""Greedy tokens of further architectures, and of those left to transformers, equal its own; test_tokens.py goes deeper."""

from pathlib import Path

import pytest

from checkpoints import MORE_ARCHITECTURES, OTHER_ARCHITECTURES, make_checkpoint
from engines import Reference, make_engine, random_prompts
from flyball_runtime.core.request import Request, SamplingParams
from flyball_runtime.engine.engine import Engine

SAMPLING = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.mark.parametrize("arch", [*MORE_ARCHITECTURES, *OTHER_ARCHITECTURES])
def test_chunks_of_several_rows_then_prefix_hits(arch: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, arch)
    prompts = random_prompts([1, 17, 60])
    expected = Reference(path).generate(prompts, SAMPLING.max_tokens)
    engine = make_engine(path, max_num_seqs=4, max_num_batched_tokens=13)
    assert run(engine, prompts) == (expected, 0)
    assert run(engine, prompts) == (expected, 16 + 48)


def run(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """Return the output tokens, and how many prompt tokens were cached."""
    for index, prompt in enumerate(prompts):
        engine.submit(Request(request_id=str(index), prompt_token_ids=prompt, sampling=SAMPLING))
    outputs: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    hits = 0
    while engine.has_work():
        output = engine.step()
        assert output.stats is not None
        hits += output.stats.num_prefix_hit_tokens
        for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
            outputs[request_id].append(token_id)
    return list(outputs.values()), hits
