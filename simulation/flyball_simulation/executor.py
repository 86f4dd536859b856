"""The executor of the simulator: a step takes as long as its plant says, and every token is 0."""

from concurrent.futures import Future
from typing import NamedTuple

from flyball_runtime.core.clock import FakeClock
from flyball_runtime.core.grammar import Grammar
from flyball_runtime.core.stats import EngineInfo, Sampled
from flyball_runtime.scheduler import BatchPlan
from flyball_simulation.plant import Device


class Launched(NamedTuple):
    """A step that is under way."""

    end_s: float
    num_tokens: int


class PlantExecutor:
    """Moves the engine's clock to the end of each step that is collected."""

    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, info: EngineInfo, device: Device, clock: FakeClock) -> None:
        self.info = info
        self._device = device
        self._clock = clock
        self._free_s = 0.0
        self._num_blocks = info.num_start_kv_blocks

    def compile(self, grammar: Grammar) -> Future[None]:
        """Return what is done at once: there are no logits."""
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def load_adapter(self, number: int, path: str) -> Future[None]:
        raise NotImplementedError("the simulator has no adapters")

    def unload_adapter(self, number: int) -> None:
        raise NotImplementedError("the simulator has no adapters")

    def launch(self, plan: BatchPlan) -> Launched:
        start_s = max(self._clock.now(), self._free_s)
        self._free_s = start_s + self._device.seconds(
            start_s,
            plan.num_tokens - plan.num_decodes,
            plan.num_decodes,
            plan.num_context_tokens,
            plan.prefill_work,
        )
        return Launched(self._free_s, plan.samples.count(True))

    def decodes_ahead(self, plan: BatchPlan) -> bool:
        return False

    def launch_decodes(self, plans: list[BatchPlan]) -> list[Launched]:
        return [self.launch(plan) for plan in plans]

    @property
    def kv_share(self) -> float:
        """Of all KV blocks, those that there is memory for."""
        return self._num_blocks / self.info.num_kv_blocks

    def resize(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def collect(self, handle: Launched) -> Sampled:
        self._clock.advance_to(handle.end_s)
        return Sampled([0] * handle.num_tokens)


def engine_info(
    *,
    model: str,
    device: str,
    max_model_len: int,
    max_num_batched_tokens: int,
    num_kv_blocks: int,
    block_size: int,
    num_start_kv_blocks: int | None = None,
) -> EngineInfo:
    """Return the facts of a replica that has no model."""
    return EngineInfo(
        model=model,
        dtype="bfloat16",
        device=device,
        kernel_backend="simulated",
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        vocab_size=1,
        block_size=block_size,
        kv_windows=(None,),
        num_kv_blocks=num_kv_blocks,
        num_start_kv_blocks=num_start_kv_blocks or num_kv_blocks,
        num_parameters=0,
        startup_s={},
        longest_pause_s=0.0,
    )
