"""Runs one plan on the device: input tensors -> model -> sampler -> token ids."""

import time
from collections.abc import Callable

import numpy as np
import torch

from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.model_config import ModelConfig
from flyball_runtime.core.sequence import Sequence
from flyball_runtime.core.stats import EngineInfo
from flyball_runtime.engine.inputs import NOBODY, InputBuilder
from flyball_runtime.engine.kv_tensors import allocate_kv_tensors
from flyball_runtime.engine.resolve import resolve_device, resolve_kv_cache, resolve_max_model_len
from flyball_runtime.engine.warm_up import WarmUp, peak_bytes
from flyball_runtime.model.backend import use_kernel_backend
from flyball_runtime.model.dtypes import TORCH_DTYPES, resolve_dtype
from flyball_runtime.model.loader import load_model
from flyball_runtime.model.sampler import NO_TOKEN, SamplingTensors
from flyball_runtime.scheduler import BatchPlan


class ModelRunner:
    """Owns everything that lives on the device: weights, KV tensors, sampler state.

    Args:
        on_progress: called after each layer of a step.
    Raises:
        ConfigError: the checkpoint, a setting or the machine makes start-up impossible.
    """

    def __init__(self, config: EngineConfig, on_progress: Callable[[], object]) -> None:
        self._on_progress = on_progress
        stages = _Stages()
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        model_config = ModelConfig.from_dir(config.model)
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, model_config)
        max_model_len = resolve_max_model_len(config, model_config)
        kernel_backend = use_kernel_backend(config.kernel_backend, device)
        stages.done("config")

        self._model = load_model(
            config.model, model_config, dtype=TORCH_DTYPES[dtype], device=device, max_model_len=max_model_len
        )
        stages.done("weights")

        step_bytes, longest_pause_s = self._warm_up(config, max_model_len, TORCH_DTYPES[dtype], device)
        stages.done("warm_up")

        kv_size = resolve_kv_cache(
            config, model_config, dtype=dtype, device=device, max_model_len=max_model_len, step_bytes=step_bytes
        )
        self._kv = allocate_kv_tensors(
            model_config,
            num_blocks=kv_size.num_blocks,
            block_size=config.block_size,
            dtype=TORCH_DTYPES[dtype],
            device=device,
        )
        stages.done("kv_cache")
        self._builder = InputBuilder(
            max_num_seqs=config.max_num_seqs, max_model_len=max_model_len, block_size=config.block_size, device=device
        )
        self._sampling = SamplingTensors(config.max_num_seqs, device)
        # Which sequence a row's sampling settings are of, by arrival index.
        self._sampling_of = [NOBODY] * config.max_num_seqs
        self.eos_token_ids = model_config.eos_token_ids
        self.info = EngineInfo(
            model=config.served_model_name,
            dtype=dtype,
            device=str(device),
            kernel_backend=kernel_backend,
            max_model_len=max_model_len,
            vocab_size=model_config.vocab_size,
            block_size=config.block_size,
            num_kv_blocks=kv_size.num_blocks,
            num_parameters=model_config.num_parameters,
            startup_s=stages.seconds,
            longest_pause_s=longest_pause_s,
        )

    def _warm_up(
        self, config: EngineConfig, max_model_len: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[int, float]:
        """Have a GPU's kernels compiled; return what the largest step takes.

        Returns:
            Its bytes beside weights and KV cache, 0 on a CPU, and the longest time for which it shows no progress.
        """
        warm_up = WarmUp(self._model, config, max_model_len=max_model_len, dtype=dtype, device=device)
        if device.type != "cuda":
            return 0, warm_up.longest_pause_s()
        warm_up.small_steps()
        return peak_bytes(warm_up.largest_step, device), warm_up.longest_pause_s()

    def run(self, plan: BatchPlan) -> list[int | None]:
        """Compute the plan and return one token for each sequence that samples, in the plan's order.

        A token is None if the model's logits for it hold NaN or +inf, or are all -inf.
        """
        logits = self._model.forward(self._builder.build(plan), self._kv, self._on_progress)
        sampled = plan.sampled
        if not sampled:
            return []
        rows = self._refresh_sampling(sampled)
        positions = np.array([len(seq.token_ids) for seq in sampled])
        token_ids = self._sampling.sample(logits, rows, positions).cpu().numpy()
        self._builder.remember(rows, token_ids)
        if (token_ids == NO_TOKEN).any():
            return [None if token_id == NO_TOKEN else token_id for token_id in token_ids.tolist()]
        return token_ids.tolist()

    def _refresh_sampling(self, sampled: list[Sequence]) -> np.ndarray:
        rows = []
        for seq in sampled:
            row = seq.row
            rows.append(row)
            if self._sampling_of[row] != seq.arrival_index:
                self._sampling.set_row(row, seq.sampling)
                self._sampling_of[row] = seq.arrival_index
        return np.array(rows)


class _Stages:
    """Seconds by stage of start-up, each since the one before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last_s = time.monotonic()

    def done(self, stage: str) -> None:
        now_s = time.monotonic()
        self.seconds[stage] = round(now_s - self._last_s, 4)
        self._last_s = now_s
