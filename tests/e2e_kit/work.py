"""Requests cut to the speed of a model on this machine, with their answers."""

import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import aiohttp

from cluster_kit.errors import ClusterError
from e2e_kit.answers import Answer, Ask

PROMPTS = (
    "Tell me about the sea.",
    "What is a KV cache?",
    "The scheduler",
    "Write a long story about a dragon.",
    "Tell me a story.",
    "Once there was a girl",
)
"""Of those whose answers go on and on, and do not end in end-of-sequence tokens, which have no text."""
NUM_RUNNING = 12
"""How many streams a replica of ``BUSY`` runs at a time; the others wait."""
STREAM_S = 10.0
"""How long a stream takes unless a test says otherwise. The shortest takes SHORTEST of it, the longest as much more."""
SHORTEST = 0.85
MIN_STREAM_S = 8.0
MAX_STREAM_TOKENS = 1900
"""What the demo model's context has room for, with the prompt."""
PROBE_TOKENS = 480
"""So many that the probe's context grows as a stream's does: tokens after a short prompt alone come twice as fast."""
SHORT_TOKENS = 24
SLOTS_OF_SHORT = 0.5
"""How many of the running requests should be short ones, on average."""
TIMEOUT_S = 600.0
BEGIN_TIMEOUT_S = 60.0


class TooFast(ClusterError):
    """Streams would end too soon.

    Attributes:
        times: how many times as fast as need be a replica is; more than 1.
    """

    def __init__(self, token_s: float, stream_s: float) -> None:
        self.times = stream_s / (MAX_STREAM_TOKENS * token_s)
        super().__init__(
            f"a token takes {token_s * 1e3:.1f} ms, so that {MAX_STREAM_TOKENS} tokens are no stream of {stream_s:g} s: "
            "give the replicas less CPU."
        )


@dataclass(frozen=True)
class Work:
    """Requests that take a known time on this machine, and their answers.

    Attributes:
        token_s: time between two tokens of a stream, with as many at a time as will run.
        streams: long ones, each with a prompt and a length of its own, so that they do not end in step.
        short: streamed and whole.
        expected: texts by prompt and number of tokens, taken while nothing was disturbed.
    """

    token_s: float
    streams: tuple[Ask, ...]
    short: tuple[Ask, ...]
    expected: dict[tuple[str, int], str]

    @property
    def short_period_s(self) -> float:
        return SHORT_TOKENS * self.token_s / SLOTS_OF_SHORT


def measure(url: str, stream_s: float = STREAM_S, num_running: int = NUM_RUNNING) -> Work:
    """Measure the speed of the model behind a Service, make requests to fit, and take their answers.

    Args:
        stream_s: how long a stream should take.
        num_running: how many streams all replicas together will run.
    Raises:
        TooFast: streams would end too soon.
    """
    return asyncio.run(_measure(url, stream_s, num_running))


async def _measure(url: str, stream_s: float, num_running: int) -> Work:
    async with new_session() as session:
        await _first_answer(session, url)
        token_s, shortest_s = await _token_s(session, url, num_running), min(MIN_STREAM_S, stream_s)
        if MAX_STREAM_TOKENS * token_s < shortest_s:
            raise TooFast(token_s, shortest_s)
        streams, short = tuple(_streams(token_s, stream_s)), tuple(_short())
        answers = await _whole_answers(session, url, streams + short[::2])
        return Work(token_s, streams, short, {one.key: one.text for one in answers})


async def _first_answer(session: aiohttp.ClientSession, url: str) -> None:
    """Wait until the Service has its first replica: kube-proxy may be a moment behind."""
    deadline_s = time.monotonic() + BEGIN_TIMEOUT_S
    while (problem := (await _answer(session, url, Ask(PROMPTS[0], 1))).problem) and time.monotonic() < deadline_s:
        await asyncio.sleep(0.5)
    assert not problem, f"no answer to begin with: {problem}"


async def _token_s(session: aiohttp.ClientSession, url: str, num_running: int) -> float:
    asks = [Ask(prompt, PROBE_TOKENS) for prompt in itertools.islice(itertools.cycle(PROMPTS), num_running)]
    answers = await _whole_answers(session, url, asks)
    return statistics.median((one.last_s - (one.first_s or 0.0)) / PROBE_TOKENS for one in answers)


async def _whole_answers(session: aiohttp.ClientSession, url: str, asks: Sequence[Ask]) -> list[Answer]:
    answers = await asyncio.gather(*(_answer(session, url, ask) for ask in asks))
    problems = [one.problem for one in answers if one.problem]
    assert not problems, f"failed before anything was disturbed: {problems}"
    return answers


async def _answer(session: aiohttp.ClientSession, url: str, ask: Ask) -> Answer:
    answer = Answer(ask)
    await answer.fetch(session, url)
    return answer


def _streams(token_s: float, stream_s: float) -> Iterator[Ask]:
    """Yield one for each prompt, from SHORTEST of ``stream_s`` to as much more."""
    for index, prompt in enumerate(PROMPTS):
        share = SHORTEST + 2 * (1 - SHORTEST) * index / (len(PROMPTS) - 1)
        yield Ask(prompt, min(int(share * stream_s / token_s), MAX_STREAM_TOKENS - len(PROMPTS) + index))


def _short() -> Iterator[Ask]:
    for prompt, streamed in itertools.product(PROMPTS, (True, False)):
        yield Ask(prompt, SHORT_TOKENS, streamed)


def new_session() -> aiohttp.ClientSession:
    """Return a session that opens a connection for each request."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
