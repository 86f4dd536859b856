// RMSNorm, alone or after a residual addition: one pass over each row, fp32 inside.
#include "../cpu/tensors.h"
#include "norm.h"

namespace flyball {
namespace {

template <class T>
void normalise_rows(const T* x, const T* residual, const T* weight, T* out, T* total, int64_t rows, int64_t n, float eps,
                    float offset) {
#pragma omp parallel for if (rows * n > kParallelGrain)
  for (int64_t row = 0; row < rows; ++row) {
    const T* from = x + row * n;
    if (residual) from = add_row(from, residual + row * n, total + row * n, n);
    normalise_row(from, weight, out + row * n, n, eps, offset);
  }
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, double offset) {
  const Tensor from = x.contiguous(), w = weight.contiguous();
  Tensor out = at::empty_like(from);
  const int64_t n = x.size(-1), rows = n ? x.numel() / n : 0;
  dispatch(x, "rms_norm", [&]<class T>(T*) {
    normalise_rows<T>(data<T>(from), nullptr, data<T>(w), data<T>(out), nullptr, rows, n, eps, offset);
  });
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
                                        double offset) {
  const Tensor from = x.contiguous(), other = residual.contiguous(), w = weight.contiguous();
  Tensor out = at::empty_like(from), total = at::empty_like(from);
  const int64_t n = x.size(-1), rows = n ? x.numel() / n : 0;
  dispatch(x, "add_rms_norm", [&]<class T>(T*) {
    normalise_rows<T>(data<T>(from), data<T>(other), data<T>(w), data<T>(out), data<T>(total), rows, n, eps, offset);
  });
  return {out, total};
}

TORCH_LIBRARY_FRAGMENT(flyball, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps, float offset) -> Tensor");
  m.def("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, float offset) -> (Tensor, Tensor)");
  m.impl("rms_norm", c10::DispatchKey::CPU, TORCH_FN(rms_norm));
  m.impl("add_rms_norm", c10::DispatchKey::CPU, TORCH_FN(add_rms_norm));
}

}  // namespace
}  // namespace flyball
