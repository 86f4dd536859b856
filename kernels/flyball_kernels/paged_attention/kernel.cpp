// Paged attention on CPU: prefill chunks and decodes as one list of tasks.
//
// A task is a tile of one sequence's query tokens, with all query heads of one KV head, and a run of its keys. A tile of
// few rows (a decode) is memory-bound: it reads each key and value once for all its rows, and its context is cut at fixed
// multiples of kSplitKeys, so that a long one occupies several threads and a decode's result is the same to the last bit
// in any batch. Where there are tasks enough, one has several KV heads: their keys lie next to each other, and memory is
// faster in long runs. A tile of many rows packs keys and values once and multiplies them like matrices. Either multiplies
// fp32, or pairs of bf16 where the CPU's bf16 dot product is the faster way.
#include <vector>

#include "../cpu/works.h"
#include "tile.h"

namespace flyball {
namespace {

constexpr int64_t kSplitKeys = 512;
constexpr int64_t kTasksPerThread = 4;  // that many at least, before tasks get several heads
constexpr int64_t kTileBytes = 1 << 17;  // of a task's keys and values in a tile; the second cache has to hold two tiles

// Rows are ordered by KV head, token and query head.
struct Task {
  int64_t sequence, kv_head, num_kv_heads, first_token, num_tokens;  // tokens are counted from the sequence's first query
  int64_t first_key, last_key;
  int64_t partial;  // index of its first row among the partial results; -1 when it writes the output itself

  bool is_same_tile(const Task& t) const {
    return sequence == t.sequence && kv_head == t.kv_head && first_token == t.first_token;
  }
};

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

  // Whether operands can be read from the cache as they are, or widened on the way.
  template <class E>
  static constexpr bool kReadsCache = kDepth<E> == 1 || std::is_same_v<T, C>;

  template <class E>
  bool reads_cache_directly(int64_t rows) const {
    return kReadsCache<E> && rows <= kFewRows && head_dim % (kLanes * kDepth<E>) == 0;
  }

  int64_t rows_of_head(const Task& t) const { return t.num_tokens * group(); }
  int64_t num_rows(const Task& t) const { return t.num_kv_heads * rows_of_head(t); }
  int64_t token_of(const Task& t, int64_t row) const { return row % rows_of_head(t) / group(); }
  int64_t q_head_of(const Task& t, int64_t row) const {
    return (t.kv_head + row / rows_of_head(t)) * group() + row % group();
  }

  // First element of the query, or the output, of a row of the task.
  int64_t row_offset(const Task& t, int64_t row) const {
    return ((cu_query_lens[t.sequence] + t.first_token + token_of(t, row)) * num_q_heads + q_head_of(t, row)) * head_dim;
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
    const int64_t step = rows_of_head(task) <= kFewRows ? kSplitKeys : last + 1;
    const int64_t start = std::max<int64_t>(0, first - window + 1);
    const bool is_split = start / step != (last - 1) / step;
    for (int64_t key = start / step * step; key < last; key += step) {
      task.first_key = std::max(key, start);
      task.last_key = std::min(key + step, last);
      task.partial = is_split ? num_partial_rows : -1;
      if (is_split) num_partial_rows += num_rows(task);
      tasks.push_back(task);
    }
  }

  // How many KV heads a task that reads the cache directly has: a power of two that divides their number.
  int64_t heads_together() const {
    int64_t num_tasks = 0;  // at least, if each had one head
    for (int64_t i = 0; i < num_sequences; ++i)
      num_tasks += num_kv_heads * ((std::min<int64_t>(context_lens[i], window) + kSplitKeys - 1) / kSplitKeys);
    const int64_t spare = num_tasks / (kTasksPerThread * omp_get_max_threads());
    const int64_t fitting = kTileBytes / std::max<int64_t>(1, 2 * kTileKeys * head_dim * sizeof(C));
    const int64_t most = std::min({spare, fitting, kQueryRows / kFewRows});  // a workspace has kQueryRows
    int64_t together = 1;
    while (2 * together <= most && num_kv_heads % (2 * together) == 0) together *= 2;
    return together;
  }

  std::vector<Task> plan(int64_t& num_partial_rows) const {
    std::vector<Task> tasks;
    const int64_t height = std::max<int64_t>(1, kQueryRows / group()), together = heads_together();
    for (int64_t i = 0; i < num_sequences; ++i) {
      for (int64_t end = query_len(i); end > 0; end -= height) {  // from the end: the longest contexts start first
        const int64_t first = std::max<int64_t>(0, end - height);
        const int64_t heads = reads_cache_directly<float>((end - first) * group()) ? together : 1;
        for (int64_t h = 0; h < num_kv_heads; h += heads) add_tile(tasks, {i, h, heads, first, end - first}, num_partial_rows);
      }
    }
    return tasks;
  }

  KeyTile<C> locate(const Task& t, int64_t start) const {
    KeyTile<C> tile;
    tile.start = start;
    tile.end = std::min(start + kTileKeys, t.last_key);
    for_each_block(t, tile, [&](int64_t i, int64_t n, int64_t block, int64_t offset) {
      const C *key = k_cache.vector(block, offset, t.kv_head), *value = v_cache.vector(block, offset, t.kv_head);
      for (int64_t end = i + n; i < end; ++i) {
        tile.keys[i] = std::exchange(key, key + k_cache.token_stride());
        tile.values[i] = std::exchange(value, value + v_cache.token_stride());
      }
    });
    return tile;
  }

  // Calls f(i, n, block, offset) for the blocks of a tile: n tokens from the tile's i-th on are in the block from an offset on.
  template <class F>
  void for_each_block(const Task& t, const KeyTile<C>& tile, F f) const {
    const int32_t* table = block_tables + t.sequence * max_blocks;
    for (int64_t i = 0, n; i < tile.size(); i += n) {
      const int64_t block = table[(tile.start + i) / block_size], offset = (tile.start + i) % block_size;
      n = std::min(tile.size() - i, block_size - offset);
      f(i, n, block, offset);
    }
  }

  // Of the task's head-th KV head. Those of the next tile are fetched: they are read first, before anything else could be.
  Scales<C> scales(const Task& t, const KeyTile<C>& tile, int64_t head) const {
    Scales<C> scales;
    if constexpr (kIsInt8<C>) {
      for_each_block(t, tile, [&](int64_t i, int64_t n, int64_t block, int64_t offset) {
        scales.read(i, n, k_cache.scale(block, offset, t.kv_head + head), v_cache.scale(block, offset, t.kv_head + head));
        prefetch_scales(t, tile.start + i + kTileKeys, head);
      });
      scales.fill_last_vector(tile.size());
    }
    return scales;
  }

  void prefetch_scales(const Task& t, int64_t key, int64_t head) const {
    if (key >= t.last_key) return;
    const int64_t block = block_tables[t.sequence * max_blocks + key / block_size], offset = key % block_size;
    __builtin_prefetch(k_cache.scale(block, offset, t.kv_head + head));
    __builtin_prefetch(v_cache.scale(block, offset, t.kv_head + head));
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
    return position(t) + token_of(t, row) + 1 - tile.start;
  }
  int64_t first_key(const Task& t, const KeyTile<C>& tile, int64_t row) const { return last_key(t, tile, row) - window; }

  // Scores of the keys [begin, end) become weights. Those of the row are in the slot-th row of the scores.
  template <class E>
  void soften(const Task& t, const KeyTile<C>& tile, const Scales<C>& scales, const Workspace<E>& work, int64_t row,
              int64_t rows, int64_t slot, int64_t begin, int64_t end) const {
    for (int64_t i = 0; i < rows; ++i) {
      float* scores = work.scores + (slot + i) * kTileKeys;
      if (kDepth<E> > 1) scale_row(scores, begin, end, query_scale());
      if constexpr (kIsInt8<C>) scale_row(scores, begin, end, scales.keys);
      if (softcap > 0.0f) bound_row(scores, begin, end, softcap * kLog2e);
      soften_row(work, scales, row + i, slot + i, first_key(t, tile, row + i), last_key(t, tile, row + i), begin, end);
    }
  }

  template <class E>
  void visit_directly(const Task& t, const KeyTile<C>& tile, const KeyTile<C>& next, const Workspace<E>& work) const {
    const int64_t rows = rows_of_head(t);
    for (int64_t head = 0; head < t.num_kv_heads; ++head) {
      const int64_t row = head * rows;
      score_few_rows(rows, tile, head * head_dim, share(t, tile, tile.values, head), work.query + row * work.dim, work.dim,
                     work.scores + row * kTileKeys);
    }
    for (int64_t head = 0; head < t.num_kv_heads; ++head)
      soften(t, tile, scales(t, tile, head), work, head * rows, rows, head * rows, 0, tile.size());
    const KeyTile<C>& then = next.size() > 0 ? next : tile;  // after the last tile, something that is there already
    for (int64_t head = 0; head < t.num_kv_heads; ++head)
      weigh_directly(tile, head * head_dim, share(t, then, then.keys, head), work, head * rows, rows);
  }

  // What is fetched while a head is visited, of the keys or values of a tile.
  Coming<C> share(const Task& t, const KeyTile<C>& tile, const C* const* vectors, int64_t head) const {
    return {vectors, tile.size(), t.num_kv_heads, head, head_dim};
  }

  // `at`: where the head begins in the tile's values. Pairs leave their sums in the order of `interleave`.
  template <class E>
  void weigh_directly(const KeyTile<C>& tile, int64_t at, const Coming<C>& coming, const Workspace<E>& work, int64_t row,
                      int64_t rows) const {
    const auto load_value = [&]<size_t V, class Row>(int64_t j, int64_t d, Row (&vectors)[V]) {
      if constexpr (kDepth<E> == 1) {
        prefetch<V * kLanes>(coming.at(j) + d);
        load_all(vectors, tile.values[j] + at + d);
      } else if constexpr (V % 2 == 0) {  // head_dim is a multiple of two vectors
        prefetch<V * kLanes>(coming.at(2 * j) + d);
        prefetch<V * kLanes>(coming.at(2 * j + 1) + d);
        const C* first = tile.values[2 * j] + at + d;
        const C* second = tile.values[std::min(2 * j + 1, tile.size() - 1)] + at + d;
#pragma GCC unroll 4
        for (size_t v = 0; v < V; v += 2)
          std::tie(vectors[v], vectors[v + 1]) =
              interleave(load_raw<VecU>(first + v * kLanes), load_raw<VecU>(second + v * kLanes));
      }
    };
    weigh(work, row, rows, row, 0, (tile.size() + kDepth<E> - 1) / kDepth<E>, load_value);
  }

  // Strip by strip, because a strip's scores then stay in the nearest cache. Keys that a strip does not see are left out.
  template <class E>
  void visit_packed(const Task& t, const KeyTile<C>& tile, const Workspace<E>& work, int64_t rows) const {
    pack_keys(tile, head_dim, work.keys);
    pack_values(tile, head_dim, work.dim, work.values);
    const Scales<C> of_tile = scales(t, tile, 0);
    for_each_strip(rows, [&](int64_t row, int64_t height) {
      const int64_t begin = std::max<int64_t>(0, first_key(t, tile, row)) / kLanes * kLanes;
      const int64_t end = std::min(tile.size(), last_key(t, tile, row + height - 1));
      if (begin >= end) return;
      score_strip(work, row, height, begin, end);
      soften(t, tile, of_tile, work, row, height, 0, begin, end);
      weigh(work, row, height, 0, begin / kDepth<E>, (end + kDepth<E> - 1) / kDepth<E>,
            [&](int64_t j, int64_t d, auto& vectors) { load_all(vectors, work.values + j * work.dim + d); });
    });
  }

  void run(const Task& t, float* memory, float* partials) const {
    if constexpr (has_dot() && std::is_same_v<T, c10::BFloat16>) {
      const int64_t rows = rows_of_head(t);
      if (dot && (reads_cache_directly<Bf16Pair>(rows) || !reads_cache_directly<float>(rows)))
        return run_with<Bf16Pair>(t, memory, partials);
    }
    run_with<float>(t, memory, partials);
  }

  template <class E>
  void run_with(const Task& t, float* memory, float* partials) const {
    const int64_t rows = num_rows(t);
    const Workspace<E> work(memory, rows, dim());
    work_on(t, work, rows);
    for (int64_t row = 0; row < rows; ++row) {
      const float* sums = work.out + row * work.dim;
      if (t.partial < 0) {
        write(t, row, sums, work.max[row], work.sum[row]);
        continue;
      }
      float* partial = partials + (t.partial + row) * (work.dim + kLanes);
      partial[0] = work.max[row];
      partial[1] = work.sum[row];
      std::copy(sums, sums + work.dim, partial + kLanes);
    }
  }

  template <class E>
  void work_on(const Task& t, const Workspace<E>& work, int64_t rows) const {
    load_query(t, work, rows);
    work.reset(rows);
    const bool directly = reads_cache_directly<E>(rows_of_head(t));
    KeyTile<C> next;
    for (KeyTile<C> tile = locate(t, t.first_key); tile.size() > 0; tile = next) {
      next = locate(t, tile.end);
      if constexpr (kReadsCache<E>) {
        if (directly) {
          if (tile.start == t.first_key) fetch_keys(tile, t.num_kv_heads * head_dim);
          visit_directly(t, tile, next, work);
          continue;
        }
      }
      visit_packed(t, tile, work, rows);
    }
    if (directly && kDepth<E> > 1)
      for (int64_t row = 0; row < rows; ++row) restore_order(work.out + row * work.dim, work.dim);
  }

  // top: what the sums and their total are relative to
  void write(const Task& t, int64_t row, const float* sums, float top, float total) const {
    if (sinks) total += exp2(splat(sinks[q_head_of(t, row)] * kLog2e - top))[0];
    T* to = out + row_offset(t, row);
    for (int64_t d = 0; d < head_dim; d += kLanes) store_up_to(to + d, load(sums + d) / total, head_dim - d);
  }

  // The splits of a tile stand next to each other; merges those from `begin` on and returns where the next tile's begin.
  size_t merge(const std::vector<Task>& tasks, size_t begin, const float* partials, float* sums) const {
    const Task& t = tasks[begin];
    const int64_t rows = num_rows(t), stride = dim() + kLanes;
    size_t end = begin + 1;
    while (end < tasks.size() && tasks[end].is_same_tile(t)) ++end;
    for (int64_t row = 0; row < rows; ++row) {
      float top = kNegInf, total = 0.0f;
      for (size_t i = begin; i < end; ++i) top = std::max(top, partials[(tasks[i].partial + row) * stride]);
      std::fill_n(sums, dim(), 0.0f);
      for (size_t i = begin; i < end; ++i) {
        const float* partial = partials + (tasks[i].partial + row) * stride;
        const float weight = exp2(splat(partial[0] - top))[0];
        total += weight * partial[1];
        for (int64_t d = 0; d < dim(); d += kLanes) store(sums + d, load(sums + d) + load(partial + kLanes + d) * weight);
      }
      write(t, row, sums, top, total);
    }
    return end;
  }

  Work work() const {
    int64_t num_partial_rows = 0;
    std::vector<Task> tasks = plan(num_partial_rows);
    return {num_partial_rows * (dim() + kLanes), [*this, tasks = std::move(tasks), num_partial_rows](const Team& team, float* partials) {
              struct Tile;
              const int64_t rows = std::max(kQueryRows, group());
              float* const memory = scratch<Tile>(Workspace<float>::num_floats(rows, dim()));
              team.share_chunks(tasks.size(), 1, [&](size_t i) { run(tasks[i], memory, partials); });
              if (num_partial_rows == 0) return;
              team.run_once([&] {
                for (size_t i = 0; i < tasks.size();) i = tasks[i].partial < 0 ? i + 1 : merge(tasks, i, partials, memory);
              });
            }};
  }
};

void paged_attention(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_tables,
                     const Tensor& cu_query_lens, const Tensor& context_lens, double scale,
                     std::optional<int64_t> sliding_window, std::optional<double> softcap,
                     const std::optional<Tensor>& sinks, std::optional<bool> dot, const Tensor& out) {
  run_in_team({paged_attention_work(query, k_cache, v_cache, block_tables, cu_query_lens, context_lens, scale, sliding_window,
                                    softcap, sinks, dot, out)});
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
                          std::optional<bool> dot, const Tensor& out) {
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
        static_cast<float>(softcap.value_or(0.0)), data_or_null<float>(sinks), dot.value_or(has_fast_dot())};
    attention.check(query.size(0), k_cache.size(0));
    work = attention.work();
  };
  dispatch(query, "paged_attention", [&]<class T>(T* type) {
    if (is_int8(k_cache)) attend(type, static_cast<int8_t*>(nullptr));
    else attend(type, type);
  });
  return work;
}

}  // namespace flyball
