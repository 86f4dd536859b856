// Rotary position embedding of one head.
#pragma once

#include "../cpu/vec.h"

namespace flyball {

// Rotates the first 2 * half elements of x and copies the others; cos_sin holds half cosines, then half sines.
// x and out may be the same.
template <class T, class C>
void rotate_head(const T* x, const C* cos_sin, T* out, int64_t half, int64_t head_dim) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t rest = half - i;
    const Vec cos = load_up_to(cos_sin + i, rest), sin = load_up_to(cos_sin + half + i, rest);
    const Vec x1 = load_up_to(x + i, rest), x2 = load_up_to(x + half + i, rest);
    store_up_to(out + i, x1 * cos - x2 * sin, rest);
    store_up_to(out + half + i, x2 * cos + x1 * sin, rest);
  }
  if (out != x) std::copy(x + 2 * half, x + head_dim, out + 2 * half);
}

}  // namespace flyball
