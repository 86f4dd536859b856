// Decoder layers in one parallel region, with embedding and head if wanted: the other ops' work, one after another.
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <c10/core/InferenceMode.h>

#include <deque>

#include "../cpu/amx.h"
#include "../cpu/kv_cache.h"
#include "../cpu/works.h"
#include "../experts/mixture.h"
#include "decoding.h"
#include "parts.h"

namespace flyball {
namespace {

// Raise ValueError unless the tensor is like this; -1 stands for any length.
void check_tensor(const char* name, const Tensor& tensor, at::ScalarType type, at::IntArrayRef shape) {
  bool fits = tensor.dim() == static_cast<int64_t>(shape.size()) && tensor.scalar_type() == type && tensor.is_contiguous();
  for (size_t i = 0; fits && i < shape.size(); ++i) fits = shape[i] < 0 || tensor.size(i) == shape[i];
  TORCH_CHECK_VALUE(fits, name, " is ", tensor.scalar_type(), " of shape ", tensor.sizes(), " and strides ", tensor.strides(),
                    "; it must be ", type, " of shape ", shape, " (-1: any length) and contiguous.");
}

// Of a step, for one layer.
struct Inputs {
  const Tensor &positions, &k_cache, &v_cache, &slot_mapping, &block_tables, &cu_query_lens, &context_lens;
};

struct DecoderLayer : torch::CustomClassHolder {
  Part qkv, output;
  std::optional<Part> gate_up, down;  // or
  std::optional<c10::intrusive_ptr<Mixture>> mixture;
  Tensor attention_norm, mlp_norm;
  OptionalTensor q_norm, k_norm;
  double eps, norm_offset;
  Tensor cos_sin_cache;
  double scale;
  std::optional<int64_t> sliding_window;
  std::optional<double> softcap;
  Activation activation;

  DecoderLayer(Part qkv_, Part output_, std::optional<Part> gate_up_, std::optional<Part> down_,
               std::optional<c10::intrusive_ptr<Mixture>> mixture_, Tensor attention_norm_, Tensor mlp_norm_,
               OptionalTensor q_norm_, OptionalTensor k_norm_, double eps, double norm_offset, Tensor cos_sin_cache_, double scale,
               std::optional<int64_t> sliding_window, std::optional<double> softcap, bool is_gelu)
      : qkv(std::move(qkv_)), output(std::move(output_)), gate_up(std::move(gate_up_)), down(std::move(down_)),
        mixture(std::move(mixture_)), attention_norm(std::move(attention_norm_)), mlp_norm(std::move(mlp_norm_)),
        q_norm(std::move(q_norm_)), k_norm(std::move(k_norm_)), eps(eps), norm_offset(norm_offset),
        cos_sin_cache(std::move(cos_sin_cache_)), scale(scale), sliding_window(sliding_window), softcap(softcap),
        activation(is_gelu ? Activation::kGeluTanh : Activation::kSilu) {
    TORCH_CHECK_VALUE(gate_up.has_value() == down.has_value() && down.has_value() != mixture.has_value(),
                      "a layer has gate_up and down, or a mixture of experts");
  }

  void check(const Tensor& k_cache, const Tensor& v_cache) const {
    const auto type = attention_norm.scalar_type(), cached = is_int8(k_cache) ? at::kChar : type;
    check_tensor("k_cache", k_cache, cached, {-1, -1, -1, -1});
    check_tensor("v_cache", v_cache, cached, k_cache.sizes());
    const int64_t num_kv = k_cache.size(2), head_dim = head_dim_of(k_cache), query = output->in_features;
    TORCH_CHECK_VALUE(head_dim > 0 && num_kv > 0 && query % (head_dim * num_kv) == 0 &&
                          qkv->out_features == query + 2 * num_kv * head_dim && cos_sin_cache.size(1) <= head_dim,
                      "k_cache has ", num_kv, " heads of ", head_dim, "; they do not fit a layer with ", qkv->out_features,
                      " outputs of qkv, ", query, " of them of query heads, and ", cos_sin_cache.size(1), " angles.");
    for (const auto& [name, norm] : {std::pair("q_norm", &q_norm), std::pair("k_norm", &k_norm)})
      if (*norm) check_tensor(name, **norm, type, {head_dim});
  }
};

using Layer = c10::intrusive_ptr<DecoderLayer>;

// What makes logits of the last layer's output: a norm and a linear layer.
struct DecoderHead : torch::CustomClassHolder {
  Tensor norm;
  double eps, norm_offset;
  Part linear;

  DecoderHead(Tensor norm, double eps, double norm_offset, Part linear)
      : norm(std::move(norm)), eps(eps), norm_offset(norm_offset), linear(std::move(linear)) {}

  void check(int64_t hidden, at::ScalarType type) const {
    TORCH_CHECK_VALUE(linear->in_features == hidden, "the head takes ", linear->in_features, " features; the layers give ",
                      hidden, ".");
    check_tensor("the head's norm", norm, type, {hidden});
  }
};

using Head = c10::intrusive_ptr<DecoderHead>;

// rows of table [n, columns] -> out [indices, columns]
Work gather_work(const Tensor& indices, const Tensor& table, const Tensor& out) {
  const auto* wanted = data<const int64_t>(indices);
  const auto* from = static_cast<const char*>(table.data_ptr());
  auto* to = static_cast<char*>(out.data_ptr());
  const int64_t rows = indices.numel(), bytes = table.size(1) * table.element_size();
  return {0, [=](const Team& team, float*) {
            team.share(rows, [&](int64_t row) { std::memcpy(to + row * bytes, from + wanted[row] * bytes, bytes); });
          }};
}

// How many rows of a step go through the ops between two attentions together. Of what these ops leave to each other, no more
// than that needs memory, and it is still in a cache when the next one reads it. A multiple of the rows that linear layers take
// at a time, so that they read weights no more often. With AMX they take more, and no machine has measured it in blocks.
int64_t rows_at_once() { return has_amx() ? std::numeric_limits<int64_t>::max() : 336; }
constexpr int64_t kRowsOfThread = 168;  // the same for a thread that runs a step of its own

// Of a tensor, so many rows from one on.
struct Rows {
  int64_t begin, num;

  Tensor operator()(const Tensor& all) const { return num == all.size(0) ? all : all.narrow(0, begin, num); }
};

// A step of layers of one size. Those but the first begin with what the one before them left: out and total, for all rows.
class Step {
 public:
  Step(const DecoderLayer& first, const Tensor& k_cache, const Tensor& out, const Tensor& total, int64_t most_rows)
      : rows_(out.size(0)), block_rows_(std::min(rows_, most_rows)), options_(out.options()), entered_(at::empty_like(out)),
        query_(at::empty({rows_, first.output->in_features / head_dim_of(k_cache), head_dim_of(k_cache)}, options_)),
        attended_(at::empty_like(query_)), out_(out), total_(total), normed_(block(out.size(1))),
        projected_(block(first.qkv->out_features)), added_(block(out.size(1))) {}

  Tensor embed(const Tensor& ids, const Tensor& table) {
    const Tensor x = empty(table.size(1));
    works_.push_back(gather_work(ids, table, x));
    until_run_.push_back(x);
    return x;
  }

  void add(const DecoderLayer& layer, const Tensor& x, const OptionalTensor& residual, const Inputs& inputs) {
    const Tensor& entered = residual ? entered_ : x;
    const auto work = [&](Work one) { add(std::move(one)); };
    project(layer, x, residual, inputs, query_);
    work(paged_attention_work(query_, inputs.k_cache, inputs.v_cache, inputs.block_tables, inputs.cu_query_lens,
                              inputs.context_lens, layer.scale, layer.sliding_window, layer.softcap, {}, {}, attended_,
                              tasks_of(inputs, layer.sliding_window)));
    const Tensor attended = attended_.view({rows_, layer.output->in_features});
    for_blocks([&](const Rows& of, const Rows& block) {
      const Tensor normed = block(normed_), added = block(added_);
      work(layer.output->work(of(attended), added));
      work(rms_norm_work(added, of(entered), layer.mlp_norm, layer.eps, layer.norm_offset, normed, of(total_)));
      if (layer.mixture) return work((*layer.mixture)->work(normed, of(out_), memory_of(**layer.mixture)));
      const Tensor gated = block(gated_of((*layer.down)->in_features));
      work((*layer.gate_up)->gated_work(normed, layer.activation, gated));
      work((*layer.down)->work(gated, of(out_)));
    });
  }

  // Writes keys and values of all tokens, and goes on with the wanted ones alone, as if they were the step: theirs are written a
  // second time, with the same bits. No layer can follow.
  void add_last(const DecoderLayer& layer, const Tensor& x, const OptionalTensor& residual, const Inputs& inputs,
                const Wanted& wanted) {
    const bool can_leave_out = layer.output->in_features % Linear::kColumnMultiple == 0;  // queries, in front of keys and values
    project(layer, x, residual, inputs, can_leave_out ? query_.narrow(1, 0, 0) : query_);
    rows_ = wanted.indices.numel();
    for (Tensor* of_all : {&query_, &attended_, &out_, &total_}) *of_all = of_all->narrow(0, 0, rows_);
    const Tensor kept = empty(x.size(1));
    const Tensor positions = inputs.positions.index_select(0, wanted.indices);
    const Tensor slot_mapping = inputs.slot_mapping.index_select(0, wanted.indices);
    until_run_.insert(until_run_.end(), {kept, positions, slot_mapping});
    works_.push_back(gather_work(wanted.indices, residual ? entered_ : x, kept));
    add(layer, kept, {}, {positions, inputs.k_cache, inputs.v_cache, slot_mapping, inputs.block_tables, wanted.cu_lens,
                          inputs.context_lens});
  }

  // What the layers gave -> logits
  void finish(const DecoderHead& head, const Tensor& logits) {
    for_blocks([&](const Rows& of, const Rows& block) {
      const Tensor normed = block(normed_);
      works_.push_back(rms_norm_work(of(out_), of(total_), head.norm, head.eps, head.norm_offset, normed, of(entered_)));
      works_.push_back(head.linear->work(normed, of(logits)));
    });
  }

  void add(Work work) { works_.push_back(std::move(work)); }

  const Tensor& out() const { return out_; }
  const Tensor& total() const { return total_; }
  const std::vector<Work>& works() const { return works_; }

 private:
  // The ops before attention: keys and values, and queries of as many heads as `query` has, all or none.
  void project(const DecoderLayer& layer, const Tensor& x, const OptionalTensor& residual, const Inputs& inputs,
               const Tensor& query) {
    const OptionalTensor entered = residual ? OptionalTensor(entered_) : OptionalTensor();
    const auto rows_of = [](const OptionalTensor& all, const Rows& rows) { return all ? OptionalTensor(rows(*all)) : all; };
    const int64_t first = query.size(1) ? 0 : layer.output->in_features, columns = layer.qkv->out_features - first;
    const Tensor projections =
        first ? projected_.view(-1).narrow(0, 0, block_rows_ * columns).view({block_rows_, columns}) : projected_;
    for_blocks([&](const Rows& of, const Rows& block) {
      const Tensor normed = block(normed_), projected = block(projections);
      works_.push_back(rms_norm_work(of(x), rows_of(residual, of), layer.attention_norm, layer.eps, layer.norm_offset, normed,
                                     rows_of(entered, of)));
      works_.push_back(layer.qkv->work_from(first, normed, projected));
      works_.push_back(rope_kv_write_work(projected, of(inputs.positions), layer.cos_sin_cache, inputs.k_cache, inputs.v_cache,
                                          of(inputs.slot_mapping), layer.q_norm, layer.k_norm, layer.eps, layer.norm_offset,
                                          of(query)));
    });
  }

  Tensor empty(int64_t columns) const { return at::empty({rows_, columns}, options_); }
  Tensor block(int64_t columns) const { return at::empty({block_rows_, columns}, options_); }

  // What attention makes of the step's lengths, null before the first layer of this kind.
  SharedTasks& tasks_of(const Inputs& inputs, std::optional<int64_t> window) {
    const Kind kind{&inputs.block_tables, &inputs.cu_query_lens, inputs.k_cache.size(0), inputs.k_cache.size(1), window};
    for (auto& [of, tasks] : tasks_)
      if (of == kind) return tasks;
    return tasks_.emplace_back(kind, nullptr).second;
  }

  // What layers of a size have in turns: gated features, and what a mixture of experts needs.
  const Tensor& gated_of(int64_t inner) {
    for (const Tensor& gated : gated_)
      if (gated.size(1) == inner) return gated;
    return gated_.emplace_back(block(inner));
  }
  const Mixture::Memory& memory_of(const Mixture& mixture) {
    for (const Mixture::Memory& memory : memories_)
      if (mixture.fits(memory)) return memory;
    return memories_.emplace_back(mixture.memory(block_rows_, options_));
  }

  // Calls f for each block of rows, with those of a tensor of all rows, and those of one that blocks have in turns.
  template <class F>
  void for_blocks(F f) const {
    for (int64_t begin = 0; begin < rows_; begin += block_rows_) {
      const int64_t num = std::min(block_rows_, rows_ - begin);
      f(Rows{begin, num}, Rows{0, num});
    }
  }

  int64_t rows_;
  const int64_t block_rows_;
  const at::TensorOptions options_;
  const Tensor entered_;
  Tensor query_, attended_, out_, total_;    // of all rows
  const Tensor normed_, projected_, added_;  // of a block's
  std::vector<Tensor> gated_;
  std::vector<Mixture::Memory> memories_;
  std::vector<Tensor> until_run_;  // what works read and nothing else holds
  // Block tables, lengths, a cache's blocks and their size, and the window.
  using Kind = std::tuple<const Tensor*, const Tensor*, int64_t, int64_t, std::optional<int64_t>>;
  std::vector<std::pair<Kind, SharedTasks>> tasks_;
  std::vector<Work> works_;
};

// Layers that follow each other, and whose caches they are. What does not change from step to step is checked once.
struct DecoderStack : torch::CustomClassHolder {
  std::vector<Layer> layers;
  std::vector<Tensor> k_caches, v_caches;
  std::vector<int64_t> groups;
  OptionalTensor embedding;
  std::optional<Head> head;
  Effort effort;
  std::vector<Blocks> blocks_of_groups;
  bool has_mixtures = false;
  mutable std::atomic<int64_t> num_apart{0};  // runs in which each thread had a part of the sequences

  // A layer takes the slots and block tables of its group. With an embedding, x are token ids; with a head, logits are returned
  // in the place of what is still to be added.
  DecoderStack(const c10::List<Layer>& given, std::vector<Tensor> k_caches_, std::vector<Tensor> v_caches_,
               std::vector<int64_t> groups_, OptionalTensor embedding_, std::optional<Head> head_)
      : layers(given.begin(), given.end()), k_caches(std::move(k_caches_)), v_caches(std::move(v_caches_)),
        groups(std::move(groups_)), embedding(std::move(embedding_)), head(std::move(head_)) {
    const size_t num = layers.size();
    TORCH_CHECK_VALUE(num > 0, "there are no layers to run");
    TORCH_CHECK_VALUE(k_caches.size() == num && v_caches.size() == num && groups.size() == num, "there are ", num,
                      " layers, caches of ", k_caches.size(), " and groups of ", groups.size());
    const auto sizes = [](const DecoderLayer& one, const Tensor& k_cache) {
      return std::array{one.qkv->in_features, one.qkv->out_features, one.output->in_features, head_dim_of(k_cache),
                        int64_t(one.attention_norm.scalar_type())};
    };
    for (size_t i = 0; i < num; ++i) {
      layers[i]->check(k_caches[i], v_caches[i]);
      TORCH_CHECK_VALUE(sizes(*layers[i], k_caches[i]) == sizes(*layers[0], k_caches[0]),
                        "layers that run as one op must have attention of the same sizes and dtype; run others by themselves");
      TORCH_CHECK_VALUE(groups[i] >= 0, "layer ", i, " is of group ", groups[i], "; a group is at least 0.");
    }
    if (embedding) check_tensor("embedding", *embedding, type(), {-1, hidden()});
    if (head) (*head)->check(hidden(), type());
    for (size_t i = 0; i < num; ++i) weigh(i);
  }

  std::tuple<Tensor, Tensor> run(const Tensor& x, const OptionalTensor& residual, const Tensor& positions,
                                 const std::vector<Tensor>& slot_mappings, const std::vector<Tensor>& block_tables,
                                 const Tensor& cu_query_lens, const Tensor& context_lens, const OptionalTensor& logits_indices,
                                 const OptionalTensor& cu_logits_lens) const {
    const int64_t rows = positions.numel(), num_seqs = context_lens.numel();
    check_tensor("positions", positions, at::kLong, {rows});
    check_tensor("context_lens", context_lens, at::kInt, {num_seqs});
    check_tensor("cu_query_lens", cu_query_lens, at::kInt, {num_seqs + 1});
    const size_t num_groups = std::min(slot_mappings.size(), block_tables.size());
    for (size_t group = 0; group < num_groups; ++group) {
      check_tensor("slot_mapping", slot_mappings[group], at::kLong, {rows});
      check_tensor("block_tables", block_tables[group], at::kInt, {num_seqs, -1});
    }
    TORCH_CHECK_VALUE(logits_indices.has_value() == cu_logits_lens.has_value(),
                      "logits_indices and cu_logits_lens go together: give both, or none to compute all tokens");
    std::optional<Wanted> wanted;
    if (logits_indices) {
      check_tensor("logits_indices", *logits_indices, at::kLong, {-1});
      check_below("logits_indices", data<const int64_t>(*logits_indices), logits_indices->numel(), rows);
      check_tensor("cu_logits_lens", *cu_logits_lens, at::kInt, {num_seqs + 1});
      wanted.emplace(*logits_indices, *cu_logits_lens);
    }
    if (embedding) {
      TORCH_CHECK_VALUE(!residual, "with an embedding there is no residual");
      check_tensor("token ids", x, at::kLong, {rows});
      check_below("token ids", data<const int64_t>(x), rows, embedding->size(0));
    } else {
      check_tensor("x", x, type(), {rows, hidden()});
    }
    if (residual) check_tensor("residual", *residual, type(), {rows, hidden()});
    check_groups(num_groups);

    const Batch batch{x, residual, positions, slot_mappings, block_tables, cu_query_lens, context_lens, wanted};
    const std::vector<int64_t> parts = parts_of(batch, batch);
    return parts.empty() ? run_together(batch) : run_apart(batch, parts);
  }

  // Several tokens of each sequence, one after another -> [num_steps, sequences], kNoToken behind the last one of a sequence that
  // has ended.
  Tensor decode(const Tensor& token_ids, const std::vector<Tensor>& block_tables, const Tensor& context_lens, int64_t num_steps,
                const OptionalTensor& temperature, const OptionalTensor& top_k, const OptionalTensor& top_p,
                const OptionalTensor& min_p, const OptionalTensor& seeds, const Tensor& stops, const Tensor& cu_stops) const {
    const int64_t num = context_lens.numel();
    TORCH_CHECK_VALUE(embedding && head, "to decode, layers need an embedding in front of them and a head behind");
    TORCH_CHECK_VALUE(num > 0 && num_steps > 0, "there are ", num, " sequences and ", num_steps, " steps; at least one of each");
    check_tensor("token ids", token_ids, at::kLong, {num});
    check_tensor("context_lens", context_lens, at::kInt, {num});
    check_tensor("stops", stops, at::kLong, {-1});
    check_tensor("cu_stops", cu_stops, at::kInt, {num + 1});
    TORCH_CHECK_VALUE(are_cumulative(cu_stops, stops.numel()), "cu_stops must go up from 0 to ", stops.numel());
    const auto* const lens = data<const int32_t>(context_lens);
    const auto [least, most] = std::minmax_element(lens, lens + num);
    TORCH_CHECK_INDEX(*least > 0, "context_lens has ", *least, "; a sequence has at least the token that it computes.");
    check_groups(block_tables.size());
    for (size_t group = 0; group < block_tables.size(); ++group) {
      check_tensor("block_tables", block_tables[group], at::kInt, {num, -1});
      const int64_t room = block_tables[group].size(1) * block_size_of(group);
      TORCH_CHECK_INDEX(*most + num_steps - 1 <= room, "a context of ", *most, " goes past the ", room,
                        " tokens of its block table in ", num_steps, " steps.");
    }
    Decodes all{token_ids, context_lens, block_tables, {}, {temperature, top_k, top_p, min_p, seeds}, stops, cu_stops};
    for (size_t group = 0; group < block_tables.size(); ++group) all.block_sizes.push_back(block_size_of(group));
    all.sampling.check(num);
    const Tensor chosen = at::full({num_steps, num}, kNoToken, at::kLong);
    const auto run = [&](int64_t first, int64_t last, int64_t most_rows, Offer* offer) {
      const c10::InferenceMode guard;  // the thread may be one of OpenMP's
      Decoding some(all, first, last);
      for (int64_t i = 0; i < num_steps && !some.is_over(); ++i) {
        const Batch batch = some.batch();
        check_below("token ids", data<const int64_t>(batch.x), batch.num_rows(), embedding->size(0));
        const Results results = empty_results(batch);
        Step step(*layers[0], k_caches[0], results.out, results.total, most_rows);
        add(step, batch, results.logits);
        step.add(some.sample(results.logits));
        run_in_team(step.works(), !offer, offer);
        some.take(data<int64_t>(chosen) + i * num);
      }
    };
    const std::vector<int64_t> parts = parts_of(all.in_one(1), all.in_one(num_steps));
    if (parts.empty()) {
      run(0, num, rows_at_once(), nullptr);
    } else {
      run_alone(parts.size() - 1, [&](size_t i, Offer& offer) { run(parts[i], parts[i + 1], kRowsOfThread, &offer); });
      ++num_apart;
    }
    return chosen;
  }

 private:
  // What a run writes: out and total are left by each layer but the last, which may leave fewer rows.
  struct Results {
    Tensor out, total, logits;
  };

  Results empty_results(const Batch& batch) const {
    const auto empty = [&](int64_t rows, int64_t columns) { return at::empty({rows, columns}, at::TensorOptions(type())); };
    const Tensor out = empty(batch.num_rows(), hidden()), total = at::empty_like(out);
    return {out, total, head ? empty(batch.num_left(), (*head)->linear->out_features) : Tensor()};
  }

  // All threads share each op.
  std::tuple<Tensor, Tensor> run_together(const Batch& batch) const {
    const Results results = empty_results(batch);
    Step step(*layers[0], k_caches[0], results.out, results.total, rows_at_once());
    add(step, batch, results.logits);
    run_in_team(step.works());
    return {head ? results.logits : step.out(), step.total()};
  }

  // Each thread has a part of the sequences.
  std::tuple<Tensor, Tensor> run_apart(const Batch& batch, const std::vector<int64_t>& parts) const {
    const Results results = empty_results(batch);
    std::deque<Batch> batches;
    std::deque<Step> steps;
    std::vector<const std::vector<Work>*> works;
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      const Batch& part = batches.emplace_back(batch.part(parts[i], parts[i + 1]));
      const auto rows_of = [&](const Tensor& all) { return all.narrow(0, batch.first_row(parts[i]), part.num_rows()); };
      Step& step = steps.emplace_back(*layers[0], k_caches[0], rows_of(results.out), rows_of(results.total), kRowsOfThread);
      add(step, part, head ? results.logits.narrow(0, batch.first_left(parts[i]), part.num_left()) : Tensor());
      works.push_back(&step.works());
    }
    run_alone(works.size(), [&](size_t i, Offer& offer) { run_in_team(*works[i], false, &offer); });
    ++num_apart;
    const auto whole = [&](const Tensor& all, auto of) {
      if (!batch.wanted) return all;
      std::vector<Tensor> left;
      for (const Step& step : steps) left.push_back(of(step));
      return at::cat(left);
    };
    return {head ? results.logits : whole(results.out, [](const Step& step) { return step.out(); }),
            whole(results.total, [](const Step& step) { return step.total(); })};
  }

  void check_groups(size_t num_groups) const {
    for (size_t i = 0; i < layers.size(); ++i)
      TORCH_CHECK_VALUE(groups[i] < static_cast<int64_t>(num_groups), "layer ", i, " is of group ", groups[i],
                        "; there are slots and block tables of ", num_groups, ".");
  }

  // 1 where no layer is of the group.
  int64_t block_size_of(size_t group) const { return group < blocks_of_groups.size() ? blocks_of_groups[group].size : 1; }

  // Counts in what a layer has to do.
  void weigh(size_t i) {
    constexpr double kOfByte = 6;  // products in the time that a core needs to read one: measured with AVX512_BF16
    const DecoderLayer& layer = *layers[i];
    const Tensor& k_cache = k_caches[i];
    const int64_t window = layer.sliding_window.value_or(kNoWindow), key = k_cache.size(2) * head_dim_of(k_cache);
    const auto group = static_cast<size_t>(groups[i]);
    has_mixtures |= layer.mixture.has_value();
    for (const std::optional<Part>& part : {std::optional(layer.qkv), std::optional(layer.output), layer.gate_up, layer.down})
      if (part) effort.of_row += static_cast<double>((*part)->in_features) * static_cast<double>((*part)->out_features);
    effort.of_score = 2.0 * static_cast<double>(layer.output->in_features);
    effort.of_key = 2.0 * kOfByte * static_cast<double>(key * k_cache.element_size());
    ++effort.windows[window];
    if (group >= blocks_of_groups.size()) blocks_of_groups.resize(group + 1);
    Blocks& blocks = blocks_of_groups[group];
    blocks = {blocks.num > 0 ? std::min(blocks.num, k_cache.size(0)) : k_cache.size(0), k_cache.size(1),
              std::max(blocks.window, window)};
  }

  // Where the sequences of each thread begin, in a step and in all that come before threads meet again; empty where all threads share
  // each op.
  std::vector<int64_t> parts_of(const Batch& step, const Batch& all) const {
    if (has_mixtures || has_amx()) return {};  // experts would be read by each thread; matrix units are not measured
    std::vector<int64_t> parts = balanced_parts(step, effort, omp_get_max_threads());
    return parts.empty() || !can_be_apart(all, parts, blocks_of_groups) ? std::vector<int64_t>() : parts;
  }

  // All layers, and what comes before and behind them.
  void add(Step& step, const Batch& batch, const Tensor& logits) const {
    const Tensor begin = embedding ? step.embed(batch.x, *embedding) : batch.x;
    for (size_t i = 0; i < layers.size(); ++i) {
      const auto group = static_cast<size_t>(groups[i]);
      const Tensor entering = i == 0 ? begin : step.out();
      const OptionalTensor added = i == 0 ? batch.residual : OptionalTensor(step.total());
      const Inputs inputs{batch.positions, k_caches[i], v_caches[i], batch.slot_mappings[group], batch.block_tables[group],
                          batch.cu_query_lens, batch.context_lens};
      if (batch.wanted && i + 1 == layers.size()) step.add_last(*layers[i], entering, added, inputs, *batch.wanted);
      else step.add(*layers[i], entering, added, inputs);
    }
    if (head) step.finish(**head, logits);
  }

  at::ScalarType type() const { return layers[0]->attention_norm.scalar_type(); }
  int64_t hidden() const { return layers[0]->qkv->in_features; }
};

// Works that share so many runs several times, beside each other -> how many runs had not been done once when they were to be
// done, and how many were done by others.
std::tuple<int64_t, int64_t> help(at::ArrayRef<int64_t> lens, int64_t num_shares) {
  std::atomic<int64_t> num_wrong{0}, num_helped{0};
  std::vector<std::vector<Work>> lists;
  for (const int64_t len : lens) {
    const auto run = [&num_wrong, &num_helped, len, num_shares](const Team& team, float*) {
      const int owner = omp_get_thread_num();
      std::vector<std::atomic<int64_t>> counts(len);
      for (int64_t share = 1; share <= num_shares; ++share) {
        team.share_runs(len, 1, [&](int64_t i, int64_t) {
          counts[i].fetch_add(1, std::memory_order_relaxed);
          num_helped += omp_get_thread_num() != owner;
        });
        for (const auto& count : counts) num_wrong += count.load(std::memory_order_relaxed) != share;
      }
    };
    lists.push_back({{0, run}});
  }
  run_alone(lists.size(), [&](size_t i, Offer& offer) { run_in_team(lists[i], false, &offer); });
  return {num_wrong.load(), num_helped.load()};
}

TORCH_LIBRARY_FRAGMENT(flyball, m) {
  m.def("help(int[] lens, int num_shares) -> (int, int)", TORCH_FN(help));
  m.class_<Linear>("Linear")  // before the class that takes it
      .def_static("packed", &packed_linear)
      .def_static("int8", &int8_linear)
      .def_static("grouped", &grouped_linear);
  m.class_<Mixture>("Mixture").def(torch::init<Part, c10::List<Part>, c10::List<Part>, int64_t, bool, bool, std::optional<Part>,
                                               std::optional<Part>, std::optional<Part>>());
  m.class_<DecoderHead>("DecoderHead").def(torch::init<Tensor, double, double, Part>());
  m.class_<DecoderLayer>("DecoderLayer")
      .def(torch::init<Part, Part, std::optional<Part>, std::optional<Part>, std::optional<c10::intrusive_ptr<Mixture>>, Tensor,
                       Tensor, OptionalTensor, OptionalTensor, double, double, Tensor, double,
                       std::optional<int64_t>, std::optional<double>, bool>());
  m.class_<DecoderStack>("DecoderStack")
      .def(torch::init<c10::List<Layer>, std::vector<Tensor>, std::vector<Tensor>, std::vector<int64_t>, OptionalTensor,
                       std::optional<Head>>())
      .def("run", &DecoderStack::run)
      .def("decode", &DecoderStack::decode)
      .def("num_apart", [](const c10::intrusive_ptr<DecoderStack>& stack) { return stack->num_apart.load(); });
}

}  // namespace
}  // namespace flyball
