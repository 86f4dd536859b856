// Linear layers by matrix units. Included by kernel.cpp, inside its namespace.
#pragma once

#if FLYBALL_AMX
constexpr int64_t kBlockSteps = 8;            // of tiles: their weights stay in the nearest cache while rows pass
constexpr int64_t kInputBytes = 1 << 20;      // of a block of rows: they stay in the second-level cache while weights pass
constexpr int64_t kStreamBytes = 2 << 20;     // of an output for each thread: beyond the cache, it goes straight to memory
constexpr int64_t kPanelsAtOnce = 2;          // neighbours in a row of the output: a prefetcher brings lines in pairs

// What tiles of rows [first, last) and panels [begin, end) are and where they go.
template <class A>
struct TileBlock {
  using Total = std::conditional_t<std::is_same_v<typename A::Sum, Vec>, float, int32_t>;
  static_assert(sizeof(Total) == sizeof(float));

  const typename A::Input* inputs;  // of all rows
  const typename A::Weight* weights;
  int64_t num_rows, num_tiles, steps;  // steps: of the arithmetic
  Output<A> out;
  bool streams;

  int64_t row(int64_t tile) const { return tile * (num_rows / num_tiles) + std::min(tile, num_rows % num_tiles); }
  int64_t tile_steps() const { return steps / kLineSteps; }

  // Sums of a panel [tiles, rows, columns].
  void sum_panel(AmxTiles& tiles, int64_t panel, int64_t first, int64_t last, Total* sums) const {
    constexpr int64_t kRowBytes = A::kWidth * sizeof(typename A::Weight), kStepBytes = kLineSteps * kRowBytes;
    const auto* from = reinterpret_cast<const char*>(weights + panel * steps * A::kWidth);
    const bool is_single = last - first == 1;
    const int64_t all = tile_steps(), most = is_single ? all : kBlockSteps;
    for (int64_t step = 0; step < all; step += most) {
      for (int64_t tile = first; tile < last; ++tile) {
        const int64_t height = row(tile + 1) - row(tile), bytes = height * kAmxStepBytes;
        const auto* x = reinterpret_cast<const char*>(inputs + row(tile) * steps) + step * bytes;
        tiles.set_rows(height);
        const auto fetch = [&](int64_t i) {
          if (!is_single) return;
#pragma GCC unroll 32
          for (int64_t line = 0; line < kStepBytes; line += 64) __builtin_prefetch(from + i * kStepBytes + kAheadBytes + line);
        };
        amx_multiply<typename A::Products>(height > kAmxRows, true, {x, kAmxStepBytes, kAmxRows * kAmxStepBytes, bytes},
                                           {from + step * kStepBytes, kRowBytes, kRowBytes / 2, kStepBytes},
                                           std::min(most, all - step), step > 0, sums + (row(tile) - row(first)) * kPanel, kPanel,
                                           fetch);
      }
    }
  }

  void run(AmxTiles& tiles, int64_t first, int64_t last, int64_t begin, int64_t end) const {
    struct Sums;
    const int64_t rows = row(last) - row(first), size = rows * kPanel;
    auto* const sums = reinterpret_cast<Total*>(scratch<Sums>((end - begin) * size));
    for (int64_t panel = begin; panel < end; ++panel) sum_panel(tiles, panel, first, last, sums + (panel - begin) * size);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t panel = begin; panel < end; ++panel) {
        const Total* of_row = sums + (panel - begin) * size + r * kPanel;
        write_sums(out.from(row(first), panel * kPanel), r, load_raw<typename A::Sum>(of_row),
                   load_raw<typename A::Sum>(of_row + kLanes), streams);
      }
    }
    if (streams) _mm_sfence();
  }
};

// By each thread of a team. A thread takes all rows of its panels, so that their weights are read once, unless there are too
// few panels.
template <class A>
void run_tiles(const TileBlock<A>& block, int64_t num_panels, const Team& team) {
  const bool takes_all = num_panels >= 2 * kPanelsAtOnce * team.size();
  const int64_t width = takes_all ? kPanelsAtOnce : 1, height = takes_all ? block.num_tiles : 1;
  const int64_t num_groups = round_up(num_panels, width) / width, num_items = num_groups * (block.num_tiles / height);
  const int64_t chunk = std::max<int64_t>(1, num_items / (2 * team.size()));
  AmxTiles tiles;
  team.share_chunks(num_items, chunk, [&](int64_t i) {
    const int64_t begin = i * height / block.num_tiles * width, first = i * height % block.num_tiles;
    block.run(tiles, first, first + height, begin, std::min(begin + width, num_panels));
  });
}
#endif
