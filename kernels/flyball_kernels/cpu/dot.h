// The bf16 dot product of AVX512_BF16 and of Arm's BFDOT: each lane of a sum grows by two products at once. Products are exact,
// sums are fp32. (Arm's instruction rounds sums to odd, and makes denormals 0.)
#pragma once

#include <utility>

#include "vec.h"

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define FLYBALL_DOT 1
#endif

namespace flyball {

constexpr bool has_dot() {
#if FLYBALL_DOT
  return true;
#else
  return false;
#endif
}

// An AMD core issues two a cycle, as many as FMAs, so they do twice the work; so do Arm's cores by their guides. An Intel core
// issues one, and FMAs were faster.
inline bool has_fast_dot() {
#if defined(__x86_64__)
  return has_dot() && __builtin_cpu_is("amd");
#else
  return has_dot();
#endif
}

// Two bf16 that lie next to each other in memory.
enum class Bf16Pair : uint32_t {};

inline VecU load(const Bf16Pair* from) { return load_raw<VecU>(from); }
inline VecU splat(Bf16Pair x) { return static_cast<uint32_t>(x) - VecU{}; }

template <class V>
inline void store(Bf16Pair* to, V pairs) {
  __builtin_memcpy(to, &pairs, sizeof(pairs));
}

// Pairs of two vectors that hold bf16 values.
inline VecU pair_up(Vec first, Vec second) { return (VecU)first >> 16 | (VecU)second; }

// The two vectors of pairs: those at lower addresses, and the others.
inline Vec first_of(VecU pairs) { return (Vec)(pairs << 16); }
inline Vec second_of(VecU pairs) { return (Vec)(pairs & 0xffff0000u); }

// Pairs of two vectors of bf16 as they are in memory: those of the first four features of each eight, and of the last four.
inline std::pair<VecU, VecU> interleave(VecU first, VecU second) {
#if defined(__AVX512BF16__)
  return {(VecU)_mm512_unpacklo_epi16((__m512i)first, (__m512i)second),
          (VecU)_mm512_unpackhi_epi16((__m512i)first, (__m512i)second)};
#elif FLYBALL_DOT
  return {(VecU)vzip1q_u16((uint16x8_t)first, (uint16x8_t)second), (VecU)vzip2q_u16((uint16x8_t)first, (uint16x8_t)second)};
#else
  return {first, second};  // never called
#endif
}

#if defined(__AVX512BF16__)
// Pairs of bf16 of two vectors, one behind the other in memory, rounded to nearest, ties to even; denormals become 0.
inline VecU round_both(Vec first, Vec second) { return (VecU)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first); }

inline Vec add_product(Vec sum, VecU a, VecU b) { return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
#elif FLYBALL_DOT
inline Vec add_product(Vec sum, VecU a, VecU b) {
  return (Vec)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
#endif

// Returns what it stored.
inline Vec store_rounded(c10::BFloat16* to, Vec v) {
  store(to, v);
  return load(to);
}

}  // namespace flyball
