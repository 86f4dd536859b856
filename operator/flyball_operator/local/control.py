"""One running instance per deployment: a lock, and a socket to hand it a changed manifest or ask how it stands."""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from flyball_operator.errors import LocalError
from flyball_operator.local.snapshot import Snapshot

ANSWER_TIMEOUT_S = 30.0
Answer = TypeVar("Answer")

MAX_SOCKET_PATH = 107  # bytes, sun_path on Linux without its final zero


class Handover(Struct, frozen=True, kw_only=True, tag=True):
    """A manifest from a second invocation. ``source`` is the absolute path it was read from."""

    manifest: str
    source: str


class StatusRequest(Struct, frozen=True, tag=True):
    """Asks for the Snapshot."""


class HandoverAnswer(Struct, frozen=True, kw_only=True):
    """What the running instance made of it: the plan it follows now, or why it changed nothing."""

    plan: tuple[str, ...] = ()
    error: str | None = None
    url: str = ""


class InstanceFolder:
    """The folder of one deployment's instance: lock, socket and logs. The lock is the kernel's and goes with the process."""

    def __init__(self, root: Path, name: str) -> None:
        self.path = root / name
        self._lock: int | None = None

    @property
    def socket_path(self) -> Path:
        return self.path / "control.sock"

    @property
    def log_dir(self) -> Path:
        return self.path / "logs"

    def acquire(self) -> bool:
        """Return True when this process is now the instance, False when another one is.

        Raises:
            LocalError: the folder cannot be used.
        """
        if len(os.fsencode(self.socket_path)) > MAX_SOCKET_PATH:
            raise LocalError(
                f"{self.socket_path} is longer than the {MAX_SOCKET_PATH} bytes of a socket's path; give a shorter --state-dir"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LocalError(
                f"the state folder {self.path} cannot be used: {error}; give another --state-dir"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class ControlServer:
    """Answers on the folder's socket."""

    def __init__(
        self,
        folder: InstanceFolder,
        apply: Callable[[Handover], Awaitable[HandoverAnswer]],
        snapshot: Callable[[], Snapshot],
    ) -> None:
        self._folder = folder
        self._apply = apply
        self._snapshot = snapshot
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._folder.socket_path.unlink(missing_ok=True)  # of an instance that was killed: we hold the lock
        self._server = await asyncio.start_unix_server(self._serve, self._folder.socket_path)
        self._folder.socket_path.chmod(0o600)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._folder.socket_path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            answer = await self._answer(await reader.read())
            with contextlib.suppress(ConnectionError):
                writer.write(msgspec.json.encode(answer))
                await writer.drain()

    async def _answer(self, request: bytes) -> HandoverAnswer | Snapshot:
        try:
            asked: Handover | StatusRequest = msgspec.json.decode(request, type=Handover | StatusRequest)
        except msgspec.MsgspecError as error:
            return HandoverAnswer(error=f"a request that cannot be read: {error}")
        return self._snapshot() if isinstance(asked, StatusRequest) else await self._apply(asked)


async def hand_over(folder: InstanceFolder, handover: Handover) -> HandoverAnswer:
    """Give a manifest to the instance that runs.

    Raises:
        LocalError: it holds the lock and does not answer.
    """
    return await _ask(folder, handover, HandoverAnswer)


async def ask_status(folder: InstanceFolder) -> Snapshot:
    """Ask the instance that runs how it stands.

    Raises:
        LocalError: none runs, or it does not answer.
    """
    if not folder.socket_path.exists():
        raise LocalError(
            f"no instance runs in {folder.path}; start one with flyball local -f FILE, "
            "or give -n NAMESPACE for a deployment on a cluster"
        )
    return await _ask(folder, StatusRequest(), Snapshot)


async def ask_all(root: Path) -> list[Snapshot]:
    """Ask every instance of a state folder how it stands; returns the answers in order of the names.

    Raises:
        LocalError: an instance does not answer.
    """
    folders = [InstanceFolder(root, path.parent.name) for path in sorted(root.glob("*/control.sock"))]
    answers = await asyncio.gather(*map(_ask_unless_killed, folders))
    return [answer for answer in answers if answer is not None]


async def _ask_unless_killed(folder: InstanceFolder) -> Snapshot | None:
    """Return None where only the socket is left of an instance."""
    try:
        return await ask_status(folder)
    except LocalError as error:
        if isinstance(error.__cause__, ConnectionRefusedError):
            return None
        raise


async def _ask(folder: InstanceFolder, request: Handover | StatusRequest, answer: type[Answer]) -> Answer:
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(folder.socket_path)
            with contextlib.closing(writer):
                writer.write(msgspec.json.encode(request))
                writer.write_eof()
                return msgspec.json.decode(await reader.read(), type=answer)
    except (OSError, TimeoutError, msgspec.MsgspecError) as error:
        raise LocalError(
            f"an instance of this deployment holds {folder.path / 'lock'} but does not answer "
            f"({error or type(error).__name__}); it may be starting or stopping. Try again, or end it"
        ) from error
