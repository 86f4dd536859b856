"""Kubernetes quantities: a number with a decimal or binary unit. Sizes may end with B, as ``2GiB`` does."""

import math
import re
from fractions import Fraction

_UNITS: dict[str | None, Fraction] = {
    None: Fraction(1),
    "m": Fraction(1, 1000),
    **{unit: Fraction(1000 ** (i + 1)) for i, unit in enumerate("kMGT")},
    **{f"{unit}i": Fraction(1024 ** (i + 1)) for i, unit in enumerate("KMGT")},
}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?", re.ASCII)


def to_number(quantity: str | int) -> Fraction:
    """Return the number that a quantity such as ``2Gi``, ``1.5`` or ``500m`` stands for.

    Raises:
        ValueError: not such a quantity.
    """
    matched = _QUANTITY.fullmatch(str(quantity))
    if matched is None:
        raise ValueError(f"{quantity!r} is no quantity; write a number and nothing, m, k, M, G, T, Ki, Mi, Gi or Ti")
    return Fraction(matched[1]) * _UNITS[matched[2]]


def of_size(size: str | int) -> str | int:
    """Return a size as a Kubernetes quantity: ``2GiB`` is ``2Gi``."""
    return size.removesuffix("B") if isinstance(size, str) else size


def to_bytes(size: str | int) -> int:
    """Return the bytes of a size, rounded up. Raises ValueError, as ``to_number`` does."""
    return math.ceil(to_number(of_size(size)))
