// A linear layer with its weights, for ops that contain one.
#pragma once

#include <torch/custom_class.h>

#include "../cpu/works.h"
#include "../swiglu/gate.h"

namespace flyball {

struct Linear : torch::CustomClassHolder {
  static constexpr int64_t kColumnMultiple = 32;  // of columns that lie together, in a panel of weights, whatever the CPU

  // x [m, in_features] -> out [m, out_features], both contiguous; with an activation out has half as many columns: the second
  // half of them times the activation of the first half. Of an output with fewer columns, they are those from the first on.
  using Prepare = std::function<Work(const Tensor& x, std::optional<Activation> activation, const Tensor& out, int64_t first)>;

  const int64_t in_features, out_features;

  // weights: the tensors that `prepare` has pointers into.
  Linear(int64_t in_features, int64_t out_features, Prepare prepare, std::vector<Tensor> weights)
      : in_features(in_features), out_features(out_features), prepare_(std::move(prepare)), weights_(std::move(weights)) {}

  Work work(const Tensor& x, const Tensor& out) const { return work_from(0, x, out); }
  Work gated_work(const Tensor& x, Activation activation, const Tensor& out) const { return prepare_(x, activation, out, 0); }

  // As many columns as out has, from one on: a multiple of kColumnMultiple.
  Work work_from(int64_t first, const Tensor& x, const Tensor& out) const { return prepare_(x, std::nullopt, out, first); }

 private:
  const Prepare prepare_;
  const std::vector<Tensor> weights_;
};

using Part = c10::intrusive_ptr<Linear>;  // of an op that contains several

// Of n columns and k features; see the ops of the same weights.
c10::intrusive_ptr<Linear> packed_linear(Tensor packed, OptionalTensor bias, int64_t n, int64_t k, std::string arithmetic);
c10::intrusive_ptr<Linear> int8_linear(Tensor packed, Tensor scales, Tensor sums, OptionalTensor bias, int64_t n, int64_t k);
c10::intrusive_ptr<Linear> grouped_linear(Tensor packed, OptionalTensor bias, int64_t n, int64_t k, int64_t bits,
                                          int64_t group_size, bool has_zeros, at::ScalarType scales, int64_t input_bits);

}  // namespace flyball
