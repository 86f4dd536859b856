from typing import Any

import numpy as np
import pytest

from flyball_clients.bench.settings import BenchSettings, Slo, parse_lengths, parse_slo
from flyball_clients.errors import ConfigError

NAN = float("nan")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_requests": 0}, "--num-requests is 0"),
        ({"concurrency": -1}, "--concurrency is -1"),
        ({"request_rate": 0.0}, "--request-rate is 0"),
        ({"request_rate": NAN}, "--request-rate is nan"),
        ({"timeout_s": NAN}, "--timeout is nan"),
        ({"max_duration_s": 0.0}, "--max-duration is 0"),
        ({"temperature": NAN}, "--temperature is nan"),
        ({"temperature": 2.1}, "from 0 to 2"),
        ({"seed": -1}, "--seed is -1"),
        ({"base_url": "nowhere"}, "--base-url"),
        ({"input_len": "0"}, "'0' is not a distribution"),
        ({"output_len": "uniform:9:3"}, "9 is above 3"),
        ({"concurrency": 1, "request_rate": 1.0}, "--concurrency and --request-rate are different"),
        ({"request_rate": 1.0, "trace": "t.csv"}, "--request-rate and --trace are different"),
        ({"trace": "t.csv", "num_requests": 3}, "--trace-limit"),
        ({"trace": "t.csv", "dataset": "d"}, "leave out --dataset"),
        ({"trace_limit": 3}, "add --trace"),
        ({"burstiness": 0.5}, "needs --request-rate and --arrival gamma"),
        ({"burstiness": 0.5, "request_rate": 1.0}, "needs --request-rate and --arrival gamma"),
        ({"tokenizer": "t", "endpoint": "chat"}, "--tokenizer"),
        ({"extra_body": {"n": 2, "stream": False}}, "--extra-body has n, stream"),
    ],
)
def test_a_wrong_setting_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BenchSettings(**fields)


def test_eight_in_flight_is_what_nobody_chose() -> None:
    settings = BenchSettings()
    assert settings.closed_loop
    assert settings.max_in_flight == 8
    assert not BenchSettings(request_rate=float("inf")).closed_loop


def test_slo_reads_both_units() -> None:
    slo = parse_slo("ttft=500ms, tpot=50ms,itl=0.1s,e2e=10s")
    assert slo == Slo(ttft_s=0.5, tpot_s=0.05, itl_s=0.1, e2e_s=10.0)
    assert str(slo) == "ttft ≤ 500 ms, tpot ≤ 50 ms, itl ≤ 100 ms, e2e ≤ 10 s"


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=500", "ttft=0ms", "ttft=-1s", "latency=1s", "ttft=1e999s", "tpot=1.2.3ms"]
)
def test_a_malformed_slo_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        parse_slo(text)


def test_one_bound_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="bounds ttft twice"):
        parse_slo("ttft=1s,ttft=2s")


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
