import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyball_protocol import StepModel

MODEL = StepModel(
    base_s=0.01,
    token_s=1e-4,
    knee_tokens=100,
    context_token_s=1e-7,
    attention_pair_s=1e-9,
    interaction_s=1e-8,
    covariance=(1.0, 0.5, 2.0),
)
COUNT = st.integers(0, 10**7)


@pytest.mark.parametrize(
    ("step", "seconds"),
    [
        ((0, 0, 0, 0), 0.01),
        ((90, 10, 0, 0), 0.01 + 900 * 1e-8),
        ((150, 0, 0, 0), 0.01 + 50 * 1e-4),
        ((0, 101, 10**6, 0), 0.01 + 1e-4 + 0.1),
        ((512, 8, 0, 10**6), 0.01 + 420 * 1e-4 + 1e-3 + 4096 * 1e-8),
    ],
)
def test_each_term_is_what_it_says(step: tuple[int, int, int, int], seconds: float):
    assert MODEL.predict(*step) == pytest.approx(seconds)


@given(step=st.tuples(COUNT, COUNT, COUNT, COUNT), more=st.tuples(COUNT, COUNT, COUNT, COUNT))
def test_more_work_never_takes_less_time(step: tuple[int, ...], more: tuple[int, ...]):
    larger = [a + b for a, b in zip(step, more, strict=True)]
    assert MODEL.predict(*larger) >= MODEL.predict(*step) >= MODEL.base_s


def test_it_survives_the_wire():
    assert msgspec.json.decode(msgspec.json.encode(MODEL), type=StepModel) == MODEL


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"base_s": -0.1, "token_s": 0}', r">= 0.*\$.base_s"),
        (b'{"base_s": 0, "token_s": null}', r"Expected `float`.*\$.token_s"),
        (b'{"base_s": 0, "token_s": 0, "num_steps": -1}', r">= 0.*\$.num_steps"),
        (b'{"base_s": 0, "token_s": 1e999}', "out of range"),
    ],
)
def test_coefficients_that_no_runtime_learns_are_refused(body: bytes, says: str):
    with pytest.raises(msgspec.ValidationError, match=says):
        msgspec.json.decode(body, type=StepModel)
