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

// Exchanges the off-diagonal H x H blocks of two rows that stand H apart: one step of a recursive transposition.
template <int H, size_t... Lane>
inline void swap_blocks(Vec& a, Vec& b, std::index_sequence<Lane...>) {
#if FLYBALL_SHUFFLE
  const Vec upper = __builtin_shufflevector(a, b, (Lane % (2 * H) < H ? Lane : Lane - H + kLanes)...);
  const Vec lower = __builtin_shufflevector(a, b, (Lane % (2 * H) < H ? Lane + H : Lane + kLanes)...);
#else
  const Vec upper{(Lane % (2 * H) < H ? a[Lane] : b[Lane - H])...}, lower{(Lane % (2 * H) < H ? a[Lane + H] : b[Lane])...};
#endif
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

// a's sums of lanes that stand H apart, and b's, in the blocks that H lanes make: a's in the even ones.
template <int H, size_t... Lane>
[[gnu::always_inline]] inline Vec fold(Vec a, Vec b, std::index_sequence<Lane...>) {
#if FLYBALL_SHUFFLE
  const Vec kept = __builtin_shufflevector(a, b, (Lane % (2 * H) < H ? Lane : Lane + kLanes)...);
  const Vec moved = __builtin_shufflevector(a, b, (Lane % (2 * H) < H ? Lane + H : Lane - H + kLanes)...);
#else
  const Vec kept{(Lane % (2 * H) < H ? a[Lane] : b[Lane])...}, moved{(Lane % (2 * H) < H ? a[Lane + H] : b[Lane - H])...};
#endif
  return kept + moved;
}

// Lane i of the result is the sum of rows[i]: a transposition that adds what it would exchange.
template <int H = kLanes / 2>
[[gnu::always_inline]] inline Vec sum_each(Vec* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < H; ++i) rows[i] = fold<H>(rows[i], rows[i + H], std::make_index_sequence<kLanes>());
  if constexpr (H > 1) return sum_each<H / 2>(rows);
  return rows[0];
}

}  // namespace flyball
