"""The parts of benchmarks/plant.py that need no server: the fit, what requests take beside steps, the comparison."""

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from flyball_runtime.governor.learner import StepTimeLearner
from flyball_runtime.governor.work import Work
from flyball_simulation.plant import Plant
from flyball_simulation.workload import Arrival

if TYPE_CHECKING:
    from contender import Answer
    from plant import Turn

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TRUE = Plant(
    shape="linear",
    overhead_s=0.005,
    weights_s=0.0,
    token_s=4e-4,
    decode_s=1e-4,
    context_token_s=1e-6,
    attention_pair_s=2e-7,
)
OUTSIDE_S, OUTSIDE_TOKEN_S = 0.003, 2e-6


@pytest.fixture(autouse=True)
def benchmarks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_a_plant_is_found_again_from_its_steps() -> None:
    from plant import fit, told_s
    from recorded_steps import Step

    rng, works = random.Random(0), []
    for _ in range(2000):
        prefill, decodes = rng.choice((0, 0, 0, 0, 16, 100, 400)), rng.randrange(1, 40)
        works.append(Work(prefill, decodes, decodes * rng.randrange(50, 2000), prefill * rng.randrange(1, 1500)))
    plant = structs.replace(TRUE, after_prompt=0.15)
    steps = []
    for number, (work, seconds) in enumerate(
        zip(works, told_s(plant, [Step(work, 1.0) for work in works]), strict=True)
    ):
        interrupted = 5.0 if number % 40 == 0 else 1.0
        steps.append(Step(work, interrupted * rng.gauss(1.0, 0.03) * seconds))
    found = fit([steps[:700], steps[700:]])
    assert found.after_prompt == pytest.approx(0.15, rel=0.15)
    for work in ((0, 1, 100, 0), (0, 32, 32_000, 0), (512, 0, 0, 131_072), (256, 16, 16_000, 65_536)):
        assert found.seconds(*work) == pytest.approx(TRUE.seconds(*work), rel=0.03)


def test_a_slower_machine_is_a_plant_whose_steps_take_longer() -> None:
    from plant import scaled, speed
    from recorded_steps import Step

    works = [Work(0, 4, 400, 0), Work(100, 4, 400, 5000), Work(512, 0, 0, 131_072)]
    steps = [Step(work, 1.3 * TRUE.seconds(*work)) for work in works]
    steps[0] = steps[0]._replace(seconds=1.0)  # the machine did something else
    assert speed(TRUE, steps) == pytest.approx(1.3)
    for work in works:
        assert scaled(TRUE, 1.3).seconds(*work) == pytest.approx(1.3 * TRUE.seconds(*work))


def test_what_a_request_takes_beside_its_steps_is_told_from_requests_alone() -> None:
    from plant import outside_of, scaled

    plants = TRUE, scaled(TRUE, 1.3)
    alone = [(*one, plant) for plant in plants for one in requests_alone(plant)]
    assert outside_of(alone) == pytest.approx((OUTSIDE_S, OUTSIDE_TOKEN_S), rel=0.01)


def test_steps_that_a_server_learns_from_are_read_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from recorded_steps import Step, Steps, record

    learned = []
    monkeypatch.setattr(StepTimeLearner, "observe", lambda _, work, seconds: learned.append(Step(work, seconds)))
    steps, learner = Steps(tmp_path / "steps"), StepTimeLearner()
    done = [Step(Work(100, 4, 4000, 5000), 0.25), Step(Work(0, 5, 5100, 0), 0.0125), Step(Work(0, 1, 7, 0), 0.5)]
    with (tmp_path / "steps").open("ab", buffering=0) as file:
        record(file)
        assert steps.new() == []
        for some in (done[:2], done[2:]):
            for step in some:
                learner.observe(*step)
            assert steps.new() == some
    assert learned == done


def test_the_simulator_tells_what_a_server_like_its_plant_would_show() -> None:
    from contender import Answer
    from plant import compare, scaled

    as_measured, slower = turn(TRUE), turn(scaled(TRUE, 1.3))
    found = compare([as_measured, slower], TRUE, 0.0)
    assert set(found["off"].values()) == {0.0}
    assert (found["requests"], found["steps_took"]) == (120, [1.0, 1.3])
    assert found["steps_took_themselves"] == [1.0, 1.3]

    late = [Answer(ttft_s=2 * (one.ttft_s or 0.0), gaps_s=one.gaps_s) for one in as_measured.answers]
    off = compare([as_measured._replace(answers=late)], TRUE, 0.0)["off"]
    assert (off["ttft_p95_s"], off["itl_p95_s"]) == (-0.5, 0.0)

    as_measured.answers[7].problem = "status 500"
    with pytest.raises(SystemExit, match="1 requests of a load failed: status 500"):
        compare([as_measured, slower], TRUE, 0.0)


def requests_alone(plant: Plant) -> "list[tuple[int, Answer]]":
    """Return what requests see that come one after the other to a server like this plant."""
    from contender import Answer

    alone = []
    for num_tokens in (16, 64, 256, 500):
        first_s = plant.seconds(num_tokens, 0, 0, num_tokens * (num_tokens + 1) // 2)
        alone.append((num_tokens, Answer(ttft_s=first_s + OUTSIDE_S + OUTSIDE_TOKEN_S * num_tokens)))
    return alone


def turn(plant: Plant) -> "Turn":
    """Return a turn of a load on a server like this plant."""
    from contender import Answer
    from plant import NUM_SIMULATIONS, Outside, Seen, Turn, simulate
    from recorded_steps import Step

    load = [Arrival(0.2 * number, 200 + number, 20) for number in range(60)]
    simulate(load, plant, 0.0, Outside(OUTSIDE_S, OUTSIDE_TOKEN_S), seen := Seen([], []))
    assert len(seen.ttft_s) == NUM_SIMULATIONS * len(load)
    answers = [
        Answer(ttft_s=one, gaps_s=seen.gaps_s[19 * at : 19 * at + 19]) for at, one in enumerate(seen.ttft_s[:60])
    ]
    steps = [Step(work, plant.seconds(*work)) for work in (Work(0, 4, 400, 0), Work(100, 4, 400, 5000))]
    return Turn(load, requests_alone(plant), answers, steps, around=steps)
