// Paged attention on CPU: prefill chunks and decodes as one list of tasks.
//
// A task is a tile of one sequence's query tokens, with all query heads of one KV head, and its keys. Keys are summed up in
// runs that begin at fixed multiples of kRunKeys, one after the other. A tile of few rows (a decode) is memory-bound: each of
// its runs is a task of its own, so that a long context occupies several threads, and it takes operands straight from the
// cache. Where threads have enough to do, such a task has several KV heads, which lie next to each other in a block. A tile of
// many rows packs its operands once.
//
// Operands are fp32, or pairs of bf16 where the CPU's bf16 dot product is the faster way, or where it has matrix units; those
// take packed values at any rate. The same numbers are added in the same order however many rows there are: a token has the
// same bits in any batch and any chunk, and as a decode.
#include <vector>

#include "../cpu/works.h"
#include "amx.h"

namespace flyball {

struct AttentionTasks {
  // Rows of a KV head are ordered by token and query head; those of the next one follow.
  struct Task {
    int64_t sequence, kv_head, num_kv_heads;
    int64_t first_token, num_tokens;  // counted from the sequence's first query
    int64_t first_key, last_key;
    int64_t partial;  // index of its first row among the partial results; -1 when it writes the output itself

    // Its i-th KV head alone.
    Task of_head(int64_t i) const {
      Task task = *this;
      task.kv_head += i;
      task.num_kv_heads = 1;
      return task;
    }
    bool is_same_tile(const Task& t) const {
      return sequence == t.sequence && kv_head == t.kv_head && first_token == t.first_token;
    }
  };

  std::vector<Task> tasks;
  int64_t num_partial_rows = 0;
};

namespace {

using Task = AttentionTasks::Task;

// Of queries and outputs T, and of a cache of C.
template <class T, class C>
struct Attention {
  const T* query;
  KVCache<const C> k_cache, v_cache;
  T* out;
  const int32_t *block_tables, *cu_query_lens, *context_lens;
  int64_t num_sequences, max_blocks, block_size, num_q_heads, num_kv_heads, head_dim;
  int64_t window;  // how many keys a token sees
  float scale;
  float softcap;  // 0: scores have no bound
  const float* sinks;  // or null
  bool dot;  // whether operands are pairs of bf16

  int64_t group() const { return num_q_heads / num_kv_heads; }
  int64_t dim() const { return round_up(head_dim, kLanes); }
  int64_t query_len(int64_t i) const { return cu_query_lens[i + 1] - cu_query_lens[i]; }
  int64_t position(const Task& t) const { return context_lens[t.sequence] - query_len(t.sequence) + t.first_token; }

  // Whether the blocks hold whole vectors of keys. The tiles of others are copied out of them first.
  bool has_vectors() const { return block_size % kLanes == 0; }

  // Whether coming tiles are fetched: with few rows, memory is the limit.
  bool fetches(const Task& t) const { return num_rows(t) <= kFewRows && has_vectors(); }

  // Whether operands of keys, or values, can be made from the cache as it is.
  template <class E>
  bool reads_keys() const {
    return head_dim % 2 == 0 || (kDepth<E> == 1 && !kIsBf16<C>);
  }
  bool reads_values() const {
    return head_dim % (kReorders<C> ? 2 * kLanes : kLanes) == 0;
  }
  template <class E>
  int64_t num_operands() const {
    return (head_dim + kDepth<E> - 1) / kDepth<E>;
  }

  int64_t num_rows(const Task& t) const { return t.num_tokens * group(); }  // of a KV head
  int64_t token_of(int64_t row) const { return row / group(); }
  int64_t q_head_of(const Task& t, int64_t row) const { return t.kv_head * group() + row % group(); }

  // First element of the query, or the output, of a row of the task.
  int64_t row_offset(const Task& t, int64_t row) const {
    return ((cu_query_lens[t.sequence] + t.first_token + token_of(row)) * num_q_heads + q_head_of(t, row)) * head_dim;
  }

  // Every row and block that will be read is there.
  void check(int64_t num_tokens, int64_t num_blocks) const {
    TORCH_CHECK_INDEX(cu_query_lens[0] == 0 && cu_query_lens[num_sequences] == num_tokens, "cu_query_lens goes from ",
                      cu_query_lens[0], " to ", cu_query_lens[num_sequences], "; it must go from 0 to ", num_tokens, ".");
    for (int64_t i = 0; i < num_sequences; ++i) {
      const int64_t context_len = context_lens[i], most = max_blocks * block_size;
      TORCH_CHECK_INDEX(0 <= query_len(i) && query_len(i) <= context_len && context_len <= most, "sequence ", i, " has ",
                        query_len(i), " query tokens and a context of ", context_len,
                        "; the query must be within the context, and the context within the ", most, " of its block table.");
      check_below("block_tables", block_tables + i * max_blocks, (context_len + block_size - 1) / block_size, num_blocks);
    }
  }

  void add_tile(std::vector<Task>& tasks, Task task, int64_t& num_partial_rows) const {
    const int64_t first = position(task), last = first + task.num_tokens;
    const int64_t step = num_rows(task) <= kFewRows ? kRunKeys : last + 1;
    const int64_t start = std::max<int64_t>(0, first - window + 1);
    const bool is_split = start / step != (last - 1) / step;
    for (int64_t key = start / step * step; key < last; key += step) {
      task.first_key = std::max(key, start);
      task.last_key = std::min(key + step, last);
      task.partial = is_split ? num_partial_rows : -1;
      if (is_split) num_partial_rows += task.num_kv_heads * num_rows(task);
      tasks.push_back(task);
    }
  }

  // Whether a task of so many tokens may have several KV heads: memory, not arithmetic, is the limit of a single strip.
  bool may_have_heads(int64_t num_tokens) const { return num_tokens * group() <= kMaxR && has_vectors(); }

  // How many KV heads such a task has: as many as leave each of the threads kTasksOfThread tasks.
  int64_t heads_of_task(int64_t num_threads) const {
    constexpr int64_t kTasksOfThread = 4;
    int64_t num_runs = 0;
    for (int64_t i = 0; i < num_sequences; ++i) {
      const int64_t num_keys = std::min<int64_t>(context_lens[i], window);
      if (query_len(i) > 0 && may_have_heads(query_len(i))) num_runs += (num_keys + kRunKeys - 1) / kRunKeys;
    }
    return std::clamp<int64_t>(num_runs * num_kv_heads / (kTasksOfThread * num_threads), 1, num_kv_heads);
  }

  AttentionTasks plan(int64_t num_threads) const {
    AttentionTasks planned;
    const int64_t height = std::max<int64_t>(1, kQueryRows / group()), most_heads = heads_of_task(num_threads);
    for (int64_t i = 0; i < num_sequences; ++i) {
      for (int64_t end = query_len(i); end > 0; end -= height) {  // from the end: the longest contexts start first
        const int64_t first = std::max<int64_t>(0, end - height), num_tokens = end - first;
        const int64_t step = may_have_heads(num_tokens) ? most_heads : 1;
        for (int64_t h = 0; h < num_kv_heads; h += step)
          add_tile(planned.tasks, {i, h, std::min(step, num_kv_heads - h), first, num_tokens}, planned.num_partial_rows);
      }
    }
    return planned;
  }

  static int64_t first_start(const Task& t) { return t.first_key / kTileKeys * kTileKeys; }
  static int64_t last_start(const Task& t) { return (t.last_key - 1) / kTileKeys * kTileKeys; }

  // The tile from `start` on, a multiple of kTileKeys.
  KeyTile<C> locate(const Task& t, int64_t start) const {
    KeyTile<C> tile;
    tile.start = start;
    tile.begin = std::max<int64_t>(0, t.first_key - start) / kLanes * kLanes;
    tile.end = std::min(kTileKeys, t.last_key - start);
    tile.head_dim = head_dim;
    tile.key_stride = k_cache.key_stride();
    tile.head_numel = block_size * head_dim;
    if (!has_vectors()) return tile;
    for (int64_t i = tile.begin; i < tile.end; i += kLanes) {
      const int64_t block = block_of(t, start + i), offset = (start + i) % block_size;
      tile.keys[i / kLanes] = k_cache.key(block, offset, t.kv_head);
      tile.values[i / kLanes] = v_cache.value(block, offset, t.kv_head);
    }
    if (tile.empty()) return tile;
    const auto fill_rest = [first = tile.begin / kLanes, last = (tile.end - 1) / kLanes](auto& vectors) {
      std::fill(std::begin(vectors), vectors + first, vectors[first]);
      std::fill(vectors + last + 1, std::end(vectors), vectors[last]);
    };
    fill_rest(tile.keys);
    fill_rest(tile.values);
    return tile;
  }

  // The tile from `start` on. Where the task ends before it, the one as far on in `then`: a task that this thread may get next, or null.
  // Of the last of both, the last tile.
  KeyTile<C> locate_ahead(const Task& t, const Task* then, int64_t start) const {
    if (start < t.last_key || !then) return locate(t, std::min(start, last_start(t)));
    return locate(*then, std::min(first_start(*then) + start - last_start(t) - kTileKeys, last_start(*then)));
  }

  int64_t block_of(const Task& t, int64_t key) const { return block_tables[t.sequence * max_blocks + key / block_size]; }

  // Calls f(i, n, block, offset) for the blocks of a tile: n tokens from the tile's i-th on are in the block from an offset on.
  template <class F>
  void for_each_block(const Task& t, const KeyTile<C>& tile, F f) const {
    for (int64_t i = std::max(tile.begin, t.first_key - tile.start), n; i < tile.end; i += n) {
      const int64_t offset = (tile.start + i) % block_size;
      n = std::min(tile.end - i, block_size - offset);
      f(i, n, block_of(t, tile.start + i), offset);
    }
  }

  // Has the tile's keys and values in one block of kTileKeys.
  void copy_out(const Task& t, KeyTile<C>& tile, C* keys, C* values) const {
    const int64_t depth = k_cache.depth(), row = kTileKeys * depth;
    std::fill(values + tile.begin * head_dim, values + round_up(tile.end, kLanes) * head_dim, C(0));
    for_each_block(t, tile, [&](int64_t i, int64_t n, int64_t block, int64_t offset) {
      const C *key = k_cache.key(block, offset, t.kv_head), *value = v_cache.value(block, offset, t.kv_head);
      for (int64_t d = 0; d < head_dim; d += depth, key += k_cache.key_stride())
        std::copy(key, key + n * depth, keys + d / depth * row + i * depth);
      std::copy(value, value + n * head_dim, values + i * head_dim);
    });
    tile.key_stride = row;
    for (int64_t v = 0; v < kTileKeys / kLanes; ++v) {
      tile.keys[v] = keys + v * kLanes * depth;
      tile.values[v] = values + v * kLanes * head_dim;
    }
  }

  // Those of the next tile are fetched: they are read first, before anything else could be.
  Scales<C> scales(const Task& t, const KeyTile<C>& tile) const {
    Scales<C> scales;
    if constexpr (kIsInt8<C>) {
      scales.reset(tile.begin, tile.end);
      for_each_block(t, tile, [&](int64_t i, int64_t n, int64_t block, int64_t offset) {
        scales.read(i, n, k_cache.scale(block, offset, t.kv_head), v_cache.scale(block, offset, t.kv_head));
        prefetch_scales(t, tile.start + i + kTileKeys);
      });
    }
    return scales;
  }

  void prefetch_scales(const Task& t, int64_t key) const {
    if (key >= t.last_key) return;
    __builtin_prefetch(k_cache.scale(block_of(t, key), key % block_size, t.kv_head));
    __builtin_prefetch(v_cache.scale(block_of(t, key), key % block_size, t.kv_head));
  }

  // Scores are in base 2, or, before the bound, in units of it.
  float query_scale() const { return softcap > 0.0f ? scale / softcap : scale * kLog2e; }

  template <class E>
  void load_query(const Task& t, const Workspace<E>& work, int64_t rows) const {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t d = 0; d < head_dim; d += kLanes * kDepth<E>) {
        const Vec operands = load_operands<E>(query + row_offset(t, row) + d, head_dim - d);
        store(work.query + row * work.dim + d / kDepth<E>, kDepth<E> == 1 ? operands * query_scale() : operands);
      }
    }
  }

  // The tile's keys that a token sees are those from first_key on, before last_key.
  int64_t last_key(const Task& t, const KeyTile<C>& tile, int64_t row) const {
    return position(t) + token_of(row) + 1 - tile.start;
  }
  int64_t first_key(const Task& t, const KeyTile<C>& tile, int64_t row) const { return last_key(t, tile, row) - window; }

  // Scores of a strip's keys [begin, end) become weights.
  template <class E>
  void soften(const Task& t, const KeyTile<C>& tile, const Scales<C>& scales, const Workspace<E>& work, int64_t row,
              int64_t height, int64_t begin, int64_t end) const {
    float factor = kDepth<E> > 1 ? query_scale() : 1.0f;
    if (kIsInt8<C> || softcap > 0.0f || !(factor > 0.0f)) {
      for (int64_t i = 0; i < height; ++i) {
        float* scores = work.scores + i * kTileKeys;
        if (kDepth<E> > 1) scale_row(scores, begin, end, factor);
        if constexpr (kIsInt8<C>) scale_row(scores, begin, end, scales.keys);
        if (softcap > 0.0f) bound_row(scores, begin, end, softcap * kLog2e);
      }
      factor = 1.0f;
    }
    soften_strip(
        work, scales, factor, row, height, [&](int64_t i) { return first_key(t, tile, row + i); },
        [&](int64_t i) { return last_key(t, tile, row + i); }, begin, end);
  }

  // Strip by strip, because a strip's scores then stay in the nearest cache. Keys that a strip does not see are left out.
  // While few rows are computed, the keys and values of the coming tile are fetched.
  template <class E>
  void visit(const Task& t, KeyTile<C>& tile, const KeyTile<C>& coming, const Workspace<E>& work) const {
    constexpr int S = kRowsOfKeys<E, C>;
    constexpr bool kConvertsKeys = kDepth<E> == 1 ? !std::is_same_v<C, float> : kIsInt8<C>;
    constexpr bool kConvertsValues = !std::is_same_v<C, float> || kDepth<E> > 1;
    const int64_t rows = num_rows(t), operands = num_operands<E>();
    const bool is_few = rows <= kFewRows, fetches = this->fetches(t);
    const bool packs_keys = !reads_keys<E>() || (kConvertsKeys && !is_few);
    const bool packs_values = !reads_values() || (kConvertsValues && !is_few);
    if (!has_vectors()) copy_out(t, tile, reinterpret_cast<C*>(work.block_keys), reinterpret_cast<C*>(work.block_values));
    if (packs_keys) {
      if (reads_keys<E>()) pack_keys(tile, operands, work.keys);
      else pack_keys_of_odd_size(tile, operands, work.keys);
    }
    if (packs_values) pack_values(tile, reads_values(), work.dim, work.values, [](int64_t) {});
    const Scales<C> of_tile = scales(t, tile);
    for_each_strip(rows, kMaxR, [&](int64_t row, int64_t height) {
      const int64_t begin = std::max(tile.begin, first_key(t, tile, row) / kLanes * kLanes);
      const int64_t end = std::min(tile.end, last_key(t, tile, row + height - 1));
      if (begin >= end) return;
      if (packs_keys) {
        score_strip<1>(work, row, height, operands, begin, end, [&]<int V>(int64_t vector) {
          return PackedRows<E>{work.keys + vector * kLanes, kTileKeys};
        });
      } else {
        score_strip<S>(work, row, height, operands, begin, end, [&]<int V>(int64_t vector) {
          return CachedKeys<E, C, V>(tile, coming, vector, fetches);
        });
      }
      if (fetches) fetch_first_values(coming);
      soften(t, tile, of_tile, work, row, height, begin, end);
      const int64_t first = begin / kDepth<E>, last = (end + kDepth<E> - 1) / kDepth<E>;
      if (packs_values) {
        weigh(work, row, height, first, last, [&]<int V>(int64_t d) {
          return PackedRows<E>{work.values + first * work.dim + d, work.dim};
        });
      } else {
        weigh(work, row, height, first, last, [&]<int V>(int64_t d) {
          return CachedValues<E, C, V>{tile, coming, first, d, fetches};
        });
      }
    });
  }

#if FLYBALL_AMX
  void soften_by_tiles(const Task& t, const KeyTile<C>& tile, const Scales<C>& scales, const Workspace<Bf16Pair>& work,
                       int64_t row, int64_t height, int64_t begin, int64_t end) const {
    soften(t, tile, scales, work, row, height, begin, end);
    const int64_t stop = round_up(end, kTogether);
    if (kRoundsPairs<Bf16Pair, C> || stop - end < kLanes) return;
    for (int64_t i = 0; i < height; ++i) store_weights(work.weights + i * kTileKeys, stop - kLanes, Vec{});
  }

  // The same by matrix units, in higher strips. Weights of keys that complete a step are 0.
  void visit_by_tiles(const Task& t, KeyTile<C>& tile, const KeyTile<C>& coming, const Workspace<Bf16Pair>& work,
                      AmxTiles& tiles) const {
    using E = Bf16Pair;
    const int64_t rows = num_rows(t), operands = num_operands<E>();
    if (!has_vectors()) copy_out(t, tile, reinterpret_cast<C*>(work.block_keys), reinterpret_cast<C*>(work.block_values));
    const bool packs_keys = !kIsBf16<C> || head_dim % (2 * kLanes) != 0;
    if (packs_keys) {
      if (reads_keys<E>()) pack_keys(tile, operands, work.keys);
      else pack_keys_of_odd_size(tile, operands, work.keys);
      pad_keys(operands, work.keys);
    }
    const bool fetches = this->fetches(t);
    pack_values(tile, reads_values(), work.dim, work.values, [&](int64_t pair) {
      if (fetches) fetch_values(coming, 2 * pair);
    });
    const int64_t key_rows = head_dim / k_cache.depth(), rows_of_step = 2 * kLanes / k_cache.depth();
    const auto fetch = [&](int64_t vector, int64_t step) {
      if (!fetches) return;
      for (int64_t i = step * rows_of_step, stop = std::min(i + rows_of_step, key_rows); i < stop; ++i) {
        prefetch_line(coming.keys[vector] + i * coming.key_stride);
        prefetch_line(coming.keys[vector + 1] + i * coming.key_stride);
      }
    };
    pad_values(tile.begin, tile.end, work.dim, work.values);
    const Scales<C> of_tile = scales(t, tile);
    const int64_t key_bytes = packs_keys ? kTileKeys * sizeof(E) : tile.key_stride * sizeof(C);
    const auto keys = [&](int64_t vector) {
      return packs_keys ? reinterpret_cast<const char*>(work.keys + vector * kLanes) : reinterpret_cast<const char*>(tile.keys[vector]);
    };
    for_each_strip(rows, kStripRows, [&](int64_t row, int64_t height) {
      const int64_t begin = step_of(std::max(tile.begin, first_key(t, tile, row)));
      const int64_t end = std::min(tile.end, last_key(t, tile, row + height - 1));
      if (begin >= end) return;
      tiles.set_rows(height);
      score_by_tiles(work, row, height, operands, begin, end, key_bytes, keys, fetch);
      soften_by_tiles(t, tile, of_tile, work, row, height, begin, end);
      weigh_by_tiles(work, row, height, begin, end);
    });
  }
#endif

  // then: a task that this thread may get next, or null
  void run(const Task& t, const Task* then, float* memory, float* partials) const {
    if constexpr (has_dot() && std::is_same_v<T, c10::BFloat16>) {
      if (dot) return run_with<Bf16Pair>(t, then, memory, partials);
    }
    run_with<float>(t, then, memory, partials);
  }

  template <class E>
  void run_with(const Task& t, const Task* then, float* memory, float* partials) const {
    const int64_t rows = num_rows(t), all_rows = t.num_kv_heads * rows;
    const Workspace<E> work(memory, all_rows, dim());
    const Sums sums = work_on(t, then, work, rows);
    if (kReorders<C> && reads_values())
      for (int64_t row = 0; row < all_rows; ++row) restore_order<E>(sums.row(row, work.dim).out, work.dim);
    if (t.partial < 0) {
      const auto write_row = [&](const Task& of_head, int64_t row, int64_t i) { write(of_head, row, sums.row(i, work.dim)); };
      return for_each_row(t, write_row);
    }
    for (int64_t row = 0; row < all_rows; ++row) {
      const Sums of_row = sums.row(row, work.dim);
      float* partial = partials + (t.partial + row) * (work.dim + kLanes);
      partial[0] = *of_row.max;
      partial[1] = *of_row.sum;
      std::copy(of_row.out, of_row.out + work.dim, partial + kLanes);
    }
  }

  // Returns the sums of all the task's keys, of so many rows for each KV head.
  template <class E>
  Sums work_on(const Task& t, const Task* then, const Workspace<E>& work, int64_t rows) const {
    const int64_t all_rows = t.num_kv_heads * rows;
    for (int64_t h = 0; h < t.num_kv_heads; ++h) load_query(t.of_head(h), work.from_row(h * rows), rows);
    work.run.reset(all_rows, work.dim);
    const bool is_one_run = t.first_key / kRunKeys == (t.last_key - 1) / kRunKeys;
    if (!is_one_run) work.whole.reset(all_rows, work.dim);
#if FLYBALL_AMX
    AmxTiles tiles;
#endif
    KeyTile<C> tile = locate(t, first_start(t)), coming = locate_ahead(t, then, tile.start + kTileKeys);
    for (bool is_last = false; !is_last;) {
      const int64_t end = tile.start + kTileKeys;
      is_last = end >= t.last_key;
      const KeyTile<C> later = locate_ahead(t, then, end + kTileKeys);
      if (fetches(t)) fetch_addresses(later);
      for (int64_t h = 0; h < t.num_kv_heads; ++h) {
        const Task task = t.of_head(h);
        const Workspace<E> of_rows = work.from_row(h * rows);
        KeyTile<C> of_head = tile.of_head(h);
        const KeyTile<C> next = h + 1 < t.num_kv_heads ? tile.of_head(h + 1) : coming;
#if FLYBALL_AMX
        if constexpr (std::is_same_v<E, Bf16Pair>) {
          if (has_amx()) visit_by_tiles(task, of_head, next, of_rows, tiles);
          else visit(task, of_head, next, of_rows);
        } else
#endif
          visit(task, of_head, next, of_rows);
      }
      tile = std::exchange(coming, later);
      if (is_one_run || (end % kRunKeys != 0 && !is_last)) continue;
      for (int64_t row = 0; row < all_rows; ++row) absorb(work.whole.row(row, work.dim), work.run.row(row, work.dim), work.dim);
      work.run.reset(all_rows, work.dim);
    }
    return is_one_run ? work.run : work.whole;
  }

  // Calls f(task, row, i) for the task's rows: the task of one KV head, the row there, and which of all rows it is.
  template <class F>
  void for_each_row(const Task& t, F f) const {
    const int64_t rows = num_rows(t);
    for (int64_t h = 0; h < t.num_kv_heads; ++h) {
      const Task of_head = t.of_head(h);
      for (int64_t row = 0; row < rows; ++row) f(of_head, row, h * rows + row);
    }
  }

  void write(const Task& t, int64_t row, const Sums& sums) const {
    float total = *sums.sum;
    if (sinks) total += exp2(splat(sinks[q_head_of(t, row)] * kLog2e - *sums.max))[0];
    T* to = out + row_offset(t, row);
    const float share = 1.0f / total;
    for (int64_t d = 0; d < head_dim; d += kLanes) store_up_to(to + d, load(sums.out + d) * share, head_dim - d);
  }

  // The runs of a tile stand next to each other; merges those from `begin` on and returns where the next tile's begin.
  size_t merge(const std::vector<Task>& tasks, size_t begin, float* partials, float* memory) const {
    const Task& t = tasks[begin];
    const int64_t stride = dim() + kLanes;
    size_t end = begin + 1;
    while (end < tasks.size() && tasks[end].is_same_tile(t)) ++end;
    float max, sum;
    const Sums whole{memory, &max, &sum};
    for_each_row(t, [&](const Task& of_head, int64_t row, int64_t of_all) {
      whole.reset(1, dim());
      for (size_t i = begin; i < end; ++i) {
        float* partial = partials + (tasks[i].partial + of_all) * stride;
        absorb(whole, {partial + kLanes, partial, partial + 1}, dim());
      }
      write(of_head, row, whole);
    });
    return end;
  }

  Work work(SharedTasks shared) const {
    return {shared->num_partial_rows * (dim() + kLanes), [*this, shared](const Team& team, float* partials) {
              const auto& [tasks, num_partial_rows] = *shared;
              struct Tile;
              const int64_t rows = std::max({kQueryRows, group(), kMaxR * num_kv_heads});
              const auto memory = [&] { return scratch<Tile>(Workspace<float>::num_floats(rows, dim())); };  // of the thread that asks
              team.share_runs(tasks.size(), 1, [&](size_t i, size_t next) {
                run(tasks[i], next < tasks.size() ? &tasks[next] : nullptr, memory(), partials);
              });
              if (num_partial_rows == 0) return;
              team.run_once([&] {
                for (size_t i = 0; i < tasks.size();) i = tasks[i].partial < 0 ? i + 1 : merge(tasks, i, partials, memory());
              });
            }};
  }
};

void paged_attention(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_tables,
                     const Tensor& cu_query_lens, const Tensor& context_lens, double scale,
                     std::optional<int64_t> sliding_window, std::optional<double> softcap,
                     const std::optional<Tensor>& sinks, std::optional<bool> dot, const Tensor& out) {
  SharedTasks tasks;
  run_in_team({paged_attention_work(query, k_cache, v_cache, block_tables, cu_query_lens, context_lens, scale, sliding_window,
                                    softcap, sinks, dot, out, tasks)});
}

TORCH_LIBRARY_FRAGMENT(flyball, m) {
  m.def(
      "paged_attention(Tensor query, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor cu_query_lens, "
      "Tensor context_lens, float scale, int? sliding_window, float? softcap, Tensor? sinks, bool? dot, Tensor(a!) out) -> ()");
  m.impl("paged_attention", c10::DispatchKey::CPU, TORCH_FN(paged_attention));
}

}  // namespace

Work paged_attention_work(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_tables,
                          const Tensor& cu_query_lens, const Tensor& context_lens, double scale,
                          std::optional<int64_t> sliding_window, std::optional<double> softcap, const OptionalTensor& sinks,
                          std::optional<bool> dot, const Tensor& out, SharedTasks& tasks) {
  TORCH_CHECK_VALUE(!dot.value_or(false) || (has_dot() && query.scalar_type() == at::kBFloat16),
                    "the bf16 dot product takes bfloat16 and a CPU with AVX512_BF16, or Arm's BF16");
  const int64_t block_size = k_cache.size(1), num_kv_heads = k_cache.size(2), head_dim = query.size(2);
  Work work;
  const auto attend = [&]<class T, class C>(T*, C*) {
    const Attention<T, C> attention{
        data<const T>(query), {data<const C>(k_cache), block_size, num_kv_heads, head_dim},
        {data<const C>(v_cache), block_size, num_kv_heads, head_dim}, data<T>(out),
        data<const int32_t>(block_tables), data<const int32_t>(cu_query_lens), data<const int32_t>(context_lens),
        context_lens.size(0), block_tables.size(1), block_size, query.size(1), num_kv_heads, head_dim,
        sliding_window.value_or(std::numeric_limits<int32_t>::max()), static_cast<float>(scale),
        static_cast<float>(softcap.value_or(0.0)), data_or_null<float>(sinks), dot.value_or(query.scalar_type() == at::kBFloat16 && (has_amx() || has_fast_dot()))};
    if (!tasks) {
      attention.check(query.size(0), k_cache.size(0));
      tasks = std::make_shared<AttentionTasks>(attention.plan(omp_get_max_threads()));
    }
    work = attention.work(tasks);
  };
  dispatch(query, "paged_attention", [&]<class T>(T* type) {
    if (is_int8(k_cache)) attend(type, static_cast<int8_t*>(nullptr));
    else attend(type, type);
  });
  return work;
}

}  // namespace flyball
