// The products of attention by matrix units.
#pragma once

#include "tile.h"

#if FLYBALL_AMX
namespace flyball {

static_assert(kAmxColumns == kLanes && kAmxStepBytes == 2 * kLanes * sizeof(c10::BFloat16));

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
