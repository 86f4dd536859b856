// Copies each token's key and value to its slot.
#include "../cpu/tensors.h"

namespace flyball {
namespace {

// Bytes are enough: nothing is computed, so any element type is welcome.
void copy_rows(const Tensor& from, const Tensor& cache, const int64_t* slots) {
  const int64_t row_bytes = cache.size(2) * cache.size(3) * cache.element_size();
  const int64_t stride_bytes = from.stride(0) * from.element_size();
  const char* source = static_cast<const char*>(from.const_data_ptr());
  char* target = static_cast<char*>(cache.data_ptr());
  for (int64_t i = 0; i < from.size(0); ++i)
    std::memcpy(target + slots[i] * row_bytes, source + i * stride_bytes, row_bytes);
}

Tensor with_dense_rows(const Tensor& x) {
  const bool dense = x.stride(2) == 1 && x.stride(1) == x.size(2);
  return dense ? x : x.contiguous();
}

void kv_write(const Tensor& key, const Tensor& value, const Tensor& k_cache, const Tensor& v_cache, const Tensor& slots) {
  const Tensor slot_mapping = slots.contiguous();
  check_below("slot_mapping", data<const int64_t>(slot_mapping), slot_mapping.numel(), k_cache.size(0) * k_cache.size(1));
  copy_rows(with_dense_rows(key), k_cache, data<const int64_t>(slot_mapping));
  copy_rows(with_dense_rows(value), v_cache, data<const int64_t>(slot_mapping));
}

TORCH_LIBRARY_FRAGMENT(flyball, m) {
  m.def("kv_write(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping) -> ()");
  m.impl("kv_write", c10::DispatchKey::CPU, TORCH_FN(kv_write));
}

}  // namespace
}  // namespace flyball
