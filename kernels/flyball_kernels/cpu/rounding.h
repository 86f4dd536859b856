// Rows of numbers rounded to 8 bits: whole numbers from -127 to 127, and a scale for each row, its largest magnitude over 127.
#pragma once

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
