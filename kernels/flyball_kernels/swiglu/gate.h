// activation(gate) * up, fp32 inside.
#pragma once

#include "../cpu/team.h"

namespace flyball {

enum class Activation { kSilu, kGeluTanh };

inline Vec silu(Vec x) { return x / (1.0f + exp(-x)); }

// 0.5 * x * (1 + tanh(u)) is x * sigmoid(2 * u)
inline Vec gelu_tanh(Vec x) {
  const Vec u = 0.797884560802865f * (x + 0.044715f * x * x * x);  // sqrt(2 / pi)
  return x / (1.0f + exp(-2.0f * u));
}

template <class F, class T>
void gate_by(F activation, const T* gate, const T* up, T* out, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t rest = n - i;
    store_up_to(out + i, activation(load_up_to(gate + i, rest)) * load_up_to(up + i, rest), rest);
  }
}

// n of each
template <class T>
void gate_row(Activation activation, const T* gate, const T* up, T* out, int64_t n) {
  if (activation == Activation::kSilu) gate_by(silu, gate, up, out, n);
  else gate_by(gelu_tanh, gate, up, out, n);
}

// from [rows, 2 * n], of which the first half are gates -> to [rows, n], by a team
template <class T>
void gate_rows(const Team& team, Activation activation, const T* from, T* to, int64_t rows, int64_t n) {
  team.share(rows, [&](int64_t row) {
    const T* gates = from + 2 * row * n;
    gate_row(activation, gates, gates + n, to + row * n, n);
  });
}

}  // namespace flyball
