"""What happens to whole blocks."""

import torch

from flyball_runtime.engine.physical_pool import copy_blocks
from flyball_runtime.scheduler import BlockCopy


def test_blocks_are_copied_in_every_layer_as_if_all_at_once() -> None:
    kv = [tuple(torch.arange(5.0).add(10 * (2 * layer + half)).view(5, 1, 1, 1) for half in (0, 1)) for layer in (0, 1)]
    copy_blocks(kv, [BlockCopy(0, 1), BlockCopy(1, 2), BlockCopy(4, 0)])  # type: ignore[arg-type]
    held = [tensor.flatten().tolist() for pair in kv for tensor in pair]
    assert held == [[base + one for one in (4, 0, 1, 3, 4)] for base in (0, 10, 20, 30)]
