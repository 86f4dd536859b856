// Token sampling: each row by one thread, in an order that depends on the row alone.
#include <algorithm>
#include <array>
#include <functional>
#include <vector>

#include "../cpu/works.h"
#include "sample.h"

namespace flyball {
namespace {

using Settings = SamplingSettings;

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

struct Top {
  float logit;
  int32_t id;

  // Whether it comes before another one: the lower id of equals does.
  bool beats(const Top& other) const { return logit > other.logit || (logit == other.logit && id < other.id); }
};

// The likeliest token, of a logit that is NaN where the logits give no distribution: one is NaN or +inf, or all are -inf.
template <class T>
Top top_of(const T* x, int64_t n) {
  constexpr int64_t kChains = 4, kStep = kChains * kLanes;  // chains, since each comparison waits for the one before it
  constexpr float kInf = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();
  Vec logits[kChains];
  VecI firsts[kChains] = {}, below_inf = ~VecI{};  // firsts: where the vectors begin that a chain's logits are of
  std::fill_n(logits, kChains, splat(kNegInf));
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    for (int64_t c = 0; c < kChains; ++c) {
      const Vec v = load(x + i + c * kLanes);
      const VecI is_above = v > logits[c];
      logits[c] = is_above ? v : logits[c];
      firsts[c] = is_above ? VecI{} + static_cast<int32_t>(i + c * kLanes) : firsts[c];
      below_inf &= v < kInf;
    }
  }
  bool is_valid = fold(below_inf, [](auto a, auto b) { return a & b; }) != 0;
  Top top{kNegInf, 0};
  const auto compare = [&](Top other) { top = other.beats(top) ? other : top; };
  for (int64_t c = 0; c < kChains; ++c)
    for (int lane = 0; lane < kLanes; ++lane) compare({logits[c][lane], firsts[c][lane] + lane});
  for (; i < n; ++i) {
    const auto logit = static_cast<float>(x[i]);
    is_valid &= logit < kInf;
    compare({logit, static_cast<int32_t>(i)});
  }
  return is_valid && top.logit > kNegInf ? top : Top{kNaN, 0};
}

constexpr int64_t kBlock = 256;  // tokens that are looked at together

// weights relative to the likeliest token's, which is 1 and stays; below min_p they are 0
void weigh_tokens(const float* logits, int64_t n, float top, const Settings& s, float* weights) {
  const float scale = kLog2e / s.temperature;
  const Vec least = splat(std::min(s.min_p, 1.0f));
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec weight = exp2((load_up_to(logits + i, n - i) - top) * scale);
    store_up_to(weights + i, weight < least ? Vec{} : weight, n - i);
  }
}

// Appends the tokens of [begin, end) that weigh something and at least so much, in their order.
void append_heavier(const float* weights, int64_t begin, int64_t end, float least, std::vector<int32_t>& ids) {
  for (int64_t i = begin; i < end; i += kLanes) {
    const Vec weight = load_up_to(weights + i, end - i);
    const VecI is_heavy = (weight >= splat(least)) & (weight > Vec{});
    if (fold(is_heavy, [](auto a, auto b) { return a | b; }) == 0) continue;
    size_t num = ids.size();
    ids.resize(num + kLanes);
    for (int64_t lane = 0; lane < kLanes; ++lane) {  // without a branch, which nobody could predict
      ids[num] = static_cast<int32_t>(i + lane);
      num -= is_heavy[lane];
    }
    ids.resize(num);
  }
}

// Returns, in their order, some tokens among which are the k likeliest ones. Each of k blocks has a token that weighs at least as
// much as the k-th of the blocks' heaviest tokens; so do the k likeliest tokens of all, then.
std::vector<int32_t> heaviest(const float* weights, int64_t n, int64_t k) {
  constexpr int64_t kBlocksOfOne = 8;  // so that few others weigh as much
  const int64_t width = std::max(kLanes, n / kBlocksOfOne / std::min(k, n) / kLanes * kLanes);
  std::vector<float> tops;
  tops.reserve(n / width + 1);
  for (int64_t begin = 0; begin < n; begin += width) {
    const int64_t end = std::min(n, begin + width);
    Vec top{};
    for (int64_t i = begin; i < end; i += kLanes) top = max(top, load_up_to(weights + i, end - i));
    tops.push_back(max(top));
  }
  float least = 0.0f;
  if (k <= static_cast<int64_t>(tops.size())) {
    std::vector<float> ordered = tops;
    std::nth_element(ordered.begin(), ordered.begin() + (k - 1), ordered.end(), std::greater<>());
    least = ordered[k - 1];
  }
  std::vector<int32_t> ids;
  for (size_t block = 0; block < tops.size(); ++block) {
    const int64_t begin = static_cast<int64_t>(block) * width;
    if (tops[block] >= least) append_heavier(weights, begin, std::min(n, begin + width), least, ids);
  }
  return ids;
}

double sum_of_all(const float* weights, int64_t n) {
  constexpr int64_t kStep = kLanes / 2;  // as many of 64 bits as a register holds
  typedef float Narrow __attribute__((vector_size(4 * kStep)));
  typedef double Wide __attribute__((vector_size(8 * kStep)));
  Wide sums{};
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) sums += __builtin_convertvector(load_raw<Narrow>(weights + i), Wide);
  double total = 0.0;
  for (int64_t lane = 0; lane < kStep; ++lane) total += sums[lane];
  for (; i < n; ++i) total += weights[i];
  return total;
}

// Returns, in their order, the tokens that weigh at least 2**-i, for the first i with which they hold more than the wanted mass; all
// tokens if there is no such i. Each pass tries several. Masses have 32 bits here, and kSurely is far more than they can be off.
std::vector<int32_t> with_mass(const float* weights, int64_t n, double wanted) {
  constexpr int kPowers = 6;
  constexpr double kSurely = 1.001;
  std::vector<int32_t> ids;
  float least = 0.0f;
  for (int power = 2; least == 0.0f && power < 120; power += kPowers) {
    std::array<double, kPowers> masses{};
    std::array<Vec, kPowers> powers;
    for (int j = 0; j < kPowers; ++j) powers[j] = splat(std::ldexp(1.0f, -power - j));
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      std::array<Vec, kPowers> sums{};
      for (int64_t i = begin, end = std::min(n, begin + kBlock); i < end; i += kLanes) {
        const Vec weight = load_up_to(weights + i, end - i);
#pragma GCC unroll 6
        for (int j = 0; j < kPowers; ++j) sums[j] += weight >= powers[j] ? weight : Vec{};
      }
      for (int j = 0; j < kPowers; ++j) masses[j] += sum(sums[j]);
    }
    for (int j = kPowers - 1; j >= 0; --j)
      if (masses[j] >= kSurely * wanted) least = powers[j][0];
  }
  append_heavier(weights, 0, n, least, ids);
  return ids;
}

// Adds up masses from the likeliest tokens on, and returns those among which the wanted one is reached, and in `before` the mass of
// likelier ones. All that are returned have the same exponent in their weights, and the same 8 bits behind it.
std::vector<int32_t> about_share(const std::vector<int32_t>& ids, const float* weights, double wanted, double& before) {
  const auto class_of = [&](int32_t id) {
    uint32_t bits;
    std::memcpy(&bits, weights + id, sizeof(bits));
    return static_cast<size_t>((0x3f800000 - bits) >> 15);  // weights are at most 1
  };
  std::vector<double> masses;
  for (const int32_t id : ids) {
    const size_t of = class_of(id);
    if (of >= masses.size()) masses.resize(of + 1);
    masses[of] += weights[id];
  }
  size_t reached = 0;
  while (reached + 1 < masses.size() && before + masses[reached] < wanted) before += masses[reached++];
  std::vector<int32_t> found;
  for (const int32_t id : ids)
    if (class_of(id) == reached) found.push_back(id);
  return found;
}

// Keeps the fewest of the likeliest tokens that hold the wanted mass, in their order. Each round parts in two those among which it
// is reached, and goes on with the half in which that is so.
template <class Likelier>
void keep_mass(std::vector<int32_t>& ids, const float* weights, double wanted, Likelier likelier) {
  double before = 0.0;  // of the tokens that are likelier than all left
  std::vector<int32_t> left = about_share(ids, weights, wanted, before);
  auto begin = left.begin(), end = left.end();
  while (end - begin > 1) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, likelier);
    double mass = before;
    for (auto id = begin; id < middle; ++id) mass += weights[*id];
    if (mass < wanted) before = mass, begin = middle;
    else end = middle;
  }
  if (begin == left.end()) return;
  std::erase_if(ids, [&, last = *begin](int32_t id) { return likelier(last, id); });
}

// The tokens that top_k and top_p keep, in their order; the lower id is the likelier one among equals.
std::vector<int32_t> keep_tokens(const float* logits, const float* weights, int64_t n, const Settings& s) {
  const auto likelier = [&](int32_t a, int32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; };
  if (s.top_k <= 0) {
    const double wanted = s.top_p * sum_of_all(weights, n);
    std::vector<int32_t> ids = with_mass(weights, n, wanted);
    keep_mass(ids, weights, wanted, likelier);
    return ids;
  }
  std::vector<int32_t> ids = heaviest(weights, n, s.top_k);
  if (s.top_k < static_cast<int64_t>(ids.size())) {
    std::vector<int32_t> ordered = ids;
    std::nth_element(ordered.begin(), ordered.begin() + (s.top_k - 1), ordered.end(), likelier);
    std::erase_if(ids, [&, last = ordered[s.top_k - 1]](int32_t id) { return likelier(last, id); });
  }
  if (s.top_p < 1.0f) {
    double total = 0.0;
    for (const int32_t id : ids) total += weights[id];
    keep_mass(ids, weights, s.top_p * total, likelier);
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

int64_t choose_among(const std::vector<int32_t>& ids, const float* weights, double u) {
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

// x in fp32: itself, or a copy in memory of so many floats.
inline const float* widened(const float* x, int64_t, float* (*)(int64_t)) { return x; }

template <class T>
const float* widened(const T* x, int64_t n, float* (*memory)(int64_t)) {
  float* const wide = memory(n);
  for (int64_t i = 0; i < n; i += kLanes) store_up_to(wide + i, load_up_to(x + i, n - i), n - i);
  return wide;
}

template <class T>
int64_t sample_row(const T* row, int64_t n, const Settings& s) {
  struct Weights;
  struct Logits;
  const Top top = top_of(row, n);
  if (std::isnan(top.logit)) return kNoToken;
  if (s.is_greedy()) return top.id;
  float* const weights = scratch<Weights>(n);
  const float* const logits = widened(row, n, scratch<Logits>);
  weigh_tokens(logits, n, top.logit, s, weights);
  const double u = uniform(s.seed, s.position);
  return s.ranks() ? choose_among(keep_tokens(logits, weights, n, s), weights, u) : choose(weights, n, u);
}

void check_setting(const char* name, const OptionalTensor& setting, int64_t rows, at::ScalarType type) {
  if (!setting) return;
  check_shape(name, *setting, {rows});
  check_dtype(name, *setting, type);
}

template <class T>
T value_or(const OptionalTensor& setting, int64_t row, T otherwise) {
  return setting.has_value() ? setting->data_ptr<T>()[row * setting->stride(0)] : otherwise;
}

Tensor sample(const Tensor& all_logits, const OptionalTensor& temperature, const OptionalTensor& top_k, const OptionalTensor& top_p,
              const OptionalTensor& min_p, const OptionalTensor& seeds, const OptionalTensor& positions) {
  check_shape("logits", all_logits, {-1, -1});
  check_dtype("logits", all_logits, {at::kFloat, at::kBFloat16, at::kHalf});
  const Tensor logits = all_logits.contiguous();
  const int64_t rows = logits.size(0), n = logits.size(1);
  TORCH_CHECK_VALUE(n > 0, "logits has shape ", logits.sizes(), "; a row needs at least 1 logit.");
  const SamplingTensors settings{temperature, top_k, top_p, min_p, seeds};
  settings.check(rows);
  check_setting("positions", positions, rows, at::kLong);
  TORCH_CHECK_VALUE(!temperature || positions, "rows with a temperature need seeds and positions.");
  Tensor ids = at::empty({rows}, at::kLong);
  dispatch(logits, "sample", [&]<class T>(T*) {
#pragma omp parallel for schedule(dynamic, 1) if (rows > 1 && rows * n > kParallelGrain)
    for (int64_t row = 0; row < rows; ++row)
      ids.data_ptr<int64_t>()[row] =
          sample_row(data<const T>(logits) + row * n, n, settings.of_row(row, value_or<int64_t>(positions, row, 0)));
  });
  return ids;
}

TORCH_LIBRARY_FRAGMENT(flyball, m) {
  m.def(
      "sample(Tensor logits, Tensor? temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p, Tensor? seeds, "
      "Tensor? positions) -> Tensor");
  m.impl("sample", c10::DispatchKey::CPU, TORCH_FN(sample));
}

}  // namespace

void SamplingTensors::check(int64_t rows) const {
  check_setting("temperature", temperature, rows, at::kFloat);
  check_setting("top_p", top_p, rows, at::kFloat);
  check_setting("min_p", min_p, rows, at::kFloat);
  check_setting("top_k", top_k, rows, at::kLong);
  check_setting("seeds", seeds, rows, at::kLong);
  TORCH_CHECK_VALUE(!temperature || seeds, "rows with a temperature need seeds and positions.");
}

SamplingSettings SamplingTensors::of_row(int64_t row, int64_t position) const {
  return {value_or(temperature, row, 0.0f), value_or(top_p, row, 1.0f), value_or(min_p, row, 0.0f),
          value_or<int64_t>(top_k, row, 0), value_or<int64_t>(seeds, row, 0), position};
}

Work sample_work(const Tensor& logits, std::vector<SamplingSettings> settings, int64_t* token_ids) {
  Work work;
  dispatch(logits, "sample", [&]<class T>(T*) {
    work.run = [rows = data<const T>(logits), n = logits.size(1), settings = std::move(settings), token_ids](const Team& team,
                                                                                                             float*) {
      team.share(settings.size(), [&](int64_t row) { token_ids[row] = sample_row(rows + row * n, n, settings[row]); });
    };
  });
  return work;
}

}  // namespace flyball
