// Rows of numbers rounded to 8 bits: whole numbers from -127 to 127, and a scale for each row, its largest magnitude over 127.
#pragma once

#include <bit>

#include "vec.h"

namespace flyball {

// The largest magnitude of k values. NaN if one is NaN or infinite: then no scale is of use, and the results shall say so.
template <class T>
inline float magnitude(const T* x, int64_t k) {
  Vec most = {}, finite = {};
  for (int64_t j = 0; j < k; j += kLanes) {
    const Vec v = load_up_to(x + j, k - j);
    most = max(most, max(v, -v));
    finite += v * 0.0f;
  }
  return max(most) + sum(finite);
}

constexpr int32_t kInfinity = 0x7f800000, kMantissaBits = 23, kZeroExponent = 127;  // of fp32
constexpr int32_t kLeastExponent = 27;  // of the largest magnitude of numbers with a power of two as the unit: smaller ones are 0

// The bits of the largest magnitude of k values; at least kInfinity if one is not finite.
template <class T>
inline int32_t magnitude_bits(const T* x, int64_t k) {
  VecI most = {};  // bits of magnitudes are in their order, with what is not finite above all
  for (int64_t j = 0; j < k; j += kLanes) {
    const VecI bits = (VecI)load_up_to(x + j, k - j) & 0x7fffffff;
    most = most > bits ? most : bits;
  }
  return fold(most, [](auto a, auto b) { return a > b ? a : b; });
}

inline float from_exponent(int32_t biased) { return std::bit_cast<float>(biased << kMantissaBits); }

// The exponent of the unit that gives a magnitude of these bits so many in a whole number. With 15, the greatest whole number is
// 0x7f00, so that no byte of one is 128.
template <int32_t Bits>
inline int32_t unit_exponent(int32_t most) {
  if (Bits == 15) most += 0x10000;  // 255/128 times a power of two has the exponent of the next one
  return std::max(most >> kMantissaBits, kLeastExponent) - (Bits - 1);
}

// Units in a value of 1, if the largest magnitude is that of 127 units; 0 where it is so small that there would be too many.
inline float units(float most) { return most > 1e-30f ? 127.0f / most : 0.0f; }

// kLanes values times a factor, as whole numbers: to nearest, ties to even. The instruction, and not a sum that rounds: a
// compiler may fuse that with the product, and ties would then depend on its options.
template <class T>
inline VecI rounded(const T* x, int64_t left, float factor) {
  const Vec product = load_up_to(x, left) * factor;
#if defined(__AVX512F__)
  return (VecI)_mm512_cvtps_epi32((__m512)product);
#elif defined(__AVX2__)
  return (VecI)_mm256_cvtps_epi32((__m256)product);
#elif defined(__aarch64__)
  return (VecI)vcvtnq_s32_f32((float32x4_t)product);
#else
  VecI whole;
  for (int lane = 0; lane < kLanes; ++lane)  // what is no number has no whole one
    whole[lane] = std::isfinite(product[lane]) ? static_cast<int32_t>(std::nearbyint(product[lane])) : 0;
  return whole;
#endif
}

// k values -> k whole numbers; returns their scale
template <class T>
inline float round_vector(const T* x, int64_t k, int8_t* values) {
  using Bytes = int8_t __attribute__((vector_size(kLanes)));
  const float most = magnitude(x, k), factor = units(most);
  for (int64_t j = 0; j < k; j += kLanes) {
    const Bytes bytes = __builtin_convertvector(rounded(x + j, k - j, factor), Bytes);
    std::memcpy(values + j, &bytes, std::min(kLanes, k - j));
  }
  return most / 127.0f;
}

}  // namespace flyball
