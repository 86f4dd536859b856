// A linear layer with its weights, for ops that contain one.
#pragma once

#include <torch/custom_class.h>

#include "../cpu/works.h"

namespace flyball {

struct Linear : torch::CustomClassHolder {
  using Prepare = std::function<Work(const Tensor& x, const Tensor& out)>;

  const int64_t in_features, out_features;
  const Prepare work;  // x [m, in_features] -> out [m, out_features], both contiguous

  Linear(int64_t in_features, int64_t out_features, Prepare work)
      : in_features(in_features), out_features(out_features), work(std::move(work)) {}
};

// Of n columns and k features; see the ops of the same weights.
c10::intrusive_ptr<Linear> packed_linear(Tensor packed, OptionalTensor bias, int64_t n, int64_t k, std::string arithmetic);
c10::intrusive_ptr<Linear> int8_linear(Tensor packed, Tensor scales, Tensor sums, OptionalTensor bias, int64_t n, int64_t k);
c10::intrusive_ptr<Linear> grouped_linear(Tensor packed, OptionalTensor bias, int64_t n, int64_t k, int64_t bits,
                                          int64_t group_size, bool has_zeros, int64_t input_bits);

}  // namespace flyball
