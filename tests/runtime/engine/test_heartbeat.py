"""Progress as the other process sees it."""

import multiprocessing
from pathlib import Path

import pytest

from checkpoints import make_checkpoint
from engines import make_engine, random_prompts
from flyball_runtime.core.clock import FakeClock
from flyball_runtime.core.request import Request
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.engine.heartbeat import Heartbeat, PauseLimit, pause_limit
from flyball_runtime.model import transformer


def test_a_beat_in_another_process_counts_here() -> None:
    clock = FakeClock(100.0)
    heartbeat = Heartbeat(clock)
    clock.advance(50)
    assert heartbeat.age_s() == 50
    child = multiprocessing.get_context("spawn").Process(target=heartbeat.beat)  # with a copy of the clock, at 150 s
    clock.advance(5)
    child.start()
    child.join()
    assert (child.exitcode, heartbeat.age_s()) == (0, 0)


def test_a_step_is_alive_as_long_as_its_layers_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer takes 20 s here, so a step takes minutes; nothing is ever silent for longer than one layer."""
    monkeypatch.setattr(transformer, "TOKENS_AT_ONCE", 200)  # as many as the step has: one layer at a time
    clock = FakeClock()
    heartbeat, ages = Heartbeat(clock), []

    def after_layer() -> None:
        clock.advance(20)
        ages.append(heartbeat.age_s())
        heartbeat.beat()

    engine = make_engine(make_checkpoint(tmp_path, "qwen3", num_hidden_layers=8), on_progress=after_layer)
    (prompt,) = random_prompts([200])
    engine.submit(Request(request_id="a", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1)))
    engine.step()
    assert ages == [20] * 8
    assert clock.now() == 160


def test_layers_of_few_tokens_run_as_one(tmp_path: Path) -> None:
    ends: list[int] = []
    path = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=20)
    engine = make_engine(path, on_progress=lambda: ends.append(1))
    (prompt,) = random_prompts([100])
    engine.submit(
        Request(request_id="a", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=2, ignore_eos=True))
    )
    numbers = []
    while engine.has_work():
        engine.step()
        numbers.append(len(ends))
        ends.clear()
    assert numbers == [2, 2], "ten at once with 100 tokens, and 16 with one"


def test_a_slow_machine_gets_the_time_that_its_largest_step_needs() -> None:
    assert pause_limit(30.0, 0.5) == PauseLimit(30.0, "--max-heartbeat-age")
    assert pause_limit(30.0, 10.0) == PauseLimit(30.0, "--max-heartbeat-age")
    assert pause_limit(30.0, 40.0) == PauseLimit(120.0, "3 times the longest pause of a step")
    assert pause_limit(300.0, 40.0) == PauseLimit(300.0, "--max-heartbeat-age")
