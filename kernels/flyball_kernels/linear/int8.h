// Weights rounded to 8 bits, one scale for each column; rows of inputs rounded to 8 bits as they come, one scale for each.
// Sums are whole numbers, so they are exact. Included by kernel.cpp, inside its namespace.
#pragma once

using VecS16 = int16_t __attribute__((vector_size(4 * kLanes)));

#if defined(__ARM_FEATURE_DOTPROD)
constexpr int32_t kZero = 0;
#else
constexpr int32_t kZero = 128;  // inputs are stored as unsigned bytes, this much too large: what x86's instruction takes
#endif

constexpr bool has_byte_dot() {
#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_DOTPROD)
  return true;
#else
  return false;
#endif
}

// What makes results of sums.
struct ColumnScales {
  float* rows;             // from the first row on
  const float* columns;    // from the first column on
  const int32_t* weights;  // sums of the columns' weights, likewise

  ColumnScales from(int64_t row, int64_t column) const { return {rows + row, columns + column, weights + column}; }

  Vec result(int64_t row, int64_t column, VecI sum) const {
    const VecI exact = sum - kZero * load_raw<VecI>(weights + column);
    return __builtin_convertvector(exact, Vec) * (splat(rows[row]) * load(columns + column));
  }
};

// Sums of four products each: of inputs' bytes and signed ones.
inline VecI add_bytes(VecI sum, VecI w, VecI x) {
#if defined(__AVX512VNNI__)
  return (VecI)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)w);
#elif defined(__ARM_FEATURE_DOTPROD)
  return (VecI)vdotq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)x);
#elif defined(__AVX2__)
  const VecS16 even = (VecS16)w << 8 >> 8, odd = (VecS16)w >> 8;  // products of bytes do not fit 16 bits, so none are made
  const VecI low = x & 0x00ff00ff, high = (VecI)((VecU)x >> 8) & 0x00ff00ff;
#if defined(__AVX512BW__)
  return sum + (VecI)_mm512_madd_epi16((__m512i)even, (__m512i)low) + (VecI)_mm512_madd_epi16((__m512i)odd, (__m512i)high);
#else
  return sum + (VecI)_mm256_madd_epi16((__m256i)even, (__m256i)low) + (VecI)_mm256_madd_epi16((__m256i)odd, (__m256i)high);
#endif
#else
  for (int byte = 0; byte < 4; ++byte) sum += ((VecI)((VecU)w << (24 - 8 * byte)) >> 24) * ((VecI)((VecU)x >> (8 * byte)) & 255);
  return sum;
#endif
}

// The same where the unsigned ones, w, are at most 15: two products fit 16 bits.
inline VecI add_small_bytes(VecI sum, VecI x, VecI w) {
#if defined(__AVX512VNNI__) || !defined(__AVX2__)
  return add_bytes(sum, x, w);
#elif defined(__AVX512BW__)
  return sum + (VecI)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)w, (__m512i)x), _mm512_set1_epi16(1));
#else
  return sum + (VecI)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)w, (__m256i)x), _mm256_set1_epi16(1));
#endif
}

template <class T>
struct Int8 {
  using Value = T;
  using Weight = int8_t;
  using Input = uint32_t;  // four features
  using Sum = VecI;
  using Scales = ColumnScales;
  static constexpr int64_t kDepth = 4, kWidth = kPanel * kDepth;
  static constexpr int64_t kTileRows = has_byte_dot() ? flyball::kTileRows : kRegisters / 4 - 1;  // more arithmetic, more registers

  static int64_t column(int64_t i) { return i / kDepth; }
  static int64_t feature(int64_t i) { return i % kDepth; }
  static Halves<VecI> weights(const Weight* from) { return {load_raw<VecI>(from), load_raw<VecI>(from + kPanel * kDepth / 2)}; }
  static VecI broadcast(Input x) { return static_cast<int32_t>(x) - VecI{}; }
  static VecI add(VecI sum, VecI w, VecI x) { return add_bytes(sum, w, x); }
};

template <class A>
constexpr bool kIsQuantized = std::is_same_v<typename A::Scales, ColumnScales>;

// weight [n, k] -> whole numbers from -127 to 127, and n scales
template <class T>
void round_weight(const T* weight, int64_t n, int64_t k, int8_t* values, float* scales) {
#pragma omp parallel for
  for (int64_t column = 0; column < n; ++column) scales[column] = round_vector(weight + column * k, k, values + column * k);
}

// values [n, k] -> n sums
inline void sum_rows(const int8_t* values, int64_t n, int64_t k, int32_t* sums) {
#pragma omp parallel for
  for (int64_t row = 0; row < n; ++row) {
    int32_t sum = 0;
    for (int64_t j = 0; j < k; ++j) sum += values[row * k + j];
    sums[row] = sum;
  }
}

// How rows are packed that have been rounded: as they are.
struct Rounded {
  using Value = uint32_t;
  using Input = uint32_t;
  static constexpr int64_t kDepth = 1;

  static Input input(const Value* x, int64_t) { return *x; }
  static Vec inputs(const Value* x) { return load_raw<Vec>(x); }
};

// k values -> ceil(k / 4) times four bytes, and their scale
template <class T>
float round_row(const T* x, int64_t k, uint32_t* steps) {
  using Bytes = uint8_t __attribute__((vector_size(kLanes)));
  const float most = magnitude(x, k), factor = units(most);
  for (int64_t j = 0; j < k; j += kLanes) {
    const Bytes bytes = __builtin_convertvector(rounded(x + j, k - j, factor) + kZero, Bytes);
    std::memcpy(steps + j / 4, &bytes, std::min(kLanes, round_up(k - j, 4)));
  }
  return most / 127.0f;
}

// rows of x [rows, k] -> [steps, rows], and a scale for each
template <class A>
void pack_rounded(const typename A::Value* x, int64_t rows, int64_t k, typename A::Input* packed, float* scales) {
  struct Rows;
  const int64_t steps = num_steps<A>(k);
  auto* by_row = reinterpret_cast<uint32_t*>(scratch<Rows>(rows * steps));
  for (int64_t row = 0; row < rows; ++row) scales[row] = round_row(x + row * k, k, by_row + row * steps);
  pack_rows<Rounded>(by_row, steps, rows, steps, packed);
}
