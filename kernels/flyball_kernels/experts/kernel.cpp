// Mixtures of experts on CPU: the router's choice, rows by expert, the linear layers of all experts in one parallel region, and
// the sum of what they make.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "../linear/linear.h"

namespace flyball {
namespace {

// One token's experts, the likeliest ones, the first of equal ones first. A row that is no distribution gets NaN.
template <class T>
void route_row(const T* logits, int64_t num_experts, int64_t per_token, bool normalizes, float* weights, int32_t* experts,
               float* memory) {
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

std::tuple<Tensor, Tensor> experts_route(const Tensor& given, int64_t per_token, bool normalizes) {
  const Tensor logits = given.contiguous();
  const int64_t num_tokens = logits.size(0), num_experts = logits.size(1);
  const Tensor weights = at::empty({num_tokens, per_token}, logits.options().dtype(at::kFloat));
  const Tensor experts = at::empty({num_tokens, per_token}, logits.options().dtype(at::kInt));
  dispatch(logits, "experts_route", [&]<class T>(T*) {
    const auto run = [&](const Team& team, float*) {
      struct Row;
      float* const memory = scratch<Row>(2 * num_experts);
      team.share(num_tokens, [&](int64_t token) {
        route_row(data<const T>(logits) + token * num_experts, num_experts, per_token, normalizes,
                  data<float>(weights) + token * per_token, data<int32_t>(experts) + token * per_token, memory);
      });
    };
    run_in_team({{0, run}}, num_tokens * num_experts * per_token > kParallelGrain);
  });
  return {weights, experts};
}

std::tuple<Tensor, Tensor> experts_assign(const Tensor& given, int64_t num_experts) {
  const Tensor experts = given.contiguous();
  const int64_t num_rows = experts.numel();
  const auto* of_rows = data<const int32_t>(experts);
  check_below("experts", of_rows, num_rows, num_experts);
  const Tensor order = at::empty({num_rows}, experts.options()), starts = at::empty({num_experts + 1}, experts.options());
  auto *rows = data<int32_t>(order), *start = data<int32_t>(starts);
  std::fill_n(start, num_experts + 1, 0);
  for (int64_t i = 0; i < num_rows; ++i) ++start[of_rows[i] + 1];
  std::partial_sum(start, start + num_experts + 1, start);
  std::vector<int32_t> next(start, start + num_experts);
  for (int64_t i = 0; i < num_rows; ++i) rows[next[of_rows[i]]++] = static_cast<int32_t>(i);
  return {order, starts};
}

// Rows of `bytes`: to[i] = from[row(i)], or with `scatters` to[row(i)] = from[i].
template <class F>
Work rows_work(const Tensor& from, const Tensor& to, int64_t num_rows, int64_t bytes, bool scatters, F row) {
  const auto* read = static_cast<const char*>(from.data_ptr());
  auto* written = static_cast<char*>(to.data_ptr());
  return {0, [=](const Team& team, float*) {
            team.share(num_rows, [&](int64_t i) {
              const int64_t other = row(i);
              std::memcpy(written + (scatters ? other : i) * bytes, read + (scatters ? i : other) * bytes, bytes);
            });
          }};
}

// The same linear layer of several experts, of which each row needs one.
struct ExpertLinear : torch::CustomClassHolder {
  using Layer = c10::intrusive_ptr<Linear>;
  const std::vector<Layer> layers;

  explicit ExpertLinear(const c10::List<Layer>& given) : layers(given.begin(), given.end()) {
    TORCH_CHECK_VALUE(!layers.empty(), "there are no experts");
    for (const Layer& layer : layers)
      TORCH_CHECK_VALUE(layer->in_features == layers[0]->in_features && layer->out_features == layers[0]->out_features,
                        "experts must have layers of the same sizes");
  }

  // Neighbouring rows of the output, num_rows / x.size(0) of them, have the same row of x. The rows of the i-th expert are those
  // from the starts[i]-th of `order` on.
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
    const int64_t per_x = num_rows / x.size(0);
    std::vector<Work> works{rows_work(x, sorted_x, num_rows, x.size(1) * x.element_size(), false,
                                      [=](int64_t i) { return rows[i] / per_x; })};
    for (int64_t e = 0; e < num_experts; ++e) {
      const int64_t num = start[e + 1] - start[e];
      if (num > 0) works.push_back(layers[e]->work(sorted_x.narrow(0, start[e], num), sorted_out.narrow(0, start[e], num)));
    }
    works.push_back(
        rows_work(sorted_out, out, num_rows, out.size(1) * out.element_size(), true, [=](int64_t i) { return rows[i]; }));
    run_in_team(works);
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

// outputs [num_tokens, per_token, n] times weights, and `shared` times the sigmoid of its gate
Tensor experts_sum(const Tensor& given, const Tensor& given_weights, const std::optional<Tensor>& shared,
                   const std::optional<Tensor>& shared_gate) {
  const Tensor outputs = given.contiguous(), weights = given_weights.contiguous();
  const int64_t num_tokens = outputs.size(0), per_token = outputs.size(1), n = outputs.size(2);
  const Tensor out = at::empty({num_tokens, n}, outputs.options());
  const std::optional<Tensor> added = shared ? std::optional(shared->contiguous()) : std::nullopt;
  const std::optional<Tensor> gates = shared ? std::optional(shared_gate->contiguous()) : std::nullopt;
  dispatch(outputs, "experts_sum", [&]<class T>(T*) {
    const T *also = data_or_null<T>(added), *gate = data_or_null<T>(gates);
    const auto run = [&](const Team& team, float*) {
      team.share(num_tokens, [&](int64_t token) {
        const T* of_token = data<const T>(outputs) + token * per_token * n;
        const float* shares = data<const float>(weights) + token * per_token;
        const float share = gate ? 1.0f / (1.0f + std::exp(-static_cast<float>(gate[token]))) : 0.0f;
        for (int64_t i = 0; i < n; i += kLanes) {
          const int64_t rest = std::min(n - i, kLanes);
          Vec total{};
          for (int64_t k = 0; k < per_token; ++k) total += load_up_to(of_token + k * n + i, rest) * shares[k];
          if (also) total += load_up_to(also + token * n + i, rest) * share;
          store_up_to(data<T>(out) + token * n + i, total, rest);
        }
      });
    };
    run_in_team({{0, run}}, outputs.numel() > kParallelGrain);
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(flyball, m) {
  m.def("experts_route(Tensor logits, int experts_per_token, bool normalizes) -> (Tensor, Tensor)");
  m.def("experts_assign(Tensor experts, int num_experts) -> (Tensor, Tensor)");
  m.def("clamped_swiglu(Tensor gate_up, float limit, float alpha) -> Tensor");
  m.def("experts_sum(Tensor outputs, Tensor weights, Tensor? shared, Tensor? shared_gate) -> Tensor");
  m.impl("experts_route", c10::DispatchKey::CPU, TORCH_FN(experts_route));
  m.impl("experts_assign", c10::DispatchKey::CPU, TORCH_FN(experts_assign));
  m.impl("clamped_swiglu", c10::DispatchKey::CPU, TORCH_FN(clamped_swiglu));
  m.impl("experts_sum", c10::DispatchKey::CPU, TORCH_FN(experts_sum));
  // After Linear, which decoder_layer/kernel.cpp registers: files are linked in the order of their names.
  m.class_<ExpertLinear>("ExpertLinear")
      .def(torch::init<c10::List<ExpertLinear::Layer>>())
      .def("run", &ExpertLinear::run);
}

}  // namespace
}  // namespace flyball
