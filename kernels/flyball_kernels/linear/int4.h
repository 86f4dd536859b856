// Weights of 4 bits, one scale for each group of features of a column; inputs as they are. Included by kernel.cpp, inside its
// namespace. A byte holds two weights, as numbers from 0 to 15; 8 is the zero that sums are made with.
#pragma once

constexpr int64_t kGroupsAhead = 8;  // how far ahead of a group's scales to prefetch

using VecBytes = uint8_t __attribute__((vector_size(kLanes)));

// What makes results of a group's sums.
struct GroupScales {
  float* inputs;         // sums of the inputs of each row and group, from the first row on; null: no group has another zero
  const float* columns;  // [groups, kPanel] for each panel, from the first one on
  const float* offsets;  // scales times how far zeros lie from 8, likewise; null: nowhere
  int64_t steps, num;    // steps of a group; groups of a column

  GroupScales from(int64_t row, int64_t column) const {
    return {inputs ? inputs + row * num : nullptr, columns + column * num, offsets ? offsets + column * num : nullptr, steps, num};
  }

  void prefetch(int64_t group, int64_t column) const {
    __builtin_prefetch(columns + group * kPanel + column);
    if (inputs) __builtin_prefetch(offsets + group * kPanel + column);
  }

  Vec add(Vec result, int64_t row, int64_t column, int64_t group, Vec sum) const {
    result += sum * load(columns + group * kPanel + column);
    return inputs ? result - load(offsets + group * kPanel + column) * splat(inputs[row * num + group]) : result;
  }
};

// The low half of a byte is a weight of the first half of a panel's columns, the high half one of the second.
template <class T>
struct Int4 {
  using Value = T;
  using Weight = uint8_t;
  using Input = float;
  using Sum = Vec;
  using Scales = GroupScales;
  static constexpr int64_t kDepth = 1, kWidth = kLanes, kTileRows = kRegisters / 2 - 3;  // constants take registers too

  static int64_t column(int64_t i) { return i / 2 + i % 2 * kLanes; }
  static int64_t feature(int64_t) { return 0; }
  static Halves<Vec> weights(const Weight* from) {
#if defined(__AVX512F__)
    const VecI both = (VecI)_mm512_cvtepu8_epi32(load_raw<__m128i>(from));  // GCC 12 makes several of this one
#elif defined(__AVX2__)
    const VecI both = (VecI)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    const VecI both = __builtin_convertvector(load_raw<VecBytes>(from), VecI);
#endif
    return {__builtin_convertvector((both & 15) - 8, Vec), __builtin_convertvector((both >> 4) - 8, Vec)};
  }
  static Input input(const T* x, int64_t) { return static_cast<float>(*x); }
  static Vec inputs(const T* x) { return load(x); }
  static Vec broadcast(Input x) { return splat(x); }
  static Vec add(Vec sum, Vec w, Vec x) { return sum + x * w; }
};

#if FLYBALL_DOT
// The two halves of a byte are the two features of a step. A table makes them the bf16 that the dot product takes.
struct Int4Dot : Dot {
  using Weight = uint8_t;
  using Scales = GroupScales;
  static constexpr int64_t kWidth = kPanel, kTileRows = Int4<float>::kTileRows;

#if defined(__aarch64__)
  static Pair weights(const Weight* from) {
    static constexpr uint8_t kLower[16] = {0x00, 0xe0, 0xc0, 0xa0, 0x80, 0x40, 0x00, 0x80,  // -8 to -1
                                           0x00, 0x80, 0x00, 0x40, 0x80, 0xa0, 0xc0, 0xe0};
    static constexpr uint8_t kUpper[16] = {0xc1, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xbf,
                                           0x00, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40};
    const uint8x8_t both = vld1_u8(from), first = vand_u8(both, vdup_n_u8(15)), second = vshr_n_u8(both, 4);
    const uint8x16_t indices = vcombine_u8(vzip1_u8(first, second), vzip2_u8(first, second));
    const uint8x16_t lower = vqtbl1q_u8(vld1q_u8(kLower), indices), upper = vqtbl1q_u8(vld1q_u8(kUpper), indices);
    return {(Vec)vzip1q_u8(lower, upper), (Vec)vzip2q_u8(lower, upper)};
  }
#else
  static Vec unpack(const Weight* from) {
    alignas(32) static constexpr uint16_t kNumbers[32] = {
        0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,  // -8 to -1
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,  // 0 to 7
    };
    const VecU both = (VecU)_mm512_cvtepu8_epi32(load_raw<__m128i>(from));
    const __m512i indices = (__m512i)((both | both << 12) & 0x000f000fu);
    return (Vec)_mm512_permutexvar_epi16(indices, _mm512_castsi256_si512(_mm256_load_si256((const __m256i*)kNumbers)));
  }
  static Pair weights(const Weight* from) { return {unpack(from), unpack(from + kLanes)}; }
#endif
};
#endif

template <class A>
constexpr bool kIsGrouped = std::is_same_v<typename A::Scales, GroupScales>;

// values [n, k] of 0 to 15 -> panels
template <class A>
void pack_int4(const uint8_t* values, int64_t n, int64_t k, uint8_t* packed) {
  const int64_t steps = num_steps<A>(k), num_panels = round_up(n, kPanel) / kPanel;
  const auto value = [=](int64_t column, int64_t feature) {
    return column < n && feature < k ? values[column * k + feature] : uint8_t{8};
  };
#pragma omp parallel for
  for (int64_t panel = 0; panel < num_panels; ++panel) {
    for (int64_t step = 0; step < steps; ++step) {
      uint8_t* to = packed + (panel * steps + step) * A::kWidth;
      for (int64_t i = 0; i < A::kWidth; ++i) {
        const int64_t low = 2 * i, high = low + 1, column = panel * kPanel, feature = step * A::kDepth;
        to[i] = value(column + A::column(low), feature + A::feature(low)) |
                value(column + A::column(high), feature + A::feature(high)) << 4;
      }
    }
  }
}

// rows of x [rows, k] -> [rows, groups]
template <class T>
void sum_groups(const T* x, int64_t rows, int64_t k, int64_t group_size, float* sums) {
  const int64_t num_groups = round_up(k, group_size) / group_size;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t group = 0; group < num_groups; ++group) {
      const int64_t first = group * group_size, end = std::min(k, first + group_size);
      Vec total = {};
      for (int64_t j = first; j < end; j += kLanes) total += load_up_to(x + row * k + j, end - j);
      sums[row * num_groups + group] = sum(total);
    }
  }
}

// The sums of a tile, group by group: add_steps adds to low and high what a range of steps comes to.
template <class A, int Rows, int Panels, class F>
void add_groups(int64_t steps, const Output<A>& out, Vec (&low)[Panels][Rows], Vec (&high)[Panels][Rows], F add_steps) {
  Vec total_low[Panels][Rows] = {}, total_high[Panels][Rows] = {};
  for (int64_t group = 0; group < out.scales.num; ++group) {
    const int64_t first = group * out.scales.steps;
    add_steps(first, std::min(steps, first + out.scales.steps));
#pragma GCC unroll 4
    for (int p = 0; p < Panels; ++p) {
      const GroupScales scales = out.scales.from(0, p * kPanel);
      for (int64_t column = 0; column < kPanel; column += 16) scales.prefetch(group + kGroupsAhead, column);
#pragma GCC unroll 16
      for (int row = 0; row < Rows; ++row) {
        total_low[p][row] = scales.add(total_low[p][row], row, 0, group, low[p][row]);
        total_high[p][row] = scales.add(total_high[p][row], row, kLanes, group, high[p][row]);
        low[p][row] = high[p][row] = Vec{};
      }
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < Panels; ++p) {
#pragma GCC unroll 16
    for (int row = 0; row < Rows; ++row) low[p][row] = total_low[p][row], high[p][row] = total_high[p][row];
  }
}
