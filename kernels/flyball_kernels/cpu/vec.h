// One register of floats, in the vector extensions that GCC and Clang share. Loads and stores convert from and to the
// element types of tensors; arithmetic is always fp32. A vector wider than a register would live in memory: GCC does not
// split it (with 64 bytes on AVX2 a linear layer took 20 times as long).
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace flyball {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16, kRegisters = 32;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int64_t kLanes = 4, kRegisters = 32;
#else
constexpr int64_t kLanes = 4, kRegisters = 16;
#endif
constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.44269504088896f;

using Vec = float __attribute__((vector_size(4 * kLanes)));
using VecI = int32_t __attribute__((vector_size(4 * kLanes)));
using VecU = uint32_t __attribute__((vector_size(4 * kLanes)));
using VecI8 = int8_t __attribute__((vector_size(kLanes)));
using VecU16 = uint16_t __attribute__((vector_size(2 * kLanes)));

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

inline Vec splat(float x) { return x - Vec{}; }

template <class V>
inline V load_raw(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(V));
  return v;
}

// sum + a * b, rounded once. Compilers make that of the operators too, but GCC not in every loop when it tunes for some AMD cores:
// a row's bits would depend on how many rows there are.
inline Vec add_product(Vec sum, Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
  return sum + a * b;
#endif
}

inline Vec load(const float* from) { return load_raw<Vec>(from); }

inline Vec load(const c10::BFloat16* from) {
#if defined(__AVX512F__)
  return (Vec)(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_raw<__m256i>(from)), 16));  // GCC 12 makes six of these two
#elif defined(__AVX2__)
  return (Vec)(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_raw<__m128i>(from)), 16));
#else
  return (Vec)(__builtin_convertvector(load_raw<VecU16>(from), VecU) << 16);
#endif
}

inline Vec load(const c10::Half* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(load_raw<__m256i>(from));
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(load_raw<__m128i>(from));
#elif defined(__aarch64__)
  return (Vec)vcvt_f32_f16(load_raw<float16x4_t>(from));
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = static_cast<float>(from[i]);
  return v;
#endif
}

inline Vec load(const int8_t* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_raw<__m128i>(from)));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  return __builtin_convertvector(load_raw<VecI8>(from), Vec);
#endif
}

inline void store(float* to, Vec v) { __builtin_memcpy(to, &v, sizeof(v)); }

inline void store(c10::BFloat16* to, Vec v) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  const bfloat16x4_t out = vcvt_bf16_f32((float32x4_t)v);  // what the rest says, in one instruction
#elif defined(__AVX512BF16__)
  const __m256bh out = _mm512_cvtneps_pbh((__m512)v);  // the same, but denormals become 0
#else
  const VecU bits = (VecU)v;
  const VecU rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
  const VecU quiet_nan = (bits >> 16) | 0x40u;
  const VecU chosen = v == v ? rounded : quiet_nan;
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m128i out = _mm_packus_epi32(_mm256_castsi256_si128((__m256i)chosen), _mm256_extracti128_si256((__m256i)chosen, 1));
#else
  const VecU16 out = __builtin_convertvector(chosen, VecU16);
#endif
#endif
  __builtin_memcpy(to, &out, sizeof(out));
}

inline void store(c10::Half* to, Vec v) {
#if defined(__AVX512F__)
  const __m256i out = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __builtin_memcpy(to, &out, sizeof(out));
#elif defined(__F16C__)
  const __m128i out = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __builtin_memcpy(to, &out, sizeof(out));
#elif defined(__aarch64__)
  const float16x4_t out = vcvt_f16_f32((float32x4_t)v);
  __builtin_memcpy(to, &out, sizeof(out));
#else
  for (int i = 0; i < kLanes; ++i) to[i] = v[i];
#endif
}

// The first n < kLanes elements; the other lanes are 0 when loaded and untouched when stored.
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

// b if one is not a number.
inline Vec max(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);  // GCC 12 makes a comparison and a choice of what is below
#else
  return a > b ? a : b;
#endif
}

// Reductions fold halves onto each other: a fixed order, so a row's result does not depend on how many rows there are.
template <class V, class F>
inline auto fold(const V& v, F f) {
  if constexpr (sizeof(V) == 16) {
    return f(f(v[0], v[2]), f(v[1], v[3]));
  } else {
    using Element = std::remove_cvref_t<decltype(v[0])>;
    typedef Element Half __attribute__((vector_size(sizeof(V) / 2)));  // GCC 12 ignores the attribute in a using
    Half halves[2];
    __builtin_memcpy(halves, &v, sizeof(V));
    return fold(f(halves[0], halves[1]), f);
  }
}

inline float sum(Vec v) {
  return fold(v, [](auto a, auto b) { return a + b; });
}

inline float max(Vec v) {
  return fold(v, [](auto a, auto b) { return a > b ? a : b; });
}

// 2**x, at most 2 units in the last place off; below -126 it is 0. The polynomial is 2**f on [-0.5, 0.5] (Cephes).
inline Vec exp2(Vec x) {
#if defined(__AVX512F__)
  const __mmask16 tiny = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_LT_OQ);
  x = (Vec)_mm512_min_ps(_mm512_set1_ps(127.0f), (__m512)x);  // x if it is not a number
  const Vec whole = (Vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec f = x - whole;
#else
  const VecI tiny = x < -126.0f;
  x = tiny ? splat(-126.0f) : x;
  x = x > 127.0f ? splat(127.0f) : x;
  const Vec shifted = x + 12582912.0f;  // 1.5 * 2**23: adding it rounds to an integer, kept in the low bits
  const Vec f = x - (shifted - 12582912.0f);
#endif
  Vec p = splat(1.535336188319500e-4f);
  p = p * f + 1.339887440266574e-3f;
  p = p * f + 9.618437357674640e-3f;
  p = p * f + 5.550332471162809e-2f;
  p = p * f + 2.402264791363012e-1f;
  p = p * f + 6.931472028550421e-1f;
  p = p * f + 1.0f;
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_scalef_ps(_knot_mask16(tiny), (__m512)p, (__m512)whole);
#else
  const Vec result = (Vec)((VecI)p + ((VecI)shifted << 23));
  return tiny ? Vec{} : result;
#endif
}

inline Vec exp(Vec x) { return exp2(x * kLog2e); }

// Absolute error near 1e-7.
inline Vec tanh(Vec x) { return 1.0f - 2.0f / (1.0f + exp(2.0f * x)); }

}  // namespace flyball
