"""Sampling fields of any value, and a prompt whose logits are NaN, against a real server."""

import concurrent.futures
import json
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints import EOS_ID, make_checkpoint, poison
from replicas import COMPLETION, Replica, replica, wait_until

# a token that ends a sequence is never computed, so only a prompt can hold it
NAN_TOKEN = EOS_ID


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    model = make_checkpoint(tmp_path_factory.mktemp("model"), "llama2")
    poison(model, NAN_TOKEN)
    with replica(model, log=tmp_path_factory.mktemp("log") / "server.log") as running:
        yield running


FLOATS = (
    st.floats(allow_nan=False, allow_infinity=False).map(repr)
    | st.floats(0, 2, width=32).map(repr)
    | st.floats(0, 1e-30).map(repr)
    | st.sampled_from(["1e-39", "1e-45", "1e-400", "1e308", "-0.0", "1e-5", "9.9e-6", "1", "0", "2", "1" * 500, "null"])
)
INTS = (
    st.integers(-2, 400).map(str)
    | st.integers(-(2**65), 2**65).map(str)
    | st.sampled_from([str(2**63 - 1), str(-(2**63)), str(2**63), str(2**64), "9" * 500, "9" * 5000, "null"])
)
PENALTIES = dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), FLOATS)
FIELDS = {"temperature": FLOATS, "top_p": FLOATS, "min_p": FLOATS, "top_k": INTS, "seed": INTS, "min_tokens": INTS}
FIELDS |= PENALTIES


def check_answer(server: Replica, fields: dict[str, str]) -> None:
    """The fields' values are JSON literals. The server takes them, or refuses them by name."""
    body = {"model": '"test"', "prompt": "[5, 6, 7]", "max_tokens": "3", "n": "2"} | fields
    text = "{" + ", ".join(f'"{name}": {literal}' for name, literal in body.items()) + "}"
    response = server.client.post("/v1/completions", content=text)
    if response.status_code == 200:
        choices = response.json()["choices"]
        assert [choice["finish_reason"] in ("length", "stop") for choice in choices] == [True, True]
        return
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    if error["code"] == "invalid_json":  # a number too large for the decoder, which knows no fields yet
        assert "out of range" in error["message"] and any(len(literal) >= 500 for literal in fields.values())
        return
    assert error["param"] in fields and error["param"] in error["message"], error
    assert len(error["message"]) < 1000


def fuzz(server: Replica, num_examples: int) -> None:
    expected = server.complete().json()["choices"]

    @settings(max_examples=num_examples, suppress_health_check=list(HealthCheck))
    @given(st.fixed_dictionaries({}, optional=FIELDS))
    def check(fields: dict[str, str]) -> None:
        check_answer(server, fields)

    check()
    assert server.complete().json()["choices"] == expected
    wait_until(lambda: server.kv_blocks_used() == 0, "a request kept its blocks")


def test_any_value_of_a_sampling_field_is_taken_or_refused_by_name(server: Replica) -> None:
    fuzz(server, 100)


@pytest.mark.slow
def test_many_values_of_sampling_fields(server: Replica) -> None:
    fuzz(server, 2000)


@pytest.mark.parametrize("temperature", ["1e-39", "1e-45", "5e-324", "1e-6"])
def test_the_lowest_temperatures_are_greedy(server: Replica, temperature: str) -> None:
    greedy = server.complete().json()["choices"]
    assert server.complete(temperature=float(temperature), top_p=0.9).json()["choices"] == greedy


def test_nan_logits_fail_their_request_and_no_other(server: Replica) -> None:
    expected = server.complete().json()["choices"]
    bad = {"prompt": [*range(5, 60), NAN_TOKEN]}
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(server.complete_on_a_new_connection) for _ in range(6)]
        failures = [pool.submit(server.complete, **bad, temperature=t / 2) for t in range(5)]
    assert [answer.result().json()["choices"] for answer in answers] == [expected] * 6
    for failure in failures:
        assert failure.result().status_code == 500
        error = failure.result().json()["error"]
        assert (error["code"], error["type"]) == ("invalid_logits", "server_error")
        assert "no usable logits after 0 output tokens" in error["message"]
    # the same tokens without the bad one: nothing of the failed requests is in the prefix cache to be found
    assert server.complete(prompt=bad["prompt"][:-1]).status_code == 200
    wait_until(lambda: server.kv_blocks_used() == 0, "a failed request kept its blocks")


def test_nan_logits_end_a_stream_with_a_status(server: Replica) -> None:
    body = json.dumps(COMPLETION | {"prompt": [5, NAN_TOKEN], "stream": True})
    response = httpx.post(f"{server.url}/v1/completions", content=body, timeout=60)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "invalid_logits")
