// Linear layer: fp32 sums of weights of 16 bits or fewer, or whole sums of 8-bit ones.
//
// A weight is stored once, as panels of two vectors of columns (output features) that a thread streams through, for one row as for
// hundreds. There are several arithmetics. Fma: weights become fp32 in registers and meet fp32 FMAs. Dot: bf16 pairs meet the
// dot product instruction of AVX512_BF16 or Arm's BF16, which does twice the work of an FMA where a core issues two of them a
// cycle (AMD's do; Intel's issue one, and there Fma was faster). Amx: the same weights meet Intel's matrix units. Products are
// exact in these. Blocks (shorts.h): bf16 become whole numbers with a common exponent for each 64. Int8 (int8.h), GroupedFma,
// GroupedBytes and GroupedWide (grouped.h), and GroupedShorts (shorts.h) are for weights that have been rounded. See
// benchmarks/linear.py.
#include <array>
#include <bit>

#include "../cpu/amx.h"
#include "../cpu/dot.h"
#include "../cpu/rounding.h"
#include "../cpu/transpose.h"
#include "../cpu/weights.h"
#include "../cpu/works.h"
#include "linear.h"

namespace flyball {
namespace {

constexpr int64_t kPanel = 2 * kLanes;
static_assert(Linear::kColumnMultiple % kPanel == 0);
constexpr int64_t kTileRows = kRegisters / 2 - 2;  // 2 sums for each row, 2 weights and a broadcast fill the registers
constexpr int64_t kAheadBytes = 8192;  // of weights, to prefetch: what memory delivers while it fetches the first of them
constexpr int64_t kLineSteps = 16;  // of a row's inputs, 4 bytes each: a cache line
constexpr int64_t kTilesOfBlock = 8;  // the copy of their rows stays in the second-level cache

template <class V>
struct Halves {
  V low, high;  // the first and the second half of a panel's columns
};
using Pair = Halves<Vec>;

inline Pair load_pair(const float* from) { return {load(from), load(from + kLanes)}; }
inline Pair load_pair(const c10::Half* from) { return {load(from), load(from + kLanes)}; }

// In bf16, columns are interleaved (with 16 lanes 0, 16, 1, 17, ...), so that a shift and a mask make two vectors of one load.
inline Pair load_pair(const c10::BFloat16* from) {
  const VecU both = load_raw<VecU>(from);
  return {first_of(both), second_of(both)};
}

// The column of the i-th number of a panel's row.
constexpr int64_t column_of(at::ScalarType type, int64_t i) { return type == at::kBFloat16 ? i / 2 + i % 2 * kLanes : i; }

// Nothing: sums are results.
struct NoScales {
  NoScales from(int64_t, int64_t) const { return {}; }
};

// An arithmetic says how many features a step takes (kDepth), where a step's weights lie in its kWidth elements, what an
// input looks like that is broadcast to a vector of columns, how both are added to a vector of sums, and what the result is.
// Value is what the layer takes and gives.
template <class T>
struct Fma {
  using Value = T;
  using Weight = T;
  using Input = float;
  using Sum = Vec;
  using Scales = NoScales;
  static constexpr int64_t kDepth = 1, kWidth = kPanel, kTileRows = flyball::kTileRows;

  static int64_t column(int64_t i) { return column_of(c10::CppTypeToScalarType<T>::value, i); }
  static int64_t feature(int64_t) { return 0; }
  static Pair weights(const T* from) { return load_pair(from); }
  // num features, at most a line's -> their steps; the line's others are zero
  static void pack_line(const T* x, int64_t num, Input* line) {
    for (int64_t i = 0; i < kLineSteps; i += kLanes) store(line + i, i < num ? load_up_to(x + i, num - i) : Vec{});
  }
  static Vec broadcast(Input x) { return splat(x); }
  static Vec add(Vec sum, Vec w, Vec x) { return add_product(sum, x, w); }
};

#if FLYBALL_DOT
struct Dot {
  using Value = c10::BFloat16;
  using Weight = c10::BFloat16;
  using Input = uint32_t;  // two features
  using Sum = Vec;
  using Scales = NoScales;
  static constexpr int64_t kDepth = 2, kWidth = kPanel * kDepth, kTileRows = flyball::kTileRows;

  static int64_t column(int64_t i) { return i / 2; }
  static int64_t feature(int64_t i) { return i % 2; }
  static Pair weights(const Weight* from) { return {load_raw<Vec>(from), load_raw<Vec>(from + kPanel)}; }
  static void pack_line(const Weight* x, int64_t num, Input* line) {
    constexpr int64_t kWhole = kLineSteps * kDepth;
    if (num == kWhole) {
      std::memcpy(line, x, kWhole * sizeof(*x));  // of a length that the compiler knows: no call
    } else {
      std::memset(line, 0, kLineSteps * sizeof(Input));
      std::memcpy(line, x, num * sizeof(*x));
    }
  }
  static Vec broadcast(Input x) { return (Vec)splat(Bf16Pair{x}); }
  static Vec add(Vec sum, Vec w, Vec x) { return add_product(sum, (VecU)w, (VecU)x); }
};
#endif

// Where a tile's result goes.
template <class A>
struct Output {
  using T = typename A::Value;
  T* data;  // the first row, the first column
  int64_t stride;
  int64_t columns;  // from the first column to the end of the row
  const T* bias;    // from the first column on, or null
  typename A::Scales scales;

  // What begins so many rows and columns further on.
  Output from(int64_t row, int64_t column) const {
    return {data + row * stride + column, stride, columns - column, bias ? bias + column : nullptr, scales.from(row, column)};
  }
};

template <class T>
void store_panel(T* to, Vec low, Vec high) {
  store(to, low);
  store(to + kLanes, high);
}

#if defined(__AVX512BF16__)
inline void store_panel(c10::BFloat16* to, Vec low, Vec high) {
  const VecU rounded = round_both(low, high);
  __builtin_memcpy(to, &rounded, sizeof(rounded));
}
#endif

// Past the caches, to where a cache line begins.
template <class T>
void stream_panel(T* to, Vec low, Vec high) {
  store_panel(to, low, high);
}

#if defined(__AVX512BF16__)
inline void stream_panel(c10::BFloat16* to, Vec low, Vec high) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)round_both(low, high));
}
#endif

// Where an output ends within a panel. Apart from what writes whole panels, which is to be short: the next tile waits for it.
template <class A>
[[gnu::noinline]] void write_part_of_row(const Output<A>& out, int64_t row, Vec low, Vec high) {
  const int64_t rest = out.columns - kLanes;
  auto* to = out.data + row * out.stride;
  if (out.bias) low += load_up_to(out.bias, out.columns);
  if (out.bias && rest > 0) high += load_up_to(out.bias + kLanes, rest);
  store_up_to(to, low, out.columns);
  if (rest > 0) store_part(to + kLanes, high, rest);
}

template <class A>
[[gnu::always_inline]] inline void write_row(const Output<A>& out, int64_t row, Vec low, Vec high, bool streams = false) {
  if (out.columns < kPanel) return write_part_of_row(out, row, low, high);
  if (out.bias) low += load(out.bias), high += load(out.bias + kLanes);
  auto* to = out.data + row * out.stride;
  streams ? stream_panel(to, low, high) : store_panel(to, low, high);
}

// The same of sums that are to be scaled. Apart, since with the scales in a tile's registers the compiler keeps its sums on the
// stack: 32 sequences with int8 have 1.38 times the tokens a second.
template <class A>
[[gnu::noinline]] void write_scaled(const Output<A>& out, int64_t row, typename A::Sum low, typename A::Sum high, bool streams) {
  write_row(out, row, out.scales.result(row, 0, low), out.scales.result(row, kLanes, high), streams);
}

// Of sums.
template <class A>
[[gnu::always_inline]] inline void write_sums(const Output<A>& out, int64_t row, typename A::Sum low, typename A::Sum high,
                                              bool streams = false) {
  if constexpr (std::is_same_v<typename A::Sum, Vec>) write_row(out, row, low, high, streams);
  else write_scaled(out, row, low, high, streams);
}

#if FLYBALL_AMX
static_assert(kAmxStepBytes == kLineSteps * sizeof(float));  // a step of the tiles takes a line of each row

// Weights as Dot has them, in whole steps of the tiles.
struct Amx : Dot {
  using Products = AmxBf16;
  static constexpr int64_t kTileRows = 2 * kAmxRows, kStepMultiple = kLineSteps;
};
#endif

template <class A>
constexpr bool kHasTiles = requires { typename A::Products; };

template <class A>
int64_t num_steps(int64_t k) {
  if constexpr (requires { A::kStepMultiple; }) k = round_up(k, A::kStepMultiple * A::kDepth);
  return round_up(k, A::kDepth) / A::kDepth;
}

// weight [n, k] -> packed [ceil(n / kPanel), steps, kPanel * depth], missing columns and features zero
template <class A>
void pack_weight(const typename A::Weight* weight, int64_t n, int64_t k, typename A::Weight* packed) {
  const int64_t num_panels = round_up(n, kPanel) / kPanel, steps = num_steps<A>(k);
#pragma omp parallel for
  for (int64_t panel = 0; panel < num_panels; ++panel) {
    for (int64_t i = 0; i < A::kWidth; ++i) {
      const int64_t column = panel * kPanel + A::column(i);
      for (int64_t step = 0; step < steps; ++step) {
        const int64_t j = step * A::kDepth + A::feature(i);
        packed[(panel * steps + step) * A::kWidth + i] = column < n && j < k ? weight[column * k + j] : typename A::Weight(0);
      }
    }
  }
}

// rows of x [rows, k] -> [steps / kLineSteps, rows, kLineSteps], zero behind the last feature. A tile's sums read a line of each
// row to its end, so that rows need not be transposed.
template <class A>
void pack_rows(const typename A::Value* x, int64_t rows, int64_t k, typename A::Input* packed) {
  constexpr int64_t kFeatures = kLineSteps * A::kDepth;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t j = 0; j < k; j += kFeatures)
      A::pack_line(x + row * k + j, std::min(kFeatures, k - j), packed + (j / kFeatures * rows + row) * kLineSteps);
}

#include "int8.h"
#include "grouped.h"
#include "shorts.h"
#include "tiles.h"

// Weights to fetch into the second-level cache while a tile is multiplied: lines from there on, and with each step so many bytes
// further.
struct Ahead {
  const char* from;
  int64_t step_bytes;
};

// Panels panels times a tile of Rows rows. Every sum runs over the steps in order, whatever Rows and Panels are, so a row's
// result does not depend on how many rows there are. Without anything else to fetch, it is what follows in the panels. A tile that
// shares with others what is to be fetched has no more than half as much of it: to fetch a line twice would take a place among those
// that are on their way.
template <class A, int Rows, int Panels, bool Shares = false>
void multiply_tile(const typename A::Input* x, const typename A::Weight* panels, int64_t steps, const Output<A>& out,
                   const std::optional<Ahead>& given) {
  typename A::Sum low[Panels][Rows] = {}, high[Panels][Rows] = {};
  constexpr int64_t kStepBytes = A::kWidth * sizeof(typename A::Weight), kPanelAhead = kAheadBytes / Panels;
  constexpr int64_t kFetchedBytes = Shares ? std::max<int64_t>(64, kStepBytes / 2) : kStepBytes;
  Ahead ahead = given.value_or(Ahead{reinterpret_cast<const char*>(panels) + kPanelAhead, kStepBytes});
  for (int64_t step = 0; step < steps; ++step) {
    // where a panel ends, the one that the next tile has in its place comes next
    const bool turns = Panels > 1 && (steps - step) * kStepBytes <= kPanelAhead;
    const int64_t skipped = turns ? (Panels - 1) * steps * kStepBytes : 0;
#pragma GCC unroll 4
    for (int p = 0; p < Panels; ++p) {
      const typename A::Weight* from = panels + (p * steps + step) * A::kWidth;
#pragma GCC unroll 4
      for (int64_t line = 0; line < kFetchedBytes; line += 64)
        __builtin_prefetch(ahead.from + skipped + p * steps * kStepBytes + line, 0, 2);
      const auto w = A::weights(from);
#pragma GCC unroll 16
      for (int row = 0; row < Rows; ++row) {
        const auto value = A::broadcast(x[row * kLineSteps]);
        low[p][row] = A::add(low[p][row], w.low, value);
        high[p][row] = A::add(high[p][row], w.high, value);
      }
    }
    ahead.from += ahead.step_bytes;
    x += (step + 1) % kLineSteps > 0 ? 1 : (Rows - 1) * kLineSteps + 1;  // or on to the rows' next lines
  }
#pragma GCC unroll 4
  for (int p = 0; p < Panels; ++p) {
    const Output<A> to = out.from(0, p * kPanel);
#pragma GCC unroll 16
    for (int row = 0; row < Rows; ++row) write_sums(to, row, low[p][row], high[p][row]);
  }
}

// Few rows have too few sums in flight to hide the arithmetic's latency, so they take several panels at a time. Unpacking weights of
// 4 bits takes as long as that latency, and pairs of 16 bits are added to a sum without any.
template <class A>
constexpr int panels_at_once(int64_t rows) {
  if (kHasRuns<A> || (kIsQuantized<A> && has_byte_pairs())) return 1;
  return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
}

template <class A, int Rows = A::kTileRows>
void multiply(int64_t rows, int64_t num_panels, const typename A::Input* x, const typename A::Weight* panels, int64_t steps,
              const Output<A>& out, const std::optional<Ahead>& ahead) {
  if (rows == Rows) {
    if constexpr (kHasRuns<A>) {
      with_scales<A>(out.scales.runs, [&]<class Scale>(Scale*) { multiply_runs<A, Rows, Scale>(x, panels, out); });
    } else {
      if constexpr (2 * Rows >= A::kTileRows)
        if (ahead) return multiply_tile<A, Rows, 1, true>(x, panels, steps, out, ahead);
      if (num_panels == panels_at_once<A>(Rows))
        return multiply_tile<A, Rows, panels_at_once<A>(Rows)>(x, panels, steps, out, ahead);
      for (int64_t p = 0; p < num_panels; ++p)
        multiply_tile<A, Rows, 1>(x, panels + p * steps * A::kWidth, steps, out.from(0, p * kPanel), ahead);
    }
    return;
  }
  if constexpr (Rows > 1) multiply<A, Rows - 1>(rows, num_panels, x, panels, steps, out, ahead);
}

// What a row's inputs and a panel have, in elements.
struct Sizes {
  int64_t steps, inputs, more, panel;  // more: floats beside the inputs
};

template <class A>
Sizes sizes(int64_t k, const Output<A>& out) {
  if constexpr (kHasRuns<A>) {
    const Runs& runs = out.scales.runs;
    const int64_t inputs = A::kParts * runs.num_steps();
    return {runs.num_steps(), inputs, runs.num * int64_t(sizeof(RunInputs) / sizeof(float)), runs.panel_bytes<A>()};
  }
  const int64_t steps = num_steps<A>(k);
  return {steps, round_up(steps, kLineSteps), kIsQuantized<A>, steps * A::kWidth};
}

// How many rows share the copy of their inputs.
template <class A>
int64_t rows_of_block([[maybe_unused]] int64_t num_inputs) {
#if FLYBALL_AMX
  if constexpr (kHasTiles<A>) {
    constexpr int64_t kMost = 512;
    const int64_t rows = kInputBytes / static_cast<int64_t>(sizeof(float)) / num_inputs;
    return std::clamp(rows / A::kTileRows * A::kTileRows, A::kTileRows, kMost);
  }
#endif
  return kTilesOfBlock * A::kTileRows;
}

// Whether an output of m rows goes past the caches.
template <class A>
bool should_stream([[maybe_unused]] const Output<A>& out, [[maybe_unused]] int64_t m, [[maybe_unused]] const Team& team) {
#if FLYBALL_AMX
  constexpr int64_t kLine = 64, size = sizeof(typename A::Value);
  const bool is_aligned = reinterpret_cast<uintptr_t>(out.data) % kLine == 0 && out.stride * size % kLine == 0;
  return kHasTiles<A> && is_aligned && m * out.columns * size >= kStreamBytes * team.size();
#else
  return false;
#endif
}

// Whether a thread multiplies a panel of gates and the panel that they are for, and gates it while it is in the nearest cache.
template <class A>
bool gates_panels(int64_t n) {
  return !kHasTiles<A> && n % (2 * kPanel) == 0;
}

// rows of x [rows, k] to rows of out, by each thread of a team. With an activation they are of the second half of the columns,
// gated by the first half.
template <class A>
void linear_block(const typename A::Value* x, int64_t rows, int64_t k, const typename A::Weight* packed, int64_t n,
                  Output<A> out, [[maybe_unused]] std::optional<Activation> activation, [[maybe_unused]] bool streams,
                  const Team& team, float* memory) {
  static_assert(sizeof(typename A::Input) == sizeof(float));
  const Sizes size = sizes(k, out);
  auto* inputs = reinterpret_cast<typename A::Input*>(memory);
  [[maybe_unused]] auto* more = reinterpret_cast<float*>(inputs + rows * size.inputs);
  if constexpr (kIsQuantized<A>) out.scales.rows = more;
  if constexpr (kHasRuns<A>) out.scales.inputs = reinterpret_cast<RunInputs*>(more);
  const int64_t num_halves = activation ? 2 : 1, num_panels = round_up(n, kPanel) / kPanel / num_halves;  // of a half
  const int64_t num_tiles = round_up(rows, A::kTileRows) / A::kTileRows, num_threads = team.size();
  const int64_t group = num_panels >= 2 * num_threads * panels_at_once<A>(rows) ? panels_at_once<A>(rows) : 1;
  const int64_t num_groups = round_up(num_panels, group) / group;
  // tiles of equal height, give or take a row
  const auto tile_start = [height = rows / num_tiles, num_taller = rows % num_tiles](int64_t tile) {
    return tile * height + std::min(tile, num_taller);
  };
  team.share(num_tiles, [&](int64_t tile) {
    const int64_t row = tile_start(tile), num = tile_start(tile + 1) - row;
    if constexpr (kIsQuantized<A>)
      pack_rounded<A>(x + row * k, num, k, inputs + row * size.inputs, out.scales.rows + row);
    else if constexpr (kHasRuns<A>)
      A::pack(x + row * k, num, out.scales.from(row, 0), inputs + row * size.inputs);
    else
      pack_rows<A>(x + row * k, num, k, inputs + row * size.inputs);
  });
  if constexpr (kHasTiles<A>) {
    run_tiles<A>({inputs, packed, rows, num_tiles, size.steps, out, streams}, num_panels, team);
  } else {
    // A thread's panels follow each other, since each fetches the beginning of the next. A panel's tiles stay on one thread,
    // unless there are few panels.
    const int64_t unit = num_groups < 4 * num_threads ? 1 : num_tiles;
    const int64_t panel_bytes = size.panel * sizeof(typename A::Weight);
    team.share_runs(num_groups * num_tiles, unit, [&](int64_t begin, int64_t end) {
      using T = typename A::Value;
      alignas(64) T gates[kTilesOfBlock * A::kTileRows * kPanel], values[A::kTileRows * kPanel];
      static_assert(kHasRuns<A> || A::kTileRows >= 3 * panels_at_once<A>(3), "a tile of few rows is that of several panels");
      for (int64_t last; begin < end; begin = last) {
        const int64_t panel = begin / num_tiles * group, width = std::min(group, num_panels - panel), columns = width * kPanel;
        const int64_t first = begin % num_tiles;
        last = std::min(begin - first + num_tiles, end);
        const int64_t num = last - begin, share = panel_bytes / num, step_bytes = round_up(share, size.steps) / size.steps;
        for (int64_t half = 0; half < num_halves; ++half) {
          const int64_t of_half = half * num_panels + panel;
          // Several tiles fetch the panel that comes next, each its share: memory has all of their time for it.
          const int64_t next = half + 1 < num_halves ? num_panels + panel : panel + group;
          const auto* from = reinterpret_cast<const char*>(packed + next * size.panel);
          const auto fetched_by = [&](int64_t i) {
            return num > 1 ? std::optional(Ahead{from + i * share, step_bytes}) : std::nullopt;
          };
          for (int64_t tile = first; tile < first + num; ++tile) {
            const int64_t row = tile_start(tile), num_rows = tile_start(tile + 1) - row;
            T* const gates_of_tile = gates + (row - tile_start(first)) * columns;
            Output<A> to = out.from(row, of_half * kPanel);
            if (activation) to.data = half == 0 ? gates_of_tile : values, to.stride = columns;
            multiply<A>(num_rows, width, inputs + row * size.inputs, packed + of_half * size.panel, size.steps, to,
                        fetched_by(tile - first));
            for (int64_t r = 0; half == 1 && r < num_rows; ++r)
              gate_row(*activation, gates_of_tile + r * columns, values + r * columns,
                       out.data + (row + r) * out.stride + panel * kPanel, columns);
          }
        }
      }
    });
  }
}

// x [m, k] -> out [m, n], or with an activation [m, n / 2]; n columns of the weights, bias and scales from the first on
template <class A>
Work linear_work(const typename A::Value* x, int64_t m, int64_t k, const typename A::Weight* packed, int64_t n, int64_t first,
                 Output<A> out, std::optional<Activation> activation) {
  using T = typename A::Value;
  constexpr int64_t kLine = 64 / sizeof(float);
  const Sizes size = sizes(k, out);
  packed += first / kPanel * size.panel;
  out.bias = out.bias ? out.bias + first : nullptr;
  out.scales = out.scales.from(0, first);
  const int64_t block_rows = rows_of_block<A>(size.inputs);
  const bool gates_later = activation && !gates_panels<A>(n);  // then all columns come into memory first
  const int64_t of_inputs = round_up(std::min(m, block_rows) * (size.inputs + size.more), kLine);  // floats
  const int64_t of_columns = gates_later ? round_up(m * n * sizeof(T), sizeof(float)) / sizeof(float) : 0;
  return {of_inputs + of_columns, [=](const Team& team, float* memory) {
            Output<A> to = out;
            if (gates_later) to.data = reinterpret_cast<T*>(memory + of_inputs), to.stride = n;
            const bool streams = should_stream(to, m, team);
            const auto run_block = [&](int64_t row, int64_t end, const Team& those, float* inputs) {
              linear_block<A>(x + row * k, end - row, k, packed, n, to.from(row, 0), gates_later ? std::nullopt : activation,
                              streams, those, inputs);
            };
            const int64_t num_blocks = round_up(m, block_rows) / block_rows;
            if (!kHasTiles<A> && num_blocks > 1 && num_blocks >= team.size()) {
              // Each thread takes blocks through all columns, and waits for no other before the end.
              const int64_t num = round_up(num_blocks, team.size());
              team.share_runs(num, 1, [&](int64_t block, int64_t) {
                struct Inputs;
                Team::Shared shared(1);
                const Team alone(shared, 0, 1);
                run_block(block * m / num, (block + 1) * m / num, alone, scratch<Inputs>(of_inputs));
              });
            } else {
              for (int64_t row = 0; row < m; row += block_rows) run_block(row, std::min(row + block_rows, m), team, memory);
            }
            if (gates_later) gate_rows<T>(team, *activation, to.data, out.data, m, n / 2);
          }};
}

// How weights of 16 bits are multiplied; Dot is by matrix units where there are any.
enum class Arithmetic { kFma, kDot, kBlocks };

constexpr std::array<std::pair<const char*, Arithmetic>, 3> kArithmetics = {
    {{"fma", Arithmetic::kFma}, {"dot", Arithmetic::kDot}, {"blocks", Arithmetic::kBlocks}}};

Arithmetic arithmetic_of(const std::string& wanted) {
  for (const auto& [name, arithmetic] : kArithmetics)
    if (wanted == name) return arithmetic;
  TORCH_CHECK_VALUE(false, "arithmetic is ", wanted, "; it must be fma, dot or blocks.");
}

Arithmetic fastest_arithmetic(at::ScalarType type) {
  if (type != at::kBFloat16) return Arithmetic::kFma;
  if (has_amx() || has_fast_dot()) return Arithmetic::kDot;
  return prefers_blocks() ? Arithmetic::kBlocks : Arithmetic::kFma;
}

std::string linear_arithmetic(at::ScalarType type) {
  return std::find_if(kArithmetics.begin(), kArithmetics.end(), [fastest = fastest_arithmetic(type)](const auto& each) {
           return each.second == fastest;
         })->first;
}

// What multiplies weights of 16, 8 and 4 bits by inputs of bf16, for people.
std::string bf16_arithmetic() {
  if (has_amx()) return "AMX";
  const Arithmetic fastest = fastest_arithmetic(at::kBFloat16);
  if (fastest == Arithmetic::kFma) return "fp32 FMA";
  if (fastest == Arithmetic::kBlocks) return has_short_dot() ? "AVX512_VNNI" : "pairs of 16 bits";
#if defined(__x86_64__)
  return "AVX512_BF16";
#else
  return "BFDOT";
#endif
}

std::string byte_arithmetic() {
#if defined(__AVX512VNNI__)
  return "AVX512_VNNI";
#elif defined(__ARM_FEATURE_DOTPROD)
  return "SDOT";
#else
  return "one byte at a time";
#endif
}

std::string int8_arithmetic() {
  if (has_byte_pairs()) return "pairs of 16 bits";
  return has_amx() ? byte_arithmetic() + ", AMX for many rows" : byte_arithmetic();
}

// Whether weights of so many bits meet bf16 inputs as two planes of bytes.
constexpr bool has_planes(int bits) { return has_byte_dot() || (has_byte_pairs() && bits == 4); }

std::string grouped_arithmetic(int64_t bits) {
  if (has_planes(bits)) return has_byte_pairs() ? "pairs of bytes" : byte_arithmetic();
  return has_short_pairs() ? "pairs of 16 bits" : "fp32 FMA";
}

// Call f with the arithmetic for tensors of this type.
template <class F>
void with_arithmetic(at::ScalarType type, Arithmetic arithmetic, F f) {
  const bool is_bf16 = type == at::kBFloat16;
#if FLYBALL_AMX
  if (arithmetic == Arithmetic::kDot && has_amx() && is_bf16) return f(Amx{});
#endif
#if FLYBALL_DOT
  if (arithmetic == Arithmetic::kDot && is_bf16) return f(Dot{});
#endif
  TORCH_CHECK_VALUE(arithmetic != Arithmetic::kDot,
                    "the bf16 dot product takes bfloat16 and a CPU with AVX512_BF16, or Arm's BF16");
  if constexpr (has_short_pairs())
    if (arithmetic == Arithmetic::kBlocks && is_bf16) return f(Blocks{});
  TORCH_CHECK_VALUE(arithmetic != Arithmetic::kBlocks, "blocks of whole numbers take bfloat16 and a CPU with AVX2");
  dispatch(type, "linear", [&]<class T>(T*) { f(Fma<T>{}); });
}

Tensor linear_pack(const Tensor& unpacked, const std::string& arithmetic) {
  const Tensor weight = unpacked.contiguous();
  const int64_t n = weight.size(0), k = weight.size(1), num_panels = round_up(n, kPanel) / kPanel;
  Tensor packed;
  with_arithmetic(weight.scalar_type(), arithmetic_of(arithmetic), [&]<class A>(A) {
    using T = typename A::Value;
    if constexpr (kHasRuns<A>) {
      packed = empty_weight({num_panels, A::runs(k).template panel_bytes<A>()}, weight.options().dtype(at::kByte));
      pack_blocks(data<const T>(weight), n, A::runs(k), data<uint8_t>(packed));
    } else {
      packed = empty_weight({num_panels, num_steps<A>(k), A::kWidth}, weight.options());
      pack_weight<A>(data<const T>(weight), n, k, data<T>(packed));
    }
  });
  return packed;
}

// How many columns of weights become so many of an output.
int64_t num_columns(const Tensor& out, std::optional<Activation> activation) { return (activation ? 2 : 1) * out.size(1); }

// Weights and bias are where tensors have them. To ask a tensor reads three cache lines, which hold nothing of it any more when
// all weights have been read since the last step.
Work linear_work(const Tensor& x, const void* packed, const void* bias, Arithmetic arithmetic,
                 std::optional<Activation> activation, const Tensor& out, int64_t first = 0) {
  const int64_t m = x.size(0), k = x.size(1), n = num_columns(out, activation);
  Work work;
  with_arithmetic(x.scalar_type(), arithmetic, [&]<class A>(A) {
    using T = typename A::Value;
    typename A::Scales scales{};
    if constexpr (kHasRuns<A>) scales = {nullptr, A::runs(k)};
    work = linear_work<A>(data<const T>(x), m, k, static_cast<const typename A::Weight*>(packed), n, first,
                          {data<T>(out), out.size(1), n, static_cast<const T*>(bias), scales}, activation);
  });
  return work;
}

Tensor linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t n,
              const std::string& arithmetic) {
  const Tensor x = input.contiguous(), out = at::empty({x.size(0), n}, x.options());
  run_in_team({linear_work(x, packed.data_ptr(), data_or_null<char>(bias), arithmetic_of(arithmetic), {}, out)});
  return out;
}

// weight [n, k] -> int8 and a scale for each row
std::tuple<Tensor, Tensor> linear_int8_round(const Tensor& unpacked) {
  const Tensor weight = unpacked.contiguous();
  const int64_t n = weight.size(0), k = weight.size(1);
  const Tensor values = at::empty({n, k}, weight.options().dtype(at::kChar));
  const Tensor scales = at::empty({n}, weight.options().dtype(at::kFloat));
  dispatch(weight, "linear_int8_round",
           [&]<class T>(T*) { round_weight(data<const T>(weight), n, k, data<int8_t>(values), data<float>(scales)); });
  return {values, scales};
}

// values [n, k], scales [n] -> panels, and for each of their columns its scale and the sum of its weights
std::tuple<Tensor, Tensor, Tensor> linear_int8_pack(const Tensor& unpacked, const Tensor& unpadded) {
  const Tensor values = unpacked.contiguous(), given = unpadded.contiguous();
  const int64_t n = values.size(0), k = values.size(1), columns = round_up(n, kPanel);
  using A = Int8<float>;  // the layout does not depend on the type of inputs
  const Tensor packed = empty_weight({columns / kPanel, num_steps<A>(k), A::kWidth}, values.options());
  const Tensor scales = at::empty({columns}, given.options()).zero_();
  const Tensor sums = at::empty({columns}, values.options().dtype(at::kInt)).zero_();
  pack_weight<A>(data<const int8_t>(values), n, k, data<int8_t>(packed));
  std::copy_n(data<const float>(given), n, data<float>(scales));
  sum_rows(data<const int8_t>(values), n, k, data<int32_t>(sums));
  return {packed, scales, sums};
}

Work linear_int8_work(const Tensor& x, const int8_t* packed, const float* scales, const int32_t* sums, const void* bias,
                      std::optional<Activation> activation, const Tensor& out, int64_t first = 0) {
  const int64_t m = x.size(0), k = x.size(1), n = num_columns(out, activation);
  Work work;
  dispatch(x, "linear_int8", [&]<class T>(T*) {
    const ColumnScales of_columns{nullptr, scales, sums};
    const auto with = [&]<class A>(A) {
      work = linear_work<A>(data<const T>(x), m, k, packed, n, first,
                            {data<T>(out), out.size(1), n, static_cast<const T*>(bias), of_columns}, activation);
    };
#if FLYBALL_AMX
    if (has_amx() && m > Int8<T>::kTileRows) return with(AmxInt8<T>{});
#endif
    with(Int8<T>{});
  });
  return work;
}

Tensor linear_int8(const Tensor& input, const Tensor& packed, const Tensor& scales, const Tensor& sums,
                   const std::optional<Tensor>& bias, int64_t n) {
  const Tensor x = input.contiguous(), out = at::empty({x.size(0), n}, x.options());
  run_in_team({linear_int8_work(x, data<const int8_t>(packed), data<const float>(scales), data<const int32_t>(sums),
                                data_or_null<char>(bias), {}, out)});
  return out;
}

// Call f with the arithmetic for weights of so many bits, scales of a type, and inputs of this type, which have so many bits.
template <class F>
void with_groups(at::ScalarType type, int64_t bits, at::ScalarType scales, int64_t input_bits, F f) {
  TORCH_CHECK_VALUE(scales == type || scales == at::kFloat, "scales are ", scales, "; they must be ", type, ", like inputs, or Float.");
  TORCH_CHECK_VALUE(bits == 4 || bits == 8, "bits is ", bits, "; it must be 4 or 8.");
  TORCH_CHECK_VALUE(input_bits == 16 || (input_bits == 8 && bits == 4), "input_bits is ", input_bits,
                    "; it must be 16, or 8 beside weights of 4 bits.");
  dispatch(type, "linear_grouped", [&]<class T>(T*) {
    const auto with_bits = [&]<int Bits>(std::integral_constant<int, Bits>) {
      if constexpr (has_planes(Bits) && std::is_same_v<T, c10::BFloat16>)
        f(GroupedBytes<T, Bits, 2>{});
      else if constexpr (has_short_pairs() && Bits == 8 && std::is_same_v<T, c10::BFloat16>)
        f(GroupedShorts{});
      else
        f(GroupedFma<T, Bits>{});
    };
    if (bits == 8) return with_bits(std::integral_constant<int, 8>{});
    if (input_bits == 8) return f(GroupedBytes<T, 4, 1>{});
    with_bits(std::integral_constant<int, 4>{});
  });
}

// values [n, k] of 0 to 15 or 255, scales of this type or fp32 and offsets of fp32 [n, groups] -> panels for inputs of this type
Tensor linear_grouped_pack(const Tensor& unpacked, const Tensor& scales, const std::optional<Tensor>& offsets, int64_t bits,
                           int64_t group_size, at::ScalarType type, int64_t input_bits) {
  const Tensor values = unpacked.contiguous(), of_groups = scales.contiguous();
  const std::optional<Tensor> others = offsets ? std::optional(offsets->contiguous()) : std::nullopt;
  const int64_t n = values.size(0), k = values.size(1);
  Tensor packed;
  with_groups(type, bits, of_groups.scalar_type(), input_bits, [&]<class A>(A) {
    const Runs runs = Runs::make<A>(k, group_size, offsets.has_value(), of_groups.scalar_type());
    packed = empty_weight({round_up(n, kPanel) / kPanel, runs.panel_bytes<A>()}, values.options());
    pack_groups<A>(data<const uint8_t>(values), static_cast<const uint8_t*>(of_groups.data_ptr()), data_or_null<float>(others), n,
                   runs, data<uint8_t>(packed));
  });
  return packed;
}

// A group has an even number of features.
Work linear_grouped_work(const Tensor& x, const uint8_t* packed, const void* bias, int64_t bits, int64_t group_size,
                         bool has_zeros, at::ScalarType scales, int64_t input_bits,
                         std::optional<Activation> activation, const Tensor& out, int64_t first = 0) {
  const int64_t m = x.size(0), k = x.size(1), n = num_columns(out, activation);
  Work work;
  const auto with = [&]<class A>(A) {
    using T = typename A::Value;
    const RunScales of_runs{nullptr, Runs::make<A>(k, group_size, has_zeros, scales)};
    work = linear_work<A>(data<const T>(x), m, k, packed, n, first,
                          {data<T>(out), out.size(1), n, static_cast<const T*>(bias), of_runs}, activation);
  };
  with_groups(x.scalar_type(), bits, scales, input_bits, [&]<class A>(A arithmetic) {
    if constexpr (has_byte_pairs() && std::is_same_v<A, GroupedWide::Bytes>)
      if (m >= GroupedWide::kLeastRows) return with(GroupedWide{});
    with(arithmetic);
  });
  return work;
}

Tensor linear_grouped(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t n, int64_t bits,
                      int64_t group_size, bool has_zeros, at::ScalarType scales, int64_t input_bits) {
  const Tensor x = input.contiguous(), out = at::empty({x.size(0), n}, x.options());
  run_in_team({linear_grouped_work(x, data<const uint8_t>(packed), data_or_null<char>(bias), bits, group_size, has_zeros, scales,
                                   input_bits, {}, out)});
  return out;
}

TORCH_LIBRARY_FRAGMENT(flyball, m) {
  m.def("linear_arithmetic(ScalarType weights) -> str", &linear_arithmetic);
  m.def("has_blocks() -> bool", &has_short_pairs);
  m.def("linear_bf16_arithmetic() -> str", &bf16_arithmetic);
  m.def("linear_int8_arithmetic() -> str", &int8_arithmetic);
  m.def("linear_grouped_arithmetic(int bits) -> str", &grouped_arithmetic);
  m.def("linear_pack(Tensor weight, str arithmetic) -> Tensor");
  m.def("linear_int8_round(Tensor weight) -> (Tensor, Tensor)");
  m.def("linear_int8_pack(Tensor values, Tensor scales) -> (Tensor, Tensor, Tensor)");
  m.def("linear_int8(Tensor x, Tensor packed, Tensor scales, Tensor sums, Tensor? bias, int out_features) -> Tensor");
  m.def("linear_grouped_pack(Tensor values, Tensor scales, Tensor? offsets, int bits, int group_size, ScalarType inputs, "
        "int input_bits) -> Tensor");
  m.def("linear_grouped(Tensor x, Tensor packed, Tensor? bias, int out_features, int bits, int group_size, bool has_zeros, "
        "ScalarType scales, int input_bits) -> Tensor");
  m.def("linear(Tensor x, Tensor packed, Tensor? bias, int out_features, str arithmetic) -> Tensor");
  m.impl("linear_pack", c10::DispatchKey::CPU, TORCH_FN(linear_pack));
  m.impl("linear", c10::DispatchKey::CPU, TORCH_FN(linear));
  m.impl("linear_int8_round", c10::DispatchKey::CPU, TORCH_FN(linear_int8_round));
  m.impl("linear_int8_pack", c10::DispatchKey::CPU, TORCH_FN(linear_int8_pack));
  m.impl("linear_int8", c10::DispatchKey::CPU, TORCH_FN(linear_int8));
  m.impl("linear_grouped_pack", c10::DispatchKey::CPU, TORCH_FN(linear_grouped_pack));
  m.impl("linear_grouped", c10::DispatchKey::CPU, TORCH_FN(linear_grouped));
}

}  // namespace

c10::intrusive_ptr<Linear> packed_linear(Tensor packed, OptionalTensor bias, int64_t n, int64_t k, std::string arithmetic) {
  const auto prepare = [weights = packed.data_ptr(), biases = data_or_null<char>(bias), arithmetic = arithmetic_of(arithmetic)](
                           const Tensor& x, std::optional<Activation> activation, const Tensor& out, int64_t first) {
    return linear_work(x, weights, biases, arithmetic, activation, out, first);
  };
  return c10::make_intrusive<Linear>(k, n, prepare, std::vector{packed, bias.value_or(Tensor())});
}

c10::intrusive_ptr<Linear> int8_linear(Tensor packed, Tensor scales, Tensor sums, OptionalTensor bias, int64_t n, int64_t k) {
  const auto prepare = [weights = data<const int8_t>(packed), of_columns = data<const float>(scales),
                        of_weights = data<const int32_t>(sums), biases = data_or_null<char>(bias)](
                           const Tensor& x, std::optional<Activation> activation, const Tensor& out, int64_t first) {
    return linear_int8_work(x, weights, of_columns, of_weights, biases, activation, out, first);
  };
  return c10::make_intrusive<Linear>(k, n, prepare, std::vector{packed, scales, sums, bias.value_or(Tensor())});
}

c10::intrusive_ptr<Linear> grouped_linear(Tensor packed, OptionalTensor bias, int64_t n, int64_t k, int64_t bits,
                                          int64_t group_size, bool has_zeros, at::ScalarType scales, int64_t input_bits) {
  const auto prepare = [bits, group_size, has_zeros, scales, input_bits, weights = data<const uint8_t>(packed),
                        biases = data_or_null<char>(bias)](
                           const Tensor& x, std::optional<Activation> activation, const Tensor& out, int64_t first) {
    return linear_grouped_work(x, weights, biases, bits, group_size, has_zeros, scales, input_bits, activation, out, first);
  };
  return c10::make_intrusive<Linear>(k, n, prepare, std::vector{packed, bias.value_or(Tensor())});
}

}  // namespace flyball
