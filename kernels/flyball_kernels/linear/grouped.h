// Weights of 4 or 8 bits, from 0 to 15 or 255. Groups of a column's features have a scale, and a zero that is the middle, 8 or
// 128, unless told. Included by kernel.cpp, inside its namespace.
//
// A panel is one stream: for each run of features, which is a group or a part of one, the scales of the panel's columns, in the
// dtype of inputs if that rounds none of the layer's, else in fp32; then, if zeros lie elsewhere than in the middle, scales times
// how far, in fp32; then the weights. Two of 4 bits are in a byte: its low half has a weight of the first half of the panel's
// columns, its high half one of the second.
#pragma once

// How the features of a column are cut into runs.
struct Runs {
  int64_t k, group, of_group, features, steps, num;  // of_group: runs of a group; features and steps of a run
  bool has_zeros;                                    // others than the middle
  at::ScalarType scales;

  template <class A>
  static Runs make(int64_t k, int64_t group_size, bool has_zeros, at::ScalarType scales) {
    const int64_t group = std::max<int64_t>(1, std::min(group_size, k));
    const int64_t of_group = round_up(group, A::kMaxFeatures) / A::kMaxFeatures;
    const int64_t steps = round_up(round_up(group, of_group) / of_group, A::kDepth) / A::kDepth;
    return {k, group, of_group, steps * A::kDepth, steps, round_up(k, group) / group * of_group, has_zeros, scales};
  }

  int64_t first(int64_t run) const { return run / of_group * group + run % of_group * features; }
  int64_t size(int64_t run) const {
    return std::max<int64_t>(0, std::min({features, (run / of_group + 1) * group - first(run), k - first(run)}));
  }
  int64_t num_steps() const { return num * steps; }
  int64_t header_bytes() const { return kPanel * ((scales == at::kFloat ? 4 : 2) + (has_zeros ? 4 : 0)); }

  template <class A>
  int64_t panel_bytes() const {
    return num * (header_bytes() + steps * A::kWidth);
  }
};

// What is known of a row's inputs in a run.
struct RunInputs {
  float unit;    // what a whole number stands for
  int32_t zero;  // what a sum starts with, so that weights count from the middle
  float sum;
};

struct RunScales {
  RunInputs* inputs;  // [rows, runs] from the first row on
  Runs runs;

  RunScales from(int64_t row, int64_t) const { return {inputs + row * runs.num, runs}; }
};

template <class A>
constexpr bool kHasRuns = std::is_same_v<typename A::Scales, RunScales>;

constexpr int32_t middle(int bits) { return 1 << (bits - 1); }

// x [rows, steps] -> [steps, rows], whole numbers as they are, or floats as fp32
template <class T, class Input>
void transpose_rows(const T* x, int64_t steps, int64_t rows, Input* transposed) {
  static_assert(sizeof(Input) == sizeof(float));
  int64_t step = 0;
  // each store but a row's worth lies beyond what it is for; the next one puts that right
  if (4 <= rows && rows <= kLanes) {
    for (; step + kLanes <= steps && (step + kLanes - 1) * rows + kLanes <= steps * rows; step += kLanes) {
      Vec block[kLanes] = {};
      for (int64_t row = 0; row < rows; ++row) {
        const T* const from = x + row * steps + step;
        if constexpr (std::is_integral_v<T>)
          block[row] = load_raw<Vec>(from);
        else
          block[row] = load(from);
      }
      transpose(block);
      for (int64_t i = 0; i < kLanes; ++i) std::memcpy(transposed + (step + i) * rows, &block[i], sizeof(Vec));
    }
  }
  for (; step < steps; ++step)
    for (int64_t row = 0; row < rows; ++row) transposed[step * rows + row] = static_cast<Input>(x[row * steps + step]);
}

// Inputs are fp32. Weights of 8 bits lie in panels as signed bytes.
template <class T, int Bits>
struct GroupedFma {
  static_assert(Bits == 4 || Bits == 8);
  using Value = T;
  using Weight = uint8_t;
  using Input = float;
  using Sum = Vec;
  using Scales = RunScales;
  static constexpr bool kIsUnrolled = false;   // too few registers are left where weights are unpacked
  static constexpr int kBits = Bits;
  static constexpr bool kIsSigned = Bits == 8;
  static constexpr int64_t kPairSteps = 0;
  static constexpr int64_t kDepth = 1, kParts = 1, kPlanes = 1, kWidth = kPanel * Bits / 8, kMaxFeatures = int64_t{1} << 40;
  static constexpr int64_t kTileRows = kRegisters / 2 - 3;  // constants take registers too

  static Halves<Vec> weights(const Weight* from) {
    if constexpr (Bits == 8) {
      const auto* bytes = reinterpret_cast<const int8_t*>(from);
      return {load(bytes), load(bytes + kLanes)};
    }
#if defined(__AVX512F__)
    const VecI both = (VecI)_mm512_cvtepu8_epi32(load_raw<__m128i>(from));  // GCC 12 makes several of this one
#elif defined(__AVX2__)
    const VecI both = (VecI)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    using Bytes = uint8_t __attribute__((vector_size(kLanes)));
    const VecI both = __builtin_convertvector(load_raw<Bytes>(from), VecI);
#endif
    return {__builtin_convertvector((both & 15) - middle(4), Vec), __builtin_convertvector((both >> 4) - middle(4), Vec)};
  }
  static Vec broadcast(Input x) { return splat(x); }
  static Vec add(Vec sum, Vec w, Vec x) { return add_product(sum, x, w); }
  static Vec first_sum(const RunInputs&) { return Vec{}; }
  static Vec add_sums(Vec total, const Vec (&sums)[kPlanes], const RunInputs&, Vec scales) {
    return add_product(total, sums[0], scales);
  }

  static void pack(const T* x, int64_t rows, const RunScales& scales, Input* packed) {
    const auto& [inputs, runs] = scales;
    transpose_rows(x, runs.k, rows, packed);
    std::fill(packed + runs.k * rows, packed + runs.num_steps() * rows, 0.0f);
    for (int64_t row = 0; runs.has_zeros && row < rows; ++row) {
      for (int64_t run = 0; run < runs.num; ++run) {
        const T* from = x + row * runs.k + runs.first(run);
        Vec total = {};
        for (int64_t j = 0, size = runs.size(run); j < size; j += kLanes) total += load_up_to(from + j, size - j);
        inputs[row * runs.num + run].sum = sum(total);
      }
    }
  }
};

// rows of x [rows, k], step by step [steps, rows]: whole numbers for each run, and what is known of each
template <class A>
void pack_runs(const typename A::Value* x, int64_t rows, const RunScales& scales, typename A::Input* packed) {
  struct ByRow;
  const auto& [inputs, runs] = scales;
  const int64_t steps = A::kParts * runs.num_steps();
  auto* by_row = reinterpret_cast<typename A::Input*>(scratch<ByRow>(rows * steps));
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t run = 0; run < runs.num; ++run) {
      auto* to = by_row + row * steps + run * runs.steps * A::kParts;
      inputs[row * runs.num + run] = A::round_run(x + row * runs.k + runs.first(run), runs.size(run), to, runs);
    }
  }
  transpose_rows(by_row, steps, rows, packed);
}

// Inputs become whole numbers of one byte or two, with a unit for each run. Sums of a run are whole, thus exact. A step has four
// features of each column.
//
// One plane: from -127 to 127, the largest magnitude over 127 as the unit. Two planes, of bf16: a power of two as the unit, so
// that inputs of at least 1/64 of the largest are the same numbers; the others are off by at most 1/32640 of it. The planes
// hold their lower and their upper bytes.
template <class T, int Bits, int Planes>
struct GroupedBytes {
  static_assert(Bits == 4 || (Bits == 8 && Planes == 2 && has_byte_dot()));  // two products of 8 bits do not fit 16
  static_assert(Planes == 1 || std::is_same_v<T, c10::BFloat16>);
  using Value = T;
  using Weight = uint8_t;
  using Input = uint32_t;  // four features
  using Sum = VecI;
  using Scales = RunScales;
  static constexpr bool kIsUnrolled = false;   // too few registers are left where weights are unpacked
  static constexpr int kBits = Bits;
  static constexpr bool kIsSigned = Bits == 8 && kZero == 0;  // what the instruction takes beside signed inputs
  static constexpr int64_t kPairSteps = has_byte_pairs() ? 8 : 0;  // so many times two products of 15 and 128 fit 16 bits
  static constexpr int64_t kDepth = 4, kParts = Planes, kPlanes = Planes, kWidth = kDepth * kPanel * Bits / 8;
  static constexpr int64_t kMaxFeatures = Planes == 1 ? 128 : Bits == 4 ? 4096 : 256;  // with one, more lose more; sums have 32 bits
  static constexpr int64_t kTileRows = Planes == 1 ? kRegisters / 2 - 4 : kRegisters / 4 - 2;

  static Halves<VecI> weights(const Weight* from) {
    if constexpr (Bits == 8) return {load_raw<VecI>(from), load_raw<VecI>(from + kWidth / 2)};
    const VecU both = load_raw<VecU>(from);
    return {(VecI)(both & 0x0f0f0f0fu), (VecI)(both >> 4 & 0x0f0f0f0fu)};
  }
  static VecI broadcast(Input x) { return static_cast<int32_t>(x) - VecI{}; }
  static VecI add(VecI sum, VecI w, VecI x) { return kPairSteps > 0 ? add_byte_pairs(sum, w, x) : add_bytes(sum, w, x); }
  static VecI first_sum(const RunInputs& inputs) { return inputs.zero - VecI{}; }
  static Vec add_sums(Vec total, const VecI (&sums)[kPlanes], const RunInputs& inputs, Vec scales) {
    const VecI sum = Planes == 1 ? sums[0] : sums[0] + (sums[kPlanes - 1] << 8);
    return add_product(total, __builtin_convertvector(sum, Vec) * splat(inputs.unit), scales);
  }

  static void pack(const T* x, int64_t rows, const RunScales& scales, Input* packed) {
    pack_runs<GroupedBytes>(x, rows, scales, packed);
  }

  // The values of a run -> for each step its bytes in each plane
  static RunInputs round_run(const T* x, int64_t size, Input* planes, const Runs& runs) {
    return round_run(x, size, planes, runs, bytes_of);
  }

  // Pack makes inputs of kLanes whole numbers.
  template <class Pack>
  static RunInputs round_run(const T* x, int64_t size, Input* planes, const Runs& runs, Pack pack) {
    const int32_t most = magnitude_bits(x, size);
    if (most >= kInfinity) return {std::numeric_limits<float>::quiet_NaN(), 0, 0.0f};
    const auto [unit, factor] = unit_of(most);
    VecI total = {};
    for (int64_t j = 0; j < runs.features; j += kLanes) {
      const VecI whole = j < size ? rounded(x + j, size - j, factor) : VecI{};
      const auto bytes = pack(whole);
      if (runs.features - j >= kLanes)
        std::memcpy(planes + kPlanes * j / kDepth, bytes.data(), sizeof(bytes));
      else
        std::memcpy(planes + kPlanes * j / kDepth, bytes.data(), kPlanes * (runs.features - j));
      total += whole;
    }
    const int32_t sum = fold(total, [](auto a, auto b) { return a + b; });
    return {unit, kIsSigned ? 0 : -middle(Bits) * sum, static_cast<float>(sum) * unit};
  }

  // The bits of the largest magnitude -> the unit, and units in a value of 1
  static std::pair<float, float> unit_of(int32_t most) {
    if constexpr (Planes == 1) {
      const float magnitude = std::bit_cast<float>(most);
      return {magnitude / 127.0f, units(magnitude)};
    } else {
      const int32_t exponent = unit_exponent<15>(most);
      return {from_exponent(exponent), from_exponent(2 * kZeroExponent - exponent)};
    }
  }

  // Four bytes of a plane, four of the next, and so on.
  static std::array<Input, kPlanes * kLanes / kDepth> bytes_of(VecI whole) {
    using Bytes = int8_t __attribute__((vector_size(kLanes)));
    std::array<Input, kPlanes * kLanes / kDepth> out;
    if constexpr (Planes == 1) {
      const Bytes bytes = __builtin_convertvector(whole, Bytes);
      std::memcpy(out.data(), &bytes, sizeof(out));
      return out;
    }
    const VecI upper = (whole + 128) >> 8;
    const Bytes planes[2] = {__builtin_convertvector(whole - (upper << 8), Bytes), __builtin_convertvector(upper, Bytes)};
#if defined(__AVX512F__)
    const __m128i low = (__m128i)planes[0], high = (__m128i)planes[1];
    const __m128i both[2] = {_mm_unpacklo_epi32(low, high), _mm_unpackhi_epi32(low, high)};
    std::memcpy(out.data(), both, sizeof(out));
#else
    for (int64_t i = 0; i < kLanes; i += kDepth)
      for (int64_t plane = 0; plane < kPlanes; ++plane)
        std::memcpy(&out[kPlanes * i / kDepth + plane], reinterpret_cast<const char*>(&planes[plane]) + i, kDepth);
#endif
    return out;
  }
};

// The same weights and inputs as with two planes, for more rows, where the products of bytes have to be added as 16 bits first.
// Weights become 16 bits in registers and meet the whole numbers, not cut into planes. So a row has one sum for each half of a
// panel's columns and not two, and tiles have twice as many rows. Sums are the same numbers.
struct GroupedWide : GroupedBytes<c10::BFloat16, 4, 2> {
  using Bytes = GroupedBytes<c10::BFloat16, 4, 2>;
  static constexpr int64_t kLeastRows = 3;  // fewer are as fast, or faster, by planes
  static constexpr int64_t kPlanes = 1, kPairSteps = 0, kTileRows = kRegisters / 2 - 3;

  // Of a step's first and third feature, and of the others.
  static std::array<Halves<VecI>, 2> weights(const Weight* from) {
    const VecU all = load_raw<VecU>(from);
    const auto pairs = [](VecU bits) { return (VecI)(bits & 0x000f000fu); };
    return {{{pairs(all), pairs(all >> 4)}, {pairs(all >> 8), pairs(all >> 12)}}};
  }
  static VecI add(VecI sum, VecI w, VecI x) { return add_short_pairs(sum, w, x); }
  static Vec add_sums(Vec total, const VecI (&sums)[kPlanes], const RunInputs& inputs, Vec scales) {
    return add_product(total, __builtin_convertvector(sums[0], Vec) * splat(inputs.unit), scales);
  }

  static void pack(const Value* x, int64_t rows, const RunScales& scales, Input* packed) {
    pack_runs<GroupedWide>(x, rows, scales, packed);
  }
  static RunInputs round_run(const Value* x, int64_t size, Input* parts, const Runs& runs) {
    return Bytes::round_run(x, size, parts, runs, shorts_of);
  }
  static std::array<Input, kParts * kLanes / kDepth> shorts_of(VecI whole) {
    std::array<Input, kParts * kLanes / kDepth> out;
    for (int64_t i = 0; i < kLanes; i += kDepth)
      for (int64_t part = 0; part < kParts; ++part)
        out[kParts * i / kDepth + part] = (whole[i + part] & 0xffff) | static_cast<uint32_t>(whole[i + part + 2]) << 16;
    return out;
  }
};

// values [n, k], scales of runs.scales and offsets [n, groups] -> panels
template <class A>
void pack_groups(const uint8_t* values, const uint8_t* scales, const float* offsets, int64_t n, const Runs& runs, uint8_t* packed) {
  const int64_t num_panels = round_up(n, kPanel) / kPanel, groups = runs.num / runs.of_group;
  constexpr uint8_t kMiddle = middle(A::kBits);
#pragma omp parallel for
  for (int64_t panel = 0; panel < num_panels; ++panel) {
    uint8_t* to = packed + panel * runs.panel_bytes<A>();
    for (int64_t run = 0; run < runs.num; ++run) {
      const auto write = [&](const uint8_t* of_groups, at::ScalarType type) {
        const int64_t size = c10::elementSize(type);
        for (int64_t i = 0; i < kPanel; ++i, to += size) {
          const int64_t column = panel * kPanel + column_of(type, i);
          if (column < n) std::memcpy(to, of_groups + (column * groups + run / runs.of_group) * size, size);
          else std::memset(to, 0, size);
        }
      };
      write(scales, runs.scales);
      if (offsets) write(reinterpret_cast<const uint8_t*>(offsets), at::kFloat);
      const uint8_t* of_run = values + runs.first(run);
      const auto value = [&, size = runs.size(run)](int64_t column, int64_t feature) {
        return column < n && feature < size ? of_run[column * runs.k + feature] : kMiddle;
      };
      for (int64_t i = 0; i < runs.steps * A::kWidth; ++i, ++to) {
        const int64_t column = panel * kPanel + i % A::kWidth / A::kDepth, feature = i / A::kWidth * A::kDepth + i % A::kDepth;
        if constexpr (A::kBits == 4)
          *to = value(column, feature) | value(column + kLanes, feature) << 4;
        else
          *to = value(column, feature) ^ (A::kIsSigned ? kMiddle : 0);
      }
    }
  }
}

// Sums of a tile's rows, for the first and the second half of a panel's columns.
template <class A, int Rows>
struct RunSums {
  typename A::Sum low[Rows][A::kPlanes], high[Rows][A::kPlanes];
};

// The weights that meet a part of a step's inputs.
template <class V>
const Halves<V>& of_part(const Halves<V>& weights, int) {
  return weights;
}
template <class V, size_t Parts>
const Halves<V>& of_part(const std::array<Halves<V>, Parts>& weights, int part) {
  return weights[part];
}

// Adds the products of a step, and goes on to the next.
template <class A, int Rows>
[[gnu::always_inline]] inline void add_step(const typename A::Input*& x, const uint8_t*& panel, RunSums<A, Rows>& sums) {
#pragma GCC unroll 2
  for (int64_t line = 0; line < A::kWidth; line += 64) __builtin_prefetch(panel + kAheadBytes + line);
  const auto w = A::weights(panel);
#pragma GCC unroll 16
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 2
    for (int part = 0; part < A::kParts; ++part) {
      const int plane = part % A::kPlanes;
      const auto value = A::broadcast(x[part * Rows + row]);
      sums.low[row][plane] = A::add(sums.low[row][plane], of_part(w, part).low, value);
      sums.high[row][plane] = A::add(sums.high[row][plane], of_part(w, part).high, value);
    }
  }
  x += A::kParts * Rows;
  panel += A::kWidth;
}

// Adds the products of so many steps.
template <class A, int Rows>
[[gnu::always_inline]] inline void add_steps(int64_t steps, const typename A::Input*& x, const uint8_t*& panel,
                                             RunSums<A, Rows>& sums) {
  if constexpr (A::kIsUnrolled) {
#pragma GCC unroll 2
    for (int64_t step = 0; step < steps; ++step) add_step<A, Rows>(x, panel, sums);
  } else {
    for (int64_t step = 0; step < steps; ++step) add_step<A, Rows>(x, panel, sums);
  }
}

// The same for arithmetics whose sums have 16 bits for a while.
template <class A, int Rows>
[[gnu::always_inline]] inline void add_pair_steps(int64_t steps, const typename A::Input*& x, const uint8_t*& panel,
                                                  RunSums<A, Rows>& sums) {
  for (int64_t step = 0; step < steps; step += A::kPairSteps) {
    RunSums<A, Rows> pairs = {};
    add_steps<A, Rows>(std::min(A::kPairSteps, steps - step), x, panel, pairs);
#pragma GCC unroll 16
    for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 2
      for (int plane = 0; plane < A::kPlanes; ++plane) {
        sums.low[row][plane] = add_short_pairs(sums.low[row][plane], pairs.low[row][plane], ones_of_16_bits());
        sums.high[row][plane] = add_short_pairs(sums.high[row][plane], pairs.high[row][plane], ones_of_16_bits());
      }
    }
  }
}

// Calls f with a null pointer of the type of scales in a panel.
template <class A, class F>
void with_scales(const Runs& runs, F f) {
  using T = typename A::Value;
  if (runs.scales == c10::CppTypeToScalarType<T>::value) return f(static_cast<T*>(nullptr));
  if constexpr (requires { A::kBits; }) f(static_cast<float*>(nullptr));  // blocks have none in fp32
}

// A panel times a tile of Rows rows, run by run.
template <class A, int Rows, class Scale>
[[gnu::noinline]] void multiply_runs(const typename A::Input* x, const uint8_t* panel, const Output<A>& out) {
  const Runs& runs = out.scales.runs;
  const int64_t header_bytes = runs.header_bytes();
  Vec low[Rows] = {}, high[Rows] = {};
  for (int64_t run = 0; run < runs.num; ++run) {
    const auto* scales = reinterpret_cast<const Scale*>(panel);
    const auto* offsets = reinterpret_cast<const float*>(scales + kPanel);
    for (int64_t line = 0; line < header_bytes; line += 64) __builtin_prefetch(panel + kAheadBytes + line);
    panel += header_bytes;
    RunSums<A, Rows> sums = {};
#pragma GCC unroll 16
    for (int row = 0; row < Rows; ++row)
      sums.low[row][0] = sums.high[row][0] = A::first_sum(out.scales.inputs[row * runs.num + run]);
    if constexpr (A::kPairSteps > 0)
      add_pair_steps<A, Rows>(runs.steps, x, panel, sums);
    else
      add_steps<A, Rows>(runs.steps, x, panel, sums);
    const Pair of_columns = load_pair(scales);
#pragma GCC unroll 16
    for (int row = 0; row < Rows; ++row) {
      const RunInputs& inputs = out.scales.inputs[row * runs.num + run];
      low[row] = A::add_sums(low[row], sums.low[row], inputs, of_columns.low);
      high[row] = A::add_sums(high[row], sums.high[row], inputs, of_columns.high);
      if (!runs.has_zeros) continue;
      low[row] = add_product(low[row], load(offsets), splat(-inputs.sum));
      high[row] = add_product(high[row], load(offsets + kLanes), splat(-inputs.sum));
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < Rows; ++row) write_row(out, row, low[row], high[row]);
}
