// The layout of a step. A step of few tokens would take longer to make it of torch's ops than to compute several layers.
#include "../cpu/tensors.h"

namespace flyball {
namespace {

using Layout = std::tuple<Tensor, Tensor, std::vector<Tensor>, std::vector<Tensor>, Tensor, Tensor, Tensor, Tensor, int64_t, int64_t,
                          int64_t>;

// The entries of a step: arrays of their number.
struct Entries {
  int64_t num;
  const int64_t *rows, *starts, *query_lens, *num_sampled;
};

// What entries come to.
struct Sums {
  int64_t tokens = 0, given = 0, sampled = 0;  // given: tokens of those but the decodes
  int64_t max_query = 0, max_sampled = 0, max_context = 0;
};

Sums add_up(const Entries& entries, int64_t num_decodes, int64_t num_rows, int64_t max_context) {
  Sums sums;
  for (int64_t i = 0; i < entries.num; ++i) {
    const int64_t row = entries.rows[i], start = entries.starts[i], num = entries.query_lens[i];
    TORCH_CHECK_INDEX(0 <= row && row < num_rows && start >= 0 && num >= 1 && start <= max_context - num, "entry ", i,
                      " computes ", num, " tokens behind ", start, " in row ", row, "; there are ", num_rows, " rows of up to ",
                      max_context, " tokens.");
    const int64_t num_sampled = entries.num_sampled[i];
    TORCH_CHECK_INDEX(0 <= num_sampled && num_sampled <= num && (i >= num_decodes || num == 1), "entry ", i, " computes ", num,
                      " tokens and wants logits of ", num_sampled);
    sums.tokens += num;
    sums.given += i < num_decodes ? 0 : num;
    sums.sampled += num_sampled;
    sums.max_query = std::max(sums.max_query, num);
    sums.max_sampled = std::max(sums.max_sampled, num_sampled);
    sums.max_context = std::max(sums.max_context, start + num);
  }
  return sums;
}

Layout step_layout(const Tensor& of_entries, int64_t num_decodes, const Tensor& given_token_ids, const Tensor& block_tables,
                   const Tensor& last_token_ids, int64_t block_size) {
  check_shape("entries", of_entries, {4, -1});
  check_dtype("entries", of_entries, at::kLong);
  check_contiguous("entries", of_entries);
  check_shape("token_ids", given_token_ids, {-1});
  check_dtype("token_ids", given_token_ids, at::kLong);
  check_shape("block_tables", block_tables, {-1, -1, -1});
  check_dtype("block_tables", block_tables, at::kInt);
  check_contiguous("block_tables", block_tables);
  check_shape("last_token_ids", last_token_ids, {block_tables.size(1)});
  check_dtype("last_token_ids", last_token_ids, at::kLong);
  check_contiguous("last_token_ids", last_token_ids);
  const int64_t n = of_entries.size(1), num_groups = block_tables.size(0), num_rows = block_tables.size(1),
                stride = block_tables.size(2);
  TORCH_CHECK_VALUE(n > 0, "a step has at least one entry");
  const auto* all = data<const int64_t>(of_entries);
  const Entries entries{n, all, all + n, all + 2 * n, all + 3 * n};
  const Sums sums = add_up(entries, num_decodes, num_rows, stride * block_size);
  const Tensor given = given_token_ids.contiguous();
  TORCH_CHECK_VALUE(given.numel() == sums.given, "token_ids has ", given.numel(), " tokens; the entries but the decodes compute ",
                    sums.given, ".");

  const auto longs = [](int64_t size) { return at::empty({size}, at::kLong); };
  const Tensor token_ids = longs(sums.tokens), positions = longs(sums.tokens), logits_indices = longs(sums.sampled);
  const auto ints = [](int64_t size) { return at::empty({size}, at::kInt); };
  const Tensor cu_query_lens = ints(n + 1), context_lens = ints(n), cu_logits_lens = ints(n + 1);
  auto *ids = data<int64_t>(token_ids), *at_positions = data<int64_t>(positions), *indices = data<int64_t>(logits_indices);
  auto *cu = data<int32_t>(cu_query_lens), *contexts = data<int32_t>(context_lens), *cu_logits = data<int32_t>(cu_logits_lens);
  const auto *last = data<const int64_t>(last_token_ids), *from = data<const int64_t>(given);
  int64_t token = 0;
  cu[0] = cu_logits[0] = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t num = entries.query_lens[i];
    if (i < num_decodes) {
      ids[token] = std::max<int64_t>(last[entries.rows[i]], 0);
    } else {
      std::copy_n(from, num, ids + token);
      from += num;
    }
    for (int64_t j = 0; j < num; ++j) at_positions[token + j] = entries.starts[i] + j;
    token += num;
    for (int64_t left = entries.num_sampled[i]; left > 0; --left) *indices++ = token - left;
    cu[i + 1] = static_cast<int32_t>(token);
    cu_logits[i + 1] = cu_logits[i] + static_cast<int32_t>(entries.num_sampled[i]);
    contexts[i] = static_cast<int32_t>(entries.starts[i] + num);
  }

  const int64_t num_blocks = (sums.max_context + block_size - 1) / block_size;
  std::vector<Tensor> slot_mappings, tables;
  for (int64_t group = 0; group < num_groups; ++group) {
    const int32_t* of_group = data<const int32_t>(block_tables) + group * num_rows * stride;
    tables.push_back(at::empty({n, num_blocks}, at::kInt));
    slot_mappings.push_back(longs(sums.tokens));
    auto* table = data<int32_t>(tables.back());
    auto* slots = data<int64_t>(slot_mappings.back());
    for (int64_t i = 0; i < n; ++i, table += num_blocks) {
      std::copy_n(of_group + entries.rows[i] * stride, num_blocks, table);
      for (int64_t position = entries.starts[i]; position < contexts[i]; ++position)
        *slots++ = int64_t{table[position / block_size]} * block_size + position % block_size;
    }
  }
  return {token_ids,      positions,      slot_mappings,  tables,           cu_query_lens,   context_lens,
          logits_indices, cu_logits_lens, sums.max_query, sums.max_sampled, sums.max_context};
}

TORCH_LIBRARY_FRAGMENT(flyball, m) {
  m.def(
      "step_layout(Tensor entries, int num_decodes, Tensor token_ids, Tensor block_tables, Tensor last_token_ids, "
      "int block_size) -> (Tensor, Tensor, Tensor[], Tensor[], Tensor, Tensor, Tensor, Tensor, int, int, int)");
  m.impl("step_layout", c10::DispatchKey::CPU, TORCH_FN(step_layout));
}

}  // namespace
}  // namespace flyball
