"""Several tokens of each sequence are launched together: when, how many, and what a step then shows."""

from pathlib import Path
from typing import Any

import pytest

from checkpoints import make_checkpoint
from engines import GREEDY, generate, make_engine, random_prompts
from flyball_protocol import LimitsChange, LimitsStatus, LimitsUpdate
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.request import Finished, Request
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.core.speculation import SpeculativeConfig
from flyball_runtime.engine.engine import LONGEST_AHEAD_S, Engine
from flyball_runtime.llm import LLM
from flyball_runtime.scheduler import Step

ALL = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=24)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture
def launched() -> list[list[int]]:
    """Of each launch of several plans, how many they were, and how many rows each had."""
    return []


def watched(engine: Engine, launched: list[list[int]]) -> Engine:
    """Have an engine note what it launches together. It takes steps for short, however busy the machine is."""
    engine.governor.predict = lambda _: 0.0  # type: ignore[method-assign]
    executor = engine._executor
    launch = executor.launch_decodes

    def launch_decodes(plans: list[Any]) -> list[Any]:
        launched.append([len(plans), len(plans[0].rows)])
        return launch(plans)

    executor.launch_decodes = launch_decodes  # type: ignore[method-assign]
    return engine


def test_sequences_get_so_many_tokens_at_a_time(path: Path, launched: list[list[int]]) -> None:
    prompts = random_prompts([5, 20, 9])
    expected = generate(make_engine(path), prompts, ALL)
    engine = watched(make_engine(path, num_scheduler_steps=7), launched)
    assert generate(engine, prompts, ALL) == expected
    assert launched == [[7, 3]] * 3 + [[2, 3]]  # the first token is the prompt's


def test_none_is_computed_behind_the_first_that_is_the_last_of_a_sequence(
    path: Path, launched: list[list[int]]
) -> None:
    engine = watched(make_engine(path, num_scheduler_steps=100), launched)
    for name, num in (("a", 6), ("b", 20)):
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num)
        assert engine.submit(Request(request_id=name, prompt_token_ids=[5, 6, 7], sampling=sampling)) is None
    while engine.has_work():
        engine.step()
    assert launched == [[5, 2], [14, 1]]


def test_nothing_is_planned_ahead_of_those_who_wait(path: Path, launched: list[list[int]]) -> None:
    engine = watched(make_engine(path, num_scheduler_steps=7, max_num_seqs=2), launched)
    generate(engine, random_prompts([5, 20, 9]), ALL)
    assert launched == [[7, 1]] * 3 + [[2, 1]]  # the third alone


@pytest.mark.parametrize(
    "settings",
    [
        {"stop": ("never",)},
        {"logprobs": 1},
        {"presence_penalty": 0.1},
        {"logit_bias": {5: 0.1}},
        {"min_tokens": 5},
    ],
)
def test_a_sequence_that_more_than_choices_are_asked_of_takes_single_steps(
    path: Path, settings: dict[str, Any], launched: list[list[int]]
) -> None:
    """Only text shows stop strings, and what else there is depends on the tokens before or is made of the logits."""
    engine = watched(make_engine(path, num_scheduler_steps=7), launched)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=24, **settings)
    for name, one in (("a", sampling), ("b", SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=40))):
        assert engine.submit(Request(request_id=name, prompt_token_ids=[5, 6, 7], sampling=one)) is None
    while engine.has_work():
        engine.step()
    assert all(num_rows == 1 for _, num_rows in launched)
    assert sum(num for num, _ in launched) == 40 - 24


def test_a_stop_token_ends_a_sequence_where_it_comes(path: Path, launched: list[list[int]]) -> None:
    (prompt, other) = random_prompts([9, 30])
    full, rest = generate(make_engine(path), [prompt, other], ALL)
    at = next(i for i in range(4, 20) if full[i] not in full[:i])
    engine = watched(make_engine(path, num_scheduler_steps=24), launched)
    for name, ids, sampling in (
        ("a", prompt, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=24, stop_token_ids=(full[at],))),
        ("b", other, ALL),
    ):
        assert engine.submit(Request(request_id=name, prompt_token_ids=ids, sampling=sampling)) is None
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    endings = []
    used = []
    while engine.has_work():
        step = engine.step()
        for name, token_id in zip(step.request_ids, step.token_ids, strict=True):
            tokens[name].append(token_id)
        endings += [(one.request_id, one.reason) for one in step.endings if isinstance(one, Finished)]
        used.append(engine.kv_cache.counts().used)
    assert tokens == {"a": full[: at + 1], "b": rest}
    assert endings == [("a", "stop"), ("b", "length")]
    assert launched == [[23, 2]]
    assert used[-1] == 0


def test_steps_launched_together_are_shown_one_by_one(path: Path) -> None:
    engine = watched(make_engine(path, num_scheduler_steps=8), [])
    engine.submit(Request(request_id="a", prompt_token_ids=[5, 6, 7], sampling=ALL))
    stats = []
    while engine.has_work():
        step = engine.step()
        stats.append(step.stats)
        assert len(step.token_ids) == 1
    assert [one.num_decodes for one in stats] == [0] + [1] * 23
    assert all(one.duration_s > 0 for one in stats)
    assert stats[1].duration_s == stats[8].duration_s != stats[9].duration_s  # the mean of those launched together


def test_no_more_is_launched_together_than_may_take_so_long(
    path: Path, launched: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = watched(make_engine(path, num_scheduler_steps=20), launched)
    monkeypatch.setattr(engine.governor, "predict", lambda _: LONGEST_AHEAD_S / 5.5)
    generate(engine, random_prompts([5]), ALL)
    assert [num for num, _ in launched] == [5, 5, 5, 5, 3]
    launched.clear()
    monkeypatch.setattr(engine.governor, "predict", lambda _: 2 * LONGEST_AHEAD_S)
    generate(engine, random_prompts([5]), ALL)
    assert launched == []


def test_single_steps_show_first_how_long_they_take(path: Path, launched: list[list[int]]) -> None:
    engine = watched(make_engine(path, num_scheduler_steps=16), launched)
    del engine.governor.predict
    generate(engine, random_prompts([5]), ALL)
    assert sum(num for num, _ in launched) < 23


def test_what_was_launched_ahead_of_an_abort_is_dropped(path: Path) -> None:
    engine = watched(make_engine(path, num_scheduler_steps=16), [])
    for name in ("a", "b"):
        engine.submit(Request(request_id=name, prompt_token_ids=[5, 6, 7], sampling=ALL))
    engine.step()
    engine.step()
    assert engine.abort("a") is not None
    tokens = []
    while engine.has_work():
        step = engine.step()
        tokens += step.token_ids
        assert set(step.request_ids) <= {"b"}
    assert len(tokens) == 22
    assert engine.kv_cache.counts().used == 0


def test_a_plan_that_does_more_is_launched_by_itself(path: Path, launched: list[list[int]]) -> None:
    """Behind a lowered limit, blocks are moved out of the memory that is given up."""
    early, *prompts = random_prompts([100, 20, 40, 30])  # the first has the lowest blocks, and ends early
    expected = generate(make_engine(path), prompts, ALL)
    settings: dict[str, Any] = {"max_model_len": 128, "enable_prefix_caching": False}
    engine = watched(make_engine(path, num_scheduler_steps=5, **settings), launched)
    plan, num_plans, num_moved = engine.scheduler.plan, 0, 0

    def plan_and_lower(now_s: float) -> Step | None:
        nonlocal num_plans, num_moved
        num_plans += 1
        if num_plans == 11:
            update = LimitsUpdate(revision=1, limits=LimitsChange(kv_cache_fraction=12 / engine.kv_cache.num_blocks))
            assert engine.post_limits(update).status in (LimitsStatus.APPLIED, LimitsStatus.DEFERRED)
        step = plan(now_s)
        num_moved += 0 if step is None else step.num_moved_blocks
        return step

    engine.scheduler.plan = plan_and_lower  # type: ignore[method-assign]
    outputs: dict[str, list[int]] = {}
    for name, prompt, num in (("early", early, 3), *((str(i), prompt, 24) for i, prompt in enumerate(prompts))):
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num)
        assert engine.submit(Request(request_id=name, prompt_token_ids=prompt, sampling=sampling)) is None
    while engine.has_work():
        step = engine.step()
        for name, token_id in zip(step.request_ids, step.token_ids, strict=True):
            outputs.setdefault(name, []).append(token_id)
    assert [outputs[str(i)] for i in range(len(prompts))] == expected
    assert num_moved > 0
    # behind the prompts: with the early one, five, two and one that moves blocks, the others
    assert launched == [[2, 4], [5, 3], [2, 3], [5, 3], [5, 3], [3, 3]]


def test_an_llm_launches_several_and_leaves_nothing_under_way(path: Path) -> None:
    llm = LLM(path, dtype="float32", max_model_len=128)
    launched: list[list[int]] = []
    watched(llm.engine, launched)
    (full,) = llm.generate([[5, 6, 7]], ALL)
    assert max(num for num, _ in launched) > 1
    stop = full.token_ids[1]
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=(stop,)))
    assert output.token_ids == full.token_ids[: full.token_ids.index(stop) + 1]
    assert not llm.engine.has_work()
    assert llm.engine.kv_cache.counts().used == 0


@pytest.mark.parametrize(
    "settings", [{"async_scheduling": True}, {"speculative_config": SpeculativeConfig(num_speculative_tokens=2)}]
)
def test_other_ways_to_plan_ahead_exclude_it(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="num_scheduler_steps is 4 with async_scheduling or a speculative_config"):
        EngineConfig(model="", served_model_name="", num_scheduler_steps=4, **settings)


def test_an_llm_that_plans_otherwise_does_not(path: Path) -> None:
    for settings in ({"async_scheduling": True}, {"speculative_config": {"num_speculative_tokens": 2}}):
        llm = LLM(path, dtype="float32", max_model_len=128, **settings)
        assert len(llm.generate([[5, 6, 7]], GREEDY)) == 1


def test_a_model_that_is_not_one_op_takes_single_steps(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "gemma2")  # its logits are bounded behind the head
    prompts = random_prompts([5, 20])
    launched: list[list[int]] = []
    engine = watched(make_engine(path, num_scheduler_steps=7), launched)
    assert generate(engine, prompts) == generate(make_engine(path), prompts)
    assert launched == []
