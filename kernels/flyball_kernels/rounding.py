"""How Triton kernels round vectors to 8 bits: compiled without fusion, as the references of linear layers do it.

e4m3 is handled as bits: sm_80 has no instruction that converts it.
"""

import triton
import triton.language as tl


@triton.jit
def scales_and_units(most, is_finite, LARGEST: tl.constexpr):
    """Return scales, and units in 1, of vectors with the largest magnitude ``most``, which becomes LARGEST.

    What is not finite has the scale NaN.
    """
    has_units = is_finite & (most > 1e-30)
    units = tl.where(has_units, tl.div_rn(LARGEST, tl.where(has_units, most, 1.0)), 0.0)
    return tl.where(is_finite, tl.div_rn(most, LARGEST), float("nan")), units


@triton.jit
def whole_numbers(x, units):
    """Return ``x`` in units as int8, to nearest, ties to even; what is not finite becomes 0."""
    x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
    return ((x * units + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5 * 2**23


@triton.jit
def to_e4m3(x, units):
    """Return ``x`` in units as the bits of e4m3, to nearest, ties to even; what is not finite becomes 0."""
    x = tl.where(tl.abs(x) < float("inf"), x, 0.0) * units
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    # three bits of mantissa stay, and exponents are 120 smaller than fp32's
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = ((magnitude * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)  # multiples of 2**-9; 1.5 * 2**23
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (tl.where(magnitude < 0.015625, subnormal, normal) | sign).to(tl.uint8)


@triton.jit
def from_e4m3(bits):
    """Return the numbers with these bits, in uint8, as fp32."""
    bits = bits.to(tl.int32)
    # exponent and mantissa in the places of fp32's, whose exponents are 120 larger
    return (((bits & 0x7F) << 20) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36
