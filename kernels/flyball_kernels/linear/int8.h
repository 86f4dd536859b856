// Weights rounded to 8 bits, one scale for each column; rows of inputs rounded to 8 bits as they come, one scale for each.
// Sums are whole numbers, so they are exact. Included by kernel.cpp, inside its namespace.
#pragma once

#if defined(__AVX512VNNI__)
constexpr int32_t kZero = 128;  // inputs are stored as unsigned bytes, this much too large: what the instruction takes
#else
constexpr int32_t kZero = 0;
#endif

constexpr bool has_byte_dot() {
#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_DOTPROD)
  return true;
#else
  return false;
#endif
}

// Where there is no such instruction: whether one multiplies bytes and adds products in pairs, as 16 bits.
constexpr bool has_byte_pairs() {
#if defined(__AVX2__)
  return !has_byte_dot();
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

// Sums of four products each: of unsigned bytes and signed ones. Arm takes unsigned ones up to 127.
inline VecI add_bytes(VecI sum, VecI u, VecI s) {
#if defined(__AVX512VNNI__)
  return (VecI)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)u, (__m512i)s);
#elif defined(__ARM_FEATURE_DOTPROD)
  return (VecI)vdotq_s32((int32x4_t)sum, (int8x16_t)u, (int8x16_t)s);
#else
  for (int byte = 24; byte >= 0; byte -= 8) sum += ((VecI)((VecU)u << byte) >> 24) * ((VecI)((VecU)s << byte) >> 24);
  return sum;
#endif
}

// Products of unsigned bytes and signed ones in pairs, added to sums of 16 bits. Those products have to fit.
inline VecI add_byte_pairs(VecI sum, [[maybe_unused]] VecI u, [[maybe_unused]] VecI s) {
#if defined(__AVX512BW__)
  return (VecI)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)u, (__m512i)s));
#elif defined(__AVX2__)
  return (VecI)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)u, (__m256i)s));
#else
  return sum;  // never called
#endif
}

// Sums of two products each, of numbers of 16 bits.
inline VecI add_short_pairs(VecI sum, [[maybe_unused]] VecI a, [[maybe_unused]] VecI b) {
#if defined(__AVX512BW__)
  return sum + (VecI)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return sum + (VecI)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return sum;  // never called
#endif
}

inline VecI ones_of_16_bits() { return 0x10001 - VecI{}; }

// As many signed bytes as make a vector of numbers of 16 bits.
inline VecI widen_bytes(const int8_t* from) {
#if defined(__AVX512BW__)
  return (VecI)_mm512_cvtepi8_epi16(load_raw<__m256i>(from));
#elif defined(__AVX2__)
  return (VecI)_mm256_cvtepi8_epi16(load_raw<__m128i>(from));
#else
  return VecI{} + from[0];  // never called
#endif
}

// A step's inputs are bytes, or where no instruction multiplies those as signed ones, numbers of 16 bits, which weights become in
// registers.
template <class T>
struct Int8 {
  using Value = T;
  using Weight = int8_t;
  using Input = uint32_t;  // four features, or two
  using InputOfFeature = std::conditional_t<has_byte_pairs(), int16_t, uint8_t>;
  using Sum = VecI;
  using Scales = ColumnScales;
  static constexpr int64_t kDepth = sizeof(Input) / sizeof(InputOfFeature), kWidth = kPanel * kDepth;
#if FLYBALL_AMX
  static constexpr int64_t kStepMultiple = kLineSteps;  // AmxInt8 multiplies the same weights
#endif
  static constexpr int64_t kTileRows = flyball::kTileRows;

  static int64_t column(int64_t i) { return i / kDepth; }
  static int64_t feature(int64_t i) { return i % kDepth; }
  static Halves<VecI> weights(const Weight* from) {
    if constexpr (has_byte_pairs()) return {widen_bytes(from), widen_bytes(from + kWidth / 2)};
    return {load_raw<VecI>(from), load_raw<VecI>(from + kWidth / 2)};
  }
  static VecI broadcast(Input x) { return static_cast<int32_t>(x) - VecI{}; }
  static VecI add(VecI sum, VecI w, VecI x) { return has_byte_pairs() ? add_short_pairs(sum, w, x) : add_bytes(sum, x, w); }
};

#if FLYBALL_AMX
// The same for more rows than a tile has registers for. Sums are whole numbers, so results are the same to the last bit.
template <class T>
struct AmxInt8 : Int8<T> {
  static_assert(kZero == 128);  // inputs are unsigned
  using Products = AmxBytes;
  static constexpr int64_t kTileRows = 2 * kAmxRows;
};
#endif

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

// rows of x [rows, k] as in pack_rows, and a scale for each
template <class A>
void pack_rounded(const typename A::Value* x, int64_t rows, int64_t k, typename A::Input* packed, float* scales) {
  using Element = typename A::InputOfFeature;
  typedef Element Elements __attribute__((vector_size(kLanes * sizeof(Element))));  // GCC 12 ignores the attribute in a using
  constexpr int64_t kFeatures = kLineSteps * A::kDepth;
  static_assert(kFeatures % kLanes == 0);
  for (int64_t row = 0; row < rows; ++row, x += k) {
    const float most = magnitude(x, k), factor = units(most);
    scales[row] = most / 127.0f;
    for (int64_t j = 0; j < round_up(k, kFeatures); j += kLanes) {
      const VecI whole = j < k ? rounded(x + j, k - j, factor) : VecI{};
      const Elements elements = __builtin_convertvector(whole + kZero, Elements);
      std::memcpy(packed + (j / kFeatures * rows + row) * kLineSteps + j % kFeatures / A::kDepth, &elements, sizeof(elements));
    }
  }
}
