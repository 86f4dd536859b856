import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyball_runtime.governor.nnls import nnls, nnls_each


@settings(deadline=None, max_examples=200)
@given(
    num_features=st.integers(1, 6), num_rows=st.integers(1, 30), seed=st.integers(0, 2**31), digits=st.integers(-6, 6)
)
def test_it_meets_the_conditions_of_an_optimum(num_features: int, num_rows: int, seed: int, digits: int):
    """Karush, Kuhn and Tucker: no coefficient is negative, no free one has a gradient, no zero one wants to grow."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(num_rows, num_features)) * 10.0 ** rng.integers(-3, 4, num_features)
    seconds = rng.normal(size=num_rows) * 10.0**digits
    found = nnls(rows.T @ rows, rows.T @ seconds)
    size = np.sqrt((rows * rows).sum(axis=0))
    gradient = (rows.T @ (seconds - rows @ found)) / size
    slack = 1e-4 * (np.abs(seconds).max() * num_rows + 1e-12)
    assert (found >= 0).all()
    assert (gradient <= slack).all()
    assert (np.abs(gradient[found > 0]) <= slack).all()


@settings(deadline=None, max_examples=100)
@given(
    num_problems=st.integers(1, 5),
    num_features=st.integers(1, 6),
    num_missing=st.integers(0, 1),
    seed=st.integers(0, 2**31),
)
def test_several_at_once_get_what_each_gets_alone(
    num_problems: int, num_features: int, num_missing: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(num_problems, 30, num_features)) * 10.0 ** rng.integers(-3, 4, num_features)
    rows[0, :, :num_missing] = 0.0
    grams, moments = rows.transpose(0, 2, 1) @ rows, (rng.normal(size=(num_problems, 1, 30)) @ rows)[:, 0]
    alone = [nnls(gram, moment) for gram, moment in zip(grams, moments, strict=True)]
    found = nnls_each(grams, moments)
    if num_missing:  # alone, that problem has a smaller matrix, whose solution is rounded in another way
        assert found[0, 0] == 0.0
        np.testing.assert_allclose(found[0], alone[0], rtol=1e-6)
    assert found[num_missing:].tolist() == [one.tolist() for one in alone[num_missing:]]


def test_a_feature_that_never_appeared_costs_nothing():
    rows = np.array([[1.0, 0.0, 2.0], [1.0, 0.0, 3.0], [1.0, 0.0, 5.0]])
    assert nnls(rows.T @ rows, rows.T @ np.array([5.0, 7.0, 11.0])) == pytest.approx([1.0, 0.0, 2.0], abs=1e-6)


def test_features_that_were_always_alike_are_no_error():
    rows = np.array([[1.0, 1.0], [2.0, 2.0]])
    found = nnls(rows.T @ rows, rows.T @ np.array([3.0, 6.0]))
    assert found.sum() == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize("seed", [10013176, 10145418, 10239681])
def test_it_ends_where_rounding_leaves_a_trace_of_what_should_be_0(seed: int):
    """That trace was halved for ever, below the smallest normal number, and the engine stood still."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(30, 12)) + 3.0 * rng.normal(size=(30, 1))
    seconds = rows @ rng.normal(size=12) + 0.1 * rng.normal(size=30)
    assert (nnls(rows.T @ rows, rows.T @ seconds) >= 0.0).all()
