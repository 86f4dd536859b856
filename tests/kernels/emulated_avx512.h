// The AVX-512 instructions that the sources call by name, done with AVX2 by Intel's description, so that CPUs without them can run
// what uses them. Compile for a CPU with AVX2 and include this before all else; FLYBALL_EMULATED_VNNI and FLYBALL_EMULATED_BF16
// ask for those too. What the compiler makes of vector types by itself is not part of it: it splits them as it can.
#pragma once

// Before the macros below, which are not for them.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <immintrin.h>
#include <torch/library.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace flyball::emulated {

using Words = uint32_t __attribute__((vector_size(32)));

struct Floats {
  __m256 low, high;
};
struct Ints {
  __m256i low, high;
};

inline Floats halves(__m512 v) { return __builtin_bit_cast(Floats, v); }
inline Ints halves(__m512i v) { return __builtin_bit_cast(Ints, v); }
inline __m512 join(__m256 low, __m256 high) { return __builtin_bit_cast(__m512, (Floats{low, high})); }
inline __m512i join(__m256i low, __m256i high) { return __builtin_bit_cast(__m512i, (Ints{low, high})); }

// f of each half of the arguments.
template <class F, class... V>
inline auto by_halves(F f, V... v) {
  return join(f(halves(v).low...), f(halves(v).high...));
}

// The sources ask for no other immediate.
inline void require(bool holds) {
  if (!holds) std::abort();
}

// Each of 16 lanes.
template <class F>
inline __m512 by_lanes(F f) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = f(i);
  return __builtin_bit_cast(__m512, lanes);
}

#if !defined(__AVX512F__)
#define __AVX512F__ 1
#define __AVX512BW__ 1

inline __m512 set1_ps(float x) { return join(_mm256_set1_ps(x), _mm256_set1_ps(x)); }

inline __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return by_halves([](__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }, a, b, c);
}

inline __m512 max_ps(__m512 a, __m512 b) {
  return by_halves([](__m256 a, __m256 b) { return _mm256_max_ps(a, b); }, a, b);
}

inline __m512 min_ps(__m512 a, __m512 b) {
  return by_halves([](__m256 a, __m256 b) { return _mm256_min_ps(a, b); }, a, b);
}

inline __m512 roundscale_ps(__m512 v, int how) {
  require(how == (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  return by_halves([](__m256 v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }, v);
}

inline __mmask16 cmp_ps_mask(__m512 a, __m512 b, int how) {
  require(how == _CMP_LT_OQ);
  const auto less = [](__m256 a, __m256 b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); };
  return less(halves(a).low, halves(b).low) | less(halves(a).high, halves(b).high) << 8;
}

inline __mmask16 knot_mask16(__mmask16 mask) { return ~mask; }

// a * 2**floor(b), 0 where the mask has none
inline __m512 maskz_scalef_ps(__mmask16 mask, __m512 a, __m512 b) {
  return by_lanes([&](int i) {
    if ((mask >> i & 1) == 0) return 0.0f;
    if (std::isnan(b[i])) return b[i];
    return std::ldexp(a[i], static_cast<int>(std::floor(std::fmin(std::fmax(b[i], -1000.0f), 1000.0f))));
  });
}

inline __m512 scalef_ps(__m512 a, __m512 b) { return maskz_scalef_ps(0xffff, a, b); }

inline __m512 permutex2var_ps(__m512 a, __m512i from, __m512 b) {
  int32_t lanes[16];
  std::memcpy(lanes, &from, sizeof(lanes));
  return by_lanes([&](int i) { return (lanes[i] & 16 ? b : a)[lanes[i] & 15]; });
}

inline __m512i unpacklo_epi16(__m512i a, __m512i b) {
  return by_halves([](__m256i a, __m256i b) { return _mm256_unpacklo_epi16(a, b); }, a, b);
}

inline __m512i unpackhi_epi16(__m512i a, __m512i b) {
  return by_halves([](__m256i a, __m256i b) { return _mm256_unpackhi_epi16(a, b); }, a, b);
}

inline __m512i slli_epi32(__m512i v, int bits) {
  return by_halves([bits](__m256i v) { return _mm256_slli_epi32(v, bits); }, v);
}

inline __m512i add_epi16(__m512i a, __m512i b) {
  return by_halves([](__m256i a, __m256i b) { return _mm256_add_epi16(a, b); }, a, b);
}

inline __m512i madd_epi16(__m512i a, __m512i b) {
  return by_halves([](__m256i a, __m256i b) { return _mm256_madd_epi16(a, b); }, a, b);
}

inline __m512i maddubs_epi16(__m512i a, __m512i b) {
  return by_halves([](__m256i a, __m256i b) { return _mm256_maddubs_epi16(a, b); }, a, b);
}

inline __m512i cvtepi8_epi16(__m256i v) {
  return join(_mm256_cvtepi8_epi16(_mm256_castsi256_si128(v)), _mm256_cvtepi8_epi16(_mm256_extracti128_si256(v, 1)));
}

inline __m512i cvtepu16_epi32(__m256i v) {
  return join(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(v)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(v, 1)));
}

inline __m512i cvtepi8_epi32(__m128i v) { return join(_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128(v, 8))); }
inline __m512i cvtepu8_epi32(__m128i v) { return join(_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8))); }
inline __m512 cvtepi32_ps(__m512i v) { return join(_mm256_cvtepi32_ps(halves(v).low), _mm256_cvtepi32_ps(halves(v).high)); }
inline __m512i cvtps_epi32(__m512 v) { return join(_mm256_cvtps_epi32(halves(v).low), _mm256_cvtps_epi32(halves(v).high)); }

inline __m512 cvtph_ps(__m256i v) {
  return join(_mm256_cvtph_ps(_mm256_castsi256_si128(v)), _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1)));
}

inline __m256i cvtps_ph(__m512 v, int how) {
  require(how == (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  const auto half = [](__m256 v) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); };
  return _mm256_set_m128i(half(halves(v).high), half(halves(v).low));
}

inline void stream_si512(__m512i* to, __m512i v) {
  require(reinterpret_cast<uintptr_t>(to) % sizeof(v) == 0);
  std::memcpy(to, &v, sizeof(v));
}

#define _mm512_set1_ps flyball::emulated::set1_ps
#define _mm512_fmadd_ps flyball::emulated::fmadd_ps
#define _mm512_max_ps flyball::emulated::max_ps
#define _mm512_min_ps flyball::emulated::min_ps
#define _mm512_roundscale_ps flyball::emulated::roundscale_ps
#define _mm512_cmp_ps_mask flyball::emulated::cmp_ps_mask
#define _knot_mask16 flyball::emulated::knot_mask16
#define _mm512_maskz_scalef_ps flyball::emulated::maskz_scalef_ps
#define _mm512_scalef_ps flyball::emulated::scalef_ps
#define _mm512_permutex2var_ps flyball::emulated::permutex2var_ps
#define _mm512_unpacklo_epi16 flyball::emulated::unpacklo_epi16
#define _mm512_unpackhi_epi16 flyball::emulated::unpackhi_epi16
#define _mm512_slli_epi32 flyball::emulated::slli_epi32
#define _mm512_add_epi16 flyball::emulated::add_epi16
#define _mm512_madd_epi16 flyball::emulated::madd_epi16
#define _mm512_maddubs_epi16 flyball::emulated::maddubs_epi16
#define _mm512_cvtepi8_epi16 flyball::emulated::cvtepi8_epi16
#define _mm512_cvtepu16_epi32 flyball::emulated::cvtepu16_epi32
#define _mm512_cvtepi8_epi32 flyball::emulated::cvtepi8_epi32
#define _mm512_cvtepu8_epi32 flyball::emulated::cvtepu8_epi32
#define _mm512_cvtepi32_ps flyball::emulated::cvtepi32_ps
#define _mm512_cvtps_epi32 flyball::emulated::cvtps_epi32
#define _mm512_cvtph_ps flyball::emulated::cvtph_ps
#define _mm512_cvtps_ph flyball::emulated::cvtps_ph
#define _mm512_stream_si512 flyball::emulated::stream_si512
#endif

#if defined(FLYBALL_EMULATED_VNNI) && !defined(__AVX512VNNI__)
#define __AVX512VNNI__ 1

// Sums wrap around.
inline __m512i dpbusd_epi32(__m512i sum, __m512i u, __m512i s) {
  return by_halves(
      [](__m256i sum, __m256i u, __m256i s) {
        Words total = (Words)sum;
        for (int byte = 0; byte < 4; ++byte) {
          const __m256i unsigned_byte = _mm256_and_si256(_mm256_srli_epi32(u, 8 * byte), _mm256_set1_epi32(255));
          const __m256i signed_byte = _mm256_srai_epi32(_mm256_slli_epi32(s, 24 - 8 * byte), 24);
          total += (Words)_mm256_mullo_epi32(unsigned_byte, signed_byte);
        }
        return (__m256i)total;
      },
      sum, u, s);
}

inline __m512i dpwssd_epi32(__m512i sum, __m512i a, __m512i b) {
  return by_halves([](__m256i sum, __m256i a, __m256i b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }, sum, a, b);
}

#define _mm512_dpbusd_epi32 flyball::emulated::dpbusd_epi32
#define _mm512_dpwssd_epi32 flyball::emulated::dpwssd_epi32
#endif

#if defined(FLYBALL_EMULATED_BF16) && !defined(__AVX512BF16__)
#define __AVX512BF16__ 1

// Denormals count as zero, whatever the thread's settings.
inline Words flushed(Words bits) { return (bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits; }

// fp32 -> bf16 in the upper half, to nearest, ties to even
inline Words bf16_of(__m256 v) {
  const Words bits = flushed((Words)v), rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  return ((bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : rounded) & 0xffff0000u;
}

inline __m256i packed(Words low, Words high) {
  const __m256i pairs = _mm256_packus_epi32((__m256i)(low >> 16), (__m256i)(high >> 16));  // of each 128 bits
  return _mm256_permute4x64_epi64(pairs, 0b11011000);
}

inline __m256bh cvtneps_pbh(__m512 v) { return (__m256bh)packed(bf16_of(halves(v).low), bf16_of(halves(v).high)); }

inline __m512bh cvtne2ps_pbh(__m512 upper, __m512 lower) {
  return (__m512bh)join((__m256i)cvtneps_pbh(lower), (__m256i)cvtneps_pbh(upper));
}

// Both products are added with one rounding each, that of the upper halves first.
inline __m512 dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  const auto add = [](__m256 sum, __m256i a, __m256i b) {
    const auto product = [](Words sum, Words a, Words b) {
      return flushed((Words)_mm256_fmadd_ps((__m256)flushed(a), (__m256)flushed(b), (__m256)flushed(sum)));
    };
    const Words first = product((Words)sum, (Words)a & 0xffff0000u, (Words)b & 0xffff0000u);
    return (__m256)product(first, (Words)a << 16, (Words)b << 16);
  };
  const Floats sums = halves(sum);
  const Ints of_a = halves((__m512i)a), of_b = halves((__m512i)b);
  return join(add(sums.low, of_a.low, of_b.low), add(sums.high, of_a.high, of_b.high));
}

#define _mm512_cvtneps_pbh flyball::emulated::cvtneps_pbh
#define _mm512_cvtne2ps_pbh flyball::emulated::cvtne2ps_pbh
#define _mm512_dpbf16_ps flyball::emulated::dpbf16_ps
#endif

}  // namespace flyball::emulated
