"""Sampling settings of the running sequences, and the choice of their next tokens."""

import numpy as np
import torch
from torch import Tensor

from flyball_kernels.backend import Backend
from flyball_kernels.sampling import NO_TOKEN, sample
from flyball_runtime.core.past import Past
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.grammar.cache import GrammarCache
from flyball_runtime.model.logits_processor import LogitsProcessor
from flyball_runtime.model.logprobs import RawLogprobs

__all__ = ["NO_TOKEN", "SamplingTensors"]


class SamplingTensors:
    """One row of settings per running sequence, written when a sequence takes the row and only read after that.

    They live on the host, where a step sees without waiting for the device which filters it can leave out.

    Args:
        grammars: those of the sequences.
    Attributes:
        stuck: of the latest ``sample``: why a row's grammar leaves no token, by index into the logits.
    """

    def __init__(
        self, num_rows: int, device: torch.device | str, backend: Backend, grammars: GrammarCache | None = None
    ) -> None:
        self._backend = backend
        self._device = torch.device(device)
        self._temperature = np.zeros(num_rows, np.float32)
        self._top_k = np.zeros(num_rows, np.int64)
        self._top_p = np.ones(num_rows, np.float32)
        self._min_p = np.zeros(num_rows, np.float32)
        self._seeds = np.zeros(num_rows, np.int64)
        self._num_logprobs = np.full(num_rows, -1)
        self._processor = LogitsProcessor(num_rows, self._device, backend, grammars or GrammarCache(None))
        self.stuck: dict[int, str] = {}

    def set_row(self, row: int, sampling: SamplingParams, past: Past | None = None) -> None:
        """Take over the settings of the sequence that now owns ``row``; they have a seed (see ``with_seed``)."""
        assert sampling.seed is not None, "a request gets its seed before it gets a row"
        self._temperature[row] = sampling.temperature
        self._top_k[row] = sampling.top_k
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._seeds[row] = sampling.seed
        self._num_logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        self._processor.set_row(row, sampling, past)

    def raw_logprobs(self, logits: Tensor, rows: np.ndarray) -> RawLogprobs | None:
        """Return what ``sample``, which changes the logits, would lose; None when no row asks for it."""
        counts = self._num_logprobs[rows]
        return RawLogprobs.of(logits, counts) if (counts >= 0).any() else None

    def sample(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> Tensor:
        """Choose one token per row; what a row gets depends on its own logits, settings and position alone.

        Args:
            logits: ``[n, vocab]`` fp32. Those of rows that ask for it are changed in place.
            rows: ``[n]`` integers, in the order of ``logits``.
            positions: ``[n]`` int64, how many tokens the sequence has before the sampled one.
        Returns:
            ``[n]`` int64 token ids on the device of ``logits``; NO_TOKEN where a row's logits give no distribution.
        """
        self.stuck = self._processor.apply(logits, rows, positions)
        temperature = self._gather(self._temperature, rows, off=0.0)
        if temperature is None:
            top_k = top_p = min_p = None
        else:
            top_k = self._gather(self._top_k, rows, off=0)
            top_p = self._gather(self._top_p, rows, off=1.0)
            min_p = self._gather(self._min_p, rows, off=0.0)
        seeds = self._tensor(self._seeds[rows])
        where = self._tensor(positions)
        token_ids = sample(logits, temperature, top_k, top_p, min_p, seeds, where, backend=self._backend)
        self._processor.remember(rows, positions, token_ids)
        return token_ids

    def _gather(self, values: np.ndarray, rows: np.ndarray, *, off: float) -> Tensor | None:
        """The rows' values on the device; None when every one of them is off."""
        chosen = values[rows]
        return None if (chosen == off).all() else self._tensor(chosen)

    def _tensor(self, array: np.ndarray) -> Tensor:
        # a blocking copy would wait for the whole forward pass before the first kernel of sampling is launched
        return torch.from_numpy(array).to(self._device, non_blocking=True)
