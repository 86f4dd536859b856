// Bans by bitmask. Most words of a mask are all ones or all zeros, so whole words are looked at first.
#include <limits>

#include "../cpu/tensors.h"

namespace flyball {
namespace {

constexpr int64_t kBits = 32;
constexpr float kBanned = -std::numeric_limits<float>::infinity();

void ban_word(float* logits, uint32_t word, int64_t num_tokens) {
  if (word == ~uint32_t{0}) return;
  for (int64_t bit = 0; bit < num_tokens; ++bit) {
    if (!(word >> bit & 1)) logits[bit] = kBanned;
  }
}

void apply_token_bitmask(Tensor logits, const Tensor& bitmask, at::IntArrayRef rows) {
  const int64_t vocab = logits.size(1), num_rows = rows.size(), stride = bitmask.size(1);
  const int64_t num_words = (vocab + kBits - 1) / kBits;
  float* all_logits = data<float>(logits);
  const int32_t* words = data<const int32_t>(bitmask);
#pragma omp parallel for schedule(static) if (num_rows > 1 && num_rows * vocab > kParallelGrain)
  for (int64_t i = 0; i < num_rows; ++i) {
    float* row = all_logits + rows[i] * vocab;
    for (int64_t word = 0; word < num_words; ++word) {
      const int64_t first = word * kBits;
      ban_word(row + first, static_cast<uint32_t>(words[i * stride + word]), std::min(kBits, vocab - first));
    }
  }
}

TORCH_LIBRARY_FRAGMENT(flyball, m) {
  m.def("apply_token_bitmask(Tensor(a!) logits, Tensor bitmask, int[] rows) -> ()");
  m.impl("apply_token_bitmask", c10::DispatchKey::CPU, TORCH_FN(apply_token_bitmask));
}

}  // namespace
}  // namespace flyball
