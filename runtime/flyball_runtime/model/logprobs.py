"""Log probabilities of sampled tokens, as the model gives them: before biases, penalties and temperature."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flyball_runtime.core.request import TokenLogprobs
from flyball_runtime.core.sampling_params import MIN_LOGPROB


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """Log probabilities of the whole vocabulary, for the rows of a step that ask for any.

    Attributes:
        indices: ``[n]`` indices of these rows in the step.
        counts: ``[n]`` how many of the likeliest tokens each row asks for.
        logprobs: ``[n, vocab]`` fp32.
    """

    indices: np.ndarray
    counts: np.ndarray
    logprobs: Tensor

    @classmethod
    @torch.inference_mode()
    def of(cls, logits: Tensor, counts: np.ndarray) -> "RawLogprobs":
        """Compute them from the logits, which may be changed afterwards.

        Args:
            counts: for each row of ``logits``; -1 if the row asks for no log probabilities.
        """
        indices = np.flatnonzero(counts >= 0)
        asked = logits[torch.from_numpy(indices).to(logits.device, non_blocking=True)].float()
        return cls(indices, counts[indices], asked.log_softmax(dim=-1).clamp_(min=MIN_LOGPROB))

    @torch.inference_mode()
    def of_tokens(self, token_ids: Tensor) -> "SampledLogprobs":
        """Return those of the sampled tokens, ``[num_sampled]`` int64, and of the likeliest ones."""
        chosen = token_ids[torch.from_numpy(self.indices).to(token_ids.device, non_blocking=True)]
        top = self.logprobs.topk(min(int(self.counts.max()), self.logprobs.shape[1]))
        of_chosen = self.logprobs.gather(1, chosen.clamp(min=0).unsqueeze(1)).squeeze(1)
        return SampledLogprobs(self.indices, self.counts, chosen, of_chosen, top.indices, top.values)


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Log probabilities of a step: of ``[n]`` sampled tokens, and of ``[n, most]`` likeliest tokens."""

    indices: np.ndarray
    counts: np.ndarray
    token_ids: Tensor
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def on_host(self) -> "SampledLogprobs":
        """Start copying the tensors from a GPU to pinned memory, without waiting; return the copies."""
        tensors = (_to_host(one) for one in (self.token_ids, self.logprobs, self.top_ids, self.top_logprobs))
        return SampledLogprobs(self.indices, self.counts, *tensors)

    def by_index(self) -> dict[int, TokenLogprobs]:
        """Return the log probabilities by row of the step. The tensors must be on the host."""
        columns = (self.token_ids, self.logprobs, self.top_ids, self.top_logprobs)
        rows = zip(self.indices.tolist(), self.counts.tolist(), *(one.tolist() for one in columns), strict=True)
        return {
            index: TokenLogprobs(token_id, logprob, top_ids[:count], top_logprobs[:count])
            for index, count, token_id, logprob, top_ids, top_logprobs in rows
        }


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
