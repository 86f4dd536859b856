"""One running thing for many tests, and a new one once a test has harmed it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Generic, Protocol, TypeVar


class Checked(Protocol):
    def unharmed(self) -> AbstractContextManager[None]:
        """Check after the block that it is as it was before."""


T = TypeVar("T", bound=Checked)


class Shared(Generic[T]):
    """Starts with ``start`` what ``unharmed`` gives to a test, when there is none that was not harmed."""

    def __init__(self, start: Callable[[], AbstractContextManager[T]]) -> None:
        self._start = start
        self._running = ExitStack()
        self._current: T | None = None

    @contextmanager
    def unharmed(self) -> Iterator[T]:
        if self._current is None:
            self._current = self._running.enter_context(self._start())
        try:
            with self._current.unharmed():
                yield self._current
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._current = None
        self._running.close()
