"""The streams of open requests, and when a client that was refused should come back."""

import asyncio

import pytest

from flyball_protocol import Lengths, Limits, StepModel
from flyball_runtime.core.request import Failed, Finished, TokenLogprobs, Tokens
from flyball_runtime.engine.front import RequestStream, RetryAfter, Router
from runtime.fake_engine import step_stats

FINISHED = Finished("a", "stop", 3, 2)


def collect(stream: RequestStream) -> list[object]:
    async def read() -> list[object]:
        return [event async for event in stream]

    return asyncio.run(read())


def open_stream(router: Router, request_id: str = "a") -> RequestStream:
    return router.open(request_id)


def test_tokens_that_wait_for_the_reader_merge_and_the_ending_comes_last() -> None:
    router = Router()
    stream = open_stream(router)
    router.push_tokens(["a"], [1])
    router.push_tokens(["a"], [2])
    router.end(FINISHED)
    assert collect(stream) == [Tokens("a", [1, 2]), FINISHED]


def test_logprobs_merge_with_their_tokens() -> None:
    router = Router()
    stream = open_stream(router)
    one, two = TokenLogprobs(1, -0.5, [1], [-0.5]), TokenLogprobs(2, -0.25, [], [])
    for logprobs in (one, two):
        router.note_logprobs({"a": logprobs, "gone": logprobs})
        router.push_tokens(["a"], [logprobs.token_id])
    router.end(FINISHED)
    assert collect(stream) == [Tokens("a", [1, 2], logprobs=[one, two]), FINISHED]


def test_a_reader_that_keeps_up_gets_each_token() -> None:
    async def scenario() -> list[object]:
        router = Router()
        stream = open_stream(router)
        events: list[object] = []

        async def read() -> None:
            async for event in stream:
                events.append(event)

        reader = asyncio.create_task(read())
        for token_id in (1, 2):
            router.push_tokens(["a"], [token_id])
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        router.end(FINISHED)
        await reader
        return events

    assert asyncio.run(scenario()) == [Tokens("a", [1]), Tokens("a", [2]), FINISHED]


def test_the_first_ending_counts_and_later_tokens_are_dropped() -> None:
    router = Router()
    stream = open_stream(router)
    router.end(FINISHED)
    router.end(Failed("a", 500, "engine_dead", "too late"))
    router.push_tokens(["a", "unknown"], [1, 2])
    assert collect(stream) == [FINISHED]
    assert len(router) == 0


def test_fail_all_ends_every_open_stream_once() -> None:
    router = Router()
    streams = [open_stream(router, name) for name in "abc"]
    router.end(FINISHED)
    router.fail_all(500, "engine_dead", "gone")
    endings = [collect(stream)[-1] for stream in streams]
    assert endings == [FINISHED, *(Failed(name, 500, "engine_dead", "gone") for name in "bc")]


def test_prompt_tokens_wait_until_the_first_token_or_the_end() -> None:
    router = Router()
    for name, client in (("a", "first"), ("b", "first"), ("c", "second")):
        router.open(name, client, num_prompt_tokens=10)
    assert (router.num_queued_tokens, router.num_queued_tokens_of("first")) == (30, 20)
    router.push_tokens(["a"], [1])
    router.push_tokens(["a"], [2])
    assert (router.num_queued_tokens, router.num_queued_tokens_of("first")) == (20, 10)
    router.end(FINISHED)
    router.end(Failed("b", 500, "engine_dead", "gone"))
    assert (router.num_queued_tokens, router.num_queued_tokens_of("first"), router.num_clients) == (10, 0, 1)
    router.fail_all(500, "engine_dead", "gone")
    assert (router.num_queued_tokens, router.num_clients) == (0, 0)


@pytest.mark.parametrize(
    ("ended_at_s", "num_waiting", "now_s", "expected_s"),
    [
        ([], 100, 5.0, 1),
        ([0.0], 3, 0.0, 1),
        ([0.0, 1.0, 2.0, 3.0], 10, 4.0, 10),
        ([0.0, 1.0, 2.0, 3.0], 10, 5.0, 13),
        ([0.0, 1.0], 1000, 2.0, 60),
    ],
    ids=["nothing known", "just now", "one a second", "slowing down", "at most a minute"],
)
def test_estimate(ended_at_s: list[float], num_waiting: int, now_s: float, expected_s: int):
    retry_after = RetryAfter()
    for at_s in ended_at_s:
        retry_after.record_ending(at_s)
    assert retry_after.estimate_s(num_waiting, now_s) == expected_s


def test_only_recent_endings_count():
    retry_after = RetryAfter()
    for i in range(64):
        retry_after.record_ending(float(i))
    for i in range(64):
        retry_after.record_ending(1000 + i / 8)
    assert retry_after.estimate_s(80, 1008.0) == 10


def test_time_before_the_requests_does_not_count():
    retry_after = RetryAfter()
    retry_after.record_ending(0.0)
    retry_after.forget()
    assert retry_after.estimate_s(10, 3600.0) == 1
    for at_s in (3600.0, 3601.0, 3602.0):
        retry_after.record_ending(at_s)
    assert retry_after.estimate_s(10, 3603.0) == 10


def test_until_a_request_ends_the_estimate_is_what_was_learned():
    """A step of 10 sequences takes 20 ms, and each has 100 tokens to put out: a seat is free every 0.2 s."""
    lengths = Lengths(
        num_requests=50,
        prompt_tokens=200,
        computed_prompt_tokens=200,
        computed_prompt_tokens_squared=40_000,
        output_tokens=100,
        output_tokens_p95=100,
        context_tokens=250,
    )
    model = StepModel(base_s=0.01, token_s=0.01 / 30)  # 10 decodes and 20 prompt tokens a step
    limits = Limits(max_num_seqs=10, kv_cache_fraction=1.0, max_num_batched_tokens=100)
    retry_after = RetryAfter()
    retry_after.learn(step_stats(step_model=model, lengths=lengths, effective=limits))
    retry_after.learn(step_stats(effective=limits))  # most steps report neither
    assert retry_after.estimate_s(50, 0.0) == 10
    retry_after.record_ending(0.0)
    assert retry_after.estimate_s(50, 1.0) == 50, "what is seen comes before what is predicted"
