"""Sampling settings of the running sequences, and the choice of their next tokens."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flyball_kernels import DecodeSampling
from flyball_kernels.backend import Backend
from flyball_kernels.sampling import NO_TOKEN, sample
from flyball_runtime.core.past import Past
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.grammar.cache import GrammarCache
from flyball_runtime.model.logits_processor import LogitsProcessor
from flyball_runtime.model.logprobs import RawLogprobs, SampledLogprobs

__all__ = ["NO_TOKEN", "SamplingTensors"]

LOGPROBS, CHANGES, TEMPERATURE, TOP_K, TOP_P, MIN_P = (1 << bit for bit in range(6))
"""What a row asks for. A step looks at these first: most rows ask for nothing but a token."""


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
        self._is_host = self._device.type == "cpu"
        self._temperature = np.zeros(num_rows, np.float32)
        self._top_k = np.zeros(num_rows, np.int64)
        self._top_p = np.ones(num_rows, np.float32)
        self._min_p = np.zeros(num_rows, np.float32)
        self._seeds = np.zeros(num_rows, np.int64)
        self._num_logprobs = np.full(num_rows, -1)
        self._asks = [0] * num_rows
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
        self._asks[row] = (
            LOGPROBS * (sampling.logprobs is not None)
            | CHANGES * sampling.changes_logits
            | TEMPERATURE * (sampling.temperature != 0.0)
            | TOP_K * (sampling.top_k != 0)
            | TOP_P * (sampling.top_p != 1.0)
            | MIN_P * (sampling.min_p != 0.0)
        )

    def likeliest(self, logits: Tensor, rows: Sequence[int]) -> Tensor | None:
        """Return ``[n]`` the likeliest token of each row if that is all they ask for, else None; see ``sample_and_score``.

        Once a step has read all weights, the calls of numpy and torch that settings need take as long as a part of a layer.
        """
        for row in rows:
            if self._asks[row]:
                return None
        self.stuck = {}
        return sample(logits, None, None, None, None, None, None, backend=self._backend)

    def only_choose(self, rows: Sequence[int]) -> bool:
        """Return whether rows ask for a token of each step's logits and nothing else."""
        return not any(self._asks[row] & (LOGPROBS | CHANGES) for row in rows)

    def choice_of(self, rows: np.ndarray) -> DecodeSampling:
        """Return the settings of rows that only choose."""
        self.stuck = {}
        return DecodeSampling(*self._choice_of(rows, self._ask(rows)))

    def sample(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> Tensor:
        """Choose one token per row; see ``sample_and_score``."""
        return self._sample(logits, rows, positions, self._ask(rows))

    def sample_and_score(
        self, logits: Tensor, rows: np.ndarray, positions: np.ndarray
    ) -> tuple[Tensor, SampledLogprobs | None]:
        """Choose one token per row; what a row gets depends on its own logits, settings and position alone.

        Args:
            logits: ``[n, vocab]``, see ``sample``. If they are fp32, those of rows that ask for it are changed in place.
            rows: ``[n]`` integers, in the order of ``logits``.
            positions: ``[n]`` int64, how many tokens the sequence has before the sampled one.
        Returns:
            ``[n]`` int64 token ids on the device of ``logits``, NO_TOKEN where a row's logits give no distribution; and the log
            probabilities of the rows that ask for any, None when no row does.
        """
        asked = self._ask(rows)
        raw = RawLogprobs.of(logits, self._num_logprobs[rows]) if asked & LOGPROBS else None
        token_ids = self._sample(logits, rows, positions, asked)
        return token_ids, None if raw is None else raw.of_tokens(token_ids)

    def _sample(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray, asked: int) -> Tensor:
        self.stuck = {}
        if asked & CHANGES:
            logits = logits.float()
            self.stuck = self._processor.apply(logits, rows, positions)
        choice = self._choice_of(rows, asked)
        at = self._tensor(positions) if asked & TEMPERATURE else None
        token_ids = sample(logits, *choice, at, backend=self._backend)
        if asked & CHANGES:
            self._processor.remember(rows, positions, token_ids)
        return token_ids

    def _choice_of(self, rows: np.ndarray, asked: int) -> tuple[Tensor | None, ...]:
        """Return temperature, top_k, top_p, min_p and seeds, None where no row needs them."""
        if not asked & TEMPERATURE:
            return (None,) * 5
        return (
            self._tensor(self._temperature[rows]),
            self._tensor(self._top_k[rows]) if asked & TOP_K else None,
            self._tensor(self._top_p[rows]) if asked & TOP_P else None,
            self._tensor(self._min_p[rows]) if asked & MIN_P else None,
            self._tensor(self._seeds[rows]),
        )

    def _ask(self, rows: np.ndarray) -> int:
        """Return what any of the rows asks for."""
        asked = 0
        for row in rows.tolist():
            asked |= self._asks[row]
        return asked

    def _tensor(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        # a blocking copy would wait for the whole forward pass before the first kernel of sampling is launched
        return tensor if self._is_host else tensor.to(self._device, non_blocking=True)
