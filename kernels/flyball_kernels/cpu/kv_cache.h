// The paged KV cache as the ops address it, in the order of bytes that kv_cache.py describes.
//
// Its elements are those of the model, or int8. In a block, each KV head has its keys, or values, together. Values lie one
// vector after the other. Keys lie feature by feature, so that a vector register holds a feature of as many tokens, and
// features of bf16 in pairs, as the bf16 dot product takes them. A block of int8 has its scales behind its vectors, fp32
// [num_kv_heads, block_size].
#pragma once

#include <type_traits>

#include "tensors.h"

namespace flyball {

template <class C>
constexpr bool kIsInt8 = std::is_same_v<std::remove_const_t<C>, int8_t>;
template <class C>
constexpr bool kIsBf16 = std::is_same_v<std::remove_const_t<C>, c10::BFloat16>;

inline bool is_int8(const Tensor& cache) { return cache.scalar_type() == at::kChar; }

// The size of a head, given the cache of its keys or values as the ops take it, [num_blocks, block_size, num_kv_heads, ...].
inline int64_t head_dim_of(const Tensor& cache) {
  return cache.size(3) - (is_int8(cache) ? static_cast<int64_t>(sizeof(float)) : 0);
}

template <class C>
struct KVCache {
  C* data;
  int64_t block_size, num_kv_heads, head_dim;

  int64_t block_numel() const {
    return block_size * num_kv_heads * (head_dim + (kIsInt8<C> ? static_cast<int64_t>(sizeof(float)) : 0));
  }
  // How many features of a key lie side by side.
  int64_t depth() const { return kIsBf16<C> && head_dim % 2 == 0 ? 2 : 1; }

  // A token's first features, in a cache of keys; the next ones are key_stride() behind them.
  C* key(int64_t block, int64_t offset, int64_t head) const { return of_head(block, head) + offset * depth(); }
  int64_t key_stride() const { return block_size * depth(); }

  // A token's vector, in a cache of values; that of the next token follows, until the block ends.
  C* value(int64_t block, int64_t offset, int64_t head) const { return of_head(block, head) + offset * head_dim; }

  // Where the bytes of a token's scale are; those of the next token follow.
  C* scale(int64_t block, int64_t offset, int64_t head) const
    requires kIsInt8<C>
  {
    return of_head(block, num_kv_heads) + (head * block_size + offset) * static_cast<int64_t>(sizeof(float));
  }

  void write_key(int64_t block, int64_t offset, int64_t head, const C* vector) const {
    C* to = key(block, offset, head);
    const int64_t stride = key_stride();
    if (depth() == 2) {
      for (int64_t d = 0; d < head_dim; d += 2, to += stride) std::memcpy(to, vector + d, 2 * sizeof(C));
    } else {
      for (int64_t d = 0; d < head_dim; ++d, to += stride) *to = vector[d];
    }
  }
  void write_value(int64_t block, int64_t offset, int64_t head, const C* vector) const {
    std::copy(vector, vector + head_dim, value(block, offset, head));
  }

 private:
  C* of_head(int64_t block, int64_t head) const { return data + block * block_numel() + head * block_size * head_dim; }
};

}  // namespace flyball
