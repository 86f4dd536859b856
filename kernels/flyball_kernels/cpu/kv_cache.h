// The paged KV cache as the ops address it.
//
// Its elements are those of the model, or int8. A block of int8 holds its vectors as whole numbers,
// [block_size, num_kv_heads, head_dim], and behind them their scales, fp32 [num_kv_heads, block_size]: its bytes are all
// that there is to it, wherever they are copied.
#pragma once

#include <type_traits>

#include "tensors.h"

namespace flyball {

template <class C>
constexpr bool kIsInt8 = std::is_same_v<std::remove_const_t<C>, int8_t>;

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
  // The vector of a token in a head; that of the next token is token_stride() behind it, until the block ends.
  C* vector(int64_t block, int64_t offset, int64_t head) const {
    return data + block * block_numel() + (offset * num_kv_heads + head) * head_dim;
  }
  int64_t token_stride() const { return num_kv_heads * head_dim; }
  // Where the bytes of its scale are; those of the next token follow.
  C* scale(int64_t block, int64_t offset, int64_t head) const
    requires kIsInt8<C>
  {
    return vector(block, block_size, 0) + (head * block_size + offset) * static_cast<int64_t>(sizeof(float));
  }
};

}  // namespace flyball
