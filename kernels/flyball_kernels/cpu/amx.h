// The matrix units of Intel's CPUs (AMX): 16 x 16 sums in a tile register, 64 bytes of a row a step.
#pragma once

#include "tensors.h"

namespace flyball {

// What a tile is configured with, as the instruction has it.
struct alignas(64) AmxLayout {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {};
};

}  // namespace flyball

// has_amx(), and in namespace flyball::tile the instructions by number of tile.
#if defined(FLYBALL_AMX_EMULATOR)
#define FLYBALL_AMX 1
#include FLYBALL_AMX_EMULATOR
#elif defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && defined(__linux__)
#define FLYBALL_AMX 1
#include "amx_tiles.h"
#else
namespace flyball {
inline bool has_amx() { return false; }
}  // namespace flyball
#endif

namespace flyball {

#if FLYBALL_AMX
// Of a tile; columns are those of sums, and a step has so many bytes of each row.
constexpr int64_t kAmxRows = 16, kAmxColumns = 16, kAmxStepBytes = 64;

// Tiles 0 to 3 hold the sums of up to 32 rows and 32 columns, 4 and 5 the rows' inputs, 6 and 7 the weights.
class AmxTiles {
 public:
  AmxTiles() = default;
  AmxTiles(const AmxTiles&) = delete;
  ~AmxTiles() {
    if (num_rows_ != 0) tile::release();
  }

  // Leaves tiles undefined if the number changes.
  void set_rows(int64_t num_rows) {
    if (num_rows == num_rows_) return;
    num_rows_ = num_rows;
    const uint8_t first = std::min(num_rows, kAmxRows), second = num_rows > kAmxRows ? num_rows - kAmxRows : 1;
    const uint8_t heights[8] = {first, first, second, second, first, second, kAmxRows, kAmxRows};
    std::copy(heights, heights + 8, layout_.rows);
    tile::configure(layout_);
  }

 private:
  AmxLayout layout_;
  int64_t num_rows_ = 0;
};

// Where a tile's rows are, a second tile, and those of the next step, in bytes.
struct AmxOperand {
  const void* data;
  int64_t stride, second, step;
};

// sums [rows, 32] of a and b over so many steps; added to what is there, or in its place. Rows of b have two features of each
// column side by side in bf16, four in 8 bits. The tiles are configured for the rows. fetch(step) may prefetch.
template <class Products, bool SecondRows, bool SecondColumns, class Sum, class F>
[[gnu::always_inline]] inline void amx_multiply(AmxOperand a, AmxOperand b, int64_t steps, bool adds, Sum* sums, int64_t stride,
                                                F fetch) {
  const char *from_a = static_cast<const char*>(a.data), *from_b = static_cast<const char*>(b.data);
  stride *= sizeof(Sum);
  char *first = reinterpret_cast<char*>(sums), *second = first + kAmxRows * stride;
  constexpr int64_t kRight = kAmxColumns * sizeof(Sum);
  tile::settle_memory();
  if (adds) {
    tile::load<0>(first, stride);
    if constexpr (SecondColumns) tile::load<1>(first + kRight, stride);
    if constexpr (SecondRows) tile::load<2>(second, stride);
    if constexpr (SecondRows && SecondColumns) tile::load<3>(second + kRight, stride);
  } else {
    tile::zero<0>();
    if constexpr (SecondColumns) tile::zero<1>();
    if constexpr (SecondRows) tile::zero<2>();
    if constexpr (SecondRows && SecondColumns) tile::zero<3>();
  }
  for (int64_t step = 0; step < steps; ++step, from_a += a.step, from_b += b.step) {
    fetch(step);
    tile::load<6>(from_b, b.stride);
    tile::load<4>(from_a, a.stride);
    Products::template add<0, 4, 6>();
    if constexpr (SecondColumns) {
      tile::load<7>(from_b + b.second, b.stride);
      Products::template add<1, 4, 7>();
    }
    if constexpr (SecondRows) {
      tile::load<5>(from_a + a.second, a.stride);
      Products::template add<2, 5, 6>();
      if constexpr (SecondColumns) Products::template add<3, 5, 7>();
    }
  }
  tile::store<0>(first, stride);
  if constexpr (SecondColumns) tile::store<1>(first + kRight, stride);
  if constexpr (SecondRows) tile::store<2>(second, stride);
  if constexpr (SecondRows && SecondColumns) tile::store<3>(second + kRight, stride);
}

// The same for numbers of rows and columns that are known when it runs.
template <class Products, class Sum, class F>
inline void amx_multiply(bool second_rows, bool second_columns, AmxOperand a, AmxOperand b, int64_t steps, bool adds, Sum* sums,
                         int64_t stride, F fetch) {
  if (second_rows && second_columns) return amx_multiply<Products, true, true>(a, b, steps, adds, sums, stride, fetch);
  if (second_rows) return amx_multiply<Products, true, false>(a, b, steps, adds, sums, stride, fetch);
  if (second_columns) return amx_multiply<Products, false, true>(a, b, steps, adds, sums, stride, fetch);
  amx_multiply<Products, false, false>(a, b, steps, adds, sums, stride, fetch);
}

// What is multiplied.
struct AmxBf16 {
  template <int Sum, int A, int B>
  [[gnu::always_inline]] static void add() { tile::add_bf16<Sum, A, B>(); }
};

struct AmxBytes {
  template <int Sum, int A, int B>
  [[gnu::always_inline]] static void add() { tile::add_bytes<Sum, A, B>(); }
};
#endif

}  // namespace flyball
