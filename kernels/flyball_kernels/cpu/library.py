"""Loads the C++ ops."""

import os
from pathlib import Path

import torch

PREBUILT_VARIABLE = "FLYBALL_CPU_LIBRARY"
"""Names a library that ``python -m flyball_kernels.cpu.build --output`` made, as an image without a compiler does."""

_loaded = False


def load() -> None:
    """Load the library, building it first when the cache has none; a second call does nothing.

    Raises:
        RuntimeError: it can be neither loaded nor built; the message says what is missing.
    """
    global _loaded
    if _loaded:
        return
    prebuilt = os.environ.get(PREBUILT_VARIABLE)
    _load(Path(prebuilt) if prebuilt else _build(), f"Unset {PREBUILT_VARIABLE}." if prebuilt else "Delete its folder.")
    _loaded = True


def _load(path: Path, remedy: str) -> None:
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise RuntimeError(f"{path} cannot be loaded: {error.__cause__ or error}. {remedy}") from error


def _build() -> Path:
    from flyball_kernels.cpu import build  # here, so that python -m flyball_kernels.cpu.build does not import it twice

    return build.build()
