"""Sends many requests, several at a time, and holds every answer to what a client may expect."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from adversary_kit.generator import Case
from adversary_kit.raw import Answer, answers_of, connect, read_until_silent

NUM_CLIENTS = 6
PATIENCE_S = 30.0
NUM_BARE_CLIENTS = 24
BARE_PATIENCE_S = 0.3
"""Of a request whose bytes were changed, after which a server may wait for more for long."""

RETRIED = (429, 503)
NOT_SERVED = (501, 505)
"""What a server of HTTP may say to a method or version that it does not know."""

_LIMITS_ACK = {"status", "revision", "target", "effective", "reason"}
"""How the admin port says that limits were understood, and not applied."""


def problem_of(answer: Answer, *, bare: bool) -> str | None:
    """Return what is wrong with an answer, or None.

    Args:
        bare: whether the request may have been no HTTP, which is answered without OpenAI's shape.
    """
    if answer.status < 400:
        return None
    if answer.status >= 500 and answer.status not in (*RETRIED, *NOT_SERVED):
        return f"status {answer.status}: {answer.body[:500]!r}"
    if answer.status in RETRIED and "retry-after" not in answer.headers:
        return f"status {answer.status} without Retry-After"
    if answer.headers.get("content-type", "").startswith("application/json"):
        return _problem_of_error(answer.body) if answer.body else None  # none after HEAD
    return None if bare else f"status {answer.status} without JSON: {answer.body[:500]!r}"


def _problem_of_error(body: bytes) -> str | None:
    try:
        answered = json.loads(body)
        if answered.keys() >= _LIMITS_ACK:
            return None
        error = answered["error"]
        shape = {name: type(value) for name, value in error.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"not an error of the API: {body[:500]!r}"
    if set(shape) != {"message", "type", "param", "code"} or shape["message"] is not str or shape["code"] is not str:
        return f"not an error of the API: {body[:500]!r}"
    if not error["message"].isprintable() or len(body) > 4096:
        return f"an error that is not cut and quoted: {len(body)} bytes, {body[:500]!r}"
    return None


def exchange(port: int, case: Case, *, bare: bool) -> tuple[str, str | None]:
    """Send one request and return how it ended, and a problem or None."""
    with connect(port) as connection:
        with contextlib.suppress(ConnectionError):  # an answer may come before the request's end
            connection.sendall(case.request)
        received = read_until_silent(connection, BARE_PATIENCE_S if bare else PATIENCE_S)
    try:
        answers = list(answers_of(received))
    except (ValueError, IndexError):
        return "none", f"not HTTP: {received[:300]!r}"
    if not answers:
        return "none", None if bare else "no answer"
    problems = [problem for answer in answers if (problem := problem_of(answer, bare=bare))]
    return str(answers[0].status), problems[0] if problems else None


def exchange_all(port: int, cases: Iterable[Case], *, bare: bool = False) -> Counter[str]:
    """Send all cases and return how often each status was the answer. Raises AssertionError with the problems found."""

    def one(case: Case) -> tuple[str, str | None]:
        status, problem = exchange(port, case, bare=bare)
        return status, problem and f"{problem}\n  {case.words}"

    with ThreadPoolExecutor(NUM_BARE_CLIENTS if bare else NUM_CLIENTS) as clients:
        ended = list(clients.map(one, cases))
    problems = [problem for _, problem in ended if problem]
    assert not problems, f"{len(problems)} bad answers:\n" + "\n".join(problems[:10])
    return Counter(status for status, _ in ended)
