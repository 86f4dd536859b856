"""What runs the scheduler's plans: this process's model, a simulator's clock, or later the ranks of a replica."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from flyball_runtime.core.stats import EngineInfo
from flyball_runtime.scheduler import BatchPlan

Handle = Any
"""What ``launch`` gives back, for its own executor only."""


class Executor(Protocol):
    """Runs every plan once, in the order of their numbers.

    A handle is collected after those launched before it. Between the two calls the step may be running, and the next plan
    may be launched: what it needs of this one's tokens, the executor has itself.
    """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def launch(self, plan: BatchPlan) -> Handle:
        """Start a step, and return at once if the device works by itself."""
        ...

    def resize(self, num_blocks: int) -> None:
        """Have memory for KV blocks ``0..num_blocks - 1``, and give back what lies above, after what was launched before."""
        ...

    def collect(self, handle: Handle) -> list[int | None]:
        """Wait for a step; return a token for each entry that samples, None where the logits give no distribution."""
        ...


class InThread:
    """An executor whose steps run in a thread of their own, beside whoever launches them.

    A CPU works only while somebody calls it; the ops leave Python's lock to others meanwhile.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="flyball-step")

    @property
    def info(self) -> EngineInfo:
        return self._executor.info

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._executor.eos_token_ids

    def launch(self, plan: BatchPlan) -> Future[list[int | None]]:
        return self._thread.submit(self._run, plan)

    def resize(self, num_blocks: int) -> None:
        self._thread.submit(self._executor.resize, num_blocks).result()

    def collect(self, handle: Future[list[int | None]]) -> list[int | None]:
        return handle.result()

    def _run(self, plan: BatchPlan) -> list[int | None]:
        return self._executor.collect(self._executor.launch(plan))


Progress = Callable[[], object]
"""Called several times within each step."""
