"""What fails again and again, told once, and once more when it is over."""

import contextlib
from collections.abc import Callable, Iterator

from flyball_protocol.quoting import one_line


class Trouble:
    """Lets something fail while the rest goes on.

    Args:
        what: what is not done while it lasts, such as "decisions are not recorded".
        over: what to say afterwards; it is given the number of failures.
    """

    def __init__(self, report: Callable[[str], None], what: str, over: Callable[[int], str]) -> None:
        self._report = report
        self._what = what
        self._over = over
        self._num_failures = 0

    @contextlib.contextmanager
    def tolerated(self) -> Iterator[None]:
        """Catch an OSError of the block. The first one is reported, and the end of their row."""
        try:
            yield
        except OSError as error:
            self._num_failures += 1
            if self._num_failures == 1:
                self._report(f"{self._what}: {one_line(str(error))}; everything else goes on")
        else:
            if self._num_failures:
                self._report(self._over(self._num_failures))
            self._num_failures = 0
