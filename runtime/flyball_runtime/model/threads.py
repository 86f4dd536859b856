"""How many threads compute on a CPU, and on which cores."""

import logging
import os
from collections.abc import Collection

import torch

from flyball_kernels import Backend, place_threads

logger = logging.getLogger(__name__)


def compute_with(num_threads: int, cores: Collection[int], *, apart: bool, backend: Backend) -> None:
    """Have torch and our ops use so many threads, each on a core of its own or all on all of these cores.

    Where the cores are none, or the ops are not those in C++, threads run where the system puts them.
    """
    torch.set_num_threads(num_threads)
    if not cores or backend.name != "cpp":
        return
    error = place_threads(cores, apart=apart, backend=backend)
    if error and apart:
        logger.warning("CPU threads get no cores of their own: %s", os.strerror(error))
        place_threads(cores, apart=False, backend=backend)
