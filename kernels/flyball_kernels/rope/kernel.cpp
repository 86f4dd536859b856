// Rotary position embedding of query and key.
#include "../cpu/tensors.h"
#include "rotate.h"

namespace flyball {
namespace {

template <class T, class C>
void rotate(const Tensor& x, const int64_t* positions, const C* cos_sin, int64_t rotary_dim, T* out) {
  const int64_t num_tokens = x.size(0), num_heads = x.size(1), head_dim = x.size(2);
  const T* from = data<T>(x);
#pragma omp parallel for if (x.numel() > kParallelGrain)
  for (int64_t i = 0; i < num_tokens * num_heads; ++i) {
    const C* row = cos_sin + positions[i / num_heads] * rotary_dim;
    rotate_head(from + i * head_dim, row, out + i * head_dim, rotary_dim / 2, head_dim);
  }
}

std::tuple<Tensor, Tensor> rope(const Tensor& positions, const Tensor& query, const Tensor& key, const Tensor& cos_sin_cache) {
  const Tensor q = query.contiguous(), k = key.contiguous(), table = cos_sin_cache.contiguous(), at = positions.contiguous();
  check_below("positions", data<const int64_t>(at), at.numel(), table.size(0));
  Tensor q_out = at::empty_like(q), k_out = at::empty_like(k);
  dispatch(q, "rope", [&]<class T>(T*) {
    dispatch(table, "rope", [&]<class C>(C*) {
      rotate<T, C>(q, data<const int64_t>(at), data<C>(table), table.size(1), data<T>(q_out));
      rotate<T, C>(k, data<const int64_t>(at), data<C>(table), table.size(1), data<T>(k_out));
    });
  });
  return {q_out, k_out};
}

TORCH_LIBRARY_FRAGMENT(flyball, m) {
  m.def("rope(Tensor positions, Tensor query, Tensor key, Tensor cos_sin_cache) -> (Tensor, Tensor)");
  m.impl("rope", c10::DispatchKey::CPU, TORCH_FN(rope));
}

}  // namespace
}  // namespace flyball
