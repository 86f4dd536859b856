"""Loads the C++ ops."""

import torch

_loaded = False


def load() -> None:
    """Load the library, building it first when the cache has none; a second call does nothing.

    Raises:
        RuntimeError: it can be neither loaded nor built; the message says what is missing.
    """
    global _loaded
    if _loaded:
        return
    from flyball_kernels.cpu import build  # here, so that python -m flyball_kernels.cpu.build does not import it twice

    path = build.build()
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise RuntimeError(
            f"{path} cannot be loaded: {error.__cause__ or error}. Delete its folder to rebuild it."
        ) from error
    _loaded = True
