// Square blocks in registers.
#pragma once

#include <utility>

#include "vec.h"

namespace flyball {

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define FLYBALL_SHUFFLE 1
#endif
#endif

// A vector of lanes of two others: those of b are counted from kLanes on.
template <size_t... From>
[[gnu::always_inline]] inline Vec pick(const Vec& a, const Vec& b) {
#if FLYBALL_SHUFFLE
  return __builtin_shufflevector(a, b, From...);
#else
  return Vec{(From < kLanes ? a[From % kLanes] : b[From % kLanes])...};
#endif
}

// Exchanges the off-diagonal H x H blocks of two rows that stand H apart: one step of a recursive transposition.
template <int H, size_t... Lane>
inline void swap_blocks(Vec& a, Vec& b, std::index_sequence<Lane...>) {
  const Vec upper = pick<(Lane % (2 * H) < H ? Lane : Lane - H + kLanes)...>(a, b);
  const Vec lower = pick<(Lane % (2 * H) < H ? Lane + H : Lane + kLanes)...>(a, b);
  a = upper;
  b = lower;
}

template <int H>
inline void swap_all_blocks(Vec* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)
    if ((i & H) == 0) swap_blocks<H>(rows[i], rows[i + H], std::make_index_sequence<kLanes>());
}

// kLanes rows.
template <int H = kLanes / 2>
inline void transpose(Vec* rows) {
  swap_all_blocks<H>(rows);
  if constexpr (H > 1) transpose<H / 2>(rows);
}

}  // namespace flyball
