"""The engine as a process: streams, abort, limits, drain, death."""

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from checkpoints import make_checkpoint
from engines import kv_block_bytes
from flyball_protocol import LimitsChange, LimitsStatus, LimitsUpdate, Objectives
from flyball_runtime.api.app import check_live
from flyball_runtime.api.errors import HttpRefusal
from flyball_runtime.core.beam_search import BeamSearch
from flyball_runtime.core.clock import FakeClock
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.errors import (
    ConfigError,
    Draining,
    EmptyPrompt,
    EngineDead,
    InvalidRequest,
    NotReady,
    PromptTooLong,
    QueuedTokensFull,
    QueueFull,
    RequestError,
    TokenOutOfVocabulary,
    TooManyPromptTokens,
)
from flyball_runtime.core.frames import packed
from flyball_runtime.core.request import Failed, Finished, Hypotheses, Request, RequestEvent, Tokens
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.core.stats import StepStats
from flyball_runtime.engine import client as client_module
from flyball_runtime.engine.client import EngineClient

Scenario = Callable[[EngineClient], Coroutine[Any, Any, None]]
RunShared = Callable[[Scenario], None]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama3", max_position_embeddings=8192)


ASKED = Objectives(ttft_s=1.0, itl_s=0.05)


def request(name: str, *, prompt_len: int = 5, **sampling: Any) -> Request:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **sampling})
    return Request(request_id=name, prompt_token_ids=list(range(4, 4 + prompt_len)), sampling=params)


async def collect(stream: AsyncIterator[RequestEvent]) -> tuple[list[int], Finished | Failed]:
    """Return a stream's tokens and its only ending."""
    tokens: list[int] = []
    endings = []
    async for event in stream:
        if isinstance(event, Tokens):
            assert not endings
            tokens += event.token_ids
        else:
            endings.append(event)
    (ending,) = endings
    return tokens, ending


def settings(path: Path, **changes: Any) -> EngineConfig:
    defaults = {"dtype": "float32", "max_num_seqs": 8, "max_model_len": 512, "num_threads": 1, "log_level": "warning"}
    defaults["enable_prefix_caching"] = False
    return EngineConfig(model=str(path), served_model_name="test", **(defaults | changes))


def run(path: Path, scenario: Scenario, observer: Any = None, clock: FakeClock | None = None, **changes: Any) -> None:
    async def session() -> None:
        async with EngineClient(settings(path, **changes), observer, clock) as client:
            await scenario(client)

    asyncio.run(session())


@pytest.fixture(scope="module")
def run_shared(path: Path) -> Iterator[RunShared]:
    """Runs scenarios that leave an engine as it was on the same one: to start one takes a second."""
    with asyncio.Runner() as runner:
        client = EngineClient(settings(path))
        runner.run(client.__aenter__())
        try:
            runner.run(client.wait_ready())
            yield lambda scenario: runner.run(scenario(client))
        finally:
            runner.run(client.__aexit__())


def test_streams_abort_limits_and_drain(path: Path) -> None:
    class Observer:
        steps: list[StepStats] = []  # noqa: RUF012 - one per test
        objectives: list[Objectives | None] = []  # noqa: RUF012 - one per test

        def step(self, stats: StepStats) -> None:
            self.steps.append(stats)

        def count_against(self, objectives: Objectives | None, revision: int) -> None:
            self.objectives.append(objectives)

    async def scenario(client: EngineClient) -> None:
        with pytest.raises(NotReady):
            client.submit(request("early"))
        info = await client.wait_ready()
        assert (info.vocab_size, info.max_model_len, client.ready) == (384, 512, True)
        assert set(info.startup_s) == {"import", "config", "vocabulary", "weights", "warm_up", "kv_cache"}
        assert info.longest_pause_s > 0

        streams = [client.submit(request(str(index), prompt_len=index + 1)) for index in range(20)]
        results = await asyncio.gather(*map(collect, streams))
        assert [len(tokens) for tokens, _ in results] == [8] * 20
        assert [ending for _, ending in results] == [Finished(str(i), "length", i + 1, 8) for i in range(20)]

        with pytest.raises(PromptTooLong):
            client.submit(request("long", prompt_len=512))

        endless = client.submit(request("endless", max_tokens=500))
        first = await anext(endless)
        assert isinstance(first, Tokens)
        client.abort("endless")
        client.abort("endless")
        _, ending = await collect(endless)
        assert isinstance(ending, Finished)
        assert (ending.reason, ending.num_prompt_tokens) == ("abort", 5)

        ack = await client.post_limits(
            LimitsUpdate(revision=3, limits=LimitsChange(max_num_seqs=2), ttl_s=0.3, objectives=ASKED)
        )
        assert (ack.status, client.limits().effective.max_num_seqs) == (LimitsStatus.APPLIED, 2)
        stale = await client.post_limits(LimitsUpdate(revision=2, limits=LimitsChange(max_num_seqs=4)))
        assert stale.status is LimitsStatus.STALE
        while client.limits().lease_expires_in_s is not None:  # the engine says so by itself
            await asyncio.sleep(0.05)
        assert client.limits().target.max_num_seqs == 2, "an expired lease never grows a limit"

        last = client.submit(request("last", max_tokens=50))
        client.start_drain()
        with pytest.raises(Draining):
            client.submit(request("refused"))
        await client.wait_drained()
        assert len((await collect(last))[0]) == 50
        assert client.heartbeat_age_s() < 5

    run(path, scenario, Observer())
    assert sum(stats.num_prefill_tokens for stats in Observer.steps) >= sum(range(1, 21))
    assert Observer.steps[-1].kv_blocks.used == 0
    assert Observer.objectives[0] is None and Observer.objectives[-1] == ASKED


def test_a_killed_engine_fails_every_request_and_says_so(path: Path) -> None:
    async def scenario(client: EngineClient) -> None:
        await client.wait_ready()
        streams = [client.submit(request(name, max_tokens=500)) for name in "abc"]
        await anext(streams[0])
        limits = asyncio.create_task(_post_until_it_fails(client))
        os.kill(client.engine_pid, signal.SIGKILL)
        for stream in streams:
            _, ending = await collect(stream)
            assert isinstance(ending, Failed)
            assert (ending.status, ending.code) == (500, "engine_dead")
            assert "exit code -9" in ending.message
        assert client.died.is_set()
        assert not client.ready
        assert client.dead_reason is not None
        with pytest.raises(EngineDead):
            client.submit(request("late"))
        with pytest.raises(EngineDead):
            await limits

    run(path, scenario)


def test_a_message_that_cannot_be_read_fails_every_request(path: Path) -> None:
    async def scenario(client: EngineClient) -> None:
        await client.wait_ready()
        streams = [client.submit(request(name, max_tokens=500)) for name in "abc"]
        await anext(streams[0])
        client._channel.data_received(packed(b"no message"))
        endings = [(await collect(stream))[1] for stream in streams]
        assert {ending.code for ending in endings if isinstance(ending, Failed)} == {"engine_dead"}
        assert client.died.is_set()
        assert "reading its messages failed" in str(client.dead_reason)

    run(path, scenario)


async def _post_until_it_fails(client: EngineClient) -> None:
    revision = 0
    while True:
        revision += 1
        await client.post_limits(LimitsUpdate(revision=revision, limits=LimitsChange(max_num_seqs=4)))


@pytest.mark.slow
def test_a_stopped_engine_makes_no_progress_until_it_goes_on(path: Path) -> None:
    """SIGSTOP in the middle of a step is what a deadlock or a dead GPU looks like from outside."""

    async def scenario(client: EngineClient) -> None:
        await client.wait_ready()
        stream = client.submit(request("busy", max_tokens=8000))
        await anext(stream)
        os.kill(client.engine_pid, signal.SIGSTOP)
        while is_live(client):
            await asyncio.sleep(0.01)
        os.kill(client.engine_pid, signal.SIGCONT)
        while not is_live(client):
            await asyncio.sleep(0.01)
        client.abort("busy")

    def is_live(client: EngineClient) -> bool:
        try:
            check_live(client, max_heartbeat_age_s=1.0)
        except HttpRefusal as error:
            assert error.code == "engine_stuck"
            return False
        return True

    run(path, scenario, max_model_len=8192)


def test_an_engine_that_comes_back_survives_the_writing_of_its_stacks(
    path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Any of its threads may be the first to get the signal when a stopped process goes on, and the others run meanwhile."""

    async def scenario(client: EngineClient) -> None:
        await client.wait_ready()
        stream = client.submit(request("busy", max_tokens=8000))
        await anext(stream)
        for _ in range(1000):
            os.kill(client.engine_pid, signal.SIGSTOP)
            client.log_stacks()
            os.kill(client.engine_pid, signal.SIGCONT)
            await asyncio.sleep(0.002)
        client.abort("busy")
        assert (await collect(client.submit(request("next"))))[1].num_output_tokens == 8

    run(path, scenario, max_model_len=8192)
    assert "most recent call first" in capfd.readouterr().err


def test_who_stops_waiting_for_a_limits_answer_disturbs_nobody(run_shared: RunShared) -> None:
    async def scenario(client: EngineClient) -> None:
        revision = client.limits().revision
        update = LimitsUpdate(revision=revision + 1, limits=LimitsChange(max_num_seqs=4))
        impatient = asyncio.create_task(client.post_limits(update))
        await asyncio.sleep(0)
        impatient.cancel()
        ack = await client.post_limits(LimitsUpdate(revision=revision + 2, limits=LimitsChange(max_num_seqs=5)))
        assert (ack.status, ack.revision) == (LimitsStatus.APPLIED, revision + 2)
        assert len((await collect(client.submit(request("after"))))[0]) == 8

    run_shared(scenario)


def test_a_message_that_cannot_be_encoded_leaves_nothing_behind(run_shared: RunShared) -> None:
    """The API bounds every number; a script that uses the client has the same right to an error and nothing more."""

    async def scenario(client: EngineClient) -> None:
        revision = client.limits().revision + 1
        with pytest.raises(OverflowError):
            await client.post_limits(LimitsUpdate(revision=2**64, limits=LimitsChange(max_num_seqs=4)))
        ack = await client.post_limits(LimitsUpdate(revision=revision, limits=LimitsChange(max_num_seqs=5)))
        assert (ack.status, ack.revision) == (LimitsStatus.APPLIED, revision)
        with pytest.raises(OverflowError):
            client.submit(msgspec.structs.replace(request("huge"), priority=2**64))
        assert client.num_unfinished == 0

    run_shared(scenario)


def test_each_post_gets_its_own_answer(run_shared: RunShared) -> None:
    async def scenario(client: EngineClient) -> None:
        first = client.limits().revision + 1
        posted = [(revision, revision % 8 + 1) for revision in range(first, first + 20)]
        posts = [
            client.post_limits(LimitsUpdate(revision=revision, limits=LimitsChange(max_num_seqs=limit)))
            for revision, limit in posted
        ]
        acks = await asyncio.gather(*posts)
        assert [(ack.revision, ack.target.max_num_seqs) for ack in acks] == posted

    run_shared(scenario)


def test_an_id_in_use_is_refused_and_its_owner_goes_on(run_shared: RunShared) -> None:
    async def scenario(client: EngineClient) -> None:
        first = client.submit(request("same", max_tokens=50))
        with pytest.raises(InvalidRequest, match="same is in use"):
            client.submit(request("same"))
        tokens, ending = await collect(first)
        assert (len(tokens), ending) == (50, Finished("same", "length", 5, 50))

    run_shared(scenario)


def test_a_beam_search_is_told_as_a_whole(run_shared: RunShared) -> None:
    async def scenario(client: EngineClient) -> None:
        search = request("search", beam_search=BeamSearch(width=3), logprobs=1)
        found, ending = [event async for event in client.submit(search)]
        assert isinstance(found, Hypotheses) and isinstance(ending, Finished)
        assert (
            [len(one.token_ids) for one in found.hypotheses]
            == [len(one.logprobs) for one in found.hypotheses]
            == [8] * 3
        )
        assert (ending.reason, ending.num_output_tokens, client.num_unfinished) == ("length", 8, 0)
        with pytest.raises(InvalidRequest, match="runs at most 8 sequences") as caught:
            client.submit(request("wide", beam_search=BeamSearch(width=9)))
        assert caught.value.param == "best_of"
        stream = client.submit(request("left", max_tokens=400, beam_search=BeamSearch(width=8)))
        client.abort("left")
        (ending,) = [event async for event in stream]
        assert isinstance(ending, Finished) and ending.reason == "abort"

    run_shared(scenario)


@pytest.mark.slow
def test_a_bug_while_reading_the_engine_ends_every_request(path: Path) -> None:
    class Broken:
        def step(self, stats: StepStats) -> None:
            if stats.num_tokens:
                raise KeyError("no such metric")

        def count_against(self, objectives: Objectives | None, revision: int) -> None: ...

    async def scenario(client: EngineClient) -> None:
        await client.wait_ready()
        _, ending = await collect(client.submit(request("victim", max_tokens=500)))
        assert isinstance(ending, Failed)
        assert "no such metric" in ending.message
        assert client.died.is_set()

    run(path, scenario, Broken())


def test_a_model_that_cannot_be_loaded_is_a_config_error(path: Path) -> None:
    async def scenario(client: EngineClient) -> None:
        with pytest.raises(ConfigError, match="the KV cache would get 1000 bytes"):
            await client.wait_ready()

    run(path, scenario, kv_cache_memory_bytes=1000)


def test_the_queue_is_bounded_before_the_engine_sees_it(path: Path) -> None:
    async def scenario(client: EngineClient) -> None:
        await client.wait_ready()
        streams = [client.submit(request(name, max_tokens=300)) for name in "abc"]
        with pytest.raises(QueueFull):
            client.check_queue("")
        with pytest.raises(QueueFull, match="2 requests are waiting") as refused:
            client.submit(request("d"))
        assert refused.value.retry_after_s == 1, "nothing has ended yet"
        results = await asyncio.gather(*map(collect, streams))
        assert [len(tokens) for tokens, _ in results] == [300, 300, 300]
        assert [len((await collect(client.submit(request("e"))))[0])] == [8]

    run(path, scenario, max_queued_requests=2, max_num_seqs=1)


@pytest.mark.slow
def test_a_queue_that_one_client_filled_has_room_for_others(path: Path) -> None:
    def of(client: str, number: int) -> Request:
        return msgspec.structs.replace(request(f"{client}-{number}"), client=client)

    def num_taken(client: EngineClient, name: str) -> int:
        for number in itertools.count():
            try:
                client.submit(of(name, number))
            except QueueFull:
                return number
        raise AssertionError

    async def scenario(client: EngineClient) -> None:
        await client.wait_ready()
        os.kill(client.engine_pid, signal.SIGSTOP)
        assert num_taken(client, "hog") == 12 + 1, "alone it has the whole queue, and the seat"
        client.check_queue("second")
        assert num_taken(client, "second") == 12 // 2
        with pytest.raises(QueueFull):
            client.check_queue("second")
        assert num_taken(client, "third") == 12 // 3
        for number in range(5):
            num_taken(client, f"many {number}")
        assert client.num_unfinished == 2 * 12 + 1, "however many names there are"
        os.kill(client.engine_pid, signal.SIGCONT)
        while client.num_unfinished:
            await asyncio.sleep(0.01)
        assert num_taken(client, "late") == 12 + 1, "who has ended counts no more"

    run(path, scenario, max_queued_requests=12, max_num_seqs=1)


@pytest.mark.slow
def test_the_prompt_tokens_that_wait_are_bounded(path: Path) -> None:
    """Each choice is a request here and counts for itself, whatever the prefix cache holds of it."""

    def of(client: str, number: int, prompt_len: int = 200) -> Request:
        return msgspec.structs.replace(
            request(f"{client}-{number}", prompt_len=prompt_len, max_tokens=300), client=client
        )

    async def scenario(client: EngineClient) -> None:
        await client.wait_ready()
        os.kill(client.engine_pid, signal.SIGSTOP)
        streams = [client.submit(of("hog", number)) for number in range(5)]
        with pytest.raises(
            QueuedTokensFull, match=r"prompts of 1000 tokens are waiting, and this one has 200; .* 1100 "
        ) as full:
            client.submit(of("hog", 5))
        assert (full.value.status, full.value.code, full.value.retry_after_s) == (429, "queue_full", 1)
        client.submit(of("hog", 6, prompt_len=100))
        with pytest.raises(QueuedTokensFull):
            client.check_queue("hog")
        client.check_queue("second")
        streams += [client.submit(of("second", number)) for number in range(2)]
        with pytest.raises(QueuedTokensFull):
            client.submit(of("second", 2))  # half of the queue is 550
        os.kill(client.engine_pid, signal.SIGCONT)
        await asyncio.gather(*map(anext, streams))
        assert client.num_unfinished, "they run on"
        client.submit(of("hog", 7))  # for those that have their first token do not wait any more
        for stream in streams:
            client.abort(stream.request_id)
        while client.num_unfinished:
            await asyncio.sleep(0.01)
        os.kill(client.engine_pid, signal.SIGSTOP)
        for number in range(8, 13):
            client.submit(of("hog", number))
        os.kill(client.engine_pid, signal.SIGCONT)

    run(path, scenario, max_queued_tokens=1100)


@pytest.mark.slow
def test_a_request_that_never_fits_into_the_queue_is_refused_for_good(path: Path) -> None:
    async def scenario(client: EngineClient) -> None:
        with pytest.raises(NotReady):
            client.prepare([[5]], 1, None)
        await client.wait_ready()
        prompt = list(range(4, 104))
        assert [one.token_ids for one in client.prepare([prompt] * 2, 5, None)] == [prompt] * 2
        with pytest.raises(TooManyPromptTokens, match=r"have 1100 tokens, .* at most 1000 ") as never:
            client.prepare([prompt] * 11, 1, None)
        assert never.value.status == 400
        with pytest.raises(TooManyPromptTokens):
            client.prepare([prompt], 11, None)

    run(path, scenario, max_queued_tokens=1000)


@pytest.mark.slow
def test_one_longest_prompt_always_fits_into_the_queue(path: Path) -> None:
    async def scenario(client: EngineClient) -> None:
        await client.wait_ready()
        (prompt,) = client.prepare([[5] * 511], 1, None)
        streams = [client.submit(request("a", prompt_len=300, max_tokens=1))]
        with pytest.raises(QueuedTokensFull):
            client.submit(request("b", prompt_len=300))
        await asyncio.gather(*map(collect, streams))
        assert len((await collect(client.submit(request("c", prompt_len=300, max_tokens=1))))[0]) == 1
        assert len(prompt.token_ids) == 511

    run(path, scenario, max_queued_tokens=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "error"), [([], EmptyPrompt), ([5, 384], TokenOutOfVocabulary), ([-1], TokenOutOfVocabulary)]
)
def test_a_prompt_that_can_never_run_is_refused_when_it_is_prepared(
    path: Path, prompt: list[int], error: type[RequestError]
) -> None:
    async def scenario(client: EngineClient) -> None:
        await client.wait_ready()
        with pytest.raises(error):
            client.prepare([[5], prompt], 1, None)

    run(path, scenario)


@pytest.mark.slow
def test_choices_of_a_prompt_are_hashed_once_and_run_alike(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    original = client_module.hash_prompt
    monkeypatch.setattr(
        client_module, "hash_prompt", lambda ids, *others: hashed.append(len(ids)) or original(ids, *others)
    )

    async def scenario(client: EngineClient) -> None:
        await client.wait_ready()
        plain = request("plain", prompt_len=100)
        (prompt,) = client.prepare([plain.prompt_token_ids], 3, None)
        assert prompt.block_hashes == original(plain.prompt_token_ids, 16)
        choices = [
            msgspec.structs.replace(plain, request_id=name, block_hashes=prompt.block_hashes)
            for name in ("a", "b", "c")
        ]
        outputs = [await collect(client.submit(one)) for one in [*choices, plain]]
        assert len({tuple(tokens) for tokens, _ in outputs}) == 1
        assert hashed == [100, 100], "once prepared, and once for the request that was not"

    run(path, scenario, enable_prefix_caching=True)


def test_requests_that_find_a_seat_do_not_wait(path: Path) -> None:
    async def scenario(client: EngineClient) -> None:
        await client.wait_ready()
        for round_number in range(2):  # the second after a burst of aborts, which leaves the engine idle again
            streams = [client.submit(request(f"{round_number}-{index}", max_tokens=8000)) for index in range(8 + 2)]
            with pytest.raises(QueueFull):
                client.submit(request("refused"))
            await asyncio.gather(*(anext(stream) for stream in streams[:8]))
            for stream in streams:
                client.abort(stream.request_id)
            await asyncio.gather(*map(collect, streams))
        await client.post_limits(LimitsUpdate(revision=1, limits=LimitsChange(max_num_seqs=3)))
        for index in range(3 + 2):
            client.submit(request(f"few-{index}"))
        with pytest.raises(QueueFull):
            client.submit(request("refused"))

    run(path, scenario, max_queued_requests=2, max_num_seqs=8, max_model_len=8192)


@pytest.mark.slow
def test_free_seats_do_not_count_while_the_engine_cannot_fill_them(path: Path) -> None:
    """One of these prompts fits into the KV cache, so the others wait whatever max_num_seqs says."""

    async def scenario(client: EngineClient) -> None:
        await client.wait_ready()
        client.submit(request("runs", prompt_len=300, max_tokens=200))
        client.submit(request("waits", prompt_len=300))
        while (stats := client.latest_stats()) is None or stats.blocked_by != "kv":
            await asyncio.sleep(0.001)
        client.submit(request("waits too", prompt_len=300))
        with pytest.raises(QueueFull):
            client.submit(request("refused"))

    kv_bytes = 32 * kv_block_bytes(path)
    run(path, scenario, max_queued_requests=2, max_num_seqs=8, kv_cache_memory_bytes=kv_bytes)


def test_limits_are_those_of_the_moment_they_are_asked_for(path: Path) -> None:
    clock = FakeClock()

    async def scenario(client: EngineClient) -> None:
        await client.wait_ready()
        streams = [client.submit(request(name, max_tokens=8000)) for name in "abc"]
        await asyncio.gather(*map(anext, streams))
        ack = await client.post_limits(LimitsUpdate(revision=1, limits=LimitsChange(max_num_seqs=1), ttl_s=3600))
        assert (ack.status, ack.effective.max_num_seqs) == (LimitsStatus.DEFERRED, 3)
        assert client.limits().lease_expires_in_s == pytest.approx(3600, abs=60)
        clock.advance(1000)
        assert client.limits().lease_expires_in_s == pytest.approx(2600, abs=60)
        clock.advance(5000)
        assert client.limits().lease_expires_in_s == 0, "run out here, and the engine has not said so yet"
        for stream, num_left in zip(streams, (2, 1, 1), strict=True):
            client.abort(stream.request_id)
            await collect(stream)
            assert client.limits().effective.max_num_seqs == num_left

    run(path, scenario, clock=clock, max_model_len=8192)


@pytest.mark.slow
def test_a_full_queue_says_when_to_come_back_by_how_fast_requests_end(path: Path) -> None:
    clock = FakeClock()

    async def scenario(client: EngineClient) -> None:
        await client.wait_ready()
        short, long = client.submit(request("a")), client.submit(request("b", max_tokens=300))
        await collect(short)
        await anext(long)
        clock.advance(10)
        for name in "cd":
            client.submit(request(name))
        with pytest.raises(QueueFull) as refused:
            client.submit(request("e"))
        assert refused.value.retry_after_s == 20, "1 ending in 10 s, 2 waiting"

    run(path, scenario, clock=clock, max_queued_requests=2, max_num_seqs=1)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [8, 32])
def test_a_conversation_finds_its_own_answer_in_the_prefix_cache_of_its_salt(path: Path, block_size: int) -> None:
    """The client hashes prompts, the engine what it generates: the names must be the same."""
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompt = list(range(4, 24))

    async def scenario(client: EngineClient) -> None:
        await client.wait_ready()
        for salt in (None, "one tenant", "another"):
            first = Request(request_id="first", prompt_token_ids=prompt, sampling=sampling, cache_salt=salt)
            events = [event async for event in client.submit(first)]
            tokens = [event for event in events if isinstance(event, Tokens)]
            assert {one.num_cached_tokens for one in tokens} == {0}, "nobody with this salt sent it before"
            answer = [token_id for one in tokens for token_id in one.token_ids]
            prompt_again = [*prompt, *answer, 5]
            again = Request(request_id="again", prompt_token_ids=prompt_again, sampling=sampling, cache_salt=salt)
            found = await anext(client.submit(again))
            assert isinstance(found, Tokens)
            assert found.num_cached_tokens == 32, "four blocks or one: 39 of 40 tokens were computed"
            while client.num_unfinished:
                await asyncio.sleep(0.01)

    run(path, scenario, enable_prefix_caching=True, block_size=block_size)
