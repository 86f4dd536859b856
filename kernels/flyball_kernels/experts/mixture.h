// A mixture of experts, for ops that contain one.
#pragma once

#include "../linear/linear.h"

namespace flyball {

// A router chooses some of the experts, which are gated MLPs, for each token. One more may be for all tokens, through a gate of
// its own.
struct Mixture : torch::CustomClassHolder {
  // What a step keeps from one part to the next, for at most so many tokens. Mixtures that run one after another share it.
  struct Memory {
    Tensor logits, weights, experts, order, places, starts, rows, gated, outputs;
    std::optional<Tensor> shared_gated, shared, shared_gate;
  };

  const Part router;
  const std::vector<Part> gate_up, down;
  const int64_t per_token;
  const bool normalizes;
  const Activation activation;
  const std::optional<Part> shared_gate_up, shared_down, shared_gate;

  Mixture(Part router, const c10::List<Part>& gate_up, const c10::List<Part>& down, int64_t per_token, bool normalizes,
          bool is_gelu, std::optional<Part> shared_gate_up, std::optional<Part> shared_down,
          std::optional<Part> shared_gate);

  Memory memory(int64_t num_tokens, const at::TensorOptions& options) const;
  bool fits(const Memory& memory) const;

  // x [num_tokens, hidden] -> out, of the same shape
  Work work(const Tensor& x, const Tensor& out, const Memory& memory) const;

 private:
  int64_t num_experts() const { return router->out_features; }
  int64_t hidden() const { return router->in_features; }
};

}  // namespace flyball
