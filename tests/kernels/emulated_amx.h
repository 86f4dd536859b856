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

// What follows is all within tiles, so no sanitizer looks: they would take most of a test's time.
#define FLYBALL_UNCHECKED __attribute__((no_sanitize("address", "undefined")))

// What four bytes of a tile hold.
struct Bf16 {
  static constexpr int kParts = 2;
  using Numbers = float[16][16][kParts];

  // Denormals count as zero.
  FLYBALL_UNCHECKED static float at(const uint8_t* bytes, int part) {
    uint32_t bits = (bytes[2 * part] | bytes[2 * part + 1] << 8) << 16;
    if ((bits & 0x7f800000) == 0) bits &= 0x80000000;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
};

template <class Byte>
struct Bytes {
  static constexpr int kParts = 4;
  using Numbers = int32_t[16][16][kParts];

  FLYBALL_UNCHECKED static int32_t at(const uint8_t* bytes, int part) { return static_cast<Byte>(bytes[part]); }
};

template <class From>
FLYBALL_UNCHECKED void unpack(const Tile& tile, typename From::Numbers& to) {
  for (int64_t row = 0; row < tile.rows; ++row)
    for (int64_t column = 0; column < tile.row_bytes / 4; ++column)
      for (int part = 0; part < From::kParts; ++part) to[row][column][part] = From::at(tile.data[row] + 4 * column, part);
}

// Adds the products of four bytes of a and of b to each sum, for b's rows in their order.
template <int Sum, int A, int B, class Value, class OfA, class OfB>
FLYBALL_UNCHECKED void add() {
  Tile &sum = configured<Sum>(), &a = configured<A>(), &b = configured<B>();
  require(sum.rows == a.rows && a.row_bytes == 4 * b.rows && sum.row_bytes == b.row_bytes, "tiles do not fit each other");
  typename OfA::Numbers of_a;
  typename OfB::Numbers of_b;
  unpack<OfA>(a, of_a);
  unpack<OfB>(b, of_b);
  for (int64_t row = 0; row < sum.rows; ++row) {
    Value sums[16];
    std::memcpy(sums, sum.data[row], sum.row_bytes);
    for (int64_t k = 0; k < b.rows; ++k) {
      for (int64_t column = 0; column < sum.row_bytes / 4; ++column) {
        Value product = 0;
        for (int part = 0; part < OfA::kParts; ++part) product += of_a[row][k][part] * of_b[k][column][part];
        sums[column] += product;
      }
    }
    std::memcpy(sum.data[row], sums, sum.row_bytes);
  }
}

template <int Sum, int A, int B>
void add_bf16() {
  add<Sum, A, B, float, Bf16, Bf16>();
}

template <int Sum, int A, int B>
void add_bytes() {
  add<Sum, A, B, int32_t, Bytes<uint8_t>, Bytes<int8_t>>();
}

}  // namespace tile
}  // namespace flyball
