"""How Triton kernels round vectors to 8 bits: compiled without fusion, as the reference ``round_rows`` of linear layers."""

import triton
import triton.language as tl


@triton.jit
def scales_and_units(most, is_finite):
    """Return scales, and units in 1, of vectors with the largest magnitude ``most``. What is not finite has the scale NaN."""
    has_units = is_finite & (most > 1e-30)
    units = tl.where(has_units, tl.div_rn(127.0, tl.where(has_units, most, 1.0)), 0.0)
    return tl.where(is_finite, tl.div_rn(most, 127.0), float("nan")), units


@triton.jit
def whole_numbers(x, units):
    """Return ``x`` in units as int8, to nearest, ties to even; what is not finite becomes 0."""
    x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
    return ((x * units + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5 * 2**23
