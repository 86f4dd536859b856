// Attention of a tile of query rows to a run of keys, with online softmax (Milakov and Gimelshein 2018; Dao et al. 2022).
//
// A row is one (token, query head); the rows of a tile share a KV head. Keys and values are read in place from the
// cache, through one pointer per token, so any block size will do. All arithmetic is fp32; scores are in base 2.
#pragma once

#include "../cpu/transpose.h"

namespace flyball {

constexpr int64_t kTileKeys = 64;
constexpr int64_t kQueryRows = 96;  // amortises converting and transposing a tile of keys
constexpr int64_t kFewRows = 8;    // up to here a tile reads the cache as it is, once per six rows

// c[r] += sum over j < k of a[r][j] * b(j), for R rows of V vectors; b returns a pointer to a row
template <int R, int V, class B>
inline void multiply_add(const float* a, int64_t a_stride, int64_t k, B b, float* c, int64_t c_stride) {
  Vec acc[R][V];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[r][v] = load(c + r * c_stride + v * kLanes);
  for (int64_t j = 0; j < k; ++j) {
    const auto* from = b(j);
    Vec row[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) row[v] = load(from + v * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[r][v] += splat(a[r * a_stride + j]) * row[v];
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(c + r * c_stride + v * kLanes, acc[r][v]);
}

constexpr int kMaxR = 6, kMaxV = kRegisters / 8;  // what the registers hold: kMaxR * kMaxV sums, kMaxV of b and one of a

// The same for any number of rows, in strips of equal height.
template <int V, int R = kMaxR, class B>
inline void multiply_add_strip(int64_t rows, const float* a, int64_t a_stride, int64_t k, B b, float* c, int64_t c_stride) {
  if (rows == R) return multiply_add<R, V>(a, a_stride, k, b, c, c_stride);
  if constexpr (R > 1) multiply_add_strip<V, R - 1>(rows, a, a_stride, k, b, c, c_stride);
}

template <int V, class B>
inline void multiply_add_rows(int64_t rows, const float* a, int64_t a_stride, int64_t k, B b, float* c, int64_t c_stride) {
  const int64_t num_strips = (rows + kMaxR - 1) / kMaxR;
  for (int64_t s = 0; s < num_strips; ++s) {
    const int64_t row = s * rows / num_strips, height = (s + 1) * rows / num_strips - row;
    multiply_add_strip<V>(height, a + row * a_stride, a_stride, k, b, c + row * c_stride, c_stride);
  }
}

template <int64_t N, class T>
inline void prefetch(const T* from) {
#pragma GCC unroll 8
  for (int64_t i = 0; i < N; i += 64 / sizeof(T)) __builtin_prefetch(from + i);
}

// The keys [start, end) of one KV head: where each token's key and value are.
template <class T>
struct KeyTile {
  int64_t start, end;
  const T* keys[kTileKeys];
  const T* values[kTileKeys];

  int64_t size() const { return end - start; }
};

// Memory of one tile; dim is head_dim rounded up to whole vectors, padded with zeros.
struct Workspace {
  int64_t dim;
  float *query, *out, *scores, *keys, *values, *max, *sum;

  static int64_t num_floats(int64_t rows, int64_t dim) { return rows * (2 * dim + kTileKeys + 2) + 2 * kTileKeys * dim; }

  Workspace(float* memory, int64_t rows, int64_t dim) : dim(dim) {
    query = memory;
    out = query + rows * dim;
    scores = out + rows * dim;
    keys = scores + rows * kTileKeys;
    values = keys + dim * kTileKeys;
    max = values + dim * kTileKeys;
    sum = max + rows;
  }

  void reset(int64_t rows) {
    std::fill_n(out, rows * dim, 0.0f);
    std::fill_n(max, rows, kNegInf);
    std::fill_n(sum, rows, 0.0f);
  }
};

// Scores of R rows, straight from the cache; the tile's values are fetched meanwhile. Dim is known at compile time for
// the common head sizes, so that the loop over it is unrolled; 0 stands for any other.
template <int R, int64_t Dim, class T>
inline void score_few(const KeyTile<T>& tile, const float* query, int64_t any_dim, float* scores) {
  const int64_t dim = Dim ? Dim : any_dim;
  for (int64_t first = 0; first < tile.size(); first += kLanes) {
    Vec partial[R][kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
      const int64_t j = std::min(first + i, tile.size() - 1);
      const T* key = tile.keys[j];
      Vec acc[R] = {};
#pragma GCC unroll 8
      for (int64_t d = 0; d < dim; d += kLanes) {
        if (d * sizeof(T) % 64 == 0) __builtin_prefetch(tile.values[j] + d);
        const Vec k = load(key + d);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[r] += k * load(query + r * dim + d);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) partial[r][i] = acc[r];
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store(scores + r * kTileKeys + first, sum_each(partial[r]));
  }
}

template <class T, int R = kFewRows>
inline void score_few_rows(int64_t rows, const KeyTile<T>& tile, const float* query, int64_t dim, float* scores) {
  if (rows == R) {
    if (dim == 64) return score_few<R, 64>(tile, query, dim, scores);
    if (dim == 128) return score_few<R, 128>(tile, query, dim, scores);
    return score_few<R, 0>(tile, query, dim, scores);
  }
  if constexpr (R > 1) score_few_rows<T, R - 1>(rows, tile, query, dim, scores);
}

// keys of the tile -> [dim, kTileKeys] fp32
template <class T>
inline void pack_keys(const KeyTile<T>& tile, int64_t head_dim, float* packed) {
  for (int64_t first = 0; first < tile.size(); first += kLanes) {
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      Vec block[kLanes];
      for (int64_t i = 0; i < kLanes; ++i)
        block[i] = load_up_to(tile.keys[std::min(first + i, tile.size() - 1)] + d, head_dim - d);
      transpose(block);
      for (int64_t i = 0; i < kLanes; ++i) store(packed + (d + i) * kTileKeys + first, block[i]);
    }
  }
}

// values of the tile -> [kTileKeys, dim] fp32
template <class T>
inline void pack_values(const KeyTile<T>& tile, int64_t head_dim, int64_t dim, float* packed) {
  for (int64_t j = 0; j < tile.size(); ++j)
    for (int64_t d = 0; d < head_dim; d += kLanes)
      store(packed + j * dim + d, load_up_to(tile.values[j] + d, head_dim - d));
}

inline void score_many(const Workspace& work, int64_t rows) {
  std::fill_n(work.scores, rows * kTileKeys, 0.0f);
  for (int64_t first = 0; first < kTileKeys; first += kMaxV * kLanes) {
    const auto key = [&](int64_t d) { return work.keys + d * kTileKeys + first; };
    multiply_add_rows<kMaxV>(rows, work.query, work.dim, work.dim, key, work.scores + first, kTileKeys);
  }
}

// out += weights * values; value<V>(j, d) points to the j-th value's elements from d on, of which V vectors are read
template <class F>
inline void weigh(const Workspace& work, int64_t rows, int64_t num_keys, F value) {
  for (int64_t d = 0; d < work.dim;) {
    const auto add = [&]<int V>(std::integral_constant<int, V>) {
      const auto at = [&](int64_t j) { return value.template operator()<V>(j, d); };
      multiply_add_rows<V>(rows, work.scores, kTileKeys, num_keys, at, work.out + d, work.dim);
      d += V * kLanes;
    };
    if (work.dim - d >= kMaxV * kLanes) add(std::integral_constant<int, kMaxV>());
    else if (work.dim - d >= 2 * kLanes) add(std::integral_constant<int, 2>());
    else add(std::integral_constant<int, 1>());
  }
}

// scores = bound * tanh(scores)
inline void bound_row(const Workspace& work, int64_t row, int64_t num_keys, float bound) {
  float* scores = work.scores + row * kTileKeys;
  for (int64_t j = 0; j < round_up(num_keys, kLanes); j += kLanes) store(scores + j, bound * tanh(load(scores + j)));
}

// Turns the row's scores into weights relative to its new maximum, and scales what was summed before to it.
// Keys outside [first, last) are hidden from the row, and so is what fills the last vector.
inline void soften_row(const Workspace& work, int64_t row, int64_t first, int64_t last, int64_t num_keys) {
  float* scores = work.scores + row * kTileKeys;
  const int64_t width = round_up(num_keys, kLanes);
  std::fill(scores, scores + std::clamp<int64_t>(first, 0, width), kNegInf);
  std::fill(scores + std::clamp<int64_t>(last, 0, num_keys), scores + width, kNegInf);
  Vec top = splat(work.max[row]), total{};
  for (int64_t j = 0; j < width; j += kLanes) top = flyball::max(top, load(scores + j));
  const float new_max = flyball::max(top);
  if (new_max == kNegInf) {  // the row sees none of the keys so far
    std::fill_n(scores, width, 0.0f);
    return;
  }
  for (int64_t j = 0; j < width; j += kLanes) {
    const Vec weight = exp2(load(scores + j) - new_max);
    store(scores + j, weight);
    total += weight;
  }
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
