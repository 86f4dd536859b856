// The products of attention by matrix units.
#pragma once

#include "tile.h"

#if FLYBALL_AMX
namespace flyball {

static_assert(kAmxColumns == kLanes && kAmxStepBytes == 2 * kLanes * sizeof(c10::BFloat16));

// The first of the keys that are multiplied together with the begin-th.
inline int64_t step_of(int64_t begin) { return begin / kTogether * kTogether; }

// Rows of operands that are missing from whole steps become zeros: the keys' last features, values of keys that are not there.
inline void pad_keys(int64_t num_operands, Bf16Pair* packed) {
  std::memset(packed + num_operands * kTileKeys, 0, (round_up(num_operands, kLanes) - num_operands) * kTileKeys * sizeof(*packed));
}

inline void pad_values(int64_t begin, int64_t end, int64_t dim, Bf16Pair* packed) {
  const int64_t first = step_of(begin) / 2, next = (end + 1) / 2;
  std::memset(packed + first * dim, 0, (begin / 2 - first) * dim * sizeof(*packed));
  std::memset(packed + next * dim, 0, (round_up(end, kTogether) / 2 - next) * dim * sizeof(*packed));
}

// Scores of a strip of rows for the keys of whole steps from begin to end; keys(v) is where the operands of a vector of keys are, of
// which one row follows the other after so many bytes. fetch(v, step) may prefetch.
template <class F, class G>
inline void score_by_tiles(const Workspace<Bf16Pair>& work, int64_t row, int64_t height, int64_t num_operands, int64_t begin,
                           int64_t end, int64_t key_bytes, F keys, G fetch) {
  const int64_t row_bytes = work.dim * sizeof(Bf16Pair);
  const AmxOperand query{work.query + row * work.dim, row_bytes, kAmxRows * row_bytes, kAmxStepBytes};
  for (int64_t j = begin; j < end; j += kTogether) {
    const char *first = keys(j / kLanes), *second = keys(j / kLanes + 1);
    amx_multiply<AmxBf16>(height > kAmxRows, j + kLanes < end, query, {first, key_bytes, second - first, kLanes * key_bytes},
                          round_up(num_operands, kLanes) / kLanes, false, work.scores + j, kTileKeys,
                          [&](int64_t step) { fetch(j / kLanes, step); });
  }
}

// 2**x for weights, which will be rounded to 8 bits: at most 2**-18 of it off. Below -149 it is 0. The polynomial is 2**f on
// [-0.5, 0.5], with the least relative error that its degree can have.
inline Vec exp2_of_weights(Vec x) {
  x = max(x, splat(-200.0f));  // -inf has no fraction
  const Vec whole = (Vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec f = x - whole;
  Vec p = splat(9.57010221e-3f);
  p = p * f + 5.59178591e-2f;
  p = p * f + 2.40247443e-1f;
  p = p * f + 6.93121791e-1f;
  p = p * f + 9.99999285e-1f;
  return (Vec)_mm512_scalef_ps((__m512)p, (__m512)whole);
}

// As soften_row, for the keys of whole steps from begin to end. What scores are multiplied by to be in base 2 is positive.
inline void soften_row_by_tiles(const Workspace<Bf16Pair>& work, float factor, int64_t row, int64_t slot, int64_t first,
                                int64_t last, int64_t begin, int64_t end) {
  float* scores = work.scores + slot * kTileKeys;
  auto* weights = reinterpret_cast<c10::BFloat16*>(work.weights + slot * kTileKeys);
  const Sums sums = work.run.row(row, work.dim);
  const int64_t stop = round_up(end, kTogether);
  std::fill(scores + begin, scores + std::clamp(first, begin, stop), kNegInf);
  std::fill(scores + std::clamp(last, begin, end), scores + stop, kNegInf);
  Vec top = splat(kNegInf), total{};
  for (int64_t j = begin; j < stop; j += kLanes) top = max(top, load(scores + j));
  const float new_max = std::max(*sums.max, max(top) * factor);
  if (new_max == kNegInf) {  // the row sees none of the keys so far
    std::memset(weights + begin, 0, (stop - begin) * sizeof(*weights));
    return;
  }
  for (int64_t j = begin; j < stop; j += kTogether) {
    const Vec low = exp2_of_weights(load(scores + j) * factor - new_max);
    const Vec high = exp2_of_weights(load(scores + j + kLanes) * factor - new_max);
    const VecU pairs = (VecU)(__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    std::memcpy(weights + j, &pairs, sizeof(pairs));
    total = add_product(total, pairs, VecU{} + 0x3f803f80u);  // ones
  }
  if (new_max != *sums.max) {
    const float correction = exp2(splat(*sums.max - new_max))[0];
    for (int64_t d = 0; d < work.dim; d += kLanes) store(sums.out + d, load(sums.out + d) * correction);
    *sums.sum *= correction;
    *sums.max = new_max;
  }
  *sums.sum += sum(total);
}

// out += weights * values, for the keys of whole steps from begin to end
inline void weigh_by_tiles(const Workspace<Bf16Pair>& work, int64_t row, int64_t height, int64_t begin, int64_t end) {
  constexpr int64_t kWeightBytes = kTileKeys * sizeof(Bf16Pair);
  const int64_t value_bytes = work.dim * sizeof(Bf16Pair);
  const AmxOperand weights{work.weights + begin / 2, kWeightBytes, kAmxRows * kWeightBytes, kAmxStepBytes};
  for (int64_t d = 0; d < work.dim; d += 2 * kAmxColumns) {
    const AmxOperand values{work.values + begin / 2 * work.dim + d, value_bytes, kAmxStepBytes, kLanes * value_bytes};
    amx_multiply<AmxBf16>(height > kAmxRows, d + kAmxColumns < work.dim, weights, values, (end - begin + kTogether - 1) / kTogether,
                          true, work.run.out + row * work.dim + d, work.dim, [](int64_t) {});
  }
}

}  // namespace flyball
#endif
