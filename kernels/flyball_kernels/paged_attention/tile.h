// Attention of a tile of query rows to a run of keys, with online softmax (Milakov and Gimelshein 2018; Dao et al. 2022).
//
// A row is one (token, query head); the rows of a tile share a KV head. Keys and values are read in place from the
// cache, through one pointer per token, so any block size will do. Operands are fp32, or pairs of bf16 for which the
// softmax weights are rounded to bf16, as in FlashAttention. Sums are fp32; scores are in base 2. Whole numbers of an int8
// cache are exact as either operand: scores are multiplied by the keys' scales, and weights by the values'.
#pragma once

#include <bit>
#include <tuple>
#include <utility>

#include "../cpu/dot.h"
#include "../cpu/kv_cache.h"
#include "../cpu/transpose.h"

namespace flyball {

constexpr int64_t kTileKeys = 64;
constexpr int64_t kQueryRows = 96;  // amortises packing a tile of keys
constexpr int64_t kFewRows = 8;     // up to here a tile reads the cache as it is, once per six rows

// How many features, or keys, an operand holds.
template <class E>
constexpr int64_t kDepth = std::is_same_v<E, Bf16Pair> ? 2 : 1;

// The vectors from there on.
template <size_t V, class Row, class T>
[[gnu::always_inline]] inline void load_all(Row (&row)[V], const T* from) {
#pragma GCC unroll 4
  for (size_t v = 0; v < V; ++v) row[v] = load(from + v * kLanes);
}

// c[r] += sum over j < k of a[r][j] * b[j], for R rows of V vectors; b(j, row) loads a row
template <int R, int V, class E, class B>
inline void multiply_add(const E* a, int64_t a_stride, int64_t k, B b, float* c, int64_t c_stride) {
  Vec acc[R][V];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[r][v] = load(c + r * c_stride + v * kLanes);
  for (int64_t j = 0; j < k; ++j) {
    decltype(splat(*a)) row[V];
    b(j, row);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[r][v] = add_product(acc[r][v], splat(a[r * a_stride + j]), row[v]);
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(c + r * c_stride + v * kLanes, acc[r][v]);
}

constexpr int kMaxR = 6, kMaxV = kRegisters / 8;  // what the registers hold: kMaxR * kMaxV sums, kMaxV of b and one of a

// Not inlined: GCC 12 would keep some of the sums in memory.
template <int R, int V, class B>
[[gnu::noinline]] void multiply_add_pairs(const Bf16Pair* a, int64_t a_stride, int64_t k, B b, float* c, int64_t c_stride) {
  multiply_add<R, V>(a, a_stride, k, b, c, c_stride);
}

// The same for up to R rows.
template <int V, int R = kMaxR, class E, class B>
inline void multiply_add_strip(int64_t rows, const E* a, int64_t a_stride, int64_t k, B b, float* c, int64_t c_stride) {
  if (rows == R) {
    if constexpr (kDepth<E> > 1) return multiply_add_pairs<R, V>(a, a_stride, k, b, c, c_stride);
    else return multiply_add<R, V>(a, a_stride, k, b, c, c_stride);
  }
  if constexpr (R > 1) multiply_add_strip<V, R - 1>(rows, a, a_stride, k, b, c, c_stride);
}

// Calls f(row, height) for strips of equal height, of at most kMaxR rows.
template <class F>
inline void for_each_strip(int64_t rows, F f) {
  const int64_t num_strips = (rows + kMaxR - 1) / kMaxR;
  for (int64_t s = 0; s < num_strips; ++s) {
    const int64_t row = s * rows / num_strips;
    f(row, (s + 1) * rows / num_strips - row);
  }
}

// Calls f<V>(i) for V vectors from element i on, as many as the registers hold, through [begin, end).
template <class F>
inline void for_each_vectors(int64_t begin, int64_t end, F f) {
  const auto call = [&]<int V>(std::integral_constant<int, V>) {
    f.template operator()<V>(begin);
    begin += V * kLanes;
  };
  while (begin < end) {
    if (end - begin >= kMaxV * kLanes) call(std::integral_constant<int, kMaxV>());
    else if (end - begin >= 2 * kLanes) call(std::integral_constant<int, 2>());
    else call(std::integral_constant<int, 1>());
  }
}

// Into the second cache: a tile of 128 features may not fit into the first beside what is being read there. Inlined at any
// rate: a function that only prefetches does nothing in GCC's eyes, so that it removes the call.
[[gnu::always_inline]] inline void prefetch_line(const void* from) { __builtin_prefetch(from, /*rw=*/0, /*locality=*/2); }

template <int64_t N, class T>
[[gnu::always_inline]] inline void prefetch(const T* from) {
#pragma GCC unroll 8
  for (int64_t i = 0; i < N; i += 64 / sizeof(T)) prefetch_line(from + i);
}

// Scales of a tile's keys and values in an int8 cache; other caches have none.
template <class C>
struct Scales {};

template <>
struct Scales<int8_t> {
  float keys[kTileKeys], values[kTileKeys];

  // Takes over those of n tokens, the i-th and following ones of the tile.
  void read(int64_t i, int64_t n, const int8_t* of_keys, const int8_t* of_values) {
    std::memcpy(keys + i, of_keys, n * sizeof(float));
    std::memcpy(values + i, of_values, n * sizeof(float));
  }
  void fill_last_vector(int64_t size) {
    std::fill(keys + size, keys + round_up(size, kLanes), 0.0f);
    std::fill(values + size, values + round_up(size, kLanes), 0.0f);
  }
};

// The keys [start, end) of a KV head: where each token's key and value are. Those of the next heads follow.
template <class C>
struct KeyTile {
  int64_t start, end;
  const C* keys[kTileKeys];
  const C* values[kTileKeys];

  int64_t size() const { return end - start; }
};

// What is fetched while a head is visited: its share of a tile's keys or values of all heads of the task (a power of two), in
// the order of memory.
template <class C>
class Coming {
 public:
  Coming(const C* const* vectors, int64_t num_vectors, int64_t num_heads, int64_t head, int64_t head_dim)
      : vectors_(vectors), shift_(std::countr_zero(static_cast<uint64_t>(num_heads))), first_(head * kTileKeys),
        last_((num_vectors << shift_) - 1), head_dim_(head_dim) {}

  const C* at(int64_t j) const {
    const int64_t i = std::min(first_ + j, last_);
    return vectors_[i >> shift_] + (i & ((1 << shift_) - 1)) * head_dim_;
  }

 private:
  const C* const* vectors_;
  int64_t shift_, first_, last_, head_dim_;
};

// Memory of one tile; dim is head_dim rounded up to whole vectors, padded with zeros. Scores are those of a strip, or of all
// rows if the cache is read directly; the weights that they become take their place.
template <class E>
struct Workspace {
  int64_t dim;
  float *out, *max, *sum, *scores;
  E *query, *keys, *values, *weights;

  static int64_t num_floats(int64_t rows, int64_t dim) { return rows * (2 * dim + 2 + kTileKeys) + 2 * dim * kTileKeys; }

  Workspace(float* memory, int64_t rows, int64_t dim) : dim(dim) {
    const auto take = [&](int64_t n) { return std::exchange(memory, memory + n); };
    keys = reinterpret_cast<E*>(take(dim * kTileKeys));
    values = reinterpret_cast<E*>(take(dim * kTileKeys));
    scores = take(rows * kTileKeys);
    weights = reinterpret_cast<E*>(scores);
    query = reinterpret_cast<E*>(take(rows * dim));
    out = take(rows * dim);
    max = take(rows);
    sum = take(rows);
  }

  void reset(int64_t rows) const {
    std::fill_n(out, rows * dim, 0.0f);
    std::fill_n(max, rows, kNegInf);
    std::fill_n(sum, rows, 0.0f);
  }
};

// kLanes operands of a key in the cache
template <class E, class T>
inline auto load_key(const T* from) {
  if constexpr (kDepth<E> == 1) return load(from);
  else return load_raw<VecU>(from);
}

// Fetches so many elements of each key.
template <class C>
inline void fetch_keys(const KeyTile<C>& tile, int64_t num_elements) {
  for (int64_t i = 0; i < tile.size(); ++i)
    for (int64_t d = 0; d < num_elements; d += 64 / sizeof(C)) prefetch_line(tile.keys[i] + d);
}

// Scores of R rows, straight from the cache, where the keys begin `at` the tile's. Dim is known at compile time for
// the common head sizes, so that the loop over it is unrolled; 0 stands for any other.
template <int R, int64_t Dim, class T, class E>
inline void score_few(const KeyTile<T>& tile, int64_t at, const Coming<T>& coming, const E* query, int64_t any_dim,
                      float* scores) {
  const int64_t dim = Dim ? Dim : any_dim;
  for (int64_t first = 0; first < tile.size(); first += kLanes) {
    Vec partial[R][kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
      const int64_t j = std::min(first + i, tile.size() - 1);
      const T *key = tile.keys[j] + at, *next = coming.at(j);
      Vec acc[R] = {};
#pragma GCC unroll 8
      for (int64_t d = 0; d < dim; d += kLanes * kDepth<E>) {
        if (d * sizeof(T) % 64 == 0) prefetch_line(next + d);
        const auto k = load_key<E>(key + d);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[r] = add_product(acc[r], k, load(query + r * dim + d / kDepth<E>));
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) partial[r][i] = acc[r];
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store(scores + r * kTileKeys + first, sum_each(partial[r]));
  }
}

template <class T, class E, int R = kFewRows>
inline void score_few_rows(int64_t rows, const KeyTile<T>& tile, int64_t at, const Coming<T>& coming, const E* query,
                           int64_t dim, float* scores) {
  if (rows == R) {
    if (dim == 64) return score_few<R, 64>(tile, at, coming, query, dim, scores);
    if (dim == 128) return score_few<R, 128>(tile, at, coming, query, dim, scores);
    return score_few<R, 0>(tile, at, coming, query, dim, scores);
  }
  if constexpr (R > 1) score_few_rows<T, E, R - 1>(rows, tile, at, coming, query, dim, scores);
}

// Sums of a row from the order of `interleave` to that of the features.
inline void restore_order(float* out, int64_t dim) {
  constexpr int64_t kRun = 2 * kLanes;
  for (int64_t d = 0; d < dim; d += kRun) {
    float sums[kRun];
    std::memcpy(sums, out + d, sizeof(sums));
    for (int64_t i = 0; i < kRun; i += 4) std::memcpy(out + d + i, sums + i % 8 / 4 * kLanes + i / 8 * 4, 4 * sizeof(float));
  }
}

// kLanes operands from an element of the query or the cache on, of which n are left
template <class E, class T>
inline Vec load_operands(const T* from, int64_t n) {
  if constexpr (kDepth<E> == 1) {
    return load_up_to(from, n);
  } else {
    if constexpr (kIsInt8<T>) return join(load_up_to(from, n), n > kLanes ? load_up_to(from + kLanes, n - kLanes) : Vec{});
    if (n >= 2 * kLanes) return load_raw<Vec>(from);
    T padded[2 * kLanes] = {};
    std::memcpy(padded, from, n * sizeof(T));
    return load_raw<Vec>(padded);
  }
}

// keys of the tile -> [dim / depth, kTileKeys]
template <class T, class E>
inline void pack_keys(const KeyTile<T>& tile, int64_t head_dim, E* packed) {
  for (int64_t first = 0; first < tile.size(); first += kLanes) {
    for (int64_t d = 0; d < head_dim; d += kLanes * kDepth<E>) {
      Vec block[kLanes];
      for (int64_t i = 0; i < kLanes; ++i)
        block[i] = load_operands<E>(tile.keys[std::min(first + i, tile.size() - 1)] + d, head_dim - d);
      transpose(block);
      for (int64_t i = 0; i < kLanes; ++i) store(packed + (d / kDepth<E> + i) * kTileKeys + first, block[i]);
    }
  }
}

// values of the tile -> [kTileKeys / depth, dim]; a last one that has no partner is paired with zeros
template <class T, class E>
inline void pack_values(const KeyTile<T>& tile, int64_t head_dim, int64_t dim, E* packed) {
  for (int64_t j = 0; j < tile.size(); j += kDepth<E>) {
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      const auto value = [&](int64_t i) { return i < tile.size() ? load_up_to(tile.values[i] + d, head_dim - d) : Vec{}; };
      E* to = packed + j / kDepth<E> * dim + d;
      if constexpr (kDepth<E> == 1) store(to, value(j));
      else store(to, pair_up(value(j), value(j + 1)));
    }
  }
}

// Scores of a strip of rows for the keys [begin, end) of the tile; begin is that of a vector.
template <class E>
inline void score_strip(const Workspace<E>& work, int64_t row, int64_t height, int64_t begin, int64_t end) {
  for (int64_t i = 0; i < height; ++i) std::fill_n(work.scores + i * kTileKeys + begin, round_up(end - begin, kLanes), 0.0f);
  for_each_vectors(begin, end, [&]<int V>(int64_t first) {
    const auto key = [&](int64_t d, auto& row) { load_all(row, work.keys + d * kTileKeys + first); };
    multiply_add_strip<V>(height, work.query + row * work.dim, work.dim, work.dim / kDepth<E>, key, work.scores + first,
                          kTileKeys);
  });
}

// out += weights * values, for the operands [begin, end) of the rows' weights; value(j, d, vectors) loads the
// j-th ones' elements from d on
template <class E, class F>
inline void weigh(const Workspace<E>& work, int64_t row, int64_t rows, int64_t slot, int64_t begin, int64_t end, F value) {
  for_each_vectors(0, work.dim, [&]<int V>(int64_t d) {
    const auto from = [&](int64_t j, auto& vectors) { value(begin + j, d, vectors); };
    for_each_strip(rows, [&](int64_t i, int64_t height) {
      multiply_add_strip<V>(height, work.weights + (slot + i) * kTileKeys + begin, kTileKeys, end - begin, from,
                            work.out + (row + i) * work.dim + d, work.dim);
    });
  });
}

// scores = bound * tanh(scores)
inline void bound_row(float* scores, int64_t begin, int64_t end, float bound) {
  for (int64_t j = begin; j < end; j += kLanes) store(scores + j, bound * tanh(load(scores + j)));
}

inline void scale_row(float* scores, int64_t begin, int64_t end, float scale) {
  for (int64_t j = begin; j < end; j += kLanes) store(scores + j, load(scores + j) * scale);
}

inline void scale_row(float* scores, int64_t begin, int64_t end, const float* scales) {
  for (int64_t j = begin; j < end; j += kLanes) store(scores + j, load(scores + j) * load(scales + j));
}

// Stores kLanes weights from the j-th on, rounded if they are pairs, and returns what it stored.
template <class E>
inline Vec store_weights(E* weights, int64_t j, Vec weight) {
  if constexpr (kDepth<E> == 1) {
    store(weights + j, weight);
    return weight;
  } else {
    return store_rounded(reinterpret_cast<c10::BFloat16*>(weights) + j, weight);
  }
}

template <class E, class C>
inline Vec store_weights(E* weights, int64_t j, Vec weight, const Scales<C>&) {
  return store_weights(weights, j, weight);
}

// The same for an int8 cache: what is stored, and rounded, are the products with the values' scales.
template <class E>
inline Vec store_weights(E* weights, int64_t j, Vec weight, const Scales<int8_t>& scales) {
  const Vec scale = load(scales.values + j), stored = store_weights(weights, j, weight * scale);
  if constexpr (kDepth<E> == 1) return weight;
  else return scale > 0.0f ? stored / scale : weight;
}

// Turns scores of the row, in the slot-th row of the scores, into weights relative to its new maximum, and scales what was
// summed before to it. Keys outside [first, last) are hidden from the row, and so is what fills the last vector.
template <class E, class C>
inline void soften_row(const Workspace<E>& work, const Scales<C>& scales, int64_t row, int64_t slot, int64_t first, int64_t last,
                       int64_t begin, int64_t end) {
  float* scores = work.scores + slot * kTileKeys;
  E* weights = work.weights + slot * kTileKeys;
  const int64_t stop = begin + round_up(end - begin, kLanes);
  std::fill(scores + begin, scores + std::clamp(first, begin, stop), kNegInf);
  std::fill(scores + std::clamp(last, begin, end), scores + stop, kNegInf);
  Vec top = splat(work.max[row]), total{};
  for (int64_t j = begin; j < stop; j += kLanes) top = flyball::max(top, load(scores + j));
  const float new_max = flyball::max(top);
  if (new_max == kNegInf) {  // the row sees none of the keys so far
    for (int64_t j = begin; j < stop; j += kLanes) store_weights(weights, j, Vec{});
    return;
  }
  for (int64_t j = begin; j < stop; j += kLanes)
    total += store_weights(weights, j, exp2(load(scores + j) - new_max), scales);
  if (new_max != work.max[row]) {
    const float correction = exp2(splat(work.max[row] - new_max))[0];
    for (int64_t d = 0; d < work.dim; d += kLanes) {
      float* out = work.out + row * work.dim + d;
      store(out, load(out) * correction);
    }
    work.sum[row] *= correction;
    work.max[row] = new_max;
  }
  work.sum[row] += flyball::sum(total);
}

}  // namespace flyball
