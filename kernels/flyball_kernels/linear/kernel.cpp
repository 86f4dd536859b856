// Linear layer: 16-bit weights, fp32 arithmetic.
//
// A weight is stored once, as panels of 32 columns (output features) that a thread streams through, for one row as for
// hundreds. 16-bit weights become fp32 in registers and meet fp32 FMAs: on the machines we measured those run faster
// than the bf16 dot product instruction, and products are exact. See benchmarks/linear.py.
#include "../cpu/tensors.h"

namespace flyball {
namespace {

constexpr int64_t kPanel = 2 * kLanes;
#if defined(__AVX512F__)
constexpr int64_t kTileRows = 14;  // 28 accumulators, 2 weights and a broadcast fill the 32 registers
#elif defined(__aarch64__)
constexpr int64_t kTileRows = 3;
#else
constexpr int64_t kTileRows = 2;
#endif
constexpr int64_t kAhead = 32;  // how many steps along in_features to prefetch
constexpr int64_t kBlockRows = 8 * kTileRows;  // their fp32 copy stays in the second-level cache

struct Pair {
  Vec low, high;  // columns 0..15 and 16..31 of a panel
};

inline Pair load_pair(const float* from) { return {load(from), load(from + kLanes)}; }
inline Pair load_pair(const c10::Half* from) { return {load(from), load(from + kLanes)}; }

// bf16 panels are interleaved (0, 16, 1, 17, ...), so that a shift and a mask make two vectors of one load.
inline Pair load_pair(const c10::BFloat16* from) {
  const VecU both = load_raw<VecU>(from);
  return {(Vec)(both << 16), (Vec)(both & 0xffff0000u)};
}

template <class T>
int64_t panel_column(int64_t i) {
  return std::is_same_v<T, c10::BFloat16> ? i / 2 + i % 2 * kLanes : i;
}

// weight [n, k] -> packed [ceil(n / 32), k, 32], missing columns zero
template <class T>
void pack_weight(const T* weight, int64_t n, int64_t k, T* packed) {
  const int64_t num_panels = round_up(n, kPanel) / kPanel;
#pragma omp parallel for
  for (int64_t panel = 0; panel < num_panels; ++panel) {
    for (int64_t i = 0; i < kPanel; ++i) {
      const int64_t column = panel * kPanel + panel_column<T>(i);
      for (int64_t j = 0; j < k; ++j) packed[(panel * k + j) * kPanel + i] = column < n ? weight[column * k + j] : T(0);
    }
  }
}

// rows of x [rows, k] -> [k, rows] fp32
template <class T>
void pack_rows(const T* x, int64_t stride, int64_t rows, int64_t k, float* packed) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t j = 0; j < k; ++j) packed[j * rows + row] = static_cast<float>(x[row * stride + j]);
}

// Where a tile's result goes.
template <class T>
struct Output {
  T* data;  // the first row, the first column
  int64_t stride;
  int64_t columns;  // from the first column to the end of the row
  const T* bias;    // from the first column on, or null

  Output panel(int64_t p) const {
    return {data + p * kPanel, stride, columns - p * kPanel, bias ? bias + p * kPanel : nullptr};
  }
};

template <class T>
void write_row(const Output<T>& out, int64_t row, Vec low, Vec high) {
  const int64_t rest = out.columns - kLanes;
  T* to = out.data + row * out.stride;
  if (out.bias) low += load_up_to(out.bias, out.columns);
  store_up_to(to, low, out.columns);
  if (rest <= 0) return;
  if (out.bias) high += load_up_to(out.bias + kLanes, rest);
  store_up_to(to + kLanes, high, rest);
}

// Panels panels times a tile of Rows rows. Every sum runs over k in order, whatever Rows and Panels are, so a row's
// result does not depend on how many rows there are.
template <class T, int Rows, int Panels>
void multiply_tile(const float* x, const T* panels, int64_t k, const Output<T>& out) {
  Vec low[Panels][Rows] = {}, high[Panels][Rows] = {};
  for (int64_t j = 0; j < k; ++j) {
#pragma GCC unroll 4
    for (int p = 0; p < Panels; ++p) {
      const T* from = panels + (p * k + j) * kPanel;
      __builtin_prefetch(from + kAhead * kPanel);  // without it a core reads memory at about half speed
      const Pair w = load_pair(from);
#pragma GCC unroll 16
      for (int row = 0; row < Rows; ++row) {
        const Vec value = splat(x[j * Rows + row]);
        low[p][row] += value * w.low;
        high[p][row] += value * w.high;
      }
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < Panels; ++p) {
#pragma GCC unroll 16
    for (int row = 0; row < Rows; ++row) write_row(out.panel(p), row, low[p][row], high[p][row]);
  }
}

// Few rows have too few sums in flight to hide an FMA's latency, so they take several panels at a time.
constexpr int panels_at_once(int64_t rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

template <class T, int Rows = kTileRows>
void multiply(int64_t rows, int64_t num_panels, const float* x, const T* panels, int64_t k, const Output<T>& out) {
  if (rows == Rows) {
    if (num_panels == panels_at_once(Rows)) return multiply_tile<T, Rows, panels_at_once(Rows)>(x, panels, k, out);
    for (int64_t p = 0; p < num_panels; ++p) multiply_tile<T, Rows, 1>(x, panels + p * k * kPanel, k, out.panel(p));
    return;
  }
  if constexpr (Rows > 1) multiply<T, Rows - 1>(rows, num_panels, x, panels, k, out);
}

template <class T>
void linear_block(const T* x, int64_t rows, int64_t k, const T* packed, int64_t n, const T* bias, T* out) {
  struct Rows;
  float* x32 = scratch<Rows>(rows * k);
  const int64_t num_panels = round_up(n, kPanel) / kPanel, num_tiles = round_up(rows, kTileRows) / kTileRows;
  const int64_t num_threads = omp_get_max_threads();
  const int64_t group = num_panels >= 2 * num_threads * panels_at_once(rows) ? panels_at_once(rows) : 1;
  const int64_t num_groups = round_up(num_panels, group) / group;
  const int64_t chunk = num_groups >= 4 * num_threads ? num_tiles : 1;  // a panel's tiles stay on one thread
  const auto tile_start = [=](int64_t tile) { return tile * rows / num_tiles; };  // tiles of equal height, give or take 1
#pragma omp parallel
  {
#pragma omp for
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const int64_t row = tile_start(tile);
      pack_rows(x + row * k, k, tile_start(tile + 1) - row, k, x32 + row * k);
    }
#pragma omp for schedule(dynamic, chunk)
    for (int64_t i = 0; i < num_groups * num_tiles; ++i) {
      const int64_t panel = i / num_tiles * group, column = panel * kPanel, row = tile_start(i % num_tiles);
      const Output<T> to{out + row * n + column, n, n - column, bias ? bias + column : nullptr};
      multiply(tile_start(i % num_tiles + 1) - row, std::min(group, num_panels - panel), x32 + row * k,
               packed + column * k, k, to);
    }
  }
}

Tensor linear_pack(const Tensor& unpacked) {
  const Tensor weight = unpacked.contiguous();
  const int64_t n = weight.size(0), k = weight.size(1);
  Tensor packed = at::empty({round_up(n, kPanel) / kPanel, k, kPanel}, weight.options());
  prefer_huge_pages(packed.data_ptr(), packed.nbytes());
  dispatch(weight, "linear", [&]<class T>(T*) { pack_weight(data<const T>(weight), n, k, data<T>(packed)); });
  return packed;
}

Tensor linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t n) {
  const Tensor x = input.contiguous();
  const int64_t m = x.size(0), k = x.size(1);
  Tensor out = at::empty({m, n}, x.options());
  dispatch(x, "linear", [&]<class T>(T*) {
    for (int64_t row = 0; row < m; row += kBlockRows) {
      const int64_t rows = std::min(kBlockRows, m - row);
      linear_block(data<const T>(x) + row * k, rows, k, data<const T>(packed), n, data_or_null<T>(bias), data<T>(out) + row * n);
    }
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(flyball, m) {
  m.def("linear_pack(Tensor weight) -> Tensor");
  m.def("linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor");
  m.impl("linear_pack", c10::DispatchKey::CPU, TORCH_FN(linear_pack));
  m.impl("linear", c10::DispatchKey::CPU, TORCH_FN(linear));
}

}  // namespace
}  // namespace flyball
