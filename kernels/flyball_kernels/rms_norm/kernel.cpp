// RMSNorm, alone or after a residual addition: one pass over each row, fp32 inside.
#include "../cpu/works.h"
#include "norm.h"

namespace flyball {
namespace {

template <class T>
Work norm_rows(const T* x, const T* residual, const T* weight, T* out, T* total, int64_t rows, int64_t n, float eps,
               float offset) {
  return {0, [=](const Team& team, float*) {
            team.share(rows, [&](int64_t row) {
              const T* from = x + row * n;
              if (residual) from = add_row(from, residual + row * n, total + row * n, n);
              normalise_row(from, weight, out + row * n, n, eps, offset);
            });
          }};
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, double offset) {
  const Tensor from = x.contiguous(), w = weight.contiguous(), out = at::empty_like(from);
  run_in_team({rms_norm_work(from, {}, w, eps, offset, out, {})}, x.numel() > kParallelGrain);
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
                                        double offset) {
  const Tensor from = x.contiguous(), other = residual.contiguous(), w = weight.contiguous();
  const Tensor out = at::empty_like(from), total = at::empty_like(from);
  run_in_team({rms_norm_work(from, other, w, eps, offset, out, total)}, x.numel() > kParallelGrain);
  return {out, total};
}

TORCH_LIBRARY_FRAGMENT(flyball, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps, float offset) -> Tensor");
  m.def("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, float offset) -> (Tensor, Tensor)");
  m.impl("rms_norm", c10::DispatchKey::CPU, TORCH_FN(rms_norm));
  m.impl("add_rms_norm", c10::DispatchKey::CPU, TORCH_FN(add_rms_norm));
}

}  // namespace

Work rms_norm_work(const Tensor& x, const OptionalTensor& residual, const Tensor& weight, double eps, double offset,
                   const Tensor& out, const OptionalTensor& total) {
  const int64_t n = x.size(-1), rows = n ? x.numel() / n : 0;
  Work work;
  dispatch(x, "rms_norm", [&]<class T>(T*) {
    work = norm_rows<T>(data<T>(x), data_or_null<T>(residual), data<T>(weight), data<T>(out),
                        total ? data<T>(*total) : nullptr, rows, n, eps, offset);
  });
  return work;
}

}  // namespace flyball
