import numpy as np
import pytest

from flyball_runtime.bench.lengths import parse_lengths
from flyball_runtime.core.errors import ConfigError


def draw(text: str, count: int = 20_000, seed: int = 0) -> np.ndarray:
    return np.array(parse_lengths(text)(np.random.default_rng(seed), count))


def test_fixed() -> None:
    assert draw("128", 3).tolist() == draw("fixed:128", 3).tolist() == [128] * 3


def test_uniform_includes_both_ends() -> None:
    assert sorted(set(draw("uniform:3:5").tolist())) == [3, 4, 5]
    assert set(draw("uniform:7:7").tolist()) == {7}


def test_lognormal_has_the_median_and_the_cap_asked_for() -> None:
    lengths = draw("lognormal:200:0.8:1000")
    assert abs(np.median(lengths) - 200) < 8
    assert lengths.max() == 1000
    assert lengths.min() >= 1


def test_zipf_probabilities_fall_as_the_power_of_the_length() -> None:
    lengths = draw("zipf:1.5:10:1000")
    counts = np.bincount(lengths, minlength=1001)
    assert lengths.min() == 10
    assert lengths.max() <= 1000
    # for neighbours far enough apart to be told apart in 20,000 draws
    assert counts[10] / counts[20] == pytest.approx(2**1.5, rel=0.15)


def test_the_seed_decides() -> None:
    assert draw("uniform:1:1000", 50, seed=1).tolist() == draw("uniform:1:1000", 50, seed=1).tolist()
    assert draw("uniform:1:1000", 50, seed=1).tolist() != draw("uniform:1:1000", 50, seed=2).tolist()


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "1.5",
        "-3",
        "nan",
        "1e99",
        "uniform:1",
        "uniform:1:2:3",
        "uniform:0:2",
        "normal:1:2",
        "lognormal:5:-1",
        "lognormal:9:1:3",
        "zipf:nan:1:2",
        ":",
        "1:",
    ],
)
def test_what_is_no_distribution_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ConfigError, match="uniform:LOW:HIGH"):
        parse_lengths(text)
