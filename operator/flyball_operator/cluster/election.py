"""One acting operator among several, by a Lease."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from flyball_operator.cluster.client import Client
from flyball_operator.cluster.errors import ClusterError, Conflict
from flyball_operator.cluster.kinds import LEASE
from flyball_operator.cluster.store import Object
from flyball_operator.errors import OperatorError

log = logging.getLogger(__name__)

LEASE_NAME = "flyball-operator"
"""The default. Operators that share a lease take turns, so those of another release need another name."""


class LeaseLost(OperatorError):
    """Somebody else may act now: this process has to end."""


@dataclass(frozen=True)
class Terms:
    """How long a lease holds, and how often it is renewed; the holder gives up before others may take over.

    All in seconds. ``give_up_s`` after the last renewal the holder stops; ``duration_s`` after it others take over.
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
    """

    def __init__(
        self,
        client: Client,
        namespace: str,
        identity: str,
        terms: Terms,
        name: str = LEASE_NAME,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._identity = identity
        self._terms = terms
        self._name = name
        self._clock = clock
        self._seen: tuple[str, float] = ("", 0.0)  # resource version of another's lease, and since when we know it
        self._lease: Object = {}
        self._renewed_at = 0.0

    async def acquire(self) -> None:
        log.info("waiting for %s as %s", self._what, self._identity)
        while not await self._try_acquire():
            await asyncio.sleep(self._terms.renew_s)
        log.info("leading as %s", self._identity)

    async def hold(self) -> None:
        while True:
            is_late = self._clock() - self._renewed_at > self._terms.renew_s
            await asyncio.sleep(self._terms.retry_s if is_late else self._terms.renew_s)
            await self._renew()

    async def release(self) -> None:
        """Let others take over at once."""
        if self._lease:
            self._lease["spec"]["holderIdentity"] = ""
            await self._client.replace(LEASE, self._lease)
            self._lease = {}

    async def _try_acquire(self) -> bool:
        asked_at = self._clock()
        try:
            found = await self._client.find(LEASE, self._namespace, self._name)
            if found is None:
                self._lease = await self._client.create(LEASE, self._signed({}))
            elif self._may_take(found):
                self._lease = await self._client.replace(LEASE, self._signed(found))
            else:
                return False
        except Conflict:  # somebody else was faster
            return False
        except ClusterError as error:
            log.warning("the lease cannot be taken yet: %s", error)
            return False
        self._renewed_at = asked_at
        return True

    def _may_take(self, lease: Object) -> bool:
        spec, version = lease.get("spec", {}), lease["metadata"]["resourceVersion"]
        if spec.get("holderIdentity") in (None, "", self._identity):
            return True
        if self._seen[0] != version:
            self._seen = (version, self._clock())
        unchanged_s = self._clock() - self._seen[1]
        return unchanged_s >= float(spec.get("leaseDurationSeconds", self._terms.duration_s))

    async def _renew(self) -> None:
        asked_at = self._clock()
        try:
            async with asyncio.timeout(max(0.0, self._renewed_at + self._terms.give_up_s - asked_at)):
                await self._write_renewal()
            self._renewed_at = asked_at
        except (ClusterError, TimeoutError) as error:
            log.warning("the lease was not renewed: %s", str(error) or "no answer in time")
            if self._clock() - self._renewed_at >= self._terms.give_up_s:
                raise LeaseLost(f"{self._what} could not be renewed for {self._terms.give_up_s:g} s") from error

    async def _write_renewal(self) -> None:
        try:
            self._lease = await self._client.replace(LEASE, self._signed(self._lease))
        except Conflict as error:
            # Taken by another, or an earlier renewal arrived although its answer did not.
            found = await self._client.get(LEASE, self._namespace, self._name)
            if found.get("spec", {}).get("holderIdentity") != self._identity:
                self._lease = {}  # nothing of ours to release
                raise LeaseLost(f"{self._what} was taken by somebody else") from error
            self._lease = found

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
        return {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": metadata, "spec": mine}
