// AMX's instructions, in memory: what they do by Intel's description, so that CPUs without them can run what uses them. What a
// CPU would refuse ends the process. AddressSanitizer sees what is read and written.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace flyball {

inline bool has_amx() { return true; }

namespace tile {

struct Tile {
  int64_t rows = 0, row_bytes = 0;
  alignas(64) uint8_t data[16][64];
};
inline thread_local Tile tiles[8];

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "emulated AMX: %s\n", what);
  std::abort();
}

inline void settle_memory() {}

inline void configure(const AmxLayout& layout) {
  require(layout.palette == 1 && layout.start_row == 0, "unknown palette or start");
  for (int i = 0; i < 8; ++i) {
    require(layout.rows[i] <= 16 && layout.row_bytes[i] <= 64 && layout.row_bytes[i] % 4 == 0, "a tile is too large");
    require((layout.rows[i] == 0) == (layout.row_bytes[i] == 0), "a tile has rows without bytes or bytes without rows");
    tiles[i].rows = layout.rows[i];
    tiles[i].row_bytes = layout.row_bytes[i];
    std::memset(tiles[i].data, 0xff, sizeof(tiles[i].data));  // NaN, so that nobody relies on what was there
  }
  for (int i = 8; i < 16; ++i) require(layout.rows[i] == 0 && layout.row_bytes[i] == 0, "there are 8 tiles");
}

inline void release() {
  for (Tile& one : tiles) one.rows = one.row_bytes = 0;
}

template <int T>
Tile& configured() {
  require(tiles[T].rows > 0, "a tile is not configured");
  return tiles[T];
}

template <int T>
void load(const char* from, int64_t stride) {
  Tile& to = configured<T>();
  std::memset(to.data, 0, sizeof(to.data));
  for (int64_t row = 0; row < to.rows; ++row) std::memcpy(to.data[row], from + row * stride, to.row_bytes);
}

template <int T>
void store(char* to, int64_t stride) {
  const Tile& from = configured<T>();
  for (int64_t row = 0; row < from.rows; ++row) std::memcpy(to + row * stride, from.data[row], from.row_bytes);
}

template <int T>
void zero() {
  std::memset(configured<T>().data, 0, sizeof(Tile::data));
}

// Of each sum, multiply(sum, four bytes of a, four of b) over a's columns.
template <int Sum, int A, int B, class Value, class F>
void add(F multiply) {
  Tile &sum = configured<Sum>(), &a = configured<A>(), &b = configured<B>();
  require(sum.rows == a.rows && a.row_bytes == 4 * b.rows && sum.row_bytes == b.row_bytes, "tiles do not fit each other");
  for (int64_t row = 0; row < sum.rows; ++row) {
    for (int64_t column = 0; column < sum.row_bytes / 4; ++column) {
      Value value;
      std::memcpy(&value, sum.data[row] + 4 * column, 4);
      for (int64_t k = 0; k < b.rows; ++k) value = multiply(value, a.data[row] + 4 * k, b.data[k] + 4 * column);
      std::memcpy(sum.data[row] + 4 * column, &value, 4);
    }
  }
}

// Denormals count as zero.
inline float value_of(const uint8_t* bytes) {
  uint32_t bits = (bytes[0] | bytes[1] << 8) << 16;
  if ((bits & 0x7f800000) == 0) bits &= 0x80000000;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

template <int Sum, int A, int B>
void add_bf16() {
  add<Sum, A, B, float>([](float sum, const uint8_t* a, const uint8_t* b) {
    return sum + (value_of(a) * value_of(b) + value_of(a + 2) * value_of(b + 2));
  });
}

template <int Sum, int A, int B>
void add_bytes() {
  add<Sum, A, B, int32_t>([](int32_t sum, const uint8_t* a, const uint8_t* b) {
    for (int i = 0; i < 4; ++i) sum += a[i] * static_cast<int8_t>(b[i]);
    return sum;
  });
}

}  // namespace tile
}  // namespace flyball
