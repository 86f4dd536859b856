// Sequences that decode several tokens in a row: what a step has chosen is the input of the next one.
#pragma once

#include <numeric>

#include "../sampling/sample.h"
#include "parts.h"

namespace flyball {

// Of all sequences of a call.
struct Decodes {
  Tensor token_ids, context_lens;  // the last token of each sequence, and how many tokens it has with that one
  std::vector<Tensor> block_tables;
  std::vector<int64_t> block_sizes;  // of each group
  SamplingTensors sampling;
  Tensor stops, cu_stops;  // the tokens that end each sequence

  int64_t num() const { return context_lens.size(0); }

  // The slot of a sequence's token, counted from the first.
  int64_t slot(size_t group, int64_t sequence, int64_t position) const {
    const int64_t size = block_sizes[group];
    const auto* blocks = data<const int32_t>(block_tables[group]) + sequence * block_tables[group].size(1);
    return blocks[position / size] * size + position % size;
  }

  // All tokens that are computed in so many steps, as one step would compute them. It has no token ids.
  Batch in_one(int64_t num_steps) const {
    Batch batch{{}, {}, at::empty({num() * num_steps}, at::kLong), {}, block_tables,
                at::empty({num() + 1}, at::kInt), at::empty_like(context_lens), {}};
    const auto* const lens = data<const int32_t>(context_lens);
    for (int64_t i = 0; i <= num(); ++i) data<int32_t>(batch.cu_query_lens)[i] = static_cast<int32_t>(i * num_steps);
    for (int64_t i = 0; i < num(); ++i) data<int32_t>(batch.context_lens)[i] = static_cast<int32_t>(lens[i] + num_steps - 1);
    for (size_t group = 0; group < block_tables.size(); ++group) {
      const Tensor slots = at::empty_like(batch.positions);
      for (int64_t i = 0; i < slots.numel(); ++i)
        data<int64_t>(slots)[i] = slot(group, i / num_steps, lens[i / num_steps] - 1 + i % num_steps);
      batch.slot_mappings.push_back(slots);
    }
    return batch;
  }
};

// The sequences [first, last) of them, or those that have not ended.
class Decoding {
 public:
  Decoding(const Decodes& all, int64_t first, int64_t last) : all_(all), left_(last - first) {
    std::iota(left_.begin(), left_.end(), first);
    for (const int64_t i : left_) {
      token_ids_.push_back(data<const int64_t>(all.token_ids)[i]);
      context_lens_.push_back(data<const int32_t>(all.context_lens)[i]);
    }
    for (const Tensor& blocks : all.block_tables) block_tables_.push_back(blocks.narrow(0, first, last - first));
  }

  bool is_over() const { return left_.empty(); }

  // The next step.
  Batch batch() const {
    const int64_t num = left_.size();
    Batch batch{at::empty({num}, at::kLong), {}, at::empty({num}, at::kLong), {}, block_tables_,
                at::empty({num + 1}, at::kInt), at::empty({num}, at::kInt), {}};
    std::copy(token_ids_.begin(), token_ids_.end(), data<int64_t>(batch.x));
    std::copy(context_lens_.begin(), context_lens_.end(), data<int32_t>(batch.context_lens));
    std::iota(data<int32_t>(batch.cu_query_lens), data<int32_t>(batch.cu_query_lens) + num + 1, 0);
    auto* const positions = data<int64_t>(batch.positions);
    for (int64_t i = 0; i < num; ++i) positions[i] = context_lens_[i] - 1;
    for (size_t group = 0; group < block_tables_.size(); ++group) {
      const Tensor slots = at::empty({num}, at::kLong);
      for (int64_t i = 0; i < num; ++i) data<int64_t>(slots)[i] = all_.slot(group, left_[i], positions[i]);
      batch.slot_mappings.push_back(slots);
    }
    return batch;
  }

  // Chooses the tokens of such a step.
  Work sample(const Tensor& logits) {
    std::vector<SamplingSettings> settings;
    for (size_t i = 0; i < left_.size(); ++i) settings.push_back(all_.sampling.of_row(left_[i], context_lens_[i]));
    return sample_work(logits, std::move(settings), token_ids_.data());
  }

  // Goes on behind the tokens that were chosen, which it writes to those [all sequences] of the step.
  void take(int64_t* chosen) {
    std::vector<int64_t> going_on;  // indices into left_
    for (size_t i = 0; i < left_.size(); ++i) {
      chosen[left_[i]] = token_ids_[i];
      ++context_lens_[i];
      if (!ends(left_[i], token_ids_[i])) going_on.push_back(i);
    }
    if (going_on.size() == left_.size()) return;
    const auto keep = [&](auto& all) {
      for (size_t i = 0; i < going_on.size(); ++i) all[i] = all[going_on[i]];
      all.resize(going_on.size());
    };
    keep(left_);
    keep(token_ids_);
    keep(context_lens_);
    const Tensor kept = at::empty({static_cast<int64_t>(going_on.size())}, at::kLong);
    std::copy(going_on.begin(), going_on.end(), data<int64_t>(kept));
    for (Tensor& blocks : block_tables_) blocks = blocks.index_select(0, kept);
  }

 private:
  bool ends(int64_t sequence, int64_t token_id) const {
    const auto* const cu_stops = data<const int32_t>(all_.cu_stops) + sequence;
    const auto* const stops = data<const int64_t>(all_.stops);
    return token_id == kNoToken || std::find(stops + cu_stops[0], stops + cu_stops[1], token_id) < stops + cu_stops[1];
  }

  const Decodes& all_;
  std::vector<int64_t> left_, token_ids_;  // those that go on, and the last token of each
  std::vector<int32_t> context_lens_;
  std::vector<Tensor> block_tables_;
};

}  // namespace flyball
