"""Numbers that no envelope has, on the admin port: refused, and the posts after them are answered."""

import json
from pathlib import Path

import pytest

from adversary_kit.attacked import Attacked, attacked
from adversary_kit.raw import ask, post
from flyball_protocol import endpoints
from flyball_protocol.limits import LIMITS_HTTP_STATUS
from replicas import ADMIN_TOKEN

TOKEN = f"Authorization: Bearer {ADMIN_TOKEN}"
ODD_UPDATES: list[bytes] = [
    b'{"revision": %d, "limits": {}}' % 2**64,
    b'{"revision": %d, "limits": {}}' % (2**63),
    b'{"revision": 1%s, "limits": {}}' % (b"0" * 5000),
    b'{"revision": -1, "limits": {"max_num_seqs": 1}}',
    b'{"revision": 1e300, "limits": {"max_num_seqs": 1}}',
    b'{"revision": 1, "limits": {"max_num_seqs": %d}}' % 10**30,
    b'{"revision": 1, "limits": {"max_num_seqs": %d}}' % 2**63,
    b'{"revision": 1, "limits": {"max_num_batched_tokens": %d}}' % 2**64,
    b'{"revision": 1, "limits": {"max_num_seqs": 0}}',
    b'{"revision": 1, "limits": {"kv_cache_fraction": 1e-320}}',
    b'{"revision": 1, "limits": {"kv_cache_fraction": 1e999}}',
    b'{"revision": 1, "limits": {"kv_cache_fraction": NaN}}',
    b'{"revision": 1, "limits": {"max_num_seqs": 1}, "ttl_s": 1e308}',
    b'{"revision": 1, "limits": {"max_num_seqs": 1}, "ttl_s": -0.0}',
    b'{"revision": 1, "limits": {"step_time_target_ms": 1e300}}',
    b'{"revision": 1, "limits": {"max_num_seqs\\n%s": 1}}' % (b"x" * 9000),
    b'{"revision": 1, "limits": ' + b"[" * 20_000,
]


def post_limits(server: Attacked, body: bytes) -> tuple[int, bytes]:
    answer = ask(server.admin_port, post(endpoints.ADMIN_LIMITS_PATH, body, TOKEN))
    assert answer is not None
    return answer.status, answer.body


@pytest.mark.parametrize("body", ODD_UPDATES, ids=lambda body: body[:60].decode())
def test_an_odd_update_is_refused_and_the_next_one_applied(server: Attacked, body: bytes) -> None:
    status, answered = post_limits(server, body)
    assert status in (400, 409, 422), answered
    assert len(answered) < 2048
    before = server.server.admin.get(endpoints.ADMIN_LIMITS_PATH).json()
    normal = {"revision": before["revision"] + 1, "limits": {"max_num_seqs": 60}}
    status, answered = post_limits(server, json.dumps(normal).encode())
    assert (status, json.loads(answered)["revision"]) == (LIMITS_HTTP_STATUS["applied"], normal["revision"])


@pytest.mark.parametrize(
    "headers",
    [
        [],
        ["Authorization: Bearer "],
        ["Authorization: Bearer " + "x" * 12_000],
        ["Authorization: Bearer \xff\xfe"],
        ["Authorization: Basic " + ADMIN_TOKEN],
        [TOKEN[:-1]],
        [TOKEN + "x"],
        ["Authorization: Bearer wrong", TOKEN],
    ],
    ids=str,
)
def test_without_the_token_nothing_is_told(server: Attacked, headers: list[str]) -> None:
    for path in (endpoints.ADMIN_LIMITS_PATH, endpoints.ADMIN_EVIDENCE_PATH, endpoints.ADMIN_DRAIN_PATH, "/none"):
        answer = ask(server.admin_port, post(path, {}, *headers))
        assert answer is not None
        assert (answer.status, answer.code) == (401, "invalid_token")


@pytest.mark.slow
def test_a_server_that_was_asked_odd_things_stops_when_told(model: Path, tmp_path: Path) -> None:
    with attacked(model, tmp_path / "server.log") as own:
        for body in ODD_UPDATES:
            post_limits(own, body)
        assert own.server.stop() == endpoints.EXIT_OK
