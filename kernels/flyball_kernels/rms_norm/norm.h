// One row of RMSNorm, for the ops that contain one.
#pragma once

#include "../cpu/vec.h"

namespace flyball {

// total = a + b, rounded to T; returns total
template <class T>
const T* add_row(const T* a, const T* b, T* total, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t rest = n - i;
    store_up_to(total + i, load_up_to(a + i, rest) + load_up_to(b + i, rest), rest);
  }
  return total;
}

template <class T>
void normalise_row(const T* x, const T* weight, T* out, int64_t n, float eps, float offset) {
  Vec squares{};
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec v = load_up_to(x + i, n - i);
    squares += v * v;
  }
  const float scale = 1.0f / std::sqrt(sum(squares) / n + eps);
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t rest = n - i;
    store_up_to(out + i, load_up_to(x + i, rest) * scale * (load_up_to(weight + i, rest) + offset), rest);
  }
}

}  // namespace flyball
