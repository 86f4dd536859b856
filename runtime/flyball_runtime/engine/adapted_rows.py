"""LoRA adapters on this process's device: those that are loaded, the slots that have some, and the rows that use a slot."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from flyball_runtime.core.checkpoint import ServedModel
from flyball_runtime.core.cpus import cores, stay_on
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.lora import LoraConfig
from flyball_runtime.core.model_config import ModelConfig
from flyball_runtime.model.linear import Adaptation, AdaptedTokens, Place
from flyball_runtime.model.lora import read_adapter
from flyball_runtime.model.transformer import CausalLM
from flyball_runtime.scheduler import BatchPlan

logger = logging.getLogger(__name__)

NO_SLOT = -1


def check_can_adapt(model: ServedModel) -> None:
    """Raise ConfigError for a model whose layers are not Flyball's own."""
    if not isinstance(model, ModelConfig):
        raise ConfigError(
            f"--enable-lora: {model.architecture} runs with the code of transformers, where adapters are not supported. "
            "Merge the adapter into the weights, or leave the flag out."
        )


class AdaptedRows:
    """Adapters are loaded in a thread of their own. On a GPU they stay in host memory until a plan gives them a slot."""

    def __init__(self, config: LoraConfig, model: CausalLM, place: Place, max_num_seqs: int) -> None:
        """Load the adapters of the settings.

        Raises:
            ConfigError: one of them cannot be used.
        """
        self._config = config
        self._place = place
        self._projections = model.projections()
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="flyball-lora", initializer=stay_on, initargs=(cores(),)
        )
        self._loaded: dict[int, Callable[[], Adaptation]] = {}
        self._slots: list[tuple[int, Adaptation] | None] = [None] * config.max_loras
        self._slot_of_row = np.full(max_num_seqs, NO_SLOT)
        for adapter in config.adapters:
            self._load(adapter.number, Path(adapter.path))

    @property
    def most_bytes(self) -> int:
        """What the slots take on the device if each has an adapter of the highest rank for every projection."""
        features = sum(one.in_features + one.columns.stop - one.columns.start for one in self._projections.values())
        return self._config.max_loras * self._config.max_lora_rank * features * self._place.dtype.itemsize

    def load(self, number: int, path: Path) -> Future[None]:
        """Read an adapter; ``result()`` raises ConfigError if it cannot be used."""
        return self._thread.submit(self._load, number, path)

    def unload(self, number: int) -> None:
        """Forget an adapter that no later plan names."""
        del self._loaded[number]
        self._slots = [None if slot is not None and slot[0] == number else slot for slot in self._slots]

    def apply(self, plan: BatchPlan) -> None:
        """Do what the plan says of slots and rows."""
        for write in plan.adapter_writes:
            self._slots[write.slot] = write.adapter, self._loaded[write.adapter]()
        for start in plan.row_starts:
            self._slot_of_row[start.row] = NO_SLOT if start.adapter_slot is None else start.adapter_slot

    def of_step(self, plan: BatchPlan) -> tuple[AdaptedTokens, ...]:
        """Return the plan's tokens that have adapters, by adapter. ``apply`` comes before."""
        of_entries = self._slot_of_row[plan.rows]
        slots = np.unique(of_entries)
        if slots[-1] == NO_SLOT:
            return ()
        of_tokens = None if len(slots) == 1 else np.repeat(of_entries, plan.num_scheduled)
        return tuple(self._tokens(of_tokens, slot) for slot in slots if slot != NO_SLOT)

    def _tokens(self, of_tokens: np.ndarray | None, number: int) -> AdaptedTokens:
        slot = self._slots[number]
        assert slot is not None, "a plan filled the slot"
        if of_tokens is None:
            return AdaptedTokens(None, slot[1])
        indices = torch.from_numpy(np.flatnonzero(of_tokens == number))
        return AdaptedTokens(indices.to(self._place.device, non_blocking=True), slot[1])

    def _load(self, number: int, path: Path) -> None:
        start_s = time.monotonic()
        place = self._place
        host = read_adapter(path, self._projections, max_rank=self._config.max_lora_rank, dtype=place.dtype)
        if place.device.type == "cpu":
            packed = host.packed(place)
            self._loaded[number] = lambda: packed
        else:
            self._loaded[number] = lambda: host.packed(place)
        logger.info("loaded the LoRA adapter %d of %s in %.1f s", number, path, time.monotonic() - start_s)
