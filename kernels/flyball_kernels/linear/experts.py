"""The linear layers of a mixture of experts as one layer."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from flyball_kernels.backend import Backend
from flyball_kernels.checks import check_dtype, check_shape
from flyball_kernels.linear import Float8Linear, GroupedLinear, Int8Linear, Linear
from flyball_kernels.linear.reference import Assignment, Rounded


class ExpertLinear:
    """The same linear layer of several experts, of which each row uses one.

    With the ``triton`` backend all experts are one launch, and the host need not know which of them are used. Elsewhere each
    that is used is computed by its own layer.

    Args:
        layers: of all experts: of one class, of equal shape, with the same dtype and settings, with bias or without.
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
        self._layers: Sequence[Linear] = ()
        if backend.name != "triton":
            self._layers = layers
            return
        from flyball_kernels.linear import kernel

        self._bias = None if first._bias is None else torch.stack([x._bias for x in layers])
        weights = [x._weight for x in layers]
        if isinstance(first, GroupedLinear):
            self._run, self._weight = kernel.grouped_linear, kernel.stack_groups(weights)
        elif isinstance(first, Int8Linear | Float8Linear):
            self._run = kernel.int8_linear if isinstance(first, Int8Linear) else kernel.float8_linear
            self._weight = Rounded(*map(torch.stack, zip(*weights, strict=True)))
        else:
            self._run, self._weight = kernel.float_linear, torch.stack(weights)

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
        if not self._layers:
            return self._run(x, self._weight, self._bias, assignment)
        out = torch.empty(num_rows, self.out_features, dtype=x.dtype, device=x.device)
        order, starts = assignment.order.long(), assignment.starts.tolist()
        per_x = num_rows // max(1, len(x))
        for layer, (start, end) in zip(self._layers, pairwise(starts), strict=True):
            rows = order[start:end]
            if len(rows):
                out[rows] = layer(x[rows // per_x])
        return out
