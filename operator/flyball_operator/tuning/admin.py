"""The replicas' admin ports, as the slow loop uses them."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import msgspec
from yarl import URL

from flyball_operator.tuning.evidence import PodEvidence, Posted
from flyball_protocol import LimitsAck, LimitsUpdate, decode_evidence, signing
from flyball_protocol.endpoints import ADMIN_EVIDENCE_PATH, ADMIN_LIMITS_PATH
from flyball_protocol.limits import LIMITS_HTTP_STATUS
from flyball_protocol.quoting import one_line

MAX_CONCURRENT = 32
MAX_ANSWER_BYTES = 1 << 20
"""Evidence is some kilobytes. What answers on a replica's address may be anything, and many are asked at once."""

UNSIGNED = "not signed with this deployment's token"

T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """A replica that is expected to serve: its name and the base URL of its admin port."""

    name: str
    url: str


class AdminClient:
    """Reads evidence and posts limits. A replica that does not answer is a result, not an exception.

    Requests are signed with ``token``, which never travels, and so are the answers: what is at a replica's address may be
    anything, and its evidence must not tune anybody.

    Args:
        slots: how many requests may be under way; several clients may share it.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        token: str,
        *,
        timeout_s: float = 2.0,
        slots: asyncio.Semaphore | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._session = session
        self._token = token
        self._wall_clock = wall_clock
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._slots = slots or asyncio.Semaphore(MAX_CONCURRENT)

    async def gather(self, targets: Sequence[Target]) -> list[PodEvidence]:
        """Read the evidence of every target at once."""
        return await asyncio.gather(*(self.evidence(target) for target in targets))

    async def post_all(self, updates: Mapping[Target, LimitsUpdate]) -> list[Posted]:
        """Post to every target its update, all at once."""
        return await asyncio.gather(*(self.post(target, update) for target, update in updates.items()))

    async def evidence(self, target: Target) -> PodEvidence:
        async def read() -> PodEvidence:
            status, body = await self._request("GET", target, ADMIN_EVIDENCE_PATH)
            if status != 200:
                return PodEvidence(
                    pod=target.name, problem=f"GET {ADMIN_EVIDENCE_PATH} answered {status}: {_head(body)}"
                )
            return PodEvidence(pod=target.name, evidence=decode_evidence(body))

        return await _or_problem(read, lambda problem: PodEvidence(pod=target.name, problem=problem))

    async def post(self, target: Target, update: LimitsUpdate) -> Posted:
        async def send() -> Posted:
            status, body = await self._request("POST", target, ADMIN_LIMITS_PATH, msgspec.json.encode(update))
            if status not in LIMITS_HTTP_STATUS.values():
                return Posted(target.name, None, f"POST {ADMIN_LIMITS_PATH} answered {status}: {_head(body)}")
            return Posted(target.name, msgspec.json.decode(body, type=LimitsAck))

        return await _or_problem(send, lambda problem: Posted(target.name, None, problem))

    async def _request(self, method: str, target: Target, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Return status and body of an answer, which is signed unless it is a refusal. Raises UnusableAnswer."""
        url = URL(target.url + path)
        async with self._slots:
            signed = signing.new_request(
                method, url.raw_path_qs, signing.target_of(url.host or "", url.port), body, self._wall_clock()
            )
            headers = {"Authorization": signed.header(self._token), "Content-Type": "application/json"}
            async with self._session.request(
                method, url, data=body or None, headers=headers, timeout=self._timeout, allow_redirects=False
            ) as response:
                answer = await _read(response)
        signature = response.headers.get(signing.ANSWER_HEADER, "")
        if not signing.is_signed_answer(self._token, signed.nonce, response.status, answer, signature):
            raise UnusableAnswer(f"{method} {path} answered {response.status}, {UNSIGNED}: {_head(answer)}")
        return response.status, answer


class UnusableAnswer(Exception):
    """An answer that cannot be a runtime's."""


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise UnusableAnswer(
                f"the answer is longer than {MAX_ANSWER_BYTES} bytes: this is no admin port of a runtime"
            )
    return bytes(body)


async def _or_problem(ask: Callable[[], Awaitable[T]], problem: Callable[[str], T]) -> T:
    started = time.monotonic()
    try:
        return await ask()
    except TimeoutError:
        return problem(f"no answer in {time.monotonic() - started:.1f} s")
    except (aiohttp.ClientError, OSError) as error:
        return problem(one_line(f"{type(error).__name__}: {error}"))
    except msgspec.MsgspecError as error:
        return problem(f"an answer that cannot be read: {one_line(str(error))}")
    except UnusableAnswer as error:
        return problem(str(error))


def _head(body: bytes) -> str:
    return one_line(body[:200].decode("utf-8", "replace"))
