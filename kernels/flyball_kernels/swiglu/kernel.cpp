// silu(gate) * up, fp32 inside.
#include "../cpu/tensors.h"

namespace flyball {
namespace {

Vec silu(Vec x) { return x / (1.0f + exp(-x)); }

template <class T>
void swiglu_row(const T* gate, const T* up, T* out, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t rest = n - i;
    store_up_to(out + i, silu(load_up_to(gate + i, rest)) * load_up_to(up + i, rest), rest);
  }
}

Tensor swiglu(const Tensor& gate_up) {
  const Tensor from = gate_up.contiguous();
  const int64_t rows = from.size(0), n = from.size(1) / 2;
  Tensor out = at::empty({rows, n}, from.options());
  dispatch(from, "swiglu", [&]<class T>(T*) {
    const T* in = data<T>(from);
    T* to = data<T>(out);
#pragma omp parallel for if (rows * n > kParallelGrain)
    for (int64_t row = 0; row < rows; ++row) swiglu_row(in + 2 * row * n, in + (2 * row + 1) * n, to + row * n, n);
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(flyball, m) {
  m.def("swiglu(Tensor gate_up) -> Tensor");
  m.impl("swiglu", c10::DispatchKey::CPU, TORCH_FN(swiglu));
}

}  // namespace
}  // namespace flyball
