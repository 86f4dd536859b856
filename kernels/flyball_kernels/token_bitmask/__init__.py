"""Ban the tokens that a bitmask leaves out."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flyball_kernels.backend import Backend
from flyball_kernels.checks import check_contiguous, check_dtype, check_shape
from flyball_kernels.token_bitmask import reference

__all__ = ["apply_token_bitmask"]


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, rows: Sequence[int], *, backend: Backend) -> None:
    """Set logits to -inf, in place, where a row's bitmask has a 0. Other logits and other rows stay as they are.

    Args:
        logits: ``[n, vocab]`` fp32, contiguous.
        bitmask: ``[num_rows, num_words]`` int32, contiguous; bit ``i % 32`` of word ``i // 32`` is that of token i. Words
            beyond the vocabulary are not read.
        rows: the row of ``logits`` that each row of ``bitmask`` is for, each named once.
    Raises:
        ValueError: a shape or a dtype is not as above, a row is not there or named twice, or there are too few words.
    """
    check_shape("logits", logits, None, None)
    check_dtype("logits", logits, torch.float32)
    check_contiguous("logits", logits)
    check_shape("bitmask", bitmask, len(rows), None)
    check_dtype("bitmask", bitmask, torch.int32)
    check_contiguous("bitmask", bitmask)
    if len(set(rows)) != len(rows) or any(not 0 <= row < logits.shape[0] for row in rows):
        raise ValueError(f"rows is {list(rows)}; it may name each row from 0 to {logits.shape[0] - 1} once.")
    if bitmask.shape[1] * 32 < logits.shape[1]:
        raise ValueError(
            f"bitmask has {bitmask.shape[1]} words; {logits.shape[1]} tokens need {-(-logits.shape[1] // 32)}."
        )
    if backend.name == "triton":
        from flyball_kernels.token_bitmask import kernel  # triton is there on Linux only

        kernel.apply_token_bitmask(logits, bitmask, rows)
        return
    op = torch.ops.flyball.apply_token_bitmask if backend.name == "cpp" else reference.apply_token_bitmask
    op(logits, bitmask, rows)
