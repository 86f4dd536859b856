"""The parts of benchmarks/plant.py that need no server: the fit, what a server takes beside its steps, the comparison."""

import random
from pathlib import Path

import pytest

from flyball_simulation.plant import Plant
from flyball_simulation.workload import Arrival

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


@pytest.fixture(autouse=True)
def benchmarks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_a_plant_is_found_again_from_its_steps() -> None:
    from plant import Step, errors, fit

    rng, steps = random.Random(0), []
    for number in range(2000):
        prefill, decodes = rng.choice((0, 16, 100, 400)), rng.randrange(1, 40)
        work = prefill, decodes, decodes * rng.randrange(50, 2000), prefill * rng.randrange(1, 1500)
        interrupted = 5.0 if number % 40 == 0 else 1.0
        steps.append(Step(*work, interrupted * rng.gauss(1.0, 0.03) * TRUE.seconds(*work)))
    found = fit(steps[::2])
    apart = sorted(errors(found, steps[1::2]))
    assert apart[len(apart) // 2] < 0.03
    for work in ((0, 1, 100, 0), (0, 32, 32_000, 0), (512, 0, 0, 131_072), (256, 16, 16_000, 65_536)):
        assert found.seconds(*work) == pytest.approx(TRUE.seconds(*work), rel=0.03)


def test_what_a_server_takes_beside_its_steps_is_told_from_single_requests() -> None:
    from contender import Answer
    from plant import outside_of

    singles = []
    for num_tokens in (16, 64, 256, 500):
        first_s = TRUE.seconds(num_tokens, 0, 0, num_tokens * (num_tokens + 1) // 2)
        gaps_s = [TRUE.seconds(0, 1, num_tokens + place + 1, 0) + 5e-4 for place in range(20)]
        gaps_s[3] += 0.1  # the machine did something else
        singles.append((num_tokens, Answer(ttft_s=first_s + 0.003 + 2e-6 * num_tokens, gaps_s=gaps_s)))
    found = outside_of(singles, TRUE)
    assert found == pytest.approx((0.003, 2e-6, 5e-4), rel=0.01)


def test_the_simulator_tells_what_a_server_like_its_plant_would_show() -> None:
    from contender import Answer
    from plant import Outside, compare, simulate

    load = [Arrival(0.2 * number, 200 + number, 20) for number in range(60)]
    told = simulate(load, TRUE, 0.0, Outside(0.003, 2e-6, 5e-4))
    ttft_s, gaps_s = told
    answers = [Answer(ttft_s=one, gaps_s=gaps_s[19 * place : 19 * place + 19]) for place, one in enumerate(ttft_s)]
    assert set(compare(load, answers, told)["off"].values()) == {0.0}
    slower = [Answer(ttft_s=2 * (one.ttft_s or 0.0), gaps_s=one.gaps_s) for one in answers]
    off = compare(load, slower, told)["off"]
    assert (off["ttft_p95_s"], off["itl_p95_s"]) == (-0.5, 0.0)
    with pytest.raises(SystemExit, match="1 of 300 requests failed: status 500"):
        compare(load, [Answer(problem="status 500"), *answers[1:]], told)
