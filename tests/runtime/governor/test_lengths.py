import math
from random import Random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyball_runtime.core.request import Request, Sequence
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.governor import OutputLengths


def sequence(num_output_tokens: int, *, max_tokens: int = 10_000, client: str = "") -> Sequence:
    request = Request(
        request_id="a", prompt_token_ids=[1] * 5, sampling=SamplingParams(max_tokens=max_tokens), client=client
    )
    seq = Sequence(request, max_model_len=20_000, eos_token_ids=frozenset())
    seq.token_ids.extend([1] * num_output_tokens)
    return seq


def known(outputs: list[int], *, prompt: int = 100, route: str = "") -> OutputLengths:
    lengths = OutputLengths()
    for output in outputs:
        lengths.observe(prompt, output, route=route)
    return lengths


def test_nothing_is_said_before_enough_is_known():
    lengths = known([100] * 15)
    assert (lengths.snapshot(), lengths.expected_remaining(0), lengths.reserve([sequence(3)])) == (None, None, 0)
    lengths.observe(100, 0)  # ended without output
    assert lengths.snapshot() is None
    lengths.observe(100, 100)
    assert lengths.snapshot() is not None and lengths.reserve([sequence(3)]) > 0


def test_answers_of_one_length_leave_what_is_missing():
    lengths = known([100] * 50)
    assert lengths.expected_remaining(0) == pytest.approx(100)
    assert lengths.expected_remaining(64) == pytest.approx(36)
    assert lengths.reserve([sequence(64)] * 10) == 360
    assert lengths.reserve([sequence(64, max_tokens=70)] * 10) == 60, "each sequence ends at its own maximum"


def test_an_answer_that_is_long_already_is_expected_to_be_one_of_the_long_ones():
    lengths = known([10, 10, 10, 1000] * 50)
    young, old = lengths.expected_remaining(1), lengths.expected_remaining(16)
    assert young is not None and old is not None
    assert young < 300 < 900 < old


def test_what_no_request_came_to_is_taken_from_the_oldest_that_did():
    lengths = known([3] * 30)
    assert lengths.expected_remaining(5000) == lengths.expected_remaining(2)


def test_clients_differ():
    lengths = known([1000] * 100, route="long")
    for _ in range(100):
        lengths.observe(10, 10, route="short")
    assert lengths.reserve([sequence(0, client="short")]) == 10
    assert lengths.reserve([sequence(0, client="long")]) == 1000
    assert lengths.reserve([sequence(0, client="another")]) > 500
    for index in range(200):
        lengths.observe(10, 10, route=f"client {index}")
    assert len(lengths._routes) == 64


def test_moments_are_those_of_the_requests():
    lengths = OutputLengths()
    samples = [(100, 10, 64), (2000, 100, 0), (500, 400, 480)] * 10
    for prompt, output, cached in samples:
        lengths.observe(prompt, output, num_cached_tokens=cached)
    found = lengths.snapshot()
    assert found is not None and found.num_requests == pytest.approx(30, rel=0.05)
    assert found.prompt_tokens == pytest.approx(fmean(one[0] for one in samples), rel=0.02)
    assert found.computed_prompt_tokens == pytest.approx(fmean(one[0] - one[2] for one in samples), rel=0.02)
    assert found.computed_prompt_tokens_squared == pytest.approx(fmean((a - c) ** 2 for a, _, c in samples), rel=0.02)
    assert found.output_tokens == pytest.approx(fmean(one[1] for one in samples), rel=0.02)
    assert found.output_tokens_p95 == 400
    context = sum(o * (i + o / 2) for i, o, _ in samples) / sum(o for _, o, _ in samples)
    assert found.context_tokens == pytest.approx(context, rel=0.02)


def test_the_latest_requests_count_most():
    lengths = known([1000] * 500 + [10] * 2000)
    assert lengths.expected_remaining(0) == pytest.approx(10, abs=25)


def test_the_reserve_holds_in_99_of_100_cases():
    """Exponential lengths: the sum of what 40 running ones still grow stays below the bound but for a few in a hundred."""
    rng = Random(3)
    lengths = known([max(1, round(rng.expovariate(1 / 200))) for _ in range(2000)])
    over = 0
    for _ in range(300):
        ages = [rng.randint(0, 300) for _ in range(40)]
        grown = sum(rng.expovariate(1 / 200) for _ in ages)
        over += grown > lengths.reserve([sequence(age) for age in ages])
    assert over <= 15


@settings(deadline=None, max_examples=50)
@given(
    outputs=st.lists(st.integers(0, 200_000), min_size=16, max_size=60),
    ages=st.lists(st.integers(0, 9000), max_size=20),
)
def test_whatever_comes_the_reserve_is_finite_and_not_negative(outputs: list[int], ages: list[int]):
    lengths = known(outputs)
    running = [sequence(age) for age in ages]
    left = sum(one.max_total_tokens - len(one.token_ids) for one in running)
    assert 0 <= lengths.reserve(running, sigmas=0.0) <= left + 1
    found = lengths.snapshot()
    assert found is None or all(math.isfinite(getattr(found, name)) for name in found.__struct_fields__)
