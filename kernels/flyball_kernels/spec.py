"""What has to be known of a Triton kernel to compile it without a GPU. Each op's ``kernel.py`` has ``specs()``."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spec:
    """A variant of a kernel to compile ahead of time.

    Attributes:
        name: unique, e.g. ``paged_attention decode bf16 d128 g8``.
        kernel: the function under ``triton.jit``.
        types: Triton's types by argument, like ``*bf16`` or ``i32``. Pointers, and integers whose names contain ``stride``
            or ``numel``, are compiled as multiples of 16, as the launcher finds them with common models.
        constants: values of the other arguments.
        options: ``num_warps`` and the like.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]
