"""What a step of the model gets, made of a plan's numbers."""

import numpy as np
import torch
from torch import Tensor

from flyball_kernels import Backend, step_layout
from flyball_runtime.model.transformer import StepInputs


def step_inputs(
    entries: np.ndarray,
    num_decodes: int,
    token_ids: Tensor,
    block_tables: Tensor,
    last_token_ids: Tensor,
    block_size: int,
    backend: Backend,
) -> StepInputs:
    """Lay out the tokens of a step; see ``step_layout``. ``entries`` are int64."""
    layout = step_layout(
        torch.from_numpy(entries),
        num_decodes,
        token_ids,
        block_tables,
        last_token_ids,
        block_size,
        backend=backend,
    )
    return StepInputs(*layout)
