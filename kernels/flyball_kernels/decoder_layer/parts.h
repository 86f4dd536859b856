// A step's sequences, and which of them each thread may have for itself, through all layers.
//
// Threads that share each op read what the others wrote before it, and wait for the last of them behind it. Sequences do not need
// each other: a thread that has enough of them runs a step of its own. The weights that one thread reads are still in the cache that
// they share when another comes by.
#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <map>

#include "../cpu/works.h"

namespace flyball {

constexpr int64_t kNoWindow = std::numeric_limits<int32_t>::max();

// Tokens of a step, the last ones of their sequences: which, and how many of each sequence, cumulative.
struct Wanted {
  Tensor indices, cu_lens;
};

// A step's sequences; slots and block tables of each group of layers.
struct Batch {
  Tensor x;
  OptionalTensor residual;
  Tensor positions;
  std::vector<Tensor> slot_mappings, block_tables;
  Tensor cu_query_lens, context_lens;
  std::optional<Wanted> wanted;

  int64_t num_rows() const { return positions.size(0); }
  int64_t num_sequences() const { return context_lens.size(0); }
  int64_t first_row(int64_t sequence) const { return data<const int32_t>(cu_query_lens)[sequence]; }
  int64_t query_len(int64_t sequence) const { return first_row(sequence + 1) - first_row(sequence); }
  int64_t context_len(int64_t sequence) const { return data<const int32_t>(context_lens)[sequence]; }
  // Of what the last layer leaves, the first row of a sequence.
  int64_t first_left(int64_t sequence) const {
    return wanted ? data<const int32_t>(wanted->cu_lens)[sequence] : first_row(sequence);
  }
  int64_t num_left() const { return wanted ? wanted->indices.numel() : num_rows(); }

  // The sequences [first, last) alone.
  Batch part(int64_t first, int64_t last) const {
    const int64_t row = first_row(first);
    const auto rows = [&](const Tensor& all) { return all.narrow(0, row, first_row(last) - row); };
    const auto sequences = [&](const Tensor& all) { return all.narrow(0, first, last - first); };
    const auto each = [](const std::vector<Tensor>& all, auto of) {
      std::vector<Tensor> part;
      for (const Tensor& one : all) part.push_back(of(one));
      return part;
    };
    const auto from_zero = [&](const Tensor& cu_lens) {
      const Tensor part = at::empty({last - first + 1}, cu_lens.options());
      const auto* lens = data<const int32_t>(cu_lens) + first;
      std::transform(lens, lens + part.numel(), data<int32_t>(part), [&](int32_t len) { return len - *lens; });
      return part;
    };
    Batch part{rows(x), {}, rows(positions), each(slot_mappings, rows), each(block_tables, sequences), from_zero(cu_query_lens),
               sequences(context_lens), {}};
    if (residual) part.residual = rows(*residual);
    if (wanted) {
      const Tensor of_part = wanted->indices.narrow(0, first_left(first), first_left(last) - first_left(first));
      part.wanted = Wanted{at::empty_like(of_part), from_zero(wanted->cu_lens)};
      const auto* indices = data<const int64_t>(of_part);
      std::transform(indices, indices + of_part.numel(), data<int64_t>(part.wanted->indices), [&](int64_t i) { return i - row; });
    }
    return part;
  }
};

// What layers that run as one op have to do, in products of a weight and an input.
struct Effort {
  double of_row = 0;                                // a token's linear layers
  double of_score = 0, of_key = 0;                  // of a layer: what a token has of a key that it sees, and what reads a key
  std::map<int64_t, int64_t> windows;               // how many layers have it

  double of(const Batch& batch, int64_t sequence) const {
    const auto rows = static_cast<double>(batch.query_len(sequence)), keys = static_cast<double>(batch.context_len(sequence));
    double effort = rows * of_row;
    for (const auto& [window, num_layers] : windows) {
      const auto seen = std::min(static_cast<double>(window), keys - (rows - 1) / 2);
      const auto read = std::min(keys, static_cast<double>(window) + rows - 1);
      effort += static_cast<double>(num_layers) * (rows * seen * of_score + read * of_key);
    }
    return effort;
  }
};

// The blocks of a group of layers; without layers there are none.
struct Blocks {
  int64_t num = 0, size = 1;
  int64_t window = 0;  // the largest of its layers: what lies behind it is not read
};

// Whether slots and blocks are there, and no part of the sequences reads a block that another one writes; parts[i] is where the i-th
// part begins. Layers of several groups have no blocks in common, or a layer would read what another one wrote.
inline bool can_be_apart(const Batch& batch, const std::vector<int64_t>& parts, const std::vector<Blocks>& groups) {
  static thread_local std::vector<int64_t> writers;  // of each block, the part that wrote to it last, of all that were ever asked for
  static thread_local int64_t num_parts = 0;
  for (size_t group = 0; group < groups.size(); ++group) {
    const Blocks& blocks = groups[group];
    if (blocks.num == 0) continue;
    const int64_t first_part = std::exchange(num_parts, num_parts + static_cast<int64_t>(parts.size())) + 1;
    const auto for_sequences = [&](auto f) {
      for (size_t i = 0; i + 1 < parts.size(); ++i)
        for (int64_t sequence = parts[i]; sequence < parts[i + 1]; ++sequence)
          if (!f(first_part + static_cast<int64_t>(i), sequence)) return false;
      return true;
    };
    const auto* slots = data<const int64_t>(batch.slot_mappings[group]);
    const auto* tables = data<const int32_t>(batch.block_tables[group]);
    const int64_t max_blocks = batch.block_tables[group].size(1);
    if (static_cast<int64_t>(writers.size()) < blocks.num) writers.resize(blocks.num);
    const bool may_write = for_sequences([&](int64_t part, int64_t sequence) {
      for (int64_t row = batch.first_row(sequence); row < batch.first_row(sequence + 1); ++row) {
        if (slots[row] < 0 || slots[row] >= blocks.num * blocks.size) return false;
        writers[slots[row] / blocks.size] = part;
      }
      return true;
    });
    const bool may_read = may_write && for_sequences([&](int64_t part, int64_t sequence) {
      const int64_t end = batch.context_len(sequence), seen = batch.query_len(sequence) + blocks.window;
      if (end > max_blocks * blocks.size) return false;
      for (int64_t i = std::max<int64_t>(0, end - seen) / blocks.size; i * blocks.size < end; ++i) {
        const int64_t block = tables[sequence * max_blocks + i];
        if (block < 0 || block >= blocks.num || (writers[block] >= first_part && writers[block] != part)) return false;
      }
      return true;
    });
    if (!may_read) return false;
  }
  return true;
}

// Whether lengths count from 0 up to `total`.
inline bool are_cumulative(const Tensor& cu_lens, int64_t total) {
  const auto* lens = data<const int32_t>(cu_lens);
  return lens[0] == 0 && lens[cu_lens.numel() - 1] == total && std::is_sorted(lens, lens + cu_lens.numel());
}

// Where the sequences of each thread begin, and where the last ones end, if each has as much to do as the others; otherwise empty.
// A thread has at least kFewestRows tokens: with fewer it would read weights faster than memory gives them.
inline std::vector<int64_t> balanced_parts(const Batch& batch, const Effort& effort, int64_t num_threads) {
  constexpr int64_t kFewestRows = 28;
  constexpr double kMost = 1.03;  // of the mean: the others help with the rest, but not with all of it
  const int64_t num = batch.num_sequences();
  if (num_threads < 2 || batch.num_rows() < num_threads * kFewestRows || num < num_threads) return {};
  if (!are_cumulative(batch.cu_query_lens, batch.num_rows())) return {};
  if (batch.wanted && !are_cumulative(batch.wanted->cu_lens, batch.wanted->indices.numel())) return {};
  std::vector<double> before{0};
  for (int64_t i = 0; i < num; ++i) {
    if (batch.context_len(i) < batch.query_len(i)) return {};
    before.push_back(before.back() + effort.of(batch, i));
  }
  const double share = before.back() / static_cast<double>(num_threads);
  std::vector<int64_t> parts{0};
  for (int64_t thread = 1; thread <= num_threads; ++thread) {
    const double end = share * static_cast<double>(thread);
    int64_t last = thread == num_threads ? num : std::lower_bound(before.begin(), before.end(), end) - before.begin();
    if (thread < num_threads && end - before[last - 1] < before[last] - end) --last;  // the nearer one
    const int64_t first = parts.back();
    if (last <= first || batch.first_row(last) - batch.first_row(first) < kFewestRows) return {};
    if (before[last] - before[first] > kMost * share) return {};
    parts.push_back(last);
  }
  return parts;
}

// Calls run(i, offer) for each i below num beside each other, each on one thread. One that is done helps those that offer something,
// so that all end together. What one of them throws is thrown when all have ended.
template <class F>
void run_alone(size_t num, F run) {
  std::vector<Offer> offers(num);
  std::vector<std::exception_ptr> errors(num);
  std::atomic<size_t> num_left{num};
#pragma omp parallel
  {
#pragma omp for schedule(static, 1) nowait
    for (size_t i = 0; i < num; ++i) {
      try {
        run(i, offers[i]);
      } catch (...) {
        errors[i] = std::current_exception();
      }
      num_left.fetch_sub(1);
    }
    const int most_spins = Wait::max_spins(omp_get_num_threads());
    for (int spins = most_spins; spins > 0 && num_left.load() > 0; --spins) {
      for (Offer& offer : offers)
        if (offer.help()) spins = most_spins;
      Wait::pause();
    }
  }
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

}  // namespace flyball
