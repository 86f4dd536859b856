"""Where the threads run that compute the C++ ops."""

from collections.abc import Collection

import torch

from flyball_kernels.backend import Backend

__all__ = ["place_threads"]


def place_threads(cores: Collection[int], *, apart: bool, backend: Backend) -> int:
    """Have each thread that computes run on a core of its own, or all of them on all of ``cores``.

    The threads are this one and those that share an op with it, of which there are ``torch.get_num_threads()``. They start anew
    when that number changes, and run where this thread may then.

    Returns:
        0, or the errno of a thread that could not be told where to run.
    Raises:
        ValueError: the ops are not those in C++, or there are no cores.
    """
    if backend.name != "cpp":
        raise ValueError(f"threads of the ops {backend.name!r} cannot be placed: only those of 'cpp' can")
    return int(torch.ops.flyball.place_threads(sorted(cores), apart))
