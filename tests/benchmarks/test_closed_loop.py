"""The parts of benchmarks/closed_loop.py that need no model: time that stands still, and what is made of the figures."""

import time
from pathlib import Path
from typing import IO

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


TICKER = """
import multiprocessing, sys, time

def tick(queue):
    while True:
        queue.put((time.monotonic(), time.perf_counter()))
        time.sleep(0.01)

def main(words):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    context.Process(target=tick, args=(queue,), daemon=True).start()
    while True:
        print(*queue.get(), flush=True)
"""


def line(stream: IO[bytes] | None) -> tuple[float, float]:
    assert stream is not None
    monotonic_s, counter_s = stream.readline().split()
    return float(monotonic_s), float(counter_s)


def test_a_stopped_group_and_its_clocks_stand_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from own_time import OwnTime

    (tmp_path / "ticker.py").write_text(TICKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with (tmp_path / "errors").open("wb") as errors:
        group = OwnTime("ticker", clock=tmp_path / "clock", errors=errors)
    try:
        before = line(group.process.stdout)
        group.stop()
        time.sleep(1.0)
        group.go_on()
        after = [line(group.process.stdout) for _ in range(50)]
    finally:
        group.kill()
    times = [before, *after]
    assert times == sorted(times), "a clock went back"
    late_s = time.monotonic() - times[-1][0]
    assert late_s > 1.0, f"the clock of the group is only {late_s:.3f} s behind"


def test_a_verdict_counts_slices() -> None:
    from closed_loop_report import verdict

    clear = verdict([(0.9, 0.7)] * 9 + [(0.5, 0.6)])
    assert (clear["auto_is"], clear["slices_better"], clear["slices_worse"]) == ("ahead", 9, 1)
    assert verdict([(0.7, 0.9)] * 9 + [(0.6, 0.5)])["auto_is"] == "behind"
    assert verdict([(0.9, 0.7)] * 6 + [(0.5, 0.6)] * 4)["auto_is"] == "not told apart"
    assert verdict([(1.0, 1.0)] * 20) == {
        "auto_is": "not told apart",
        "slices_better": 0,
        "slices_worse": 0,
        "slices_equal": 20,
        "median_difference": 0.0,
        "mean_difference": 0.0,
        "chance": 1.0,
    }


def test_steps_with_a_whole_prompt_are_counted_at_least() -> None:
    from closed_loop import CHAT, Speed, prompt_share

    chat = [(least + most) / 2 for least, most in (CHAT[:2], CHAT[2:])]
    assert 1155 / chat[0] == pytest.approx(5.0, rel=0.02) and 211 / chat[1] == pytest.approx(5.0, rel=0.02)
    speed = Speed(long_prompt_s=1.28, gap_s=0.0084, prompt_token_s=0.000625, output_token_s=0.00093)
    a_request_s = chat[0] * 0.000625 + chat[1] * 0.00093
    per_s = 0.7 / a_request_s
    others_per_s = (1.0 - per_s * chat[0] * 0.000625) / 0.0084
    assert prompt_share(speed, 0.7) == pytest.approx(per_s / (per_s + others_per_s))
    assert prompt_share(speed, 0.5) < 0.05 < prompt_share(speed, 0.7) < prompt_share(speed, 0.9) < 1.0


def test_requests_count_in_the_slice_in_which_they_were_sent() -> None:
    from closed_loop_report import pooled, slices, summary
    from contender import Answer, Ask, Outcome
    from flyball_operator.spec import Objectives

    objectives = Objectives(ttft_p95_milliseconds=1000, inter_token_latency_p95_milliseconds=100)
    load = [
        Ask(at_s, phase, [1], 2) for at_s, phase in ((1.0, "chat"), (2.0, "chat"), (16.0, "batch"), (17.0, "batch"))
    ]
    in_time, late, slow = Answer(0.5, [0.05]), Answer(1.5, [0.05]), Answer(0.5, [0.2])
    failed = Answer(0.5, [0.05], problem="1 of 2 tokens")
    outcome = Outcome(
        answers=[in_time, late, slow, failed],
        final_limits=[],
        resident_bytes_before=1,
        resident_bytes_after=2,
        decisions=[],
        num_decisions=0,
        num_replayed=0,
        status={},
    )
    found = summary(load, outcome, objectives)
    assert (found["share_good"], found["failed"], found["problems"]) == (0.25, 1, {"1 of 2 tokens": 1})
    assert found["share_good_by_phase"] == {"chat": 0.5, "batch": 0.0}
    rows = slices(load, {"auto": outcome}, objectives, [{"auto": 0.1}] * 3, 15.0)
    assert [(row["phase"], row["requests"]) for row in rows] == [("chat", 2), ("batch", 2), (None, 0)]
    assert [row["share_good"]["auto"] for row in rows] == [0.5, 0.0, None]
    assert pooled(rows, "auto", 2) == [(1.0, 0.25)]
