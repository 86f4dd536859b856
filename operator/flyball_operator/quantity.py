"""Kubernetes quantities of memory."""

import math
import re
from fractions import Fraction

_UNITS: dict[str | None, int] = {
    None: 1,
    **{unit: 1000 ** (i + 1) for i, unit in enumerate("kMGT")},
    **{f"{unit}i": 1024 ** (i + 1) for i, unit in enumerate("KMGT")},
}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(k|M|G|T|Ki|Mi|Gi|Ti)?")


def to_bytes(quantity: str | int) -> int:
    """Return the bytes of a quantity such as ``2Gi``, ``1.5G`` or ``1048576``, rounded up.

    Raises:
        ValueError: not such a quantity.
    """
    matched = _QUANTITY.fullmatch(str(quantity))
    if matched is None:
        raise ValueError(f"{quantity!r} is no quantity of memory; write a number and k, M, G, T, Ki, Mi, Gi or Ti")
    return math.ceil(Fraction(matched[1]) * _UNITS[matched[2]])
