// The op of gate.h.
#include "gate.h"

namespace flyball {
namespace {

Tensor swiglu(const Tensor& gate_up, bool is_gelu) {
  const Tensor from = gate_up.contiguous(), out = at::empty({from.size(0), from.size(1) / 2}, from.options());
  const int64_t rows = out.size(0), n = out.size(1);
  const Activation activation = is_gelu ? Activation::kGeluTanh : Activation::kSilu;
  dispatch(from, "swiglu", [&]<class T>(T*) {
    const auto run = [&](const Team& team, float*) {
      gate_rows(team, activation, data<const T>(from), data<T>(out), rows, n);
    };
    run_in_team({{0, run}}, out.numel() > kParallelGrain);
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(flyball, m) {
  m.def("swiglu(Tensor gate_up, bool is_gelu) -> Tensor");
  m.impl("swiglu", c10::DispatchKey::CPU, TORCH_FN(swiglu));
}

}  // namespace
}  // namespace flyball
