"""The linear layers of a mixture of experts as one layer."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from flyball_kernels.backend import Backend
from flyball_kernels.checks import check_dtype, check_shape
from flyball_kernels.linear import GroupedLinear, Int8Linear, Linear, PackedLinear
from flyball_kernels.linear.reference import Assignment, Rounded


class ExpertLinear:
    """The same linear layer of several experts, of which each row uses one.

    With the ``triton`` backend all experts are one launch, and the host need not know which of them are used. With ``cpp`` they
    are one op; where layers are torch's (see ``PackedLinear``), and with ``torch``, each that is used is called by itself.

    Args:
        layers: of all experts: of one class, of equal shape, with the same dtype and settings, with bias or without.
    Attributes:
        layers: those given; none with ``triton``, which has copied them.
    Raises:
        ValueError: the layers are not alike.
    """

    def __init__(self, layers: Sequence[Linear], *, backend: Backend) -> None:
        first = layers[0]
        kinds = {(type(x), x.out_features, x.in_features, x._dtype, x._bias is None) for x in layers}
        if len(kinds) > 1:
            raise ValueError(f"experts have layers of {len(kinds)} kinds; all must be alike.")
        self.in_features, self.out_features = first.in_features, first.out_features
        self._dtype, self._num_experts = first._dtype, len(layers)
        self.layers: Sequence[Linear] = () if backend.name == "triton" else layers
        if backend.name == "triton":
            self._run = _stacked(layers)
        elif backend.name == "cpp" and first.kernel is not None:
            experts = torch.classes.flyball.ExpertLinear([layer.kernel for layer in layers])
            self._run = lambda x, assignment: experts.run(x, *assignment)
        else:
            self._run = partial(_one_by_one, layers)

    def __call__(self, x: Tensor, assignment: Assignment) -> Tensor:
        """Return ``[num_rows, out_features]``, in the dtype of the weights.

        Args:
            x: ``[num_rows, in_features]``, or a row for each token, which the rows of all its experts have in common.
            assignment: the rows of each expert.
        Raises:
            ValueError: the shape or dtype of ``x`` does not fit, or the assignment is for another number of experts.
        """
        num_rows = len(assignment.order)
        check_shape("x", x, None, self.in_features)
        check_dtype("x", x, self._dtype)
        check_shape("starts", assignment.starts, self._num_experts + 1)
        if num_rows and (not len(x) or num_rows % len(x)):
            raise ValueError(f"x has {len(x)} rows, and {num_rows} are assigned; that must be a multiple.")
        return self._run(x, assignment)


def _stacked(layers: Sequence[Linear]) -> Callable[[Tensor, Assignment], Tensor]:
    """Return what launches the Triton kernel of layers that are alike."""
    from flyball_kernels.linear import kernel  # triton is there on Linux only

    first, weights = layers[0], [layer._weight for layer in layers]
    bias = None if first._bias is None else torch.stack([layer._bias for layer in layers])
    if isinstance(first, GroupedLinear):
        run, weight = kernel.grouped_linear, kernel.stack_groups(weights)
    elif isinstance(first, PackedLinear):
        run, weight = kernel.float_linear, torch.stack(weights)
    else:
        run = kernel.int8_linear if isinstance(first, Int8Linear) else kernel.float8_linear
        weight = Rounded(*map(torch.stack, zip(*weights, strict=True)))
    return lambda x, assignment: run(x, weight, bias, assignment)


def _one_by_one(layers: Sequence[Linear], x: Tensor, assignment: Assignment) -> Tensor:
    num_rows = len(assignment.order)
    out = torch.empty(num_rows, layers[0].out_features, dtype=x.dtype, device=x.device)
    order, starts = assignment.order.long(), assignment.starts.tolist()
    for layer, (start, end) in zip(layers, pairwise(starts), strict=True):
        rows = order[start:end]
        if len(rows):
            out[rows] = layer(x[rows // (num_rows // len(x))])
    return out
