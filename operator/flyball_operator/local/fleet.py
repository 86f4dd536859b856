"""The replicas of one deployment, kept at the number and template that are wanted."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp

from flyball_operator.local.accelerators import RESOURCE_NAME, AcceleratorPool
from flyball_operator.local.backoff import Backoff
from flyball_operator.local.replica import Replica, State
from flyball_operator.local.rollout import Seen, Start, Stop, next_actions
from flyball_operator.local.template import ProcessTemplate
from flyball_protocol.endpoints import ADMIN_TOKEN_ENV


class Fleet:
    """Starts and stops replicas until ``want()`` is met; every change of a replica is a reason to look again."""

    def __init__(
        self,
        template: ProcessTemplate,
        wanted: int,
        *,
        token: str,
        log_dir: Path,
        session: aiohttp.ClientSession,
        accelerators: AcceleratorPool,
        backoff: Callable[[], Backoff],
        report: Callable[[str], None],
    ) -> None:
        self.template = template
        self.wanted = wanted
        self.num_killed = 0
        self._token = token
        self._log_dir = log_dir
        self._session = session
        self._accelerators = accelerators
        self._backoff = backoff
        self._report = report
        self._replicas: dict[int, Replica] = {}
        self._next_number = 1
        self._changed = asyncio.Event()
        self._no_room = False
        self._task: asyncio.Task[None] | None = None

    @property
    def replicas(self) -> Sequence[Replica]:
        """Every replica that has not ended, in the order they were started."""
        return [replica for replica in self._replicas.values() if replica.state is not State.STOPPED]

    def start(self) -> None:
        self._task = asyncio.create_task(self._reconcile_forever(), name="fleet")

    def want(self, template: ProcessTemplate, wanted: int) -> None:
        """Change what is wanted."""
        self.template, self.wanted = template, wanted
        self._changed.set()

    async def drain(self) -> None:
        """Drain all replicas at once and wait for their end. Nothing is started afterwards."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        for replica in self.replicas:
            replica.stop()
        await asyncio.gather(*(replica.join() for replica in self._replicas.values()))
        self._forget_ended()

    def kill(self) -> None:
        """End all replicas now."""
        for replica in self.replicas:
            replica.kill()

    async def _reconcile_forever(self) -> None:
        while True:
            self._changed.clear()
            self._forget_ended()
            self._reconcile()
            await self._changed.wait()

    def _forget_ended(self) -> None:
        for replica in [one for one in self._replicas.values() if one.state is State.STOPPED]:
            self._accelerators.give_back(replica.number)
            self.num_killed += replica.killed
            del self._replicas[replica.number]

    def _reconcile(self) -> None:
        room = self._accelerators.room(self.template.num_accelerators)
        seen = [
            Seen(replica.number, current=replica.template.digest == self.template.digest, ready=replica.ready)
            for replica in self.replicas
            if not replica.leaving
        ]
        for action in next_actions(self.wanted, seen, room=room):
            match action:
                case Start():
                    self._start_one()
                case Stop(number=number, reason=reason):
                    self._report(f"replica {number} drains: {reason}")
                    self._replicas[number].stop()
        self._tell_if_no_room(room, len(seen))

    def _start_one(self) -> None:
        number, self._next_number = self._next_number, self._next_number + 1
        devices = self._accelerators.take(number, self.template.num_accelerators)
        replica = Replica(
            number,
            self.template,
            {**self.template.env, **devices, ADMIN_TOKEN_ENV: self._token},
            self._log_dir / f"replica-{number}.log",
            self._session,
            on_change=self._changed.set,
            report=self._report,
            backoff=self._backoff(),
        )
        self._replicas[number] = replica
        replica.start()

    def _tell_if_no_room(self, room: int | None, num_active: int) -> None:
        no_room = room == 0 and num_active < self.wanted and len(self.replicas) == num_active
        if no_room and not self._no_room:
            self._report(
                f"{self.wanted} replicas of {self.template.num_accelerators} {RESOURCE_NAME} are wanted, and this machine has "
                f"{len(self._accelerators.devices)}; running {num_active}. Lower spec.replicas, or set accelerator.count to 0"
            )
        self._no_room = no_room
