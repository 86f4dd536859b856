"""Loads the C++ ops."""

import logging
import os
from pathlib import Path

import torch

from flyball_kernels.cpu import variants

logger = logging.getLogger(__name__)

PREBUILT_VARIABLE = "FLYBALL_CPU_LIBRARY"
"""Names a library that ``python -m flyball_kernels.cpu.build --output`` made, as an image without a compiler does, or a
folder of them, one for each instruction set."""

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
    path = _prebuilt(Path(prebuilt)) if prebuilt else _build()
    _load(path, f"Unset {PREBUILT_VARIABLE}." if prebuilt else "Delete its folder.")
    _loaded = True
    logger.info("C++ ops: %s from %s", torch.ops.flyball.instruction_set(), path)


def _prebuilt(path: Path) -> Path:
    """Return the library that the setting means: the file, or the best one in the folder that this CPU can run.

    Raises:
        RuntimeError: this CPU cannot run it.
    """
    machine, cpu_flags = variants.this_cpu()
    if path.is_dir():
        return path / variants.choose(path, machine, cpu_flags).file_name
    named = next((variant for variant in variants.VARIANTS if variant.file_name == path.name), None)
    if named is not None:
        variants.check(named, machine, cpu_flags)
    return path


def _load(path: Path, remedy: str) -> None:
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise RuntimeError(f"{path} cannot be loaded: {error.__cause__ or error}. {remedy}") from error


def _build() -> Path:
    from flyball_kernels.cpu import build  # here, so that python -m flyball_kernels.cpu.build does not import it twice

    return build.build()
