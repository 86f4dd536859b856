// What every op needs to meet torch: registration, dispatch over element types, and memory that outlives a call.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <omp.h>
#include <torch/library.h>

#include <optional>

#include "vec.h"

namespace flyball {

using at::Tensor;

// Call f with a null pointer of an element type.
template <class F>
void dispatch(at::ScalarType type, const char* op, F f) {
  switch (type) {
    case at::kFloat: return f(static_cast<float*>(nullptr));
    case at::kBFloat16: return f(static_cast<c10::BFloat16*>(nullptr));
    case at::kHalf: return f(static_cast<c10::Half*>(nullptr));
    default: TORCH_CHECK_VALUE(false, op, " takes float32, bfloat16 or float16, not ", type);
  }
}

template <class F>
void dispatch(const Tensor& tensor, const char* op, F f) {
  dispatch(tensor.scalar_type(), op, f);
}

template <class T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

template <class T>
const T* data_or_null(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? data<const T>(*tensor) : nullptr;
}

// The checks of checks.py, in its words, for ops that are so short that checks in Python would take as long. They raise
// ValueError; a length of -1 stands for any.
inline void check_shape(const char* name, const Tensor& tensor, at::IntArrayRef shape) {
  bool fits = tensor.dim() == static_cast<int64_t>(shape.size());
  for (size_t i = 0; fits && i < shape.size(); ++i) fits = shape[i] < 0 || tensor.size(i) == shape[i];
  if (fits) return;
  std::string wanted;
  for (const int64_t length : shape) wanted += (wanted.empty() ? "" : ", ") + (length < 0 ? "any" : std::to_string(length));
  TORCH_CHECK_VALUE(false, name, " has shape ", tensor.sizes(), "; it must be [", wanted, "].");
}

inline void check_dtype(const char* name, const Tensor& tensor, at::ArrayRef<at::ScalarType> types) {
  const auto called = [](at::ScalarType one) { return "torch." + std::string(c10::getDtypeNames(one).first); };
  if (std::find(types.begin(), types.end(), tensor.scalar_type()) != types.end()) return;
  std::string wanted;
  for (const at::ScalarType type : types) wanted += (wanted.empty() ? "" : " or ") + called(type);
  TORCH_CHECK_VALUE(false, name, " is ", called(tensor.scalar_type()), "; it must be ", wanted, ".");
}

inline void check_contiguous(const char* name, const Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_contiguous(), name, " has strides ", tensor.strides(),
                    "; it must be contiguous. Call .contiguous() on it.");
}

// Raise IndexError unless each value is in [0, limit). Ids that come from the scheduler are cheap to check, and a wrong one
// would read or overwrite another sequence's tokens.
template <class I>
void check_below(const char* name, const I* values, int64_t count, int64_t limit) {
  using Unsigned = std::make_unsigned_t<I>;
  Unsigned largest = 0;  // as unsigned, negative values are the largest
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, static_cast<Unsigned>(values[i]));
  TORCH_CHECK_INDEX(count == 0 || largest < static_cast<Unsigned>(limit), name, " holds ", static_cast<I>(largest),
                    "; its values must be at least 0 and below ", limit, ".");
}

// Work below this many elements is done by the calling thread: waking the others costs more.
constexpr int64_t kParallelGrain = 16384;

// A cache-line-aligned buffer that only grows, one per thread and per Tag, so that steady state allocates nothing.
template <class Tag>
float* scratch(int64_t num_floats) {
  struct Buffer {
    float* data = nullptr;
    int64_t size = 0;
    ~Buffer() { std::free(data); }
  };
  static thread_local Buffer buffer;
  if (buffer.size < num_floats) {
    std::free(buffer.data);
    buffer.size = round_up(num_floats, 1024);
    buffer.data = static_cast<float*>(std::aligned_alloc(64, buffer.size * sizeof(float)));
    TORCH_CHECK(buffer.data, "no memory for ", buffer.size * sizeof(float), " bytes of scratch");
  }
  return buffer.data;
}

}  // namespace flyball
