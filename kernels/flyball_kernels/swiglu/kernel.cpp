// activation(gate) * up, fp32 inside.
#include "../cpu/works.h"

namespace flyball {
namespace {

Vec silu(Vec x) { return x / (1.0f + exp(-x)); }

// 0.5 * x * (1 + tanh(u)) is x * sigmoid(2 * u)
Vec gelu_tanh(Vec x) {
  const Vec u = 0.797884560802865f * (x + 0.044715f * x * x * x);  // sqrt(2 / pi)
  return x / (1.0f + exp(-2.0f * u));
}

template <class F, class T>
void gated_row(F activation, const T* gate, const T* up, T* out, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t rest = n - i;
    store_up_to(out + i, activation(load_up_to(gate + i, rest)) * load_up_to(up + i, rest), rest);
  }
}

Tensor swiglu(const Tensor& gate_up, bool is_gelu) {
  const Tensor from = gate_up.contiguous(), out = at::empty({from.size(0), from.size(1) / 2}, from.options());
  run_in_team({swiglu_work(from, is_gelu, out)}, out.numel() > kParallelGrain);
  return out;
}

TORCH_LIBRARY_FRAGMENT(flyball, m) {
  m.def("swiglu(Tensor gate_up, bool is_gelu) -> Tensor");
  m.impl("swiglu", c10::DispatchKey::CPU, TORCH_FN(swiglu));
}

}  // namespace

Work swiglu_work(const Tensor& gate_up, bool is_gelu, const Tensor& out) {
  const int64_t rows = out.size(0), n = out.size(1);
  Work work;
  dispatch(gate_up, "swiglu", [&]<class T>(T*) {
    const T* in = data<T>(gate_up);
    T* to = data<T>(out);
    work.run = [=](const Team& team, float*) {
      team.share(rows, [&](int64_t row) {
        const T *gate = in + 2 * row * n, *up = gate + n;
        if (is_gelu) gated_row(gelu_tanh, gate, up, to + row * n, n);
        else gated_row(silu, gate, up, to + row * n, n);
      });
    };
  });
  return work;
}

}  // namespace flyball
