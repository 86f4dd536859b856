"""The LoRA adapters that requests may name, as the API process knows them."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable

from msgspec import Struct

from flyball_protocol.quoting import quoted
from flyball_runtime.core.errors import AdapterNotFound, EngineDead, InvalidAdapter
from flyball_runtime.core.lora import Adapter, LoraConfig


class LoadAdapter(Struct, frozen=True, tag=True):
    """Read a LoRA adapter; an AdapterAnswer with its number follows."""

    number: int
    path: str


class UnloadAdapter(Struct, frozen=True, tag=True):
    """Forget an adapter. All requests that had it have ended, and no more come."""

    number: int


class AdapterAnswer(Struct, frozen=True, tag=True):
    """``error``: why the adapter cannot be used; None when it can."""

    number: int
    error: str | None


class Adapters:
    """Those that are loaded, by name, and those whose last requests are running. Lives on one event loop.

    An adapter that is unloaded takes no more requests at once. The engine forgets it when the last of its requests has ended.

    Args:
        config: None where adapters are not served.
        post: sends a message to the engine.
    """

    def __init__(self, config: LoraConfig | None, post: Callable[[LoadAdapter | UnloadAdapter], None]) -> None:
        self._most = 0 if config is None else config.max_cpu_loras
        self._post = post
        self._loaded = {one.name: one for one in (config.adapters if config is not None else ())}
        self._numbers = itertools.count(len(self._loaded))
        self._loading: dict[int, tuple[Adapter, asyncio.Future[None]]] = {}
        self._leaving: set[int] = set()
        self._adapter_of: dict[str, int] = {}  # by request id
        self._dead: EngineDead | None = None
        self._num_open: Counter[int] = Counter()  # requests, by adapter

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._loaded)

    def find(self, name: str) -> Adapter | None:
        return self._loaded.get(name)

    def __contains__(self, number: int) -> bool:
        """Whether new requests may have the adapter of this number."""
        return any(one.number == number for one in self._loaded.values())

    async def load(self, name: str, path: str, *, replaces: bool = False) -> None:
        """Have the engine read an adapter; requests may name it from then on.

        Args:
            replaces: whether a loaded adapter of this name is then unloaded.
        Raises:
            RequestError: the name is taken, there are too many, or this one cannot be used.
        """
        if self._dead is not None:
            raise self._dead
        if any(one.name == name for one, _ in self._loading.values()) or (name in self._loaded and not replaces):
            raise InvalidAdapter(
                f"an adapter {quoted(name)} is loaded or being loaded. Unload it, choose another name, or send load_inplace.",
                param="lora_name",
            )
        num = len(self._loaded) + len(self._loading) + len(self._leaving)
        if num >= self._most:
            raise InvalidAdapter(
                f"{num} adapters are loaded, the limit of this server (--max-cpu-loras). Unload one that is not needed; "
                "its memory is free when its last request has ended."
            )
        adapter = Adapter(number=next(self._numbers), name=name, path=path)
        answer = asyncio.get_running_loop().create_future()
        self._loading[adapter.number] = adapter, answer
        self._post(LoadAdapter(adapter.number, path))
        await answer

    def unload(self, name: str) -> None:
        """Take no more requests for an adapter. Raises AdapterNotFound."""
        if name not in self._loaded:
            raise AdapterNotFound(f"no adapter {quoted(name)} is loaded.", param="lora_name")
        self._retire(self._loaded.pop(name))

    def opened(self, request_id: str, number: int) -> None:
        """Note that a request for an adapter goes to the engine."""
        self._adapter_of[request_id] = number
        self._num_open[number] += 1

    def ended(self, request_id: str) -> None:
        """Note that the engine has ended a request."""
        number = self._adapter_of.pop(request_id, None)
        if number is None:
            return
        self._num_open[number] -= 1
        if not self._num_open[number]:
            del self._num_open[number]
            if number in self._leaving:
                self._leaving.remove(number)
                self._post(UnloadAdapter(number))

    def answered(self, message: AdapterAnswer) -> None:
        """Take the engine's answer to a LoadAdapter. It counts whether or not somebody still waits for it."""
        adapter, answer = self._loading.pop(message.number)
        if message.error is None:
            if (old := self._loaded.get(adapter.name)) is not None:
                self._retire(old)
            self._loaded[adapter.name] = adapter
        if answer.done():
            return
        if message.error is None:
            answer.set_result(None)
        else:
            answer.set_exception(InvalidAdapter(message.error, param="lora_path"))

    def fail_all(self, error: EngineDead) -> None:
        """Fail what waits for the engine, which will not answer any more."""
        self._dead = error
        for _, answer in self._loading.values():
            if not answer.done():
                answer.set_exception(error)

    def _retire(self, adapter: Adapter) -> None:
        if self._num_open[adapter.number]:
            self._leaving.add(adapter.number)
        else:
            self._post(UnloadAdapter(adapter.number))
