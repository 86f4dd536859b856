// Mixtures of experts on CPU: the router's choice, rows by expert, the linear layers of all experts in one parallel region, and
// the sum of what they make.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "mixture.h"

namespace flyball {
namespace {

// One token's experts, the likeliest ones, the first of equal ones first. A row that is no distribution gets NaN.
template <class T>
[[gnu::noinline]] void route_row(const T* logits, int64_t num_experts, int64_t per_token, bool normalizes, float* weights,
                                 int32_t* experts, float* memory) {
  float* const left = memory;
  std::copy_n(logits, num_experts, left);
  const bool is_bad = !std::all_of(left, left + num_experts, [](float x) { return x < INFINITY; });  // NaN is not below
  if (is_bad) std::fill_n(left, num_experts, 0.0f);
  const float top = *std::max_element(left, left + num_experts), least = -std::numeric_limits<float>::infinity();
  float total = 0.0f, of_chosen = 0.0f;
  for (int64_t e = 0; e < num_experts && top > least; ++e) total += std::exp(left[e] - top);
  bool* const is_taken = reinterpret_cast<bool*>(memory + num_experts);
  std::fill_n(is_taken, num_experts, false);
  for (int64_t i = 0; i < per_token; ++i) {
    int64_t best = -1;
    for (int64_t e = 0; e < num_experts; ++e)
      if (!is_taken[e] && (best < 0 || left[e] > left[best])) best = e;
    is_taken[best] = true;
    experts[i] = static_cast<int32_t>(best);
    weights[i] = is_bad || top == least ? NAN : std::exp(left[best] - top);
    of_chosen += weights[i];
  }
  for (int64_t i = 0; i < per_token; ++i) weights[i] /= normalizes ? of_chosen : total;
}

// logits [num_tokens, num_experts] -> weights and experts, both [num_tokens, per_token]; by a team
template <class T>
void route_rows(const Team& team, const Tensor& logits, bool normalizes, const Tensor& weights, const Tensor& experts) {
  struct Row;
  const int64_t num_experts = logits.size(1), per_token = weights.size(1);
  float* const memory = scratch<Row>(2 * num_experts);
  team.share(logits.size(0), [&](int64_t token) {
    route_row(data<const T>(logits) + token * num_experts, num_experts, per_token, normalizes,
              data<float>(weights) + token * per_token, data<int32_t>(experts) + token * per_token, memory);
  });
}

std::tuple<Tensor, Tensor> experts_route(const Tensor& given, int64_t per_token, bool normalizes) {
  const Tensor logits = given.contiguous();
  const int64_t num_tokens = logits.size(0), num_experts = logits.size(1);
  const Tensor weights = at::empty({num_tokens, per_token}, logits.options().dtype(at::kFloat));
  const Tensor experts = at::empty({num_tokens, per_token}, logits.options().dtype(at::kInt));
  dispatch(logits, "experts_route", [&]<class T>(T*) {
    const auto run = [&](const Team& team, float*) { route_rows<T>(team, logits, normalizes, weights, experts); };
    run_in_team({{0, run}}, num_tokens * num_experts * per_token > kParallelGrain);
  });
  return {weights, experts};
}

// Sorts rows by expert: those of the i-th are order[starts[i]] to order[starts[i + 1] - 1]. places: where rows are then, or null.
void assign_rows(const int32_t* experts, int64_t num_rows, int64_t num_experts, int32_t* order, int32_t* starts,
                 int32_t* places) {
  std::fill_n(starts, num_experts + 1, 0);
  for (int64_t i = 0; i < num_rows; ++i) ++starts[experts[i] + 1];
  std::partial_sum(starts, starts + num_experts + 1, starts);
  std::vector<int32_t> next(starts, starts + num_experts);
  for (int64_t i = 0; i < num_rows; ++i) {
    const int32_t place = next[experts[i]]++;
    order[place] = static_cast<int32_t>(i);
    if (places) places[i] = place;
  }
}

std::tuple<Tensor, Tensor> experts_assign(const Tensor& given, int64_t num_experts) {
  const Tensor experts = given.contiguous();
  const int64_t num_rows = experts.numel();
  const auto* of_rows = data<const int32_t>(experts);
  check_below("experts", of_rows, num_rows, num_experts);
  const Tensor order = at::empty({num_rows}, experts.options()), starts = at::empty({num_experts + 1}, experts.options());
  assign_rows(of_rows, num_rows, num_experts, data<int32_t>(order), data<int32_t>(starts), nullptr);
  return {order, starts};
}

// Copies rows of x into the order of experts: the i-th is x[order[i] / per_x]; by a team.
template <class T>
void gather_rows(const Team& team, const T* x, const int32_t* order, int64_t per_x, int64_t n, T* rows, int64_t num_rows) {
  team.share(num_rows, [&](int64_t i) { std::copy_n(x + order[i] / per_x * n, n, rows + i * n); });
}

// The same linear layer of several experts, of which each row needs one.
struct ExpertLinear : torch::CustomClassHolder {
  const std::vector<Part> layers;

  explicit ExpertLinear(const c10::List<Part>& given) : layers(given.begin(), given.end()) {
    TORCH_CHECK_VALUE(!layers.empty(), "there are no experts");
    for (const Part& layer : layers)
      TORCH_CHECK_VALUE(layer->in_features == layers[0]->in_features && layer->out_features == layers[0]->out_features,
                        "experts must have layers of the same sizes");
  }

  // Neighbouring rows of the output, num_rows / x.size(0) of them, have the same row of x. The rows of the i-th expert are
  // those from the starts[i]-th of `order` on.
  Tensor run(const Tensor& given, const Tensor& order, const Tensor& starts) const {
    const Tensor x = given.contiguous();
    const int64_t num_rows = order.numel(), num_experts = static_cast<int64_t>(layers.size());
    const auto *rows = data<const int32_t>(order), *start = data<const int32_t>(starts);
    TORCH_CHECK_VALUE(starts.numel() == num_experts + 1 && start[0] == 0 && start[num_experts] == num_rows &&
                          std::is_sorted(start, start + num_experts + 1),
                      "starts must have ", num_experts + 1, " numbers that rise from 0 to the ", num_rows, " rows");
    check_below("order", rows, num_rows, num_rows);
    const Tensor out = at::empty({num_rows, layers[0]->out_features}, x.options());
    if (num_rows == 0) return out;
    const Tensor sorted_x = at::empty({num_rows, x.size(1)}, x.options()), sorted_out = at::empty_like(out);
    dispatch(x, "experts_linear", [&]<class T>(T*) {
      std::vector<Work> works;
      works.push_back({0, [&](const Team& team, float*) {
                         gather_rows(team, data<const T>(x), rows, num_rows / x.size(0), x.size(1), data<T>(sorted_x),
                                     num_rows);
                       }});
      for (int64_t e = 0; e < num_experts; ++e) {
        const int64_t num = start[e + 1] - start[e];
        if (num > 0) works.push_back(layers[e]->work(sorted_x.narrow(0, start[e], num), sorted_out.narrow(0, start[e], num)));
      }
      works.push_back({0, [&, n = out.size(1)](const Team& team, float*) {
                         team.share(num_rows, [&](int64_t i) {
                           std::copy_n(data<const T>(sorted_out) + i * n, n, data<T>(out) + rows[i] * n);
                         });
                       }});
      run_in_team(works);
    });
    return out;
  }
};

// gpt-oss's gated unit. Gates and ups take turns in a row.
Tensor clamped_swiglu(const Tensor& given, double limit, double alpha) {
  const Tensor from = given.contiguous(), out = at::empty({from.size(0), from.size(1) / 2}, from.options());
  const int64_t rows = out.size(0), n = out.size(1);
  const Vec most = splat(static_cast<float>(limit)), slope = splat(static_cast<float>(-alpha));
  dispatch(from, "clamped_swiglu", [&]<class T>(T*) {
    const auto run = [&](const Team& team, float*) {
      team.share(rows, [&](int64_t row) {
        for (int64_t i = 0; i < n; i += kLanes) {
          const int64_t rest = std::min(n - i, kLanes);
          const T* pairs = data<const T>(from) + 2 * (row * n + i);
          Vec gate{}, up{};
          for (int64_t j = 0; j < rest; ++j) {
            gate[j] = static_cast<float>(pairs[2 * j]);
            up[j] = static_cast<float>(pairs[2 * j + 1]);
          }
          gate = gate > most ? most : gate;  // NaN stays
          up = up > most ? most : up < -most ? -most : up;
          store_up_to(data<T>(out) + row * n + i, (up + 1.0f) * gate / (1.0f + exp(slope * gate)), rest);
        }
      });
    };
    run_in_team({{0, run}}, out.numel() > kParallelGrain);
  });
  return out;
}

// A token's outputs times their weights, and `shared`, if it is not null, times the sigmoid of its gate. The i-th output is
// places[i] rows of n from the first, or i. Not inlined: a compiler could fuse the products differently in each place.
template <class T>
[[gnu::noinline]] void sum_row(const T* outputs, const int32_t* places, const float* weights, int64_t per_token,
                               const T* shared, const T* gate, int64_t n, T* out) {
  const float share = shared ? 1.0f / (1.0f + std::exp(-static_cast<float>(*gate))) : 0.0f;
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t rest = n - i;
    Vec total{};
    for (int64_t k = 0; k < per_token; ++k) total += load_up_to(outputs + (places ? places[k] : k) * n + i, rest) * weights[k];
    if (shared) total += load_up_to(shared + i, rest) * share;
    store_up_to(out + i, total, rest);
  }
}

// The same for all tokens: weights [num_tokens, per_token] -> out [num_tokens, n]. places: of all outputs, or null; by a team
template <class T>
void sum_rows(const Team& team, const Tensor& outputs, const int32_t* places, const Tensor& weights,
              const std::optional<Tensor>& shared, const std::optional<Tensor>& gates, const Tensor& out) {
  const int64_t per_token = weights.size(1), n = out.size(1);
  const T *also = data_or_null<T>(shared), *gate = data_or_null<T>(gates);
  team.share(out.size(0), [&](int64_t token) {
    const int64_t first = token * per_token;
    sum_row(data<const T>(outputs) + (places ? 0 : first * n), places ? places + first : nullptr,
            data<const float>(weights) + first, per_token, also ? also + token * n : nullptr, gate ? gate + token : nullptr, n,
            data<T>(out) + token * n);
  });
}

// outputs [num_tokens, per_token, n]
Tensor experts_sum(const Tensor& given, const Tensor& given_weights, const std::optional<Tensor>& shared,
                   const std::optional<Tensor>& shared_gate) {
  const Tensor outputs = given.contiguous(), weights = given_weights.contiguous();
  const Tensor out = at::empty({outputs.size(0), outputs.size(2)}, outputs.options());
  const std::optional<Tensor> added = shared ? std::optional(shared->contiguous()) : std::nullopt;
  const std::optional<Tensor> gates = shared ? std::optional(shared_gate->contiguous()) : std::nullopt;
  dispatch(outputs, "experts_sum", [&]<class T>(T*) {
    const auto run = [&](const Team& team, float*) { sum_rows<T>(team, outputs, nullptr, weights, added, gates, out); };
    run_in_team({{0, run}}, outputs.numel() > kParallelGrain);
  });
  return out;
}

// The steps of a mixture on its tokens, of type T. Rows are those of a token and one of its experts, in the order of experts.
template <class T>
struct MixtureStep {
  const Mixture& mixture;
  Mixture::Memory memory;  // of these tokens
  Tensor x, out;
  Work router;
  std::vector<Work> shared;  // one after another
  int64_t expert_floats;     // what a layer of an expert has as memory, at most

  struct Expert {
    int64_t index, begin, num_rows;
  };
  // Found by one thread, for all.
  struct Found {
    std::vector<Expert> experts;  // that are used, those with most rows first
    std::vector<Work> works;      // of all of them, if they are not for a thread each
  };

  int64_t num_rows() const { return x.size(0) * mixture.per_token; }

  // gate_up and down of an expert
  std::array<Work, 2> works(const Expert& of) const {
    const Tensor gated = memory.gated.narrow(0, of.begin, of.num_rows);
    return {mixture.gate_up[of.index]->gated_work(memory.rows.narrow(0, of.begin, of.num_rows), mixture.activation, gated),
            mixture.down[of.index]->work(gated, memory.outputs.narrow(0, of.begin, of.num_rows))};
  }

  // Whether a thread computes experts by itself, without waiting for others, and reads their weights from beginning to end.
  bool is_alone(size_t num_used, int64_t num_threads) const { return num_used >= 4 * static_cast<size_t>(num_threads); }

  void find(Found& found, int64_t num_threads) const {
    const auto num_experts = static_cast<int64_t>(mixture.down.size());
    const auto* starts = data<int32_t>(memory.starts);
    assign_rows(data<const int32_t>(memory.experts), num_rows(), num_experts, data<int32_t>(memory.order),
                data<int32_t>(memory.starts), data<int32_t>(memory.places));
    for (int64_t e = 0; e < num_experts; ++e)
      if (starts[e + 1] > starts[e]) found.experts.push_back({e, starts[e], starts[e + 1] - starts[e]});
    std::stable_sort(found.experts.begin(), found.experts.end(),
                     [](const Expert& a, const Expert& b) { return a.num_rows > b.num_rows; });
    if (is_alone(found.experts.size(), num_threads)) return;
    for (const Expert& expert : found.experts)
      for (Work& work : works(expert)) found.works.push_back(std::move(work));
  }

  void run(const Team& team, float* floats, Found& found) const {
    router.run(team, floats);
    route_rows<T>(team, memory.logits, mixture.normalizes, memory.weights, memory.experts);
    team.run_once([&] { find(found, team.size()); });
    gather_rows(team, data<const T>(x), data<const int32_t>(memory.order), mixture.per_token, x.size(1), data<T>(memory.rows),
                num_rows());
    if (is_alone(found.experts.size(), team.size())) {
      struct Alone;
      Team::Shared of_thread(1);
      const Team alone(of_thread, 0, 1);
      float* const own = scratch<Alone>(expert_floats);
      team.share_chunks(static_cast<int64_t>(found.experts.size()), 1, [&](int64_t i) {
        for (const Work& work : works(found.experts[i])) work.run(alone, own);
      });
    } else {
      for (const Work& work : found.works) work.run(team, floats);
    }
    for (const Work& work : shared) work.run(team, floats);
    sum_rows<T>(team, memory.outputs, data<const int32_t>(memory.places), memory.weights, memory.shared, memory.shared_gate,
                out);
  }
};

TORCH_LIBRARY_FRAGMENT(flyball, m) {
  m.def("experts_route(Tensor logits, int experts_per_token, bool normalizes) -> (Tensor, Tensor)");
  m.def("experts_assign(Tensor experts, int num_experts) -> (Tensor, Tensor)");
  m.def("clamped_swiglu(Tensor gate_up, float limit, float alpha) -> Tensor");
  m.def("experts_sum(Tensor outputs, Tensor weights, Tensor? shared, Tensor? shared_gate) -> Tensor");
  m.impl("experts_route", c10::DispatchKey::CPU, TORCH_FN(experts_route));
  m.impl("experts_assign", c10::DispatchKey::CPU, TORCH_FN(experts_assign));
  m.impl("clamped_swiglu", c10::DispatchKey::CPU, TORCH_FN(clamped_swiglu));
  m.impl("experts_sum", c10::DispatchKey::CPU, TORCH_FN(experts_sum));
  // After Linear, which decoder_layer/kernel.cpp registers: files are compiled as one, in the order of their names.
  m.class_<ExpertLinear>("ExpertLinear")
      .def(torch::init<c10::List<Part>>())
      .def("run", &ExpertLinear::run);
}

}  // namespace

Mixture::Mixture(Part router_, const c10::List<Part>& gate_up_, const c10::List<Part>& down_, int64_t per_token,
                 bool normalizes, bool is_gelu, std::optional<Part> shared_gate_up_, std::optional<Part> shared_down_,
                 std::optional<Part> shared_gate_)
    : router(std::move(router_)), gate_up(gate_up_.begin(), gate_up_.end()), down(down_.begin(), down_.end()),
      per_token(per_token), normalizes(normalizes), activation(is_gelu ? Activation::kGeluTanh : Activation::kSilu),
      shared_gate_up(std::move(shared_gate_up_)), shared_down(std::move(shared_down_)), shared_gate(std::move(shared_gate_)) {
  const auto check = [&](const char* name, const Part& layer, int64_t in_features, int64_t out_features) {
    TORCH_CHECK_VALUE(layer->in_features == in_features && layer->out_features == out_features, name, " takes ",
                      layer->in_features, " features and gives ", layer->out_features,
                      "; beside the other layers it must take ", in_features, " and give ", out_features, ".");
  };
  TORCH_CHECK_VALUE(static_cast<int64_t>(gate_up.size()) == num_experts() && gate_up.size() == down.size(), "the router knows ",
                    num_experts(), " experts; there are ", gate_up.size(), " and ", down.size(), " layers of experts.");
  TORCH_CHECK_VALUE(1 <= per_token && per_token <= num_experts(), "a token has ", per_token, " of ", num_experts(), " experts");
  const int64_t inner = down[0]->in_features;
  for (int64_t e = 0; e < num_experts(); ++e) {
    check("gate_up", gate_up[e], hidden(), 2 * inner);
    check("down", down[e], inner, hidden());
  }
  TORCH_CHECK_VALUE(shared_gate_up.has_value() == shared_down.has_value() && shared_down.has_value() == shared_gate.has_value(),
                    "an expert for all tokens has gate_up, down and a gate of its own");
  if (!shared_gate) return;
  check("shared_gate_up", *shared_gate_up, hidden(), 2 * (*shared_down)->in_features);
  check("shared_down", *shared_down, (*shared_down)->in_features, hidden());
  check("shared_gate", *shared_gate, hidden(), 1);
}

Mixture::Memory Mixture::memory(int64_t num_tokens, const at::TensorOptions& options) const {
  const auto ints = [&](int64_t size) { return at::empty({size}, options.dtype(at::kInt)); };
  const int64_t num_rows = num_tokens * per_token;
  Memory memory{.logits = at::empty({num_tokens, num_experts()}, options),
                .weights = at::empty({num_tokens, per_token}, options.dtype(at::kFloat)),
                .experts = at::empty({num_tokens, per_token}, options.dtype(at::kInt)),
                .order = ints(num_rows),
                .places = ints(num_rows),
                .starts = ints(num_experts() + 1),
                .rows = at::empty({num_rows, hidden()}, options),
                .gated = at::empty({num_rows, down[0]->in_features}, options),
                .outputs = at::empty({num_rows, hidden()}, options),
                .shared_gated = {},
                .shared = {},
                .shared_gate = {}};
  if (shared_gate) {
    memory.shared_gated = at::empty({num_tokens, (*shared_down)->in_features}, options);
    memory.shared = at::empty({num_tokens, hidden()}, options);
    memory.shared_gate = at::empty({num_tokens, 1}, options);
  }
  return memory;
}

bool Mixture::fits(const Memory& memory) const {
  return memory.logits.size(1) == num_experts() && memory.weights.size(1) == per_token && memory.rows.size(1) == hidden() &&
         memory.gated.size(1) == down[0]->in_features && memory.shared.has_value() == shared_gate.has_value() &&
         (!shared_gate || memory.shared_gated->size(1) == (*shared_down)->in_features);
}

Work Mixture::work(const Tensor& x, const Tensor& out, const Memory& all) const {
  const int64_t num_tokens = x.size(0), num_rows = num_tokens * per_token;
  const auto of_tokens = [&](const Tensor& tensor) { return tensor.narrow(0, 0, num_tokens); };
  Memory memory = all;
  for (Tensor* tensor : {&memory.logits, &memory.weights, &memory.experts}) *tensor = of_tokens(*tensor);
  for (Tensor* tensor : {&memory.order, &memory.places, &memory.rows, &memory.gated, &memory.outputs})
    *tensor = tensor->narrow(0, 0, num_rows);
  Work work;
  dispatch(x, "mixture", [&]<class T>(T*) {
    auto step = std::make_shared<MixtureStep<T>>(MixtureStep<T>{*this, memory, x, out, router->work(x, memory.logits), {}, 0});
    // a token uses an expert once
    for (const Work& one : step->works({0, 0, num_tokens})) step->expert_floats = std::max(step->expert_floats, one.num_floats);
    if (shared_gate) {
      const Tensor gated = of_tokens(*memory.shared_gated), gate = of_tokens(*memory.shared_gate);
      step->shared = {(*shared_gate_up)->gated_work(x, activation, gated),
                      (*shared_down)->work(gated, of_tokens(*memory.shared)), (*shared_gate)->work(x, gate)};
    }
    work.num_floats = std::max(step->router.num_floats, step->expert_floats);
    for (const Work& one : step->shared) work.num_floats = std::max(work.num_floats, one.num_floats);
    work.run = [step, found = std::make_shared<typename MixtureStep<T>::Found>()](const Team& team, float* floats) {
      step->run(team, floats, *found);
    };
  });
  return work;
}

}  // namespace flyball
