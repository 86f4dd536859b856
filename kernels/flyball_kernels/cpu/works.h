// The ops of which a decoder layer consists, as work for a team. Arguments are those of the ops, which document them; tensors
// are contiguous, and the last ones are written.
#pragma once

#include <memory>

#include "team.h"

namespace flyball {

using OptionalTensor = std::optional<Tensor>;

// total = x + residual, out = norm(total); without a residual and a total out = norm(x)
Work rms_norm_work(const Tensor& x, const OptionalTensor& residual, const Tensor& weight, double eps, double offset,
                   const Tensor& out, const OptionalTensor& total);

Work rope_kv_write_work(const Tensor& qkv, const Tensor& positions, const Tensor& cos_sin_cache, const Tensor& k_cache,
                        const Tensor& v_cache, const Tensor& slot_mapping, const OptionalTensor& q_norm,
                        const OptionalTensor& k_norm, double eps, double norm_offset, const Tensor& query);

// What sequences' lengths make of an attention: the same for layers with the same lengths, window and sizes.
struct AttentionTasks;
using SharedTasks = std::shared_ptr<const AttentionTasks>;

// tasks: those of another layer whose block tables are the same, or null; then they are made here, once all that will be read
// has been found to be there.
Work paged_attention_work(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_tables,
                          const Tensor& cu_query_lens, const Tensor& context_lens, double scale,
                          std::optional<int64_t> sliding_window, std::optional<double> softcap, const OptionalTensor& sinks,
                          std::optional<bool> dot, const Tensor& out, SharedTasks& tasks);

}  // namespace flyball
