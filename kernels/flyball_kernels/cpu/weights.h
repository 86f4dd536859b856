// Memory for weights, which are read from end to end in every step. It lies in huge pages: a prefetcher stops where a page ends,
// and addresses of small pages take long to look up. Weights share pages, since most of a small model's are smaller than one.
#pragma once

#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>

#include "tensors.h"

namespace flyball {

class WeightMemory {
 public:
  // Whoever holds the result keeps its chunk.
  std::shared_ptr<char> take(int64_t bytes) {
    if (bytes > kChunkBytes / 4) return allocate(bytes);
    const std::lock_guard lock(mutex_);
    if (chunk_.use_count() == 1) {  // nobody else's any more
      std::atomic_thread_fence(std::memory_order_acquire);  // behind what they did with it
      used_ = 0;
    }
    if (!chunk_ || used_ + bytes > kChunkBytes) {
      chunk_ = allocate(kChunkBytes);
      used_ = 0;
    }
    char* const begin = chunk_.get() + used_;
    used_ += round_up(bytes, kLine);
    return {chunk_, begin};
  }

 private:
  static constexpr int64_t kLine = 64, kPage = 2 << 20, kChunkBytes = 64 << 20;  // what is never written takes no memory

  static std::shared_ptr<char> allocate(int64_t bytes) {
    const int64_t whole = round_up(bytes, kPage);
    void* const memory = std::aligned_alloc(kPage, whole);
    TORCH_CHECK(memory, "no memory for ", whole, " bytes of weights");
#if defined(MADV_HUGEPAGE)
    madvise(memory, whole, MADV_HUGEPAGE);  // a hint: failing is harmless
#endif
    return {static_cast<char*>(memory), std::free};
  }

  std::mutex mutex_;
  std::shared_ptr<char> chunk_;
  int64_t used_ = 0;
};

inline Tensor empty_weight(at::IntArrayRef sizes, const at::TensorOptions& options) {
#if defined(__SANITIZE_ADDRESS__)  // which sees where memory ends, if it is not shared
  return at::empty(sizes, options);
#else
  static WeightMemory memory;
  const std::shared_ptr<char> begin = memory.take(c10::multiply_integers(sizes) * options.dtype().itemsize());
  return at::from_blob(begin.get(), sizes, [begin](void*) {}, options);
#endif
}

}  // namespace flyball
