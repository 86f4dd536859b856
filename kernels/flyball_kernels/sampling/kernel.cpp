// Token sampling: each row by one thread, in an order that depends on the row alone.
#include <array>
#include <vector>

#include "../cpu/tensors.h"

namespace flyball {
namespace {

constexpr int64_t kNoToken = -1;
constexpr float kGreedyBelow = 1e-5f;  // GREEDY_BELOW of reference.py

struct Settings {
  float temperature, top_p, min_p;
  int64_t top_k, seed, position;

  bool is_greedy() const { return !(temperature >= kGreedyBelow); }
  bool ranks() const { return top_k > 0 || top_p < 1.0f; }
};

// SplitMix64's finaliser (Steele et al. 2014)
uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

double uniform(int64_t seed, int64_t position) {
  return (mix(mix(seed) + static_cast<uint64_t>(position)) >> 11) * 0x1p-53;
}

// The largest logit, or NaN where the logits give no distribution: one is NaN or +inf, or all are -inf.
float top_of(const float* x, int64_t n) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  Vec tops = splat(kNegInf);
  VecI below_inf = ~VecI{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec v = load(x + i);
    tops = max(tops, v);
    below_inf &= v < kInf;
  }
  float top = max(tops);
  bool valid = true;
  for (int lane = 0; lane < kLanes; ++lane) valid &= below_inf[lane] != 0;
  for (; i < n; ++i) {
    valid &= x[i] < kInf;
    top = std::max(top, x[i]);
  }
  return valid && top > kNegInf ? top : std::numeric_limits<float>::quiet_NaN();
}

// weights relative to the likeliest token's, which is 1 and stays; below min_p they are 0
void weigh_tokens(const float* logits, int64_t n, float top, const Settings& s, float* weights) {
  const float scale = kLog2e / s.temperature;
  const Vec least = splat(std::min(s.min_p, 1.0f));
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec weight = exp2((load_up_to(logits + i, n - i) - top) * scale);
    store_up_to(weights + i, weight < least ? Vec{} : weight, n - i);
  }
}

// Tokens by likelihood, the lower id first among equals; only as many as top_k and top_p can keep.
//
// Weights are counted by power of two first: the few largest classes that hold top_k tokens, or the mass that top_p
// asks for, are all that has to be sorted.
std::vector<int32_t> rank_tokens(const float* logits, const float* weights, int64_t n, const Settings& s) {
  constexpr int kClasses = 128;  // weights are at most 1, and those below 2**-126 are 0
  std::array<double, kClasses> mass{};
  std::array<int64_t, kClasses> count{};
  const auto class_of = [](float weight) {
    uint32_t bits;
    std::memcpy(&bits, &weight, sizeof(bits));
    return std::max<int32_t>(0, 127 - static_cast<int32_t>(bits >> 23));
  };
  double total = 0.0;
  for (int64_t i = 0; i < n; ++i) {
    if (weights[i] == 0.0f) continue;
    const int c = class_of(weights[i]);
    mass[c] += weights[i];
    count[c] += 1;
    total += weights[i];
  }
  int last = 0;
  double kept_mass = mass[0];
  for (int64_t kept = count[0]; last + 1 < kClasses; kept += count[last], kept_mass += mass[last]) {
    if (s.top_k > 0 ? kept >= s.top_k : kept_mass >= s.top_p * total) break;
    ++last;
  }
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < n; ++i)
    if (weights[i] != 0.0f && class_of(weights[i]) <= last) ids.push_back(i);
  const auto likelier = [&](int32_t a, int32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; };
  if (s.top_k > 0 && s.top_k < static_cast<int64_t>(ids.size())) {
    std::nth_element(ids.begin(), ids.begin() + s.top_k, ids.end(), likelier);
    ids.resize(s.top_k);
  }
  if (s.top_p < 1.0f) {
    std::sort(ids.begin(), ids.end(), likelier);
    if (s.top_k > 0) {
      total = 0.0;
      for (const int32_t id : ids) total += weights[id];
    }
    double before = 0.0;
    size_t kept = 0;
    while (kept < ids.size() && (kept == 0 || before < s.top_p * total)) before += weights[ids[kept++]];
    ids.resize(kept);
  }
  return ids;
}

// The first id, of those given in order, whose cumulative weight passes the target; the last with any weight if none does.
template <class Id>
int64_t scan(int64_t begin, int64_t end, Id id, const float* weights, double target) {
  double before = 0.0;
  int64_t last = id(begin);
  for (int64_t i = begin; i < end; ++i) {
    if (weights[id(i)] == 0.0f) continue;
    last = id(i);
    before += weights[last];
    if (before > target) break;
  }
  return last;
}

int64_t choose_among(std::vector<int32_t> ids, const float* weights, double u) {
  std::sort(ids.begin(), ids.end());
  double total = 0.0;
  for (const int32_t id : ids) total += weights[id];
  return scan(0, ids.size(), [&](int64_t i) { return ids[i]; }, weights, u * total);
}

float sum_of(const float* x, int64_t n) {
  Vec total{};
  for (int64_t i = 0; i < n; i += kLanes) total += load_up_to(x + i, n - i);
  return sum(total);
}

// As choose_among all ids, by blocks: first the block that passes the target, then the token in it.
int64_t choose(const float* weights, int64_t n, double u) {
  constexpr int64_t kBlock = 256;
  std::vector<float> sums;
  double total = 0.0;
  for (int64_t i = 0; i < n; i += kBlock) total += sums.emplace_back(sum_of(weights + i, std::min(kBlock, n - i)));
  const double target = u * total;
  double before = 0.0;
  size_t block = 0, used = 0;
  for (; block < sums.size(); before += sums[block++]) {
    if (sums[block] == 0.0f) continue;
    used = block;
    if (before + sums[block] > target) break;
  }
  if (block == sums.size()) before -= sums[used];  // rounding left the target past the end
  const int64_t begin = used * kBlock;
  return scan(begin, std::min(begin + kBlock, n), [](int64_t i) { return i; }, weights, target - before);
}

int64_t sample_row(const float* logits, int64_t n, const Settings& s, float* weights) {
  const float top = top_of(logits, n);
  if (std::isnan(top)) return kNoToken;
  if (s.is_greedy()) return std::find(logits, logits + n, top) - logits;
  weigh_tokens(logits, n, top, s, weights);
  const double u = uniform(s.seed, s.position);
  return s.ranks() ? choose_among(rank_tokens(logits, weights, n, s), weights, u) : choose(weights, n, u);
}

void check_setting(const char* name, const std::optional<Tensor>& setting, int64_t rows, at::ScalarType type) {
  if (!setting) return;
  check_shape(name, *setting, {rows});
  check_dtype(name, *setting, type);
}

template <class T>
T value_or(const std::optional<Tensor>& setting, int64_t row, T otherwise) {
  return setting.has_value() ? setting->data_ptr<T>()[row * setting->stride(0)] : otherwise;
}

Tensor sample(const Tensor& all_logits, const std::optional<Tensor>& temperature, const std::optional<Tensor>& top_k,
              const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p, const std::optional<Tensor>& seeds,
              const std::optional<Tensor>& positions) {
  struct Weights;
  check_shape("logits", all_logits, {-1, -1});
  check_dtype("logits", all_logits, at::kFloat);
  const Tensor logits = all_logits.contiguous();
  const int64_t rows = logits.size(0), n = logits.size(1);
  TORCH_CHECK_VALUE(n > 0, "logits has shape ", logits.sizes(), "; a row needs at least 1 logit.");
  check_setting("temperature", temperature, rows, at::kFloat);
  check_setting("top_p", top_p, rows, at::kFloat);
  check_setting("min_p", min_p, rows, at::kFloat);
  check_setting("top_k", top_k, rows, at::kLong);
  check_setting("seeds", seeds, rows, at::kLong);
  check_setting("positions", positions, rows, at::kLong);
  TORCH_CHECK_VALUE(!temperature || (seeds && positions), "rows with a temperature need seeds and positions.");
  Tensor ids = at::empty({rows}, at::kLong);
#pragma omp parallel for schedule(dynamic, 1) if (rows > 1 && rows * n > kParallelGrain)
  for (int64_t row = 0; row < rows; ++row) {
    const Settings settings{value_or(temperature, row, 0.0f), value_or(top_p, row, 1.0f),  value_or(min_p, row, 0.0f),
                            value_or<int64_t>(top_k, row, 0), value_or<int64_t>(seeds, row, 0),
                            value_or<int64_t>(positions, row, 0)};
    ids.data_ptr<int64_t>()[row] = sample_row(logits.data_ptr<float>() + row * n, n, settings, scratch<Weights>(n));
  }
  return ids;
}

TORCH_LIBRARY_FRAGMENT(flyball, m) {
  m.def(
      "sample(Tensor logits, Tensor? temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p, Tensor? seeds, "
      "Tensor? positions) -> Tensor");
  m.impl("sample", c10::DispatchKey::CPU, TORCH_FN(sample));
}

}  // namespace
}  // namespace flyball
