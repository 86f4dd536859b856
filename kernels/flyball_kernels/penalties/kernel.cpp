// Penalties on tokens that a sequence has already: work grows with the history, not with the vocabulary.
#include <vector>

#include "../cpu/tensors.h"

namespace flyball {
namespace {

struct Penalties {
  float repetition, presence, frequency;

  float apply(float logit, float count) const {
    logit = logit > 0.0f ? logit / repetition : logit * repetition;
    return count > 0.0f ? logit - frequency * count - presence : logit;
  }
};

// counts has an entry per token of the vocabulary; only those of the history are touched.
void penalize_row(float* logits, const int32_t* history, int64_t num_prompt_tokens, int64_t num_tokens,
                  const Penalties& penalties, float* counts) {
  constexpr float kDone = -1.0f;
  for (int64_t i = 0; i < num_tokens; ++i) counts[history[i]] = 0.0f;
  for (int64_t i = num_prompt_tokens; i < num_tokens; ++i) counts[history[i]] += 1.0f;
  for (int64_t i = 0; i < num_tokens; ++i) {
    const int32_t id = history[i];
    if (counts[id] == kDone) continue;
    logits[id] = penalties.apply(logits[id], counts[id]);
    counts[id] = kDone;
  }
}

void penalize(Tensor logits, at::IntArrayRef rows, at::TensorList histories, at::IntArrayRef num_prompt_tokens,
              at::ArrayRef<double> repetition, at::ArrayRef<double> presence, at::ArrayRef<double> frequency) {
  struct Counts;
  const int64_t vocab = logits.size(1), num_rows = rows.size();
  int64_t num_tokens = 0;
  for (const Tensor& history : histories) {
    check_below("history", data<const int32_t>(history), history.numel(), vocab);
    num_tokens += history.numel();
  }
  float* all_logits = data<float>(logits);
#pragma omp parallel for schedule(dynamic, 1) if (num_rows > 1 && num_tokens > kParallelGrain)
  for (int64_t i = 0; i < num_rows; ++i) {
    const Penalties penalties{static_cast<float>(repetition[i]), static_cast<float>(presence[i]),
                              static_cast<float>(frequency[i])};
    penalize_row(all_logits + rows[i] * vocab, data<const int32_t>(histories[i]), num_prompt_tokens[i],
                 histories[i].numel(), penalties, scratch<Counts>(vocab));
  }
}

TORCH_LIBRARY_FRAGMENT(flyball, m) {
  m.def(
      "penalize(Tensor(a!) logits, int[] rows, Tensor[] histories, int[] num_prompt_tokens, float[] repetition, "
      "float[] presence, float[] frequency) -> ()");
  m.impl("penalize", c10::DispatchKey::CPU, TORCH_FN(penalize));
}

}  // namespace
}  // namespace flyball
