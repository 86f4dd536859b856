"""Lower the logits of tokens that a sequence has already."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flyball_kernels.backend import Backend
from flyball_kernels.checks import check_contiguous, check_dtype, check_shape
from flyball_kernels.penalties import reference

__all__ = ["penalize"]


def penalize(
    logits: Tensor,
    rows: Sequence[int],
    histories: Sequence[Tensor],
    num_prompt_tokens: Sequence[int],
    repetition: Sequence[float],
    presence: Sequence[float],
    frequency: Sequence[float],
    *,
    backend: Backend,
) -> None:
    """Penalize some rows of ``logits`` in place, each by its own sequence.

    Logits of tokens in the history are divided by the repetition penalty if above 0 and multiplied by it otherwise
    (Keskar et al. 2019). Then a token that comes n > 0 times behind the prompt loses n times the frequency penalty, and
    the presence penalty once.

    Args:
        logits: ``[n, vocab]`` fp32, contiguous.
        rows: the rows to change, each named once; the other arguments have an entry for each.
        histories: ``[num_tokens]`` int32, contiguous, the tokens of a sequence; ids are below vocab.
        num_prompt_tokens: how many of the history come before the output.
        repetition: above 0; 1 is off.
        presence, frequency: 0 is off.
    Raises:
        ValueError: a shape, a dtype or a length is not as above, or a row is not there or named twice.
        IndexError: a token id is not below vocab, on CPU. The Triton kernel skips such tokens.
    """
    check_shape("logits", logits, None, None)
    check_dtype("logits", logits, torch.float32)
    check_contiguous("logits", logits)
    lengths = {len(values) for values in (rows, histories, num_prompt_tokens, repetition, presence, frequency)}
    if len(lengths) != 1:
        raise ValueError(f"the arguments of penalize have {sorted(lengths)} entries; each needs one for every row.")
    if len(set(rows)) != len(rows) or any(not 0 <= row < logits.shape[0] for row in rows):
        raise ValueError(f"rows is {list(rows)}; it may name each row from 0 to {logits.shape[0] - 1} once.")
    for history, num_prompt in zip(histories, num_prompt_tokens, strict=True):
        _check_history(history, num_prompt)
    if backend.name == "triton":
        from flyball_kernels.penalties import kernel  # triton is there on Linux only

        kernel.penalize(logits, rows, histories, num_prompt_tokens, repetition, presence, frequency)
        return
    op = torch.ops.flyball.penalize if backend.name == "cpp" else reference.penalize
    op(logits, rows, histories, num_prompt_tokens, repetition, presence, frequency)


def _check_history(history: Tensor, num_prompt_tokens: int) -> None:
    check_shape("history", history, None)
    check_dtype("history", history, torch.int32)
    check_contiguous("history", history)
    if not 0 <= num_prompt_tokens <= history.shape[0]:
        raise ValueError(f"num_prompt_tokens is {num_prompt_tokens} of a history of {history.shape[0]} tokens.")
