"""Signatures of the admin port: what is taken once, and what never."""

import inspect

import pytest

from flyball_protocol import signing
from flyball_protocol.signing import SignatureError, SignedRequest, Verifier, new_request, target_of

TOKEN = "a-token"
NOW_S = 1_795_000_000.5
TARGET = "10.0.0.5:8001"
BODY = b'{"revision": 1}'


def signed(time_s: float = NOW_S, target: str = TARGET, path: str = "/admin/limits?a=1") -> SignedRequest:
    return new_request("POST", path, target, BODY, time_s)


def verifier(started_s: float = NOW_S - 3600) -> Verifier:
    return Verifier(TOKEN, started_s)


def check(verifier: Verifier, header: str, **changed: object) -> SignedRequest:
    asked = {"method": "POST", "path": "/admin/limits?a=1", "target": TARGET, "now_s": NOW_S} | changed
    return verifier.check(header, **asked)  # type: ignore[arg-type]


def test_a_signed_request_is_taken_and_says_which_body_it_covers() -> None:
    request = signed()
    taken = check(verifier(), request.header(TOKEN))
    assert taken == request
    assert taken.covers(BODY)
    assert not taken.covers(BODY + b" ")
    assert not taken.covers(b"")


def test_the_token_is_not_in_what_travels() -> None:
    assert TOKEN not in signed().header(TOKEN)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"method": "GET"}, "not one of this token"),
        ({"path": "/admin/drain"}, "not one of this token"),
        ({"path": "/admin/limits"}, "not one of this token"),
        ({"path": "/admin/limits?a=2"}, "not one of this token"),
        ({"target": "10.0.0.6:8001"}, "signed for 10.0.0.5:8001, and this is 10.0.0.6:8001"),
        ({"target": "10.0.0.5:8002"}, "signed for 10.0.0.5:8001, and this is 10.0.0.5:8002"),
        (
            {"now_s": NOW_S + 61},
            "signed at 2026-11-18T11:06:40.500+00:00, and here it is 2026-11-18T11:07:41.500+00:00",
        ),
        ({"now_s": NOW_S - 61}, "60 s apart are allowed. Set the clocks"),
    ],
)
def test_what_was_signed_for_something_else_is_not_taken(changed: dict[str, object], says: str) -> None:
    with pytest.raises(SignatureError) as refused:
        check(verifier(), signed().header(TOKEN), **changed)
    assert says in str(refused.value)


@pytest.mark.parametrize("now_s", [NOW_S - 59, NOW_S + 59])
def test_clocks_may_differ_by_a_minute(now_s: float) -> None:
    check(verifier(), signed().header(TOKEN), now_s=now_s)


def test_each_field_of_the_header_is_covered() -> None:
    header = signed().header(TOKEN)
    for name in ("target=1", "time=1", "nonce=", "digest=", "signature="):
        place = header.index(name) + len(name)
        other = "0" if header[place] != "0" else "1"
        with pytest.raises(SignatureError, match="not one of this token"):
            check(verifier(), header[:place] + other + header[place + 1 :])


def test_another_token_signs_nothing() -> None:
    with pytest.raises(SignatureError, match="not one of this token"):
        check(verifier(), signed().header("another"))


def test_a_request_is_taken_once_for_as_long_as_its_time_is_valid() -> None:
    replica = verifier()
    # Accepted as early as it can be, a nonce is remembered until its time has passed, whatever else comes.
    header = signed(time_s=NOW_S + 60).header(TOKEN)
    check(replica, header)
    for passed_s in range(0, 119, 7):
        check(replica, signed(time_s=NOW_S + passed_s).header(TOKEN), now_s=NOW_S + passed_s)
        with pytest.raises(SignatureError, match="sent before"):
            check(replica, header, now_s=NOW_S + passed_s)
    with pytest.raises(SignatureError, match="60 s apart"):
        check(replica, header, now_s=NOW_S + 121)


def test_a_restarted_replica_takes_nothing_that_the_one_before_may_have_seen() -> None:
    header = signed().header(TOKEN)
    with pytest.raises(SignatureError, match="before this process started"):
        check(verifier(started_s=NOW_S + 1), header, now_s=NOW_S + 2)
    check(verifier(started_s=NOW_S), header)


def test_nonces_take_bounded_memory_and_none_is_forgotten_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signing, "MAX_NONCES", 3)
    replica = verifier()
    first = signed().header(TOKEN)
    for header in (first, signed().header(TOKEN), signed().header(TOKEN)):
        check(replica, header, now_s=NOW_S + 1)
    with pytest.raises(SignatureError, match="more than 3 requests"):
        check(replica, signed().header(TOKEN), now_s=NOW_S + 1)
    with pytest.raises(SignatureError, match="sent before"):
        check(replica, first, now_s=NOW_S + 1)
    later = signed(time_s=NOW_S + 200)
    check(replica, later.header(TOKEN), now_s=NOW_S + 200)


@pytest.mark.parametrize(
    "header",
    [
        "",
        signing.SCHEME,
        f"{signing.SCHEME} x",
        "Bearer a-token",
        f"{signing.SCHEME} target=a, time=1, nonce=0, digest=0, signature=0",
        f"{signing.SCHEME} target=a b, time=1, nonce={'0' * 32}, digest={'0' * 64}, signature={'0' * 64}",
        f"{signing.SCHEME} target=a, time={'9' * 5000}, nonce={'0' * 32}, digest={'0' * 64}, signature={'0' * 64}",
        signed().header(TOKEN) + ", x=y",
        signed().header(TOKEN) + "\n",
        signed().header(TOKEN).replace("time=1", "time=\u0661"),
        "x" * 1_000_000,
    ],
)
def test_a_header_of_another_form_is_refused(header: str) -> None:
    with pytest.raises(SignatureError, match="cannot be read") as refused:
        check(verifier(), header)
    assert len(str(refused.value)) < 200


def test_signatures_are_compared_in_constant_time() -> None:
    for compared in (Verifier._read, SignedRequest.covers, signing.is_signed_answer):
        assert "compare_digest" in inspect.getsource(compared)


@pytest.mark.parametrize(
    ("host", "target"),
    [
        ("10.0.0.5", "10.0.0.5:8001"),
        ("::ffff:10.0.0.5", "10.0.0.5:8001"),
        ("fd00:0:0::0001", "[fd00::1]:8001"),
        ("Pod.example", "pod.example:8001"),
    ],
)
def test_an_address_is_spelled_in_one_way(host: str, target: str) -> None:
    assert target_of(host, 8001) == target
    header = signed(target=target).header(TOKEN)
    assert check(verifier(), header, target=target).target == target


def test_an_answer_is_signed_for_its_request_status_and_body() -> None:
    signature = signing.sign_answer(TOKEN, "0" * 32, 200, b"{}")
    assert signing.is_signed_answer(TOKEN, "0" * 32, 200, b"{}", signature)
    for token, nonce, status, body, given in (
        ("another", "0" * 32, 200, b"{}", signature),
        (TOKEN, "1" * 32, 200, b"{}", signature),
        (TOKEN, "0" * 32, 202, b"{}", signature),
        (TOKEN, "0" * 32, 200, b"{ }", signature),
        (TOKEN, "0" * 32, 200, b"{}", ""),
        (TOKEN, "0" * 32, 200, b"{}", "\xff"),
    ):
        assert not signing.is_signed_answer(token, nonce, status, body, given)
