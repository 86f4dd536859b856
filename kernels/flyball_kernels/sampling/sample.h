// The choice of tokens, for ops that contain it.
#pragma once

#include <vector>

#include "../cpu/works.h"

namespace flyball {

constexpr int64_t kNoToken = -1;  // where logits give no distribution

// Of a row. The position is how many tokens its sequence has before the one that is chosen.
struct SamplingSettings {
  static constexpr float kGreedyBelow = 1e-5f;  // GREEDY_BELOW of reference.py

  float temperature, top_p, min_p;
  int64_t top_k, seed, position;

  bool is_greedy() const { return !(temperature >= kGreedyBelow); }
  bool ranks() const { return top_k > 0 || top_p < 1.0f; }
};

// Of all rows, see the op `sample`; without a temperature all are greedy.
struct SamplingTensors {
  OptionalTensor temperature, top_k, top_p, min_p, seeds;

  void check(int64_t rows) const;
  SamplingSettings of_row(int64_t row, int64_t position) const;
};

// logits [rows, vocab] -> a token of each row
Work sample_work(const Tensor& logits, std::vector<SamplingSettings> settings, int64_t* token_ids);

}  // namespace flyball
