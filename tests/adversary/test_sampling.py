"""Values of sampling fields that are allowed, and break arithmetic."""

import pytest

from adversary_kit.attacked import Attacked

TINY = 1e-39
"""Not zero, but its inverse is infinite in float32."""


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": TINY, "top_p": 0.9},
        {"temperature": TINY, "top_k": 2},
        {"temperature": TINY, "min_p": 1.0},
        {"temperature": TINY, "top_p": TINY},
        {"temperature": 5e-324},
        {"temperature": 2, "top_p": 5e-324, "min_p": 5e-324},
        {"temperature": 1e-30, "top_p": 0.9, "top_k": 1, "min_p": 1},
    ],
    ids=str,
)
def test_an_extreme_value_gets_an_answer(server: Attacked, fields: dict[str, float]) -> None:
    answer = server.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 4, "n": 3, "seed": 1, **fields})
    assert answer.status == 200, answer.body
    assert [choice["finish_reason"] for choice in answer.json()["choices"]]
