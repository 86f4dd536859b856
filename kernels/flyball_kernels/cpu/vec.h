// Sixteen floats at once, in the vector extensions that GCC and Clang share: one AVX-512 register, two of AVX2 or four
// of NEON. Loads and stores convert from and to the element types of tensors; arithmetic is always fp32.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace flyball {

constexpr int64_t kLanes = 16;
constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.44269504088896f;

using Vec = float __attribute__((vector_size(64)));
using VecI = int32_t __attribute__((vector_size(64)));
using VecU = uint32_t __attribute__((vector_size(64)));
using VecU16 = uint16_t __attribute__((vector_size(32)));

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

inline Vec splat(float x) { return Vec{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

template <class V>
inline V load_raw(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(V));
  return v;
}

inline Vec load(const float* from) { return load_raw<Vec>(from); }

inline Vec load(const c10::BFloat16* from) {
#if defined(__AVX512F__)
  return (Vec)(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_raw<__m256i>(from)), 16));  // GCC 12 makes six of these two
#else
  return (Vec)(__builtin_convertvector(load_raw<VecU16>(from), VecU) << 16);
#endif
}

inline Vec load(const c10::Half* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(load_raw<__m256i>(from));
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = static_cast<float>(from[i]);
  return v;
#endif
}

inline void store(float* to, Vec v) { __builtin_memcpy(to, &v, sizeof(v)); }

inline void store(c10::BFloat16* to, Vec v) {
  const VecU bits = (VecU)v;
  const VecU rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
  const VecU quiet_nan = (bits >> 16) | 0x40u;
  const VecU16 out = __builtin_convertvector(v == v ? rounded : quiet_nan, VecU16);
  __builtin_memcpy(to, &out, sizeof(out));
}

inline void store(c10::Half* to, Vec v) {
#if defined(__AVX512F__)
  const __m256i out = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __builtin_memcpy(to, &out, sizeof(out));
#else
  for (int i = 0; i < kLanes; ++i) to[i] = v[i];
#endif
}

// The first n < 16 elements; the other lanes are 0 when loaded and untouched when stored.
template <class T>
inline Vec load_part(const T* from, int64_t n) {
  T padded[kLanes] = {};
  std::memcpy(padded, from, n * sizeof(T));
  return load(padded);
}

template <class T>
inline void store_part(T* to, Vec v, int64_t n) {
  T padded[kLanes];
  store(padded, v);
  std::memcpy(to, padded, n * sizeof(T));
}

template <class T>
inline Vec load_up_to(const T* from, int64_t n) {
  return n >= kLanes ? load(from) : load_part(from, n);
}

template <class T>
inline void store_up_to(T* to, Vec v, int64_t n) {
  n >= kLanes ? store(to, v) : store_part(to, v, n);
}

inline Vec max(Vec a, Vec b) { return a > b ? a : b; }

// Reductions fold halves onto each other: a fixed order, so a row's result does not depend on how many rows there are.
using Vec8 = float __attribute__((vector_size(32)));
using Vec4 = float __attribute__((vector_size(16)));

template <class Half, class Whole>
inline Half half(const Whole& v, int which) {
  Half h;
  __builtin_memcpy(&h, reinterpret_cast<const char*>(&v) + which * sizeof(Half), sizeof(Half));
  return h;
}

inline float sum(Vec v) {
  const Vec8 v8 = half<Vec8>(v, 0) + half<Vec8>(v, 1);
  const Vec4 v4 = half<Vec4>(v8, 0) + half<Vec4>(v8, 1);
  return (v4[0] + v4[2]) + (v4[1] + v4[3]);
}

inline float max(Vec v) {
  const Vec8 a = half<Vec8>(v, 0), b = half<Vec8>(v, 1), v8 = a > b ? a : b;
  const Vec4 c = half<Vec4>(v8, 0), d = half<Vec4>(v8, 1), v4 = c > d ? c : d;
  return std::max(std::max(v4[0], v4[2]), std::max(v4[1], v4[3]));
}

// 2**x, at most 2 units in the last place off; below -126 it is 0. The polynomial is 2**f on [-0.5, 0.5] (Cephes).
inline Vec exp2(Vec x) {
  const VecI tiny = x < -126.0f;
  x = tiny ? splat(-126.0f) : x;
  x = x > 127.0f ? splat(127.0f) : x;
  const Vec shifted = x + 12582912.0f;  // 1.5 * 2**23: adding it rounds to an integer, kept in the low bits
  const Vec f = x - (shifted - 12582912.0f);
  Vec p = splat(1.535336188319500e-4f);
  p = p * f + 1.339887440266574e-3f;
  p = p * f + 9.618437357674640e-3f;
  p = p * f + 5.550332471162809e-2f;
  p = p * f + 2.402264791363012e-1f;
  p = p * f + 6.931472028550421e-1f;
  p = p * f + 1.0f;
  const Vec result = (Vec)((VecI)p + ((VecI)shifted << 23));
  return tiny ? Vec{} : result;
}

inline Vec exp(Vec x) { return exp2(x * kLog2e); }

}  // namespace flyball
