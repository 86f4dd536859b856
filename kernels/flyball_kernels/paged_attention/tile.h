// Attention of a tile of query rows to a run of keys, with online softmax (Milakov and Gimelshein 2018; Dao et al. 2022).
//
// A row is one (token, query head); the rows of a tile share a KV head. Operands are fp32, or pairs of bf16 for which the
// softmax weights are rounded to bf16, as in FlashAttention. Sums are fp32; scores are in base 2. Whole numbers of an int8
// cache are exact as either operand: scores are multiplied by the keys' scales, and weights by the values'.
//
// A score is a sum over the features from the first to the last, and an output one over the keys, in tiles and runs of tiles
// that begin at multiples of their size. So a row has the same bits whichever rows are computed with it.
#pragma once

#include <bit>
#include <tuple>
#include <utility>

#include "../cpu/amx.h"
#include "../cpu/dot.h"
#include "../cpu/kv_cache.h"

namespace flyball {

constexpr int64_t kTileKeys = 64, kRunKeys = 512;  // of a tile, and of a run of tiles
constexpr int64_t kQueryRows = 96;                  // amortises packing a tile of keys
constexpr int64_t kFewRows = 8;  // up to here operands are made from the cache when they are used, and not packed before
constexpr int64_t kLineBytes = 64;  // of a cache line
constexpr int64_t kNoEnd = std::numeric_limits<int32_t>::max();  // rows of a run that has all of them
static_assert(kRunKeys % kTileKeys == 0 && kTileKeys % kLanes == 0);

// How many features, or keys, an operand holds.
template <class E>
constexpr int64_t kDepth = std::is_same_v<E, Bf16Pair> ? 2 : 1;

// The vectors from there on.
template <size_t V, class Row, class T>
[[gnu::always_inline]] inline void load_all(Row (&row)[V], const T* from) {
#pragma GCC unroll 4
  for (size_t v = 0; v < V; ++v) row[v] = load(from + v * kLanes);
}

// c[r] += sum over j < k of a[r][j] * b[j], for R rows of V vectors. B says how many rows of b are a run: b.run(j) is the one that
// begins with the j-th, and its load(i, s, row) loads the s-th of its i-th S rows. Not inlined: GCC 12 would keep some of the sums
// in memory, as it would if all S rows were loaded before the first is used.
template <int R, int V, int S, class E, class B>
[[gnu::noinline]] void multiply_add(const E* a, int64_t a_stride, int64_t k, const B& b, float* c, int64_t c_stride) {
  Vec acc[R][V];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[r][v] = load(c + r * c_stride + v * kLanes);
  for (int64_t start = 0; start < k; start += B::kRun) {
    const auto& run = b.run(start);
    const E* const from = a + start;
    const int64_t num_steps = (std::min(k - start, B::kRun) + S - 1) / S;
#pragma GCC unroll 1
    for (int64_t i = 0; i < num_steps; ++i) {
#pragma GCC unroll 2
      for (int s = 0; s < S; ++s) {
        decltype(splat(*a)) row[V];
        run.load(i, s, row);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) acc[r][v] = add_product(acc[r][v], splat(from[r * a_stride + S * i + s]), row[v]);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(c + r * c_stride + v * kLanes, acc[r][v]);
}

constexpr int kMaxR = 6, kMaxV = kRegisters / 8;  // what the registers hold: kMaxR * kMaxV sums, kMaxV of b and one of a
constexpr int kWideRows = kMaxV < 4 ? 2 : 0, kWideV = 4;  // of so few rows more vectors, or each addition waits for the one before
#if FLYBALL_AMX
constexpr int64_t kStripRows = 2 * kAmxRows;  // at most
#else
constexpr int64_t kStripRows = kMaxR;
#endif

// The same for up to R rows.
template <int V, int S, int R = V <= kMaxV ? kMaxR : kWideRows, class E, class B>
inline void multiply_add_strip(int64_t rows, const E* a, int64_t a_stride, int64_t k, const B& b, float* c, int64_t c_stride) {
  if (rows == R) return multiply_add<R, V, S>(a, a_stride, k, b, c, c_stride);
  if constexpr (R > 1) multiply_add_strip<V, S, R - 1>(rows, a, a_stride, k, b, c, c_stride);
}

// Calls f(row, height) for strips of equal height, of at most so many rows.
template <class F>
inline void for_each_strip(int64_t rows, int64_t most, F f) {
  const int64_t num_strips = (rows + most - 1) / most;
  for (int64_t s = 0; s < num_strips; ++s) {
    const int64_t row = s * rows / num_strips;
    f(row, (s + 1) * rows / num_strips - row);
  }
}

// Calls f<V>(i) for V vectors from element i on, as many as the registers hold for so many rows, through [begin, end).
template <class F>
inline void for_each_vectors(int64_t rows, int64_t begin, int64_t end, F f) {
  const auto call = [&]<int V>(std::integral_constant<int, V>) {
    f.template operator()<V>(begin);
    begin += V * kLanes;
  };
  while (begin < end) {
    if (rows <= kWideRows && end - begin >= kWideV * kLanes) call(std::integral_constant<int, kWideV>());
    else if (end - begin >= kMaxV * kLanes) call(std::integral_constant<int, kMaxV>());
    else if (end - begin >= 2 * kLanes) call(std::integral_constant<int, 2>());
    else call(std::integral_constant<int, 1>());
  }
}

// Into the second cache: blocks lie scattered, so that no prefetcher of the CPU runs ahead, and a core has few lines on their way to
// the first at a time. Inlined at any rate: a function that only prefetches does nothing in GCC's eyes, so that it removes the call.
[[gnu::always_inline]] inline void prefetch_line(const void* from) { __builtin_prefetch(from, 0, 2); }

constexpr int64_t kTogether = 2 * kLanes;  // keys of a step of matrix units

// The first of the keys that are multiplied together with the begin-th.
inline int64_t step_of(int64_t begin) { return begin / kTogether * kTogether; }

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
  // Of keys that are not there, beside others.
  void reset(int64_t begin, int64_t end) {
    begin = step_of(begin);
    std::fill(keys + begin, keys + round_up(end, kTogether), 0.0f);
    std::fill(values + begin, values + round_up(end, kTogether), 0.0f);
  }
};

// Keys of a sequence and a KV head, in vectors of kLanes: those of [begin, end), counted from a multiple of kTileKeys; begin is
// that of a vector. Vectors that are not there have the pointers of those next to them, so that all can be fetched.
template <class C>
struct KeyTile {
  int64_t start = 0, begin = 0, end = 0;
  int64_t head_dim = 0, head_numel = 0;      // elements of a key, and of all keys of a KV head in a block
  int64_t key_stride = 0;                    // elements from a row of keys to the next; a row has a feature, or a pair
  const C* keys[kTileKeys / kLanes] = {};    // where the first row of each vector is
  const C* values[kTileKeys / kLanes] = {};  // where its first value is; the others follow

  bool empty() const { return begin >= end; }
  // The same keys of the i-th KV head from here on, in blocks that hold whole vectors.
  KeyTile of_head(int64_t i) const {
    KeyTile tile = *this;
    for (auto* vectors : {tile.keys, tile.values})
      for (int64_t v = 0; v < kTileKeys / kLanes; ++v) vectors[v] += i * head_numel;
    return tile;
  }
  const C* value(int64_t j) const { return values[j / kLanes] + j % kLanes * head_dim; }
};

// What rows have summed up: values times their weights, and the weights, relative to the largest score (in base 2).
struct Sums {
  float *out, *max, *sum;

  void reset(int64_t rows, int64_t dim) const {
    std::fill_n(out, rows * dim, 0.0f);
    std::fill_n(max, rows, kNegInf);
    std::fill_n(sum, rows, 0.0f);
  }
  Sums row(int64_t row, int64_t dim) const { return {out + row * dim, max + row, sum + row}; }
};

// Adds what a run of keys came to for a row. Not inlined: a compiler could fuse the products differently in each place.
[[gnu::noinline]] inline void absorb(const Sums& whole, const Sums& run, int64_t dim) {
  if (*run.max == kNegInf) return;  // the row sees none of its keys
  if (*whole.max == kNegInf) {
    std::copy(run.out, run.out + dim, whole.out);
    *whole.max = *run.max;
    *whole.sum = *run.sum;
    return;
  }
  const float top = std::max(*whole.max, *run.max);
  const float ours = exp2(splat(*whole.max - top))[0], theirs = exp2(splat(*run.max - top))[0];
  for (int64_t d = 0; d < dim; d += kLanes)
    store(whole.out + d, load(whole.out + d) * ours + load(run.out + d) * theirs);
  *whole.max = top;
  *whole.sum = *whole.sum * ours + *run.sum * theirs;
}

// Memory of one tile; dim is head_dim rounded up to whole vectors, padded with zeros. Scores are those of a strip; the weights
// that they become take their place.
template <class E>
struct Workspace {
  int64_t dim;
  Sums run, whole;
  float* scores;
  E *query, *keys, *values, *weights;
  float *block_keys, *block_values;  // of a tile that was copied out of its blocks

  // That of the rows from one on.
  Workspace from_row(int64_t row) const {
    Workspace rest = *this;
    rest.query += row * dim;
    rest.run = run.row(row, dim);
    rest.whole = whole.row(row, dim);
    return rest;
  }

  static int64_t num_floats(int64_t rows, int64_t dim) { return rows * (3 * dim + 4) + kStripRows * kTileKeys + 4 * dim * kTileKeys; }

  Workspace(float* memory, int64_t rows, int64_t dim) : dim(dim) {
    const auto take = [&](int64_t n) { return std::exchange(memory, memory + n); };
    keys = reinterpret_cast<E*>(take(dim * kTileKeys));
    values = reinterpret_cast<E*>(take(dim * kTileKeys));
    block_keys = take(dim * kTileKeys);
    block_values = take(dim * kTileKeys);
    scores = take(kStripRows * kTileKeys);
    weights = reinterpret_cast<E*>(scores);
    query = reinterpret_cast<E*>(take(rows * dim));
    for (Sums* sums : {&run, &whole}) *sums = {take(rows * dim), take(rows), take(rows)};
  }
};

// Operands that were packed, a row of them `stride` behind the other.
template <class E>
struct PackedRows {
  static constexpr int64_t kRun = kNoEnd;
  const E* from;
  int64_t stride;

  const PackedRows& run(int64_t) const { return *this; }

  template <class Row, size_t V>
  [[gnu::always_inline]] void load(int64_t i, int, Row (&row)[V]) const {
    load_all(row, from + i * stride);
  }
};

// How many rows of operands a row of keys in the cache makes: pairs of bf16 are two of fp32.
template <class E, class C>
constexpr int kRowsOfKeys = kDepth<E> == 1 && kIsBf16<C> ? 2 : 1;

// How many rows of keys in the cache make a row of operands.
template <class E, class C>
constexpr int kKeyRowsOfOne = kDepth<E> > 1 && !kIsBf16<C> ? 2 : 1;

// Operands of V vectors of keys: the s-th row of the i-th S, where keys[v] is where the first row of keys is.
template <class E, class C, size_t V, class Row>
[[gnu::always_inline]] inline void load_keys(const C* const (&keys)[V], int64_t stride, int64_t i, int s, Row (&row)[V]) {
#pragma GCC unroll 4
  for (size_t v = 0; v < V; ++v) {
    const C* from = keys[v] + kKeyRowsOfOne<E, C> * i * stride;
    if constexpr (kIsBf16<C> && kDepth<E> > 1) row[v] = load_raw<VecU>(from);
    else if constexpr (kIsBf16<C>) row[v] = s == 0 ? first_of(load_raw<VecU>(from)) : second_of(load_raw<VecU>(from));
    else if constexpr (kDepth<E> == 1) row[v] = load(from);
    else row[v] = pair_up(load(from), load(from + stride));
  }
}

// Keys as they are in the cache. Those of the coming tile are fetched meanwhile, each line once: in a block of 16 tokens, rows of
// keys that are shorter than a line follow each other, and kVectorsOfLine vectors of a longer one are in a line.
template <class E, class C, int V>
struct CachedKeys {
  static constexpr int64_t kRun = kNoEnd;
  static constexpr int64_t kVectorsOfLine =
      std::clamp<int64_t>(kLineBytes / (kLanes * (kIsBf16<C> ? 2 : 1) * sizeof(C)), 1, 16 / kLanes);
  const C *keys[V], *coming[V];
  int64_t stride;
  uint32_t steps_of_line;  // a power of two
  bool fetches;

  CachedKeys(const KeyTile<C>& tile, const KeyTile<C>& next, int64_t first, bool fetches) : stride(tile.key_stride), fetches(fetches) {
    std::copy_n(tile.keys + first, V, keys);
    std::copy_n((fetches ? next : tile).keys + first, V, coming);
    const uint32_t step_bytes = kKeyRowsOfOne<E, C> * stride * sizeof(C);
    steps_of_line = std::bit_floor(std::max<uint32_t>(1, kLineBytes / step_bytes));
  }
  const CachedKeys& run(int64_t) const { return *this; }

  template <class Row>
  [[gnu::always_inline]] void load(int64_t i, int s, Row (&row)[V]) const {
    if (s == 0 && fetches && (i & (steps_of_line - 1)) == 0) {
#pragma GCC unroll 4
      for (int v = 0; v < V; v += kVectorsOfLine) prefetch_line(coming[v] + kKeyRowsOfOne<E, C> * i * stride);
    }
    load_keys<E>(keys, stride, i, s, row);
  }
};

// Whether operands of values are made of whole registers of the cache, which leaves the features of a register in another order:
// that of `interleave` in pairs of keys, and otherwise the even ones before the odd ones.
template <class C>
constexpr bool kReorders = kIsBf16<C>;

// Operands of V vectors of features: of a key's values, or of those of two keys.
template <class E, class C, size_t V, class Row>
[[gnu::always_inline]] inline void load_values(const C* first, const C* second, Row (&row)[V]) {
  if constexpr (kReorders<C>) {
    if constexpr (V % 2 == 0) {  // features are read directly if they make an even number of vectors
#pragma GCC unroll 4
      for (size_t v = 0; v < V; v += 2) {
        const VecU pairs = load_raw<VecU>(first + v * kLanes);
        if constexpr (kDepth<E> > 1) std::tie(row[v], row[v + 1]) = interleave(pairs, load_raw<VecU>(second + v * kLanes));
        else std::tie(row[v], row[v + 1]) = std::pair(first_of(pairs), second_of(pairs));
      }
    }
  } else if constexpr (kDepth<E> == 1) {
    load_all(row, first);
  } else {
#pragma GCC unroll 4
    for (size_t v = 0; v < V; ++v) row[v] = pair_up(load(first + v * kLanes), load(second + v * kLanes));
  }
}

// Values as they are in the cache, V vectors of features from one on; a run is a vector of keys. The values of the coming tile are
// fetched meanwhile, as many bytes as are loaded, but in the order of their addresses, which CPUs are best at.
template <class E, class C, int V>
struct CachedValues {
  static constexpr int64_t kRun = kLanes / kDepth<E>;
  const KeyTile<C> &tile, &coming;
  int64_t first, feature;  // the first operand, that of a vector
  bool fetches;

  struct Run {
    const C *values, *coming;
    int64_t stride, last;  // the last key
    bool fetches;

    template <class Row>
    [[gnu::always_inline]] void load(int64_t i, int, Row (&row)[V]) const {
      constexpr uint64_t kStep = kDepth<E> * V * kLanes, kLine = kLineBytes / sizeof(C);
      const int64_t key = kDepth<E> * i;
      if (fetches && i * kStep % kLine == 0) {
#pragma GCC unroll 8
        for (uint64_t e = 0; e < kStep; e += kLine) prefetch_line(coming + i * kStep + e);
      }
      load_values<E>(values + key * stride, values + std::min(key + kDepth<E> - 1, last) * stride, row);
    }
  };

  Run run(int64_t start) const {
    const int64_t vector = (first + start) / kRun;
    const uint32_t numel = kLanes * tile.head_dim;                               // of a vector of keys
    const uint32_t place = feature * kTileKeys + vector * kLanes * V * kLanes;  // so many elements have been loaded
    return {tile.values[vector] + feature, (fetches ? coming : tile).values[place / numel] + place % numel, tile.head_dim,
            tile.end - 1 - vector * kLanes, fetches};
  }
};

// Has the CPU look up where in memory a tile's blocks are, before all of it is fetched: a block of a large cache is in a page of its
// own, and what is fetched meanwhile would wait.
template <class C>
[[gnu::always_inline]] inline void fetch_addresses(const KeyTile<C>& tile) {
  for (int64_t v = 0; v < kTileKeys / kLanes; v += 16 / kLanes) {
    prefetch_line(tile.keys[v]);
    prefetch_line(tile.values[v]);
  }
}

// The first values of such a tile, before a softmax, in which nothing is loaded from the cache. With more lines it takes longer.
template <class C>
[[gnu::always_inline]] inline void fetch_first_values(const KeyTile<C>& tile) {
  constexpr int64_t kLines = 16, kStep = kLineBytes / sizeof(C);
  for (int64_t i = 0, n = std::min(kLines * kStep, kLanes * tile.head_dim); i < n; i += kStep) prefetch_line(tile.values[0] + i);
}

// Of the j-th and the next key of such a tile.
template <class C>
[[gnu::always_inline]] inline void fetch_values(const KeyTile<C>& tile, int64_t j) {
  for (const C* from : {tile.value(j), tile.value(j + 1)})
    for (int64_t d = 0; d < tile.head_dim; d += kLineBytes / sizeof(C)) prefetch_line(from + d);
}

// Sums of a row from the order of such operands to that of the features.
template <class E>
inline void restore_order(float* out, int64_t dim) {
  constexpr int64_t kRun = 2 * kLanes;
#if defined(__AVX512BF16__)
  if constexpr (kDepth<E> > 1) {
    const VecI low{0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
    for (int64_t d = 0; d < dim; d += kRun) {
      const __m512 first = (__m512)load(out + d), second = (__m512)load(out + d + kLanes);
      store(out + d, (Vec)_mm512_permutex2var_ps(first, (__m512i)low, second));
      store(out + d + kLanes, (Vec)_mm512_permutex2var_ps(first, (__m512i)(low + 8), second));
    }
    return;
  }
#endif
  for (int64_t d = 0; d < dim; d += kRun) {
    float sums[kRun];
    std::memcpy(sums, out + d, sizeof(sums));
    for (int64_t i = 0; i < kRun; ++i) out[d + i] = sums[kDepth<E> > 1 ? i % 8 / 4 * kLanes + i / 8 * 4 + i % 4 : i % 2 * kLanes + i / 2];
  }
}

// kLanes operands from an element of the query on, of which n are left
template <class E, class T>
inline Vec load_operands(const T* from, int64_t n) {
  if constexpr (kDepth<E> == 1) return load_up_to(from, n);
  if (n >= 2 * kLanes) return load_raw<Vec>(from);
  T padded[2 * kLanes] = {};
  std::memcpy(padded, from, n * sizeof(T));
  return load_raw<Vec>(padded);
}

// keys of the tile -> [dim / depth, kTileKeys]
template <class E, class C>
inline void pack_keys(const KeyTile<C>& tile, int64_t num_operands, E* packed) {
  constexpr int S = kRowsOfKeys<E, C>;
  for (int64_t first = tile.begin; first < tile.end; first += kLanes) {
    const C* const keys[] = {tile.keys[first / kLanes]};
    for (int64_t i = 0; i < num_operands; ++i) {
      decltype(load(packed)) row[1];
      load_keys<E>(keys, tile.key_stride, i / S, i % S, row);
      store(packed + i * kTileKeys + first, row[0]);
    }
  }
}

// The same where features do not come in pairs: their number is odd, so a row of keys has one, and the last pair a 0.
template <class E, class C>
inline void pack_keys_of_odd_size(const KeyTile<C>& tile, int64_t num_operands, E* packed) {
  for (int64_t first = tile.begin; first < tile.end; first += kLanes) {
    const auto feature = [&](int64_t d) {
      return d < tile.head_dim ? load(tile.keys[first / kLanes] + d * tile.key_stride) : Vec{};
    };
    for (int64_t i = 0; i < num_operands; ++i) {
      E* to = packed + i * kTileKeys + first;
      if constexpr (kDepth<E> == 1) store(to, feature(i));
      else store(to, pair_up(feature(2 * i), feature(2 * i + 1)));
    }
  }
}

// values of the tile -> [kTileKeys / depth, dim], in the order of `load_values` if they may be read so; fetch(j) may
// prefetch
template <class E, class C, class F>
inline void pack_values(const KeyTile<C>& tile, bool directly, int64_t dim, E* packed, F fetch) {
  constexpr int V = kReorders<C> ? 2 : 1;
  for (int64_t j = tile.begin / kDepth<E>; j * kDepth<E> < tile.end; fetch(j), ++j) {
    E* const to = packed + j * dim;
    for (int64_t d = 0; directly && d < dim; d += V * kLanes) {
      decltype(load(packed)) row[V];
      load_values<E>(tile.value(kDepth<E> * j) + d, tile.value(std::min(kDepth<E> * (j + 1), tile.end) - 1) + d, row);
      for (int v = 0; v < V; ++v) store(to + d + v * kLanes, row[v]);
    }
    for (int64_t d = 0; !directly && d < dim; d += kLanes) {
      const auto value = [&](int64_t i) { return load_up_to(tile.value(i) + d, tile.head_dim - d); };
      if constexpr (kDepth<E> == 1) store(to + d, value(j));
      else store(to + d, pair_up(value(2 * j), value(std::min(2 * j + 1, tile.end - 1))));
    }
  }
}

// Scores of a strip of rows for the keys [begin, end) of the tile; begin is that of a vector. keys<V>(vector) has the operands of V
// vectors.
template <int S, class E, class F>
inline void score_strip(const Workspace<E>& work, int64_t row, int64_t height, int64_t num_operands, int64_t begin, int64_t end,
                        F keys) {
  for (int64_t i = 0; i < height; ++i) std::fill_n(work.scores + i * kTileKeys + begin, round_up(end - begin, kLanes), 0.0f);
  for_each_vectors(height, begin, end, [&]<int V>(int64_t first) {
    multiply_add_strip<V, S>(height, work.query + row * work.dim, work.dim, num_operands, keys.template operator()<V>(first / kLanes),
                             work.scores + first, kTileKeys);
  });
}

// out += weights * values, for the operands [begin, end) of a strip's weights; values<V>(d) has the operands from the begin-th on, of
// V vectors of features from d on
template <class E, class F>
inline void weigh(const Workspace<E>& work, int64_t row, int64_t height, int64_t begin, int64_t end, F values) {
  for_each_vectors(height, 0, work.dim, [&]<int V>(int64_t d) {
    multiply_add_strip<V, 1>(height, work.weights + begin, kTileKeys, end - begin, values.template operator()<V>(d),
                             work.run.out + row * work.dim + d, work.dim);
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

// Whether weights are computed and rounded two vectors at a time, as pairs.
template <class E, class C>
constexpr bool kRoundsPairs =
#if defined(__AVX512BF16__)
    std::is_same_v<E, Bf16Pair> && !kIsInt8<C>;

// 2**x for weights, which will be rounded to 8 bits: at most 2**-18 of it off. Below -149 it is 0. The polynomial is 2**f on
// [-0.5, 0.5], with the least relative error that its degree can have.
inline Vec exp2_of_weights(Vec x) {
  x = max(splat(-200.0f), x);  // -inf has no fraction; x if it is not a number
  const Vec whole = (Vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec f = x - whole;
  Vec p = splat(9.57010221e-3f);
  p = p * f + 5.59178591e-2f;
  p = p * f + 2.40247443e-1f;
  p = p * f + 6.93121791e-1f;
  p = p * f + 9.99999285e-1f;
  return (Vec)_mm512_scalef_ps((__m512)p, (__m512)whole);
}

// Stores the pairs of weights of 2**low and 2**high from the j-th on, and adds what it stored to a sum.
inline Vec add_weights(Vec sum, Bf16Pair* weights, int64_t j, Vec low, Vec high) {
  const VecU pairs = round_both(exp2_of_weights(low), exp2_of_weights(high));
  std::memcpy(reinterpret_cast<c10::BFloat16*>(weights) + j, &pairs, sizeof(pairs));
  return add_product(sum, pairs, VecU{} + 0x3f803f80u);  // ones
}
#else
    false;
#endif

// Turns the scores of a strip of rows into weights relative to each row's new maximum, and scales what was summed before to it.
// Scores are in base 2 when they are multiplied by a factor, which is positive. Keys outside [first(i), last(i)) are hidden
// from the i-th row, and so is what fills the last step. Each part is for all rows before the next one, since a row alone would
// wait for its sums longer than it computes.
template <class E, class C, class F, class G>
inline void soften_strip(const Workspace<E>& work, const Scales<C>& scales, float factor, int64_t row, int64_t height, F first,
                         G last, int64_t begin, int64_t end) {
  constexpr int64_t kStep = kRoundsPairs<E, C> ? kTogether : kLanes;
  const int64_t start = begin / kStep * kStep, stop = round_up(end, kStep);
  const Sums sums = work.run.row(row, work.dim);
  float tops[kStripRows];
  Vec totals[kStripRows];
  for (int64_t i = 0; i < height; ++i) {
    float* scores = work.scores + i * kTileKeys;
    std::fill(scores + start, scores + std::clamp(first(i), begin, stop), kNegInf);
    std::fill(scores + std::clamp(last(i), begin, end), scores + stop, kNegInf);
    Vec top = load(scores + start);
    for (int64_t j = start + kLanes; j < stop; j += kLanes) top = max(top, load(scores + j));
    tops[i] = std::max(sums.max[i], max(top) * factor);
  }
  for (int64_t i = 0; i < height; ++i) {
    const float* scores = work.scores + i * kTileKeys;
    E* weights = work.weights + i * kTileKeys;
    const Vec origin = splat(tops[i] == kNegInf ? 0.0f : -tops[i]);  // where a row has seen no key so far all weights are 0
    const auto power = [&](int64_t j) { return add_product(origin, load(scores + j), splat(factor)); };
    Vec total{};
    for (int64_t j = start; j < stop; j += kStep) {
      if constexpr (kRoundsPairs<E, C>) total = add_weights(total, weights, j, power(j), power(j + kLanes));
      else total += store_weights(weights, j, exp2(power(j)), scales);
    }
    totals[i] = total;
  }
  for (int64_t i = 0; i < height; ++i) {
    if (tops[i] != sums.max[i]) {
      const float correction = exp2(splat(sums.max[i] - tops[i]))[0];
      float* out = sums.out + i * work.dim;
      for (int64_t d = 0; d < work.dim; d += kLanes) store(out + d, load(out + d) * correction);
      sums.sum[i] *= correction;
      sums.max[i] = tops[i];
    }
    sums.sum[i] += sum(totals[i]);
  }
}

}  // namespace flyball
