"""One acting operator among several, by a Lease."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime

from flyball_operator import names
from flyball_operator.cluster.api_server import LEASE, ClusterError, Conflict
from flyball_operator.cluster.client import Client
from flyball_operator.errors import OperatorError
from flyball_operator.observed import Object

log = logging.getLogger(__name__)

LEASE_NAME = "flyball-operator"
"""The default. Operators that share a lease take turns, so those of another release need another name."""


PROCESS = f"{names.GROUP}/process"
"""Annotation of the lease: tells processes with the same identity apart."""


class LeaseLost(OperatorError):
    """Another process may act now: this one has to end."""


def boot_clock() -> float:
    """Return seconds since some moment, those included in which the machine slept: a lease runs out meanwhile."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@dataclass(frozen=True)
class Terms:
    """How long a lease holds, and how often it is renewed; the holder gives up before others may take over.

    All in seconds. ``give_up_s`` after the last renewal the holder stops; ``duration_s`` after it others take over. The
    time between is for writes that the API server has received and not yet carried out, and for clocks that run slow.
    """

    duration_s: float = 15.0

    @property
    def renew_s(self) -> float:
        return self.duration_s / 3

    @property
    def retry_s(self) -> float:
        """After a renewal that failed."""
        return self.duration_s / 15

    @property
    def give_up_s(self) -> float:
        return self.duration_s * 2 / 3


class Election:
    """``acquire()`` returns when this process leads; ``hold()`` then runs until it no longer does, and raises LeaseLost.

    Whether another holder is gone is judged by this process's own clock: the lease has to stay unchanged for its whole
    duration while we look. Clocks that differ do no harm.

    Whatever ends them, ``release()`` comes next: a signal may cancel them while the API server writes the lease. It waits for
    the answer to that.

    ``hold()`` alone could be late: a blocked event loop runs what waits in any order. So each write asks
    ``time_to_write()`` first. The calls for the lease itself need no permission: its resource version protects it.
    """

    def __init__(
        self,
        client: Client,
        namespace: str,
        identity: str,
        terms: Terms,
        name: str = LEASE_NAME,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._identity = identity
        self._process = uuid.uuid4().hex
        self._terms = terms
        self._name = name
        self._clock = clock
        self._seen: tuple[str, float] = ("", 0.0)  # resource version of another's lease, and since when we know it
        self._lease: Object = {}
        self._renewed_at = float("-inf")
        self._asking: asyncio.Future[bool | None] | None = None  # the last call for the lease

    async def acquire(self) -> None:
        log.info("waiting for %s as %s", self._what, self._identity)
        while not await self._to_its_end(self.try_acquire()):
            await asyncio.sleep(self._terms.renew_s)
        log.info("leading as %s", self._identity)

    async def hold(self) -> None:
        while True:
            is_late = self._clock() - self._renewed_at > self._terms.renew_s
            await asyncio.sleep(self._terms.retry_s if is_late else self._terms.renew_s)
            await self._to_its_end(self.renew())

    async def _to_its_end(self, asking: Coroutine[None, None, bool | None]) -> bool | None:
        self._asking = asyncio.ensure_future(asking)
        return await asyncio.shield(self._asking)

    def time_to_write(self) -> float:
        """Return for how many seconds this process may still write.

        Raises:
            LeaseLost: it may not: the lease was not renewed in time, or was never acquired.
        """
        left_s = self._renewed_at + self._terms.give_up_s - self._clock()
        if left_s <= 0:
            raise LeaseLost(f"{self._what} was not renewed for {self._terms.give_up_s:g} s")
        return left_s

    async def release(self) -> None:
        """Let others take over at once, if the lease is ours."""
        if self._asking is not None:
            await asyncio.wait([self._asking])
        self._renewed_at = float("-inf")
        found = await self._client.find(LEASE, self._namespace, self._name)
        if found is not None and self._is_mine(found):
            found["spec"]["holderIdentity"] = ""
            await self._client.replace(LEASE, found)

    async def try_acquire(self) -> bool:
        """Take the lease if it is free; returns whether this process leads."""
        try:
            found = await self._client.find(LEASE, self._namespace, self._name)
            if found is not None and not self._may_take(found):
                return False
            asked_at = self._clock()
            async with asyncio.timeout(self._terms.give_up_s):
                self._lease = await self._take(found)
        except Conflict:  # another process was faster
            return False
        except (ClusterError, TimeoutError) as error:
            log.warning("%s cannot be taken yet: %s", self._what, str(error) or "no answer in time")
            return False
        self._renewed_at = asked_at
        return True

    async def _take(self, found: Object | None) -> Object:
        if found is None:
            return await self._client.create(LEASE, self._signed({}))
        return await self._client.replace(LEASE, self._signed(found))

    def _may_take(self, lease: Object) -> bool:
        spec, version = lease.get("spec", {}), lease["metadata"]["resourceVersion"]
        if spec.get("holderIdentity") in (None, "", self._identity):
            return True
        if self._seen[0] != version:
            self._seen = (version, self._clock())
        unchanged_s = self._clock() - self._seen[1]
        return unchanged_s >= float(spec.get("leaseDurationSeconds", self._terms.duration_s))

    async def renew(self) -> None:
        """Renew the lease once; a failure is logged while there is time for another try.

        Raises:
            LeaseLost: another process has it, or the time to renew it is up.
        """
        asked_at = self._clock()
        try:
            async with asyncio.timeout(self.time_to_write()):
                await self._write_renewal()
            self._renewed_at = asked_at
        except (ClusterError, TimeoutError) as error:
            log.warning("%s was not renewed: %s", self._what, str(error) or "no answer in time")
            self.time_to_write()

    async def _write_renewal(self) -> None:
        try:
            self._lease = await self._client.replace(LEASE, self._signed(self._lease))
        except Conflict as error:
            # Taken by another, or an earlier renewal arrived although its answer did not.
            found = await self._client.get(LEASE, self._namespace, self._name)
            if not self._is_mine(found):
                raise LeaseLost(f"{self._what} was taken by {self._holder_of(found)}") from error
            self._lease = found

    def _is_mine(self, lease: Object) -> bool:
        process = lease["metadata"].get("annotations", {}).get(PROCESS)
        holder = lease.get("spec", {}).get("holderIdentity")
        return bool((process, holder) == (self._process, self._identity))

    def _holder_of(self, lease: Object) -> str:
        holder = lease.get("spec", {}).get("holderIdentity") or "nobody"
        return f"another process with the name {holder}" if holder == self._identity else str(holder)

    @property
    def _what(self) -> str:
        return f"the lease {self._namespace}/{self._name}"

    def _signed(self, lease: Object) -> Object:
        """Return the lease with this process as its holder, as of now."""
        spec = lease.get("spec", {})
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        is_mine = spec.get("holderIdentity") == self._identity
        mine = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, round(self._terms.duration_s)),
            "renewTime": now,
            "acquireTime": spec.get("acquireTime", now) if is_mine else now,
            "leaseTransitions": spec.get("leaseTransitions", 0) + (not is_mine and bool(lease)),
        }
        metadata = lease.get("metadata") or {"name": self._name, "namespace": self._namespace}
        signed = {**metadata, "annotations": {**metadata.get("annotations", {}), PROCESS: self._process}}
        return {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": signed, "spec": mine}
